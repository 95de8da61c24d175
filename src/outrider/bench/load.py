"""The load generator of `outrider bench-server`: N concurrent streams against one server, each timed token by token."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import httpx

from ..types import bad_input

Summary = dict[str, Any]  # made by `summary`, written by --json


@dataclass
class Timing:
    """Arrival times of one answer's chunks, and the tokens in each."""

    began: float
    chunks: list[tuple[float, int]] = field(default_factory=list)
    cycles: int = 0
    accepted: int = 0
    error: str | None = None

    @property
    def tokens(self) -> int:
        return sum(n for _, n in self.chunks)

    @property
    def per_token(self) -> list[float]:
        """Times between tokens. A chunk of m tokens after g seconds counts as m times g/m. The first chunk belongs to
        the time to first token."""
        return [(at - before) / n for (before, _), (at, n) in pairwise(self.chunks) for _ in range(n)]

    @property
    def waits(self) -> list[float]:
        return [at - before for (before, _), (at, _) in pairwise(self.chunks)]


async def run(
    url: str,
    prompts: Sequence[str],
    concurrency: int,
    requests: int,
    max_tokens: int,
    temperature: float = 0.0,
    drafts: int | Literal["auto"] = "auto",
    key: str | None = None,
) -> Summary:
    """`requests` answers, `concurrency` at a time."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=httpx.Timeout(600)) as client:
        wrong = (httpx.HTTPError, ValueError, KeyError, IndexError)
        with bad_input(wrong, lambda error: f"{url} does not answer as an OpenAI-compatible server: {error}"):
            answer = await client.get("/v1/models")
            answer.raise_for_status()
            model = answer.json()["data"][0]["id"]
        body = {
            "model": model,
            "stream": True,
            "temperature": temperature,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "outrider": {"stats": True, "token_kinds": True, "draft_tokens": drafts},
        }
        todo = iter(range(requests))
        timings: list[Timing] = []

        async def worker() -> None:
            for i in todo:
                messages = [{"role": "user", "content": prompts[i % len(prompts)]}]
                timings.append(await _stream(client, {**body, "messages": messages, "seed": i}))

        began = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        return summary(timings, time.perf_counter() - began, concurrency, drafts=drafts)


async def _stream(client: httpx.AsyncClient, body: dict[str, object]) -> Timing:
    timing = Timing(time.perf_counter())
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                timing.error = f"{answer.status_code} {(await answer.aread())[:200]!r}"
                return timing
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    timing.error = chunk["error"]["message"]
                    continue
                ours = chunk.get("outrider") or {}
                if "tokens" in ours:
                    timing.chunks.append((time.perf_counter(), len(ours["tokens"])))
                elif "cycles" in ours:
                    timing.cycles = ours["cycles"]
                    timing.accepted = ours["accepted"]
    except (httpx.HTTPError, ValueError) as e:
        timing.error = f"{type(e).__name__}: {e}"
    return timing


def summary(timings: Sequence[Timing], wall: float, concurrency: int, drafts: int | str) -> Summary:
    good = [t for t in timings if t.error is None and t.chunks]
    decode = [(t.tokens - t.chunks[0][1]) / (t.chunks[-1][0] - t.chunks[0][0]) for t in good if len(t.chunks) > 1]
    cycles = sum(t.cycles for t in good)
    accepted = sum(t.accepted for t in good)
    return {
        "concurrency": concurrency,
        "draft_tokens": drafts,
        "requests": len(timings),
        "errors": len(timings) - len(good),
        "first_error": next((t.error or "no tokens" for t in timings if t not in good), None),
        "wall_s": wall,
        "tokens": sum(t.tokens for t in good),
        "tokens_per_s": sum(t.tokens for t in good) / wall,
        "stream_tokens_per_s": sum(decode) / len(decode) if decode else 0.0,  # of one stream
        "ttft_s": percentiles([t.chunks[0][0] - t.began for t in good]),
        "token_s": percentiles([s for t in good for s in t.per_token]),
        "wait_s": percentiles([s for t in good for s in t.waits]),  # from chunk to chunk
        "tokens_per_cycle": (cycles + accepted) / cycles if cycles else 0.0,
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Nearest rank; zeros for an empty list."""
    ordered = sorted(values) or [0.0]
    ranked = {f"p{q}": ordered[min(len(ordered) - 1, q * len(ordered) // 100)] for q in (50, 95, 99)}
    return {**ranked, "max": ordered[-1]}
