"""Soak: many streams for minutes, with joins, cancels, disconnects and bad requests, against one server in this
process.

    python tests/stress/soak_server.py smollm2 --streams 64 --minutes 5

Fails when a request ends in anything but its answer or a deliberate 4xx, when a completed text differs from the same
request run alone with the same seed, when a page is leaked (engine.check and the count of free pages), when JSON
answers don't validate, or when memory grows after the first third. Prints one line of JSON at the end; --out appends it
to a file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import jsonschema

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / part) for part in ("src", ".")]
from tests.running import running  # noqa: E402

from outrider.config import EngineConfig  # noqa: E402
from outrider.llm import LLM  # noqa: E402
from outrider.server.main import HttpServer  # noqa: E402
from outrider.server.model_info import ServedModel  # noqa: E402
from outrider.server.settings import ServerSettings  # noqa: E402

TOPICS = [
    "the sea",
    "a lost key",
    "prime numbers",
    "bread",
    "the moon",
    "a slow train",
    "rivers",
    "a clever fox",
    "clocks",
    "old maps",
]
WAYS = ["stream"] * 5 + ["whole"] * 3 + ["json"] * 2 + ["leave"] * 3 + ["bad"] * 2 + ["plain"]
SCHEMA = {
    "type": "object",
    "properties": {"topic": {"enum": TOPICS}, "score": {"type": "integer", "minimum": 0, "maximum": 100}},
    "required": ["topic", "score"],
    "additionalProperties": False,
}
BAD: list[dict[str, Any]] = [
    {"foo": 1}, {"temperature": 9}, {"messages": []}, {"model": "nope"}, {"max_tokens": 10**7}, {"n": 0},
    {"tools": [{"type": "x"}]},
]  # fmt: skip


def body_of(seed: int, model: str, most: int) -> dict[str, Any]:
    """The request a number stands for: the same number, the same request."""
    rng = random.Random(seed)
    way = rng.choice(WAYS)
    words = " ".join(rng.choice(TOPICS) for _ in range(rng.choice([1, 3, 25])))
    body: dict[str, Any] = {
        "model": model, "messages": [{"role": "user", "content": f"Write about {words}."}], "seed": seed,
        "temperature": rng.choice([0.0, 0.7, 1.0]), "max_tokens": rng.randint(4, most),
        "stream": way in ("stream", "leave", "plain"),
    }  # fmt: skip
    if way == "plain":
        body["outrider"] = {"draft_tokens": 0}
    if way == "json":
        body |= {
            "response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA}},
            "max_tokens": 200,
        }
    if way == "bad":
        body |= rng.choice(BAD)
    body["way"], body["leave_after"] = way, rng.randint(0, 12)
    return body


class Soak:
    def __init__(self, client: httpx.AsyncClient, model: str, most: int) -> None:
        self.client = client
        self.model = model
        self.most = most
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.texts: dict[int, str] = {}

    async def one(self, seed: int) -> str | None:
        """The text of a completed request, else None. Everything unexpected becomes a problem."""
        body = body_of(seed, self.model, self.most)
        way = body.pop("way")
        leave_after = body.pop("leave_after")
        try:
            if not body["stream"]:
                answer = await self.client.post("/v1/chat/completions", json=body)
                self.counts[f"{way} {answer.status_code}"] += 1
                if answer.status_code == 429:
                    await asyncio.sleep(0.2)
                    return None
                if way == "bad":
                    if not 400 <= answer.status_code < 500:
                        self.problems.append(f"bad request {seed} got {answer.status_code}: {answer.text[:200]}")
                    return None
                if answer.status_code != 200:
                    self.problems.append(f"request {seed} got {answer.status_code}: {answer.text[:200]}")
                    return None
                text = answer.json()["choices"][0]["message"]["content"]
                if way == "json":
                    jsonschema.validate(json.loads(text), SCHEMA)
                return str(text)
            return await self._stream(seed, body, leave_after if way == "leave" else None)
        except (httpx.HTTPError, ValueError, KeyError, jsonschema.ValidationError) as e:
            self.problems.append(f"request {seed} ({way}): {type(e).__name__}: {str(e)[:200]}")
            return None

    async def _stream(self, seed: int, body: dict[str, Any], leave_after: int | None) -> str | None:
        text = ""
        finished = False
        chunks = 0
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            self.counts[f"stream {answer.status_code}"] += 1
            if answer.status_code == 429:
                await answer.aread()
                await asyncio.sleep(0.2)
                return None
            if answer.status_code != 200:
                self.problems.append(f"stream {seed} got {answer.status_code}: {(await answer.aread())[:200]!r}")
                return None
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    finished = True
                    break
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    self.problems.append(f"stream {seed}: {chunk['error']}")
                    return None
                text += chunk["choices"][0]["delta"].get("content") or ""
                chunks += 1
                if leave_after is not None and chunks > leave_after:
                    self.counts["left"] += 1
                    return None
        if not finished and leave_after is None:
            self.problems.append(f"stream {seed} ended without [DONE]")
        return text if finished else None


async def run(url: str, model: str, streams: int, seconds: float, most: int, verify: int) -> tuple[Soak, list[float]]:
    limits = httpx.Limits(max_connections=streams, max_keepalive_connections=streams)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=httpx.Timeout(600)) as client:
        soak = Soak(client, model, most)
        until = time.monotonic() + seconds
        memory = []
        numbers = iter(range(10**9))

        async def worker(rng: random.Random) -> None:
            while time.monotonic() < until:
                seed = next(numbers)
                text = await soak.one(seed)
                if text is not None:
                    soak.texts[seed] = text
                if rng.random() < 0.2:
                    await asyncio.sleep(rng.random())  # joins come in bursts and gaps

        async def watch() -> None:
            while time.monotonic() < until:
                memory.append(resident_mb())
                await asyncio.sleep(min(5.0, seconds / 12))

        await asyncio.gather(watch(), *(worker(random.Random(i)) for i in range(streams)))
        done = sorted(soak.texts)
        for seed in random.Random(1).sample(done, min(verify, len(done))):  # one at a time: alone
            alone = await soak.one(seed)
            soak.counts["compared with alone"] += 1
            if alone != soak.texts[seed]:
                soak.problems.append(
                    f"request {seed} alone gives another text: {alone!r:.200} instead of {soak.texts[seed]!r:.200}"
                )
        return soak, memory


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--draft-tokens", default="auto")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--max-context", type=int, default=1024)
    parser.add_argument(
        "--verify", type=int, default=10**9, help="how many completed texts to compare with alone (default: all)"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = EngineConfig(max_batch=args.batch, max_context=args.max_context)
    llm = LLM.load(args.model, drafter=args.drafter, draft_tokens=args.draft_tokens, engine=config)
    settings = ServerSettings("soaked", port=0, max_concurrent=args.batch, max_queued=args.streams)
    server = HttpServer(ServedModel.of(llm), settings)
    with running(server) as url:
        began = time.monotonic()
        soak, memory = asyncio.run(run(url, "soaked", args.streams, 60 * args.minutes, args.max_tokens, args.verify))
        state = server.app.state.server
        deadline = time.monotonic() + 10
        while (llm.engine.busy or state.admission.in_flight) and time.monotonic() < deadline:
            time.sleep(0.05)
        if llm.engine.busy or state.admission.in_flight:
            soak.problems.append(f"not idle at the end: {state.admission.in_flight} in flight")
        try:
            llm.engine.check()
        except Exception as e:
            soak.problems.append(f"engine.check: {e}")
        third = len(memory) // 3
        growth = max(memory[-third:]) - max(memory[third : 2 * third]) if third else 0.0
        if growth > 64:
            soak.problems.append(f"memory grew by {growth:.0f} MB in the last third")
    result = {
        "model": args.model, "streams": args.streams, "minutes": args.minutes, "completed": len(soak.texts),
        "counts": dict(soak.counts),
        "problems": len(soak.problems), "first_problems": soak.problems[:5],
        "memory_mb": [round(m) for m in memory[:: max(1, len(memory) // 12)]],
        "tokens": llm.engine.metrics.new_tokens, "preemptions": llm.engine.metrics.preemptions,
        "seconds": round(time.monotonic() - began),
    }  # fmt: skip
    print(json.dumps(result))
    if args.out:
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    raise SystemExit(1 if soak.problems else 0)


if __name__ == "__main__":
    main()
