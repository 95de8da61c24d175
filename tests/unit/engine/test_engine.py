"""The engine's contract at its edges: bad input, ends of answers, logprobs, statistics."""

from __future__ import annotations

import math
from collections import abc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines import VOCAB, FixedDrafts, request, run, tiny_engine, tiny_model
from tests.scheduling import CountingCache, next_step
from tests.unit.engine.test_host_cycle import SHAPES

from outrider.config import EngineConfig, SpecConfig, parse_draft_tokens
from outrider.engine.engine import Engine
from outrider.engine.memory import KVOptions
from outrider.engine.prefill_budget import PrefillBudget
from outrider.engine.scheduler import Scheduler
from outrider.engine.step import PromptChunk, Request, Sequence, StepBatch
from outrider.models.config import ModelConfig
from outrider.models.decoder import TextModel
from outrider.ops.backend import Capabilities
from outrider.ops.cpu.ops import CpuOps
from outrider.spec.controller import Controller
from outrider.spec.cost import CostTable
from outrider.types import DraftPlan, OutriderError, SamplingParams, SoftSpan
from outrider.weights.load import dummy_weights

MODEL = tiny_model("llama")
PROMPT = [3, 5, 7, 9, 11, 3, 5, 7]


@pytest.fixture
def engine() -> Engine:
    return tiny_engine("llama", model=MODEL)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (Request("a", [], SamplingParams()), "prompt is empty"),
        (Request("a", [1] * 600, SamplingParams()), "600 tokens"),
        (Request("a", [VOCAB], SamplingParams()), "outside the vocabulary"),
        (Request("a", [-1], SamplingParams()), "outside the vocabulary"),
        (Request("a", [1], SamplingParams(), 17), "0..16"),
        (Request("a", [1], SamplingParams(), -1), "0..16"),
        (Request("a", [1], SamplingParams(temperature=-1)), "temperature"),
        (Request("a", [1], SamplingParams(temperature=math.nan)), "temperature"),
        (Request("a", [1], SamplingParams(top_p=0)), "top_p"),
        (Request("a", [1], SamplingParams(top_p=1.1)), "top_p"),
        (Request("a", [1], SamplingParams(max_tokens=0)), "max_tokens"),
        (Request("a", [1], SamplingParams(min_tokens=9, max_tokens=3)), "min_tokens"),
        (Request("a", [1], SamplingParams(logit_bias={VOCAB: 1.0})), "outside the vocabulary"),
        (Request("a", [1], SamplingParams(stop_token_ids=(-3,))), "outside the vocabulary"),
        (Request("a", [1], SamplingParams(stop=("x",))), "tokenizer"),
    ],
)
def test_bad_requests(engine: Engine, bad: Request, says: str) -> None:
    with pytest.raises(OutriderError, match=says) as caught:
        engine.submit(bad)
    assert "\n" not in str(caught.value)
    assert not engine.busy


def test_bad_settings() -> None:
    for make in (
        lambda: SpecConfig(draft_tokens=17),
        lambda: SpecConfig(draft_tokens=-1),
        lambda: EngineConfig(max_batch=0),
        lambda: EngineConfig(prefill_chunk=33),
        lambda: parse_draft_tokens("many"),
    ):
        with pytest.raises(OutriderError):
            make()
    assert parse_draft_tokens("auto") is None and parse_draft_tokens("0") == 0


def test_an_id_runs_once(engine: Engine) -> None:
    engine.submit(request("a", PROMPT))
    with pytest.raises(OutriderError, match="already running"):
        engine.submit(request("a", PROMPT))


def test_max_tokens_and_context_end_an_answer(engine: Engine) -> None:
    assert len(run(engine, [request("a", PROMPT, k=5, max_tokens=7)])["a"]) == 7
    small = tiny_engine("llama", model=MODEL, max_context=40)
    assert len(run(small, [request("a", PROMPT, k=5, max_tokens=500)])["a"]) == 40 - len(PROMPT)


