"""A drafter's whole round in one launch: K times [embedding; hidden state] -> layers -> head -> guess.

As many programs as the GPU has processors, all resident, walk through the same phases. A phase fetches what it needs of the
weights, waits until every program has finished the phase before (`sync`), then reads what the others left in a small scratch.
Norms are computed by every program for itself. Phases keep nothing between them but the scratch, so that they can also be
launched one by one (SYNC False): that is how the interpreter runs them.

Scratch, float32, one row of STRIDE a sequence; offsets X (input stream), X0 and X1 (stream before attention and before the
MLP), MG (what the fed-back state adds to the next input), Q (queries), P and ML (attention by splits: sums; maximum and mass),
YP (out product by heads), ACT, Y (down product), C (cluster scores), BV (best score of each program; its token in `ids`).
Weights `w` hold bfloat16, or int8 with one factor a row in `ws`. Nothing here can change an answer: no row invariance.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .choose import mix32
from .common import activate, prefetch

# Thread 0 arrives and spins; the budget of spins (in, out) makes a round end even if a program is missing.
ARRIVE = tl.constexpr("""{
    .reg .pred p; .reg .u32 t, v;
    mov.u32 $0, $3;
    mov.u32 t, %tid.x;
    setp.ne.u32 p, t, 0;
    @p bra DONE;
    red.release.gpu.global.add.u32 [$1], 1;
SPIN:
    ld.acquire.gpu.global.u32 v, [$1];
    sub.u32 v, v, $2;
    setp.ge.s32 p, v, 0;
    @p bra DONE;
    sub.u32 $0, $0, 1;
    setp.ne.u32 p, $0, 0;
    @p bra SPIN;
    mov.u32 $0, 1;
    st.relaxed.gpu.global.u32 [$1+256], 1;
DONE:
}""")
BULK = tl.constexpr("""{
    .reg .pred p; .reg .u32 t;
    mov.u32 t, %tid.x;
    setp.eq.u32 p, t, 0;
    @p cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.u32 $0, 0;
}""")
CLOCK = tl.constexpr("mov.u64 $0, %clock64;")


@triton.jit
def sync(counter, tick, spins, probe, G: tl.constexpr, SYNC: tl.constexpr, PROBE: tl.constexpr):
    """Until all G programs have arrived for the tick-th time. The counter only grows (and wraps)."""
    if SYNC:
        if PROBE > 0:
            began = tl.inline_asm_elementwise(CLOCK, "=l", [], dtype=tl.int64, is_pure=False, pack=1)
        tl.debug_barrier()
        spins = tl.inline_asm_elementwise(
            ARRIVE, "=&r,l,r,r", [counter.to(tl.int64, bitcast=True), (tick + 1) * G, spins], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
        if PROBE > 0:
            ended = tl.inline_asm_elementwise(CLOCK, "=l", [], dtype=tl.int64, is_pure=False, pack=1)
            at = probe + (tl.program_id(0) * PROBE + tick % PROBE) * 2
            tl.store(at, began)
            tl.store(at + 1, ended)
    return spins


@triton.jit
def fetch(ptr, count: tl.constexpr, ok, SYNC: tl.constexpr):
    """Ask for `count` contiguous elements to be brought into L2."""
    if SYNC:
        size: tl.constexpr = count * (ptr.dtype.element_ty.primitive_bitwidth // 8)
        if ok:
            tl.inline_asm_elementwise(
                BULK, "=r,l,r", [ptr.to(tl.int64, bitcast=True), tl.full((), size, tl.int32)], dtype=tl.int32, is_pure=False, pack=1
            )


@triton.jit
def tile_of(w, row, k, ok, K: tl.constexpr, BN: tl.constexpr, ODD: tl.constexpr = False):
    """[BN, len(k)] of a matrix with K columns; zeros unless `ok` (and, where ODD, beyond column K)."""
    r = row + tl.arange(0, BN)
    live = (r < tl.where(ok, 0x7FFFFFFF, -1))[:, None]
    if ODD:
        live = live & (k < K)[None, :]
    return tl.load(w + r[:, None] * K + k[None, :], mask=live, other=0)


@triton.jit
def scaled(y, ws, row, BN: tl.constexpr, Q8: tl.constexpr):
    if Q8:
        y = y * tl.load(ws + row + tl.arange(0, BN))
    return y


@triton.jit
def normed(x, w, EPS: tl.constexpr, H: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 0) / H + EPS) * w


@triton.jit
def after_mlp(s, norms, X1: tl.constexpr, Y: tl.constexpr, EPS: tl.constexpr, H: tl.constexpr):
    """The stream that a layer leaves; norms: that layer's."""
    h = tl.arange(0, H)
    post, factor = tl.load(norms + 3 * H + h), tl.load(norms + 4 * H)
    x, y = tl.load(s + X1 + h, cache_modifier=".cg"), tl.load(s + Y + h, cache_modifier=".cg")
    return (x + normed(y, post, EPS, H)) * factor


