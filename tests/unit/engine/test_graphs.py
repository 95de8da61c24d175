"""Cycles that are launched before the last one was read: the captured function itself, run eagerly on the CPU.

The same engine code drives CUDA graphs; here a replay is a call. Texts must be those of the eager engine, whoever
joins, leaves, is pre-empted or stops in between.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.engines import VOCAB, mtp_drafter, request, run, tiny_engine, tiny_model

from outrider.engine.capture import Graph
from outrider.engine.decode import Key, choosing_of
from outrider.engine.decode_graphs import DecodeGraphs
from outrider.engine.engine import Engine
from outrider.engine.graph_dispatch import GraphDispatcher
from outrider.engine.graphs import GraphExecutor
from outrider.engine.step import DecodeRow, Request
from outrider.ops.backend import Capabilities
from outrider.spec.drafter import Drafter
from outrider.spec.plan import VERIFY, CostPart
from outrider.spec.slot_sampling import NO_FEATURES, SamplingFeatures
from outrider.types import MAX_DRAFT, DraftPlan, SamplingParams

MODELS = {name: tiny_model(name) for name in ("dense", "edge", "moe", "llama")}
PROMPT = [3, 5, 7, 9, 11, 3, 5, 7, 9, 13, 2, 40, 41, 3, 5]


def engines(variant: str, clustered: bool = False, **config: Any) -> Engine:
    drafter = mtp_drafter(MODELS[variant], variant, clustered) if variant != "llama" else None
    return tiny_engine(variant, drafter, model=MODELS[variant], graphs=True, **config)


def alone(variant: str, r: Request) -> list[int]:
    return run(tiny_engine(variant, model=MODELS[variant]), [Request("alone", r.prompt, r.params, 0, False)])["alone"]


def graphs_of(engine: Engine) -> GraphExecutor:
    executor = engine.executors[0]
    assert isinstance(executor, GraphExecutor)
    return executor


def test_it_is_for_gpus() -> None:
    assert [e.name for e in tiny_engine("llama", model=MODELS["llama"]).executors] == ["eager"]
    can = Capabilities()
    assert can.graph_widths[-1] == MAX_DRAFT and can.graph_batches[-1] >= 256 and can.bucket(17) == 24


def test_a_step_never_grows_beyond_the_rows_that_are_independent() -> None:
    """Equal text in any batch was promised, and ended silently at 272 rows."""
    can = Capabilities(independent_rows=272)
    assert [can.widest(n, True) for n in (1, 16, 17, 64, 256)] == [16, 16, 8, 3, 0]
    assert [can.widest(n, False) for n in (16, 17, 64)] == [16, 15, 3]
    assert Capabilities().widest(256, False) >= MAX_DRAFT
    engine = tiny_engine("llama", model=MODELS["llama"], max_batch=16)
    engine.can = Capabilities(independent_rows=48)
    rows: list[int] = []
    eager = engine.executors[-1]
    launch = eager.launch
    eager.launch = lambda plan: (rows.append(sum(item.plan.k + 1 for item in plan.batch.decode)), launch(plan))[1]  # type: ignore[method-assign]
    jobs = [request(str(i), [4, 5, 6, 7] * 4 + [i], k=8, max_tokens=20) for i in range(16)]
    got = run(engine, jobs)
    assert 16 < max(rows) <= 48
    assert all(got[r.id] == alone("llama", r) for r in jobs)


def test_cycles_overlap_and_the_last_one_is_dropped() -> None:
    """A step returns what the launch before it did. A stop token is seen one cycle late; what came after it is not
    emitted."""
    engine = engines("dense")
    want = alone("dense", request("a", PROMPT, max_tokens=30))
    stop = want[9]
    engine.submit(request("a", PROMPT, k=2, max_tokens=30, stop_token_ids=(stop,)))
    launches = 0
    got = []
    while engine.busy:
        before = engine._in_flight
        got += [t for e in engine.step() for t in e.tokens]
        launches += engine._in_flight is not None and engine._in_flight is not before
    assert got == want[: want.index(stop) + 1]
    assert launches == engine.metrics.cycles + 1, "one cycle too many was launched, and it was not counted"
    engine.check()


def test_no_cycle_is_wasted_on_an_answer_of_known_length() -> None:
    engine = engines("dense")
    engine.submit(request("a", PROMPT, k=0, max_tokens=7))
    launches = 0
    while engine.busy:
        before = engine._in_flight
        engine.step()
        launches += engine._in_flight is not None and engine._in_flight is not before
    assert launches == 7


class Thirds:
    """A grammar: the n-th token must leave the rest n when divided by three, but for token 2, which may always come."""

    def matcher(self) -> Thirds:
        return Thirds()

    def __init__(self) -> None:
        self.failed: str | None = None
        self.taken = 0

    def allows(self, token: int, n: int) -> bool:
        return token == 2 or token % 3 == n % 3

    def masks(self, drafts: Any) -> tuple[np.ndarray, int]:
        valid = next((i for i, t in enumerate(drafts) if not self.allows(t, self.taken + i)), len(drafts))
        rows = np.ones((len(drafts) + 1, VOCAB), dtype=bool)
        for i in range(valid + 1):
            rows[i] = [self.allows(t, self.taken + i) for t in range(VOCAB)]
        return rows, valid

    def bits(self, drafts: Any) -> np.ndarray:
        return np.packbits(self.masks(drafts)[0], axis=1, bitorder="little").view(np.int32)

    def advance(self, tokens: Any) -> None:
        assert all(self.allows(t, self.taken + i) for i, t in enumerate(tokens)), (
            "a token outside the grammar was emitted"
        )
        self.taken += len(tokens)


def test_the_context_fills_to_its_end() -> None:
    """In pending cycles must not write past the table, nor ask for pages that can never be had."""
    eager = tiny_engine("dense", model=MODELS["dense"], max_context=64, kv_tokens=72)
    want = run(eager, [request("b", PROMPT, k=0, drafter=False, max_tokens=500)])["b"]
    for k in (0, 3, 16):
        engine = engines("dense", max_context=64, kv_tokens=72, max_batch=2)
        assert run(engine, [request("a", PROMPT, k=k, max_tokens=500)])["a"] == want
        assert engine.scheduler.preemptions == 0


def test_ngram_drafts_go_through_a_graph_too() -> None:
    engine = engines("llama")
    r = request("a", [4, 5, 6, 7] * 6, k=4, max_tokens=40)
    assert run(engine, [r])["a"] == alone("llama", r)
    assert any(key.source == "host" for key in graphs_of(engine).decode_graphs.cache.graphs)


@pytest.mark.parametrize("k", [0, 4])
def test_logprobs_of_a_graph_are_those_of_the_eager_cycle(k: int) -> None:
    def rows(engine: Engine) -> list[dict[int, float]]:
        engine.submit(request("a", PROMPT, k=k, logprobs=3, temperature=0.8, seed=4))
        return [row for _ in iter(lambda: engine.busy, False) for e in engine.step() for row in e.logprobs or ()]

    ours = rows(engines("dense"))
    want = rows(tiny_engine("dense", mtp_drafter(MODELS["dense"], "dense"), model=MODELS["dense"]))
    assert len(ours) == 24 and [list(r) for r in ours] == [list(r) for r in want]
    assert all(abs(a[t] - b[t]) < 1e-4 for a, b in zip(ours, want) for t in a)


def test_what_a_batch_asks_for() -> None:
    plain = SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.1, seed=3, stop_token_ids=(4,))
    assert not plain.processed and not plain.temperature_only and SamplingFeatures.of([plain], 1) == NO_FEATURES
    for n, likely in ((0, 0), (3, 5), (20, 20)):
        params = SamplingParams(logprobs=n)
        assert (
            params.processed
            and params.temperature_only
            and SamplingFeatures.of([plain, params], 1) == SamplingFeatures(logprobs=likely)
        )
    for p, want in (
        (SamplingParams(repetition_penalty=1.1), SamplingFeatures(penalties=True)),
        (SamplingParams(presence_penalty=0.1), SamplingFeatures(penalties=True)),
        (SamplingParams(frequency_penalty=0.1), SamplingFeatures(penalties=True)),
        (SamplingParams(logit_bias={1: 1.0, 2: 1.0, 3: 0.5}), SamplingFeatures(bias=4)),
        (SamplingParams(bad_words=((1,), (1, 2, 3))), SamplingFeatures(words=2, reach=2)),
        (SamplingParams(min_tokens=1), SamplingFeatures(stops=1)),
        (SamplingParams(grammar=Thirds()), SamplingFeatures(grammar=True)),
    ):  # fmt: skip
        assert p.processed and not p.temperature_only and SamplingFeatures.of([plain, p], 1) == want


def test_how_candidates_are_found() -> None:
    sampled = {"temperature": 1.0}
    assert choosing_of([SamplingParams(top_k=5)]) == "greedy"
    assert choosing_of([SamplingParams(), SamplingParams(**sampled)]) == "sampled"
    assert choosing_of([SamplingParams(**sampled, top_k=64, top_p=0.9)]) == "head 64"
    assert choosing_of([SamplingParams(**sampled, min_p=0.1)]) == "head 64"
    assert choosing_of([SamplingParams(**sampled, top_k=65)]) == "head 1024"
    assert choosing_of([SamplingParams(**sampled, top_p=0.9), SamplingParams(**sampled, top_k=5)]) == "sort"
    assert choosing_of([SamplingParams(**sampled, top_k=5000)]) == "sort"


def test_a_failing_capture_leaves_the_eager_cycle(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines("dense")
    calls = 0

    def fail(self: DecodeGraphs, key: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < 4:
            return capture(self, key)
        self.broken = "no memory"
        return None

    capture = DecodeGraphs.capture
    monkeypatch.setattr(DecodeGraphs, "capture", fail)
    r = request("a", PROMPT, k=3)
    assert run(engine, [r])["a"] == alone("dense", r)
    assert calls == 4


def test_a_special_graph_that_cannot_be_captured_does_not_end_the_others() -> None:
    """Steps with it are eager, back and forth with the graphs of the others; the texts are the same."""
    engine = engines("dense")
    executor = graphs_of(engine)
    jobs = [
        request("a", PROMPT, k=2, max_tokens=30),
        request("b", PROMPT[3:], k=2, max_tokens=9, repetition_penalty=1.3),
    ]
    jobs.append(request("c", PROMPT[5:], k=0, max_tokens=6, frequency_penalty=0.5))
    capture = executor.decode_graphs.capture

    def some(key: Key, optional: bool = False) -> Any:
        if key.asks.penalties and key.batch in (1, 2):
            executor.decode_graphs.cache.refused.add(key)
        return capture(key, optional)

    executor.decode_graphs.capture = some  # type: ignore[method-assign]
    got = run(engine, jobs)
    assert (
        executor.decode_graphs.cache.refused
        and executor.decode_graphs.cache.graphs
        and executor.decode_graphs.broken is None
    )
    assert all(got[r.id] == alone("dense", r) for r in jobs)


def test_probes_leave_the_sequences_alone() -> None:
    engine = engines("dense")
    r = request("a", PROMPT, k=2)
    engine.submit(r)
    got = [t for _ in range(3) for e in engine.step() for t in e.tokens]
    for part in (VERIFY, CostPart("draft", "mtp")):
        graphs_of(engine).probe(part, 2, 4, 100)
    while engine.busy:
        got += [t for e in engine.step() for t in e.tokens]
    assert got == alone("dense", r)


def test_a_graph_without_a_gpu_is_the_function() -> None:
    seen: list[int] = []
    graph = Graph(lambda: seen.append(1) or len(seen), torch.device("cpu"))
    graph.replay()
    graph.replay()
    assert graph.result == 2 and len(seen) == 2


@pytest.mark.parametrize("asked, nodes", [((16,), 15), ((8,), 7), ((5,), 0), ((16, 8), 7), ((16, 0), 0)])
def test_a_captured_tree_has_no_more_rows_than_each_sequence_has_pages_for(asked: tuple[int, ...], nodes: int) -> None:
    """Rows beyond what was reserved would lie on the scratch page, which neighbours write too."""

    class Wide(Drafter):
        def max_nodes(self, depth: int) -> int:
            return 99

    dispatcher = object.__new__(GraphDispatcher)
    dispatcher.drafter = Wide()
    dispatcher.names = (None,)
    dispatcher.trees = True
    scheduled = [DecodeRow(None, i, 10, plan=DraftPlan("mtp", 3, nodes=n)) for i, n in enumerate(asked)]  # type: ignore[arg-type]
    assert dispatcher.tree_nodes(scheduled, 3, 20) == nodes
    plain = DecodeRow(None, 9, 10)  # type: ignore[arg-type]  who drafts nothing takes no part in it
    assert dispatcher.tree_nodes([*scheduled, plain], 3, 20) == nodes
