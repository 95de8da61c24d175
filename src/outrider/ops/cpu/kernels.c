/* The library: what Python calls. One translation unit; see build.py for the flags. */
#include "cycle.h"
#include "draft_model.h"
#include "requantize.h"

int or_isa(void) {
#if ISA_AMX
    return 4;
#elif ISA_BF16
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
    const size_t sizes[] = {sizeof(Weight), sizeof(Spec),         sizeof(Batch),        sizeof(Layer),
                            sizeof(Stack),  sizeof(Call),         sizeof(Draft),        sizeof(Cycle),
                            sizeof(Moe),    sizeof(Chain),        sizeof(LowRank),      sizeof(BlockNet),
                            sizeof(Unread), sizeof(DecodeInputs), sizeof(DecodeOutputs)};
    return (int)sizes[which];
}

/* ---- teams ---- */
/* NULL without memory */
ThreadPool *or_pool_new(int size) {
    ThreadPool *t = os_allocate(64, (sizeof(ThreadPool) + 63) & ~(size_t)63);
    if (!t) return NULL;
    memset(t, 0, sizeof *t);
    t->size = size < 1 ? 1 : size;
    t->threads = calloc((size_t)t->size, sizeof(OsThread));
    t->claims = os_allocate(64, (size_t)t->size * sizeof(Claim));
    if (!t->threads || !t->claims) {
        free(t->threads);
        os_free(t->claims);
        os_free(t);
        return NULL;
    }
    pool_start(t);
    return t;
}

int or_pool_size(const ThreadPool *t) { return t->size; }

void or_pool_free(ThreadPool *t) {
    if (t->owner == os_process()) {
        os_mutex_lock(&t->lock);
        t->stop = 1;
        atomic_fetch_add(&t->round, 1);
        os_condition_wake_all(&t->wake);
        os_mutex_unlock(&t->lock);
        for (int i = 1; i < t->size; i++) os_thread_join(t->threads[i]);
    }
    free(t->threads);
    os_free(t->claims);
    os_free(t->scratch.at);
    os_free(t);
}

/* ---- packing ---- */
const uint8_t *grid_points[GRIDS];
/* The points of the lattices, in the order of formats.h: kept by the caller */
void or_grids(const uint8_t *const *grids) { memcpy(grid_points, grids, sizeof grid_points); }
/* The layout of a file's type, and its table of codes */
int or_file_kind(int type) { return file_types[type].kind; }
int or_file_table(int type) { return file_types[type].table; }
/* Bytes of `data` (which = 0) or `scale` (1) that a weight of this kind needs */
int64_t or_packed_bytes(int kind, int n, int k, int which) {
    const int64_t groups = (n + LANES - 1) / LANES, blocks = k / 32;
    return which ? groups * (blocks / k_blocks(kind)) * (int64_t)k_scale_step(kind)
                 : groups * blocks * 64 * k_lines(kind);
}
/* `rows` rows of a file, of a type that has w's layout and table, become rows first.. of w */
void or_pack(ThreadPool *pool, const Weight *w, int type, int first, const uint8_t *from, int64_t row_bytes, int rows) {
    PackJob job = {w, type, first, rows, from, (size_t)row_bytes};
    pool_begin(pool);
    pool_run(pool, pack_region, &job);
    pool_end(pool);
}
/* Row i of `to` is row order[i] of `from` */
void or_take(const Weight *from, const int64_t *order, const Weight *to) {
    for (int64_t i = 0; i < to->n; i++) copy_lane(from, order[i], to, i);
}

/* `to`, of kind W_Q4, becomes `from` in four bits */
int or_coarse(ThreadPool *pool, const Weight *from, const Weight *to) {
    CoarseJob job = {from, to, NULL};
    pool_begin(pool);
    job.rows = (float *)pool_scratch(pool, (size_t)pool->size * LANES * to->k * 4);
    if (job.rows) pool_run(pool, coarse_region, &job);
    pool_end(pool);
    return job.rows ? 0 : 1;
}

