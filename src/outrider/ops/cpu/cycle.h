/* A whole decode cycle in one call: draft K, verify K + 1, choose, accept, keep what the next draft starts from.
 * The same sums as or_draft, or_forward, or_logits and or_choose one after the other, so the results are bitwise the same; it
 * saves the host's work between them, which runs on cold caches after 100 MB of weights have been read.
 */
#pragma once
#include "block.h"
#include "tree.h"

int or_forward(ThreadPool *pool, const Call *call);
int or_logits(ThreadPool *pool, const Weight *w, const float *x, int rows, float cap, float *out);

typedef struct {          /* one sequence */
    int64_t last, length;  /* the newest token and its position */
    double stop, drop;     /* as in Draft */
    double steps;          /* out, of a tree: as in BuiltTree */
    int32_t slot;
    int32_t k;             /* in: most tokens to draft, in a chain; out: tokens verified */
    int32_t given;         /* drafts[b] already holds k tokens */
    int32_t accepted;      /* out */
    int32_t nodes;         /* most tokens of a tree; 0: a chain */
    int32_t priced;        /* prices[b] says what its rows cost */
    int32_t adapter;       /* which of the call's it uses; -1: none */
    int32_t likely;        /* logprobs: of the chosen tokens and of this many of the cycle's `likely` best; -1: none */
    int32_t block;         /* its draft is the block drafter's */
    int32_t unused;
} CycleRequest;

typedef struct {
    Call call;                     /* the target's stack; of its batch: page size, whole page tables by slot, the cache */
    Weight head;
    const Draft *draft;            /* the drafter's round (its batch: the cache alone), or NULL: drafts are given */
    float *const *taps;            /* [streams] [rows, H] residual streams that the drafter reads as well as the hidden state */
    float *features;               /* [slots, (1 + streams)·H], by slot: in what drafts start from, out what the next will */
    float *z;                      /* [rows, V] */
    CycleRequest *requests;                  /* [B] */
    int64_t *drafts;               /* [B, most] */
    float *confidence;             /* [B, most] of what was drafted here */
    int32_t *parents;              /* [B, most] out, of a tree: the row that each token follows; 0: the newest token */
    int32_t *path;                 /* [B, most] out, of a tree: the rows that were accepted */
    const double *prices;          /* [B, most + 1] of that many rows, in tokens */
    const float *temperature;      /* [B]; 1 where greedy */
    const uint8_t *sampled;            /* [B] */
    const int64_t *seed;           /* [B] */
    const int64_t *top_k;          /* [B] as filter_row; NULL: no sequence is filtered */
    const double *top_p;           /* [B] */
    const float *min_logp;         /* [B] */
    const double *trust;           /* as in Draft */
    int64_t *chosen;               /* [rows] the target's own tokens */
    float *logprobs;               /* [rows, 1 + 2·likely] out, for rows of sequences with logprobs: as logprob_row */
    int32_t seqs, most, streams, shift; /* shift: of the drafter's constant position */
    float cap;                     /* of the logits; 0: none */
    int32_t likely;                /* the maximum over the sequences; -1: no logprobs */
    const BlockNet *block;         /* a drafter that reads all rows, or NULL */
    const Unread *unread;          /* what it has not yet read */
    const int32_t *block_taps;     /* [block->streams] its own among `taps` */
} Cycle;