def test_stop_ids_cut_inside_an_accepted_draft(engine: Engine) -> None:
    text = run(engine, [request("a", PROMPT, drafter=False, max_tokens=30)])["a"]
    stop = text[6]
    first = text.index(stop)
    for k in (0, 1, 4, 16):
        got = run(engine, [request("b", PROMPT, k=k, max_tokens=30, stop_token_ids=(stop,))])["b"]
        assert got == text[: first + 1]
        later = run(engine, [request("c", PROMPT, k=k, max_tokens=30, stop_token_ids=(stop,), min_tokens=first + 2)])[
            "c"
        ]
        assert len(later) > first + 1 and stop not in later[: first + 1]


def test_eos_ends_unless_ignored(engine: Engine) -> None:
    eos = 1
    got = run(engine, [Request("a", PROMPT, SamplingParams(max_tokens=20, logit_bias={eos: 100.0}))])["a"]
    assert got == [eos]
    assert len(run(engine, [request("b", PROMPT, max_tokens=20, logit_bias={eos: 100.0})])["b"]) == 20


def test_logprobs_are_those_of_plain_decoding(engine: Engine) -> None:
    def tables(k: int) -> list[dict[int, float]]:
        engine.submit(request("a", PROMPT, k=k, logprobs=3, temperature=0.8, seed=4))
        rows: list[dict[int, float]] = []
        while engine.busy:
            for event in engine.step():
                assert event.logprobs is not None and len(event.logprobs) == len(event.tokens)
                assert all(token in row for token, row in zip(event.tokens, event.logprobs))
                rows += event.logprobs
        return rows

    plain = tables(0)
    fast = tables(5)
    assert [list(r) for r in plain] == [list(r) for r in fast]
    assert all(abs(a[t] - b[t]) < 1e-4 for a, b in zip(plain, fast) for t in a)
    assert all(len(r) in (3, 4) and max(r.values()) <= 0 for r in plain)


def test_statistics_add_up(engine: Engine) -> None:
    engine.submit(request("a", PROMPT, k=4, max_tokens=30))
    stats = None
    kinds = []
    while engine.busy:
        for event in engine.step():
            assert len(event.kinds) == len(event.tokens)
            kinds += event.kinds
            stats = event.stats or stats
    assert stats is not None
    assert stats.new_tokens == 30 == len(kinds)
    assert stats.accepted == sum(stats.accepted_by_position) and stats.drafted == sum(stats.drafted_by_position)
    assert stats.cycles + stats.accepted >= 30
    assert stats.prompt_tokens == len(PROMPT) and stats.ttft_s > 0 and stats.prefill_s <= stats.ttft_s
    assert set(kinds) <= {"accepted", "corrected", "bonus", "plain"}


def test_a_long_prompt_delays_running_streams_by_one_chunk() -> None:
    scheduler = Scheduler(CountingCache(4, 10_000), 4, PrefillBudget(64), 64, 1 << 30, FixedDrafts())
    short, long = (Sequence(Request(i, [1] * n, SamplingParams()), 0.0, [1] * n) for i, n in (("s", 5), ("l", 4000)))
    scheduler.add(short)
    for chunk in next_step(scheduler).prompts:
        chunk.seq.computed = chunk.start + chunk.num_tokens
    scheduler.add(long)
    for step in range(10):
        plan = next_step(scheduler)
        assert [row.seq.id for row in plan.decode] == ["s"], "the running stream is in every step"
        assert sum(c.num_tokens for c in plan.prompts) <= 64
        for chunk in plan.prompts:
            assert chunk.start == step * 64
            chunk.seq.computed = chunk.start + chunk.num_tokens


def test_prompts_beside_streams_are_cut_small_until_many_wait() -> None:
    prefill = PrefillBudget(1024, batched=8192, with_decodes=512)
    scheduler = Scheduler(CountingCache(256, 1 << 20), 256, prefill, 32, 1 << 30, FixedDrafts())
    sequences = [Sequence(Request(str(i), [1] * 8192, SamplingParams()), 0.0, [1] * 8192) for i in range(96)]

    def step(decoding: int, waiting: int) -> list[int]:
        """Prompt tokens of each sequence in a step."""
        for seq in [*scheduler.running]:
            scheduler.remove(seq)
        for i, seq in enumerate(sequences[: decoding + waiting]):
            scheduler.add(seq)
            scheduler._admit()
            seq.computed = len(seq.tokens) - 1 if i < decoding else 0
        plan = next_step(scheduler)
        assert len(plan.decode) == decoding
        return [item.num_tokens for item in plan.prompts]

    assert step(0, 64) == [1024] * 8, "nobody decodes: whole passes"
    assert step(64, 1) == [512] and step(64, 2) == [256, 256], "few prompts beside streams"
    assert step(64, 6) == [1024], "some: a chunk"
    assert step(64, 32) == [1024] * 8, "many wait: whole passes again"


def test_the_youngest_is_preempted() -> None:
    cache = CountingCache(4, 40)
    scheduler = Scheduler(cache, 4, PrefillBudget(64), 64, 1 << 30, FixedDrafts(DraftPlan("d", 4)))
    seqs = [Sequence(Request(str(i), [1] * 10, SamplingParams()), 0.0, [1] * 10) for i in range(4)]
    for seq in seqs:
        scheduler.add(seq)
    for chunk in next_step(scheduler).prompts:
        chunk.seq.computed = chunk.start + chunk.num_tokens
    plan = next_step(scheduler)
    assert [row.seq.id for row in plan.decode] == ["0", "1"]
    assert scheduler.preemptions == 2 and [s.id for s in scheduler.waiting] == ["2", "3"]
    assert all(s.computed == 0 and s.cache is None for s in scheduler.waiting)


def test_a_request_that_does_not_fit_is_tried_again_when_pages_are_released() -> None:
    """The head of the queue was opened, its prefix looked up, and closed again in every step."""
    cache = CountingCache(4, 40)
    scheduler = Scheduler(cache, 4, PrefillBudget(64), 64, 1 << 30, FixedDrafts())
    first, blocked = (Sequence(Request(str(i), [1] * 30, SamplingParams()), 0.0, [1] * 30) for i in range(2))
    scheduler.add(first)
    for chunk in next_step(scheduler).prompts:
        chunk.seq.computed = chunk.start + chunk.num_tokens
    scheduler.add(blocked)
    for _ in range(10):
        next_step(scheduler)
    assert cache.opened == 2 and list(scheduler.waiting) == [blocked]
    first.paused = True
    next_step(scheduler)
    assert cache.opened == 3 and scheduler.running == [blocked], "a paused sequence gives way"
    scheduler.remove(blocked)
    first.paused = False
    next_step(scheduler)
    assert scheduler.running == [first]


def test_prompts_that_come_together_are_packed_and_change_nothing() -> None:
    """Chunks of several sequences in one pass, smaller ones beside those that decode: the tokens are those of each
    alone."""
    ops = CpuOps(threads=1)
    config = ModelConfig.from_hf(SHAPES["sliding"])
    model = ops.compile(TextModel(config, dummy_weights(config, "cpu", torch.float32, ops, None, seed=3), ops))
    settings = EngineConfig(max_batch=6, max_context=256, page_size=16, prefill_chunk=64, prefix_cache=False)
    rows: list[list[int]] = []

    def engine_of() -> Engine:
        return Engine(model, None, settings, SpecConfig(0), None, Controller(CostTable(), ()), KVOptions(torch.float16))

    engine = engine_of()
    engine.clock = engine.runner.clock = lambda: 0.0  # the budget of prompts stays what it is
    whole = engine.runner.run
    engine.runner.run = lambda scheduled: (rows.append([item.num_tokens for item in scheduled]), whole(scheduled))[1]  # type: ignore[method-assign]
    jobs = [
        request(str(i), [(7 * i + j) % 90 for j in range(n)], max_tokens=12)
        for i, n in enumerate((5, 9, 70, 3, 33, 130))
    ]
    got = run(engine, jobs)
    assert rows[0] == [4, 8, 64, 2] and max(map(sum, rows[1:])) == 16 and len(rows) < 20, rows
    assert sum(map(sum, rows)) == sum(len(r.prompt) - 1 for r in jobs)
    for job in jobs:
        assert got[job.id] == run(engine_of(), [job])[job.id]


def test_prompts_are_packed_only_as_far_as_rows_are_independent() -> None:
    engine = tiny_engine("llama", model=MODEL)
    passes: list[list[int]] = []
    engine.runner.run = lambda scheduled: passes.append([item.num_tokens for item in scheduled])  # type: ignore[method-assign]
    seq = Sequence(request("a", PROMPT), 0.0, list(PROMPT))
    scheduled = [PromptChunk(seq, 0, 0, n, False) for n in (30, 80, 20, 90, 10, 300, 40)]
    for rows, replay, want in (
        (0, 1 << 30, [[30], [80], [20], [90], [10], [300], [40]]),
        (120, 1 << 30, [[30, 80], [20, 90, 10], [300], [40]]),
        (1 << 30, 1 << 30, [[30, 80, 20, 90, 10, 300, 40]]),
        (200, 64, [[30, 20, 10, 40], [80, 90], [300]]),
    ):
        passes.clear()
        MODEL.ops.capabilities = Capabilities(independent_rows=rows, replay_rows=replay)
        try:
            engine.runner.prompts(scheduled)
        finally:
            del MODEL.ops.capabilities
        assert passes == want


def test_more_prompt_tokens_a_step_while_most_wait_for_theirs() -> None:
    def budgets(decoding: abc.Sequence[int], paused: int = 0, **how: int) -> list[int]:
        """So many of forty sequences decode; the others wait for their prompts, except paused ones."""
        return [PrefillBudget(512, **how).tokens(n, 40 - n - paused)[0] for n in decoding]

    assert budgets((0, 20, 32, 35, 36, 39), batched=2048) == [2048, 2048, 2048, 1024, 640, 640]
    crowd = budgets((0, 1, 20, 32, 33, 39), batched=2048, idle=8192)
    assert crowd == [8192, 8192, 8192, 8192, 2048, 640], "a fifth waits: its prompts are done in few large passes"
    assert budgets((2,), paused=38, batched=2048, idle=8192) == [640], "who is paused waits for no prompt"
    assert budgets((0, 39)) == [640, 640]


def test_a_paused_request_goes_on_where_it_was() -> None:
    """It takes no step while it is paused, an engine of paused ones is not busy, and the tokens are those of one never
    paused."""
    requests = [request(f"r{i}", [3 + i, 5, 7, 5, 7], temperature=0.8, seed=i) for i in range(3)]
    want = run(tiny_engine(), requests)
    engine = tiny_engine()
    got = {r.id: list[int]() for r in requests}

    def step() -> None:
        for event in engine.step():
            got[event.id] += event.tokens

    for r in requests:
        engine.submit(r)
    step()
    step()
    engine.pause("r1", True)
    before = len(got["r1"])
    while len(got["r0"]) < 24 or len(got["r2"]) < 24:
        step()
    assert len(got["r1"]) == before < 24 and not engine.busy
    engine.pause("r1", False)
    while engine.busy:
        step()
    engine.pause("r1", True)  # it has ended: nothing to pause
    engine.check()
    assert got == want


def test_beside_streams_prompts_come_in_small_pieces() -> None:
    scheduler = Scheduler(CountingCache(4, 10_000), 4, PrefillBudget(512, with_decodes=16), 16, 1 << 30, FixedDrafts())
    stream, long, short = (
        Sequence(Request(f"{n}", list(range(n)), SamplingParams(max_tokens=8)), 0.0, list(range(n)))
        for n in (2, 400, 10)
    )
    for seq in (stream, long, short):
        scheduler.add(seq)
    first = next_step(scheduler)
    assert [item.num_tokens for item in first.prompts] == [1, 399, 9]  # nobody waits: as much as fits
    stream.computed = 1
    counts = []
    while short.computed < 9:
        batch = next_step(scheduler)
        assert [item.seq for item in batch.decode] == [stream]
        counts.append([item.num_tokens for item in batch.prompts])
        for item in batch.prompts:
            item.seq.computed += item.num_tokens
    assert counts == [[8, 8], [1, 15]]  # sixteen in all: of the one that is soonest done, the rest of the oldest
    assert [item.num_tokens for item in next_step(scheduler).prompts] == [16]