/* ---- products ---- */
typedef struct { const Weight *w; QActs a; int rows; Epilogue to; } ProductJob;

static void product_region(ThreadPool *pool, int me, void *job) {
    ProductJob *p = job;
    if (p->w->kind != W_DENSE) {
        int lo, hi;
        pool_share(pool, me, p->rows, &lo, &hi);
        for (int r = lo; r < hi; r++) acts_row(&p->a, r);
        if (p->rows > 1) pool_barrier(pool); /* a single row was quantised by its caller */
    }
    product_phase(pool, me, p->w, &p->a, p->rows, &p->to);
}

/* Returns 1 without scratch. */
static int run_product(ThreadPool *pool, const Weight *w, const float *x, int rows, Epilogue to) {
    const int quantised = w->kind != W_DENSE;
    pool_begin(pool);
    char *scratch = quantised ? pool_scratch(pool, acts_bytes(rows, w->k)) : NULL;
    const int failed = quantised && !scratch;
    if (!failed) {
        ProductJob job = {.w = w, .a = acts_at(scratch, rows, w->k, x, w->k), .rows = rows, .to = to};
        if (quantised && rows == 1) acts_row(&job.a, 0);
        pool_run(pool, product_region, &job);
    }
    pool_end(pool);
    return failed;
}

int or_linear(ThreadPool *pool, const Weight *w, const float *x, int rows, const float *bias, float *out) {
    Epilogue to = {.how = TO_STORE, .bias = bias, .out = out, .ldo = w->n};
    return run_product(pool, w, x, rows, to);
}
int or_gated_linear(ThreadPool *pool, const Weight *w, const float *x, int rows, int act, float *out) {
    Epilogue to = {.how = TO_GATED, .out = out, .ldo = w->n / 2, .act = act};
    return run_product(pool, w, x, rows, to);
}
int or_logits(ThreadPool *pool, const Weight *w, const float *x, int rows, float cap, float *out) {
    Epilogue to = {.how = TO_STORE, .out = out, .ldo = w->n, .cap = cap};
    return run_product(pool, w, x, rows, to);
}
/* y [rows, 16·groups] += scale · B (A x), x [rows, k]: as a product of a pass adds it */
typedef struct { LowRankRows low; QActs x; int rows, groups; float *y; } LowRankJob;
static void lowrank_region(ThreadPool *pool, int me, void *job) {
    const LowRankJob *j = job;
    float change[BLOCK_ROWS * LANES];
    int lo, hi;
    shrink_phase(&j->low, me, &j->x, j->rows);
    pool_share(pool, me, j->groups, &lo, &hi);
    for (int g = lo; g < hi; g++)
        for (int m0 = 0; m0 < j->rows; m0 += BLOCK_ROWS) {
            const int rows = j->rows - m0 < BLOCK_ROWS ? j->rows - m0 : BLOCK_ROWS;
            expand_groups(&j->low, g, 1, m0, rows, change);
            for (int m = 0; m < rows; m++) {
                float *y = j->y + ((int64_t)(m0 + m) * j->groups + g) * LANES;
                vf_store(y, vf_add(vf_load(y), vf_load(change + LANES * m)));
            }
        }
}
int or_lowrank(ThreadPool *pool, const LowRank *p, const float *x, int rows, int groups, float *y) {
    const int64_t ld = w_groups(&p->a);
    const size_t low = UP((size_t)rows * ld * sizeof(Low));
    pool_begin(pool);
    char *at = pool_scratch(pool, low + acts_bytes(rows, p->a.k));
    LowRankJob job = {.low = {.pool = pool, .table = &p, .low = (Low *)at, .ld = ld, .past = 1},
                      .rows = rows,
                      .groups = groups,
                      .y = y};
    if (at) {
        job.x = acts_at(at + low, rows, p->a.k, x, p->a.k);
        for (int r = 0; p->a.kind != W_DENSE && r < rows; r++) acts_row(&job.x, r);
        pool_run(pool, lowrank_region, &job);
    }
    pool_end(pool);
    return at ? 0 : 1;
}
void or_rows(const Weight *w, const int64_t *ids, int count, float scale, float *out) {
    for (int r = 0; r < count; r++) {
        float *y = out + (int64_t)r * w->k;
        weight_row(w, ids[r], y);
        if (scale != 1.0f) for (int i = 0; i < w->k; i++) y[i] *= scale;
    }
}

