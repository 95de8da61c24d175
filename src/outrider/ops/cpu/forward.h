/* A whole stack of decoder layers in one parallel region: embedding (or a projection of given features) in, the
 * normed hidden state out. Every step calls the same row and tile functions as the single operations, so the results
 * are bitwise those of the operations called one by one.
 */
#pragma once
#include "moe.h"

typedef struct {
    Spec attn;
    int32_t rope, inter;
    Weight qkv, out, gate_up, down, ple_gate, ple_out;
    Weight kv;                        /* of a block drafter: k and v, where `qkv` is q alone */
    Moe moe;                          /* next to the dense MLP */
    const float *attn_norm, *qkv_bias, *q_norm, *k_norm, *out_bias, *post_attn_norm;
    const float *mlp_norm, *gate_up_bias, *down_bias, *post_mlp_norm, *scalar, *next_norm, *ple_post_norm, *kv_bias;
} Layer;

typedef struct {
    int32_t layers, hidden, act, ropes, ple;
    float eps, embed_scale, ple_token_scale, ple_proj_scale;
    const Layer *layer;
    Weight embed, pre, post;          /* pre: features -> stream instead of an embedding; post: hidden -> features */
    Weight ple_embed, ple_proj;
    const float *ple_norm;
    const float *const *inv_freq;     /* per rope variant */
    const int32_t *rope_half;         /* head_dim / 2 of each */
} Stack;

typedef struct {
    const Stack *stack;
    Batch batch;
    const float *features; /* [rows, pre.k] where the stack has `pre` */
    float *hidden;         /* [rows, H] after the last norm; of the wanted rows alone where not all are */
    float *fed_back;       /* [rows, post.n] where the stack has `post` */
    float *const *taps;    /* per layer: NULL or [rows, H] for the residual stream after it; likewise */
    const int64_t *wanted; /* [few.rows] the rows whose output is read, ascending; the others stop at the last layer
                              that writes K/V */
    Batch few;             /* the batch as the wanted rows see it */
    int32_t narrow;        /* 0: all rows are wanted, and `wanted` and `few` say nothing */
    Adapters adapters;
} Call;

/* ---- the region ---- */
typedef struct {
    Call call;
    AttnSplit cut[2], few_cut[2];  /* full, sliding; of all rows, and of the wanted ones */
    float **cos, **sin;      /* per rope variant [rows, half] */
    float *x, *h, *y, *qkv, *mixed, *mlp, *ple, *side; /* x, h: one copy each member when private */
    float *few_in,
        *few_ple; /* [few, H] embeddings of the wanted rows; [few, layers·ple] what all layers take of them */
    int64_t xh_step;            /* floats between members' copies */
    QActs norm, attn, mlp_acts, side_acts, few_acts;
    char *norm_at;           /* members' copies of the quantised stream */
    size_t norm_step;
    char *moe_at;            /* laid out anew for every layer: formats may differ */
    int own;                 /* row work is private */
    int last_write;          /* the last layer that writes K/V */
    float *tmp;              /* [members, H] */
    Low *low;                /* [rows, low_ld] A x of adapters; one copy each member when private */
    int64_t low_ld;
    int32_t *few_of;         /* the adapters of the wanted rows */
} Run;

typedef struct { float *x, *h; QActs acts; int rows, lo, hi; } View; /* what a member sees of the row work */

INLINE void row_finish(const View *v, int row, const Weight *next) {
    if (next->kind != W_DENSE) acts_row(&v->acts, row);
}

/* x += y (normed, scaled), then h = norm(x) and its quantised form for `next` */
static void residual_phase(ThreadPool *pool, int me, const Run *run, View *v, const float *post, const float *scalar,
                           const float *norm, const Weight *next) {
    const Stack *s = run->call.stack;
    const int n = s->hidden;
    v->acts.x = norm ? v->h : v->x;
    for (int r = v->lo; r < v->hi; r++) {
        residual_row(v->x + (int64_t)r * n, run->y + (int64_t)r * n, n, post, scalar, norm, s->eps,
                     v->h + (int64_t)r * n, run->tmp + (int64_t)me * n);
        if (next) row_finish(v, r, next);
    }
    if (!run->own) pool_barrier(pool);
}

