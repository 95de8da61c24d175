/* ARM NEON with the dot-product extension, and with matrix products (i8mm) where the processor has them: a group is
 * four registers of 4 outputs. Included by product.h. Codes are made signed, so no offsets are left to take off.
 */
#pragma once
#include <arm_neon.h>

INLINE float32x4_t quarter_half(const uint8_t *p) { float16x4_t h; memcpy(&h, p, 8); return vcvt_f32_f16(h); }
INLINE float32x4_t quarter_u8(const uint8_t *p) {
    float32x4_t r = {p[0], p[1], p[2], p[3]};
    return r;
}
INLINE float32x4_t quarter_i8(const uint8_t *p) {
    float32x4_t r = {(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]};
    return r;
}

INLINE float32x4_t quarter_nibble(const uint8_t *p, int high) { /* one half of every byte */
    const uint8_t n[4] = {(uint8_t)(p[0] >> 4 * high & 15), (uint8_t)(p[1] >> 4 * high & 15),
                          (uint8_t)(p[2] >> 4 * high & 15), (uint8_t)(p[3] >> 4 * high & 15)};
    return quarter_u8(n);
}
/* d of 4 rows: from the first numbers of a block's or a super-block's scales */
INLINE float32x4_t quarter_front(int kind, const CodeTable *table, const uint8_t *scale) {
    if (kind == W_F4) return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)scale), 16));
    const float32x4_t d = quarter_half(scale);
    return k_table(kind) && k_super(kind) ? vmulq_n_f32(d, table->unit) : d;
}

/* Columns 4j..4j+3 of 4 rows, from the quarter of a (group, block) at `data` */
INLINE int8x16_t step_codes(int kind, const CodeTable *table, const uint8_t *data, int j) {
    if (kind == W_Q8) return vreinterpretq_s8_u8(vld1q_u8(data + 64 * j));
    uint8x16_t v;
    if (k_lines(kind) < 4)
        v = vandq_u8(vshlq_u8(vld1q_u8(data + 64 * (j / 4)), vdupq_n_s8((int8_t)(-2 * (j % 4)))), vdupq_n_u8(3));
    else {
        v = vld1q_u8(data + 64 * (j % 4));
        v = j < 4 ? vandq_u8(v, vdupq_n_u8(15)) : vshrq_n_u8(v, 4);
    }
    if (k_lines(kind) == 3)
        v = vorrq_u8(v, vandq_u8(vshlq_u8(vld1q_u8(data + 128), vdupq_n_s8((int8_t)(2 - j))), vdupq_n_u8(4)));
    if (k_lines(kind) == 5)
        v = vorrq_u8(v, vandq_u8(vshlq_u8(vld1q_u8(data + 256), vdupq_n_s8((int8_t)(4 - j))), vdupq_n_u8(16)));
    if (k_lines(kind) == 6)
        v = vorrq_u8(v, vandq_u8(vshlq_u8(vld1q_u8(data + 256 + 64 * (j / 4)), vdupq_n_s8((int8_t)(4 - 2 * (j % 4)))),
                                 vdupq_n_u8(48)));
    const int8x16_t s = vreinterpretq_s8_u8(v);
    if (k_table(kind)) return vqtbl1q_s8(vld1q_s8(table->value), v);
    const int zero = kind == W_Q4 ? 8 : kind == W_Q5 ? 16 : kind == W_Q6K ? 32 : 0;
    return zero ? vsubq_s8(s, vdupq_n_s8((int8_t)zero)) : s;
}