typedef struct { const Cycle *c; const int64_t *row_seq, *position; int rows; float *warm; } VerdictJob; /* warm: [members, V + FILTER_ROOM(V)] */
static void verdict_region(ThreadPool *pool, int me, void *job) {
    const VerdictJob *j = job;
    const Cycle *c = j->c;
    const int n = c->head.n;
    int lo, hi;
    while (pool_next(pool, j->rows, 1, &lo, &hi)) {
        const int64_t b = j->row_seq[lo];
        const int told = c->requests[b].likely >= 0, heat = c->sampled[b] && c->temperature[b] != 1.0f, filter = c->sampled[b] && c->top_k;
        float *z = c->z + (int64_t)lo * n, *own = j->warm + me * (n + FILTER_ROOM(n));
        float *warm = told && (heat || filter) ? own : z; /* logprobs are those of the raw logits */
        if (heat) for (int i = 0; i < n; i++) warm[i] = z[i] / c->temperature[b];
        else if (warm != z) memcpy(warm, z, (size_t)n * 4);
        if (filter) filter_row(warm, n, c->top_k[b], c->top_p[b], c->min_logp[b], own + n);
        c->chosen[lo] = choose_row(warm, n, c->sampled[b], c->seed[b], j->position[lo] + 1, NULL);
        if (told) logprob_row(z, n, c->chosen[lo], c->likely, c->logprobs + lo * (INT64_C(1) + 2 * c->likely));
    }
}

/* Choosing needs no logits in memory without logprobs and filters: every member keeps the best of its outputs, of z or of z with its noise,
 * while it waits for the next weights. */
typedef struct { const Cycle *c; QActs a; int rows; const Draw *draw; Best *best; } BestJob; /* best: [members, rows] */
static void best_region(ThreadPool *pool, int me, void *job) {
    const BestJob *j = job;
    const Weight *w = &j->c->head;
    Best *mine = j->best + (int64_t)me * j->rows;
    int lo, hi;
    pool_share(pool, me, j->rows, &lo, &hi);
    for (int r = lo; r < hi && w->kind != W_DENSE; r++) acts_row(&j->a, r);
    for (int r = 0; r < j->rows; r++) {
        for (int i = 0; i < LANES; i++) mine[r].value[i] = -INFINITY, mine[r].group[i] = 0.0f;
        mine[r].found = -INFINITY;
    }
    pool_barrier(pool);
    Epilogue to = {TO_STORE, .cap = j->c->cap, .best = mine, .draw = j->draw};
    product_phase(pool, me, w, &j->a, j->rows, &to);
    pool_barrier(pool);
    for (int r = lo; r < hi; r++) {
        float top = -INFINITY;
        int64_t at = 0;
        for (int t = 0; t < pool->size * LANES; t++) {
            const Best *b = j->best + (int64_t)(t / LANES) * j->rows + r;
            const float value = b->value[t % LANES];
            const int64_t token = (int64_t)b->group[t % LANES] * LANES + t % LANES;
            if (value > top || (value == top && token < at)) top = value, at = token;
        }
        j->c->chosen[r] = at;
    }
}
static int choose_best(ThreadPool *pool, const Cycle *c, const float *x, int rows, const int64_t *row_seq, const int64_t *position) {
    const Weight *w = &c->head;
    const size_t acts = acts_bytes(rows, w->k), best = (size_t)pool->size * rows * sizeof(Best);
    pool_begin(pool);
    char *at = pool_scratch(pool, acts + best + rows * sizeof(Draw));
    if (at) {
        Draw *draw = (Draw *)(at + acts + best);
        int sampled = 0;
        for (int r = 0; r < rows; r++) {
            const int64_t b = row_seq[r];
            draw[r] = (Draw){noise_key(c->seed[b], position[r] + 1), c->sampled[b], c->temperature[b]};
            sampled |= c->sampled[b];
        }
        BestJob job = {c, acts_at(at, rows, w->k, x, w->k), rows, sampled ? draw : NULL, (Best *)(at + acts)};
        pool_run(pool, best_region, &job);
    }
    pool_end(pool);
    return at ? 0 : 1;
}

/* Page tables of the sequences `who` of a cycle, gathered: [count, width] for each group. */
static void gather_tables(Batch *to, const Cycle *c, const int *who, int count, int width, int32_t *at) {
    for (int g = 0; g < 2; g++) {
        const int32_t *from = c->call.batch.tables[g];
        if (!from) continue;
        for (int i = 0; i < count; i++)
            memcpy(at + (int64_t)i * width, from + (int64_t)c->requests[who ? who[i] : i].slot * c->call.batch.width[g], (size_t)width * 4);
        to->tables[g] = at;
        to->width[g] = width;
        at += (int64_t)count * width;
    }
}