/* A x of the rows that use adapters, before a product of `x` with the weight `which`. NULL: no adapter changes it. */
static const LowRankRows *shrink(ThreadPool *pool, int me, const Run *run, int which, const int32_t *of, const QActs *x,
                                 int rows, LowRankRows *out) {
    const Adapters *a = &run->call.adapters;
    *out = (LowRankRows) {.pool = pool,
                          .table = a->table,
                          .of = of,
                          .low = run->low,
                          .ld = run->low_ld,
                          .past = run->call.stack->layers * LR_COUNT,
                          .private = run->own};
    for (int i = 0; i < a->count; i++)
        for (int at = 0; at < 2; at++)
            __builtin_prefetch((const char *)&a->table[i][which + 1] + 64 * at); /* by then it has left the caches */
    if (!a->count || !lowrank_select(out, which, rows)) return NULL;
    if (out->own) out->low += (int64_t)me * run->call.batch.rows * run->low_ld;
    shrink_phase(out, me, x, rows);
    return out;
}

static void copy_out(const Run *run, const View *v, int me, float *to, const float *from) {
    if (run->own && me) return; /* every member holds all rows: one of them is enough */
    const int64_t n = run->call.stack->hidden;
    memcpy(to + v->lo * n, from + v->lo * n, (size_t)((v->hi - v->lo) * n) * 4);
}

/* The same of the wanted rows, while all rows are there. */
static void copy_wanted(const Run *run, const View *v, int me, float *to, const float *from) {
    const int64_t n = run->call.stack->hidden;
    for (int i = 0; i < run->call.few.rows; i++) {
        const int64_t r = run->call.wanted[i];
        if (r >= v->lo && r < v->hi && !(run->own && me)) memcpy(to + i * n, from + r * n, (size_t)n * 4);
    }
}

/* From here on there are the wanted rows alone: what is kept of them moves to the front. Between two barriers. */
static void keep_wanted(ThreadPool *pool, int me, const Run *run, View *v, int qkv_n) {
    const Stack *s = run->call.stack;
    const int64_t n = s->hidden;
    v->rows = run->call.few.rows;
    acts_rows(&v->acts, v->rows);
    for (int i = 0; i < v->rows; i++) {
        const int64_t r = run->call.wanted[i];
        if (r == i) continue;
        if (run->own || !me) memcpy(v->x + i * n, v->x + r * n, (size_t)n * 4);
        if (me) continue;
        memcpy(run->qkv + (int64_t)i * qkv_n, run->qkv + r * qkv_n, (size_t)qkv_n * 4);
        for (int k = 0; k < s->ropes; k++) {
            const int64_t half = s->rope_half[k];
            memcpy(run->cos[k] + i * half, run->cos[k] + r * half, (size_t)half * 4);
            memcpy(run->sin[k] + i * half, run->sin[k] + r * half, (size_t)half * 4);
        }
    }
    if (run->own) v->hi = v->rows;
    else pool_share(pool, me, v->rows, &v->lo, &v->hi);
}

/* What the first `layers` layers read of `rows` tokens in addition to the stream: a projection of the embedding, which
 * `a` holds, and the token's own part. which: the batch's rows they are; NULL: all. Ends without a barrier. */
static void ple_phase(ThreadPool *pool, int me, const Run *run, const QActs *a, int rows, const int64_t *which,
                      int layers, float *out) {
    const Stack *s = run->call.stack;
    const int L = s->layers * s->ple, n = layers * s->ple;
    Weight proj = s->ple_proj;
    proj.n = n;
    Epilogue to = {.how = TO_STORE, .out = out, .ldo = L};
    LowRankRows low;
    int lo, hi;
    to.low = shrink(pool, me, run, s->layers * LR_COUNT, which ? run->few_of : run->call.adapters.of, a, rows, &low);
    product_phase(pool, me, &proj, a, rows, &to);
    pool_barrier(pool);
    pool_share(pool, me, rows, &lo, &hi);
    for (int r = lo; r < hi; r++) {
        float *p = out + (int64_t)r * L, *token = run->side + (int64_t)me * L;
        weight_row(&s->ple_embed, run->call.batch.ids[which ? which[r] : r], token);
        for (int i = 0; i < n; i++) p[i] *= s->ple_proj_scale;
        for (int i = 0; i < layers; i++) norm_row(p + i * s->ple, s->ple, s->ple_norm, s->eps, p + i * s->ple);
        for (int i = 0; i < n; i++) p[i] = (p[i] + token[i] * s->ple_token_scale) * 0.70710678118654752f;
    }
}

