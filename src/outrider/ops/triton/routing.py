"""Expert routing: pairs of (row, slot), one of a row's chosen experts each, listed by expert (`list_pairs`), and the
tile of them that a program of the grouped products takes (`tile_of`; dense products: `moe`, quantised: `quant_moe`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import pdl_start


@triton.jit
def route_kernel(
    z, scale, chosen, weight, EXPERTS: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
    PDL: tl.constexpr
):
    """The TOP best experts of each row in order (ties: the lower id), and their weights, which sum to 1 before scale
    [E]: z float32 [R, E] router logits -> chosen int32, weight float32 [R, TOP].

    Grid (R,): a program per row.
    """
    row = tl.program_id(0)
    ids = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    pdl_start(PDL)
    logit = tl.load(z + row * EXPERTS + ids, mask=ids < EXPERTS, other=float("-inf"))
    highest = tl.max(logit, 0)
    total = 0.0
    best = tl.zeros((SLOTS,), dtype=tl.int32)
    ps = tl.zeros((SLOTS,), dtype=tl.float32)
    for i in tl.static_range(TOP):
        high = tl.max(logit, 0)
        at = tl.min(tl.where(logit == high, ids, BLOCK), 0)
        one = tl.exp(high - highest)
        total += one
        ps = tl.where(slot == i, one, ps)
        # logits that are no numbers have no order: some expert
        best = tl.where(slot == i, tl.minimum(at, EXPERTS - 1), best)
        logit = tl.where(ids == at, float("-inf"), logit)
    ok = slot < TOP
    tl.store(chosen + row * TOP + slot, best, mask=ok)
    tl.store(weight + row * TOP + slot, ps / total * tl.load(scale + best, mask=ok, other=0.0), mask=ok)


@triton.jit(do_not_specialize=["pairs"])
def group_kernel(chosen, members, counts, pairs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Lists the pairs by expert, ascending: chosen int32 [pairs] -> members int32 [pairs], counts int32 [E]. A program
    puts its pairs after those of the experts before it.

    Grid (E,): a program per expert.
    """
    e = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    pdl_start(PDL)
    less = tl.zeros((BLOCK,), dtype=tl.int32)
    for base in range(0, pairs, BLOCK):
        less += (tl.load(chosen + base + i, mask=base + i < pairs, other=1 << 30) < e).to(tl.int32)
    before = tl.sum(less, 0)
    num_experts = 0
    for base in range(0, pairs, BLOCK):
        hit = tl.load(chosen + base + i, mask=base + i < pairs, other=-1) == e
        place = before + num_experts + tl.cumsum(hit.to(tl.int32), 0) - 1
        tl.store(members + place, base + i, mask=hit)
        num_experts += tl.sum(hit.to(tl.int32), 0)
    tl.store(counts + e, num_experts)


@triton.jit
def tile_of(members, counts, t, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BM: tl.constexpr, ALONE: tl.constexpr):
    """The t-th tile: its expert, the first of its pairs in the list, how many there are from there on, and whether
    there is such a tile."""
    if ALONE:  # a single row: its experts differ, and pair i is its i-th (members: the chosen experts)
        return tl.load(members + t), t, t * 0 + 1, t >= 0
    else:
        ids = tl.arange(0, BLOCK_E)
        each = tl.load(counts + ids, mask=ids < EXPERTS, other=0)
        tiles = (each + BM - 1) // BM
        upto = tl.cumsum(tiles, 0)
        e = tl.minimum(tl.sum((upto <= t).to(tl.int32), 0), EXPERTS - 1)
        base = (t - tl.sum(tl.where(ids < e, tiles, 0), 0)) * BM
        first = tl.sum(tl.where(ids < e, each, 0), 0) + base
        return e, first, tl.sum(tl.where(ids == e, each, 0), 0) - base, t < tl.sum(tiles, 0)


@triton.jit
def pairs_of(members, first, count, BM: tl.constexpr, ALONE: tl.constexpr):
    """int64 [BM]: the tile's pairs."""
    i = tl.arange(0, BM)
    if ALONE:
        return (first + i * 0).to(tl.int64)
    else:
        return tl.load(members + first + i, mask=i < count, other=0).to(tl.int64)


@dataclass(frozen=True)
class Pairs:
    """Every row's chosen experts. alone: there is one row, with at most one pair per expert."""

    experts: int
    top: int
    alone: bool
    weight: Tensor  # float32 [pairs], by row and slot
    members: Tensor  # int32 [pairs], listed by expert; alone: the experts of the pairs
    counts: Tensor  # int32 [E]: pairs of each expert; alone: not filled

    @property
    def count(self) -> int:
        return len(self.weight)

    @property
    def block(self) -> int:
        return triton.next_power_of_2(self.experts)

    def tiles(self, size: int) -> int:
        """An upper bound of the number of tiles with this many pairs each."""
        return min(self.count, min(self.experts, self.count) + self.count // size)


def list_pairs(z: Tensor, expert_scale: Tensor, top_k: int, pdl: bool) -> Pairs:
    """z [R, E] float32 router logits."""
    rows, count = z.shape
    pairs = rows * top_k
    chosen, counts = (torch.empty((n,), dtype=torch.int32, device=z.device) for n in (pairs, count))
    weight = torch.empty((pairs,), dtype=torch.float32, device=z.device)
    block = triton.next_power_of_2(count)
    slots = triton.next_power_of_2(top_k)
    route_kernel[(rows,)](
        z, expert_scale, chosen, weight,
        EXPERTS=count, TOP=top_k, BLOCK=block, SLOTS=slots, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )
    if rows == 1:
        return Pairs(count, top_k, alone=True, weight=weight, members=chosen, counts=counts)
    members = torch.empty((pairs,), dtype=torch.int32, device=z.device)
    warps = 1 if pairs <= 1024 else 8
    block = 8192
    if pairs <= 8192:
        block = 256 if pairs <= 1024 else 2048
    group_kernel[(count,)](chosen, members, counts, pairs, BLOCK=block, PDL=pdl, num_warps=warps, launch_pdl=pdl)
    return Pairs(count, top_k, alone=False, weight=weight, members=members, counts=counts)
