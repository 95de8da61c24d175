"""How long a start takes and how much memory it needs: `python benchmarks/cpu_start.py MODEL.gguf [--rounds 3] [--no-peer]`.

Every start is a process of its own: import, load, one token. "first" starts with an empty cache (kernels are compiled), "later" with a
warm one; llama.cpp's load (llama-cpp-python, where it is installed) runs in between. Seconds are from the process's beginning.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OURS = """
import json, resource, sys, time
from outrider import LLM, SamplingParams
llm = LLM.load(sys.argv[1], drafter="none")
ready = time.time()
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
print(json.dumps({"ready": ready, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""
PEER = """
import json, resource, sys, time
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=4096, n_threads=int(sys.argv[2]), verbose=False)
ready = time.time()
llm.eval([1, 2, 3])
print(json.dumps({"ready": ready, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def start(code: str, model: str, cache: str | None) -> dict[str, float]:
    env = {**os.environ, **({"OUTRIDER_CACHE": cache} if cache else {})}
    begun = time.time()
    done = subprocess.run([sys.executable, "-c", code, model, str(os.cpu_count())], env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"a start failed:\n{done.stderr[-2000:]}")
    out = json.loads(done.stdout.splitlines()[-1])
    return {"seconds": out["ready"] - begun, "peak": out["peak"], "to_first_token": time.time() - begun}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true")
    args = parser.parse_args()
    peer = not args.no_peer and subprocess.run([sys.executable, "-c", "import llama_cpp"], capture_output=True).returncode == 0
    size = Path(args.model).stat().st_size
    with open(args.model, "rb") as file:  # the file in the page cache for everybody
        while file.read(1 << 24):
            pass
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as cache:
            runs.setdefault("first (kernels compiled)", []).append(start(OURS, args.model, cache))
            runs.setdefault("later", []).append(start(OURS, args.model, cache))
        if peer:
            runs.setdefault("llama.cpp", []).append(start(PEER, args.model, None))
    print(f"{args.model}: {size / 1e6:.0f} MB, {os.cpu_count()} cores; medians of {args.rounds} (least to most)")
    for name, found in runs.items():
        seconds = sorted(r["seconds"] for r in found)
        peak = statistics.median(r["peak"] for r in found)
        print(
            f"  {name:26} ready after {statistics.median(seconds):5.2f} s ({seconds[0]:.2f} to {seconds[-1]:.2f}), "
            f"peak {peak / 1e6:.0f} MB = {peak / size:.2f} x the file"
        )


if __name__ == "__main__":
    main()