/* run->y, the dense MLP's answer, becomes norm(y) + norm(the routed experts' answer): what they read is the stream
 * itself */
static void moe_with_shared_mlp(ThreadPool *pool, int me, Run *run, const View *v, const Moe *m) {
    const Stack *s = run->call.stack;
    const int64_t n = s->hidden;
    MoeRun here, *r = &here; /* every member finds the same places */
    int lo, hi;
    moe_layout(r, m, v->rows, run->moe_at);
    pool_share(pool, me, r->rows, &lo, &hi);
    for (int i = lo; i < hi; i++) {
        norm_row(v->x + i * n, (int)n, m->router_norm, s->eps, r->router_in + i * n);
        norm_row(v->x + i * n, (int)n, m->norm, s->eps, r->in + i * n);
        moe_quantise(m, r, i);
    }
    pool_barrier(pool);
    moe_phase(pool, me, m, r, s->act);
    for (int i = lo; i < hi; i++) {
        norm_row(run->y + i * n, (int)n, m->post_dense_norm, s->eps, run->y + i * n);
        residual_row(run->y + i * n, r->out + i * n, (int)n, m->post_norm, NULL, NULL, s->eps, NULL, run->tmp + me * n);
    }
    pool_barrier(pool);
}

/* One member's share of the whole stack. Ends without a barrier. */
static void stack_phase(ThreadPool *pool, int me, Run *run) {
    const Stack *s = run->call.stack;
    const Batch *b = &run->call.batch;
    const AttnSplit *cut = run->cut;
    const int64_t *wanted = run->call.wanted;
    const int few = run->call.narrow ? run->call.few.rows : 0, H = s->hidden;
    const int32_t *of = run->call.adapters.of;
    LowRankRows low;
    int rows = b->rows;
    View v = {run->x + run->xh_step * (run->own ? me : 0),
              run->h + run->xh_step * (run->own ? me : 0),
              run->norm,
              rows,
              0,
              rows};
    if (run->own) v.acts = acts_at(run->norm_at + run->norm_step * me, rows, H, v.h, H);
    else pool_share(pool, me, rows, &v.lo, &v.hi);
    int mine_lo, mine_hi;
    pool_share(pool, me, rows, &mine_lo, &mine_hi);

    /* angles, and the stream's beginning */
    for (int k = 0; k < s->ropes; k++)
        for (int r = mine_lo; r < mine_hi; r++)
            angles_row(b->positions[r] + b->rope_shift, s->inv_freq[k], s->rope_half[k],
                       run->cos[k] + (int64_t)r * s->rope_half[k], run->sin[k] + (int64_t)r * s->rope_half[k]);
    if (s->pre.kind != W_NONE) {
        QActs in = acts_at((char *)run->side_acts.q, rows, s->pre.k, run->call.features, s->pre.k);
        if (s->pre.kind != W_DENSE)
            for (int r = mine_lo; r < mine_hi; r++) acts_row(&in, r);
        pool_barrier(pool);
        Epilogue to = {.how = TO_STORE, .out = run->y, .ldo = H};
        product_phase(pool, me, &s->pre, &in, rows, &to);
        pool_barrier(pool);
        for (int r = v.lo; r < v.hi; r++) memcpy(v.x + (int64_t)r * H, run->y + (int64_t)r * H, (size_t)H * 4);
    } else {
        for (int r = v.lo; r < v.hi; r++) {
            weight_row(&s->embed, b->ids[r], v.x + (int64_t)r * H);
            if (s->embed_scale != 1.0f) for (int i = 0; i < H; i++) v.x[(int64_t)r * H + i] *= s->embed_scale;
        }
    }
    const float *ple = run->ple;
    if (s->ple) {
        v.acts.x = v.x;
        for (int r = v.lo; r < v.hi; r++) row_finish(&v, r, &s->ple_proj);
        pool_barrier(pool);
        int lo, hi;
        pool_share(pool, me, few, &lo, &hi);
        for (int i = lo; i < hi; i++) {
            memcpy(run->few_in + (int64_t)i * H, v.x + wanted[i] * H, (size_t)H * 4);
            if (s->ple_proj.kind != W_DENSE) acts_row(&run->few_acts, i);
        }
        ple_phase(pool, me, run, &v.acts, rows, NULL, run->call.narrow ? run->last_write : s->layers, run->ple);
        if (few) ple_phase(pool, me, run, &run->few_acts, few, wanted, s->layers, run->few_ple);
    }
    v.acts.x = v.h;
    for (int r = v.lo; r < v.hi; r++) {
        norm_row(v.x + (int64_t)r * H, H, s->layer[0].attn_norm, s->eps, v.h + (int64_t)r * H);
        row_finish(&v, r, &s->layer[0].qkv);
    }
    pool_barrier(pool);

    for (int i = 0; i < s->layers; i++) {
        const Layer *l = &s->layer[i];
        const Spec *a = &l->attn;
        const int qkv_n = l->qkv.n + l->kv.n, heads = qkv_n / a->dim, wide = a->heads * a->dim;
        const float *cos = run->cos[l->rope], *sin = run->sin[l->rope];
        const int half = s->rope_half[l->rope];
        const int narrow = run->call.narrow && i == run->last_write, dense = l->down.kind == W_DENSE;
        const Weight *next = i + 1 < s->layers ? &s->layer[i + 1].qkv : (s->post.kind != W_NONE ? &s->post : NULL);
        int lo, hi;

        /* q, and k with v, are cut alike for product, rotation and attention: lines rarely change cores */
        Epilogue to_qkv = {
            .how = TO_STORE, .bias = l->qkv_bias, .out = run->qkv, .ldo = qkv_n, .cut = wide % LANES ? 0 : wide};
        to_qkv.low = shrink(pool, me, run, i * LR_COUNT + LR_QKV, of, &v.acts, rows, &low);
        product_phase(pool, me, &l->qkv, &v.acts, rows, &to_qkv);
        pool_barrier(pool);
        if (l->kv.kind != W_NONE) {
            Epilogue to_kv = {.how = TO_STORE, .bias = l->kv_bias, .out = run->qkv + l->qkv.n, .ldo = qkv_n};
            product_phase(pool, me, &l->kv, &v.acts, rows, &to_kv);
            pool_barrier(pool);
        }
        for (int part = 0; part < 2; part++) {
            const int before = part ? a->heads : 0, count = part ? heads - a->heads : a->heads;
            const int only = narrow && !part, these = only ? few : rows;
            pool_share(pool, me, these * count, &lo, &hi);
            for (int t = lo; t < hi; t++) {
                const int64_t r = only ? wanted[t % these] : t % these;
                rope_write_head(a, b, (int)r, before + t / these, run->qkv + r * qkv_n, cos + r * half, sin + r * half,
                                l->q_norm, l->k_norm);
            }
        }
        pool_barrier(pool);
        if (narrow) {
            if (!few) return;
            keep_wanted(pool, me, run, &v, qkv_n);
            rows = few; b = &run->call.few; cut = run->few_cut; ple = run->few_ple; of = run->few_of;
            pool_barrier(pool);
        }
        QActs mixed = run->attn;
        mixed.k = wide; mixed.x = run->mixed; mixed.ldx = wide;
        acts_rows(&mixed, rows);
        attend_phase(pool, me, a, b, &cut[a->group], run->qkv, qkv_n, run->mixed, wide,
                     l->out.kind != W_DENSE ? &mixed : NULL);
        product_ahead(pool, me, &l->out, 0, 1, rows);
        pool_barrier(pool);
        Epilogue to_y = {.how = TO_STORE, .bias = l->out_bias, .out = run->y, .ldo = H};
        to_y.low = shrink(pool, me, run, i * LR_COUNT + LR_OUT, of, &mixed, rows, &low);
        product_phase(pool, me, &l->out, &mixed, rows, &to_y);
        product_ahead(pool, me, &l->gate_up, 1, dense ? 1 : 2, rows);
        pool_barrier(pool);
        residual_phase(pool, me, run, &v, l->post_attn_norm, NULL, l->mlp_norm, &l->gate_up);

        QActs mlp = run->mlp_acts;
        mlp.k = l->inter; mlp.x = run->mlp; mlp.ldx = l->inter;
        acts_rows(&mlp, rows);
        Epilogue to_mlp = {.how = TO_GATED,
                           .bias = l->gate_up_bias,
                           .out = run->mlp,
                           .ldo = l->inter,
                           .act = s->act,
                           .quantised = dense ? NULL : &mlp};
        to_mlp.low = shrink(pool, me, run, i * LR_COUNT + LR_GATE_UP, of, &v.acts, rows, &low);
        product_phase(pool, me, &l->gate_up, &v.acts, rows, &to_mlp);
        product_ahead(pool, me, &l->down, 0, 1, rows);
        pool_barrier(pool);
        Epilogue to_down = {.how = TO_STORE, .bias = l->down_bias, .out = run->y, .ldo = H};
        to_down.low = shrink(pool, me, run, i * LR_COUNT + LR_DOWN, of, &mlp, rows, &low);
        product_phase(pool, me, &l->down, &mlp, rows, &to_down);
        if (next) product_ahead(pool, me, next, 0, 1, rows);
        pool_barrier(pool);

        if (l->moe.experts) moe_with_shared_mlp(pool, me, run, &v, &l->moe);

        if (s->ple) {
            residual_phase(pool, me, run, &v, l->post_mlp_norm, NULL, NULL, &l->ple_gate);
            QActs side = run->side_acts;
            side.k = s->ple; side.x = run->mlp; side.ldx = s->ple;
            acts_rows(&side, rows);
            const int plain = l->ple_out.kind == W_DENSE;
            Epilogue to_side = {.how = TO_TIMES,
                                .out = run->mlp,
                                .ldo = s->ple,
                                .act = s->act,
                                .side = ple + (int64_t)i * s->ple,
                                .ldside = (int64_t)s->layers * s->ple,
                                .quantised = plain ? NULL : &side};
            to_side.low = shrink(pool, me, run, i * LR_COUNT + LR_PLE_GATE, of, &v.acts, rows, &low);
            product_phase(pool, me, &l->ple_gate, &v.acts, rows, &to_side);
            pool_barrier(pool);
            Epilogue to_out = {.how = TO_STORE, .out = run->y, .ldo = H};
            to_out.low = shrink(pool, me, run, i * LR_COUNT + LR_PLE_OUT, of, &side, rows, &low);
            product_phase(pool, me, &l->ple_out, &side, rows, &to_out);
            pool_barrier(pool);
            residual_phase(pool, me, run, &v, l->ple_post_norm, l->scalar, l->next_norm, next);
        } else {
            residual_phase(pool, me, run, &v, l->post_mlp_norm, l->scalar, l->next_norm, next);
        }
        float *tap = run->call.taps ? run->call.taps[i] : NULL;
        if (tap && run->call.narrow && i < run->last_write) copy_wanted(run, &v, me, tap, v.x);
        else if (tap) copy_out(run, &v, me, tap, v.x);
    }
    copy_out(run, &v, me, run->call.hidden, v.h);
    if (s->post.kind != W_NONE) {
        v.acts.x = v.h;
        Epilogue to = {.how = TO_STORE, .out = run->call.fed_back, .ldo = s->post.n};
        product_phase(pool, me, &s->post, &v.acts, rows, &to);
    }
}

