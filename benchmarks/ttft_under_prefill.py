"""How long a short request waits for its first token while a long prompt is being prefilled, and how long a running stream is held up.

    python benchmarks/ttft_under_prefill.py smollm2 --long 4000

Three figures: the short request alone, the short request sent just after the long prompt, and the longest wait of a stream that
was running when the long prompt came.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src")]
from outrider.config import EngineConfig  # noqa: E402
from outrider.engine.step import Request  # noqa: E402
from outrider.llm import LLM  # noqa: E402
from outrider.types import SamplingParams  # noqa: E402


def drive(engine: Any, requests: list[tuple[float, Request]]) -> dict[str, list[float]]:
    """Submit each request at its time (seconds from now); returns the times of every request's events, from its submission."""
    began = time.perf_counter()
    submitted: dict[str, float] = {}
    seen: dict[str, list[float]] = {r.id: [] for _, r in requests}
    waiting = sorted(requests, key=lambda pair: pair[0])
    while waiting or engine.busy:
        now = time.perf_counter() - began
        while waiting and waiting[0][0] <= now:
            request = waiting.pop(0)[1]
            engine.submit(request)
            submitted[request.id] = time.perf_counter()
        for event in engine.step():
            if event.tokens:
                seen[event.id].append(time.perf_counter() - submitted[event.id])
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--long", type=int, default=4000, help="tokens of the long prompt")
    parser.add_argument("--chunk", type=int, default=512)
    args = parser.parse_args()
    config = EngineConfig(max_batch=4, max_context=args.long + 512, prefill_chunk=args.chunk, prefix_cache=False)
    llm = LLM.load(args.model, engine=config)
    assert llm.tokenizer is not None
    short = llm.chat_prompt([{"role": "user", "content": "Why is the sky blue?"}])
    filler = llm.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * args.long)[: args.long]

    def request(name: str, prompt: list[int], tokens: int) -> Request:
        return Request(name, prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))

    drive(llm.engine, [(0.0, request("warm", short, 16))])
    alone = drive(llm.engine, [(0.0, request("short", short, 4))])["short"][0]
    long_alone = drive(llm.engine, [(0.0, request("long", filler, 1))])["long"][0]
    under = drive(llm.engine, [(0.0, request("long", filler, 1)), (0.05, request("short", short, 4))])
    held = drive(llm.engine, [(0.0, request("running", short, 200)), (0.5, request("long", filler, 1))])["running"]
    result = {
        "model": args.model, "long_prompt": args.long, "chunk": args.chunk, "short_alone_ms": round(1e3 * alone),
        "long_alone_ms": round(1e3 * long_alone), "short_during_prefill_ms": round(1e3 * under["short"][0]),
        "long_with_short_ms": round(1e3 * under["long"][0]),
        "running_stream_longest_wait_ms": round(1e3 * max(b - a for a, b in itertools.pairwise(held))),
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
