// y = x · wᵀ for 1 to 8 tokens and weights of four bits: the layout, the arithmetic and the order of sums of ops/triton/quant.py, so its bits.
//
// A warp takes 16 rows of the weight over one span of its columns, a unit. While it multiplies a chunk the next one is on its way into shared
// memory that is the warp's own, 16 bytes a lane, and every lane reads back what it fetched itself (factors aside): no warp waits for
// another, and 24 of them on a processor hide each other's waiting. Units are dealt out evenly, one to each warp in Gemma's 31B. x lies in
// shared memory once a block, in the order in which lanes multiply it.
//
// The matrix instruction multiplies 16 columns at once, in any order, so a lane takes four neighbours (8 bytes of x) where the instruction's
// own order would give it two and two: loads are twice as wide. On Hopper the bits are the same.
//
// Given when compiled: TOKENS 4 or 8; GATED: the lower 8 rows of a unit are the gate's, the upper ones up's; ACT 1 gelu_tanh, 2 silu; HALF:
// factors are float16, else bfloat16; OFFSET 8 or 0: what a nibble stands above; PER: planes of 32 columns that share a factor; LIFT:
// groups have an offset; WARPS of a block.
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
typedef unsigned long long u64;

#define SUMS (TOKENS == 8 ? 4 : 2)  // of a lane: its two rows, one or two tokens
#define GROUPS (8 / PER)            // of a chunk
#define PAIRS ((GROUPS + 1) / 2)    // words of a row's factors in a chunk
#define STAGE (2048 + 64 * PAIRS * (1 + LIFT))  // bytes: 16 rows of a chunk, their factors, their offsets

struct Shape {
    int m, n, k, chunks, span, splits, tiles, x_stride, sums_stride;
    u32 magic;                // 2^32 / tiles, rounded up
    int longs, more_longs;    // units of whole spans that each block takes, and how many of the last blocks take one more
    int shorts, more_shorts;  // units of a last span that is shorter; how many of the first blocks take one more
    int rest;                 // chunks of that span
};

__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Nibble J of both halves of a word that was moved down by 8 for nibbles 2 and 3. An even one under the exponent of 128 is 128 + q. An odd
// one is, as it stands, the subnormal number q · 2^-129; times 2^127 it is q / 4, and the x that it meets is four times itself: no shift.
template <int J> __device__ __forceinline__ u32 value(u32 w) {
    if constexpr (J % 2 == 0) {
        u32 t;
        asm("lop3.b32 %0, %1, 0x000F000F, %2, 0xEA;" : "=r"(t) : "r"(w), "r"(0x43004300));
        return fma2(t, 0x3F803F80, OFFSET ? 0xC308C308 : 0xC300C300);  // -136, -128
    } else {
        return fma2(w & 0x00F000F0, 0x7F007F00, OFFSET ? 0xC000C000 : 0);  // -2, 0
    }
}

__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint4 read16(u32 at) {  // x: written once, so it may be read whenever
    uint4 v;
    asm("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

__device__ __forceinline__ uint4 take16(u32 at) {  // of the ring: stays where it is
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ void take_pairs(u32 (&v)[PAIRS], u32 at) {
    if constexpr (PAIRS == 4) {
        uint4 all = take16(at);
        v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
    } else {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v[i]) : "r"(at + 4 * i) : "memory");
    }
}

template <int G> __device__ __forceinline__ float number(const u32 (&pairs)[PAIRS]) {  // of group G
    const u32 pair = pairs[G / 2];
#if HALF
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)(G % 2 ? pair >> 16 : pair)));
    return f;
#else
    return __uint_as_float(G % 2 ? pair & 0xFFFF0000u : pair << 16);
#endif
}

struct Chunk {
    uint4 low[2], high[2];  // of the lane's two rows: columns 0 to 15 and 16 to 31 of the planes
    u32 scale[2][PAIRS];
#if LIFT
    u32 lift[2][PAIRS];
#endif
};

