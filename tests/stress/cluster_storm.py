"""A real Ray cluster under load while a replica is killed and another version is rolled out.

    python tests/stress/cluster_storm.py smollm2 --requests 2000 --concurrency 32

Two replicas on this machine. Every answer is compared with what one engine alone says for the same prompt and seed. One
line a verdict; exit code 1 when one fails. Phases: `kill` (requests by the openai client, some cancelled, one replica
gets SIGKILL in the middle), `prefix` (conversations, with prefix routing and without: the share of prompt tokens found
in a cache), `update` (new settings under load), `scale` (one replica that becomes two when requests queue).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai

TOPICS = (
    "rivers",
    "clocks",
    "bread",
    "stars",
    "bridges",
    "horses",
    "maps",
    "glass",
    "salt",
    "wind",
    "paper",
    "ships",
    "bees",
    "iron",
    "rain",
    "wool",
)
RULE = "You are a patient guide. Answer in plain words, keep it short, say so when you do not know, never invent a name or a number. "
HANG_S = 150.0
VERDICTS: list[bool] = []


@dataclass(frozen=True)
class Case:
    """A request whose answer is known."""

    messages: tuple[tuple[str, str], ...]
    seed: int
    max_tokens: int
    temperature: float

    def body(self) -> dict[str, object]:
        messages = [{"role": r, "content": c} for r, c in self.messages]
        return {"messages": messages, "seed": self.seed, "max_tokens": self.max_tokens, "temperature": self.temperature}


def cases(count: int, rng: random.Random) -> list[Case]:
    bodies = []
    for i in range(count):
        system = f"{RULE * 2}Today you speak about {TOPICS[i % 8]}."
        user = f"Tell me something about {rng.choice(TOPICS)} and {rng.choice(TOPICS)}, number {i}."
        bodies.append(
            Case(
                (("system", system), ("user", user)),
                rng.randrange(1 << 30),
                rng.randrange(8, 25),
                rng.choice((0.0, 0.8)),
            )
        )
    return bodies


def alone(model: str, known: list[Case]) -> list[str]:
    """Answers of one engine through the batch runner: no HTTP, no Ray."""
    from outrider.config import EngineConfig
    from outrider.llm import LLM
    from outrider.server.app import Server
    from outrider.server.batch import BatchFile, answer_file
    from outrider.server.model_info import ServedModel
    from outrider.server.settings import ServerSettings, public_name

    name = public_name(model)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        target = Path(folder) / "out.jsonl"
        lines = [
            {"custom_id": str(i), "url": "/v1/chat/completions", "body": {"model": name, **case.body()}}
            for i, case in enumerate(known)
        ]
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        llm = LLM.load(model, threads=1, engine=EngineConfig(max_batch=8))
        server = Server.offline(ServedModel.of(llm), ServerSettings(model_name=name, max_concurrent=8))
        answer_file(server, BatchFile(source, target, name))
        rows = [json.loads(line) for line in target.read_text().splitlines()]
    by_id = {int(row["custom_id"]): row["response"]["body"]["choices"][0]["message"]["content"] for row in rows}
    return [by_id[i] for i in range(len(known))]


def verdict(ok: bool, text: str) -> None:
    VERDICTS.append(ok)
    print(f"{'ok  ' if ok else 'FAIL'} {text}", flush=True)


class Load:
    """Requests at a fixed concurrency; what became of each is counted by name."""

    def __init__(self, url: str, model: str, known: list[Case], texts: list[str]) -> None:
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=HANG_S)
        self.url = url
        self.model = model
        self.known = known
        self.texts = texts
        self.count: Counter[str] = Counter()
        self.odd: list[str] = []
        self.done = 0

    async def run(self, plan: list[tuple[int, str]], concurrency: int) -> None:
        """`plan`: (case, how) with how whole | stream | cancel."""
        todo = iter(plan)

        async def worker() -> None:
            for index, how in todo:
                try:
                    what = await asyncio.wait_for(self.one(index, how), HANG_S + 10)
                except (openai.APITimeoutError, TimeoutError):
                    what = "hung"
                except openai.APIStatusError as e:
                    clean = e.status_code == 503 and "retry-after" in e.response.headers
                    what = "clean 503" if clean else f"status {e.status_code}"
                except openai.APIConnectionError as e:
                    what = "connection error"
                    self.odd.append(repr(e.__cause__))
                except openai.APIError as e:
                    what = "stream error" if "replica that wrote this answer is gone" in str(e) else "other error"
                    if what == "other error":
                        self.odd.append(str(e)[:200])
                self.count[what] += 1
                self.done += 1

        await asyncio.gather(*(worker() for _ in range(concurrency)))

    async def one(self, index: int, how: str) -> str:
        body = {"model": self.model, **self.known[index].body()}
        if how == "whole":
            answer = await self.client.chat.completions.create(**body)  # type: ignore[call-overload]
            text = answer.choices[0].message.content
        else:
            text = ""
            stream = await self.client.chat.completions.create(**body, stream=True)  # type: ignore[call-overload]
            async for chunk in stream:
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                if how == "cancel" and text:
                    await stream.close()
                    return "cancelled" if self.texts[index].startswith(text) else "wrong"
        if text == self.texts[index]:
            return "right"
        self.odd.append(f"case {index}: {text!r} is not {self.texts[index]!r}")
        return "wrong"

    def summary(self) -> str:
        return ", ".join(f"{n} {what}" for what, n in self.count.most_common())

    @property
    def bad(self) -> int:
        return sum(
            n for what, n in self.count.items() if what not in ("right", "cancelled", "clean 503", "stream error")
        )


async def metrics(url: str) -> dict[str, float]:
    async with httpx.AsyncClient(timeout=60) as client:
        page = (await client.get(f"{url}/metrics")).text
    return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))}


async def ready(url: str, count: int, seconds: float) -> float | None:
    """Seconds until so many replicas answer."""
    began = time.monotonic()
    async with httpx.AsyncClient(timeout=60) as client:
        while time.monotonic() - began < seconds:
            try:
                state = (await client.get(f"{url}/health")).json()
                if state["ready"] == count and state["replicas"] == count:
                    return time.monotonic() - began
            except (httpx.HTTPError, ValueError, KeyError):
                pass
            await asyncio.sleep(0.25)
    return None


def pids() -> list[int]:
    from ray import serve

    return [pid for _, pid in serve.get_deployment_handle("Engine", "outrider").broadcast("pid").results(timeout_s=60)]


async def kill_phase(load: Load, requests: int, concurrency: int, rng: random.Random) -> None:
    plan = [
        (rng.randrange(len(load.known)), rng.choices(("whole", "stream", "cancel"), (45, 45, 10))[0])
        for _ in range(requests)
    ]
    began = time.monotonic()
    back: list[float | None] = []

    async def killer() -> None:
        while load.done < requests // 2:
            await asyncio.sleep(0.02)
        victim = (await asyncio.to_thread(pids))[0]
        os.kill(victim, signal.SIGKILL)
        print(f"     kill -9 {victim} after {load.done} requests", flush=True)
        await asyncio.sleep(1.0)
        back.append(await ready(load.url, 2, 180))

    await asyncio.gather(load.run(plan, concurrency), killer())
    took = time.monotonic() - began
    seen = await metrics(load.url)
    print(f"     {requests} requests at concurrency {concurrency} in {took:.0f} s: {load.summary()}")
    verdict(sum(load.count.values()) == requests and not load.count["hung"], "no request hangs")
    verdict(
        not load.count["wrong"],
        f"every finished answer is the single engine's ({load.count['right']} of them), and so are cancelled ones as far as read",
    )
    verdict(
        not load.bad,
        f"every other request got a clean 503 ({load.count['clean 503']}) or a stream error ({load.count['stream error']})",
    )
    retried = int(seen["outrider_cluster_retries_total"])
    verdict(retried > 0, f"requests not yet streaming were retried unseen ({retried})")
    verdict(
        bool(back) and back[0] is not None,
        f"the replica came back, {1 + (back[0] or 0):.0f} s after the kill"
        if back and back[0]
        else "the replica did not come back",
    )
    await idle(load.url)


async def idle(url: str) -> None:
    """Checks that cancelled requests are no longer computed."""
    running = -1.0
    for _ in range(120):
        seen = await metrics(url)
        running = seen["outrider_sequences_in_flight"]
        if running == 0:
            break
        await asyncio.sleep(0.25)
    verdict(running == 0, "nothing runs on after the last client has gone")


async def conversations(url: str, model: str, groups: int, turns: int, concurrency: int) -> float:
    """Share of prompt tokens found in a replica's cache, over conversations that grow turn by turn."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=HANG_S)
    before = await metrics(url)
    free = asyncio.Semaphore(concurrency)

    async def conversation(group: int) -> list[dict[str, str]]:
        rng = random.Random(group)
        events = [
            {"role": "system", "content": f"Guide number {group}, who knows all about {rng.choice(TOPICS)}. {RULE * 3}"}
        ]
        for turn in range(turns):
            events.append(
                {
                    "role": "user",
                    "content": f"Question {turn}: what about {rng.choice(TOPICS)}? Compare them with {rng.choice(TOPICS)}.",
                }
            )
            async with free:
                answer = await client.chat.completions.create(
                    model=model, messages=events, max_tokens=8, temperature=0, seed=1
                )  # type: ignore[arg-type]
            events.append({"role": "assistant", "content": answer.choices[0].message.content or "-"})
        return events

    await asyncio.gather(*(conversation(g) for g in range(groups)))
    after = await metrics(url)
    requests, found = (
        after[f"outrider_{n}_tokens_total"] - before[f"outrider_{n}_tokens_total"] for n in ("prompt", "cached")
    )
    return found / requests


