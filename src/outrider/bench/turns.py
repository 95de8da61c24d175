"""Times one request plainly and with drafts, in turn and repeatedly, so that other programs slow both sides alike.

The side that begins changes from round to round, and the fastest run of each side counts: other load only ever adds
time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..types import SamplingParams

if TYPE_CHECKING:
    from ..llm import LLM, Completion

ROUNDS = 3
MAX_SECONDS = 20.0  # no further round begins after this long

Decode = Callable[[bool], "Completion"]  # with drafts (True) or plainly


@dataclass(frozen=True)
class Comparison:
    """The fastest run of each side."""

    drafting: Completion
    plain: Completion
    rounds: int
    identical: bool  # all runs gave the same tokens

    @property
    def speedup(self) -> float:
        """Speed of drafting relative to plain decoding; 0 if the answers are too short to compare."""
        plain_tps = self.plain.stats.decode_tps
        return self.drafting.stats.decode_tps / plain_tps if plain_tps else 0.0


def compare(
    decode: Decode,
    first: Completion | None = None,
    *,
    rounds: int = ROUNDS,
    max_seconds: float = MAX_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
    drafting_first: bool = True,
) -> Comparison:
    """`first`: a finished run with drafts, which begins the first round. `drafting_first`: which side begins
    otherwise."""
    runs: dict[bool, list[Completion]] = {True: [], False: []}
    begins = drafting_first or first is not None
    if first is not None:
        runs[True].append(first)
    started = clock()
    for number in range(rounds):
        if number > 0 and clock() - started >= max_seconds:
            break
        for drafts in (begins, not begins):
            if len(runs[drafts]) == number:
                runs[drafts].append(decode(drafts))
        begins = not begins
    tokens = runs[True][0].token_ids
    return Comparison(
        drafting=_fastest(runs[True]),
        plain=_fastest(runs[False]),
        rounds=len(runs[False]),
        identical=all(run.token_ids == tokens for side in runs.values() for run in side),
    )


def _fastest(runs: list[Completion]) -> Completion:
    return max(runs, key=lambda run: run.stats.decode_tps)


def decoder(llm: LLM, ids: list[int], params: SamplingParams) -> Decode:
    """Runs a request plainly or with drafts, without entries of earlier runs in the prefix cache."""

    def decode(drafts: bool) -> Completion:
        llm.engine.store.prefix.clear()
        return llm.generate(ids, params, drafter=drafts)[0]

    return decode
