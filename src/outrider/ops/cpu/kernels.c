/* The library: what Python calls. One translation unit; see build.py for the flags. */
#include "cycle.h"
#include "draft_model.h"
#include "requantize.h"

int or_isa(void) {
#if ISA_BF16
    return 3;
#elif ISA_AVX512
    return 2;
#elif ISA_AVX2
    return 1;
#else
    return 0;
#endif
}
int or_sizes(int which) {
    const size_t sizes[] = {sizeof(Weight), sizeof(Spec), sizeof(Batch), sizeof(Layer), sizeof(Stack), sizeof(Call), sizeof(Draft), sizeof(Cycle), sizeof(Moe), sizeof(Chain), sizeof(LowRank), sizeof(BlockNet), sizeof(Unread)};
    return (int)sizes[which];
}

/* ---- teams ---- */
ThreadPool *or_team_new(int size) {
    ThreadPool *t = aligned_alloc(64, (sizeof(ThreadPool) + 63) & ~(size_t)63);
    memset(t, 0, sizeof *t);
    t->size = size < 1 ? 1 : size;
    t->threads = calloc((size_t)t->size, sizeof(pthread_t));
    t->claims = aligned_alloc(64, (size_t)t->size * sizeof(Claim));
    team_start(t);
    return t;
}

int or_team_size(const ThreadPool *t) { return t->size; }

void or_team_free(ThreadPool *t) {
    if (t->owner == getpid()) {
        pthread_mutex_lock(&t->lock);
        t->stop = 1;
        atomic_fetch_add(&t->round, 1);
        pthread_cond_broadcast(&t->wake);
        pthread_mutex_unlock(&t->lock);
        for (int i = 1; i < t->size; i++) pthread_join(t->threads[i], NULL);
    }
    free(t->threads);
    free(t->claims);
    free(t->scratch.at);
    free(t);
}

/* ---- packing ---- */
/* Bytes of `data` (which = 0) or `scale` (1) that a weight of this kind needs */
int64_t or_packed_bytes(int kind, int n, int k, int which) {
    const int64_t groups = (n + LANES - 1) / LANES, blocks = k / 32;
    return which ? groups * (blocks / k_blocks(kind)) * (int64_t)k_scale_step(kind) : groups * blocks * 64 * k_lines(kind);
}
/* `rows` rows of a file, in the format of w->kind, become rows first.. of w */
void or_pack(ThreadPool *team, const Weight *w, int first, const uint8_t *from, int64_t row_bytes, int rows) {
    PackJob job = {w, first, rows, from, (size_t)row_bytes};
    pool_begin(team);
    team_run(team, pack_region, &job);
    pool_end(team);
}
/* Row i of `to` is row order[i] of `from` */
void or_take(const Weight *from, const int64_t *order, const Weight *to) {
    for (long i = 0; i < to->n; i++) copy_lane(from, order[i], to, i);
}

/* `to`, of kind W_Q4, becomes `from` in four bits */
int or_coarse(ThreadPool *team, const Weight *from, const Weight *to) {
    CoarseJob job = {from, to, NULL};
    pool_begin(team);
    job.rows = (float *)team_scratch(team, (size_t)team->size * LANES * to->k * 4);
    if (job.rows) team_run(team, coarse_region, &job);
    pool_end(team);
    return job.rows ? 0 : 1;
}

/* ---- products ---- */
typedef struct { const Weight *w; QActs a; int rows; Epilogue to; } ProductJob;

static void product_region(ThreadPool *team, int me, void *job) {
    ProductJob *p = job;
    if (p->w->kind != W_DENSE) {
        int lo, hi;
        team_share(team, me, p->rows, &lo, &hi);
        for (int r = lo; r < hi; r++) acts_row(&p->a, r);
        if (p->rows > 1) team_barrier(team); /* a single row was quantised by its caller */
    }
    product_phase(team, me, p->w, &p->a, p->rows, &p->to);
}

static void run_product(ThreadPool *team, const Weight *w, const float *x, int rows, Epilogue to) {
    pool_begin(team);
    ProductJob job = {w, {0}, rows, to};
    job.a = acts_at(w->kind == W_DENSE ? NULL : team_scratch(team, acts_bytes(rows, w->k)), rows, w->k, x, w->k);
    if (w->kind != W_DENSE && rows == 1) acts_row(&job.a, 0);
    team_run(team, product_region, &job);
    pool_end(team);
}

