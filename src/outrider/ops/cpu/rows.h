/* What happens to one row at a time: norms, activations, rotary embedding, choosing. */
#pragma once
#include "product.h"

enum { ACT_SILU = 0, ACT_GELU = 1 };

INLINE vf vf_act(vf x, int act) { /* both are x·sigmoid(u): u = x, or twice the argument of gelu's tanh */
    vf u = x;
    if (act == ACT_GELU) {
        vf cube = vf_mul(vf_mul(x, x), x);
        u = vf_mul(vf_set(1.5957691216f), vf_fma(vf_set(0.044715f), cube, x));
    }
    return vf_div(x, vf_add(vf_set(1.0f), vf_exp(vf_sub(vf_set(0.0f), u))));
}
INLINE vf vf_softcap(vf z, float cap) { /* cap·tanh(z / cap) */
    vf e = vf_exp(vf_mul(vf_set(2.0f / cap), z));
    vf t = vf_sub(vf_set(1.0f), vf_div(vf_set(2.0f), vf_add(e, vf_set(1.0f))));
    return vf_mul(t, vf_set(cap));
}

/* out = x / rms(x) · w (w NULL: no weight); out may be x */
static void norm_row(const float *x, int n, const float *w, float eps, float *out) {
    vf a = vf_set(0.0f), b = a;
    int i = 0;
    for (; i + 32 <= n; i += 32) {
        vf u = vf_load(x + i), v = vf_load(x + i + 16);
        a = vf_fma(u, u, a); b = vf_fma(v, v, b);
    }
    for (; i < n; i += LANES) { vf u = vf_load_n(x + i, n - i); a = vf_fma(u, u, a); }
    vf r = vf_set(1.0f / sqrtf(vf_sum(vf_add(a, b)) / (float)n + eps));
    for (i = 0; i < n; i += LANES) {
        vf h = vf_mul(vf_load_n(x + i, n - i), r);
        vf_store_n(out + i, w ? vf_mul(h, vf_load_n(w + i, n - i)) : h, n - i);
    }
}

/* x = (x + post_norm(y))·scale; h = norm(x, next) where next is given. tmp: n floats. scale NULL: 1 */
SHARED void residual_row(float *x, const float *y, int n, const float *post, const float *scale, const float *next,
                         float eps, float *h, float *tmp) {
    if (post) { norm_row(y, n, post, eps, tmp); y = tmp; }
    for (int i = 0; i < n; i += LANES) {
        vf v = vf_add(vf_load_n(x + i, n - i), vf_load_n(y + i, n - i));
        vf_store_n(x + i, scale ? vf_mul(v, vf_set(*scale)) : v, n - i);
    }
    if (next) norm_row(x, n, next, eps, h);
}

/* A head: norm (unless `plain`), rotate by NeoX pairs, in float. x and out may be the same. */
static void rope_head(const float *x, int dim, const float *norm, int normed, float eps, const float *cos,
                      const float *sin, float *out) {
    float tmp[1024];
    if (normed) { norm_row(x, dim, norm, eps, tmp); x = tmp; }
    const int half = dim / 2;
    for (int i = 0; i < half; i += LANES) {
        int n = half - i;
        vf a = vf_load_n(x + i, n), b = vf_load_n(x + half + i, n), c = vf_load_n(cos + i, n),
           s = vf_load_n(sin + i, n);
        vf_store_n(out + i, vf_sub(vf_mul(a, c), vf_mul(b, s)), n);
        vf_store_n(out + half + i, vf_add(vf_mul(b, c), vf_mul(a, s)), n);
    }
}

/* cos, sin of position · inv_freq, the product rounded to float32 as the models were trained */
SHARED void angles_row(int64_t position, const float *inv_freq, int half, float *cos_out, float *sin_out) {
    const float p = (float)position;
    for (int i = 0; i < half; i++) {
        const float angle = p * inv_freq[i];
        cos_out[i] = inv_freq[i] == 0.0f ? 1.0f : cosf(angle);
        sin_out[i] = inv_freq[i] == 0.0f ? 0.0f : sinf(angle);
    }
}

