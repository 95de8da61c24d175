"""Attention of prompt chunks: many queries of a sequence, heads of 256 and 512, splits of one block.

It computes the sums of `attention`, so the same bits, arranged for the tensor cores. A split's product with the values
is computed for a quarter of the columns at a time and added to the sums before the next quarter starts: then one
accumulator of all columns is alive instead of two, and tiles of 128 queries (two warpgroups with 64 whole rows each, so
that no row is exchanged) fit the registers. Only blocks at the edge of a tile's visible keys are masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import AttnSpec, KVView
from .attention import INDEX, _known, power
from .attention_config import MIN_QUERIES, WIDE_HEAD_SMEM, AttentionConfig, ReductionSpec, choose_reduction
from .common import LOG2E, Launch, gdc_launch_dependents, gdc_wait
from .fp8_kv import is_fp8, join_columns, kv_tensors, scores_of, sorted_columns, widen_columns
from .quant_config import max_smem


def choose_prefill_config(spec: AttnSpec, cut: ReductionSpec) -> AttentionConfig:
    large = spec.head_dim > 256
    return AttentionConfig(split=False, bq=64 if large else 128, warps=8, stages=1 if large and cut.bn != 32 else 2)


def supports(spec: AttnSpec, kv: KVView, dtype: torch.dtype, shared: int) -> bool:
    """Whether all splits that a row of this pass can see are single blocks, and the tile fits. In bfloat16:
    a split's factor goes into its weights, and float16 has no room for small ones. K/V of eight bits: where there are
    tiles for half of an H200's sms; smaller ones of `attention` widen it where it is multiplied."""
    cut = choose_reduction(spec, dtype, shared)
    plain = dtype == torch.bfloat16 and kv.ancestors is None
    blocks = cut.fine == cut.bn and (spec.window is not None or kv.max_context <= cut.near)
    packed = kv.max_rows * (spec.heads // spec.kv_heads)
    tiles = (kv.row_start.shape[0] - 1) * spec.kv_heads * triton.cdiv(packed, choose_prefill_config(spec, cut).bq)
    enough = packed > MIN_QUERIES and not (is_fp8(kv, spec) and tiles <= 66)
    return plain and blocks and enough and spec.head_dim in (256, 512) and shared > WIDE_HEAD_SMEM


def attend(
    q: Tensor, spec: AttnSpec, kv: KVView, pdl: bool, cut: ReductionSpec | None = None,
    shape: AttentionConfig | None = None, span_end: int = 0,
) -> Tensor:
    """cut, shape: override the rules, for measuring. span_end: see `ReferenceOps.attend_span`; 0: causal."""
    out, launch = launch_of(q, spec, kv, pdl=pdl, cut=cut, shape=shape, span_end=span_end)
    launch.run()
    return out


def launch_of(
    q: Tensor, spec: AttnSpec, kv: KVView, pdl: bool, cut: ReductionSpec | None = None,
    shape: AttentionConfig | None = None, span_end: int = 0,
) -> tuple[Tensor, Launch]:
    """The result, valid once the launch has run, and the launch."""
    keys, values = kv_tensors(kv, spec)
    cut = cut or choose_reduction(spec, q.dtype, max_smem(q.device))
    shape = shape or choose_prefill_config(spec, cut)
    out = torch.empty_like(q)
    table = kv.tables[spec.group]
    tiles = triton.cdiv(kv.max_rows * (spec.heads // spec.kv_heads), shape.bq)
    arguments = (
        q, keys, values, table, kv.positions, kv.row_start, out, table.stride(0), keys.stride(0), spec.scale * LOG2E,
        span_end,
    )
    options = dict(
        HEADS=spec.heads, KV_HEADS=spec.kv_heads, D=spec.head_dim, PAGE=kv.page_size, WINDOW=spec.window or 0,
        BQ=shape.bq, BN=cut.bn, ASM=q.device.type != "cpu", SPAN=span_end > 0, PDL=pdl, num_warps=shape.warps,
        num_stages=shape.stages, launch_pdl=pdl,
    )
    return out, Launch(prompt_kernel, (tiles, spec.kv_heads, kv.row_start.shape[0] - 1), arguments, options=options)


@triton.jit
def _values(values, to, live, FIRST: tl.constexpr, PIECE: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """A quarter of the columns of a block's values [BN, PIECE], or two of eight bits: a tuple."""
    return widen_columns(
        tl.load(values + to[:, None] + (FIRST + tl.arange(0, PIECE))[None, :], mask=live[:, None], other=0), KIND, ASM
    )


@triton.jit
def _add(sums, before, more):
    """An explicit addition: the compiler would make `sums * before` the start of the product, whose sums then had
    another order."""
    return tl.fma(sums, tl.broadcast_to(before, sums.shape), more)


@triton.jit(do_not_specialize=["table_stride", "span_end"], do_not_specialize_on_alignment=INDEX[:3])
def prompt_kernel(
    q, keys, values, table, positions, row_start, out, table_stride, page_stride, scale, span_end,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    BQ: tl.constexpr, BN: tl.constexpr, ASM: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):
    """Attention of q [R, HEADS, D] over paged keys and values [pages, KV_HEADS, PAGE, D] -> out [R, HEADS, D]: the bits
    of `attend_kernel` where a split is a single block. SPAN: every row sees the keys up to span_end.

    Grid (tiles, KV_HEADS, B): a program per tile of BQ queries (rows times the heads that share a K/V head) of a
    sequence, the last tiles first: they see most keys.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    b = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    KIND: tl.constexpr = q.dtype.element_ty
    PIECE: tl.constexpr = D // 4
    PLANES: tl.constexpr = 1 if keys.dtype.element_ty == KIND else 2  # columns of a word of K/V
    WORDS: tl.constexpr = D // PLANES
    if PDL:
        gdc_launch_dependents()
    first = tl.load(row_start + b)
    end = tl.load(row_start + b + 1)
    count = (end - first) * GROUP
    begin = tile * BQ
    table += b * table_stride
    if begin < count:
        m = begin + tl.arange(0, BQ)
        row = (first + tl.minimum(m, count - 1) // GROUP).to(tl.int64)
        head = kv_head * GROUP + m % GROUP
        at = tl.load(positions + row).to(tl.int32)  # [BQ]
        low = tl.min(at, 0)
        high = tl.max(at, 0)
        key_from = high * 0
        if WINDOW > 0:
            key_from = tl.maximum(low - WINDOW + 1, 0) // BN * BN
        key_to = high + 1
        if SPAN:  # every row sees the keys up to the image's end
            key_to = span_end
        next_key = key_from + tl.arange(0, BN)
        page = tl.load(table + next_key // PAGE, mask=next_key < key_to, other=0)
        if PDL:  # positions and tables were written before the pass
            gdc_wait()
        of_row = row * (HEADS * D) + head * D
        query = sorted_columns(tl.load(q + of_row[:, None] + tl.arange(0, D)[None, :]), PLANES)
        top = tl.full((BQ,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BQ, 16), dtype=tl.float32)
        ones = tl.full((BN, 16), 1.0, dtype=KIND)
        acc0 = tl.zeros((BQ, PIECE), dtype=tl.float32)
        acc1 = tl.zeros((BQ, PIECE), dtype=tl.float32)
        acc2 = tl.zeros((BQ, PIECE), dtype=tl.float32)
        acc3 = tl.zeros((BQ, PIECE), dtype=tl.float32)
        for k in range(key_from, key_to, BN):
            key = k + tl.arange(0, BN)
            live = key < key_to
            to = page.to(tl.int64) * page_stride + (kv_head * PAGE + key % PAGE) * WORDS
            page = tl.load(table + (key + BN) // PAGE, mask=key + BN < key_to, other=0)
            kt = tl.load(keys + to[:, None] + tl.arange(0, WORDS)[None, :], mask=live[:, None], other=0)
            s = scores_of(query, widen_columns(kt, KIND, ASM), "tf32") * scale  # [BQ, BN]
            edge = k + BN - 1 > low
            if SPAN:
                edge = k + BN > key_to
            if WINDOW > 0:
                edge = edge | (k <= high - WINDOW)
            if edge:
                s = _masked(s, key, at, key_to, WINDOW, SPAN)
            peak = tl.ceil(tl.max(s, 1))
            new = tl.maximum(top, peak)
            ref = _known(new)
            # The split's own factor goes into its weights: a power of two rounds nothing there either.
            before = power(top - ref)[:, None]
            here = power(peak - ref)[:, None]
            top = new
            p = (tl.exp2(s - _known(peak)[:, None]) * here).to(KIND)
            total = _add(total, before, tl.dot(p, ones))
            if PLANES == 1:
                acc0 = _add(acc0, before, tl.dot(p, _values(values, to, live, 0, PIECE, KIND, ASM)[0]))
                acc1 = _add(acc1, before, tl.dot(p, _values(values, to, live, PIECE, PIECE, KIND, ASM)[0]))
                acc2 = _add(acc2, before, tl.dot(p, _values(values, to, live, 2 * PIECE, PIECE, KIND, ASM)[0]))
                acc3 = _add(acc3, before, tl.dot(p, _values(values, to, live, 3 * PIECE, PIECE, KIND, ASM)[0]))
            else:  # the even columns of the first half and its odd ones, those of the second half
                v = _values(values, to, live, 0, PIECE, KIND, ASM)
                acc0 = _add(acc0, before, tl.dot(p, v[0]))
                acc1 = _add(acc1, before, tl.dot(p, v[1]))
                v = _values(values, to, live, PIECE, PIECE, KIND, ASM)
                acc2 = _add(acc2, before, tl.dot(p, v[0]))
                acc3 = _add(acc3, before, tl.dot(p, v[1]))
        mass = tl.max(total, 1)[:, None]  # all columns are equal
        ok = (m < count)[:, None]
        if PLANES == 1:
            d = of_row[:, None] + tl.arange(0, PIECE)[None, :]
            tl.store(out + d, (acc0 / mass).to(out.dtype.element_ty), mask=ok)
            tl.store(out + d + PIECE, (acc1 / mass).to(out.dtype.element_ty), mask=ok)
            tl.store(out + d + 2 * PIECE, (acc2 / mass).to(out.dtype.element_ty), mask=ok)
            tl.store(out + d + 3 * PIECE, (acc3 / mass).to(out.dtype.element_ty), mask=ok)
        else:
            d = of_row[:, None] + tl.arange(0, 2 * PIECE)[None, :]
            tl.store(out + d, (join_columns((acc0, acc1)) / mass).to(out.dtype.element_ty), mask=ok)
            tl.store(out + d + 2 * PIECE, (join_columns((acc2, acc3)) / mass).to(out.dtype.element_ty), mask=ok)


@triton.jit
def _masked(s, key, at, key_to, WINDOW: tl.constexpr, SPAN: tl.constexpr):
    far = at[:, None] - key[None, :]
    seen = far >= 0
    if SPAN:
        seen = (far > -(1 << 30)) & (key < key_to)[None, :]
    if WINDOW > 0:
        seen = seen & (far < WINDOW)
    return tl.where(seen, s, float("-inf"))
