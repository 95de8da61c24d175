"""Mixture of experts: each needed expert is read once a tile of pairs, and a row's answer depends on that row alone.

A pair is (row, slot): one of a row's chosen experts. `route` picks the experts of each row; `group` lists the pairs by expert; the
grouped products run over tiles of up to 128 pairs of one expert; `mix` adds a row's slots in their order. How many pairs a tile
takes follows from their number; a pair's sums are one chain over the inner dimension whatever the tile (linear.chain).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import activate, start
from .linear import chain, gate_and_up, weight_rows
from .norm import width_warps


@triton.jit
def route_kernel(z, scale, chosen, weight, experts, TOP: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr):
    """z [R, E] float32 router logits -> the TOP best experts in order (ties: the lower id), weights summing to 1 before scale."""
    row = tl.program_id(0)
    e = tl.arange(0, BLOCK)
    start(PDL)
    logit = tl.load(z + row * experts + e, mask=e < experts, other=float("-inf"))
    p = tl.exp(logit - tl.max(logit, 0))
    p = p / tl.sum(p, 0)
    slot = tl.arange(0, SLOTS)
    ids = tl.zeros((SLOTS,), dtype=tl.int32)
    ps = tl.zeros((SLOTS,), dtype=tl.float32)
    for i in tl.static_range(TOP):
        best, at = tl.max(p, 0, return_indices=True, return_indices_tie_break_left=True)
        ids = tl.where(slot == i, at, ids)
        ps = tl.where(slot == i, best, ps)
        p = tl.where(e == at, -1.0, p)
    ok = slot < TOP
    factor = tl.load(scale + ids, mask=ok, other=0.0)
    tl.store(chosen + row * TOP + slot, ids, mask=ok)
    tl.store(weight + row * TOP + slot, ps / tl.sum(ps, 0) * factor, mask=ok)


@triton.jit(do_not_specialize=["pairs"])
def group_kernel(chosen, members, counts, pairs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One expert a program: it puts its pairs, ascending, behind those of the experts before it."""
    e = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    start(PDL)
    before = 0
    for base in range(0, pairs, BLOCK):
        before += tl.sum((tl.load(chosen + base + i, mask=base + i < pairs, other=1 << 30) < e).to(tl.int32), 0)
    found = 0
    for base in range(0, pairs, BLOCK):
        hit = tl.load(chosen + base + i, mask=base + i < pairs, other=-1) == e
        place = before + found + tl.cumsum(hit.to(tl.int32), 0) - 1
        tl.store(members + place, base + i, mask=hit)
        found += tl.sum(hit.to(tl.int32), 0)
    tl.store(counts + e, found)