template <int I> __device__ __forceinline__ void plane(float (&acc)[SUMS], float (&d)[4], const u32 (&a)[8], const Chunk& c, u32 xs, u32 totals) {
    if constexpr (I % PER == 0) d[0] = d[1] = d[2] = d[3] = 0.f;
    const uint4 b = read16(xs + I * 64);
    multiply(d, value<I % 4>(a[0]), value<I % 4>(a[1]), value<I % 4>(a[2]), value<I % 4>(a[3]), b.x, b.y);
    multiply(d, value<I % 4>(a[4]), value<I % 4>(a[5]), value<I % 4>(a[6]), value<I % 4>(a[7]), b.z, b.w);
    if constexpr (I % PER == PER - 1) {
        constexpr int G = I / PER;
        const float f = number<G>(c.scale[0]), e = number<G>(c.scale[1]);
#pragma unroll
        for (int i = 0; i < SUMS / 2; i++) {
            acc[i] = fmaf(d[i], f, acc[i]);
            acc[i + SUMS / 2] = fmaf(d[i + 2], e, acc[i + SUMS / 2]);
        }
#if LIFT
        const float p = number<G>(c.lift[0]), q = number<G>(c.lift[1]);
#pragma unroll
        for (int i = 0; i < SUMS / 2; i++) {
            float total;
            asm("ld.shared.f32 %0, [%1];" : "=f"(total) : "r"(totals + (G * TOKENS + i) * 4));
            acc[i] = fmaf(p, total, acc[i]);
            acc[i + SUMS / 2] = fmaf(q, total, acc[i + SUMS / 2]);
        }
#endif
    }
}

__device__ __forceinline__ void add_chunk(float (&acc)[SUMS], const Chunk& c, u32 xs, u32 totals) {
    float d[4];
    u32 a[8] = {c.low[0].x, c.low[1].x, c.low[0].z, c.low[1].z, c.high[0].x, c.high[1].x, c.high[0].z, c.high[1].z};
    u32 b[8] = {c.low[0].y, c.low[1].y, c.low[0].w, c.low[1].w, c.high[0].y, c.high[1].y, c.high[0].w, c.high[1].w};
    plane<0>(acc, d, a, c, xs, totals);
    plane<1>(acc, d, a, c, xs, totals);
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] >>= 8;
    plane<2>(acc, d, a, c, xs, totals);
    plane<3>(acc, d, a, c, xs, totals);
    plane<4>(acc, d, b, c, xs, totals);
    plane<5>(acc, d, b, c, xs, totals);
#pragma unroll
    for (int i = 0; i < 8; i++) b[i] >>= 8;
    plane<6>(acc, d, b, c, xs, totals);
    plane<7>(acc, d, b, c, xs, totals);
}

__device__ __forceinline__ float rounded(float v) {  // to bfloat16 and back
    u16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return __uint_as_float((u32)h << 16);
}

__device__ __forceinline__ float exp_of(float v) {
    float e;
    asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(v, 1.44269504089f)));
    return e;
}

__device__ __forceinline__ float ratio(float a, float b) {
    float q;
    asm("div.full.f32 %0, %1, %2;" : "=f"(q) : "f"(a), "f"(b));
    return q;
}

__device__ __forceinline__ float activate(float x) {  // `activate` of ops/triton/common.py, each operation as Triton rounds it
#if ACT == 2
    return ratio(x, __fadd_rn(1.f, exp_of(-x)));
#else
    const float s = __fmaf_rn(__fmul_rn(__fmul_rn(x, 0.044715f), x), x, x), u = __fmul_rn(s, 0.7978845608028654f);
    return __fmul_rn(__fmul_rn(x, 0.5f), __fadd_rn(2.f, -ratio(2.f, __fadd_rn(exp_of(__fmaf_rn(s, 0.7978845608028654f, u)), 1.f))));
#endif
}

__device__ __forceinline__ void store(u16* out, float v) {
    u16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
    *out = h;
}

__device__ __forceinline__ void copy16(u32 to, const char* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_pairs(u32 to, const char* from) {
    if constexpr (PAIRS == 4) copy16(to, from);
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(4 * PAIRS) : "memory");
}

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

