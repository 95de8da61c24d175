// What the emulated machine is made of.
#ifndef OUTRIDER_PARTS
#define OUTRIDER_PARTS
#include "interface.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

namespace machine {

inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline u32 max(u32 a, u32 b) { return a > b ? a : b; }

constexpr size_t STACK = 256 << 10, PAGE = 4096;
constexpr u32 MOST_FIBERS = 8192, FLAGS = 1024;
constexpr u64 MOST_SPINS = 2000;  // rounds of all fibers in which nobody but those who wait for a flag did anything

enum Access { READS, WRITES, ADDS };  // ADDS: whole, so in any order

struct Word {
    u32 by, clock, shown;  // who wrote last: 0, or a fiber and one; when
    u32 reader, read;      // the warp and one that read it since: 0, or SEVERAL; clock of the last, times 64, and its lane and one, or SEVERAL
};

struct Shadow {  // of shared memory, of shared variables, or of a buffer
    int buffer;  // -1: shared memory, -2: shared variables
    u32 grain;   // bytes of a word here: no thread touches less
    bool used;
    u64 count;
    Word* words;
    u32** reads;  // of words that several warps read: as `read`, by warp, from the first one that may read here
    u32 first_warp, warps;
};

struct Flag { const void* at; u32* known; Flag* next; };

struct Copy { u32 to; const char* from; int bytes, read, group; };  // bytes beyond those that are read become 0

struct Block;
struct Warp;
struct Barrier;   // of async.h
struct Products;  // of products.h

struct Fiber {
    jmp_buf state;
    char* stack;
    bool begun;
    int thread, lane;
    u32 id, clock, shown;  // among all fibers; of order.h; how often it showed what it wrote to the matrix units
    u32* taken_along;      // from flags, until the next barrier
    bool has_taken;
    int alone;  // 1: the kernel before the one ahead is done; 2: the kernel ahead is
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
    Meeting barriers[16], cluster;  // cluster: of its two blocks, held by the first
    Barrier* mbarriers;
    int expected[16];
    Fiber* fibers;
    Warp* warps;
    char* room;       // shared memory of the launch
    u16 *flying, *held;  // by word of it: copies that are on their way there, products that still read it
    Shadow shadow, variables_shadow;
    char* variables;  // shared variables while another block runs
};

struct Machine : Launch {
    void (*kernel)(void**);
    char *variables, *variables_end;
    u32 begun, resident, live_blocks;
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
    u64 spins, meetings;
    jmp_buf home;
    ucontext_t fresh;  // a thread's first step
};

}  // namespace machine
#endif
