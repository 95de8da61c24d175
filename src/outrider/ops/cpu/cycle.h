/* A whole decode cycle in one call: draft K, verify K + 1, choose, accept, keep what the next draft starts from.
 * The same sums as or_draft, or_forward, or_logits and or_choose one after the other, so the results are bitwise the
 * same; it saves the host's work between them, which runs on cold caches after 100 MB of weights have been read.
 */
#pragma once
#include "block.h"
#include "tree.h"

int or_forward(ThreadPool *pool, const Call *call);
int or_logits(ThreadPool *pool, const Weight *w, const float *x, int rows, float cap, float *out);

enum { PROPOSER_HOST, PROPOSER_MTP, PROPOSER_BLOCK }; /* as decode_io.Proposer */

typedef struct { /* what to do with each sequence: the arrays of decode_io.DecodeInputs, by their names */
    const int64_t *slot;           /* [B] */
    const int64_t *last_token;     /* [B] the newest token */
    const int64_t *position;       /* [B] its position */
    const int64_t *max_draft;      /* [B] tokens to draft, in a chain; of a tree its depth */
    const int64_t *max_nodes;      /* [B] tokens of a tree; 0: a chain */
    const int64_t *proposer;       /* [B] PROPOSER_HOST: the draft is the first max_draft tokens of host_draft */
    const int64_t *host_draft;     /* [B, host_draft_width] */
    const double *stop_below;      /* [B] as stop and drop in Draft */
    const double *drop_below;      /* [B] */
    const int64_t *has_prices;     /* [B] */
    const double *prices;          /* [B, most + 1] of that many rows of a tree, in tokens */
    const int64_t *adapter;        /* [B] which of the call's it uses; -1: none */
    const int64_t *num_logprobs; /* [B] of the chosen tokens and of this many of the cycle's `likely` best; -1: none */
    int64_t host_draft_width;
} DecodeInputs;

typedef struct {                   /* the arrays of decode_io.DecodeOutputs, by their names */
    int64_t *tokens;               /* [B, most + 1] the accepted draft tokens, then the target's next one */
    int64_t *num_tokens;           /* [B] */
    int64_t *num_drafted;          /* [B] tokens that were verified */
    int64_t *draft;                /* [B, most] these tokens */
    int64_t *parents;              /* [B, most] of a tree: the row that each token follows; 0: the newest token */
    int64_t *path;                 /* [B, most] of a tree: the rows that were accepted */
    double *draft_steps;           /* [B] of a tree: as in BuiltTree */
    float *confidence;             /* [B, most] of tokens that were drafted here */
    int64_t *num_confidences;      /* [B]; -1: no token was */
    float *logprobs; /* [B, most + 1, 1 + 2·likely] of tokens, for sequences with logprobs: as logprob_row */
} DecodeOutputs;

typedef struct {
    Call call; /* the target's stack; of its batch: page size, whole page tables by slot, the cache */
    Weight head;
    const Draft *draft;            /* the drafter's round (its batch: the cache alone), or NULL: drafts are given */
    float *const *taps; /* [streams] [rows, H] residual streams that the drafter reads as well as the hidden state */
    float *features; /* [slots, (1 + streams)·H], by slot: in what drafts start from, out what the next will */
    float *z;                      /* [rows, V] */
    DecodeInputs in;
    DecodeOutputs out;
    const float *temperature;      /* [B]; 1 where greedy */
    const uint8_t *sampled;            /* [B] */
    const int64_t *seed;           /* [B] */
    const int64_t *top_k;          /* [B] as filter_row; NULL: no sequence is filtered */
    const double *top_p;           /* [B] */
    const float *min_logp;         /* [B] */
    const double *trust;           /* as in Draft */
    int64_t *chosen;               /* [rows] the target's own tokens */
    float *row_logprobs;           /* [rows, 1 + 2·likely] as out.logprobs */
    int32_t seqs, most, streams, shift; /* shift: of the drafter's constant position */
    float cap;                     /* of the logits; 0: none */
    int32_t likely;                /* the maximum over the sequences; -1: no logprobs */
    const BlockNet *block;         /* a drafter that reads all rows, or NULL */
    const Unread *unread;          /* what it has not yet read */
    const int32_t *block_taps;     /* [block->streams] its own among `taps` */
} Cycle;

