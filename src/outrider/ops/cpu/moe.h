/* Routed experts. The rows of a pass are grouped by the experts they chose, so that every chosen expert is read once,
 * whatever the number of rows; the others are not read at all. An answer row is the sum over its own experts in the
 * order of their weight: it does not depend on the other rows.
 */
#pragma once
#include "gemm.h"

typedef struct {
    Weight router, gate_up,
        down; /* [experts, H]; [experts·2·inter, H], [experts·H, inter]: an expert's rows are whole groups */
    const float *router_norm, *norm, *expert_scale, *post_norm, *post_dense_norm;
    int32_t experts, top;         /* experts = 0: there are none */
} Moe;

typedef struct {
    int rows, hidden, inter;
    float *router_in, *in;        /* [rows, H] what router and experts read */
    QActs router_acts, acts;
    float *logits, *weight;       /* [rows, experts], [rows, top] */
    int64_t *chosen;              /* [rows, top], best first */
    int32_t *first;               /* [experts + 1] an expert's pairs are first[e] .. first[e + 1] - 1 */
    int32_t *place, *row_of;      /* [rows, top] the pair of a row's choice; [pairs] the row of a pair */
    float *pair_in, *mid, *y;     /* by pair: [H] (dense experts only), [inter] (the same), [H] */
    QActs pair_acts, mid_acts;
    float *out;                   /* [rows, H] */
} MoeRun;

INLINE Weight expert_of(const Weight *w, int experts, int64_t e) {
    Weight one = *w;
    one.n = w->n / experts;
    if (w->kind == W_DENSE) one.data = (const char *)w->data + (size_t)e * one.n * w->k * (w->dtype == DT_F32 ? 4 : 2);
    else { one.data = w_data(w, e * (one.n / LANES)); one.scale = w_scale(w, e * (one.n / LANES)); }
    return one;
}

/* One member's share of a product of every pair with its expert. A share is counted in units: reading one costs about
 * as much as computing it for eight rows. */
static void experts_phase(ThreadPool *pool, int me, const Weight *w, int experts, const QActs *a, const Epilogue *to,
                          int n, const int32_t *first) {
    const int wide = to->quantised ? 2 : 1, units = n / (LANES * wide);
    int active = 0;
    for (int e = 0; e < experts; e++) active += first[e + 1] > first[e];
    const int64_t all = (int64_t)units * (first[experts] + INT64_C(8) * active), lo = all * me / pool->size,
                  hi = all * (me + 1) / pool->size;
    int64_t at = 0;
    for (int e = 0; e < experts; e++) {
        const int rows = first[e + 1] - first[e];
        if (!rows) continue;
        const int64_t cost = rows + 8, end = at + cost * units;
        if (end > lo && at < hi) {
            const Weight one = expert_of(w, experts, e);
            const int64_t from = lo <= at ? 0 : (lo - at + cost - 1) / cost,
                          past = hi >= end ? units : (hi - at + cost - 1) / cost;
            if (past > from) product_units(&one, a, to, n, wide, (int)from, (int)past, first[e], first[e + 1], NULL);
        }
        at = end;
    }
}

/* The best `top` experts of a row and their weights: softmax over all, the chosen ones scaled to 1, times the expert's
 * own scale */
static void route_row(const float *z, const Moe *m, int64_t *chosen, float *weight) {
    best_columns(z, m->experts, m->top, chosen);
    float e[LANES], sum = 0.0f;
    for (int t = 0; t < m->top; t += LANES) {
        const int n = m->top - t < LANES ? m->top - t : LANES;
        for (int i = 0; i < LANES; i++) e[i] = i < n ? z[chosen[t + i]] - z[chosen[0]] : 0.0f;
        vf_store_n(weight + t, vf_exp(vf_load(e)), n);
    }
    for (int t = 0; t < m->top; t++) sum += weight[t];
    for (int t = 0; t < m->top; t++) weight[t] = weight[t] / sum * m->expert_scale[chosen[t]];
}

