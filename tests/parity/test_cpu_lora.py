"""Adapters in the C library: a whole pass, and whole decode steps, have the bits of the single operations and of every
row alone, on every instruction set that this machine can run.

Catches: a row with its neighbour's adapter, an addition to a row or matrix without one, sums whose order follows the
number of rows or threads, rows that moved to the front of a prompt's pass without their adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines import request, run_joining
from tests.kv import build_kv
from tests.lora import write_adapter
from tests.parity.test_cpu_kernels import MODELS
from tests.unit.engine.test_host_cycle import PROMPT, engines
from torch import Tensor

from outrider.cache.store import last_rows
from outrider.engine.adapters import AdapterPool, adaptable_weights, weight_names
from outrider.engine.engine import Engine
from outrider.engine.step import Request
from outrider.models.config import ModelConfig
from outrider.models.decoder import TextModel
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.cpu.packing import PackedWeight
from outrider.ops.formats import DeviceWeight
from outrider.ops.lowrank import AdaptedOps, Adapter, row_groups
from outrider.ops.reference import ReferenceOps
from outrider.weights.adapter import load_adapter
from outrider.weights.load import dummy_weights

ADAPTERS = {"a": dict(rank=4), "b": dict(rank=16), "c": dict(rank=9, only="k_proj"), "d": dict(rank=3, only="p_proj")}


def adapters_of(
    config: ModelConfig, ops: CpuOps, folder: Path, bases: Mapping[str, DeviceWeight]
) -> dict[str, Adapter]:
    adapters = {}
    for i, (name, how) in enumerate(ADAPTERS.items()):
        path = write_adapter(config, folder / name, seed=i, **how)  # type: ignore[arg-type]
        adapters[name] = load_adapter(name, path, config, ops, torch.float32, torch.device("cpu"), bases)
    return adapters


KINDS = {torch.float32: (None, 1e-4), torch.float16: (None, 2e-3), torch.int8: ("int4", 0.02)}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_addition(ops: CpuOps, kind: torch.dtype, tmp_path: Path) -> None:
    """Against the definition; rows and matrices without a change keep their bits, minus zero too."""
    config = ModelConfig.from_hf(MODELS["qwen3"])
    quantize, error = KINDS[kind]
    dtype = torch.float16 if kind == torch.float16 else torch.float32
    bases = dummy_weights(config, "cpu", dtype, ops, quantize)
    adapters = adapters_of(config, ops, tmp_path, bases)
    reference = ReferenceOps()
    for name, path in ((name, tmp_path / name) for name in ADAPTERS):
        theirs = load_adapter(name, path, config, reference, torch.float32, torch.device("cpu"))
        assert adapters[name].parts.keys() == theirs.parts.keys()
        for key, part in adapters[name].parts.items():
            assert isinstance(part.a, PackedWeight)
            assert part.a.nbytes < (kind.itemsize + 0.1) * part.a.c.n * part.a.c.k
            x = torch.randn((11, theirs.parts[key].a.shape[1]), generator=torch.Generator().manual_seed(1))
            y = torch.full((11, len(part.scale)), -0.0)
            want = reference.add_lowrank(y.clone(), x, theirs.parts[key], None)
            got = ops.add_lowrank(y.clone(), x, part, None)
            assert (got - want).abs().max().item() <= error * want.abs().max().item()
            some = ops.add_lowrank(y.clone(), x, part, torch.tensor([3, 7, 8]))
            assert torch.equal(some[[3, 7, 8]], got[[3, 7, 8]]) and bool(torch.signbit(some[[0, 1, 2, 4, 9]]).all())
            if name == "c":  # of q, k and v it changes k alone
                assert bool(torch.signbit(got[:, part.scale == 0]).all())
            several = CpuOps(threads=3, isa=ops.isa)
            assert torch.equal(several.add_lowrank(y.clone(), x, part, None), got)


def test_a_small_matrix_under_a_large_scale(ops: CpuOps) -> None:
    """Next to a quantised weight: what is 2^-24 of A and 2^24 of the scale is the same change, to the last bit."""
    rng = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(shape, generator=rng) for shape in ((5, 64), (6, 64), (32, 6)))
    base = ops.quantize(torch.randn((32, 64), generator=rng), "int8")
    scale = torch.ones(32)
    pieces = [(32, 6)]
    changes = [ops.lowrank(a / size, b, scale * size, pieces, base) for size in (1.0, 2.0**24)]
    want, got = (ops.add_lowrank(torch.zeros(5, 32), x, part, None) for part in changes)
    assert torch.equal(want, got) and want.abs().max() > 1.0


@pytest.mark.parametrize("quantize", ["int4", None])
@pytest.mark.parametrize("name", MODELS)
def test_a_whole_pass(ops: CpuOps, name: str, quantize: str | None, tmp_path: Path) -> None:
    config = ModelConfig.from_hf(MODELS[name])
    model = TextModel(config, dummy_weights(config, "cpu", torch.float32, ops, quantize, seed=3), ops)
    compiled = ops.compile(model)
    names = weight_names(model)
    adapters = adapters_of(config, ops, tmp_path, adaptable_weights(model))
    order = [adapters["a"], None, adapters["b"], adapters["c"], adapters["a"], adapters["d"]]
    counts = [9, 4, 17, 3, 1, 30]
    taps = (0, 2)
    ids = torch.randint(0, 96, (sum(counts),), generator=torch.Generator().manual_seed(0))
    spans = [(0, n) for n in counts]

    def passed(who: TextModel, wanted: list[int] | None = None) -> list[Tensor]:
        view = build_kv(config, len(counts), 64, 16, torch.float32).view(spans)
        out = who.forward(ids, view, taps, None if wanted is None else last_rows(view, wanted))
        return [out.hidden, *out.streams]

    one = ops.adapted(compiled, order, counts)
    assert one is not None
    want = passed(model.with_ops(AdaptedOps(model.ops, names, row_groups(order, counts, model.device))))
    assert all(torch.equal(a, b) for a, b in zip(passed(one), want, strict=True))
    ends = [0, 2, 5]
    last = [counts[0] - 1, sum(counts[:3]) - 1, sum(counts) - 1]
    assert all(torch.equal(a, b[last]) for a, b in zip(passed(one, ends), want, strict=True))
    base = passed(compiled)[0].split(counts)
    for i, (adapter, rows) in enumerate(zip(order, want[0].split(counts), strict=True)):
        assert torch.equal(rows, base[i]) == (adapter is None)
        kv = build_kv(config, 1, 64, 16, torch.float32)
        at = sum(counts[:i])
        for j in range(counts[i]):  # token by token, alone
            lone = ops.adapted(compiled, [adapter], [1])
            assert lone is not None
            assert torch.equal(lone.forward(ids[at + j : at + j + 1], kv.view([(j, 1)])).hidden, rows[j : j + 1])


def adapted_engines(shape: str, ops: CpuOps, folder: Path) -> tuple[Engine, Engine]:
    """The second without the one call: operation by operation."""
    one, many = engines(shape, (1,), ops=ops, max_batch=8)
    model = one.model.model  # type: ignore[attr-defined]
    to = (model.config, ops, model.dtype, model.device)
    pool = AdapterPool(model, lambda name, path: load_adapter(name, path, *to))
    for i, (name, how) in enumerate(ADAPTERS.items()):
        pool.add(name, str(write_adapter(model.config, folder / name, seed=i, **how)))  # type: ignore[arg-type]
    one.runner.adapters = many.runner.adapters = pool
    many.runner.model = model
    return one, many


@pytest.mark.parametrize("shape", ["llama", "sliding"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "T0.9"])
def test_decode_steps(ops: CpuOps, shape: str, params: dict[str, Any], tmp_path: Path) -> None:
    """Eight sequences of four adapters and of none in one batch, with drafts of 1, 4, 8 and 16 and a tree, against
    the single operations and against each alone and plain."""
    one, many = adapted_engines(shape, ops, tmp_path)
    num_adapted: list[int] = []  # sequences with an adapter, by call of the C cycle
    cycle = one.executors[0].cycle  # type: ignore[attr-defined]
    host_run = cycle.run

    def counted_run(count: int, sampling: Any, *, adapters: list[Any], **options: Any) -> None:
        num_adapted.append(sum(adapter is not None for adapter in adapters))
        host_run(count, sampling, adapters=adapters, **options)

    cycle.run = counted_run

    def asked(speculate: bool) -> list[Request]:
        requests = []
        order = ("a", "b", None, "c", "d", "a", None, "b")
        for i, (name, k) in enumerate(zip(order, (1, 4, 8, 16, 0, 4, 16, 8), strict=True)):
            job = request(str(i), PROMPT[i % 4 :], k=k if speculate else 0, logprobs=2, max_tokens=20, **params)
            job.adapter = name
            job.drafter = "mtp" if speculate and k else False
            job.tree = 12 * (i == 5)
            requests.append(job)
        return requests

    events: list[dict[str, list[Any]]] = [{}, {}, {}]
    texts = [
        run_joining(engine, [(0, job) for job in asked(True)], logprobs=to) for engine, to in zip((one, many), events)
    ]
    assert texts[0] == texts[1] and events[0] == events[1]
    assert max(num_adapted) > 1 and one.metrics.drafted > 0 < many.metrics.drafted
    for job in asked(False):
        assert run_joining(one, [(0, job)], logprobs=events[2])[job.id] == texts[0][job.id]
    assert events[2] == events[0]