typedef struct {
    const Cycle *c;
    const int64_t *row_seq, *position;
    int rows;
    float *warm;
} VerdictJob; /* warm: [members, V + FILTER_ROOM(V)] */
static void verdict_region(ThreadPool *pool, int me, void *job) {
    const VerdictJob *j = job;
    const Cycle *c = j->c;
    const int n = c->head.n;
    int lo, hi;
    while (pool_next(pool, j->rows, 1, &lo, &hi)) {
        const int64_t b = j->row_seq[lo];
        const int told = c->in.num_logprobs[b] >= 0, heat = c->sampled[b] && c->temperature[b] != 1.0f,
                  filter = c->sampled[b] && c->top_k;
        float *z = c->z + (int64_t)lo * n, *own = j->warm + me * (n + FILTER_ROOM(n));
        float *warm = told && (heat || filter) ? own : z; /* logprobs are those of the raw logits */
        if (heat) for (int i = 0; i < n; i++) warm[i] = z[i] / c->temperature[b];
        else if (warm != z) memcpy(warm, z, (size_t)n * 4);
        if (filter) filter_row(warm, n, c->top_k[b], c->top_p[b], c->min_logp[b], own + n);
        c->chosen[lo] = choose_row(warm, n, c->sampled[b], c->seed[b], j->position[lo] + 1, NULL);
        if (told) logprob_row(z, n, c->chosen[lo], c->likely, c->row_logprobs + lo * (INT64_C(1) + 2 * c->likely));
    }
}

/* Choosing needs no logits in memory without logprobs and filters: every member keeps the best of its outputs, of z or
 * of z with its noise, while it waits for the next weights. */
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
    Epilogue to = {.how = TO_STORE, .cap = j->c->cap, .best = mine, .draw = j->draw};
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
static int choose_best(ThreadPool *pool, const Cycle *c, const float *x, int rows, const int64_t *row_seq,
                       const int64_t *position) {
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
        BestJob job = {
            .c = c,
            .a = acts_at(at, rows, w->k, x, w->k),
            .rows = rows,
            .draw = sampled ? draw : NULL,
            .best = (Best *)(at + acts),
        };
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
            memcpy(at + (int64_t)i * width, from + c->in.slot[who ? who[i] : i] * c->call.batch.width[g],
                   (size_t)width * 4);
        to->tables[g] = at;
        to->width[g] = width;
        at += (int64_t)count * width;
    }
}

/* A sequence's draft: at most `length` of the `steps` tokens in `drafted`, and their confidences with that of the token
 * that ended it. */
static void take_draft(Cycle *c, int b, int64_t length, const int64_t *drafted, const float *sure, int steps) {
    const DecodeOutputs *out = &c->out;
    const int64_t first = (int64_t)b * c->most, wanted = out->num_drafted[b];
    int64_t k = length < wanted ? length : wanted;
    for (int64_t j = 0; j < k; j++) {
        if (drafted[j] < 0 || drafted[j] >= c->head.n) {
            k = j;
            break;
        } /* a damaged drafter must not reach the target */
        out->draft[first + j] = drafted[j];
    }
    memcpy(out->confidence + first, sure, (size_t)steps * 4);
    out->num_drafted[b] = k;
    const int64_t count = wanted < k + 1 ? wanted : k + 1;
    out->num_confidences[b] = sure[count - 1] == 0.0f ? count - 1 : count; /* 0: no such token was drafted */
}

