/* Quantised weights: GGUF's block formats as they lie in a file, and the same bits laid out for the kernels.
 *
 * Packed, a weight is cut into groups of 16 rows and blocks of 32 columns. A (group, block) is a few lines of 64 bytes; in every
 * line a row (lane) owns one word of four bytes, so that one integer dot-product instruction advances 16 outputs:
 *   nibbles  4 lines: byte c of word j holds columns 4j + c (low half) and 16 + 4j + c (high half)
 *   bytes    8 lines: byte c of word j is column 4j + c
 *   fifth    1 line:  bit j of byte c is bit 4 of column 4j + c
 *   top two  2 lines: bits 2j, 2j + 1 of byte c of the first are bits 4, 5 of column 4j + c; the second has columns 16 and up
 * Scales are a stream of their own. Formats without super-blocks: for each (group, block) 16 float16, then 16 minima where they
 * have them. With super-blocks of 256: for each (group, super-block) 16 float16 (and 16 for the minima), then for each of 8 blocks
 * 16 bytes a scale. Nothing is rounded, and only 6-bit scales grow (to 8): at most 1.03 times the file.
 */
#pragma once
#include "vec.h"

enum {
    W_NONE, W_DENSE,
    W_Q4M,  /* Q4_1: nibble·d + m */
    W_Q4,   /* Q4_0: (nibble - 8)·d */
    W_Q8,   /* Q8_0: int8·d */
    W_Q5,   /* Q5_0: (q - 16)·d */
    W_Q5M,  /* Q5_1: q·d + m */
    W_Q4K,  /* Q4_K: q·(d·scale) - dmin·min */
    W_Q5K,  /* Q5_K */
    W_Q6K,  /* Q6_K: (q - 32)·(d·scale), a scale for 16 columns */
    W_IQ4,  /* IQ4_NL: table[nibble]·d */
    W_IQ4X, /* IQ4_XS: table[nibble]·(d·scale) */
    W_PARTS, /* rows of several weights, one after the other: data is a Weight[dtype]; all but the last have whole groups */
    W_FILE   /* rows as they lie in the file, in the format `dtype`: only ever looked up */
};

typedef struct {
    int32_t kind, n, k, dtype; /* dtype: of dense data; see W_PARTS, W_FILE */
    const void *data;          /* dense: [n, k]; packed: [groups][k / 32][lines] of 64 bytes */
    const void *scale;
} Weight;

static const int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

INLINE int k_lines(int kind) { /* 64-byte lines of a (group, block) */
    return kind == W_Q8 ? 8 : kind == W_Q6K ? 6 : kind == W_Q5 || kind == W_Q5M || kind == W_Q5K ? 5 : 4;
}
INLINE int k_super(int kind) { return kind == W_Q4K || kind == W_Q5K || kind == W_Q6K || kind == W_IQ4X; }
INLINE int k_min(int kind) { return kind == W_Q4M || kind == W_Q5M || kind == W_Q4K || kind == W_Q5K; }
INLINE int k_halves(int kind) { return k_super(kind) ? (k_min(kind) ? 32 : 16) : k_min(kind) ? 32 : 16; } /* float16 at the front */
INLINE int k_bytes(int kind) { return kind == W_IQ4X ? 16 : k_super(kind) ? 32 : 0; } /* byte scales of a block */
INLINE size_t k_scale_step(int kind) { /* bytes of scales for a block, or for a super-block of 8 */
    return (size_t)k_halves(kind) * 2 + 8 * (size_t)k_bytes(kind);
}
INLINE int k_blocks(int kind) { return k_super(kind) ? 8 : 1; } /* blocks that share a step of scales */
INLINE int w_groups(const Weight *w) { return (w->n + LANES - 1) / LANES; }
INLINE const uint8_t *w_data(const Weight *w, int64_t g) { return (const uint8_t *)w->data + (size_t)g * (w->k / 32) * 64 * k_lines(w->kind); }
INLINE const uint8_t *w_scale(const Weight *w, int64_t g) {
    return (const uint8_t *)w->scale + (size_t)g * (w->k / 32 / k_blocks(w->kind)) * k_scale_step(w->kind);
}
INLINE uint16_t half_at(const uint8_t *p) { uint16_t h; memcpy(&h, p, 2); return h; }

typedef struct { float d[2], lift; } Scales; /* of columns 0..15 and 16..31 of a block; value = code·d + lift */

