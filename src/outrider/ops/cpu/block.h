/* A block drafter inside the decode step: its reading of the target's states, for every kind, and the drafts of a
 * DFlash, all tokens in one pass. The same row and tile functions as the single operations, so its K/V has the same
 * bits however the rows are cut; drafts cannot change the output.
 *
 * K/V of a block's own rows is written behind the committed positions, where the next pass writes. What the drafter
 * reads is only kept after a pass (Unread) and projected before its next draft, many rows at once: steps without a
 * draft of its own cost a copy.
 */
#pragma once
#include "arena.h"
#include "draft.h"

int or_forward(ThreadPool *pool, const Call *call);

typedef struct {
    Call call;                  /* its stack, with `embed`; of its batch: the cache alone */
    Weight fc, head;            /* fc: [H, streams·Ht] */
    const float *hidden_norm, *input_norm; /* of fc's output; of all its input, or NULL */
    const float *token_norm; /* EAGLE-3: of the next token's embedding, the first half of the layers' input; NULL: there
                                is none */
    const float *const *fc_norms; /* [streams] of each part of fc's input, or NULL */
    const int64_t *ids;         /* [head.n] the target's tokens; NULL: row i is token i */
    int64_t mask;               /* token of the rows behind the newest one */
    int32_t streams, first;     /* first: the row that predicts the next token */
    int32_t block;              /* rows of a draft; 0: as many as predict (its layers are causal) */
    float cap, scale;           /* of the logits: scale first; cap 0: none */
} BlockNet;

typedef struct {
    const BlockNet *net;
    Batch batch;
    const float *const *from;   /* [rows, streams] */
    const int64_t *following;   /* [rows] the next token */
    float **cos, **sin;         /* per rope variant [rows, half] */
    float *in, *y, *x, *kv[2];  /* [rows, fc.k], [rows, H], [rows, kv.k], [rows, kv.n] of two layers */
    QActs in_acts, acts;
} ContextRun;

/* What one row's layers read, from fc's output. */
static void context_row(const ContextRun *run, int64_t r) {
    const BlockNet *net = run->net;
    const Stack *s = net->call.stack;
    float *x = run->x + r * run->acts.k;
    if (net->token_norm) {
        weight_row(&s->embed, run->following[r], x);
        if (s->embed_scale != 1.0f) for (int i = 0; i < s->hidden; i++) x[i] *= s->embed_scale;
        norm_row(x, s->hidden, net->token_norm, s->eps, x);
        x += s->hidden;
    }
    norm_row(run->y + r * s->hidden, s->hidden, net->hidden_norm, s->eps, x);
    if (s->layer[0].kv.kind != W_DENSE) acts_row(&run->acts, r);
}

static void context_region(ThreadPool *pool, int me, void *job) {
    const ContextRun *run = job;
    const BlockNet *net = run->net;
    const Stack *s = net->call.stack;
    const int rows = run->batch.rows, wide = net->fc.k / net->streams;
    int lo, hi;
    pool_share(pool, me, rows, &lo, &hi);
    for (int64_t r = lo; r < hi; r++) {
        float *in = run->in + r * net->fc.k;
        for (int t = 0; t < net->streams; t++) {
            memcpy(in + (int64_t)t * wide, run->from[r * net->streams + t], (size_t)wide * 4);
            if (net->fc_norms) norm_row(in + (int64_t)t * wide, wide, net->fc_norms[t], s->eps, in + (int64_t)t * wide);
        }
        if (net->input_norm) norm_row(in, net->fc.k, net->input_norm, s->eps, in);
        if (net->fc.kind != W_DENSE) acts_row(&run->in_acts, r);
        for (int k = 0; k < s->ropes; k++)
            angles_row(run->batch.positions[r], s->inv_freq[k], s->rope_half[k], run->cos[k] + r * s->rope_half[k],
                       run->sin[k] + r * s->rope_half[k]);
    }
    pool_barrier(pool);
    Epilogue to_y = {.how = TO_STORE, .out = run->y, .ldo = s->hidden};
    product_phase(pool, me, &net->fc, &run->in_acts, rows, &to_y);
    pool_barrier(pool);
    for (int64_t r = lo; r < hi; r++) context_row(run, r);
    pool_barrier(pool);
    for (int i = 0; i < s->layers; i++) { /* a layer's heads are written while the next one's product begins */
        const Layer *l = &s->layer[i];
        const int n = l->kv.n, half = s->rope_half[l->rope];
        Spec a = l->attn;
        a.heads = 0;
        Epilogue to = {.how = TO_STORE, .bias = l->kv_bias, .out = run->kv[i & 1], .ldo = n};
        product_phase(pool, me, &l->kv, &run->acts, rows, &to);
        pool_barrier(pool);
        pool_share(pool, me, rows * (n / a.dim), &lo, &hi);
        for (int t = lo; t < hi; t++) {
            const int64_t r = t % rows;
            rope_write_head(&a, &run->batch, (int)r, t / rows, run->kv[i & 1] + r * n, run->cos[l->rope] + r * half,
                            run->sin[l->rope] + r * half, NULL, l->k_norm);
        }
    }
}