/* The MTP drafter's chains. */
static int cycle_draft(ThreadPool *pool, Cycle *c, int width, Arena *arena) {
    const int B = c->seqs, H = c->call.stack->hidden, wide = (1 + c->streams) * H;
    int n = 0, steps = 0, who[B];
    for (int b = 0; b < B; b++)
        if (c->in.proposer[b] == PROPOSER_MTP && c->in.max_draft[b] > 0 && !c->in.max_nodes[b]) {
            who[n++] = b;
            if (c->in.max_draft[b] > steps) steps = (int)c->in.max_draft[b];
        }
    if (!n) return 0;
    Draft d = *c->draft;
    const int T = (d.call.stack->pre.k - 2 * H) / H; /* of the streams, the drafter's own: the first */
    int64_t *last = NEW(arena, int64_t, n);
    int64_t *seed = NEW(arena, int64_t, n);
    int64_t *guess = NEW(arena, int64_t, n);
    int64_t *lengths = NEW(arena, int64_t, n);
    int64_t *position = NEW(arena, int64_t, n);
    int64_t *row_seq = NEW(arena, int64_t, n);
    int64_t *top_k = NEW(arena, int64_t, n);
    int64_t *out = NEW(arena, int64_t, (size_t)n * steps);
    double *stop = NEW(arena, double, n);
    double *drop = NEW(arena, double, n);
    double *top_p = NEW(arena, double, n);
    float *min_logp = NEW(arena, float, n);
    float *start = NEW(arena, float, (size_t)n * H);
    float *taps = NEW(arena, float, (size_t)n * T * H);
    float *temperature = NEW(arena, float, n);
    float *sure = NEW(arena, float, (size_t)n * steps);
    int32_t *row_start = NEW(arena, int32_t, n + 1);
    int32_t *tables = NEW(arena, int32_t, 2 * (size_t)n * width);
    uint8_t *sampled = NEW(arena, uint8_t, n);
    if (arena->failed) return 1;
    for (int i = 0; i < n; i++) {
        const int b = who[i];
        const int64_t length = c->in.position[b];
        const float *from = c->features + c->in.slot[b] * wide;
        last[i] = c->in.last_token[b];
        seed[i] = c->seed[b];
        sampled[i] = c->sampled[b];
        temperature[i] = c->temperature[b];
        guess[i] = length + 1;
        position[i] = length - 1;
        row_seq[i] = i;
        row_start[i] = i;
        stop[i] = c->in.stop_below[b];
        drop[i] = c->in.drop_below[b];
        if (c->top_k) {
            top_k[i] = c->top_k[b];
            top_p[i] = c->top_p[b];
            min_logp[i] = c->min_logp[b];
        }
        memcpy(start + (int64_t)i * H, from, (size_t)H * 4);
        for (int t = 0; t < T; t++)
            norm_row(from + (1 + t) * H, H, NULL, d.call.stack->eps, taps + ((int64_t)i * T + t) * H);
    }
    row_start[n] = n;
    Batch *v = &d.call.batch;
    v->rows = n;
    v->seqs = n;
    v->rope_shift = c->shift;
    v->positions = position;
    v->row_seq = row_seq;
    v->row_start = row_start;
    gather_tables(v, c, who, n, width, tables);
    d.steps = steps;
    d.last = last;
    d.start = start;
    d.taps = T ? taps : NULL;
    d.temperature = temperature;
    d.sampled = sampled;
    d.seed = seed;
    d.position = guess;
    d.out = out;
    d.confidence = sure;
    d.lengths = lengths;
    d.top_k = c->top_k ? top_k : NULL;
    d.top_p = top_p;
    d.min_logp = min_logp;
    d.stop = c->trust ? stop : NULL;
    d.drop = c->trust ? drop : NULL;
    d.trust = c->trust;
    memset(sure, 0, (size_t)n * steps * 4); /* steps that do not run */
    const int failed = or_draft(pool, &d);
    for (int i = 0; i < n && !failed; i++)
        take_draft(c, who[i], lengths[i], out + (int64_t)i * steps, sure + (int64_t)i * steps, steps);
    return failed;
}

/* A block drafter's pass for the sequences `who`: the newest token of each and masks. hidden [n · steps, H]: of the
 * rows that predict. */
