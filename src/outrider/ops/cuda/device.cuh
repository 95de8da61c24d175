// Every instruction without a C++ equivalent, one function each: the only `asm` of these kernels. Addresses of shared memory are u32, bfloat16
// pairs are u32, the first of them in the lower half. tests/cuda/emulate.h has the same functions for a machine without a GPU.
#ifndef OUTRIDER_DEVICE
#define OUTRIDER_DEVICE
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
typedef unsigned long long u64;

// Arithmetic.

__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {  // a · b + c of two bfloat16, one rounding
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

template <u32 MASK> __device__ __forceinline__ u32 and_or(u32 a, u32 b) {  // (a & MASK) | b
    u32 d;
    asm("lop3.b32 %0, %1, %3, %2, 0xEA;" : "=r"(d) : "r"(a), "r"(b), "n"(MASK));
    return d;
}

// d [16, 8] += a [16, 16] · b [16, 8] of bfloat16. Lane 4 g + c holds rows g (a0, a2; d0, d1) and g + 8 (a1, a3; d2, d3): of a columns 2 c
// and 2 c + 1 (a0, a1), and 8 further (a2, a3); of b the same rows of column g (b0; b1); of d columns 2 c and 2 c + 1.
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 transposed(u32 v) {  // an 8 x 8 matrix of 16 bits; lane 4 g + c has of row g columns 2 c and 2 c + 1
    u32 t;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(v));
    return t;
}

__device__ __forceinline__ float float_of_half(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

__device__ __forceinline__ u16 bfloat_of(float v) {  // rounded to nearest even
    u16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
}

__device__ __forceinline__ u32 bfloats_of(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float power_of_2(float v) {
    float e;
    asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(v));
    return e;
}

__device__ __forceinline__ float power_of_2_flushed(float v) {  // 0 where the power has no full precision
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v));
    return e;
}

__device__ __forceinline__ float root(float v) {  // 1 / sqrt(v)
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

__device__ __forceinline__ float ratio(float a, float b) {
    float q;
    asm("div.full.f32 %0, %1, %2;" : "=f"(q) : "f"(a), "f"(b));
    return q;
}

// Shared memory. What is read (read16, read_float) was written once, before `pin`, and may be read whenever; what is taken stays where it is.

__device__ __forceinline__ u32 shared_room() {  // what the launch asked for; swizzled tiles begin at multiples of 1,024
    extern __shared__ __align__(1024) uint4 room[];
    u32 base;
    asm("{.reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t;}" : "=r"(base) : "l"(room));
    return base;
}

__device__ __forceinline__ uint4 read16(u32 at) {
    uint4 v;
    asm("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

__device__ __forceinline__ float read_float(u32 at) {
    float v;
    asm("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
    return v;
}

__device__ __forceinline__ uint4 take16(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ uint2 take8(u32 at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ float take_float(u32 at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ u32 take4(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ void put4(u32 at, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }

__device__ __forceinline__ void put16(u32 at, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void put8(u32 at, u32 a, u32 b) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}

__device__ __forceinline__ void put_float(u32 at, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}

__device__ __forceinline__ void pin(u32& a, u32& b) {  // no read through these addresses moves up from here
    asm volatile("" : "+r"(a), "+r"(b)::"memory");
}

// Asynchronous copies into shared memory: a thread waits for its own; those of other threads are visible after a further barrier.

__device__ __forceinline__ void copy16(u32 to, const char* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy16_or_zeros(u32 to, const char* from, int bytes) {  // 16, or 0: then it reads nothing
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy16_once(u32 to, const char* from) {  // of data that is read once: L2 evicts it first
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy) : "memory");
}

template <int BYTES> __device__ __forceinline__ void copy_few(u32 to, const char* from) {  // 4, 8 or 16 bytes; 16 of data that is read once
    if constexpr (BYTES == 16) copy16_once(to, from);
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}

__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }  // those asked for since the last one

template <int GROUPS> __device__ __forceinline__ void wait_copies_but() {  // but for the last GROUPS that were committed
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

__device__ __forceinline__ void prefetch_line(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }  // 128 bytes, into L2

// Between warps, between blocks and between kernels.

__device__ __forceinline__ void meet(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

__device__ __forceinline__ int count_one(int* at) {  // the old value; earlier writes are visible to every block that counts later
    int before;
    asm volatile("atom.global.acq_rel.gpu.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(at) : "memory");
    return before;
}

__device__ __forceinline__ u32 look(const u32* at) {  // at what another block counts
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ void pdl_trigger() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif
