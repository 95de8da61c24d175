/* Attention over one chunk of keys, for every type of K/V. A translation unit of its own: most of all the compiling.
 * See attend.h. */
#include "attend.h"

#define AHEAD (3 * LANES) /* keys from those that are scored to those that are fetched */

/* Sixteen keys (or values) from `position` on as a row off the main chain sees them: committed ones, then those of its
 * path, zeros past its own position. Laid out as a tile of the cache; where pages hold no tiles, keys [dim][16] and
 * values [16][wide] in float32. */
static void own_tile(const Spec *s, const Batch *b, int seq, int row, int head, int64_t position, int values,
                     void *out) {
    const void *from = values ? b->values[s->kv_layer] : b->keys[s->kv_layer];
    const int64_t base = b->positions[b->row_start[seq]], end = b->positions[row];
    const int32_t *path = b->paths + (int64_t)row * b->path_width;
    const int dim = s->dim, wide = padded(dim), whole = tiled(b) && (!values || dim % LANES == 0);
    const size_t item = kv_item(b);
    const int64_t slot = kv_row(s, b);
    if (whole && position < base)
        memcpy(out, (const char *)from + kv_offset(s, b, seq, position, head) * item, LANES * slot * item);
    else memset(out, 0, (size_t)LANES * wide * 4);
    for (int lane = 0; lane < LANES; lane++) {
        const int64_t at = position + lane;
        if (whole && at < base) continue;
        if (at > end) { /* what lies there in the cache may be anything */
            if (whole && position < base) {
                static const float nothing[1024] = {0};
                if (item == 1)
                    memset((int8_t *)out + (int64_t)LANES * dim + 4 * lane, 0,
                           4); /* scale 0: the bytes count for nothing */
                else if (values) copy_value(s, b, nothing, 0, 0, out, 0, lane);
                else for (int d = 0; d < dim; d++) {
                    if (item == 4) ((float *)out)[d * LANES + lane] = 0.0f;
                    else ((uint16_t *)out)[paired(s, b) ? (d & ~1) * LANES + 2 * lane + (d & 1) : d * LANES + lane] = 0;
                }
            }
            continue;
        }
        const int64_t place = at < base ? at : base + path[at - base];
        const int64_t source = kv_offset(s, b, seq, place, head);
        if (whole) {
            const int l = (int)(place % LANES);
            if (values) copy_value(s, b, from, source - l * slot, l, out, 0, lane);
            else copy_key(s, b, from, source - l * slot, l, out, 0, lane);
        } else if (values)
            for (int d = 0; d < dim; d++)
                ((float *)out)[(int64_t)lane * wide + d] = one_any(from, source + d, b->kv_dtype);
        else
            for (int d = 0; d < dim; d++)
                ((float *)out)[(int64_t)d * LANES + lane] = one_any(from, source + d, b->kv_dtype);
    }
}

/* The queries of a unit of work over one chunk of keys, and the room for what is computed of them. */
typedef struct {
    const Spec *s;
    const Batch *b;
    RowBlock rows;
    int head, first_query, queries; /* of a K/V head, head by head and row by row */
    int64_t base;                   /* position of the chunk's first key */
    int whole;                      /* pages hold whole tiles */
    int from, to;                   /* the keys of the chunk that any query on the main line sees; to < 0: none */
    int lo[MAX_QUERIES], hi[MAX_QUERIES]; /* visible keys of each query */
    int line[MAX_QUERIES], lines;         /* queries that read the cache as it lies */
    int off[MAX_QUERIES], offs;           /* queries of rows off the main line */
    uint8_t away[MAX_QUERIES];            /* of each query: whether it is one of those */
    int tail;                             /* where the tiles begin that are assembled for those */
    const float *x[MAX_QUERIES];
    const uint32_t *pairs[MAX_QUERIES]; /* the same in pairs of bfloat16, in the room of `tile` */
    int64_t at[CHUNK / LANES];          /* where the cache's tiles begin, in elements */
    float *scores;                      /* [MAX_QUERIES][CHUNK] */
    float *tile, *own;                  /* [16][wide] each: keys or values in float32; an assembled tile */
} ChunkQueries;

INLINE int query_row(const ChunkQueries *c, int i) { return (c->first_query + i) % c->rows.count; }
INLINE float *query_scores(const ChunkQueries *c, int i) { return c->scores + (int64_t)i * CHUNK; }