static int block_forward(ThreadPool *pool, const Cycle *c, const int *who, int n, int steps, float *hidden,
                         Arena *arena) {
    const BlockNet *net = c->block;
    const int S = net->block ? net->block : steps + net->first, R = n * S, W = n * steps;
    int64_t furthest = 0;
    for (int i = 0; i < n; i++) if (c->in.position[who[i]] > furthest) furthest = c->in.position[who[i]];
    const int width = (int)((furthest + S) / c->call.batch.page_size) + 1;
    int64_t *ids = NEW(arena, int64_t, R);
    int64_t *positions = NEW(arena, int64_t, R);
    int64_t *row_seq = NEW(arena, int64_t, R);
    int64_t *wanted = NEW(arena, int64_t, W);
    int64_t *few_at = NEW(arena, int64_t, W);
    int64_t *few_seq = NEW(arena, int64_t, W);
    int64_t *ends = NEW(arena, int64_t, n);
    int32_t *row_start = NEW(arena, int32_t, n + 1);
    int32_t *few_start = NEW(arena, int32_t, n + 1);
    int32_t *tables = NEW(arena, int32_t, 2 * (size_t)n * width);
    if (arena->failed) return 1;
    for (int i = 0; i < n; i++) {
        const int64_t at = c->in.position[who[i]];
        row_start[i] = i * S;
        few_start[i] = i * steps;
        ends[i] = at + S - 1;
        for (int j = 0; j < S; j++) {
            const int r = i * S + j;
            ids[r] = j ? net->mask : c->in.last_token[who[i]];
            positions[r] = at + j;
            row_seq[r] = i;
        }
        for (int j = 0; j < steps; j++) {
            const int r = i * steps + j;
            wanted[r] = i * S + net->first + j;
            few_at[r] = at + net->first + j;
            few_seq[r] = i;
        }
    }
    row_start[n] = R;
    few_start[n] = W;
    Call call = net->call;
    gather_tables(&call.batch, c, who, n, width, tables);
    call.batch.seqs = n;
    call.batch.ends = ends;
    call.few = call.batch;
    call.batch.rows = R;
    call.batch.ids = ids;
    call.batch.positions = positions;
    call.batch.row_seq = row_seq;
    call.batch.row_start = row_start;
    call.few.rows = W;
    call.few.positions = few_at;
    call.few.row_seq = few_seq;
    call.few.row_start = few_start;
    call.wanted = wanted;
    call.narrow = 1;
    call.hidden = hidden;
    return or_forward(pool, &call);
}

/* A block drafter's drafts, after it has read what it has not. */
static int cycle_block(ThreadPool *pool, Cycle *c, Arena *arena) {
    const BlockNet *net = c->block;
    const int B = c->seqs;
    int n = 0, steps = 0, who[B];
    int64_t slots[B];
    for (int b = 0; b < B; b++) {
        if (c->in.proposer[b] != PROPOSER_BLOCK || c->in.max_draft[b] <= 0) continue;
        int64_t *k = &c->out.num_drafted[b], *span = c->unread->span + 2 * c->in.slot[b];
        if (net->block && *k > net->block - net->first) *k = net->block - net->first; /* a block predicts no more */
        if (span[0] + span[1] != c->in.position[b]) span[1] = 0;
        slots[n] = c->in.slot[b]; who[n++] = b;
        steps = *k > steps ? (int)*k : steps;
    }
    if (!n) return 0;
    if (or_read_slots(pool, net, c->unread, slots, n)) return 1;
    const size_t rows = (size_t)n * steps, V = (size_t)net->head.n;
    int64_t *out = NEW(arena, int64_t, rows);
    int64_t *seed = NEW(arena, int64_t, n);
    int64_t *position = NEW(arena, int64_t, n);
    int64_t *top_k = NEW(arena, int64_t, n);
    double *top_p = NEW(arena, double, n);
    float *min_logp = NEW(arena, float, n);
    float *temperature = NEW(arena, float, n);
    float *sure = NEW(arena, float, rows);
    float *hidden = NEW(arena, float, rows * net->call.stack->hidden);
    uint8_t *sampled = NEW(arena, uint8_t, n);
    if (arena->failed) return 1;
    for (int i = 0; i < n; i++) {
        const int b = who[i];
        seed[i] = c->seed[b];
        position[i] = c->in.position[b] + 1;
        temperature[i] = c->temperature[b];
        sampled[i] = c->sampled[b];
        if (c->top_k) {
            top_k[i] = c->top_k[b];
            top_p[i] = c->top_p[b];
            min_logp[i] = c->min_logp[b];
        }
    }
    int failed = block_forward(pool, c, who, n, steps, hidden, arena);
    if (!failed) failed = or_logits(pool, &net->head, hidden, (int)rows, net->scale == 1.0f ? net->cap : 0.0f, c->z);
    if (!failed) {
        pool_begin(pool);
        Guess job = {
            .net = net,
            .steps = steps,
            .rows = (int)rows,
            .temperature = temperature,
            .sampled = sampled,
            .seed = seed,
            .position = position,
            .top_k = c->top_k ? top_k : NULL,
            .top_p = top_p,
            .min_logp = min_logp,
            .z = c->z,
            .room = (float *)pool_scratch(pool, pool->size * (V + FILTER_ROOM(V)) * 4),
            .out = out,
            .confidence = sure,
        };
        failed = !job.room;
        if (!failed) pool_run(pool, guess_region, &job);
        pool_end(pool);
    }
    for (int i = 0; i < n && !failed; i++) {
        const int b = who[i];
        double path = 1.0;
        int64_t length = steps;
        int j = 0;
        while (c->trust && j < c->out.num_drafted[b] &&
               goes_on(c->trust, c->in.stop_below[b], c->in.drop_below[b], &length, j, sure[(int64_t)i * steps + j],
                       &path))
            j++;
        take_draft(c, b, length, out + (int64_t)i * steps, sure + (int64_t)i * steps, steps);
    }
    return failed;
}

