// A GPU's blocks on one CPU thread. Every thread of a block is a fiber; it runs until it meets others (a barrier, an instruction of the whole
// warp), waits for a flag, or leaves. Blocks of a grid are there at once, as many as fit, so they may wait for each other.
//
// What goes wrong ends the launch with one line that says where: memory that is nobody's, addresses that are not aligned, bytes that are
// still on their way, lanes that meet at different places, and waiting that cannot end.
#ifndef OUTRIDER_MACHINE
#define OUTRIDER_MACHINE
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
typedef unsigned long long u64;

struct uint3 { u32 x, y, z; };

extern char shared_begin[] __asm__("__start_emulated_shared") __attribute__((weak));  // variables of kernels that are said to be shared
extern char shared_end[] __asm__("__stop_emulated_shared") __attribute__((weak));

namespace machine {

constexpr size_t STACK = 256 << 10, PAGE = 4096;
constexpr u32 ROOM_AT = 1024;    // where the shared memory of a launch begins
constexpr int MOST_FIBERS = 8192;
constexpr u64 MOST_SPINS = 2000;  // rounds of all fibers in which nobody but those who wait for a flag did anything

struct Buffer { char* at; u64 bytes; };

struct Copy { u32 to; const char* from; int bytes, read, group; };  // bytes beyond those that are read become 0

struct Block;
struct Warp;
struct Products;  // of warpgroup.h

struct Fiber {
    jmp_buf state;
    ucontext_t context;
    char* stack;
    bool begun;
    int thread, lane;
    Block* block;
    Warp* warp;
    void* operands;  // of the instruction of the whole warp that it stands at
    Copy* copies;
    int copying, copies_room, group;
    Products* products;
};

struct Meeting {  // of the threads that come to one barrier, or of a warp's lanes at one instruction
    const char* what;
    Fiber** waiting;
    int arrived;
};

struct Warp {
    Meeting meeting;
    Fiber* lanes[32];
    int size, live;
};

struct Block {
    u32 index;
    int live;
    Meeting barriers[16];
    int expected[16];
    Fiber* fibers;
    Warp* warps;
    char* room;       // shared memory of the launch
    u16* flying;      // by word of it: copies that are on their way there
    char* variables;  // shared variables while another block runs
};

struct Machine {
    u32 blocks, threads, shared, begun, resident, live_blocks;
    void (*kernel)(void**);
    void** values;
    const Buffer* buffers;
    int buffer_count;
    Fiber* now;
    Block *here, *finished;
    Block* slots;
    Fiber** ready;
    u32 first, count, ring;
    u64 spins, seed;
    jmp_buf home;
    char* message;
    int message_room;
};

inline Machine the;

__attribute__((noinline, noreturn)) inline void fail(const char* text, ...) {
    char line[400];
    va_list more;
    va_start(more, text);
    vsnprintf(line, sizeof line, text, more);
    va_end(more);
    if (the.now) snprintf(the.message, the.message_room, "block %u, thread %d: %s", the.now->block->index, the.now->thread, line);
    else snprintf(the.message, the.message_room, "%s", line);
    _longjmp(the.home, 2);
}

// Who runs.

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
                const Warp& warp = block.warps[w];
                if (warp.meeting.arrived)
                    fail("all wait for ever: in block %u, warp %u, %d of %d lanes are at %s", block.index, w, warp.meeting.arrived, warp.live, warp.meeting.what);
            }
            for (int i = 0; i < 16; i++)
                if (block.barriers[i].arrived) fail("all wait for ever: %d of %d threads of block %u are at %s", block.barriers[i].arrived, block.live, block.index, block.barriers[i].what);
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

__attribute__((noinline, noreturn)) inline void go(Fiber* f) {
    if (the.here != f->block) {
        const size_t bytes = shared_end - shared_begin;
        if (bytes && the.here) memcpy(the.here->variables, shared_begin, bytes);
        if (bytes) memcpy(shared_begin, f->block->variables, bytes);
        the.here = f->block;
    }
    the.now = f;
    if (f->begun) _longjmp(f->state, 1);
    f->begun = true;
    setcontext(&f->context);
    abort();
}

__attribute__((noinline)) inline void leave() {  // until somebody makes this fiber ready
    if (_setjmp(the.now->state) == 0) go(next_ready());
}

inline void give_way() {
    make_ready(the.now);
    leave();
}

inline void spin() {  // one look at a flag that another thread is to set
    if (++the.spins > MOST_SPINS * (the.count + 1)) fail("waits for a flag that nobody sets");
    give_way();
}

inline void stir() {  // where the order of threads is drawn, one may be overtaken before any access
    if (the.seed && chance(16) == 0) give_way();
}

// Where threads meet.

inline void release(Meeting& m) {
    the.spins = 0;
    for (int i = 0; i < m.arrived; i++) make_ready(m.waiting[i]);
    m.arrived = 0;
}

inline void arrive(Meeting& m, const char* what) {
    if (m.arrived && strcmp(m.what, what)) fail("is at %s where others wait at %s", what, m.what);
    m.what = what, m.waiting[m.arrived++] = the.now;
}