def test_however_many_prompts_wait_streams_wait_no_longer() -> None:
    """Six of one client's come together: a step has as many rows of prompts as with one, and all of them are done in
    the end."""
    scheduler = Scheduler(CountingCache(8, 10_000), 8, PrefillBudget(512, with_decodes=16), 16, 1 << 30, FixedDrafts())
    stream, *many = (
        Sequence(Request(f"{n}", list(range(n)), SamplingParams(max_tokens=8)), 0.0, list(range(n)))
        for n in (2, *[40] * 6)
    )
    scheduler.add(stream)
    next_step(scheduler)
    stream.computed = 1
    for seq in many:
        scheduler.add(seq)
    steps = 0
    while any(seq.computed < 39 for seq in many):
        batch = next_step(scheduler)
        steps = steps + 1
        assert (
            stream in [item.seq for item in batch.decode] and 0 < sum(item.num_tokens for item in batch.prompts) <= 16
        )
        for item in batch.prompts:
            item.seq.computed += item.num_tokens
    assert steps == -(-6 * 39 // 16)


def test_images_of_others_leave_a_stream_its_share() -> None:
    """Three of 160 rows that may not be split, each with a line of text: one in a step, and the next when the steps
    between them have had fewer rows by as many. Texts do not wait for that."""
    scheduler = Scheduler(CountingCache(5, 10_000), 5, PrefillBudget(512, with_decodes=16), 16, 1 << 30, FixedDrafts())
    soft_spans = (SoftSpan(4, torch.zeros(160, 1), b"x", True),)
    stream, text, *seen = (
        Sequence(Request(f"{i}", [1] * n, SamplingParams(max_tokens=99), spans=spans), 0.0, [1] * n)
        for i, (n, spans) in enumerate([(2, ()), (99, ()), *[(170, soft_spans)] * 3])
    )
    scheduler.add(stream)
    next_step(scheduler)
    stream.computed = 1
    for seq in (text, *seen):
        scheduler.add(seq)
    rows: list[int] = []
    while any(seq.computed < len(seq.tokens) - 1 for seq in (text, *seen)):
        batch = next_step(scheduler)
        rows.append(sum(item.num_tokens for item in batch.prompts))
        for item in batch.prompts:
            item.seq.computed += item.num_tokens
            assert item.num_tokens in (160, min(16, item.num_tokens))
    large = [i for i, n in enumerate(rows) if n >= 160]
    assert len(large) == 3 and all(b - a >= 9 for a, b in pairwise(large)), rows
    assert max(rows) < 180 and sum(rows[large[0] + 1 : large[1]]) >= 60, "text goes on between them"


def test_a_server_s_prompts_come_in_pieces_even_where_nobody_decodes() -> None:
    engine = tiny_engine("llama", model=MODEL)
    engine.can = replace(engine.can, prompts_independent=True, prefill_idle=8)
    whole = run(engine, [request("a", list(range(3, 50)))])
    counts: list[int] = []
    prompts = engine.runner.prompts
    engine.runner.prompts = lambda scheduled: (
        counts.extend(item.num_tokens for item in scheduled),
        prompts(scheduled),
    )[1]  # type: ignore[method-assign]
    engine.serve()
    engine.store.prefix.clear()
    assert run(engine, [request("a", list(range(3, 50)))]) == whole and max(counts) == 8 and sum(counts) == 46


def test_the_controller_knows_of_those_whose_k_was_asked_for() -> None:
    engine = tiny_engine(k=None)
    seen: list[list[bool]] = []
    propose = engine.controller.propose
    engine.controller.propose = lambda views: seen.append([v.fixed for v in views]) or propose(views)  # type: ignore[method-assign, func-returns-value]
    run(engine, [request("free", [3, 5, 7]), replace(request("asked", [4, 5, 7]), draft_tokens=0)])
    assert [False, True] in seen


def test_a_request_runs_while_paused_ones_hold_all_slots() -> None:
    """It waited until one of them was read, however long that took."""
    requests = [request(f"r{i}", [3 + i, 5, 7, 5, 7], temperature=0.8, seed=i) for i in range(3)]
    want = run(tiny_engine(), requests)
    engine = tiny_engine(max_batch=2)
    got = {r.id: list[int]() for r in requests}
    for r in requests[:2]:
        engine.submit(r)

    def step() -> None:
        for event in engine.step():
            got[event.id] += event.tokens

    step()
    step()
    for r in requests[:2]:
        engine.pause(r.id, True)
    assert not engine.busy
    engine.submit(requests[2])
    while engine.busy:
        step()
    assert [len(got[r.id]) == 24 for r in requests] == [False, False, True]
    engine.pause("r1", False)
    while engine.busy:
        step()
    assert [len(got[r.id]) == 24 for r in requests] == [False, True, True], "r0 is still paused"
    engine.pause("r0", False)
    while engine.busy:
        step()
    engine.check()
    assert got == want


def test_a_seed_of_numpy_is_its_number() -> None:
    """It passes validation; inside a step its mask would overflow, and every request of the batch would fail."""
    want, got = (
        run(tiny_engine(), [request("a", [3, 4, 5], temperature=1.0, seed=seed)])["a"] for seed in (-7, np.int64(-7))
    )
    assert got == want


@pytest.mark.parametrize("scarce", ["pages", "slots"])
def test_a_paused_request_gives_way_to_others(scarce: str) -> None:
    """It kept its pages while another waited for them: the engine was busy, and thousands of steps did nothing."""
    limits = {"pages": {"kv_tokens": 60, "max_context": 56}, "slots": {"max_batch": 1}}[scarce]
    requests = [request(name, [3 + i] * 20, temperature=0.8, seed=i) for i, name in enumerate(("paused", "other"))]
    want = run(tiny_engine(prefix_cache=False), requests)
    engine = tiny_engine(prefix_cache=False, **limits)
    got = {r.id: list[int]() for r in requests}

    def step() -> bool:
        events = engine.step()
        for event in events:
            got[event.id] += event.tokens
        return bool(events)

    engine.submit(requests[0])
    while len(got["paused"]) < 4:
        step()
    engine.pause("paused", True)
    engine.submit(requests[1])
    empty = 0
    while engine.busy and empty < 50:
        empty = 0 if step() else empty + 1
    assert len(got["other"]) == 24 and not engine.busy, "it waits for a paused request"
    engine.pause("paused", False)
    while engine.busy:
        step()
        engine.check()
    assert got == want


def test_a_discarded_plan_costs_the_controller_nothing() -> None:
    """A step scheduled before the one in flight was read is scheduled again. Each plan was booked: probes, seconds."""
    engine = tiny_engine("llama", model=MODEL, k=None, graphs=True)
    controller = engine.controller
    graphs = engine.executors[0]
    plan_of = graphs.plan
    steps = 0
    proposals = 0
    propose = controller.propose

    def sometimes(batch: StepBatch) -> Any:
        nonlocal steps
        steps += 1
        return None if steps % 3 == 0 else plan_of(batch)

    def counted(seqs: Any) -> Any:
        nonlocal proposals
        proposals += 1
        return propose(seqs)

    graphs.plan = sometimes  # type: ignore[method-assign]
    controller.propose = counted  # type: ignore[method-assign]
    got = run(engine, [request("a", PROMPT, max_tokens=40)])
    assert got == run(tiny_engine("llama", model=MODEL), [request("a", PROMPT, max_tokens=40)])
    cycles = engine.metrics.cycles
    assert proposals > cycles, "no plan was discarded"
    plain = controller.cost.curve(None, 1, 20)[0]
    assert controller._time == pytest.approx(cycles * plain, rel=0.3), "more cycles are booked than ran"
