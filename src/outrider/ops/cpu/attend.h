/* Attention of rows over the paged cache, and the writing of keys and values.
 *
 * Keys are taken in chunks cut at absolute positions. Within a chunk: scores, their maximum, the weights and the
 * weighted sum of values in ascending order; then the chunks are merged in ascending order. Nothing depends on which
 * rows are computed together or on how the work is split, so a row's answer is bitwise its own.
 */
#pragma once
#include "pool.h"
#include "rows.h"

#define CHUNK 256
#define MAX_QUERIES 32 /* of one unit of work: rows × query heads that share a K/V head */

typedef struct {
    int32_t heads, kv_heads, dim, kv_layer, writes, group, window, k_eq_v, norm_v; /* group 0: full, 1: sliding; window 0: none */
    float scale, eps;
} Spec;

typedef struct {
    int32_t rows, seqs, page_size, kv_dtype, rope_shift;
    const int64_t *ids, *positions, *row_seq;
    const int32_t *row_start;     /* [seqs + 1] */
    const int32_t *tables[2];     /* [seqs, width] per group */
    int32_t width[2];
    void *const *keys, *const *values; /* per layer that owns K/V: [pages, kv_heads, page_size, dim] */
} Batch;

INLINE int spec_qkv_rows(const Spec *s) { return (s->heads + (s->writes ? (s->k_eq_v ? 1 : 2) : 0) * s->kv_heads) * s->dim; }
INLINE long kv_offset(const Spec *s, const Batch *b, int seq, int64_t position, int head) { /* in elements */
    long page = b->tables[s->group][(long)seq * b->width[s->group] + position / b->page_size];
    return ((page * s->kv_heads + head) * b->page_size + position % b->page_size) * s->dim;
}

INLINE void store_kv(const float *x, int dim, void *base, long at, int dtype) {
    int i = 0;
    for (; i + LANES <= dim; i += LANES) vf_store_any(base, at + i, vf_load(x + i), dtype);
    for (; i < dim; i++) {
        if (dtype == DT_F32) ((float *)base)[at + i] = x[i];
        else ((uint16_t *)base)[at + i] = dtype == DT_F16 ? float_half(x[i]) : float_bf16(x[i]);
    }
}

/* Head `h` of a row's fused projection (q heads, then k, then v): q is rotated in place, k and v go to the cache. */
static void rope_write_head(const Spec *s, const Batch *b, int row, int h, float *qkv, const float *cos, const float *sin,
                            const float *q_norm, const float *k_norm) {
    float *x = qkv + (long)h * s->dim;
    if (h < s->heads) { rope_head(x, s->dim, q_norm, q_norm != NULL, s->eps, cos, sin, x); return; }
    float k[1024], v[1024];
    const int kv = (h - s->heads) % s->kv_heads, is_v = h >= s->heads + s->kv_heads;
    const long at = kv_offset(s, b, (int)b->row_seq[row], b->positions[row], kv);
    if (is_v || s->k_eq_v) {
        if (s->norm_v) norm_row(x, s->dim, NULL, s->eps, v);
        store_kv(s->norm_v ? v : x, s->dim, b->values[s->kv_layer], at, b->kv_dtype);
    }
    if (!is_v) {
        rope_head(x, s->dim, k_norm, k_norm != NULL, s->eps, cos, sin, k);
        store_kv(k, s->dim, b->keys[s->kv_layer], at, b->kv_dtype);
    }
}

/* ---- units of work ---- */
typedef struct { int32_t seq, row, count; } RowBlock; /* `count` rows of one sequence from `row` */

INLINE int block_rows(const Spec *s) { int n = 24 / (s->heads / s->kv_heads); return n < 1 ? 1 : n; }
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
INLINE int64_t first_key(const Spec *s, int64_t position) { return s->window && position - s->window + 1 > 0 ? position - s->window + 1 : 0; }
INLINE void block_chunks(const Spec *s, const Batch *b, RowBlock r, int *lo, int *hi) { /* positions ascend within a sequence */
    *lo = (int)(first_key(s, b->positions[r.row]) / CHUNK);
    *hi = (int)(b->positions[r.row + r.count - 1] / CHUNK) + 1;
}

INLINE int padded(int dim) { return (dim + LANES - 1) & ~(LANES - 1); }
INLINE size_t part_floats(const Spec *s) { return (size_t)padded(s->dim) + LANES; } /* maximum, sum, (pad), weighted values */
INLINE size_t attend_scratch(int dim) { return ((size_t)MAX_QUERIES * CHUNK + (size_t)LANES * padded(dim)) * sizeof(float); }

/* Sixteen keys (or values) from position j0, as floats: out[16][padded dim]. Outside first..last stands any finite one:
 * its weight is 0. */
