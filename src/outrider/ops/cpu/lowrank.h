/* Low-rank adapters next to a weight: y += scale · B (A x), for the rows of a pass that use one.
 *
 * A product of a pass whose rows use adapters begins with A x of these rows (`shrink_phase`), a product like any other; B adds its part to
 * the answers (`expand_tile`). No barrier lies between the two: a member starts its tiles and waits for A x before the first addition. The
 * order of all sums is fixed by rank and k: a row's bits do not depend on the other rows. A row, or a part of a fused weight, without a
 * change takes no addition.
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
    const uint8_t *b;      /* of every piece [groups] of 16 float32 scales and [rank][16 outputs] in the type of A; W_Q8: [rank / 2][16][2] int8 */
    const char *next;      /* the A that the pass reads next: every group of B fetches `lines` lines of 64 bytes of it */
    int64_t lines;
    LowRankPiece piece[3]; /* q, k, v; gate, up */
} LowRank;

enum { LR_QKV, LR_OUT, LR_GATE_UP, LR_DOWN, LR_PLE_GATE, LR_PLE_OUT, LR_COUNT }; /* of a layer; behind all layers ple_proj */

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
    ThreadPool *team;
    const LowRank *const *table;
    const int32_t *of; /* see Adapters.of; NULL: all rows are of adapter 0 */
    Low *low;          /* [rows, ld] A x */
    long which, ld;    /* ld: groups of 16 */
} LowRankRows;

#define AHEAD 4096 /* bytes: B is read in one stream, which the weights between its groups interrupt */

/* How many rows from m on, `most` at most, use the adapter of row m: that adapter's change of the weight, NULL where there is none. */
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

/* A member's share of A x. */
static void shrink_phase(const LowRankRows *l, int me, const QActs *x, int rows) {
    float tile[TILE_ROWS * LANES];
    for (int m = 0, task = 0, run; m < rows; m += run) {
        const LowRank *p = lowrank_run(l, m, rows - m < TILE_ROWS ? rows - m : TILE_ROWS, &run);
        for (int g = 0; p && g < w_groups(&p->a); g++) {
            if (task++ % l->team->size != me) continue;
            product_tile(&p->a, g, x, m, run, tile);
            for (int i = 0; i < run; i++) low_store(l->low + (m + i) * l->ld + g, tile + LANES * i, p->a.kind == W_Q8);
        }
    }
    team_ready(l->team);
}

#define EXPAND_ROWS 5 /* at once: their sums stay in registers */

/* scale · B low of one group of outputs for MT rows of one adapter: even ranks, then odd ones. */
INLINE void expand_floats(int dtype, int MT, int rank, const uint8_t *b, const float *low, long ld, float *delta) {
    vf sum[2][EXPAND_ROWS];
    for (int odd = 0; odd < 2; odd++) {
        for (int m = 0; m < MT; m++) sum[odd][m] = vf_set(0.0f);
        for (int k = odd; k < rank; k += 2) {
            const vf v = vf_any(b + 64, (long)k * LANES, dtype);
            for (int m = 0; m < MT; m++) sum[odd][m] = vf_fma(v, vf_set(low[m * ld + k]), sum[odd][m]);
        }
    }
    for (int m = 0; m < MT; m++) vf_store(delta + m * LANES, vf_mul(vf_add(sum[0][m], sum[1][m]), vf_load((const float *)b)));
}
/* The same in integers, sixteen ranks at a time. */
INLINE void dot_low(int MT, int pairs, const uint8_t *b, const Low *low, long ld, vf *sum) {
    const int chains = MT < 3 ? 2 : 1; /* of dependent sums for each row: their order does not matter */
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
INLINE void expand_rows(int dtype, int MT, int rank, const uint8_t *b, const Low *low, long ld, float *delta) {
    if (dtype != DT_I8) { expand_floats(dtype, MT, rank, b, (const float *)low, ld * LANES, delta); return; }
    vf sum[EXPAND_ROWS];
    const uint8_t *at = b + 64;
    UNROLL for (int m = 0; m < MT; m++) sum[m] = vf_set(0.0f);
    for (; rank >= LANES; rank -= LANES, at += LANES * LANES, low++) dot_low(MT, LANES / 2, at, low, ld, sum);
    if (rank == LANES / 2) dot_low(MT, LANES / 4, at, low, ld, sum); /* as below, with sums in registers */
    else if (rank) dot_low(MT, (rank + 1) / 2, at, low, ld, sum);
    UNROLL for (int m = 0; m < MT; m++) vf_store(delta + m * LANES, vf_mul(sum[m], vf_load((const float *)b)));
}
INLINE void expand_typed(int dtype, int rows, int rank, const uint8_t *b, const Low *low, long ld, float *delta) {
    switch (rows) {
    case 1: expand_rows(dtype, 1, rank, b, low, ld, delta); break;
    case 2: expand_rows(dtype, 2, rank, b, low, ld, delta); break;
    case 3: expand_rows(dtype, 3, rank, b, low, ld, delta); break;
    case 4: expand_rows(dtype, 4, rank, b, low, ld, delta); break;
    default: expand_rows(dtype, EXPAND_ROWS, rank, b, low, ld, delta);
    }
}
/* delta[mc][16]: what group g of rows m0.. gets added; returns the rows that get something, as bits. */
static unsigned expand_tile(const LowRankRows *l, int g, int m0, int mc, float *delta) {
    unsigned changed = 0;
    team_await(l->team);
    for (int m = 0, run; m < mc; m += run) {
        const LowRank *p = lowrank_run(l, m0 + m, mc - m < EXPAND_ROWS ? mc - m : EXPAND_ROWS, &run);
        if (!p) continue;
        const LowRankPiece *c = p->piece;
        int before = 0;
        for (; g >= c->end; c++) before = c->end;
        if (!c->rank) continue;
        const int dtype = p->a.kind == W_Q8 ? DT_I8 : p->a.dtype;
        const long size = 64 + LANES * (dtype == DT_I8 ? (c->rank + 1) & ~1L : (long)c->rank * (dtype == DT_F32 ? 4 : 2));
        const uint8_t *b = p->b + c->at + (g - before) * size;
        const Low *low = (const Low *)((const float *)(l->low + (m0 + m) * l->ld) + c->first);
        if (!(m0 + m) || (l->of && l->of[m0 + m] != l->of[m0 + m - 1])) { /* else the row before has asked */
            for (long i = 0; i < size; i += 64) __builtin_prefetch(b + i + AHEAD, 0, 2);
            for (long i = g * p->lines; i < (g + 1) * p->lines; i++) __builtin_prefetch(p->next + 64 * i, 0, 2);
        }
        changed |= ((1u << run) - 1) << m;
#define EXPAND(type) expand_typed(type, run, c->rank, b, low, l->ld, delta + m * LANES)
        if (dtype == DT_I8) EXPAND(DT_I8);
        else if (dtype == DT_F32) EXPAND(DT_F32);
        else if (dtype == DT_F16) EXPAND(DT_F16);
        else EXPAND(DT_BF16);
#undef EXPAND
    }
    return changed;
}
