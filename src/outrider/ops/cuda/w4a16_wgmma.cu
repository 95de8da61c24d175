// y = x · wᵀ for 9 to 40 tokens and weights of four bits: the layout, the arithmetic and the order of sums of ops/triton/quant.py, so its bits.
//
// A block takes units of 16 rows over one span of columns, TILES of them per warp at a time, and processes the span chunk by chunk: all its
// warps multiply the same 256 columns of x, which lie in shared memory in the layout of wgmma, while the next
// chunks of x and of the weights are in flight. Four units are the 64 rows of wgmma, so a weight is unpacked once for all tokens.
// Its sums of a group are multiplied by the rows' scales and added up while the other tile's product runs.
//
// An odd nibble becomes a quarter of its value in one instruction less (values.cuh), so all of them do here, and so do all sums until a unit is
// done: powers of 2 change no digit.
//
// Given when compiled: NT, tokens by eights; WARPS of a block, a multiple of 4; TILES of a warp, 1 or 2; STAGES of shared memory; OFFSET 8 or 0:
// subtracted from a nibble; HALF: factors are float16, else bfloat16; PER: planes of 32 columns that share one; ZERO_POINT: they have an offset;
// GATED: half of the rows are gates; ACT (units.cuh); RANK (lora.cuh).
#define TOKENS (8 * NT)
#include "units.cuh"
#include "warpgroup.cuh"

constexpr int COLUMNS = 256, PLANES = 8, GROUPS = PLANES / PER, PAIRS = (GROUPS + 1) / 2, SLOTS = WARPS * TILES;
constexpr int WORDS = 2048, UNIT = WORDS + 64 * PAIRS * (1 + ZERO_POINT);  // bytes: a chunk's words of 16 rows, then their factors, then their offsets
constexpr int PIECE = 128, PLANE = NT * 4 * PIECE;                   // x: 8 columns of 8 tokens (`matrix_at`); all tokens' of a plane
constexpr int X_AT = SLOTS * UNIT, TOTALS_AT = X_AT + PLANES * PLANE, STAGE = TOTALS_AT + (ZERO_POINT ? GROUPS * TOKENS * 4 : 0);

struct Cut {
    int m, n, k, chunks, span, splits, tiles, x_stride, sums_stride;
    int longs, per;  // whole spans, and blocks that each of them has; those that are left have the last span where it is shorter
};

// A block's work: `units` tiles of 16 rows from `first` on, over `count` chunks from `from` on; `at_once` of them at a time, in `passes` passes.
struct Work {
    int split, first, units, from, count, passes, at_once;
    __device__ __forceinline__ Work(const Cut& p) {
        const int b = blockIdx.x, rest = p.longs * p.per;
        split = min(b / p.per, p.longs);
        const int place = b - split * p.per, blocks = split < p.longs ? p.per : gridDim.x - rest;
        first = place * p.tiles / blocks, units = split < p.splits ? (place + 1) * p.tiles / blocks - first : 0;
        from = split * p.span, count = min(p.span, p.chunks - from);
        passes = (units + SLOTS - 1) / SLOTS, at_once = (units + max(passes, 1) - 1) / max(passes, 1);
    }
    __device__ __forceinline__ int unit(int pass, int slot) const {  // its tile, or -1: none
        const int u = pass * at_once + slot;
        return slot < at_once && u < units ? first + u : -1;
    }
};

// A row's 128 bytes lie in shared memory by 32s, in an order that changes from row to row, so that the lanes of an instruction find them in
// different banks.
__device__ __forceinline__ u32 turned(int row, int eight) { return row * 128 + ((eight ^ (row & 3)) << 5); }

__device__ __forceinline__ void copy_unit(u32 to, const Weights& w, int tile, int chunk, const Cut& p, const Lane& lane) {
    const int a = tile * (GATED ? 8 : 16), i = lane.index;
    const u32 row = ((u32)(a >> 6) * p.chunks + chunk) * 64 + (a & 63);  // the unit's first one, among all rows of all chunks
    const char *low = w.words + (u64)row * 128 + i * 16, *high = w.words_high + (u64)row * 128 + i * 16;
    const u32 mine = to + turned(i >> 3, (i >> 1) & 3) + (i & 1) * 16;
    copy16_once(mine, low), copy16_once(mine + 512, low + 512), copy16_once(mine + 1024, high), copy16_once(mine + 1536, high + 512);
    if (i < 16) {
        const u64 place = (u64)(row + (i & 7)) * (4 * PAIRS);
        copy_few<4 * PAIRS>(to + WORDS + i * (4 * PAIRS), (i & 8 ? w.scales_high : w.scales) + place);
        if constexpr (ZERO_POINT) copy_few<4 * PAIRS>(to + WORDS + (16 + i) * (4 * PAIRS), (i & 8 ? w.lifts_high : w.lifts) + place);
    }
}