/* Keeps what the block drafter will read of a sequence's accepted rows, the first of which is `row`. */
static int keep_unread(ThreadPool *pool, const Cycle *c, int b, int64_t row) {
    const BlockNet *net = c->block;
    const Unread *u = c->unread;
    const int wide = net->fc.k / net->streams;
    const int64_t slot = c->in.slot[b], position = c->in.position[b], count = c->out.num_tokens[b];
    int64_t *span = u->span + 2 * slot;
    if (span[0] + span[1] != position) span[1] = 0; /* of another text */
    if (span[1] + count > u->most && or_read_slots(pool, net, u, &slot, 1)) return 1;
    if (!span[1]) span[0] = position;
    for (int64_t j = 0; j < count; j++, span[1]++) {
        const int64_t r = row + (j && c->in.max_nodes[b] ? c->out.path[(int64_t)b * c->most + j - 1] : j),
                      at = slot * u->most + span[1];
        u->following[at] = c->chosen[row + j]; /* of a tree: accept_path has put the path's first */
        for (int t = 0; t < net->streams; t++)
            memcpy(u->states + at * net->fc.k + (int64_t)t * wide, c->taps[c->block_taps[t]] + r * wide,
                   (size_t)wide * 4);
    }
    return 0;
}

/* A tree of drafts of one sequence. */
static int cycle_tree(ThreadPool *pool, Cycle *c, int b, int width, Arena *arena) {
    const DecodeInputs *in = &c->in;
    const DecodeOutputs *out = &c->out;
    const int H = c->call.stack->hidden, depth = in->max_draft[b] < TREE_DEEP ? (int)in->max_draft[b] : TREE_DEEP;
    const int64_t length = in->position[b];
    const float *from = c->features + in->slot[b] * (1 + c->streams) * H;
    Draft d = *c->draft;
    const int S = (d.call.stack->pre.k - 2 * H) / H; /* of the streams, the drafter's own: the first */
    int64_t last[TREE_WIDE] = {in->last_token[b]}, guess[TREE_WIDE] = {length + 1}, seed[TREE_WIDE],
            position[TREE_WIDE], row_seq[TREE_WIDE] = {0};
    float temperature[TREE_WIDE];
    uint8_t sampled[TREE_WIDE];
    BuiltTree grown;
    float *start = NEW(arena, float, (size_t)2 * TREE_WIDE * H);
    float *taps = NEW(arena, float, (size_t)TREE_WIDE * S * H);
    int32_t *tables = NEW(arena, int32_t, 2 * (size_t)width);
    if (arena->failed) return 1;
    memcpy(start, from, (size_t)H * 4);
    for (int i = 0; i < TREE_WIDE; i++) {
        seed[i] = c->seed[b]; sampled[i] = c->sampled[b]; temperature[i] = c->temperature[b]; position[i] = length - 1;
        for (int t = 0; t < S; t++)
            norm_row(from + (1 + t) * H, H, NULL, d.call.stack->eps, taps + ((int64_t)i * S + t) * H);
    }
    d.call.batch.rope_shift = c->shift;
    d.call.batch.positions = position; d.call.batch.row_seq = row_seq;
    gather_tables(&d.call.batch, c, &b, 1, width, tables);
    d.taps = S ? taps : NULL; d.temperature = temperature; d.sampled = sampled; d.seed = seed;
    const int failed = build_tree(pool, &d, H, c->head.n, depth, in->stop_below[b], in->drop_below[b], c->trust, start,
                                  last, guess, &grown);
    if (!failed) {
        const int64_t at = (int64_t)b * c->most;
        const double *prices = in->has_prices[b] ? in->prices + b * (c->most + INT64_C(1)) : NULL;
        const int count =
            pick_nodes(&grown, (int)in->max_nodes[b], prices, out->draft + at, out->confidence + at, out->parents + at);
        out->num_drafted[b] = out->num_confidences[b] = count;
        out->draft_steps[b] = grown.steps;
    }
    return failed;
}

