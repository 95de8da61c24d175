// Hopper's asynchronous instructions for kernels compiled for sm_90a: TMA, mbarriers, clusters of two blocks, and wgmma with both operands in
// shared memory. With device.cuh and warpgroup.cuh the only `asm`; tests/cuda/emulate.h has the same functions for a machine without a GPU.
#ifndef OUTRIDER_TMA
#define OUTRIDER_TMA
#include "device.cuh"

struct alignas(64) TensorMap { char opaque[128]; };  // CUtensorMap

// mbarriers: 8 bytes of shared memory each.

__device__ __forceinline__ void barrier_init(u32 at, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }  // to TMA and the cluster

__device__ __forceinline__ void barrier_expect(u32 at, int bytes) {  // arrives; the phase also waits for this many bytes
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

// At the same barrier of a block of the cluster. It says that something was read; `.release.cluster`, which would show what was written, is a
// fence of the whole GPU, some 600 cycles.
__device__ __forceinline__ void barrier_arrive(u32 at, int block) {
    asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there];}"
                 ::"r"(at), "r"(block) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 at, u32 parity) {
    asm volatile(
        "{.reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @done bra DONE; bra AGAIN; DONE: }" ::"r"(at), "r"(parity)
        : "memory");
}

// Clusters.

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

// A tile whose first element is (row, column), with zeros past the ends; its bytes arrive at the barrier. To all: of both blocks of the
// cluster, at the same places. Paired: the matrix has two halves, and rows of a tile are eight of the first and eight of the second in turns.

#define FETCH(DIMENSIONS, REST, ...)                                                                                             \
    asm volatile("cp.async.bulk.tensor." DIMENSIONS ".shared::cluster.global.mbarrier::complete_tx::bytes" REST ::"r"(to), "l"(&map), \
                 "r"(barrier), "r"(column), __VA_ARGS__ : "memory")

template <bool Paired, bool All> __device__ __forceinline__ void fetch_tile(u32 to, const TensorMap& map, u32 barrier, int row, int column) {
    if constexpr (Paired && All) FETCH("4d", ".multicast::cluster [%0], [%1, {%3, %5, %5, %4}], [%2], %6;", "r"(row / 16), "r"(0), "h"((u16)3));
    else if constexpr (Paired) FETCH("4d", " [%0], [%1, {%3, %5, %5, %4}], [%2];", "r"(row / 16), "r"(0));
    else if constexpr (All) FETCH("2d", ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;", "r"(row), "h"((u16)3));
    else FETCH("2d", " [%0], [%1, {%3, %4}], [%2];", "r"(row));
}

// `bytes` of adjacent ones, a multiple of 16.
__device__ __forceinline__ void fetch_bytes(u32 to, const char* from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Registers of a warpgroup's threads.

template <int COUNT> __device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> __device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// wgmma. A matrix in shared memory: rows of 64 bfloat16 (128 bytes) as TMA leaves them with its 128-byte swizzle, at a multiple of 1,024
// bytes; 16 columns further are 2 more. next: bytes to the 64 columns after these, where a product takes columns (Across).
__device__ __forceinline__ u64 swizzled_matrix(u32 at, u32 next = 16) {
    return (u64)((at & 0x3FFFF) >> 4) | (u64)(next >> 4) << 16 | (u64)64 << 32 | (u64)1 << 62;
}

#define TEN(p) "%" p "0,%" p "1,%" p "2,%" p "3,%" p "4,%" p "5,%" p "6,%" p "7,%" p "8,%" p "9"
#define D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define D32(i) D8(i), D8(i + 8), D8(i + 16), D8(i + 24)
#define T60 TEN("") "," TEN("1") "," TEN("2") "," TEN("3") "," TEN("4") "," TEN("5")
#define T80 T60 "," TEN("6") "," TEN("7")
#define MULTIPLY(SHAPE, D, A, B, ADD, ACROSS) \
    "{.reg .pred p; setp.ne.b32 p, " ADD ", 0; wgmma.mma_async.sync.aligned." SHAPE ".f32.bf16.bf16 {" D "}, " A ", " B ", p, 1, 1, 0, " ACROSS ";}"

// d [64, 2 SUMS] = a [64, 16] · b [2 SUMS, 16]ᵀ, added to d where `add`. Warp w of the group has rows 16 w to 16 w + 15, by lanes as in `multiply`.
// d is not to be touched until it was waited for. Across: b is [16, 2 SUMS], its next 16 rows are 128 more.
template <bool Across = false, int SUMS> __device__ __forceinline__ void multiply_shared(float (&d)[SUMS], u64 a, u64 b, int add) {
    static_assert(SUMS == 64 || !Across && (SUMS == 128 || SUMS == 96 || SUMS == 80));
    if constexpr (SUMS == 128)
        asm volatile(MULTIPLY("m64n256k16", T80 "," TEN("8") "," TEN("9") "," TEN("10") "," TEN("11") ",%120,%121,%122,%123,%124,%125,%126,%127",
                              "%128", "%129", "%130", "0") : D32(0), D32(32), D32(64), D32(96) : "l"(a), "l"(b), "r"(add));
    else if constexpr (SUMS == 96)
        asm volatile(MULTIPLY("m64n192k16", T80 "," TEN("8") ",%90,%91,%92,%93,%94,%95", "%96", "%97", "%98", "0")
                     : D32(0), D32(32), D32(64) : "l"(a), "l"(b), "r"(add));
    else if constexpr (SUMS == 64)
        asm volatile(MULTIPLY("m64n128k16", T60 ",%60,%61,%62,%63", "%64", "%65", "%66", "%67")
                     : D32(0), D32(32) : "l"(a), "l"(b), "r"(add), "n"((int)Across));
    else
        asm volatile(MULTIPLY("m64n160k16", T80, "%80", "%81", "%82", "0") : D32(0), D32(32), D8(64), D8(72) : "l"(a), "l"(b), "r"(add));
}
#endif

#ifndef OUTRIDER_RING
#define OUTRIDER_RING
// Where in a ring of stages a thread is: COUNT of BYTES each, then a `full` barrier for each, then an `empty` one.
template <int COUNT, int BYTES> struct StageRing {
    u32 base, slot = 0, phase = 0;
    __device__ __forceinline__ u32 stage() const { return base + slot * BYTES; }
    __device__ __forceinline__ u32 full() const { return base + COUNT * BYTES + slot * 8; }
    __device__ __forceinline__ u32 empty() const { return full() + COUNT * 8; }
    __device__ __forceinline__ void next() {
        if (++slot == COUNT) slot = 0, phase ^= 1;
    }
};
#endif
