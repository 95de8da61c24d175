"""The captured steps of a server: what it has before the first request comes, and what runs in which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.engines import mtp_drafter, request, run, run_joining, tiny_engine, tiny_model

from outrider.engine import capture, graph_dispatch
from outrider.engine.decode import Key
from outrider.engine.engine import Engine, Reporter
from outrider.engine.graph_dispatch import GraphLimits, cheapest_covering, covers, first_keys, padded, warmup_keys
from outrider.engine.graphs import GraphExecutor
from outrider.engine.prefill_graphs import PrefillKey
from outrider.spec.slot_sampling import SamplingFeatures

PLAIN = Key(8, 0, 1024, "greedy", None)
DRAFTED = Key(8, 4, 1024, "sampled", "drafter")
LIMITS = GraphLimits(batch=256, context=32768, rows=2048)
PROMPT = [3, 5, 7, 9, 11, 3, 5, 7, 9, 13, 2, 40, 41, 3, 5]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("dense")


def served(model: Any, **config: Any) -> tuple[Engine, GraphExecutor]:
    engine = tiny_engine("dense", mtp_drafter(model, "dense"), model=model, graphs=True, **config)
    executor = engine.executors[0]
    assert isinstance(executor, GraphExecutor)
    return engine, executor


def test_a_step_runs_in_a_graph_that_does_all_of_it() -> None:
    assert covers(PLAIN, PLAIN) and covers(replace(PLAIN, batch=64, context=2048, choosing="sort"), PLAIN)
    for less in (dict(batch=4), dict(context=512)):
        assert not covers(replace(PLAIN, **less), PLAIN)
    assert not covers(PLAIN, replace(PLAIN, choosing="sampled"))
    assert (
        covers(replace(DRAFTED, k=6), DRAFTED)
        and not covers(DRAFTED, replace(DRAFTED, k=6))
        and not covers(DRAFTED, replace(DRAFTED, k=0))
    )
    assert not covers(replace(DRAFTED, k=6, nodes=7), replace(DRAFTED, nodes=7)), "how deep a tree is makes it another"
    for other in (dict(source="host"), dict(asks=SamplingFeatures(logprobs=5)), dict(nodes=7), dict(part="draft")):
        assert not covers(replace(DRAFTED, **other), DRAFTED) and not covers(DRAFTED, replace(DRAFTED, **other))
    there = [
        replace(PLAIN, batch=b, choosing=c, context=n) for b in (8, 16) for c in ("greedy", "sort") for n in (512, 2048)
    ]
    assert cheapest_covering(there, replace(PLAIN, batch=5)) == replace(PLAIN, context=2048)
    assert cheapest_covering(there, replace(PLAIN, choosing="sampled")) == replace(PLAIN, context=2048, choosing="sort")
    assert cheapest_covering(there, replace(PLAIN, batch=24)) is None


def test_what_is_captured_beside_requests_has_room_to_spare() -> None:
    assert padded(PLAIN, LIMITS) == replace(PLAIN, context=2048)
    assert padded(replace(PLAIN, batch=24, context=4096), LIMITS) == replace(PLAIN, batch=32, context=8192)
    assert padded(replace(PLAIN, batch=96), GraphLimits(96, 1024, 2048)) == replace(PLAIN, batch=96), (
        "no more than there can be"
    )
    assert padded(replace(DRAFTED, batch=192, k=8), LIMITS).batch == 192, "nor more rows than a step may have"


def test_the_last_tokens_of_an_answer_need_no_graphs_of_their_own() -> None:
    """64 prompts with K = 4: each number of sequences was captured with K = 4, 3, 2 and 1, some in every run."""
    drafted = replace(DRAFTED, context=2048)
    k = {k: padded(replace(drafted, k=k), LIMITS, 16).k for k in (1, 3, 4, 5, 6, 9, 16)}
    assert k == {1: 4, 3: 4, 4: 4, 5: 8, 6: 8, 9: 16, 16: 16}
    assert padded(replace(drafted, k=6), LIMITS, 7).k == 6, "a block of 7 drafts no 8"
    assert padded(replace(drafted, k=6, batch=256), LIMITS, 16).k == 6, "8 would be too many rows"
    assert padded(replace(drafted, k=6), LIMITS).k == 6


def test_trees_get_a_longer_context_as_far_as_memory_allows() -> None:
    """Attention keeps sums of every row of a tree by pieces of the context: with room to spare it could take all
    memory. A single sequence's context doubled every few steps, and each was a capture."""
    tree = replace(DRAFTED, batch=3, context=65536, nodes=8)
    assert padded(tree, GraphLimits(256, 1 << 18, 2048), 16) == tree
    assert padded(replace(tree, context=512), GraphLimits(256, 1 << 18, 2048), 16) == replace(tree, context=2048)


