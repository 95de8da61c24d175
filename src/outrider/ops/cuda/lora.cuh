// What adapters add to a tile of 16 rows of a weight, for its tokens: `lowrank_delta` of ops/triton/lowrank.py, so its bits. The sums over ranks
// are made by the matrix instruction, 16 at a time and in order; of a range that is not a token's own it multiplies zeros, which change no sum.
//
// Given when compiled: RANK, a multiple of 16; 0: there are no adapters.
#ifndef OUTRIDER_LORA
#define OUTRIDER_LORA
#include "activate.cuh"
#include "codes.cuh"
#ifndef RANK
#define RANK 0  // there are none
#endif

// Ranges times rank are at most 128 (FUSED_RANKS of ops/triton/lowrank.py), and every range has a token.
constexpr int RANK_STEPS = RANK ? RANK / 16 : 1, MOST_RANGES = RANK == 0 ? 1 : 128 / RANK < TOKENS ? 128 / RANK : TOKENS;

struct Lora {
    const u16 *u, *b;   // scale · A x [m, parts, RANK], which `shrink` writes; B [slots, n, RANK]
    const int* ranges;  // [count, 3]: first token, tokens, slot or -1
    int count, parts, end_0, end_1;  // matrices that the weight is fused of, and where the first two end
    int x_ready;                     // x is complete when the kernel starts, and u when the kernel ahead is
    __device__ __forceinline__ int part_of(int row) const { return (parts > 1 && row >= end_0) + (parts > 2 && row >= end_1); }
};

struct Range {
    u32 bits;  // first token, tokens, slot + 1
    __device__ __forceinline__ int first() const { return bits & 255; }
    __device__ __forceinline__ int tokens() const { return bits >> 8 & 255; }
    __device__ __forceinline__ int slot() const { return (int)(bits >> 16) - 1; }
    __device__ __forceinline__ i64 matrix() const { return max(slot(), 0); }  // without a slot u is 0
};

__device__ __forceinline__ Range range_at(const Lora& lora, int range) {
    const int* at = lora.ranges + min(range, lora.count - 1) * 3;
    return {(u32)__ldg(at) | (u32)__ldg(at + 1) << 8 | (u32)(__ldg(at + 2) + 1) << 16};
}

// Every lane holds one range, `mine`; of all lanes, the given one's.
__device__ __forceinline__ Range range_of(Range mine, int lane) { return {__shfl_sync(~0u, mine.bits, lane)}; }

// Asks for B of a tile's rows: the lower 8 from `low` on, the upper 8 from `high` on; n: rows of a slot.
__device__ __forceinline__ void prefetch_b(const Lora& lora, Range mine, int n, int low, int high, const Lane& lane) {
    constexpr int LINES = RANK ? RANK / 8 : 1;  // of 8 rows
    for (int first = 0; first < lora.count; first += 16 / LINES) {
        const int range = first + lane.index / (2 * LINES), half = lane.index / LINES & 1;
        const Range of = range_of(mine, range);
        if (range < lora.count) prefetch_line(lora.b + (of.matrix() * n + (half ? high : low)) * RANK + lane.index % LINES * 64);
    }
}

// B of a tile, as the matrix instruction takes it: of the lane's two rows four ranks per step.
struct TileB {
    uint2 low[MOST_RANGES][RANK_STEPS], high[MOST_RANGES][RANK_STEPS];
    __device__ __forceinline__ TileB(const Lora& lora, Range mine, int n, int low_row, int high_row, const Lane& lane) {
        if constexpr (RANK == 0) return;
#pragma unroll
        for (int r = 0; r < MOST_RANGES; r++) {
            const i64 matrix = range_of(mine, r).matrix() * n;
#pragma unroll
            for (int s = 0; s < RANK_STEPS; s++)
                if (r < lora.count) {
                    low[r][s] = __ldg((const uint2*)(lora.b + (matrix + low_row + lane.g) * RANK + s * 16 + lane.c * 4));
                    high[r][s] = __ldg((const uint2*)(lora.b + (matrix + high_row + lane.g) * RANK + s * 16 + lane.c * 4));
                }
        }
    }
};

// d [16, 8 EIGHTS] as `multiply` has it, by eights of columns; of u the lane holds token + 8 j. Gated: the upper rows are of another part.
template <int EIGHTS, bool Gated>
__device__ __forceinline__ void lowrank_delta(float (&d)[4 * EIGHTS], const TileB& b, const Lora& lora, Range mine, int m, int low, int high, int token, const Lane& lane) {
    const u16 *u_low = lora.u + lora.part_of(low) * RANK + lane.c * 4, *u_high = lora.u + lora.part_of(high) * RANK + lane.c * 4;
#pragma unroll
    for (int j = 0; j < 4 * EIGHTS; j++) d[j] = 0.f;
    pdl_wait();  // for u
#pragma unroll
    for (int s = 0; s < RANK_STEPS; s++) {
        uint2 u[EIGHTS], v[EIGHTS];
#pragma unroll
        for (int j = 0; j < EIGHTS; j++) {
            const i64 at = (i64)min(token + 8 * j, m - 1) * (lora.parts * RANK) + s * 16;
            u[j] = __ldcg((const uint2*)(u_low + at));
            if constexpr (Gated) v[j] = __ldcg((const uint2*)(u_high + at));
        }
#pragma unroll
        for (int r = 0; r < MOST_RANGES; r++) {
            if (r >= lora.count) break;
            const Range of = range_of(mine, r);
            const int from = of.first(), to = from + of.tokens();
            const uint2 lower = b.low[r][s], upper = b.high[r][s];
#pragma unroll
            for (int j = 0; j < EIGHTS; j++) {
                if (from >= 8 * j + 8 || to <= 8 * j) continue;
                const bool own = token + 8 * j >= from && token + 8 * j < to;
                float(&sums)[4] = *(float(*)[4])&d[4 * j];
                if constexpr (Gated) {
                    multiply(sums, lower.x, 0, lower.y, 0, own ? u[j].x : 0, own ? u[j].y : 0);
                    multiply(sums, 0, upper.x, 0, upper.y, own ? v[j].x : 0, own ? v[j].y : 0);
                } else {
                    multiply(sums, lower.x, upper.x, lower.y, upper.y, own ? u[j].x : 0, own ? u[j].y : 0);
                }
            }
        }
    }
}

// The product is rounded as without an adapter before its change is added; -0 changes no bit.
__device__ __forceinline__ float changed(float y, float delta) { return __fadd_rn(rounded(y), delta == 0.f ? -0.f : delta); }

// With adapters the kernel ahead is `shrink`, whose programs let this one in when they have waited for the kernel that wrote x: its writes are in L2.
__device__ __forceinline__ void wait_for_x(const Lora& lora) {
    if (RANK == 0 || !lora.x_ready) pdl_wait();
}
#endif