void or_linear(ThreadPool *team, const Weight *w, const float *x, int rows, const float *bias, float *out) {
    Epilogue to = {TO_STORE, bias, out, w->n};
    run_product(team, w, x, rows, to);
}
void or_gated_linear(ThreadPool *team, const Weight *w, const float *x, int rows, int act, float *out) {
    Epilogue to = {TO_GATED, NULL, out, w->n / 2, act};
    run_product(team, w, x, rows, to);
}
void or_logits(ThreadPool *team, const Weight *w, const float *x, int rows, float cap, float *out) {
    Epilogue to = {TO_STORE, NULL, out, w->n, 0, NULL, 0, cap};
    run_product(team, w, x, rows, to);
}
/* y [rows, 16·groups] += scale · B (A x), x [rows, k]: as a product of a pass adds it */
typedef struct { LowRankRows low; QActs x; int rows, groups; float *y; } LowRankJob;
static void lowrank_region(ThreadPool *team, int me, void *job) {
    const LowRankJob *j = job;
    float change[BLOCK_ROWS * LANES];
    int lo, hi;
    shrink_phase(&j->low, me, &j->x, j->rows);
    team_share(team, me, j->groups, &lo, &hi);
    for (int g = lo; g < hi; g++)
        for (int m0 = 0; m0 < j->rows; m0 += BLOCK_ROWS) {
            const int rows = j->rows - m0 < BLOCK_ROWS ? j->rows - m0 : BLOCK_ROWS;
            expand_groups(&j->low, g, 1, m0, rows, change);
            for (int m = 0; m < rows; m++) {
                float *y = j->y + ((long)(m0 + m) * j->groups + g) * LANES;
                vf_store(y, vf_add(vf_load(y), vf_load(change + LANES * m)));
            }
        }
}
int or_lowrank(ThreadPool *team, const LowRank *p, const float *x, int rows, int groups, float *y) {
    const long ld = w_groups(&p->a);
    const size_t low = UP((size_t)rows * ld * sizeof(Low));
    pool_begin(team);
    char *at = team_scratch(team, low + acts_bytes(rows, p->a.k));
    LowRankJob job = {{team, &p, NULL, (Low *)at, 0, ld}, {0}, rows, groups, y};
    if (at) {
        job.x = acts_at(at + low, rows, p->a.k, x, p->a.k);
        for (int r = 0; p->a.kind != W_DENSE && r < rows; r++) acts_row(&job.x, r);
        team_run(team, lowrank_region, &job);
    }
    pool_end(team);
    return at ? 0 : 1;
}
void or_rows(const Weight *w, const int64_t *ids, int count, float scale, float *out) {
    for (int r = 0; r < count; r++) {
        float *y = out + (long)r * w->k;
        weight_row(w, ids[r], y);
        if (scale != 1.0f) for (int i = 0; i < w->k; i++) y[i] *= scale;
    }
}

typedef struct { const int32_t *hashes; int clusters, size, rows; const float *temperature; const uint8_t *sampled; const int64_t *seed, *position; float *out; } LeanJob;
static void lean_region(ThreadPool *team, int me, void *job) {
    (void)me;
    LeanJob *j = job;
    lean_phase(team, j->hashes, j->clusters, j->size, j->rows, j->temperature, j->sampled, j->seed, j->position, 0, j->out);
}
void or_cluster_lean(ThreadPool *team, const int32_t *hashes, int clusters, int size, int rows, const float *temperature, const uint8_t *sampled,
                     const int64_t *seed, const int64_t *position, float *out) {
    LeanJob job = {hashes, clusters, size, rows, temperature, sampled, seed, position, out};
    pool_begin(team);
    team_run(team, lean_region, &job);
    pool_end(team);
}

/* Logits of the tokens of the best clusters: best [rows, top], out [rows, top, size]. scores: [rows, clusters] */
typedef struct { Clusters c; QActs a; int rows; int64_t *best; float *out; } ClusterJob;
static void cluster_region(ThreadPool *team, int me, void *job) {
    (void)me;
    ClusterJob *j = job;
    cluster_phase(team, &j->c, &j->a, j->rows, j->best, j->out);
}
void or_clustered(ThreadPool *team, const Weight *w, const float *x, int rows, const float *scores, int clusters, int top, int size, int64_t *best,
                  float *out) {
    for (int r = 0; r < rows; r++) best_columns(scores + (long)r * clusters, clusters, top, best + (long)r * top);
    pool_begin(team);
    ClusterJob job = {{w, clusters, top, size}, {0}, rows, best, out};
    job.a = acts_at(w->kind == W_DENSE ? NULL : team_scratch(team, acts_bytes(rows, w->k)), rows, w->k, x, w->k);
    if (w->kind != W_DENSE) for (int r = 0; r < rows; r++) acts_row(&job.a, r);
    team_run(team, cluster_region, &job);
    pool_end(team);
}

