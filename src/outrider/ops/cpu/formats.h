/* Quantised weights: GGUF's block formats as they lie in a file, and the same values laid out for the kernels.
 *
 * Packed, a weight is cut into groups of 16 rows and blocks of 32 columns. A (group, block) is a few lines of 64 bytes;
 * in every line a row (lane) owns one word of four bytes, so that one integer dot-product instruction advances 16
 * outputs: nibbles  4 lines: byte c of word j holds columns 4j + c (low half) and 16 + 4j + c (high half) bytes    8
 * lines: byte c of word j is column 4j + c pairs    2 lines: bits 2j, 2j + 1 of byte c of the first are the code of
 * column 4j + c; the second has columns 16 and up one bit  1 line:  bit j of byte c belongs to column 4j + c Codes of 5
 * bits are nibbles and one bit, of 6 bits nibbles and pairs, of 2 bits pairs, of 3 bits pairs and one bit. Scales are a
 * stream of their own. Formats without super-blocks: for each (group, block) 16 numbers of 16 bits, then 16 minima if
 * the format has them. With super-blocks of 256: for each (group, super-block) 16 float16 (and 16 for the minima), then
 * for each of 8 blocks 16 bytes a scale. Nothing is rounded.
 *
 * Several formats of files have one layout here: IQ1, IQ2 and Q3_K are codes of 3 bits, IQ3 and IQ4_XS of 4, which
 * stand for the values of a table. Ternary weights are Q2_K whose scales and minima are 1.
 */
#pragma once
#include "vec.h"

enum {
    W_NONE,
    W_DENSE,
    W_Q4M,  /* Q4_1: nibble·d + m */
    W_Q4,   /* Q4_0: (nibble - 8)·d */
    W_Q8,   /* Q8_0: int8·d */
    W_Q5,   /* Q5_0: (q - 16)·d */
    W_Q5M,  /* Q5_1: q·d + m */
    W_Q4K,  /* Q4_K: q·(d·scale) - dmin·min */
    W_Q5K,  /* Q5_K */
    W_Q6K,  /* Q6_K: (q - 32)·(d·scale), a scale for 16 columns */
    W_IQ4,  /* IQ4_NL: table[nibble]·d */
    W_T4,   /* table[nibble]·(d·unit·scale) */
    W_Q2K, /* Q2_K: q·(d·scale) - dmin·min, for 16 columns: a byte with the scale in its low half and the minimum in its
              high half */
    W_T3, /* table[q]·(d·unit·scale), 3 bits */
    W_T3H, /* the same with a scale for 16 columns */
    W_F4, /* table[nibble]·d, where d is a bfloat16 */
    W_PARTS, /* rows of several weights, one after the other: data is a Weight[dtype]; all but the last have whole
                groups */
    W_FILE /* rows as they lie in the file, of the file's type `dtype`: only ever looked up */
};

typedef struct {
    int32_t kind, n, k, dtype; /* dtype: of dense data; a table of codes (T_...); see W_PARTS, W_FILE */
    const void *data;          /* dense: [n, k]; packed: [groups][k / 32][lines] of 64 bytes */
    const void *scale;
} Weight;

typedef struct { int8_t value[16]; float unit; } CodeTable;
enum { T_IQ4, T_IQ3_XXS, T_IQ3_S, T_IQ2, T_IQ1, T_Q3, T_FP4 };
static const CodeTable code_tables[] = {
    {{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}, 1.0f},
    {{4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62}, 0.25f},
    {{1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15}, 1.0f},
    {{8, 25, 43, 0, -8, -25, -43, 0}, 0.125f},
    {{-7, 1, 9, 0, -9, -1, 7, 0}, 0.125f},
    {{-32, -24, -16, -8, 0, 8, 16, 24}, 0.125f}, /* eight times the code less 4: IQ2's unit */
    {{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}, 1.0f},
};

