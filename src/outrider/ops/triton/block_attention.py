"""Attention of block drafters: the rows of a block over the paged K/V of the positions before it, and over one another.

The first kernel norms and rotates the block's q and k and stores its K/V for the second. The second packs the rows of a
block and the heads that share a K/V head into a tile, and processes a split of the context; the last split takes the
block's own rows. Drafts decide no token, so splits may follow from the batch: no order of sums is promised here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import BlockAttn, BlockRows, KVView
from ..backend import Angles
from .common import LOG2E, Launcher, pdl_start, precision
from .unpack import plain_value

PROGRAMS = 264  # enough to keep the SMs of a Hopper busy
MAX_SPLITS = 64


@triton.jit
def block_rope_kernel(
    q, made, cos, sin, q_norm, k_norm, q_out, own_k, own_v, slots, first, capacity, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, MADE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, NORM_V: tl.constexpr, PDL: tl.constexpr,
):
    """Norms and rotates a block's q and k: q [R, HEADS, 2 · HALF], made [R, MADE, 2 · HALF], the K/V product (MADE: its
    heads, KV_HEADS if v is the raw k) -> q_out like q; own_k and own_v [B, KV_HEADS, capacity, 2 · HALF] from place
    `first` on.

    Grid (R, HEADS + 2 · KV_HEADS): a program per head of a row: the q heads, then k, then v.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    ok = i < HALF
    pdl_start(PDL)
    c = tl.load(cos + row * HALF + i, mask=ok, other=0.0)
    s = tl.load(sin + row * HALF + i, mask=ok, other=0.0)
    kind = q_out.dtype.element_ty
    base = q + (row * HEADS + head) * (2 * HALF)
    if head >= HEADS:
        base = made + (row * MADE + (head - HEADS) % MADE) * (2 * HALF)
    a = tl.load(base + i, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(base + HALF + i, mask=ok, other=0.0).to(tl.float32)
    inv = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / (2 * HALF) + eps)
    if head < HEADS:
        if Q_NORM:
            a = (a * inv * tl.load(q_norm + i, mask=ok, other=0.0)).to(kind).to(tl.float32)
            b = (b * inv * tl.load(q_norm + HALF + i, mask=ok, other=0.0)).to(kind).to(tl.float32)
        to = q_out + (row * HEADS + head) * (2 * HALF)
        tl.store(to + i, (a * c - b * s).to(kind), mask=ok)
        tl.store(to + HALF + i, (b * c + a * s).to(kind), mask=ok)
    else:
        number = head - HEADS
        place = ((row // slots) * KV_HEADS + number % KV_HEADS) * capacity + first + row % slots
        if number < KV_HEADS:
            if K_NORM:
                a = (a * inv * tl.load(k_norm + i, mask=ok, other=0.0)).to(kind).to(tl.float32)
                b = (b * inv * tl.load(k_norm + HALF + i, mask=ok, other=0.0)).to(kind).to(tl.float32)
            tl.store(own_k + place * (2 * HALF) + i, (a * c - b * s).to(kind), mask=ok)
            tl.store(own_k + place * (2 * HALF) + HALF + i, (b * c + a * s).to(kind), mask=ok)
        else:
            if NORM_V:
                a = a * inv
                b = b * inv
            tl.store(own_v + place * (2 * HALF) + i, a.to(kind), mask=ok)
            tl.store(own_v + place * (2 * HALF) + HALF + i, b.to(kind), mask=ok)


@triton.jit
def _widened(x, KIND: tl.constexpr):
    """K/V as products take it; of eight bits it comes as bytes."""
    if x.dtype == tl.uint8:
        return plain_value(x.to(tl.int32), "fp8").to(KIND)
    else:
        return x.to(KIND)


@triton.jit
def _take(query, kt, vt, seen, acc, total, top, scale, PREC: tl.constexpr):
    """Take a block of keys into the running sums."""
    s = tl.where(seen, tl.dot(query, tl.trans(kt), input_precision=PREC) * scale, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1))
    ref = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - ref[:, None])
    fade = tl.exp2(top - ref)
    acc = tl.dot(p.to(query.dtype), vt, acc * fade[:, None], input_precision=PREC)
    return acc, total * fade + tl.sum(p, 1), new