async def update_phase(load: Load, change, concurrency: int, rng: random.Random) -> None:  # type: ignore[no-untyped-def]
    """Requests without pause until the new version is up, and some after it."""
    old = set(await asyncio.to_thread(pids))
    finished = asyncio.Event()

    def plan():  # type: ignore[no-untyped-def]
        extra = 40
        while extra:
            extra -= finished.is_set()
            yield rng.randrange(len(load.known)), rng.choice(("whole", "stream"))

    async def roll() -> float:
        began = time.monotonic()
        await asyncio.to_thread(change)
        finished.set()
        return time.monotonic() - began

    took, _ = await asyncio.gather(roll(), load.run(plan(), concurrency))
    new = set(await asyncio.to_thread(pids))
    total = sum(load.count.values())
    right = load.count["right"]
    verdict(
        total == right,
        f"rolling update under load: {total - right} of {total} requests failed ({load.summary()}; {took:.0f} s)",
    )
    verdict(len(new) == 2 and not old & new, "both replicas were replaced")


async def scale_phase(load: Load, concurrency: int, rng: random.Random) -> None:
    """One replica, bounds 1..2, and more requests than it may have: a second one comes."""
    grown: list[float | None] = []

    def plan():  # type: ignore[no-untyped-def]
        while not grown:
            yield rng.randrange(len(load.known)), "whole"

    async def watch() -> None:
        grown.append(await ready(load.url, 2, 120))

    await asyncio.gather(watch(), load.run(plan(), concurrency))
    growth = grown[0]
    verdict(
        growth is not None,
        f"autoscaling 1..2: a second replica after {growth or 0:.0f} s of {concurrency} requests at a time",
    )
    verdict(load.count["right"] == sum(load.count.values()), f"no request failed meanwhile ({load.summary()})")