def test_a_tree_runs_as_a_chain_until_it_is_wanted_often(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_dispatch, "OFTEN_STEPS", 3)
    executor = served(model, max_batch=4)[1]
    executor.prepare()
    before = set(executor.decode_graphs.cache.graphs)
    tree = replace(DRAFTED, batch=1, k=4, context=512, choosing="greedy", nodes=7)
    assert [executor.dispatcher.dispatch(tree).nodes for _ in range(3)] == [0, 0, 0] and set(
        executor.decode_graphs.cache.graphs
    ) == before
    assert executor.dispatcher.dispatch(tree) == replace(tree, context=executor.dispatcher.limits.context)
    assert len(executor.decode_graphs.cache.graphs) == len(before) + 1
    executor.dispatcher.dispatch(tree)
    assert len(executor.decode_graphs.cache.graphs) == len(before) + 1, "once"


def test_the_same_request_again_waits_for_no_capture(model: Any) -> None:
    """The second identical request waited for a second: its prompt was cached but for some rows, its K another."""
    engine, executor = served(model, max_batch=8)
    lines: list[str] = []
    engine.device = Card()  # type: ignore[assignment]
    engine.warm_up(lines.append)
    engine.device = executor.device
    assert len(lines) == 1 and "captured in" in lines[0]
    near = {key for key in executor.decode_graphs.cache.graphs}
    assert {key.batch for key in near} == {1, 8} and {key.k for key in near} == {0, 4}
    jobs = [request(str(i), [*PROMPT[:5], i], k=4, max_tokens=7) for i in range(5)]
    alone = run(tiny_engine("dense", model=model), jobs)
    for batch in (jobs[:1], jobs[:1], jobs):
        assert run(engine, batch) == {job.id: alone[job.id] for job in batch}
    assert set(executor.decode_graphs.cache.graphs) == near


@pytest.mark.parametrize("served_requests", [False, True])
def test_what_the_controller_chooses_for_one_sequence_is_captured_ahead(model: Any, served_requests: bool) -> None:
    """The first tree on a machine was compiled in the middle of a request: 3.4 s, and 4.5 s with random choices."""
    engine, executor = served(model, max_batch=8, k=None)
    executor.prepare(served=served_requests)
    keys = set(executor.decode_graphs.cache.graphs)
    trees = {(key.k, key.choosing, key.nodes) for key in keys if key.nodes}
    assert trees == {(k, way, 15) for k in (6, 8) for way in ("greedy", "sampled")}
    assert {key.k for key in keys if key.batch == 1} == {0, 4, 6, 8, 16} and {
        key.k for key in keys if key.batch > 1
    } == {0, 4}
    job = request("0", PROMPT[:5], k=16, max_tokens=40)
    assert run(engine, [job]) == run(tiny_engine("dense", model=model), [job])
    assert set(executor.decode_graphs.cache.graphs) == keys


def test_without_trees_none_is_captured_ahead(model: Any) -> None:
    _, executor = served(model, max_batch=8, k=None)
    executor.dispatcher.trees = False
    executor.prepare(served=False)
    assert not any(key.nodes for key in executor.decode_graphs.cache.graphs)


