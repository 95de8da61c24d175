/* AVX2: a group in two halves of 8 outputs. Included by product.h. */
#pragma once

INLINE __m256 m256_u8(const uint8_t *p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
INLINE __m256 m256_i8(const uint8_t *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
INLINE __m256 m256_half(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE int is_signed(int kind) { return kind == W_Q8 || kind == W_IQ4 || kind == W_IQ4X; }

/* The codes of half a (group, block): v[j] has columns 4j..4j+3 of 8 rows. Signed formats: int8 */
INLINE void block_codes(int kind, const uint8_t *data, __m256i *v) {
    const __m256i low = _mm256_set1_epi8(15);
    if (kind == W_Q8) {
        UNROLL for (int j = 0; j < 8; j++) v[j] = _mm256_loadu_si256((const __m256i *)(data + 64 * j));
        return;
    }
    UNROLL for (int j = 0; j < 4; j++) {
        const __m256i p = _mm256_loadu_si256((const __m256i *)(data + 64 * j));
        v[j] = _mm256_and_si256(p, low);
        v[j + 4] = _mm256_and_si256(_mm256_srli_epi16(p, 4), low);
    }
    if (k_lines(kind) == 5) {
        const __m256i h = _mm256_loadu_si256((const __m256i *)(data + 256)), fifth = _mm256_set1_epi8(16);
        UNROLL for (int j = 0; j < 8; j++)
            v[j] = _mm256_or_si256(v[j], _mm256_and_si256(j < 4 ? _mm256_slli_epi16(h, 4 - j) : _mm256_srli_epi16(h, j - 4), fifth));
    } else if (k_lines(kind) == 6) {
        const __m256i top = _mm256_set1_epi8(48);
        UNROLL for (int j = 0; j < 8; j++) {
            const __m256i h = _mm256_loadu_si256((const __m256i *)(data + 256 + 64 * (j / 4)));
            const int at = 2 * (j % 4);
            v[j] = _mm256_or_si256(v[j], _mm256_and_si256(at < 4 ? _mm256_slli_epi16(h, 4 - at) : _mm256_srli_epi16(h, at - 4), top));
        }
    } else if (is_signed(kind)) {
        const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)iq4_values));
        UNROLL for (int j = 0; j < 8; j++) v[j] = _mm256_shuffle_epi8(table, v[j]);
    }
}

/* Products of pairs are 16 bits wide; as many as fit are added before they are widened: 8 of 4-bit codes (15·127·2 each), 4 of
 * 5 bits, 2 of 6 bits, 1 of int8 (whose sign goes to the activation) */
INLINE __m256i block_dot(int kind, const __m256i *v, const int8_t *x, int from, int count) {
    const int run = is_signed(kind) ? 1 : kind == W_Q6K ? 2 : k_lines(kind) == 5 ? 4 : 8;
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i dot = _mm256_setzero_si256();
    UNROLL for (int j = from; j < from + count; j += run) {
        __m256i sum = _mm256_setzero_si256();
        UNROLL for (int i = j; i < j + run; i++) {
            const __m256i y = _mm256_set1_epi32(word(x + 4 * i));
            const __m256i two = is_signed(kind) ? _mm256_maddubs_epi16(_mm256_abs_epi8(v[i]), _mm256_sign_epi8(y, v[i])) : _mm256_maddubs_epi16(v[i], y);
            sum = i == j ? two : _mm256_add_epi16(sum, two);
        }
        sum = _mm256_madd_epi16(sum, ones);
        dot = j == from ? sum : _mm256_add_epi32(dot, sum);
    }
    return dot;
}

INLINE void half_tile(int kind, const Weight *w, int g, int half, const Acts *a, int m0, int MT, float *tile) {
    const int kb = w->k / 32, lines = k_lines(kind), super = k_blocks(kind);
    const uint8_t *data = w_data(w, g) + 32 * half, *scale = w_scale(w, g);
    const int8_t *x = a->q + (size_t)m0 * a->k;
    const Blk *s = a->blk + (size_t)m0 * kb;
    __m256 acc[TILE_ROWS];
    UNROLL for (int m = 0; m < MT; m++) acc[m] = _mm256_setzero_ps();
    for (int b = 0; b < kb; b += super, scale += k_scale_step(kind)) {
        const __m256 first = m256_half(scale + 16 * half);
        const __m256 second = k_min(kind) ? m256_half(scale + 32 + 16 * half) : first;
        const __m256 minus = k_super(kind) ? _mm256_sub_ps(_mm256_setzero_ps(), second) : second;
        for (int sub = 0; sub < super; sub++, data += 64 * lines, x += 32, s++) {
            __m256i v[8];
            __m256 d[2] = {first, first}, lift = second;
            block_codes(kind, data, v);
            if (k_super(kind)) {
                const uint8_t *bytes = scale + 2 * k_halves(kind) + sub * k_bytes(kind) + 8 * half;
                if (k_min(kind)) { d[0] = _mm256_mul_ps(first, m256_u8(bytes)); lift = _mm256_mul_ps(minus, m256_u8(bytes + 16)); }
                else d[0] = _mm256_mul_ps(first, m256_i8(bytes));
                if (kind == W_Q6K) d[1] = _mm256_mul_ps(first, m256_i8(bytes + 16));
            }
            const int count = kind == W_Q6K ? 4 : 8;
            UNROLL for (int m = 0; m < MT; m++) {
                const Blk *of = s + (size_t)m * kb;
                UNROLL for (int from = 0; from < 8; from += count) {
                    __m256i dot = block_dot(kind, v, x + (size_t)m * a->k, from, count);
                    if (!is_signed(kind) && !k_min(kind)) dot = _mm256_add_epi32(dot, _mm256_set1_epi32(zero_point(kind, of, from, count)));
                    acc[m] = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(of->d)), d[from / 4 % 2], acc[m]);
                }
                if (k_min(kind)) acc[m] = _mm256_fmadd_ps(lift, _mm256_set1_ps(of->s), acc[m]);
            }
        }
    }
    UNROLL for (int m = 0; m < MT; m++) _mm256_storeu_ps(tile + LANES * m + 8 * half, acc[m]);
}
INLINE void group_tile(int kind, const Weight *w, int g, const Acts *a, int m0, int MT, float *tile) {
    half_tile(kind, w, g, 0, a, m0, MT, tile);
    half_tile(kind, w, g, 1, a, m0, MT, tile);
}