/* ---- rows ---- */
void or_rms_norm(const float *x, int rows, int n, const float *w, float eps, float *out) {
    for (long r = 0; r < rows; r++) norm_row(x + r * n, n, w, eps, out + r * n);
}
void or_residual_norm(const float *x, const float *y, int rows, int n, const float *post, const float *scale, const float *next, float eps,
                      float *out, float *h, float *tmp) {
    memcpy(out, x, (size_t)rows * n * 4);
    for (long r = 0; r < rows; r++) residual_row(out + r * n, y + r * n, n, post, scale, next, eps, h + r * n, tmp);
}
void or_act_mul(const float *x, long ldx, const float *y, long ldy, int rows, int n, int act, float *out) {
    for (long r = 0; r < rows; r++)
        for (int i = 0; i < n; i += LANES)
            vf_store_n(out + r * n + i, vf_mul(vf_act(vf_load_n(x + r * ldx + i, n - i), act), vf_load_n(y + r * ldy + i, n - i)), n - i);
}
void or_angles(const int64_t *positions, int rows, const float *inv_freq, int half, float *cos_out, float *sin_out) {
    for (long r = 0; r < rows; r++) angles_row(positions[r], inv_freq, half, cos_out + r * half, sin_out + r * half);
}

typedef struct { const float *z; int n; const int64_t *seed, *position, *tokens; const uint8_t *sampled; int rows; int64_t *out; } ChooseJob;
static void choose_region(ThreadPool *team, int me, void *job) {
    (void)me;
    ChooseJob *c = job;
    int lo, hi;
    while (team_next(team, c->rows, 1, &lo, &hi))
        c->out[lo] = choose_row(c->z + (long)lo * c->n, c->n, c->sampled[lo], c->seed[lo], c->position[lo],
                                c->tokens ? c->tokens + (long)lo * c->n : NULL);
}
void or_choose(ThreadPool *team, const float *z, int rows, int n, const int64_t *seed, const int64_t *position, const int64_t *tokens,
               const uint8_t *sampled, int64_t *out) {
    ChooseJob job = {z, n, seed, position, tokens, sampled, rows, out};
    pool_begin(team);
    team_run(team, choose_region, &job);
    pool_end(team);
}

/* z [rows, n], in place: as filter_row */
typedef struct { float *z; int rows, n; const int64_t *top_k; const double *top_p; const float *min_logp; float *room; } FilterJob;
static void filter_region(ThreadPool *team, int me, void *job) {
    const FilterJob *j = job;
    int lo, hi;
    while (team_next(team, j->rows, 1, &lo, &hi))
        filter_row(j->z + (long)lo * j->n, j->n, j->top_k[lo], j->top_p[lo], j->min_logp[lo], j->room + me * FILTER_ROOM(j->n));
}
int or_filter(ThreadPool *team, float *z, int rows, int n, const int64_t *top_k, const double *top_p, const float *min_logp) {
    pool_begin(team);
    FilterJob job = {z, rows, n, top_k, top_p, min_logp, team_scratch(team, team->size * FILTER_ROOM(n) * 4)};
    if (job.room) team_run(team, filter_region, &job);
    pool_end(team);
    return job.room ? 0 : 1;
}

/* tokens [rows], out [rows, 1 + 2·top]: as logprob_row */
typedef struct { const float *z; int rows, n, top; const int64_t *tokens; float *out; } LogprobJob;
static void logprob_region(ThreadPool *team, int me, void *job) {
    (void)me;
    const LogprobJob *j = job;
    int lo, hi;
    while (team_next(team, j->rows, 1, &lo, &hi)) logprob_row(j->z + (long)lo * j->n, j->n, j->tokens[lo], j->top, j->out + lo * (1L + 2 * j->top));
}
void or_logprobs(ThreadPool *team, const float *z, int rows, int n, const int64_t *tokens, int top, float *out) {
    LogprobJob job = {z, rows, n, top, tokens, out};
    pool_begin(team);
    team_run(team, logprob_region, &job);
    pool_end(team);
}

