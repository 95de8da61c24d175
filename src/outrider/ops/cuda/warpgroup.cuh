// wgmma and its fences: with device.cuh the only `asm`, for kernels compiled for sm_90a.
//
// Given when compiled: NT, the tokens of a product by eights (2 to 5, 7, 8 or 10), where `multiply_all` is used.
#ifndef OUTRIDER_WARPGROUP
#define OUTRIDER_WARPGROUP
#include "device.cuh"

#ifdef NT
// Operands of wgmma by eights of tokens: sums, their names, and the instruction's shape with the names of what follows them.
#define SUMS_OF(j) "+f"(d[4 * j]), "+f"(d[4 * j + 1]), "+f"(d[4 * j + 2]), "+f"(d[4 * j + 3])
#define SUMS_2 SUMS_OF(0), SUMS_OF(1)
#define NAMES_2 "%0,%1,%2,%3,%4,%5,%6,%7"
#define SUMS_3 SUMS_2, SUMS_OF(2)
#define NAMES_3 NAMES_2 ",%8,%9,%10,%11"
#define SUMS_4 SUMS_2, SUMS_OF(2), SUMS_OF(3)
#define NAMES_4 NAMES_2 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define SUMS_5 SUMS_3, SUMS_OF(3), SUMS_OF(4)
#define NAMES_5 NAMES_3 ",%12,%13,%14,%15,%16,%17,%18,%19"
#define SUMS_6 SUMS_4, SUMS_OF(4), SUMS_OF(5)
#define NAMES_6 NAMES_4 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define SUMS_7 SUMS_5, SUMS_OF(5), SUMS_OF(6)
#define NAMES_7 NAMES_5 ",%20,%21,%22,%23,%24,%25,%26,%27"
#define SUMS_8 SUMS_6, SUMS_OF(6), SUMS_OF(7)
#define NAMES_8 NAMES_6 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define SUMS_10 SUMS_8, SUMS_OF(8), SUMS_OF(9)
#define NAMES_10 NAMES_8 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define REST_2 "m64n16k16", "%8,%9,%10,%11", "%12", "%13"
#define REST_3 "m64n24k16", "%12,%13,%14,%15", "%16", "%17"
#define REST_4 "m64n32k16", "%16,%17,%18,%19", "%20", "%21"
#define REST_5 "m64n40k16", "%20,%21,%22,%23", "%24", "%25"
#define REST_7 "m64n56k16", "%28,%29,%30,%31", "%32", "%33"
#define REST_8 "m64n64k16", "%32,%33,%34,%35", "%36", "%37"
#define REST_10 "m64n80k16", "%40,%41,%42,%43", "%44", "%45"
#define JOINED(a, b) a##b
#define OF_NT(name, nt) JOINED(name, nt)
#define WGMMA_TEXT(D, SHAPE, A, B, ADD) \
    "{.reg .pred p; setp.ne.b32 p, " ADD ", 0; wgmma.mma_async.sync.aligned." SHAPE ".f32.bf16.bf16 {" D "}, {" A "}, " B ", p, 1, 1, 0;}"
#define WGMMA_TEXT_OF(...) WGMMA_TEXT(__VA_ARGS__)

// d [64, 8 NT] = a [64, 16] · b [16, 8 NT], or more of it (Add). Each warp holds 16 rows of a and d, by lanes as in `multiply`, d by eights of
// columns. b: `matrix_at`, or `swizzled_matrix` of tma.cuh. It goes on behind the thread's back: a, and d until it has been waited for, are not to be touched.
template <bool Add> __device__ __forceinline__ void multiply_all(float (&d)[4 * NT], const u32* a, u64 b) {
    asm volatile(WGMMA_TEXT_OF(OF_NT(NAMES_, NT), OF_NT(REST_, NT))
                 : OF_NT(SUMS_, NT)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(Add));
}

// What `multiply_all` finds in shared memory: pieces of 8 columns (16 bytes) of 8 tokens are 128 bytes; the next 8 columns lie NT such
// pieces further, the next 8 tokens one.
__device__ __forceinline__ u64 matrix_at(u32 at) { return (u64)((at & 0x3FFFF) >> 4) | (u64)(NT * 8) << 16 | (u64)8 << 32; }

#endif

__device__ __forceinline__ void begin_multiplying() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void end_batch() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT> __device__ __forceinline__ void wait_batches() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }  // all but the last LEFT

template <int COUNT> __device__ __forceinline__ void pin(float* d) {  // they are computed ahead of here, and used after it
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

template <int LEFT, int COUNT> __device__ __forceinline__ void wait_batches(float (&d)[COUNT]) {  // d was in one of those
    wait_batches<LEFT>();
    pin<COUNT>(d);
}

__device__ __forceinline__ void show_to_matrix_units() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }  // what was written
#endif