// By the whole block. A warp's copy is a plane of 8 tokens; tokens that are not there repeat the last one, columns that are not there are 0.
__device__ __forceinline__ void copy_x(u32 stage, const char* x, const float* sums, int chunk, const Cut& p, const Lane& lane) {
    const int t = lane.index & 7, eight = lane.index >> 3;
#pragma unroll
    for (int i = 0; i < (NT * PLANES + WARPS - 1) / WARPS; i++) {
        const int piece = i * WARPS + (threadIdx.x >> 5), plane = piece & 7, tokens = piece >> 3;
        if (tokens < NT) {
            const int column = chunk * COLUMNS + plane * 32 + eight * 8;
            const u32 to = stage + X_AT + plane * PLANE + (eight * NT + tokens) * PIECE + t * 16;
            copy16_or_zeros(to, x + ((i64)min(tokens * 8 + t, p.m - 1) * p.x_stride + min(column, p.k - 8)) * 2, column < p.k ? 16 : 0);
        }
    }
    if constexpr (ZERO_POINT) {
        for (int i = threadIdx.x; i < GROUPS * TOKENS / 4; i += WARPS * 32) {
            const int group = i / (TOKENS / 4), token = i % (TOKENS / 4) * 4;
            copy16(stage + TOTALS_AT + i * 16, (const char*)(sums + (i64)(chunk * GROUPS + group) * p.sums_stride + token));
        }
    }
}

struct Factors { float low, high, zero_point_low, zero_point_high; };  // of a group, in the lane's two rows

__device__ __forceinline__ float number(u32 pair, int group) {
    if constexpr (HALF) return float_of_half((u16)(group % 2 ? pair >> 16 : pair));
    else return __uint_as_float(group % 2 ? pair & 0xFFFF0000u : pair << 16);
}

// Of a warp's unit what a lane has: words of the chunk at hand, the product of the group at hand, sums.
struct Tile {
    u32 at;              // of the chunk in shared memory
    u32 words[2][4][2];  // of rows g and g + 8, by eights of columns: of the first half of the planes and of the second
    u32 a[8];            // a plane of them as the instruction takes it: 16 columns, then the next
    float d[4 * NT], acc[4 * NT];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4 * NT; i++) acc[i] = 0.f;
    }

    __device__ __forceinline__ void take(u32 from, const Lane& lane) {
        at = from;
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int b = 0; b < 4; b++) {
                const uint2 v = take8(at + h * 1024 + turned(lane.g, b) + lane.c * 8);
                words[h][b][0] = v.x, words[h][b][1] = v.y;
            }
    }

    template <int P> __device__ __forceinline__ void unpack() {  // nibbles P of two columns: a quarter of what they stand for
#pragma unroll
        for (int b = 0; b < 4; b++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32& w = words[h][b][P / 4];
                if constexpr (P % 4 == 2) w >>= 8;
                if constexpr (P % 2 == 0) a[b * 2 + h] = fma2(and_or<0x000F000F>(w, 0x43004300), 0x3E803E80, OFFSET ? 0xC208C208 : 0xC200C200);
                else a[b * 2 + h] = fma2(w & 0x00F000F0, 0x7F007F00, OFFSET ? 0xC000C000 : 0);  // above: (128 + q) / 4 - 34 or - 32
            }
    }

    template <int P> __device__ __forceinline__ void send(u64 xs) {
        begin_multiplying();
        multiply_all<P % PER != 0>(d, a, xs + P * (PLANE / 16));
        multiply_all<true>(d, a + 4, xs + P * (PLANE / 16) + PLANE / 32);
        end_batch();
    }

    template <int P> __device__ __forceinline__ Factors factors(const Lane& lane) const {
        Factors f = {0.f, 0.f, 0.f, 0.f};
        if constexpr (P % PER == PER - 1) {
            constexpr int G = P / PER;
            const u32 pair = at + WORDS + lane.g * (4 * PAIRS) + G / 2 * 4;
            f.low = number(take4(pair), G), f.high = number(take4(pair + 32 * PAIRS), G);
            if constexpr (ZERO_POINT) f.zero_point_low = number(take4(pair + 64 * PAIRS), G) * 0.25f, f.zero_point_high = number(take4(pair + 96 * PAIRS), G) * 0.25f;
        }
        return f;
    }

    template <int P> __device__ __forceinline__ void fold(const Factors& f, u32 totals, const Lane& lane) {
        if constexpr (P % PER == PER - 1) {
#pragma unroll
            for (int j = 0; j < 4 * NT; j += 4) {
                acc[j] = fmaf(d[j], f.low, acc[j]), acc[j + 1] = fmaf(d[j + 1], f.low, acc[j + 1]);
                acc[j + 2] = fmaf(d[j + 2], f.high, acc[j + 2]), acc[j + 3] = fmaf(d[j + 3], f.high, acc[j + 3]);
                if constexpr (ZERO_POINT) {
                    const uint2 v = take8(totals + (P / PER * TOKENS + j * 2 + lane.c * 2) * 4);
                    const float s = __uint_as_float(v.x), r = __uint_as_float(v.y);
                    acc[j] = fmaf(f.zero_point_low, s, acc[j]), acc[j + 1] = fmaf(f.zero_point_low, r, acc[j + 1]);
                    acc[j + 2] = fmaf(f.zero_point_high, s, acc[j + 2]), acc[j + 3] = fmaf(f.zero_point_high, r, acc[j + 3]);
                }
            }
        }
    }
};

