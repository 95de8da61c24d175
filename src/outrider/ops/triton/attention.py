"""Attention over paged K/V for a few queries a sequence (decode, verify, draft), and for prompt chunks.

The queries of a sequence and the heads that share a K/V head are packed into the rows of one tile. For few queries the
keys are cut into splits at absolute positions, so that a row's sum has the same order whatever else is in the batch: a
block of keys that a row cannot see leaves its state bitwise unchanged (weights exactly 0, rescaling exactly 1). A second
kernel combines the splits that a row can see, in order. The sum of weights is a matrix product too: its order, unlike that
of a reduction, does not follow from the tile's shape. Scores are a batched product over slices of the head, one a warp:
otherwise every warp would hold the whole query and walk the whole chain of dependent instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import AttnSpec, KVView
from .common import gdc_launch_dependents, gdc_wait, prefetch

INDEX = ["table", "positions", "row_start"]  # compiled once, however they are aligned
MANY = 1 << 30
PREFILL_ROWS = 64  # more rows than this of one sequence: a prompt chunk


@dataclass(frozen=True)
class Cut:
    """How keys are cut. A function of the layer: never of the rows, the batch or the length."""

    bn: int  # keys a block; one block's weights are computed together
    fine: int = 64  # keys a split
    warps: int = 4
    stages: int = 2
    slices: int = 4  # of the head: 1, or one a warp
    # Full layers: splits of `fine` keys up to `near`, of `mid` up to `far`, then of `coarse`. Short contexts need many
    # programs; long ones have them anyway, and the partial results must stay bounded.
    near: int = 1024
    mid: int = 128
    far: int = 8192
    coarse: int = 1024
    # (up to so many queries a K/V head, in tiles of so many, with so many warps): free where slices is 1, else warps = slices.
    queries: tuple[tuple[int, int, int], ...] = ()


def choose_cut(spec: AttnSpec, dtype: torch.dtype) -> Cut:
    """Measured on an H200 at 1, 5, 9 and 17 rows of 1k and 4k."""
    if dtype == torch.float32:
        return Cut(16, 128, warps=8, slices=1)
    if spec.head_dim < 256:
        return Cut(32, 64 if spec.head_dim < 128 else 32)
    if spec.window is not None and spec.kv_heads >= 8:
        return Cut(64, 64, slices=1, queries=((10, 16, 4), (18, 32, 4), (MANY, 32 if spec.kv_heads == 8 else 16, 4)))
    if spec.window is not None:
        return Cut(32, 32, slices=1, queries=((MANY, 16, 4),))
    if spec.heads >= 16:
        return Cut(64, 64, slices=1, queries=((16, 16, 8), (MANY, 32, 8)))
    return Cut(32, 32, slices=1, queries=((8, 16, 8), (MANY, 16, 4)))


@triton.jit
def _range(
    slot, first_at, WINDOW: tl.constexpr,
    FINE: tl.constexpr, MID: tl.constexpr, COARSE: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """The keys of a slot. Under a window slots count from the first split that the sequence's first row can see."""
    if WINDOW > 0:
        begin = (tl.maximum(tl.load(first_at) - WINDOW + 1, 0) // FINE + slot) * FINE
        return begin, begin + FINE
    else:
        return _bounds(slot, FINE, MID, COARSE, NEAR, FAR)


@triton.jit
def _bounds(slot, FINE: tl.constexpr, MID: tl.constexpr, COARSE: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr):
    """The keys of a full layer's split."""
    near: tl.constexpr = NEAR // FINE
    far: tl.constexpr = near + (FAR - NEAR) // MID
    begin = tl.minimum(slot, near) * FINE + tl.minimum(tl.maximum(slot - near, 0), far - near) * MID + tl.maximum(slot - far, 0) * COARSE
    return begin, begin + tl.where(slot < near, FINE, tl.where(slot < far, MID, COARSE))


@triton.jit
def _split_of(key, FINE: tl.constexpr, MID: tl.constexpr, COARSE: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr):
    """The split that holds a key."""
    near: tl.constexpr = NEAR // FINE
    far: tl.constexpr = near + (FAR - NEAR) // MID
    beyond = tl.where(key < FAR, near + tl.maximum(key - NEAR, 0) // MID, far + tl.maximum(key - FAR, 0) // COARSE)
    return tl.where(key < NEAR, key // FINE, beyond)


@triton.jit
def _keys(
    keys, values, page, page_stride, kv_head, k, live, d,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """A block of keys [BN, DP] (sliced: [SLICES, BN, DP / SLICES]) and its values [BN, DP]."""
    key = k + tl.arange(0, BN)
    at = page.to(tl.int64) * page_stride + (kv_head * PAGE + key % PAGE) * D
    ok = live[:, None] & (d < D)[None, :]
    if SLICES > 1:
        DS: tl.constexpr = DP // SLICES
        ds = (tl.arange(0, SLICES) * DS)[:, None, None] + tl.arange(0, DS)[None, None, :]
        kt = tl.load(keys + at[None, :, None] + ds, mask=live[None, :, None] & (ds < D), other=0.0)
    else:
        kt = tl.load(keys + at[:, None] + d[None, :], mask=ok, other=0.0)
    return kt, tl.load(values + at[:, None] + d[None, :], mask=ok, other=0.0)


@triton.jit
def _block(
    query, kt, vt, k, live, at, ones, acc, total, top, scale,
    BN: tl.constexpr, WINDOW: tl.constexpr, SLICES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Take a block of keys into the running sums."""
    key = k + tl.arange(0, BN)
    if SLICES > 1:
        s = tl.sum(tl.dot(query, tl.permute(kt, (0, 2, 1)), input_precision=PREC), 0) * scale  # [BQ, BN]
    else:
        s = tl.dot(query, tl.trans(kt), input_precision=PREC) * scale
    seen = (key[None, :] <= at[:, None]) & live[None, :]
    if WINDOW > 0:
        seen = seen & (key[None, :] > at[:, None] - WINDOW)
    s = tl.where(seen, s, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1))
    ref = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - ref[:, None]).to(vt.dtype)
    fade = tl.exp2(top - ref)[:, None]
    return tl.dot(p, vt, acc * fade, input_precision=PREC), tl.dot(p, ones, total * fade, input_precision=PREC), new


@triton.jit(do_not_specialize=["slots", "table_stride"], do_not_specialize_on_alignment=INDEX)
def attend_kernel(
    q, keys, values, table, positions, row_start, out, part, part_ml,
    table_stride, page_stride, scale, slots,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    BQ: tl.constexpr, BN: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr,
    FINE: tl.constexpr, MID: tl.constexpr, COARSE: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    LONE: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    slot, b = tl.program_id(0), tl.program_id(2)
    kv_head, tile = tl.program_id(1) % KV_HEADS, tl.program_id(1) // KV_HEADS
    GROUP: tl.constexpr = HEADS // KV_HEADS
    if PDL:
        gdc_launch_dependents()
    # Positions and tables stand since before the pass: where the keys are is known before the kernel ahead is done.
    first, end = tl.load(row_start + b), tl.load(row_start + b + 1)
    count = (end - first) * GROUP
    m = tile * BQ + tl.arange(0, BQ)
    ok = m < count
    row = (first + tl.maximum(tl.minimum(m, count - 1), 0) // GROUP).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    alive = tile * BQ < count
    at = tl.load(positions + row, mask=m < tl.where(alive, tile * BQ + BQ, 0), other=0)  # [BQ]
    tile_end = tl.max(at, 0) + 1
    key_from, key_to = tile_end * 0, tile_end
    if WINDOW > 0:
        key_from = tl.maximum(tl.min(at, 0) - WINDOW + 1, 0) // BN * BN
    if SPLIT:
        split_from, split_to = _range(slot, positions + tl.where(alive, first, 0), WINDOW, FINE, MID, COARSE, NEAR, FAR)
        key_from, key_to = tl.maximum(key_from, split_from), tl.minimum(key_to, split_to)
    key_to = tl.where(alive, key_to, 0)
    if SPLIT:  # noqa: SIM102
        if PDL:  # noqa: SIM102
            # K/V may be in the making, but L2 is where it will be made. The first tile fetches for all, a bit further than it sees.
            if (tile == 0) & (key_from < key_to):
                ahead = key_from + tl.arange(0, FINE)
                near = ahead < key_to
                page = tl.load(table + b * table_stride + ahead // PAGE, mask=near, other=0).to(tl.int64)
                line = page * page_stride + (kv_head * PAGE + ahead % PAGE) * D
                each = tl.minimum(tl.arange(0, DP // 64 if DP > 64 else 1) * 64, D - 1)
                prefetch(keys + line[:, None] + each[None, :])
                prefetch(values + line[:, None] + each[None, :])
    next_key = key_from + tl.arange(0, BN)
    page = tl.load(table + b * table_stride + next_key // PAGE, mask=next_key < key_to, other=0)
    if PDL:
        gdc_wait()
    if key_from < key_to:
        d = tl.arange(0, DP)
        d_ok = d < D
        if SLICES > 1:
            DS: tl.constexpr = DP // SLICES
            ds = (tl.arange(0, SLICES) * DS)[:, None, None] + tl.arange(0, DS)[None, None, :]
            from_q = q + (row * (HEADS * D) + head * D)[None, :, None] + ds
            query = tl.load(from_q, mask=ok[None, :, None] & (ds < D), other=0.0)  # [SLICES, BQ, DS]
        else:
            from_q = q + (row * (HEADS * D) + head * D)[:, None] + d[None, :]
            query = tl.load(from_q, mask=ok[:, None] & d_ok[None, :], other=0.0)
        top = tl.full((BQ,), float("-inf"), dtype=tl.float32)
        # Wider than high: the compiler then spreads the columns of this product, and of the next one, over the warps.
        WIDE: tl.constexpr = 16 if BQ >= 64 else 2 * BQ
        total = tl.zeros((BQ, WIDE), dtype=tl.float32)
        acc = tl.zeros((BQ, DP), dtype=tl.float32)
        ones = tl.full((BN, WIDE), 1.0, dtype=values.dtype.element_ty)
        if LONE:
            live = key_from + tl.arange(0, BN) < key_to
            kt, vt = _keys(keys, values, page, page_stride, kv_head, key_from, live, d, D, DP, PAGE, BN, SLICES)
            acc, total, top = _block(
                query, kt, vt, key_from, live, at, ones, acc, total, top, scale, BN, WINDOW, SLICES, PREC
            )  # fmt: skip
        else:
            for k in range(key_from, key_to, BN):
                key = k + tl.arange(0, BN)
                live = key < key_to
                if not SPLIT:
                    page = tl.load(table + b * table_stride + key // PAGE, mask=live, other=0)
                here = page
                if SPLIT:  # of the next block, ahead of time
                    page = tl.load(table + b * table_stride + (key + BN) // PAGE, mask=key + BN < key_to, other=0)
                kt, vt = _keys(keys, values, here, page_stride, kv_head, k, live, d, D, DP, PAGE, BN, SLICES)
                acc, total, top = _block(
                    query, kt, vt, k, live, at, ones, acc, total, top, scale, BN, WINDOW, SLICES, PREC
                )  # fmt: skip
        mass = tl.max(total, 1)  # all columns are equal
        if SPLIT:
            to = (row * HEADS + head) * slots + slot
            tl.store(part + to[:, None] * D + d[None, :], acc, mask=ok[:, None] & d_ok[None, :])
            tl.store(part_ml + to * 2, top, mask=ok)
            tl.store(part_ml + to * 2 + 1, mass, mask=ok)
        else:
            to = row[:, None] * (HEADS * D) + head[:, None] * D + d[None, :]
            tl.store(out + to, (acc / mass[:, None]).to(out.dtype.element_ty), mask=ok[:, None] & d_ok[None, :])


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=["positions", "row_seq", "row_start"])
def combine_kernel(
    part, part_ml, out, positions, row_seq, row_start, slots,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, WINDOW: tl.constexpr,
    FINE: tl.constexpr, MID: tl.constexpr, COARSE: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    SB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A piece of one head of one row a program. Blocks of SB splits start at the row's own first split."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.load(positions + row)
    if WINDOW > 0:
        origin = tl.maximum(tl.load(positions + tl.load(row_start + tl.load(row_seq + row))) - WINDOW + 1, 0) // FINE
        lo = tl.maximum(at - WINDOW + 1, 0) // FINE - origin
        hi = at // FINE + 1 - origin
    else:
        lo = at * 0
        hi = _split_of(at, FINE, MID, COARSE, NEAR, FAR) + 1
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    base = (row * HEADS + head) * slots
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    d_ok = d < D
    i = tl.arange(0, SB)
    top, mass = float("-inf"), 0.0
    acc = tl.zeros((BD,), dtype=tl.float32)
    for s in range(lo, hi, SB):  # nearly always once: everything is asked for together
        ok = s + i < hi
        m = tl.load(part_ml + (base + s + i) * 2, mask=ok, other=float("-inf"))
        total = tl.load(part_ml + (base + s + i) * 2 + 1, mask=ok, other=0.0)
        o = tl.load(part + (base + s + i)[:, None] * D + d[None, :], mask=ok[:, None] & d_ok[None, :], other=0.0)
        best = tl.maximum(top, tl.max(m, 0))
        fade = tl.exp2(top - best)
        weight = tl.exp2(m - best)
        mass = mass * fade + tl.sum(weight * total, 0)
        acc = acc * fade + tl.sum(weight[:, None] * o, 0)
        top = best
    tl.store(out + (row * HEADS + head) * D + d, (acc / mass).to(out.dtype.element_ty), mask=d_ok)


def split_count(spec: AttnSpec, kv: KVView, cut: Cut) -> int:
    """Slots that cover every key any row of this pass can see: a host number, so that a captured grid stays valid."""
    length = kv.max_context
    if spec.window is not None:
        return min(triton.cdiv(length, cut.fine), (spec.window + kv.max_rows - 2) // cut.fine + 2)
    pieces = ((min(length, cut.near), cut.fine), (min(length, cut.far) - cut.near, cut.mid), (length - cut.far, cut.coarse))
    return sum(triton.cdiv(keys, size) for keys, size in pieces if keys > 0)


def attend(q: Tensor, spec: AttnSpec, kv: KVView, pdl: bool, cut: Cut | None = None) -> Tensor:
    keys, values = kv.keys[spec.kv_layer], kv.values[spec.kv_layer]
    assert keys is not None and values is not None
    rows, batch, group, dim = q.shape[0], kv.row_start.shape[0] - 1, spec.heads // spec.kv_heads, spec.head_dim
    cut = cut or choose_cut(spec, q.dtype)
    out = torch.empty_like(q)
    table = kv.tables[spec.group]
    padded, wide = triton.next_power_of_2(dim), q.dtype == torch.float32
    split = kv.max_rows <= PREFILL_ROWS
    packed = kv.max_rows * group
    bq, warps = 16 if wide or (split and packed <= 16) else 32 if split else 64, cut.warps
    if split and not wide:
        bq, warps = next(((b, w) for most, b, w in cut.queries if packed <= most), (bq, warps))
    slots = split_count(spec, kv, cut) if split else 1
    part = torch.empty((rows, spec.heads, slots, dim), dtype=torch.float32, device=q.device) if split else out
    part_ml = torch.empty((rows, spec.heads, slots, 2), dtype=torch.float32, device=q.device) if split else out
    same = dict(
        HEADS=spec.heads, D=dim, WINDOW=spec.window or 0, FINE=cut.fine, MID=cut.mid, COARSE=cut.coarse, NEAR=cut.near, FAR=cut.far,
        PDL=pdl, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    tiles = spec.kv_heads * triton.cdiv(packed, bq)
    attend_kernel[(slots, tiles, batch)](
        q, keys, values, table, kv.positions, kv.row_start, out, part, part_ml,
        table.stride(0), keys.stride(0), spec.scale * 1.4426950408889634, slots,
        KV_HEADS=spec.kv_heads, DP=padded, PAGE=kv.page_size, BQ=bq, BN=cut.bn if split or wide else 64 if dim <= 256 else 32,
        SLICES=cut.slices if split else 1, SPLIT=split, PREC="tf32x3" if wide else "tf32",
        LONE=split and spec.window is not None and cut.fine == cut.bn,
        num_warps=warps if split or padded <= 128 else 8, num_stages=cut.stages if split else 2, **same,
    )  # fmt: skip
    if split:
        # A warp reads 16 splits of 128 columns: all of them are under way at once, and little is exchanged between threads.
        block = 64 if (cut.near if spec.window is None else spec.window - 1) // cut.fine >= 31 else 32
        piece = min(padded, 128)
        combine_kernel[(rows, spec.heads, triton.cdiv(dim, piece))](
            part, part_ml, out, kv.positions, kv.row_seq, kv.row_start, slots, BD=piece, SB=block, num_warps=block // 16, **same
        )
    return out