/* dot[m][quarter] of the steps `from`.. of a block */
INLINE void block_dots(int kind, const CodeTable *table, const uint8_t *data, const int8_t *x, int64_t ldx, int MT,
                       int from, int count, int32x4_t dot[][4]) {
#ifdef __ARM_FEATURE_MATMUL_INT8
    if (MT > 1) { /* two rows of weights with two rows of activations, eight columns at once; an odd last row goes with
                     itself */
        int32x4_t both[(TILE_ROWS + 1) / 2][4][2];
        UNROLL for (int p = 0; p < (MT + 1) / 2; p++)
            UNROLL for (int q = 0; q < 4; q++) both[p][q][0] = both[p][q][1] = vdupq_n_s32(0);
        UNROLL for (int j = from; j < from + count; j += 2)
            UNROLL for (int q = 0; q < 4; q++) {
                const int32x4_t a = vreinterpretq_s32_s8(step_codes(kind, table, data + 16 * q, j));
                const int32x4_t b = vreinterpretq_s32_s8(step_codes(kind, table, data + 16 * q, j + 1));
                const int8x16_t low = vreinterpretq_s8_s32(vzip1q_s32(a, b)),
                                high = vreinterpretq_s8_s32(vzip2q_s32(a, b));
                UNROLL for (int p = 0; p < (MT + 1) / 2; p++) {
                    const int second = 2 * p + 1 < MT ? 2 * p + 1 : 2 * p;
                    const int8x16_t y =
                        vcombine_s8(vld1_s8(x + 2 * p * ldx + 4 * j), vld1_s8(x + second * ldx + 4 * j));
                    both[p][q][0] = vmmlaq_s32(both[p][q][0], low, y);
                    both[p][q][1] = vmmlaq_s32(both[p][q][1], high, y);
                }
            }
        UNROLL for (int m = 0; m < MT; m++)
            UNROLL for (int q = 0; q < 4; q++)
            dot[m][q] = m % 2 ? vuzp2q_s32(both[m / 2][q][0], both[m / 2][q][1])
                              : vuzp1q_s32(both[m / 2][q][0], both[m / 2][q][1]);
        return;
    }
#endif
    UNROLL for (int m = 0; m < MT; m++)
        UNROLL for (int q = 0; q < 4; q++) dot[m][q] = vdupq_n_s32(0);
    UNROLL for (int j = from; j < from + count; j++)
        UNROLL for (int q = 0; q < 4; q++) {
            const int8x16_t w = step_codes(kind, table, data + 16 * q, j);
            UNROLL for (int m = 0; m < MT; m++)
                dot[m][q] = vdotq_s32(dot[m][q], w, vreinterpretq_s8_s32(vdupq_n_s32(word(x + m * ldx + 4 * j))));
        }
}

INLINE void group_tile(int kind, const Weight *w, int g, const QActs *a, int m0, int MT, float *tile) {
    const int kb = w->k / 32, lines = k_lines(kind), super = k_blocks(kind), count = k_columns(kind) / 4;
    const CodeTable *table = w_table(w);
    const uint8_t *data = w_data(w, g), *scale = w_scale(w, g);
    const int8_t *x = a->q + (size_t)m0 * a->k;
    const Blk *s = a->blk + (size_t)m0 * kb;
    float32x4_t acc[TILE_ROWS][4];
    UNROLL for (int m = 0; m < MT; m++)
        UNROLL for (int q = 0; q < 4; q++) acc[m][q] = vdupq_n_f32(0.0f);
    for (int b = 0; b < kb; b += super, scale += k_scale_step(kind))
        for (int sub = 0; sub < super; sub++, data += 64 * lines, x += 32, s++) {
            const uint8_t *bytes = scale + 2 * k_halves(kind) + sub * k_bytes(kind);
            int32x4_t dot[TILE_ROWS][4];
            UNROLL for (int from = 0; from < 8; from += count) {
                block_dots(kind, table, data, x, a->k, MT, from, count, dot);
                UNROLL for (int q = 0; q < 4; q++) {
                    float32x4_t d = quarter_front(kind, table, scale + 8 * q);
                    if (kind == W_Q2K) d = vmulq_f32(d, quarter_nibble(bytes + 4 * q + (from ? 16 : 0), 0));
                    else if (k_super(kind))
                        d = vmulq_f32(d, k_min(kind) ? quarter_u8(bytes + 4 * q)
                                                     : quarter_i8(bytes + 4 * q + (from ? 16 : 0)));
                    UNROLL for (int m = 0; m < MT; m++)
                        acc[m][q] = vfmaq_f32(acc[m][q], vmulq_n_f32(vcvtq_f32_s32(dot[m][q]), s[(size_t)m * kb].d), d);
                }
                if (k_min(kind)) UNROLL for (int q = 0; q < 4; q++) {
                    float32x4_t zero_point = quarter_half(scale + 32 + 8 * q);
                    if (kind == W_Q2K)
                        zero_point =
                            vmulq_f32(vnegq_f32(zero_point), quarter_nibble(bytes + 4 * q + (from ? 16 : 0), 1));
                    else if (k_super(kind))
                        zero_point = vmulq_f32(vnegq_f32(zero_point), quarter_u8(bytes + 16 + 4 * q));
                    UNROLL for (int m = 0; m < MT; m++)
                        acc[m][q] = vfmaq_n_f32(acc[m][q], zero_point, zero_weight(s + (size_t)m * kb, from, count));
                }
            }
        }
    UNROLL for (int m = 0; m < MT; m++)
        UNROLL for (int q = 0; q < 4; q++) vst1q_f32(tile + LANES * m + 4 * q, acc[m][q]);
}
