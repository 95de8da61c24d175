// Units of work: a warp takes 16 rows of the weight over one span of its columns. Which warp takes which (`Deal`), chunks in flight (`Ring`), x in
// shared memory (`X`), and a warp's work on the units of one product (`multiply_units`). Code: one of codes.cuh.
//
// Given when compiled: TOKENS 4 or 8; WARPS of a block; ACT (activate.cuh).
#ifndef OUTRIDER_UNITS
#define OUTRIDER_UNITS
#include "lora.cuh"

struct Shape {
    int m, n, k, chunks, span, splits, tiles, x_stride;
    u32 magic;                // 2^32 / tiles, rounded up
    int longs, more_longs;    // units of whole spans that each block takes, and how many of the last blocks take one more
    int shorts, more_shorts;  // units of a last span that is shorter; how many of the first blocks take one more
    int rest;                 // chunks of that span
};

struct Place { int split, tile, first, count; };  // a unit: its span, its rows, its chunks

// What a block does: units [first_long, + longs) of whole spans, then units [first_short, + shorts) of the last span where that is shorter.
struct Deal {
    int first_long, longs, first_short, shorts;
    __device__ __forceinline__ Deal(const Shape& p) {
        const int b = blockIdx.x, late_from = gridDim.x - p.more_longs;
        first_long = b * p.longs + max(0, b - late_from);
        longs = p.longs + (b >= late_from);
        first_short = b * p.shorts + min(b, p.more_shorts);
        shorts = p.shorts + (b < p.more_shorts);
    }
    __device__ __forceinline__ int count() const { return longs + shorts; }
    __device__ __forceinline__ Place at(const Shape& p, int i) const {
        Place u;
        if (i < longs) {
            u.split = __umulhi(first_long + i, p.magic);
            u.tile = first_long + i - u.split * p.tiles;
            u.count = p.span;
        } else {
            u.split = p.splits - 1, u.tile = first_short + i - longs, u.count = p.rest;
        }
        u.first = u.split * p.span;
        return u;
    }
};

// The lane's row of a unit's first chunk, among all rows of all chunks. Gated: the lower 8 rows of a unit are the gate's, the upper ones up's.
template <bool Gated> __device__ __forceinline__ u32 row_of(const Shape& p, const Place& u, const Lane& lane) {
    const int a = u.tile * (Gated ? 8 : 16);
    return ((u32)(a >> 6) * p.chunks + u.first) * 64 + (a & 63) + lane.g;
}

// The units of one product that a warp takes, one after the other. A ring asks its source for the next unit: `enter` gives the lane's row in
// its first chunk and how many chunks it has, or leaves both where there is none; `weights` where they lie.
template <bool Gated> struct OneProduct {
    const Shape& p;
    const Deal& deal;
    const Weights& weights;
    int ahead, units;  // the unit that is fetched
    __device__ __forceinline__ void enter(u32& row, int& left, const Lane& lane) const {
        if (ahead < units) {
            const Place u = deal.at(p, ahead);
            row = row_of<Gated>(p, u, lane), left = u.count;
        }
    }
    __device__ __forceinline__ void advance() { ahead += WARPS; }
};

// A warp's own two stages of shared memory: while one chunk is multiplied the next one is on its way. Every lane takes back what it fetched
// itself, factors aside, so no warp waits for another.
template <class Code, class Source> struct Ring {
    static constexpr u32 BYTES = 2 * Code::STAGE;  // of a warp
    Source& source;
    const Lane& lane;
    const u32 mine, pairs;   // of the first stage: the lane's words, the rows' factors
    u32 row = 0, stage = 0;  // the lane's lower row in the chunk that is fetched next; where the next chunk is taken from
    int left = 0;            // chunks of the unit that are still to be fetched
    __device__ __forceinline__ Ring(Source& from, u32 at, const Lane& of)
        : source(from), lane(of), mine(at + of.index * 16), pairs(at + Code::WORDS) {}
    __device__ __forceinline__ void fetch(u32 into) {
        if (left > 0) {
            Code::copy(mine + into, pairs + into, source.weights, row, lane);
            row += 64;
            if (--left == 0) source.advance(), source.enter(row, left, lane);
        }
    }
    __device__ __forceinline__ void start() {
        source.enter(row, left, lane);
        fetch(0);
    }
    __device__ __forceinline__ void next(typename Code::Chunk& k) {  // takes a chunk and sets off the one after
        wait_copies();
        __syncwarp();  // factors were fetched by other lanes; and all have read the stage that is filled next
        Code::take(k, mine + stage, pairs + stage, lane);
        stage = Code::STAGE - stage;
        fetch(stage);
    }
};

__device__ __forceinline__ float lower_of(u32 pair) { return __uint_as_float(pair << 16); }  // of two bfloat16

