"""Attention of many sequences with few rows each: one program walks all keys of a sequence, several splits abreast.

The sums of `attention`, so the same bits. With one split at a time a program waits: for a chain of matrix instructions over the columns
of the keys, for the maximum that its warps find together, for the weights that they exchange. Splits abreast wait for these together.
They must be single blocks of whole pages; the longer splits of a full layer are walked block by block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import AttnSpec, KVView
from .attention import INDEX, _add, _block, _fetch, _known, _opens, power
from .attention_shapes import WIDE_HEAD, Cut, choose_cut
from .columns import columns_of, held, in_columns, no_sums, scores_of, sorted_columns
from .common import gdc_launch_dependents, gdc_wait, prefetch
from .quant_tiles import shared_of

MOST = 2048  # positions of a full layer: beyond, most splits are longer than a block


@dataclass(frozen=True)
class Shape:
    """What a program takes; changes no bit."""

    splits: int  # abreast: 2 or 4
    warps: int
    stages: int
    parts: int = 1  # programs that share the columns of the values
    ahead: int = 64  # keys that are asked for before the kernel ahead is done
    bq: int = 16  # queries: rows times the heads that share a K/V head


def choose_shape(spec: AttnSpec, kv: KVView, batch: int, dtype: torch.dtype, shared: int) -> Shape | None:
    """None: not for this pass. Measured on an H200 with E2B, 32 to 128 sequences of 1 and 5 rows at 1k."""
    cut, pairs = choose_cut(spec, dtype, shared), batch * spec.kv_heads
    blocks = cut.bn == 32 and cut.fine == 32 and cut.bn % kv.page_size == 0 and spec.head_dim in (256, 512) and kv.paths is None
    packed = kv.max_rows * (spec.heads // spec.kv_heads)
    if not blocks or dtype == torch.float32 or shared <= WIDE_HEAD or not 32 <= pairs <= 132 or packed > 64:
        return None
    room = pairs <= 66  # two programs a pair find a processor each
    if packed > 16:
        return Shape(2, 4, 3, parts=2, bq=64) if room and spec.window is not None else None
    if pairs < 48 or (spec.window is None and (not room or kv.max_context > MOST)):
        return None
    if spec.window is None:
        return Shape(2, 4, 3, parts=2, ahead=0)
    return Shape(2, 4, 4, parts=2) if room else Shape(2, 4, 3)


def attend(q: Tensor, spec: AttnSpec, kv: KVView, pdl: bool, shape: Shape, cut: Cut | None = None) -> Tensor:
    """cut: another than the rule's, for measuring."""
    keys, values = held(kv, spec)
    cut = cut or choose_cut(spec, q.dtype, shared_of(q.device))
    out, table = torch.empty_like(q), kv.tables[spec.group]
    tiles = triton.cdiv(kv.max_rows * (spec.heads // spec.kv_heads), shape.bq)
    abreast_kernel[(shape.parts, spec.kv_heads * tiles, kv.row_start.shape[0] - 1)](
        q, keys, values, table, kv.positions, kv.row_start, out, table.stride(0), keys.stride(0), spec.scale * 1.4426950408889634,
        HEADS=spec.heads, KV_HEADS=spec.kv_heads, D=spec.head_dim, PAGE=kv.page_size, WINDOW=spec.window or 0, BQ=shape.bq, BN=cut.bn,
        SPLITS=shape.splits, PARTS=shape.parts, AHEAD=shape.ahead, PREC="tf32x3" if q.dtype == torch.float32 else "tf32",
        MID=cut.mid, COARSE=cut.coarse, NEAR=cut.near, FAR=cut.far, ASM=q.device.type != "cpu", PDL=pdl,
        num_warps=shape.warps, num_stages=shape.stages, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


@triton.jit
def _pages(table, k, most, PAGE: tl.constexpr, COUNT: tl.constexpr):
    """The pages of COUNT keys from k on."""
    i = tl.arange(0, COUNT)
    return tl.load(table + k // PAGE + i // PAGE, mask=k + i < most, other=0)


@triton.jit
def _lines(page, page_stride, kv_head, D: tl.constexpr, PAGE: tl.constexpr):
    """Where the rows of K/V of whole pages begin."""
    return page.to(tl.int64) * page_stride + (kv_head * PAGE + tl.arange(0, page.shape[0]) % PAGE) * D


@triton.jit
def _values(values, page, page_stride, kv_head, live, dv, D: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """A split's values [BN, COLS], a tuple; none where no key is: what lies there may be no number."""
    at = _lines(page, page_stride, kv_head, D, PAGE)
    return in_columns(tl.load(values + at[:, None] + dv[None, :], mask=live[:, None], other=0), KIND, ASM)


@triton.jit
def _take(sums, p, v, here, PREC: tl.constexpr):
    """Add a split's products to the sums."""
    if len(sums) == 1:
        return (sums[0] + tl.dot(p, v[0], input_precision=PREC) * here[:, None],)
    else:
        even = sums[0] + tl.dot(p, v[0], input_precision=PREC) * here[:, None]
        return even, sums[1] + tl.dot(p, v[1], input_precision=PREC) * here[:, None]


@triton.jit
def _faded(sums, before):
    if len(sums) == 1:
        return (sums[0] * before,)
    else:
        return sums[0] * before, sums[1] * before


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=INDEX[:3])
def abreast_kernel(
    q, keys, values, table, positions, row_start, out, table_stride, page_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    BQ: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr,
    MID: tl.constexpr, COARSE: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    PREC: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of BQ queries of one sequence, and COLS columns of its values, a program."""
    share, b = tl.program_id(0), tl.program_id(2)
    kv_head, tile = tl.program_id(1) % KV_HEADS, tl.program_id(1) // KV_HEADS
    GROUP: tl.constexpr = HEADS // KV_HEADS
    KIND: tl.constexpr = q.dtype.element_ty
    COLS: tl.constexpr = D // PARTS
    MANY: tl.constexpr = SPLITS * BN
    PLANES: tl.constexpr = 1 if keys.dtype.element_ty == KIND else 2  # columns of a word of K/V
    WORDS: tl.constexpr = D // PLANES
    if PDL:
        gdc_launch_dependents()
    # Positions and tables stand since before the pass: where the keys are is known before the kernel ahead is done.
    first, end = tl.load(row_start + b), tl.load(row_start + b + 1)
    count, begin = (end - first) * GROUP, tile * BQ
    table += b * table_stride
    if begin < count:
        m = begin + tl.arange(0, BQ)
        row = (first + tl.minimum(m, count - 1) // GROUP).to(tl.int64)
        at = tl.load(positions + row).to(tl.int32)  # [BQ]
        key_to = tl.max(at, 0) + 1
        key_from, single_to = key_to * 0, tl.minimum(key_to, NEAR)  # up to there splits are single blocks
        if WINDOW > 0:
            key_from, single_to = tl.maximum(tl.min(at, 0) - WINDOW + 1, 0) // BN * BN, key_to
        page = _pages(table, key_from, key_to, PAGE, MANY)
        page0, page1 = _pages(table, key_from, key_to, PAGE, BN), _pages(table, key_from + BN, key_to, PAGE, BN)
        page2, page3 = page0, page1
        if SPLITS == 4:
            page2, page3 = _pages(table, key_from + 2 * BN, key_to, PAGE, BN), _pages(table, key_from + 3 * BN, key_to, PAGE, BN)
        MINE: tl.constexpr = COLS // PLANES
        v_words = share * MINE + tl.arange(0, MINE)
        if PDL and AHEAD > 0:  # noqa: SIM102
            if tile == 0:  # K/V may be in the making, but L2 is where it will be made
                line = _lines(_pages(table, key_from, key_to, PAGE, AHEAD), page_stride, kv_head, WORDS, PAGE)
                each = share * MINE + tl.arange(0, MINE // 64 if MINE > 64 else 1) * 64
                prefetch(keys + line[:, None] + each[None, :])
                prefetch(values + line[:, None] + each[None, :])
        if PDL:
            gdc_wait()
        of_row = row * (HEADS * D) + (kv_head * GROUP + m % GROUP) * D
        words = tl.arange(0, WORDS)
        query = sorted_columns(tl.load(q + of_row[:, None] + tl.arange(0, D)[None, :]), PLANES)
        top = tl.full((BQ,), float("-inf"), dtype=tl.float32)
        # Wider than high: the compiler then spreads the columns of this product, and of the next one, over the warps.
        WIDE: tl.constexpr = 16 if BQ >= 64 else 2 * BQ
        ones = tl.full((BN, WIDE), 1.0, dtype=KIND)
        total = tl.zeros((BQ, WIDE), dtype=tl.float32)
        acc = no_sums(BQ, COLS, PLANES)
        i = tl.arange(0, BN)
        for k in range(key_from, single_to, MANY):
            # Keys are not masked: what those give that are not there is.
            kt = in_columns(tl.load(keys + _lines(page, page_stride, kv_head, WORDS, PAGE)[:, None] + words[None, :]), KIND, ASM)
            v0 = _values(values, page0, page_stride, kv_head, k + i < key_to, v_words, WORDS, PAGE, KIND, ASM)
            v1 = _values(values, page1, page_stride, kv_head, k + BN + i < key_to, v_words, WORDS, PAGE, KIND, ASM)
            next = k + MANY  # pages of the next splits are asked for ahead of time
            page = _pages(table, next, key_to, PAGE, MANY)
            page0, page1 = _pages(table, next, key_to, PAGE, BN), _pages(table, next + BN, key_to, PAGE, BN)
            if SPLITS == 4:
                v2 = _values(values, page2, page_stride, kv_head, k + 2 * BN + i < key_to, v_words, WORDS, PAGE, KIND, ASM)
                v3 = _values(values, page3, page_stride, kv_head, k + 3 * BN + i < key_to, v_words, WORDS, PAGE, KIND, ASM)
                page2, page3 = _pages(table, next + 2 * BN, key_to, PAGE, BN), _pages(table, next + 3 * BN, key_to, PAGE, BN)
            s = scores_of(query, kt, PREC) * scale  # [BQ, MANY]
            far = at[:, None] - (k + tl.arange(0, MANY))[None, :]
            seen = far >= 0
            if WINDOW > 0:
                seen = seen & (far < WINDOW)
            s = tl.reshape(tl.where(seen, s, float("-inf")), (BQ, SPLITS, BN))
            peak = tl.ceil(tl.max(s, 2))  # [BQ, SPLITS]
            p = tl.permute(tl.exp2(s - _known(peak)[:, :, None]).to(KIND), (0, 2, 1))  # [BQ, BN, SPLITS]
            new = tl.maximum(top, tl.max(peak, 1))
            ref = _known(new)
            before, here = power(top - ref)[:, None], power(peak - ref[:, None])
            acc, total, top = _faded(acc, before), total * before, new
            if SPLITS == 4:
                p02, p13 = tl.split(tl.reshape(p, (BQ, BN, 2, 2)))
                h02, h13 = tl.split(tl.reshape(here, (BQ, 2, 2)))
                p0, p2 = tl.split(p02)
                p1, p3 = tl.split(p13)
                h0, h2 = tl.split(h02)
                h1, h3 = tl.split(h13)
            else:
                p0, p1 = tl.split(p)
                h0, h1 = tl.split(here)
            acc, total = _take(acc, p0, v0, h0, PREC), _take((total,), p0, (ones,), h0, PREC)[0]
            acc, total = _take(acc, p1, v1, h1, PREC), _take((total,), p1, (ones,), h1, PREC)[0]
            if SPLITS == 4:
                acc, total = _take(acc, p2, v2, h2, PREC), _take((total,), p2, (ones,), h2, PREC)[0]
                acc, total = _take(acc, p3, v3, h3, PREC), _take((total,), p3, (ones,), h3, PREC)[0]
        if WINDOW == 0:  # longer splits, block by block
            none_acc, none_total = no_sums(BQ, COLS, PLANES), tl.zeros((BQ, WIDE), dtype=tl.float32)
            none_top = tl.full((BQ,), float("-inf"), dtype=tl.float32)
            one_acc, one_total, one_top = none_acc, none_total, none_top
            page0 = _pages(table, NEAR, key_to, PAGE, BN)
            for k in range(NEAR, key_to, BN):
                live, here = k + i < key_to, page0
                page0 = _pages(table, k + BN, key_to, PAGE, BN)
                kt = _fetch(keys, here, i % PAGE, page_stride, kv_head, live, words, WORDS, PAGE, KIND, ASM)
                vt = _fetch(values, here, i % PAGE, page_stride, kv_head, live, v_words, WORDS, PAGE, KIND, ASM)
                if _opens(k, WINDOW, BN, MID, COARSE, NEAR, FAR):
                    acc, total, top = _add(acc, total, top, one_acc, one_total, one_top)
                    one_acc, one_total, one_top = none_acc, none_total, none_top
                one_acc, one_total, one_top = _block(query, kt, vt, k, live, at, ones, one_acc, one_total, one_top, scale, BN, WINDOW, PREC)
            acc, total, top = _add(acc, total, top, one_acc, one_total, one_top)
        mass = tl.max(total, 1)[:, None]  # all columns are equal
        dv = share * COLS + tl.arange(0, COLS)
        tl.store(out + of_row[:, None] + dv[None, :], (columns_of(acc) / mass).to(out.dtype.element_ty), mask=(m < count)[:, None])