/* ---- as in the file ---- */
INLINE int raw_bytes(int kind) { /* of a block, or a super-block */
    switch (kind) {
    case W_Q4: case W_IQ4: return 18;
    case W_Q4M: return 20;
    case W_Q5: return 22;
    case W_Q5M: return 24;
    case W_Q8: return 34;
    case W_Q4K: return 144;
    case W_Q5K: return 176;
    case W_Q6K: return 210;
    default: return 136; /* IQ4X */
    }
}
/* The unsigned codes of block `sub` of the super-block at `p` (sub = 0 without super-blocks). W_Q8: the bytes themselves */
INLINE void raw_codes(int kind, const uint8_t *p, int sub, uint8_t *q) {
    const uint8_t *low;
    uint32_t fifth = 0;
    switch (kind) {
    case W_Q8: memcpy(q, p + 2, 32); return;
    case W_Q4K: case W_Q5K:
        low = p + (kind == W_Q4K ? 16 : 48) + 32 * (sub / 2);
        for (int i = 0; i < 32; i++) q[i] = sub & 1 ? low[i] >> 4 : low[i] & 15;
        if (kind == W_Q5K) for (int i = 0; i < 32; i++) q[i] |= (uint8_t)(((p[16 + i] >> sub) & 1) << 4);
        return;
    case W_Q6K: {
        const uint8_t *high = p + 128 + 32 * (sub / 4);
        low = p + 64 * (sub / 4) + 32 * (sub & 1);
        const int top = sub & 2, shift = 2 * (sub & 3);
        for (int i = 0; i < 32; i++) q[i] = (uint8_t)((top ? low[i] >> 4 : low[i] & 15) | (((high[i] >> shift) & 3) << 4));
        return;
    }
    case W_Q4M: low = p + 4; break;
    case W_Q5: low = p + 6; memcpy(&fifth, p + 2, 4); break;
    case W_Q5M: low = p + 8; memcpy(&fifth, p + 4, 4); break;
    case W_IQ4X: low = p + 8 + 16 * sub; break;
    default: low = p + 2; /* Q4, IQ4 */
    }
    for (int i = 0; i < 16; i++) q[i] = low[i] & 15, q[16 + i] = low[i] >> 4;
    if (kind == W_Q5 || kind == W_Q5M) for (int i = 0; i < 32; i++) q[i] |= (uint8_t)(((fifth >> i) & 1) << 4);
}
/* The byte scales of block `sub`: Q4K, Q5K scale and minimum; Q6K two scales; IQ4X one */
INLINE void raw_byte_scales(int kind, const uint8_t *p, int sub, uint8_t *a, uint8_t *b) {
    if (kind == W_Q6K) { *a = p[192 + 2 * sub]; *b = p[193 + 2 * sub]; return; }
    if (kind == W_IQ4X) {
        *a = (uint8_t)((((p[4 + sub / 2] >> 4 * (sub & 1)) & 15) | (((half_at(p + 2) >> 2 * sub) & 3) << 4)) - 32);
        return;
    }
    const uint8_t *s = p + 4;
    if (sub < 4) { *a = s[sub] & 63; *b = s[sub + 4] & 63; }
    else {
        *a = (uint8_t)((s[sub + 4] & 15) | ((s[sub - 4] >> 6) << 4));
        *b = (uint8_t)((s[sub + 4] >> 4) | ((s[sub] >> 6) << 4));
    }
}
INLINE uint16_t raw_half(int kind, const uint8_t *p, int which) { return half_at(p + (kind == W_Q6K ? 208 : 2 * which)); }

