/* Top-k, top-p and min-p of a row, as spec/choose.py defines them: a function of the row's values alone. Masses are
 * whole numbers of 2^-40, so no order of summation matters.
 */
#pragma once
#include <float.h>
#include <stdlib.h>

#include "rows.h"

#define FILTER_ROOM(n) (2 * (size_t)(n) + 512) /* floats of scratch */
enum { FILTER_HEAD = 256 };                    /* candidates of a top-p without top-k that are tried first */

static void masses(const float *z, int count, float best, int64_t *out) { /* of up to sixteen logits */
    float t[LANES];
    for (int j = 0; j < LANES; j++) t[j] = j < count ? z[j] - best : -100.0f;
    vf_store(t, vf_mul(vf_exp(vf_max(vf_load(t), vf_set(-100.0f))), vf_set(1099511627776.0f)));
    for (int j = 0; j < count; j++) out[j] = t[j] >= 1.0f ? (int64_t)t[j] : 0; /* no number: no mass */
}
static int64_t mass_sum(const float *z, int n, float best) {
    int64_t sum = 0, own[LANES];
    for (int i = 0; i < n; i += LANES) {
        if (i + LANES <= n && !vf_any_ge(vf_load(z + i), vf_set(best - 28.0f))) continue; /* exp(-28) < 2^-40 */
        const int count = n - i < LANES ? n - i : LANES;
        masses(z + i, count, best, own);
        for (int j = 0; j < count; j++) sum += own[j];
    }
    return sum;
}

/* The k-th largest of n numbers, which are put into another order. */
static float nth_largest(float *v, int n, int k) {
    int lo = 0, hi = n - 1;
    while (lo < hi) {
        const float pivot = v[lo + (hi - lo) / 2];
        int i = lo, j = hi;
        while (i <= j) {
            while (v[i] > pivot) i++;
            while (v[j] < pivot) j--;
            if (i <= j) { const float x = v[i]; v[i++] = v[j]; v[j--] = x; }
        }
        if (k - 1 <= j) hi = j;
        else if (k - 1 >= i) lo = i;
        else break;
    }
    return v[k - 1];
}

/* At least the `most` largest of z go to `out`, in no order; returns how many there are. The most-th of the largest
 * ones of as many small sets bounds them from below. tops: [n / 16 + 512] */
static int candidates(const float *z, int n, int most, float *tops, float *out) {
    float bound = -INFINITY;
    int sets = 0, have = 0, i = 0;
    for (; i + LANES * LANES <= n; i += LANES * LANES, sets += LANES) {
        vf top = vf_set(-INFINITY);
        for (int j = 0; j < LANES; j++) top = vf_max(vf_load(z + i + LANES * j), top);
        vf_store(tops + sets, top);
    }
    for (; i < n; i++) tops[sets++] = z[i] > -INFINITY ? z[i] : -INFINITY;
    if (most < sets) bound = nth_largest(tops, sets, most);
    for (i = 0; i < n; i += LANES) {
        const int end = i + LANES < n ? i + LANES : n;
        if (end - i == LANES && !vf_any_ge(vf_load(z + i), vf_set(bound))) continue;
        for (int j = i; j < end; j++) if (z[j] >= bound) out[have++] = z[j];
    }
    return have;
}

static int falling(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* What of a row may be drawn stays, the rest becomes -inf. top_k: n or more keeps all; top_p: 1 keeps all; min_logp:
 * log(min-p). room: [FILTER_ROOM(n)] */
static void filter_row(float *z, int n, int64_t top_k, double top_p, float min_logp, float *room) {
    float *tops = room + n, floor = -INFINITY, best = -FLT_MAX, kept = INFINITY;
    for (int i = 0; i < n; i++) best = z[i] > best ? z[i] : best;
    int have = 0, want = FILTER_HEAD, tried = 0;
    if (top_k < n) {
        have = candidates(z, n, (int)top_k, tops, room);
        if (have >= top_k) floor = nth_largest(room, have, (int)top_k);
        int few = 0;
        for (int i = 0; i < have; i++) if (room[i] >= floor) room[few++] = room[i];
        have = few;
    }
    if (top_p < 1.0) {
        const double limit = top_p * (double)(top_k < n ? mass_sum(room, have, best) : mass_sum(z, n, best));
        int64_t upto = 0, own[LANES];
        do {
            if (top_k >= n) have = candidates(z, n, want, tops, room);
            qsort(room, (size_t)have, sizeof *room, falling);
            upto = 0;
            for (int i = 0; i < have && (double)upto < limit;
                 i++) { /* while the likelier ones have less than the limit */
                if (i % LANES == 0) masses(room + i, have - i < LANES ? have - i : LANES, best, own);
                kept = room[i];
                upto += own[i % LANES];
            }
            tried = want;
            want = want < n / LANES ? want * LANES : n;
        } while ((double)upto < limit && top_k >= n && tried < n);
        floor = kept > floor ? kept : floor;
    }
    if (best + min_logp > floor) floor = best + min_logp;
    for (int i = 0; i < n; i++) z[i] = z[i] < floor ? -INFINITY : z[i];
}