/* A sequence's draft: at most `length` of the `steps` tokens at `out`. */
static void take_draft(Cycle *c, int b, int64_t length, const int64_t *out, const float *sure, int steps) {
    int k = length < c->requests[b].k ? (int)length : c->requests[b].k;
    for (int j = 0; j < k; j++) {
        if (out[j] < 0 || out[j] >= c->head.n) { k = j; break; } /* a damaged drafter must not reach the target */
        c->drafts[(int64_t)b * c->most + j] = out[j];
    }
    memcpy(c->confidence + (int64_t)b * c->most, sure, (size_t)steps * 4);
    c->requests[b].k = k;
}

/* Draft for the sequences without given drafts. */
static int cycle_draft(ThreadPool *pool, Cycle *c, int width) {
    const int B = c->seqs, H = c->call.stack->hidden, wide = (1 + c->streams) * H;
    int n = 0, steps = 0, who[B];
    for (int b = 0; b < B; b++)
        if (!c->requests[b].given && !c->requests[b].block && c->requests[b].k > 0 && !c->requests[b].nodes) { who[n++] = b; if (c->requests[b].k > steps) steps = c->requests[b].k; }
    if (!n) return 0;
    Draft d = *c->draft;
    const int T = (d.call.stack->pre.k - 2 * H) / H; /* of the streams, the drafter's own: the first */
    const size_t floats = (size_t)n * ((1 + T) * H + 2 + steps), longs = (size_t)n * (7 + steps), doubles = 3 * (size_t)n;
    char *room = malloc(floats * 4 + longs * 8 + doubles * 8 + (size_t)(n + 1 + 2 * n * width) * 4 + n), *at = room;
    if (!room) return 1;
    int64_t *last = (int64_t *)at, *seed = last + n, *guess = seed + n, *lengths = guess + n, *position = lengths + n, *row_seq = position + n,
            *top_k = row_seq + n, *out = top_k + n;
    double *stop = (double *)(out + (size_t)n * steps), *drop = stop + n, *top_p = drop + n;
    float *min_logp = (float *)(top_p + n), *start = min_logp + n, *taps = start + (size_t)n * H, *temperature = taps + (size_t)n * T * H, *sure = temperature + n;
    int32_t *row_start = (int32_t *)(sure + (size_t)n * steps), *tables = row_start + n + 1;
    uint8_t *sampled = (uint8_t *)(tables + 2 * (size_t)n * width);
    for (int i = 0; i < n; i++) {
        const int b = who[i];
        const CycleRequest *a = &c->requests[b];
        const float *from = c->features + (int64_t)a->slot * wide;
        last[i] = a->last; seed[i] = c->seed[b]; sampled[i] = c->sampled[b]; temperature[i] = c->temperature[b];
        guess[i] = a->length + 1; position[i] = a->length - 1; row_seq[i] = row_start[i] = i;
        stop[i] = a->stop; drop[i] = a->drop;
        if (c->top_k) top_k[i] = c->top_k[b], top_p[i] = c->top_p[b], min_logp[i] = c->min_logp[b];
        memcpy(start + (int64_t)i * H, from, (size_t)H * 4);
        for (int t = 0; t < T; t++) norm_row(from + (1 + t) * H, H, NULL, d.call.stack->eps, taps + ((int64_t)i * T + t) * H);
    }
    row_start[n] = n;
    Batch *v = &d.call.batch;
    v->rows = v->seqs = n; v->rope_shift = c->shift;
    v->positions = position; v->row_seq = row_seq; v->row_start = row_start;
    gather_tables(v, c, who, n, width, tables);
    d.steps = steps; d.last = last; d.start = start; d.taps = T ? taps : NULL; d.temperature = temperature; d.sampled = sampled; d.seed = seed;
    d.position = guess; d.out = out; d.confidence = sure; d.lengths = lengths;
    d.top_k = c->top_k ? top_k : NULL; d.top_p = top_p; d.min_logp = min_logp;
    d.stop = c->trust ? stop : NULL; d.drop = c->trust ? drop : NULL; d.trust = c->trust;
    memset(sure, 0, (size_t)n * steps * 4); /* steps that do not run */
    const int failed = or_draft(pool, &d);
    for (int i = 0; i < n && !failed; i++) take_draft(c, who[i], lengths[i], out + (int64_t)i * steps, sure + (int64_t)i * steps, steps);
    free(room);
    return failed;
}

