/* Products of a weight matrix with a few rows of activations.
 *
 * A packed weight is cut into groups of 16 output rows and blocks of 32 columns. The values of a (group, block) lie
 * together: step s holds columns 4s..4s+3 of the 16 rows, so that one integer dot-product instruction advances 16
 * outputs. Scales (and minima) are float16, one per row and block, in a stream of their own.
 *
 * Activations are quantised per block of 32 to int8. A block's dot product is exact integer arithmetic; blocks are
 * added in ascending order with one fused multiply-add each: a row's answer does not depend on the rows beside it.
 */
#pragma once
#include "vec.h"

#define UP(n) (((size_t)(n) + 63) & ~(size_t)63) /* to the next cache line */

enum { W_NONE = 0, W_DENSE = 1, W_Q4M = 2, W_Q4 = 3, W_Q8 = 4, W_Q8M = 5 };
/* Q4M: nibble·scale + min; Q4: (nibble - 8)·scale; Q8: int8·scale; Q8M: byte (<= 127)·scale + min */

typedef struct {
    int32_t kind, n, k, dtype; /* dtype: of dense data only */
    const void *data;          /* dense: [n, k]; Q4*: [groups][k/32][256] bytes; Q8*: [groups][k/32][512] */
    const uint16_t *scale;     /* [groups][k/32][16 scales (then 16 minima)] float16 */
} Weight;

typedef struct { float d, s; int32_t i, pad; } Blk; /* scale, scale·Σq, -128·Σq */

typedef struct { /* R rows of activations, quantised and as they were */
    int k, ldx;
    int8_t *q;      /* [R, k] */
    Blk *blk;       /* [R, k/32] */
    const float *x; /* [R, ldx] */
} Acts;

#if ISA_AVX512
#define TILE_ROWS 9 /* 8 weight registers, 9 sums and the dot products in flight: K = 8 drafts and one in one tile */
#else
#define TILE_ROWS 4
#endif
#define BLOCK_ROWS 128 /* activation rows that stay in the second-level cache while weights pass by */

INLINE int w_groups(const Weight *w) { return (w->n + LANES - 1) / LANES; }
INLINE int w_has_min(const Weight *w) { return w->kind == W_Q4M || w->kind == W_Q8M; }
INLINE size_t acts_bytes(int rows, int k) { /* scratch that `acts_at` needs */
    return UP((size_t)rows * k) + UP((size_t)rows * (k / 32) * sizeof(Blk));
}
INLINE Acts acts_at(char *at, int rows, int k, const float *x, int ldx) {
    Acts a = {k, ldx, (int8_t *)at, (Blk *)(at + UP((size_t)rows * k)), x};
    return a;
}

/* 32 activations -> int8, scale and sum */
INLINE void quantize_block(const float *x, int8_t *q, Blk *blk) {
    vf a = vf_load(x), b = vf_load(x + 16);
    float top = vf_hmax(vf_max(vf_abs(a), vf_abs(b)));
    vf inv = vf_set(top > 0.0f ? 127.0f / top : 0.0f);
    a = vf_round(vf_mul(a, inv));
    b = vf_round(vf_mul(b, inv));
    vf_store_i8(q, a);
    vf_store_i8(q + 16, b);
    const int32_t sum = (int32_t)vf_sum(vf_add(a, b)); /* whole numbers: exact */
    blk->d = top / 127.0f;
    blk->s = blk->d * (float)sum;
    blk->i = -128 * sum;
    blk->pad = 0;
}
static void quantize_row(const float *x, int k, int8_t *q, Blk *blk) {
    for (int b = 0; b < k / 32; b++) quantize_block(x + 32 * b, q + 32 * b, blk + b);
}

INLINE void acts_row(const Acts *a, long r) { /* quantise row r of x */
    quantize_row(a->x + r * a->ldx, a->k, a->q + r * a->k, a->blk + r * (a->k / 32));
}

