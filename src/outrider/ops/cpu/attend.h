/* Attention of rows over the paged cache, and the writing of keys and values.
 *
 * Keys are taken in chunks cut at absolute positions. Within a chunk: scores, their maximum, the weights and the
 * weighted sum of values in ascending order; then the chunks are merged in ascending order. Nothing depends on which
 * rows are computed together or on how the work is split, so a row's result does not depend on the other rows, bit for
 * bit.
 *
 * Where pages hold whole tiles of 16 slots (`tiled`), the keys of a tile lie transposed, [dim][16], in the tile's
 * place: sixteen scores then advance together without shuffling. Values keep their rows. Where the processor multiplies
 * pairs of bfloat16 (`paired`) a tile holds keys as [dim / 2][16][2] and values as [8][dim][2]. In 8 bits (DT_I8, tiles
 * only) sixteen scales in float32 follow the bytes of a tile, one per slot: a key's is multiplied into its score, a
 * value's into its weight. Only this file and chunks.c depend on this layout.
 *
 * Rows of a tree (Batch.paths) are written one after the other, in the order of rows, and read in the order of
 * positions. Rows of the main chain lie at their positions; for another path the tiles from the newest token on are
 * assembled (own_keys, own_values), and everything else is the same, bit for bit.
 */
#pragma once
#include "threads.h"
#include "rows.h"
#include "attend_inner.h"

#define CHUNK 128
#define MAX_QUERIES 32 /* of one unit of work: rows × query heads that share a K/V head */

typedef struct {
    int32_t heads, kv_heads, dim, kv_layer, writes, group, window, k_eq_v,
        norm_v; /* group 0: full, 1: sliding; window 0: none */
    int32_t bidirectional; /* rows see later ones too, up to Batch.ends */
    float scale, eps;
} Spec;

typedef struct {
    int32_t rows, seqs, page_size, kv_dtype, rope_shift;
    const int64_t *ids, *positions, *row_seq;
    const int32_t *row_start;     /* [seqs + 1] */
    const int32_t *tables[2];     /* [seqs, width] per group */
    int32_t width[2];
    void *const *keys, *const *values; /* per layer that owns K/V: [pages, kv_heads, page_size, dim] */
    const int64_t *places;        /* [rows] of a tree: where rows are written; NULL: at their positions */
    const int32_t *paths; /* [rows, path_width] of a tree: the row of the sequence at each depth; NULL: chains */
    int64_t path_width;
    const int64_t *ends;          /* [seqs] the last position that rows of a bidirectional layer see */
} Batch;

INLINE int spec_qkv_rows(const Spec *s) {
    return (s->heads + (s->writes ? (s->k_eq_v ? 1 : 2) : 0) * s->kv_heads) * s->dim;
}
INLINE int kv_row(const Spec *s, const Batch *b) {
    return s->dim + (b->kv_dtype == DT_I8 ? 4 : 0);
} /* elements of a slot */
INLINE size_t kv_item(const Batch *b) { return b->kv_dtype == DT_F32 ? 4 : b->kv_dtype == DT_I8 ? 1 : 2; }
INLINE int64_t kv_offset(const Spec *s, const Batch *b, int seq, int64_t position, int head) { /* in elements */
    int64_t page = b->tables[s->group][(int64_t)seq * b->width[s->group] + position / b->page_size];
    return ((page * s->kv_heads + head) * b->page_size + position % b->page_size) * kv_row(s, b);
}
/* The scales of the tile at `at`, in 8 bits. */
INLINE vf tile_factors(const void *base, int64_t at, int dim) {
    return vf_load((const float *)((const int8_t *)base + at + (int64_t)LANES * dim));
}

INLINE int tiled(const Batch *b) { return b->page_size % LANES == 0; }

INLINE int paired(const Spec *s, const Batch *b) {
#if ISA_BF16
    return b->kv_dtype == DT_BF16 && tiled(b) && s->dim % LANES == 0;
#else
    (void)s;
    (void)b;
    return 0;
#endif
}

