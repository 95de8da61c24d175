/* Intel's tiles (AMX): up to sixteen rows of activations with a (group, block) in one instruction. Included by tiles.c,
 * behind tile_avx512.h, which serves the few rows for which a tile brings nothing.
 *
 * A packed (group, block) of eight lines is a tile of B as it lies. Other formats are decoded to signed bytes first,
 * AMX_BLOCKS blocks of a group at a time, once for all rows of the call. Activations lie in tiles already (product.h).
 * The int32 of a block is exact, and scales are applied per block in the order of tile_avx512.h, with the same
 * roundings: a row's bits do not depend on which of the two computed it.
 *
 * What a tile stores reaches the first-level cache only after the instruction has retired, and a load of another
 * address with the same lower twelve bits waits for it. Hence the order (products of several blocks first, then their
 * scales) and the places of the buffers.
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

#define AMX_BLOCKS 8 /* decoded at a time: 4 KB in the first-level cache, which two threads may share */
#define AMX_ANSWERS 8 /* products whose answers are in memory at a time */

#ifndef AMX_STEPS
#define AMX_STEPS 8 /* products before their scales */
#endif

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

#define PAGE 4096
#ifndef ANSWERS_AHEAD
#define ANSWERS_AHEAD 3072
#endif /* of the activations, in a page: what is loaded next then lies outside of what is being stored */

typedef struct { /* some blocks of a group, decoded */
    _Alignas(
        64) float scale[AMX_BLOCKS][2][LANES]; /* of both halves; with minima of 32 columns: scale and zero point */
    _Alignas(64) float zero[AMX_BLOCKS][2][LANES];  /* zero points of both halves */
    _Alignas(64) int8_t room[PAGE + AMX_BLOCKS * 512];
    int8_t (*codes)[8][64]; /* in room, at the place in a page that the activations have */
} AmxBlocks;

/* The first address from `room` on whose place in a page is that of `like`. */
INLINE int8_t *same_place(int8_t *room, const int8_t *like) {
    return room + (((uintptr_t)like - (uintptr_t)room) & (PAGE - 64));
}

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
                _mm512_store_si512(out->codes[b + sub][j],
                                   zero ? _mm512_sub_epi8(v[j], _mm512_set1_epi8((char)zero)) : v[j]);
        }
    }
}

typedef struct { /* a group's blocks */
    const int8_t *codes;            /* [steps][columns / 4][64] */
    const float (*scale)[2][LANES]; /* [blocks] */
    const float (*zero)[2][LANES];
    float *sums;                    /* [rows][16] */
} AmxGroup;

typedef struct { /* one tile's rows over some blocks of one or two groups */
    AmxGroup group[2];
    const int8_t *x; /* [blocks][height][32] */
    const Blk *blk;  /* [blocks][height] */
    int height, steps, groups;
    int begin;       /* sums begin here */
    char *answers;
} AmxTile;

/* The place of a step's answers: they move through a page as fast as activations and codes do, 512 bytes a step. */
INLINE int32_t *answer_of(const AmxTile *t, int step, int group) {
    const int n = step % AMX_ANSWERS;
    return (int32_t *)(t->answers + 512 * n + 2 * PAGE * (n & 1) + 4 * PAGE * group);
}
#define ANSWER_BYTES (6 * PAGE + 512 * AMX_ANSWERS + 1024)

/* Tile registers are part of an instruction: c, a and b are constants. */
#define AMX_LOAD_X(a)                                                                                     \
    TILE_LOAD(a, t->x + (int64_t)(step / halves) * t->height * 32 + columns * (step % halves), 32)
#define AMX_DOT(c, a, b, n)                                                                               \
    TILE_ZERO(c);                                                                                         \
    TILE_LOAD(b, t->group[n].codes + (int64_t)columns * 16 * step, 64);                                   \
    TILE_DOT(c, a, b);                                                                                    \
    TILE_STORE(c, answer_of(t, step, n), 64)

/* Steps first..past-1 of both groups. columns: of a step, a constant. */
INLINE void amx_products(int columns, const AmxTile *t, int first, int past) {
    const int halves = 32 / columns;
    int step = first;
    if (t->groups == 2) {
        for (; step < past; step++) {
            AMX_LOAD_X(4);
            AMX_DOT(0, 4, 6, 0);
            AMX_DOT(1, 4, 7, 1);
            if (++step == past) break;
            AMX_LOAD_X(5);
            AMX_DOT(2, 5, 6, 0);
            AMX_DOT(3, 5, 7, 1);
        }
        return;
    }
    for (; step < past; step++) {
        AMX_LOAD_X(4);
        AMX_DOT(0, 4, 6, 0);
        if (++step == past) break;
        AMX_LOAD_X(5);
        AMX_DOT(1, 5, 7, 0);
        if (++step == past) break;
        AMX_LOAD_X(4);
        AMX_DOT(2, 4, 6, 0);
        if (++step == past) break;
        AMX_LOAD_X(5);
        AMX_DOT(3, 5, 7, 0);
    }
}

