// What emulate.h asks the emulated machine for. The machine is a library of its own (machine.cpp), compiled once; kernels are compiled with a
// call of it at every load and store (-fsanitize=thread without its library). No header of the system is included, which would be a third of
// a compilation.
#ifndef OUTRIDER_INTERFACE
#define OUTRIDER_INTERFACE
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
typedef unsigned long long u64;

namespace machine {

constexpr u32 ROOM_AT = 1024;  // where the shared memory of a launch begins

struct Buffer { char* at; u64 bytes, element, ahead; };  // bytes in all, and of an element; whether the kernel ahead writes it

struct Launch {  // as emulator.py has it
    void** values;  // addresses of the parameters
    const Buffer* buffers;
    char* message;
    u64 seed;  // of the order in which threads run; 0: one after the other
    u32 blocks, threads, shared, buffer_count, message_room;
    u32 overlaps;  // 1: it begins before the kernel ahead is done; 2: and after the one before that is
};

// The thread that runs.
u32 thread_index();
u32 block_index();
u32 threads_of_block();
u32 blocks_of_grid();

[[noreturn]] void fail(const char* text, ...);

struct Warp;
void* operands_of(Warp& warp, int lane);  // of the instruction of the whole warp that the lane stands at
int lanes_of(Warp& warp);

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

void pdl_wait();

void begin_copy(u32 to, const char* from, int bytes, int read);
void end_group();
void end_copies(int open);  // all but those of the newest `open` groups

void multiply(float* d, const u32* a, const u32* b);  // mma.m16n8k16
void take_matrices(u32* b, u32 at);                   // ldmatrix.x4
void begin_products();                                // products of four warps: wgmma
void add_product(float* d, int sums, const u32* a, u64 left, u64 matrix, bool add, bool across);  // a null: `left` is in shared memory too
void end_products();
void wait_products(int open);
void show_to_products();

struct Matrix { const char* at; i64 rows, columns, stride, tile_rows, paired; };  // of bfloat16, for TMA: a tile has 64 columns

void barrier_init(u32 at, int arrivals);
void barrier_arrive(u32 at, int rank, i64 bytes);  // at the barrier of a block of the cluster (-1: its own), which then waits for more bytes
void barrier_wait(u32 at, u32 parity);
void meet_cluster();
void fetch_tile(u32 to, const Matrix& from, u32 barrier, int row, int column, bool all);
void fetch_bytes(u32 to, const char* from, u32 bytes, u32 barrier);

// 1: it failed, and the message says why. variables: those that are said to be shared.
int launch(const Launch& asked, void (*kernel)(void**), char* variables, char* variables_end);

}  // namespace machine
#endif
