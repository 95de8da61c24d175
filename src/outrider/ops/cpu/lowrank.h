/* Low-rank adapters next to a weight: y += scale · B (A x), for the rows of a pass that use one.
 *
 * A product of a pass whose rows use adapters begins with A x of these rows (`shrink_phase`), a product like any other.
 * Then every thread computes what B adds to as much of its share of the outputs as fits into a buffer
 * (`expand_groups`), and the tiles to which that is added. It waits only for A x, at no barrier, or computes all of A x
 * itself. The order of all sums is fixed by rank and k: a row's bits do not depend on the other rows. A row, or a part
 * of a fused weight, without a change keeps its bits.
 */
#pragma once
#include "attend.h"

typedef struct { /* the outputs of one matrix of a fused weight */
    int32_t end;         /* one past its last group of 16 outputs */
    int32_t first, rank; /* its rows of A, W_Q8: in whole groups; rank 0: it is not changed */
    int32_t spare;
    int64_t at;          /* of B, in bytes */
} LowRankPiece;

typedef struct {   /* the change of one weight */
    Weight a;              /* [rank, k], W_Q8 where the activations are quantised, else dense; n = 0: none */
    const uint8_t *b; /* of every piece [groups] of 16 float32 scales and [rank][16 outputs] in the type of A; W_Q8:
                         [rank / 2][16][2] int8 */
    LowRankPiece piece[3]; /* q, k, v; gate, up */
} LowRank;

enum {
    LR_QKV,
    LR_OUT,
    LR_GATE_UP,
    LR_DOWN,
    LR_PLE_GATE,
    LR_PLE_OUT,
    LR_COUNT
}; /* of a layer; behind all layers ple_proj */

typedef struct { /* the adapters of a pass */
    const LowRank *const *table; /* by adapter: layers·LR_COUNT + 1 changes */
    const int32_t *of;           /* [rows] whose adapter a row uses; -1: none */
    int64_t count;               /* 0: no row uses one */
} Adapters;

typedef union { /* sixteen values of A x */
    float x[LANES];
    struct { int16_t q[LANES]; float d; }; /* W_Q8: q·d */
} Low;

typedef struct { /* what a product's answers get added */
    ThreadPool *pool;
    const LowRank *const *table;
    const int32_t *of; /* see Adapters.of; NULL: all rows are of adapter 0 */
    Low *low;          /* [rows, ld] A x */
    int64_t ld;           /* groups of 16 */
    int past, which;   /* changes of a table, one past the last; the one that is meant */
    int private, own;  /* every member may compute all of A x for itself (few rows); it does */
} LowRankRows;

#define AHEAD 4096 /* bytes: B is read in one stream, which the weights between its groups interrupt */

/* How many rows from m on, `most` at most, use the adapter of row m: that adapter's change of the weight, NULL where
 * there is none. */
INLINE const LowRank *lowrank_run(const LowRankRows *l, int m, int most, int *run) {
    const int a = l->of ? l->of[m] : 0;
    for (*run = 1; *run < most && (!l->of || l->of[m + *run] == a); ++*run) {}
    return a < 0 || !l->table[a][l->which].a.n ? NULL : &l->table[a][l->which];
}

INLINE void low_store(Low *to, const float *x, int coded) {
    if (!coded) { memcpy(to->x, x, sizeof to->x); return; }
    const float top = vf_hmax(vf_abs(vf_load(x))), inv = top > 0.0f ? 32767.0f / top : 0.0f;
    float t[LANES];
    vf_store(t, vf_round(vf_mul(vf_load(x), vf_set(inv))));
    for (int i = 0; i < LANES; i++) to->q[i] = (int16_t)t[i];
    to->d = top / 32767.0f;
}