typedef struct {
    const int32_t *hashes;
    int clusters, size, rows;
    const float *temperature;
    const uint8_t *sampled;
    const int64_t *seed, *position;
    float *out;
} ClusterBonusJob;
static void cluster_bonus_region(ThreadPool *pool, int me, void *job) {
    (void)me;
    ClusterBonusJob *j = job;
    cluster_bonus_phase(pool, j->hashes, j->clusters, j->size, j->rows, j->temperature, j->sampled, j->seed,
                        j->position, 0, j->out);
}
void or_cluster_bonus(ThreadPool *pool, const int32_t *hashes, int clusters, int size, int rows,
                      const float *temperature, const uint8_t *sampled, const int64_t *seed, const int64_t *position,
                      float *out) {
    ClusterBonusJob job = {hashes, clusters, size, rows, temperature, sampled, seed, position, out};
    pool_begin(pool);
    pool_run(pool, cluster_bonus_region, &job);
    pool_end(pool);
}

/* Logits of the tokens of the best clusters: best [rows, top], out [rows, top, size]. scores: [rows, clusters] */
typedef struct { Clusters c; QActs a; int rows; int64_t *best; float *out; } ClusterJob;
static void cluster_region(ThreadPool *pool, int me, void *job) {
    (void)me;
    ClusterJob *j = job;
    cluster_phase(pool, &j->c, &j->a, j->rows, j->best, j->out);
}
int or_clustered(ThreadPool *pool, const Weight *w, const float *x, int rows, const float *scores, int clusters,
                 int top, int size, int64_t *best, float *out) {
    const int quantised = w->kind != W_DENSE;
    pool_begin(pool);
    char *scratch = quantised ? pool_scratch(pool, acts_bytes(rows, w->k)) : NULL;
    const int failed = quantised && !scratch;
    if (!failed) {
        for (int r = 0; r < rows; r++)
            best_columns(scores + (int64_t)r * clusters, clusters, top, best + (int64_t)r * top);
        ClusterJob job = {
            .c = {w, clusters, top, size},
            .a = acts_at(scratch, rows, w->k, x, w->k),
            .rows = rows,
            .best = best,
            .out = out,
        };
        for (int r = 0; quantised && r < rows; r++) acts_row(&job.a, r);
        pool_run(pool, cluster_region, &job);
    }
    pool_end(pool);
    return failed;
}

/* ---- rows ---- */
void or_rms_norm(const float *x, int rows, int n, const float *w, float eps, float *out) {
    for (int64_t r = 0; r < rows; r++) norm_row(x + r * n, n, w, eps, out + r * n);
}
void or_residual_norm(const float *x, const float *y, int rows, int n, const float *post, const float *scale,
                      const float *next, float eps, float *out, float *h, float *tmp) {
    memcpy(out, x, (size_t)rows * n * 4);
    for (int64_t r = 0; r < rows; r++) residual_row(out + r * n, y + r * n, n, post, scale, next, eps, h + r * n, tmp);
}
void or_act_mul(const float *x, int64_t ldx, const float *y, int64_t ldy, int rows, int n, int act, float *out) {
    for (int64_t r = 0; r < rows; r++)
        for (int i = 0; i < n; i += LANES)
            vf_store_n(out + r * n + i,
                       vf_mul(vf_act(vf_load_n(x + r * ldx + i, n - i), act), vf_load_n(y + r * ldy + i, n - i)),
                       n - i);
}
void or_angles(const int64_t *positions, int rows, const float *inv_freq, int half, float *cos_out, float *sin_out) {
    for (int64_t r = 0; r < rows; r++) angles_row(positions[r], inv_freq, half, cos_out + r * half, sin_out + r * half);
}

