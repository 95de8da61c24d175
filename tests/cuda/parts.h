// What the emulated machine is made of, and `fail`.
#ifndef OUTRIDER_PARTS
#define OUTRIDER_PARTS
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
constexpr int MOST_FIBERS = 8192, FLAGS = 1024;
constexpr u64 MOST_SPINS = 2000;  // rounds of all fibers in which nobody but those who wait for a flag did anything

struct Buffer { char* at; u64 bytes; };

struct Written { u32 by, clock, shown; };  // by: 0, or a fiber and one

struct Shadow {  // of shared memory, or of a buffer: by words of four bytes
    int buffer;  // -1: shared memory
    u64 words;
    Written* written;
    u32** reads;  // by warp, from the first one that may read here: clock of the last, times 64, and its lane and one
    u32 first_warp, warps;
};

struct Flag { const void* at; u32* known; Flag* next; };

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
    u32 id, clock, shown;  // among all fibers; of order.h; how often it showed what it wrote to the matrix units
    u32* taken_along;      // from flags, until the next barrier
    bool has_taken;
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
    u32 index;   // among all warps
    u32* known;  // of order.h
    u64 meeting_number;
};

struct Block {
    u32 index;
    int live;
    Meeting barriers[16];
    int expected[16];
    Fiber* fibers;
    Warp* warps;
    char* room;       // shared memory of the launch
    u16 *flying, *held;  // by word of it: copies that are on their way there, products that still read it
    Shadow shadow;
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
    Fiber* fibers;
    Warp** warps;
    Shadow* shadows;  // of the buffers
    Flag* flags[FLAGS];
    void* owned;  // the last of all rooms; each begins with where the one before is
    Fiber** ready;
    u32 first, count, ring;
    u64 spins, seed, meetings;
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

inline void* room_for(u64 bytes) {  // zeros, until the launch ends
    void** room = (void**)calloc(1, bytes + 64);
    if (!room) fail("no memory");
    *room = the.owned, the.owned = room;
    return room + 2;
}

}  // namespace machine
#endif
