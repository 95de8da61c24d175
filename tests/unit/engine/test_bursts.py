"""Several cycles of a single sequence in one call: what single cycles bring, and no further than where somebody must
look."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engines import request, run
from tests.unit.engine.test_host_cycle import PROMPT, SHAPES, cycle_of, engines

from outrider.engine.engine import Engine, Request
from outrider.ops.backend import BURST_CYCLES, Burst, CycleRequest, CycleResult
from outrider.spec.choose import SamplingBatch
from outrider.spec.controller import Controller
from outrider.spec.cost import CostTable
from outrider.types import SamplingParams


def engine_of(shape: str = "llama", cycles: int = BURST_CYCLES, step: float = 1e-3) -> tuple[Engine, list[int]]:
    """An engine whose cycles take so long by its table, and how many cycles its calls have run."""
    engine, ran = engines(shape)[0], list[int]()
    trust = {"mtp": [0.99] * 16}  # drafts end themselves from the start
    engine.controller = Controller(
        CostTable.linear(step, step / 9, {"mtp": step / 9}), ("mtp", "ngram"), {"mtp": [0.9] * 4}, trust
    )
    engine.controller.cost.observe = lambda *args: None  # type: ignore[method-assign]  how busy this machine is must not matter
    engine.cycles = cycles
    whole = cycle_of(engine).run

    def counted(*args: Any) -> list[CycleResult]:
        told: list[CycleResult] = whole(*args)
        ran.append(len(told) if len(args) > 3 else 1)
        return told

    cycle_of(engine).run = counted
    return engine, ran


def counts(engine: Engine) -> tuple[object, ...]:
    m = engine.metrics
    return (
        m.cycles,
        m.drafted,
        m.accepted,
        m.trees,
        m.branched,
        m.new_tokens,
        m.drafted_by_position,
        m.accepted_by_position,
    )


@pytest.mark.parametrize("shape", ["few", "few sliding"])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.3, "seed": 7}], ids=["greedy", "T1.3"])
@pytest.mark.parametrize(("k", "tree"), [(0, None), (3, None), (4, 9)], ids=["plain", "lines", "trees"])
def test_a_burst_is_its_cycles(shape: str, params: dict[str, Any], k: int, tree: int | None) -> None:
    """Fixed K, so that the controller has no say: tokens, counts and what the next draft starts from are those of
    single cycles."""
    (burst, ran), (single, one) = engine_of(shape), engine_of(shape, cycles=1)
    asked = request("a", [t % 8 for t in PROMPT], k=k, drafter="mtp" if k else True, max_tokens=60, **params)
    asked.tree = tree
    got = run(burst, [asked])
    assert got == run(single, [asked]) and counts(burst) == counts(single)
    assert torch.equal(burst.runner.features, single.runner.features)
    assert ran[0] == 1 and max(ran) == BURST_CYCLES and sum(ran) == burst.metrics.cycles == len(one) > len(ran)


def test_bursts_by_the_controller_s_plan() -> None:
    """Where tokens are drawn from few even a random drafter is right often enough to be kept; the text is that of plain
    decoding."""
    engine, ran = engine_of("few")
    params: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 120}
    prompt = [t % 8 for t in PROMPT]
    got = run(engine, [request("a", prompt, drafter="mtp", **params)])
    assert got == run(engine_of("few", cycles=1)[0], [request("a", prompt, drafter=False, **params)])
    assert engine.metrics.drafted > 0 and sum(ran) == engine.metrics.cycles > len(ran)


@pytest.mark.parametrize("k", [0, 3])
def test_no_cycle_is_run_behind_the_end(k: int) -> None:
    engine, ran = engine_of()
    params: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 2}
    whole = run(engine, [request("a", PROMPT, k=k, drafter="mtp" if k else True, **params)])["a"]
    assert k or ran == [1, 4, 4, 4, 4, 4, 3], "the first token at once, and the last cycles as many as are left"
    end = next(i for i in range(6, 24) if whole[i] not in whole[:i])
    other, ran = engine_of()
    stopped = request("a", PROMPT, k=k, drafter="mtp" if k else True, **params, stop_token_ids=(whole[end],))
    assert run(other, [stopped])["a"] == whole[: end + 1] and other.metrics.finished == {"stop": 1}
    assert sum(ran) == other.metrics.cycles and (k or sum(ran) == end + 1)


def test_where_somebody_must_look_there_is_one_cycle() -> None:
    """Logprobs, copies, company, steps that take long; and a context that ends."""
    for params in ({"logprobs": 2}, {"drafter": "ngram", "k": 4}):
        engine, ran = engine_of()
        run(engine, [request("a", PROMPT, **{"k": 0, **params})])
        assert set(ran) == {1}
    engine, ran = engine_of(step=20e-3)
    run(engine, [request("a", PROMPT, k=3)])
    assert set(ran) == {1}
    engine, ran = engine_of()
    got = run(engine, [request("a", PROMPT, k=0), request("b", PROMPT[3:], k=0, max_tokens=8)])
    assert set(ran[:8]) == {1} and max(ran) == BURST_CYCLES, "alone again when the other has ended"
    assert got["a"] == run(engine_of(cycles=1)[0], [request("a", PROMPT, k=0)])["a"]
    engine, ran = engine_of()
    long = request("a", PROMPT, k=3, drafter="mtp", max_tokens=1000)
    assert run(engine, [long]) == run(engine_of(cycles=1)[0], [long]) and max(ran) == BURST_CYCLES
    assert len(engine.scheduler.running) == 0 and engine.metrics.finished == {"length": 1}


def test_an_abort_between_two_bursts() -> None:
    engine, ran = engine_of()
    engine.submit(request("a", PROMPT, k=3, drafter="mtp", max_tokens=100))
    while len(ran) < 3:
        engine.step()
    engine.abort("a")
    assert [event.finish_reason for event in engine.step()] == ["abort"] and not engine.busy
    engine.check()


def test_a_text_that_repeats_itself_is_looked_at() -> None:
    engine, _ = engine_of("few")
    prompt = [t % 8 for t in PROMPT]
    job = Request("a", prompt, SamplingParams(max_tokens=64, ignore_eos=True), 0)
    engine.submit(job)
    while not engine.metrics.cycles:
        engine.step()
    seq = engine.scheduler.running[0]
    assert engine.store.reserve(seq.held, 64)
    engine.store.flush()
    cycle, sampling = (
        cycle_of(engine),
        SamplingBatch.build([job.params], [prompt], [[]], SHAPES["few"]["vocab_size"], engine.device),
    )
    asked = [CycleRequest(seq.held.slot, seq.tokens[-1], len(seq.tokens) - 1, 0, None)]

    def burst(text: list[int], match: int) -> list[int]:
        told = cycle.run(asked, sampling, None, Burst(4, frozenset(), 64, seq.held.room, text, match))
        return [token for line in told for token in line.tokens]

    come = burst([], 0)
    assert len(come) == 4
    other = next(t for t in range(90) if t not in come)  # need not be a token of this model: it is only looked at
    assert burst([*come[:3], other], 3) == come[:3]
    assert (
        burst([*come[1:3], other], 3) == come
        and burst([*come[:2], other, *come[:1]], 2) == come[: 2 if come[0] != come[1] else 1]
    )
    text = [*come[:3], other]
    assert burst(text, 3) == come[:3]
    text += [other] * 3  # only ever appended to
    assert burst(text, 3) == come[:3] and burst(text, 5) == come


@pytest.mark.parametrize("which", [0, 1], ids=["one call", "single operations"])
def test_events_tell_what_was_drafted(which: int) -> None:
    """The draft tokens, right or wrong: accepted ones are the answer's, the one after them is not what the target
    chose."""
    engine = engines("few")[which]
    engine.submit(request("a", [t % 8 for t in PROMPT], k=3, drafter="mtp", max_tokens=40, temperature=1.0, seed=3))
    wrong = 0
    while engine.busy:
        for event in engine.step():
            right = event.kinds.count("accepted")
            assert event.drafts is not None and event.drafts[:right] == event.tokens[:right]
            if event.kinds and event.kinds[-1] == "corrected":
                wrong += 1
                assert event.drafts[right] != event.tokens[right]
    assert wrong