/* What each query sees of the chunk. */
INLINE void chunk_queries(ChunkQueries *c, int dim, const float *q, int64_t ldq) {
    const Spec *s = c->s;
    const Batch *b = c->b;
    const RowBlock r = c->rows;
    const int per = s->heads / s->kv_heads;
    int row = c->first_query % r.count, head = c->first_query / r.count;
    c->from = CHUNK;
    c->to = -1;
    c->tail = CHUNK;
    c->lines = 0;
    c->offs = 0;
    for (int i = 0; i < c->queries; i++) {
        const int64_t last = last_key(s, b, r.seq, r.row + row) - c->base;
        const int64_t first = first_key(s, b->positions[r.row + row]) - c->base;
        const int64_t leaves = off_line(b, r.seq, r.row + row) - c->base;
        c->lo[i] = first > 0 ? (int)(first < CHUNK ? first : CHUNK) : 0;
        c->hi[i] = last < CHUNK - 1 ? (int)(last < -1 ? -1 : last) : CHUNK - 1;
        int seen = c->hi[i];
        c->away[i] = c->lo[i] <= c->hi[i] && leaves <= c->hi[i];
        if (c->away[i]) {
            c->off[c->offs++] = i;
            c->tail = leaves > 0 ? (int)leaves & -LANES : 0;
            seen = c->tail - 1;
        } else c->line[c->lines++] = i;
        if (c->lo[i] <= seen) {
            c->from = c->lo[i] < c->from ? c->lo[i] : c->from;
            c->to = seen > c->to ? seen : c->to;
        }
        c->x[i] = q + (int64_t)(r.row + row) * ldq + (int64_t)(c->head * per + head) * dim;
        if (++row == r.count) {
            row = 0;
            head++;
        }
    }
    for (int k = c->from & -LANES; c->whole && k <= c->to; k += LANES)
        c->at[k / LANES] = kv_offset(s, b, r.seq, c->base + k, c->head);
}

/* A row of the cache for key k; outside of from..to a neighbour's, which is finite: its weight is 0. */
INLINE int64_t finite_row(const ChunkQueries *c, int k) {
    const int seen = k < c->from ? c->from : k > c->to ? c->to : k;
    return kv_offset(c->s, c->b, c->rows.seq, c->base + seen, c->head);
}

/* Scores of the keys that lie on the main line, for all queries. */
INLINE void score_line(ChunkQueries *c, int dtype, int dim, int pairs) {
    const Spec *s = c->s;
    const void *keys = c->b->keys[s->kv_layer], *values = c->b->values[s->kv_layer];
    const vf scale = vf_set(s->scale);
    const int direct = c->whole && (DIRECT || c->queries <= SCORED), each = even_share(c->queries, SCORED);
    const int64_t newest = last_key(s, c->b, c->rows.seq, c->rows.row + c->rows.count - 1);
    for (int k = c->from & -LANES; k <= c->to; k += LANES) {
        const int64_t here = c->whole ? c->at[k / LANES] : 0;
        const char *ahead = NULL, *beside = NULL; /* fetched while this tile is scored: keys to come, and its values */
        if (c->whole) { /* the cache is larger than the caches, its pages lie anywhere */
            const int soon = k + AHEAD; /* its place in the next chunk, which mostly follows at once */
            int64_t next = here;
            if (soon <= c->to) next = c->at[soon / LANES];
            else if (soon >= CHUNK && c->base + soon <= newest)
                next = kv_offset(s, c->b, c->rows.seq, c->base + soon, c->head);
            if (pairs) {
                ahead = (const char *)keys + next * 2;
                beside = (const char *)values + here * 2;
            } else {
                fetch_tile(keys, next, dim, dtype);
                fetch_tile(values, here, dim, dtype);
            }
        }
        if (!c->whole) {
            for (int i = 0; i < LANES; i++) {
                const int64_t row = finite_row(c, k + i);
                for (int d = 0; d < dim; d++) c->tile[d * LANES + i] = one_any(keys, row + d, dtype);
            }
        } else if (!direct) {
            for (int d = 0; d < dim; d++) vf_store(c->tile + d * LANES, vf_any(keys, here + (int64_t)d * LANES, dtype));
        }
        const vf by = dtype == DT_I8 ? vf_mul(scale, tile_factors(keys, here, dim)) : scale;
        for (int i = 0; i < c->queries; i += each) {
            const int count = c->queries - i < each ? c->queries - i : each;
            float *out[SCORED];
            for (int j = 0; j < count; j++) out[j] = query_scores(c, i + j) + k;
            if (pairs)
                score_some_pairs(count, c->pairs + i, (const uint32_t *)keys + here / 2, dim, scale, out,
                                 i ? NULL : ahead, beside);
            else if (direct) score_some(count, c->x + i, keys, here, dtype, dim, by, out);
            else score_some(count, c->x + i, c->tile, 0, DT_F32, dim, by, out);
        }
    }
}

