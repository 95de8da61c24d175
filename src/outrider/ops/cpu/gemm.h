/* One product, divided among a thread pool: which outputs a member computes, and its epilogue. */
#pragma once
#include "lowrank.h"

#define TAKE(bytes)                                                                                                    \
    (used += UP(bytes), at ? at + used - UP(bytes) : NULL) /* a piece of scratch at `at`; NULL: only counted */

/* Of a row, by lane: the largest output and the first group that has it; of a sampled one also the largest of all
 * lanes. */
typedef struct { _Alignas(64) float value[LANES], group[LANES], found; } Best;
typedef struct {
    uint32_t key;
    int sampled;
    float temperature;
} Draw; /* a row's token: the argmax of output / temperature + noise where sampled */

typedef struct { /* where a product's outputs go */
    enum { TO_STORE, TO_GATED, TO_TIMES } how;
    const float *bias;
    float *out;            /* [rows, ldo] */
    int64_t ldo;
    int act;               /* GATED: act(gate)·up; TIMES: act(y)·side */
    const float *side;
    int64_t ldside;
    float cap;             /* STORE: softcap; 0: none */
    QActs *quantised;       /* GATED, TIMES: also quantise what was written */
    Best *best;            /* [rows] or NULL: kept up to date */
    const Draw *draw;      /* [rows] or NULL: the best are those of the answers */
    int cut;               /* the first `cut` outputs and the rest are shared out separately (0: all together) */
    const LowRankRows *low; /* NULL: no row uses an adapter */
} Epilogue;

#define PRIVATE_ROWS 16 /* up to here every member does the row work for itself: cheaper than handing rows over */
/* Rows for each member from which products are shared by rows, not by outputs: every member decodes all weights. */
#if ISA_AMX
#define SPLIT_ROWS BLOCK_ROWS
#else
#define SPLIT_ROWS 32
#endif

INLINE vf add_bias(vf y, const float *bias, int n, int left) { return bias ? vf_add(y, vf_load_n(bias + n, left)) : y; }