template <class All> inline void meet_warp(const char* what, void* operands, bool everybody, All all) {  // all: run once, by the last lane
    Warp& warp = *the.now->warp;
    if (everybody && warp.live != warp.size) fail("%s, and %d lanes of the warp have left", what, warp.size - warp.live);
    the.now->operands = operands;
    arrive(warp.meeting, what);
    if (warp.meeting.arrived < warp.live) return leave();
    all(warp);
    release(warp.meeting);
    leave();
}

inline void meet_block(int id, int expected, const char* what) {  // expected 0: all that have not left
    Block& block = *the.now->block;
    Meeting& m = block.barriers[id];
    if (m.arrived && block.expected[id] != expected) fail("%s of %d threads where others wait for %d", what, expected, block.expected[id]);
    block.expected[id] = expected;
    arrive(m, what);
    if (m.arrived == (expected ? expected : block.live)) release(m);
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
        release(m);
    }
    if (block.barriers[0].arrived && block.barriers[0].arrived == block.live) release(block.barriers[0]);
    if (block.live == 0) {
        the.finished = &block;
        _longjmp(the.home, 1);
    }
    go(next_ready());
}

// Memory.

inline const Buffer* buffer_of(const void* at, u64 bytes) {
    for (int i = 0; i < the.buffer_count; i++) {
        const Buffer& b = the.buffers[i];
        if ((char*)at >= b.at && (char*)at + bytes <= b.at + b.bytes) return &b;
    }
    return nullptr;
}

inline void outside(const void* at, const char* what) {
    i64 best = 1 << 20;
    int which = -1, past = 0;
    for (int i = 0; i < the.buffer_count; i++) {
        const Buffer& b = the.buffers[i];
        const i64 before = b.at - (char*)at, behind = (char*)at - (b.at + (i64)b.bytes);
        if (before > 0 && before < best) best = before, which = i, past = 0;
        if (behind >= 0 && behind < best) best = behind, which = i, past = 1;
        if (before <= 0 && behind < 0) best = -behind, which = i, past = 2;
    }
    static const char* const texts[] = {"%s %lld bytes ahead of buffer %d of %llu bytes", "%s %lld bytes behind the end of buffer %d of %llu bytes",
                                        "%s across the end, %lld bytes on, of buffer %d of %llu bytes"};
    if (which < 0) fail("%s at %p, which is in no buffer", what, at);
    fail(texts[past], what, (long long)best, which, the.buffers[which].bytes);
}

inline void check_global(const void* at, u64 aligned, u64 bytes, const char* what) {
    if ((uintptr_t)at % aligned) fail("%s of %llu bytes at %p, which is not aligned", what, bytes, at);
    if (!buffer_of(at, bytes)) outside(at, what);
    stir();
}

inline char* shared_at(u32 at, u32 bytes, const char* what) {
    if (at % bytes) fail("%s of %u bytes of shared memory at %u, which is not aligned", what, bytes, at - ROOM_AT);
    if (at < ROOM_AT || (u64)at + bytes > (u64)ROOM_AT + the.shared) fail("%s at byte %lld of %u of shared memory", what, (i64)at - ROOM_AT, the.shared);
    return the.here->room + (at - ROOM_AT);
}

inline char* touch_shared(u32 at, u32 bytes, const char* what) {
    stir();
    char* place = shared_at(at, bytes, what);
    for (u32 i = 0; i < bytes; i += 4)
        if (the.here->flying[(at - ROOM_AT + i) / 4]) fail("%s of byte %u of shared memory, which a copy is still on its way to", what, at - ROOM_AT + i);
    return place;
}

inline void begin_copy(u32 to, const char* from, int bytes, int read) {
    Fiber& f = *the.now;
    if (read) check_global(from, bytes, read, "copies");
    touch_shared(to, bytes, "copies over");
    for (int i = 0; i < bytes; i += 4) the.here->flying[(to - ROOM_AT + i) / 4]++;
    if (f.copying == f.copies_room) f.copies = (Copy*)realloc(f.copies, (f.copies_room = 2 * f.copies_room + 16) * sizeof(Copy));
    f.copies[f.copying++] = {to, from, bytes, read, f.group};
}

inline void end_copies(int open) {  // all but those of the newest `open` groups; a group ends with `f.group++`
    Fiber& f = *the.now;
    int kept = 0;
    for (int i = 0; i < f.copying; i++) {
        const Copy& c = f.copies[i];
        if (c.group >= f.group - open) {
            f.copies[kept++] = c;
            continue;
        }
        char* to = shared_at(c.to, c.bytes, "copies");
        memset(to, 0, c.bytes);
        memcpy(to, c.from, c.read);
        for (int j = 0; j < c.bytes; j += 4) the.here->flying[(c.to - ROOM_AT + j) / 4]--;
    }
    f.copying = kept;
    stir();
}

// The launch.