@triton.jit(do_not_specialize=["table_stride", "slots", "first", "capacity", "splits", "chunk", "back", "window"])
def block_attend_kernel(
    q, keys, values, own_k, own_v, table, end, out, partial_out, partial_lse,
    table_stride, page_stride, scale, slots, first, capacity, splits, chunk, back, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of a block's q [R, HEADS, D] over the paged context before end [B] and over the block's own rows -> out
    [R, HEADS, D], or, SPLIT, for `block_combine_kernel`: partial_out [R, HEADS, splits, D], partial_lse [R, HEADS,
    splits, 2]. back, window: positions that a row sees of the context, counted from the block's begin and from itself.

    Grid (splits, KV_HEADS · tiles, B): a program takes `chunk` keys of the context for a tile of BQ queries; the
    last split also the block's own rows.
    """
    split = tl.program_id(0)
    b = tl.program_id(2)
    kv_head = tl.program_id(1) % KV_HEADS
    tile = tl.program_id(1) // KV_HEADS
    GROUP: tl.constexpr = HEADS // KV_HEADS
    KIND: tl.constexpr = q.dtype.element_ty
    m = tile * BQ + tl.arange(0, BQ)
    ok = m < slots * GROUP
    slot = tl.minimum(m // GROUP, slots - 1)
    row = (b * slots + slot).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    at = first + slot  # places of the queries in the block
    d = tl.arange(0, DP)
    d_ok = d < D
    pdl_start(PDL)
    n = tl.load(end + b).to(tl.int32)
    low = tl.maximum(n - back + 1, 0)
    begin = low // BN * BN + split * chunk
    stop = tl.minimum(begin + chunk, n)
    query = tl.load(q + (row * HEADS + head)[:, None] * D + d[None, :], mask=ok[:, None] & d_ok[None, :], other=0.0)
    acc = tl.zeros((BQ, DP), dtype=tl.float32)
    total = tl.zeros((BQ,), dtype=tl.float32)
    top = tl.full((BQ,), float("-inf"), dtype=tl.float32)
    for k in range(begin, stop, BN):
        key = k + tl.arange(0, BN)
        live = key < stop
        page = tl.load(table + b * table_stride + key // PAGE, mask=live, other=0).to(tl.int64)
        place = (page * page_stride + (kv_head * PAGE + key % PAGE) * D)[:, None] + d[None, :]
        there = live[:, None] & d_ok[None, :]
        kt = _widened(tl.load(keys + place, mask=there, other=0), KIND)
        vt = _widened(tl.load(values + place, mask=there, other=0), KIND)
        seen = (live & (key >= low))[None, :] & (n + at[:, None] - key[None, :] < window)
        acc, total, top = _take(query, kt, vt, seen, acc, total, top, scale, PREC)
    if split == splits - 1:
        base = (b * KV_HEADS + kv_head) * capacity
        for k in range(0, first + slots, BN):
            key = k + tl.arange(0, BN)
            live = key < first + slots
            place = (base + key)[:, None].to(tl.int64) * D + d[None, :]
            there = live[:, None] & d_ok[None, :]
            kt = tl.load(own_k + place, mask=there, other=0.0)
            vt = tl.load(own_v + place, mask=there, other=0.0)
            apart = at[:, None] - key[None, :]
            seen = live[None, :] & (tl.abs(apart) < window)
            if CAUSAL:
                seen = seen & (apart >= 0)
            acc, total, top = _take(query, kt, vt, seen, acc, total, top, scale, PREC)
    if SPLIT:
        to = (row * HEADS + head) * splits + split
        tl.store(partial_lse + to * 2, top, mask=ok)
        tl.store(partial_lse + to * 2 + 1, total, mask=ok)
        tl.store(partial_out + to[:, None] * D + d[None, :], acc, mask=ok[:, None] & d_ok[None, :])
    else:
        tl.store(
            out + (row * HEADS + head)[:, None] * D + d[None, :],
            (acc / total[:, None]).to(KIND),
            mask=ok[:, None] & d_ok[None, :],
        )


@triton.jit(do_not_specialize=["splits"])
def block_combine_kernel(
    partial_out, partial_lse, out, splits, D: tl.constexpr, DP: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr
):
    """Adds the splits of each head: partial_out [R, HEADS, splits, D], partial_lse [R, HEADS, splits, 2] -> out [R,
    HEADS, D].

    Grid (R · HEADS,): a program per head of a row.
    """
    head = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, MOST)
    d = tl.arange(0, DP)
    pdl_start(PDL)
    at = head * splits + i
    top = tl.load(partial_lse + at * 2, mask=i < splits, other=float("-inf"))
    total = tl.load(partial_lse + at * 2 + 1, mask=i < splits, other=0.0)
    weight = tl.exp2(top - tl.max(top, 0))  # the block's own rows are always seen: some split has a maximum
    acc = tl.load(partial_out + at[:, None] * D + d[None, :], mask=(i < splits)[:, None] & (d < D)[None, :], other=0.0)
    mixed = tl.sum(acc * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + head * D + d, mixed.to(out.dtype.element_ty), mask=d < D)


def attend_block(
    ops: Launcher, q: Tensor, kv_rows: Tensor, angles: Angles, attn: BlockAttn, kv: KVView, block: BlockRows, first: int
) -> Tensor:
    spec = attn.spec
    size, kv_heads, capacity, dim = block.keys.shape
    cos, sin = angles
    pdl = ops.pdl
    rows = q.shape[0]
    group = spec.heads // spec.kv_heads
    slots = rows // size
    heads = kv_rows.shape[1] // dim
    turned = torch.empty_like(q)
    block_rope_kernel[(rows, spec.heads + 2 * kv_heads)](
        q, kv_rows, cos, sin, cos if attn.q_norm is None else attn.q_norm, cos if attn.k_norm is None else attn.k_norm,
        turned, block.keys, block.values, slots, first, capacity, spec.eps,
        HEADS=spec.heads, KV_HEADS=kv_heads, MADE=heads, HALF=dim // 2,
        BLOCK=triton.next_power_of_2(dim // 2), Q_NORM=attn.q_norm is not None,
        K_NORM=attn.k_norm is not None, NORM_V=spec.norm_v, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )
    keys = kv.keys[spec.kv_layer]
    values = kv.values[spec.kv_layer]
    table = kv.tables[spec.group]
    assert keys is not None and values is not None
    if keys.itemsize == 1:
        keys = keys.view(torch.uint8)
        values = values.view(torch.uint8)
    far = kv.max_context
    back, window = (min((w for w in windows if w is not None), default=far + capacity) for windows in (
        (spec.window, attn.window), (attn.window,)))
    padded = triton.next_power_of_2(dim)
    bn = 64 if padded <= 128 else 32
    bq = bn if padded <= 256 else 16
    bq = max(16, min(bq, triton.next_power_of_2(slots * group)))
    tiles = triton.cdiv(slots * group, bq)
    reach = min(far, back) + bn
    splits = max(1, min(triton.cdiv(PROGRAMS, size * kv_heads * tiles), triton.cdiv(reach, 2 * bn), MAX_SPLITS))
    chunk = triton.cdiv(triton.cdiv(reach, splits), bn) * bn
    out = torch.empty_like(q)
    sizes = (rows, spec.heads, splits)
    partial_out = out
    partial_lse = out
    if splits > 1:
        partial_out, partial_lse = (q.new_empty((*sizes, width), dtype=torch.float32) for width in (dim, 2))
    block_attend_kernel[(splits, kv_heads * tiles, size)](
        turned, keys, values, block.keys, block.values, table, block.end, out, partial_out, partial_lse,
        table.stride(0), keys.stride(0), spec.scale * LOG2E, slots, first, capacity, splits, chunk, back, window,
        HEADS=spec.heads, KV_HEADS=kv_heads, D=dim, DP=padded, PAGE=kv.page_size,
        CAUSAL=attn.causal, BQ=bq, BN=bn, SPLIT=splits > 1,
        PREC=precision(q), PDL=pdl, num_warps=8 if padded > 256 else 4, num_stages=2, launch_pdl=pdl,
    )
    if splits > 1:
        block_combine_kernel[(rows * spec.heads,)](
            partial_out, partial_lse, out, splits, D=dim, DP=padded, MOST=triton.next_power_of_2(splits), PDL=pdl,
            num_warps=4, launch_pdl=pdl,
        )
    return out
