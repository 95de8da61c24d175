"""Attention of long prompts on full layers with heads of 512, where splits are of two blocks: from 1,024 to 8,192 keys.

The sums of `attention`, so the same bits. Two blocks of keys are taken together: they are a split, or two. Keys go by a quarter of their
columns at a time, and two programs share the columns of the values, so that tiles of 128 queries fit the registers; both make all scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import AttnSpec, KVView
from .attention import INDEX, _known, power
from .attention_shapes import WIDE_HEAD, Cut, choose_cut
from .common import prefetch, start
from .quant_tiles import shared_of

TILE = 128  # queries a program: rows times the heads that share a K/V head
ENOUGH = 1024  # programs


def suited(spec: AttnSpec, kv: KVView, dtype: torch.dtype, shared: int) -> bool:
    """Whether splits are of one block and of two, K/V is held as it is computed, the tile fits, and the pass is one of chunks of similar
    length that fill many tiles: a few drafted rows would fill a third of one, and take several times as long as in `attention`.
    In bfloat16: a split's factor goes into its weights, and float16 has no room for small ones."""
    cut, keys = choose_cut(spec, dtype, shared), kv.keys[spec.kv_layer]
    plain = dtype == torch.bfloat16 and keys is not None and keys.dtype == dtype and kv.paths is None
    fits = spec.window is None and spec.head_dim == 512 and cut.bn == 64 and cut.near < kv.max_context <= cut.far and shared > WIDE_HEAD
    rows, batch = kv.positions.shape[0], kv.row_start.shape[0] - 1
    return plain and fits and 2 * rows >= batch * kv.max_rows and 2 * rows * spec.heads >= ENOUGH * TILE