INLINE void store_kv(const float *x, int dim, void *base, int64_t at, int dtype) {
    int i = 0;
    for (; i + LANES <= dim; i += LANES) vf_store_any(base, at + i, vf_load(x + i), dtype);
    for (; i < dim; i++) {
        if (dtype == DT_F32) ((float *)base)[at + i] = x[i];
        else ((uint16_t *)base)[at + i] = dtype == DT_F16 ? float_half(x[i]) : float_bf16(x[i]);
    }
}

/* A row in 8 bits into its slot of a tile: down a column, or along. */
static void store_bytes(const Spec *s, const Batch *b, const float *x, void *base, int64_t position, int64_t at,
                        int column) {
    const int lane = (int)(position % LANES), dim = s->dim;
    int8_t *tile = (int8_t *)base + at - (int64_t)lane * kv_row(s, b), q[1024];
    vf top = vf_set(0.0f);
    for (int d = 0; d < dim; d += LANES) top = vf_max(top, vf_abs(vf_load(x + d)));
    const float most = vf_hmax(top), factor = most / 127.0f;
    const vf by = vf_set(most > 0.0f ? 127.0f / most : 0.0f);
    for (int d = 0; d < dim; d += LANES) vf_store_i8(q + d, vf_round(vf_mul(vf_load(x + d), by)));
    if (column) for (int d = 0; d < dim; d++) tile[d * LANES + lane] = q[d];
    else memcpy(tile + (int64_t)lane * dim, q, (size_t)dim);
    memcpy(tile + (int64_t)LANES * dim + 4 * lane, &factor, 4);
}

/* A key into its column of a tile; `at` is where its row would begin. */
static void store_key(const Spec *s, const Batch *b, const float *x, int64_t position, int64_t at) {
    void *base = b->keys[s->kv_layer];
    if (b->kv_dtype == DT_I8) { store_bytes(s, b, x, base, position, at, 1); return; }
    if (!tiled(b)) { store_kv(x, s->dim, base, at, b->kv_dtype); return; }
    const int lane = (int)(position % b->page_size % LANES);
    at += lane - (int64_t)lane * s->dim;
    if (b->kv_dtype == DT_F32) {
        for (int d = 0; d < s->dim; d++) ((float *)base)[at + (int64_t)d * LANES] = x[d];
        return;
    }
    uint16_t half[1024];
    store_kv(x, s->dim, half, 0, b->kv_dtype);
    if (paired(s, b))
        for (int d = 0; d < s->dim; d += 2) memcpy((uint16_t *)base + at + lane + (int64_t)d * LANES, half + d, 4);
    else for (int d = 0; d < s->dim; d++) ((uint16_t *)base)[at + (int64_t)d * LANES] = half[d];
}
static void store_value(const Spec *s, const Batch *b, const float *x, int64_t position, int64_t at) {
    void *base = b->values[s->kv_layer];
    if (b->kv_dtype == DT_I8) { store_bytes(s, b, x, base, position, at, 0); return; }
    if (!paired(s, b)) { store_kv(x, s->dim, base, at, b->kv_dtype); return; }
    uint16_t half[1024], *to = (uint16_t *)base + at + (position & 1) - (position & 1) * s->dim;
    store_kv(x, s->dim, half, 0, b->kv_dtype);
    for (int d = 0; d < s->dim; d++) to[2 * d] = half[d];
}