@triton.jit(do_not_specialize=["pairs"])
def experts_kernel(
    x, w, members, counts, out, pairs, N, K,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, SHARE: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, ALONE: tl.constexpr,
    PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[pair] = x[pair // SHARE] · w[expert]ᵀ (GATED: act(gate) * up). Program (n, t): columns n of the t-th tile of pairs, counted
    through the experts; programs past the last tile leave at once."""
    pid_n, t = tl.program_id(0), tl.program_id(1)
    start(PDL)
    if ALONE:  # a single row: its experts differ, and pair i is its i-th (members: the chosen experts)
        e, first, count, some = tl.load(members + t), t, t * 0 + 1, t >= 0
    else:
        ids = tl.arange(0, BLOCK_E)
        each = tl.load(counts + ids, mask=ids < EXPERTS, other=0)
        tiles = (each + BM - 1) // BM
        upto = tl.cumsum(tiles, 0)
        some = t < tl.sum(tiles, 0)
        e = tl.minimum(tl.sum((upto <= t).to(tl.int32), 0), EXPERTS - 1)
        base = (t - tl.sum(tl.where(ids < e, tiles, 0), 0)) * BM
        first = tl.sum(tl.where(ids < e, each, 0), 0) + base
        count = tl.sum(tl.where(ids == e, each, 0), 0) - base  # pairs of this tile and of the expert's later ones
    if some:
        SIDES: tl.constexpr = 2 if GATED else 1
        cols = pid_n * BN + tl.arange(0, BN)
        w_row = w + (e.to(tl.int64) * SIDES * N + weight_rows(pid_n * BN, N, BN, GATED)) * K
        kind = out.dtype.element_ty
        i = tl.arange(0, BM)
        if ALONE:
            pair = (first + i * 0).to(tl.int64)
        else:
            pair = tl.load(members + first + i, mask=i < count, other=0).to(tl.int64)
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


def grouping(pairs: int, experts: int) -> tuple[Grouping, Grouping]:
    """For the first and the second product, by how many pairs an expert has on average."""
    mean = pairs / experts
    if mean <= 8:
        one = Grouping(16, 128, 5, 4)
    elif mean <= 32:
        one = Grouping(32, 128, 5, 4)
    elif mean <= 90:
        one = Grouping(64, 128, 4, 4)
    else:
        one = Grouping(128, 128, 3, 4)
    return one, one


@dataclass(frozen=True)
class Beside:
    """The dense MLP's answer, to which the routed one is added, each under its norm."""

    dense: Tensor
    dense_w: Tensor
    post_w: Tensor
    eps: float


def experts(
    z: Tensor, x: Tensor, expert_scale: Tensor, gate_up: Tensor, down: Tensor, top_k: int, act: str, pdl: bool,
    beside: Beside | None = None, cut: tuple[Grouping, Grouping] | None = None,
) -> Tensor:  # fmt: skip
    """z [R, E] float32 router logits; x [R, H] -> [R, H]. cut: another grouping than the rule's, for measuring."""
    rows, hidden = x.shape
    count, inner, pairs = down.shape[0], down.shape[2], rows * top_k
    launch = {"launch_pdl": True} if pdl else {}
    chosen = torch.empty((pairs,), dtype=torch.int32, device=x.device)
    weight = torch.empty((pairs,), dtype=torch.float32, device=x.device)
    members = torch.empty((pairs,), dtype=torch.int32, device=x.device)
    counts = torch.empty((count,), dtype=torch.int32, device=x.device)
    inner_out = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    pair_out = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    block = triton.next_power_of_2(count)
    route_kernel[(rows,)](
        z, expert_scale, chosen, weight, count, TOP=top_k, BLOCK=block, SLOTS=triton.next_power_of_2(top_k), PDL=pdl, num_warps=1, **launch
    )
    alone = rows == 1
    if not alone:
        group_kernel[(count,)](
            chosen, members, counts, pairs, BLOCK=256 if pairs <= 1024 else 2048, PDL=pdl, num_warps=1 if pairs <= 1024 else 8, **launch
        )
    first, second = cut or grouping(pairs, count)
    float32 = x.dtype == torch.float32

    def grouped(source: Tensor, w: Tensor, to: Tensor, g: Grouping, share: int, gated: bool) -> None:
        n, k = to.shape[1], source.shape[1]
        bk, bn = 32 if float32 else 64, g.wide // 2 if gated else g.wide
        tiles = min(pairs, min(count, pairs) + pairs // g.pairs)  # no fewer than there can be
        experts_kernel[(triton.cdiv(n, bn), tiles)](
            source, w, chosen if alone else members, counts, to, pairs, n, k,
            EXPERTS=count, BLOCK_E=block, SHARE=share, GATED=gated, ACT=act, BM=g.pairs, BN=bn, BK=bk, EVEN=k % bk == 0, ALONE=alone,
            PREC="tf32x3" if float32 else "tf32", PDL=pdl, num_warps=g.warps, num_stages=2 if float32 else g.stages, **launch,
        )  # fmt: skip

    grouped(x, gate_up, inner_out, first, top_k, True)
    grouped(inner_out, down, pair_out, second, 1, False)
    if beside is not None:
        block, warps = width_warps(hidden)
        mix_beside_kernel[(rows,)](
            pair_out, weight, beside.dense.contiguous(), beside.dense_w, beside.post_w, out, hidden, beside.eps,
            TOP=top_k, BLOCK=block, PDL=pdl, num_warps=warps, **launch,
        )  # fmt: skip
        return out
    mix_kernel[(rows, triton.cdiv(hidden, 1024))](pair_out, weight, out, hidden, TOP=top_k, BLOCK=1024, PDL=pdl, num_warps=4, **launch)
    return out
