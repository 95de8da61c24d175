// The int8 experts of up to 8 tokens, and the shared dense MLP: the layout, the arithmetic and the order of sums of
// ops/triton/quant_moe.py and ops/triton/quant.py, so their bits; and the choice of ops/triton/routing.py.
//
// A tile is 16 rows of a weight. `experts_gate_up`: groups of 128 columns have scales, so a chunk's products are a separate sum, and
// every chunk of x has a warp: it goes through the block's tiles, several of them in flight into its own part of shared memory, and stores
// each one's sums and scales, which a warp then adds up in order. `experts_down`: rows have scales, so a tile (of the dense MLP: a span of
// it) is one chain, and has a warp; the first ones are in flight before the previous kernel is done.
//
// `experts_router` computes the router's logits; every block (with one token: every warp) derives the chosen experts from them itself, which
// is faster than another launch. Tokens are columns of the matrix instruction, whichever experts they chose: a tile's results are stored
// for those that chose its expert.
//
// Given when compiled: ROUTER_SPAN, ROUTER_SPLITS: columns of a span of the router, spans; CHUNKS of gate_up's columns; STAGES: tiles on their
// way; DOWN: chunks of an expert's inner columns; DOWN_WARPS; MOST: tokens, 1 or 8; ACT; and TOKENS, WARPS, which units.cuh asks for.
#include "units.cuh"

#define WORDS 2048           // bytes of 16 rows of a chunk: 4 x 16 of every lane
#define STAGE (WORDS + 64)  // then the rows' factors
#define X_BYTES 256          // of a chunk of x
#define X_ROW (DOWN * X_BYTES + (MOST > 1 ? 64 : 0))  // of a token of down's x: rows that are read together lie in different banks
#define TOKEN_SUMS (MOST > 1 ? 80 : 64)                // bytes of a token's sums of a tile's chunk
#define TILE_SUMS (MOST * TOKEN_SUMS + 64)             // of all tokens', and the rows' factors

struct Mixture {
    int rows, experts, top, hidden, inner;
    int dense;                                // inner width of the shared dense MLP; 0: it is not included
    int dense_span, dense_splits;             // chunks of a span of its gate_up; spans
    int down_chunks, down_span, down_splits;  // of its down
};

// The router's logits in bfloat16 weights: the order of sums of ops/triton/gemm.py. A block takes 8 experts (the other half of the matrix
// instruction's rows is empty), a warp one span of the columns, whose weights are all in flight before the previous kernel is done.
#define STEPS (ROUTER_SPAN / 16)
#define ROUTER_ROW (ROUTER_SPAN * 2 + 32)  // bytes of a row in shared memory: rows that are read together lie in different banks