@triton.jit
def best_token(s, ids, BV: tl.constexpr, G: tl.constexpr):
    """The best guess of all programs; the lower id on ties."""
    i = tl.arange(0, 256)
    value = tl.load(s + BV + i, mask=i < G, other=float("-inf"), cache_modifier=".cg")
    token = tl.load(ids + i, mask=i < G, other=0, cache_modifier=".cg")
    return tl.min(tl.where(value == tl.max(value, 0), token, 0x7FFFFFFF), 0)


@triton.jit
def noisy(z, token, temperature, seed, position):
    """z / temperature plus the target's own noise (ops.triton.choose)."""
    key = mix32((seed & 0xFFFFFFFF).to(tl.uint32) ^ mix32(((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)))
    key = mix32(key ^ mix32(((position + 0x9E3779B9) & 0xFFFFFFFF).to(tl.uint32)))
    bits = mix32(key ^ mix32(((token.to(tl.int64) + 0x85EBCA6B) & 0xFFFFFFFF).to(tl.uint32)))
    u = tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), 1.0 - 1.0 / 16777216.0)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0)))
    return z / temperature - tl.log(tl.where(u < 1.0 / 1024.0, series, -tl.log(1.0 - u)))


# ---- phases -----------------------------------------------------------------------------------------------------------------
@triton.jit
def pre_phase(
    w, ws, table, features, feature_stride, last, out, s0, ids, step, steps, batch, table_scale, tick, spins, counter, probe,
    H: tl.constexpr, HB: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, X: tl.constexpr, MG: tl.constexpr, BV: tl.constexpr,
    STRIDE: tl.constexpr, Q8: tl.constexpr, G: tl.constexpr, SYNC: tl.constexpr, PROBE: tl.constexpr,
):  # fmt: skip
    """x = pre · [embedding of the newest token; hidden state]. After the first step the second part is ready (MG)."""
    pid = tl.program_id(0)
    UNITS: tl.constexpr = H // R
    k = tl.arange(0, BK)
    row = pid % UNITS * R
    tile = tile_of(w, row, k, pid < UNITS * batch, HB, R, True)
    fetch(w + row * HB, R * HB, pid < UNITS, SYNC)
    spins = sync(counter, tick, spins, probe, G, SYNC, PROBE)
    for u in range(pid, UNITS * batch, G):
        b, row = u // UNITS, u % UNITS * R
        s = s0 + b * STRIDE
        if step > 0:
            token = best_token(s, ids + b * 256, BV, G)
            if row == 0:
                tl.store(out + b * steps + step - 1, token.to(tl.int64))
        else:
            token = tl.load(last + b).to(tl.int32)
        acc = tl.zeros((R, BK), dtype=tl.float32)
        for base in range(0, HB, BK):
            over = base + BK >= HB
            to = tl.where(over, 0, base + BK) + k
            more = (over == 0) | (u + G < UNITS * batch)
            ahead = tile_of(w, tl.where(over, (u + G) % UNITS * R, row), to, more, HB, R, True)
            at = base + k
            e = tl.load(table + token.to(tl.int64) * HB + at, mask=at < HB, other=0.0).to(tl.float32) * table_scale
            acc += tile.to(tl.float32) * e[None, :]
            tile = ahead
        x = scaled(tl.sum(acc, 1), ws, row, R, Q8)
        r = row + tl.arange(0, R)
        if step > 0:
            x += tl.load(s + MG + r, cache_modifier=".cg")
        else:
            acc = tl.zeros((R, BK), dtype=tl.float32)
            for base in range(0, HB, BK):
                at = base + k
                other = tile_of(w + H * HB, row, at, row >= 0, HB, R, True)
                e = tl.load(features + b * feature_stride + at, mask=at < HB, other=0.0).to(tl.float32)
                acc += other.to(tl.float32) * e[None, :]
            x += scaled(tl.sum(acc, 1), ws + H, row, R, Q8)
        tl.store(s + X + r, x)
    return spins