// The lane's row of a unit's first chunk, among all rows of all chunks.
__device__ __forceinline__ u32 row_of(const Shape& p, const Place& u, int g) {
    const int a = u.tile * (GATED ? 8 : 16);
    return ((u32)(a >> 6) * p.chunks + u.first) * 64 + (a & 63) + g;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
four_bit(const char* x, const char* w, const char* w_high, const char* scales, const char* scales_high, const char* lifts, const char* lifts_high,
         const float* sums, u16* out, float* part, int* seen, const __grid_constant__ Shape p) {
    extern __shared__ uint4 room[];
    u32 base;
    asm("{.reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t;}" : "=r"(base) : "l"(room));
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
    const Deal deal(p);
    const int units = deal.count();
    if (units == 0) return;

    // Two stages: 4 x 16 bytes of every lane, then the factors of 16 rows, then their offsets.
    const u32 ring = base + warp * (2 * STAGE), mine = ring + lane * 16, pairs = ring + 2048;
    int ahead = warp, left = 0;  // the unit that is fetched, chunks of it to come
    u32 row = 0;                 // the lane's lower row in the chunk that is fetched next
    auto enter = [&]() {
        if (ahead < units) {
            const Place u = deal.at(p, ahead);
            row = row_of(p, u, g), left = u.count;
        }
    };
    auto fetch = [&](u32 stage) {
        if (left > 0) {
            const u32 to = mine + stage, beside = pairs + stage + (lane & 15) * (4 * PAIRS);
            const char *low = w + (u64)(row * 8 + c) * 16, *high = w_high + (u64)(row * 8 + c) * 16;
            copy16(to, low), copy16(to + 512, low + 64), copy16(to + 1024, high), copy16(to + 1536, high + 64);
            if (lane < 16) {
                const u64 place = (u64)(row - g + (lane & 7)) * (4 * PAIRS);
                copy_pairs(beside, (lane & 8 ? scales_high : scales) + place);
#if LIFT
                copy_pairs(beside + 64 * PAIRS, (lane & 8 ? lifts_high : lifts) + place);
#endif
            }
            row += 64;
            if (--left == 0) ahead += WARPS, enter();
        }
    };
    enter();
    fetch(0);  // weights are nobody's output: the first ones come while the kernel ahead still runs
    asm volatile("griddepcontrol.launch_dependents;");  // all blocks have their place, so the next kernel takes none from them
    asm volatile("griddepcontrol.wait;" ::: "memory");

    const u32 xs = base + WARPS * (2 * STAGE);
    // x as the lanes multiply it: a plane of a token is 64 bytes, lane c of four takes 16 of them: its columns of the first instruction, then
    // of the second. Planes of odd nibbles are four times as large.
    const int long_from = __umulhi(deal.first_long, p.magic) * p.span;
    const int long_chunks = deal.longs ? (__umulhi(deal.first_long + deal.longs - 1, p.magic) + 1) * p.span - long_from : 0;
    const int x_chunks = long_chunks + (deal.shorts ? p.rest : 0), token_bytes = x_chunks * 512 + 64;
    const u32 totals = xs + p.m * token_bytes;
    for (int j = threadIdx.x; j < x_chunks * 32; j += WARPS * 32) {
        const int chunk = j >> 5, column = (chunk < long_chunks ? long_from + chunk : p.chunks - p.rest + chunk - long_chunks) * 256 + (j & 31) * 8;
        const char* from = x + (i64)column * 2;
        uint4 v[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            v[t] = make_uint4(0, 0, 0, 0);
            if (t < p.m && column < p.k) v[t] = __ldcg((const uint4*)(from + (i64)t * p.x_stride * 2));
        }
        const u32 to = xs + (j >> 2) * 64 + (j & 1) * 32 + (j & 2) * 4;
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
            if (t < p.m) {
                if (j & 4) {  // times 4, added to -0: zeros keep their sign
                    v[t].x = fma2(v[t].x, 0x40804080, 0x80008000), v[t].y = fma2(v[t].y, 0x40804080, 0x80008000);
                    v[t].z = fma2(v[t].z, 0x40804080, 0x80008000), v[t].w = fma2(v[t].w, 0x40804080, 0x80008000);
                }
                asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to + t * token_bytes), "r"(v[t].x), "r"(v[t].y) : "memory");
                asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to + t * token_bytes + 16), "r"(v[t].z), "r"(v[t].w) : "memory");
            }
    }
