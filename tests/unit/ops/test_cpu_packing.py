"""The packed layout: what goes in comes out. Catches swapped nibbles, lanes, scales, minima and padding."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.dummy_checkpoint import HALVES, set_half

from outrider.ops.cpu.lib import FILE_TYPES, PackedKind
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.cpu.packing import in_file
from outrider.ops.formats import BLOCKS, GGUFBlockFormat, Weight
from outrider.weights.sizes import CPU_LAYOUTS, OWN_BITS


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuOps(threads=1)


def part(kind: str, n: int, k: int, seed: int = 0) -> Weight:
    """Random bytes with sane scales."""
    rng = np.random.default_rng(seed)
    size, nbytes = BLOCKS[kind]
    b = rng.integers(0, 256, (n * k // size, nbytes), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        set_half(kind, b, at, rng.uniform(0.001, 0.02, len(b)))
    return Weight(GGUFBlockFormat(kind), (n, k), {"blocks": torch.from_numpy(b.reshape(n, -1))})


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_keeps_every_value_and_its_width(ops: CpuOps, kind: str) -> None:
    k = 96 if BLOCKS[kind][0] == 32 else 512
    p = part(kind, 40, k)
    w = ops.packer.pack([p])
    assert w is not None and w.shape == (40, k)
    assert torch.equal(ops.unpack(w), p.dense())
    layout = CPU_LAYOUTS[kind]
    assert w.nbytes == 48 * k * layout.bits / 8  # 40 rows lie in three groups of 16
    assert w.nbytes <= 1.06 * p.nbytes * 48 / 40 or layout.about != OWN_BITS


def test_nvfp4_is_exact_in_bfloat16(ops: CpuOps) -> None:
    p = part("NVFP4", 40, 128)
    w = ops.pack_weights([p], "cpu")
    assert w is not None and torch.equal(ops.unpack(w), p.dense()) and w.nbytes == 40 * 128 * 2


@pytest.mark.parametrize("kind", ["Q1_0", "Q2_0"])
@pytest.mark.parametrize("shape", [(40, 256), (2, 32, 128)])
def test_narrow_codes_are_widened_to_four_bits(ops: CpuOps, kind: str, shape: tuple[int, ...]) -> None:
    flat = part(kind, math.prod(shape[:-1]), shape[-1])
    p = replace(flat, shape=shape, tensors={"blocks": flat.tensors["blocks"].view(*shape[:-1], -1)})
    w = ops.pack_weights([p], "cpu")
    assert w is not None and torch.equal(ops.unpack(w).view(shape), p.dense())
    assert CPU_LAYOUTS[kind].bits == 4.5


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_rows_of_a_file_are_read_where_they_lie(ops: CpuOps, kind: str) -> None:
    p = part(kind, 7, 512)
    assert torch.equal(ops.unpack(in_file(p)), p.dense())


MIXED = [
    ("Q4_1", "Q4_1", "Q4_1"),
    ("Q4_0", "Q4_1"),
    ("Q4_K", "Q4_K", "Q6_K"),
    ("Q8_0", "Q5_1", "IQ4_XS"),
    ("IQ2_XS", "Q3_K", "IQ3_S", "Q2_K"),
]


@pytest.mark.parametrize("kinds", MIXED)
@pytest.mark.parametrize("n", [32, 24])
def test_fused_parts(ops: CpuOps, kinds: tuple[str, ...], n: int, caplog: pytest.LogCaptureFixture) -> None:
    """Rows of several formats keep their values, and their formats unless a group of 16 would have rows of two; these
    once became int8, and nobody was told."""
    parts = [part(kind, n, 256, seed) for seed, kind in enumerate(kinds)]
    w = ops.packer.pack(parts)
    assert w is not None and w.shape == (n * len(kinds), 256)
    whole = len(set(kinds)) == 1 or n % 16 == 0 or kinds == ("Q4_K", "Q4_K", "Q6_K")
    assert (w.c.kind == PackedKind.PARTS) == (whole and len(set(kinds)) > 1)
    assert torch.equal(ops.unpack(w), torch.cat([p.dense() for p in parts]))
    assert (w.c.kind == PackedKind.DENSE) == (not whole) == ("kept in float32" in caplog.text)


def test_file_pages_are_given_back_as_rows_are_packed(ops: CpuOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.ops.cpu.packing.SLICE", 4096)
    p = part("Q4_K", 100, 512)
    released = []
    w = ops.packer.pack([replace(p, release=lambda lo, hi: released.append((lo, hi)))])
    assert w is not None and torch.equal(ops.unpack(w), p.dense())
    assert released == [(0, 16), (16, 32), (32, 48), (48, 64), (64, 80), (80, 96), (96, 100)]


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_rows_in_another_order(ops: CpuOps, kind: str) -> None:
    p = part(kind, 37, 256)
    order = torch.randperm(37, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ops.unpack(ops.take_rows(ops.packer.pack([p]), order)), p.dense()[order])


def test_refuses_odd_widths(ops: CpuOps) -> None:
    odd = torch.randn(16, 40)
    assert isinstance(ops.quantize(odd, "int8"), torch.Tensor)


@pytest.mark.parametrize(("mode", "error"), [("int8", 0.006), ("int4", 0.09)])
def test_quantize(ops: CpuOps, mode: str, error: float) -> None:
    dense = torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    dense[3, 32:64] = 0  # a block of zeros has scale 0
    back = ops.unpack(ops.quantize(dense, mode))
    assert (back - dense).norm() / dense.norm() < error
    assert (back[3, 32:64] == 0).all()


def test_memory_is_what_the_format_needs(ops: CpuOps) -> None:
    w = ops.packer.pack([part("Q4_1", 64, 256), part("Q4_1", 64, 256)])
    assert w is not None and w.nbytes == 128 * 256 * 5 // 8
