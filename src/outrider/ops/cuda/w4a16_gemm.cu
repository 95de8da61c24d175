// y = x · wᵀ for more than 40 tokens and weights of four bits on Hopper: the layout, the arithmetic and the order of sums of ops/triton/quant.py,
// so its bits.
//
// Persistent: a cluster of two blocks takes tiles of 2 x 128 rows of the weight and TOKENS of x, one tile after the other. In each block one
// thread fetches x by TMA, 64 columns at a time, half of the tokens for both blocks, and another one the weights, a chunk of 256 columns at a
// time. Two warpgroups multiply 64 rows each: a thread unpacks its weights into registers, the first operand of wgmma, one plane of 32 columns
// ahead. A group's sums are multiplied by the rows' scales in float32, which takes half as long as wgmma where a group is a plane. So a warpgroup
// has two products under way, of half of the tokens each: the sums of one are scaled while the other one runs.
//
// Numbers are a quarter of what they stand for until a tile is done, as in w4a16_wgmma.cu.
//
// Given when compiled: NT, half of the tokens by eights, up to 10; X_STAGES, W_STAGES of shared memory; OFFSET 8 or 0: subtracted from a nibble; HALF:
// scales are float16, else bfloat16; PER: planes of 32 columns that share one; ZERO_POINT: they have an offset; SPANS 0: the columns are one span;
// 1: a block adds up the spans of its tile in shared memory; 2: each span is a tile's work by itself, and the last one adds them up; GATED: half
// of the rows are gates; ACT (activate.cuh).
#include "activate.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"

constexpr int TOKENS = 16 * NT, SUMS = 4 * NT, WARPS = 8, THREADS = 128 + 32 * WARPS, PLANES = 8, GROUPS = PLANES / PER, PAIRS = (GROUPS + 1) / 2;
constexpr int X_STAGE = TOKENS * 128, X_STEP = X_STAGE / 32;  // 64 columns of x; half of the tokens, in units of a matrix descriptor
constexpr int WORDS = 128 * 128, SCALES = 128 * 4 * PAIRS, ZERO_POINTS_AT = WORDS + SCALES, TOTALS_AT = ZERO_POINTS_AT + SCALES;
constexpr int W_BYTES = ZERO_POINT ? TOTALS_AT + GROUPS * TOKENS * 4 : ZERO_POINTS_AT, W_STAGE = (W_BYTES + 1023) / 1024 * 1024;
constexpr int W_AT = (X_STAGES * (X_STAGE + 16) + 1023) / 1024 * 1024, SPAN_SUMS_AT = W_AT + (W_STAGES * (W_STAGE + 16) + 127) / 128 * 128;
constexpr int SHARED = 1024 + SPAN_SUMS_AT + (SPANS == 1 ? TOKENS * 512 : 0);
constexpr int PIECES = GATED ? 2 : 1, PIECE_ROWS = 64 / PIECES, HIGH = GATED ? 32 : 8;  // of a warpgroup's rows; from a lane's first row to its second one

struct Problem {
    int m, n, chunks, span, splits;
    int pairs, tiles_b, group;  // tiles of 256 rows of the weight; of tokens; how many of the latter go through all weights together
    int tiles;                  // of 64 rows
    int sums_stride;
};

struct Part { int tile, a, b, split, from, count; };  // first tile of 64 rows, first token, chunks

struct Work {  // of a cluster
    const Problem& p;
    int tiles, me, clusters, count;
    __device__ __forceinline__ Work(const Problem& p) : p(p), tiles(p.pairs * p.tiles_b), me(blockIdx.x / 2), clusters(gridDim.x / 2) {
        count = (tiles * (SPANS == 2 ? p.splits : 1) - me + clusters - 1) / clusters;
    }
    __device__ __forceinline__ Part operator[](int i) const {
        const int item = me + i * clusters, split = SPANS == 2 ? item / tiles : 0, tile = item - split * tiles;
        const int first = tile / (p.group * p.pairs) * p.group, high = min(p.tiles_b - first, p.group), inside = tile - first * p.pairs;
        const int from = split * p.span;
        return {tile, inside / high * 4, (first + inside % high) * TOKENS, split, from, SPANS == 2 ? min(p.span, p.chunks - from) : p.chunks};
    }
};