INLINE void best_seen(Best *b, vf y, int g, int left) {
    static const float lane[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    if (left < LANES) y = vf_pick_lt(vf_load(lane), vf_set((float)left), y, vf_set(-INFINITY));
    const vf top = vf_load(b->value), now = vf_set((float)g), held = vf_load(b->group);
    const vf least = vf_pick_lt(now, held, now, held); /* of equals: groups may come in any order */
    vf_store(b->group, vf_pick_lt(top, y, now, vf_pick_lt(y, top, held, least)));
    vf_store(b->value, vf_max(y, top));
}

INLINE vi token_hashes(int first) { /* of sixteen tokens in a row */
    static const int32_t lane[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return vi_token_hash(vi_add(vi_load(lane), vi_set(first)));
}
/* The same with the noise of the sixteen tokens whose hashes are given. For nearly all of them one look at the bits
 * says that none wins. */
INLINE void draw_seen(Best *b, const Draw *d, vf y, vi hash, int g, int left) {
    if (d->temperature != 1.0f) y = vf_div(y, vf_set(d->temperature));
    const vi bits = vi_noise_bits(d->key, hash);
    if (!vf_any_ge(vf_add(y, vf_noise_most(bits)), vf_set(b->found))) return;
    best_seen(b, vf_max(vf_add(y, vf_noise(bits)), vf_set(-INFINITY)), g, left); /* what is no number does not win */
    b->found = vf_hmax(vf_load(b->value));
}

/* Outputs 16g.. of rows m0..: into tile and to where they belong. n: outputs in all; change: what adapters add, [mc,
 * 16], and behind CHANGES groups what they add to up */
INLINE void product_group(const Weight *w, const QActs *a, const Epilogue *to, int n, int g, int m0, int mc,
                          const float *change, float *tile) {
    _Alignas(64) float up[STEP_ROWS * LANES];
    const int at = g * LANES, left = n - at;
    for (int m = 0; to->out && m < mc; m++)
        __builtin_prefetch(to->out + (int64_t)(m0 + m) * to->ldo + at, 1); /* another core may hold the line */
    product_tile(w, g, a, m0, mc, tile);
    if (to->how == TO_GATED) product_tile(w, g + n / LANES, a, m0, mc, up);
    vi hash = vi_set(0);
    if (to->draw) hash = token_hashes(at);
    for (int m = 0; m < mc; m++) {
        const int64_t row = m0 + m;
        vf y = add_bias(vf_load(tile + LANES * m), to->bias, at, left);
        if (to->low) y = vf_add(y, vf_load(change + LANES * m));
        if (to->how == TO_GATED) {
            vf v = add_bias(vf_load(up + LANES * m), to->bias, n + at, left);
            if (to->low) v = vf_add(v, vf_load(change + LANES * (CHANGES + m)));
            y = vf_mul(vf_act(y, to->act), v);
        } else if (to->how == TO_TIMES)
            y = vf_mul(vf_act(y, to->act), vf_load_n(to->side + row * to->ldside + at, left));
        else if (to->cap > 0.0f) y = vf_softcap(y, to->cap);
        if (to->draw && to->draw[row].sampled) draw_seen(to->best + row, to->draw + row, y, hash, g, left);
        else if (to->best) best_seen(to->best + row, y, g, left);
        if (to->out) vf_store_n(to->out + row * to->ldo + at, y, left);
        if (to->quantised) vf_store(tile + LANES * m, y);
    }
}

/* What adapters add to units from..past-1 of the block of rows at `base`. Computed for as much of a member's share as
 * fits, not piece by piece: whenever a core turns from the weights to B and back, memory is idle for a while. */
typedef struct {
    int base, from, past, end; /* end: of the share, beyond which another member computes */
    _Alignas(64) float at[2 * CHANGES * LANES]; /* [units][wide][rows][16]; GATED: up's in the second half */
} Changes;

/* Units lo..hi-1 of a product for rows first..last-1. A unit is a group, or two if 32 answers are quantised at once. */
static void product_units(const Weight *w, const QActs *a, const Epilogue *to, int n, int wide, int lo, int hi,
                          int first, int last, Changes *c) {
    _Alignas(64) float tile[2][STEP_ROWS * LANES], x[2 * LANES];
    const int block = BLOCK_ROWS / height_of(a) * height_of(a);
    for (int base = first; base < last; base += block) {
        const int end = base + block < last ? base + block : last, rows = end - base;
        for (int u = lo; u < hi; u++) {
            if (to->low && (base != c->base || u < c->from || u >= c->past)) {
                const int most = CHANGES / (wide * rows),
                          stop = last - first > block ? hi : c->end; /* one block of rows is kept */
                c->base = base; c->from = u; c->past = stop - u < most ? stop : u + most;
                for (int up = 0; up <= (to->how == TO_GATED); up++)
                    expand_groups(to->low, u * wide + up * (n / LANES), (c->past - u) * wide, base, rows,
                                  c->at + up * CHANGES * LANES);
            }
            for (int m0 = base; m0 < end; m0 += STEP_ROWS) {
                const int mc = end - m0 < STEP_ROWS ? end - m0 : STEP_ROWS;
                for (int half = 0; half < wide; half++) {
                    const float *change =
                        to->low ? c->at + ((int64_t)((u - c->from) * wide + half) * rows + m0 - base) * LANES : NULL;
                    product_group(w, a, to, n, u * wide + half, m0, mc, change, tile[half]);
                }
                for (int m = 0; to->quantised && m < mc; m++) {
                    const int64_t at = acts_place(to->quantised, m0 + m, 32 * u);
                    vf_store(x, vf_load(tile[0] + LANES * m));
                    vf_store(x + LANES, vf_load(tile[1] + LANES * m));
                    quantize_block(x, to->quantised, at);
                }
            }
        }
    }
}

#define PIECES 8 /* of a member's share */

/* One product, handed out in pieces: all outputs of some rows, or some outputs of all rows. Which member computes an
 * output changes no bit of it. No barrier at the end. */
static void product_phase(ThreadPool *pool, int me, const Weight *w, const QActs *a, int rows, const Epilogue *to) {
    const int n = to->how == TO_GATED ? w->n / 2 : w->n, wide = to->quantised ? 2 : 1;
    const int units = (n + LANES * wide - 1) / (LANES * wide), cut = to->cut / (LANES * wide);
    const int by_rows = rows >= SPLIT_ROWS * pool->size, height = height_of(a), block = BLOCK_ROWS / height * height;
    Changes changes;
    changes.base = -1;
    for (int i = 0; i < pool->size; i++) { /* the member's own share first, then the others' */
        const int of = (me + i) % pool->size;
        int lo, hi, lo2 = 0, hi2 = 0;
        pool_share(pool, of, by_rows ? (rows + height - 1) / height : cut, &lo, &hi);
        if (by_rows) { /* whole tiles */
            lo *= height;
            hi = hi * height < rows ? hi * height : rows;
        } else pool_share(pool, of, units - cut, &lo2, &hi2);
        const int front = hi - lo, all = front + hi2 - lo2;
        const int grain = pool->size == 1 ? all : by_rows ? block : (all + PIECES - 1) / PIECES;
        if (!all) continue;
        for (int at = 0, piece;
             (piece = pool->size == 1 ? (at ? -1 : 0) : pool_claim(pool, of, (all + grain - 1) / grain)) >= 0; at++) {
            const int from = piece * grain, past = from + grain < all ? from + grain : all;
            const int split = past < front ? past : front,
                      rest = cut + lo2 - front; /* from `front` on, units of the second part */
            changes.end = by_rows ? units : i ? lo + split : hi;
            if (by_rows) { product_units(w, a, to, n, wide, 0, units, lo + from, lo + past, &changes); continue; }
            if (from < front) product_units(w, a, to, n, wide, lo + from, lo + split, 0, rows, &changes);
            changes.end = i ? rest + past : cut + hi2;
            if (past > front)
                product_units(w, a, to, n, wide, rest + (from > front ? from : front), rest + past, 0, rows, &changes);
        }
    }
    if (to->low) lowrank_ahead(*to->low, me, rows);
}

/* Bytes that a member fetches of its share of the next product before it waits for the others: until the last one
 * arrives, memory would be idle. 0: none. Other values are for measuring. */
#ifndef PHASE_AHEAD
#define PHASE_AHEAD 0
#endif

/* At most `bytes` of the weight from group g on, into the second-level cache. */
static void groups_ahead(const Weight *w, int64_t g, int64_t bytes) {
    if (w->kind == W_PARTS) {
        const Weight *part = w->data;
        for (const Weight *last = part + w->dtype; part < last && g >= w_groups(part); part++) g -= w_groups(part);
        w = part;
    }
    if (w->kind == W_DENSE) {
        const char *at = (const char *)w->data + g * LANES * w->k * (w->dtype == DT_F32 ? 4 : 2);
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
        return;
    }
    const uint8_t *data = w_data(w, g), *scale = w_scale(w, g);
    const int64_t all = (int64_t)k_blocks(w->kind) * 64 * k_lines(w->kind), step = (int64_t)k_scale_step(w->kind);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(data + i, 0, 2);
    for (int64_t i = 0; i < bytes * step / all; i += 64) __builtin_prefetch(scale + i, 0, 2);
}
/* The beginning of member me's share of a product whose phase is next but for a barrier. gated, wide: as its epilogue
 * has them. */
static void product_ahead(const ThreadPool *pool, int me, const Weight *w, int gated, int wide, int rows) {
    const int64_t most = PHASE_AHEAD;
    if (most <= 0 || pool->size == 1 || rows > PRIVATE_ROWS || w->n == 0) return;
    const int n = gated ? w->n / 2 : w->n, units = (n + LANES * wide - 1) / (LANES * wide);
    const int64_t group = (int64_t)w->k * (w->kind == W_DENSE ? 32 : 9); /* bytes, about */
    int lo, hi;
    pool_share(pool, me, units, &lo, &hi);
    const int64_t share = (int64_t)(hi - lo) * wide * group;
    for (int up = 0; up <= gated; up++)
        groups_ahead(w, (int64_t)lo * wide + up * (n / LANES), share < most >> gated ? share : most >> gated);
}
