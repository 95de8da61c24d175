// wgmma and its fences: with device.cuh the only `asm`, for kernels compiled for sm_90a.
//
// Given when compiled: NT, the tokens of a product by eights, 2 to 5, where `multiply_all` is used.
#ifndef OUTRIDER_WARPGROUP
#define OUTRIDER_WARPGROUP
#include "device.cuh"

#ifdef NT
#define SUMS_OF(d, j) "+f"(d[4 * j]), "+f"(d[4 * j + 1]), "+f"(d[4 * j + 2]), "+f"(d[4 * j + 3])
#define SUMS_OF_2(d) SUMS_OF(d, 0), SUMS_OF(d, 1)
#define SUMS_OF_4(d) SUMS_OF_2(d), SUMS_OF(d, 2), SUMS_OF(d, 3)
#define TEXT_OF_2 "%0,%1,%2,%3,%4,%5,%6,%7"
#define TEXT_OF_4 TEXT_OF_2 ",%8,%9,%10,%11,%12,%13,%14,%15"
#if NT == 2
#define SHAPE "m64n16k16"
#define ALL_SUMS(d) SUMS_OF_2(d)
#define TEXT "{" TEXT_OF_2 "}, {%8,%9,%10,%11}, %12"
#define ADDED "%13"
#elif NT == 3
#define SHAPE "m64n24k16"
#define ALL_SUMS(d) SUMS_OF_2(d), SUMS_OF(d, 2)
#define TEXT "{" TEXT_OF_2 ",%8,%9,%10,%11}, {%12,%13,%14,%15}, %16"
#define ADDED "%17"
#elif NT == 4
#define SHAPE "m64n32k16"
#define ALL_SUMS(d) SUMS_OF_4(d)
#define TEXT "{" TEXT_OF_4 "}, {%16,%17,%18,%19}, %20"
#define ADDED "%21"
#else
#define SHAPE "m64n40k16"
#define ALL_SUMS(d) SUMS_OF_4(d), SUMS_OF(d, 4)
#define TEXT "{" TEXT_OF_4 ",%16,%17,%18,%19}, {%20,%21,%22,%23}, %24"
#define ADDED "%25"
#endif

// d [64, 8 NT] = a [64, 16] · b [16, 8 NT], or more of it (Add). Each warp holds 16 rows of a and d, by lanes as in `multiply`, d by eights of
// columns. b: `matrix_at`. It goes on behind the thread's back: a, and d until it has been waited for, are not to be touched.
template <bool Add> __device__ __forceinline__ void multiply_all(float (&d)[4 * NT], const u32* a, u64 b) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, " ADDED ", 0; wgmma.mma_async.sync.aligned." SHAPE ".f32.bf16.bf16 " TEXT ", p, 1, 1, 0;}"
                 : ALL_SUMS(d)
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
