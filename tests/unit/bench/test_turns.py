"""Comparisons of drafting with plain decoding on a machine whose speed changes. Bugs caught: one side meets all of the
load; differing tokens go unnoticed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from outrider.bench.turns import compare
from outrider.llm import Completion
from outrider.types import RequestStats


class Machine:
    """Decodes 101 tokens, drafting at twice the plain speed, while the load slows the runs of the given numbers."""

    def __init__(self, slow: tuple[int, ...] = ()):
        self.slow = slow
        self.sides: list[bool] = []
        self.tokens: dict[int, list[int]] = {}

    def __call__(self, drafts: bool) -> Completion:
        number = len(self.sides)
        self.sides.append(drafts)
        seconds = (1.0 if drafts else 2.0) * (5.0 if number in self.slow else 1.0)
        stats = RequestStats(prompt_tokens=1, new_tokens=101, cycles=101, first_emitted=1, decode_s=seconds)
        return Completion("", self.tokens.get(number, [1, 2]), "length", stats)


@pytest.mark.parametrize("slow", [(), (0, 1, 2), (3, 4, 5), (0, 3), (1, 2, 4), (0, 2, 4)])
def test_load_during_some_runs_changes_no_ratio(slow: tuple[int, ...]) -> None:
    machine = Machine(slow)
    result = compare(machine)
    assert machine.sides == [True, False, False, True, True, False]
    assert result.speedup == pytest.approx(2.0) and result.rounds == 3 and result.identical


def test_a_run_that_took_place_is_the_first_one() -> None:
    machine = Machine()
    result = compare(machine, machine(True), rounds=2)
    assert machine.sides == [True, False, False, True] and result.rounds == 2


def test_one_differing_run_is_not_identical() -> None:
    machine = Machine()
    machine.tokens = {4: [1, 3]}
    assert not compare(machine).identical


def test_slow_models_are_not_run_again_and_again() -> None:
    clock: Any = itertools.count(step=15.0).__next__
    machine = Machine()
    assert compare(machine, clock=clock).rounds == 2 and len(machine.sides) == 4
