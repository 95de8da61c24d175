"""Prompt tokens beside streams, by what steps and rows take."""

from __future__ import annotations

import pytest

from outrider.engine.prefill_budget import LONGER, PrefillBudget
from outrider.engine.prefill_graphs import LIKELY


def driven(pace: PrefillBudget, plain: float, pass_s: float, row: float, steps: int = 200) -> int:
    """Steps with and without prompts in turn; a pass takes `pass_s` at least."""
    for _ in range(steps):
        pace.observe(0, plain)
        pace.observe(pace.rows, plain + max(pass_s, row * pace.rows))
    return pace.rows


@pytest.mark.parametrize(("plain", "row"), [(3.4e-3, 3.3e-6), (23e-3, 100e-6), (2e-3, 3.3e-6), (70e-3, 100e-6)])
def test_a_step_with_prompts_lasts_little_more_than_twice_as_long(plain: float, row: float) -> None:
    for begin in (512, 1024):
        rows = driven(PrefillBudget(begin, LIKELY), plain, 1e-3, row)
        assert rows in LIKELY and (plain + rows * row <= LONGER * plain or rows == begin // 4)
        assert 2 * rows * row > (LONGER - 1) * plain or rows == LIKELY[-1], "and no shorter than that"


def test_it_follows_the_batch_and_forgets_what_held_up_one_step() -> None:
    pace = PrefillBudget(512, LIKELY)
    few = driven(pace, 3e-3, 1e-3, 10e-6)
    many = driven(pace, 12e-3, 1e-3, 10e-6)
    assert few == 256 and many == 1536
    pace.observe(pace.rows, 5.0)
    pace.observe(0, 5.0)
    driven(pace, 12e-3, 1e-3, 10e-6, 40)
    assert pace.rows == many


def test_before_anything_is_known_it_is_what_it_was() -> None:
    pace = PrefillBudget(512, LIKELY)
    pace.observe(512, 1.0)
    assert pace.rows == 512


def test_a_pass_of_few_rows_says_nothing_of_a_row() -> None:
    pace = PrefillBudget(512, LIKELY)
    rows = driven(pace, 12e-3, 1e-3, 10e-6)
    for _ in range(50):
        pace.observe(16, 15e-3)
    assert pace.rows == rows
