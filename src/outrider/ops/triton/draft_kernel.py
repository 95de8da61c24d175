"""A small clustered drafter's whole round in one launch: K times [embedding; hidden state] -> layers -> clusters ->
token.

One resident program per SM; all run the same phases. A phase loads its share of the weights into registers, waits until
every program has finished the previous phase (`sync`), then reads the others' results from a small scratch. Such a
phase is latency-bound, so: what is older than the last phase is read before the wait; vectors are read once by every
warp (`spread`, L1 serves seven of eight), so that norms and products are sums within a warp; loops over keys keep one
softmax per row and merge them once. Phases communicate only through the scratch, so they can also be launched one by
one (SYNC False), as the interpreter does.

Scratch, float32, one row of STRIDE per sequence; offsets X (input stream), X0 and X1 (stream before attention and
before the MLP), MG (what the fed-back state adds to the next input), A (cosines and sines), Q (queries), P and ML
(attention by splits: sums; maximum and mass), YP (out product by groups of columns), ACT, Y (down product), GN (the
normed stream for the head), C (cluster scores), L (the best clusters); `best`: every program's best score and token as
one number. Drafts cannot change the output: no row invariance.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .choose import gumbel, noise, noise_bits
from .common import activate

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
STORE = tl.constexpr("st.global.f32 [$1], $2; mov.u32 $0, 0;")


@triton.jit
def sync(counter, tick, spins, G: tl.constexpr, SYNC: tl.constexpr):
    """Until all G programs have arrived for the tick-th time. Ticks only grow (and wrap)."""
    if SYNC:
        tl.debug_barrier()
        at = counter.to(tl.int64, bitcast=True)
        spins = tl.inline_asm_elementwise(
            ARRIVE, "=&r,l,r,r", [at, (tick + 1) * G, spins], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
    return spins


@triton.jit
def fetch(ptr, count: tl.constexpr, SYNC: tl.constexpr):
    """Ask for `count` contiguous elements to be brought into L2."""
    if SYNC:
        size: tl.constexpr = count * (ptr.dtype.element_ty.primitive_bitwidth // 8)
        at = ptr.to(tl.int64, bitcast=True)
        tl.inline_asm_elementwise(
            BULK, "=r,l,r", [at, tl.full((), size, tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def tile_of(w, row, WIDE: tl.constexpr, R: tl.constexpr, K: tl.constexpr):
    """[R, K] of a matrix with WIDE columns; zeros beyond a row's end."""
    r, k = row + tl.arange(0, R), tl.arange(0, K)
    if K > WIDE:
        return tl.load(w + r[:, None] * WIDE + k[None, :], mask=(r >= 0)[:, None] & (k < WIDE)[None, :], other=0)
    else:
        return tl.load(w + r[:, None] * WIDE + k[None, :])


@triton.jit
def spread(ptr, R: tl.constexpr, K: tl.constexpr):
    """A vector as R equal rows: every warp reads it for itself."""
    return tl.load(ptr + (tl.arange(0, R) * 0)[:, None] + tl.arange(0, K)[None, :])


@triton.jit
def keep(ptr, x, R: tl.constexpr, K: tl.constexpr):
    """Store one of the equal rows of x; one program does, after what the others wait for."""
    if tl.program_id(0) == 0:
        r = tl.arange(0, R)[:, None]
        tl.store(ptr + r * 0 + tl.arange(0, K)[None, :], x, mask=(r < 1) & (tl.arange(0, K) >= 0)[None, :])


