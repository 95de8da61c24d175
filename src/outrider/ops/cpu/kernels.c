/* The library: what Python calls. One translation unit; see build.py for the flags. */
#include "forward.h"

#define UP(n) (((size_t)(n) + 63) & ~(size_t)63)

int or_isa(void) {
#if ISA_AVX512
    return 2;
#elif ISA_AVX2
    return 1;
#else
    return 0;
#endif
}
int or_sizes(int which) {
    const size_t sizes[] = {sizeof(Weight), sizeof(Spec), sizeof(Batch), sizeof(Layer), sizeof(Stack), sizeof(Call)};
    return (int)sizes[which];
}

/* ---- products ---- */
typedef struct { const Weight *w; Acts a; int rows; To to; } ProductJob;

static void product_region(Team *team, int me, void *job) {
    ProductJob *p = job;
    if (p->w->kind != W_DENSE) {
        int lo, hi;
        team_share(team, me, p->rows, &lo, &hi);
        for (int r = lo; r < hi; r++)
            quantize_row(p->a.x + (long)r * p->a.ldx, p->a.k, p->a.q + (long)r * p->a.k, p->a.blk + (long)r * (p->a.k / 32));
        if (p->rows > 1) team_barrier(team); /* a single row was quantised by its caller */
    }
    product_phase(team, p->w, &p->a, p->rows, &p->to);
}

static void run_product(Team *team, const Weight *w, const float *x, int rows, To to) {
    team_begin(team);
    ProductJob job = {w, {0}, rows, to};
    job.a = acts_at(w->kind == W_DENSE ? NULL : team_scratch(team, acts_bytes(rows, w->k)), rows, w->k, x, w->k);
    if (w->kind != W_DENSE && rows == 1) quantize_row(x, w->k, job.a.q, job.a.blk);
    team_run(team, product_region, &job);
    team_end(team);
}

void or_linear(Team *team, const Weight *w, const float *x, int rows, const float *bias, float *out) {
    To to = {TO_STORE, bias, out, w->n};
    run_product(team, w, x, rows, to);
}
void or_gated_linear(Team *team, const Weight *w, const float *x, int rows, int act, float *out) {
    To to = {TO_GATED, NULL, out, w->n / 2, act};
    run_product(team, w, x, rows, to);
}
void or_logits(Team *team, const Weight *w, const float *x, int rows, float cap, float *out) {
    To to = {cap > 0.0f ? TO_SOFTCAP : TO_STORE, NULL, out, w->n, 0, NULL, 0, cap};
    run_product(team, w, x, rows, to);
}
void or_rows(const Weight *w, const int64_t *ids, int count, float scale, float *out) {
    for (int r = 0; r < count; r++) {
        float *y = out + (long)r * w->k;
        weight_row(w, ids[r], y);
        if (scale != 1.0f) for (int i = 0; i < w->k; i++) y[i] *= scale;
    }
}

/* Logits of the tokens of the best clusters: best [rows, top], out [rows, top, size]. scores: [rows, clusters] */
typedef struct { const Weight *w; Acts a; int rows, top, size; const int64_t *best; float *out; } ClusterJob;
static void cluster_region(Team *team, int me, void *job) {
    (void)me;
    ClusterJob *c = job;
    float tile[LANES];
    int lo, hi;
    while (team_next(team, c->rows * c->top, 4, &lo, &hi))
        for (int t = lo; t < hi; t++) {
            const long first = c->best[t] * c->size, last = first + c->size;
            for (long g = first / LANES; g * LANES < last; g++) {
                product_tile(c->w, (int)g, &c->a, t / c->top, 1, tile);
                for (int j = 0; j < LANES; j++)
                    if (g * LANES + j >= first && g * LANES + j < last) c->out[(long)t * c->size + g * LANES + j - first] = tile[j];
            }
        }
}
void or_clustered(Team *team, const Weight *w, const float *x, int rows, const float *scores, int clusters, int top, int size, int64_t *best, float *out) {
    for (int r = 0; r < rows; r++) { /* the best `top` in falling order; the earlier of equals first */
        const float *z = scores + (long)r * clusters;
        int64_t *b = best + (long)r * top;
        int have = 0;
        for (int c = 0; c < clusters; c++) {
            if (have == top && !(z[c] > z[b[top - 1]])) continue;
            int at = have < top ? have++ : top - 1;
            for (; at > 0 && z[c] > z[b[at - 1]]; at--) b[at] = b[at - 1];
            b[at] = c;
        }
    }
    team_begin(team);
    ClusterJob job = {w, {0}, rows, top, size, best, out};
    job.a = acts_at(w->kind == W_DENSE ? NULL : team_scratch(team, acts_bytes(rows, w->k)), rows, w->k, x, w->k);
    if (w->kind != W_DENSE) for (int r = 0; r < rows; r++) quantize_row(x + (long)r * w->k, w->k, job.a.q + (long)r * w->k, job.a.blk + (long)r * (w->k / 32));
    team_run(team, cluster_region, &job);
    team_end(team);
}

