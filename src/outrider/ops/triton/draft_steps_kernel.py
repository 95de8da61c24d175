"""Kernels of a large drafter's step (draft_steps.py): each is one short pass over a weight matrix for one row.

A program loads its whole tile of weights into registers before it waits for the previous kernel: with several programs
per SM, and the next kernels' programs started early (PDL), the memory stays busy during sums and norms. The stream is
only H wide, so a program computes the norm it needs itself; those of gate and up read that of `ready_kernel`: one more
launch, but less work after the wait and registers for twice the weights.

Weights are int8 with one scale per row, read as words of four. Activations between kernels are 16 bits with one scale
per 16 of them: a word of four high bytes, a word of four low ones, so that the product is two instructions per word. A
row of K such values takes K words: K/4 high, K/4 low, K/16 scales. Drafts cannot change the output: no row invariance,
only the same bits for the same input.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .choose import gumbel
from .common import activate, pdl_start, prefetch

MADE = tl.constexpr("dp4a.s32.s32 $0, $1, $2, 0;\nshl.b32 $0, $0, 8;\ndp4a.s32.s32 $0, $1, $3, $0;")
STEP = tl.constexpr(32512.0)  # 127 * 256: a high byte never leaves -127..127


@triton.jit
def tile_of(w, rows, first, K: tl.constexpr, KC: tl.constexpr):
    """Columns first .. first + KC of some rows: [BN, KC / 16, 4] words."""
    k = first // 4 + tl.arange(0, KC // 4)
    # flat: lanes side by side
    words = tl.load(w + rows[:, None] * (K // 4) + k[None, :], eviction_policy="evict_first")
    return tl.reshape(words, (rows.shape[0], KC // 16, 4))


@triton.jit
def narrowed(x, K: tl.constexpr):
    """float32 [K] -> high [K / 16, 4], low [K / 16, 4], factors [K / 16]."""
    x = tl.reshape(x, (K // 16, 4, 4))
    factor = tl.maximum(tl.max(tl.max(tl.abs(x), 2), 1), 1e-30) * (1.0 / STEP)
    i = tl.floor(x * (1.0 / factor)[:, None, None] + 0.5).to(tl.int32)
    high = (i + 128) >> 8
    low = i - (high << 8)
    shift = (tl.arange(0, 4) * 8)[None, None, :]
    return tl.sum((high & 255) << shift, 2), tl.sum((low & 255) << shift, 2), factor


@triton.jit
def keep(to, x, first, K: tl.constexpr, KC: tl.constexpr):
    """Columns first .. first + KC of a row of K activations, for `taken` to read."""
    high, low, factor = narrowed(x, KC)
    at = to + first // 4 + (tl.arange(0, KC // 16) * 4)[:, None] + tl.arange(0, 4)[None, :]
    tl.store(at, high)
    tl.store(at + K // 4, low)
    tl.store(to + K // 2 + first // 16 + tl.arange(0, KC // 16), factor.to(tl.int32, bitcast=True))


@triton.jit
def taken(of, first, K: tl.constexpr, KC: tl.constexpr):
    """(high, low, factors)."""
    at = of + first // 4 + tl.arange(0, KC // 4)
    factor = tl.load(of + K // 2 + first // 16 + tl.arange(0, KC // 16)).to(tl.float32, bitcast=True)
    return tl.reshape(tl.load(at), (KC // 16, 4)), tl.reshape(tl.load(at + K // 4), (KC // 16, 4)), factor


@triton.jit
def byte(x, i: tl.constexpr):
    return (x << (24 - 8 * i)) >> 24


@triton.jit
def times(tile, scale, high, low, factor, ASM: tl.constexpr):
    """tile · x: [BN] float32. ASM: the SM's product of four bytes; without it (the interpreter) spelt out."""
    a = high[None, :, :]
    b = low[None, :, :]
    if ASM:
        z = tl.inline_asm_elementwise(MADE, "=&r,r,r,r", [tile, a, b], dtype=tl.int32, is_pure=True, pack=1)
    else:
        z = byte(tile, 0) * (byte(a, 0) * 256 + byte(b, 0)) + byte(tile, 1) * (byte(a, 1) * 256 + byte(b, 1))
        z += byte(tile, 2) * (byte(a, 2) * 256 + byte(b, 2)) + byte(tile, 3) * (byte(a, 3) * 256 + byte(b, 3))
    return tl.sum(tl.sum(z, 2).to(tl.float32) * factor[None, :], 1) * scale


@triton.jit
def normed(x, w, EPS: tl.constexpr, H: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 0) / H + EPS) * w