INLINE int k_lines(int kind) { /* 64-byte lines of a (group, block) */
    switch (kind) {
    case W_Q2K: return 2;
    case W_T3: case W_T3H: return 3;
    case W_Q5: case W_Q5M: case W_Q5K: return 5;
    case W_Q6K: return 6;
    case W_Q8: return 8;
    default: return 4;
    }
}
INLINE int k_super(int kind) {
    return kind == W_Q4K || kind == W_Q5K || kind == W_Q6K || kind == W_T4 || kind == W_Q2K || kind == W_T3 ||
           kind == W_T3H;
}
INLINE int k_min(int kind) { return kind == W_Q4M || kind == W_Q5M || kind == W_Q4K || kind == W_Q5K || kind == W_Q2K; }
INLINE int k_table(int kind) { return kind == W_IQ4 || kind == W_T4 || kind == W_T3 || kind == W_T3H || kind == W_F4; }
INLINE int k_columns(int kind) {
    return kind == W_Q6K || kind == W_Q2K || kind == W_T3H ? 16 : 32;
} /* under one scale */
INLINE int k_halves(int kind) { return k_min(kind) ? 32 : 16; } /* numbers of 16 bits at the front */
INLINE int k_bytes(int kind) {
    return kind == W_T4 || kind == W_T3 ? 16 : k_super(kind) ? 32 : 0;
} /* byte scales of a block */
INLINE size_t k_scale_step(int kind) { /* bytes of scales for a block, or for a super-block of 8 */
    return (size_t)k_halves(kind) * 2 + 8 * (size_t)k_bytes(kind);
}
INLINE int k_blocks(int kind) { return k_super(kind) ? 8 : 1; } /* blocks that share a step of scales */
INLINE int w_groups(const Weight *w) { return (w->n + LANES - 1) / LANES; }
INLINE const uint8_t *w_data(const Weight *w, int64_t g) {
    return (const uint8_t *)w->data + (size_t)g * (w->k / 32) * 64 * k_lines(w->kind);
}
INLINE const uint8_t *w_scale(const Weight *w, int64_t g) {
    return (const uint8_t *)w->scale + (size_t)g * (w->k / 32 / k_blocks(w->kind)) * k_scale_step(w->kind);
}
INLINE const CodeTable *w_table(const Weight *w) { return k_table(w->kind) ? code_tables + w->dtype : code_tables; }
INLINE uint16_t half_at(const uint8_t *p) { uint16_t h; memcpy(&h, p, 2); return h; }
INLINE uint32_t word_at(const uint8_t *p) { uint32_t w; memcpy(&w, p, 4); return w; }

typedef struct { float d[2], lift[2]; } Scales; /* of columns 0..15 and 16..31 of a block; value = code·d + lift */

/* ---- as in the file ---- */
enum { /* types of a file's tensors: FILE_TYPES of lib.py in their order */
       F_Q4_1,
       F_Q4_0,
       F_Q8_0,
       F_Q5_0,
       F_Q5_1,
       F_Q4_K,
       F_Q5_K,
       F_Q6_K,
       F_IQ4_NL,
       F_IQ4_XS,
       F_Q2_K,
       F_Q3_K,
       F_IQ1_S,
       F_IQ1_M,
       F_IQ2_XXS,
       F_IQ2_XS,
       F_IQ2_S,
       F_IQ3_XXS,
       F_IQ3_S,
       F_TQ1_0,
       F_TQ2_0,
       F_MXFP4
};
typedef struct { uint8_t kind, table, bytes; } FileType; /* bytes: of a block, or a super-block */
static const FileType file_types[] = {
    {W_Q4M, 0, 20},     {W_Q4, 0, 18},      {W_Q8, 0, 34},         {W_Q5, 0, 22},        {W_Q5M, 0, 24},
    {W_Q4K, 0, 144},    {W_Q5K, 0, 176},    {W_Q6K, 0, 210},       {W_IQ4, T_IQ4, 18},   {W_T4, T_IQ4, 136},
    {W_Q2K, 0, 84},     {W_T3H, T_Q3, 110}, {W_T3, T_IQ1, 50},     {W_T3H, T_IQ1, 56},   {W_T3, T_IQ2, 66},
    {W_T3H, T_IQ2, 74}, {W_T3H, T_IQ2, 82}, {W_T4, T_IQ3_XXS, 98}, {W_T4, T_IQ3_S, 110}, {W_Q2K, 0, 54},
    {W_Q2K, 0, 66},     {W_F4, T_FP4, 17},
};