typedef struct {
    const float *z;
    int n;
    const int64_t *seed, *position, *tokens;
    const uint8_t *sampled;
    int rows;
    int64_t *out;
} ChooseJob;
static void choose_region(ThreadPool *pool, int me, void *job) {
    (void)me;
    ChooseJob *c = job;
    int lo, hi;
    while (pool_next(pool, c->rows, 1, &lo, &hi))
        c->out[lo] = choose_row(c->z + (int64_t)lo * c->n, c->n, c->sampled[lo], c->seed[lo], c->position[lo],
                                c->tokens ? c->tokens + (int64_t)lo * c->n : NULL);
}
void or_choose(ThreadPool *pool, const float *z, int rows, int n, const int64_t *seed, const int64_t *position,
               const int64_t *tokens, const uint8_t *sampled, int64_t *out) {
    ChooseJob job = {z, n, seed, position, tokens, sampled, rows, out};
    pool_begin(pool);
    pool_run(pool, choose_region, &job);
    pool_end(pool);
}

/* z [rows, n], in place: as filter_row */
typedef struct {
    float *z;
    int rows, n;
    const int64_t *top_k;
    const double *top_p;
    const float *min_logp;
    float *room;
} FilterJob;
static void filter_region(ThreadPool *pool, int me, void *job) {
    const FilterJob *j = job;
    int lo, hi;
    while (pool_next(pool, j->rows, 1, &lo, &hi))
        filter_row(j->z + (int64_t)lo * j->n, j->n, j->top_k[lo], j->top_p[lo], j->min_logp[lo],
                   j->room + me * FILTER_ROOM(j->n));
}
int or_filter(ThreadPool *pool, float *z, int rows, int n, const int64_t *top_k, const double *top_p,
              const float *min_logp) {
    pool_begin(pool);
    FilterJob job = {z, rows, n, top_k, top_p, min_logp, pool_scratch(pool, pool->size * FILTER_ROOM(n) * 4)};
    if (job.room) pool_run(pool, filter_region, &job);
    pool_end(pool);
    return job.room ? 0 : 1;
}

/* tokens [rows], out [rows, 1 + 2·top]: as logprob_row */
typedef struct { const float *z; int rows, n, top; const int64_t *tokens; float *out; } LogprobJob;
static void logprob_region(ThreadPool *pool, int me, void *job) {
    (void)me;
    const LogprobJob *j = job;
    int lo, hi;
    while (pool_next(pool, j->rows, 1, &lo, &hi))
        logprob_row(j->z + (int64_t)lo * j->n, j->n, j->tokens[lo], j->top, j->out + lo * (INT64_C(1) + 2 * j->top));
}
void or_logprobs(ThreadPool *pool, const float *z, int rows, int n, const int64_t *tokens, int top, float *out) {
    LogprobJob job = {z, rows, n, top, tokens, out};
    pool_begin(pool);
    pool_run(pool, logprob_region, &job);
    pool_end(pool);
}

/* ---- experts ---- */
typedef struct { const Moe *m; MoeRun run; int act; } MoeJob;
static void moe_region(ThreadPool *pool, int me, void *job) {
    MoeJob *j = job;
    int lo, hi;
    pool_share(pool, me, j->run.rows, &lo, &hi);
    for (int i = lo; i < hi; i++) moe_quantise(j->m, &j->run, i);
    pool_barrier(pool);
    moe_phase(pool, me, j->m, &j->run, j->act);
}
int or_moe(ThreadPool *pool, const Moe *m, const float *router_in, const float *x, int rows, int act, float *out) {
    MoeJob job = {m, {0}, act};
    pool_begin(pool);
    char *at = pool_scratch(pool, moe_layout(&job.run, m, rows, NULL));
    if (at) {
        moe_layout(&job.run, m, rows, at);
        job.run.router_acts.x = router_in;
        job.run.acts.x = job.run.in = (float *)x; /* only read */
        job.run.out = out;
        pool_run(pool, moe_region, &job);
    }
    pool_end(pool);
    return at ? 0 : 1;
}