using XRing = StageRing<X_STAGES, X_STAGE>;
using WRing = StageRing<W_STAGES, W_STAGE>;

__device__ __forceinline__ void fetch_x(XRing ring, const TensorMap& x, const Problem& p, int rank) {
    const Work work(p);
    for (int i = 0; i < work.count; i++) {
        const Part at = work[i];
#pragma unroll 1
        for (int k = at.from * 4; k < (at.from + at.count) * 4; k++, ring.next()) {
            barrier_wait(ring.empty(), ring.phase ^ 1);
            barrier_expect(ring.full(), X_STAGE);
            fetch_tile<false, true>(ring.stage() + rank * (X_STAGE / 2), x, ring.full(), at.b + rank * (TOKENS / 2), k * 64);
        }
    }
}

struct Weights { const char *scales, *zero_points; };

// Rows past the end repeat the last 64.
__device__ __forceinline__ void fetch_w(WRing ring, const TensorMap& words, const Weights& w, const float* sums, const Problem& p, int rank) {
    const Work work(p);
    for (int i = 0; i < work.count; i++) {
        const Part at = work[i];
#pragma unroll 1
        for (int k = at.from; k < at.from + at.count; k++, ring.next()) {
            barrier_wait(ring.empty(), ring.phase ^ 1);
            barrier_expect(ring.full(), W_BYTES);
#pragma unroll
            for (int j = 0; j < 2 * PIECES; j++) {
                const int tile = min(at.a + rank * 2 + j / PIECES, p.tiles - 1), block = GATED ? tile / 2 + j % 2 * (p.tiles / 2) : tile;
                const int row = (block * p.chunks + k) * 64 + (GATED ? tile % 2 * 32 : 0), bytes = PIECE_ROWS * 4 * PAIRS;
                fetch_tile<false, false>(ring.stage() + j * PIECE_ROWS * 128, words, ring.full(), row, 0);
                fetch_bytes(ring.stage() + WORDS + j * bytes, w.scales + (i64)row * (4 * PAIRS), bytes, ring.full());
                if constexpr (ZERO_POINT) fetch_bytes(ring.stage() + ZERO_POINTS_AT + j * bytes, w.zero_points + (i64)row * (4 * PAIRS), bytes, ring.full());
            }
            if constexpr (ZERO_POINT)
#pragma unroll 1
                for (int g = 0; g < GROUPS; g++)
                    fetch_bytes(ring.stage() + TOTALS_AT + g * (TOKENS * 4), (const char*)(sums + (i64)(k * GROUPS + g) * p.sums_stride + at.b), TOKENS * 4, ring.full());
        }
    }
}

__device__ __forceinline__ float number(u32 pair, int group) {
    if constexpr (HALF) return float_of_half((u16)(group % 2 ? pair >> 16 : pair));
    else return __uint_as_float(group % 2 ? pair & 0xFFFF0000u : pair << 16);
}

struct Place {  // a lane's
    int warp, lane, c;
    u32 words, scales, totals;  // in a stage; words with the 128-byte swizzle of TMA
    __device__ __forceinline__ Place(int warp, int lane) : warp(warp), lane(lane), c(lane & 3) {
        const int g = lane >> 2, group = warp / 4, row = warp % 4 * (GATED ? 8 : 16) + g;
        words = group * (WORDS / 2) + row * 128 + (((c >> 1) ^ g) << 4) + (c & 1) * 8;
        scales = WORDS + (group * 64 + row) * (4 * PAIRS), totals = TOTALS_AT + c * 8;
    }
};

struct Factors { float low, high, zero_point_low, zero_point_high; };  // of a group, in the lane's two rows