/* ---- choosing ---- */
INLINE uint32_t mix32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}
INLINE vi vi_mix32(vi x) {
    x = vi_mul(vi_xor(x, vi_shr(x, 16)), vi_set(0x7FEB352D));
    x = vi_mul(vi_xor(x, vi_shr(x, 15)), vi_set((int32_t)0x846CA68Bu));
    return vi_xor(x, vi_shr(x, 16));
}
INLINE uint32_t noise_key(int64_t seed, int64_t position) {
    const uint32_t key = mix32((uint32_t)seed ^ mix32((uint32_t)((uint64_t)seed >> 32)));
    return mix32(key ^ mix32((uint32_t)(position + 0x9E3779B9)));
}
/* Sixteen tokens' 32 random bits, from what `mix32(token + ...)` gives for each. */
INLINE vi vi_noise_bits(uint32_t key, vi hash) { return vi_mix32(vi_xor(vi_set((int32_t)key), hash)); }
/* Gumbel noise of 32 random bits: -log(E), E = -log(1 - u), as the reference defines it. It falls as the bits rise. */
INLINE vf vf_noise(vi bits) {
    vf high = vi_to_float(vi_shr(bits, 16)), low = vi_to_float(vi_and(bits, vi_set(0xFFFF)));
    vf u = vf_add(vf_mul(high, vf_set(65536.0f)), low); /* the 32 bits, rounded once */
    u = vf_min(vf_mul(vf_add(u, vf_set(0.5f)), vf_set(2.3283064365386963e-10f)), vf_set(0.99999994f));
    vf zero = vf_set(0.0f), edge = vf_set(0.0009765625f);
    vf small = vf_mul(u, vf_fma(u, vf_fma(u, vf_set(1.0f / 3.0f), vf_set(0.5f)), vf_set(1.0f))); /* log1p near 0 */
    vf large = vf_sub(zero, vf_log(vf_sub(vf_set(1.0f), vf_max(u, edge))));
    return vf_sub(zero, vf_log(vf_pick_lt(u, edge, small, large)));
}
INLINE vi vi_token_hash(vi token) { return vi_mix32(vi_add(token, vi_set((int32_t)0x85EBCA6Bu))); }
INLINE vf vf_gumbel(uint32_t key, vi token) { return vf_noise(vi_noise_bits(key, vi_token_hash(token))); }
/* No less than vf_noise of the same bits, and little more where u is small: E is no less than u, u no less than its
 * first 24 bits, and a logarithm to base 2 no less than what a float's own bits say if they are read as a number
 * (exponent and, in a straight line, fraction). Rounding keeps an order, so z + this is no less than z + noise,
 * whatever z. */
INLINE vf vf_noise_most(vi bits) {
    const vf log2 = vi_to_float(vf_bits(vi_to_float(vi_shr(bits, 8)))); /* (127 + 24 + log2(u)) << 23, or less */
    return vf_sub(vf_set(104.6662f), vf_mul(log2, vf_set(8.2629582e-8f))); /* 151 · log(2) + 0.001, log(2) / 2^23 */
}

/* The softmax of z at one column; 0 where z is no number. */
SHARED float softmax_at(const float *z, int n, int64_t at) {
    const int whole = n & ~15;
    vf best = vf_set(-INFINITY), total = vf_set(0.0f);
    for (int i = 0; i < whole; i += LANES) best = vf_max(vf_load(z + i), best);
    float top = vf_hmax(best), t[LANES], sum = 0.0f;
    for (int i = whole; i < n; i++) if (z[i] > top) top = z[i];
    for (int i = 0; i < n; i += LANES) {
        vf v;
        if (i < whole) v = vf_load(z + i);
        else { for (int j = 0; j < LANES; j++) t[j] = i + j < n ? z[i + j] : top - 80.0f; v = vf_load(t); }
        if (vf_any_ge(v, vf_set(top - 20.0f)))
            total = vf_add(total, vf_exp(vf_sub(v, vf_set(top)))); /* the others weigh nothing */
    }
    vf_store(t, total);
    for (int j = 0; j < LANES; j++) sum += t[j];
    vf_store(t, vf_exp(vf_set(z[at] - top)));
    const float p = t[0] / sum;
    return p > 0.0f ? (p < 1.0f ? p : 1.0f) : 0.0f;
}

/* z += noise. tokens: as below */
SHARED void noise_row(float *z, int n, int64_t seed, int64_t position, const int64_t *tokens) {
    const uint32_t key = noise_key(seed, position);
    for (int i = 0; i < n; i += LANES) {
        float t[LANES];
        int32_t ids[LANES];
        for (int j = 0; j < LANES; j++) ids[j] = i + j < n ? (tokens ? (int32_t)tokens[i + j] : i + j) : 0;
        vf_store(t, vf_gumbel(key, vi_load(ids)));
        for (int j = 0; j < LANES && i + j < n; j++) z[i + j] += t[j];
    }
}

