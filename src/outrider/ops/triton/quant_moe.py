"""Experts in 4 or 8 bits: the grouped products of `moe` with weights that are dequantised in registers, as in `quant`.

Experts [E, N, K] are one matrix of E·N rows in the layout of `quant`; expert e has the rows from e·N on. A program
takes BN rows of one expert and up to BM of its pairs, the weights on the long side of the matrix instruction.

**Order of sums**: planes in order, chunks in order, one chain per pair whatever the tile: its result depends on that
pair alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..formats import Format, Weight
from .common import activate, pdl_start
from .quant import _pairs, add_chunk, weight_arguments
from .repack import ROWS, SLICE, QuantWeight, repack
from .routing import Pairs, pairs_of, tile_of


@dataclass(frozen=True)
class QuantExperts:
    """Experts [E, N, K] as one quantised matrix of E·N rows."""

    shape: tuple[int, int, int]
    matrix: QuantWeight

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def view(self, *shape: int) -> QuantExperts:
        raise NotImplementedError("quantised experts of the GPU have no other shape")


def hold_experts(weight: Weight) -> QuantExperts | None:
    """None for a format that the kernels do not support, and if every expert has its own order of columns."""
    count, n, k = weight.shape
    if any(unit.shared for unit in weight.format.units.values()):
        return None
    rows = {name: t.reshape(count * n, -1) for name, t in weight.tensors.items()}
    flat = repack(Weight(weight.format, (count * n, k), rows))
    return None if flat is None else QuantExperts((count, n, k), flat)


def round_experts(dense: Tensor, format: Format) -> QuantExperts | None:
    """Dense experts in a format with independent rows, some rows at a time: rounding takes several times their
    memory."""
    count, n, k = dense.shape
    rows = dense.reshape(count * n, k)
    tiles = triton.cdiv(count * n, ROWS)
    step = max(1, SLICE // (k * ROWS))
    whole = dict[str, Any]()
    part = None
    for lo in range(0, tiles, step):
        part = repack(format.quantise(rows[lo * ROWS : (lo + step) * ROWS]))
        if part is None:
            return None
        for name in ("words", "scale", "zero_point", "factor", "high"):
            t: Tensor | None = getattr(part, name)
            if t is not None:
                each = len(t) // len(part.words)  # a tile has one entry, or one for each of its rows
                whole.setdefault(name, t.new_empty((tiles * each, *t.shape[1:])))[lo * each : lo * each + len(t)] = t
    assert part is not None
    return QuantExperts((count, n, k), replace(part, shape=(count * n, k), **whole))


@triton.jit
def quant_experts_kernel(
    x, w, high, scale, zero_point, sums, factor, members, counts, out, N, K, chunks, sums_stride,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, SHARE: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    ALONE: tl.constexpr, CODES: tl.constexpr, PLANES: tl.constexpr, P: tl.constexpr, PER: tl.constexpr,
    FP16: tl.constexpr, ZERO_POINT: tl.constexpr, FACTOR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, PLAIN: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):
    """out[pair] = x[pair // SHARE] · w[expert]ᵀ for experts in the layout of `quant.quant_kernel`: x [rows, K]; N: rows
    of an expert -> out [pairs, N] (GATED: gate rows, then up rows -> [pairs, N / 2]).

    Grid (N / BN, tiles): program (n, t) has BN rows of the expert of the t-th tile of up to BM pairs; programs past
    the last tile leave at once.
    """
    pid_n = tl.program_id(0)
    t = tl.program_id(1)
    PAIRS: tl.constexpr = 0 if PER == 0 else (PLANES // PER + 1) // 2
    GROUPS: tl.constexpr = 1 if PER == 0 else PLANES // PER
    COLUMNS: tl.constexpr = PLANES * P
    pdl_start(PDL)
    e, first, count, some = tile_of(members, counts, t, EXPERTS, BLOCK_E, BM, ALONE)
    if some:
        local = tl.arange(0, BN)
        if GATED:  # gate and up rows alternate in the tile, and so do the sums
            rows = e * N + tl.minimum(pid_n * (BN // 2) + local // 2, N // 2 - 1) + (local % 2) * (N // 2)
        else:
            # rows past the end repeat the last one and are never stored
            rows = e * N + tl.minimum(pid_n * BN + local, N - 1)
        block = (rows // 64).to(tl.int64) * chunks
        w_at = (block * (64 * P) + (rows % 64) * P)[:, None] + tl.arange(0, P)[None, :]
        w_ptr = w + w_at
        h_ptr = high + w_at
        s_ptr = scale + block * (64 * PAIRS) + rows % 64 * PAIRS
        l_ptr = zero_point + block * (64 * PAIRS) + rows % 64 * PAIRS
        live = tl.arange(0, BM) < count
        pair = pairs_of(members, first, count, BM, ALONE)
        source = pair // SHARE
        x_ptr = x + source[:, None] * K + tl.arange(0, P)[None, :]
        acc = tl.zeros((BN, BM), dtype=tl.float32)
        if PER > 0:
            s_a, s_b, s_c, s_d = _pairs(s_ptr, PAIRS, PLAIN)
        for chunk in tl.range(0, chunks, num_stages=STAGES):
            words = tl.load(w_ptr + chunk * (64 * P))
            above = words
            if CODES == "int5" or CODES == "uint5" or CODES == "int6":
                above = tl.load(h_ptr + chunk * (64 * P)).to(tl.int32)
            scales = (words, words, words, words)  # not read where there are none
            if PER > 0:  # this chunk's scales were loaded with the one before; the next one's are loaded now
                scales = (s_a, s_b, s_c, s_d)
                s_a, s_b, s_c, s_d = _pairs(s_ptr + tl.minimum(chunk + 1, chunks - 1) * (64 * PAIRS), PAIRS, PLAIN)
            lifts = scales
            if ZERO_POINT:
                lifts = _pairs(l_ptr + chunk * (64 * PAIRS), PAIRS, PLAIN)
            at_sums = sums + chunk * GROUPS * sums_stride + source
            acc, _ = add_chunk(
                acc, acc, words, above, scales, lifts, x_ptr + chunk * COLUMNS, x_ptr, live, live, at_sums, sums_stride,
                K - chunk * COLUMNS, CODES, PLANES, P, PER, FP16, ZERO_POINT, BM, 0, BN, EVEN, PLAIN, PREC,
            )
        _finish(acc, factor, out, rows, pair, live, pid_n, N, BM, BN, GATED, ACT, FACTOR)


@triton.jit
def _finish(
    acc, factor, out, rows, pair, live, pid_n, N, BM: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, FACTOR: tl.constexpr,
):
    """Round where the plain twin rounds: after the product, after the activation."""
    if FACTOR:
        acc *= tl.load(factor + rows)[:, None]
    kind = out.dtype.element_ty
    y = tl.trans(acc)  # [BM, BN]
    width = N
    if GATED:
        width = N // 2
        gate, up = tl.split(tl.reshape(y, (BM, BN // 2, 2)))
        y = activate(gate.to(kind).to(tl.float32), ACT).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
        cols = pid_n * (BN // 2) + tl.arange(0, BN // 2)
    else:
        cols = pid_n * BN + tl.arange(0, BN)
    tl.store(out + pair[:, None] * width + cols[None, :], y.to(kind), mask=live[:, None] & (cols[None, :] < width))


@dataclass(frozen=True)
class ExpertTile:
    """The tile of a program: pairs (bm), rows of weights (bn), and its launch options."""

    bm: int
    bn: int
    stages: int
    warps: int
    registers: int | None = None  # maximum registers per thread; None: the compiler's choice


def choose_tile(pairs: Pairs, w: QuantWeight, gated: bool, shared: int) -> ExpertTile:
    """The tile for this mean number of pairs per expert (measured on an H200: docs/gpu.md)."""
    mean = pairs.count / pairs.experts
    if mean <= 6 and w.plane == 32 and w.high is None:  # five bits take no tile of 8 (quant_config.fit)
        if gated or pairs.count <= 16:
            return ExpertTile(bm=8, bn=64, stages=4, warps=4)
        if w.codes.bits == 4:
            return ExpertTile(bm=8, bn=64, stages=3, warps=2, registers=160)
        return ExpertTile(bm=8, bn=64, stages=4, warps=2)
    if mean <= 8:
        bm = 16
    else:
        bm = 32 if mean <= 24 or shared < 100 << 10 else 64
    each = 64 * w.plane * 4 + bm * w.columns_of_chunk * 2
    return ExpertTile(bm, bn=64, stages=max(2, min(4, shared // each + 1)), warps=4)


def quant_product(
    source: Tensor, w: QuantExperts, to: Tensor, pairs: Pairs, share: int, act: str | None, pdl: bool,
    tile: ExpertTile
) -> None:
    """to[pair] = source[pair // share] · w[expert]ᵀ; act: w is gate and up, and its answer act(gate) * up."""
    gated = act is not None
    count, n, k = w.shape
    tensors, sums_stride, constants = weight_arguments(source, w.matrix, tokens=1, out=to, pdl=pdl)
    grid = (triton.cdiv(to.shape[1], tile.bn // 2 if gated else tile.bn), pairs.tiles(tile.bm))
    quant_experts_kernel[grid](
        *tensors, pairs.members, pairs.counts, to, n, k, w.matrix.chunks, sums_stride, EXPERTS=count,
        BLOCK_E=pairs.block, SHARE=share, GATED=gated, ACT=act or "", ALONE=pairs.alone, BM=tile.bm, BN=tile.bn,
        STAGES=tile.stages, num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers, **constants,
    )
