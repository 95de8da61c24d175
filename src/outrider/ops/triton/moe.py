"""Mixture of experts without sorting: each needed expert is read once, and a row's answer depends on that row alone.

A pair is (row, slot): one of a row's chosen experts. `route` picks the experts of each row; `group` lists the pairs of each
expert; the grouped products run over the experts that have any, 16 pairs at a time; `mix` adds a row's slots in their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import activate, start
from .linear import MAX_ROWS, sliced
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
    """One expert a program: members[e, :counts[e]] are its pairs, ascending."""
    e = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    start(PDL)
    found = 0
    for base in range(0, pairs, BLOCK):
        hit = tl.load(chosen + base + i, mask=base + i < pairs, other=-1) == e
        place = found + tl.cumsum(hit.to(tl.int32), 0) - 1
        tl.store(members + e * pairs + place, base + i, mask=hit)
        found += tl.sum(hit.to(tl.int32), 0)
    tl.store(counts + e, found)


@triton.jit(do_not_specialize=["pairs"])
def experts_kernel(
    x, w, members, counts, out, pairs, N, K,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, SHARE: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SLICES: tl.constexpr, EVEN: tl.constexpr, ALONE: tl.constexpr,
    PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[pair] = x[pair // SHARE] · w[expert]ᵀ (GATED: act(gate) * up). Programs past the last busy expert leave at once."""
    pid_n, busy = tl.program_id(0), tl.program_id(1)
    start(PDL)
    if ALONE:  # a single row: its experts differ, and pair i is its i-th (members: the chosen experts)
        e, count, some = tl.load(members + busy), busy * 0 + 1, busy >= 0
    else:
        ids = tl.arange(0, BLOCK_E)
        used = tl.load(counts + ids, mask=ids < EXPERTS, other=0) > 0
        rank = tl.cumsum(used.to(tl.int32), 0)
        some = busy < tl.sum(used.to(tl.int32), 0)
        e = tl.sum(tl.where(used & (rank == busy + 1), ids, 0), 0)
        count = tl.load(counts + e)
    if some:
        cols = pid_n * BN + tl.arange(0, BN)
        rows_in_w = 2 * N if GATED else N
        w_row = (e.to(tl.int64) * rows_in_w + tl.minimum(cols, N - 1)) * K
        kind = out.dtype.element_ty
        for base in range(0, count, BM):
            i = base + tl.arange(0, BM)
            if ALONE:
                pair = (busy + i * 0).to(tl.int64)
            else:
                pair = tl.load(members + e * pairs + i, mask=i < count, other=0).to(tl.int64)
            acc, up = sliced(x, w, pair // SHARE, i, w_row, 0, K, count, N, K, K, BM, BN, BK, SLICES, GATED, EVEN, PREC)
            if GATED:
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
class Beside:
    """The dense MLP's answer, to which the routed one is added, each under its norm."""

    dense: Tensor
    dense_w: Tensor
    post_w: Tensor
    eps: float


def experts(
    z: Tensor, x: Tensor, expert_scale: Tensor, gate_up: Tensor, down: Tensor, top_k: int, act: str, pdl: bool, beside: Beside | None = None
) -> Tensor:
    """z [R, E] float32 router logits; x [R, H] -> [R, H]."""
    rows, hidden = x.shape
    count, inner, pairs = down.shape[0], down.shape[2], rows * top_k
    launch = {"launch_pdl": True} if pdl else {}
    chosen = torch.empty((pairs,), dtype=torch.int32, device=x.device)
    weight = torch.empty((pairs,), dtype=torch.float32, device=x.device)
    members = torch.empty((count, pairs), dtype=torch.int32, device=x.device)
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
        group_kernel[(count,)](chosen, members, counts, pairs, BLOCK=256, PDL=pdl, num_warps=1, **launch)
    wide = x.dtype == torch.float32
    same = dict(
        EXPERTS=count, BLOCK_E=block, ACT=act, BM=16 if rows <= MAX_ROWS else 32, SLICES=4, PREC="tf32x3" if wide else "tf32", PDL=pdl,
        ALONE=alone, num_warps=4, num_stages=2 if wide else 4, **launch,
    )  # fmt: skip
    busy, bk = min(count, pairs), 16 if wide else 64
    experts_kernel[(triton.cdiv(inner, 16), busy)](
        x, gate_up, chosen if alone else members, counts, inner_out, pairs, inner, hidden,
        SHARE=top_k, GATED=True, BN=16, BK=bk, EVEN=hidden % (4 * bk) == 0, **same,
    )  # fmt: skip
    experts_kernel[(triton.cdiv(hidden, 32), busy)](
        inner_out, down, chosen if alone else members, counts, pair_out, pairs, hidden, inner,
        SHARE=1, GATED=False, BN=32, BK=bk, EVEN=inner % (4 * bk) == 0, **same,
    )  # fmt: skip
    if beside is not None:
        block, warps = width_warps(hidden)
        mix_beside_kernel[(rows,)](
            pair_out, weight, beside.dense.contiguous(), beside.dense_w, beside.post_w, out, hidden, beside.eps,
            TOP=top_k, BLOCK=block, PDL=pdl, num_warps=warps, **launch,
        )  # fmt: skip
        return out
    mix_kernel[(rows, triton.cdiv(hidden, 1024))](pair_out, weight, out, hidden, TOP=top_k, BLOCK=1024, PDL=pdl, num_warps=4, **launch)
    return out