/* Points of a lattice: [points][8] indexes of magnitudes, of IQ3 [points][4]. Given by Python (or_grids). */
enum { G_IQ1, G_IQ2_XXS, G_IQ2_XS, G_IQ2_S, G_IQ3_XXS, G_IQ3_S, GRIDS };
extern __attribute__((visibility("hidden"))) const uint8_t *grid_points[GRIDS];

INLINE void eight_codes(const uint8_t *point, uint32_t signs, uint8_t *q) { /* IQ1, IQ2: the sign above two bits */
    for (int i = 0; i < 8; i++) q[i] = (uint8_t)(point[i] | ((signs >> i) & 1) << 2);
}
INLINE void twice_four_codes(const uint8_t *front, const uint8_t *back, uint32_t signs,
                             uint8_t *q) { /* IQ3: the sign above three bits */
    for (int i = 0; i < 8; i++) q[i] = (uint8_t)((i < 4 ? front[i] : back[i - 4]) | ((signs >> i) & 1) << 3);
}
INLINE uint32_t with_parity(uint32_t seven) { /* an eighth sign makes the number of signs even */
    uint32_t folded = seven ^ seven >> 4;
    folded ^= folded >> 2;
    return seven | ((folded ^ folded >> 1) & 1) << 7;
}
static void lattice_codes(int type, const uint8_t *p, int sub, uint8_t *q) { /* four points, of IQ3 eight */
    for (int l = 0; l < 4; l++, q += 8) {
        uint32_t at, more;
        switch (type) {
        case F_IQ1_S:
            more = half_at(p + 34 + 2 * sub);
            at = p[2 + 4 * sub + l] | ((more >> 3 * l) & 7) << 8;
            eight_codes(grid_points[G_IQ1] + 8 * at, more & 0x8000 ? 255 : 0, q);
            break;
        case F_IQ1_M:
            more = p[32 + 2 * sub + l / 2] >> 4 * (l & 1);
            eight_codes(grid_points[G_IQ1] + 8 * (p[4 * sub + l] | (more & 7) << 8), more & 8 ? 255 : 0, q);
            break;
        case F_IQ2_XXS:
            more = word_at(p + 6 + 8 * sub);
            eight_codes(grid_points[G_IQ2_XXS] + 8 * p[2 + 8 * sub + l], with_parity((more >> 7 * l) & 127), q);
            break;
        case F_IQ2_XS:
            more = half_at(p + 2 + 8 * sub + 2 * l);
            eight_codes(grid_points[G_IQ2_XS] + 8 * (more & 511), with_parity(more >> 9), q);
            break;
        case F_IQ2_S:
            at = p[2 + 4 * sub + l] | (uint32_t)((p[66 + sub] >> 2 * l) & 3) << 8;
            eight_codes(grid_points[G_IQ2_S] + 8 * at, p[34 + 4 * sub + l], q);
            break;
        case F_IQ3_XXS: {
            const uint8_t *points = p + 2 + 8 * sub + 2 * l, *grid = grid_points[G_IQ3_XXS];
            more = word_at(p + 66 + 4 * sub);
            twice_four_codes(grid + 4 * points[0], grid + 4 * points[1], with_parity((more >> 7 * l) & 127), q);
            break;
        }
        default: { /* IQ3_S */
            const uint8_t *points = p + 2 + 8 * sub + 2 * l, *grid = grid_points[G_IQ3_S];
            more = p[66 + sub] >> 2 * l;
            twice_four_codes(grid + 4 * (points[0] | (more & 1) << 8), grid + 4 * (points[1] | (more & 2) << 7),
                             p[74 + 4 * sub + l], q);
        }
        }
    }
}
static void trits(const uint8_t *p, int sub,
                  uint8_t *q) { /* TQ1_0: a byte is five, or four, digits of a fraction to the base of three */
    static const uint8_t power[5] = {1, 3, 9, 27, 81};
    for (int i = 0; i < 32; i++) {
        const int e = 32 * sub + i, at = e < 160 ? e % 32 : e < 240 ? 32 + e % 16 : 48 + e % 4;
        const int digit = e < 160 ? e / 32 : e < 240 ? (e - 160) / 16 : (e - 240) / 4;
        q[i] = (uint8_t)(3 * (uint8_t)(p[at] * power[digit]) >> 8);
    }
}

/* The unsigned codes of block `sub` of the super-block at `p` (sub = 0 without super-blocks). Q8_0: the bytes
 * themselves */