/* Their answers, scaled, onto the sums of group n. minima: blocks have zero points; MT: rows. Both are constants. */
INLINE void amx_scales(int columns, int minima, int MT, const AmxTile *t, int n, int first, int past) {
    const int halves = 32 / columns, height = t->height;
    const AmxGroup *group = &t->group[n];
    float *sums = group->sums;
    vf sum[TILE_HEIGHT];
    UNROLL for (int m = 0; m < MT; m++) sum[m] = t->begin && first == 0 ? vf_set(0.0f) : vf_load(sums + LANES * m);
    for (int step = first; step < past; step++) {
        const int block = step / halves, half = step % halves;
        const vf d = vf_load(group->scale[block][half]);
        const Blk *row = t->blk + (int64_t)block * height;
        const int32_t *answer = answer_of(t, step, n);
        UNROLL for (int m = 0; m < MT; m++)
            sum[m] = vf_fma(vf_mul(vi_to_float(vi_load(answer + LANES * m)), vf_set(row[m].d)), d, sum[m]);
        if (!minima) continue;
        const vf zero_point = vf_load(columns == 16 ? group->zero[block][half] : group->scale[block][1]);
        UNROLL for (int m = 0; m < MT; m++)
            sum[m] = vf_fma(zero_point, vf_set(zero_weight(row + m, 4 * half, columns / 4)), sum[m]);
    }
    UNROLL for (int m = 0; m < MT; m++) vf_store(sums + LANES * m, sum[m]);
}

#define AMX_CASE(MT) case MT: amx_scales(columns, minima, MT, t, n, first, past); break;
INLINE void amx_tile(int columns, int minima, int rows, const AmxTile *t) {
    for (int first = 0; first < t->steps; first += AMX_STEPS) {
        const int past = first + AMX_STEPS < t->steps ? first + AMX_STEPS : t->steps;
        amx_products(columns, t, first, past);
        for (int n = 0; n < t->groups; n++)
            switch (rows) {
            AMX_CASE(1) AMX_CASE(2) AMX_CASE(3) AMX_CASE(4) AMX_CASE(5) AMX_CASE(6) AMX_CASE(7) AMX_CASE(8)
            AMX_CASE(9) AMX_CASE(10) AMX_CASE(11) AMX_CASE(12) AMX_CASE(13) AMX_CASE(14) AMX_CASE(15) AMX_CASE(16)
            }
    }
}
static void amx_plain(int rows, const AmxTile *t) { amx_tile(32, 0, rows, t); }
static void amx_minima(int rows, const AmxTile *t) { amx_tile(32, 1, rows, t); }
static void amx_halves(int rows, const AmxTile *t) { amx_tile(16, 0, rows, t); }
static void amx_halves_minima(int rows, const AmxTile *t) { amx_tile(16, 1, rows, t); }

typedef struct { const Weight *w; int g; float *tile; } AmxTarget; /* a group of a weight, and where its outputs go */

/* tile[mc][16] of one or two groups of a format: rows m0.. of activations that lie in tiles */
INLINE void amx_groups(int kind, const AmxTarget *to, int groups, const QActs *a, int m0, int mc) {
    AmxBlocks blocks[2][2]; /* by group: those that are multiplied, and the next */
    _Alignas(64) char room[PAGE + ANSWER_BYTES];
    const int kb = a->k / 32, columns = k_columns(kind), height = a->height;
    tiles_configure(height, columns);
    for (int n = 0; n < groups; n++) {
        for (int i = 0; i < 2; i++) {
            const int8_t *x = a->q + acts_place(a, m0, 32 * AMX_BLOCKS * i);
            blocks[n][i].codes = (int8_t (*)[8][64])same_place(blocks[n][i].room, x);
        }
        amx_decode(kind, to[n].w, to[n].g, 0, kb < AMX_BLOCKS ? kb : AMX_BLOCKS, &blocks[n][0]);
    }
    for (int first = 0; first < kb; first += AMX_BLOCKS) {
        const int count = kb - first < AMX_BLOCKS ? kb - first : AMX_BLOCKS, next = first + AMX_BLOCKS,
                  i = first / AMX_BLOCKS % 2;
        for (int row = 0, rows; row < mc; row += rows) {
            const int line = (m0 + row) % height, left = mc - row;
            rows = height - line < left ? height - line : left;
            if (rows == left && next < kb) /* their stores leave the pipeline while this tile computes */
                for (int n = 0; n < groups; n++)
                    amx_decode(kind, to[n].w, to[n].g, next, kb - next < AMX_BLOCKS ? kb - next : AMX_BLOCKS,
                               &blocks[n][!i]);
            const int64_t place = acts_place(a, m0 + row, 32 * first);
            AmxTile t = {
                .x = a->q + place, .blk = a->blk + place / 32, .height = height,
                .steps = count * (32 / columns), .groups = groups, .begin = first == 0,
                .answers = (char *)same_place((int8_t *)room, a->q + place + ANSWERS_AHEAD),
            };
            for (int n = 0; n < groups; n++) {
                const AmxBlocks *here = &blocks[n][i];
                const int8_t *codes = here->codes[0][0];
                if (kind == W_Q8) codes = (const int8_t *)w_data(to[n].w, to[n].g) + (size_t)first * 512;
                t.group[n] = (AmxGroup){
                    .codes = codes,
                    .scale = (const float (*)[2][LANES])here->scale, .zero = (const float (*)[2][LANES])here->zero,
                    .sums = to[n].tile + (int64_t)row * LANES,
                };
            }
            if (columns == 16 && k_min(kind)) amx_halves_minima(rows, &t);
            else if (columns == 16) amx_halves(rows, &t);
            else if (k_min(kind)) amx_minima(rows, &t);
            else amx_plain(rows, &t);
        }
    }
}
