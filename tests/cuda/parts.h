// What the emulated machine is made of, and what emulate.h asks it for. The machine itself is machine.cpp, a library of its own, compiled once;
// kernels are compiled with a call of the machine at every load and store (-fsanitize=thread without its library).
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

namespace machine {

constexpr size_t STACK = 256 << 10, PAGE = 4096;
constexpr u32 ROOM_AT = 1024;    // where the shared memory of a launch begins
constexpr int MOST_FIBERS = 8192, FLAGS = 1024;
constexpr u64 MOST_SPINS = 2000;  // rounds of all fibers in which nobody but those who wait for a flag did anything

struct Buffer { char* at; u64 bytes, element, ahead; };  // bytes in all, and of an element; whether the kernel ahead writes it

enum Access { READS, WRITES, ADDS };  // ADDS: whole, so in any order

struct Written { u32 by, clock, shown; };  // by: 0, or a fiber and one

struct Shadow {  // of shared memory, of shared variables, or of a buffer
    int buffer;  // -1: shared memory, -2: shared variables
    u32 grain;   // bytes of a word here: no thread touches less
    u64 words;
    Written* written;
    u32** reads;  // by warp, from the first one that may read here: clock of the last, times 64, and its lane and one
    u32 first_warp, warps;
};

struct Flag { const void* at; u32* known; Flag* next; };

struct Copy { u32 to; const char* from; int bytes, read, group; };  // bytes beyond those that are read become 0

struct Block;
struct Warp;
struct Products;  // of products.h

struct Fiber {
    jmp_buf state;
    ucontext_t context;
    char* stack;
    bool begun;
    int thread, lane;
    u32 id, clock, shown;  // among all fibers; of order.h; how often it showed what it wrote to the matrix units
    u32* taken_along;      // from flags, until the next barrier
    bool has_taken;
    bool alone;  // the kernel ahead is done
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
    Shadow shadow, variables_shadow;
    char* variables;  // shared variables while another block runs
};

struct Machine {
    char *variables, *variables_end;  // that are said to be shared
    bool overlaps;                    // it may begin before the kernel ahead is done
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

// The thread that runs.
u32 thread_index();
u32 block_index();
u32 threads_of_block();
u32 blocks_of_grid();

[[noreturn]] void fail(const char* text, ...);

// An instruction of the whole warp. all: run once, by the last lane. everybody: a lane that has left is an error; else it is `__syncwarp`.
void meet_warp(const char* what, void* operands, bool everybody, void (*all)(Warp&));
void meet_block(int id, int expected, const char* what);  // expected 0: all that have not left
void spin();  // one look at a flag that another thread is to set

void read_global(const void* at, void* v, u32 bytes);
void write_global(void* at, const void* v, u32 bytes);
void look_global(const void* at, void* v, u32 bytes);  // at a flag
void begin_adding(void* at, void* v, u32 bytes);       // what stands there; nobody comes between this and
void end_adding(void* at, const void* v, u32 bytes);
void read_shared(u32 at, void* v, u32 bytes);
void write_shared(u32 at, const void* v, u32 bytes);

void wait_for_kernel_ahead();

void begin_copy(u32 to, const char* from, int bytes, int read);
void end_group();
void end_copies(int open);  // all but those of the newest `open` groups

void multiply(float* d, const u32* a, const u32* b);  // mma.m16n8k16
void take_matrices(u32* b, u32 at);                   // ldmatrix.x4
void begin_products();                                // products of four warps: wgmma
void add_product(float* d, int sums, const u32* a, u64 matrix, bool add);
void end_products();
void wait_products(int open);
void show_to_products();

int launch(void (*kernel)(void**), char* variables, char* variables_end, u32 blocks, u32 threads, u32 shared, void** values, const Buffer* buffers, int count,
           bool overlaps, u64 seed, char* message, int room);

}  // namespace machine
#endif