/* router_in, in and their quantised forms are ready in all members; writes the member's share of rows to `out`. */
static void moe_phase(ThreadPool *pool, int me, const Moe *m, MoeRun *r, int act) {
    const int top = m->top, H = r->hidden, pairs = r->rows * top, packed = m->gate_up.kind != W_DENSE,
              packed_mid = m->down.kind != W_DENSE;
    int lo, hi;
    pool_share(pool, me, r->rows, &lo, &hi);
    Epilogue to_logits = {.how = TO_STORE, .out = r->logits, .ldo = m->experts};
    product_phase(pool, me, &m->router, &r->router_acts, r->rows, &to_logits);
    pool_barrier(pool);
    for (int i = lo; i < hi; i++)
        route_row(r->logits + (int64_t)i * m->experts, m, r->chosen + (int64_t)i * top, r->weight + (int64_t)i * top);
    pool_barrier(pool);
    if (!me) { /* pairs in the order of their experts, then of their rows */
        for (int e = 0; e <= m->experts; e++) r->first[e] = 0;
        for (int p = 0; p < pairs; p++) r->first[r->chosen[p] + 1]++;
        for (int e = 0; e < m->experts; e++) r->first[e + 1] += r->first[e];
        for (int p = 0; p < pairs; p++) { /* first[e] runs to the end of e, then everything moves up by one */
            r->place[p] = r->first[r->chosen[p]]++;
            r->row_of[r->place[p]] = p / top;
        }
        for (int e = m->experts; e > 0; e--) r->first[e] = r->first[e - 1];
        r->first[0] = 0;
    }
    pool_barrier(pool);
    pool_share(pool, me, pairs, &lo, &hi);
    for (int64_t p = lo; p < hi; p++) {
        const int64_t row = r->row_of[p];
        if (packed) acts_copy(&r->pair_acts, p, &r->acts, row);
        else memcpy(r->pair_in + p * H, r->in + row * H, (size_t)H * 4);
    }
    pool_barrier(pool);
    Epilogue to_mid = {.how = TO_GATED,
                       .out = packed_mid ? NULL : r->mid,
                       .ldo = r->inter,
                       .act = act,
                       .quantised = packed_mid ? &r->mid_acts : NULL};
    experts_phase(pool, me, &m->gate_up, m->experts, &r->pair_acts, &to_mid, r->inter, r->first);
    pool_barrier(pool);
    Epilogue to_y = {.how = TO_STORE, .out = r->y, .ldo = H};
    experts_phase(pool, me, &m->down, m->experts, &r->mid_acts, &to_y, H, r->first);
    pool_barrier(pool);
    pool_share(pool, me, r->rows, &lo, &hi);
    for (int64_t i = lo; i < hi; i++)
        for (int n = 0; n < H; n += LANES) {
            vf sum = vf_set(0.0f);
            for (int64_t t = i * top; t < (i + 1) * top; t++)
                sum = vf_fma(vf_set(r->weight[t]), vf_load_n(r->y + (int64_t)r->place[t] * H + n, H - n), sum);
            vf_store_n(r->out + i * H + n, sum, H - n);
        }
}

/* As run_layout. */
static size_t moe_layout(MoeRun *r, const Moe *m, int rows, char *at) {
    const size_t R = (size_t)rows, H = (size_t)m->gate_up.k, I = (size_t)m->down.k, P = R * m->top;
    size_t used = 0;
    r->rows = rows; r->hidden = (int)H; r->inter = (int)I;
    r->router_in = (float *)TAKE(R * H * 4);
    r->in = (float *)TAKE(R * H * 4);
    r->logits = (float *)TAKE(R * m->experts * 4);
    r->weight = (float *)TAKE(P * 4);
    r->chosen = (int64_t *)TAKE(P * 8);
    r->first = (int32_t *)TAKE((size_t)(m->experts + 1) * 4);
    r->place = (int32_t *)TAKE(P * 4);
    r->row_of = (int32_t *)TAKE(P * 4);
    const int packed = m->gate_up.kind != W_DENSE, packed_mid = m->down.kind != W_DENSE;
    r->pair_in = packed ? NULL : (float *)TAKE(P * H * 4);
    r->mid = packed_mid ? NULL : (float *)TAKE(P * I * 4);
    r->y = (float *)TAKE(P * H * 4);
    r->out = (float *)TAKE(R * H * 4);
    r->router_acts = acts_at(TAKE(acts_bytes(rows, (int)H)), rows, (int)H, r->router_in, (int)H);
    r->acts = acts_at(TAKE(acts_bytes(rows, (int)H)), rows, (int)H, r->in, (int)H);
    r->pair_acts = acts_at(packed ? TAKE(acts_bytes((int)P, (int)H)) : NULL, (int)P, (int)H, r->pair_in, (int)H);
    r->mid_acts = acts_at(packed_mid ? TAKE(acts_bytes((int)P, (int)I)) : NULL, (int)P, (int)I, r->mid, (int)I);
    acts_rows(&r->pair_acts, (int)P / m->experts); /* of one expert, about */
    acts_rows(&r->mid_acts, (int)P / m->experts);
    return used;
}
INLINE void moe_quantise(const Moe *m, const MoeRun *r, int row) {
    if (m->router.kind != W_DENSE) acts_row(&r->router_acts, row);
    if (m->gate_up.kind != W_DENSE) acts_row(&r->acts, row);
}
