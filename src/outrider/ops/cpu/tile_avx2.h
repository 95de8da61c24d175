/* AVX2, and AVX-VNNI where the processor has it: a group is two registers of 8 outputs. Included by product.h.
 *
 * Steps outside, rows inside: both halves of a step are in registers while one broadcast of each row's activations
 * meets them, so that the loads do not set the pace. Without VNNI products of pairs are 16 bits wide; as many as fit
 * are added before they are widened: 8 of 4-bit codes (15·127·2 each), 4 of 5 bits, 2 of 6 bits, 1 of int8 (whose sign
 * goes to the activation; several rows: wide_dots).
 */
#pragma once

#if defined(__AVXVNNI__) && !defined(__AVX512VNNI__)
#define VNNI256 1
#define m256_dot4(sum, codes, x) _mm256_dpbusd_avx_epi32(sum, codes, x)
#elif defined(                                                                                                         \
    ISA_TWIN) /* the same code with AVX-512's encoding of the instruction: to test it where AVX-VNNI is missing */
#define VNNI256 1
#define m256_dot4(sum, codes, x) _mm256_dpbusd_epi32(sum, codes, x)
#else
#define VNNI256 0
#define m256_dot4(sum, codes, x) (sum)
#endif

INLINE __m256 m256_u8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE __m256 m256_i8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE __m256 m256_nibble(const uint8_t *p, int high) { /* one half of every byte */
    const __m128i v = _mm_loadl_epi64((const __m128i *)p);
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_and_si128(high ? _mm_srli_epi16(v, 4) : v, _mm_set1_epi8(15))));
}
INLINE __m256 m256_half(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE __m256 m256_bf16(const uint8_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
/* d of 8 rows: from the first numbers of a block's or a super-block's scales */
INLINE __m256 m256_front(int kind, const CodeTable *table, const uint8_t *scale) {
    if (kind == W_F4) return m256_bf16(scale);
    const __m256 d = m256_half(scale);
    return k_table(kind) && k_super(kind) ? _mm256_mul_ps(d, _mm256_set1_ps(table->unit)) : d;
}
INLINE __m256i m256_at(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE int is_signed(int kind) { return kind == W_Q8 || k_table(kind); }

/* Columns 4j..4j+3 of 8 rows, from the half of a (group, block) at `data`. Signed formats: int8; with VNNI + 128 */
INLINE __m256i step_codes(int kind, const CodeTable *table, const uint8_t *data, int j) {
    const __m256i flip = _mm256_set1_epi8((char)0x80);
    if (kind == W_Q8) return VNNI256 ? _mm256_xor_si256(m256_at(data + 64 * j), flip) : m256_at(data + 64 * j);
    __m256i v;
    if (k_lines(kind) < 4)
        v = _mm256_and_si256(_mm256_srli_epi16(m256_at(data + 64 * (j / 4)), 2 * (j % 4)), _mm256_set1_epi8(3));
    else {
        v = m256_at(data + 64 * (j % 4));
        v = _mm256_and_si256(j < 4 ? v : _mm256_srli_epi16(v, 4), _mm256_set1_epi8(15));
    }
    if (k_lines(kind) == 3) {
        const __m256i h = m256_at(data + 128);
        v = _mm256_or_si256(v, _mm256_and_si256(j < 2 ? _mm256_slli_epi16(h, 2 - j) : _mm256_srli_epi16(h, j - 2),
                                                _mm256_set1_epi8(4)));
    }
    if (k_lines(kind) == 5) {
        const __m256i h = m256_at(data + 256);
        return _mm256_or_si256(v, _mm256_and_si256(j < 4 ? _mm256_slli_epi16(h, 4 - j) : _mm256_srli_epi16(h, j - 4),
                                                   _mm256_set1_epi8(16)));
    }
    if (k_lines(kind) == 6) {
        const __m256i h = m256_at(data + 256 + 64 * (j / 4));
        const int at = 2 * (j % 4);
        return _mm256_or_si256(v, _mm256_and_si256(at < 4 ? _mm256_slli_epi16(h, 4 - at) : _mm256_srli_epi16(h, at - 4),
                                                   _mm256_set1_epi8(48)));
    }
    if (k_table(kind)) {
        const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table->value));
        v = _mm256_shuffle_epi8(values, v);
        return VNNI256 ? _mm256_xor_si256(v, flip) : v;
    }
    return v;
}

/* Signed codes without VNNI, for several rows: in 16 bits, as 256 times the code, where a byte in the upper half of its
 * place needs no sign of its own. Half the products an instruction, but nothing to do with signs or widening for each
 * row. 32·128·127·256 < 2^31. */
INLINE void wide_dots(int kind, const CodeTable *table, const uint8_t *data, const int16_t *x, int64_t ldx, int MT,
                      int from, int count, __m256i dot[][2]) {
    const __m256i upper = _mm256_set1_epi16((short)0xff00);
    UNROLL for (int j = from; j < from + count; j++)
        UNROLL for (int odd = 0; odd < 2; odd++) {
            const __m256i v[2] = {step_codes(kind, table, data, j), step_codes(kind, table, data + 32, j)};
            const __m256i w[2] = {odd ? _mm256_and_si256(v[0], upper) : _mm256_slli_epi16(v[0], 8),
                                  odd ? _mm256_and_si256(v[1], upper) : _mm256_slli_epi16(v[1], 8)};
            UNROLL for (int m = 0; m < MT; m++) {
                const __m256i y = _mm256_set1_epi32(word((const int8_t *)(x + m * ldx + 4 * j + 2 * odd)));
                UNROLL for (int h = 0; h < 2; h++) {
                    const __m256i two = _mm256_madd_epi16(w[h], y);
                    dot[m][h] = j > from || odd ? _mm256_add_epi32(dot[m][h], two) : two;
                }
            }
        }
    UNROLL for (int m = 0; m < MT; m++)
        UNROLL for (int h = 0; h < 2; h++) dot[m][h] = _mm256_srai_epi32(dot[m][h], 8);
}

/* dot[m][half] of the steps `from`.. of a block, offsets of unsigned codes taken off */
INLINE void block_dots(int kind, const CodeTable *table, const uint8_t *data, const int8_t *x, int64_t ldx,
                       const Blk *s, int kb, int MT, int from, int count, __m256i dot[][2]) {
    const int run = is_signed(kind) ? 1 : kind == W_Q6K ? 2 : k_lines(kind) == 5 || kind == W_Q2K ? 4 : 8;
    const int offset = !k_min(kind) && (VNNI256 || !is_signed(kind));
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[TILE_ROWS][2];
    if (VNNI256) UNROLL for (int m = 0; m < MT; m++) dot[m][0] = dot[m][1] = _mm256_setzero_si256();
    UNROLL for (int t = 0; t < count; t++) {
        const int j =
            count == 4 ? from + t : t / 2 + 4 * (t % 2); /* low and high halves of the same bytes after each other */
        const __m256i w[2] = {step_codes(kind, table, data, j), step_codes(kind, table, data + 32, j)};
        const __m256i size[2] = {is_signed(kind) && !VNNI256 ? _mm256_abs_epi8(w[0]) : w[0],
                                 is_signed(kind) && !VNNI256 ? _mm256_abs_epi8(w[1]) : w[1]};
        UNROLL for (int m = 0; m < MT; m++) {
            const __m256i y = _mm256_set1_epi32(word(x + m * ldx + 4 * j));
            UNROLL for (int h = 0; h < 2; h++) {
                if (VNNI256) { dot[m][h] = m256_dot4(dot[m][h], w[h], y); continue; }
                const __m256i two = _mm256_maddubs_epi16(size[h], is_signed(kind) ? _mm256_sign_epi8(y, w[h]) : y);
                sum[m][h] = t % run ? _mm256_add_epi16(sum[m][h], two) : two;
                if (t % run < run - 1) continue;
                const __m256i four = _mm256_madd_epi16(sum[m][h], ones);
                dot[m][h] = t < run ? four : _mm256_add_epi32(dot[m][h], four);
            }
        }
    }
    if (offset) UNROLL for (int m = 0; m < MT; m++) { /* only now: before, the registers are needed for sums */
        const __m256i zero =
            _mm256_srai_epi32(_mm256_set1_epi32(zero_sum(s + (size_t)m * kb, from, count)), zero_shift(kind));
        UNROLL for (int h = 0; h < 2; h++) dot[m][h] = _mm256_add_epi32(dot[m][h], zero);
    }
}

INLINE void group_tile(int kind, const Weight *w, int g, const QActs *a, int m0, int MT, float *tile) {
    const int kb = w->k / 32, lines = k_lines(kind), super = k_blocks(kind), count = k_columns(kind) / 4;
    const CodeTable *table = w_table(w);
    const uint8_t *data = w_data(w, g), *scale = w_scale(w, g);
    const size_t ahead = (size_t)kb * lines * 64;
    const int8_t *x = a->q + (size_t)m0 * a->k;
    const Blk *s = a->blk + (size_t)m0 * kb;
    __m256 acc[TILE_ROWS][2];
    UNROLL for (int m = 0; m < MT; m++) acc[m][0] = acc[m][1] = _mm256_setzero_ps();
    for (int b = 0; b < kb; b += super, scale += k_scale_step(kind))
        for (int sub = 0; sub < super; sub++, data += 64 * lines, x += 32, s++) {
            const uint8_t *bytes = scale + 2 * k_halves(kind) + sub * k_bytes(kind);
            __m256i dot[TILE_ROWS][2];
            if (MT > 1) UNROLL for (int j = 0; j < lines; j++) __builtin_prefetch(data + ahead + 64 * j, 0, 2);
            UNROLL for (int from = 0; from < 8; from += count) {
                if (WIDE && is_signed(kind) && MT > 1)
                    wide_dots(kind, table, data, a->wide + (x - a->q), a->k, MT, from, count, dot);
                else block_dots(kind, table, data, x, a->k, s, kb, MT, from, count, dot);
                UNROLL for (int h = 0; h < 2; h++) {
                    __m256 d = m256_front(kind, table, scale + 16 * h);
                    if (kind == W_Q2K) d = _mm256_mul_ps(d, m256_nibble(bytes + 8 * h + (from ? 16 : 0), 0));
                    else if (k_super(kind))
                        d = _mm256_mul_ps(d, k_min(kind) ? m256_u8(bytes + 8 * h)
                                                         : m256_i8(bytes + 8 * h + (from ? 16 : 0)));
                    UNROLL for (int m = 0; m < MT; m++)
                        acc[m][h] = _mm256_fmadd_ps(
                            _mm256_mul_ps(_mm256_cvtepi32_ps(dot[m][h]), _mm256_set1_ps(s[(size_t)m * kb].d)), d,
                            acc[m][h]);
                }
                if (k_min(kind)) UNROLL for (int h = 0; h < 2; h++) {
                    __m256 zero_point = m256_half(scale + 32 + 16 * h);
                    if (k_super(kind)) {
                        const __m256 minimum = kind == W_Q2K ? m256_nibble(bytes + 8 * h + (from ? 16 : 0), 1)
                                                             : m256_u8(bytes + 16 + 8 * h);
                        zero_point = _mm256_mul_ps(_mm256_sub_ps(_mm256_setzero_ps(), zero_point), minimum);
                    }
                    UNROLL for (int m = 0; m < MT; m++)
                        acc[m][h] = _mm256_fmadd_ps(
                            zero_point, _mm256_set1_ps(zero_weight(s + (size_t)m * kb, from, count)), acc[m][h]);
                }
            }
        }
    UNROLL for (int m = 0; m < MT; m++) {
        _mm256_storeu_ps(tile + LANES * m, acc[m][0]);
        _mm256_storeu_ps(tile + LANES * m + 8, acc[m][1]);
    }
}