/* A block drafter's pass for the sequences `who`: the newest token of each and masks. hidden [n · steps, H]: of the rows that predict. */
static int block_forward(ThreadPool *pool, const Cycle *c, const int *who, int n, int steps, float *hidden) {
    const BlockNet *net = c->block;
    const int S = net->block ? net->block : steps + net->first, R = n * S, W = n * steps;
    int64_t furthest = 0;
    for (int i = 0; i < n; i++) if (c->requests[who[i]].length > furthest) furthest = c->requests[who[i]].length;
    const int width = (int)((furthest + S) / c->call.batch.page_size) + 1;
    char *room = malloc(((size_t)3 * (R + W) + n) * 8 + (size_t)(2 * (n + 1) + 2 * n * width) * 4);
    if (!room) return 1;
    int64_t *ids = (int64_t *)room, *positions = ids + R, *row_seq = positions + R, *wanted = row_seq + R, *few_at = wanted + W, *few_seq = few_at + W,
            *ends = few_seq + W;
    int32_t *row_start = (int32_t *)(ends + n), *few_start = row_start + n + 1, *tables = few_start + n + 1;
    for (int i = 0; i < n; i++) {
        const int64_t at = c->requests[who[i]].length;
        row_start[i] = i * S; few_start[i] = i * steps; ends[i] = at + S - 1;
        for (int j = 0; j < S; j++) ids[i * S + j] = j ? net->mask : c->requests[who[i]].last, positions[i * S + j] = at + j, row_seq[i * S + j] = i;
        for (int j = 0; j < steps; j++)
            wanted[i * steps + j] = i * S + net->first + j, few_at[i * steps + j] = at + net->first + j, few_seq[i * steps + j] = i;
    }
    row_start[n] = R; few_start[n] = W;
    Call call = net->call;
    gather_tables(&call.batch, c, who, n, width, tables);
    call.batch.seqs = n; call.batch.ends = ends;
    call.few = call.batch;
    call.batch.rows = R; call.batch.ids = ids; call.batch.positions = positions; call.batch.row_seq = row_seq; call.batch.row_start = row_start;
    call.few.rows = W; call.few.positions = few_at; call.few.row_seq = few_seq; call.few.row_start = few_start;
    call.wanted = wanted; call.narrow = 1; call.hidden = hidden;
    const int failed = or_forward(pool, &call);
    free(room);
    return failed;
}