/* Sorts the queries off the main line by row: a tile serves all heads of a row. */
INLINE void sort_off_line(ChunkQueries *c) {
    for (int i = 1; i < c->offs; i++)
        for (int j = i; j > 0 && query_row(c, c->off[j]) < query_row(c, c->off[j - 1]); j--) {
            const int query = c->off[j];
            c->off[j] = c->off[j - 1];
            c->off[j - 1] = query;
        }
}
/* How many of them from the i-th on are of one row, at most `most`. */
INLINE int of_one_row(const ChunkQueries *c, int i, int most) {
    const int row = query_row(c, c->off[i]);
    int count = 1;
    while (count < most && i + count < c->offs && query_row(c, c->off[i + count]) == row) count++;
    return count;
}

/* Scores of the keys that rows off the main line see in tiles of their own. */
INLINE void score_off_line(ChunkQueries *c, int dtype, int dim, int pairs) {
    const vf scale = vf_set(c->s->scale);
    for (int i = 0, count; i < c->offs; i += count) {
        const int query = c->off[i], row = query_row(c, query), first = c->lo[query] & -LANES;
        count = of_one_row(c, i, MIXED < SCORED ? MIXED : SCORED);
        for (int k = c->tail > first ? c->tail : first; k <= c->hi[query]; k += LANES) {
            float *out[MIXED];
            const float *x[MIXED];
            const uint32_t *x_pairs[MIXED];
            for (int j = 0; j < count; j++) {
                out[j] = query_scores(c, c->off[i + j]) + k;
                x[j] = c->x[c->off[i + j]];
                if (pairs) x_pairs[j] = c->pairs[c->off[i + j]];
            }
            own_tile(c->s, c->b, c->rows.seq, c->rows.row + row, c->head, c->base + k, 0, c->own);
            if (pairs) {
                score_some_pairs(count, x_pairs, (const uint32_t *)c->own, dim, scale, out, NULL, NULL);
                continue;
            }
            const vf by = dtype == DT_I8 ? vf_mul(scale, tile_factors(c->own, 0, dim)) : scale;
            score_some(count, x, c->own, 0, c->whole ? dtype : DT_F32, dim, by, out);
        }
    }
}

/* Scores become weights: part[query][maximum, sum]. Maxima of all queries first, then all exponentials: each query's
 * chain of dependent steps overlaps the next one's. */
