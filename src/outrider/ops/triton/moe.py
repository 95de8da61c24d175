"""Mixture of experts: each needed expert is read once per tile of pairs, and a row's result depends on that row alone.

A pair is (row, slot): one of a row's chosen experts. `routing` picks the experts of each row and lists the pairs by
expert; the grouped products run over tiles of up to 128 pairs of one expert; `mix` adds a row's slots in their order.
The number of pairs per tile follows from their total; a pair's sums are one chain over the inner dimension whatever the
tile (gemm.chain). Quantised experts have their own product (`quant_moe`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backend import MoeResidual
from ..formats import DeviceWeight
from ..reference import as_tensor
from .common import activate, gate_and_up, pdl_start, precision, weight_rows
from .gemm import chain
from .norm import PROMPT, residual_norm, width_warps
from .quant_config import max_smem
from .quant_moe import ExpertTile, QuantExperts, choose_tile, quant_product
from .routing import Pairs, pairs_of, tile_of


@triton.jit
def experts_kernel(
    x, w, members, counts, out, N, K,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, SHARE: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, ALONE: tl.constexpr,
    PREC: tl.constexpr, PDL: tl.constexpr,
):
    """out[pair] = x[pair // SHARE] · w[expert]ᵀ (GATED: act(gate) * up): x [rows, K], w [E, N, K] (GATED: [E, 2N, K],
    gate rows first) -> out [pairs, N].

    Grid (N / BN, tiles): program (n, t) has columns n of the t-th tile of up to BM pairs of one expert, counted
    through the experts; programs past the last tile leave at once.
    """
    pid_n = tl.program_id(0)
    t = tl.program_id(1)
    pdl_start(PDL)
    e, first, count, some = tile_of(members, counts, t, EXPERTS, BLOCK_E, BM, ALONE)
    if some:
        SIDES: tl.constexpr = 2 if GATED else 1
        w_row = w + (e.to(tl.int64) * SIDES * N + weight_rows(pid_n * BN, N, BN, GATED)) * K
        cols = pid_n * BN + tl.arange(0, BN)
        kind = out.dtype.element_ty
        i = tl.arange(0, BM)
        pair = pairs_of(members, first, count, BM, ALONE)
        acc = chain(x + pair // SHARE * K, i < count, w_row, 0, K, BM, BN * SIDES, BK, True, EVEN, PREC, "")
        if GATED:
            acc, up = gate_and_up(acc, BM, BN)
            acc = activate(acc.to(kind).to(tl.float32), ACT).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
        tl.store(out + pair[:, None] * N + cols[None, :], acc.to(kind), mask=(i < count)[:, None] & (cols[None, :] < N))


@triton.jit
def mix_kernel(y, weight, out, n, TOP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[row] = the sum of weight * y over the row's slots, in order: y [R · TOP, n], weight float32 [R · TOP] -> [R,
    n].

    Grid (R, n / BLOCK): a program per BLOCK columns of a row.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < n
    pdl_start(PDL)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(TOP):
        acc += tl.load(weight + row * TOP + slot) * tl.load(y + (row * TOP + slot) * n + i, mask=ok, other=0.0).to(
            tl.float32
        )
    tl.store(out + row * n + i, acc.to(out.dtype.element_ty), mask=ok)


@triton.jit
def mix_epilogue_kernel(
    y, weight, dense, dense_w, post_w, x, out_w, scale, next_w, x_out, h_out, n, eps,
    TOP: tl.constexpr, PARTS: tl.constexpr, ADD: tl.constexpr, OUT: tl.constexpr, SCALE: tl.constexpr,
    NEXT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """both = norm(dense) + norm(mix of the experts): rounded where the separate steps round. ADD: what
    `norm.residual_norm` makes of x and both. y [R · TOP, n], weight float32 [R · TOP], dense [R, n] (PARTS: float32
    [PARTS, R, n], spans of a product that are still to be added; 0: it is done) -> x_out [R, n], NEXT: h_out [R, n].

    Grid (R,): a program per row.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    ok = i < n
    kind = x_out.dtype.element_ty
    dw = tl.load(dense_w + i, mask=ok, other=0.0)
    pw = tl.load(post_w + i, mask=ok, other=0.0)
    if OUT:
        ow = tl.load(out_w + i, mask=ok, other=0.0)
    if NEXT:
        nw = tl.load(next_w + i, mask=ok, other=0.0)
    if SCALE:
        factor = tl.load(scale).to(kind).to(tl.float32)
    pdl_start(PDL)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(TOP):
        acc += tl.load(weight + row * TOP + slot) * tl.load(y + (row * TOP + slot) * n + i, mask=ok, other=0.0).to(
            tl.float32
        )
    if PARTS == 0:
        a = tl.load(dense + row * n + i, mask=ok, other=0.0).to(tl.float32)
    else:
        a = tl.load(dense + row * n + i, mask=ok, other=0.0)
        if PARTS > 1:
            a += 0.0
        for part in tl.static_range(1, PARTS):
            a += tl.load(dense + (part * tl.num_programs(0) + row) * n + i, mask=ok, other=0.0)
        a = a.to(kind).to(tl.float32)
    b = acc.to(kind).to(tl.float32)
    a = (a * tl.rsqrt(tl.sum(a * a, 0) / n + eps) * dw).to(kind).to(tl.float32)
    b = (b * tl.rsqrt(tl.sum(b * b, 0) / n + eps) * pw).to(kind).to(tl.float32)
    both = (a + b).to(kind)
    if ADD:
        c = both.to(tl.float32)
        if OUT:
            c = (c * tl.rsqrt(tl.sum(c * c, 0) / n + eps) * ow).to(kind).to(tl.float32)
        both = (tl.load(x + row * n + i, mask=ok, other=0.0).to(tl.float32) + c).to(kind)
        if SCALE:
            both = (both.to(tl.float32) * factor).to(kind)
    tl.store(x_out + row * n + i, both, mask=ok)
    if NEXT:
        h = both.to(tl.float32)
        tl.store(h_out + row * n + i, (h * tl.rsqrt(tl.sum(h * h, 0) / n + eps) * nw).to(kind), mask=ok)