def attend(q: Tensor, spec: AttnSpec, kv: KVView, pdl: bool, cut: Cut | None = None, bq: int = TILE) -> Tensor:
    """cut, bq: others than the rules', for tests."""
    keys, values = kv.keys[spec.kv_layer], kv.values[spec.kv_layer]
    assert keys is not None and values is not None
    cut = cut or choose_cut(spec, q.dtype, shared_of(q.device))
    assert cut.bn == cut.fine and cut.mid == 2 * cut.bn and cut.near % cut.mid == 0 and kv.max_context <= cut.far
    out, table = torch.empty_like(q), kv.tables[spec.group]
    tiles = triton.cdiv(kv.max_rows * (spec.heads // spec.kv_heads), bq)
    long_kernel[(2 * tiles, spec.kv_heads, kv.row_start.shape[0] - 1)](
        q, keys, values, table, kv.positions, kv.row_start, out, table.stride(0), keys.stride(0), spec.scale * 1.4426950408889634,
        HEADS=spec.heads, KV_HEADS=spec.kv_heads, D=spec.head_dim, PAGE=kv.page_size, BQ=bq, BN=cut.bn, NEAR=cut.near,
        PDL=pdl, num_warps=8, num_stages=1, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


@triton.jit
def _places(table, key, key_to, page_stride, kv_head, D: tl.constexpr, PAGE: tl.constexpr):
    """Where these keys begin in the cache."""
    page = tl.load(table + key // PAGE, mask=key < key_to, other=0)
    return page.to(tl.int64) * page_stride + (kv_head * PAGE + key % PAGE) * D


@triton.jit
def _some(of, to, live, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Some columns of a block of keys or values [BN, COUNT]."""
    return tl.load(of + to[:, None] + (FIRST + tl.arange(0, COUNT))[None, :], mask=live[:, None], other=0.0)


@triton.jit
def _scores(q, keys, to, key, key_to, low, at, scale, PIECE: tl.constexpr):
    """[BQ, BN]; masked only where a row does not see all of the block."""
    live = key < key_to
    s = tl.dot(q[0], tl.trans(_some(keys, to, live, 0, PIECE)))
    for i in tl.static_range(1, 4):
        s = tl.dot(q[i], tl.trans(_some(keys, to, live, i * PIECE, PIECE)), s)
    s *= scale
    if tl.max(key, 0) > low:
        s = tl.where(at[:, None] >= key[None, :], s, float("-inf"))
    return s


@triton.jit
def _chain(sums, before, pa, va, pb, vb, near):
    """The sums with two blocks added: as one split, or (near = 1) as two. Exact: `before`, a power of two, and `near`, 0 or 1.
    Additions are explicit: the compiler would make `sums * before` the start of a product, whose sums then had another order."""
    part = tl.dot(pa, va)
    sums = tl.fma(sums, tl.broadcast_to(before, sums.shape), part * near)
    return sums + tl.dot(pb, vb, part * (1.0 - near))


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=INDEX[:3])
def long_kernel(
    q, keys, values, table, positions, row_start, out, table_stride, page_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr,
    NEAR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Half of the columns of a tile of BQ queries (rows times the heads that share a K/V head) of one sequence a program, the last tiles
    first: they see most."""
    tile, kv_head, b = (tl.num_programs(0) - 1 - tl.program_id(0)) // 2, tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    COLUMNS: tl.constexpr = D // 2
    PIECE: tl.constexpr = D // 8
    values += tl.program_id(0) % 2 * COLUMNS
    out += tl.program_id(0) % 2 * COLUMNS
    first, end = tl.load(row_start + b), tl.load(row_start + b + 1)
    count, begin = (end - first) * GROUP, tile * BQ
    start(PDL)
    if begin < count:
        m = begin + tl.arange(0, BQ)
        row = (first + tl.minimum(m, count - 1) // GROUP).to(tl.int64)
        head = kv_head * GROUP + m % GROUP
        at = tl.load(positions + row).to(tl.int32)  # [BQ]
        low, key_to = tl.min(at, 0), tl.max(at, 0) + 1
        of_row = row * (HEADS * D) + head * D
        WIDE: tl.constexpr = D // 4
        of_q = q + of_row[:, None] + tl.arange(0, WIDE)[None, :]
        queries = (tl.load(of_q), tl.load(of_q + WIDE), tl.load(of_q + 2 * WIDE), tl.load(of_q + 3 * WIDE))
        kind = values.dtype.element_ty
        ones = tl.full((BN, 16), 1.0, dtype=kind)
        top = tl.full((BQ,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BQ, 16), dtype=tl.float32)
        acc0 = tl.zeros((BQ, PIECE), dtype=tl.float32)
        # Zeros that the compiler cannot tell to be the same: it takes accumulators that change places for one if they begin alike.
        acc1, acc2, acc3 = acc0 + tl.where(low < -1, 1.0, 0.0), acc0 + tl.where(low < -2, 1.0, 0.0), acc0 + tl.where(low < -3, 1.0, 0.0)
        of_table = table + b * table_stride
        for k in range(0, key_to, 2 * BN):
            ka = k + tl.arange(0, BN)
            kb = ka + BN
            ta = _places(of_table, ka, key_to, page_stride, kv_head, D, PAGE)
            tb = _places(of_table, kb, key_to, page_stride, kv_head, D, PAGE)
            if PDL:  # the next keys and values are asked into L2
                next_key = k + 2 * BN + tl.arange(0, 2 * BN)
                to = _places(of_table, next_key, key_to, page_stride, kv_head, D, PAGE)
                prefetch(keys + to[:, None] + (tl.arange(0, D // 64) * 64)[None, :])
                prefetch(values + to[:, None] + (tl.arange(0, COLUMNS // 64) * 64)[None, :])
            near = tl.where(k < NEAR, 1.0, 0.0)
            s = _scores(queries, keys, ta, ka, key_to, low, at, scale, WIDE)
            peak_a = tl.ceil(tl.max(s, 1))
            pa = tl.exp2(s - _known(peak_a)[:, None]).to(kind)
            s = _scores(queries, keys, tb, kb, key_to, low, at, scale, WIDE)
            peak_b = tl.ceil(tl.max(s, 1))
            new = tl.maximum(top, tl.maximum(peak_a, peak_b))
            peak_b = tl.where(k < NEAR, peak_b, tl.maximum(peak_a, peak_b))  # a split's blocks have one maximum
            pb = tl.exp2(s - _known(peak_b)[:, None])
            ref = _known(new)
            # The factors of splits go into their weights: a power of two rounds nothing there either.
            pb = (pb * power(peak_b - ref)[:, None]).to(kind)
            pa = (pa * power(peak_a - ref)[:, None]).to(kind)
            before = power(top - ref)[:, None]
            top = new
            total = _chain(total, before, pa, ones, pb, ones, near)
            la, lb = ka < key_to, kb < key_to
            for c in range(0, COLUMNS, PIECE):  # a loop and not four lines: these would have all their products alive at once
                va = tl.load(values + c + ta[:, None] + tl.arange(0, PIECE)[None, :], mask=la[:, None], other=0.0)
                vb = tl.load(values + c + tb[:, None] + tl.arange(0, PIECE)[None, :], mask=lb[:, None], other=0.0)
                acc0, acc1, acc2, acc3 = acc1, acc2, acc3, _chain(acc0, before, pa, va, pb, vb, near)
        mass = tl.max(total, 1)[:, None]  # all columns are equal
        ok = (m < count)[:, None]
        d = of_row[:, None] + tl.arange(0, PIECE)[None, :]
        tl.store(out + d, (acc0 / mass).to(out.dtype.element_ty), mask=ok)
        tl.store(out + d + PIECE, (acc1 / mass).to(out.dtype.element_ty), mask=ok)
        tl.store(out + d + 2 * PIECE, (acc2 / mass).to(out.dtype.element_ty), mask=ok)
        tl.store(out + d + 3 * PIECE, (acc3 / mass).to(out.dtype.element_ty), mask=ok)