/* First index of the largest z (+ noise where sampled). tokens: the ids of the columns, NULL for 0.. */
SHARED int64_t choose_row(const float *z, int n, int sampled, int64_t seed, int64_t position, const int64_t *tokens) {
    float top = -INFINITY;
    int64_t at = 0;
    vf best = vf_set(-INFINITY);
    int whole = n & ~15;
    for (int i = 0; i < whole; i += LANES) best = vf_max(vf_load(z + i), best);
    top = vf_hmax(best);
    for (int i = whole; i < n; i++) if (z[i] > top) top = z[i];
    int first = 0; /* index of the largest */
    while (first < whole && !vf_any_ge(vf_load(z + first), vf_set(top))) first += LANES;
    while (first < n && z[first] != top) first++;
    if (first == n) return 0; /* no numbers */
    if (!sampled) return first;
    const uint32_t key = noise_key(seed, position);
    /* Noise lies in (-2.9, 22.9), and for nearly all columns one look at its bits says that they cannot win. The search
     * begins just below the score of the largest z: that column is met again, or an earlier one that is as good. */
    float found = -INFINITY, noise[LANES];
    vf_store(noise, vf_gumbel(key, vi_set((int32_t)(tokens ? tokens[first] : first))));
    if (fabsf(top) < INFINITY) found = top + noise[0] - (0.001f + 1e-6f * fabsf(top));
    for (int i = 0; i < n; i += LANES) {
        float t[LANES];
        int count = n - i < LANES ? n - i : LANES;
        vf v;
        if (count == LANES) v = vf_load(z + i);
        else { for (int j = 0; j < LANES; j++) t[j] = j < count ? z[i + j] : -INFINITY; v = vf_load(t); }
        if (!vf_any_ge(v, vf_set(found - 23.0f))) continue;
        int32_t ids[LANES];
        for (int j = 0; j < LANES; j++) ids[j] = j < count ? (tokens ? (int32_t)tokens[i + j] : i + j) : 0;
        const vi bits = vi_noise_bits(key, vi_token_hash(vi_load(ids)));
        if (!vf_any_ge(vf_add(v, vf_noise_most(bits)), vf_set(found))) continue;
        v = vf_add(v, vf_noise(bits));
        if (!vf_any_ge(v, vf_set(found))) continue;
        vf_store(t, v);
        for (int j = 0; j < count; j++) if (t[j] > found) { found = t[j]; at = i + j; }
    }
    return at;
}

/* The best `top` columns in falling order; the earlier of equals first. */
static void best_columns(const float *z, int n, int top, int64_t *best) {
    int have = 0;
    for (int c = 0; c < n; c++) {
        if (have == top && c % LANES == 0 && c + LANES <= n && !vf_any_ge(vf_load(z + c), vf_set(z[best[top - 1]]))) {
            c += LANES - 1; /* none of sixteen is good enough */
            continue;
        }
        if (have == top && !(z[c] > z[best[top - 1]])) continue;
        int at = have < top ? have++ : top - 1;
        for (; at > 0 && z[c] > z[best[at - 1]]; at--) best[at] = best[at - 1];
        best[at] = c;
    }
}

/* out [1 + 2·top]: the logarithm of the softmax of z at `token`, then those of the `top` best columns and their
 * numbers. Sums of 1,024 are added up in double precision: over a large vocabulary float32 alone would lose digits. */
SHARED void logprob_row(const float *z, int n, int64_t token, int top, float *out) {
    enum { PIECE = 64 * LANES };
    int64_t best[top + 1];
    double sum = 0.0;
    memset(best, 0, sizeof best); /* a vocabulary may have fewer */
    best_columns(z, n, top + 1, best); /* with top 0, too: the largest is needed */
    const float most = z[best[0]];
    for (int piece = 0; piece < n; piece += PIECE) {
        const int end = piece + PIECE < n ? piece + PIECE : n;
        vf part = vf_set(0.0f);
        for (int i = piece; i < end; i += LANES) {
            float t[LANES];
            if (i + LANES <= end) { part = vf_add(part, vf_exp(vf_sub(vf_load(z + i), vf_set(most)))); continue; }
            for (int j = 0; j < LANES; j++) t[j] = i + j < end ? z[i + j] - most : -100.0f; /* whose exponential is 0 */
            part = vf_add(part, vf_exp(vf_load(t)));
        }
        sum += vf_sum(part);
    }
    const double all = most + log(sum);
    out[0] = (float)(z[token] - all);
    for (int i = 0; i < top; i++) {
        out[1 + i] = (float)(z[best[i]] - all);
        out[1 + top + i] = (float)best[i];
    }
}
