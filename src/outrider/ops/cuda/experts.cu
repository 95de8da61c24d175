// One token's experts in bytes, and the dense MLP beside them: the layout, the arithmetic and the order of sums of ops/triton/quant_moe.py and
// ops/triton/quant.py, so their bits; and the choice of ops/triton/routing.py.
//
// A tile is 16 rows of a weight. `experts_gate_up`: groups of 128 columns have factors, so a chunk's products are a sum of their own, and
// every chunk of x has a warp: it goes through the block's tiles, several of them on their way into shared memory that is its own, and leaves
// each one's sums with their factors. When all are done, a warp for each tile adds these up in order. `experts_down`: rows have factors, so a
// tile (of the dense MLP: a span of it) is one chain, and has a warp; all its chunks are on their way before the kernel ahead is done.
//
// `experts_router` gives the router's logits; which experts are chosen every warp finds out from them by itself, sooner than a launch would
// tell it.
//
// Given when compiled: ROUTER_SPAN, ROUTER_SPLITS: columns of a span of the router, spans; CHUNKS of gate_up's columns; STAGES: tiles on their way; DOWN: chunks of an expert's inner columns; DOWN_WARPS; ACT; and
// TOKENS, WARPS, which units.cuh asks for.
#include "units.cuh"

#define WORDS 2048           // bytes of 16 rows of a chunk: 4 x 16 of every lane
#define STAGE (WORDS + 64)  // then the rows' factors
#define X_BYTES 256          // of a chunk of x

struct Mixture {
    int experts, top, hidden, inner;
    int dense;                       // inner width of the dense MLP; 0: it is not beside them
    int dense_span, dense_splits;  // chunks of a span of its gate_up; spans
    int down_chunks, down_span, down_splits;  // of its down
};

// The router's logits in bfloat16 weights: the order of sums of ops/triton/linear.py. A block takes 16 experts, a warp one span of the columns,
// whose weights are all on their way before the kernel ahead is done.
#define STEPS (ROUTER_SPAN / 16)

extern "C" __global__ void __launch_bounds__(ROUTER_SPLITS * 32, 1) experts_router(const char* x, const char* w, float* z, const __grid_constant__ Mixture p) {
    const int index = threadIdx.x & 31, g = index >> 2, c = index & 3, span = threadIdx.x >> 5, first = span * ROUTER_SPAN;
    const int steps = min(STEPS, (p.hidden - first) / 16);
    const u32 sums = shared_room();
    uint2 low[STEPS], high[STEPS];  // of rows g and g + 8: four neighbouring columns a step
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        low[i] = high[i] = make_uint2(0, 0);
        if (i < steps) {
            const u64 at = (u64)(blockIdx.x * 16 + g) * p.hidden + first + i * 16 + c * 4;
            low[i] = __ldg((const uint2*)(w + at * 2)), high[i] = __ldg((const uint2*)(w + (at + 8 * p.hidden) * 2));
        }
    }
    wait_for_kernel_ahead();
    let_next_kernel_in();  // only now: whoever comes next may read what the kernels before this one wrote
    uint2 b[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; i++)
        if (i < steps) b[i] = __ldcg((const uint2*)(x + (first + i * 16 + c * 4) * 2));
    float d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < STEPS; i++)
        if (i < steps) multiply(d, low[i].x, high[i].x, low[i].y, high[i].y, b[i].x, b[i].y);
    if (c == 0) put_float(sums + (span * 16 + g) * 4, d[0]), put_float(sums + (span * 16 + g + 8) * 4, d[2]);
    __syncthreads();
    if (threadIdx.x < 16) {
        float total = 0.f;
#pragma unroll
        for (int s = 0; s < ROUTER_SPLITS; s++) total = __fadd_rn(total, __uint_as_float(take4(sums + (s * 16 + threadIdx.x) * 4)));
        z[blockIdx.x * 16 + threadIdx.x] = total;
    }
}

struct Choice {
    int id;        // lane i: the i-th expert
    float weight;  // and its weight before the expert's own factor
};

