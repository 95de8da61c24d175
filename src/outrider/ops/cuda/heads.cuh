// Norm and rotation of one head of one row, a warp each: the arithmetic and the order of sums of ops/triton/rope.py, so its bits. A lane has
// D / 64 neighbouring columns of either half.
//
// Given when compiled: D.
#ifndef OUTRIDER_HEADS
#define OUTRIDER_HEADS
#include "device.cuh"

struct Head {
    static constexpr int N = D / 64;
    u32 a[N / 2], b[N / 2];
    float cos[N], sin[N], of_a[N], of_b[N];  // of_a, of_b: weights of the norm

    __device__ __forceinline__ static float value(const u32* pairs, int i) {
        return __uint_as_float(i & 1 ? pairs[i / 2] & 0xFFFF0000 : pairs[i / 2] << 16);
    }

    __device__ __forceinline__ static void numbers(float* to, const float* from, int lane) {
        for (int i = 0; i < N; i += 4) {
            const float4 v = __ldcg((const float4*)(from + lane * N + i));
            to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
        }
    }

    __device__ __forceinline__ void load(const u16* from, const float* cosines, const float* sines, const float* weight, int lane) {
        for (int i = 0; i < N / 2; i += 2) {
            const uint2 v = __ldcg((const uint2*)(from + lane * N) + i / 2), w = __ldcg((const uint2*)(from + D / 2 + lane * N) + i / 2);
            a[i] = v.x, a[i + 1] = v.y, b[i] = w.x, b[i + 1] = w.y;
        }
        if (cosines) numbers(cos, cosines, lane), numbers(sin, sines, lane);
        if (weight) numbers(of_a, weight, lane), numbers(of_b, weight + D / 2, lane);
    }

    __device__ __forceinline__ static float squares(const u32* pairs) {
        float sum = __fmul_rn(value(pairs, 1), value(pairs, 1));
        sum = __fmaf_rn(value(pairs, 0), value(pairs, 0), sum);
        for (int i = 2; i < N; i++) sum = __fmaf_rn(value(pairs, i), value(pairs, i), sum);
        for (int with = 16; with; with /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, with));
        return sum;
    }

    __device__ __forceinline__ void norm(bool weighted, float eps) {
        const float factor = root(__fadd_rn(eps, ratio(__fadd_rn(squares(a), squares(b)), (float)D)));
        for (int i = 0; i < N; i += 2) {
            float x[4] = {value(a, i), value(a, i + 1), value(b, i), value(b, i + 1)};
            const float w[4] = {of_a[i], of_a[i + 1], of_b[i], of_b[i + 1]};
            for (int j = 0; j < 4; j++) {
                x[j] = __fmul_rn(factor, x[j]);
                if (weighted) x[j] = __fmul_rn(x[j], w[j]);
            }
            a[i / 2] = pair_of(x[0], x[1]), b[i / 2] = pair_of(x[2], x[3]);
        }
    }

    __device__ __forceinline__ void turn() {
        for (int i = 0; i < N; i += 2) {
            float x[2], y[2];
            for (int j = 0; j < 2; j++) {
                const float u = value(a, i + j), v = value(b, i + j), c = cos[i + j], s = sin[i + j];
                x[j] = __fmaf_rn(c, u, -__fmul_rn(s, v));
                y[j] = __fmaf_rn(c, v, __fmul_rn(s, u));
            }
            a[i / 2] = pair_of(x[0], x[1]), b[i / 2] = pair_of(y[0], y[1]);
        }
    }

    __device__ __forceinline__ static u32 pair_of(float low, float high) { return bfloat_of(low) | (u32)bfloat_of(high) << 16; }
};
#endif
