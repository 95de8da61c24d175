/* The two loops of attention: scores of a few queries against sixteen keys, and sums of values by weight.
 * Each query's sum has its own order: the other queries do not change it.
 */
#pragma once
#include "vec.h"

/* Queries whose sums fit the registers: of scores, and of values in COLUMNS vectors at once. DIRECT: widening while
 * loading is free */
#if ISA_AVX512
enum { SCORED = 8, MIXED = 6, COLUMNS = 4, DIRECT = 1 };
#elif ISA_AVX2
enum { SCORED = 3, MIXED = 6, COLUMNS = 1, DIRECT = 0 };
#else
enum { SCORED = 2, MIXED = 2, COLUMNS = 4, DIRECT = 0 };
#endif
/* scores of 16 keys for Q queries: keys are [dim][16] of any type */
INLINE void score_keys(int Q, const float *const *x, const void *keys, int64_t at, int dtype, int dim, vf scale,
                       float *const *out) {
    vf even[SCORED], odd[SCORED];
    UNROLL for (int i = 0; i < Q; i++) even[i] = odd[i] = vf_set(0.0f);
    for (int d = 0; d < dim; d += 2) { /* one register of keys after the other: of AVX2's sixteen, twelve hold sums */
        const vf k0 = vf_any(keys, at + (int64_t)d * LANES, dtype);
        UNROLL for (int i = 0; i < Q; i++) even[i] = vf_fma(vf_set(x[i][d]), k0, even[i]);
        const vf k1 = vf_any(keys, at + (int64_t)(d + 1) * LANES, dtype);
        UNROLL for (int i = 0; i < Q; i++) odd[i] = vf_fma(vf_set(x[i][d + 1]), k1, odd[i]);
    }
    UNROLL for (int i = 0; i < Q; i++) vf_store(out[i], vf_mul(vf_add(even[i], odd[i]), scale));
}
#define SCORE(Q) case Q: if (Q <= SCORED) score_keys(Q, x, keys, at, dtype, dim, scale, out); break;
INLINE void score_some(int count, const float *const *x, const void *keys, int64_t at, int dtype, int dim, vf scale,
                       float *const *out) {
    switch (count) { SCORE(1) SCORE(2) SCORE(3) SCORE(4) SCORE(5) SCORE(6) SCORE(7) SCORE(8) }
}
/* out[i] (+)= sum of weight times value over keys k0..k1-1 of a chunk, ascending, for Q queries and 16C columns from d.
 * row[t]: where the values of the chunk's tile t begin. */
INLINE void mix_columns(int Q, int C, const float *const *w, const void *values, const int64_t *row, int dim, int dtype,
                        int d, int k0, int k1, float *const *out, int more) {
    vf a[MIXED][COLUMNS];
    UNROLL for (int i = 0; i < Q; i++)
        UNROLL for (int c = 0; c < C; c++) a[i][c] = more ? vf_load(out[i] + d + LANES * c) : vf_set(0.0f);
    for (int k = k0; k < k1;) {
        const int stop = (k | (LANES - 1)) + 1 < k1 ? (k | (LANES - 1)) + 1 : k1;
        int64_t at = row[k / LANES] + (int64_t)(k % LANES) * dim + d;
        for (; k < stop; k++, at += dim) {
            vf v[COLUMNS];
            UNROLL for (int c = 0; c < C; c++) v[c] = vf_any(values, at + LANES * c, dtype);
            UNROLL for (int i = 0; i < Q; i++)
                UNROLL for (int c = 0; c < C; c++) a[i][c] = vf_fma(vf_set(w[i][k]), v[c], a[i][c]);
        }
    }
    UNROLL for (int i = 0; i < Q; i++)
        UNROLL for (int c = 0; c < C; c++) vf_store(out[i] + d + LANES * c, a[i][c]);
}
INLINE void mix_values(int Q, const float *const *w, const void *values, const int64_t *row, int dim, int dtype, int k0,
                       int k1, float *const *out, int more) {
    int d = 0;
    for (; COLUMNS > 1 && d + LANES * COLUMNS <= dim; d += LANES * COLUMNS)
        mix_columns(Q, COLUMNS, w, values, row, dim, dtype, d, k0, k1, out, more);
    for (; d < dim; d += LANES) mix_columns(Q, 1, w, values, row, dim, dtype, d, k0, k1, out, more);
}
#define MIX(Q) case Q: if (Q <= MIXED) mix_values(Q, w, values, row, dim, dtype, k0, k1, out, more); break;
INLINE void mix_some(int count, const float *const *w, const void *values, const int64_t *row, int dim, int dtype,
                     int k0, int k1, float *const *out, int more) {
    switch (count) { MIX(1) MIX(2) MIX(3) MIX(4) MIX(5) MIX(6) }
}