/* As run_layout. */
static size_t context_layout(ContextRun *run, char *at) {
    const BlockNet *net = run->net;
    const Stack *s = net->call.stack;
    const size_t R = (size_t)run->batch.rows, H = (size_t)s->hidden;
    size_t used = 0, n = 0;
    const int k = s->layer[0].kv.k;
    for (int i = 0; i < s->layers; i++) if ((size_t)s->layer[i].kv.n > n) n = (size_t)s->layer[i].kv.n;
    run->cos = (float **)TAKE(2 * s->ropes * sizeof(float *));
    run->sin = run->cos + s->ropes;
    for (int i = 0; i < s->ropes; i++) {
        float *cos = (float *)TAKE(R * s->rope_half[i] * 4), *sin = (float *)TAKE(R * s->rope_half[i] * 4);
        if (at) { run->cos[i] = cos; run->sin[i] = sin; }
    }
    run->in = (float *)TAKE(R * net->fc.k * 4);
    run->y = (float *)TAKE(R * H * 4);
    run->x = (float *)TAKE(R * k * 4);
    run->kv[0] = (float *)TAKE(R * n * 4);
    run->kv[1] = (float *)TAKE(R * n * 4);
    run->in_acts =
        acts_at(TAKE(acts_bytes(run->batch.rows, net->fc.k)), run->batch.rows, net->fc.k, run->in, net->fc.k);
    run->acts = acts_at(TAKE(acts_bytes(run->batch.rows, k)), run->batch.rows, k, run->x, k);
    return used;
}

/* Writes the K/V of `batch`'s rows. from [rows, streams]: the target's states of each; following [rows]. Returns 1
 * without scratch. */
static int block_context(ThreadPool *pool, const BlockNet *net, const Batch *batch, const float *const *from,
                         const int64_t *following) {
    ContextRun run = {.net = net, .batch = *batch, .from = from, .following = following};
    pool_begin(pool);
    char *at = pool_scratch(pool, context_layout(&run, NULL));
    if (at) {
        context_layout(&run, at);
        pool_run(pool, context_region, &run);
    }
    pool_end(pool);
    return at ? 0 : 1;
}
/* The same of whole streams: [streams] [rows, Ht] */
int or_block_context(ThreadPool *pool, const BlockNet *net, const Batch *batch, const float *const *streams,
                     const int64_t *following) {
    const int64_t wide = net->fc.k / net->streams;
    const float **from = malloc((size_t)batch->rows * net->streams * sizeof(float *));
    if (!from) return 1;
    for (int64_t i = 0; i < (int64_t)batch->rows * net->streams; i++)
        from[i] = streams[i % net->streams] + i / net->streams * wide;
    const int failed = block_context(pool, net, batch, from, following);
    free(from);
    return failed;
}

