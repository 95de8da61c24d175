// y = x · wᵀ of many rows in bfloat16 on Hopper: the chains of sums of ops/triton/gemm.py, so its bits.
//
// Persistent: a cluster of two blocks takes tiles of 2 x 128 rows of one operand and BN rows of the other, one tile after the other. In each block
// one warp fetches 64 columns at a time by TMA, each of the two blocks one half of the BN rows for both, and two warpgroups multiply 64 rows
// each (wgmma, both operands from shared memory). A ring of STAGES is between them: `full` barriers count bytes, `empty` ones the warps of both
// blocks that have read. The fetching warp runs ahead into the next tile while this one is stored.
//
// CUT (stream-K): the tiles do not divide evenly, so the first ones are cut along their chains. A cluster begins with the first part of a tile,
// stores the sums, and later finishes the tile that the previous cluster began with: a chain continues from exactly the stored sums.
//
// Given when compiled: BN, 256, 192 or 160; SWAP_AB: the 128 rows are of w and the BN of x, else the other way round; STAGES; SPLITS 1, or 2: the
// columns have spans, each a chain of its own, added in order (192 leaves registers for it); GATED: half of w's rows are gates; ACT (activate.cuh); BIAS
// 0, 1: bfloat16, 2: float32; SOFTCAP; FLOAT_OUT: the result is float32; CUT.
#include "activate.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

constexpr int BM = 128, BK = 64, SUMS = BN / 2, WARPS = 8, THREADS = 128 + 32 * WARPS;
constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, STAGE = A_BYTES + B_BYTES, SIDES = GATED ? 2 : 1;

struct Problem {
    int m, n, steps, span;      // of 64 columns: all, of a span
    int pairs, tiles_b, group;  // of tiles of 128 rows; of BN rows; how many of the former go through all of the latter together
    int cut;                    // tiles that are cut
    float softcap;
};

struct Part {  // of a tile
    int a, b;       // the first rows of the cluster's tiles
    int low, high;  // steps
};

struct Work {  // of a cluster
    const Problem& p;
    int clusters, me, begin, end, last, parts, count;
    __device__ __forceinline__ Work(const Problem& p) : p(p), clusters(gridDim.x / 2), me(blockIdx.x / 2) {
        begin = CUT ? p.cut * p.steps * me / clusters : 0, end = CUT ? p.cut * p.steps * (me + 1) / clusters : 0;
        last = (end + p.steps - 1) / p.steps - 1, parts = CUT ? last - begin / p.steps + 1 : 0;
        count = parts + (p.pairs * p.tiles_b - p.cut - me + clusters - 1) / clusters;
    }
    __device__ __forceinline__ Part operator[](int i) const {
        const int tile = i < parts ? last - i : p.cut + me + (i - parts) * clusters;
        const int first = tile / (p.group * p.tiles_b) * p.group, high = min(p.pairs - first, p.group), inside = tile - first * p.tiles_b;
        Part part = {(first + inside % high) * 2 * BM, inside / high * BN, 0, p.steps};
        if (CUT && i < parts) part.low = max(begin - tile * p.steps, 0), part.high = min(end - tile * p.steps, p.steps);
        return part;
    }
};

using Ring = StageRing<STAGES, STAGE>;

__device__ __forceinline__ void fetch(Ring ring, const TensorMap& a, const TensorMap& b, const Problem& p, int rank) {
    const Work work(p);
    for (int i = 0; i < work.count; i++) {
        const Part at = work[i];
#pragma unroll 1
        for (int k = at.low; k < at.high; k++, ring.next()) {
            barrier_wait(ring.empty(), ring.phase ^ 1);
            barrier_expect(ring.full(), STAGE);
            fetch_tile<GATED && SWAP_AB, false>(ring.stage(), a, ring.full(), at.a + rank * BM, k * BK);
            fetch_tile<GATED && !SWAP_AB, true>(ring.stage() + A_BYTES + rank * (B_BYTES / 2), b, ring.full(), at.b + rank * (BN / 2), k * BK);
        }
    }
}