/* Prepare the change `which` for the first `rows` rows; false: no adapter has it. */
static int lowrank_select(LowRankRows *l, int which, int rows) {
    int tasks = 0;
    l->which = which;
    for (int m = 0, run; m < rows; m += run) {
        const LowRank *p = lowrank_run(l, m, rows - m < TILE_ROWS ? rows - m : TILE_ROWS, &run);
        if (p) tasks += w_groups(&p->a);
    }
    l->own = l->private && tasks < 2 * l->pool->size; /* shared out, so few would make members wait for each other */
    return tasks;
}
INLINE void fetch(const uint8_t *at, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}
/* A member's share of A x; without x: its A is fetched into the second-level cache. */
static void shrink_phase(const LowRankRows *l, int me, const QActs *x, int rows) {
    float tile[TILE_ROWS * LANES];
    const int most = x ? TILE_ROWS : rows;
    for (int m = 0, task = 0, run; m < rows; m += run) {
        const LowRank *p = lowrank_run(l, m, rows - m < most ? rows - m : most, &run);
        const int coded = p && p->a.kind == W_Q8;
        for (int g = 0; p && g < w_groups(&p->a); g++) {
            if (task++ % l->pool->size != me && !l->own) continue;
            if (!x) {
                if (coded) {
                    fetch(w_data(&p->a, g), LANES * (size_t)p->a.k);
                    fetch(w_scale(&p->a, g), (size_t)p->a.k);
                }
                continue;
            }
            product_tile(&p->a, g, x, m, run, tile);
            for (int i = 0; i < run; i++) low_store(l->low + (m + i) * l->ld + g, tile + LANES * i, coded);
        }
    }
    if (x && !l->own) pool_ready(l->pool);
}
/* When a member has done a product: the A that it reads next, since the row work between the two leaves memory idle. */
static void lowrank_ahead(LowRankRows next, int me, int rows) {
    while (++next.which < next.past)
        if (lowrank_select(&next, next.which, rows)) { shrink_phase(&next, me, NULL, rows); return; }
}

#define EXPAND_ROWS 5 /* at once: their sums stay in registers */

INLINE int64_t group_bytes(int dtype, int64_t rank) { /* of a group of B */
    return 4 * LANES + LANES * (dtype == DT_I8 ? (rank + 1) & ~INT64_C(1) : rank * (dtype == DT_F32 ? 4 : 2));
}

