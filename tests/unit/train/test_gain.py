"""The verdict on a new drafter. Bug caught: "use it" about a drafter with which plain decoding is as fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from outrider.train.data import Sequences
from outrider.train.gain import Gain, timed_pairs


@pytest.mark.parametrize(
    "speedup, verdict",
    [
        (1.5, "use it"),
        (1.1, "use it"),
        (1.06, "hardly faster"),
        (1.02, "do not use it: plain decoding is as fast"),
        (0.99, "do not use it: plain decoding is as fast"),
        (0.8, "do not use it: plain decoding is faster"),
    ],
)
def test_the_verdict_follows_the_measured_speed(speedup: float, verdict: str) -> None:
    gain = Gain(prompts=4, tokens=400, plain_seconds=8.0 * speedup, drafting_seconds=8.0)
    assert gain.verdict.startswith(verdict)
    assert gain.to_json()["speedup"] == speedup
    assert gain.to_json()["useful"] == (speedup > 1.02)
    assert gain.line().endswith("50.0 drafting")


@dataclass
class Stats:
    new_tokens: int
    first_emitted: int
    decode_s: float


class Model:
    """Answers of 9 tokens; the first drafted cycle yields 3 of them."""

    def __init__(self) -> None:
        self.runs: list[bool] = []

    def generate(self, ids: list[int], params: object, *, drafter: bool) -> list[SimpleNamespace]:
        self.runs.append(drafter)
        first = 3 if drafter else 1
        per_token = 0.5 if drafter else 1.0
        stats = Stats(new_tokens=9, first_emitted=first, decode_s=per_token * (9 - first))
        return [SimpleNamespace(stats=stats)]


def never() -> bool:
    return False


def pairs(halt: Callable[[], bool] = never, seconds: float = 1e6) -> tuple[list[Gain], list[bool]]:
    prompts = Sequences.of([np.arange(8)] * 4, [4] * 4, range(4), [True] * 4, 8)
    model = Model()
    timings = list(timed_pairs(model, prompts, max_new=9, seconds=seconds, halt=halt))  # type: ignore[arg-type]
    return timings, model.runs[2:]  # without the two warm-up runs


def test_both_sides_are_timed_in_turn_and_per_token() -> None:
    """A version that divided by all tokens made the side that emits more in its first cycle look faster."""
    timings, runs = pairs()
    assert runs == [False, True, True, False] * 2
    assert [gain.speedup for gain in timings] == pytest.approx([2.0] * 4)


def test_time_and_a_signal_end_the_measurement() -> None:
    assert len(pairs(seconds=0.0)[0]) == 2
    assert pairs(halt=lambda: True)[0] == []