/* A block drafter's drafts, after it has read what it has not. */
static int cycle_block(ThreadPool *pool, Cycle *c) {
    const BlockNet *net = c->block;
    const int B = c->seqs;
    int n = 0, steps = 0, who[B];
    int64_t slots[B];
    for (int b = 0; b < B; b++) {
        CycleRequest *a = &c->requests[b];
        if (a->given || !a->block || a->k <= 0) continue;
        if (net->block && a->k > net->block - net->first) a->k = net->block - net->first; /* a block predicts no more */
        if (c->unread->span[2 * a->slot] + c->unread->span[2 * a->slot + 1] != a->length) c->unread->span[2 * a->slot + 1] = 0;
        slots[n] = a->slot; who[n++] = b;
        steps = a->k > steps ? a->k : steps;
    }
    if (!n) return 0;
    if (or_read_slots(pool, net, c->unread, slots, n)) return 1;
    const size_t rows = (size_t)n * steps, V = (size_t)net->head.n;
    char *room = malloc((rows + 3 * (size_t)n) * 8 + (size_t)n * 8 + (rows * (1 + net->call.stack->hidden) + 2 * (size_t)n) * 4 + n);
    if (!room) return 1;
    int64_t *out = (int64_t *)room, *seed = out + rows, *position = seed + n, *top_k = position + n;
    double *top_p = (double *)(top_k + n);
    float *min_logp = (float *)(top_p + n), *temperature = min_logp + n, *sure = temperature + n, *hidden = sure + rows;
    uint8_t *sampled = (uint8_t *)(hidden + rows * net->call.stack->hidden);
    for (int i = 0; i < n; i++) {
        const int b = who[i];
        seed[i] = c->seed[b]; position[i] = c->requests[b].length + 1; temperature[i] = c->temperature[b]; sampled[i] = c->sampled[b];
        if (c->top_k) top_k[i] = c->top_k[b], top_p[i] = c->top_p[b], min_logp[i] = c->min_logp[b];
    }
    int failed = block_forward(pool, c, who, n, steps, hidden);
    if (!failed) failed = or_logits(pool, &net->head, hidden, (int)rows, net->scale == 1.0f ? net->cap : 0.0f, c->z);
    if (!failed) {
        pool_begin(pool);
        Guess job = {steps, (int)rows, temperature, sampled, seed, position, c->top_k ? top_k : NULL, top_p, min_logp, c->z,
                     (float *)pool_scratch(pool, pool->size * (V + FILTER_ROOM(V)) * 4), out, sure, net};
        failed = !job.room;
        if (!failed) pool_run(pool, guess_region, &job);
        pool_end(pool);
    }
    for (int i = 0; i < n && !failed; i++) {
        const CycleRequest *a = &c->requests[who[i]];
        double path = 1.0;
        int64_t length = steps;
        for (int j = 0; c->trust && j < a->k && goes_on(c->trust, a->stop, a->drop, &length, j, sure[(int64_t)i * steps + j], &path);) j++;
        take_draft(c, who[i], length, out + (int64_t)i * steps, sure + (int64_t)i * steps, steps);
    }
    free(room);
    return failed;
}

/* Keeps what the block drafter will read of a sequence's accepted rows, the first of which is `row`. */
static int keep_unread(ThreadPool *pool, const Cycle *c, const CycleRequest *a, int b, int64_t row) {
    const BlockNet *net = c->block;
    const Unread *u = c->unread;
    const int wide = net->fc.k / net->streams;
    int64_t *span = u->span + INT64_C(2) * a->slot, slot = a->slot;
    if (span[0] + span[1] != a->length) span[1] = 0; /* of another text */
    if (span[1] + a->accepted + 1 > u->most && or_read_slots(pool, net, u, &slot, 1)) return 1;
    if (!span[1]) span[0] = a->length;
    for (int j = 0; j <= a->accepted; j++, span[1]++) {
        const int64_t r = row + (j && a->nodes ? c->path[(int64_t)b * c->most + j - 1] : j), at = slot * u->most + span[1];
        u->following[at] = c->chosen[row + j]; /* of a tree: accept_path has put the path's first */
        for (int t = 0; t < net->streams; t++)
            memcpy(u->states + at * net->fc.k + (int64_t)t * wide, c->taps[c->block_taps[t]] + r * wide, (size_t)wide * 4);
    }
    return 0;
}