// Planes P and on of a chunk. The first plane of the first tile is unpacked.
template <int P> __device__ __forceinline__ void planes(Tile (&t)[TILES], u64 xs, u32 totals, const Lane& lane) {
    Tile &one = t[0], &other = t[TILES - 1];
    one.template send<P>(xs);
    if constexpr (TILES == 2) {
        if constexpr (P > 0) {
            const Factors f = other.template factors<P - 1>(lane);
            wait_batches<1>(other.d);
            other.template fold<P - 1>(f, totals, lane);
        }
        other.template unpack<P>();
        other.template send<P>(xs);
    }
    const Factors f = one.template factors<P>(lane);
    wait_batches<TILES - 1>(one.d);
    one.template fold<P>(f, totals, lane);
    if constexpr (P + 1 < PLANES) {
        one.template unpack<P + 1>();
        planes<P + 1>(t, xs, totals, lane);
    } else if constexpr (TILES == 2) {
        const Factors e = other.template factors<P>(lane);
        wait_batches<0>(other.d);
        other.template fold<P>(e, totals, lane);
    }
}

// A unit's sums: kept, or, by the last warp of these rows, added to those of the other spans, in order, and stored.
__device__ __forceinline__ void finish(float (&acc)[4 * NT], const Cut& p, int split, int tile, const Result& to, const Lane& lane, Range range) {
    const int low = tile * (GATED ? 8 : 16), high = GATED ? p.n / 2 + low : low + 8;
#pragma unroll
    for (int i = 0; i < 4 * NT; i++) acc[i] *= 4.f;
    float4* whole = (float4*)to.part + (i64)tile * p.splits * (NT * 32) + lane.index;  // [tiles, splits, NT, lanes]
    if (p.splits > 1) {
#pragma unroll
        for (int j = 0; j < NT; j++)
            __stcg(whole + (split * NT + j) * 32, make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]));
        if (!last_of(to.semaphores + tile, p.splits, lane)) return;
    }
    const TileB b(to.lora, range, p.n, low, high, lane);  // on its way while spans are added
    if (p.splits > 1) {
#pragma unroll
        for (int i = 0; i < 4 * NT; i++) acc[i] = 0.f;
        constexpr int AT_ONCE = RANK ? 2 : 3;  // spans whose loads fly together
        for (int s = 0; s < p.splits; s += AT_ONCE) {
            float4 v[AT_ONCE][NT];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
                for (int j = 0; j < NT; j++) v[i][j] = __ldcg(whole + (min(s + i, p.splits - 1) * NT + j) * 32);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (s + i < p.splits)
#pragma unroll
                    for (int j = 0; j < NT; j++) {
                        acc[4 * j] = __fadd_rn(acc[4 * j], v[i][j].x), acc[4 * j + 1] = __fadd_rn(acc[4 * j + 1], v[i][j].y);
                        acc[4 * j + 2] = __fadd_rn(acc[4 * j + 2], v[i][j].z), acc[4 * j + 3] = __fadd_rn(acc[4 * j + 3], v[i][j].w);
                    }
        }
    }
    if constexpr (RANK > 0) {
        float delta[4 * NT];
        lowrank_delta<NT, GATED>(delta, b, to.lora, range, p.m, low, high, lane.g, lane);
#pragma unroll
        for (int i = 0; i < 4 * NT; i++) acc[i] = changed(acc[i], delta[i]);
    }
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = j * 8 + lane.c * 2 + i;
            const float lower = acc[4 * j + i], upper = acc[4 * j + 2 + i];
            if (token >= p.m) continue;
            if constexpr (GATED) {
                store(to.out + (i64)token * (p.n / 2) + tile * 8 + lane.g, __fmul_rn(rounded(activate(rounded(lower))), rounded(upper)));
            } else {
                store(to.out + (i64)token * p.n + tile * 16 + lane.g, lower);
                store(to.out + (i64)token * p.n + tile * 16 + lane.g + 8, upper);
            }
        }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