static void raw_codes(int type, const uint8_t *p, int sub, uint8_t *q) {
    const uint8_t *low;
    uint32_t fifth = 0;
    switch (type) {
    case F_Q8_0: memcpy(q, p + 2, 32); return;
    case F_Q2_K: case F_Q3_K: case F_TQ2_0:
        low = p + (type == F_Q2_K ? 16 : type == F_Q3_K ? 32 : 0) + 32 * (sub / 4);
        for (int i = 0; i < 32; i++) q[i] = (low[i] >> 2 * (sub & 3)) & 3;
        if (type == F_Q3_K) for (int i = 0; i < 32; i++) q[i] |= (uint8_t)(((p[i] >> sub) & 1) << 2);
        return;
    case F_TQ1_0: trits(p, sub, q); return;
    case F_IQ1_S:
    case F_IQ1_M:
    case F_IQ2_XXS:
    case F_IQ2_XS:
    case F_IQ2_S:
    case F_IQ3_XXS:
    case F_IQ3_S: lattice_codes(type, p, sub, q); return;
    case F_Q4_K: case F_Q5_K:
        low = p + (type == F_Q4_K ? 16 : 48) + 32 * (sub / 2);
        for (int i = 0; i < 32; i++) q[i] = sub & 1 ? low[i] >> 4 : low[i] & 15;
        if (type == F_Q5_K) for (int i = 0; i < 32; i++) q[i] |= (uint8_t)(((p[16 + i] >> sub) & 1) << 4);
        return;
    case F_Q6_K: {
        const uint8_t *high = p + 128 + 32 * (sub / 4);
        low = p + 64 * (sub / 4) + 32 * (sub & 1);
        const int top = sub & 2, shift = 2 * (sub & 3);
        for (int i = 0; i < 32; i++)
            q[i] = (uint8_t)((top ? low[i] >> 4 : low[i] & 15) | (((high[i] >> shift) & 3) << 4));
        return;
    }
    case F_Q4_1: low = p + 4; break;
    case F_Q5_0: low = p + 6; memcpy(&fifth, p + 2, 4); break;
    case F_Q5_1: low = p + 8; memcpy(&fifth, p + 4, 4); break;
    case F_IQ4_XS: low = p + 8 + 16 * sub; break;
    case F_MXFP4: low = p + 1; break;
    default: low = p + 2; /* Q4_0, IQ4_NL */
    }
    for (int i = 0; i < 16; i++) q[i] = low[i] & 15, q[16 + i] = low[i] >> 4;
    if (type == F_Q5_0 || type == F_Q5_1) for (int i = 0; i < 32; i++) q[i] |= (uint8_t)(((fifth >> i) & 1) << 4);
}
/* The byte scales of block `sub`: of Q4_K and Q5_K scale and minimum, else those of columns 0..15 and 16..31 (b: only
 * if there are two) */
