"""Churn: adapters are loaded and unloaded thousands of times while requests with and without adapters run.

    python tests/stress/adapter_churn.py --calls 10000 [--clients 2]

A tiny model in a server of this process; one client loads and unloads adapters by turns over HTTP, `--clients` others
send completions. Fails when a call is refused, when an answer differs from the one before the churn, when bytes of
adapters are left, or when the process grew by more than --slack MiB after the first tenth of the calls. Prints one
line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import httpx

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / part) for part in ("src", ".")]
from tests import tiny  # noqa: E402
from tests.lora import write_adapter  # noqa: E402
from tests.running import running  # noqa: E402

from outrider import LLM  # noqa: E402
from outrider.config import EngineConfig  # noqa: E402
from outrider.models.config import ModelConfig  # noqa: E402
from outrider.server.main import HttpServer  # noqa: E402
from outrider.server.model_info import ServedModel  # noqa: E402
from outrider.server.settings import ServerSettings  # noqa: E402

SIZES = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "intermediate_size": 96}


def resident_mib() -> float:
    gc.collect()
    entry = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(entry.split()[1]) / 1024


def churn(calls: int, clients: int, folder: Path) -> dict[str, Any]:
    """Half of the calls load, half unload. Memory is read at the start, after a tenth of them, and at the end."""
    tiny.write(tiny.target("qwen3", **SIZES), folder / "base")
    config = ModelConfig.from_hf(json.loads((folder / "base" / "config.json").read_text()))
    for i, name in enumerate("abc"):
        write_adapter(config, folder / name, seed=i, rank=(4, 8, 16)[i], size=0.3)
    llm = LLM.load(
        str(folder / "base"), drafter="ngram", device="cpu", ops="cpu", threads=1, max_adapters=3,
        adapters={"a": str(folder / "a")}, engine=EngineConfig(max_batch=6, max_context=256),
    )  # fmt: skip
    assert llm.adapters is not None
    before = llm.adapters.nbytes
    done = threading.Event()
    bad = list[str]()
    answered = [0]
    settings = ServerSettings("tiny", port=0, runtime_adapters=True)
    with running(HttpServer(ServedModel.of(llm), settings)) as url, httpx.Client(base_url=url, timeout=120) as http:

        def complete(client: httpx.Client, model: str) -> str:
            body = {"model": model, "prompt": "abcabcab", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            return str(client.post("/v1/completions", json=body).json()["choices"][0]["text"])

        want = {model: complete(http, model) for model in ("tiny", "tiny:a")}

        def traffic() -> None:
            with httpx.Client(base_url=url, timeout=120) as client:
                while not done.is_set():
                    for model, text in want.items():
                        answered[0] += 1
                        if (got := complete(client, model)) != text:
                            bad.append(f"{model}: {got!r}, not {text!r}")

        threads = [threading.Thread(target=traffic) for _ in range(clients)]
        memory = [resident_mib()]
        for thread in threads:
            thread.start()
        for i in range(calls // 2):
            name = "bc"[i % 2]
            for what in ("load", "unload"):
                body = {"lora_name": "x"} | ({"lora_path": str(folder / name)} if what == "load" else {})
                answer = http.post(f"/v1/{what}_lora_adapter", json=body)
                if answer.status_code != 200:
                    bad.append(f"{what}: {answer.text[:200]}")
                if what == "load" and i % 10 == 0:  # some of them are used before they leave
                    complete(http, "tiny:x")
            if i + 1 == max(1, calls // 20):
                memory.append(resident_mib())
        done.set()
        for thread in threads:
            thread.join()
        memory.append(resident_mib())
    return {
        "calls": 2 * (calls // 2), "answers": answered[0], "bad": bad[:5], "adapter_bytes_left": llm.adapters.nbytes - before,
        "rss_mib": [round(m, 1) for m in memory],
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--slack", type=float, default=16.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        result = churn(args.calls, args.clients, Path(place))
    print(json.dumps(result))
    if result["bad"] or result["adapter_bytes_left"] or result["rss_mib"][-1] > result["rss_mib"][1] + args.slack:
        sys.exit(1)
