"""Two models in one server whose memory holds one of them: mixed requests, none wrong, none lost.

    python benchmarks/two_models.py --requests 500
    python benchmarks/two_models.py smollm2 coder=./coder.gguf --requests 500 --max-tokens 16

Without models, two tiny random ones are written. Every answer is compared with the one the same model gives alone, in process,
to the same prompt and seed. Exit code 1 if one differs or is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from outrider.config import EngineConfig  # noqa: E402
from outrider.llm import LLM  # noqa: E402
from outrider.server import catalogue  # noqa: E402
from outrider.server.main import HttpServer  # noqa: E402
from outrider.server.settings import ServerSettings  # noqa: E402
from outrider.types import SamplingParams  # noqa: E402

KINDS = ("whole", "stream", "chat")


def wanted(count: int, names: list[str], seed: int) -> list[tuple[str, str, int]]:
    """(model, kind, seed), in runs of one to six of a model, as callers come."""
    rng, out = random.Random(seed), []
    while len(out) < count:
        name = rng.choice(names)
        out += [(name, rng.choice(KINDS), rng.randrange(40)) for _ in range(rng.randint(1, 6))]
    return out[:count]


def alone(llm: LLM, items: set[tuple[str, int]], max_tokens: int) -> dict[tuple[str, int], str]:
    """What the model says when nobody else is there."""
    out = {}
    for kind, seed in sorted(items):
        text = f"Request number {seed}:"
        prompt = llm.chat_prompt([{"role": "user", "content": text}]) if kind == "chat" else text
        out[(kind, seed)] = llm.generate(prompt, SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed))[0].text
    return out


async def ask(http: httpx.AsyncClient, model: str, kind: str, seed: int, max_tokens: int) -> str:
    text = f"Request number {seed}:"
    body: dict[str, object] = {"model": model, "max_tokens": max_tokens, "seed": seed, "temperature": 1.0}
    if kind == "chat":
        answer = await http.post("/v1/chat/completions", json={**body, "messages": [{"role": "user", "content": text}]})
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"])
    if kind == "whole":
        answer = await http.post("/v1/completions", json={**body, "prompt": text})
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])
    said = ""
    async with http.stream("POST", "/v1/completions", json={**body, "prompt": text, "stream": True}) as stream:
        stream.raise_for_status()
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                said += httpx.Response(200, content=line[6:]).json()["choices"][0]["text"]
    return said


async def run(
    url: str, items: list[tuple[str, str, int]], max_tokens: int, at_once: int, right: dict[tuple[str, str, int], str]
) -> Counter[str]:
    found: Counter[str] = Counter()
    gate = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=at_once)) as http:

        async def one(item: tuple[str, str, int]) -> None:
            async with gate:
                try:
                    said = await ask(http, *item, max_tokens)
                except httpx.HTTPError as e:
                    print(f"lost: {item}: {e}", file=sys.stderr)
                    found["lost"] += 1
                    return
            found["right" if said == right[item] else "wrong"] += 1

        await asyncio.gather(*map(one, items))
        for card in (await http.get("/v1/models")).json()["data"]:
            found[f"{card['id']} {card['outrider']['state']}"] += 1
        for line in (await http.get("/metrics")).text.splitlines():
            if line.startswith(("outrider_model_loads_total", "outrider_model_evictions_total")):
                print(line)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="MODEL or name=MODEL; two or more")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--max-context", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = args.models
        if not given:
            from tests import tiny

            tiny.write_target("llama", Path(folder) / "one")
            tiny.write_target("qwen3", Path(folder) / "two")
            given = [f"{folder}/one", f"{folder}/two"]
        listed, engine = catalogue.read(given), EngineConfig(max_batch=8, max_context=args.max_context)
        load = lambda model: LLM.load(model, draft_tokens=4, engine=engine)  # noqa: E731  # a fixed draft: no costs measured at each load
        items = wanted(args.requests, [m.name for m in listed], args.seed)
        right: dict[tuple[str, str, int], str] = {}
        for one in listed:
            llm = load(one.model)
            said = alone(llm, {(kind, seed) for name, kind, seed in items if name == one.name}, args.max_tokens)
            right |= {(one.name, kind, seed): text for (kind, seed), text in said.items()}
            del llm
        settings = ServerSettings(listed[0].name, port=0, max_concurrent=6, max_queued=args.requests)
        server = HttpServer(catalogue.shelf(listed, load, engine, 1, settings, cuda=False), settings)  # one byte: each only alone
        with server.running() as url:
            began = time.monotonic()
            found = asyncio.run(run(url, items, args.max_tokens, args.at_once, right))
            took = time.monotonic() - began
    print(
        f"{args.requests} requests to {len(listed)} models in {took:.1f} s: "
        + ", ".join(f"{n} {what}" for what, n in sorted(found.items()))
    )
    return 0 if found["right"] == args.requests else 1


if __name__ == "__main__":
    raise SystemExit(main())