INLINE void weigh(ChunkQueries *c, int dtype, int dim, int pairs, float *part, int64_t part_step) {
    static const float steps[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const void *values = c->b->values[c->s->kv_layer];
    const vf none = vf_set(-INFINITY), lane = vf_load(steps);
    const int weights = pairs ? DT_BF16 : DT_F32; /* what is added up is what is multiplied */
    for (int i = 0; i < c->queries; i++) {
        float *p = part + (int64_t)i * part_step, *z = query_scores(c, i);
        p[0] = -INFINITY;
        if (c->lo[i] > c->hi[i]) continue;
        vf top = none;
        const int first = c->lo[i] & -LANES, last = c->hi[i] & -LANES;
        if (c->lo[i] > first)
            vf_store(z + first, vf_pick_lt(lane, vf_set((float)(c->lo[i] - first)), none, vf_load(z + first)));
        if (c->hi[i] < last + LANES - 1) /* keys out of sight, perhaps of slots never written */
            vf_store(z + last, vf_pick_lt(lane, vf_set((float)(c->hi[i] - last + 1)), vf_load(z + last), none));
        for (int k = first; k <= last; k += LANES) top = vf_max(top, vf_load(z + k));
        p[0] = vf_hmax(top);
    }
    for (int i = 0; i < c->queries; i++) {
        float *p = part + (int64_t)i * part_step, *z = query_scores(c, i);
        const vf top = vf_set(p[0]);
        vf sum = vf_set(0.0f);
        const int first = c->lo[i] & -LANES, last = c->hi[i] & -LANES;
        for (int k = c->from & -LANES; k < first; k += LANES) vf_store_any(z, k, vf_set(0.0f), weights);
        for (int k = first; k <= last; k += LANES) {
            vf e = vf_exp(vf_sub(vf_load(z + k), top));
            if (pairs) {
                vf_store_any(z, k, e, weights);
                e = vf_any(z, k, weights);
            }
            sum = vf_add(sum, e);
            if (dtype == DT_I8 && !(c->away[i] && k >= c->tail))
                e = vf_mul(e, tile_factors(values, c->at[k / LANES], dim));
            if (!pairs) vf_store(z + k, e);
        }
        for (int k = last + LANES; k <= c->to; k += LANES) vf_store_any(z, k, vf_set(0.0f), weights);
        p[1] = vf_sum(sum);
    }
}

/* Weights, also as pairs, and sums of `count` queries of a list. */
typedef struct {
    const float *weights[MIXED];
    const uint32_t *pairs[MIXED];
    float *out[MIXED];
} Mixing;
INLINE Mixing mixing_of(const ChunkQueries *c, const int *queries, int count, float *part, int64_t part_step) {
    Mixing mixing;
    for (int j = 0; j < count; j++) {
        mixing.weights[j] = query_scores(c, queries[j]);
        mixing.pairs[j] = (const uint32_t *)mixing.weights[j];
        mixing.out[j] = part + (int64_t)queries[j] * part_step + LANES;
    }
    return mixing;
}

/* Weighted sums of the values on the main line. rows: values are read where they lie. */
INLINE void mix_line(ChunkQueries *c, int dtype, int dim, int pairs, int rows, float *part, int64_t part_step) {
    static const int64_t zero = 0;
    const void *values = c->b->values[c->s->kv_layer];
    const int wide = padded(dim), from = c->from, to = c->to;
    const int together = c->lines ? even_share(c->lines, MIXED) : 1;
    for (int k = from & -LANES; !rows && k <= to; k += LANES) {
        for (int i = 0; i < LANES; i++) {
            const int64_t row = finite_row(c, k + i);
            for (int d = 0; d < wide; d += LANES)
                vf_store(c->tile + (int64_t)i * wide + d, load_piece(values, row, d, dim, dtype));
        }
        for (int i = 0; i < c->lines; i += together) {
            const int count = c->lines - i < together ? c->lines - i : together;
            Mixing mixing = mixing_of(c, c->line + i, count, part, part_step);
            for (int j = 0; j < count; j++) mixing.weights[j] += k;
            mix_some(count, mixing.weights, c->tile, &zero, wide, DT_F32, 0, LANES, mixing.out, k > (from & -LANES));
        }
    }
    for (int i = 0; i < c->lines && (rows || to < 0); i += together) {
        const int count = c->lines - i < together ? c->lines - i : together;
        const Mixing mixing = mixing_of(c, c->line + i, count, part, part_step);
        if (pairs) {
            const uint32_t front = from & 1 ? 0xffff0000u : ~0u, back = to & 1 ? ~0u : 0xffffu;
            mix_some_pairs(count, mixing.pairs, values, c->at, dim, from / 2, to / 2 + (to >= 0), front, back,
                           mixing.out, 0);
        } else mix_some(count, mixing.weights, values, c->at, wide, dtype, from, to + 1, mixing.out, 0);
    }
}

/* The same for queries off the main line: the tiles that all share, then their own. */
INLINE void mix_off_line(ChunkQueries *c, int dtype, int dim, int pairs, int rows, float *part, int64_t part_step) {
    static const int64_t nowhere[CHUNK / LANES] = {0};
    const void *values = c->b->values[c->s->kv_layer];
    const int wide = padded(dim), tail = c->tail;
    for (int i = 0, count; i < c->offs; i += count) {
        const int query = c->off[i], row = query_row(c, query);
        const int first = c->lo[query] & -LANES, shared = rows && first < tail;
        count = of_one_row(c, i, MIXED);
        const Mixing mixing = mixing_of(c, c->off + i, count, part, part_step);
        const float *const *w = mixing.weights;
        float *const *out = mixing.out;
        if (shared && pairs)
            mix_some_pairs(count, mixing.pairs, values, c->at, dim, first / 2, tail / 2, ~0u, ~0u, out, 0);
        if (shared && !pairs) mix_some(count, w, values, c->at, wide, dtype, c->lo[query], tail, out, 0);
        for (int k = shared ? tail : first; k <= c->hi[query]; k += LANES) {
            const int more = shared || k > first;
            own_tile(c->s, c->b, c->rows.seq, c->rows.row + row, c->head, c->base + k, 1, c->own);
            for (int j = 0; dtype == DT_I8 && j < count; j++)
                vf_store((float *)w[j] + k, vf_mul(vf_load(w[j] + k), tile_factors(c->own, 0, dim)));
            if (pairs)
                mix_some_pairs(count, mixing.pairs, (const uint32_t *)c->own, nowhere, dim, k / 2, k / 2 + 8, ~0u, ~0u,
                               out, more);
            else if (rows) mix_some(count, w, c->own, nowhere, wide, dtype, k, k + LANES, out, more);
            if (!rows) {
                const float *here[MIXED];
                for (int j = 0; j < count; j++) here[j] = w[j] + k;
                mix_some(count, here, c->own, nowhere, wide, DT_F32, 0, LANES, out, more);
            }
        }
    }
}

/* One chunk of keys for queries q0..q1-1 (head by head, row by row) of a row block and a K/V head:
 * part[query][maximum, sum, values]. dtype, dim and pairs are constants of a layout. */
INLINE void attend_typed(int dtype, int dim, int pairs, const Spec *s, const Batch *b, RowBlock r, int head, int q0,
                         int q1, int chunk, const float *q, int64_t ldq, float *part, int64_t part_step,
                         float *scratch) {
    ChunkQueries c;
    c.s = s;
    c.b = b;
    c.rows = r;
    c.head = head;
    c.first_query = q0;
    c.queries = q1 - q0;
    c.base = (int64_t)chunk * CHUNK;
    c.whole = tiled(b);
    c.scores = scratch;
    c.tile = scratch + (int64_t)MAX_QUERIES * CHUNK;
    c.own = c.tile + (int64_t)LANES * padded(dim);
    chunk_queries(&c, dim, q, ldq);
    for (int i = 0; pairs && i < c.queries; i++) {
        uint16_t *half = (uint16_t *)c.tile + (int64_t)i * dim;
        for (int d = 0; d < dim; d += LANES) vf_store_any(half, d, vf_load(c.x[i] + d), DT_BF16);
        c.pairs[i] = (const uint32_t *)half;
    }
    score_line(&c, dtype, dim, pairs);
    sort_off_line(&c);
    score_off_line(&c, dtype, dim, pairs);
    weigh(&c, dtype, dim, pairs, part, part_step);
    const int rows = c.whole && dim % LANES == 0;
    mix_line(&c, dtype, dim, pairs, rows, part, part_step);
    mix_off_line(&c, dtype, dim, pairs, rows, part, part_step);
}
void attend_chunk(const Spec *s, const Batch *b, RowBlock r, int head, int q0, int q1, int chunk, const float *q,
                  int64_t ldq, float *part, int64_t part_step, float *scratch) {
#define ARGS s, b, r, head, q0, q1, chunk, q, ldq, part, part_step, scratch
    if (paired(s, b)) {
        if (s->dim == 64) attend_typed(DT_BF16, 64, 1, ARGS);
        else attend_typed(DT_BF16, s->dim, 1, ARGS);
    } else if (b->kv_dtype == DT_F16 && s->dim == 64) attend_typed(DT_F16, 64, 0, ARGS);
    else if (b->kv_dtype == DT_F16) attend_typed(DT_F16, s->dim, 0, ARGS);
    else if (b->kv_dtype == DT_F32) attend_typed(DT_F32, s->dim, 0, ARGS);
    else if (b->kv_dtype == DT_I8) attend_typed(DT_I8, s->dim, 0, ARGS);
    else attend_typed(DT_BF16, s->dim, 0, ARGS);
#undef ARGS
}
