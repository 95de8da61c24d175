/* A drafter's whole round in one parallel region: K times [embedding of the newest token; hidden state] -> layers ->
 * head -> choose. Same row and tile functions as the single operations; drafts cannot change the output.
 */
#pragma once
#include "filter.h"
#include "forward.h"

typedef struct { const Weight *head; int clusters, top, size; } Clusters; /* head: rows in cluster order, `size` each */

/* One member's share of: cluster_bonus [rows, clusters] where sampled, temperature · the largest noise of the cluster's
 * tokens (that of the smallest bits). hashes [clusters / 16, size, 16]: a lane is a cluster. position + step: of the
 * token being chosen. */
static void cluster_bonus_phase(ThreadPool *pool, const int32_t *hashes, int clusters, int size, int rows,
                                const float *temperature, const uint8_t *sampled, const int64_t *seed,
                                const int64_t *position, int step, float *cluster_bonus) {
    const int groups = (clusters + LANES - 1) / LANES;
    int lo, hi;
    while (pool_next(pool, rows * groups, 8, &lo, &hi))
        for (int t = lo; t < hi; t++) {
            const int r = t / groups, g = t % groups;
            if (!sampled[r]) continue;
            const uint32_t key = noise_key(seed[r], position[r] + step);
            const int32_t *hash = hashes + (int64_t)g * size * LANES;
            vi least = vi_set(-1);
            for (int s = 0; s < size; s++)
                least = vi_min_unsigned(least, vi_noise_bits(key, vi_load(hash + (int64_t)s * LANES)));
            vf_store_n(cluster_bonus + (int64_t)r * clusters + g * LANES,
                       vf_mul(vf_set(temperature[r]), vf_noise(least)), clusters - g * LANES);
        }
}
/* One member's share of scoring the chosen clusters' tokens: out [rows, top, size]. */
static void cluster_phase(ThreadPool *pool, const Clusters *c, const QActs *a, int rows, const int64_t *best,
                          float *out) {
    float tile[LANES];
    int lo, hi;
    while (pool_next(pool, rows * c->top, 4, &lo, &hi))
        for (int t = lo; t < hi; t++) {
            const int64_t first = best[t] * c->size, last = first + c->size;
            for (int64_t g = first / LANES; g * LANES < last; g++) { /* groups may straddle clusters */
                product_tile(c->head, (int)g, a, t / c->top, 1, tile);
                for (int j = 0; j < LANES; j++)
                    if (g * LANES + j >= first && g * LANES + j < last)
                        out[(int64_t)t * c->size + g * LANES + j - first] = tile[j];
            }
        }
}

typedef struct {
    Call call;                /* stack with `pre`; its batch; features, hidden and fed_back are set here */
    Weight table, head, centroids;
    float table_scale;
    int32_t steps, unit, tied, clusters, top, size; /* unit: inputs are normed; tied: the head reads what is fed back */
    const int64_t *cluster_ids; /* [clusters, size] token ids */
    const int32_t *hashes;      /* as cluster_bonus_phase */
    const int64_t *last;        /* [B] */
    const float *start;         /* [B, Hb] the target's hidden state */
    const float *taps;          /* [B, pre.k - 2·Hb], at unit scale, or NULL */
    const float *temperature;   /* [B]; 1 where greedy */
    const uint8_t *sampled;
    const int64_t *seed, *position; /* [B]; position of the first draft token */
    int64_t *out;               /* [B, steps] */
    float *confidence;          /* [B, steps] each token's probability among the candidates */
    int64_t *lengths;           /* [B] tokens that count: `steps`, or fewer where a draft has ended itself */
    const double *stop, *drop, *trust; /* [B], [B], [TRUST]; trust NULL: every draft goes on to the end */
    int64_t *runner_ups; /* [B, steps, RUNNER_UPS] the next best tokens, or NULL; with them confidences are those of the
                            scores with their noise */
    float *runner_up_confidence;    /* likewise */
    float *state;               /* [B, wide] what would be fed back after the last step, or NULL */
    const int64_t *top_k;       /* [B] as filter_row, of drafts without runner_ups; NULL: no filter */
    const double *top_p;        /* [B] */
    const float *min_logp;      /* [B] */
} Draft;

enum { TRUST = 16, RUNNER_UPS = 2 }; /* bins of confidence; runner-ups that a tree may branch into */

/* With path = product of trust[confidence] so far: a token that brings it below `drop` is left out, one that brings it
 * below `stop` is the last. Returns whether the draft goes on. */