/* ---- what is not yet read ---- */
typedef struct {                /* committed rows, by slot */
    float *states;              /* [slots, most, fc.k] */
    int64_t *following;         /* [slots, most] */
    int64_t *span;              /* [slots, 2] the first one's position and their number */
    int64_t most;
} Unread;

/* Reads the kept rows of some slots. Returns 1 without memory. */
int or_read_slots(ThreadPool *pool, const BlockNet *net, const Unread *u, const int64_t *slots, int count) {
    int64_t rows = 0, r = 0;
    for (int i = 0; i < count; i++) rows += u->span[2 * slots[i] + 1];
    if (!rows) return 0;
    Arena arena = {0};
    int64_t *positions = NEW(&arena, int64_t, rows);
    int64_t *row_seq = NEW(&arena, int64_t, rows);
    int64_t *following = NEW(&arena, int64_t, rows);
    const float **from = NEW(&arena, const float *, rows * net->streams);
    if (arena.failed) {
        arena_free(&arena);
        return 1;
    }
    for (int i = 0; i < count; i++) {
        const int64_t slot = slots[i], *span = u->span + 2 * slot;
        for (int64_t j = 0; j < span[1]; j++, r++) {
            const float *states = u->states + (slot * u->most + j) * net->fc.k;
            positions[r] = span[0] + j;
            row_seq[r] = slot;
            following[r] = u->following[slot * u->most + j];
            for (int t = 0; t < net->streams; t++)
                from[r * net->streams + t] = states + (int64_t)t * (net->fc.k / net->streams);
        }
    }
    Batch batch = net->call.batch; /* whole tables, by slot */
    batch.rows = (int32_t)rows;
    batch.positions = positions;
    batch.row_seq = row_seq;
    const int failed = block_context(pool, net, &batch, from, following);
    for (int i = 0; i < count && !failed; i++) u->span[2 * slots[i] + 1] = 0; /* rows that were not read stay unread */
    arena_free(&arena);
    return failed;
}
/* ---- choosing ---- */
typedef struct {                /* the draft tokens of some sequences */
    int steps, rows;            /* rows: sequences · steps */
    const float *temperature;   /* of each sequence; 1 where greedy */
    const uint8_t *sampled;
    const int64_t *seed, *position; /* position of the first token */
    const int64_t *top_k;       /* as filter_row; NULL: no filter */
    const double *top_p;
    const float *min_logp;
    float *z, *room;            /* [rows, n]; [members, n + FILTER_ROOM(n)] */
    int64_t *out;               /* [rows] */
    float *confidence;          /* [rows] */
    const BlockNet *net;
} Guess;

static void guess_region(ThreadPool *pool, int me, void *job) {
    const Guess *g = job;
    const BlockNet *net = g->net;
    const int n = net->head.n;
    int r, hi;
    while (pool_next(pool, g->rows, 1, &r, &hi)) {
        const int b = r / g->steps;
        float *z = g->z + (int64_t)r * n, *from = z;
        if (net->scale != 1.0f)
            for (int i = 0; i < n; i++)
                z[i] = net->cap > 0.0f ? tanhf(z[i] * (net->scale / net->cap)) * net->cap : z[i] * net->scale;
        if (g->sampled[b]) for (int i = 0; i < n; i++) z[i] /= g->temperature[b];
        if (g->sampled[b] && g->top_k) { /* confidence is that of all tokens */
            from = memcpy(g->room + me * (n + FILTER_ROOM(n)), z, (size_t)n * 4);
            filter_row(from, n, g->top_k[b], g->top_p[b], g->min_logp[b], from + n);
        }
        const int64_t at = choose_row(from, n, g->sampled[b], g->seed[b], g->position[b] + r % g->steps, net->ids);
        g->out[r] = net->ids ? net->ids[at] : at;
        g->confidence[r] = softmax_at(z, n, at);
    }
}