/* Accept from the root on the child that holds the target's choice, while there is one. The accepted rows' choices are
 * moved to the front of the sequence's, their keys and values to the positions of their tokens. Returns the last
 * accepted row. */
static int64_t accept_path(const Cycle *c, const Batch *v, int b) {
    int64_t *chosen = c->chosen + v->row_start[b];
    const int64_t k = c->out.num_drafted[b], length = c->in.position[b];
    const int64_t *draft = c->out.draft + (int64_t)b * c->most, *parents = c->out.parents + (int64_t)b * c->most;
    int64_t *path = c->out.path + (int64_t)b * c->most, at = 0, right = 0, j;
    do {
        for (j = 0; j < k && !(parents[j] == at && draft[j] == chosen[at]); j++) {}
        if (j < k) path[right++] = at = j + 1;
    } while (j < k);
    for (int64_t i = 0; i < right; i++) chosen[i + 1] = chosen[path[i]]; /* path[i] > i: read before it is written */
    const Stack *s = c->call.stack;
    for (int l = 0; l < s->layers; l++)
        for (int64_t i = 0; i < right && s->layer[l].attn.writes; i++)
            if (path[i] != i + 1) move_kv(&s->layer[l].attn, v, b, length + path[i], length + i + 1);
    c->out.num_tokens[b] = right + 1;
    return at;
}

/* Accept the tokens of a chain while they equal the target's choices. Returns the last accepted row. */
static int64_t accept_chain(const Cycle *c, const Batch *v, int b) {
    const int64_t *chosen = c->chosen + v->row_start[b], *draft = c->out.draft + (int64_t)b * c->most;
    int64_t right = 0;
    while (right < c->out.num_drafted[b] && draft[right] == chosen[right]) right++;
    c->out.num_tokens[b] = right + 1;
    return right;
}

/* The emitted tokens of a sequence whose rows begin at `row`, and their logprobs. */
static void emit(const Cycle *c, int b, int64_t row) {
    const DecodeOutputs *out = &c->out;
    const int64_t count = out->num_tokens[b], first = (int64_t)b * (c->most + 1), width = 1 + 2 * (int64_t)c->likely;
    memcpy(out->tokens + first, c->chosen + row, (size_t)count * 8);
    for (int64_t j = 0; c->in.num_logprobs[b] >= 0 && j < count; j++) {
        const int64_t r = row + (j && c->in.max_nodes[b] ? out->path[(int64_t)b * c->most + j - 1] : j);
        memcpy(out->logprobs + (first + j) * width, c->row_logprobs + r * width, (size_t)width * 4);
    }
}

