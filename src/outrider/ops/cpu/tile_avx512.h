/* AVX-512 with VNNI: 16 outputs in a register. Included by product.h. */
#pragma once

INLINE vf vf_u8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE vf vf_i8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE vf vf_nibble(const uint8_t *p, int high) { /* one half of every byte */
    const __m128i v = _mm_loadu_si128((const __m128i *)p);
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_and_si128(high ? _mm_srli_epi16(v, 4) : v, _mm_set1_epi8(15))));
}
/* d of 16 rows: the first number of a block's or a super-block's scales */
INLINE vf vf_front(int kind, const CodeTable *table, const uint8_t *scale) {
    if (kind == W_F4) return vf_bf16((const uint16_t *)scale);
    const vf d = vf_half((const uint16_t *)scale);
    return k_table(kind) && k_super(kind) ? vf_mul(d, vf_set(table->unit)) : d;
}

/* The unsigned codes of a (group, block): v[j] has columns 4j..4j+3 of 16 rows. Signed formats: + 128 */
INLINE void block_codes(int kind, const CodeTable *table, const uint8_t *data, __m512i *v) {
    const __m512i low = _mm512_set1_epi8(15), fifth = _mm512_set1_epi8(16), top = _mm512_set1_epi8(48);
    if (kind == W_Q8) {
        UNROLL
        for (int j = 0; j < 8; j++)
            v[j] = _mm512_xor_si512(_mm512_loadu_si512(data + 64 * j), _mm512_set1_epi8((char)0x80));
        return;
    }
    if (k_lines(kind) < 4) {
        UNROLL for (int j = 0; j < 8; j++)
            v[j] = _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(data + 64 * (j / 4)), 2 * (j % 4)),
                                    _mm512_set1_epi8(3));
    } else UNROLL for (int j = 0; j < 4; j++) {
        const __m512i p = _mm512_loadu_si512(data + 64 * j);
        v[j] = _mm512_and_si512(p, low);
        v[j + 4] = _mm512_and_si512(_mm512_srli_epi16(p, 4), low);
    }
    if (k_lines(kind) == 3) {
        const __m512i h = _mm512_loadu_si512(data + 128), third = _mm512_set1_epi8(4);
        UNROLL for (int j = 0; j < 8; j++)
            v[j] = _mm512_ternarylogic_epi32(v[j], j < 2 ? _mm512_slli_epi16(h, 2 - j) : _mm512_srli_epi16(h, j - 2),
                                             third, 0xF8);
    }
    if (k_lines(kind) == 5) { /* a | (b & c) */
        const __m512i h = _mm512_loadu_si512(data + 256);
        UNROLL for (int j = 0; j < 8; j++)
            v[j] = _mm512_ternarylogic_epi32(v[j], j < 4 ? _mm512_slli_epi16(h, 4 - j) : _mm512_srli_epi16(h, j - 4),
                                             fifth, 0xF8);
    } else if (k_lines(kind) == 6) {
        UNROLL for (int j = 0; j < 8; j++) {
            const __m512i h = _mm512_loadu_si512(data + 256 + 64 * (j / 4));
            const int at = 2 * (j % 4);
            v[j] = _mm512_ternarylogic_epi32(v[j], at < 4 ? _mm512_slli_epi16(h, 4 - at) : _mm512_srli_epi16(h, at - 4),
                                             top, 0xF8);
        }
    }
    if (k_table(kind)) {
        const __m512i values = _mm512_broadcast_i32x4(
            _mm_xor_si128(_mm_loadu_si128((const __m128i *)table->value), _mm_set1_epi8((char)0x80)));
        UNROLL for (int j = 0; j < 8; j++) v[j] = _mm512_shuffle_epi8(values, v[j]);
    }
}

/* Bytes from the lines that are multiplied to those that are fetched into the second-level cache, for few rows and for
 * more (0: none; -1: the next group's). With Intel's tiles there are processors on which one row waits for memory: of
 * Qwen2.5 1.5B's shape 13.3 ms without and 10.0 with 4 KB, 16 threads. An AMD Zen 4 needs no request, and each costs.
 */
#ifndef FEW_ROWS_AHEAD
#if ISA_AMX
#define FEW_ROWS_AHEAD 4096
#else
#define FEW_ROWS_AHEAD 0
#endif
#endif
#ifndef MORE_ROWS_AHEAD
#define MORE_ROWS_AHEAD (-1)
#endif

