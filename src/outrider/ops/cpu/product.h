/* Products of a weight matrix with a few rows of activations.
 *
 * Activations are quantised per block of 32 to int8. A block's dot product with packed weights (formats.h) is exact integer
 * arithmetic; blocks are added in ascending order with one fused multiply-add for each scale: a row's answer does not depend on
 * the rows beside it.
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
} Acts;

#if ISA_AVX512
#define TILE_ROWS 9 /* 8 weight registers, 9 sums and the dot products in flight: K = 8 drafts and one in one tile */
#elif ISA_AVX2
#define TILE_ROWS 5 /* K = 4 drafts and one; nine rows are two tiles */
#else
#define TILE_ROWS 4
#endif
#define BLOCK_ROWS 128 /* activation rows that stay in the second-level cache while weights pass by */

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
    const int32_t front = (int32_t)vf_sum(a), sum = front + (int32_t)vf_sum(b); /* whole numbers: exact */
    blk->d = top / 127.0f;
    blk->s = blk->d * (float)sum;
    blk->i = -128 * sum;
    blk->i0 = -128 * front;
}
static void quantize_row(const float *x, int k, int8_t *q, Blk *blk) {
    for (int b = 0; b < k / 32; b++) quantize_block(x + 32 * b, q + 32 * b, blk + b);
}

INLINE void acts_row(const Acts *a, long r) { /* quantise row r of x */
    quantize_row(a->x + r * a->ldx, a->k, a->q + r * a->k, a->blk + r * (a->k / 32));
}

/* tile[mc][16]: outputs 16g.. of rows m0.. (mc <= TILE_ROWS). In tiles.c */
__attribute__((visibility("hidden"))) void product_tile(const Weight *w, int g, const Acts *a, int m0, int mc, float *tile);