@triton.jit
def stream_of(
    base, y, post, factor,
    CHUNKS: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr, EPS: tl.constexpr, H: tl.constexpr,
):
    """The sum of CHUNKS rows at base, or (base + norm(sum of PARTS rows at y)) * factor."""
    h = tl.arange(0, H)
    x = tl.load(base + h)
    if CHUNKS > 0:
        for i in tl.static_range(1, CHUNKS):
            x += tl.load(base + i * H + h)
    else:
        z = tl.load(y + h)
        for i in tl.static_range(1, PARTS):
            z += tl.load(y + i * H + h)
        x += normed(z, post, EPS, H)
        if SCALED:
            x *= tl.load(factor)
    return x


@triton.jit
def best_token(best, ids, PROGRAMS: tl.constexpr, SPACE: tl.constexpr):
    """The best guess of all programs of the head; the lower id on ties."""
    i = tl.arange(0, SPACE)
    value = tl.load(best + i, mask=i < PROGRAMS, other=float("-inf"))
    token = tl.load(ids + i, mask=i < PROGRAMS, other=0)
    return tl.min(tl.where(value == tl.max(value, 0), token, 0x7FFFFFFF), 0)


# ---- kernels
@triton.jit(do_not_specialize=["step"], do_not_specialize_on_alignment=["last", "out"])
def pre_kernel(
    w, ws, table, features, g, last, best, ids, out, parts, table_scale, step,
    H: tl.constexpr, HB: tl.constexpr, KC: tl.constexpr, CHUNKS: tl.constexpr, BN: tl.constexpr, FIRST: tl.constexpr,
    PROGRAMS: tl.constexpr, SPACE: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):
    """The sum over the input [embedding of the newest token; state fed back], by chunks of KC columns that are left
    apart in `parts` [2 · CHUNKS, H]. w [2 · CHUNKS + 1, H, KC]: chunks of the embedding, of the target's hidden state
    (FIRST), and the product of `pre`'s second half with `post`, which takes g itself. The newest token is what the
    head's programs left.

    Grid (H / BN, chunks; 2 · CHUNKS if FIRST, else CHUNKS + 1): a program per BN rows of a chunk.
    """
    c = tl.program_id(1)
    which = c if FIRST else tl.where(c < CHUNKS, c, 2 * CHUNKS)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    tile = tile_of(w, which * H + rows, 0, KC, KC)
    scale = tl.load(ws + which * H + rows)
    pdl_start(PDL)
    k = tl.arange(0, KC)
    if FIRST:
        token = tl.load(last).to(tl.int32)
    else:
        token = best_token(best, ids, PROGRAMS, SPACE)
        if (tl.program_id(0) == 0) & (c == 0):
            tl.store(out + step - 1, token.to(tl.int64))
    if c < CHUNKS:
        at = c * KC + k
        x = tl.load(table + token.to(tl.int64) * HB + at, mask=at < HB, other=0.0).to(tl.float32) * table_scale
    elif FIRST:
        at = (c - CHUNKS) * KC + k
        x = tl.load(features + at, mask=at < HB, other=0.0).to(tl.float32)
    else:
        x = tl.load(g + k, mask=k < H, other=0.0)
    high, low, each = narrowed(x, KC)
    y = times(tile, scale, high, low, each, ASM)
    tl.store(parts + c * H + rows, y)


@triton.jit
def ready_kernel(
    base, y, post, factor, norm, kept, out, H: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr,
    SCALED: tl.constexpr, LAST: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):
    """kept = norm(x) [H] for a product to take, x the stream as `stream_of` makes it; `out` keeps x, after the last
    layer the norm itself.

    Grid (1,).
    """
    h = tl.arange(0, H)
    after = tl.load(post + h)
    weight = tl.load(norm + h)
    pdl_start(PDL)
    x = stream_of(base, y, after, factor, CHUNKS, PARTS, SCALED, EPS, H)
    n = normed(x, weight, EPS, H)
    keep(kept, n, 0, H, H)
    tl.store(out + h, n if LAST else x)


@triton.jit
def rows_kernel(
    w, ws, kept, base, y, post, factor, norm, stream, out, H: tl.constexpr, N: tl.constexpr, BN: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr,
    EPS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):
    """out = w [N, H] · norm(x), x the stream as `stream_of` makes it and as `stream` keeps it; GATED: act(gate) * up of
    w [2N, H] · `kept`.

    Grid (N / BN,): a program per BN rows of the weight.
    """
    pid = tl.program_id(0)
    rows = pid * BN + tl.arange(0, BN)
    h = tl.arange(0, H)
    tile = tile_of(w, rows, 0, H, H)
    scale = tl.load(ws + rows)
    if GATED:
        up = tile_of(w, N + rows, 0, H, H)
        up_scale = tl.load(ws + N + rows)
        pdl_start(PDL)
        high, low, each = taken(kept, 0, H, H)
        z = times(tile, scale, high, low, each, ASM)
        v = times(up, up_scale, high, low, each, ASM)
        keep(out, activate(z, ACTIVATION) * v, pid * BN, N, BN)
    else:
        after = tl.load(post + h)
        weight = tl.load(norm + h)
        pdl_start(PDL)
        x = stream_of(base, y, after, factor, CHUNKS, PARTS, SCALED, EPS, H)
        if pid == 0:
            tl.store(stream + h, x)
        high, low, each = narrowed(normed(x, weight, EPS, H), H)
        z = times(tile, scale, high, low, each, ASM)
        tl.store(out + rows, z)


