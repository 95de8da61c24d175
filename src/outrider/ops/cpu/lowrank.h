/* Low-rank adapters next to a weight: y += scale · B (A x), for the rows of a pass that use one.
 *
 * A product of a pass whose rows use adapters has two phases: A x of these rows (`shrink_phase`), then the product itself, to whose
 * answers B adds its part (`expand_tile`). The order of all sums is fixed by rank and k: a row's bits do not depend on the other rows. A
 * row, or a part of a fused weight, without a change takes no addition.
 */
#pragma once
#include "attend.h"

typedef struct { /* the outputs of one matrix of a fused weight */
    int32_t end;         /* one past its last group of 16 outputs */
    int32_t first, rank; /* its rows of A; rank 0: it is not changed */
    float scale;
    int64_t at;          /* of B, in values */
} LowRankPiece;

typedef struct {   /* the change of one weight */
    const void *a;                   /* [rank / 4][k / 16][4 rows][16 columns]; the last rows may be padding */
    const void *b;                   /* of every piece [groups][rank][16 outputs] */
    int32_t rank, k, dtype, spare;   /* rank 0: none */
    LowRankPiece piece[3];           /* q, k, v; gate, up */
} LowRank;

enum { LR_QKV, LR_OUT, LR_GATE_UP, LR_DOWN, LR_PLE_GATE, LR_PLE_OUT, LR_COUNT }; /* of a layer; behind all layers ple_proj */

typedef struct { /* the adapters of a pass */
    const LowRank *const *table; /* by adapter: layers·LR_COUNT + 1 changes */
    const int32_t *of;           /* [rows] whose adapter a row uses; -1: none */
    int64_t count;               /* 0: no row uses one */
} Adapters;

typedef struct { /* what a product's answers get added */
    const LowRank *const *table;
    const int32_t *of;
    const float *low; /* [rows, ld] A x */
    long which, ld;
} LowRankRows;

#define AHEAD 2048 /* bytes: an adapter is read in one stream, which the weights between its parts interrupt */

/* Four rows of A from `first` on with one or two rows of x; rows beyond the last are computed and thrown away. */
INLINE void shrink_rows(int dtype, int MT, const LowRank *p, int first, const float *x0, const float *x1, float *low0, float *low1) {
    vf acc[4][2];
    for (int r = 0; r < 4; r++) for (int m = 0; m < MT; m++) acc[r][m] = vf_set(0.0f);
    const long item = dtype == DT_F32 ? 4 : 2, at = (long)first * p->k;
    for (long i = 0; i < p->k; i += LANES) {
        const vf x[2] = {vf_load(x0 + i), MT > 1 ? vf_load(x1 + i) : vf_set(0.0f)};
        for (int r = 0; r < 4; r++) {
            const vf a = vf_any(p->a, at + 4 * i + r * LANES, dtype);
            if (r * LANES * item % 64 == 0) __builtin_prefetch((const char *)p->a + (at + 4 * i + r * LANES) * item + AHEAD, 0, 2);
            for (int m = 0; m < MT; m++) acc[r][m] = vf_fma(a, x[m], acc[r][m]);
        }
    }
    for (int r = 0; r < 4 && first + r < p->rank; r++) {
        low0[first + r] = vf_sum(acc[r][0]);
        if (MT > 1) low1[first + r] = vf_sum(acc[r][1]);
    }
}
static void shrink_pair(const LowRank *p, int first, const float *x0, const float *x1, float *low0, float *low1) {
#define SHRINK(dtype) \
    if (x1) shrink_rows(dtype, 2, p, first, x0, x1, low0, low1); \
    else shrink_rows(dtype, 1, p, first, x0, x0, low0, low0)
    if (p->dtype == DT_F32) { SHRINK(DT_F32); }
    else if (p->dtype == DT_F16) { SHRINK(DT_F16); }
    else { SHRINK(DT_BF16); }
#undef SHRINK
}