/* A tree of drafts of one sequence. */
static int cycle_tree(ThreadPool *pool, Cycle *c, int b, int width) {
    CycleRequest *a = &c->requests[b];
    const int H = c->call.stack->hidden;
    const float *from = c->features + (int64_t)a->slot * (1 + c->streams) * H;
    Draft d = *c->draft;
    const int S = (d.call.stack->pre.k - 2 * H) / H; /* of the streams, the drafter's own: the first */
    int64_t last[TREE_WIDE] = {a->last}, guess[TREE_WIDE] = {a->length + 1}, seed[TREE_WIDE], position[TREE_WIDE], row_seq[TREE_WIDE] = {0};
    float temperature[TREE_WIDE];
    uint8_t sampled[TREE_WIDE];
    BuiltTree grown;
    char *room = malloc((size_t)TREE_WIDE * (2 + S) * H * 4 + (size_t)2 * width * 4);
    if (!room) return 1;
    float *start = (float *)room, *taps = start + (size_t)2 * TREE_WIDE * H;
    memcpy(start, from, (size_t)H * 4);
    for (int i = 0; i < TREE_WIDE; i++) {
        seed[i] = c->seed[b]; sampled[i] = c->sampled[b]; temperature[i] = c->temperature[b]; position[i] = a->length - 1;
        for (int t = 0; t < S; t++) norm_row(from + (1 + t) * H, H, NULL, d.call.stack->eps, taps + ((int64_t)i * S + t) * H);
    }
    d.call.batch.rope_shift = c->shift;
    d.call.batch.positions = position; d.call.batch.row_seq = row_seq;
    gather_tables(&d.call.batch, c, &b, 1, width, (int32_t *)(taps + (size_t)TREE_WIDE * S * H));
    d.taps = S ? taps : NULL; d.temperature = temperature; d.sampled = sampled; d.seed = seed;
    const int failed = build_tree(pool, &d, H, c->head.n, a->k < TREE_DEEP ? a->k : TREE_DEEP, a->stop, a->drop, c->trust, start, last, guess, &grown);
    if (!failed) {
        const int64_t at = (int64_t)b * c->most;
        a->k = pick_nodes(&grown, a->nodes, a->priced ? c->prices + b * (c->most + INT64_C(1)) : NULL, c->drafts + at, c->confidence + at, c->parents + at);
        a->steps = grown.steps;
    }
    free(room);
    return failed;
}

/* Accept from the root on the child that holds the target's choice, while there is one. The accepted rows' choices are moved to the front
 * of the sequence's, their keys and values to the positions of their tokens. Returns the last accepted row. */
static int accept_path(const Cycle *c, const Batch *v, int b) {
    CycleRequest *a = &c->requests[b];
    int64_t *chosen = c->chosen + v->row_start[b];
    const int64_t *drafts = c->drafts + (int64_t)b * c->most;
    const int32_t *parents = c->parents + (int64_t)b * c->most;
    int32_t *path = c->path + (int64_t)b * c->most;
    int at = 0, right = 0, j;
    do {
        for (j = 0; j < a->k && !(parents[j] == at && drafts[j] == chosen[at]); j++) {}
        if (j < a->k) path[right++] = at = j + 1;
    } while (j < a->k);
    for (int i = 0; i < right; i++) chosen[i + 1] = chosen[path[i]]; /* path[i] > i: read before it is written */
    const Stack *s = c->call.stack;
    for (int l = 0; l < s->layers; l++)
        for (int i = 0; i < right && s->layer[l].attn.writes; i++)
            if (path[i] != i + 1) move_kv(&s->layer[l].attn, v, b, a->length + path[i], a->length + i + 1);
    a->accepted = right;
    return at;
}