/* ---- one group of 16 outputs for MT rows: tile[m][16] ---- */
INLINE int32_t word(const int8_t *p) { int32_t x; memcpy(&x, p, 4); return x; }
#if ISA_AVX512
INLINE void group_tile(int kind, const Weight *w, int g, const Acts *a, int m0, int MT, float *tile) {
    const int kb = w->k / 32, has_min = kind == W_Q4M || kind == W_Q8M, small = kind == W_Q4M || kind == W_Q4;
    const uint8_t *data = (const uint8_t *)w->data + (size_t)g * kb * (small ? 256 : 512);
    const uint16_t *scale = w->scale + (size_t)g * kb * (has_min ? 32 : 16);
    const int8_t *q = a->q + (size_t)m0 * a->k;
    const Blk *blk = a->blk + (size_t)m0 * kb;
    const size_t ahead = (size_t)kb * (small ? 256 : 512), ahead_scale = (size_t)kb * (has_min ? 64 : 32);
    const __m512i low = _mm512_set1_epi8(15), flip = _mm512_set1_epi8((char)0x80);
    vf acc[TILE_ROWS];
    UNROLL for (int m = 0; m < MT; m++) acc[m] = vf_set(0.0f);
    for (int b = 0; b < kb; b++) {
        __m512i v[8];
        if (small) {
            for (int j = 0; j < 4; j++) {
                __m512i p = _mm512_loadu_si512(data + 64 * j);
                v[j] = _mm512_and_si512(p, low);
                v[j + 4] = _mm512_and_si512(_mm512_srli_epi16(p, 4), low);
            }
            data += 256;
        } else {
            for (int j = 0; j < 8; j++) {
                v[j] = _mm512_loadu_si512(data + 64 * j);
                if (kind == W_Q8) v[j] = _mm512_xor_si512(v[j], flip);
            }
            data += 512;
        }
        const vf d = vf_half(scale);
        const vf lift = has_min ? vf_half(scale + 16) : d;
        scale += has_min ? 32 : 16;
        if (MT > 1) { /* one row keeps up with memory; more rows compute while the next group arrives in the second-level cache:
                         the first level has too few places for lines under way */
            UNROLL for (int j = 0; j < (small ? 4 : 8); j++) __builtin_prefetch(data + ahead + 64 * j - (small ? 256 : 512), 0, 2);
            __builtin_prefetch((const char *)scale + ahead_scale, 0, 2);
        }
        const int8_t *x = q + 32 * (size_t)b;
        const Blk *s = blk + b;
        __m512i dot[TILE_ROWS]; /* steps outside, rows inside: chains of dependent sums, one a row, run side by side */
        UNROLL for (int m = 0; m < MT; m++) {
            const int32_t zero = s[(size_t)m * kb].i;
            dot[m] = _mm512_set1_epi32(kind == W_Q8 ? zero : kind == W_Q4 ? zero >> 4 : 0);
        }
        UNROLL for (int j = 0; j < 8; j++)
            UNROLL for (int m = 0; m < MT; m++)
                dot[m] = _mm512_dpbusd_epi32(dot[m], v[j], _mm512_set1_epi32(word(x + (size_t)m * a->k + 4 * j)));
        UNROLL for (int m = 0; m < MT; m++) {
            acc[m] = vf_fma(vf_mul(_mm512_cvtepi32_ps(dot[m]), vf_set(s[(size_t)m * kb].d)), d, acc[m]);
            if (has_min) acc[m] = vf_fma(lift, vf_set(s[(size_t)m * kb].s), acc[m]);
        }
    }
    UNROLL for (int m = 0; m < MT; m++) vf_store(tile + LANES * m, acc[m]);
}