/* One key, one value from a tile's lane to another's. */
INLINE void copy_factor(const Spec *s, const int8_t *from, int lane, int8_t *to, int to_lane) {
    memcpy(to + (int64_t)LANES * s->dim + 4 * to_lane, from + (int64_t)LANES * s->dim + 4 * lane, 4);
}
static void copy_key(const Spec *s, const Batch *b, const void *from, int64_t tile, int lane, void *to, int64_t to_tile,
                     int to_lane) {
    if (b->kv_dtype == DT_I8) {
        const int8_t *x = (const int8_t *)from + tile;
        int8_t *y = (int8_t *)to + to_tile;
        for (int d = 0; d < s->dim; d++) y[to_lane + d * LANES] = x[lane + d * LANES];
        copy_factor(s, x, lane, y, to_lane);
    } else if (b->kv_dtype == DT_F32) {
        for (int d = 0; d < s->dim; d++)
            ((float *)to)[to_tile + to_lane + (int64_t)d * LANES] =
                ((const float *)from)[tile + lane + (int64_t)d * LANES];
    } else if (paired(s, b)) {
        for (int d = 0; d < s->dim; d += 2)
            memcpy((uint16_t *)to + to_tile + 2 * to_lane + (int64_t)d * LANES,
                   (const uint16_t *)from + tile + 2 * lane + (int64_t)d * LANES, 4);
    } else {
        for (int d = 0; d < s->dim; d++)
            ((uint16_t *)to)[to_tile + to_lane + (int64_t)d * LANES] =
                ((const uint16_t *)from)[tile + lane + (int64_t)d * LANES];
    }
}
static void copy_value(const Spec *s, const Batch *b, const void *from, int64_t tile, int lane, void *to,
                       int64_t to_tile, int to_lane) {
    const size_t item = kv_item(b);
    if (b->kv_dtype == DT_I8) copy_factor(s, (const int8_t *)from + tile, lane, (int8_t *)to + to_tile, to_lane);
    if (!paired(s, b)) {
        memcpy((char *)to + (to_tile + (int64_t)to_lane * s->dim) * item,
               (const char *)from + (tile + (int64_t)lane * s->dim) * item, s->dim * item);
        return;
    }
    const uint16_t *x = (const uint16_t *)from + tile + (int64_t)(lane & ~1) * s->dim + (lane & 1);
    uint16_t *y = (uint16_t *)to + to_tile + (int64_t)(to_lane & ~1) * s->dim + (to_lane & 1);
    for (int d = 0; d < s->dim; d++) y[2 * d] = x[2 * d];
}
/* Keys and values of one place of a sequence to another. */
SHARED void move_kv(const Spec *s, const Batch *b, int seq, int64_t from, int64_t to) {
    void *keys = b->keys[s->kv_layer], *values = b->values[s->kv_layer];
    const size_t item = kv_item(b);
    const int64_t row = kv_row(s, b);
    for (int head = 0; head < s->kv_heads; head++) {
        const int64_t source = kv_offset(s, b, seq, from, head), target = kv_offset(s, b, seq, to, head);
        if (!tiled(b)) {
            memmove((char *)keys + target * item, (char *)keys + source * item, s->dim * item);
            memmove((char *)values + target * item, (char *)values + source * item, s->dim * item);
            continue;
        }
        const int l = (int)(from % LANES), t = (int)(to % LANES);
        copy_key(s, b, keys, source - l * row, l, keys, target - t * row, t);
        copy_value(s, b, values, source - l * row, l, values, target - t * row, t);
    }
}

/* Head `h` of a row's fused projection (q heads, then k, then v): q is rotated in place, k and v go to the cache. */
SHARED void rope_write_head(const Spec *s, const Batch *b, int row, int h, float *qkv, const float *cos,
                            const float *sin, const float *q_norm, const float *k_norm) {
    float *x = qkv + (int64_t)h * s->dim;
    if (h < s->heads) { rope_head(x, s->dim, q_norm, q_norm != NULL, s->eps, cos, sin, x); return; }
    float k[1024], v[1024];
    const int kv = (h - s->heads) % s->kv_heads, is_v = h >= s->heads + s->kv_heads;
    const int64_t place = b->places ? b->places[row] : b->positions[row];
    const int64_t at = kv_offset(s, b, (int)b->row_seq[row], place, kv);
    if (is_v || s->k_eq_v) {
        if (s->norm_v) norm_row(x, s->dim, NULL, s->eps, v);
        store_value(s, b, s->norm_v ? v : x, place, at);
    }
    if (!is_v) {
        rope_head(x, s->dim, k_norm, k_norm != NULL, s->eps, cos, sin, k);
        store_key(s, b, k, place, at);
    }
}

