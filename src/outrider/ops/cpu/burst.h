/* Several decode cycles of one sequence in one call, by a plan that holds for all of them. Between two passes over the weights the host runs
 * on cold caches, so what it does once for several cycles costs it as much as what it does for one.
 *
 * A cycle is or_cycle's, to the bit; each starts where the one before has ended. The burst is over where the host must look: the answer has
 * ended, it could become too long or leave its pages, or a copy of earlier text may be the better draft.
 */
#pragma once
#include "cycle.h"

typedef struct {
    double *seconds;       /* [most] out, of each cycle */
    const int64_t *ends;   /* [end_count] tokens that end the answer */
    int32_t *text;         /* prompt and answer, where copies are looked for; with room for what may come */
    int64_t length;        /* of the text */
    int64_t room;          /* tokens that may still be emitted */
    int64_t positions;     /* that have pages */
    int32_t most, end_count;
    int32_t match;         /* a copy of at least so many of the last tokens is worth another plan; 0: nobody copies */
} Burst;

/* Do the last `count` tokens stand somewhere before? */
static int stood_before(const int32_t *text, int64_t length, int count) {
    const int32_t *end = text + length - count;
    for (int64_t at = length - count - 1; at >= 0; at--)
        if (text[at] == end[0] && !memcmp(text + at, end, (size_t)count * 4)) return 1;
    return 0;
}

/* `c`: one sequence, nobody wants logprobs. What cycle i brings lies where a batch has what its sequence i brings: asked[i], drafts[i],
 * confidence[i], parents[i], path[i], and in `chosen` one behind the other. Returns how many cycles were run; -1: no memory. */
int or_burst(Team *team, const Cycle *c, Burst *burst) {
    Cycle at = *c;
    const Asked plan = *c->asked;
    const int widest = plan.k > plan.nodes ? plan.k : plan.nodes;
    for (int done = 0;;) {
        const double began = clock_now();
        if (or_cycle(team, &at)) return -1;
        burst->seconds[done] = clock_now() - began;
        const Asked *a = at.asked;
        const int made = a->accepted + 1;
        int over = ++done == burst->most;
        for (int i = 0; i < made; i++) {
            for (int e = 0; e < burst->end_count; e++) over |= at.chosen[i] == burst->ends[e];
            if (burst->match) burst->text[burst->length++] = (int32_t)at.chosen[i];
        }
        burst->room -= made;
        if (over || burst->room <= plan.k || a->length + made + widest >= burst->positions) return done;
        if (burst->match && stood_before(burst->text, burst->length, burst->match)) return done;
        Asked next = plan;
        next.last = at.chosen[made - 1];
        next.length = a->length + made;
        at.chosen += a->k + 1;
        at.drafts += c->most; at.confidence += c->most; at.parents += c->most; at.path += c->most;
        *++at.asked = next;
    }
}