extern "C" __global__ void __launch_bounds__(ROUTER_SPLITS * 32, 1)
experts_router(const char* x, const char* w, float* z, const __grid_constant__ Mixture p) {
    const int index = threadIdx.x & 31, g = index >> 2, c = index & 3, span = threadIdx.x >> 5, first = span * ROUTER_SPAN;
    const int steps = min(STEPS, (p.hidden - first) / 16);
    const u32 base = shared_room(), rows = base + span * (8 * ROUTER_ROW), sums = base + ROUTER_SPLITS * (8 * ROUTER_ROW);  // [span][token][8]
    pdl_trigger();
    for (int i = index; i < steps * 16; i += 32) {  // 16 bytes each: two of a row and a step
        const int row = i / (steps * 2), piece = i - row * (steps * 2);
        copy16(rows + row * ROUTER_ROW + piece * 16, w + ((u64)(blockIdx.x * 8 + row) * p.hidden + first) * 2 + piece * 16);
    }
    pdl_wait();
    uint2 b[STEPS];  // of token g: four neighbouring columns per step
    const char* own = x + ((u64)min(g, p.rows - 1) * p.hidden + first + c * 4) * 2;
#pragma unroll
    for (int i = 0; i < STEPS; i++)
        if (i < steps) b[i] = __ldcg((const uint2*)(own + i * 32));
    wait_copies();
    __syncwarp();
    float d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < STEPS; i++)
        if (i < steps) {
            const u32 at = rows + g * ROUTER_ROW + i * 32 + c * 8;
            multiply(d, take4(at), 0, take4(at + 4), 0, b[i].x, b[i].y);
        }
    put_float(sums + ((span * 8 + 2 * c) * 8 + g) * 4, d[0]), put_float(sums + ((span * 8 + 2 * c + 1) * 8 + g) * 4, d[1]);
    __syncthreads();
    for (int i = threadIdx.x; i < p.rows * 8; i += ROUTER_SPLITS * 32) {
        float total = 0.f;
#pragma unroll
        for (int s = 0; s < ROUTER_SPLITS; s++) total = __fadd_rn(total, __uint_as_float(take4(sums + (s * 64 + i) * 4)));
        z[(i >> 3) * p.experts + blockIdx.x * 8 + (i & 7)] = total;
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

struct Chosen {  // an expert that some token chose
    int id;
    u32 tokens, slots;  // a bit for each token that did; for each token 4 bits: the slot it has there
    __device__ __forceinline__ int pair(int token, const Mixture& p) const { return token * p.top + (slots >> 4 * token & 15); }
};

// All chosen experts. Of one token every warp has its own; of several the block lists them in shared memory, in the order of their ids.
struct Choices {
    Choice own;
    u32 list;  // ids of pairs (512 bytes), counts (16), then 8 bytes an expert
    int count;

    __device__ __forceinline__ void make(const float* z, const Mixture& p, int warp, int lane, u32 at, float* weight, const float* scale) {
        list = at;
        if (MOST == 1 || warp < p.rows) {
            own = choose(z + (MOST == 1 ? 0 : warp) * p.experts, p, lane);
            if (weight != nullptr && (MOST > 1 || warp == 0) && lane < p.top) weight[warp * p.top + lane] = __fmul_rn(own.weight, scale[own.id]);
        }
        count = p.top;
        if (MOST == 1) return;
        if (warp < p.rows && lane < p.top) put_float(list + (warp * p.top + lane) * 4, __int_as_float(own.id));
        __syncthreads();
        const int e = warp * 32 + lane;
        u32 tokens = 0, slots = 0, chosen = 0;
        if (warp < 4) {
            for (int t = 0, q = 0; t < p.rows; t++)
                for (int s = 0; s < p.top; s++, q++)
                    if ((int)take4(list + q * 4) == e) tokens |= 1u << t, slots |= (u32)s << 4 * t;
            chosen = __ballot_sync(~0u, tokens != 0);
            if (lane == 0) put_float(list + 512 + warp * 4, __int_as_float(__popc(chosen)));
        }
        __syncthreads();
        int before = 0;
        count = 0;
        for (int w = 0; w < 4; w++) {
            const int here = take4(list + 512 + w * 4);
            before += w < warp ? here : 0, count += here;
        }
        if (tokens) put8(list + 528 + (before + __popc(chosen & ((1u << lane) - 1))) * 8, e | tokens << 8, slots);
        __syncthreads();
    }

    __device__ __forceinline__ Chosen at(int i) const {
        if (MOST == 1) return {__shfl_sync(~0u, own.id, i), 1u, (u32)i};
        const u32 word = take4(list + 528 + i * 8);
        return {(int)(word & 255), word >> 8, take4(list + 532 + i * 8)};
    }
};
#define CHOICES 1040  // bytes of the list: 64 experts

template <int P> __device__ __forceinline__ u32 value(u32 w) { return Integer8::value<P, 0>(make_uint4(w, 0, 0, 0), 0); }

struct Four { uint4 low[2], high[2]; };  // of the lane's two rows: columns 0 to 15 and 16 to 31 of the planes

__device__ __forceinline__ void copy_chunk(u32 to, const char* low, const char* high) {
    copy16_once(to, low), copy16_once(to + 512, low + 64), copy16_once(to + 1024, high), copy16_once(to + 1536, high + 64);
}

__device__ __forceinline__ void take_chunk(Four& k, u32 at) {
    k.low[0] = take16(at), k.high[0] = take16(at + 512), k.low[1] = take16(at + 1024), k.high[1] = take16(at + 1536);
}

// Planes 2 H and 2 H + 1 of a chunk, which words H of every pair hold: d += their products with b, the lane's x of both.
template <int H> __device__ __forceinline__ void add_planes(float (&d)[4], const Four& k, const uint4& b0, const uint4& b1) {
    const u32 a[4] = {H ? k.low[0].y : k.low[0].x, H ? k.low[1].y : k.low[1].x, H ? k.low[0].w : k.low[0].z, H ? k.low[1].w : k.low[1].z};
    const u32 e[4] = {H ? k.high[0].y : k.high[0].x, H ? k.high[1].y : k.high[1].x, H ? k.high[0].w : k.high[0].z, H ? k.high[1].w : k.high[1].z};
    multiply(d, value<0>(a[0]), value<0>(a[1]), value<0>(a[2]), value<0>(a[3]), b0.x, b0.y);
    multiply(d, value<0>(e[0]), value<0>(e[1]), value<0>(e[2]), value<0>(e[3]), b0.z, b0.w);
    multiply(d, value<1>(a[0]), value<1>(a[1]), value<1>(a[2]), value<1>(a[3]), b1.x, b1.y);
    multiply(d, value<1>(e[0]), value<1>(e[1]), value<1>(e[2]), value<1>(e[3]), b1.z, b1.w);
}

// Where row `row` of a weight lies in a chunk, counted in rows of chunks.
__device__ __forceinline__ u64 row_in(u32 row, int chunks, int chunk) { return ((u64)(row >> 6) * chunks + chunk) * 64 + (row & 63); }

struct GateUp {  // a tile of 8 rows of the gate and 8 of up
    bool routed;
    int tile, slot;  // among those of its expert or of the dense MLP; the how manieth expert
};

extern "C" __global__ void __launch_bounds__(CHUNKS * 32, 1)
experts_gate_up(const float* z, const float* expert_scale, const char* x, const char* words, const char* scales, u16* out, float* weight,
                const char* dense_x, const char* dense_words, const char* dense_scales, u16* dense_out, const __grid_constant__ Mixture p) {
    const int index = threadIdx.x & 31, g = index >> 2, c = index & 3, chunk = threadIdx.x >> 5, blocks = gridDim.x, block = blockIdx.x;
    const u32 base = shared_room(), ring = base + chunk * (STAGES * STAGE), list = base + CHUNKS * STAGES * STAGE, sums = list + (MOST > 1 ? CHOICES : 0);
    const int tiles = p.inner / 8, dense_tiles = p.dense / 8, dense_units = block < dense_tiles ? (dense_tiles - block - 1) / blocks + 1 : 0;
    Choices choices;
    int units = dense_units;  // of this block; experts follow

    auto unit = [&](int i) -> GateUp {
        const int tile = block + i * blocks;
        if (i < dense_units) return {false, tile, 0};
        const int slot = (tile - dense_tiles) / tiles;
        return {true, tile - dense_tiles - slot * tiles, slot};
    };
    auto fetch = [&](int i) {
        if (i < units) {
            const GateUp u = unit(i);
            const int rows = u.routed ? p.inner : p.dense;
            const u32 row = (u.routed ? choices.at(u.slot).id * 2 * rows : 0) + u.tile * 8 + g, to = ring + i % STAGES * STAGE;
            const u64 low = row_in(row, CHUNKS, chunk), high = row_in(row + rows, CHUNKS, chunk);
            const char *w = u.routed ? words : dense_words, *s = u.routed ? scales : dense_scales;
            copy_chunk(to + index * 16, w + low * 128 + c * 16, w + high * 128 + c * 16);
            if (c == 0) copy_few<4>(to + WORDS + g * 4, s + low * 4), copy_few<4>(to + WORDS + 32 + g * 4, s + high * 4);
        }
        commit_copies();
    };

    int ahead = 0;  // no kernel writes weights: those that depend on no choice are loaded while the previous kernel still runs
    for (; ahead < min(STAGES, dense_units); ahead++) fetch(ahead);
    pdl_wait();
    pdl_trigger();  // only now: the next kernel may read what the kernels before this one wrote
    uint4 b[4];  // token g's x of the chunk, a plane each: four columns of its first 16 and four of its last
    auto load = [&](const char* from) {
        const char* own = from + ((u64)min(g, p.rows - 1) * p.hidden + chunk * 128 + c * 4) * 2;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint2 low = __ldcg((const uint2*)(own + i * 64)), high = __ldcg((const uint2*)(own + i * 64 + 32));
            b[i] = make_uint4(low.x, low.y, high.x, high.y);
        }
    };
    load(dense_units ? dense_x : x);
    choices.make(z, p, chunk, index, list, block == 0 ? weight : nullptr, expert_scale);
    const int all = dense_tiles + choices.count * tiles;
    units = block < all ? (all - block - 1) / blocks + 1 : 0;
    for (; ahead < STAGES; ahead++) fetch(ahead);

    auto finish = [&](int i, u32 from, int first) {  // tokens first and first + 1 of those concerned; lane l: row l of the tile, or l - 16
        const GateUp u = unit(i);
        const Chosen e = u.routed ? choices.at(u.slot) : Chosen{0, (1u << p.rows) - 1, 0};
        if (__popc(e.tokens) <= first) return;
        const int splits = u.routed ? 1 : p.dense_splits, span = u.routed ? CHUNKS : p.dense_span, row = index & 15;
        u32 rest = e.tokens;
        for (int skip = first + (index >> 4); skip > 0; skip--) rest &= rest - 1;
        const int token = rest ? __ffs(rest) - 1 : 0;
        u32 at = from + token * TOKEN_SUMS + row * 4;
        float acc = 0.f, total = 0.f;
        for (int s = 0, k = 0; s < splits; s++) {
            acc = 0.f;
            const int to = min(k + span, CHUNKS);
#pragma unroll 8
            for (; k < to; k++, at += TILE_SUMS)
                acc = __fmaf_rn(__uint_as_float(take4(at)), __uint_as_float(take4(at + (MOST - token) * TOKEN_SUMS)), acc);
            total = __fadd_rn(total, acc);
        }
        if (splits > 1) acc = total;
        const float up = __shfl_down_sync(~0u, acc, 8);
        u16* to = u.routed ? out + (u64)e.pair(token, p) * p.inner : dense_out + (u64)token * p.dense;
        if (rest && row < 8) store(to + u.tile * 8 + row, __fmul_rn(rounded(activate(rounded(acc))), rounded(up)));
    };

    for (int i = 0; i < units; i++) {
        if (i == dense_units && i > 0) load(x);
        wait_copies_but<STAGES - 1>();
        const u32 at = ring + i % STAGES * STAGE, kept = sums + (MOST > 1 ? i & 1 : i) * (CHUNKS * TILE_SUMS), to = kept + chunk * TILE_SUMS;
        Four k;
        take_chunk(k, at + index * 16);
        u32 f = 0, e = 0;
        if (c == 0) f = take4(at + WORDS + g * 4), e = take4(at + WORDS + 32 + g * 4);
        fetch(i + STAGES);
        float d[4] = {0.f, 0.f, 0.f, 0.f};
        add_planes<0>(d, k, b[0], b[1]);
        add_planes<1>(d, k, b[2], b[3]);
        if (c == 0) put_float(to + MOST * TOKEN_SUMS + g * 4, __uint_as_float(f << 16)), put_float(to + MOST * TOKEN_SUMS + 32 + g * 4, __uint_as_float(e << 16));
        if (MOST == 1) {
            if (c == 0) put_float(to + g * 4, d[0]), put_float(to + 32 + g * 4, d[2]);
            continue;
        }
        const u32 mine = to + 2 * c * TOKEN_SUMS + g * 4;
        put_float(mine, d[0]), put_float(mine + TOKEN_SUMS, d[1]), put_float(mine + 32, d[2]), put_float(mine + TOKEN_SUMS + 32, d[3]);
        __syncthreads();  // the warp that finishes the previous tile is done at the next barrier, and its sums are overwritten after that
        const int turn = (chunk + 4 * i) % CHUNKS;
        if (turn < 4) finish(i, kept, 2 * turn);
    }
    if (MOST > 1) return;
    __syncthreads();
    for (int i = chunk; i < units; i += CHUNKS) finish(i, sums + i * (CHUNKS * TILE_SUMS), 0);
}