/* ---- units of work ---- */
typedef struct { int32_t seq, row, count; } RowBlock; /* `count` rows of one sequence from `row` */

INLINE int block_rows(const Spec *s) { int n = MAX_QUERIES / (s->heads / s->kv_heads); return n < 1 ? 1 : n; }
static int count_blocks(const Batch *b, int per) {
    int n = 0;
    for (int i = 0; i < b->seqs; i++) n += (b->row_start[i + 1] - b->row_start[i] + per - 1) / per;
    return n;
}
static void cut_blocks(const Batch *b, int per, RowBlock *out) {
    for (int i = 0; i < b->seqs; i++)
        for (int r = b->row_start[i]; r < b->row_start[i + 1]; r += per) {
            RowBlock x = {i, r, b->row_start[i + 1] - r < per ? b->row_start[i + 1] - r : per};
            *out++ = x;
        }
}
INLINE int64_t first_key(const Spec *s, int64_t position) {
    return s->window && position - s->window + 1 > 0 ? position - s->window + 1 : 0;
}
/* The last position that a row sees. */
INLINE int64_t last_key(const Spec *s, const Batch *b, int seq, int row) {
    const int64_t own = b->positions[row];
    if (!s->bidirectional) return own;
    return s->window && own + s->window - 1 < b->ends[seq] ? own + s->window - 1 : b->ends[seq];
}
INLINE void block_span(const Spec *s, const Batch *b, int seq, int row, int count, int64_t *least,
                       int64_t *most) { /* positions; in lines they ascend */
    *least = b->positions[row];
    *most = last_key(s, b, seq, row + count - 1);
    for (int i = 0; b->paths && i < count; i++) {
        if (b->positions[row + i] < *least) *least = b->positions[row + i];
        if (b->positions[row + i] > *most) *most = b->positions[row + i];
    }
}
INLINE void block_chunks(const Spec *s, const Batch *b, RowBlock r, int *lo, int *hi) {
    int64_t least, most;
    block_span(s, b, r.seq, r.row, r.count, &least, &most);
    *lo = (int)(first_key(s, least) / CHUNK);
    *hi = (int)(most / CHUNK) + 1;
}
/* The position of the newest token if a row's path leaves the main chain; else a position beyond all others. */
INLINE int64_t off_line(const Batch *b, int seq, int row) {
    if (!b->paths) return INT64_MAX;
    const int first = b->row_start[seq];
    const int64_t base = b->positions[first], depth = b->positions[row] - base;
    return b->paths[(int64_t)row * b->path_width + depth] == depth
               ? INT64_MAX
               : base; /* a row's number is its depth on the main line alone */
}

INLINE int padded(int dim) { return (dim + LANES - 1) & ~(LANES - 1); }
INLINE size_t part_floats(const Spec *s) {
    return (size_t)padded(s->dim) + LANES;
} /* maximum, sum, (pad), weighted values */
INLINE size_t attend_scratch(int dim) {
    return (size_t)(MAX_QUERIES * CHUNK + 2 * LANES * padded(dim)) * sizeof(float);
} /* scores, two tiles */

INLINE vf load_piece(const void *base, int64_t row, int d, int dim,
                     int dtype) { /* sixteen of a row's values from d, zeros past its end */
    if (d + LANES <= dim) return vf_any(base, row + d, dtype);
    float t[LANES] = {0};
    for (int i = d; i < dim; i++) t[i - d] = one_any(base, row + i, dtype);
    return vf_load(t);
}
INLINE int even_share(int count, int most) { /* the size of equal pieces of at most `most` */
    const int pieces = (count + most - 1) / most;
    return (count + pieces - 1) / pieces;
}

INLINE void fetch_tile(const void *base, int64_t at, int dim, int dtype) { /* sixteen rows */
    const int item = dtype == DT_F32 ? 4 : dtype == DT_I8 ? 1 : 2;
    for (int i = 0; i < LANES * dim * item; i += 64) __builtin_prefetch((const char *)base + at * item + i, 0, 2);
}

/* One chunk of keys for queries q0..q1-1 (head by head, row by row) of a row block and a K/V head: part[query][maximum,
 * sum, values]. In chunks.c. */