#if LIFT
    for (int i = threadIdx.x; i < x_chunks * GROUPS * TOKENS; i += WARPS * 32) {
        const int of = i / (GROUPS * TOKENS), chunk = of < long_chunks ? long_from + of : p.chunks - p.rest + of - long_chunks;
        const int group = chunk * GROUPS + i / TOKENS % GROUPS;
        const float total = __ldcg(sums + (i64)group * p.sums_stride + min(i % TOKENS, p.m - 1));
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(totals + i * 4), "f"(total) : "memory");
    }
#endif
    __syncthreads();

    // Tokens are columns of the matrix instruction: of 4 the even ones (the odd ones repeat them, and are nobody's), so that half of the sums
    // need no work. Columns of tokens that are not there repeat the last one.
    const int token = TOKENS == 8 ? 2 * c : c;
    u32 x_lane = xs + min(TOKENS == 8 ? g : g / 2, p.m - 1) * token_bytes + c * 16, totals_lane = totals + token * 4;
    asm volatile("" : "+r"(x_lane), "+r"(totals_lane)::"memory");  // no read of x moves up from here
    int i = warp, n;  // the unit that is multiplied, chunks of it to come
    u32 at, sum_at, stage = 0;
    float acc[SUMS];
    auto begin = [&]() {
        const Place u = deal.at(p, i);
        n = u.count;
        const int x_at = i < deal.longs ? u.first - long_from : long_chunks;
        at = x_lane + x_at * 512, sum_at = totals_lane + x_at * (GROUPS * TOKENS * 4);
#pragma unroll
        for (int a = 0; a < SUMS; a++) acc[a] = 0.f;
    };
    auto finish = [&]() {
        const Place u = deal.at(p, i);
        const int split = u.split, tile = u.tile;
        if (p.splits > 1) {  // the last warp of these rows adds the spans in order and resets the counter
            float* whole = part + (i64)tile * p.splits * (TOKENS * 16) + token * 16 + g;
            float* own = whole + split * (TOKENS * 16);
#pragma unroll
            for (int a = 0; a < SUMS / 2; a++) __stcg(own + a * 16, acc[a]), __stcg(own + a * 16 + 8, acc[a + SUMS / 2]);
            __syncwarp();
            int done = 0;
            if (lane == 0) asm volatile("atom.global.acq_rel.gpu.add.s32 %0, [%1], 1;" : "=r"(done) : "l"(seen + tile) : "memory");
            if (__shfl_sync(~0u, done, 0) != p.splits - 1) return;
            __syncwarp();
            if (lane == 0) seen[tile] = 0;
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
#pragma unroll
        for (int a = 0; a < SUMS / 2; a++) {
            if (token + a >= p.m) break;
            const float lower = acc[a], upper = acc[a + SUMS / 2];
#if GATED
            store(out + (i64)(token + a) * (p.n / 2) + tile * 8 + g, __fmul_rn(rounded(activate(rounded(lower))), rounded(upper)));
#else
            store(out + (i64)(token + a) * p.n + tile * 16 + g, lower);
            store(out + (i64)(token + a) * p.n + tile * 16 + g + 8, upper);
#endif
        }
    };
    if (i >= units) return;
    begin();
    while (true) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncwarp();  // factors were fetched by other lanes; and all have read the stage that is filled next
        Chunk k;
        const u32 from = mine + stage, beside = pairs + stage + g * (4 * PAIRS);
        k.low[0] = take16(from), k.high[0] = take16(from + 512), k.low[1] = take16(from + 1024), k.high[1] = take16(from + 1536);
        take_pairs(k.scale[0], beside), take_pairs(k.scale[1], beside + 32 * PAIRS);
#if LIFT
        take_pairs(k.lift[0], beside + 64 * PAIRS), take_pairs(k.lift[1], beside + 96 * PAIRS);
#endif
        stage = STAGE - stage;
        fetch(stage);
        add_chunk(acc, k, at, sum_at);
        at += 512, sum_at += GROUPS * TOKENS * 4;
        if (--n > 0) continue;
        finish();
        i += WARPS;
        if (i >= units) break;
        begin();
    }
}