/* scale · B low of one group of outputs for MT rows of one adapter: even ranks, then odd ones. */
INLINE void expand_floats(int dtype, int MT, int rank, const uint8_t *b, const float *low, int64_t ld, float *delta) {
    vf sum[2][EXPAND_ROWS];
    for (int odd = 0; odd < 2; odd++) {
        for (int m = 0; m < MT; m++) sum[odd][m] = vf_set(0.0f);
        for (int k = odd; k < rank; k += 2) {
            const vf v = vf_any(b + 64, (int64_t)k * LANES, dtype);
            for (int m = 0; m < MT; m++) sum[odd][m] = vf_fma(v, vf_set(low[m * ld + k]), sum[odd][m]);
        }
    }
    for (int m = 0; m < MT; m++)
        vf_store(delta + m * LANES, vf_mul(vf_add(sum[0][m], sum[1][m]), vf_load((const float *)b)));
}
/* The same in integers, sixteen ranks at a time. */
INLINE void dot_low(int MT, int pairs, const uint8_t *b, const Low *low, int64_t ld, vf *sum) {
    const int chains = MT < 3 || TILE_ROWS > 5
                           ? 2
                           : 1; /* of dependent sums for each row, as registers allow: their order does not matter */
    vi dot[2][EXPAND_ROWS];
    UNROLL for (int m = 0; m < MT; m++) dot[0][m] = dot[1][m] = vi_set(0);
    UNROLL for (int i = 0; i < pairs; i++) {
        const vi v = vi_pairs((const int8_t *)b + 2 * LANES * i);
        UNROLL for (int m = 0; m < MT; m++) {
            int32_t x;
            memcpy(&x, low[m * ld].q + 2 * i, 4);
            dot[i % chains][m] = vi_dot2(dot[i % chains][m], v, x);
        }
    }
    UNROLL for (int m = 0; m < MT; m++) {
        if (chains > 1) dot[0][m] = vi_add(dot[0][m], dot[1][m]);
        sum[m] = vf_fma(vi_to_float(dot[0][m]), vf_set(low[m * ld].d), sum[m]);
    }
}
INLINE void expand_rows(int dtype, int MT, int rank, const uint8_t *b, const Low *low, int64_t ld, float *delta) {
    if (dtype != DT_I8) { expand_floats(dtype, MT, rank, b, (const float *)low, ld * LANES, delta); return; }
    vf sum[EXPAND_ROWS];
    const uint8_t *at = b + 64;
    UNROLL for (int m = 0; m < MT; m++) sum[m] = vf_set(0.0f);
    for (; rank >= LANES; rank -= LANES, at += LANES * LANES, low++) dot_low(MT, LANES / 2, at, low, ld, sum);
    if (rank == LANES / 2) dot_low(MT, LANES / 4, at, low, ld, sum); /* as below, with sums in registers */
    else if (rank) dot_low(MT, (rank + 1) / 2, at, low, ld, sum);
    UNROLL for (int m = 0; m < MT; m++) vf_store(delta + m * LANES, vf_mul(sum[m], vf_load((const float *)b)));
}
/* The same for `groups` groups in a row: out[groups][ld][16], where ld is the rows of a whole block. */
INLINE void expand_run(int dtype, int MT, const LowRankPiece *c, const uint8_t *b, const Low *low, int64_t low_ld,
                       int groups, int64_t ld, float *out) {
    const int64_t size = group_bytes(dtype, c->rank);
    for (int g = 0; g < groups; g++, b += size, out += ld * LANES) {
        for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(b + i + AHEAD, 0, 2);
        expand_rows(dtype, MT, c->rank, b, low, low_ld, out);
    }
}
#define EXPAND(MT) case MT: expand_run(dtype, MT, c, b, low, low_ld, groups, ld, out); break;
INLINE void expand_typed(int dtype, int rows, const LowRankPiece *c, const uint8_t *b, const Low *low, int64_t low_ld,
                         int groups, int64_t ld, float *out) {
    switch (rows) { EXPAND(1) EXPAND(2) EXPAND(3) EXPAND(4) EXPAND(5) }
}
#undef EXPAND

#define CHANGES (2 * BLOCK_ROWS) /* groups of a row: 32 outputs fit for all rows of a block */

/* change[groups][rows][16]: what groups g.. of rows m0.. get added; minus zero, which changes no bit, where there is no
 * adapter. Several groups at once: B is one stream, and which rows and matrices are changed is looked up once. */
static void expand_groups(const LowRankRows *l, int g, int groups, int m0, int rows, float *change) {
    if (!l->own) pool_await(l->pool);
    for (int m = 0, run; m < rows; m += run) {
        const LowRank *p = lowrank_run(l, m0 + m, rows - m < EXPAND_ROWS ? rows - m : EXPAND_ROWS, &run);
        const LowRankPiece *c = p ? p->piece : NULL;
        for (int at = 0, count, before = 0; at < groups; at += count) {
            float *out = change + ((int64_t)at * rows + m) * LANES;
            for (; p && g + at >= c->end; c++) before = c->end;
            count = p && c->end < g + groups ? c->end - g - at : groups - at;
            if (!p || !c->rank) {
                for (int i = 0; i < count * run; i++)
                    vf_store(out + ((int64_t)(i / run) * rows + i % run) * LANES, vf_set(-0.0f));
                continue;
            }
            const int dtype = p->a.kind == W_Q8 ? DT_I8 : p->a.dtype;
            const uint8_t *b = p->b + c->at + (g + at - before) * group_bytes(dtype, c->rank);
            const Low *low = (const Low *)((const float *)(l->low + (m0 + m) * l->ld) + c->first);
#define EXPAND(type) expand_typed(type, run, c, b, low, l->ld, count, rows, out)
            if (dtype == DT_I8) EXPAND(DT_I8);
            else if (dtype == DT_F32) EXPAND(DT_F32);
            else if (dtype == DT_F16) EXPAND(DT_F16);
            else EXPAND(DT_BF16);
#undef EXPAND
        }
    }
}