__device__ __forceinline__ Choice choose(const float* z, const Mixture& p, int lane) {
    u32 key[4];  // larger for larger logits; 0: there is none, or it was taken
#pragma unroll
    for (int j = 0; j < 4; j++) {
        key[j] = 0;
        if (lane + 32 * j < p.experts) {
            const u32 bits = __float_as_uint(__fadd_rn(__ldcg(z + lane + 32 * j), 0.f));  // -0 ties with 0
            key[j] = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
        }
    }
    Choice own = {0, 0.f};
    float best = 0.f, total = 0.f;
    for (int i = 0; i < p.top; i++) {
        const u32 most = max(max(key[0], key[1]), max(key[2], key[3])), top = __reduce_max_sync(~0u, most);
        int at = 128;
#pragma unroll
        for (int j = 3; j >= 0; j--)
            if (key[j] == top) at = lane + 32 * j;
        const int id = __reduce_min_sync(~0u, (u32)at);
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (id == lane + 32 * j) key[j] = 0;
        const float logit = __uint_as_float(top & 0x80000000u ? top ^ 0x80000000u : ~top);
        if (i == 0) best = logit;
        const float one = exp_of(__fadd_rn(logit, -best));
        total = __fadd_rn(total, one);
        if (i == lane) own = {min(id, p.experts - 1), one};
    }
    own.weight = ratio(own.weight, total);
    return own;
}

template <int P> __device__ __forceinline__ u32 value(u32 w) { return Integer8::value<P, 0>(make_uint4(w, 0, 0, 0), 0); }

struct Four { uint4 low[2], high[2]; };  // of the lane's two rows: columns 0 to 15 and 16 to 31 of the planes

__device__ __forceinline__ void copy_chunk(u32 to, const char* low, const char* high) {
    copy16_once(to, low), copy16_once(to + 512, low + 64), copy16_once(to + 1024, high), copy16_once(to + 1536, high + 64);
}

__device__ __forceinline__ void take_chunk(Four& k, u32 at) {
    k.low[0] = take16(at), k.high[0] = take16(at + 512), k.low[1] = take16(at + 1024), k.high[1] = take16(at + 1536);
}

__device__ __forceinline__ void add_chunk(float (&d)[4], const Four& k, u32 xs) {  // d += the chunk's products, planes in order
    uint4 b = take16(xs);
    multiply(d, value<0>(k.low[0].x), value<0>(k.low[1].x), value<0>(k.low[0].z), value<0>(k.low[1].z), b.x, b.y);
    multiply(d, value<0>(k.high[0].x), value<0>(k.high[1].x), value<0>(k.high[0].z), value<0>(k.high[1].z), b.z, b.w);
    b = take16(xs + 64);
    multiply(d, value<1>(k.low[0].x), value<1>(k.low[1].x), value<1>(k.low[0].z), value<1>(k.low[1].z), b.x, b.y);
    multiply(d, value<1>(k.high[0].x), value<1>(k.high[1].x), value<1>(k.high[0].z), value<1>(k.high[1].z), b.z, b.w);
    b = take16(xs + 128);
    multiply(d, value<0>(k.low[0].y), value<0>(k.low[1].y), value<0>(k.low[0].w), value<0>(k.low[1].w), b.x, b.y);
    multiply(d, value<0>(k.high[0].y), value<0>(k.high[1].y), value<0>(k.high[0].w), value<0>(k.high[1].w), b.z, b.w);
    b = take16(xs + 192);
    multiply(d, value<1>(k.low[0].y), value<1>(k.low[1].y), value<1>(k.low[0].w), value<1>(k.low[1].w), b.x, b.y);
    multiply(d, value<1>(k.high[0].y), value<1>(k.high[1].y), value<1>(k.high[0].w), value<1>(k.high[1].w), b.z, b.w);
}

// Columns 8 j to 8 j + 7 of a chunk of x, as the lanes multiply them: a plane is 64 bytes, lane c of four takes 16 of them.
__device__ __forceinline__ void lay(u32 xs, int j, uint4 v) {
    const u32 to = xs + (j >> 2) * 64 + (j & 1) * 32 + (j & 2) * 4;
    put8(to, v.x, v.y), put8(to + 16, v.z, v.w);
}

// Where row `row` of a weight lies in a chunk, counted in rows of chunks.
__device__ __forceinline__ u64 row_in(u32 row, int chunks, int chunk) { return ((u64)(row >> 6) * chunks + chunk) * 64 + (row & 63); }

