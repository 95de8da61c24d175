"""Passes over prompts as they are captured, run as functions on the CPU: the bits of passes that nothing was added to."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.engines import VOCAB, mtp_drafter, request, run, tiny_engine, tiny_model

from outrider.engine import passes
from outrider.engine.engine import Engine
from outrider.engine.graphs import GraphExecutor
from outrider.ops.cpu.ops import CpuOps

LENGTHS = (3, 40, 1, 17, 70, 16, 33)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    ops = CpuOps(threads=1)
    return {name: tiny_model(name, ops=ops) for name in ("edge", "moe", "llama")}


def captured(engine: Engine) -> passes.Passes:
    executor = engine.executors[0]
    assert isinstance(executor, GraphExecutor)
    return executor.passes


@pytest.mark.parametrize("variant", ["edge", "moe", "llama"])
def test_a_captured_pass_leaves_the_bits_of_any_other(variant: str, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "NEAR", 32)  # so that both bounds are met
    rng, left = random.Random(1), []
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in LENGTHS]
    for graphs in (False, True):
        drafter = mtp_drafter(models[variant], variant) if variant != "llama" else None
        engine = tiny_engine(variant, drafter, model=models[variant], graphs=graphs, prefill_chunk=24)
        jobs = [request(str(i), prompt, k=2, max_tokens=6) for i, prompt in enumerate(prompts)]
        for job in jobs:
            engine.submit(job)
        engine.machine.features.zero_()
        engine.scheduler.beside = 0  # whole chunks
        while any(seq.computed < len(seq.tokens) - 1 for seq in engine._seqs.values()):
            batch = engine.scheduler.plan(lambda ready: [])
            engine.machine.prompts(batch.prompts, captured(engine).run if graphs else None)
            for lane in batch.prompts:
                lane.seq.computed = lane.start + lane.count
        engine.store.flush()
        seen: list[Any] = [engine.machine.features[:-1].clone()]
        for slot, prompt in enumerate(prompts):
            for group, table in engine.store.tables.items():
                pages = table[slot, : -(-(len(prompt) - 1) // 4)].long()
                layers = models[variant].config.layers
                held = [k for layer, k in zip(layers, engine.store.keys) if k is not None and layer.attn.group == group]
                seen += [keys[pages].clone() for keys in held]
        left.append(seen)
        if graphs:
            keys = captured(engine)._graphs
            assert {key.context for key in keys} == {32, captured(engine).furthest} and len({key.rows for key in keys}) > 1
    assert all(torch.equal(a, b) for a, b in zip(*left)) and len(left[0]) == len(left[1])


def test_texts_are_the_same_through_captured_passes(models: dict[str, Any]) -> None:
    jobs = [request(str(i), [(7 * i + j) % VOCAB for j in range(n)], k=2, max_tokens=8) for i, n in enumerate(LENGTHS)]
    texts = [run(tiny_engine("edge", mtp_drafter(models["edge"], "edge"), model=models["edge"], graphs=g), jobs) for g in (False, True)]
    assert texts[0] == texts[1]


def test_a_server_has_its_passes_before_the_first_prompt_comes(models: dict[str, Any]) -> None:
    engine = tiny_engine("edge", mtp_drafter(models["edge"], "edge"), model=models["edge"], graphs=True)
    engine.serve()
    known = set(captured(engine)._graphs)
    assert {(key.rows, key.wanted) for key in known} == {(rows, wanted) for rows in passes.ROWS for wanted in (False, True)}
    run(engine, [request(str(n), [t % VOCAB for t in range(n)], max_tokens=3) for n in LENGTHS])
    assert set(captured(engine)._graphs) == known
    engine.check()


def test_many_rows_go_in_several_captured_passes(models: dict[str, Any]) -> None:
    engine = tiny_engine("llama", model=models["llama"], graphs=True, prefill_chunk=32)
    passed = captured(engine)
    passed.most, whole, rows = 64, passed.run, list[int]()
    passed.run = lambda lanes: (rows.append(sum(lane.count for lane in lanes)), whole(lanes))[1]  # type: ignore[method-assign]
    engine.scheduler.alone, engine.scheduler.beside = 512, 0
    jobs = [request(str(i), [(i + j) % VOCAB for j in range(31)], max_tokens=3) for i in range(8)]
    assert len(run(engine, jobs)) == 8
    assert rows == [60, 60, 60, 60] and {key.rows for key in passed._graphs} == {64}


def test_only_rows_that_are_independent_are_filled_up() -> None:
    """Of a backend that promises nothing, a pass has the rows that it was asked for."""
    engine = tiny_engine("llama", graphs=True)
    assert captured(engine).most == 0
    run(engine, [request("a", [3, 4, 5, 6], max_tokens=2)])
    assert not captured(engine)._graphs