/* ---- experts ---- */
typedef struct { const Moe *m; MoeRun run; int act; } MoeJob;
static void moe_region(ThreadPool *team, int me, void *job) {
    MoeJob *j = job;
    int lo, hi;
    team_share(team, me, j->run.rows, &lo, &hi);
    for (int i = lo; i < hi; i++) moe_quantise(j->m, &j->run, i);
    team_barrier(team);
    moe_phase(team, me, j->m, &j->run, j->act);
}
int or_moe(ThreadPool *team, const Moe *m, const float *router_in, const float *x, int rows, int act, float *out) {
    MoeJob job = {m, {0}, act};
    pool_begin(team);
    char *at = team_scratch(team, moe_layout(&job.run, m, rows, NULL));
    if (at) {
        moe_layout(&job.run, m, rows, at);
        job.run.router_acts.x = router_in;
        job.run.acts.x = job.run.in = (float *)x; /* only read */
        job.run.out = out;
        team_run(team, moe_region, &job);
    }
    pool_end(team);
    return at ? 0 : 1;
}

/* ---- attention ---- */
typedef struct { const Spec *s; const Batch *b; float *qkv; const float *cos, *sin, *q_norm, *k_norm; long ld; } RopeJob;
static void rope_region(ThreadPool *team, int me, void *job) {
    RopeJob *j = job;
    const int heads = spec_qkv_rows(j->s) / j->s->dim, half = j->s->dim / 2;
    int lo, hi;
    team_share(team, me, j->b->rows * heads, &lo, &hi);
    for (int t = lo; t < hi; t++) {
        const long r = t / heads;
        rope_write_head(j->s, j->b, (int)r, t % heads, j->qkv + r * j->ld, j->cos + r * half, j->sin + r * half, j->q_norm, j->k_norm);
    }
}
/* qkv [rows, qkv_rows] is changed in place: its q part is the answer */
void or_rope_write(ThreadPool *team, const Spec *s, const Batch *b, float *qkv, const float *cos, const float *sin, const float *q_norm,
                   const float *k_norm) {
    RopeJob job = {s, b, qkv, cos, sin, q_norm, k_norm, spec_qkv_rows(s)};
    pool_begin(team);
    team_run(team, rope_region, &job);
    pool_end(team);
}

typedef struct { const Spec *s; const Batch *b; Cut cut; const float *q; long ldq; float *out; } AttendJob;
static void attend_region(ThreadPool *team, int me, void *job) {
    AttendJob *j = job;
    attend_phase(team, me, j->s, j->b, &j->cut, j->q, j->ldq, j->out, (long)j->s->heads * j->s->dim, NULL);
}
int or_attend(ThreadPool *team, const Spec *s, const Batch *b, const float *q, long ldq, float *out) {
    AttendJob job = {s, b, {0}, q, ldq, out};
    pool_begin(team);
    cut_plan(&job.cut, team, s, b);
    char *at = team_scratch(team, cut_bytes(&job.cut, team, s, b));
    if (at) {
        cut_place(&job.cut, team, s, b, at);
        team_run(team, attend_region, &job);
    }
    pool_end(team);
    return at ? 0 : 1;
}

/* Keys and values of `from`[i] of the sequences seq[i] to `to`[i], one after another. */
void or_move_kv(const Spec *s, const Batch *b, const int64_t *seq, const int64_t *from, const int64_t *to, int count) {
    for (int i = 0; i < count; i++) if (from[i] != to[i]) move_kv(s, b, (int)seq[i], from[i], to[i]);
}

/* ---- whole stacks ---- */
int or_forward(ThreadPool *team, const Call *call) {
    Run run = {*call};
    pool_begin(team);
    char *at = team_scratch(team, run_layout(&run, team, NULL));
    if (at) {
        run_layout(&run, team, at);
        team_run(team, stack_region, &run);
    }
    pool_end(team);
    return at ? 0 : 1;
}

int or_draft(ThreadPool *team, const Draft *draft) {
    DraftRun run = {*draft};
    run.run.call = draft->call;
    pool_begin(team);
    char *at = team_scratch(team, draft_layout(&run, team, NULL));
    if (at) {
        draft_layout(&run, team, at);
        team_run(team, draft_region, &run);
    }
    pool_end(team);
    return at ? 0 : 1;
}
