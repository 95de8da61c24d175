/* Intel's tiles (AMX): up to sixteen rows of activations with a (group, block) in one instruction. Included by tiles.c, behind
 * tile_avx512.h, which serves the few rows for which a tile brings nothing.
 *
 * A packed (group, block) of eight lines is a tile of B as it lies. Other formats are decoded to signed bytes first, BLOCKS blocks of a
 * group at a time, once for all rows of the call. The int32 of a block is exact, and scales are applied per block in the order of
 * tile_avx512.h, with the same roundings: a row's bits do not depend on which of the two computed it.
 *
 * Rows are cut into equal tiles; the last one begins early enough to end with the last row, so some rows are computed twice. While a tile
 * multiplies, the answers of AMX_LAG steps before are scaled.
 */
#pragma once

#ifndef EMULATED_TILES /* the tests' C in place of the instructions */
/* Numbered registers, which the compiler does not know of; "memory": their operands are in memory that it does know of. */
#define TILE_CONFIGURE(config) __asm__ __volatile__("ldtilecfg %0" : : "m"(*(config)))
#define TILE_RELEASE() __asm__ __volatile__("tilerelease" : :)
#define TILE_ZERO(t) __asm__ __volatile__("tilezero %%tmm" #t : :)
#define TILE_LOAD(t, from, stride) \
    __asm__ __volatile__("tileloadd (%0,%1,1), %%tmm" #t : : "r"(from), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(t, to, stride) \
    __asm__ __volatile__("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(stride)) : "memory")
#define TILE_DOT(c, a, b) __asm__ __volatile__("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :) /* c += a · b, all signed */
#endif

#define TILE_HEIGHT 16 /* rows of activations in a tile */
#ifndef AMX_BLOCKS
#define AMX_BLOCKS 16 /* decoded at a time: 10 KB next to as much of the activations in the first-level cache */
#endif
#ifndef AMX_LAG
#define AMX_LAG 2 /* steps from a product to its scales: a load waits until the tile's store has left the pipeline */
#endif
#define AMX_ANSWERS (AMX_LAG < 4 ? 4 : AMX_LAG < 8 ? 8 : 16)

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
    _Alignas(64) float scale[AMX_BLOCKS][2][LANES]; /* of both halves; with minima of 32 columns: scale and zero point */
    _Alignas(64) float zero[AMX_BLOCKS][2][LANES];  /* zero points of both halves */
} AmxBlocks;

/* Blocks first.. of group g. What they read of the next group is fetched meanwhile. */
INLINE void amx_decode(int kind, const Weight *w, int g, int first, int count, AmxBlocks *out) {
    const int kb = w->k / 32, lines = k_lines(kind), super = k_blocks(kind);
    const uint8_t *data = w_data(w, g) + (size_t)first * 64 * lines;
    const uint8_t *scale = w_scale(w, g) + (size_t)(first / super) * k_scale_step(kind);
    const size_t ahead = (size_t)kb * lines * 64, ahead_scale = (size_t)(kb / super) * k_scale_step(kind);
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
            UNROLL for (int j = 0; j < lines; j++) __builtin_prefetch(data + ahead + 64 * j, 0, 2);
            __builtin_prefetch(scale + ahead_scale + 40 * sub, 0, 2);
            if (kind == W_Q8) continue; /* its lines are codes already */
            __m512i v[8];
            block_codes(kind, table, data, v);
            UNROLL for (int j = 0; j < 8; j++)
                _mm512_store_si512(out->codes[b + sub][j], zero ? _mm512_sub_epi8(v[j], _mm512_set1_epi8((char)zero)) : v[j]);
        }
    }
}

typedef struct { /* one tile's rows over some blocks */
    const int8_t *codes;           /* [steps][columns / 4][64] */
    const float (*scale)[2][LANES]; /* [blocks] */
    const float (*zero)[2][LANES];
    const int8_t *x;               /* [rows, ldx] */
    const Blk *blk;                /* [rows, ldblk] */
    int64_t ldx, ldblk;
    int steps;
    const float *from;             /* [rows][16] the sums so far; NULL: none */
    float *to;
} AmxTile;

/* Tile registers are part of an instruction: n is a constant. */
INLINE void amx_multiply(int n, const int8_t *x, int64_t ldx, const int8_t *codes, int32_t *answer) {
#define AMX_MULTIPLY(c, a, b)   \
    TILE_ZERO(c);               \
    TILE_LOAD(a, x, ldx);       \
    TILE_LOAD(b, codes, 64);    \
    TILE_DOT(c, a, b);          \
    TILE_STORE(c, answer, 64)
    switch (n) {
    case 0: AMX_MULTIPLY(0, 4, 6); break;
    case 1: AMX_MULTIPLY(1, 5, 7); break;
    case 2: AMX_MULTIPLY(2, 4, 6); break;
    default: AMX_MULTIPLY(3, 5, 7);
    }
#undef AMX_MULTIPLY
}

