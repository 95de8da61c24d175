"""PrefillGraphs over prompts as they are captured, run as functions on the CPU: the bits of passes that nothing was
added to."""

from __future__ import annotations

import gc
import random
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.engines import VOCAB, mtp_drafter, request, run, tiny_engine, tiny_model

from outrider.engine import capture, prefill_graphs
from outrider.engine.engine import Engine
from outrider.engine.graphs import GraphExecutor
from outrider.engine.prefill_budget import CAPTURED_ROWS, WARMUP_ROWS, max_packed_rows, max_prefill_rows
from outrider.engine.prefill_graphs import PrefillKey, warmup_keys
from outrider.models.builtin_configs import BUILTIN_CONFIGS
from outrider.models.config import ModelConfig
from outrider.ops.backend import Capabilities
from outrider.ops.cpu.ops import CpuOps

LENGTHS = (3, 40, 1, 17, 70, 16, 33)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    ops = CpuOps(threads=1)
    return {name: tiny_model(name, ops=ops) for name in ("edge", "moe", "llama")}


def captured(engine: Engine) -> prefill_graphs.PrefillGraphs:
    executor = engine.executors[0]
    assert isinstance(executor, GraphExecutor)
    return executor.prefill_graphs


@pytest.mark.parametrize("variant", ["edge", "moe", "llama"])
def test_a_captured_pass_leaves_the_bits_of_any_other(
    variant: str, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_graphs, "NEAR_PREFILL", 32)  # so that both bounds are met
    rng = random.Random(1)
    left = []
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in LENGTHS]
    for graphs in (False, True):
        drafter = mtp_drafter(models[variant], variant) if variant != "llama" else None
        engine = tiny_engine(variant, drafter, model=models[variant], graphs=graphs, prefill_chunk=24)
        jobs = [request(str(i), prompt, k=2, max_tokens=6) for i, prompt in enumerate(prompts)]
        for job in jobs:
            engine.submit(job)
        engine.runner.features.zero_()
        engine.prefill.with_decodes = 0  # whole chunks
        while any(seq.computed < len(seq.tokens) - 1 for seq in engine._seqs.values()):
            batch = engine.scheduler.schedule().batch
            engine.runner.prompts(batch.prompts, captured(engine).run if graphs else None)
            for item in batch.prompts:
                item.seq.computed = item.start + item.num_tokens
        engine.store.flush()
        seen: list[Any] = [engine.runner.features[:-1].clone()]
        for slot, prompt in enumerate(prompts):
            for group, table in engine.store.tables.items():
                pages = table[slot, : -(-(len(prompt) - 1) // 4)].long()
                layers = models[variant].config.layers
                full_keys = [
                    k for layer, k in zip(layers, engine.store.keys) if k is not None and layer.attn.group == group
                ]
                seen += [keys[pages].clone() for keys in full_keys]
        left.append(seen)
        if graphs:
            keys = captured(engine).cache.graphs
            assert {key.context for key in keys} == {32, captured(engine).furthest} and len(
                {key.rows for key in keys}
            ) > 1
    assert all(torch.equal(a, b) for a, b in zip(*left)) and len(left[0]) == len(left[1])


def test_texts_are_the_same_through_captured_passes(models: dict[str, Any]) -> None:
    jobs = [request(str(i), [(7 * i + j) % VOCAB for j in range(n)], k=2, max_tokens=8) for i, n in enumerate(LENGTHS)]
    texts = [
        run(tiny_engine("edge", mtp_drafter(models["edge"], "edge"), model=models["edge"], graphs=g), jobs)
        for g in (False, True)
    ]
    assert texts[0] == texts[1]


def test_a_server_has_its_passes_before_the_first_prompt_comes(models: dict[str, Any]) -> None:
    engine = tiny_engine("edge", mtp_drafter(models["edge"], "edge"), model=models["edge"], graphs=True)
    engine.serve()
    assert not captured(engine).cache.graphs, "of use on a GPU alone"
    engine.executors[0].prepare()
    known = set(captured(engine).cache.graphs)
    assert {(key.rows, key.wanted) for key in known} == {
        (rows, wanted) for rows in WARMUP_ROWS for wanted in (False, True)
    }
    assert len(known) <= 24 and {key.sequences for key in known} == {8, 64}
    run(engine, [request(str(n), [t % VOCAB for t in range(n)], max_tokens=3) for n in LENGTHS])
    assert set(captured(engine).cache.graphs) == known
    engine.check()


def test_a_program_has_the_passes_of_few_prompts(models: dict[str, Any]) -> None:
    engine = tiny_engine("edge", mtp_drafter(models["edge"], "edge"), model=models["edge"], graphs=True)
    passed = captured(engine)
    few = passed.likely(served=False)
    assert {key.rows for key in few} == set(WARMUP_ROWS) and {(key.sequences, key.wanted) for key in few} == {(8, True)}
    assert set(few) < set(passed.likely())
    plain = captured(tiny_engine("edge", model=models["edge"], graphs=True))
    assert {key.wanted for key in plain.likely(served=False)} == {False}


def test_views_of_a_pass_are_those_of_its_capture(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled for them before the pass is captured."""
    engine = tiny_engine("edge", mtp_drafter(models["edge"], "edge"), model=models["edge"], graphs=True)
    passed = captured(engine)
    seen: list[Any] = []
    attend = engine.model.ops.attend
    monkeypatch.setattr(engine.model.ops, "attend", lambda q, spec, kv: (seen.append(kv), attend(q, spec, kv))[1])
    key = passed.likely(served=False)[-1]
    passed.capture(key)
    passed.cache.graphs[key].replay()

    def form(kv: Any) -> tuple[object, ...]:
        tables = {group: table.shape for group, table in kv.tables.items()}
        return kv.positions.shape, kv.row_seq.shape, kv.row_start.dtype, kv.max_rows, kv.max_context, str(tables)

    assert {form(kv) for kv in seen} == {form(kv) for kv in passed.views(key)}


def test_a_server_captures_nothing_beside_requests(models: dict[str, Any]) -> None:
    """Chunks run in the smallest pass that is there and holds them; where none does they are launched."""
    engine = tiny_engine("llama", model=models["llama"], graphs=True, prefill_chunk=100, prefix_cache=False)
    passed = captured(engine)
    launched = list[int]()
    launch = engine.runner.run
    passed.max_rows = 256
    passed.furthest = 512
    passed.prepare()
    assert {(key.rows, key.sequences) for key in passed.cache.graphs} == {(64, 8), (128, 8), (256, 8), (256, 64)}
    engine.runner.run = lambda scheduled: (
        launched.append(sum(item.num_tokens for item in scheduled)),
        launch(scheduled),
    )[1]  # type: ignore[method-assign]
    engine.prefill.idle = 1024
    engine.prefill.with_decodes = 0
    alone = run(engine, [request("a", [t % VOCAB for t in range(81)], max_tokens=3)])
    assert not launched and passed.ran == 128
    many = run(engine, [request(str(i), [t % VOCAB for t in range(81)], max_tokens=3) for i in range(4)])
    assert launched == [320] and passed.ran == 128 + 320 and len(passed.cache.graphs) == 4
    assert {tuple(tokens) for tokens in many.values()} == {tuple(alone["a"])}


def test_a_pass_that_cannot_be_captured_leaves_the_smaller_ones(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    passed = captured(tiny_engine("llama", model=models["llama"], graphs=True))
    tried = list[int]()

    def graph(fn: Any, device: Any, pool: Any) -> Any:
        tried.append(fn.args[-1].rows)
        if tried[-1] > 512:
            raise RuntimeError("out of memory\nand so on")
        return fn

    class Pretended:
        type = "cuda"

    monkeypatch.setattr(capture, "Graph", graph)
    monkeypatch.setattr(passed, "_write_inputs", lambda scheduled, key: None)
    passed.cache.device = Pretended()  # type: ignore[assignment]
    passed.prepare()
    assert passed.max_rows == 640 and {key.rows for key in passed.cache.graphs} == {64, 128, 256, 512}
    said = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert len(said) == len([n for n in WARMUP_ROWS if n > 512]) and "and so on" not in caplog.text, (
        "a line for each number of rows"
    )
    before = len(tried)
    assert not any(passed.capture(key) for key in passed.cache.refused) and len(tried) == before, (
        "and is not tried again"
    )
    smallest = PrefillKey(CAPTURED_ROWS[0], 8, 512, False)
    monkeypatch.setattr(capture, "Graph", lambda *_: 1 / 0)
    assert not passed.capture(smallest) and passed.max_rows == 0


def test_passes_are_captured_where_launching_is_what_they_wait_for() -> None:
    can = Capabilities(independent_rows=8192, prompts_independent=True)
    sizes = ("E2B", "E4B", "12B", "26B-A4B", "31B")
    most = {
        size: max_prefill_rows(ModelConfig.from_hf(BUILTIN_CONFIGS[f"google/gemma-4-{size}-it"]), can) for size in sizes
    }
    assert most == {"E2B": 2048, "E4B": 2048, "12B": 640, "26B-A4B": 2048, "31B": 256}
    keys = warmup_keys(most["E2B"], 32768, (False,))
    assert len(keys) == 12 and [key.rows for key in keys] == sorted((key.rows for key in keys), reverse=True)
    assert max(key.context for key in keys if key.sequences > 8) == 8192
    assert len(warmup_keys(most["31B"], 32768, (False, True))) == 10 and warmup_keys(0, 32768, (False,)) == []
    assert all(5 * (b - a) <= b for a, b in pairwise(CAPTURED_ROWS[3:])), (
        "of more than 256 rows a fifth at most fills up"
    )


def test_passes_beyond_the_captured_ones_hide_their_launches() -> None:
    """26B-A4B's prompts went through 2,048 rows at a time, and each pass read all experts again."""
    can = Capabilities(independent_rows=8192, prompts_independent=True)

    def packed(size: str, spare: int) -> int:
        model = ModelConfig.from_hf(BUILTIN_CONFIGS[f"google/gemma-4-{size}-it"])
        return max_packed_rows(model, can, max_prefill_rows(model, can), spare << 30)

    sizes = ("E2B", "E4B", "12B", "26B-A4B", "31B")
    assert {size: packed(size, 14) for size in sizes} == dict(zip(sizes, (2048, 2048, 8192, 8192, 8192), strict=True))
    assert packed("26B-A4B", 2) == 2048, "a card with little room to spare takes no larger passes"


def test_one_graph_is_captured_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []
    monkeypatch.setattr(
        capture.Graph, "_capture", lambda self, device, pool: held.append(capture.CAPTURE_LOCK.locked())
    )
    capture.Graph(lambda: None, torch.device("cuda"))
    assert held == [True] and not capture.CAPTURE_LOCK.locked()


def test_an_engine_that_is_dropped_leaves_its_cache_at_once(models: dict[str, Any]) -> None:
    engine = tiny_engine("llama", model=models["llama"], graphs=True)
    run(engine, [request("a", [t % VOCAB for t in range(40)], max_tokens=3)])
    assert captured(engine).cache.graphs
    store = weakref.ref(engine.store)
    gc.collect()
    gc.disable()
    try:
        del engine
        assert store() is None
    finally:
        gc.enable()


def test_many_rows_go_in_several_captured_passes(models: dict[str, Any]) -> None:
    engine = tiny_engine("llama", model=models["llama"], graphs=True, prefill_chunk=32)
    passed = captured(engine)
    assert passed.pack == CAPTURED_ROWS[-1]
    passed.pack = 64
    whole = passed.run
    rows = list[int]()
    passed.run = lambda scheduled: (rows.append(sum(item.num_tokens for item in scheduled)), whole(scheduled))[1]  # type: ignore[method-assign]
    engine.prefill.idle = 512
    engine.prefill.with_decodes = 0
    jobs = [request(str(i), [(i + j) % VOCAB for j in range(31)], max_tokens=3) for i in range(8)]
    assert len(run(engine, jobs)) == 8
    assert rows == [60, 60, 60, 60] and {key.rows for key in passed.cache.graphs} == {64}


def test_only_rows_that_are_independent_are_filled_up() -> None:
    """On a backend that promises nothing, a pass has the rows that were requested."""
    engine = tiny_engine("llama", graphs=True)
    assert captured(engine).max_rows == 0
    run(engine, [request("a", [3, 4, 5, 6], max_tokens=2)])
    assert not captured(engine).cache.graphs