@triton.jit
def put(ptrs, y, SYNC: tl.constexpr):
    """Store a sum from where it lies, by every thread that has it: tl.store would first move it through shared
    memory."""
    if SYNC:
        tl.inline_asm_elementwise(
            STORE, "=r,l,f", [ptrs.to(tl.int64, bitcast=True), y], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.store(ptrs, y)


@triton.jit
def normed(x, w, EPS: tl.constexpr, H: tl.constexpr):
    """RMS norm of every row."""
    return x * tl.rsqrt(tl.sum(x * x, 1) / H + EPS)[:, None] * w


@triton.jit
def ranked(z, token):
    """A number that is greater for a greater score, and for the lower token among equal ones."""
    bits = z.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def unranked(number):
    """The score and the token that made it; -inf and 0 where there was none."""
    bits = (number >> 32).to(tl.int32)
    z = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    found = z == z
    return tl.where(found, z, float("-inf")), tl.where(found, 0x7FFFFFFF - (number & 0x7FFFFFFF), 0).to(tl.int32)


@triton.jit
def best_token(best, G: tl.constexpr):
    """The best guess of all programs."""
    i = tl.arange(0, 256)
    top = tl.max(tl.load(best + i, mask=i < G, other=-0x7FFFFFFFFFFFFFFF), 0)
    return (0x7FFFFFFF - (top & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def angles(s, position, freqs, HALF: tl.constexpr):
    """Cosines and sines of one rope variant at `position`."""
    i = tl.arange(0, HALF)
    angle = position.to(tl.float32) * tl.load(freqs + i)
    tl.store(s + i, tl.cos(angle))
    tl.store(s + HALF + i, tl.sin(angle))


# ---- phases
@triton.jit
def pre_phase(
    w, table, features, feature_stride, last, out, s0, best, step, steps, batch, table_scale, tick, spins, counter,
    H: tl.constexpr, HB: tl.constexpr, HBP: tl.constexpr, R: tl.constexpr, X: tl.constexpr, MG: tl.constexpr,
    STRIDE: tl.constexpr, G: tl.constexpr, SYNC: tl.constexpr,
):
    """x = pre · [embedding of the newest token; hidden state]. After the first step the second part is ready (MG)."""
    pid = tl.program_id(0)
    UNITS: tl.constexpr = H // R
    row = pid % UNITS * R
    r, k = row + tl.arange(0, R), tl.arange(0, HBP)
    tile = tile_of(w, row, HB, R, HBP)
    spins = sync(counter, tick, spins, G, SYNC)
    if pid < UNITS:
        for b in range(batch):
            s = s0 + b * STRIDE
            if step > 0:
                more = tl.load(s + MG + r)
                token = best_token(best + b * 256, G)
                if row == 0:
                    tl.store(out + b * steps + step - 1, token.to(tl.int64))
            else:
                token = tl.load(last + b).to(tl.int32)
                state = tl.load(features + b * feature_stride + k, mask=k < HB, other=0.0).to(tl.float32)
                more = tl.sum(tile_of(w + H * HB, row, HB, R, HBP).to(tl.float32) * state[None, :], 1)
            at = table + token.to(tl.int64) * HB + (tl.arange(0, R) * 0)[:, None] + k[None, :]
            e = tl.load(at, mask=(r >= 0)[:, None] & (k < HB)[None, :], other=0.0).to(tl.float32) * table_scale
            put(s + X + r, tl.sum(tile.to(tl.float32) * e, 1) + more, SYNC)
    return spins


@triton.jit
def q_phase(
    w, norms, before, s0, first, batch, tick, spins, counter,
    H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, X: tl.constexpr, X0: tl.constexpr, X1: tl.constexpr,
    Y: tl.constexpr, Q: tl.constexpr, EPS: tl.constexpr, STRIDE: tl.constexpr, G: tl.constexpr, SYNC: tl.constexpr,
):
    """q = w · norm(x). norms: this layer's; before: those of the layer that x comes from (first: x is the input)."""
    pid = tl.program_id(0)
    UNITS: tl.constexpr = N // R
    row = pid % UNITS * R
    tile = tile_of(w, row, H, R, H)
    weight, post, factor = spread(norms, R, H), spread(before + 3 * H, R, H), tl.load(before + 4 * H)
    x1 = spread(s0 + X1, R, H)
    spins = sync(counter, tick, spins, G, SYNC)
    if pid < UNITS:
        for b in range(batch):
            s = s0 + b * STRIDE
            if b > 0:
                x1 = spread(s + X1, R, H)
            x = spread(s + tl.where(first, X, Y), R, H)
            x = tl.where(first, x, (x1 + normed(x, post, EPS, H)) * factor)
            put(s + Q + row + tl.arange(0, R), tl.sum(tile.to(tl.float32) * normed(x, weight, EPS, H), 1), SYNC)
            keep(s + X0, x, R, H)
    return spins


@triton.jit
def block_at(keys, values, pages, kv, first, hi, page_stride, PAGE: tl.constexpr, D: tl.constexpr, BN: tl.constexpr):
    """Keys and values from position `first`, each as two halves [BN, D / 2]; zeros from `hi` on."""
    HALF: tl.constexpr = D // 2
    key = first + tl.arange(0, BN)
    live = (key < hi)[:, None]
    page = tl.load(pages + key // PAGE, mask=key < hi, other=0).to(tl.int64)
    at = (page * page_stride + (kv * PAGE + key % PAGE) * D)[:, None] + tl.arange(0, HALF)[None, :]
    ka, kb = tl.load(keys + at, mask=live, other=0.0), tl.load(keys + at + HALF, mask=live, other=0.0)
    return ka, kb, tl.load(values + at, mask=live, other=0.0), tl.load(values + at + HALF, mask=live, other=0.0)


@triton.jit
def span(position, split, S: tl.constexpr, WINDOW: tl.constexpr, BN: tl.constexpr):
    """The keys [from, to) of a split."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    each = tl.cdiv(tl.cdiv(position + 1 - first, S), BN) * BN
    return first + split * each, tl.minimum(first + (split + 1) * each, position + 1)


@triton.jit
def attend_phase(
    keys, values, tables, table_stride, page_stride, positions, q_norm, s0, batch, tick, spins, counter,
    SCALE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    S: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, A: tl.constexpr, Q: tl.constexpr, P: tl.constexpr,
    ML: tl.constexpr, EPS: tl.constexpr, STRIDE: tl.constexpr, G: tl.constexpr, SYNC: tl.constexpr,
):
    """One unit is the attention of one head over one split of the keys. K/V was written before the round: two blocks
    are loaded before the wait, and a warp keeps its rows to itself until all are done."""
    pid = tl.program_id(0)
    HALF: tl.constexpr = D // 2
    GROUP: tl.constexpr = HEADS // KV_HEADS
    UNITS: tl.constexpr = HEADS * S
    i, d = tl.arange(0, BN), tl.arange(0, HALF)
    b, head = tl.minimum(pid // UNITS, batch - 1), pid % UNITS // S
    lo, hi = span(tl.load(positions + b).to(tl.int32), pid % S, S, WINDOW, BN)
    hi = tl.where(pid < UNITS * batch, hi, 0)
    pages = tables + b * table_stride
    ka, kb, va, vb = block_at(keys, values, pages, head // GROUP, lo, hi, page_stride, PAGE, D, BN)
    ka2, kb2, va2, vb2 = block_at(keys, values, pages, head // GROUP, lo + BN, hi, page_stride, PAGE, D, BN)
    wa, wb = spread(q_norm, BN, HALF) * SCALE, spread(q_norm + HALF, BN, HALF) * SCALE
    cos, sin = spread(s0 + b * STRIDE + A, BN, HALF), spread(s0 + b * STRIDE + A + HALF, BN, HALF)
    spins = sync(counter, tick, spins, G, SYNC)
    for u in range(pid, UNITS * batch, G):
        if u != pid:
            b, head = u // UNITS, u % UNITS // S
            lo, hi = span(tl.load(positions + b).to(tl.int32), u % S, S, WINDOW, BN)
            pages = tables + b * table_stride
            ka, kb, va, vb = block_at(keys, values, pages, head // GROUP, lo, hi, page_stride, PAGE, D, BN)
            ka2, kb2, va2, vb2 = block_at(keys, values, pages, head // GROUP, lo + BN, hi, page_stride, PAGE, D, BN)
            cos, sin = spread(s0 + b * STRIDE + A, BN, HALF), spread(s0 + b * STRIDE + A + HALF, BN, HALF)
        s = s0 + b * STRIDE
        qa, qb = spread(s + Q + head * D, BN, HALF), spread(s + Q + head * D + HALF, BN, HALF)
        inv = tl.rsqrt((tl.sum(qa * qa, 1) + tl.sum(qb * qb, 1)) / D + EPS)[:, None]
        qa, qb = qa * wa * inv, qb * wb * inv
        ra, rb = qa * cos - qb * sin, qb * cos + qa * sin
        top = tl.full((BN,), float("-inf"), dtype=tl.float32)
        mass = tl.zeros((BN,), dtype=tl.float32)
        acc_a, acc_b = tl.zeros((BN, HALF), dtype=tl.float32), tl.zeros((BN, HALF), dtype=tl.float32)
        for start in range(lo, hi, BN):
            z = tl.sum(ka.to(tl.float32) * ra + kb.to(tl.float32) * rb, 1)  # in powers of two
            z = tl.where(start + i < hi, z, float("-inf"))
            new = tl.maximum(top, z)
            base = tl.where(new == float("-inf"), 0.0, new)
            p, fade = tl.exp2(z - base), tl.exp2(top - base)
            acc_a = acc_a * fade[:, None] + p[:, None] * va.to(tl.float32)
            acc_b = acc_b * fade[:, None] + p[:, None] * vb.to(tl.float32)
            mass = mass * fade + p
            top = new
            ka, kb, va, vb = ka2, kb2, va2, vb2
            ka2, kb2, va2, vb2 = block_at(
                keys, values, pages, head // GROUP, start + 2 * BN, hi, page_stride, PAGE, D, BN
            )
        most = tl.max(top, 0)  # -inf: a split without keys
        share = tl.exp2(top - tl.where(most == float("-inf"), 0.0, most))
        to = u % UNITS
        tl.store(s + P + to * D + d, tl.sum(acc_a * share[:, None], 0))
        tl.store(s + P + to * D + HALF + d, tl.sum(acc_b * share[:, None], 0))
        tl.store(s + ML + to * 2, most)
        tl.store(s + ML + to * 2 + 1, tl.sum(mass * share, 0))
    return spins


@triton.jit
def out_phase(
    w, s0, batch, tick, spins, counter,
    H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, S: tl.constexpr, COLS: tl.constexpr, CUTS: tl.constexpr,
    P: tl.constexpr, ML: tl.constexpr, YP: tl.constexpr,
    STRIDE: tl.constexpr, G: tl.constexpr, SYNC: tl.constexpr,
):
    """COLS columns of the attention's result, joined from the splits, times some rows of the out matrix, a unit."""
    pid = tl.program_id(0)
    GROUPS: tl.constexpr = HEADS * D // COLS
    PARTS: tl.constexpr = CUTS // GROUPS if CUTS > GROUPS else 1
    R: tl.constexpr = H // PARTS
    UNITS: tl.constexpr = GROUPS * PARTS
    group, row = pid % UNITS // PARTS, pid % PARTS * R
    c, r, i = tl.arange(0, COLS), tl.arange(0, R), tl.arange(0, S)
    tile = tl.load(w + (row + r)[:, None] * (HEADS * D) + group * COLS + c[None, :])
    spins = sync(counter, tick, spins, G, SYNC)
    if pid < UNITS:
        head, column = group * COLS // D, group * COLS % D
        for b in range(batch):
            s = s0 + b * STRIDE
            m, mass = tl.load(s + ML + (head * S + i) * 2), tl.load(s + ML + (head * S + i) * 2 + 1)
            part = tl.load(s + P + (head * S + i)[:, None] * D + column + c[None, :])
            share = tl.exp2(m - tl.max(m, 0))
            x = tl.sum(share[:, None] * part, 0) / tl.sum(share * mass, 0)
            put(s + YP + group * H + row + r, tl.sum(tile.to(tl.float32) * x[None, :], 1), SYNC)
    return spins


@triton.jit
def gate_phase(
    w, norms, s0, batch, tick, spins, counter,
    H: tl.constexpr, GROUPS: tl.constexpr, INTER: tl.constexpr, R: tl.constexpr, ACTIVATION: tl.constexpr,
    X0: tl.constexpr, X1: tl.constexpr, YP: tl.constexpr, ACT: tl.constexpr, EPS: tl.constexpr, STRIDE: tl.constexpr,
    G: tl.constexpr, SYNC: tl.constexpr,
):
    """x1 = x0 + norm(sum of the out product); act(gate · norm(x1)) * (up · norm(x1))."""
    pid = tl.program_id(0)
    UNITS: tl.constexpr = INTER // R
    row, h, i = pid % UNITS * R, tl.arange(0, H), tl.arange(0, GROUPS)
    gate, up = tile_of(w, row, H, R, H), tile_of(w, INTER + row, H, R, H)
    post, weight = spread(norms + H, R, H), spread(norms + 2 * H, R, H)
    x0 = spread(s0 + X0, R, H)
    spins = sync(counter, tick, spins, G, SYNC)
    if pid < UNITS:
        for b in range(batch):
            s = s0 + b * STRIDE
            if b > 0:
                x0 = spread(s + X0, R, H)
            y = tl.sum(tl.load(s + YP + i[:, None] * H + h[None, :]), 0)
            y = y * tl.rsqrt(tl.sum(y * y, 0) / H + EPS)
            x = x0 + y[None, :] * post
            n = normed(x, weight, EPS, H)
            a = activate(tl.sum(gate.to(tl.float32) * n, 1), ACTIVATION) * tl.sum(up.to(tl.float32) * n, 1)
            put(s + ACT + row + tl.arange(0, R), a, SYNC)
            keep(s + X1, x, R, H)
    return spins


@triton.jit
def down_phase(
    w, s0, batch, tick, spins, counter,
    H: tl.constexpr, INTER: tl.constexpr, R: tl.constexpr, ACT: tl.constexpr, Y: tl.constexpr,
    STRIDE: tl.constexpr, G: tl.constexpr, SYNC: tl.constexpr,
):
    pid = tl.program_id(0)
    UNITS: tl.constexpr = H // R
    row = pid % UNITS * R
    tile = tile_of(w, row, INTER, R, INTER)
    spins = sync(counter, tick, spins, G, SYNC)
    if pid < UNITS:
        for b in range(batch):
            s = s0 + b * STRIDE
            put(s + Y + row + tl.arange(0, R), tl.sum(tile.to(tl.float32) * spread(s + ACT, R, INTER), 1), SYNC)
    return spins


@triton.jit
def head_phase(
    mix, centroids, norms, final_norm, cluster_ids, s0, temperature, sampled, seed, position, warm, step, batch, tick,
    spins, counter,
    H: tl.constexpr, CLUSTERS: tl.constexpr, SIZE: tl.constexpr, R: tl.constexpr, X1: tl.constexpr, Y: tl.constexpr,
    MG: tl.constexpr, GN: tl.constexpr, C: tl.constexpr, EPS: tl.constexpr, STRIDE: tl.constexpr, G: tl.constexpr,
    SYNC: tl.constexpr,
):
    """g = norm(x); scores of the clusters, with the cluster_bonus of those that sample (reference.cluster_bonus); what
    g adds to the next input (mix [H, H]). warm: whether any of the batch samples."""
    pid = tl.program_id(0)
    row, r = pid * R, tl.arange(0, R)
    tile, mixer = tile_of(centroids, row % CLUSTERS, H, R, H), tile_of(mix, row % H, H, R, H)
    weight, post, factor = spread(final_norm, R, H), spread(norms + 3 * H, R, H), tl.load(norms + 4 * H)
    x1 = spread(s0 + X1, R, H)
    token = tl.zeros((R, SIZE), dtype=tl.int32)
    if warm:
        token = tile_of(cluster_ids, row % CLUSTERS, SIZE, R, SIZE)
    spins = sync(counter, tick, spins, G, SYNC)
    if (row < CLUSTERS) | (row < H):
        for b in range(batch):
            s = s0 + b * STRIDE
            if b > 0:
                x1 = spread(s + X1, R, H)
            y = spread(s + Y, R, H)
            cluster_bonus = tl.zeros((R,), dtype=tl.float32)
            if warm:  # while y is on its way
                heat = tl.where(tl.load(sampled + b) != 0, tl.load(temperature + b), 0.0)
                bits = noise_bits(token.to(tl.int64), tl.load(seed + b), tl.load(position + b) + step)
                cluster_bonus = heat * noise(tl.min(bits, 1))
            x = normed((x1 + normed(y, post, EPS, H)) * factor, weight, EPS, H)
            if row < CLUSTERS:
                put(s + C + row + r, tl.sum(tile.to(tl.float32) * x, 1) + cluster_bonus, SYNC)
            if row < H:
                put(s + MG + row + r, tl.sum(mixer.to(tl.float32) * x, 1), SYNC)
            keep(s + GN, x, R, H)
    return spins


@triton.jit
def rank_phase(
    head, s0, batch, tick, spins, counter,
    H: tl.constexpr, CLUSTERS: tl.constexpr, SIZE: tl.constexpr, TOP: tl.constexpr, SOME: tl.constexpr,
    C: tl.constexpr, L: tl.constexpr,
    STRIDE: tl.constexpr, G: tl.constexpr, SYNC: tl.constexpr,
):
    """A cluster's place is the number of clusters that beat it; every program counts for SOME of them. Exact ties share
    a place: the one left over keeps a cluster of an earlier step."""
    pid = tl.program_id(0)
    spins = sync(counter, tick, spins, G, SYNC)
    if pid * SOME < CLUSTERS:
        i = tl.arange(0, SOME)
        for b in range(batch):
            s = s0 + b * STRIDE
            mine, all_ = tl.load(s + C + pid * SOME + i), tl.load(s + C + tl.arange(0, CLUSTERS))
            place = tl.sum((all_[None, :] > mine[:, None]).to(tl.int32), 1)
            tl.store(s + L + place, (pid * SOME + i).to(tl.float32), mask=place < TOP)
            chosen = tl.sum(tl.where(place < TOP, 1, 0) << i, 0)
            if SYNC:  # noqa: SIM102
                if chosen != 0:  # on the way while the programs meet
                    for c in range(SOME):
                        if ((chosen >> c) & 1) != 0:
                            fetch(head + (pid * SOME + c) * SIZE * H, SIZE * H, SYNC)
    return spins


@triton.jit
def score_phase(
    head, cluster_ids, table, s0, best, scores, tokens, temperature, sampled, seed, position, step, batch, tick, spins,
    counter,
    H: tl.constexpr, HB: tl.constexpr, SIZE: tl.constexpr, TOP: tl.constexpr, PIECES: tl.constexpr, GN: tl.constexpr,
    L: tl.constexpr, STRIDE: tl.constexpr, G: tl.constexpr, SYNC: tl.constexpr,
):
    """The tokens of the best clusters, one of PIECES of a cluster a unit; the best of them, and for trees the two best
    of every step (scores, tokens [B, 16, 2, 256])."""
    pid = tl.program_id(0)
    BN: tl.constexpr = SIZE // PIECES
    x = spread(s0 + GN, BN, H)
    spins = sync(counter, tick, spins, G, SYNC)
    for b in range(batch):
        s = s0 + b * STRIDE
        if b > 0:
            x = spread(s + GN, BN, H)
        warm, key, at = tl.load(sampled + b) != 0, tl.load(seed + b), tl.load(position + b) + step
        heat = tl.load(temperature + b)
        top = tl.full((), -0x7FFFFFFFFFFFFFFF, dtype=tl.int64)
        next_ = top
        for u in range(pid, TOP * PIECES, G):
            row = tl.load(s + L + u // PIECES).to(tl.int32) * SIZE + u % PIECES * BN
            tile = tile_of(head, row, H, BN, H)
            token = tl.load(cluster_ids + row + tl.arange(0, BN))
            z = tl.sum(tile.to(tl.float32) * x, 1)
            if warm:
                z = z / heat + gumbel(token.to(tl.int64), key, at)
            places = ranked(z, token)
            first = tl.max(places, 0)
            second = tl.max(tl.where(places == first, -0x7FFFFFFFFFFFFFFF, places), 0)
            next_ = tl.maximum(tl.maximum(next_, second), tl.minimum(top, first))
            top = tl.maximum(top, first)
        tl.store(best + b * 256 + pid, top)
        to = (b * 16 + step) * 512 + pid
        value, token = unranked(top)
        tl.store(scores + to, value)
        tl.store(tokens + to, token)
        value, token = unranked(next_)
        tl.store(scores + to + 256, value)
        tl.store(tokens + to + 256, token)
        if pid < TOP * PIECES:  # should it win, its embedding is on the way
            fetch(table + (0x7FFFFFFF - (top & 0x7FFFFFFF)) * HB, HB, SYNC)
    return spins
