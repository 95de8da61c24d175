/* Sixteen float lanes on every instruction set, and nothing else.
 *
 * One translation unit is compiled for one instruction set (the flags decide; see build.py). Every operation rounds
 * once, in the order written: no contraction (-ffp-contract=off), fused multiply-add only where `vf_fma` says so.
 * That is what makes a row's result independent of the tile it was computed in.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__) && !defined(ISA_TWIN)
#define ISA_AVX512 1
#if defined(__AVX512BF16__)
#define ISA_BF16 1
#endif
#if defined(__AMX_INT8__) || defined(EMULATED_TILES)
#define ISA_AMX 1
#endif
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define ISA_AVX2 1
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline, unused))
#define SHARED static __attribute__((unused)) /* a header's function that some of the units do not call */
#define UNROLL                                                                                                         \
    _Pragma("GCC unroll 16") /* before a loop of known, short length: sums in arrays then stay in registers */

enum { DT_F32 = 0, DT_F16 = 1, DT_BF16 = 2, DT_I8 = 3 }; /* DT_I8: of keys and values only, whose factors lie apart */

INLINE float bits_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
INLINE uint32_t float_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

/* ---- half precision, one value (round to nearest even) ---- */
INLINE float half_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 1023;
    if (exp == 31) return bits_float(sign | 0x7f800000 | (man << 13));
    if (exp == 0) { float f = (float)man * 5.9604644775390625e-8f; return sign ? -f : f; }
    return bits_float(sign | ((exp + 112) << 23) | (man << 13));
}
INLINE uint16_t float_half(float f) {
    uint32_t u = float_bits(f), sign = (u >> 16) & 0x8000; u &= 0x7fffffff;
    if (u > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (u >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (u < 0x38800000) return (uint16_t)(sign | (uint16_t)lrintf(bits_float(u) * 16777216.0f));
    u += 0xfff + ((u >> 13) & 1);
    return (uint16_t)(sign | ((u - 0x38000000) >> 13));
}
INLINE uint16_t float_bf16(float f) {
    uint32_t u = float_bits(f);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)((u >> 16) | 64);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

#if ISA_AVX512
/* ------------------------------------------------------------------------------------------------ AVX-512 ---- */
typedef __m512 vf;
typedef __m512i vi;
INLINE vf vf_set(float x) { return _mm512_set1_ps(x); }
INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf vf_abs(vf a) { return _mm512_abs_ps(a); }
INLINE vf vf_round(vf a) { return _mm512_roundscale_ps(a, 0); }
INLINE vf vf_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vf vf_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE void vf_store_half(uint16_t *p, vf a) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, 0)); }
INLINE void vf_store_i8(int8_t *p, vf a) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}
INLINE vi vf_bits(vf a) { return _mm512_castps_si512(a); }
INLINE vf vi_float(vi a) { return _mm512_castsi512_ps(a); }
INLINE vi vf_int(vf a) { return _mm512_cvtps_epi32(a); }
INLINE vf vi_to_float(vi a) { return _mm512_cvtepi32_ps(a); }
INLINE vi vi_set(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vi vi_load(const int32_t *p) { return _mm512_loadu_si512(p); }
INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
INLINE vi vi_mul(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
INLINE vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
INLINE vi vi_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
INLINE vi vi_min_unsigned(vi a, vi b) { return _mm512_min_epu32(a, b); }
INLINE vi vi_pairs(const int8_t *p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
} /* a lane: two of 16 bits */
INLINE vi vi_dot2(vi sum, vi pairs, int32_t x) {
    return _mm512_dpwssd_epi32(sum, pairs, _mm512_set1_epi32(x));
} /* x: another two */
#define vi_shl(a, n) _mm512_slli_epi32(a, n)
#define vi_shr(a, n) _mm512_srli_epi32(a, n)
INLINE float vf_sum(vf a) { /* ((0+8)+(4+12))... : the same tree on every call */
    __m256 s = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
INLINE float vf_hmax(vf a) { return _mm512_reduce_max_ps(a); }
INLINE int vf_any_ge(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ) != 0; }
INLINE vf vf_pick_lt(vf a, vf b, vf yes, vf no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
/* lane i of the answer is the sum of the lanes of v[i] */
INLINE vf vf_sum16(const vf *v) {
    vf a[8], b[4], c[2];
    for (int i = 0; i < 8; i++) /* pairs (i, i+8): lanes of i in the even half of each 128-bit piece */
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[i], v[i + 8]), _mm512_unpackhi_ps(v[i], v[i + 8]));
    for (int i = 0; i < 4; i++)
        b[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[i], a[i + 4]), _mm512_unpackhi_ps(a[i], a[i + 4]));
    /* b[i] lanes in each piece: i, i+4, i+8, i+12 -> sums over the four pieces are left */
    for (int i = 0; i < 2; i++)
        c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x44),
                             _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xEE));
    vf d = _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xDD));
    /* pieces of d: v0.. group 0,1,2,3, each with lanes (i, i+4, i+8, i+12) -> transpose 4x4 */
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_ps(order, d);
}

