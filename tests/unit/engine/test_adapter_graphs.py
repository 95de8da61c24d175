"""Adapters inside captured steps: slots, ranges of rows and graphs, on the CPU's kernels, whose rows are independent.

A replay is a call of the captured function here. Tokens and log-probabilities must be those of the eager engine, bit
for bit, whatever the slots held before.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engines import mtp_drafter, run_joining, tiny_engine, tiny_model
from tests.lora import write_adapter

from outrider.engine.adapters import AdapterPool
from outrider.engine.engine import Engine
from outrider.engine.graphs import GraphExecutor
from outrider.engine.step import Request
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.reference import ReferenceOps
from outrider.types import SamplingParams
from outrider.weights.adapter import load_adapter

NAMES = ("a", "b", "c", "d")
RANKS = (4, 8, 3, 24)
PROMPT = [3, 5, 7, 9, 11, 3, 5, 7, 9, 13, 2, 40, 41, 3, 5]


class SlottedOps(CpuOps):
    """The CPU's kernels, with adapters in slots."""

    capabilities = replace(CpuOps.capabilities, adapter_slots=True, holds_halves=False)

    adapted = ReferenceOps.adapted  # type: ignore[assignment]
    compile = ReferenceOps.compile  # type: ignore[assignment]
    host_cycle = ReferenceOps.host_cycle  # type: ignore[assignment]
    lowrank = ReferenceOps.lowrank  # type: ignore[assignment]
    prepare = ReferenceOps.prepare


MODELS = {name: tiny_model(name, ops=SlottedOps(threads=1)) for name in ("dense", "edge", "moe")}


def pool(variant: str, folder: Path, slots: int = 8) -> AdapterPool:
    model = MODELS[variant]

    def load(name, path):
        return load_adapter(name, path, model.config, model.ops, model.dtype, model.device)

    adapters = AdapterPool(model, load, slots)
    for i, name in enumerate(NAMES):
        adapters.add(name, str(write_adapter(model.config, folder / variant / name, seed=i, rank=RANKS[i])))
    return adapters


def engine_of(variant: str, adapters: AdapterPool, graphs: bool) -> Engine:
    drafter = mtp_drafter(MODELS[variant], variant, True)
    engine = tiny_engine(variant, drafter, model=MODELS[variant], graphs=graphs)
    engine.runner.adapters = adapters
    return engine


def request(i: int, adapter: str | None, k: int = 0, tree: int | None = None) -> Request:
    params = SamplingParams(
        max_tokens=10, ignore_eos=True, logprobs=None if tree else 1, temperature=0.9 * (i % 2), seed=i
    )
    return Request(str(i), PROMPT[i % 5 :], params, k, bool(k), tree=tree, adapter=adapter)


def graphs_of(engine: Engine) -> GraphExecutor:
    executor = engine.executors[0]
    assert isinstance(executor, GraphExecutor)
    return executor


@pytest.mark.parametrize("variant", MODELS)
def test_a_mixed_batch_has_the_bits_of_each_request_alone(variant: str, tmp_path: Path) -> None:
    """Four adapters and none in one captured step, with two slots to begin with: slots are taken over, and made."""
    adapters = pool(variant, tmp_path, slots=2)
    events = dict[str, list[Any]]()
    alone = dict[str, list[int]]()
    who = [None, *NAMES, "a", None, "b"]
    for i, name in enumerate(who):
        eager = engine_of(variant, adapters, graphs=False)
        alone |= run_joining(eager, [(0, request(i, name))], logprobs=events)
    assert alone["1"] != run_joining(engine_of(variant, adapters, False), [(0, request(1, None))])["1"]
    for k, tree in ((0, None), (1, None), (4, None), (16, None), (3, 7)):
        engine = engine_of(variant, adapters, graphs=True)
        mixed = dict[str, list[Any]]()
        jobs = [(i % 3, request(i, name, k, tree)) for i, name in enumerate(who)]
        assert run_joining(engine, jobs, logprobs=mixed) == alone, (k, tree)
        assert tree or mixed == events, (k, tree)
        assert any(key.nodes and key.adapted for key in graphs_of(engine).decode_graphs.cache.graphs) == bool(tree)
        assert any(key.adapted for key in graphs_of(engine).decode_graphs.cache.graphs), (
            "no adapted step went through a graph"
        )
    assert adapters.slots is not None and adapters.slots.count == 4


def test_a_request_on_its_way_keeps_its_adapter_when_slots_change(tmp_path: Path) -> None:
    """One slot: the adapter is replaced under its name, and others run in its slot between its steps."""
    adapters = pool("dense", tmp_path, slots=1)
    want = {
        name: run_joining(engine_of("dense", adapters, False), [(0, request(0, name))])["0"] for name in (*NAMES, None)
    }
    engine = engine_of("dense", adapters, graphs=True)
    engine.submit(request(0, "a", k=4))
    got: dict[str, list[int]] = {"0": [], "1": [], "2": []}

    def step() -> None:
        for event in engine.step():
            got[event.id] += event.tokens

    for _ in range(2):
        step()
    adapters.remove("a")
    adapters.add("a", adapters.paths["b"])
    for i, name in ((1, "a"), (2, None)):
        engine.submit(replace(request(0, name), id=str(i)))
        step()
    while engine.busy:
        step()
    assert got == {"0": want["a"], "1": want["b"], "2": want[None]}


def test_steps_without_adapters_run_in_graphs_without_them(tmp_path: Path) -> None:
    adapters = pool("dense", tmp_path)
    engine = engine_of("dense", adapters, graphs=True)
    run_joining(engine, [(0, request(0, None))])
    assert [key.adapted for key in graphs_of(engine).decode_graphs.cache.graphs] == [False] * len(
        graphs_of(engine).decode_graphs.cache.graphs
    )
    assert adapters.nbytes == 0, "nothing is reserved before an adapter is used"
    run_joining(engine, [(0, request(0, "a"))])
    assert adapters.nbytes > 0


def test_a_server_with_adapters_captures_adapted_steps_before_its_first_request(tmp_path: Path) -> None:
    adapters = pool("dense", tmp_path)
    engine = engine_of("dense", adapters, graphs=True)
    assert adapters.slots is not None
    adapters.slots.place([adapters.get("d")])  # the largest rank
    graphs_of(engine).prepare()
    keys = set(graphs_of(engine).decode_graphs.cache.graphs)
    assert {replace(key, adapted=True) for key in keys} <= keys
    run_joining(engine, [(0, request(i, name, k=4)) for i, name in enumerate(("a", None, "d"))])
    assert {
        key for key in graphs_of(engine).decode_graphs.cache.graphs if key not in keys and key.asks.logprobs < 0
    } == set()