@triton.jit
def wide_kernel(
    w, ws, x, y, H: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """w [H, K] · x [K], the sum over K in PARTS left apart: y [PARTS, H].

    Grid (H / BN, PARTS): a program per BN rows of the weight and part of K.
    """
    KC: tl.constexpr = K // PARTS
    part = tl.program_id(1)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    tile = tile_of(w, rows, part * KC, K, KC)
    scale = tl.load(ws + rows)
    pdl_start(PDL)
    high, low, each = taken(x, part * KC, K, KC)
    z = times(tile, scale, high, low, each, ASM)
    tl.store(y + part * H + rows, z)


@triton.jit
def span(position, split, S: tl.constexpr, WINDOW: tl.constexpr, BN: tl.constexpr):
    """The keys [from, to) of a split, and how many keys a split has."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    each = tl.cdiv(tl.cdiv(position + 1 - first, S), BN) * BN
    return first + split * each, tl.minimum(first + (split + 1) * each, position + 1), each


@triton.jit
def block_at(kv, pages, first, end, page_stride, PAGE: tl.constexpr, D: tl.constexpr, BN: tl.constexpr):
    """Offsets of BN keys from `first` on (in elements), and which of them are before `end`."""
    key = first + tl.arange(0, BN)
    live = key < end
    page = tl.load(pages + key // PAGE, mask=live, other=0).to(tl.int64)
    return (page * page_stride + (kv * PAGE + key % PAGE) * D)[:, None], live[:, None]


@triton.jit
def _wide(x):
    """K/V as the matrix instruction takes it: eight-bit floats as float16, exactly."""
    if x.dtype == tl.float8e4nv:
        x = x.to(tl.float16)
    return x


@triton.jit(do_not_specialize_on_alignment=["table", "positions"])
def attend_kernel(
    q, keys, values, table, positions, cos, sin, q_norm, part, ml, page_stride,
    SCALE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    S: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):
    """Attention of one row's q [HEADS, D] over paged K/V, which was written before the round: part [HEADS, S, D] and ml
    [HEADS, S, 2] (maximum, mass) for `combine_kernel`.

    Grid (KV_HEADS · S,): a program per K/V head, with all its query heads, and split of the keys.
    """
    kv = tl.program_id(0) % KV_HEADS
    split = tl.program_id(0) // KV_HEADS
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, D)[None, :]
    half = tl.arange(0, HALF)[None, :]
    g = tl.arange(0, 16)
    lo, hi, _ = span(tl.load(positions).to(tl.int32), split, S, WINDOW, BN)
    at, live = block_at(kv, table, lo, hi, page_stride, PAGE, D, BN)
    ka = _wide(tl.load(keys + at + half, mask=live, other=0.0))
    kb = _wide(tl.load(keys + at + HALF + half, mask=live, other=0.0))
    v = _wide(tl.load(values + at + d, mask=live, other=0.0))
    wa = tl.load(q_norm + half)
    wb = tl.load(q_norm + HALF + half)
    if PDL:
        for key in range(lo + BN, hi, BN):
            line = block_at(kv, table, key, hi, page_stride, PAGE, D, BN)[0] + (tl.arange(0, D // 64) * 64)[None, :]
            prefetch(keys + line)
            prefetch(values + line)
    pdl_start(PDL)
    if lo < hi:
        head = kv * GROUP + g
        in_group = (g < GROUP)[:, None]
        from_q = q + head[:, None] * D + half
        qa = tl.load(from_q, mask=in_group, other=0.0)
        qb = tl.load(from_q + HALF, mask=in_group, other=0.0)
        c = tl.load(cos + half)
        sn = tl.load(sin + half)
        inv = (tl.rsqrt((tl.sum(qa * qa, 1) + tl.sum(qb * qb, 1)) / D + EPS) * SCALE)[:, None]
        qa = qa * inv * wa
        qb = qb * inv * wb
        ra = (qa * c - qb * sn).to(ka.dtype)
        rb = (qb * c + qa * sn).to(ka.dtype)
        top = tl.full((16,), float("-inf"), dtype=tl.float32)
        mass = tl.zeros((16,), dtype=tl.float32)
        acc = tl.zeros((16, D), dtype=tl.float32)
        for key in range(lo, hi, BN):
            z = tl.dot(ra, tl.trans(ka)) + tl.dot(rb, tl.trans(kb))  # [16, BN], in powers of two
            z = tl.where((key + tl.arange(0, BN) < hi)[None, :], z, float("-inf"))
            new = tl.maximum(top, tl.max(z, 1))
            p = tl.exp2(z - new[:, None])
            fade = tl.exp2(top - new)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
            mass = mass * fade + tl.sum(p, 1)
            top = new
            if key + BN < hi:
                at, live = block_at(kv, table, key + BN, hi, page_stride, PAGE, D, BN)
                ka = _wide(tl.load(keys + at + half, mask=live, other=0.0))
                kb = _wide(tl.load(keys + at + HALF + half, mask=live, other=0.0))
                v = _wide(tl.load(values + at + d, mask=live, other=0.0))
        to = head * S + split
        tl.store(part + to[:, None] * D + d, acc, mask=in_group)
        tl.store(ml + to * 2, top, mask=g < GROUP)
        tl.store(ml + to * 2 + 1, mass, mask=g < GROUP)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def combine_kernel(
    part, ml, positions, out, HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, WINDOW: tl.constexpr,
    S: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):
    """Adds the splits of each head: part, ml as `attend_kernel` stores them -> out [HEADS · D], for `taken` to read.

    Grid (HEADS, D / BD): a program per piece of a head.
    """
    head = tl.program_id(0)
    piece = tl.program_id(1)
    position = tl.load(positions).to(tl.int32)
    lo, _, each = span(position, 0, S, WINDOW, BN)
    used = tl.cdiv(position + 1 - lo, each)
    pdl_start(PDL)
    i = tl.arange(0, S)
    base = head * S + i
    m = tl.load(ml + base * 2, mask=i < used, other=float("-inf"))
    mass = tl.load(ml + base * 2 + 1, mask=i < used, other=0.0)
    d = piece * BD + tl.arange(0, BD)
    x = tl.load(part + base[:, None] * D + d[None, :], mask=(i < used)[:, None], other=0.0)
    share = tl.exp2(m - tl.max(m, 0))
    x = tl.sum(x * share[:, None], 0) / tl.sum(mass * share, 0)
    keep(out, x, head * D + piece * BD, HEADS * D, BD)


@triton.jit(do_not_specialize=["step"], do_not_specialize_on_alignment=["temperature", "sampled", "seed", "position"])
def head_kernel(
    w, ws, kept, best, ids, temperature, sampled, seed, position, step, H: tl.constexpr, V: tl.constexpr,
    BN: tl.constexpr, PROGRAMS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):
    """The best token by w [V, H] · kept [H], with noise for sampled rows, among every PROGRAMS-th tile of BN tokens ->
    best float32 and ids int32 [PROGRAMS].

    Grid (PROGRAMS,).
    """
    pid = tl.program_id(0)
    n = tl.arange(0, BN)
    tile = tile_of(w, pid * BN + n, 0, H, H)
    scale = tl.load(ws + pid * BN + n)
    pdl_start(PDL)
    high, low, each = taken(kept, 0, H, H)
    warm = tl.load(sampled) != 0
    heat = tl.load(temperature)
    key = tl.load(seed)
    at = tl.load(position) + step
    tops = tl.full((BN,), float("-inf"), dtype=tl.float32)
    tokens = tl.zeros((BN,), dtype=tl.int32)
    for t in range(pid, V // BN, PROGRAMS):
        # The next tile is in flight; past the end it is one row that is cached.
        row = (t + PROGRAMS) * BN + n
        row = tl.where(row < V, row, t * BN)
        ahead = tile_of(w, row, 0, H, H)
        next_scale = tl.load(ws + row)
        z = times(tile, scale, high, low, each, ASM)
        if warm:
            z = z / heat + gumbel((t * BN + n).to(tl.int64), key, at)
        tokens = tl.where(z > tops, t * BN + n, tokens)
        tops = tl.maximum(tops, z)
        tile = ahead
        scale = next_scale
    most = tl.max(tops, 0)
    tl.store(best + pid, most)
    tl.store(ids + pid, tl.min(tl.where(tops == most, tokens, 0x7FFFFFFF), 0))


@triton.jit(do_not_specialize=["step"], do_not_specialize_on_alignment=["out"])
def finish_kernel(best, ids, out, step, PROGRAMS: tl.constexpr, SPACE: tl.constexpr, PDL: tl.constexpr):
    """The last token of a round: best, ids [PROGRAMS] -> out[step].

    Grid (1,).
    """
    pdl_start(PDL)
    tl.store(out + step, best_token(best, ids, PROGRAMS, SPACE).to(tl.int64))
