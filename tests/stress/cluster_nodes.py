"""Two Ray nodes on this machine, a replica each; a replica that is two processes; keys. One line a verdict; exit code 1
when one fails.

    python tests/stress/cluster_nodes.py [MODEL] [--phases divided,nodes] [--requests 200]

Without MODEL a tiny one is made up. `divided`: one replica over two processes (gloo, a placement group); answers are
those of `--tensor-parallel 2` alone; then its second process is killed under load. `nodes`: the head has no room for
engines, two more nodes have room for one each; requests by key and without, then the node that has a replica and not
the ingress is killed under load, and another joins.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx

KEY = "secret"
TINY = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 256, "vocab_size": 320, "max_position_embeddings": 16384, "tie_word_embeddings": False,
    "eos_token_id": 1,
}  # fmt: skip
PROMPTS = [[9 + i, 8, 7, 30 + i % 5] for i in range(12)]
TOKENS = 24
VERDICTS: list[bool] = []


def verdict(ok: bool, text: str) -> None:
    VERDICTS.append(ok)
    print(f"{'ok  ' if ok else 'FAIL'} {text}", flush=True)


def below(pid: int) -> list[int]:
    """The processes that it started, and those that they did."""
    children = [
        int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
    ]
    return children + [more for child in children for more in below(child)]


def named(pid: int, part: str) -> bool:
    try:
        return part in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False


def alone(model: str, processes: int) -> list[str]:
    """Answers of one engine divided over this many processes."""
    from outrider import LLM, SamplingParams

    llm = LLM.load(model, device="cpu", threads=1, tensor_parallel=processes)
    said = [
        done.text for done in llm.generate(PROMPTS, SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True))
    ]
    llm.close()
    return said


async def ask(client: httpx.AsyncClient, index: int, stream: bool) -> str:
    """right | wrong | clean 503 | stream error | something else."""
    body = {
        "model": "m",
        "prompt": PROMPTS[index],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    answer = await client.post("/v1/completions", json=body)
    if answer.status_code != 200:
        return (
            "clean 503"
            if answer.status_code == 503 and "retry-after" in answer.headers
            else f"status {answer.status_code}: {answer.text[:200]}"
        )
    if not stream:
        return str(answer.json()["choices"][0]["text"])
    text = ""
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                return "stream error" if event["error"].get("code") == "replica_lost" else f"other error {event}"
            text += event["choices"][0]["text"] if event["choices"] else ""
    return text


async def load(
    url: str, texts: list[str], requests: int, harm: Callable[[], str] | None, key: str | None
) -> Counter[str]:
    """Requests at concurrency 8; in the middle something is killed."""
    count: Counter[str] = Counter()
    order = iter(range(requests))
    done = 0
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, timeout=150, headers=headers) as client:

        async def worker() -> None:
            nonlocal done
            for i in order:
                try:
                    got = await ask(client, i % len(PROMPTS), bool(i % 2))
                except httpx.HTTPError as error:
                    got = f"{type(error).__name__}"
                count["right" if got == texts[i % len(PROMPTS)] else got] += 1
                done += 1

        async def harmer() -> None:
            while done < requests // 2:
                await asyncio.sleep(0.02)
            if harm is not None:
                print(f"     after {done} requests: {await asyncio.to_thread(harm)}", flush=True)

        await asyncio.gather(harmer(), *(worker() for _ in range(8)))
    return count


def judge(count: Counter[str], requests: int, what: str) -> None:
    bad = {k: v for k, v in count.items() if k not in ("right", "clean 503", "stream error")}
    shown = ", ".join(f"{v} {k}" for k, v in count.most_common())
    verdict(
        sum(count.values()) == requests and not bad and count["right"] > requests // 2,
        f"{what}: {requests} requests: {shown}"[:600],
    )


def back(url: str, replicas: int, seconds: float = 180) -> float | None:
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        try:
            if httpx.get(f"{url}/health", timeout=30).json().get("ready") == replicas:
                return time.monotonic() - began
        except (httpx.HTTPError, ValueError):
            pass
        time.sleep(0.25)
    return None


def engines() -> dict[str, int]:
    from ray import serve

    return dict(serve.get_deployment_handle("Engine", "outrider").broadcast("pid").results(timeout_s=60))


def deploy(model: str, port: int, **more: object) -> float:
    from outrider.cluster import run
    from outrider.cluster.config import ClusterConfig

    began = time.monotonic()
    fields = {
        "model": model,
        "name": "m",
        "port": port,
        "device": "cpu",
        "max_concurrent": 8,
        "max_context": 512,
        "wait": 60,
        **more,
    }
    run.deploy(ClusterConfig.of(fields), False)
    return time.monotonic() - began


def divided(model: str, port: int, requests: int) -> None:
    import ray

    url = f"http://127.0.0.1:{port}"
    texts = alone(model, 2)
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False,
        logging_level=logging.ERROR,
        namespace="serve",
    )  # fmt: skip
    took = deploy(model, port, replicas=1, tensor_parallel=2, cpus_per_replica=2)
    from ray.util import placement_group_table

    groups = [g for g in placement_group_table().values() if g["state"] == "CREATED"]
    bundles = [(g["strategy"], *g["bundles"].values()) for g in groups]
    verdict(
        bundles == [("STRICT_PACK", {"CPU": 2.0})],
        f"a replica over two processes up in {took:.0f} s, a placement group: {bundles}",
    )
    (pid,) = engines().values()
    workers = [child for child in below(pid) if named(child, "import worker")]
    verdict(len(workers) == 1, f"it has started one process beside itself ({pid} and {workers})")

    def harm() -> str:
        os.kill(workers[0], signal.SIGKILL)
        return f"kill -9 {workers[0]}, the replica's second process"

    count = asyncio.run(load(url, texts, requests, harm, None))
    judge(count, requests, "its second process killed")
    status = back(url, 1)
    (new,) = engines().values()
    verdict(
        status is not None and new != pid,
        f"the replica came back as another ({new}); the old one is gone: {not Path(f'/proc/{pid}').exists()}",
    )
    judge(asyncio.run(load(url, texts, 24, None, None)), 24, "after that")
    left = [child for child in below(new) if named(child, "import worker")]
    finish()
    until = time.monotonic() + 30
    while time.monotonic() < until and any(named(child, "import worker") for child in left):
        time.sleep(0.2)
    verdict(
        bool(left) and not any(named(child, "import worker") for child in left),
        f"its processes end with the cluster ({len(left)})",
    )


def finish() -> None:
    import ray
    from ray import serve

    serve.shutdown()
    ray.shutdown()


def nodes(model: str, port: int, requests: int) -> None:
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    url = f"http://127.0.0.1:{port}"
    texts = alone(model, 1)
    small = {"object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
    try:
        members = [cluster.add_node(num_cpus=1, **small) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, namespace="serve")
        serve.start(
            proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port}
        )  # one machine has one such port
        os.environ["OUTRIDER_API_KEY"] = KEY
        took = deploy(model, port, replicas=2)

        def on(node: object) -> list[int]:
            return below(node.all_processes["raylet"][0].process.pid)  # type: ignore[attr-defined]

        pids = engines()
        where = {name: [i for i, node in enumerate(members) if pid in on(node)] for name, pid in pids.items()}
        verdict(
            sorted(where.values()) == [[0], [1]], f"two replicas up in {took:.0f} s, one on each of two nodes: {where}"
        )
        body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 2}
        for key, want in ((None, 401), ("wrong", 401), (KEY, 200)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
            clean = want == 200 or "error" in answer.json()
            verdict(
                answer.status_code == want and clean,
                f"key {key}: {answer.status_code} {'' if want == 200 else answer.text[:120]}",
            )
        answer = httpx.post(
            f"{url}/v1/completions",
            json={**body, "stream": True},
            headers={"authorization": f"Bearer {KEY}"},
            timeout=60,
        )
        verdict(answer.status_code == 200 and answer.text.rstrip().endswith("data: [DONE]"), "a stream by key")
        ingress = [i for i, node in enumerate(members) if any(named(pid, "Ingress") for pid in on(node))]
        victim = members[0 if 0 not in ingress else 1]

        def harm() -> str:
            cluster.remove_node(victim, allow_graceful=False)
            return f"the node of one replica killed (the ingress is on {ingress or 'the head'})"

        judge(asyncio.run(load(url, texts, requests, harm, KEY)), requests, "a node killed")
        cluster.add_node(num_cpus=1, **small)
        status = back(url, 2)
        verdict(status is not None, f"a node joined: two replicas again after {status or 0:.0f} s")
        judge(asyncio.run(load(url, texts, 24, None, KEY)), 24, "after that")
        finish()
    finally:
        cluster.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--phases", default="divided,nodes")
    args = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model is None:
            sys.path.append(str(Path(__file__).resolve().parents[2]))
            from tests.dummy_checkpoint import write_folder

            from outrider.models.config import ModelConfig

            write_folder(Path(folder) / "tiny", TINY, ModelConfig.from_hf(TINY))
            model = f"{folder}/tiny"
        for phase in args.phases.split(","):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            {"divided": divided, "nodes": nodes}[phase](model, port, args.requests)
    print(f"{sum(VERDICTS)} of {len(VERDICTS)} verdicts ok")
    return 0 if VERDICTS and all(VERDICTS) else 1


if __name__ == "__main__":
    sys.exit(main())