@triton.jit
def q_phase(
    w, ws, norms, before, s0, first, batch, tick, spins, counter, probe,
    H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, X: tl.constexpr, X0: tl.constexpr, X1: tl.constexpr,
    Y: tl.constexpr, Q: tl.constexpr, EPS: tl.constexpr,
    STRIDE: tl.constexpr, Q8: tl.constexpr, G: tl.constexpr, SYNC: tl.constexpr, PROBE: tl.constexpr,
):  # fmt: skip
    """q = w · norm(x). norms: this layer's; before: those of the layer that x comes from (first: x is the input)."""
    pid = tl.program_id(0)
    UNITS: tl.constexpr = N // R
    h = tl.arange(0, H)
    tile = tile_of(w, pid % UNITS * R, h, pid < UNITS * batch, H, BN)
    fetch(w + pid % UNITS * R * H, R * H, pid < UNITS, SYNC)
    weight = tl.load(norms + h)
    spins = sync(counter, tick, spins, probe, G, SYNC, PROBE)
    for u in range(pid, UNITS * batch, G):
        b, row = u // UNITS, u % UNITS * R
        s = s0 + b * STRIDE
        if first:
            x = tl.load(s + X + h, cache_modifier=".cg")
        else:
            x = after_mlp(s, before, X1, Y, EPS, H)
        if row == 0:
            tl.store(s + X0 + h, x)
        x = normed(x, weight, EPS, H)
        for t in range(0, R, BN):
            last = t + BN >= R
            ahead = tile_of(w, tl.where(last, (u + G) % UNITS * R, row + t + BN), h, (last == 0) | (u + G < UNITS * batch), H, BN)
            y = tl.sum(tile.to(tl.float32) * x[None, :], 1)
            tl.store(s + Q + row + t + tl.arange(0, BN), scaled(y, ws, row + t, BN, Q8))
            tile = ahead
    return spins


