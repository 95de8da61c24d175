/* Builds a draft tree for one sequence, as spec/tree.py does: level by level, the likeliest nodes of a level scored as
 * one batch of the drafter's step, the three best tokens after each. Drafts cannot change the output.
 */
#pragma once
#include "draft.h"

int or_draft(ThreadPool *pool, const Draft *draft);

enum { TREE_WIDE = 4, TREE_DEEP = 16, TREE_BRANCH = 1 + RUNNER_UPS, TREE_ALL = TREE_DEEP * TREE_WIDE * TREE_BRANCH };
#define TREE_ROW 0.4 /* a further row in a draft step, as a part of a step */

typedef struct {
    int parent, rank;
    int64_t token;
    float confidence;
    double chance;
} Node; /* parent -1: the newest token */
typedef struct { int node, row; double chance; } Tip;
typedef struct {
    Node node[TREE_ALL];
    int count;
    double steps; /* of the drafter */
} BuiltTree;

INLINE double chance_of(const double *trust, float confidence) {
    const int bin = (int)(confidence * TRUST);
    return trust ? trust[bin < TRUST ? bin : TRUST - 1] : confidence;
}

/* `d`: the drafter's step with everything set that is the same for all rows, for TREE_WIDE rows; start [TREE_WIDE,
 * wide] holds the first row's state. last, position: of the first row, filled up here. */
static int build_tree(ThreadPool *pool, Draft *d, int wide, int vocab, int deep, double stop, double drop,
                      const double *trust, float *start, int64_t *last, int64_t *guess, BuiltTree *g) {
    int64_t best[TREE_WIDE], runner_ups[TREE_WIDE * RUNNER_UPS], lengths[TREE_WIDE];
    float sure[TREE_WIDE], less[TREE_WIDE * RUNNER_UPS], *state = start + (int64_t)TREE_WIDE * wide;
    int32_t row_start[2] = {0, 1};
    Tip front[TREE_WIDE] = {{-1, 0, 1.0}};
    const int64_t first = guess[0];
    int w = 1;
    d->steps = 1;
    d->out = best;
    d->runner_ups = runner_ups;
    d->confidence = sure;
    d->runner_up_confidence = less;
    d->lengths = lengths;
    d->state = state;
    d->start = start; d->last = last; d->position = guess; d->trust = d->stop = d->drop = NULL;
    d->call.batch.seqs = 1; d->call.batch.row_start = row_start;
    g->count = 0; g->steps = 0.0;
    for (int level = 0; level < deep && w; level++) {
        d->call.batch.rows = row_start[1] = w;
        for (int i = 0; i < w; i++) guess[i] = first + level;
        if (or_draft(pool, d)) return 1;
        g->steps += 1.0 + (w - 1) * TREE_ROW;
        Tip next[TREE_WIDE];
        int n = 0;
        for (int i = 0; i < TREE_BRANCH * w; i++) {
            const int row = i / TREE_BRANCH, rank = i % TREE_BRANCH, rival = row * RUNNER_UPS + rank - 1;
            const float confidence = rank ? less[rival] : sure[row];
            const Node x = {front[row].node, rank, rank ? runner_ups[rival] : best[row], confidence,
                            front[row].chance * chance_of(trust, confidence)};
            if (x.token < 0 || x.token >= vocab || !(x.confidence > 0.0f) || x.chance < drop)
                continue; /* a damaged drafter must not reach the target */
            g->node[g->count] = x;
            if (x.chance >= stop) {
                int at = n < TREE_WIDE ? n++ : TREE_WIDE;
                for (; at > 0 && x.chance > next[at - 1].chance; at--) if (at < TREE_WIDE) next[at] = next[at - 1];
                if (at < TREE_WIDE) next[at] = (Tip){g->count, row, x.chance};
            }
            g->count++;
        }
        for (int i = 0; i < n; i++) {
            memcpy(start + (int64_t)i * wide, state + (int64_t)next[i].row * wide, (size_t)wide * 4);
            last[i] = g->node[next[i].node].token;
            front[i] = next[i];
        }
        w = n;
    }
    return 0;
}

/* The likeliest nodes, at most `most` and no more than are worth their price, the main line first: tokens, confidences,
 * and the row that each follows. Returns how many. */
static int pick_nodes(const BuiltTree *g, int most, const double *prices, int64_t *tokens, float *confidence,
                      int64_t *parents) {
    int order[TREE_ALL], number[TREE_ALL], kept = 0, out = 0, tip = -1;
    double sum = 0.0, top = 0.0;
    for (int i = 0; i < g->count; i++) { /* a parent is never less likely than its children, nor later */
        int at = i;
        for (; at > 0 && g->node[i].chance > g->node[order[at - 1]].chance; at--) order[at] = order[at - 1];
        order[at] = i;
    }
    most = most < g->count ? most : g->count;
    if (!prices) kept = most;
    for (int n = 1; prices && n <= most; n++) {
        sum += g->node[order[n - 1]].chance;
        if (sum - prices[n] > top) top = sum - prices[n], kept = n;
    }
    for (int i = 0; i < g->count; i++) number[i] = 0;
    for (int n = 0; n < kept; n++) number[order[n]] = -1; /* to be numbered */
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < g->count; i++) {
            const Node *x = &g->node[i];
            if (number[i] != -1 || (!pass && (x->rank || x->parent != tip))) continue;
            tip = i;
            tokens[out] = x->token; confidence[out] = x->confidence;
            parents[out] = x->parent < 0 ? 0 : number[x->parent];
            number[i] = ++out;
        }
    return kept;
}