#if ISA_BF16
/* Pairs of bfloat16 in every lane: twice the multiply-adds of float32. */
INLINE vf vf_dot2(vf acc, vi a, vi b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
INLINE void vf_store_bf16(uint16_t *p, vf a) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(a)); }
#endif

#elif ISA_AVX2
/* --------------------------------------------------------------------------------------------------- AVX2 ---- */
typedef struct { __m256 a, b; } vf;
typedef struct { __m256i a, b; } vi;
INLINE vf vf_set(float x) { vf r = {_mm256_set1_ps(x), _mm256_set1_ps(x)}; return r; }
INLINE vf vf_load(const float *p) { vf r = {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; return r; }
INLINE void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
INLINE vf vf_add(vf x, vf y) { vf r = {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; return r; }
INLINE vf vf_sub(vf x, vf y) { vf r = {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; return r; }
INLINE vf vf_mul(vf x, vf y) { vf r = {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; return r; }
INLINE vf vf_div(vf x, vf y) { vf r = {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; return r; }
INLINE vf vf_fma(vf x, vf y, vf z) {
    vf r = {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
    return r;
}
INLINE vf vf_max(vf x, vf y) { vf r = {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; return r; }
INLINE vf vf_min(vf x, vf y) { vf r = {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; return r; }
INLINE vf vf_abs(vf x) {
    const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    vf r = {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)}; return r;
}
INLINE vf vf_round(vf x) { vf r = {_mm256_round_ps(x.a, 0), _mm256_round_ps(x.b, 0)}; return r; }
INLINE vf vf_half(const uint16_t *p) {
    vf r = {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
    return r;
}
INLINE vf vf_bf16(const uint16_t *p) {
    vf r = {
        _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16)),
        _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 8))), 16))};
    return r;
}
INLINE void vf_store_half(uint16_t *p, vf x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x.a, 0));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(x.b, 0));
}
INLINE void vf_store_i8(int8_t *p, vf x) {
    __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)); /* a0-3 b0-3 | a4-7 b4-7 */
    w = _mm256_permute4x64_epi64(w, 0xD8);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