__device__ __forceinline__ void multiply_stage(float (&acc)[SUMS], const Ring& ring, int done, int group) {
    barrier_wait(ring.full(), ring.phase);
    const u64 a = swizzled_matrix(ring.stage() + group * (A_BYTES / 2)), b = swizzled_matrix(ring.stage() + A_BYTES);
    begin_multiplying();
#pragma unroll
    for (int i = 0; i < BK / 16; i++) multiply_shared(acc, a + 2 * i, b + 2 * i, done + i);
    end_batch();
}

// The sums of a span: `count` steps, after `done` ones.
__device__ __forceinline__ void chain(float (&acc)[SUMS], Ring& ring, int done, int count, int group, int lane) {
    u32 read = 0;  // the `empty` barrier of the step before
    for (int k = 0; k < count; k++, ring.next()) {
        multiply_stage(acc, ring, done + k, group);
        wait_batches<1>();
        if (k > 0 && lane < 2) barrier_arrive(read, lane);
        read = ring.empty();
    }
    wait_batches<0>(acc);
    if (count > 0 && lane < 2) barrier_arrive(read, lane);
}

// Sums that a warp stores for the same warp of the next cluster.
struct Handover {
    float4* room;
    int* flags;  // by warp: whether they are there

    __device__ __forceinline__ void leave(int slot, const float (&sums)[SUMS], int lane) const {
#pragma unroll
        for (int i = 0; i < SUMS / 4; i++)
            __stcg(room + (slot * (SUMS / 4) + i) * 32 + lane, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
    }
    __device__ __forceinline__ void take(int slot, float (&sums)[SUMS], int lane) const {
#pragma unroll
        for (int i = 0; i < SUMS / 4; i++) {
            const float4 v = __ldcg(room + (slot * (SUMS / 4) + i) * 32 + lane);
            sums[4 * i] = v.x, sums[4 * i + 1] = v.y, sums[4 * i + 2] = v.z, sums[4 * i + 3] = v.w;
        }
    }
    __device__ __forceinline__ void announce(int warp, int lane) const {
        __threadfence();
        __syncwarp();
        if (lane == 0) count_one(flags + warp);
    }
    __device__ __forceinline__ void await(int warp, int lane) const {  // the cluster before began with them: there is hardly ever a wait
        if (lane == 0) {
            while (look((const u32*)flags + warp) == 0) {}
            flags[warp] = 0;
        }
        __syncwarp();
    }
};

struct Epilogue {
    const void* bias;
    void* out;
    const Problem& p;

    __device__ __forceinline__ float bias_at(int column) const {
        return BIAS == 2 ? __ldg((const float*)bias + column) : __uint_as_float((u32)__ldg((const u16*)bias + column) << 16);
    }

    // One element of the result: `epilogue` of ops/triton/common.py. Rows and columns past the end are not stored.
    __device__ __forceinline__ float finish(float v, float up, int column) const {
        if constexpr (BIAS) column = min(column, p.n - 1), v = __fadd_rn(v, bias_at(column));
        if constexpr (BIAS && GATED) up = __fadd_rn(up, bias_at(p.n + column));
        if constexpr (GATED) v = __fmul_rn(rounded(activate(rounded(v))), rounded(up));
        if constexpr (SOFTCAP) v = __fmul_rn(tanh_of(ratio(v, p.softcap)), p.softcap);
        return v;
    }

    __device__ __forceinline__ void put(int row, int column, float v) const {
        if (row < p.m && column < p.n) ((float*)out)[(i64)row * p.n + column] = v;
    }
    __device__ __forceinline__ void put8(int row, int column, uint4 v) const {
        if (row < p.m && column < p.n) *(uint4*)((u16*)out + (i64)row * p.n + column) = v;
    }