/* ---- attention ---- */
typedef struct {
    const Spec *s;
    const Batch *b;
    float *qkv;
    const float *cos, *sin, *q_norm, *k_norm;
    int64_t ld;
} RopeJob;
static void rope_region(ThreadPool *pool, int me, void *job) {
    RopeJob *j = job;
    const int heads = spec_qkv_rows(j->s) / j->s->dim, half = j->s->dim / 2;
    int lo, hi;
    pool_share(pool, me, j->b->rows * heads, &lo, &hi);
    for (int t = lo; t < hi; t++) {
        const int64_t r = t / heads;
        rope_write_head(j->s, j->b, (int)r, t % heads, j->qkv + r * j->ld, j->cos + r * half, j->sin + r * half,
                        j->q_norm, j->k_norm);
    }
}
/* qkv [rows, qkv_rows] is changed in place: its q part is the answer */
void or_rope_write(ThreadPool *pool, const Spec *s, const Batch *b, float *qkv, const float *cos, const float *sin,
                   const float *q_norm, const float *k_norm) {
    RopeJob job = {s, b, qkv, cos, sin, q_norm, k_norm, spec_qkv_rows(s)};
    pool_begin(pool);
    pool_run(pool, rope_region, &job);
    pool_end(pool);
}

typedef struct { const Spec *s; const Batch *b; AttnSplit cut; const float *q; int64_t ldq; float *out; } AttendJob;
static void attend_region(ThreadPool *pool, int me, void *job) {
    AttendJob *j = job;
    attend_phase(pool, me, j->s, j->b, &j->cut, j->q, j->ldq, j->out, (int64_t)j->s->heads * j->s->dim, NULL);
}
int or_attend(ThreadPool *pool, const Spec *s, const Batch *b, const float *q, int64_t ldq, float *out) {
    AttendJob job = {s, b, {0}, q, ldq, out};
    pool_begin(pool);
    split_plan(&job.cut, pool, s, b);
    char *at = pool_scratch(pool, split_bytes(&job.cut, pool, s, b));
    if (at) {
        split_place(&job.cut, pool, s, b, at);
        pool_run(pool, attend_region, &job);
    }
    pool_end(pool);
    return at ? 0 : 1;
}

/* Keys and values of `from`[i] of the sequences seq[i] to `to`[i], one after another. */
void or_move_kv(const Spec *s, const Batch *b, const int64_t *seq, const int64_t *from, const int64_t *to, int count) {
    for (int i = 0; i < count; i++) if (from[i] != to[i]) move_kv(s, b, (int)seq[i], from[i], to[i]);
}

/* ---- whole stacks ---- */
int or_forward(ThreadPool *pool, const Call *call) {
    Run run = {.call = *call};
    pool_begin(pool);
    char *at = pool_scratch(pool, run_layout(&run, pool, NULL));
    if (at) {
        run_layout(&run, pool, at);
        pool_run(pool, stack_region, &run);
    }
    pool_end(pool);
    return at ? 0 : 1;
}

int or_draft(ThreadPool *pool, const Draft *draft) {
    DraftRun run = {.draft = *draft};
    run.run.call = draft->call;
    pool_begin(pool);
    char *at = pool_scratch(pool, draft_layout(&run, pool, NULL));
    if (at) {
        draft_layout(&run, pool, at);
        pool_run(pool, draft_region, &run);
    }
    pool_end(pool);
    return at ? 0 : 1;
}