@triton.jit
def block_at(kv, pages, first, end, i, page_stride, PAGE: tl.constexpr, D: tl.constexpr, KV_HEADS: tl.constexpr, BN: tl.constexpr):
    """Where BN keys from `first` lie (elements), and which of them are before `end`."""
    key = first + tl.arange(0, BN)
    live = key < end
    page = tl.load(pages + key // PAGE, mask=live, other=0).to(tl.int64)
    return page * page_stride + (kv * PAGE + key % PAGE) * D, live


@triton.jit
def span(position, split, S: tl.constexpr, WINDOW: tl.constexpr, BN: tl.constexpr):
    """The keys [from, to) of a split, and how many keys a split has."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    each = tl.cdiv(tl.cdiv(position + 1 - first, S), BN) * BN
    return first + split * each, tl.minimum(first + (split + 1) * each, position + 1), each


@triton.jit
def attend_phase(
    keys, values, tables, table_stride, page_stride, positions, cos, sin, q_norm, s0, batch, tick, spins, counter, probe,
    SCALE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, S: tl.constexpr,
    BN: tl.constexpr, PAGE: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, ML: tl.constexpr, EPS: tl.constexpr,
    STRIDE: tl.constexpr, G: tl.constexpr, SYNC: tl.constexpr, PROBE: tl.constexpr,
):  # fmt: skip
    """Attention of one K/V head over one split of the keys a unit."""
    pid = tl.program_id(0)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    GP: tl.constexpr = 16
    HALF: tl.constexpr = D // 2
    UNITS: tl.constexpr = KV_HEADS * S
    d, half, g = tl.arange(0, D), tl.arange(0, HALF), tl.arange(0, GP)
    # The first block comes before the wait: K/V stands since before the round.
    b = tl.minimum(pid // UNITS, batch - 1)
    lo, hi, _ = span(tl.load(positions + b).to(tl.int32), pid % UNITS // KV_HEADS, S, WINDOW, BN)
    hi = tl.where(pid < UNITS * batch, hi, 0)
    at, live = block_at(pid % KV_HEADS, tables + b * table_stride, lo, hi, 0, page_stride, PAGE, D, KV_HEADS, BN)
    ka = tl.load(keys + at[:, None] + half[None, :], mask=live[:, None], other=0.0)
    kb = tl.load(keys + at[:, None] + HALF + half[None, :], mask=live[:, None], other=0.0)
    v = tl.load(values + at[:, None] + d[None, :], mask=live[:, None], other=0.0)
    wa, wb = tl.load(q_norm + half), tl.load(q_norm + HALF + half)
    if SYNC:
        for start in range(lo + BN, hi, BN):
            at, live = block_at(pid % KV_HEADS, tables + b * table_stride, start, hi, 0, page_stride, PAGE, D, KV_HEADS, BN)
            line = at[:, None] + (tl.arange(0, D // 64) * 64)[None, :]
            prefetch(keys + line)
            prefetch(values + line)
    spins = sync(counter, tick, spins, probe, G, SYNC, PROBE)
    for u in range(pid, UNITS * batch, G):
        b, kv, split = u // UNITS, u % KV_HEADS, u % UNITS // KV_HEADS
        s = s0 + b * STRIDE
        position = tl.load(positions + b).to(tl.int32)
        lo, hi, _ = span(position, split, S, WINDOW, BN)
        if lo < hi:
            pages = tables + b * table_stride
            if u != pid:
                at, live = block_at(kv, pages, lo, hi, 0, page_stride, PAGE, D, KV_HEADS, BN)
                ka = tl.load(keys + at[:, None] + half[None, :], mask=live[:, None], other=0.0)
                kb = tl.load(keys + at[:, None] + HALF + half[None, :], mask=live[:, None], other=0.0)
                v = tl.load(values + at[:, None] + d[None, :], mask=live[:, None], other=0.0)
            head = kv * GROUP + g
            mine = g < GROUP
            from_q = s + Q + head[:, None] * D + half[None, :]
            qa = tl.load(from_q, mask=mine[:, None], other=0.0, cache_modifier=".cg")
            qb = tl.load(from_q + HALF, mask=mine[:, None], other=0.0, cache_modifier=".cg")
            inv = tl.rsqrt((tl.sum(qa * qa, 1) + tl.sum(qb * qb, 1)) / D + EPS) * SCALE
            c, sn = tl.load(cos + b * HALF + half), tl.load(sin + b * HALF + half)
            qa = qa * inv[:, None] * wa[None, :]
            qb = qb * inv[:, None] * wb[None, :]
            ra = (qa * c[None, :] - qb * sn[None, :]).to(ka.dtype)
            rb = (qb * c[None, :] + qa * sn[None, :]).to(ka.dtype)
            top = tl.full((GP,), float("-inf"), dtype=tl.float32)
            mass = tl.zeros((GP,), dtype=tl.float32)
            acc = tl.zeros((GP, D), dtype=tl.float32)
            for start in range(lo, hi, BN):
                z = tl.dot(ra, tl.trans(ka)) + tl.dot(rb, tl.trans(kb))  # [GP, BN], in powers of two
                z = tl.where((start + tl.arange(0, BN) < hi)[None, :], z, float("-inf"))
                new = tl.maximum(top, tl.max(z, 1))
                p = tl.exp2(z - new[:, None])
                fade = tl.exp2(top - new)
                acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
                mass = mass * fade + tl.sum(p, 1)
                top = new
                at, live = block_at(kv, pages, start + BN, hi, 0, page_stride, PAGE, D, KV_HEADS, BN)
                ka = tl.load(keys + at[:, None] + half[None, :], mask=live[:, None], other=0.0)
                kb = tl.load(keys + at[:, None] + HALF + half[None, :], mask=live[:, None], other=0.0)
                v = tl.load(values + at[:, None] + d[None, :], mask=live[:, None], other=0.0)
            to = head * S + split
            tl.store(s + P + to[:, None] * D + d[None, :], acc, mask=mine[:, None])
            tl.store(s + ML + to * 2, top, mask=mine)
            tl.store(s + ML + to * 2 + 1, mass, mask=mine)
    return spins


@triton.jit
def out_phase(
    w, ws, s0, positions, batch, tick, spins, counter, probe,
    H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, S: tl.constexpr, KEYS: tl.constexpr,
    R: tl.constexpr, BN: tl.constexpr, P: tl.constexpr, ML: tl.constexpr, YP: tl.constexpr,
    STRIDE: tl.constexpr, Q8: tl.constexpr, G: tl.constexpr, SYNC: tl.constexpr, PROBE: tl.constexpr,
):  # fmt: skip
    """One head's splits combined, times R rows of its columns of the out matrix, a unit: a partial sum by head."""
    pid = tl.program_id(0)
    TILES: tl.constexpr = H // R
    UNITS: tl.constexpr = HEADS * TILES
    SP: tl.constexpr = S if S > 16 else 16
    K: tl.constexpr = HEADS * D
    d = tl.arange(0, D)
    tile = tile_of(w + pid % UNITS // TILES * D, pid % TILES * R, d, pid < UNITS * batch, K, BN)
    if SYNC:  # noqa: SIM102
        if pid < UNITS:
            for t in range(BN, R, BN):
                r = pid % TILES * R + t + tl.arange(0, BN)
                LINE: tl.constexpr = 128 if Q8 else 64
                prefetch(w + pid % UNITS // TILES * D + r[:, None] * K + (tl.arange(0, D // LINE) * LINE)[None, :])
    spins = sync(counter, tick, spins, probe, G, SYNC, PROBE)
    for u in range(pid, UNITS * batch, G):
        b, head, row = u // UNITS, u % UNITS // TILES, u % TILES * R
        s = s0 + b * STRIDE
        lo, _, each = span(tl.load(positions + b).to(tl.int32), 0, S, WINDOW, KEYS)
        used = tl.cdiv(tl.load(positions + b).to(tl.int32) + 1 - lo, each)
        i = tl.arange(0, SP)
        ml = s + ML + head * S * 2
        m = tl.load(ml + i * 2, mask=i < used, other=float("-inf"), cache_modifier=".cg")
        weight = tl.load(ml + i * 2 + 1, mask=i < used, other=0.0, cache_modifier=".cg")
        top = tl.max(m, 0)
        mass = tl.sum(tl.exp2(m - top) * weight, 0)
        x = tl.zeros((D,), dtype=tl.float32)
        for c in range(0, used, 16):
            i16 = c + tl.arange(0, 16)
            share = tl.exp2(tl.load(ml + i16 * 2, mask=i16 < used, other=float("-inf"), cache_modifier=".cg") - top)
            part = tl.load(s + P + (head * S + i16)[:, None] * D + d[None, :], mask=(i16 < used)[:, None], other=0.0, cache_modifier=".cg")
            x += tl.sum(share[:, None] * part, 0)
        x = x / mass
        for t in range(0, R, BN):
            v = u + G
            last = t + BN >= R
            column = tl.where(last, v % UNITS // TILES, head) * D
            ahead = tile_of(w + column, tl.where(last, v % TILES * R, row + t + BN), d, (last == 0) | (v < UNITS * batch), K, BN)
            y = tl.sum(tile.to(tl.float32) * x[None, :], 1)
            tl.store(s + YP + head * H + row + t + tl.arange(0, BN), scaled(y, ws, row + t, BN, Q8))
            tile = ahead
    return spins


@triton.jit
def gate_phase(
    w, ws, norms, s0, batch, tick, spins, counter, probe,
    H: tl.constexpr, HEADS: tl.constexpr, INTER: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, CH: tl.constexpr,
    ACTIVATION: tl.constexpr, X0: tl.constexpr, X1: tl.constexpr, YP: tl.constexpr, ACT: tl.constexpr, EPS: tl.constexpr,
    STRIDE: tl.constexpr, Q8: tl.constexpr, G: tl.constexpr, SYNC: tl.constexpr, PROBE: tl.constexpr,
):  # fmt: skip
    """x1 = x0 + norm(sum of the out product); act(gate · norm(x1)) * (up · norm(x1))."""
    pid = tl.program_id(0)
    UNITS: tl.constexpr = INTER // R
    h = tl.arange(0, H)
    row = pid % UNITS * R
    gate, up = tile_of(w, row, h, pid < UNITS * batch, H, BN), tile_of(w, INTER + row, h, pid < UNITS * batch, H, BN)
    fetch(w + row * H, R * H, pid < UNITS, SYNC)
    fetch(w + (INTER + row) * H, R * H, pid < UNITS, SYNC)
    post, weight = tl.load(norms + H + h), tl.load(norms + 2 * H + h)
    spins = sync(counter, tick, spins, probe, G, SYNC, PROBE)
    for u in range(pid, UNITS * batch, G):
        b, row = u // UNITS, u % UNITS * R
        s = s0 + b * STRIDE
        x = tl.load(s + X0 + h, cache_modifier=".cg")
        y = tl.zeros((H,), dtype=tl.float32)
        for part in range(0, HEADS, CH):
            y += tl.sum(tl.load(s + YP + (part + tl.arange(0, CH))[:, None] * H + h[None, :], cache_modifier=".cg"), 0)
        x += normed(y, post, EPS, H)
        if row == 0:
            tl.store(s + X1 + h, x)
        x = normed(x, weight, EPS, H)
        for t in range(0, R, BN):
            last = t + BN >= R
            to = tl.where(last, (u + G) % UNITS * R, row + t + BN)
            ok = (last == 0) | (u + G < UNITS * batch)
            next_gate, next_up = tile_of(w, to, h, ok, H, BN), tile_of(w, INTER + to, h, ok, H, BN)
            a = scaled(tl.sum(gate.to(tl.float32) * x[None, :], 1), ws, row + t, BN, Q8)
            b_up = scaled(tl.sum(up.to(tl.float32) * x[None, :], 1), ws, INTER + row + t, BN, Q8)
            tl.store(s + ACT + row + t + tl.arange(0, BN), activate(a, ACTIVATION) * b_up)
            gate, up = next_gate, next_up
    return spins


@triton.jit
def down_phase(
    w, ws, s0, batch, tick, spins, counter, probe,
    H: tl.constexpr, INTER: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, ACT: tl.constexpr, Y: tl.constexpr,
    STRIDE: tl.constexpr, Q8: tl.constexpr, G: tl.constexpr, SYNC: tl.constexpr, PROBE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    UNITS: tl.constexpr = H // R
    k = tl.arange(0, BK)
    tile = tile_of(w, pid % UNITS * R, k, pid < UNITS * batch, INTER, R)
    fetch(w + pid % UNITS * R * INTER, R * INTER, pid < UNITS, SYNC)
    spins = sync(counter, tick, spins, probe, G, SYNC, PROBE)
    for u in range(pid, UNITS * batch, G):
        b, row = u // UNITS, u % UNITS * R
        s = s0 + b * STRIDE
        acc = tl.zeros((R, BK), dtype=tl.float32)
        for base in range(0, INTER, BK):
            last = base + BK >= INTER
            to, ok = tl.where(last, 0, base + BK), (last == 0) | (u + G < UNITS * batch)
            ahead = tile_of(w, tl.where(last, (u + G) % UNITS * R, row), to + k, ok, INTER, R)
            x = tl.load(s + ACT + base + k, cache_modifier=".cg")
            acc += tile.to(tl.float32) * x[None, :]
            tile = ahead
        tl.store(s + Y + row + tl.arange(0, R), scaled(tl.sum(acc, 1), ws, row, R, Q8))
    return spins


@triton.jit
def head_phase(
    mix, mix_s, head, head_s, norms, final_norm, s0, ids, temperature, hot, seed, position, step, batch, tick, spins, counter, probe,
    H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr, CLUSTERED: tl.constexpr,
    X1: tl.constexpr, Y: tl.constexpr, MG: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, EPS: tl.constexpr,
    STRIDE: tl.constexpr, Q8: tl.constexpr, G: tl.constexpr, SYNC: tl.constexpr, PROBE: tl.constexpr,
):  # fmt: skip
    """g = norm(x); what it adds to the next input (mix [H, H]); scores of N rows of `head`: of clusters, or of all tokens and
    then the best of them."""
    pid = tl.program_id(0)
    UNITS: tl.constexpr = H // R
    TILES: tl.constexpr = N // BN
    h = tl.arange(0, H)
    tile = tile_of(head, pid * BN, h, pid < TILES, H, BN)
    mixer = tile_of(mix, pid % UNITS * R, h, pid < UNITS, H, R)
    for i in tl.static_range(1, AHEAD):
        fetch(head + tl.minimum(pid + i * G, TILES - 1) * BN * H, BN * H, pid + i * G < TILES, SYNC)
    weight = tl.load(final_norm + h)
    spins = sync(counter, tick, spins, probe, G, SYNC, PROBE)
    for b in range(batch):
        s = s0 + b * STRIDE
        x = normed(after_mlp(s, norms, X1, Y, EPS, H), weight, EPS, H)
        if pid < UNITS:
            y = tl.sum(mixer.to(tl.float32) * x[None, :], 1)
            tl.store(s + MG + pid * R + tl.arange(0, R), scaled(y, mix_s, pid * R, R, Q8))
        best = tl.full((BN,), float("-inf"), dtype=tl.float32)
        token = tl.zeros((BN,), dtype=tl.int32)
        if not CLUSTERED:
            warm, key, at = tl.load(hot + b) != 0, tl.load(seed + b), tl.load(position + b) + step
            heat = tl.load(temperature + b)
        for t in range(pid, TILES, G):
            if not CLUSTERED:
                fetch(head + tl.minimum(t + AHEAD * G, TILES - 1) * BN * H, BN * H, t + AHEAD * G < TILES, SYNC)
            last = t + G >= TILES
            ahead = tile_of(head, tl.where(last, pid, t + G) * BN, h, (last == 0) | (b + 1 < batch), H, BN)
            z = scaled(tl.sum(tile.to(tl.float32) * x[None, :], 1), head_s, t * BN, BN, Q8)
            each = t * BN + tl.arange(0, BN)
            if CLUSTERED:
                tl.store(s + C + each, z)
            else:
                if warm:
                    z = noisy(z, each, heat, key, at)
                token = tl.where(z > best, each, token)
                best = tl.maximum(best, z)
            tile = ahead
        if not CLUSTERED:
            top = tl.max(best, 0)
            tl.store(s + BV + pid, top)
            tl.store(ids + b * 256 + pid, tl.min(tl.where(best == top, token, 0x7FFFFFFF), 0))
    return spins


@triton.jit
def cluster_phase(
    head, head_s, cluster_ids, norms, final_norm, s0, ids, temperature, hot, seed, position, step, batch, tick, spins, counter, probe,
    H: tl.constexpr, CLUSTERS: tl.constexpr, SIZE: tl.constexpr, TOP: tl.constexpr, SOME: tl.constexpr, STEP: tl.constexpr,
    BN: tl.constexpr, X1: tl.constexpr, Y: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, EPS: tl.constexpr,
    STRIDE: tl.constexpr, Q8: tl.constexpr, G: tl.constexpr, SYNC: tl.constexpr, PROBE: tl.constexpr,
):  # fmt: skip
    """Every program looks which of its SOME clusters are among the TOP best (as many as are beaten by fewer than TOP), and
    scores the tokens of those."""
    pid = tl.program_id(0)
    h = tl.arange(0, H)
    weight = tl.load(final_norm + h)
    spins = sync(counter, tick, spins, probe, G, SYNC, PROBE)
    for b in range(batch):
        s = s0 + b * STRIDE
        best = tl.full((BN,), float("-inf"), dtype=tl.float32)
        token = tl.zeros((BN,), dtype=tl.int32)
        if pid * SOME < CLUSTERS:
            i = tl.arange(0, SOME)
            mine = tl.load(s + C + pid * SOME + i, cache_modifier=".cg")
            place = tl.zeros((SOME,), dtype=tl.int32)
            for base in range(0, CLUSTERS, STEP):
                j = base + tl.arange(0, STEP)
                other = tl.load(s + C + j, cache_modifier=".cg")
                beats = (other[None, :] > mine[:, None]) | ((other[None, :] == mine[:, None]) & (j[None, :] < pid * SOME + i[:, None]))
                place += tl.sum(beats.to(tl.int32), 1)
            chosen = tl.sum(tl.where(place < TOP, 1, 0) << i, 0)
            if chosen != 0:
                x = normed(after_mlp(s, norms, X1, Y, EPS, H), weight, EPS, H)
                warm, key, at = tl.load(hot + b) != 0, tl.load(seed + b), tl.load(position + b) + step
                heat = tl.load(temperature + b)
                for c in range(SOME):
                    if ((chosen >> c) & 1) != 0:
                        first = (pid * SOME + c) * SIZE
                        for t in range(0, SIZE, BN):
                            tile = tile_of(head, first + t, h, first >= 0, H, BN)
                            each = tl.load(cluster_ids + first + t + tl.arange(0, BN))
                            z = scaled(tl.sum(tile.to(tl.float32) * x[None, :], 1), head_s, first + t, BN, Q8)
                            if warm:
                                z = noisy(z, each, heat, key, at)
                            token = tl.where(z > best, each, token)
                            best = tl.maximum(best, z)
        top = tl.max(best, 0)
        tl.store(s + BV + pid, top)
        tl.store(ids + b * 256 + pid, tl.min(tl.where(best == top, token, 0x7FFFFFFF), 0))
    return spins