def expert_tile(pairs: int, experts: int) -> ExpertTile:
    """By how many pairs an expert has on average."""
    mean = pairs / experts
    if mean <= 32:
        return ExpertTile(16 if mean <= 8 else 32, bn=128, stages=5, warps=4)
    return ExpertTile(bm=64, bn=128, stages=4, warps=4) if mean <= 90 else ExpertTile(bm=128, bn=128, stages=3, warps=4)


def grouped_gemm(
    source: Tensor, w: DeviceWeight, to: Tensor, pairs: Pairs, share: int, act: str | None, pdl: bool
) -> None:
    """to[pair] = source[pair // share] · w[expert]ᵀ; act: w is gate and up, and its answer act(gate) * up."""
    if isinstance(w, QuantExperts):
        tile = choose_tile(pairs, w.matrix, act is not None, shared=max_smem(source.device))
        quant_product(source, w, to, pairs=pairs, share=share, act=act, pdl=pdl, tile=tile)
        return
    tile = expert_tile(pairs.count, pairs.experts)
    n = to.shape[1]
    k = source.shape[1]
    float32 = source.dtype == torch.float32
    gated = act is not None
    bk = 32 if float32 else 64
    bn = tile.bn // 2 if gated else tile.bn
    experts_kernel[(triton.cdiv(n, bn), pairs.tiles(tile.bm))](
        source, as_tensor(w), pairs.members, pairs.counts, to, n, k, EXPERTS=pairs.experts, BLOCK_E=pairs.block,
        SHARE=share, GATED=gated, ACT=act or "", BM=tile.bm, BN=bn, BK=bk, EVEN=k % bk == 0, ALONE=pairs.alone,
        PREC=precision(source), PDL=pdl, num_warps=tile.warps, num_stages=2 if float32 else tile.stages, launch_pdl=pdl,
    )


def products(pairs: Pairs, x: Tensor, gate_up: DeviceWeight, down: DeviceWeight, act: str, pdl: bool) -> Tensor:
    """x [R, H] -> [pairs, H]."""
    inner_out, pair_out = (x.new_empty((pairs.count, width)) for width in (down.shape[2], x.shape[1]))
    grouped_gemm(x, gate_up, inner_out, pairs=pairs, share=pairs.top, act=act, pdl=pdl)
    grouped_gemm(inner_out, down, pair_out, pairs=pairs, share=1, act=None, pdl=pdl)
    return pair_out


def experts(pairs: Pairs, x: Tensor, gate_up: DeviceWeight, down: DeviceWeight, act: str, pdl: bool) -> Tensor:
    """x [R, H] -> [R, H]; pairs: of these rows."""
    pair_out = products(pairs, x, gate_up, down=down, act=act, pdl=pdl)
    out = torch.empty_like(x)
    rows, hidden = x.shape
    mix_kernel[(rows, triton.cdiv(hidden, 1024))](
        pair_out, pairs.weight, out, hidden, TOP=pairs.top, BLOCK=1024, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )
    return out


def mix(
    pair_out: Tensor, weight: Tensor, dense: Tensor, stream: Tensor, end: MoeResidual, pdl: bool
) -> tuple[Tensor, Tensor]:
    """pair_out [pairs, H], weight float32 [pairs]; dense [R, H], or float32 [parts, R, H]: spans that are still to be
    added -> the residual stream [R, H], and its norm by end.next_norm (itself where there is none)."""
    rows, hidden = stream.shape
    x = stream.contiguous()
    whole = rows < PROMPT  # else two launches: more programs at a time are worth more than what one would save
    operands = (end.post_norm, end.scale, end.next_norm)
    post, scaled, normed = (whole and w is not None for w in operands)
    x_out = torch.empty_like(x)
    h_out = torch.empty_like(x) if normed else x_out
    block, warps = width_warps(hidden)
    mix_epilogue_kernel[(rows,)](
        pair_out, weight, dense.contiguous(), end.dense_norm, end.routed_norm, x,
        *(x if w is None else w for w in operands),
        x_out, h_out, hidden, end.eps, TOP=len(weight) // rows, PARTS=len(dense) if dense.dim() == 3 else 0, ADD=whole,
        OUT=post, SCALE=scaled, NEXT=normed, BLOCK=block, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )
    return (x_out, h_out) if whole else residual_norm(x, x_out, *operands, end.eps, pdl)[:2]