// What a lane has: words of half of a chunk's planes, two planes of them unpacked, sums of the group at hand and of the span, of both halves of
// the tokens.
struct Tile {
    u32 words[2][4];  // of the lane's two rows, by eights of columns
    u32 a[2][8];      // 16 columns, then the next
    float d[2][SUMS], acc[2][SUMS];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < SUMS; i++) acc[0][i] = acc[1][i] = 0.f;
    }

    template <int W> __device__ __forceinline__ void take(u32 stage, const Place& place) {  // W: the first half of the planes, or the second
#pragma unroll
        for (int b = 0; b < 4; b++)
#pragma unroll
            for (int h = 0; h < 2; h++) words[h][b] = take4(((stage + place.words) ^ (b << 5)) + h * (HIGH * 128) + W * 4);
    }

    template <int P> __device__ __forceinline__ void unpack() {  // nibbles P of two columns: a quarter of what they stand for
#pragma unroll
        for (int b = 0; b < 4; b++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32& w = words[h][b];
                if constexpr (P % 4 == 2) w >>= 8;
                u32& to = a[P % 2][b * 2 + h];
                if constexpr (P % 2 == 0) to = fma2(and_or<0x000F000F>(w, 0x43004300), 0x3E803E80, OFFSET ? 0xC208C208 : 0xC200C200);
                else to = fma2(w & 0x00F000F0, 0x7F007F00, OFFSET ? 0xC000C000 : 0);  // above: (128 + q) / 4 - 34 or - 32
            }
    }

    template <int P, int S> __device__ __forceinline__ void send(u64 x) {  // S: which half of the tokens
        begin_multiplying();
        multiply_all<P % PER != 0>(d[S], a[P % 2], x + S * X_STEP + P % 2 * 4);
        multiply_all<true>(d[S], a[P % 2] + 4, x + S * X_STEP + P % 2 * 4 + 2);
        end_batch();
    }

    template <int P> __device__ __forceinline__ Factors factors(u32 stage, const Place& place) const {
        Factors f = {0.f, 0.f, 0.f, 0.f};
        if constexpr (P % PER == PER - 1) {
            constexpr int G = P / PER;
            const u32 pair = stage + place.scales + G / 2 * 4;
            f.low = number(take4(pair), G), f.high = number(take4(pair + HIGH * 4 * PAIRS), G);
            if constexpr (ZERO_POINT)
                f.zero_point_low = number(take4(pair + SCALES), G) * 0.25f, f.zero_point_high = number(take4(pair + SCALES + HIGH * 4 * PAIRS), G) * 0.25f;
        }
        return f;
    }

    template <int P, int S> __device__ __forceinline__ void fold(const Factors& f, u32 stage, const Place& place) {
        if constexpr (P % PER == PER - 1) {
            float(&sums)[SUMS] = acc[S];
#pragma unroll
            for (int j = 0; j < SUMS; j += 4) {
                sums[j] = fmaf(d[S][j], f.low, sums[j]), sums[j + 1] = fmaf(d[S][j + 1], f.low, sums[j + 1]);
                sums[j + 2] = fmaf(d[S][j + 2], f.high, sums[j + 2]), sums[j + 3] = fmaf(d[S][j + 3], f.high, sums[j + 3]);
                if constexpr (ZERO_POINT) {
                    const uint2 v = take8(stage + place.totals + (P / PER * TOKENS + S * (TOKENS / 2) + j * 2) * 4);
                    const float s = __uint_as_float(v.x), r = __uint_as_float(v.y);
                    sums[j] = fmaf(f.zero_point_low, s, sums[j]), sums[j + 1] = fmaf(f.zero_point_low, r, sums[j + 1]);
                    sums[j + 2] = fmaf(f.zero_point_high, s, sums[j + 2]), sums[j + 3] = fmaf(f.zero_point_high, r, sums[j + 3]);
                }
            }
        }
    }
};

struct Rings {
    XRing x;
    WRing w;
};