#elif ISA_AVX2
INLINE void half_tile(int kind, const Weight *w, int g, int half, const Acts *a, int m0, int MT, float *tile) {
    const int kb = w->k / 32, has_min = kind == W_Q4M || kind == W_Q8M, small = kind == W_Q4M || kind == W_Q4;
    const uint8_t *data = (const uint8_t *)w->data + (size_t)g * kb * (small ? 256 : 512) + 32 * half;
    const uint16_t *scale = w->scale + (size_t)g * kb * (has_min ? 32 : 16) + 8 * half;
    const int8_t *q = a->q + (size_t)m0 * a->k;
    const Blk *blk = a->blk + (size_t)m0 * kb;
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256 acc[4];
    for (int m = 0; m < MT; m++) acc[m] = _mm256_setzero_ps();
    for (int b = 0; b < kb; b++) {
        __m256i v[8];
        if (small) {
            for (int j = 0; j < 4; j++) {
                __m256i p = _mm256_loadu_si256((const __m256i *)(data + 64 * j));
                v[j] = _mm256_and_si256(p, low);
                v[j + 4] = _mm256_and_si256(_mm256_srli_epi16(p, 4), low);
            }
        } else {
            for (int j = 0; j < 8; j++) {
                v[j] = _mm256_loadu_si256((const __m256i *)(data + 64 * j));
                if (kind == W_Q8) v[j] = _mm256_abs_epi8(v[j]);
            }
        }
        const __m256 d = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)scale));
        const __m256 lift = has_min ? _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(scale + 16))) : d;
        scale += has_min ? 32 : 16;
        for (int m = 0; m < MT; m++) {
            const int32_t *x = (const int32_t *)(q + (size_t)m * a->k + 32 * b);
            const Blk *s = blk + (size_t)m * kb + b;
            __m256i dot;
            if (small) { /* eight products of 15·127·2 still fit 16 bits: widen once a block */
                __m256i sum = _mm256_maddubs_epi16(v[0], _mm256_set1_epi32(x[0]));
                for (int j = 1; j < 8; j++) sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(v[j], _mm256_set1_epi32(x[j])));
                dot = _mm256_madd_epi16(sum, ones);
                if (kind == W_Q4) dot = _mm256_add_epi32(dot, _mm256_set1_epi32(s->i >> 4));
            } else {
                dot = _mm256_setzero_si256();
                for (int j = 0; j < 8; j++) {
                    __m256i y = _mm256_set1_epi32(x[j]); /* |w| is unsigned; its sign goes to the activation */
                    if (kind == W_Q8) y = _mm256_sign_epi8(y, _mm256_loadu_si256((const __m256i *)(data + 64 * j)));
                    dot = _mm256_add_epi32(dot, _mm256_madd_epi16(_mm256_maddubs_epi16(v[j], y), ones));
                }
            }
            acc[m] = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(s->d)), d, acc[m]);
            if (has_min) acc[m] = _mm256_fmadd_ps(lift, _mm256_set1_ps(s->s), acc[m]);
        }
        data += small ? 256 : 512;
    }
    for (int m = 0; m < MT; m++) _mm256_storeu_ps(tile + LANES * m + 8 * half, acc[m]);
}
INLINE void group_tile(int kind, const Weight *w, int g, const Acts *a, int m0, int MT, float *tile) {
    half_tile(kind, w, g, 0, a, m0, MT, tile);
    half_tile(kind, w, g, 1, a, m0, MT, tile);
}

#else
INLINE void group_tile(int kind, const Weight *w, int g, const Acts *a, int m0, int MT, float *tile) {
    const int kb = w->k / 32, has_min = kind == W_Q4M || kind == W_Q8M, small = kind == W_Q4M || kind == W_Q4;
    const uint8_t *data = (const uint8_t *)w->data + (size_t)g * kb * (small ? 256 : 512);
    const uint16_t *scale = w->scale + (size_t)g * kb * (has_min ? 32 : 16);
    vf acc[TILE_ROWS];
    for (int m = 0; m < MT; m++) acc[m] = vf_set(0.0f);
    for (int b = 0; b < kb; b++) {
        int16_t v[8][64]; /* [step][row·4 + column] */
        for (int j = 0; j < (small ? 4 : 8); j++)
            for (int i = 0; i < 64; i++) {
                uint8_t p = data[64 * j + i];
                if (small) { v[j][i] = p & 15; v[j + 4][i] = p >> 4; }
                else v[j][i] = kind == W_Q8 ? (int8_t)p : p;
            }
        data += small ? 256 : 512;
        const vf d = vf_half(scale), lift = has_min ? vf_half(scale + 16) : d;
        scale += has_min ? 32 : 16;
        for (int m = 0; m < MT; m++) {
            const int8_t *x = a->q + (size_t)(m0 + m) * a->k + 32 * b;
            const Blk *s = a->blk + (size_t)(m0 + m) * kb + b;
            int32_t dot[16];
            for (int r = 0; r < 16; r++) dot[r] = kind == W_Q4 ? s->i / 16 : 0;
            for (int j = 0; j < 8; j++) {
                const int32_t x0 = x[4 * j], x1 = x[4 * j + 1], x2 = x[4 * j + 2], x3 = x[4 * j + 3];
                for (int r = 0; r < 16; r++) dot[r] += v[j][4 * r] * x0 + v[j][4 * r + 1] * x1 + v[j][4 * r + 2] * x2 + v[j][4 * r + 3] * x3;
            }
            acc[m] = vf_fma(vf_mul(vi_to_float(vi_load(dot)), vf_set(s->d)), d, acc[m]);
            if (has_min) acc[m] = vf_fma(lift, vf_set(s->s), acc[m]);
        }
    }
    for (int m = 0; m < MT; m++) vf_store(tile + LANES * m, acc[m]);
}
#endif