INLINE void load_tile(const Spec *s, const Batch *b, int seq, int head, const void *base, int64_t j0, int64_t first, int64_t last, int dtype, float *out) {
    const long start = kv_offset(s, b, seq, j0, head);
    const int together = b->page_size % LANES == 0, dim = s->dim, wide = padded(dim); /* together: a tile never straddles pages */
    for (int i = 0; i < LANES; i++) {
        int64_t j = j0 + i < first ? first : j0 + i <= last ? j0 + i : last;
        long at = together ? start + (j - j0) * dim : kv_offset(s, b, seq, j, head);
        float *o = out + (long)i * wide;
        int d = 0;
        for (; d + LANES <= dim; d += LANES) vf_store(o + d, vf_any(base, at + d, dtype));
        for (; d < wide; d++) o[d] = d < dim ? one_any(base, at + d, dtype) : 0.0f;
    }
}

#if ISA_AVX512
#define KEYS_AT_ONCE 16
#else
#define KEYS_AT_ONCE 4
#endif

/* One chunk of keys for the queries of a row block and a K/V head: part[(row, head)][maximum, sum, values]. */
INLINE void attend_typed(int dtype, const Spec *s, const Batch *b, RowBlock r, int head, int chunk, const float *q, long ldq,
                         float *part, long part_step, float *scratch) {
    const int per = s->heads / s->kv_heads, nq = r.count * per, dim = s->dim, wide = padded(dim);
    float *scores = scratch, *tile = scratch + (long)MAX_QUERIES * CHUNK;
    int64_t lo[MAX_QUERIES], hi[MAX_QUERIES], from = INT64_MAX, to = -1; /* visible keys of each query within the chunk */
    for (int i = 0; i < nq; i++) {
        int64_t at = b->positions[r.row + i / per];
        lo[i] = first_key(s, at); hi[i] = at;
        if (lo[i] < (int64_t)chunk * CHUNK) lo[i] = (int64_t)chunk * CHUNK;
        if (hi[i] > (int64_t)chunk * CHUNK + CHUNK - 1) hi[i] = (int64_t)chunk * CHUNK + CHUNK - 1;
        if (lo[i] <= hi[i]) { from = lo[i] < from ? lo[i] : from; to = hi[i] > to ? hi[i] : to; }
    }
    const vf none = vf_set(-INFINITY), scale = vf_set(s->scale);
    for (int64_t j0 = from & ~15L; j0 <= to; j0 += LANES) {
        load_tile(s, b, r.seq, head, b->keys[s->kv_layer], j0, from, to, dtype, tile);
        const int c = (int)(j0 % CHUNK);
        for (int i = 0; i < nq; i++) {
            float *out = scores + (long)i * CHUNK + c;
            if (j0 + LANES <= lo[i] || j0 > hi[i]) { vf_store(out, none); continue; }
            const float *x = q + (long)(r.row + i / per) * ldq + (long)(head * per + i % per) * dim;
            vf sums[LANES];
            for (int k0 = 0; k0 < LANES; k0 += KEYS_AT_ONCE) {
                vf acc[KEYS_AT_ONCE];
                for (int k = 0; k < KEYS_AT_ONCE; k++) acc[k] = vf_set(0.0f);
                for (int d = 0; d < dim; d += LANES) {
                    vf xv = vf_load_n(x + d, dim - d);
                    for (int k = 0; k < KEYS_AT_ONCE; k++) acc[k] = vf_fma(xv, vf_load(tile + (long)(k0 + k) * wide + d), acc[k]);
                }
                for (int k = 0; k < KEYS_AT_ONCE; k++) sums[k0 + k] = acc[k];
            }
            vf_store(out, vf_mul(vf_sum16(sums), scale));
            if (j0 < lo[i] || j0 + LANES - 1 > hi[i])
                for (int k = 0; k < LANES; k++)
                    if (j0 + k < lo[i] || j0 + k > hi[i]) out[k] = -INFINITY;
        }
    }
    for (int i = 0; i < nq; i++) {
        float *p = part + (long)i * part_step;
        for (int d = 0; d < wide + LANES; d += LANES) vf_store(p + d, vf_set(0.0f));
        if (lo[i] > hi[i]) { p[0] = -INFINITY; continue; }
        float *row = scores + (long)i * CHUNK;
        vf top = none, sum = vf_set(0.0f);
        const int a = (int)((lo[i] & ~15L) % CHUNK), z = (int)(hi[i] % CHUNK);
        for (int c = a; c <= z; c += LANES) top = vf_max(top, vf_load(row + c));
        p[0] = vf_hmax(top);
        top = vf_set(p[0]);
        for (int c = a; c <= z; c += LANES) {
            vf e = vf_exp(vf_sub(vf_load(row + c), top));
            sum = vf_add(sum, e);
            vf_store(row + c, e);
        }
        p[1] = vf_sum(sum);
    }
    for (int64_t j0 = from & ~15L; j0 <= to; j0 += LANES) {
        load_tile(s, b, r.seq, head, b->values[s->kv_layer], j0, from, to, dtype, tile);
        const int c = (int)(j0 % CHUNK);
        for (int i = 0; i < nq; i++) {
            if (j0 + LANES <= lo[i] || j0 > hi[i]) continue;
            const float *w = scores + (long)i * CHUNK + c;
            float *out = part + (long)i * part_step + LANES;
            int d = 0;
            for (; d + 64 <= dim; d += 64) {
                vf a0 = vf_load(out + d), a1 = vf_load(out + d + 16), a2 = vf_load(out + d + 32), a3 = vf_load(out + d + 48);
                for (int k = 0; k < LANES; k++) {
                    const float *v = tile + (long)k * wide + d;
                    vf e = vf_set(w[k]);
                    a0 = vf_fma(e, vf_load(v), a0); a1 = vf_fma(e, vf_load(v + 16), a1);
                    a2 = vf_fma(e, vf_load(v + 32), a2); a3 = vf_fma(e, vf_load(v + 48), a3);
                }
                vf_store(out + d, a0); vf_store(out + d + 16, a1); vf_store(out + d + 32, a2); vf_store(out + d + 48, a3);
            }
            for (; d < dim; d += LANES) {
                vf a0 = vf_load(out + d);
                for (int k = 0; k < LANES; k++) a0 = vf_fma(vf_set(w[k]), vf_load(tile + (long)k * wide + d), a0);
                vf_store(out + d, a0);
            }
        }
    }
}
static void attend_chunk(const Spec *s, const Batch *b, RowBlock r, int head, int chunk, const float *q, long ldq, float *part,
                         long part_step, float *scratch) {
    if (b->kv_dtype == DT_F16) attend_typed(DT_F16, s, b, r, head, chunk, q, ldq, part, part_step, scratch);
    else if (b->kv_dtype == DT_F32) attend_typed(DT_F32, s, b, r, head, chunk, q, ldq, part, part_step, scratch);
    else attend_typed(DT_BF16, s, b, r, head, chunk, q, ldq, part, part_step, scratch);
}