// Planes P and on of a chunk; plane P is unpacked. before: the factors of the plane before, whose second half is under way. more: a chunk follows.
template <int P> __device__ __forceinline__ void planes(Tile& t, Rings& rings, u32 read, const Factors& before, bool more, const Place& place) {
    const u32 stage = rings.w.stage();
    if constexpr (P % 2 == 0) barrier_wait(rings.x.full(), rings.x.phase);
    const u64 x = swizzled_matrix(rings.x.stage());
    t.template send<P, 0>(x);
    if constexpr (P > 0) {
        wait_batches<1>(t.d[1]);
        t.template fold<P - 1, 1>(before, stage, place);
        if (P % 2 == 0 && place.lane < 2) barrier_arrive(read, place.lane);
    }
    t.template send<P, 1>(x);
    if constexpr (P % 2 == 1) read = rings.x.empty(), rings.x.next();
    if constexpr (P == 3) t.template take<1>(stage, place);
    if constexpr (P + 1 < PLANES) t.template unpack<P + 1>();
    else if (more) {
        WRing next = rings.w;
        next.next();
        barrier_wait(next.full(), next.phase);
        t.template take<0>(next.stage(), place);
        t.template unpack<0>();
    }
    const Factors f = t.template factors<P>(stage, place);
    wait_batches<1>(t.d[0]);
    t.template fold<P, 0>(f, stage, place);
    if constexpr (P + 1 < PLANES) {
        planes<P + 1>(t, rings, read, f, more, place);
    } else {
        wait_batches<0>(t.d[1]);
        t.template fold<P, 1>(f, stage, place);
        if (place.lane < 2) barrier_arrive(read, place.lane);
    }
}

// The sums of spans, by lane: in shared memory those of a block's own spans, in global memory those that other blocks add up.

__device__ __forceinline__ void add_span(Tile& t, u32 room, bool first, bool last) {
#pragma unroll
    for (int i = 0; i < SUMS / 2; i++) {
        float* sums = t.acc[i / (SUMS / 4)] + i % (SUMS / 4) * 4;
        const uint4 v = first ? make_uint4(0, 0, 0, 0) : take16(room + i * 512);
        sums[0] = __fadd_rn(__uint_as_float(v.x), sums[0]), sums[1] = __fadd_rn(__uint_as_float(v.y), sums[1]);
        sums[2] = __fadd_rn(__uint_as_float(v.z), sums[2]), sums[3] = __fadd_rn(__uint_as_float(v.w), sums[3]);
        if (last) continue;
        put16(room + i * 512, make_uint4(__float_as_uint(sums[0]), __float_as_uint(sums[1]), __float_as_uint(sums[2]), __float_as_uint(sums[3])));
        sums[0] = sums[1] = sums[2] = sums[3] = 0.f;
    }
}

// Whether these are the last of `splits` sums; then they are all added up.
__device__ __forceinline__ bool add_spans(Tile& t, float4* room, int* semaphore, int split, int splits, int lane) {
#pragma unroll
    for (int i = 0; i < SUMS / 2; i++) {
        const float* sums = t.acc[i / (SUMS / 4)] + i % (SUMS / 4) * 4;
        __stcg(room + (split * (SUMS / 2) + i) * 32 + lane, make_float4(sums[0], sums[1], sums[2], sums[3]));
    }
    __syncwarp();
    int done = 0;
    if (lane == 0) done = count_one(semaphore);
    if (__shfl_sync(~0u, done, 0) != splits - 1) return false;
    __syncwarp();
    if (lane == 0) *semaphore = 0;
    t.clear();
#pragma unroll 1
    for (int s = 0; s < splits; s++)
#pragma unroll
        for (int i = 0; i < SUMS / 2; i++) {
            float* sums = t.acc[i / (SUMS / 4)] + i % (SUMS / 4) * 4;
            const float4 v = __ldcg(room + (s * (SUMS / 2) + i) * 32 + lane);
            sums[0] = __fadd_rn(sums[0], v.x), sums[1] = __fadd_rn(sums[1], v.y), sums[2] = __fadd_rn(sums[2], v.z), sums[3] = __fadd_rn(sums[3], v.w);
        }
    return true;
}

