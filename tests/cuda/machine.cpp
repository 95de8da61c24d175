// A GPU's blocks on one CPU thread. Every thread of a block is a fiber; it runs until it meets others (a barrier, an instruction of the whole
// warp), waits for a flag, or leaves. Blocks of a grid are there at once, as many as fit, so they may wait for each other.
//
// What goes wrong ends the launch with one line that says where: memory that is nobody's, addresses that are not aligned, bytes that are
// still on their way, words that two threads touch in no order (order.h), lanes that meet at different places, and waiting that cannot end.
#include "async.h"

namespace machine {

inline void fault(int, siginfo_t* info, void*) {
    const char* at = (char*)info->si_addr;
    if (the.now && at >= the.now->stack - PAGE && at < the.now->stack) fail("more than %zu bytes of variables", STACK);
    outside(at, "reads or writes");
}

inline void begin_block(Block& block) {
    block.index = the.begun++, block.live = the.threads, block.mbarriers = nullptr;
    memset(block.room, 0xFF, the.shared);  // NaN of every kind
    memset(block.flying, 0, (the.shared / 4 + 4) * 2), memset(block.held, 0, (the.shared / 4 + 4) * 2);
    forget(block.shadow), forget(block.variables_shadow);
    memset(block.variables, 0xFF, the.variables_end - the.variables);
    if (the.here == &block) the.here = nullptr;
    for (u32 w = 0; w < (the.threads + 31) / 32; w++) {
        Warp& warp = block.warps[w];
        warp.size = warp.live = the.threads - 32 * w < 32 ? the.threads - 32 * w : 32;
        warp.meeting.arrived = 0;
    }
    for (u32 t = 0; t < the.threads; t++) {
        Fiber& f = block.fibers[t];
        f.begun = false, f.thread = t, f.lane = t % 32, f.block = &block, f.warp = &block.warps[t / 32], f.warp->lanes[f.lane] = &f;
        f.copying = f.group = 0, f.alone = the.overlaps == 2, f.clock++, f.shown++;
        make_ready(&f);
    }
    the.live_blocks++;
}

inline char* stack_of(u32 fiber) {  // behind a page that is nobody's; kept for the next launch, whose pages are then there
    const int access = PROT_READ | PROT_WRITE, kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    static char* first = (char*)mmap(nullptr, (STACK + PAGE) * MOST_FIBERS, access, kind, -1, 0);
    static u32 guarded = 0;
    for (; guarded <= fiber; guarded++) mprotect(first + guarded * (STACK + PAGE), PAGE, PROT_NONE);
    return first + fiber * (STACK + PAGE) + PAGE;
}

int launch(const Launch& asked, void (*kernel)(void**), char* variables, char* variables_end) {
    const u32 threads = asked.threads, shared = asked.shared, warps = (threads + 31) / 32, most = max(MOST_FIBERS / threads, 1u);
    const u32 resident = min(most, asked.blocks), count = asked.buffer_count;
    the = Machine{asked, kernel, variables, variables_end};
    the.resident = resident, the.ring = resident * threads + 1;
    the.ready = (Fiber**)room_for(the.ring * sizeof(Fiber*));
    the.slots = (Block*)room_for(resident * sizeof(Block));
    the.fibers = (Fiber*)room_for((size_t)resident * threads * sizeof(Fiber));
    the.warps = (Warp**)room_for(resident * warps * sizeof(Warp*));
    the.shadows = (Shadow*)room_for(count * sizeof(Shadow));
    for (u32 i = 0; i < count; i++) {
        const Buffer& b = the.buffers[i];
        make_shadow(the.shadows[i], i, b.element == 2 ? 2 : 4, b.bytes, 0, resident * warps);
    }
    for (u32 i = 0; i < resident * threads; i++) the.fibers[i].stack = stack_of(i), the.fibers[i].id = i;
    for (u32 b = 0; b < resident; b++) {
        Block& block = the.slots[b];
        block.fibers = the.fibers + b * threads, block.warps = (Warp*)room_for(warps * sizeof(Warp));
        block.room = (char*)room_for(shared);
        block.flying = (u16*)room_for((shared / 4 + 4) * 2), block.held = (u16*)room_for((shared / 4 + 4) * 2);
        make_shadow(block.shadow, -1, 4, shared, b * warps, warps);
        make_shadow(block.variables_shadow, -2, 4, variables_end - variables, b * warps, warps);
        block.variables = (char*)room_for(the.variables_end - the.variables);
        for (u32 w = 0; w < warps; w++) {
            Warp& warp = block.warps[w];
            warp.meeting.waiting = (Fiber**)room_for(32 * sizeof(Fiber*)), warp.index = b * warps + w, warp.known = nothing_known();
            the.warps[warp.index] = &warp;
        }
        block.cluster.waiting = (Fiber**)room_for(2 * threads * sizeof(Fiber*));
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
    for (u32 i = 0; i < the.resident * the.threads; i++) free(the.fibers[i].copies);
    while (the.owned) {
        void* room = the.owned;
        the.owned = *(void**)room;
        free(room);
    }
    return why == 2;
}

void pdl_wait() { the.now->alone = 2; }

void* operands_of(Warp& warp, int lane) { return warp.lanes[lane]->operands; }
int lanes_of(Warp& warp) { return warp.size; }

u32 thread_index() { return the.now->thread; }
u32 block_index() { return the.now->block->index; }
u32 threads_of_block() { return the.threads; }
u32 blocks_of_grid() { return the.blocks; }

}  // namespace machine

// What the compiler calls at loads and stores.
#define LOADS_AND_STORES(BYTES, PLACE)                                                                       \
    extern "C" void __tsan_##PLACE##read##BYTES(void* at) { machine::plain(at, BYTES, false); }              \
    extern "C" void __tsan_##PLACE##write##BYTES(void* at) { machine::plain(at, BYTES, true); }              \
    extern "C" void __tsan_##PLACE##volatile_read##BYTES(void* at) { machine::plain(at, BYTES, false); }     \
    extern "C" void __tsan_##PLACE##volatile_write##BYTES(void* at) { machine::plain(at, BYTES, true); }
LOADS_AND_STORES(1, )
LOADS_AND_STORES(2, )
LOADS_AND_STORES(4, )
LOADS_AND_STORES(8, )
LOADS_AND_STORES(16, )
LOADS_AND_STORES(2, unaligned_)
LOADS_AND_STORES(4, unaligned_)
LOADS_AND_STORES(8, unaligned_)
LOADS_AND_STORES(16, unaligned_)
extern "C" void __tsan_read_range(void* at, long bytes) { machine::plain(at, bytes, false); }
extern "C" void __tsan_write_range(void* at, long bytes) { machine::plain(at, bytes, true); }
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}