/* ---- rows ---- */
void or_rms_norm(const float *x, int rows, int n, const float *w, float eps, float *out) {
    for (long r = 0; r < rows; r++) norm_row(x + r * n, n, w, eps, out + r * n);
}
void or_residual_norm(const float *x, const float *y, int rows, int n, const float *post, const float *scale, const float *next, float eps, float *out, float *h, float *tmp) {
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

typedef struct { const float *z; int n; const int64_t *seed, *position, *tokens; const uint8_t *hot; int rows; int64_t *out; } ChooseJob;
static void choose_region(Team *team, int me, void *job) {
    (void)me;
    ChooseJob *c = job;
    int lo, hi;
    while (team_next(team, c->rows, 1, &lo, &hi))
        c->out[lo] = choose_row(c->z + (long)lo * c->n, c->n, c->hot[lo], c->seed[lo], c->position[lo], c->tokens ? c->tokens + (long)lo * c->n : NULL);
}
void or_choose(Team *team, const float *z, int rows, int n, const int64_t *seed, const int64_t *position, const int64_t *tokens, const uint8_t *hot, int64_t *out) {
    ChooseJob job = {z, n, seed, position, tokens, hot, rows, out};
    team_begin(team);
    team_run(team, choose_region, &job);
    team_end(team);
}

/* ---- attention ---- */
typedef struct { const Spec *s; const Batch *b; float *qkv; const float *cos, *sin, *q_norm, *k_norm; long ld; } RopeJob;
static void rope_region(Team *team, int me, void *job) {
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
void or_rope_write(Team *team, const Spec *s, const Batch *b, float *qkv, const float *cos, const float *sin, const float *q_norm, const float *k_norm) {
    RopeJob job = {s, b, qkv, cos, sin, q_norm, k_norm, spec_qkv_rows(s)};
    team_begin(team);
    team_run(team, rope_region, &job);
    team_end(team);
}

static void cut_plan(Cut *cut, const Team *team, const Spec *s, const Batch *b) { /* sizes only */
    const int per = cut->per = block_rows(s, b, team->size);
    cut->count = count_blocks(b, per);
    cut->most = 1;
    for (int i = 0; i < b->seqs; i++) {
        if (b->row_start[i] == b->row_start[i + 1]) continue;
        int chunks = (int)(b->positions[b->row_start[i + 1] - 1] / CHUNK) + 1;
        const int within = (s->window + per - 2) / CHUNK + 2; /* chunks that a window and a block's rows can touch */
        if (s->window && chunks > within) chunks = within;
        if (chunks > cut->most) cut->most = chunks;
    }
    cut->split = cut->most > 1 && cut->count * s->kv_heads < 2 * team->size;
    cut->scratch_step = UP(attend_scratch(s->dim));
    cut->parts_step = UP(MAX_QUERIES * part_floats(s) * cut->most * 4) / 4;
}
INLINE size_t cut_bytes(const Cut *cut, const Team *team, const Spec *s, const Batch *b) {
    size_t parts = cut->split ? UP((size_t)b->rows * s->heads * cut->most * part_floats(s) * 4) : cut->parts_step * 4 * team->size;
    return UP(cut->count * sizeof(RowBlock)) + parts + cut->scratch_step * team->size;
}
static void cut_place(Cut *cut, const Team *team, const Spec *s, const Batch *b, char *at) {
    cut->blocks = (RowBlock *)at;
    cut_blocks(b, cut->per, cut->blocks);
    at += UP(cut->count * sizeof(RowBlock));
    cut->scratch = at;
    cut->parts = (float *)(at + cut->scratch_step * team->size);
}

typedef struct { const Spec *s; const Batch *b; Cut cut; const float *q; long ldq; float *out; } AttendJob;
static void attend_region(Team *team, int me, void *job) {
    AttendJob *j = job;
    attend_phase(team, me, j->s, j->b, &j->cut, j->q, j->ldq, j->out, (long)j->s->heads * j->s->dim, NULL);
}
int or_attend(Team *team, const Spec *s, const Batch *b, const float *q, long ldq, float *out) {
    AttendJob job = {s, b, {0}, q, ldq, out};
    team_begin(team);
    cut_plan(&job.cut, team, s, b);
    char *at = team_scratch(team, cut_bytes(&job.cut, team, s, b));
    if (at) {
        cut_place(&job.cut, team, s, b, at);
        team_run(team, attend_region, &job);
    }
    team_end(team);
    return at ? 0 : 1;
}

/* ---- the whole stack ---- */
int or_forward(Team *team, const Call *call) {
    const Stack *s = call->stack;
    const Batch *b = &call->batch;
    const size_t R = (size_t)b->rows, H = (size_t)s->hidden, T = (size_t)team->size;
    Run run = {*call};
    run.own = b->rows <= PRIVATE_ROWS;
    size_t qkv = 0, wide = 0, inter = s->ple > 32 ? s->ple : 32, halves = 0;
    int dense_mlp = 0;
    const Spec *of[2] = {NULL, NULL}; /* the widest layer of each group decides its scratch */
    for (int i = 0; i < s->layers; i++) {
        const Layer *l = &s->layer[i];
        const Spec *a = &l->attn;
        if ((size_t)l->qkv.n > qkv) qkv = l->qkv.n;
        if ((size_t)a->heads * a->dim > wide) wide = (size_t)a->heads * a->dim;
        if ((size_t)l->inter > inter) inter = l->inter;
        dense_mlp |= l->down.kind == W_DENSE || (s->ple && l->ple_out.kind == W_DENSE);
        if (!of[a->group] || a->dim > of[a->group]->dim) of[a->group] = a;
    }
    for (int k = 0; k < s->ropes; k++) halves += s->rope_half[k];
    const size_t copies = run.own ? T : 1, ple = (size_t)s->ple * s->layers;
    const size_t side_k = s->pre.kind != W_NONE && (size_t)s->pre.k > (size_t)s->ple ? (size_t)s->pre.k : (size_t)s->ple;
    team_begin(team);
    size_t need = UP(R * halves * 4) * 2 + UP(2 * s->ropes * sizeof(float *)) + 2 * copies * UP(R * H * 4) + UP(R * H * 4) + UP(R * qkv * 4) + UP(R * wide * 4)
        + (dense_mlp ? UP(R * inter * 4) : 0) + UP(R * ple * 4) + UP(T * ple * 4) + copies * UP(acts_bytes(b->rows, s->hidden))
        + UP(acts_bytes(b->rows, (int)wide)) + UP(acts_bytes(b->rows, (int)inter)) + UP(acts_bytes(b->rows, (int)side_k)) + UP(T * H * 4) + 4096;
    for (int g = 0; g < 2; g++)
        if (of[g]) { cut_plan(&run.cut[g], team, of[g], b); need += cut_bytes(&run.cut[g], team, of[g], b); }
    char *at = team_scratch(team, need);
    if (!at) { team_end(team); return 1; }
#define TAKE(bytes) (at += UP(bytes), at - UP(bytes))
    run.cos = (float **)TAKE(2 * s->ropes * sizeof(float *));
    run.sin = run.cos + s->ropes;
    for (int k = 0; k < s->ropes; k++) {
        run.cos[k] = (float *)at; at += R * s->rope_half[k] * 4;
        run.sin[k] = (float *)at; at += R * s->rope_half[k] * 4;
    }
    at = (char *)UP(at);
    run.xh_step = UP(R * H * 4) / 4;
    run.x = (float *)TAKE(copies * UP(R * H * 4));
    run.h = (float *)TAKE(copies * UP(R * H * 4));
    run.y = (float *)TAKE(R * H * 4);
    run.qkv = (float *)TAKE(R * qkv * 4);
    run.mixed = (float *)TAKE(R * wide * 4);
    run.mlp = dense_mlp ? (float *)TAKE(R * inter * 4) : NULL;
    run.ple = (float *)TAKE(R * ple * 4);
    run.side = (float *)TAKE(T * ple * 4);
    run.norm_step = UP(acts_bytes(b->rows, s->hidden));
    run.norm_at = TAKE(copies * run.norm_step);
    run.norm = acts_at(run.norm_at, b->rows, s->hidden, run.h, s->hidden);
    run.attn = acts_at(TAKE(acts_bytes(b->rows, (int)wide)), b->rows, (int)wide, run.mixed, (int)wide);
    run.mlp_acts = acts_at(TAKE(acts_bytes(b->rows, (int)inter)), b->rows, (int)inter, run.mlp, (int)inter);
    run.side_acts = acts_at(TAKE(acts_bytes(b->rows, (int)side_k)), b->rows, (int)side_k, run.mlp, (int)side_k);
    run.tmp = (float *)TAKE(T * H * 4);
    for (int g = 0; g < 2; g++)
        if (of[g]) { size_t bytes = cut_bytes(&run.cut[g], team, of[g], b); cut_place(&run.cut[g], team, of[g], b, at); at += bytes; }
    team_run(team, stack_region, &run);
    team_end(team);
    return 0;
}