__attribute__((visibility("hidden"))) void attend_chunk(const Spec *s, const Batch *b, RowBlock r, int head, int q0,
                                                        int q1, int chunk, const float *q, int64_t ldq, float *part,
                                                        int64_t part_step, float *scratch);

/* Merge the chunks of one query, in ascending order. */
static void merge_chunks(float *parts, int count, int64_t step, int dim, float *out) {
    float top = -INFINITY;
    for (int c = 0; c < count; c++) if (parts[c * step] > top) top = parts[c * step];
    vf sum = vf_set(0.0f);
    for (int c = 0; c < count; c++) {
        vf w = vf_exp(vf_set(parts[c * step] - top));
        sum = vf_fma(w, vf_set(parts[c * step + 1]), sum);
        vf_store(parts + c * step, w); /* maximum and sum have served */
    }
    for (int d = 0; d < dim; d += LANES) {
        vf o = vf_set(0.0f);
        for (int c = 0; c < count; c++) o = vf_fma(vf_load(parts + c * step), vf_load(parts + c * step + LANES + d), o);
        vf_store_n(out + d, vf_div(o, sum), dim - d);
    }
}

/* How attention over a batch is cut, decided once a pass. Cores may be far apart, so with few rows every member takes a
 * fixed range of queries and nothing is handed over; with few rows and many keys the chunks are shared out and merged;
 * with many rows blocks are claimed as they come. */
typedef struct {
    enum { CUT_QUERIES, CUT_CHUNKS, CUT_BLOCKS } how;
    RowBlock *blocks;
    int count, most; /* most: chunks of any block */
    float *parts;    /* CHUNKS: [rows, heads, most]; else per member [MAX_QUERIES, most] */
    char *scratch;   /* per member */
    size_t scratch_step, parts_step;
} AttnSplit;

SHARED void split_plan(AttnSplit *cut, const ThreadPool *pool, const Spec *s, const Batch *b) { /* sizes */
    const int per = block_rows(s);
    cut->count = count_blocks(b, per);
    cut->most = 1;
    for (int i = 0; i < b->seqs; i++) {
        if (b->row_start[i] == b->row_start[i + 1]) continue;
        int64_t least, most;
        block_span(s, b, i, b->row_start[i], b->row_start[i + 1] - b->row_start[i], &least, &most);
        int chunks = (int)(most / CHUNK) + 1;
        const int rows = b->paths || s->bidirectional ? (int)(most - least) + 1 : per;
        const int within = (s->window + rows - 2) / CHUNK + 2; /* chunks that a window and a block's rows can touch */
        if (s->window && chunks > within) chunks = within;
        if (chunks > cut->most) cut->most = chunks;
    }
    const int tasks = cut->count * s->kv_heads;
    cut->how = tasks >= 8 * pool->size                    ? CUT_BLOCKS
               : cut->most >= 8 && tasks < 4 * pool->size ? CUT_CHUNKS
                                                          : CUT_QUERIES;
    cut->scratch_step = UP(attend_scratch(s->dim));
    cut->parts_step = UP(MAX_QUERIES * part_floats(s) * cut->most * 4) / 4;
}
INLINE size_t split_bytes(const AttnSplit *cut, const ThreadPool *pool, const Spec *s, const Batch *b) {
    size_t all = UP((size_t)b->rows * s->heads * cut->most * part_floats(s) * 4);
    return UP(cut->count * sizeof(RowBlock)) + cut->scratch_step * pool->size +
           (cut->how == CUT_CHUNKS ? all : cut->parts_step * 4 * pool->size);
}
SHARED void split_place(AttnSplit *cut, const ThreadPool *pool, const Spec *s, const Batch *b, char *at) {
    cut->blocks = (RowBlock *)at;
    cut_blocks(b, block_rows(s), cut->blocks);
    at += UP(cut->count * sizeof(RowBlock));
    cut->scratch = at;
    cut->parts = (float *)(at + cut->scratch_step * pool->size);
}