int or_decode_step(ThreadPool *pool, Cycle *c) {
    const int B = c->seqs, H = c->call.stack->hidden, deep = c->most + 1;
    int64_t furthest = 0, rows = 0, trees = 0;
    for (int b = 0; b < B; b++) {
        const CycleRequest *a = &c->requests[b];
        const int64_t end = a->length + (a->k > a->nodes ? a->k : a->nodes);
        furthest = end > furthest ? end : furthest;
        trees |= a->nodes;
    }
    const int width = (int)(furthest / c->call.batch.page_size) + 1;
    if (c->draft && cycle_draft(pool, c, width)) return 1;
    if (c->block && cycle_block(pool, c)) return 1;
    for (int b = 0; b < B; b++) if (c->requests[b].nodes && cycle_tree(pool, c, b, width)) return 1;
    for (int b = 0; b < B; b++) rows += c->requests[b].k + 1;
    char *room = malloc((size_t)rows * 4 * 8 + (size_t)(rows + B + 1 + 2 * B * width) * 4 + (trees ? (size_t)rows * deep * 4 : 0));
    if (!room) return 1;
    int64_t *ids = (int64_t *)room, *positions = ids + rows, *row_seq = positions + rows, *places = row_seq + rows;
    int32_t *of = (int32_t *)(places + rows), *row_start = of + rows, *tables = row_start + B + 1, *paths = tables + 2 * B * width;
    int r = 0;
    for (int b = 0; b < B; b++) {
        row_start[b] = r;
        for (int j = 0; j <= c->requests[b].k; j++, r++) {
            ids[r] = j ? c->drafts[(int64_t)b * c->most + j - 1] : c->requests[b].last;
            places[r] = positions[r] = c->requests[b].length + j;
            row_seq[r] = b;
            of[r] = c->requests[b].adapter;
            if (!trees) continue;
            const int up = j ? row_start[b] + (c->requests[b].nodes ? c->parents[(int64_t)b * c->most + j - 1] : j - 1) : r;
            const int depth = j ? (int)(positions[up] - c->requests[b].length) + 1 : 0;
            memcpy(paths + (int64_t)r * deep, paths + (int64_t)up * deep, (size_t)depth * 4);
            for (int i = depth; i < deep; i++) paths[(int64_t)r * deep + i] = j;
            positions[r] = c->requests[b].length + depth;
        }
    }
    row_start[B] = r;
    Call call = c->call;
    if (trees) { call.batch.places = places; call.batch.paths = paths; call.batch.path_width = deep; }
    call.batch.rows = r; call.batch.seqs = B; call.adapters.of = of;
    call.batch.ids = ids; call.batch.positions = positions; call.batch.row_seq = row_seq; call.batch.row_start = row_start;
    gather_tables(&call.batch, c, NULL, B, width, tables);
    int failed = or_forward(pool, &call);
    if (!failed && c->likely < 0 && !c->top_k) failed = choose_best(pool, c, call.hidden, r, row_seq, positions);
    else if (!failed) failed = or_logits(pool, &c->head, call.hidden, r, c->cap, c->z);
    if (!failed && (c->likely >= 0 || c->top_k)) {
        pool_begin(pool);
        VerdictJob job = {c, row_seq, positions, r, pool_scratch(pool, pool->size * (c->head.n + FILTER_ROOM(c->head.n)) * 4)};
        failed = !job.warm;
        if (!failed) pool_run(pool, verdict_region, &job);
        pool_end(pool);
    }
    if (!failed) {
        for (int b = 0; b < B; b++) {
            CycleRequest *a = &c->requests[b];
            int right = 0;
            if (a->nodes) right = accept_path(c, &call.batch, b);
            else {
                while (right < a->k && c->drafts[(int64_t)b * c->most + right] == c->chosen[row_start[b] + right]) right++;
                a->accepted = right;
            }
            if (c->block && keep_unread(pool, c, a, b, row_start[b])) failed = 1;
            const int64_t row = row_start[b] + right;
            float *to = c->features + (int64_t)a->slot * (1 + c->streams) * H;
            memcpy(to, call.hidden + row * H, (size_t)H * 4);
            for (int t = 0; t < c->streams; t++) memcpy(to + (1 + t) * H, c->taps[t] + row * H, (size_t)H * 4);
        }
    }
    free(room);
    return failed;
}