static void stack_region(ThreadPool *pool, int me, void *job) { stack_phase(pool, me, job); }

static Spec widest(const Spec *a, const Spec *b) {
    Spec s = *b;
    if (a->heads && (!a->window || (s.window && a->window > s.window))) s.window = a->window;
    s.bidirectional |= a->bidirectional;
    return s;
}

/* Where everything lies in `at`; with NULL only the bytes are counted. */
static size_t run_layout(Run *run, const ThreadPool *pool, char *at) {
    const Stack *s = run->call.stack;
    const Batch *b = &run->call.batch;
    const Batch *few = &run->call.few;
    const size_t R = (size_t)b->rows, W = run->call.narrow ? (size_t)few->rows : 0, H = (size_t)s->hidden,
                 T = (size_t)pool->size;
    size_t qkv = 0, wide = 0, inter = s->ple > 32 ? s->ple : 32, used = 0;
    const Adapters *adapters = &run->call.adapters;
    int keeps_mlp = 0, rank = 0;
    for (int i = 0; i < adapters->count; i++)
        for (int j = 0; j <= s->layers * LR_COUNT; j++) {
            const Weight *a = &adapters->table[i][j].a;
            keeps_mlp |= a->kind == W_DENSE; /* which reads floats */
            if (a->n > rank) rank = a->n;
        }
    Spec of[2] = {
        {0},
        {0}}; /* layers of a group are alike, but for the windows and directions of a block drafter's: the widest */
    for (int i = 0; i < s->layers; i++) {
        const Layer *l = &s->layer[i];
        const Spec *a = &l->attn;
        if ((size_t)(l->qkv.n + l->kv.n) > qkv) qkv = (size_t)(l->qkv.n + l->kv.n);
        if ((size_t)a->heads * a->dim > wide) wide = (size_t)a->heads * a->dim;
        if ((size_t)l->inter > inter) inter = l->inter;
        keeps_mlp |= l->down.kind == W_DENSE || (s->ple && l->ple_out.kind == W_DENSE);
        of[a->group] = widest(&of[a->group], a);
        if (a->writes) run->last_write = i;
    }
    run->own = b->rows <= PRIVATE_ROWS;
    const size_t copies = run->own ? T : 1, ple = (size_t)s->ple * s->layers;
    const size_t side_k = s->pre.kind != W_NONE && s->pre.k > s->ple ? (size_t)s->pre.k : (size_t)s->ple;
    run->cos = (float **)TAKE(2 * s->ropes * sizeof(float *));
    run->sin = run->cos + s->ropes;
    for (int k = 0; k < s->ropes; k++) {
        float *cos = (float *)TAKE(R * s->rope_half[k] * 4), *sin = (float *)TAKE(R * s->rope_half[k] * 4);
        if (at) { run->cos[k] = cos; run->sin[k] = sin; }
    }
    run->xh_step = UP(R * H * 4) / 4;
    run->x = (float *)TAKE(copies * UP(R * H * 4));
    run->h = (float *)TAKE(copies * UP(R * H * 4));
    run->y = (float *)TAKE(R * H * 4);
    run->qkv = (float *)TAKE(R * qkv * 4);
    run->mixed = (float *)TAKE(R * wide * 4);
    run->mlp = keeps_mlp ? (float *)TAKE(R * inter * 4) : NULL;
    run->low_ld = (rank + LANES - 1) / LANES;
    run->low = (Low *)TAKE(copies * R * run->low_ld * sizeof(Low));
    run->few_of = (int32_t *)TAKE(adapters->count ? W * 4 : 0);
    for (size_t i = 0; at && adapters->count && i < W; i++) run->few_of[i] = adapters->of[run->call.wanted[i]];
    run->ple = (float *)TAKE(R * ple * 4);
    run->side = (float *)TAKE(T * ple * 4);
    const size_t in = s->ple ? W * H : 0; /* embeddings are kept for these alone */
    run->few_ple = (float *)TAKE(W * ple * 4);
    run->few_in = (float *)TAKE(in * 4);
    run->few_acts = acts_at(TAKE(in ? acts_bytes((int)W, s->hidden) : 0), (int)W, s->hidden, run->few_in, s->hidden);
    run->norm_step = UP(acts_bytes(b->rows, s->hidden));
    run->norm_at = TAKE(copies * run->norm_step);
    run->norm = acts_at(run->norm_at, b->rows, s->hidden, run->h, s->hidden);
    run->attn = acts_at(TAKE(acts_bytes(b->rows, (int)wide)), b->rows, (int)wide, run->mixed, (int)wide);
    run->mlp_acts = acts_at(TAKE(acts_bytes(b->rows, (int)inter)), b->rows, (int)inter, run->mlp, (int)inter);
    run->side_acts = acts_at(TAKE(acts_bytes(b->rows, (int)side_k)), b->rows, (int)side_k, run->mlp, (int)side_k);
    run->tmp = (float *)TAKE(T * H * 4);
    size_t most = 0;
    for (int i = 0; i < s->layers; i++) {
        MoeRun one;
        const size_t need = s->layer[i].moe.experts ? moe_layout(&one, &s->layer[i].moe, b->rows, NULL) : 0;
        if (need > most) most = need;
    }
    run->moe_at = TAKE(most);
    for (int g = 0; g < 4; g++) {
        const Batch *rows = g < 2 ? b : few;
        const Spec *a = &of[g & 1];
        AttnSplit *cut = g < 2 ? &run->cut[g] : &run->few_cut[g & 1];
        if (!a->heads || (g >= 2 && !W)) continue;
        split_plan(cut, pool, a, rows);
        char *place = TAKE(split_bytes(cut, pool, a, rows));
        if (place) split_place(cut, pool, a, rows, place);
    }
    return used;
}
