"""Attention over paged K/V: one token, a few drafted ones, or a prompt chunk of each of many sequences, in one or two
launches.

The queries of a sequence and the heads that share a K/V head are packed into the rows of one tile. Keys are cut into
splits at absolute positions; a split is a chain of blocks, and a row's splits are added in order. So a row's bits do
not depend on the other rows of the pass or on their number: a block that a row cannot see adds exactly nothing to it.

Few queries: a program takes one split or a few, and a second kernel adds the splits up. Many: one program processes all
splits of its queries and adds them up as it goes. Both give the same bits, because maxima are rounded up to integers:
weights are powers of two of (score - maximum), so the factor between two maxima is an exact power of two, and rescaling
a sum rounds nothing. The sum of weights is a matrix product too: its order, unlike that of a reduction, does not follow
from the tile's shape.

Rows of a tree (KVView.ancestors) share the keys of the committed text, and only those. Splits that hold a position of
the tree are processed for each row separately: a key is fetched from where the row's ancestor was written and takes its
place in the order of positions, so a row has the bits it would have in a chain. It is still one launch: those programs
come after the others of their tile.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import AttnSpec, KVView
from .attention_config import AttentionConfig, ReductionSpec, choose_config, choose_reduction, fit_smem, split_count
from .common import LOG2E, Launch, gdc_launch_dependents, gdc_wait, precision, prefetch
from .fp8_kv import join_columns, kv_tensors, scores_of, sorted_columns, widen_columns, zero_sums
from .quant_config import max_smem

INDEX = ["table", "positions", "row_start", "paths"]  # compiled once, however they are aligned


@triton.jit
def _range(
    slot, first_at, WINDOW: tl.constexpr,
    FINE: tl.constexpr, MID: tl.constexpr, COARSE: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
):
    """The keys of a slot. Under a window slots count from the first split that the sequence's first row can see."""
    if WINDOW > 0:
        begin = (tl.maximum(tl.load(first_at).to(tl.int32) - WINDOW + 1, 0) // FINE + slot) * FINE
        return begin, begin + FINE
    else:
        return _bounds(slot, FINE, MID, COARSE, NEAR, FAR)


@triton.jit
def _bounds(slot, FINE: tl.constexpr, MID: tl.constexpr, COARSE: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr):
    """The keys of a full layer's split."""
    near: tl.constexpr = NEAR // FINE
    far: tl.constexpr = near + (FAR - NEAR) // MID
    begin = (
        tl.minimum(slot, near) * FINE
        + tl.minimum(tl.maximum(slot - near, 0), far - near) * MID
        + tl.maximum(slot - far, 0) * COARSE
    )
    return begin, begin + tl.where(slot < near, FINE, tl.where(slot < far, MID, COARSE))


@triton.jit
def _split_of(key, FINE: tl.constexpr, MID: tl.constexpr, COARSE: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr):
    """The split that holds a key."""
    near: tl.constexpr = NEAR // FINE
    far: tl.constexpr = near + (FAR - NEAR) // MID
    beyond = tl.where(key < FAR, near + tl.maximum(key - NEAR, 0) // MID, far + tl.maximum(key - FAR, 0) // COARSE)
    return tl.where(key < NEAR, key // FINE, beyond)


@triton.jit
def _opens(
    k, WINDOW: tl.constexpr, FINE: tl.constexpr, MID: tl.constexpr, COARSE: tl.constexpr, NEAR: tl.constexpr,
    FAR: tl.constexpr,
):
    """Whether a split begins at key k."""
    if WINDOW > 0:
        return k % FINE == 0
    else:
        return tl.where(k < NEAR, k % FINE, tl.where(k < FAR, (k - NEAR) % MID, (k - FAR) % COARSE)) == 0


@triton.jit
def power(n):
    """2 to the integer n <= 0, exactly; 0 below -126 and for -inf. Adding 1.5 · 2^23 puts the number into the last
    bits."""
    bits = (tl.maximum(n, -127.0) + (127.0 + 12582912.0)).to(tl.int32, bitcast=True)
    return (bits << 23).to(tl.float32, bitcast=True)


@triton.jit
def _known(top):
    """A maximum that can be subtracted: 0 where nothing was seen."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _seek(table, k, most, paths, row, base, TREE_DEPTH: tl.constexpr, PAGE: tl.constexpr, COUNT: tl.constexpr):
    """The pages of COUNT keys from k on, and their places in them. Those of a tree's own positions lie where the row's
    ancestors were written; of lines, where a block is made of whole pages, places are known without a division."""
    i = tl.arange(0, COUNT)
    key = k + i
    live = k + i < most
    if TREE_DEPTH > 0:
        inner = live & (key >= base)
        ancestor = tl.load(paths + row * TREE_DEPTH + key - base, mask=inner, other=0)
        key = tl.where(inner, base + ancestor, key).to(tl.int32)
    return tl.load(table + key // PAGE, mask=live, other=0), key % PAGE


@triton.jit
def _fetch(
    of, page, within, page_stride, kv_head, live, d,
    D: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
):
    """These columns of keys or of values, a row each; of eight bits, where D counts pairs of columns, the even ones and
    the odd ones."""
    at = page.to(tl.int64) * page_stride + (kv_head * PAGE + within) * D
    words = tl.load(of + at[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0)
    return widen_columns(words, KIND, ASM)


@triton.jit
def _block(
    query, kt, vt, k, live, at, ones, acc, total, top, scale, BN: tl.constexpr, WINDOW: tl.constexpr,
    SPAN: tl.constexpr, PREC: tl.constexpr
):
    """Take a block of keys into the running sums of its split. SPAN: rows see all that live, those behind them too."""
    key = k + tl.arange(0, BN)
    s = scores_of(query, kt, PREC) * scale  # [BQ, BN]
    seen = (key[None, :] <= at[:, None]) & live[None, :]
    if SPAN:
        seen = (key[None, :] > at[:, None] * 0 - 1) & live[None, :]
    if WINDOW > 0:
        seen = seen & (key[None, :] > at[:, None] - WINDOW)
    s = tl.where(seen, s, float("-inf"))
    new = tl.maximum(top, tl.ceil(tl.max(s, 1)))
    ref = _known(new)
    p = tl.exp2(s - ref[:, None]).to(ones.dtype)
    fade = power(top - ref)[:, None]
    first = tl.dot(p, vt[0], acc[0] * fade, input_precision=PREC)
    if len(acc) == 1:
        acc = (first,)
    else:
        acc = (first, tl.dot(p, vt[1], acc[1] * fade, input_precision=PREC))
    return acc, tl.dot(p, ones, total * fade, input_precision=PREC), new


@triton.jit
def _add(all_acc, all_total, all_top, acc, total, top):
    """Add a split to the ones before it."""
    new = tl.maximum(all_top, top)
    ref = _known(new)
    before = power(all_top - ref)[:, None]
    here = power(top - ref)[:, None]
    total = all_total * before + total * here
    if len(acc) == 1:
        return (all_acc[0] * before + acc[0] * here,), total, new
    else:
        return (all_acc[0] * before + acc[0] * here, all_acc[1] * before + acc[1] * here), total, new


@triton.jit(do_not_specialize=["slots", "table_stride", "span_end"], do_not_specialize_on_alignment=INDEX)
def attend_kernel(
    q, keys, values, table, positions, row_start, paths, out, partial_out, partial_lse,
    table_stride, page_stride, scale, slots, span_end,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, SPLITS_PER_PROGRAM: tl.constexpr,
    MULTI_SPLIT: tl.constexpr, PARTS: tl.constexpr, PREFETCH: tl.constexpr, FINE: tl.constexpr, MID: tl.constexpr,
    COARSE: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr, SINGLE_BLOCK: tl.constexpr, TREE_DEPTH: tl.constexpr,
    TAIL: tl.constexpr, EACH: tl.constexpr, PREC: tl.constexpr, ASM: tl.constexpr, SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of q [R, HEADS, D] over paged keys and values [pages, KV_HEADS, PAGE, D] -> out [R, HEADS, D], or,
    SPLIT, for `combine_kernel`: partial_out float32 [R, HEADS, slots, D] and partial_lse float32 [R, HEADS, slots, 2]
    (maximum, mass).

    SPAN: every row sees the keys up to span_end. SPLIT: a program processes SPLITS_PER_PROGRAM splits from its slot on,
    and stores each separately (MULTI_SPLIT: there may be several). SINGLE_BLOCK: a split is a single block. PARTS:
    programs that share a tile, each with its columns of the values. PREFETCH: keys that are fetched into L2 early.
    TREE_DEPTH: entries of a row's path in a tree (0: chains); then programs beyond the last slot process the TAIL
    splits that hold positions of the tree, each for one row: EACH of them per tile.

    Grid (programs over slots, or PARTS; KV_HEADS · tiles; B): a program per tile of BQ queries (rows of a sequence
    times the heads that share a K/V head) and its splits.
    """
    slot = tl.program_id(0) * SPLITS_PER_PROGRAM
    b = tl.program_id(2)
    share = tl.program_id(0) * 0
    if PARTS > 1:
        slot = 0
        share = tl.program_id(0)
    table += b * table_stride
    kv_head = tl.program_id(1) % KV_HEADS
    tile = tl.program_id(1) // KV_HEADS
    GROUP: tl.constexpr = HEADS // KV_HEADS
    KIND: tl.constexpr = q.dtype.element_ty
    PLANES: tl.constexpr = 1 if keys.dtype.element_ty == KIND else 2  # columns of a word of K/V
    WORDS: tl.constexpr = D // PLANES
    if PDL:
        gdc_launch_dependents()
    # Positions and tables were written before the pass: the keys' addresses are known before the previous kernel ends.
    first = tl.load(row_start + b)
    end = tl.load(row_start + b + 1)
    count = (end - first) * GROUP
    begin = tile * BQ
    base = first * 0
    if TREE_DEPTH > 0:
        PIECES: tl.constexpr = (GROUP + BQ - 1) // BQ  # of the heads of a row
        base = tl.load(positions + tl.where(first < end, first, 0)).to(tl.int32)  # of the newest token
        tail = _split_of(base, FINE, MID, COARSE, NEAR, FAR)
        if WINDOW > 0:
            tail = base // FINE - tl.maximum(base - WINDOW + 1, 0) // FINE
        current = slot >= slots
        unit = tile * EACH + tl.program_id(0) - tl.cdiv(slots, SPLITS_PER_PROGRAM)
        number = unit // PIECES  # of the row
        begin = tl.where(current, number * GROUP + unit % PIECES * BQ, begin)
        row_end = tl.where(first + number < end, (number + 1) * GROUP, 0)
        count = tl.where(current, row_end, tl.where(slot < tail, count, 0))
        last = tl.where(current, tail + TAIL, tl.minimum(slot + SPLITS_PER_PROGRAM, tail)) - 1
        slot = tl.where(current, tail, slot)
    m = begin + tl.arange(0, BQ)
    ok = m < count
    row = (first + tl.maximum(tl.minimum(m, count - 1), 0) // GROUP).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    alive = begin < count
    at = tl.load(positions + row, mask=m < tl.where(alive, begin + BQ, 0), other=0).to(tl.int32)  # [BQ]
    tile_end = tl.max(at, 0) + 1
    if SPAN:
        tile_end = span_end
    key_from = tile_end * 0
    key_to = tile_end
    if WINDOW > 0:
        key_from = tl.maximum(tl.min(at, 0) - WINDOW + 1, 0) // BN * BN
    if SPLIT:
        split_from, split_to = _range(slot, positions + tl.where(alive, first, 0), WINDOW, FINE, MID, COARSE, NEAR, FAR)
        if MULTI_SPLIT:
            if TREE_DEPTH == 0:
                last = slot + SPLITS_PER_PROGRAM - 1
            _, split_to = _range(last, positions + tl.where(alive, first, 0), WINDOW, FINE, MID, COARSE, NEAR, FAR)
            slot += tl.maximum(key_from - split_from, 0) // FINE  # of the first block; only a window skips splits
        key_from = tl.maximum(key_from, split_from)
        key_to = tl.minimum(key_to, split_to)
    key_to = tl.where(alive, key_to, 0)
    COLS: tl.constexpr = DP // PARTS
    if PDL and PREFETCH > 0:  # noqa: SIM102
        # The previous kernel may still be writing these lines; prefetching is safe because its writes land in L2 too.
        # The first tile prefetches for all, a bit further than it sees.
        if (tile == 0) & (key_from < key_to):
            fetched, places = _seek(table, key_from, key_to, paths, 0, 0, 0, PAGE, PREFETCH)
            line = fetched.to(tl.int64) * page_stride + (kv_head * PAGE + places) * WORDS
            MINE: tl.constexpr = COLS // PLANES
            each = tl.minimum(share * MINE + tl.arange(0, MINE // 64 if MINE > 64 else 1) * 64, WORDS - 1)
            prefetch(keys + line[:, None] + each[None, :])
            prefetch(values + line[:, None] + each[None, :])
    sequence = (first + tl.maximum(begin, 0) // GROUP).to(tl.int64)  # whose path it is, where a program has one row
    page, within = _seek(table, key_from, key_to, paths, sequence, base, TREE_DEPTH, PAGE, BN)
    if PDL:
        gdc_wait()
    if key_from < key_to:
        d = tl.arange(0, DP)
        d_ok = d < D
        query = tl.load(
            q + (row * (HEADS * D) + head * D)[:, None] + d[None, :], mask=ok[:, None] & d_ok[None, :], other=0.0
        )
        query = sorted_columns(query, PLANES)
        top = tl.full((BQ,), float("-inf"), dtype=tl.float32)
        # Wider than high: the compiler then spreads the columns of this product, and of the next one, over the warps.
        WIDE: tl.constexpr = 16 if BQ >= 64 else 2 * BQ
        total = tl.zeros((BQ, WIDE), dtype=tl.float32)
        acc = zero_sums(BQ, COLS, PLANES)
        ones = tl.full((BN, WIDE), 1.0, dtype=KIND)
        to = (row * HEADS + head) * slots + slot
        dv = share * COLS + tl.arange(0, COLS)
        words = tl.arange(0, DP // PLANES)
        v_words = share * (COLS // PLANES) + tl.arange(0, COLS // PLANES)
        if SPLIT and SINGLE_BLOCK and not MULTI_SPLIT:
            live = key_from + tl.arange(0, BN) < key_to
            kt = _fetch(keys, page, within, page_stride, kv_head, live, words, WORDS, PAGE, KIND, ASM)
            vt = _fetch(values, page, within, page_stride, kv_head, live, v_words, WORDS, PAGE, KIND, ASM)
            acc, total, top = _block(
                query, kt, vt, key_from, live, at, ones, acc, total, top, scale, BN, WINDOW, SPAN, PREC
            )
        else:
            all_acc = acc
            all_total = total
            all_top = top
            none_acc = acc
            none_total = total
            none_top = top
            for k in range(key_from, key_to, BN):
                live = k + tl.arange(0, BN) < key_to
                # those of the next block are loaded ahead of time
                here = page
                places = within
                page, within = _seek(table, k + BN, key_to, paths, sequence, base, TREE_DEPTH, PAGE, BN)
                if TREE_DEPTH == 0:  # computed again: kept alive they would take registers
                    places = (k + tl.arange(0, BN)) % PAGE
                kt = _fetch(keys, here, places, page_stride, kv_head, live, words, WORDS, PAGE, KIND, ASM)
                vt = _fetch(values, here, places, page_stride, kv_head, live, v_words, WORDS, PAGE, KIND, ASM)
                if SPLIT:
                    acc, total, top = _block(
                        query, kt, vt, k, live, at, ones, acc, total, top, scale, BN, WINDOW, SPAN, PREC
                    )
                    if MULTI_SPLIT:  # noqa: SIM102
                        if _opens(k + BN, WINDOW, FINE, MID, COARSE, NEAR, FAR) | (k + BN >= key_to):
                            _leave(partial_out, partial_lse, to, acc, total, top, d, ok, D)
                            to += 1
                            acc = none_acc
                            total = none_total
                            top = none_top
                elif SINGLE_BLOCK:
                    acc, total, top = _block(
                        query, kt, vt, k, live, at, ones, none_acc, none_total, none_top, scale, BN, WINDOW, SPAN, PREC
                    )
                    all_acc, all_total, all_top = _add(all_acc, all_total, all_top, acc, total, top)
                else:
                    if _opens(k, WINDOW, FINE, MID, COARSE, NEAR, FAR):
                        all_acc, all_total, all_top = _add(all_acc, all_total, all_top, acc, total, top)
                        acc = none_acc
                        total = none_total
                        top = none_top
                    acc, total, top = _block(
                        query, kt, vt, k, live, at, ones, acc, total, top, scale, BN, WINDOW, SPAN, PREC
                    )
            if SINGLE_BLOCK and not SPLIT:
                acc = all_acc
                total = all_total
            elif not SPLIT:
                acc, total, top = _add(all_acc, all_total, all_top, acc, total, top)
        if SPLIT and not MULTI_SPLIT:
            _leave(partial_out, partial_lse, to, acc, total, top, d, ok, D)
        if not SPLIT:
            mass = tl.max(total, 1)  # all columns are equal
            at_out = out + (row[:, None] * (HEADS * D) + head[:, None] * D + dv[None, :])
            result = (join_columns(acc) / mass[:, None]).to(out.dtype.element_ty)
            tl.store(at_out, result, mask=ok[:, None] & (dv < D)[None, :])


@triton.jit
def _leave(partial_out, partial_lse, to, acc, total, top, d, ok, D: tl.constexpr):
    """Store a split's sums for the second kernel."""
    tl.store(partial_out + to[:, None] * D + d[None, :], join_columns(acc), mask=ok[:, None] & (d < D)[None, :])
    tl.store(partial_lse + to * 2, top, mask=ok)
    tl.store(partial_lse + to * 2 + 1, tl.max(total, 1), mask=ok)  # all columns are equal


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=["positions", "row_seq", "row_start"])
def combine_kernel(
    partial_out, partial_lse, out, positions, row_seq, row_start, slots,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, WINDOW: tl.constexpr,
    FINE: tl.constexpr, MID: tl.constexpr, COARSE: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    SB: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):
    """Adds the splits of each head in order, SB of them (at most MOST) loaded at a time: partial_out, partial_lse as
    `attend_kernel` stores them -> out [R, HEADS, D].

    Grid (R, HEADS, D / BD): a program per piece of one head of one row.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
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
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    base = (row * HEADS + head) * slots + lo
    # the latter one address for all
    each = partial_out + base * D + d
    sums = partial_lse + base * 2 + d * 0
    count = (hi - lo).to(tl.int32)
    i = tl.arange(0, MOST)
    top = tl.zeros((BD,), dtype=tl.float32) + float("-inf")
    mass = tl.zeros((BD,), dtype=tl.float32)
    acc = tl.zeros((BD,), dtype=tl.float32)
    for s in range(0, count, SB):  # nearly always once
        tops = tl.load(partial_lse + (base + s + i) * 2, mask=(i < SB) & (s + i < count), other=float("-inf"))
        best = tl.maximum(top, tl.max(tops, 0))
        ref = _known(best)
        fade = power(top - ref)
        mass = mass * fade
        acc = acc * fade
        top = best
        for j in tl.static_range(SB):  # unrolled: the loads fly together
            ok = (d < D) & (d * 0 + (s + j) < count)
            weight = power(tl.load(sums + (s + j) * 2, mask=ok, other=float("-inf")) - ref)
            mass += tl.load(sums + (s + j) * 2 + 1, mask=ok, other=0.0) * weight
            acc += tl.load(each + (s + j) * D, mask=ok, other=0.0) * weight
    tl.store(out + (row * HEADS + head) * D + d, (acc / mass).to(out.dtype.element_ty), mask=d < D)


def attend(
    q: Tensor, spec: AttnSpec, kv: KVView, pdl: bool, cut: ReductionSpec | None = None,
    shape: AttentionConfig | None = None, span_end: int = 0,
) -> Tensor:
    """cut, shape: override the rules, for measuring. span_end: see `ReferenceOps.attend_span`; 0: causal."""
    out, launches = launches_of(q, spec, kv, pdl=pdl, cut=cut, shape=shape, span_end=span_end)
    for launch in launches:
        launch.run()
    return out


def launches_of(
    q: Tensor, spec: AttnSpec, kv: KVView, pdl: bool, cut: ReductionSpec | None = None,
    shape: AttentionConfig | None = None, span_end: int = 0,
) -> tuple[Tensor, list[Launch]]:
    """The result, valid once the launches have run, and the launches."""
    keys, values = kv_tensors(kv, spec)
    rows = q.shape[0]
    batch = kv.row_start.shape[0] - 1
    group = spec.heads // spec.kv_heads
    dim = spec.head_dim
    shared = max_smem(q.device)
    cut = cut or choose_reduction(spec, q.dtype, shared)
    shape = shape or fit_smem(choose_config(spec, cut, kv, batch=batch, dtype=q.dtype), spec, shared)
    if span_end:  # splits after a row are its own too: one program processes them all
        shape = replace(shape, split=False, run=1)
    out = torch.empty_like(q)
    table = kv.tables[spec.group]
    padded = triton.next_power_of_2(dim)
    slots = split_count(spec, kv, cut) if shape.split else 1
    partial_out = partial_lse = out
    if shape.split:
        sizes = (rows, spec.heads, slots)
        partial_out, partial_lse = (q.new_empty((*sizes, width), dtype=torch.float32) for width in (dim, 2))
    same = dict(
        HEADS=spec.heads, D=dim, WINDOW=spec.window or 0, FINE=cut.fine, MID=cut.mid, COARSE=cut.coarse, NEAR=cut.near,
        FAR=cut.far, PDL=pdl, launch_pdl=pdl,
    )
    tiles = triton.cdiv(kv.max_rows * group, shape.bq)
    programs = triton.cdiv(slots, shape.run) if shape.split else shape.parts
    deep = 0
    tail = 1
    each = 1
    if kv.ancestors is not None:
        assert shape.split, "rows of a tree are walked split by split"
        deep = kv.ancestors.shape[1]
        tail = 1 + triton.cdiv(deep - 1, cut.fine)
        each = triton.cdiv(kv.max_rows * triton.cdiv(group, shape.bq), tiles)
        programs += each
    lone = spec.window is not None and cut.fine == cut.bn
    walks = shape.run > 1 or deep > 0
    arguments = (
        q, keys, values, table, kv.positions, kv.row_start, kv.row_start if kv.ancestors is None else kv.ancestors,
        out, partial_out, partial_lse, table.stride(0), keys.stride(0), spec.scale * LOG2E, slots, span_end,
    )
    options = dict(
        KV_HEADS=spec.kv_heads, DP=padded, PAGE=kv.page_size, BQ=shape.bq, BN=cut.bn, SPLIT=shape.split,
        SPLITS_PER_PROGRAM=shape.run, PREC=precision(q), SINGLE_BLOCK=lone, MULTI_SPLIT=walks,
        PARTS=1 if shape.split else shape.parts, PREFETCH=cut.fine if shape.split and not walks else 0,
        TREE_DEPTH=deep, TAIL=tail, EACH=each, ASM=q.device.type != "cpu", SPAN=span_end > 0, num_warps=shape.warps,
        num_stages=shape.stages, **same,
    )
    launches = [Launch(attend_kernel, (programs, spec.kv_heads * tiles, batch), arguments, options=options)]
    if shape.split:
        block = min(32, triton.cdiv(slots, 4) * 4)
        piece = min(padded, 128)
        sums = (partial_out, partial_lse, out, kv.positions, kv.row_seq, kv.row_start, slots)
        blocks = dict(BD=piece, SB=block, MOST=triton.next_power_of_2(block), num_warps=2, **same)
        launches.append(Launch(combine_kernel, (rows, spec.heads, triton.cdiv(dim, piece)), sums, options=blocks))
    return out, launches