/* All chunks of some queries, merged into their rows of `out`. */
static void attend_queries(const Spec *s, const Batch *b, const AttnSplit *cut, int me, RowBlock r, int head, int q0,
                           int q1, const float *q, int64_t ldq, float *out, int64_t ldo, float *done,
                           QActs *quantised) {
    const int per = s->heads / s->kv_heads, dim = s->dim;
    const int64_t step = (int64_t)part_floats(s);
    float *part = done ? done : cut->parts + cut->parts_step * me;
    int c0, c1;
    block_chunks(s, b, r, &c0, &c1);
    for (int c = c0; !done && c < c1; c++)
        attend_chunk(s, b, r, head, q0, q1, c, q, ldq, part + (c - c0) * step, cut->most * step,
                     (float *)(cut->scratch + cut->scratch_step * me));
    for (int i = q0; i < q1; i++) {
        const int64_t row = r.row + i % r.count, at = (int64_t)(head * per + i / r.count) * dim;
        merge_chunks(part + (int64_t)(i - q0) * cut->most * step, c1 - c0, step, dim, out + row * ldo + at);
        if (quantised)
            quantize_row(out + row * ldo + at, dim, quantised, acts_place(quantised, row, at));
    }
}

/* One member's share of attention. No barrier at the end. */
SHARED void attend_phase(ThreadPool *pool, int me, const Spec *s, const Batch *b, const AttnSplit *cut, const float *q,
                         int64_t ldq, float *out, int64_t ldo, QActs *quantised) {
    const int per = s->heads / s->kv_heads, tasks = cut->count * s->kv_heads;
    const int64_t step = (int64_t)part_floats(s);
    int lo, hi;
    if (cut->how == CUT_QUERIES) {
        pool_share(pool, me, b->rows * s->heads, &lo, &hi);
        int at = 0; /* queries before this block and head */
        for (int t = 0; t < tasks && at < hi; t++) {
            RowBlock r = cut->blocks[t / s->kv_heads];
            const int n = r.count * per, q0 = lo > at ? lo - at : 0, q1 = hi - at < n ? hi - at : n;
            if (q0 < q1) attend_queries(s, b, cut, me, r, t % s->kv_heads, q0, q1, q, ldq, out, ldo, NULL, quantised);
            at += n;
        }
        return;
    }
    if (cut->how == CUT_BLOCKS) {
        while (pool_next(pool, tasks, 1, &lo, &hi)) {
            RowBlock r = cut->blocks[lo / s->kv_heads];
            attend_queries(s, b, cut, me, r, lo % s->kv_heads, 0, r.count * per, q, ldq, out, ldo, NULL, quantised);
        }
        return;
    }
    const int units = tasks * cut->most, fair = units / (16 * pool->size),
              grain = fair < 1   ? 1
                      : fair > 8 ? 8
                                 : fair; /* a chunk fetches for the next one */
    while (pool_next(pool, units, grain, &lo, &hi)) for (; lo < hi; lo++) {
        const int t = lo / cut->most, c = lo % cut->most, head = t % s->kv_heads;
        RowBlock r = cut->blocks[t / s->kv_heads];
        int c0, c1;
        block_chunks(s, b, r, &c0, &c1);
        float *part = cut->parts + ((int64_t)r.row * s->heads + (int64_t)head * r.count * per) * cut->most * step;
        if (c0 + c < c1)
            attend_chunk(s, b, r, head, 0, r.count * per, c0 + c, q, ldq, part + c * step, cut->most * step,
                         (float *)(cut->scratch + cut->scratch_step * me));
    }
    pool_barrier(pool);
    pool_share(pool, me, tasks, &lo, &hi);
    for (int t = lo; t < hi; t++) {
        RowBlock r = cut->blocks[t / s->kv_heads];
        const int head = t % s->kv_heads;
        float *part = cut->parts + ((int64_t)r.row * s->heads + (int64_t)head * r.count * per) * cut->most * step;
        attend_queries(s, b, cut, me, r, head, 0, r.count * per, q, ldq, out, ldo, part, quantised);
    }
}
