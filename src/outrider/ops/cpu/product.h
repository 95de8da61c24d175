/* Products of a weight matrix with a few rows of activations.
 *
 * Activations are quantised per block of 32 to int8. A block's dot product with packed weights (formats.h) is exact
 * integer arithmetic; blocks are added in ascending order with one fused multiply-add for each scale: a row's result
 * does not depend on the other rows.
 */
#pragma once
#include "formats.h"

#define UP(n) (((size_t)(n) + 63) & ~(size_t)63) /* to the next cache line */

typedef struct { float d, s; int32_t i, i0; } Blk; /* scale, scale·Σq, -128·Σq, the same of the first 16 */

typedef struct { /* R rows of activations, quantised and as they were */
    int k, ldx;
    int8_t *q;      /* [R, k] */
    Blk *blk;       /* [R, k/32] */
    const float *x; /* [R, ldx] */
    int16_t *wide;  /* [R, k] where WIDE: of every four columns the first, third, second, fourth */
#if ISA_AMX
    int height;     /* q and blk lie tile by tile of so many rows, block by block: [R / height, k/32, height, 32]; see
                       acts_height */
#endif
} QActs;

#if ISA_AVX2 && !defined(__AVXVNNI__) && !defined(ISA_TWIN)
#define WIDE 1 /* signed codes are multiplied in 16 bits (tile_avx2.h) */
#else
#define WIDE 0
#endif

#if ISA_AVX512
#define TILE_ROWS 9 /* 8 weight registers, 9 sums and the dot products in flight: K = 8 drafts and one in one tile */
#elif ISA_AVX2
#define TILE_ROWS 5 /* K = 4 drafts and one; nine rows are two tiles */
#else
#define TILE_ROWS 4
#endif
#define BLOCK_ROWS 128 /* activation rows that stay in the second-level cache while weights pass by */
#if ISA_AMX
#ifndef AMX_ROWS
#define AMX_ROWS 49 /* from here on tiles are faster than registers; either has the same bits */
#endif
#define TILE_HEIGHT 16 /* rows of activations in a tile */
#define STEP_ROWS BLOCK_ROWS /* rows of a call: a group is decoded once for all of them */
/* Rows of a tile of Intel's where so many rows are multiplied: they are cut evenly. 1: the rows follow each other
 * whole, as on other levels. */
INLINE int acts_height(int rows) {
    if (rows < AMX_ROWS) return 1;
    const int tiles = (rows + TILE_HEIGHT - 1) / TILE_HEIGHT;
    return (rows + tiles - 1) / tiles;
}
INLINE int height_of(const QActs *a) { return a->height; }
INLINE size_t padded_rows(int rows) {
    return (size_t)rows + (rows < AMX_ROWS ? 0 : TILE_HEIGHT);
} /* the last tile is whole */
/* The place of a row's column in q. Its block is at a 32nd of that. */
INLINE int64_t acts_place(const QActs *a, int row, int column) {
    const int tile = row / a->height, line = row % a->height;
    return (((int64_t)tile * (a->k / 32) + column / 32) * a->height + line) * 32 + column % 32;
}
#else
#define STEP_ROWS TILE_ROWS
INLINE int height_of(const QActs *a) { (void)a; return 1; }
INLINE size_t padded_rows(int rows) { return (size_t)rows; }
INLINE int64_t acts_place(const QActs *a, int64_t row, int64_t column) { return row * a->k + column; }
#endif

INLINE size_t acts_bytes(int rows, int k) { /* scratch that `acts_at` needs */
    return UP(padded_rows(rows) * k) * (WIDE ? 3 : 1) + UP(padded_rows(rows) * (k / 32) * sizeof(Blk));
}
INLINE QActs acts_at(char *at, int rows, int k, const float *x, int ldx) {
    const size_t bytes = UP(padded_rows(rows) * k);
    return (QActs){
        .k = k, .ldx = ldx, .x = x,
        .q = (int8_t *)at,
        .blk = (Blk *)(at + bytes * (WIDE ? 3 : 1)),
        .wide = WIDE ? (int16_t *)(at + bytes) : NULL,
#if ISA_AMX
        .height = acts_height(rows),
#endif
    };
}
/* For another number of rows, at most those that `a` was made for. */
INLINE void acts_rows(QActs *a, int rows) {
#if ISA_AMX
    a->height = acts_height(rows);
#else
    (void)a, (void)rows;
#endif
}

#if WIDE
INLINE void widen_block(const int8_t *q, int16_t *wide) {
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    const __m256i v = _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)q), order);
    _mm256_storeu_si256((__m256i *)wide, _mm256_cvtepi8_epi16(_mm256_castsi256_si128(v)));
    _mm256_storeu_si256((__m256i *)(wide + 16), _mm256_cvtepi8_epi16(_mm256_extracti128_si256(v, 1)));
}
#else
INLINE void widen_block(const int8_t *q, int16_t *wide) { (void)q, (void)wide; }
#endif

/* 32 activations -> int8, scale and sum: those at `at` of acts_place */
INLINE void quantize_block(const float *x, const QActs *acts, int64_t at) {
    int8_t *q = acts->q + at;
    Blk *blk = acts->blk + at / 32;
    vf a = vf_load(x), b = vf_load(x + 16);
    float top = vf_hmax(vf_max(vf_abs(a), vf_abs(b)));
    vf inv = vf_set(top > 0.0f ? 127.0f / top : 0.0f);
    a = vf_round(vf_mul(a, inv));
    b = vf_round(vf_mul(b, inv));
    vf_store_i8(q, a);
    vf_store_i8(q + 16, b);
    const int32_t front = (int32_t)vf_sum(a), sum = front + (int32_t)vf_sum(b); /* whole numbers: exact */
    blk->d = top / 127.0f;
    blk->s = blk->d * (float)sum;
    blk->i = -128 * sum;
    blk->i0 = -128 * front;
    if (WIDE) widen_block(q, acts->wide + at);
}
INLINE void quantize_row(const float *x, int n, const QActs *acts, int64_t at) { /* n activations from `at` on */
    for (int i = 0; i < n; i += 32) quantize_block(x + i, acts, at + (int64_t)i * height_of(acts));
}

SHARED void acts_row(const QActs *a, int64_t r) { /* quantise row r of x */
    quantize_row(a->x + r * a->ldx, a->k, a, acts_place(a, r, 0));
}
SHARED void acts_copy(const QActs *to, int64_t t, const QActs *from,
                      int64_t r) { /* what was quantised as row r becomes row t */
    const int64_t k = from->k;
#if ISA_AMX
    for (int i = 0; i < k; i += 32) {
        const int64_t source = acts_place(from, (int)r, i), target = acts_place(to, (int)t, i);
        memcpy(to->q + target, from->q + source, 32);
        to->blk[target / 32] = from->blk[source / 32];
    }
    return;
#endif
    memcpy(to->q + t * k, from->q + r * k, (size_t)k);
    memcpy(to->blk + t * (k / 32), from->blk + r * (k / 32), (size_t)(k / 32) * sizeof(Blk));
    if (WIDE) memcpy(to->wide + t * k, from->wide + r * k, (size_t)k * 2);
}

/* tile[mc][16]: outputs 16g.. of rows m0.. (mc <= STEP_ROWS). In tiles.c */
__attribute__((visibility("hidden"))) void product_tile(const Weight *w, int g, const QActs *a, int m0, int mc,
                                                        float *tile);