INLINE vi vf_bits(vf x) { vi r = {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; return r; }
INLINE vf vi_float(vi x) { vf r = {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; return r; }
INLINE vi vf_int(vf x) { vi r = {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; return r; }
INLINE vf vi_to_float(vi x) { vf r = {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; return r; }
INLINE vi vi_set(int32_t x) { vi r = {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; return r; }
INLINE vi vi_load(const int32_t *p) {
    vi r = {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 8))}; return r;
}
INLINE vi vi_add(vi x, vi y) { vi r = {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; return r; }
INLINE vi vi_sub(vi x, vi y) { vi r = {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; return r; }
INLINE vi vi_mul(vi x, vi y) { vi r = {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; return r; }
INLINE vi vi_and(vi x, vi y) { vi r = {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; return r; }
INLINE vi vi_or(vi x, vi y) { vi r = {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; return r; }
INLINE vi vi_xor(vi x, vi y) { vi r = {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; return r; }
INLINE vi vi_min_unsigned(vi x, vi y) { vi r = {_mm256_min_epu32(x.a, y.a), _mm256_min_epu32(x.b, y.b)}; return r; }
INLINE vi vi_pairs(const int8_t *p) {
    vi r = {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)),
            _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(p + 16)))};
    return r;
}
INLINE vi vi_dot2(vi sum, vi pairs, int32_t x) {
    const __m256i y = _mm256_set1_epi32(x);
    vi r = {_mm256_add_epi32(sum.a, _mm256_madd_epi16(pairs.a, y)),
            _mm256_add_epi32(sum.b, _mm256_madd_epi16(pairs.b, y))};
    return r;
}
INLINE vi vi_shl(vi x, int n) { vi r = {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; return r; }
INLINE vi vi_shr(vi x, int n) { vi r = {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)}; return r; }
INLINE float m256_sum(__m256 s) {
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
INLINE float vf_sum(vf x) { return m256_sum(_mm256_add_ps(x.a, x.b)); }
INLINE float vf_hmax(vf x) {
    __m256 m = _mm256_max_ps(x.a, x.b);
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
}
INLINE int vf_any_ge(vf x, vf y) {
    return (_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ)) |
            _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ))) != 0;
}
INLINE vf vf_pick_lt(vf x, vf y, vf yes, vf no) {
    vf r = {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
    return r;
}
INLINE __m256 m256_sum8(const vf *v) {
    __m256 s[8];
    for (int i = 0; i < 8; i++) s[i] = _mm256_add_ps(v[i].a, v[i].b);
    __m256 p = _mm256_hadd_ps(_mm256_hadd_ps(s[0], s[1]), _mm256_hadd_ps(s[2], s[3]));
    __m256 q = _mm256_hadd_ps(_mm256_hadd_ps(s[4], s[5]), _mm256_hadd_ps(s[6], s[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(p, q, 0x20), _mm256_permute2f128_ps(p, q, 0x31));
}
INLINE vf vf_sum16(const vf *v) { vf r = {m256_sum8(v), m256_sum8(v + 8)}; return r; }

#else
/* ------------------------------------------------------- any other processor: the compiler's own vectors ---- */
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
INLINE vf vf_set(float x) { return x - (vf){0}; } /* keeps the sign of a zero */
INLINE vf vf_load(const float *p) { vf r; memcpy(&r, p, 64); return r; }
INLINE void vf_store(float *p, vf a) { memcpy(p, &a, 64); }
INLINE vf vf_add(vf a, vf b) { return a + b; }
INLINE vf vf_sub(vf a, vf b) { return a - b; }
INLINE vf vf_mul(vf a, vf b) { return a * b; }
INLINE vf vf_div(vf a, vf b) { return a / b; }
#if defined(__aarch64__)
INLINE vf vf_fma(vf a, vf b, vf c) {
    vf r;
    for (int i = 0; i < 16; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
}
#else
INLINE vf vf_fma(vf a, vf b, vf c) {
    return a * b + c;
} /* two roundings: without the instruction a fused one is slow */
#endif
INLINE vf vf_pick(vi m, vf a, vf b) { return (vf)((m & (vi)a) | (~m & (vi)b)); }
INLINE vf vf_pick_lt(vf a, vf b, vf yes, vf no) { return vf_pick(a < b, yes, no); }
INLINE vf vf_max(vf a, vf b) { return vf_pick(a > b, a, b); }
INLINE vf vf_min(vf a, vf b) { return vf_pick(a < b, a, b); }
INLINE vf vf_abs(vf a) { return (vf)((vi)a & 0x7fffffff); }
INLINE vf vf_round(vf a) { const vf big = vf_set(12582912.0f); return (a + big) - big; } /* |a| < 2^22 */
#if defined(__aarch64__)
INLINE vf vf_half(const uint16_t *p) {
    __fp16 h[16];
    vf r;
    memcpy(h, p, 32);
    for (int i = 0; i < 16; i++) r[i] = h[i];
    return r;
}
#else
INLINE vf vf_half(const uint16_t *p) { vf r; for (int i = 0; i < 16; i++) r[i] = half_float(p[i]); return r; }
#endif
INLINE vf vf_bf16(const uint16_t *p) {
    vi r;
    for (int i = 0; i < 16; i++) r[i] = (int32_t)((uint32_t)p[i] << 16);
    return (vf)r;
}
INLINE void vf_store_half(uint16_t *p, vf a) { for (int i = 0; i < 16; i++) p[i] = float_half(a[i]); }
INLINE vi vf_bits(vf a) { return (vi)a; }
INLINE vf vi_float(vi a) { return (vf)a; }
INLINE vi vf_int(vf a) { return __builtin_convertvector(vf_round(a), vi); }
INLINE void vf_store_i8(int8_t *p, vf a) { vi v = vf_int(a); for (int i = 0; i < 16; i++) p[i] = (int8_t)v[i]; }
INLINE vf vi_to_float(vi a) { return __builtin_convertvector(a, vf); }
INLINE vi vi_set(int32_t x) { return (vi){0} + x; }
INLINE vi vi_load(const int32_t *p) { vi r; memcpy(&r, p, 64); return r; }
INLINE vi vi_add(vi a, vi b) { return (vi)((vu)a + (vu)b); }
INLINE vi vi_sub(vi a, vi b) { return (vi)((vu)a - (vu)b); }
INLINE vi vi_mul(vi a, vi b) { return (vi)((vu)a * (vu)b); }
INLINE vi vi_and(vi a, vi b) { return a & b; }
INLINE vi vi_or(vi a, vi b) { return a | b; }
INLINE vi vi_xor(vi a, vi b) { return a ^ b; }
INLINE vi vi_min_unsigned(vi a, vi b) { vi m = (vu)a < (vu)b; return (m & a) | (~m & b); }
INLINE vi vi_pairs(const int8_t *p) {
    vi r;
    for (int i = 0; i < 16; i++) r[i] = (int32_t)((uint32_t)p[2 * i + 1] << 16 | (uint16_t)p[2 * i]);
    return r;
}
INLINE vi vi_dot2(vi sum, vi pairs, int32_t x) {
    return sum + ((vi)((vu)pairs << 16) >> 16) * (int16_t)x + (pairs >> 16) * (x >> 16);
}
INLINE vi vi_shl(vi a, int n) { return (vi)((vu)a << n); }
INLINE vi vi_shr(vi a, int n) { return (vi)((vu)a >> n); }
INLINE float vf_sum(vf a) {
    float s[16]; memcpy(s, &a, 64);
    for (int w = 8; w; w >>= 1) for (int i = 0; i < w; i++) s[i] += s[i + w];
    return s[0];
}
INLINE float vf_hmax(vf a) { float m = a[0]; for (int i = 1; i < 16; i++) if (a[i] > m) m = a[i]; return m; }
INLINE int vf_any_ge(vf a, vf b) {
    vi m = a >= b;
    int any = 0;
    for (int i = 0; i < 16; i++) any |= m[i];
    return any != 0;
}
INLINE vf vf_sum16(const vf *v) { vf r; for (int i = 0; i < 16; i++) r[i] = vf_sum(v[i]); return r; }
#endif

/* ---- built from the above, the same everywhere ---- */
INLINE vf vf_bytes(const int8_t *p) {
#if ISA_AVX512
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif ISA_AVX2
    vf r = {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8))))};
    return r;
#else
    int32_t t[LANES];
    for (int i = 0; i < LANES; i++) t[i] = p[i];
    return vi_to_float(vi_load(t));
#endif
}
INLINE vf vf_any(const void *p, int64_t i, int dtype) { /* sixteen values of any float type */
    if (dtype == DT_F32) return vf_load((const float *)p + i);
    if (dtype == DT_F16) return vf_half((const uint16_t *)p + i);
    if (dtype == DT_I8) return vf_bytes((const int8_t *)p + i);
    return vf_bf16((const uint16_t *)p + i);
}
INLINE void vf_store_any(void *p, int64_t i, vf a, int dtype) {
    if (dtype == DT_F32) vf_store((float *)p + i, a);
    else if (dtype == DT_F16) vf_store_half((uint16_t *)p + i, a);
#if ISA_BF16
    else vf_store_bf16((uint16_t *)p + i, a);
#else
    else { float t[LANES]; vf_store(t, a); for (int j = 0; j < LANES; j++) ((uint16_t *)p)[i + j] = float_bf16(t[j]); }
#endif
}
INLINE float one_any(const void *p, int64_t i, int dtype) {
    if (dtype == DT_F32) return ((const float *)p)[i];
    uint16_t h = ((const uint16_t *)p)[i];
    return dtype == DT_F16 ? half_float(h) : bits_float((uint32_t)h << 16);
}
INLINE vf vf_load_n(const float *p, int n) { /* the first n lanes, zeros behind */
    if (n >= LANES) return vf_load(p);
    float t[LANES] = {0}; memcpy(t, p, (size_t)n * 4); return vf_load(t);
}
INLINE void vf_store_n(float *p, vf a, int n) {
    if (n >= LANES) { vf_store(p, a); return; }
    float t[LANES]; vf_store(t, a); memcpy(p, t, (size_t)n * 4);
}

/* e^x to about 1 ulp; exactly 0 below -87, exactly 1 at 0; large x saturates near the largest float */
INLINE vf vf_exp(vf x) {
    const vf lo = vf_set(-87.0f);
    vf y = vf_min(vf_max(x, lo), vf_set(88.0f));
    vf n = vf_round(vf_mul(y, vf_set(1.44269504f)));
    vf r = vf_fma(n, vf_set(-0.693145751953125f), y);
    r = vf_fma(n, vf_set(-1.428606765330187e-06f), r);
    vf p = vf_set(1.9875691500e-4f);
    p = vf_fma(p, r, vf_set(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set(5.0000001201e-1f));
    p = vf_fma(vf_mul(r, r), p, vf_add(r, vf_set(1.0f)));
    p = vf_mul(p, vi_float(vi_shl(vi_add(vf_int(n), vi_set(127)), 23)));
#if ISA_AVX512
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, lo, _CMP_GE_OQ), p);
#elif ISA_AVX2
    vf z = {_mm256_and_ps(p.a, _mm256_cmp_ps(x.a, lo.a, _CMP_GE_OQ)),
            _mm256_and_ps(p.b, _mm256_cmp_ps(x.b, lo.b, _CMP_GE_OQ))};
    return z;
#else
    return (vf)((x >= lo) & (vi)p);
#endif
}
/* natural logarithm of positive normal numbers, about 1 ulp (Cephes' polynomial) */
INLINE vf vf_log(vf x) {
    vi b = vf_bits(x);
    vi e = vi_sub(vi_shr(b, 23), vi_set(126));
    vf m = vi_float(vi_or(vi_and(b, vi_set(0x007fffff)), vi_set(0x3f000000))); /* [0.5, 1) */
    /* below sqrt(1/2): m *= 2, e -= 1 */
    vi small =
        vi_sub(vi_set(0), vi_shr(vi_sub(vf_bits(m), vi_set(0x3f3504f3)), 31)); /* all ones where m < 0.70710678 */
    vf fe = vi_to_float(vi_add(e, small));
    m = vf_add(m, vi_float(vi_and(vf_bits(m), small)));
    vf f = vf_sub(m, vf_set(1.0f)), z = vf_mul(f, f);
    vf p = vf_set(7.0376836292e-2f);
    p = vf_fma(p, f, vf_set(-1.1514610310e-1f));
    p = vf_fma(p, f, vf_set(1.1676998740e-1f));
    p = vf_fma(p, f, vf_set(-1.2420140846e-1f));
    p = vf_fma(p, f, vf_set(1.4249322787e-1f));
    p = vf_fma(p, f, vf_set(-1.6668057665e-1f));
    p = vf_fma(p, f, vf_set(2.0000714765e-1f));
    p = vf_fma(p, f, vf_set(-2.4999993993e-1f));
    p = vf_fma(p, f, vf_set(3.3333331174e-1f));
    p = vf_mul(vf_mul(p, f), z);
    p = vf_fma(fe, vf_set(-2.12194440e-4f), p);
    p = vf_fma(z, vf_set(-0.5f), p);
    return vf_fma(fe, vf_set(0.693359375f), vf_add(f, p));
}