/* ---- dense weights [n, k]: lanes run along k, then one fixed tree ---- */
INLINE void dense_rows(int dtype, const Weight *w, int n0, const Acts *a, int m0, int MT, vf *sums /* [MT][16], rows n0..n0+3 */) {
    vf acc[4][2];
    const long k = w->k, whole = k & ~15L;
    for (int r = 0; r < 4; r++) for (int m = 0; m < MT; m++) acc[r][m] = vf_set(0.0f);
    for (long i = 0; i < whole; i += LANES) {
        vf x[2];
        for (int m = 0; m < MT; m++) x[m] = vf_load(a->x + (long)(m0 + m) * a->ldx + i);
        for (int r = 0; r < 4; r++) {
            long n = n0 + r < w->n ? n0 + r : w->n - 1; /* beyond the last row: computed, thrown away */
            vf v = vf_any(w->data, n * k + i, dtype);
            for (int m = 0; m < MT; m++) acc[r][m] = vf_fma(v, x[m], acc[r][m]);
        }
    }
    if (whole < k)
        for (int r = 0; r < 4; r++) {
            long n = n0 + r < w->n ? n0 + r : w->n - 1;
            float t[LANES] = {0};
            for (long i = whole; i < k; i++) t[i - whole] = one_any(w->data, n * k + i, dtype);
            for (int m = 0; m < MT; m++)
                acc[r][m] = vf_fma(vf_load(t), vf_load_n(a->x + (long)(m0 + m) * a->ldx + whole, (int)(k - whole)), acc[r][m]);
        }
    for (int m = 0; m < MT; m++) for (int r = 0; r < 4; r++) sums[LANES * m + (n0 & 15) + r] = acc[r][m];
}
INLINE void dense_typed(int dtype, const Weight *w, int g, const Acts *a, int m0, int mc, float *tile) {
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
static void dense_tile(const Weight *w, int g, const Acts *a, int m0, int mc, float *tile) {
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
static void tile_q4m(const Weight *w, int g, const Acts *a, int m0, int mc, float *tile) { TILE_CASES(W_Q4M) }
static void tile_q4(const Weight *w, int g, const Acts *a, int m0, int mc, float *tile) { TILE_CASES(W_Q4) }
static void tile_q8(const Weight *w, int g, const Acts *a, int m0, int mc, float *tile) { TILE_CASES(W_Q8) }
static void tile_q8m(const Weight *w, int g, const Acts *a, int m0, int mc, float *tile) { TILE_CASES(W_Q8M) }

/* tile[mc][16]: outputs 16g.. of rows m0.. (mc <= TILE_ROWS) */
static void product_tile(const Weight *w, int g, const Acts *a, int m0, int mc, float *tile) {
    switch (w->kind) {
    case W_Q4M: tile_q4m(w, g, a, m0, mc, tile); break;
    case W_Q4: tile_q4(w, g, a, m0, mc, tile); break;
    case W_Q8: tile_q8(w, g, a, m0, mc, tile); break;
    case W_Q8M: tile_q8m(w, g, a, m0, mc, tile); break;
    default: dense_tile(w, g, a, m0, mc, tile);
    }
}

/* Row n of a weight as floats. */
static void weight_row(const Weight *w, long n, float *out) {
    if (w->kind == W_DENSE) {
        for (long i = 0; i < w->k; i++) out[i] = one_any(w->data, n * w->k + i, w->dtype);
        return;
    }
    const int kb = w->k / 32, lane = (int)(n % LANES), has_min = w_has_min(w), small = w->kind == W_Q4M || w->kind == W_Q4;
    const uint8_t *data = (const uint8_t *)w->data + (size_t)(n / LANES) * kb * (small ? 256 : 512);
    const uint16_t *scale = w->scale + (size_t)(n / LANES) * kb * (has_min ? 32 : 16);
    for (int b = 0; b < kb; b++, data += small ? 256 : 512, scale += has_min ? 32 : 16) {
        const float d = half_float(scale[lane]), lift = has_min ? half_float(scale[16 + lane]) : 0.0f;
        for (int s = 0; s < 8; s++)
            for (int c = 0; c < 4; c++) {
                int v;
                if (small) v = (data[64 * (s & 3) + 4 * lane + c] >> (s < 4 ? 0 : 4)) & 15;
                else v = w->kind == W_Q8 ? (int8_t)data[64 * s + 4 * lane + c] : data[64 * s + 4 * lane + c];
                if (w->kind == W_Q4) v -= 8;
                out[32 * b + 4 * s + c] = has_min ? d * (float)v + lift : d * (float)v;
            }
    }
}