def test_attention_is_compiled_before_the_first_capture(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first start compiled attention kernel by kernel in its captures: 11 of 24 seconds."""
    _, executor = served(model, max_batch=8, k=None)
    specs = {replace(layer.attn, kv_layer=0) for layer in model.config.layers}
    steps: list[tuple[int, int, int, int]] = []

    def compile_attention(kinds: Any, views: Any, dtype: Any, progress: Any) -> int:
        assert not executor.decode_graphs.cache.graphs and len(kinds) == len(specs)
        for view in views:
            depth = 0 if view.ancestors is None else view.ancestors.shape[1] - 1
            steps.append((len(view.row_start) - 1, view.max_rows, view.max_context, depth))
            assert len(view.positions) == len(view.row_seq) == steps[-1][0] * view.max_rows
        progress(1, 2)
        return 2

    monkeypatch.setattr(model.ops, "compile_attention", compile_attention)
    stages: list[str] = []
    executor.prepare(served=False, progress=lambda what, done, total: stages.append(what))
    keys = executor.decode_graphs.cache.graphs
    assert set(steps) == {(key.batch, key.drafted + 1, key.context, key.k if key.nodes else 0) for key in keys}
    assert stages[0].startswith("compiling kernels") and stages[-1] == "capturing steps and passes"
    monkeypatch.setattr(model.ops, "compile_attention", lambda *_, **__: 1 / 0)
    executor.close()
    executor.prepare(served=False)
    assert executor.decode_graphs.cache.graphs, "without it captures compile"


class Card:
    """A device that says that it is a GPU."""

    type = "cuda"
    index = None


def test_progress_is_told_every_few_seconds() -> None:
    now = [0.0]
    lines: list[str] = []
    report = Reporter(lines.append, lambda: now[0])
    for done in range(11):
        report("steps", done, 10)
        now[0] += 0.5
    assert lines == ["steps: 4 of 10", "steps: 8 of 10"]


def test_a_step_during_which_a_graph_was_captured_has_no_time(model: Any) -> None:
    """Captures of half a second made prompts beside decoding look slow, and so they got the least tokens."""
    engine, _ = served(model, max_batch=4)
    seen: list[int] = []
    engine.prefill.observe = lambda rows, seconds: seen.append(engine.metrics.steps)  # type: ignore[method-assign]
    counts = []
    for _ in range(2):  # the second request joins the first: two sequences are another graph
        seen.clear()
        run_joining(
            engine, [(0, request("a", PROMPT, k=0, max_tokens=8)), (4, request("b", PROMPT, k=0, max_tokens=8))]
        )
        counts.append(len(seen))
    assert counts[0] < counts[1]


@pytest.mark.parametrize("k", [1, 3])
def test_a_graph_of_more_drafts_has_room_for_their_keys(model: Any, monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """A line of one draft ran in a graph of four just before the graph's context ended, and K/V of the others went past
    its table."""
    monkeypatch.setattr(graph_dispatch, "NEAR_CONTEXT", 512)
    engine, executor = served(model, max_batch=2, max_context=1024)
    executor.prepare()
    prompts = [[(7 * i * i + 3 * i) % 40 + 3 for i in range(length)] for length in (498, 505)]
    jobs = [request(str(i), prompt, k=k, max_tokens=20) for i, prompt in enumerate(prompts)]
    plain = tiny_engine("dense", model=model, max_context=1024)
    assert all(run(engine, [job]) == run(plain, [replace(job, draft_tokens=0)]) for job in jobs)
    assert {key.k for key in executor.decode_graphs.cache.graphs} == {0, 4}


def refuse(executor: GraphExecutor, when: Callable[[Key], bool]) -> Any:
    """Makes the graphs of these keys fail for lack of GPU memory. Returns the original capture."""
    capture = executor.decode_graphs.cache.capture

    def some(key: Key, fn: Any, strict: bool) -> Any:
        if not when(key):
            return capture(key, fn, strict)
        executor.decode_graphs.cache.refused.add(key)
        return "RuntimeError: out of memory"

    executor.decode_graphs.cache.capture = some  # type: ignore[method-assign]
    return capture


def test_widths_are_those_of_steps(model: Any) -> None:
    """`--draft-tokens 5`: steps have six, a limit leaves one out; graphs of five would serve nobody."""
    runner = served(model)[1].runner
    assert GraphExecutor(runner, runner.model.ops.capabilities, widths=(0, 5)).dispatcher.warmup_widths == (0, 6)


def test_a_server_is_ready_for_every_number_of_sequences() -> None:
    keys = warmup_keys(LIMITS, (0, 4))
    assert len(keys) == len(set(keys)) <= 56
    rows = [key.batch * (key.k + 1) for key in keys]
    assert rows == sorted(rows, reverse=True), "the largest first"
    for batch in range(1, 257):
        for wanted in (PLAIN, replace(PLAIN, choosing="sampled"), DRAFTED, replace(DRAFTED, choosing="greedy")):
            assert cheapest_covering(keys, replace(wanted, batch=batch)) is not None
    assert cheapest_covering(keys, replace(DRAFTED, batch=16, context=8192)) is not None
    assert max(key.context for key in warmup_keys(GraphLimits(72, 512, 2048), (0,))) == 512
    assert {key.batch for key in warmup_keys(GraphLimits(96, 512, 2048), (0, 0))} == {1, 2, 4, 8, 16, 32, 64, 96}


def test_a_model_that_advises_filters_has_their_graphs() -> None:
    """Gemma's own temperature 1, top-k 64 and top-p 0.95: every first chat captured its steps."""
    plain = warmup_keys(LIMITS, (0, 4))
    advised = warmup_keys(LIMITS, (0, 4), advised="head 64")
    more = set(advised) - set(plain)
    assert set(plain) < set(advised) and {(key.choosing, key.context) for key in more} == {("head 64", 2048)}
    assert {(key.batch, key.k) for key in more} == {(b, k) for b in (1, 2, 4, 8, 16, 32) for k in (0, 4)}
    assert warmup_keys(LIMITS, (0, 4), advised="sampled") == plain
    few = first_keys(LIMITS, (0, 4), advised="head 64")
    ways = ("greedy", "sampled", "head 64")
    assert {(key.batch, key.k, key.choosing) for key in few} == {
        (b, k, w) for b in (1, 8) for k in (0, 4) for w in ways
    }


def test_nobody_waits_for_a_capture(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first requests of a server joined one by one, and each new number of sequences was captured while they
    waited."""
    engine, executor = served(model, max_batch=12)
    said = executor.prepare()
    before = set(executor.decode_graphs.cache.graphs)
    assert f"{len(before)} steps and " in said and executor.dispatcher.serving
    jobs = [request(str(i), [*PROMPT, i], k=4, max_tokens=9, temperature=float(i % 2)) for i in range(12)]
    alone = [run(tiny_engine("dense", model=model), [job])[job.id] for job in jobs]
    got: dict[str, list[int]] = {job.id: [] for job in jobs}
    waiting = list(jobs)
    while waiting or engine.busy:
        if waiting:
            engine.submit(waiting.pop(0))
        for event in engine.step():
            got[event.id] += event.tokens
    assert set(executor.decode_graphs.cache.graphs) == before
    assert list(got.values()) == alone
    for _ in range(2):
        run(engine, [request("a", PROMPT, k=4, max_tokens=4, logprobs=2)])
        new = set(executor.decode_graphs.cache.graphs) - before
        assert {(key.batch, key.k, key.asks.logprobs) for key in new} <= {(1, 4, 5), (1, 0, 5)}
    monkeypatch.setattr(graph_dispatch, "OFTEN_STEPS", 8)
    run(engine, [request(str(i), PROMPT, k=2, max_tokens=30, temperature=1.0) for i in range(3)])
    assert any(key.k == 2 for key in executor.decode_graphs.cache.graphs), "what is wanted again and again has its own"


def test_a_steady_number_of_sequences_gets_its_own_graph(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """17 to 24 of them would have run in the graph of 32 for ever."""
    monkeypatch.setattr(graph_dispatch, "OFTEN_STEPS", 4)
    engine, executor = served(model, max_batch=40)
    executor.prepare()
    jobs = [request(str(i), [3 + i], k=0, max_tokens=9) for i in range(18)]
    got = run(engine, jobs)
    assert {key.batch for key in executor.decode_graphs.cache.graphs if key.batch not in graph_dispatch.BATCHES} == {
        24,
        48,
    }, "48 is all that there can be"
    assert all(got[job.id] == run(tiny_engine("dense", model=model), [job])[job.id] for job in jobs[:3])
    executor.dispatcher._stand_ins = {}
    executor.decode_graphs.cache.graphs = {
        key: made for key, made in executor.decode_graphs.cache.graphs.items() if key.batch != 24
    }
    refuse(executor, lambda key: key.batch == 24)
    assert run(engine, jobs) == got and executor.decode_graphs.broken is None, "it is done without"


def test_a_step_without_room_to_spare_has_its_own_graph(model: Any) -> None:
    """After the roomy graph failed, steps with logprobs were launched for ever though their own would have fitted."""
    _, executor = served(model, max_batch=12)
    executor.prepare()
    refuse(executor, lambda key: key.asks.logprobs >= 0 and key.batch > 3)
    wanted = replace(PLAIN, batch=3, context=512, asks=SamplingFeatures(logprobs=5))
    assert (
        executor.dispatcher.dispatch(wanted) == wanted
        and executor.decode_graphs.broken is None
        and executor.decode_graphs.capture(wanted)
    )


def test_what_cannot_be_captured_ahead_is_done_without(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine, executor = served(model, max_batch=12)
    most = 20
    capture = refuse(executor, lambda key: key.batch * (key.k + 1) > most)
    executor.prepare()
    assert (
        executor.decode_graphs.broken is None
        and executor.decode_graphs.cache.graphs
        and executor.decode_graphs.cache.refused
    )
    assert all(key.batch * (key.k + 1) > most for key in executor.decode_graphs.cache.refused)
    executor.decode_graphs.cache.capture = capture  # type: ignore[method-assign]
    jobs = [request(str(i), [*PROMPT, i], k=4, max_tokens=6) for i in range(12)]
    got = run(engine, jobs)
    assert all(got[job.id] == run(tiny_engine("dense", model=model), [job])[job.id] for job in jobs)
    nothing = served(model, max_batch=12)[1]
    refuse(nothing, lambda key: True)
    nothing.prepare()
    assert nothing.decode_graphs.broken and len(caplog.records) == 2, "a line each time"


def test_no_process_of_a_team_goes_its_own_way(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that could not capture ran the step launched while the others captured: they waited for one another for
    ever."""

    class Pretended:
        type = "cuda"

    def graph(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    passed = served(model)[1].prefill_graphs
    key = PrefillKey(64, 8, 512, False)
    monkeypatch.setattr(capture, "Graph", graph)
    monkeypatch.setattr(passed, "_write_inputs", lambda scheduled, key: None)
    passed.cache.device = Pretended()  # type: ignore[assignment]
    passed.runner.divided = True  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="out of memory"):
        passed.capture(key)
    passed.runner.divided = False
    assert passed.capture(key) is None, "one alone launches what it cannot capture"
