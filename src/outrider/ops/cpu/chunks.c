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

/* One chunk of keys for queries q0..q1-1 (head by head, row by row) of a row block and a K/V head: part[query][maximum,
 * sum, values]. */
INLINE void attend_typed(int dtype, int dim, int pairs, const Spec *s, const Batch *b, RowBlock r, int head, int q0,
                         int q1, int chunk, const float *q, int64_t ldq, float *part, int64_t part_step,
                         float *scratch) {
    const int per = s->heads / s->kv_heads, nq = q1 - q0, wide = padded(dim), base = chunk * CHUNK;
    const void *keys = b->keys[s->kv_layer], *values = b->values[s->kv_layer];
    float *scores = scratch, *tile = scratch + (int64_t)MAX_QUERIES * CHUNK, *own = tile + (int64_t)LANES * wide;
    const float *x[MAX_QUERIES];
    int lo[MAX_QUERIES], hi[MAX_QUERIES], from = CHUNK, to = -1; /* visible keys of each query within the chunk */
    int line[MAX_QUERIES], nl = 0, off[MAX_QUERIES],
                           no = 0; /* queries that read the cache as it lies, and those of rows off the main line */
    uint8_t away[MAX_QUERIES] = {0};
    int tail = CHUNK; /* where the tiles begin that are put together for these */
    for (int i = 0, row = q0 % r.count, h = q0 / r.count; i < nq; i++) {
        const int64_t last = last_key(s, b, r.seq, r.row + row) - base,
                      first = first_key(s, b->positions[r.row + row]) - base;
        lo[i] = first > 0 ? (int)(first < CHUNK ? first : CHUNK) : 0;
        hi[i] = last < CHUNK - 1 ? (int)(last < -1 ? -1 : last) : CHUNK - 1;
        int seen = hi[i];
        const int64_t leaves = off_line(b, r.seq, r.row + row) - base;
        if (lo[i] <= hi[i] && leaves <= hi[i]) {
            off[no++] = i;
            away[i] = 1;
            tail = leaves > 0 ? (int)leaves & -LANES : 0;
            seen = tail - 1;
        } else line[nl++] = i;
        if (lo[i] <= seen) { from = lo[i] < from ? lo[i] : from; to = seen > to ? seen : to; }
        x[i] = q + (int64_t)(r.row + row) * ldq + (int64_t)(head * per + h) * dim;
        if (++row == r.count) row = 0, h++;
    }
    static const float steps[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vf none = vf_set(-INFINITY), scale = vf_set(s->scale), lane = vf_load(steps);
    const int whole = tiled(b), direct = whole && (DIRECT || nq <= SCORED), each = even_share(nq, SCORED);
    int64_t at[CHUNK / LANES]; /* where tiles begin, in elements */
    for (int c = from & -LANES; whole && c <= to; c += LANES) at[c / LANES] = kv_offset(s, b, r.seq, base + c, head);
#if ISA_BF16
    const uint32_t *xs[MAX_QUERIES]; /* queries as pairs, in the room of `tile` */
    for (int i = 0; pairs && i < nq; i++) {
        uint16_t *half = (uint16_t *)tile + (int64_t)i * dim;
        for (int d = 0; d < dim; d += LANES) vf_store_bf16(half + d, vf_load(x[i] + d));
        xs[i] = (const uint32_t *)half;
    }
#endif
    const int64_t newest = last_key(s, b, r.seq, r.row + r.count - 1);
    for (int c = from & -LANES; c <= to; c += LANES) {
        const char *ahead = NULL,
                   *beside = NULL; /* what shall be fetched while this tile is scored: keys to come, and its values */
        (void)ahead;
        (void)beside;
        if (whole) { /* the cache is larger than the caches, its pages lie anywhere */
            const int soon = c + AHEAD; /* its place in the next chunk, which mostly follows at once */
            const int64_t next = soon <= to                               ? at[soon / LANES]
                                 : soon >= CHUNK && base + soon <= newest ? kv_offset(s, b, r.seq, base + soon, head)
                                                                          : at[c / LANES];
            if (pairs) ahead = (const char *)keys + next * 2, beside = (const char *)values + at[c / LANES] * 2;
            else {
                fetch_tile(keys, next, dim, dtype);
                fetch_tile(values, at[c / LANES], dim, dtype);
            }
        }
        if (!whole) {
            for (int i = 0; i < LANES; i++) { /* outside from..to is a neighbour that is finite: its weight is 0 */
                const int64_t row = kv_offset(s, b, r.seq,
                                              base + (c + i < from ? from
                                                      : c + i > to ? to
                                                                   : c + i),
                                              head);
                for (int d = 0; d < dim; d++) tile[d * LANES + i] = one_any(keys, row + d, dtype);
            }
        } else if (!direct) {
            for (int d = 0; d < dim; d++)
                vf_store(tile + d * LANES, vf_any(keys, at[c / LANES] + (int64_t)d * LANES, dtype));
        }
        const vf by = dtype == DT_I8 ? vf_mul(scale, tile_factors(keys, at[c / LANES], dim)) : scale;
        for (int i = 0; i < nq; i += each) {
            const int count = nq - i < each ? nq - i : each;
            float *out[SCORED];
            for (int j = 0; j < count; j++) out[j] = scores + (int64_t)(i + j) * CHUNK + c;
#if ISA_BF16
            if (pairs) {
                score_some_pairs(count, xs + i, (const uint32_t *)keys + at[c / LANES] / 2, dim, scale, out,
                                 i ? NULL : ahead, beside);
                continue;
            }
#endif
            if (direct) score_some(count, x + i, keys, at[c / LANES], dtype, dim, by, out);
            else score_some(count, x + i, tile, 0, DT_F32, dim, by, out);
        }
    }
    for (int i = 1; i < no; i++) /* row by row: a tile serves all heads of a row */
        for (int j = i; j > 0 && (q0 + off[j]) % r.count < (q0 + off[j - 1]) % r.count; j--) {
            const int k = off[j];
            off[j] = off[j - 1];
            off[j - 1] = k;
        }
    for (int i = 0, count; i < no; i += count) {
        const int row = (q0 + off[i]) % r.count, first = lo[off[i]] & -LANES;
        for (count = 1; count < MIXED && count < SCORED && i + count < no && (q0 + off[i + count]) % r.count == row;)
            count++;
        for (int c = tail > first ? tail : first; c <= hi[off[i]]; c += LANES) {
            float *out[MIXED];
            const float *xo[MIXED];
            for (int j = 0; j < count; j++) out[j] = scores + (int64_t)off[i + j] * CHUNK + c, xo[j] = x[off[i + j]];
            own_tile(s, b, r.seq, r.row + row, head, base + c, 0, own);
#if ISA_BF16
            const uint32_t *xp[MIXED];
            for (int j = 0; pairs && j < count; j++) xp[j] = xs[off[i + j]];
            if (pairs) { score_some_pairs(count, xp, (const uint32_t *)own, dim, scale, out, NULL, NULL); continue; }
#endif
            score_some(count, xo, own, 0, whole ? dtype : DT_F32, dim,
                       dtype == DT_I8 ? vf_mul(scale, tile_factors(own, 0, dim)) : scale, out);
        }
    }
    /* maxima of all queries first, then all exponentials: each query's chain of dependent steps overlaps the next one's
     */
    for (int i = 0; i < nq; i++) {
        float *p = part + (int64_t)i * part_step, *z = scores + (int64_t)i * CHUNK;
        p[0] = -INFINITY;
        if (lo[i] > hi[i]) continue;
        vf top = none;
        const int first = lo[i] & -LANES, last = hi[i] & -LANES;
        if (lo[i] > first)
            vf_store(z + first, vf_pick_lt(lane, vf_set((float)(lo[i] - first)), none, vf_load(z + first)));
        /* keys out of sight, perhaps of slots never written */
        if (hi[i] < last + LANES - 1)
            vf_store(z + last, vf_pick_lt(lane, vf_set((float)(hi[i] - last + 1)), vf_load(z + last), none));
        for (int c = first; c <= last; c += LANES) top = vf_max(top, vf_load(z + c));
        p[0] = vf_hmax(top);
    }
    for (int i = 0; i < nq; i++) {
        float *p = part + (int64_t)i * part_step, *z = scores + (int64_t)i * CHUNK;
        const vf top = vf_set(p[0]);
        vf sum = vf_set(0.0f);
        const int first = lo[i] & -LANES, last = hi[i] & -LANES;
        for (int c = from & -LANES; c < first; c += LANES) vf_store_any(z, c, vf_set(0.0f), pairs ? DT_BF16 : DT_F32);
        for (int c = first; c <= last; c += LANES) {
            vf e = vf_exp(vf_sub(vf_load(z + c), top));
#if ISA_BF16
            if (pairs) { /* what is added up is what is multiplied */
                vf_store_bf16((uint16_t *)z + c, e);
                e = vf_bf16((uint16_t *)z + c);
            }
#endif
            sum = vf_add(sum, e);
            if (dtype == DT_I8 && !(away[i] && c >= tail)) e = vf_mul(e, tile_factors(values, at[c / LANES], dim));
            if (!pairs) vf_store(z + c, e);
        }
        for (int c = last + LANES; c <= to; c += LANES) vf_store_any(z, c, vf_set(0.0f), pairs ? DT_BF16 : DT_F32);
        p[1] = vf_sum(sum);
    }
    const int together = nl ? even_share(nl, MIXED) : 1,
              rows = whole && dim % LANES == 0; /* rows: values are read where they lie */
    for (int c = from & -LANES; !rows && c <= to; c += LANES) {
        for (int i = 0; i < LANES; i++) {
            const int64_t row = kv_offset(s, b, r.seq, base + (c + i < from ? from : c + i > to ? to : c + i), head);
            for (int d = 0; d < wide; d += LANES)
                vf_store(tile + (int64_t)i * wide + d, load_piece(values, row, d, dim, dtype));
        }
        for (int i = 0; i < nl; i += together) {
            const int count = nl - i < together ? nl - i : together;
            const float *w[MIXED];
            float *out[MIXED];
            const int64_t zero = 0;
            for (int j = 0; j < count; j++)
                w[j] = scores + (int64_t)line[i + j] * CHUNK + c,
                out[j] = part + (int64_t)line[i + j] * part_step + LANES;
            mix_some(count, w, tile, &zero, wide, DT_F32, 0, LANES, out, c > (from & -LANES));
        }
    }
    for (int i = 0; i < nl && (rows || to < 0); i += together) {
        const int count = nl - i < together ? nl - i : together;
        const float *w[MIXED];
        float *out[MIXED];
        for (int j = 0; j < count; j++)
            w[j] = scores + (int64_t)line[i + j] * CHUNK, out[j] = part + (int64_t)line[i + j] * part_step + LANES;
#if ISA_BF16
        if (pairs) {
            mix_some_pairs(count, (const uint32_t *const *)w, values, at, dim, from / 2, to / 2 + (to >= 0),
                           from & 1 ? 0xffff0000u : ~0u, to & 1 ? ~0u : 0xffffu, out, 0);
            continue;
        }
#endif
        mix_some(count, w, values, at, wide, dtype, from, to + 1, out, 0);
    }
    static const int64_t nowhere[CHUNK / LANES] = {0};
    for (int i = 0, count; i < no; i += count) { /* the tiles that all share, then its own */
        const int row = (q0 + off[i]) % r.count, first = lo[off[i]] & -LANES, shared = rows && first < tail;
        const float *w[MIXED];
        float *out[MIXED];
        for (count = 0; count < MIXED && i + count < no && (q0 + off[i + count]) % r.count == row; count++)
            w[count] = scores + (int64_t)off[i + count] * CHUNK,
            out[count] = part + (int64_t)off[i + count] * part_step + LANES;
#if ISA_BF16
        if (shared && pairs)
            mix_some_pairs(count, (const uint32_t *const *)w, values, at, dim, first / 2, tail / 2, ~0u, ~0u, out, 0);
#endif
        if (shared && !pairs) mix_some(count, w, values, at, wide, dtype, lo[off[i]], tail, out, 0);
        for (int c = shared ? tail : first; c <= hi[off[i]]; c += LANES) {
            const int more = shared || c > first;
            own_tile(s, b, r.seq, r.row + row, head, base + c, 1, own);
            for (int j = 0; dtype == DT_I8 && j < count; j++)
                vf_store((float *)w[j] + c, vf_mul(vf_load(w[j] + c), tile_factors(own, 0, dim)));
#if ISA_BF16
            if (pairs)
                mix_some_pairs(count, (const uint32_t *const *)w, (const uint32_t *)own, nowhere, dim, c / 2, c / 2 + 8,
                               ~0u, ~0u, out, more);
#endif
            if (!pairs && rows) mix_some(count, w, own, nowhere, wide, dtype, c, c + LANES, out, more);
            if (!rows) {
                const float *here[MIXED];
                for (int j = 0; j < count; j++) here[j] = w[j] + c;
                mix_some(count, here, own, nowhere, wide, DT_F32, 0, LANES, out, more);
            }
        }
    }
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