/* columns: of a step; minima: blocks have zero points; MT: rows. All three are constants. */
INLINE void amx_tile(int columns, int minima, int MT, const AmxTile *t) {
    _Alignas(64) int32_t answers[AMX_ANSWERS][TILE_HEIGHT][LANES];
    const int halves = 32 / columns, steps = t->steps;
    const int64_t ldx = t->ldx, ldblk = t->ldblk;
    vf sum[TILE_HEIGHT];
    UNROLL for (int m = 0; m < MT; m++) sum[m] = t->from ? vf_load(t->from + LANES * m) : vf_set(0.0f);
    for (int base = 0; base < steps + AMX_LAG; base += 4) {
        UNROLL for (int n = 0; n < 4; n++) {
            const int now = base + n, then = now - AMX_LAG;
            if (now < steps) {
                const int8_t *x = t->x + (int64_t)columns * now, *codes = t->codes + (int64_t)columns * 16 * now;
                amx_multiply(n, x, ldx, codes, answers[now % AMX_ANSWERS][0]);
            }
            if (then < 0 || then >= steps) continue;
            const vf d = vf_load(t->scale[then / halves][then % halves]);
            const Blk *row = t->blk + then / halves;
            const int32_t(*answer)[LANES] = (const int32_t(*)[LANES])answers[then % AMX_ANSWERS];
            UNROLL for (int m = 0; m < MT; m++, row += ldblk)
                sum[m] = vf_fma(vf_mul(vi_to_float(vi_load(answer[m])), vf_set(row->d)), d, sum[m]);
            if (!minima) continue;
            const vf zero_point = vf_load(columns == 16 ? t->zero[then / 2][then % 2] : t->scale[then][1]);
            row = t->blk + then / halves;
            UNROLL for (int m = 0; m < MT; m++, row += ldblk)
                sum[m] = vf_fma(zero_point, vf_set(zero_weight(row, 4 * (then % halves), columns / 4)), sum[m]);
        }
    }
    UNROLL for (int m = 0; m < MT; m++) vf_store(t->to + LANES * m, sum[m]);
}

#define AMX_CASE(columns, minima, MT) case MT: amx_tile(columns, minima, MT, t); break;
#define AMX_CASES(columns, minima)                                                                                   \
    switch (rows) {                                                                                                  \
    AMX_CASE(columns, minima, 5) AMX_CASE(columns, minima, 6) AMX_CASE(columns, minima, 7)                           \
    AMX_CASE(columns, minima, 8) AMX_CASE(columns, minima, 9) AMX_CASE(columns, minima, 10)                          \
    AMX_CASE(columns, minima, 11) AMX_CASE(columns, minima, 12) AMX_CASE(columns, minima, 13)                        \
    AMX_CASE(columns, minima, 14) AMX_CASE(columns, minima, 15) AMX_CASE(columns, minima, 16)                        \
    }
static void amx_plain(int rows, const AmxTile *t) { AMX_CASES(32, 0) }
static void amx_minima(int rows, const AmxTile *t) { AMX_CASES(32, 1) }
static void amx_halves(int rows, const AmxTile *t) { AMX_CASES(16, 0) }
static void amx_halves_minima(int rows, const AmxTile *t) { AMX_CASES(16, 1) }

/* tile[mc][16]: AMX_ROWS to STEP_ROWS rows */
INLINE void amx_group(int kind, const Weight *w, int g, const QActs *a, int m0, int mc, float *tile) {
    AmxBlocks blocks;
    _Alignas(64) float sums[STEP_ROWS * LANES]; /* between blocks, tile by tile */
    const int kb = w->k / 32, columns = k_columns(kind), tiles = (mc + TILE_HEIGHT - 1) / TILE_HEIGHT, rows = (mc + tiles - 1) / tiles;
    tiles_configure(rows, columns);
    for (int first = 0; first < kb; first += AMX_BLOCKS) {
        const int count = kb - first < AMX_BLOCKS ? kb - first : AMX_BLOCKS;
        const int8_t *codes = kind == W_Q8 ? (const int8_t *)w_data(w, g) + (size_t)first * 512 : blocks.codes[0][0];
        amx_decode(kind, w, g, first, count, &blocks);
        for (int i = 0; i < tiles; i++) {
            const int from = i < tiles - 1 ? i * rows : mc - rows;
            float *kept = sums + (int64_t)i * rows * LANES;
            const AmxTile t = {
                .codes = codes, .scale = (const float (*)[2][LANES])blocks.scale, .zero = (const float (*)[2][LANES])blocks.zero,
                .x = a->q + (int64_t)(m0 + from) * a->k + 32 * first, .ldx = a->k,
                .blk = a->blk + (int64_t)(m0 + from) * kb + first, .ldblk = kb,
                .steps = count * (32 / columns),
                .from = first ? kept : NULL, .to = first + count < kb ? kept : tile + (int64_t)from * LANES,
            };
            if (columns == 16 && k_min(kind)) amx_halves_minima(rows, &t);
            else if (columns == 16) amx_halves(rows, &t);
            else if (k_min(kind)) amx_minima(rows, &t);
            else amx_plain(rows, &t);
        }
    }
}