static void raw_byte_scales(int type, const uint8_t *p, int sub, uint8_t *a, uint8_t *b) {
    const uint8_t *s = p + 4;
    uint32_t bits;
    switch (type) {
    case F_Q2_K: *a = p[2 * sub]; *b = p[2 * sub + 1]; return;
    case F_TQ1_0: case F_TQ2_0: *a = *b = 0x11; return;
    case F_Q3_K:
        for (int h = 0; h < 2; h++) {
            const int i = 2 * sub + h, low = i < 8 ? p[96 + i] & 15 : p[88 + i] >> 4,
                      high = (p[104 + i % 4] >> 2 * (i / 4)) & 3;
            *(h ? b : a) = (uint8_t)((low | high << 4) - 32);
        }
        return;
    case F_Q6_K: *a = p[192 + 2 * sub]; *b = p[193 + 2 * sub]; return;
    case F_IQ4_XS:
        *a = (uint8_t)((((p[4 + sub / 2] >> 4 * (sub & 1)) & 15) | (((half_at(p + 2) >> 2 * sub) & 3) << 4)) - 32);
        return;
    case F_IQ1_S: *a = (uint8_t)(2 * ((half_at(p + 34 + 2 * sub) >> 12) & 7) + 1); return;
    case F_IQ1_M:
        bits = half_at(p + 48 + 2 * (sub / 2)) >> 6 * (sub & 1);
        *a = (uint8_t)(2 * (bits & 7) + 1);
        *b = (uint8_t)(2 * ((bits >> 3) & 7) + 1);
        return;
    case F_IQ2_XXS: *a = (uint8_t)(2 * (p[9 + 8 * sub] >> 4) + 1); return;
    case F_IQ2_XS: case F_IQ2_S:
        bits = p[(type == F_IQ2_XS ? 66 : 74) + sub];
        *a = (uint8_t)(2 * (bits & 15) + 1);
        *b = (uint8_t)(2 * (bits >> 4) + 1);
        return;
    case F_IQ3_XXS: *a = (uint8_t)(2 * (p[69 + 4 * sub] >> 4) + 1); return;
    case F_IQ3_S: *a = (uint8_t)(2 * ((p[106 + sub / 2] >> 4 * (sub & 1)) & 15) + 1); return;
    }
    if (sub < 4) { *a = s[sub] & 63; *b = s[sub + 4] & 63; } /* Q4_K, Q5_K */
    else {
        *a = (uint8_t)((s[sub + 4] & 15) | ((s[sub - 4] >> 6) << 4));
        *b = (uint8_t)((s[sub + 4] >> 4) | ((s[sub] >> 6) << 4));
    }
}
/* The numbers of 16 bits at the front of the scales: d, and of the minima */
static uint16_t raw_half(int type, const uint8_t *p, int which) {
    switch (type) {
    case F_Q2_K: return half_at(p + 80 + 2 * which);
    case F_Q3_K: return half_at(p + 108);
    case F_Q6_K: return half_at(p + 208);
    case F_TQ1_0: return half_at(p + 52);
    case F_TQ2_0: return half_at(p + 64);
    case F_IQ1_M: return (uint16_t)(p[49] >> 4 | (p[51] & 0xf0) | (p[53] & 0xf0) << 4 | (p[55] & 0xf0) << 8);
    case F_MXFP4:
        return (uint16_t)(*p < 2 ? 0x20 << *p
                                 : (*p - 1) << 7); /* half of two to the power of (byte - 127), as bfloat16 */
    default: return half_at(p + 2 * which);
    }
}

/* ---- decoding ---- */
INLINE Scales make_scales(int kind, float unit, uint16_t first, uint16_t second, uint8_t a, uint8_t b) {
    const float d = kind == W_F4 ? bits_float((uint32_t)first << 16) : half_float(first) * unit;
    Scales s = {{d, d}, {0.0f, 0.0f}};
    if (kind == W_Q2K) {
        const float minimum = half_float(second);
        s.d[0] = d * (float)(a & 15), s.d[1] = d * (float)(b & 15);
        s.lift[0] = -(minimum * (float)(a >> 4)), s.lift[1] = -(minimum * (float)(b >> 4));
    } else if (k_super(kind) && k_columns(kind) == 16) { s.d[0] = d * (float)(int8_t)a; s.d[1] = d * (float)(int8_t)b; }
    else if (k_super(kind) && k_table(kind)) s.d[0] = s.d[1] = d * (float)(int8_t)a;
    else if (k_super(kind)) {
        s.d[0] = s.d[1] = d * (float)a;
        s.lift[0] = s.lift[1] = -(half_float(second) * (float)b);
    } else if (k_min(kind)) s.lift[0] = s.lift[1] = half_float(second);
    return s;
}
INLINE int code_value(int kind, const CodeTable *table, uint8_t q) {
    switch (kind) {
    case W_Q8: return (int8_t)q;
    case W_Q4: return q - 8;
    case W_Q5: return q - 16;
    case W_Q6K: return q - 32;
    default: return k_table(kind) ? table->value[q] : q;
    }
}
INLINE void block_floats(int kind, const CodeTable *table, const uint8_t *q, Scales s, float *out) {
    for (int i = 0; i < 32; i++) {
        const float v = s.d[i >> 4] * (float)code_value(kind, table, q[i]);
        out[i] = k_min(kind) ? v + s.lift[i >> 4] : v;
    }
}
/* The codes of one lane of a packed (group, block) */
INLINE void lane_codes(int kind, const uint8_t *data, int lane, uint8_t *q) {
    const int lines = k_lines(kind), bit = lines == 3 ? 2 : 4; /* the bit, or the lower of two, that lies apart */
    data += 4 * lane;
    if (lines == 8) { for (int j = 0; j < 8; j++) memcpy(q + 4 * j, data + 64 * j, 4); return; }
    if (lines < 4) for (int i = 0; i < 32; i++) q[i] = (data[64 * (i >> 4) + (i & 3)] >> 2 * ((i >> 2) & 3)) & 3;
    else for (int j = 0; j < 4; j++)
        for (int c = 0; c < 4; c++) q[4 * j + c] = data[64 * j + c] & 15, q[16 + 4 * j + c] = data[64 * j + c] >> 4;
    if (lines & 1)
        for (int i = 0; i < 32; i++) q[i] |= (uint8_t)(((data[64 * (lines - 1) + (i & 3)] >> (i >> 2)) & 1) << bit);
    if (lines == 6)
        for (int i = 0; i < 32; i++)
            q[i] |= (uint8_t)(((data[256 + 64 * (i >> 4) + (i & 3)] >> 2 * ((i >> 2) & 3)) & 3) << bit);
}