static int decode_step(ThreadPool *pool, Cycle *c, Arena *arena) {
    const int B = c->seqs, H = c->call.stack->hidden, deep = c->most + 1;
    const DecodeInputs *in = &c->in;
    const DecodeOutputs *out = &c->out;
    int64_t furthest = 0, rows = 0, trees = 0;
    for (int b = 0; b < B; b++) {
        const int64_t k = in->max_draft[b], nodes = in->max_nodes[b], end = in->position[b] + (k > nodes ? k : nodes);
        furthest = end > furthest ? end : furthest;
        trees |= nodes;
        out->num_drafted[b] = k;
        out->num_confidences[b] = -1;
        if (in->proposer[b] == PROPOSER_HOST)
            memcpy(out->draft + (int64_t)b * c->most, in->host_draft + b * in->host_draft_width, (size_t)k * 8);
    }
    const int width = (int)(furthest / c->call.batch.page_size) + 1;
    if (c->draft && cycle_draft(pool, c, width, arena)) return 1;
    if (c->block && cycle_block(pool, c, arena)) return 1;
    for (int b = 0; b < B; b++) if (in->max_nodes[b] && cycle_tree(pool, c, b, width, arena)) return 1;
    for (int b = 0; b < B; b++) rows += out->num_drafted[b] + 1;
    int64_t *ids = NEW(arena, int64_t, rows);
    int64_t *positions = NEW(arena, int64_t, rows);
    int64_t *row_seq = NEW(arena, int64_t, rows);
    int64_t *places = NEW(arena, int64_t, rows);
    int32_t *of = NEW(arena, int32_t, rows);
    int32_t *row_start = NEW(arena, int32_t, B + 1);
    int32_t *tables = NEW(arena, int32_t, 2 * (size_t)B * width);
    int32_t *paths = NEW(arena, int32_t, trees ? (size_t)rows * deep : 0);
    if (arena->failed) return 1;
    int r = 0;
    for (int b = 0; b < B; b++) {
        row_start[b] = r;
        for (int j = 0; j <= out->num_drafted[b]; j++, r++) {
            ids[r] = j ? out->draft[(int64_t)b * c->most + j - 1] : in->last_token[b];
            places[r] = in->position[b] + j;
            positions[r] = places[r];
            row_seq[r] = b;
            of[r] = (int32_t)in->adapter[b];
            if (!trees) continue;
            const int up =
                j ? row_start[b] + (in->max_nodes[b] ? (int)out->parents[(int64_t)b * c->most + j - 1] : j - 1) : r;
            const int depth = j ? (int)(positions[up] - in->position[b]) + 1 : 0;
            memcpy(paths + (int64_t)r * deep, paths + (int64_t)up * deep, (size_t)depth * 4);
            for (int i = depth; i < deep; i++) paths[(int64_t)r * deep + i] = j;
            positions[r] = in->position[b] + depth;
        }
    }
    row_start[B] = r;
    Call call = c->call;
    if (trees) {
        call.batch.places = places;
        call.batch.paths = paths;
        call.batch.path_width = deep;
    }
    call.batch.rows = r;
    call.batch.seqs = B;
    call.adapters.of = of;
    call.batch.ids = ids;
    call.batch.positions = positions;
    call.batch.row_seq = row_seq;
    call.batch.row_start = row_start;
    gather_tables(&call.batch, c, NULL, B, width, tables);
    int failed = or_forward(pool, &call);
    if (!failed && c->likely < 0 && !c->top_k) failed = choose_best(pool, c, call.hidden, r, row_seq, positions);
    else if (!failed) failed = or_logits(pool, &c->head, call.hidden, r, c->cap, c->z);
    if (!failed && (c->likely >= 0 || c->top_k)) {
        pool_begin(pool);
        VerdictJob job = {
            .c = c,
            .row_seq = row_seq,
            .position = positions,
            .rows = r,
            .warm = pool_scratch(pool, pool->size * (c->head.n + FILTER_ROOM(c->head.n)) * 4),
        };
        failed = !job.warm;
        if (!failed) pool_run(pool, verdict_region, &job);
        pool_end(pool);
    }
    if (!failed) {
        for (int b = 0; b < B; b++) {
            const int64_t accepted =
                in->max_nodes[b] ? accept_path(c, &call.batch, b) : accept_chain(c, &call.batch, b);
            if (c->block && keep_unread(pool, c, b, row_start[b])) failed = 1;
            emit(c, b, row_start[b]);
            const int64_t row = row_start[b] + accepted;
            float *to = c->features + in->slot[b] * (1 + c->streams) * H;
            memcpy(to, call.hidden + row * H, (size_t)H * 4);
            for (int t = 0; t < c->streams; t++) memcpy(to + (1 + t) * H, c->taps[t] + row * H, (size_t)H * 4);
        }
    }
    return failed;
}

int or_decode_step(ThreadPool *pool, Cycle *c) {
    Arena arena = {0};
    const int failed = decode_step(pool, c, &arena);
    arena_free(&arena);
    return failed;
}