extern "C" __global__ void __launch_bounds__(CHUNKS * 32, 1)
experts_gate_up(const float* z, const float* expert_scale, const char* x, const char* words, const char* scales, u16* out, float* weight,
                const char* dense_x, const char* dense_words, const char* dense_scales, u16* dense_out, const __grid_constant__ Mixture p) {
    const int index = threadIdx.x & 31, g = index >> 2, c = index & 3, chunk = threadIdx.x >> 5, blocks = gridDim.x, block = blockIdx.x;
    const u32 base = shared_room(), ring = base + chunk * (STAGES * STAGE), xs = base + CHUNKS * STAGES * STAGE + chunk * (2 * X_BYTES);
    const u32 sums = base + CHUNKS * (STAGES * STAGE + 2 * X_BYTES);
    const int tiles = p.inner / 8, dense_tiles = p.dense / 8, all = dense_tiles + p.top * tiles;  // a tile: 8 rows of the gate, 8 of up
    const int units = block < all ? (all - block - 1) / blocks + 1 : 0, dense_units = block < dense_tiles ? (dense_tiles - block - 1) / blocks + 1 : 0;
    Choice chosen = {0, 0.f};

    auto fetch = [&](int i) {
        if (i < units) {
            const bool routed = i >= dense_units;
            int tile = block + i * blocks, rows = p.dense, first = 0;
            if (routed) {
                const int slot = (tile - dense_tiles) / tiles;
                tile -= dense_tiles + slot * tiles, rows = p.inner, first = __shfl_sync(~0u, chosen.id, slot) * 2 * rows;
            }
            const u32 row = first + tile * 8 + g, to = ring + i % STAGES * STAGE;
            const u64 low = row_in(row, CHUNKS, chunk), high = row_in(row + rows, CHUNKS, chunk);
            const char *w = routed ? words : dense_words, *s = routed ? scales : dense_scales;
            copy_chunk(to + index * 16, w + low * 128 + c * 16, w + high * 128 + c * 16);
            if (c == 0) copy_few<4>(to + WORDS + g * 4, s + low * 4), copy_few<4>(to + WORDS + 32 + g * 4, s + high * 4);
        }
        commit_copies();
    };

    int ahead = 0;  // weights are nobody's output: those that depend on no choice come while the kernel ahead still runs
    for (; ahead < min(STAGES, dense_units); ahead++) fetch(ahead);
    wait_for_kernel_ahead();
    let_next_kernel_in();  // only now: whoever comes next may read what the kernels before this one wrote
    chosen = choose(z, p, index);
    for (; ahead < STAGES; ahead++) fetch(ahead);
    if (block == 0 && chunk == 0 && index < p.top) weight[index] = __fmul_rn(chosen.weight, expert_scale[chosen.id]);
    if (index < 16) lay(xs, index, __ldcg((const uint4*)(x + chunk * X_BYTES) + index));
    else if (p.dense) lay(xs + X_BYTES, index - 16, __ldcg((const uint4*)(dense_x + chunk * X_BYTES) + index - 16));
    __syncwarp();

    for (int i = 0; i < units; i++) {
        wait_copies_but<STAGES - 1>();
        const u32 at = ring + i % STAGES * STAGE;
        Four k;
        take_chunk(k, at + index * 16);
        u32 f = 0, e = 0;
        if (c == 0) f = take4(at + WORDS + g * 4), e = take4(at + WORDS + 32 + g * 4);
        fetch(i + STAGES);
        float d[4] = {0.f, 0.f, 0.f, 0.f};
        add_chunk(d, k, xs + (i < dense_units ? X_BYTES : 0) + c * 16);
        if (c == 0) {
            const u32 to = sums + ((i * CHUNKS + chunk) * 16 + g) * 8;
            put8(to, __float_as_uint(d[0]), f << 16), put8(to + 64, __float_as_uint(d[2]), e << 16);
        }
    }
    __syncthreads();

    for (int i = chunk; i < units; i += CHUNKS) {  // lane l: row l of the tile
        const bool routed = i >= dense_units;
        const int splits = routed ? 1 : p.dense_splits, span = routed ? CHUNKS : p.dense_span;
        u32 from = sums + (i * CHUNKS * 16 + (index & 15)) * 8;
        float acc = 0.f, total = 0.f;
        for (int s = 0, k = 0; s < splits; s++) {
            acc = 0.f;
#pragma unroll 8
            for (const int to = min(k + span, CHUNKS); k < to; k++, from += 128)
                acc = __fmaf_rn(__uint_as_float(take4(from)), __uint_as_float(take4(from + 4)), acc);
            total = __fadd_rn(total, acc);
        }
        if (splits > 1) acc = total;
        const float up = __shfl_down_sync(~0u, acc, 8);
        const int tile = block + i * blocks;
        u16* to = routed ? out + (tile - dense_tiles) * 8 : dense_out + tile * 8;  // slots lie one after the other, as their tiles do
        if (index < 8) store(to + index, __fmul_rn(rounded(activate(rounded(acc))), rounded(up)));
    }
}

