"""Every allocation of the library fails in turn: the call raises MemoryError, and the process lives.

A library of its own, compiled with allocators that fail on request (failing_allocations.h).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import c_int
from pathlib import Path

import pytest
import torch
from tests.engines import request
from tests.kv import build_kv
from tests.parity.test_cpu_kernels import GEMMA4, seeded
from tests.unit.engine.test_host_cycle import PROMPT, engines

from outrider.models.config import ModelConfig
from outrider.models.decoder import TextModel
from outrider.ops.backend import ExpertWeights
from outrider.ops.cpu import build
from outrider.ops.cpu.ops import CpuOps
from outrider.types import AttnSpec
from outrider.weights.load import dummy_weights

HEADER = Path(__file__).with_name("failing_allocations.h")
MAX_ALLOCATIONS = 40  # of one call


@pytest.fixture(scope="module")
def isa() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(build.FLAGS, "generic", f"{build.FLAGS['generic']} -O0 -include {HEADER}")
        yield "generic"


def fail_each_allocation(isa: str, prepare: Callable[[CpuOps], Callable[[], object]]) -> int:
    """Runs what `prepare` returns with 0, 1, 2, ... allocations until it succeeds. Returns how often it failed."""
    for count in range(MAX_ALLOCATIONS):
        ops = CpuOps(threads=2, isa=isa)  # its scratch is empty
        call = prepare(ops)
        left = c_int.in_dll(ops.lib, "allocations_left")
        left.value = count
        try:
            call()
        except MemoryError as error:
            assert "or_" in str(error)
            continue
        finally:
            left.value = -1
        return count
    raise AssertionError("it never succeeded")


X = seeded(3, 64)
TWO_ROWS = torch.tensor([0, 2], dtype=torch.int32)


def linear(ops: CpuOps) -> Callable[[], object]:
    w = ops.quantize(seeded(64, 64), "int8")
    fresh = CpuOps(threads=2, isa=ops.isa)
    return lambda: fresh.linear(X, w)


def gated_linear(ops: CpuOps) -> Callable[[], object]:
    w = ops.quantize(seeded(64, 64), "int4")
    fresh = CpuOps(threads=2, isa=ops.isa)
    return lambda: fresh.gated_linear(X, w, "silu")


def logits(ops: CpuOps) -> Callable[[], object]:
    w = ops.quantize(seeded(64, 64), "int8")
    fresh = CpuOps(threads=2, isa=ops.isa)
    return lambda: fresh.logits(X, w, 30.0)


def clustered_logits(ops: CpuOps) -> Callable[[], object]:
    rows = ops.quantize(seeded(20 * 24, 64), "int8").view(20, 24, 64)
    fresh = CpuOps(threads=2, isa=ops.isa)
    return lambda: fresh.clustered_logits(X, seeded(20, 64), rows, 5)


def low_rank(ops: CpuOps) -> Callable[[], object]:
    base = ops.quantize(seeded(64, 64), "int8")
    part = ops.lowrank(seeded(8, 64), seeded(64, 8), torch.ones(64), [(64, 8)], base)
    fresh = CpuOps(threads=2, isa=ops.isa)
    return lambda: fresh.add_lowrank(torch.zeros(3, 64), X, part, None)


def moe(ops: CpuOps) -> Callable[[], object]:
    gate_up = ops.quantize(seeded(4 * 64, 64), "int8").view(4, 64, 64)
    down = ops.quantize(seeded(4 * 64, 32), "int8").view(4, 64, 32)
    experts = ExpertWeights(seeded(4, 64), torch.ones(4), gate_up, down, 2, "silu")
    fresh = CpuOps(threads=2, isa=ops.isa)
    return lambda: fresh.moe(X, X, experts)


def filters(ops: CpuOps) -> Callable[[], object]:
    top_p = torch.full((3,), 0.9, dtype=torch.float64)
    return lambda: ops.filter_logits(seeded(3, 400), torch.tensor([5, 6, 7]), top_p, torch.zeros(3))


def attend(ops: CpuOps) -> Callable[[], object]:
    config = ModelConfig.from_hf(GEMMA4)
    spec = next(layer.attn for layer in config.layers if isinstance(layer.attn, AttnSpec))
    kv = build_kv(config, 1, 32, 16).view([(0, 3)])
    q = seeded(3, spec.heads * spec.head_dim)
    return lambda: ops.attend(q, spec, kv)


def forward(ops: CpuOps) -> Callable[[], object]:
    config = ModelConfig.from_hf(GEMMA4)
    weights = dummy_weights(config, "cpu", torch.float32, ops, None, seed=3)
    fresh = CpuOps(threads=2, isa=ops.isa)
    model = fresh.compile(TextModel(config, weights, fresh))
    kv = build_kv(config, 1, 32, 16)
    return lambda: model.forward(torch.arange(5), kv.view([(0, 5)]))


def decode_cycle(filtered: bool) -> Callable[[CpuOps], Callable[[], object]]:
    """The engine's steps after the prompt: drafts and the target's verdict in one call."""

    def prepare(ops: CpuOps) -> Callable[[], object]:
        engine, _ = engines("llama", (0,), ops=ops)
        params = {"temperature": 0.9, "seed": 7, "top_k": 20} if filtered else {}
        engine.submit(request("a", PROMPT, k=3, drafter="mtp", max_tokens=12, **params))
        while not engine.step():
            pass

        def finish() -> None:
            while engine.busy:
                for event in engine.step():
                    assert event.error is None

        return finish

    return prepare


CALLS = {
    "linear": linear, "gated_linear": gated_linear, "logits": logits, "clustered_logits": clustered_logits,
    "low_rank": low_rank, "moe": moe, "filters": filters, "attend": attend, "forward": forward,
    "decode_cycle": decode_cycle(filtered=False), "filtered_cycle": decode_cycle(filtered=True),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_an_allocation_that_fails_is_a_memory_error(isa: str, name: str) -> None:
    assert fail_each_allocation(isa, CALLS[name]) >= 1


def test_a_pool_without_memory_is_a_memory_error(isa: str) -> None:
    library = CpuOps(threads=1, isa=isa).lib
    left = c_int.in_dll(library, "allocations_left")
    for count in range(3):
        left.value = count
        with pytest.raises(MemoryError, match="or_pool_new"):
            library.or_pool_new(2)
    left.value = 3  # not enough for a thread: a pool without it
    pool = library.or_pool_new(2)
    left.value = -1
    assert library.or_pool_size(pool) == 1
    library.or_pool_free(pool)