/* A member's share of A x, for the weight `which` of every adapter. who: see Adapters.of; NULL: all rows are of adapter 0. No barrier at
 * the end. */
static void shrink_phase(const ThreadPool *team, int me, const LowRank *const *table, int count, long which, const int32_t *of, const float *x,
                         long ldx, int rows, float *low, long ld) {
    int quads = 0, lo, hi, at = 0;
    for (int a = 0; a < count; a++) quads += (table[a][which].rank + 3) / 4;
    team_share(team, me, quads, &lo, &hi);
    for (int a = 0; a < count; a++) {
        const LowRank *p = &table[a][which];
        for (int first = 0; first < p->rank; first += 4, at++) {
            if (at < lo || at >= hi) continue;
            int held = -1;
            for (int r = 0; r < rows; r++) {
                if (of && of[r] != a) continue;
                if (held < 0) { held = r; continue; }
                shrink_pair(p, first, x + held * ldx, x + r * ldx, low + held * ld, low + r * ld);
                held = -1;
            }
            if (held >= 0) shrink_pair(p, first, x + held * ldx, NULL, low + held * ld, NULL);
        }
    }
}

/* scale · B low of one group of outputs, for `count` rows of one adapter. */
INLINE void expand_rows(int dtype, int MT, const LowRank *p, const LowRankPiece *c, int group, const float *low, long ld, float *delta) {
    vf acc[4][2]; /* even and odd k */
    const long at = c->at + (long)group * c->rank * LANES;
    low += c->first;
    for (int m = 0; m < MT; m++) acc[m][0] = acc[m][1] = vf_set(0.0f);
    for (int k = 0; k < c->rank; k += 2) {
        const vf even = vf_any(p->b, at + (long)k * LANES, dtype);
        __builtin_prefetch((const char *)p->b + (at + (long)k * LANES) * (dtype == DT_F32 ? 4 : 2) + AHEAD, 0, 2);
        for (int m = 0; m < MT; m++) acc[m][0] = vf_fma(even, vf_set(low[m * ld + k]), acc[m][0]);
        if (k + 1 == c->rank) break;
        const vf odd = vf_any(p->b, at + (long)(k + 1) * LANES, dtype);
        for (int m = 0; m < MT; m++) acc[m][1] = vf_fma(odd, vf_set(low[m * ld + k + 1]), acc[m][1]);
    }
    for (int m = 0; m < MT; m++) vf_store(delta + m * LANES, vf_mul(vf_add(acc[m][0], acc[m][1]), vf_set(c->scale)));
}
/* delta[mc][16]: what group g of rows m0.. gets added; returns the rows that get something, as bits. */
static unsigned expand_tile(const LowRankRows *l, int g, int m0, int mc, float *delta) {
    unsigned changed = 0;
    for (int m = 0, run; m < mc; m += run) {
        const int a = l->of ? l->of[m0 + m] : 0;
        for (run = 1; run < 4 && m + run < mc && (!l->of || l->of[m0 + m + run] == a); run++) {}
        const LowRank *p = a < 0 ? NULL : &l->table[a][l->which];
        if (!p || !p->rank) continue;
        const LowRankPiece *c = p->piece;
        int before = 0;
        for (; g >= c->end; c++) before = c->end;
        if (!c->rank) continue;
        const float *low = l->low + (long)(m0 + m) * l->ld;
        float *to = delta + m * LANES;
        if (run == 3) run = 2;
        changed |= ((1u << run) - 1) << m;
#define EXPAND(dtype) \
        if (run == 4) expand_rows(dtype, 4, p, c, g - before, low, l->ld, to); \
        else if (run == 2) expand_rows(dtype, 2, p, c, g - before, low, l->ld, to); \
        else expand_rows(dtype, 1, p, c, g - before, low, l->ld, to)
        if (p->dtype == DT_F32) { EXPAND(DT_F32); }
        else if (p->dtype == DT_F16) { EXPAND(DT_F16); }
        else { EXPAND(DT_BF16); }
#undef EXPAND
    }
    return changed;
}