/* Merge the chunks of one query, in ascending order. */
static void merge_chunks(const float *parts, int count, long step, int dim, float *out) {
    float top = -INFINITY;
    for (int c = 0; c < count; c++) if (parts[c * step] > top) top = parts[c * step];
    vf sum = vf_set(0.0f);
    for (int c = 0; c < count; c++) sum = vf_fma(vf_exp(vf_set(parts[c * step] - top)), vf_set(parts[c * step + 1]), sum);
    for (int d = 0; d < dim; d += LANES) {
        vf o = vf_set(0.0f);
        for (int c = 0; c < count; c++) o = vf_fma(vf_exp(vf_set(parts[c * step] - top)), vf_load(parts + c * step + LANES + d), o);
        vf_store_n(out + d, vf_div(o, sum), dim - d);
    }
}

/* How attention over a batch is cut, decided once a pass: blocks of rows, and whether chunks are tasks of their own. */
typedef struct {
    RowBlock *blocks;
    int count, split, most; /* most: chunks of any block */
    float *parts;           /* split: [rows, heads, most]; else per member [MAX_QUERIES, most] */
    char *scratch;          /* per member */
    size_t scratch_step, parts_step;
} Cut;

/* One member's share of attention. Ends with a barrier before the merge only; the caller places the last one. */
static void attend_phase(Team *team, int me, const Spec *s, const Batch *b, const Cut *cut, const float *q, long ldq, float *out, long ldo,
                         Acts *quantised) {
    const int per = s->heads / s->kv_heads, dim = s->dim;
    const long step = (long)part_floats(s);
    float *scratch = (float *)(cut->scratch + cut->scratch_step * me);
    int lo, hi;
    if (cut->split) {
        const int tasks = cut->count * s->kv_heads * cut->most;
        while (team_next(team, tasks, 1, &lo, &hi)) {
            RowBlock r = cut->blocks[lo / cut->most / s->kv_heads];
            int head = lo / cut->most % s->kv_heads, c0, c1;
            block_chunks(s, b, r, &c0, &c1);
            if (c0 + lo % cut->most >= c1) continue;
            float *part = cut->parts + (((long)r.row * s->kv_heads + head * r.count) * per) * cut->most * step;
            attend_chunk(s, b, r, head, c0 + lo % cut->most, q, ldq, part + (lo % cut->most) * step, cut->most * step, scratch);
        }
        team_barrier(team);
    }
    const int tasks = cut->count * s->kv_heads;
    while (team_next(team, tasks, 1, &lo, &hi)) {
        RowBlock r = cut->blocks[lo / s->kv_heads];
        int head = lo % s->kv_heads, c0, c1;
        block_chunks(s, b, r, &c0, &c1);
        float *part = cut->parts + (((long)r.row * s->kv_heads + head * r.count) * per) * cut->most * step;
        if (!cut->split) {
            part = cut->parts + cut->parts_step * me;
            for (int c = c0; c < c1; c++) attend_chunk(s, b, r, head, c, q, ldq, part + (c - c0) * step, cut->most * step, scratch);
        }
        for (int i = 0; i < r.count * per; i++) {
            const long row = r.row + i / per, at = (long)(head * per + i % per) * dim;
            merge_chunks(part + (long)i * cut->most * step, c1 - c0, step, dim, out + row * ldo + at);
            if (quantised) quantize_row(out + row * ldo + at, dim, quantised->q + row * quantised->k + at, quantised->blk + (row * quantised->k + at) / 32);
        }
    }
}