INLINE void group_tile(int kind, const Weight *w, int g, const QActs *a, int m0, int MT, float *tile) {
    const int kb = w->k / 32, lines = k_lines(kind), super = k_blocks(kind);
    const CodeTable *table = w_table(w);
    const uint8_t *data = w_data(w, g), *scale = w_scale(w, g);
    const size_t ahead = (size_t)kb * lines * 64, ahead_scale = (size_t)(kb / super) * k_scale_step(kind);
    const int8_t *x = a->q + (size_t)m0 * a->k;
    const Blk *s = a->blk + (size_t)m0 * kb;
    vf acc[TILE_ROWS];
    UNROLL for (int m = 0; m < MT; m++) acc[m] = vf_set(0.0f);
    for (int b = 0; b < kb; b += super, scale += k_scale_step(kind)) {
        const vf first = vf_front(kind, table, scale);
        const vf second = k_min(kind) ? vf_half((const uint16_t *)scale + 16) : first;
        const vf minus = k_super(kind) ? vf_sub(vf_set(0.0f), second) : second;
        for (int sub = 0; sub < super; sub++, data += 64 * lines, x += 32, s++) {
            __m512i v[8];
            vf d[2] = {first, first}, zero_point[2] = {second, second};
            block_codes(kind, table, data, v);
            if (k_super(kind)) {
                const uint8_t *bytes = scale + 2 * k_halves(kind) + sub * k_bytes(kind);
                if (kind == W_Q2K) UNROLL for (int h = 0; h < 2; h++) {
                    d[h] = vf_mul(first, vf_nibble(bytes + 16 * h, 0));
                    zero_point[h] = vf_mul(minus, vf_nibble(bytes + 16 * h, 1));
                }
                else if (k_min(kind)) {
                    d[0] = vf_mul(first, vf_u8(bytes));
                    zero_point[0] = vf_mul(minus, vf_u8(bytes + 16));
                }
                else d[0] = vf_mul(first, vf_i8(bytes));
                if (k_columns(kind) == 16 && kind != W_Q2K) d[1] = vf_mul(first, vf_i8(bytes + 16));
            }
            /* few rows (8 bits: up to three) keep pace with memory; more compute while the next group arrives: the
             * first level has too few places for lines under way */
            const int distance = MT > (lines == 8 ? 3 : 1) ? MORE_ROWS_AHEAD : FEW_ROWS_AHEAD;
            if (distance != 0) {
                const size_t soon = distance < 0 ? ahead : (size_t)distance;
                const size_t steps = soon / (size_t)(64 * lines * super);
                const size_t soon_scale = distance < 0 ? ahead_scale : steps * k_scale_step(kind);
                UNROLL for (int j = 0; j < lines; j++) __builtin_prefetch(data + soon + 64 * j, 0, 2);
                __builtin_prefetch(scale + soon_scale + 40 * sub, 0, 2);
            }
            const int count = k_columns(kind) / 4; /* steps under one scale */
            UNROLL for (int from = 0; from < 8; from += count) {
                __m512i dot[TILE_ROWS]; /* steps outside, rows inside: chains of dependent sums, one per row, run side
                                           by side */
                UNROLL for (int m = 0; m < MT; m++)
                    dot[m] = k_min(kind)
                                 ? _mm512_setzero_si512()
                                 : _mm512_srai_epi32(_mm512_set1_epi32(zero_sum(s + (size_t)m * kb, from, count)),
                                                     zero_shift(kind));
                UNROLL for (int j = from; j < from + count; j++)
                    UNROLL for (int m = 0; m < MT; m++)
                    dot[m] = _mm512_dpbusd_epi32(dot[m], v[j], _mm512_set1_epi32(word(x + (size_t)m * a->k + 4 * j)));
                UNROLL for (int m = 0; m < MT; m++)
                    acc[m] = vf_fma(vf_mul(_mm512_cvtepi32_ps(dot[m]), vf_set(s[(size_t)m * kb].d)), d[from / 4 % 2],
                                    acc[m]);
                if (k_min(kind)) UNROLL for (int m = 0; m < MT; m++)
                    acc[m] =
                        vf_fma(zero_point[from / 4 % 2], vf_set(zero_weight(s + (size_t)m * kb, from, count)), acc[m]);
            }
        }
    }
    UNROLL for (int m = 0; m < MT; m++) vf_store(tile + LANES * m, acc[m]);
}