__device__ __forceinline__ float upper_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// The columns of x that a block needs, in shared memory, and their sums by group: tokens one after the other, then the sums.
template <class Code> struct X {
    static constexpr int BYTES = Code::COLUMNS * 2;  // of a chunk
    u32 base, totals;
    int long_from, long_chunks, chunks, token_bytes;  // chunks [long_from, + long_chunks) of x, then those of the last span
    __device__ __forceinline__ X(const Shape& p, const Deal& deal, u32 at) : base(at) {
        long_from = __umulhi(deal.first_long, p.magic) * p.span;
        long_chunks = deal.longs ? (__umulhi(deal.first_long + deal.longs - 1, p.magic) + 1) * p.span - long_from : 0;
        chunks = long_chunks + (deal.shorts ? p.rest : 0), token_bytes = chunks * BYTES + 64;
        totals = base + p.m * token_bytes;
    }
    __device__ __forceinline__ int chunk(const Shape& p, int i) const {  // of x, the block's i-th
        return i < long_chunks ? long_from + i : p.chunks - p.rest + i - long_chunks;
    }
    static constexpr int PIECES = Code::COLUMNS / 8;
    __device__ __forceinline__ void lay(const Shape& p, const char* x) const {  // the whole block; a barrier follows
        for (int j = threadIdx.x; j < chunks * PIECES; j += WARPS * 32) {
            const int column = chunk(p, (u32)j / PIECES) * Code::COLUMNS + (u32)j % PIECES * 8;
            const char* from = x + (i64)column * 2;
            uint4 v[TOKENS];
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                v[t] = make_uint4(0, 0, 0, 0);
                if (t < p.m && column < p.k) v[t] = __ldcg((const uint4*)(from + (i64)t * p.x_stride * 2));
            }
            const u32 to = Code::place(base, j);
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
                if (t < p.m) {
                    if constexpr (Code::HAS_ZERO_POINT) total(v[t], j, t);
                    Code::laid(v[t], j);
                    put8(to + t * token_bytes, v[t].x, v[t].y);
                    put8(to + t * token_bytes + 16, v[t].z, v[t].w);
                }
        }
    }
    // A group's sum from the lanes that hold it, eight neighbours each, as `sums_kernel` of ops/triton/quant.py adds: the eight in order, then
    // lanes half a group apart, a quarter, and so on.
    __device__ __forceinline__ void total(const uint4& v, int j, int t) const {
        constexpr int LANES = PIECES / Code::GROUPS;
        static_assert(PIECES % 32 == 0, "a warp has whole chunks, so all its lanes are here");
        float sum = __fadd_rn(lower_of(v.x), upper_of(v.x));
        sum = __fadd_rn(__fadd_rn(sum, lower_of(v.y)), upper_of(v.y));
        sum = __fadd_rn(__fadd_rn(sum, lower_of(v.z)), upper_of(v.z));
        sum = __fadd_rn(__fadd_rn(sum, lower_of(v.w)), upper_of(v.w));
#pragma unroll
        for (int apart = LANES / 2; apart > 0; apart /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, apart));
        if (j % LANES == 0) put_float(totals + (j / LANES * TOKENS + t) * 4, sum);
    }
};

struct Result {
    u16* out;     // [m, n], or [m, n / 2]
    float* part;  // [tiles, splits, TOKENS, 16]
    int* semaphores;    // [tiles]: spans that are done
    const Lora& lora;   // what is added before it is stored
};

__device__ __forceinline__ void store(u16* out, float v) { *out = bfloat_of(v); }

// Whether the warp, its own sums written, is the last of `splits` that come here: then the others' can be read, and the count is 0 again.
__device__ __forceinline__ bool last_of(int* semaphores, int splits, const Lane& lane) {
    __syncwarp();
    int done = 0;
    if (lane.index == 0) done = count_one(semaphores);
    if (__shfl_sync(~0u, done, 0) != splits - 1) return false;
    __syncwarp();
    if (lane.index == 0) *semaphores = 0;
    return true;
}

