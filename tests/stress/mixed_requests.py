"""360 mixed requests, asked in four ways: each answer must be the same in all of them.

    python tests/stress/mixed_requests.py                 # random weights; about three minutes on two cores
    python tests/stress/mixed_requests.py smollm2

Asked one by one; from twelve connections at once; at once in another order; and one by one from a server without a
drafter. The requests are those of soak_million.py: all protocols, streamed or whole, with schemas, log-probabilities,
several answers, stop strings, embeddings, and refused ones. Fails (exit code 1) when an answer differs. One JSON object
is printed at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]
from server_process import Target
from soak_million import Connection, answer, request

Answers = dict[int, Any]


async def ask(port: int, numbers: Sequence[int], at_once: int) -> Answers:
    """The answers to these requests, in this order, from so many connections."""
    answers: Answers = {}
    waiting = iter(numbers)

    async def work() -> None:
        connection = Connection(port)
        for number in waiting:
            async with asyncio.timeout(300):
                answers[number] = answer(*await connection.ask(*request(number)))
        connection.close()

    await asyncio.gather(*(work() for _ in range(at_once)))
    return answers


def ask_in_all_ways(model: str, number: int, at_once: int) -> dict[str, Answers]:
    numbers = list(range(number))
    reordered = random.Random(1).sample(numbers, number)
    server = Target(model, ["--log-level", "warning"])
    try:
        ways = {
            "alone": asyncio.run(ask(server.port, numbers, 1)),
            "in company": asyncio.run(ask(server.port, numbers, at_once)),
            "reordered": asyncio.run(ask(server.port, reordered, at_once)),
        }
    finally:
        server.stop()
    server = Target(model, ["--log-level", "warning", "--drafter", "none"])
    try:
        ways["without drafts"] = asyncio.run(ask(server.port, numbers, 1))
    finally:
        server.stop()
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random", help="as for `outrider serve`, or random")
    parser.add_argument("--requests", type=int, default=360)
    parser.add_argument("--at-once", type=int, default=12, help="connections")
    options = parser.parse_args()
    ways = ask_in_all_ways(options.model, options.requests, options.at_once)
    alone = ways["alone"]
    differing = {way: [n for n in alone if answers[n] != alone[n]] for way, answers in ways.items()}
    for way, numbers in differing.items():
        for number in numbers[:3]:
            said = f"{json.dumps(ways[way][number])[:300]} instead of {json.dumps(alone[number])[:300]}"
            print(f"{way}: request {number} {request(number)[0]}: {said}", file=sys.stderr)
    refused = sum(status >= 400 for status, *_ in alone.values())
    print(json.dumps({"requests": len(alone), "refused": refused, "differing": differing}))
    sys.exit(1 if any(differing.values()) else 0)


if __name__ == "__main__":
    main()