inline void fault(int, siginfo_t* info, void*) {
    if (the.now && (char*)info->si_addr >= the.now->stack - PAGE && (char*)info->si_addr < the.now->stack) fail("more than %zu bytes of variables", STACK);
    outside(info->si_addr, "reads or writes");
}

inline void begin_block(Block& block) {
    block.index = the.begun++, block.live = the.threads;
    memset(block.room, 0xFF, the.shared);  // NaN of every kind
    memset(block.flying, 0, (the.shared / 4 + 4) * 2);
    memset(block.variables, 0xFF, shared_end - shared_begin);
    if (the.here == &block) the.here = nullptr;
    for (u32 w = 0; w < (the.threads + 31) / 32; w++) {
        Warp& warp = block.warps[w];
        warp.size = warp.live = the.threads - 32 * w < 32 ? the.threads - 32 * w : 32;
        warp.meeting.arrived = 0;
    }
    for (u32 t = 0; t < the.threads; t++) {
        Fiber& f = block.fibers[t];
        f.begun = false, f.thread = t, f.lane = t % 32, f.block = &block, f.warp = &block.warps[t / 32], f.warp->lanes[f.lane] = &f;
        f.copying = f.group = 0;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack, f.context.uc_stack.ss_size = STACK, f.context.uc_link = nullptr;
        makecontext(&f.context, enter_kernel, 0);
        make_ready(&f);
    }
    the.live_blocks++;
}

inline void* room_for(u64 bytes) { return calloc(1, bytes + 16); }

inline int launch(void (*kernel)(void**), u32 blocks, u32 threads, u32 shared, void** values, const Buffer* buffers, int count, u64 seed, char* message, int room) {
    const u32 warps = (threads + 31) / 32;
    u32 resident = MOST_FIBERS / threads ? MOST_FIBERS / threads : 1;
    if (resident > blocks) resident = blocks;
    the = Machine{};
    the.kernel = kernel, the.blocks = blocks, the.threads = threads, the.shared = shared, the.values = values, the.buffers = buffers, the.buffer_count = count;
    the.resident = resident, the.seed = seed, the.message = message, the.message_room = room, the.ring = resident * threads + 1;
    the.ready = (Fiber**)room_for(the.ring * sizeof(Fiber*));
    the.slots = (Block*)room_for(resident * sizeof(Block));
    const size_t each = STACK + PAGE, stacks_bytes = (size_t)resident * threads * each;
    char* stacks = (char*)mmap(nullptr, stacks_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    Fiber* fibers = (Fiber*)room_for((size_t)resident * threads * sizeof(Fiber));
    for (u32 i = 0; i < resident * threads; i++) mprotect(stacks + i * each, PAGE, PROT_NONE), fibers[i].stack = stacks + i * each + PAGE;
    for (u32 b = 0; b < resident; b++) {
        Block& block = the.slots[b];
        block.fibers = fibers + b * threads, block.warps = (Warp*)room_for(warps * sizeof(Warp));
        block.room = (char*)room_for(shared), block.flying = (u16*)room_for((shared / 4 + 4) * 2);
        block.variables = (char*)room_for(shared_end - shared_begin);
        for (u32 w = 0; w < warps; w++) block.warps[w].meeting.waiting = (Fiber**)room_for(32 * sizeof(Fiber*));
        for (int i = 0; i < 16; i++) block.barriers[i].waiting = (Fiber**)room_for(threads * sizeof(Fiber*));
    }
    static char signal_stack[64 << 10];
    stack_t aside = {}, aside_before;
    aside.ss_sp = signal_stack, aside.ss_size = sizeof signal_stack;
    struct sigaction action = {}, segv_before, bus_before;
    action.sa_sigaction = fault, action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaltstack(&aside, &aside_before), sigaction(SIGSEGV, &action, &segv_before), sigaction(SIGBUS, &action, &bus_before);

    const int why = _setjmp(the.home);  // 0: begins; 1: a block has left; 2: failed
    if (why != 2) {
        the.now = nullptr;
        if (why == 0)
            for (u32 b = 0; b < the.resident; b++) begin_block(the.slots[b]);
        else if (--the.live_blocks, the.begun < the.blocks) begin_block(*the.finished);
        if (the.live_blocks) go(next_ready());
    }

    sigaction(SIGSEGV, &segv_before, nullptr), sigaction(SIGBUS, &bus_before, nullptr), sigaltstack(&aside_before, nullptr);
    for (u32 b = 0; b < the.resident; b++) {
        Block& block = the.slots[b];
        for (u32 t = 0; t < the.threads; t++) free(block.fibers[t].copies), free(block.fibers[t].products);
        for (u32 w = 0; w < (the.threads + 31) / 32; w++) free(block.warps[w].meeting.waiting);
        for (int i = 0; i < 16; i++) free(block.barriers[i].waiting);
        free(block.warps), free(block.room), free(block.flying), free(block.variables);
    }
    munmap(stacks, stacks_bytes), free(fibers), free(the.slots), free(the.ready);
    return why == 2;
}

}  // namespace machine
#endif