/* ---- decoding ---- */
INLINE Scales make_scales(int kind, uint16_t first, uint16_t second, uint8_t a, uint8_t b) {
    const float d = half_float(first);
    Scales s = {{d, d}, 0.0f};
    if (kind == W_Q6K) { s.d[0] = d * (float)(int8_t)a; s.d[1] = d * (float)(int8_t)b; }
    else if (kind == W_IQ4X) s.d[0] = s.d[1] = d * (float)(int8_t)a;
    else if (k_super(kind)) { s.d[0] = s.d[1] = d * (float)a; s.lift = -(half_float(second) * (float)b); }
    else if (k_min(kind)) s.lift = half_float(second);
    return s;
}
INLINE int code_value(int kind, uint8_t q) {
    switch (kind) {
    case W_Q8: return (int8_t)q;
    case W_Q4: return q - 8;
    case W_Q5: return q - 16;
    case W_Q6K: return q - 32;
    case W_IQ4: case W_IQ4X: return iq4_values[q];
    default: return q;
    }
}
INLINE void block_floats(int kind, const uint8_t *q, Scales s, float *out) {
    for (int i = 0; i < 32; i++) {
        const float v = s.d[i >> 4] * (float)code_value(kind, q[i]);
        out[i] = k_min(kind) ? v + s.lift : v;
    }
}
/* The codes of one lane of a packed (group, block) */
INLINE void lane_codes(int kind, const uint8_t *data, int lane, uint8_t *q) {
    data += 4 * lane;
    if (kind == W_Q8) { for (int j = 0; j < 8; j++) memcpy(q + 4 * j, data + 64 * j, 4); return; }
    for (int j = 0; j < 4; j++)
        for (int c = 0; c < 4; c++) q[4 * j + c] = data[64 * j + c] & 15, q[16 + 4 * j + c] = data[64 * j + c] >> 4;
    if (k_lines(kind) == 5) for (int i = 0; i < 32; i++) q[i] |= (uint8_t)(((data[256 + (i & 3)] >> (i >> 2)) & 1) << 4);
    if (k_lines(kind) == 6) for (int i = 0; i < 32; i++) q[i] |= (uint8_t)(((data[256 + 64 * (i >> 4) + (i & 3)] >> 2 * ((i >> 2) & 3)) & 3) << 4);
}

INLINE void row_of_file(int kind, const uint8_t *p, int k, float *out) {
    uint8_t q[32], a = 0, b = 0;
    for (int at = 0; at < k; p += raw_bytes(kind))
        for (int sub = 0; sub < k_blocks(kind); sub++, at += 32) {
            raw_codes(kind, p, sub, q);
            if (k_super(kind)) raw_byte_scales(kind, p, sub, &a, &b);
            block_floats(kind, q, make_scales(kind, raw_half(kind, p, 0), raw_half(kind, p, 1), a, b), out + at);
        }
}
INLINE void row_of_packed(int kind, const Weight *w, int64_t n, float *out) {
    const int lane = (int)(n % LANES);
    const uint8_t *data = w_data(w, n / LANES), *scale = w_scale(w, n / LANES);
    uint8_t q[32];
    for (int b = 0; b < w->k / 32; b++, data += 64 * k_lines(kind)) {
        const int sub = b % k_blocks(kind);
        const uint8_t *bytes = scale + 2 * k_halves(kind) + sub * k_bytes(kind) + lane;
        lane_codes(kind, data, lane, q);
        block_floats(kind, q, make_scales(kind, half_at(scale + 2 * lane), half_at(scale + 2 * lane + (k_halves(kind) == 32 ? 32 : 0)),
                                          k_bytes(kind) ? bytes[0] : 0, k_bytes(kind) == 32 ? bytes[16] : 0), out + 32 * b);
        if (sub == k_blocks(kind) - 1) scale += k_scale_step(kind);
    }
}

#define EACH_KIND(DO) \
    case W_Q4M: DO(W_Q4M); break; case W_Q4: DO(W_Q4); break; case W_Q8: DO(W_Q8); break; case W_Q5: DO(W_Q5); break; \
    case W_Q5M: DO(W_Q5M); break; case W_Q4K: DO(W_Q4K); break; case W_Q5K: DO(W_Q5K); break; case W_Q6K: DO(W_Q6K); break; \
    case W_IQ4: DO(W_IQ4); break; case W_IQ4X: DO(W_IQ4X); break;

/* Row n of a weight as floats. */
SHARED void weight_row(const Weight *w, int64_t n, float *out) {
    if (w->kind == W_PARTS) {
        const Weight *part = w->data;
        for (; n >= part->n; part++) n -= part->n;
        weight_row(part, n, out);
        return;
    }
    if (w->kind == W_DENSE) {
        for (int64_t i = 0; i < w->k; i++) out[i] = one_any(w->data, n * w->k + i, w->dtype);
        return;
    }
    if (w->kind == W_FILE) {
#define FILE_ROW(K) row_of_file(K, (const uint8_t *)w->data + (size_t)n * (w->k / 32 / k_blocks(K)) * raw_bytes(K), w->k, out)
        switch (w->dtype) { EACH_KIND(FILE_ROW) }
        return;
    }
#define PACKED_ROW(K) row_of_packed(K, w, n, out)
    switch (w->kind) { EACH_KIND(PACKED_ROW) }
}
