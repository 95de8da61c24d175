// What ops/triton/common.py does with sums, each operation as Triton rounds it; and `gathered`, for stores of 16 bytes.
//
// Given when compiled: ACT 1 gelu_tanh, 2 silu: what a gate goes through.
#ifndef OUTRIDER_ACTIVATE
#define OUTRIDER_ACTIVATE
#include "device.cuh"

__device__ __forceinline__ float rounded(float v) { return __uint_as_float((u32)bfloat_of(v) << 16); }  // to bfloat16 and back

__device__ __forceinline__ float exp_of(float v) { return power_of_2(__fmul_rn(v, 1.44269504089f)); }

__device__ __forceinline__ float activate(float x) {
#if ACT == 2
    return ratio(x, __fadd_rn(1.f, exp_of(-x)));
#else
    const float s = __fmaf_rn(__fmul_rn(__fmul_rn(x, 0.044715f), x), x, x), u = __fmul_rn(s, 0.7978845608028654f);
    return __fmul_rn(__fmul_rn(x, 0.5f), __fadd_rn(2.f, -ratio(2.f, __fadd_rn(exp_of(__fmaf_rn(s, 0.7978845608028654f, u)), 1.f))));
#endif
}

__device__ __forceinline__ float tanh_of(float x) { return __fadd_rn(1.f, -ratio(2.f, __fadd_rn(exp_of(__fadd_rn(x, x)), 1.f))); }

// Of four lanes the first gets all four words v[0], the second all v[1], and so on.
__device__ __forceinline__ uint4 gathered(u32 (&v)[4], int c) {
    auto exchange = [&](u32& a, u32& b, int upper, int lanes) {
        const u32 got = __shfl_xor_sync(~0u, upper ? a : b, lanes);
        if (upper) a = got;
        else b = got;
    };
    exchange(v[0], v[1], c & 1, 1), exchange(v[2], v[3], c & 1, 1);
    exchange(v[0], v[2], c & 2, 2), exchange(v[1], v[3], c & 2, 2);
    return make_uint4(v[0], v[1], v[2], v[3]);
}
#endif