static int goes_on(const double *trust, double stop, double drop, int64_t *length, int k, float confidence,
                   double *path) {
    const int bin = confidence > 0 ? (int)(confidence * TRUST) : 0; /* no number: no confidence */
    *path *= trust[bin < TRUST ? bin : TRUST - 1];
    if (*path < drop) *length = k;
    else if (*path < stop) *length = k + 1;
    else return 1;
    return 0;
}

typedef struct {
    Draft draft;
    Run run;
    double *path; /* [B] */
    uint8_t *live; /* [B] whose drafts go on */
    float *features, *hidden, *fed_back, *cluster_bonus, *scores, *z,
        *filtered; /* filtered: [members, n + FILTER_ROOM(n)] */
    int64_t *best, *ids;
    QActs g;
} DraftRun;

/* The cluster bonus of step k, computed while members wait for each other: it does not depend on the step before. */
static void draft_cluster_bonus(ThreadPool *pool, const DraftRun *d, int k) {
    const Draft *r = &d->draft;
    if (r->clusters && k < r->steps)
        cluster_bonus_phase(pool, r->hashes, r->clusters, r->size, r->call.batch.rows, r->temperature, r->sampled,
                            r->seed, r->position, k, d->cluster_bonus);
}

/* The tokens behind the best one, which is at column `at` and has the probability `sure`. z is overwritten. best: as in
 * draft_region */
static void next_best(float *z, int n, int64_t at, float sure, const Draft *r, const int64_t *best, int64_t to) {
    const float top = z[at];
    for (int t = 0; t < RUNNER_UPS; t++) {
        z[at] = -INFINITY;
        at = choose_row(z, n, 0, 0, 0, NULL);
        r->runner_ups[to + t] = r->clusters ? r->cluster_ids[best[at / r->size] * r->size + at % r->size] : at;
        r->runner_up_confidence[to + t] = z[at] > -INFINITY ? sure * expf(z[at] - top) : 0.0f;
    }
}

static void draft_region(ThreadPool *pool, int me, void *job) {
    DraftRun *d = job;
    const Draft *r = &d->draft;
    const Stack *s = r->call.stack;
    const int B = r->call.batch.rows, wide = s->post.kind != W_NONE ? s->post.n : s->hidden, in = s->pre.k;
    const int dense = (r->clusters ? r->centroids.kind : r->head.kind) == W_DENSE, dense_head = r->head.kind == W_DENSE;
    const float *next = s->post.kind != W_NONE ? d->fed_back : d->hidden; /* [B, wide] */
    const int64_t n = r->clusters ? (int64_t)r->top * r->size : r->head.n;
    const Clusters clusters = {&r->head, r->clusters, r->top, r->size};
    int lo, hi;
    pool_share(pool, me, B, &lo, &hi);
    for (int b = lo; b < hi; b++) d->path[b] = 1.0, d->live[b] = 1, r->lengths[b] = r->steps;
    draft_cluster_bonus(pool, d, 0);
    for (int k = 0; k < r->steps; k++) {
        for (int b = lo; b < hi; b++) {
            float *x = d->features + (int64_t)b * in;
            weight_row(&r->table, k ? r->out[(int64_t)b * r->steps + k - 1] : r->last[b], x);
            if (r->table_scale != 1.0f) for (int i = 0; i < wide; i++) x[i] *= r->table_scale;
            memcpy(x + wide, (k ? next : r->start) + (int64_t)b * wide, (size_t)wide * 4);
            if (r->unit) { norm_row(x, wide, NULL, s->eps, x); norm_row(x + wide, wide, NULL, s->eps, x + wide); }
            if (!k && r->taps)
                memcpy(x + 2 * wide, r->taps + (int64_t)b * (in - 2 * wide), (size_t)(in - 2 * wide) * 4);
        }
        pool_barrier(pool);
        stack_phase(pool, me, &d->run);
        pool_barrier(pool);
        if (!dense || !dense_head) for (int b = lo; b < hi; b++) acts_row(&d->g, b);
        pool_barrier(pool);
        if (r->clusters) {
            Epilogue to = {.how = TO_STORE, .out = d->scores, .ldo = r->clusters};
            product_phase(pool, me, &r->centroids, &d->g, B, &to);
            pool_barrier(pool);
            for (int b = lo; b < hi; b++) {
                float *score = d->scores + (int64_t)b * r->clusters,
                      *cluster_bonus = d->cluster_bonus + (int64_t)b * r->clusters;
                if (r->sampled[b]) for (int c = 0; c < r->clusters; c++) score[c] += cluster_bonus[c];
                best_columns(score, r->clusters, r->top, d->best + (int64_t)b * r->top);
            }
            pool_barrier(pool);
            cluster_phase(pool, &clusters, &d->g, B, d->best, d->z);
        } else {
            Epilogue to = {.how = TO_STORE, .out = d->z, .ldo = r->head.n};
            product_phase(pool, me, &r->head, &d->g, B, &to);
        }
        pool_barrier(pool);
        for (int b = lo; b < hi; b++) {
            float *z = d->z + b * n;
            int64_t *ids = NULL;
            const int64_t *best = d->best + (int64_t)b * r->top;
            if (r->clusters && r->sampled[b]) { /* noise goes by token */
                ids = d->ids + b * n;
                for (int t = 0; t < r->top; t++)
                    memcpy(ids + (int64_t)t * r->size, r->cluster_ids + best[t] * r->size, (size_t)r->size * 8);
            }
            if (r->sampled[b]) for (int64_t i = 0; i < n; i++) z[i] /= r->temperature[b];
            const int noisy = r->sampled[b] && r->runner_ups;
            if (noisy) noise_row(z, (int)n, r->seed[b], r->position[b] + k, ids);
            float *from = z;
            if (r->sampled[b] && r->top_k && !r->runner_ups) { /* confidence is that of all tokens */
                from = memcpy(d->filtered + me * (n + FILTER_ROOM(n)), z, (size_t)n * 4);
                filter_row(from, (int)n, r->top_k[b], r->top_p[b], r->min_logp[b], from + n);
            }
            const int64_t at = choose_row(from, (int)n, r->sampled[b] && !noisy, r->seed[b], r->position[b] + k, ids);
            r->out[(int64_t)b * r->steps + k] =
                r->clusters ? r->cluster_ids[best[at / r->size] * r->size + at % r->size] : at;
            const float sure = r->confidence[(int64_t)b * r->steps + k] = softmax_at(z, (int)n, at);
            if (r->runner_ups) next_best(z, (int)n, at, sure, r, best, ((int64_t)b * r->steps + k) * RUNNER_UPS);
            if (r->state && k == r->steps - 1)
                memcpy(r->state + (int64_t)b * wide, next + (int64_t)b * wide, (size_t)wide * 4);
            if (r->trust && d->live[b])
                d->live[b] = goes_on(r->trust, r->stop[b], r->drop[b], r->lengths + b, k, sure, d->path + b);
        }
        draft_cluster_bonus(pool, d, k + 1);
        /* a member begins the next step with the rows it has chosen for itself */
        if (!r->trust) continue;
        pool_barrier(pool);
        int live = 0;
        for (int b = 0; b < B; b++) live |= d->live[b];
        if (!live) break;
    }
}

/* As run_layout. */
static size_t draft_layout(DraftRun *d, const ThreadPool *pool, char *at) {
    const Draft *r = &d->draft;
    const Stack *s = r->call.stack;
    const size_t B = (size_t)r->call.batch.rows, n = r->clusters ? (size_t)r->top * r->size : (size_t)r->head.n;
    size_t used = 0;
    d->path = (double *)TAKE(B * 8);
    d->live = (uint8_t *)TAKE(B);
    d->features = (float *)TAKE(B * s->pre.k * 4);
    d->hidden = (float *)TAKE(B * s->hidden * 4);
    d->fed_back = s->post.kind != W_NONE ? (float *)TAKE(B * s->post.n * 4) : NULL;
    d->cluster_bonus = (float *)TAKE(B * r->clusters * 4);
    d->scores = (float *)TAKE(B * r->clusters * 4);
    d->best = (int64_t *)TAKE(B * r->top * 8);
    d->ids = (int64_t *)TAKE(r->clusters ? B * n * 8 : 0);
    d->z = (float *)TAKE(B * n * 4);
    d->filtered = (float *)TAKE(r->top_k ? pool->size * (n + FILTER_ROOM(n)) * 4 : 0);
    const int k = r->head.k;
    d->g = acts_at(TAKE(acts_bytes((int)B, k)), (int)B, k, r->tied && d->fed_back ? d->fed_back : d->hidden, k);
    d->run.call.features = d->features;
    d->run.call.hidden = d->hidden;
    d->run.call.fed_back = d->fed_back;
    return used + run_layout(&d->run, pool, at ? at + used : NULL);
}