#define EACH_KIND(DO)                                                                                                  \
    case W_Q4M: DO(W_Q4M); break;                                                                                      \
    case W_Q4: DO(W_Q4); break;                                                                                        \
    case W_Q8: DO(W_Q8); break;                                                                                        \
    case W_Q5: DO(W_Q5); break;                                                                                        \
    case W_Q5M: DO(W_Q5M); break;                                                                                      \
    case W_Q4K: DO(W_Q4K); break;                                                                                      \
    case W_Q5K: DO(W_Q5K); break;                                                                                      \
    case W_Q6K: DO(W_Q6K); break;                                                                                      \
    case W_IQ4: DO(W_IQ4); break;                                                                                      \
    case W_T4: DO(W_T4); break;                                                                                        \
    case W_Q2K: DO(W_Q2K); break;                                                                                      \
    case W_T3: DO(W_T3); break;                                                                                        \
    case W_T3H: DO(W_T3H); break;                                                                                      \
    case W_F4: DO(W_F4); break;

INLINE void row_of_file(int kind, int type, const uint8_t *p, int k, float *out) {
    const CodeTable *table = code_tables + file_types[type].table;
    uint8_t q[32], a = 0, b = 0;
    for (int at = 0; at < k; p += file_types[type].bytes)
        for (int sub = 0; sub < k_blocks(kind); sub++, at += 32) {
            raw_codes(type, p, sub, q);
            if (k_super(kind)) raw_byte_scales(type, p, sub, &a, &b);
            block_floats(kind, table, q,
                         make_scales(kind, table->unit, raw_half(type, p, 0), raw_half(type, p, 1), a, b), out + at);
        }
}
INLINE void row_of_packed(int kind, const Weight *w, int64_t n, float *out) {
    const int lane = (int)(n % LANES);
    const CodeTable *table = w_table(w);
    const uint8_t *data = w_data(w, n / LANES), *scale = w_scale(w, n / LANES);
    uint8_t q[32];
    for (int b = 0; b < w->k / 32; b++, data += 64 * k_lines(kind)) {
        const int sub = b % k_blocks(kind);
        const uint8_t *bytes = scale + 2 * k_halves(kind) + sub * k_bytes(kind) + lane;
        const uint16_t first = half_at(scale + 2 * lane),
                       second = half_at(scale + 2 * lane + (k_halves(kind) == 32 ? 32 : 0));
        lane_codes(kind, data, lane, q);
        block_floats(kind, table, q,
                     make_scales(kind, table->unit, first, second, k_bytes(kind) ? bytes[0] : 0,
                                 k_bytes(kind) == 32 ? bytes[16] : 0),
                     out + 32 * b);
        if (sub == k_blocks(kind) - 1) scale += k_scale_step(kind);
    }
}

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
        const FileType *type = file_types + w->dtype;
        const uint8_t *row = (const uint8_t *)w->data + (size_t)n * (w->k / 32 / k_blocks(type->kind)) * type->bytes;
#define FILE_ROW(K) row_of_file(K, w->dtype, row, w->k, out)
        switch (type->kind) { EACH_KIND(FILE_ROW) }
        return;
    }
#define PACKED_ROW(K) row_of_packed(K, w, n, out)
    switch (w->kind) { EACH_KIND(PACKED_ROW) }
}
