"""Mixture of experts: each needed expert is read once a tile of pairs, and a row's answer depends on that row alone.

A pair is (row, slot): one of a row's chosen experts. `routing` picks the experts of each row and lists the pairs by expert; the
grouped products run over tiles of up to 128 pairs of one expert; `mix` adds a row's slots in their order. How many pairs a tile
takes follows from their number; a pair's sums are one chain over the inner dimension whatever the tile (linear.chain). Quantised
experts have a product of their own (`quant_moe`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import Held
from ..reference import plain
from .common import activate, start
from .linear import chain, gate_and_up, weight_rows
from .norm import width_warps
from .quant_moe import ExpertTile, QuantExperts, choose_tile, quant_product
from .quant_tiles import shared_of
from .routing import Pairs, pairs_of, tile_of


@triton.jit
def experts_kernel(
    x, w, members, counts, out, N, K,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, SHARE: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, ALONE: tl.constexpr,
    PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[pair] = x[pair // SHARE] · w[expert]ᵀ (GATED: act(gate) * up). Program (n, t): columns n of the t-th tile of pairs, counted
    through the experts; programs past the last tile leave at once."""
    pid_n, t = tl.program_id(0), tl.program_id(1)
    start(PDL)
    e, first, count, some = tile_of(members, counts, t, EXPERTS, BLOCK_E, BM, ALONE)
    if some:
        SIDES: tl.constexpr = 2 if GATED else 1
        w_row = w + (e.to(tl.int64) * SIDES * N + weight_rows(pid_n * BN, N, BN, GATED)) * K
        cols = pid_n * BN + tl.arange(0, BN)
        kind = out.dtype.element_ty
        i = tl.arange(0, BM)
        pair = pairs_of(members, first, count, BM, ALONE)
        acc = chain(x + pair // SHARE * K, i < count, w_row, 0, K, BM, BN * SIDES, BK, True, EVEN, PREC)
        if GATED:
            acc, up = gate_and_up(acc, BM, BN)
            acc = activate(acc.to(kind).to(tl.float32), ACT).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
        tl.store(out + pair[:, None] * N + cols[None, :], acc.to(kind), mask=(i < count)[:, None] & (cols[None, :] < N))


@triton.jit
def mix_kernel(y, weight, out, n, TOP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[row] = sum over slots, in order, of weight * y."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < n
    start(PDL)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(TOP):
        acc += tl.load(weight + row * TOP + slot) * tl.load(y + (row * TOP + slot) * n + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * n + i, acc.to(out.dtype.element_ty), mask=ok)


@triton.jit
def mix_beside_kernel(
    y, weight, dense, dense_w, post_w, out, n, eps, TOP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out[row] = norm(dense) + norm(mix): rounded where the separate steps round."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    ok = i < n
    kind = out.dtype.element_ty
    dw, pw = tl.load(dense_w + i, mask=ok, other=0.0), tl.load(post_w + i, mask=ok, other=0.0)
    start(PDL)
    a = tl.load(dense + row * n + i, mask=ok, other=0.0).to(tl.float32)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(TOP):
        acc += tl.load(weight + row * TOP + slot) * tl.load(y + (row * TOP + slot) * n + i, mask=ok, other=0.0).to(tl.float32)
    b = acc.to(kind).to(tl.float32)
    a = (a * tl.rsqrt(tl.sum(a * a, 0) / n + eps) * dw).to(kind).to(tl.float32)
    b = (b * tl.rsqrt(tl.sum(b * b, 0) / n + eps) * pw).to(kind).to(tl.float32)
    tl.store(out + row * n + i, (a + b).to(kind), mask=ok)


@dataclass(frozen=True)
class Grouping:
    """What a program of the grouped products takes: pairs, and rows of weights."""

    pairs: int
    wide: int
    stages: int
    warps: int


def grouping(pairs: int, experts: int) -> Grouping:
    """By how many pairs an expert has on average."""
    mean = pairs / experts
    if mean <= 8:
        return Grouping(16, 128, 5, 4)
    if mean <= 32:
        return Grouping(32, 128, 5, 4)
    return Grouping(64, 128, 4, 4) if mean <= 90 else Grouping(128, 128, 3, 4)


Cut = Grouping | ExpertTile


def grouped(source: Tensor, w: Held, to: Tensor, pairs: Pairs, share: int, act: str | None, pdl: bool, cut: Cut | None) -> None:
    """to[pair] = source[pair // share] · w[expert]ᵀ; act: w is gate and up, and its answer act(gate) * up."""
    if isinstance(w, QuantExperts):
        tile = cut if isinstance(cut, ExpertTile) else choose_tile(pairs, w.matrix, act is not None, shared_of(source.device))
        quant_product(source, w, to, pairs, share, act, pdl, tile)
        return
    g = cut if isinstance(cut, Grouping) else grouping(pairs.count, pairs.experts)
    n, k = to.shape[1], source.shape[1]
    float32, gated = source.dtype == torch.float32, act is not None
    bk, bn = 32 if float32 else 64, g.wide // 2 if gated else g.wide
    experts_kernel[(triton.cdiv(n, bn), pairs.tiles(g.pairs))](
        source, plain(w), pairs.members, pairs.counts, to, n, k,
        EXPERTS=pairs.experts, BLOCK_E=pairs.block, SHARE=share, GATED=gated, ACT=act or "",
        BM=g.pairs, BN=bn, BK=bk, EVEN=k % bk == 0, ALONE=pairs.alone, PREC="tf32x3" if float32 else "tf32", PDL=pdl,
        num_warps=g.warps, num_stages=2 if float32 else g.stages, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@dataclass(frozen=True)
class Beside:
    """The dense MLP's answer, to which the routed one is added, each under its norm."""

    dense: Tensor
    dense_w: Tensor
    post_w: Tensor
    eps: float


def experts(
    pairs: Pairs, x: Tensor, gate_up: Held, down: Held, act: str, pdl: bool,
    beside: Beside | None = None, cut: tuple[Cut, Cut] | None = None,
) -> Tensor:  # fmt: skip
    """x [R, H] -> [R, H]; pairs: of these rows. cut: other tiles than the rule's, for measuring."""
    rows, hidden = x.shape
    launch = {"launch_pdl": True} if pdl else {}
    inner_out = torch.empty((pairs.count, down.shape[2]), dtype=x.dtype, device=x.device)
    pair_out = torch.empty((pairs.count, hidden), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    first, second = cut or (None, None)
    grouped(x, gate_up, inner_out, pairs, pairs.top, act, pdl, first)
    grouped(inner_out, down, pair_out, pairs, 1, None, pdl, second)
    if beside is not None:
        block, warps = width_warps(hidden)
        mix_beside_kernel[(rows,)](
            pair_out, pairs.weight, beside.dense.contiguous(), beside.dense_w, beside.post_w, out, hidden, beside.eps,
            TOP=pairs.top, BLOCK=block, PDL=pdl, num_warps=warps, **launch,
        )  # fmt: skip
        return out
    mix_kernel[(rows, triton.cdiv(hidden, 1024))](
        pair_out, pairs.weight, out, hidden, TOP=pairs.top, BLOCK=1024, PDL=pdl, num_warps=4, **launch
    )
    return out