    // A warp's sums: 16 rows of a from `first_a` on, BN of b. Eights of rows of w are of the gate and of up in turns where it is gated.
    __device__ __forceinline__ void store(const float (&acc)[SUMS], int first_a, int first_b, int lane) const {
        const int g = lane >> 2, c = lane & 3;
        if constexpr (SWAP_AB) {  // lane: columns g and g + 8 of rows 2 c and 2 c + 1
            const int column = first_a / SIDES;
#pragma unroll
            for (int q = 0; q < BN / 8; q += 2 * SIDES) {
                u32 v[4];
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    const int j = q + (GATED ? t : t / 2), h = GATED ? 0 : t % 2, i = 4 * j + 2 * h, up = GATED ? i + 2 : i;
                    const int row = first_b + 8 * j + 2 * c, at = column + 8 * h + g;
                    const float2 two = make_float2(finish(acc[i], acc[up], at), finish(acc[i + 1], acc[up + 1], at));
                    if constexpr (FLOAT_OUT) put(row, at, two.x), put(row + 1, at, two.y);
                    else v[t] = transposed(bfloats_of(two.x, two.y));
                }
                if constexpr (!FLOAT_OUT) put8(first_b + 8 * (q + (GATED ? c : c / 2)) + g, column + (GATED ? 0 : c % 2 * 8), gathered(v, c));
            }
        } else {  // rows g and g + 8, columns 2 c and 2 c + 1 of each eight
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int q = 0; q < BN / SIDES / 32; q++) {
                    u32 v[4];
                    const int row = first_a + g + 8 * h, column = first_b / SIDES + 32 * q;
#pragma unroll
                    for (int t = 0; t < 4; t++) {
                        const int i = 4 * SIDES * (4 * q + t) + 2 * h, up = GATED ? i + 4 : i, at = column + 8 * t + 2 * c;
                        const float2 two = make_float2(finish(acc[i], acc[up], at), finish(acc[i + 1], acc[up + 1], at + 1));
                        if constexpr (FLOAT_OUT) put(row, at, two.x), put(row, at + 1, two.y);
                        else v[t] = bfloats_of(two.x, two.y);
                    }
                    if constexpr (!FLOAT_OUT) put8(row, column + 8 * c, gathered(v, c));
                }
        }
    }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
gemm_wgmma(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const void* bias, void* out, float4* room,
           int* flags, const __grid_constant__ Problem p) {
    const int warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31, rank = blockIdx.x & 1;
    Ring ring = {(shared_room() + 1023) & ~1023};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++, ring.next()) barrier_init(ring.full(), 1), barrier_init(ring.empty(), 2 * WARPS);
        show_barriers();
    }
    ring.slot = ring.phase = 0;
    cluster_sync();
    pdl_trigger();
    pdl_wait();
    if (warp < 4) {
        give_registers<40>();
        if (warp == 0 && lane == 0) fetch(ring, a, b, p, rank);
    } else {
        take_registers<232>();
        const int mine = warp - 4, group = mine / 4, slot = blockIdx.x * WARPS + mine, next = slot + 2 * WARPS;
        const Epilogue epilogue = {bias, out, p};
        const Handover handover = {room, flags};
        const Work work(p);
        for (int i = 0; i < work.count; i++) {
            Part at = work[i];
            float acc[SUMS], total[SUMS];  // of a span, and of those before it
            if constexpr (SPLITS > 1)
                for (int j = 0; j < SUMS; j++) total[j] = 0.f;
            auto close = [&](int k) {  // a span, where it ends
                if (SPLITS > 1 && (k % p.span == 0 || k == p.steps))
#pragma unroll
                    for (int j = 0; j < SUMS; j++) total[j] = __fadd_rn(total[j], acc[j]);
            };
            if (CUT && at.low > 0) {
                handover.await(slot, lane);
                handover.take(SPLITS * slot, acc, lane);
                if constexpr (SPLITS > 1) handover.take(SPLITS * slot + 1, total, lane);
                multiply_stage(acc, ring, at.low % p.span, group);  // by itself: sums that enter a loop as they were loaded make every wgmma wait
                wait_batches<0>(acc);
                if (lane < 2) barrier_arrive(ring.empty(), lane);
                ring.next(), close(++at.low);
            }
            if constexpr (SPLITS == 1) {
                chain(acc, ring, at.low, at.high - at.low, group, lane);
            } else {
                for (int k = at.low; k < at.high;) {
                    const int done = k % p.span, count = min(p.span - done, at.high - k);
                    chain(acc, ring, done, count, group, lane);
                    close(k += count);
                }
            }
            if (CUT && at.high < p.steps) {
                handover.leave(SPLITS * next, acc, lane);
                if constexpr (SPLITS > 1) handover.leave(SPLITS * next + 1, total, lane);
                handover.announce(next, lane);
            } else epilogue.store(SPLITS > 1 ? total : acc, at.a + rank * BM + mine * 16, at.b, lane);
        }
    }
    __syncwarp();
    cluster_sync();  // no block exits while the other one's bytes and arrivals are in flight
}