w4a16_wgmma(const char* x, const float* sums, u16* out, float* part, int* semaphores, const __grid_constant__ Weights weights, const __grid_constant__ Cut p,
            const __grid_constant__ Lora lora) {
    const u32 base = shared_room();
    const int index = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const Lane lane = {index, index >> 2, index & 3};
    const Work work(p);
    if (work.units == 0) return;

    int ahead = 0, ahead_pass = 0;  // the chunk that is fetched next
    auto copy_units = [&](u32 stage) {
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const int slot = i * WARPS + warp, tile = work.unit(ahead_pass, slot);
            if (ahead_pass < work.passes && tile >= 0) copy_unit(stage + slot * UNIT, weights, tile, work.from + ahead, p, lane);
        }
    };
    auto advance = [&]() {
        if (++ahead == work.count) ahead = 0, ahead_pass++;
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) copy_units(base + s * STAGE), advance();  // no kernel writes weights: they are loaded while the previous kernel still runs
    Range range = {0};
    if constexpr (RANK > 0) {
        range = range_at(lora, index);
        for (int u = warp; work.split == 0 && u < work.units; u += WARPS) {  // one of a tile's spans asks for B
            const int low = (work.first + u) * (GATED ? 8 : 16);
            prefetch_b(lora, range, p.n, low, GATED ? p.n / 2 + low : low + 8, lane);
        }
    }
    wait_for_x(lora);
    pdl_trigger();  // all blocks have their place, so the next kernel takes none from them; what x is made of is complete
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        copy_x(base + s * STAGE, x, sums, work.from + (u32)s % work.count, p, lane);
        commit_copies();
    }

    Tile t[TILES];
    u32 stage = base, into = base + (STAGES - 1) * STAGE;
    for (int pass = 0; pass < work.passes; pass++) {
#pragma unroll
        for (int i = 0; i < TILES; i++) t[i].clear();
        for (int n = 0; n < work.count; n++) {
            wait_copies_but<STAGES - 2>();
            show_to_matrix_units();
            __syncthreads();  // this chunk is there, and all have read the one whose place the next one takes
            if (ahead_pass < work.passes) copy_units(into), copy_x(into, x, sums, work.from + ahead, p, lane), advance();
            commit_copies();
#pragma unroll
            for (int i = 0; i < TILES; i++) t[i].take(stage + (i * WARPS + warp) * UNIT, lane);
            t[0].template unpack<0>();
            planes<0>(t, matrix_at(stage + X_AT), stage + TOTALS_AT, lane);
            stage = stage == base + (STAGES - 1) * STAGE ? base : stage + STAGE;
            into = into == base + (STAGES - 1) * STAGE ? base : into + STAGE;
        }
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const int tile = work.unit(pass, i * WARPS + warp);
            if (tile >= 0) finish(t[i].acc, p, work.split, tile, {out, part, semaphores, lora}, lane, range);
        }
    }
}