// Columns 8 j to 8 j + 7 of a chunk of x, as the lanes multiply them: a plane is 64 bytes, lane c of four takes 16 of them.
__device__ __forceinline__ void lay(u32 xs, int j, uint4 v) {
    const u32 to = xs + (j >> 2) * 64 + (j & 1) * 32 + (j & 2) * 4;
    put8(to, v.x, v.y), put8(to + 16, v.z, v.w);
}

struct Down {  // 16 rows of an expert's weight, or of a span of the dense MLP's
    bool routed;
    int tile, part, first, count;  // part: the how manieth expert, or span; its chunks
};

extern "C" __global__ void __launch_bounds__(DOWN_WARPS * 32, 1)
experts_down(const float* z, const char* x, const char* words, const float* factor, u16* out, const char* dense_x, const char* dense_words,
             const float* dense_factor, float* dense_out, const __grid_constant__ Mixture p) {
    const int index = threadIdx.x & 31, g = index >> 2, c = index & 3, warp = threadIdx.x >> 5;
    const u32 base = shared_room(), ring = base + warp * (DOWN * WORDS + MOST * X_ROW), xs = ring + DOWN * WORDS;
    const int tiles = p.hidden / 16;
    Choices choices;  // the router's logits are older than the previous kernel, which triggers this one only after they are visible
    choices.make(z, p, warp, index, base + DOWN_WARPS * (DOWN * WORDS + MOST * X_ROW), nullptr, nullptr);
    const int routed_units = choices.count * tiles, units = routed_units + p.down_splits * tiles;

    auto unit = [&](int u) -> Down {
        const bool routed = u < routed_units;
        const int v = routed ? u : u - routed_units, part = v / tiles, first = routed ? 0 : part * p.down_span;
        return {routed, v - part * tiles, part, first, routed ? DOWN : min(p.down_span, p.down_chunks - first)};
    };
    auto row_of = [&](const Down& u) -> u32 { return (u.routed ? choices.at(u.part).id * p.hidden : 0) + u.tile * 16 + g; };
    auto fetch = [&](const Down& u, u32 row, int k) {  // chunk k of the unit
        if (k < u.count) {
            const u64 low = row_in(row, u.routed ? DOWN : p.down_chunks, u.first + k);
            const char* from = (u.routed ? words : dense_words) + low * 128 + c * 16;
            copy_chunk(ring + k * WORDS + index * 16, from, from + 1024);
        }
        commit_copies();
    };

    int u = blockIdx.x * DOWN_WARPS + warp;
    if (u >= units) return;
    Down now = unit(u);
    u32 row = row_of(now);
#pragma unroll
    for (int k = 0; k < DOWN; k++) fetch(now, row, k);
    pdl_wait();
    pdl_trigger();
    while (true) {
        const float *rows = now.routed ? factor : dense_factor, f = rows[row], e = rows[row + 8];
        const Chosen who = now.routed ? choices.at(now.part) : Chosen{0, (1u << p.rows) - 1, 0};
        const int width = now.routed ? p.inner : p.dense;
        for (u32 rest = who.tokens; rest; rest &= rest - 1) {
            const int token = __ffs(rest) - 1;
            const char* from = (now.routed ? x : dense_x) + (u64)(now.routed ? who.pair(token, p) : token) * width * 2;
            for (int j = index; j < now.count * 16; j += 32) {
                const int column = now.first * 128 + j * 8;
                const uint4 v = column < width ? __ldcg((const uint4*)(from + column * 2)) : make_uint4(0, 0, 0, 0);
                lay(xs + token * X_ROW + (j >> 4) * X_BYTES, j & 15, v);
            }
        }
        __syncwarp();
        const int next = u + gridDim.x * DOWN_WARPS;
        const bool more = next < units;
        const Down then = more ? unit(next) : Down{true, 0, 0, 0, 0};
        const u32 then_row = more ? row_of(then) : 0;
        const u32 at = xs + (who.tokens >> g & 1 ? g : __ffs(who.tokens) - 1) * X_ROW + c * 16;  // of one that is not concerned: anything
        float d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int k = 0; k < DOWN; k++) {
            wait_copies_but<DOWN - 1>();
            if (k < now.count) {
                Four four;
                take_chunk(four, ring + k * WORDS + index * 16);
                const uint4 b0 = take16(at + k * X_BYTES), b1 = take16(at + k * X_BYTES + 64), b2 = take16(at + k * X_BYTES + 128), b3 = take16(at + k * X_BYTES + 192);
                fetch(then, then_row, k);
                add_planes<0>(d, four, b0, b1);
                add_planes<1>(d, four, b2, b3);
            } else {
                fetch(then, then_row, k);
            }
        }
#pragma unroll
        for (int a = 0; a < 2; a++) {
            const int token = 2 * c + a;
            if (who.tokens >> token & 1) {
                const float low = __fmul_rn(d[a], f), high = __fmul_rn(d[a + 2], e);
                const u64 to = (u64)(now.routed ? who.pair(token, p) : now.part * p.rows + token) * p.hidden + now.tile * 16 + g;
                if (now.routed) store(out + to, low), store(out + to + 8, high);
                else dense_out[to] = low, dense_out[to + 8] = high;
            }
        }
        if (!more) return;
        __syncwarp();  // x of this unit was read
        u = next, now = then, row = then_row;
    }
}
