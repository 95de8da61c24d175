/* Intel's tiles (AMX): up to sixteen rows of activations with a (group, block) in one instruction. Included by tiles.c,
 * behind tile_avx512.h, which serves the few rows for which a tile brings nothing.
 *
 * A packed (group, block) of eight lines is a tile of B as it lies. Other formats are decoded to signed bytes first,
 * AMX_BLOCKS blocks of a group at a time, once for all rows of the call. Activations lie in tiles already (product.h).
 * The int32 of a block is exact, and scales are applied per block in the order of tile_avx512.h, with the same
 * roundings: a row's bits do not depend on which of the two computed it.
 *
 * A step is a product of a tile of activations with a block. What it stores is scaled AMX_LAG steps later: a load must
 * wait until the tile's store has left the core. What a tile reads is small enough for half a first-level cache, which
 * the other thread of the core shares, and the next tile's activations are fetched into it.
 */
#pragma once

#ifndef EMULATED_TILES /* the tests' C in place of the instructions */
/* Numbered registers, unknown to the compiler; "memory": their operands are in memory that it does know of. */
#define TILE_CONFIGURE(config) __asm__ __volatile__("ldtilecfg %0" : : "m"(*(config)))
#define TILE_RELEASE() __asm__ __volatile__("tilerelease" : :)
#define TILE_ZERO(t) __asm__ __volatile__("tilezero %%tmm" #t : :)
#define TILE_LOAD(t, from, stride) \
    __asm__ __volatile__("tileloadd (%0,%1,1), %%tmm" #t : : "r"(from), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(t, to, stride) \
    __asm__ __volatile__("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(stride)) : "memory")
#define TILE_DOT(c, a, b)                                                                                              \
    __asm__ __volatile__("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :) /* c += a · b, all signed */
#endif

#define AMX_BLOCKS 8 /* decoded at a time: 4 KB */
#define AMX_LAG 2 /* steps from a product to its scales */
#define AMX_ANSWERS 4 /* in memory at a time */
#define AMX_PREFETCH_BYTES 4096 /* from the lines that are decoded to those that are fetched */

typedef struct { /* as LDTILECFG reads it */
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;
_Static_assert(sizeof(TileConfig) == 64, "LDTILECFG reads 64 bytes");

/* The shape of this thread's tiles: activation rows, and columns of a product (32, or 16 under one scale); 0: none */
static _Thread_local struct { int rows, columns; } tile_shape;

/* Tiles 0 to 3: answers; 4, 5: activations; 6, 7: codes */
static void tiles_configure(int rows, int columns) {
    if (tile_shape.rows == rows && tile_shape.columns == columns) return;
    TileConfig config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.rows[t] = (uint8_t)(t < 6 ? rows : columns / 4);
        config.row_bytes[t] = (uint16_t)(t == 4 || t == 5 ? columns : 64);
    }
    TILE_CONFIGURE(&config);
    tile_shape.rows = rows;
    tile_shape.columns = columns;
}
void tiles_release(void) {
    if (tile_shape.rows) TILE_RELEASE();
    tile_shape.rows = 0;
}

typedef struct { /* some blocks of a group, decoded */
    _Alignas(64) int8_t codes[AMX_BLOCKS][8][64];
    _Alignas(64) float scale[AMX_BLOCKS][2][LANES]; /* of both halves; with minima of 32 columns: scale, zero point */
    _Alignas(64) float zero[AMX_BLOCKS][2][LANES];  /* zero points of both halves */
} AmxBlocks;

/* Blocks first.. of group g. */
INLINE void amx_decode(int kind, const Weight *w, int g, int first, int count, AmxBlocks *out) {
    const int lines = k_lines(kind), super = k_blocks(kind);
    const uint8_t *data = w_data(w, g) + (size_t)first * 64 * lines;
    const uint8_t *scale = w_scale(w, g) + (size_t)(first / super) * k_scale_step(kind);
    const size_t scale_prefetch = AMX_PREFETCH_BYTES / (size_t)(64 * lines * super) * k_scale_step(kind);
    const int zero = kind == W_Q4 ? 8 : kind == W_Q5 ? 16 : kind == W_Q6K ? 32 : k_table(kind) ? 128 : 0;
    const CodeTable *table = w_table(w);
    for (int b = 0; b < count; b += super, scale += k_scale_step(kind)) {
        const vf d = vf_front(kind, table, scale);
        const vf lift = k_min(kind) ? vf_half((const uint16_t *)scale + 16) : d;
        for (int sub = 0; sub < super; sub++, data += 64 * lines) {
            const uint8_t *bytes = scale + 2 * k_halves(kind) + sub * k_bytes(kind);
            vf front = d, second = k_min(kind) ? lift : d;
            if (kind == W_Q2K) {
                front = vf_mul(d, vf_nibble(bytes, 0));
                second = vf_mul(d, vf_nibble(bytes + 16, 0));
                UNROLL for (int h = 0; h < 2; h++)
                    vf_store(out->zero[b + sub][h], vf_mul(vf_sub(vf_set(0.0f), lift), vf_nibble(bytes + 16 * h, 1)));
            } else if (k_super(kind)) {
                front = vf_mul(d, k_min(kind) ? vf_u8(bytes) : vf_i8(bytes));
                if (k_min(kind)) second = vf_mul(vf_sub(vf_set(0.0f), lift), vf_u8(bytes + 16));
                if (k_columns(kind) == 16) second = vf_mul(d, vf_i8(bytes + 16));
            }
            vf_store(out->scale[b + sub][0], front);
            vf_store(out->scale[b + sub][1], second);
            UNROLL for (int j = 0; j < lines; j++) __builtin_prefetch(data + AMX_PREFETCH_BYTES + 64 * j, 0, 2);
            __builtin_prefetch(scale + scale_prefetch + 40 * sub, 0, 2);
            if (kind == W_Q8) continue; /* its lines are codes already */
            __m512i v[8];
            block_codes(kind, table, data, v);
            UNROLL for (int j = 0; j < 8; j++)
                _mm512_store_si512(out->codes[b + sub][j],
                                   zero ? _mm512_sub_epi8(v[j], _mm512_set1_epi8((char)zero)) : v[j]);
        }
    }
}

typedef struct { /* a tile's rows over some blocks of a group */
    const int8_t *x;                /* [blocks][height][32] */
    const int8_t *codes;            /* [steps][columns / 4][64] */
    const Blk *blk;                 /* [blocks][height] */
    const float (*scale)[2][LANES]; /* [blocks] */
    const float (*zero)[2][LANES];
    const int8_t *next_x;           /* of the tile behind it */
    const Blk *next_blk;
    float *sums;                    /* [rows][16] */
    int height, steps;
    int begins;                     /* the sums begin with zero */
} AmxTile;

/* Tile registers are part of an instruction: c, a and b are constants. */
#define AMX_PRODUCT(c, a, b)    \
    TILE_ZERO(c);               \
    TILE_LOAD(a, x, 32);        \
    TILE_LOAD(b, codes, 64);    \
    TILE_DOT(c, a, b);          \
    TILE_STORE(c, answer, 64)

/* n: the step's number, of which the last two bits are a constant */
INLINE void amx_product(int n, const int8_t *x, const int8_t *codes, int32_t *answer) {
    switch (n % 4) {
    case 0: AMX_PRODUCT(0, 4, 6); break;
    case 1: AMX_PRODUCT(1, 5, 7); break;
    case 2: AMX_PRODUCT(2, 4, 6); break;
    default: AMX_PRODUCT(3, 5, 7);
    }
}

/* columns: of a step; minima: blocks have zero points; MT: rows. All three are constants. */
INLINE void amx_tile(int columns, int minima, int MT, const AmxTile *t) {
    _Alignas(64) int32_t answers[AMX_ANSWERS][TILE_HEIGHT][LANES];
    const int halves = 32 / columns, height = t->height;
    vf sum[TILE_HEIGHT];
    UNROLL for (int m = 0; m < MT; m++) sum[m] = t->begins ? vf_set(0.0f) : vf_load(t->sums + LANES * m);
    for (int base = 0; base < t->steps + AMX_LAG; base += AMX_ANSWERS)
        UNROLL for (int n = 0; n < AMX_ANSWERS; n++) {
            const int step = base + n, scaled = step - AMX_LAG;
            if (step < t->steps) {
                const int64_t first = (int64_t)(step / halves) * height; /* row of all blocks' */
                amx_product(n, t->x + first * 32 + columns * (step % halves), t->codes + (int64_t)columns * 16 * step,
                            answers[n][0]);
                if (step % halves == 0) {
                    UNROLL for (int i = 0; i < MT; i += 2) __builtin_prefetch(t->next_x + (first + i) * 32);
                    UNROLL for (int i = 0; i < MT; i += 4) __builtin_prefetch(t->next_blk + first + i);
                }
            }
            if (scaled < 0 || scaled >= t->steps) continue;
            const int block = scaled / halves, half = scaled % halves;
            const vf d = vf_load(t->scale[block][half]);
            const Blk *row = t->blk + (int64_t)block * height;
            const int32_t *answer = answers[(n + AMX_ANSWERS - AMX_LAG) % AMX_ANSWERS][0];
            UNROLL for (int m = 0; m < MT; m++)
                sum[m] = vf_fma(vf_mul(vi_to_float(vi_load(answer + LANES * m)), vf_set(row[m].d)), d, sum[m]);
            if (!minima) continue;
            const vf zero_point = vf_load(columns == 16 ? t->zero[block][half] : t->scale[block][1]);
            UNROLL for (int m = 0; m < MT; m++)
                sum[m] = vf_fma(zero_point, vf_set(zero_weight(row + m, 4 * half, columns / 4)), sum[m]);
        }
    UNROLL for (int m = 0; m < MT; m++) vf_store(t->sums + LANES * m, sum[m]);
}

#define AMX_CASE(MT) case MT: amx_tile(columns, minima, MT, t); break;
INLINE void amx_rows(int columns, int minima, int rows, const AmxTile *t) {
    switch (rows) {
    AMX_CASE(1) AMX_CASE(2) AMX_CASE(3) AMX_CASE(4) AMX_CASE(5) AMX_CASE(6) AMX_CASE(7) AMX_CASE(8)
    AMX_CASE(9) AMX_CASE(10) AMX_CASE(11) AMX_CASE(12) AMX_CASE(13) AMX_CASE(14) AMX_CASE(15) AMX_CASE(16)
    }
}
static void amx_plain(int rows, const AmxTile *t) { amx_rows(32, 0, rows, t); }
static void amx_minima(int rows, const AmxTile *t) { amx_rows(32, 1, rows, t); }
static void amx_halves(int rows, const AmxTile *t) { amx_rows(16, 0, rows, t); }
static void amx_halves_minima(int rows, const AmxTile *t) { amx_rows(16, 1, rows, t); }

/* tile[mc][16] of a group: rows m0.. of activations that lie in tiles */
INLINE void amx_group(int kind, const Weight *w, int g, const QActs *a, int m0, int mc, float *tile) {
    AmxBlocks blocks[2]; /* those that are multiplied, and the next */
    const int kb = a->k / 32, columns = k_columns(kind), height = a->height;
    tiles_configure(height, columns);
    amx_decode(kind, w, g, 0, kb < AMX_BLOCKS ? kb : AMX_BLOCKS, &blocks[0]);
    for (int first = 0; first < kb; first += AMX_BLOCKS) {
        const int next = first + AMX_BLOCKS, count = next < kb ? AMX_BLOCKS : kb - first, i = first / AMX_BLOCKS % 2;
        const AmxBlocks *here = &blocks[i];
        for (int row = 0, rows; row < mc; row += rows) {
            const int line = (m0 + row) % height, left = mc - row;
            rows = height - line < left ? height - line : left;
            const int last = rows == left;
            if (last && next < kb) /* their stores leave the core while this tile computes */
                amx_decode(kind, w, g, next, kb - next < AMX_BLOCKS ? kb - next : AMX_BLOCKS, &blocks[!i]);
            const int64_t place = acts_place(a, m0 + row, 32 * first);
            const int64_t then = last ? acts_place(a, m0, next < kb ? 32 * next : 0)
                                      : acts_place(a, m0 + row + rows, 32 * first);
            const AmxTile t = {
                .x = a->q + place, .blk = a->blk + place / 32,
                .codes = kind == W_Q8 ? (const int8_t *)w_data(w, g) + (size_t)first * 512 : here->codes[0][0],
                .scale = (const float (*)[2][LANES])here->scale, .zero = (const float (*)[2][LANES])here->zero,
                .next_x = a->q + then, .next_blk = a->blk + then / 32,
                .sums = tile + (int64_t)row * LANES,
                .height = height, .steps = count * (32 / columns), .begins = first == 0,
            };
            if (columns == 16 && k_min(kind)) amx_halves_minima(rows, &t);
            else if (columns == 16) amx_halves(rows, &t);
            else if (k_min(kind)) amx_minima(rows, &t);
            else amx_plain(rows, &t);
        }
    }
}