// A unit's sums: kept, or, by the last warp of these rows, added to those of the other spans, in order, and stored.
template <bool Gated>
__device__ __forceinline__ void finish_unit(float (&acc)[SUMS], const Shape& p, const Place& u, const Result& to, const Lane& lane, int token, Range range) {
    const int g = lane.g, split = u.split, tile = u.tile, low = tile * (Gated ? 8 : 16), high = Gated ? p.n / 2 + low : low + 8;
    float* whole = to.part + (i64)tile * p.splits * (TOKENS * 16) + token * 16 + g;
    if (p.splits > 1) {
        float* own = whole + split * (TOKENS * 16);
#pragma unroll
        for (int a = 0; a < SUMS / 2; a++) __stcg(own + a * 16, acc[a]), __stcg(own + a * 16 + 8, acc[a + SUMS / 2]);
        if (!last_of(to.semaphores + tile, p.splits, lane)) return;
    }
    const TileB b(to.lora, range, p.n, low, high, lane);  // on its way while spans are added
    if (p.splits > 1) {
#pragma unroll
        for (int a = 0; a < SUMS; a++) acc[a] = 0.f;
        for (int s = 0; s < p.splits; s += 8) {  // eight spans' loads fly together
            float v[8][SUMS];
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float* from = whole + min(s + j, p.splits - 1) * (TOKENS * 16);
#pragma unroll
                for (int a = 0; a < SUMS / 2; a++) v[j][a] = __ldcg(from + a * 16), v[j][a + SUMS / 2] = __ldcg(from + a * 16 + 8);
            }
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (s + j < p.splits)
#pragma unroll
                    for (int a = 0; a < SUMS; a++) acc[a] = __fadd_rn(acc[a], v[j][a]);
        }
    }
    if constexpr (RANK > 0) {
        float delta[4];
        lowrank_delta<1, Gated>(delta, b, to.lora, range, p.m, low, high, TOKENS == 8 ? g : g / 2, lane);
#pragma unroll
        for (int a = 0; a < SUMS / 2; a++) acc[a] = changed(acc[a], delta[a]), acc[a + SUMS / 2] = changed(acc[a + SUMS / 2], delta[a + 2]);
    }
#pragma unroll
    for (int a = 0; a < SUMS / 2; a++) {
        if (token + a >= p.m) break;
        const float lower = acc[a], upper = acc[a + SUMS / 2];
        if constexpr (Gated) {
            store(to.out + (i64)(token + a) * (p.n / 2) + tile * 8 + g, __fmul_rn(rounded(activate(rounded(lower))), rounded(upper)));
        } else {
            store(to.out + (i64)(token + a) * p.n + tile * 16 + g, lower);
            store(to.out + (i64)(token + a) * p.n + tile * 16 + g + 8, upper);
        }
    }
}

// Asks for B of the rows of a warp's i-th unit.
template <bool Gated> __device__ __forceinline__ void prefetch_unit_b(const Lora& lora, Range range, const Shape& p, const Deal& deal, int i, const Lane& lane) {
    const Place u = deal.at(p, i);
    const int low = u.tile * (Gated ? 8 : 16);
    if (u.split == 0) prefetch_b(lora, range, p.n, low, Gated ? p.n / 2 + low : low + 8, lane);
}

// A warp's units of one product: its chunks come out of the ring in the order in which the source gave them.
template <class Code, bool Gated, class Source>
__device__ __forceinline__ void multiply_units(Ring<Code, Source>& ring, const Shape& p, const Deal& deal, const X<Code>& x, const Result& to, Range range) {
    // Tokens are columns of the matrix instruction: of 4 the even ones (the odd ones repeat them, and are not stored), so that half of the sums
    // need no work. Columns of tokens that are not there repeat the last one.
    const Lane& lane = ring.lane;
    const int g = lane.g, c = lane.c, token = TOKENS == 8 ? 2 * c : c, units = deal.count();
    u32 x_lane = x.base + min(TOKENS == 8 ? g : g / 2, p.m - 1) * x.token_bytes + c * 16, totals_lane = x.totals + token * 4;
    pin(x_lane, totals_lane);
    int i = threadIdx.x >> 5, n;  // the unit that is multiplied, chunks of it to come
    u32 at, sum_at;
    float acc[Code::HELD], lower = 0.f, upper = 0.f;  // factors of the lane's two rows
    auto begin = [&]() {
        const Place u = deal.at(p, i);
        n = u.count;
        const int x_at = i < deal.longs ? u.first - x.long_from : x.long_chunks;
        at = x_lane + x_at * X<Code>::BYTES, sum_at = totals_lane + x_at * (Code::GROUPS * TOKENS * 4);
#pragma unroll
        for (int a = 0; a < Code::HELD; a++) acc[a] = 0.f;
        if constexpr (Code::FACTORED) {
            const int row = u.tile * (Gated ? 8 : 16) + g;
            lower = __ldg(ring.source.weights.factors + row), upper = __ldg(ring.source.weights.factors_high + row);
        }
    };
    if (i >= units) return;
    begin();
    while (true) {
        typename Code::Chunk k;
        ring.next(k);
        Code::add(acc, k, at, sum_at);
        at += X<Code>::BYTES, sum_at += Code::GROUPS * TOKENS * 4;
        if (--n > 0) continue;
        float sums[SUMS];
        Code::close(sums, acc, lower, upper);
        finish_unit<Gated>(sums, p, deal.at(p, i), to, lane, token, range);
        i += WARPS;
        if (i >= units) break;
        if constexpr (RANK > 0) prefetch_unit_b<Gated>(to.lora, range, p, deal, i, lane);
        begin();
    }
}
#endif