// A warp's sums: 16 rows of the weight of TOKENS tokens, eight tokens by eight columns at a time.
__device__ __forceinline__ void store(const Tile& t, const Problem& p, u16* out, int tile, int token, const Place& place) {
    const int width = GATED ? p.n / 2 : p.n, column = GATED ? tile * 32 + place.warp % 4 * 8 : tile * 64 + place.warp % 4 * 16;
    auto put = [&](int row, int at, uint4 v) {
        if (row < p.m && at < width) *(uint4*)(out + (i64)row * width + at) = v;
    };
#pragma unroll
    for (int q = 0; q < 2 * NT; q += 2 * PIECES) {  // eights of tokens; two or four of them are four matrices
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int j = min(q + (GATED ? i : i / 2), 2 * NT - 1), h = GATED ? 0 : i % 2 * 2;
            const float* sums = t.acc[j / NT] + j % NT * 4;
            float two[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                two[e] = __fmul_rn(sums[h + e], 4.f);
                if constexpr (GATED) two[e] = __fmul_rn(rounded(activate(rounded(two[e]))), rounded(__fmul_rn(sums[2 + e], 4.f)));
            }
            v[i] = transposed(bfloats_of(two[0], two[1]));
        }
        const int eight = q + (GATED ? place.c : place.c / 2), row = token + eight * 8 + (place.lane >> 2);
        const uint4 whole = gathered(v, place.c);
        if (eight < 2 * NT) put(row, column + (GATED ? 0 : place.c % 2 * 8), whole);
    }
}

__device__ __forceinline__ void multiply_parts(Rings rings, u32 spans_at, float4* part, int* semaphores, u16* out, const Problem& p, int rank, const Place& place) {
    const Work work(p);
    Tile t;
    for (int i = 0; i < work.count; i++) {
        const Part at = work[i];
        t.clear();
        barrier_wait(rings.w.full(), rings.w.phase);
        t.template take<0>(rings.w.stage(), place);
        t.template unpack<0>();
        for (int k = 1, done = 0; k <= at.count; k++, rings.w.next()) {
            planes<0>(t, rings, 0, {}, k < at.count, place);
            __syncwarp();  // all lanes have read the weights
            if (place.lane == 0) barrier_arrive(rings.w.empty(), rank);
            if (SPANS == 1 && (k == done + p.span || k == at.count)) {
                add_span(t, spans_at + (place.warp * (SUMS / 2) * 32 + place.lane) * 16, done == 0, k == at.count);
                done = k;
            }
        }
        if constexpr (SPANS == 2) {
            const int mine = (at.tile * 2 + rank) * WARPS + place.warp;
            if (!add_spans(t, part + (i64)mine * p.splits * (SUMS / 2 * 32), semaphores + mine, at.split, p.splits, place.lane)) continue;
        }
        store(t, p, out, at.a + rank * 2 + place.warp / 4, at.b, place);
    }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
w4a16_gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap words, const char* scales, const char* zero_points, const float* sums,
           u16* out, float4* part, int* semaphores, const __grid_constant__ Problem p) {
    const int warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31, rank = blockIdx.x & 1;
    const u32 base = (shared_room() + 1023) & ~1023;
    Rings rings = {{base}, {base + W_AT}};
    if (threadIdx.x == 0) {
        for (int i = 0; i < X_STAGES; i++, rings.x.next()) barrier_init(rings.x.full(), 1), barrier_init(rings.x.empty(), 2 * WARPS);
        for (int i = 0; i < W_STAGES; i++, rings.w.next()) barrier_init(rings.w.full(), 1), barrier_init(rings.w.empty(), WARPS);
        show_barriers();
    }
    rings.x.slot = rings.x.phase = rings.w.slot = rings.w.phase = 0;
    cluster_sync();
    pdl_trigger();
    if (warp < 4) {
        give_registers<40>();
        if (warp == 0 && lane == 0) pdl_wait(), fetch_x(rings.x, x, p, rank);
        if (warp == 1 && lane == 0) {
            if constexpr (ZERO_POINT) pdl_wait();  // no kernel writes weights: they are fetched while the previous kernel still runs
            fetch_w(rings.w, words, {scales, zero_points}, sums, p, rank);
        }
    } else {
        take_registers<232>();
        pdl_wait();
        multiply_parts(rings, base + SPAN_SUMS_AT, part, semaphores, out, p, rank, Place(warp - 4, lane));
    }
    __syncwarp();
    cluster_sync();  // no block exits while the other one's bytes and arrivals are in flight
}
