"""Prompt tokens beside streams, by what steps and rows take."""

from __future__ import annotations

import pytest

from outrider.engine.prefill_budget import MAX_SLOWDOWN, MAX_SLOWDOWN_FEW_ROWS, WARMUP_ROWS, PrefillBudget


def driven(pace: PrefillBudget, plain: float, pass_s: float, row: float, steps: int = 200) -> int:
    """Steps with and without prompts in turn; a pass takes `pass_s` at least."""
    for _ in range(steps):
        pace.observe(0, plain)
        pace.observe(pace.with_decodes, plain + max(pass_s, row * pace.with_decodes))
    return pace.with_decodes


@pytest.mark.parametrize(("plain", "row"), [(3.4e-3, 3.3e-6), (23e-3, 100e-6), (2e-3, 3.3e-6), (70e-3, 100e-6)])
def test_a_step_with_prompts_lasts_little_more_than_twice_as_long(plain: float, row: float) -> None:
    for begin in (512, 1024):
        rows = driven(PrefillBudget(0, with_decodes=begin, choices=WARMUP_ROWS), plain, 1e-3, row)
        assert rows in WARMUP_ROWS and (plain + rows * row <= MAX_SLOWDOWN * plain or rows == begin // 4)
        assert 2 * rows * row > (MAX_SLOWDOWN - 1) * plain or rows == WARMUP_ROWS[-1], "and no shorter than that"


def test_it_follows_the_batch_and_forgets_what_held_up_one_step() -> None:
    pace = PrefillBudget(0, with_decodes=512, choices=WARMUP_ROWS)
    few = driven(pace, 3e-3, 1e-3, 10e-6)
    many = driven(pace, 12e-3, 1e-3, 10e-6)
    assert few == 256 and many == 1536
    pace.observe(pace.with_decodes, 5.0)
    pace.observe(0, 5.0)
    driven(pace, 12e-3, 1e-3, 10e-6, 40)
    assert pace.with_decodes == many


def test_before_anything_is_known_it_is_what_it_was() -> None:
    pace = PrefillBudget(0, with_decodes=512, choices=WARMUP_ROWS)
    pace.observe(512, 1.0)
    assert pace.with_decodes == 512


def test_a_pass_of_few_rows_says_nothing_of_a_row() -> None:
    pace = PrefillBudget(0, with_decodes=512, choices=WARMUP_ROWS)
    rows = driven(pace, 12e-3, 1e-3, 10e-6)
    for _ in range(50):
        pace.observe(16, 15e-3)
    assert pace.with_decodes == rows


CPU = (4, 8, *range(16, 513, 16))


@pytest.mark.parametrize("row", [0.2e-3, 2e-3, 16e-3])
@pytest.mark.parametrize("plain", [8e-3, 80e-3, 400e-3, 2.0])
def test_on_a_cpu_a_long_prompt_and_a_stream_both_move(plain: float, row: float) -> None:
    """16 rows a step, whatever a decode step costs, left an 8k prompt a tenth of the time next to several sequences
    with drafts; and where rows are dear, a stream next to prompts a fifth."""
    pace = PrefillBudget(0, with_decodes=16, choices=CPU)
    rows = driven(pace, plain, plain / 2, row)
    cost = max(plain / 2, row * rows)
    prompt = cost / (plain + cost)
    stream = plain / (plain + cost)
    assert rows in CPU
    assert prompt > 0.4 or rows == CPU[-1], "the prompt gets its share of the time"
    longest = MAX_SLOWDOWN_FEW_ROWS if rows <= 16 else MAX_SLOWDOWN
    assert stream >= 1 / (longest + 0.01) or rows == 4, "and the stream keeps its own, down to the fewest rows"
    alone = driven(PrefillBudget(0, with_decodes=16, choices=CPU), 1e-9, 0.0, row)
    assert alone == 4, "no time left over: the fewest rows"


@pytest.mark.parametrize(
    ("plain", "base", "row", "rows"),
    [(2.1, 1.25, 0.53, 4), (1.8, 1.5, 0.41, 4), (60, 50, 4.0, 16), (60, 30, 0.5, 80)],
    ids=["smollm2, AVX2", "smollm2, AVX-512", "bound by memory", "many cores"],
)
def test_prompts_of_many_clients_do_not_hold_up_a_stream(plain: float, base: float, row: float, rows: int) -> None:
    """A prompt of 15 tokens ten times a second, with which a decode step of 2 ms lasted 11. Rows are cut only where
    that makes the step shorter: not where a pass takes as long with a few of them."""
    pace = PrefillBudget(0, with_decodes=16, choices=CPU)
    for _ in range(200):
        pace.observe(0, plain)
        count = min(15, pace.with_decodes) if rows < 16 else pace.with_decodes
        pace.observe(count, plain + base + row * count)
    assert pace.with_decodes == rows


def test_an_engine_on_a_cpu_measures_what_prompts_cost() -> None:
    from tests.engines import request, run_joining, tiny_engine

    engine = tiny_engine(prefill_chunk=64, max_context=1024)
    prefill = PrefillBudget(64, with_decodes=4, choices=range(4, 65, 4))
    engine.scheduler.prefill = engine.timer.prefill = prefill
    now = [0.0]
    real = engine.runner.run

    def prompts(scheduled):  # type: ignore[no-untyped-def]
        now[0] += 1e-3 * sum(item.num_tokens for item in scheduled)
        real(scheduled)

    def read(pending, inner=engine.executors[-1].read):  # type: ignore[no-untyped-def]
        now[0] += 40e-3
        return inner(pending)

    engine.clock = engine.runner.clock = lambda: now[0]
    engine.runner.run = prompts  # type: ignore[method-assign]
    engine.executors[-1].read = read  # type: ignore[method-assign]
    run_joining(
        engine,
        [(0, request("stream", [5] * 8, max_tokens=60)), (2, request("long", [7] * 400, max_tokens=2))],
        audited=False,
    )
    assert prefill.with_decodes in (48, 52), "1.3 times a step of 40 ms, at 1 ms a row"
