/* The tiles of a product for every format and number of rows. A translation unit of its own; see product.h. */
#include "product.h"

/* ---- one group of 16 outputs for MT rows: tile[m][16] ---- */
INLINE int32_t word(const int8_t *p) { int32_t x; memcpy(&x, p, 4); return x; }
/* What the codes' offset takes from a dot product over the steps [from, from + count) of a block (8 a block), times
 * 2^zero_shift */
INLINE int32_t zero_sum(const Blk *s, int from, int count) { return count == 8 ? s->i : from ? s->i - s->i0 : s->i0; }
/* What a minimum is multiplied by: the scale times the sum of activations over these steps */
INLINE float zero_weight(const Blk *s, int from, int count) {
    return count == 8 ? s->s : s->d * ((float)zero_sum(s, from, count) * -0.0078125f);
}
INLINE int zero_shift(int kind) {
    return kind == W_Q4 ? 4 : kind == W_Q5 ? 3 : kind == W_Q6K ? 2 : 0;
} /* of offsets 8, 16, 32; 128 */
#if ISA_AVX512
#include "tile_avx512.h"
#if ISA_AMX
#include "tile_amx.h"
#endif
#elif ISA_AVX2
#include "tile_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "tile_neon.h"
#else
#include "tile_portable.h"
#endif

/* ---- dense weights [n, k]: lanes run along k, then one fixed tree ---- */
INLINE void dense_rows(int dtype, const Weight *w, int n0, const QActs *a, int m0, int MT,
                       vf *sums /* [MT][16], rows n0..n0+3 */) {
    vf acc[4][2];
    const int64_t k = w->k, whole = k & ~INT64_C(15);
    for (int r = 0; r < 4; r++) for (int m = 0; m < MT; m++) acc[r][m] = vf_set(0.0f);
    for (int64_t i = 0; i < whole; i += LANES) {
        vf x[2];
        for (int m = 0; m < MT; m++) x[m] = vf_load(a->x + (int64_t)(m0 + m) * a->ldx + i);
        for (int r = 0; r < 4; r++) {
            int64_t n = n0 + r < w->n ? n0 + r : w->n - 1; /* beyond the last row: computed, thrown away */
            vf v = vf_any(w->data, n * k + i, dtype);
            for (int m = 0; m < MT; m++) acc[r][m] = vf_fma(v, x[m], acc[r][m]);
        }
    }
    if (whole < k)
        for (int r = 0; r < 4; r++) {
            int64_t n = n0 + r < w->n ? n0 + r : w->n - 1;
            float t[LANES] = {0};
            for (int64_t i = whole; i < k; i++) t[i - whole] = one_any(w->data, n * k + i, dtype);
            for (int m = 0; m < MT; m++)
                acc[r][m] = vf_fma(vf_load(t), vf_load_n(a->x + (int64_t)(m0 + m) * a->ldx + whole, (int)(k - whole)),
                                   acc[r][m]);
        }
    for (int m = 0; m < MT; m++) for (int r = 0; r < 4; r++) sums[LANES * m + (n0 & 15) + r] = acc[r][m];
}
INLINE void dense_typed(int dtype, const Weight *w, int g, const QActs *a, int m0, int mc, float *tile) {
    vf sums[2 * LANES];
    for (int at = 0; at < mc; at += 2) {
        int count = mc - at < 2 ? 1 : 2;
        for (int r = 0; r < LANES; r += 4) {
            if (count == 1) dense_rows(dtype, w, g * LANES + r, a, m0 + at, 1, sums);
            else dense_rows(dtype, w, g * LANES + r, a, m0 + at, 2, sums);
        }
        for (int m = 0; m < count; m++) vf_store(tile + LANES * (at + m), vf_sum16(sums + LANES * m));
    }
}
static void dense_tile(const Weight *w, int g, const QActs *a, int m0, int mc, float *tile) {
    if (w->dtype == DT_F32) dense_typed(DT_F32, w, g, a, m0, mc, tile);
    else if (w->dtype == DT_F16) dense_typed(DT_F16, w, g, a, m0, mc, tile);
    else dense_typed(DT_BF16, w, g, a, m0, mc, tile);
}

#if TILE_ROWS == 9
#define MORE_CASES(kind)                                            \
    case 5: group_tile(kind, w, g, a, m0, 5, tile); break;          \
    case 6: group_tile(kind, w, g, a, m0, 6, tile); break;          \
    case 7: group_tile(kind, w, g, a, m0, 7, tile); break;          \
    case 8: group_tile(kind, w, g, a, m0, 8, tile); break;          \
    case 9: group_tile(kind, w, g, a, m0, 9, tile); break;
#elif TILE_ROWS == 5
#define MORE_CASES(kind)                                            \
    case 5: group_tile(kind, w, g, a, m0, 5, tile); break;
#else
#define MORE_CASES(kind)
#endif
#define TILE_CASES(kind)                                            \
    switch (mc) {                                                   \
    case 1: group_tile(kind, w, g, a, m0, 1, tile); break;          \
    case 2: group_tile(kind, w, g, a, m0, 2, tile); break;          \
    case 3: group_tile(kind, w, g, a, m0, 3, tile); break;          \
    case 4: group_tile(kind, w, g, a, m0, 4, tile); break;          \
    MORE_CASES(kind)                                                \
    }
#if ISA_AMX
/* Rows that no tile of the processor serves are cut as AVX-512 alone cuts them. */
#define TILE_OF(K)                                                                                          \
    static void tile_##K(const Weight *w, int g, const QActs *a, int m0, int all, float *tile) {            \
        if (a->height > 1) { amx_group(K, w, g, a, m0, all, tile); return; }                                \
        for (int left = all, mc; left > 0; left -= mc, m0 += mc, tile += (int64_t)mc * LANES) {             \
            mc = left < TILE_ROWS ? left : TILE_ROWS;                                                       \
            TILE_CASES(K)                                                                                   \
        }                                                                                                   \
    }
#else
#define TILE_OF(K)                                                                                          \
    static void tile_##K(const Weight *w, int g, const QActs *a, int m0, int mc, float *tile) { TILE_CASES(K) }
#endif
TILE_OF(W_Q4M) TILE_OF(W_Q4) TILE_OF(W_Q8) TILE_OF(W_Q5) TILE_OF(W_Q5M)
TILE_OF(W_Q4K) TILE_OF(W_Q5K) TILE_OF(W_Q6K) TILE_OF(W_IQ4) TILE_OF(W_T4)
TILE_OF(W_Q2K) TILE_OF(W_T3) TILE_OF(W_T3H) TILE_OF(W_F4)

void product_tile(const Weight *w, int g, const QActs *a, int m0, int mc, float *tile) {
    if (w->kind == W_PARTS) {
        const Weight *part = w->data;
        for (; g >= w_groups(part); part++) g -= w_groups(part);
        w = part;
    }
#define TILE(K) tile_##K(w, g, a, m0, mc, tile)
    switch (w->kind) {
    EACH_KIND(TILE)
    default: dense_tile(w, g, a, m0, mc, tile);
    }
}
