/* A draft model's whole round in one call: the unread tokens of each text, then token by token.
 * The same sums as or_forward, or_logits and or_choose one after the other; drafts cannot change the output.
 */
#pragma once
#include "arena.h"
#include "draft.h"

int or_forward(ThreadPool *pool, const Call *call);

typedef struct {
    Call call; /* the model's stack; its batch: the rows to be read first, at least one of each sequence */
    Weight head, all;           /* the rows scored for all sequences; the whole head */
    const int64_t *listed;      /* [head.n] whose rows these are; NULL: row i is token i */
    const int64_t *seen;        /* additional tokens, by sequence: those of its text */
    const int32_t *seen_start;  /* [B + 1] */
    float cap;
    int32_t steps;
    const float *temperature;   /* [B]; 1 where cold */
    const uint8_t *sampled;
    const int64_t *seed;
    int64_t *position;          /* [B] of the first guess; spoilt */
    int64_t *out;               /* [B, steps] */
    float *confidence;          /* [B, steps] each guess's probability among what was scored; 0 where no step was run */
    int64_t *lengths;           /* [B] tokens that count: `steps`, or fewer where a draft has ended itself */
    const double *stop, *drop, *trust; /* as in Draft */
} Chain;

typedef struct {
    const Chain *c;
    int step, wide;             /* wide: most tokens scored of a sequence */
    QActs g;
    float *z;                   /* [B, wide] */
    int64_t *tokens;            /* [B, wide] scored tokens, if some sequence is sampled */
    double *path;               /* [B] */
    uint8_t *live;              /* [B] */
} Scoring;

static void scoring_region(ThreadPool *pool, int me, void *job) {
    const Scoring *s = job;
    const Chain *c = s->c;
    const int B = c->call.batch.seqs, n = c->head.n;
    int lo, hi;
    pool_share(pool, me, B, &lo, &hi);
    for (int b = lo; b < hi; b++) acts_row(&s->g, b);
    pool_barrier(pool);
    Epilogue to = {.how = TO_STORE, .out = s->z, .ldo = s->wide, .cap = c->cap};
    product_phase(pool, me, &c->head, &s->g, B, &to);
    for (int b = 0; b < B; b++) { /* a tile for one of its rows: texts hold few tokens that are not listed */
        const int first = c->seen_start[b];
        int from, past;
        pool_share(pool, me, c->seen_start[b + 1] - first, &from, &past);
        for (int i = from; i < past; i++) {
            float tile[LANES];
            const int64_t token = c->seen[first + i];
            product_tile(&c->all, (int)(token / LANES), &s->g, b, 1, tile);
            if (c->cap > 0.0f) vf_store(tile, vf_softcap(vf_load(tile), c->cap));
            s->z[(int64_t)b * s->wide + n + i] = tile[token % LANES];
        }
    }
    pool_barrier(pool);
    for (int b = lo; b < hi; b++) {
        float *z = s->z + (int64_t)b * s->wide;
        const int count = n + c->seen_start[b + 1] - c->seen_start[b];
        const int64_t *ids = c->sampled[b] && s->tokens ? s->tokens + (int64_t)b * s->wide : NULL;
        const int64_t to_out = (int64_t)b * c->steps + s->step;
        if (c->sampled[b]) for (int i = 0; i < count; i++) z[i] /= c->temperature[b];
        const int64_t at = choose_row(z, count, c->sampled[b], c->seed[b], c->position[b], ids);
        c->out[to_out] = at >= n ? c->seen[c->seen_start[b] + at - n] : c->listed ? c->listed[at] : at;
        const float sure = c->confidence[to_out] = softmax_at(z, count, at);
        if (c->trust && s->live[b])
            s->live[b] = goes_on(c->trust, c->stop[b], c->drop[b], c->lengths + b, s->step, sure, s->path + b);
    }
}

/* Guess `s->step` from the states x [B, H]. Returns 1 without scratch. */
static int score_step(ThreadPool *pool, Scoring *s, const float *x) {
    const int B = s->c->call.batch.seqs, k = s->c->head.k;
    pool_begin(pool);
    char *at = pool_scratch(pool, acts_bytes(B, k));
    if (at) {
        s->g = acts_at(at, B, k, x, k);
        pool_run(pool, scoring_region, s);
    }
    pool_end(pool);
    return at ? 0 : 1;
}

int or_draft_model_steps(ThreadPool *pool, const Chain *c) {
    const Batch *first = &c->call.batch;
    const int B = first->seqs, R = first->rows, H = c->call.stack->hidden;
    int most = 0, warm = 0, failed = 1;
    for (int b = 0; b < B; b++) {
        const int seen = c->seen_start[b + 1] - c->seen_start[b];
        most = seen > most ? seen : most;
        warm |= c->sampled[b];
        c->lengths[b] = c->steps;
    }
    const int wide = c->head.n + most;
    warm = warm && (c->listed || most); /* noise goes by token: a whole vocabulary needs no names */
    Arena arena = {0};
    float *hidden = NEW(&arena, float, (size_t)R * H);
    float *g = NEW(&arena, float, (size_t)B * H);
    float *z = NEW(&arena, float, (size_t)B * wide);
    int64_t *ids = NEW(&arena, int64_t, B);
    int64_t *positions = NEW(&arena, int64_t, B);
    int64_t *row_seq = NEW(&arena, int64_t, B);
    int64_t *tokens = warm ? NEW(&arena, int64_t, (size_t)B * wide) : NULL;
    int32_t *row_start = NEW(&arena, int32_t, B + 1);
    double *path = NEW(&arena, double, B);
    uint8_t *live = NEW(&arena, uint8_t, B);
    if (!arena.failed) {
        for (int b = 0; b < B; b++) {
            path[b] = 1.0;
            live[b] = 1;
            row_seq[b] = b;
            row_start[b] = b;
            for (int i = 0; warm && i < c->head.n; i++) tokens[(int64_t)b * wide + i] = c->listed ? c->listed[i] : i;
            if (warm)
                memcpy(tokens + (int64_t)b * wide + c->head.n, c->seen + c->seen_start[b],
                       (size_t)(c->seen_start[b + 1] - c->seen_start[b]) * 8);
        }
        row_start[B] = B;
        Call call = c->call;
        call.hidden = hidden;
        failed = or_forward(pool, &call);
        for (int b = 0; b < B && !failed; b++)
            memcpy(g + (int64_t)b * H, hidden + (first->row_start[b + 1] - INT64_C(1)) * H, (size_t)H * 4);
        call.batch.rows = B;
        call.batch.ids = ids;
        call.batch.positions = positions;
        call.batch.row_seq = row_seq;
        call.batch.row_start = row_start;
        call.hidden = g;
        Scoring s = {.c = c, .wide = wide, .z = z, .tokens = tokens, .path = path, .live = live};
        for (int any = 1; !failed && any; s.step++) {
            failed = score_step(pool, &s, g);
            any = 0;
            for (int b = 0; b < B; b++) any |= live[b];
            any = any && s.step + 1 < c->steps;
            if (failed || !any) continue;
            for (int b = 0; b < B; b++) {
                ids[b] = c->out[(int64_t)b * c->steps + s.step];
                positions[b] = c->position[b]++;
            }
            failed = or_forward(pool, &call);
        }
    }
    arena_free(&arena);
    return failed;
}