async def storm(args: argparse.Namespace, url: str, port: int, known: list[Case], texts: list[str]) -> None:
    from outrider.cluster import run
    from outrider.cluster.config import ClusterConfig
    from outrider.server.settings import public_name

    rng = random.Random(args.seed)
    fields: dict[str, object] = {
        "model": args.model,
        "replicas": 2,
        "port": port,
        "max_concurrent": 8,
        "routing": "prefix",
    }

    def deploy(**more: object) -> None:
        fields.update(more)
        run.deploy(ClusterConfig.of(fields), False)

    began = time.monotonic()
    await asyncio.to_thread(deploy)
    print(f"     2 replicas of {args.model} up in {time.monotonic() - began:.0f} s at {url}", flush=True)
    name = public_name(args.model)
    if "kill" in args.phases:
        await kill_phase(Load(url, name, known, texts), args.requests, args.concurrency, rng)
    if "update" in args.phases:
        await update_phase(
            Load(url, name, known, texts), lambda: deploy(max_queued=65), max(4, args.concurrency // 4), rng
        )
    if "scale" in args.phases:
        await asyncio.to_thread(deploy, replicas="1..2", target_queue=4, upscale_delay=1, downscale_delay=600)
        await ready(url, 1, 120)
        await scale_phase(Load(url, name, known, texts), 16, rng)
        await asyncio.to_thread(deploy, replicas=2)
    if "prefix" in args.phases:
        await asyncio.to_thread(deploy, max_queued=66)  # new replicas: nothing is cached
        by_prefix = await conversations(url, name, args.groups, 4, 4)
        await asyncio.to_thread(deploy, routing="least-loaded")
        by_load = await conversations(url, name, args.groups, 4, 4)
        verdict(
            by_prefix > by_load,
            f"prompt tokens found in a cache: {by_prefix:.1%} with prefix routing, {by_load:.1%} by load alone",
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--cases", type=int, default=200, help="different requests among them")
    parser.add_argument("--groups", type=int, default=24, help="conversations of the prefix phase")
    parser.add_argument("--phases", default="kill,update,scale,prefix")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-to-driver", action="store_true", help="show the log of Ray's processes")
    args = parser.parse_args()
    known = cases(args.cases, random.Random(args.seed))
    began = time.monotonic()
    texts = alone(args.model, known)
    print(f"     {len(known)} answers of one engine alone in {time.monotonic() - began:.0f} s", flush=True)

    import ray
    from ray import serve

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(
        address="local", num_cpus=8, include_dashboard=False, object_store_memory=200 << 20,
        log_to_driver=args.log_to_driver,
        logging_level=logging.ERROR, namespace="serve",
    )  # fmt: skip
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        asyncio.run(storm(args, f"http://127.0.0.1:{port}", port, known, texts))
    finally:
        serve.shutdown()
        ray.shutdown()
    print(f"{sum(VERDICTS)} of {len(VERDICTS)} verdicts ok")
    return 0 if VERDICTS and all(VERDICTS) else 1


if __name__ == "__main__":
    sys.exit(main())
