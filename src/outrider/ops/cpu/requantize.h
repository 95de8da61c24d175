/* Weights rounded anew to four bits (Q4_0), for a draft model: what it says need not be exact, only cheap to read. */
#pragma once
#include "pack.h"

INLINE float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; } /* in the range of codes */
INLINE float code_of(float x) { /* -8 .. 7 */
    x = nearest(x);
    return x < -8.0f ? -8.0f : x > 7.0f ? 7.0f : x;
}

enum { TRIES = 6 }; /* scales tried to either side of the one that brings the largest weight to -8 */

/* Blocks of 16 rows side by side, x [32][lanes]: for each the scale with the least squares of errors among those tried,
 * and its codes. */
static void coarse_blocks(const float *x, uint16_t *scale, uint8_t *codes) {
    float top[LANES] = {0}, best[LANES] = {0}, d[LANES] = {0}, inv[LANES], dot[LANES], square[LANES];
    for (int i = 0; i < 32; i++)
        for (int l = 0; l < LANES; l++) top[l] = fabsf(x[i * LANES + l]) > fabsf(top[l]) ? x[i * LANES + l] : top[l];
    for (int t = -TRIES; t <= TRIES; t++) {
        for (int l = 0; l < LANES; l++) {
            inv[l] = top[l] != 0.0f ? (-8.0f - 0.15f * (float)t) / top[l] : 0.0f;
            dot[l] = square[l] = 0.0f;
        }
        for (int i = 0; i < 32; i++)
            for (int l = 0; l < LANES; l++) {
                const float c = code_of(x[i * LANES + l] * inv[l]);
                dot[l] += c * x[i * LANES + l];
                square[l] += c * c;
            }
        for (int l = 0; l < LANES;
             l++) { /* with the codes given, the best scale is dot / square, and it takes dot² / square off the error */
            const float good = square[l] > 0.0f ? dot[l] * dot[l] / square[l] : 0.0f;
            if (good > best[l]) best[l] = good, d[l] = dot[l] / square[l];
        }
    }
    for (int l = 0; l < LANES; l++) {
        scale[l] = float_half(d[l]);
        d[l] = half_float(scale[l]);
        inv[l] = d[l] != 0.0f ? 1.0f / d[l] : 0.0f;
    }
    for (int i = 0; i < 32; i++)
        for (int l = 0; l < LANES; l++) codes[l * 32 + i] = (uint8_t)(int)(code_of(x[i * LANES + l] * inv[l]) + 8.0f);
}

typedef struct { const Weight *from, *to; float *rows; } CoarseJob; /* rows: [members][16][k] */
static void coarse_region(ThreadPool *pool, int me, void *arg) {
    const CoarseJob *job = arg;
    const int n = job->to->n, k = job->to->k;
    float *rows = job->rows + (int64_t)me * LANES * k, x[32 * LANES];
    uint8_t codes[LANES * 32];
    int lo, hi;
    while (pool_next(pool, w_groups(job->to), 4, &lo, &hi))
        for (int g = lo; g < hi; g++) {
            for (int l = 0; l < LANES; l++)
                if (g * LANES + l < n) weight_row(job->from, (int64_t)g * LANES + l, rows + (int64_t)l * k);
                else memset(rows + (int64_t)l * k, 0, (size_t)k * 4);
            uint8_t *data = (uint8_t *)w_data(job->to, g);
            uint16_t *scale = (uint16_t *)w_scale(job->to, g);
            for (int b = 0; b < k / 32; b++, data += 64 * k_lines(W_Q4), scale += LANES) {
                for (int l = 0; l < LANES; l++)
                    for (int i = 0; i < 32; i++) x[i * LANES + l] = rows[(int64_t)l * k + 32 * b + i];
                coarse_blocks(x, scale, codes);
                for (int l = 0; l < LANES; l++) put_codes(W_Q4, codes + 32 * l, data + 4 * l);
            }
        }
}