#if ISA_BF16
/* The same for pairs: x[i] [dim / 2] pairs of a query, keys [dim / 2][16] pairs */
INLINE void score_pairs(int Q, const uint32_t *const *x, const uint32_t *keys, int dim, vf scale, float *const *out,
                        const char *ahead, const char *beside) {
    vf even[SCORED], odd[SCORED];
    UNROLL for (int i = 0; i < Q; i++) even[i] = odd[i] = vf_set(0.0f);
    for (int d = 0; d < dim / 2; d += 2) {
        const vi k0 = vi_load((const int32_t *)keys + d * LANES), k1 = vi_load((const int32_t *)keys + (d + 1) * LANES);
        if (ahead) { /* as much of another tile of keys, and of values, as is read here: all at once would hold up the
                        sums */
            const int64_t line = (int64_t)d * LANES * 4;
            __builtin_prefetch(ahead + line, 0, 2);
            __builtin_prefetch(ahead + line + 64, 0, 2);
            __builtin_prefetch(beside + line, 0, 2);
            __builtin_prefetch(beside + line + 64, 0, 2);
        }
        UNROLL for (int i = 0; i < Q; i++) {
            even[i] = vf_dot2(even[i], k0, vi_set((int32_t)x[i][d]));
            odd[i] = vf_dot2(odd[i], k1, vi_set((int32_t)x[i][d + 1]));
        }
    }
    UNROLL for (int i = 0; i < Q; i++) vf_store(out[i], vf_mul(vf_add(even[i], odd[i]), scale));
}
/* w[i]: pairs of weights by pairs of keys p0..p1-1; `first`, `last`: the bits of the outer pairs that belong to keys in
 * sight of anyone */
INLINE void mix_pairs(int Q, int C, const uint32_t *const *w, const uint32_t *values, const int64_t *row, int dim,
                      int d, int p0, int p1, uint32_t first, uint32_t last, float *const *out, int more) {
    vf a[MIXED][COLUMNS];
    UNROLL for (int i = 0; i < Q; i++)
        UNROLL for (int c = 0; c < C; c++) a[i][c] = more ? vf_load(out[i] + d + LANES * c) : vf_set(0.0f);
    for (int p = p0; p < p1; p++) {
        const uint32_t *at = values + row[p / 8] / 2 + (int64_t)(p % 8) * dim + d;
        const uint32_t seen = (p == p0 ? first : ~0u) & (p == p1 - 1 ? last : ~0u); /* elsewhere anything may lie */
        vi v[4];
        UNROLL for (int c = 0; c < C; c++) v[c] = vi_load((const int32_t *)at + LANES * c);
        if (seen != ~0u) UNROLL for (int c = 0; c < C; c++) v[c] = vi_and(v[c], vi_set((int32_t)seen));
        UNROLL for (int i = 0; i < Q; i++)
            UNROLL for (int c = 0; c < C; c++) a[i][c] = vf_dot2(a[i][c], v[c], vi_set((int32_t)w[i][p]));
    }
    UNROLL for (int i = 0; i < Q; i++) UNROLL for (int c = 0; c < C; c++) vf_store(out[i] + d + LANES * c, a[i][c]);
}
#define SCORE_PAIRS(Q) case Q: score_pairs(Q, x, keys, dim, scale, out, ahead, beside); break;
INLINE void score_some_pairs(int count, const uint32_t *const *x, const uint32_t *keys, int dim, vf scale,
                             float *const *out, const char *ahead, const char *beside) {
    switch (count) {
        SCORE_PAIRS(1)
        SCORE_PAIRS(2) SCORE_PAIRS(3) SCORE_PAIRS(4) SCORE_PAIRS(5) SCORE_PAIRS(6) SCORE_PAIRS(7) SCORE_PAIRS(8)
    }
}
#define MIX_PAIRS(Q)                                                                                              \
    case Q:                                                                                                       \
        for (; d + 64 <= dim; d += 64) mix_pairs(Q, 4, w, values, row, dim, d, p0, p1, first, last, out, more);   \
        for (; d < dim; d += LANES) mix_pairs(Q, 1, w, values, row, dim, d, p0, p1, first, last, out, more);      \
        break;
INLINE void mix_some_pairs(int count, const uint32_t *const *w, const uint32_t *values, const int64_t *row, int dim,
                           int p0, int p1, uint32_t first, uint32_t last, float *const *out, int more) {
    int d = 0;
    switch (count) { MIX_PAIRS(1) MIX_PAIRS(2) MIX_PAIRS(3) MIX_PAIRS(4) MIX_PAIRS(5) MIX_PAIRS(6) }
}
#else /* no processor of this level has them (`paired`) */
INLINE void score_some_pairs(int count, const uint32_t *const *x, const uint32_t *keys, int dim, vf scale,
                             float *const *out, const char *ahead, const char *beside) {
    (void)count, (void)x, (void)keys, (void)dim, (void)scale, (void)out, (void)ahead, (void)beside;
}
INLINE void mix_some_pairs(int count, const uint32_t *const *w, const uint32_t *values, const int64_t *row, int dim,
                           int p0, int p1, uint32_t first, uint32_t last, float *const *out, int more) {
    (void)count, (void)w, (void)values, (void)row, (void)dim, (void)p0, (void)p1, (void)first, (void)last;
    (void)out, (void)more;
}
#endif