template <int K> __device__ __forceinline__ void chain(float (&d)[4], u32 ring, u32 xs, int count, int index, int c) {
    if constexpr (K < DOWN) {
        wait_copies_but<DOWN - 1 - K>();
        if (K < count) {
            Four k;
            take_chunk(k, ring + K * WORDS + index * 16);
            add_chunk(d, k, xs + K * X_BYTES + c * 16);
        }
        chain<K + 1>(d, ring, xs, count, index, c);
    }
}

extern "C" __global__ void __launch_bounds__(DOWN_WARPS * 32, 1)
experts_down(const float* z, const char* x, const char* words, const float* factor, u16* out, const char* dense_x, const char* dense_words,
             const float* dense_factor, float* dense_out, const __grid_constant__ Mixture p) {
    const int index = threadIdx.x & 31, g = index >> 2, c = index & 3, warp = threadIdx.x >> 5;
    const u32 ring = shared_room() + warp * (DOWN * (WORDS + X_BYTES)), xs = ring + DOWN * WORDS;
    const int tiles = p.hidden / 16, unit = blockIdx.x * DOWN_WARPS + warp;
    const bool routed = unit < p.top * tiles;
    const int part = (routed ? unit : unit - p.top * tiles) / tiles, tile = unit - (routed ? part : part + p.top) * tiles;  // part: slot, or span
    if (!routed && part >= p.down_splits) return;

    // The router's logits are older than the kernel ahead, which lets nobody in before they are there.
    const int first = routed ? 0 : part * p.down_span, chunks = routed ? DOWN : p.down_chunks, count = min(routed ? DOWN : p.down_span, chunks - first);
    const int expert = routed ? __shfl_sync(~0u, choose(z, p, index).id, part) : 0;
    const u32 row = expert * p.hidden + tile * 16 + g;
    const char* w = routed ? words : dense_words;
#pragma unroll
    for (int k = 0; k < DOWN; k++) {
        if (k < count) {
            const u64 low = row_in(row, chunks, first + k);
            copy_chunk(ring + k * WORDS + index * 16, w + low * 128 + c * 16, w + (low + 8) * 128 + c * 16);
        }
        commit_copies();
    }
    const float* rows = routed ? factor : dense_factor;
    const float f = rows[row], e = rows[row + 8];
    wait_for_kernel_ahead();
    let_next_kernel_in();
    const int width = routed ? p.inner : p.dense;
    const char* from = routed ? x + (u64)part * p.inner * 2 : dense_x;
    for (int j = index; j < count * 16; j += 32) {
        const int column = first * 128 + j * 8;
        lay(xs + (j >> 4) * X_BYTES, j & 15, column < width ? __ldcg((const uint4*)(from + column * 2)) : make_uint4(0, 0, 0, 0));
    }
    __syncwarp();
    float d[4] = {0.f, 0.f, 0.f, 0.f};
    chain<0>(d, ring, xs, count, index, c);
    if (c == 0) {
        const float low = __fmul_rn(d[0], f), high = __fmul_rn(d[2], e);
        const u64 to = (u64)part * p.hidden + tile * 16 + g;
        if (routed) store(out + to, low), store(out + to + 8, high);
        else dense_out[to] = low, dense_out[to + 8] = high;
    }
}
