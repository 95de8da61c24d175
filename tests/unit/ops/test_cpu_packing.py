"""The packed layout: what goes in comes out. Catches swapped nibbles, lanes, scales, minima and padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.ops.cpu.lib import W_Q4, W_Q4M, W_Q8, W_Q8M
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.quant import BLOCKS, QuantPart

EXACT = {"Q4_0": W_Q4, "Q4_1": W_Q4M, "Q8_0": W_Q8, "Q5_0": W_Q8M, "Q5_1": W_Q8M}
SCALES_ROUNDED = {"Q4_K": W_Q4M, "Q5_K": W_Q8M}  # a block's scale is a product of two numbers, kept as float16


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuOps(threads=1)


def part(kind: str, n: int, k: int, seed: int = 0) -> QuantPart:
    """Random bytes with sane scales."""
    rng = np.random.default_rng(seed)
    size, nbytes = BLOCKS[kind]
    b = rng.integers(0, 256, (n * k // size, nbytes), dtype=np.uint8)
    halves = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}.get(kind, (0, 2))
    for at in halves:
        b[:, at : at + 2] = rng.uniform(0.001, 0.02, len(b)).astype(np.float16)[:, None].view(np.uint8)
    return QuantPart(kind, (n, k), b.reshape(n, -1))


@pytest.mark.parametrize("kind", EXACT)
def test_keeps_every_value(ops: CpuOps, kind: str) -> None:
    p = part(kind, 40, 96)
    w = ops.pack([p])
    assert w is not None and w.c.kind == EXACT[kind] and w.shape == (40, 96)
    assert torch.equal(ops.unpack(w), torch.from_numpy(p.dense()))


@pytest.mark.parametrize("kind", SCALES_ROUNDED)
def test_k_quants_keep_their_integers(ops: CpuOps, kind: str) -> None:
    p = part(kind, 16, 512)
    w = ops.pack([p])
    assert w is not None and w.c.kind == SCALES_ROUNDED[kind]
    want = torch.from_numpy(p.dense())
    block = want.view(16, -1, 32)
    reach = block.abs().amax(-1, keepdim=True) + (block.amax(-1) - block.amin(-1))[:, :, None]
    assert ((ops.unpack(w).view_as(block) - block).abs() <= 2**-10 * reach).all()


def test_six_bits_become_eight(ops: CpuOps) -> None:
    p = part("Q6_K", 16, 256)
    w = ops.pack([p])
    assert w is not None and w.c.kind == W_Q8
    want = torch.from_numpy(p.dense()).view(16, -1, 32)
    assert ((ops.unpack(w).view_as(want) - want).abs() <= want.abs().amax(-1, keepdim=True) / 250).all()


@pytest.mark.parametrize("kinds", [("Q4_1", "Q4_1", "Q4_1"), ("Q4_0", "Q4_1"), ("Q4_K", "Q6_K"), ("Q8_0", "Q5_1")])
@pytest.mark.parametrize("n", [32, 24])
def test_fused_parts(ops: CpuOps, kinds: tuple[str, ...], n: int) -> None:
    parts = [part(kind, n, 256, seed) for seed, kind in enumerate(kinds)]
    w = ops.pack(parts)
    assert w is not None and w.shape == (n * len(kinds), 256)
    want = torch.cat([torch.from_numpy(p.dense()) for p in parts]).view(w.shape[0], -1, 32)
    got = ops.unpack(w).view_as(want)
    tolerance = 0 if set(kinds) <= {"Q4_0", "Q4_1"} else 1 / 250
    assert ((got - want).abs() <= tolerance * want.abs().amax(-1, keepdim=True)).all()


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
    w = ops.pack([part("Q4_1", 64, 256), part("Q4_1", 64, 256)])
    assert w is not None and w.nbytes == 128 * 256 * 5 // 8
