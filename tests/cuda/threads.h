// Who runs, and where threads meet.
#ifndef OUTRIDER_THREADS
#define OUTRIDER_THREADS
#include "order.h"

namespace machine {

inline void make_ready(Fiber* f) { the.ready[(the.first + the.count++) % the.ring] = f; }

inline u32 chance(u32 below) {  // xorshift
    the.seed ^= the.seed << 13, the.seed ^= the.seed >> 7, the.seed ^= the.seed << 17;
    return (u32)(the.seed >> 11) % below;
}

inline Fiber* next_ready() {
    if (!the.count) {
        for (u32 b = 0; b < the.resident; b++) {
            const Block& block = the.slots[b];
            if (!block.live) continue;
            for (u32 w = 0; w < (the.threads + 31) / 32; w++) {
                const Meeting& m = block.warps[w].meeting;
                const int live = block.warps[w].live;
                if (m.arrived) fail("all wait for ever: in block %u, warp %u, %d of %d lanes are at %s", block.index, w, m.arrived, live, m.what);
            }
            for (const Meeting& m : block.barriers)
                if (m.arrived) fail("all wait for ever: %d of %d threads of block %u are at %s", m.arrived, block.live, block.index, m.what);
        }
        fail("all wait for ever");
    }
    if (the.seed) {
        Fiber **a = &the.ready[the.first], **b = &the.ready[(the.first + chance(the.count)) % the.ring], *f = *a;
        *a = *b, *b = f;
    }
    Fiber* f = the.ready[the.first];
    the.first = (the.first + 1) % the.ring, the.count--;
    return f;
}

inline void enter_kernel();

__attribute__((noinline, noreturn)) inline void go(Fiber* f) {
    if (the.here != f->block) {
        const size_t bytes = the.variables_end - the.variables;
        if (bytes && the.here) memcpy(the.here->variables, the.variables, bytes);
        if (bytes) memcpy(the.variables, f->block->variables, bytes);
        the.here = f->block;
    }
    the.now = f;
    if (f->begun) _longjmp(f->state, 1);
    f->begun = true;
    getcontext(&the.fresh);
    the.fresh.uc_stack.ss_sp = f->stack, the.fresh.uc_stack.ss_size = STACK, the.fresh.uc_link = nullptr;
    makecontext(&the.fresh, enter_kernel, 0);
    setcontext(&the.fresh);
    abort();
}

__attribute__((noinline)) inline void leave() {  // until somebody makes this fiber ready
    if (_setjmp(the.now->state) == 0) go(next_ready());
}

inline void give_way() {
    make_ready(the.now);
    leave();
}

void spin() {
    if (++the.spins > MOST_SPINS * (the.count + 1)) fail("waits for a flag that nobody sets");
    give_way();
}

inline void stir() {  // where the order of threads is drawn, one may be overtaken before any access
    if (the.seed && chance(16) == 0) give_way();
}

// Where threads meet.

inline void release(Meeting& m, bool orders) {
    the.spins = 0;
    if (orders) order_all(m.waiting, m.arrived);
    for (int i = 0; i < m.arrived; i++) make_ready(m.waiting[i]);
    m.arrived = 0;
}

inline void arrive(Meeting& m, const char* what) {
    if (m.arrived && strcmp(m.what, what)) fail("is at %s where others wait at %s", what, m.what);
    m.what = what, m.waiting[m.arrived++] = the.now;
}

void meet_warp(const char* what, void* operands, bool everybody, void (*all)(Warp&)) {
    Warp& warp = *the.now->warp;
    if (everybody && warp.live != warp.size) fail("%s, and %d lanes of the warp have left", what, warp.size - warp.live);
    the.now->operands = operands;
    arrive(warp.meeting, what);
    if (warp.meeting.arrived < warp.live) return leave();
    if (all) all(warp);
    release(warp.meeting, !everybody);
    leave();
}

void meet_block(int id, int expected, const char* what) {
    Block& block = *the.now->block;
    Meeting& m = block.barriers[id];
    if (m.arrived && block.expected[id] != expected) fail("%s of %d threads where others wait for %d", what, expected, block.expected[id]);
    block.expected[id] = expected;
    arrive(m, what);
    if (m.arrived == (expected ? expected : block.live)) release(m, true);
    leave();
}

inline void enter_kernel() {
    the.kernel(the.values);
    Fiber& f = *the.now;
    Block& block = *f.block;
    the.spins = 0, f.copying = 0;
    f.warp->live--, block.live--;
    Meeting& m = f.warp->meeting;
    if (m.arrived && m.arrived == f.warp->live) {
        if (strcmp(m.what, "__syncwarp")) fail("leaves while the other lanes wait at %s", m.what);
        release(m, true);
    }
    if (block.barriers[0].arrived && block.barriers[0].arrived == block.live) release(block.barriers[0], true);
    if (block.live == 0) {
        the.finished = &block;
        _longjmp(the.home, 1);
    }
    go(next_ready());
}

}  // namespace machine
#endif
