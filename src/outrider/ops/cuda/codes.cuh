// Codes of weights: how a chunk of 16 rows comes into shared memory, back into a warp's registers and becomes sums. All that depends on how
// weights are written is here; units.cuh moves chunks about and knows of a code what `FourBits` has:
//
// COLUMNS of a chunk; GROUPS of them, each with a factor; STAGE: bytes of a chunk in the ring; LIFTED: groups have an offset, so sums of x over
// them are needed; Chunk: what a lane holds of one; copy, take, add; and place, laid: how x lies in shared memory.
#ifndef OUTRIDER_CODES
#define OUTRIDER_CODES
#include "device.cuh"

#define SUMS (TOKENS == 8 ? 4 : 2)  // of a lane: its two rows, one or two tokens

struct Lane {  // of a warp; of the matrix instruction rows g and g + 8, and the c-th of four that share them
    int index, g, c;
};

struct Weights {  // where the lower and the upper 8 rows of a unit lie
    const char *words, *words_high, *scales, *scales_high, *lifts, *lifts_high;
};

// Half: factors are float16, else bfloat16; Offset 8 or 0: what a nibble stands above; Per: planes of 32 columns that share a factor.
template <bool Half, int Offset, int Per, bool Lift> struct FourBits {
    static constexpr bool LIFTED = Lift;
    static constexpr int COLUMNS = 256, GROUPS = 8 / Per;
    static constexpr int PAIRS = (GROUPS + 1) / 2;                 // words of a row's factors in a chunk
    static constexpr int WORDS = 2048;                              // bytes of 16 rows of a chunk: 4 x 16 of every lane
    static constexpr int STAGE = WORDS + 64 * PAIRS * (1 + Lift);  // then the rows' factors, then their offsets

    struct Chunk {
        uint4 low[2], high[2];  // of the lane's two rows: columns 0 to 15 and 16 to 31 of the planes
        u32 scale[2][PAIRS], lift[2][Lift ? PAIRS : 1];
    };

    // Into a stage: the lane's words at `mine`, factors at `pairs`. row: the lane's lower one, among all rows of all chunks.
    static __device__ __forceinline__ void copy(u32 mine, u32 pairs, const Weights& w, u32 row, const Lane& lane) {
        const u32 beside = pairs + (lane.index & 15) * (4 * PAIRS);
        const char *low = w.words + (u64)(row * 8 + lane.c) * 16, *high = w.words_high + (u64)(row * 8 + lane.c) * 16;
        copy16(mine, low), copy16(mine + 512, low + 64), copy16(mine + 1024, high), copy16(mine + 1536, high + 64);
        if (lane.index < 16) {
            const u64 place = (u64)(row - lane.g + (lane.index & 7)) * (4 * PAIRS);
            copy_few<4 * PAIRS>(beside, (lane.index & 8 ? w.scales_high : w.scales) + place);
            if constexpr (Lift) copy_few<4 * PAIRS>(beside + 64 * PAIRS, (lane.index & 8 ? w.lifts_high : w.lifts) + place);
        }
    }

    static __device__ __forceinline__ void take_pairs(u32 (&v)[PAIRS], u32 at) {
        if constexpr (PAIRS == 4) {
            uint4 all = take16(at);
            v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
        } else {
#pragma unroll
            for (int i = 0; i < PAIRS; i++) v[i] = take4(at + 4 * i);
        }
    }

    static __device__ __forceinline__ void take(Chunk& k, u32 mine, u32 pairs, const Lane& lane) {
        const u32 beside = pairs + lane.g * (4 * PAIRS);
        k.low[0] = take16(mine), k.high[0] = take16(mine + 512), k.low[1] = take16(mine + 1024), k.high[1] = take16(mine + 1536);
        take_pairs(k.scale[0], beside), take_pairs(k.scale[1], beside + 32 * PAIRS);
        if constexpr (Lift) take_pairs(k.lift[0], beside + 64 * PAIRS), take_pairs(k.lift[1], beside + 96 * PAIRS);
    }

    // Nibble J of both halves of a word that was moved down by 8 for nibbles 2 and 3. An even one under the exponent of 128 is 128 + q. An odd
    // one is, as it stands, the subnormal number q · 2^-129; times 2^127 it is q / 4, and the x that it meets is four times itself: no shift.
    template <int J> static __device__ __forceinline__ u32 value(u32 w) {
        if constexpr (J % 2 == 0) return fma2(and_or<0x000F000F>(w, 0x43004300), 0x3F803F80, Offset ? 0xC308C308 : 0xC300C300);  // -136, -128
        else return fma2(w & 0x00F000F0, 0x7F007F00, Offset ? 0xC000C000 : 0);  // -2, 0
    }

    template <int G> static __device__ __forceinline__ float number(const u32* pairs) {  // of group G
        const u32 pair = pairs[G / 2];
        if constexpr (Half) return float_of_half((u16)(G % 2 ? pair >> 16 : pair));
        else return __uint_as_float(G % 2 ? pair & 0xFFFF0000u : pair << 16);
    }

    template <int I>
    static __device__ __forceinline__ void plane(float (&acc)[SUMS], float (&d)[4], const u32 (&a)[8], const Chunk& c, u32 xs, u32 totals) {
        if constexpr (I % Per == 0) d[0] = d[1] = d[2] = d[3] = 0.f;
        const uint4 b = read16(xs + I * 64);
        multiply(d, value<I % 4>(a[0]), value<I % 4>(a[1]), value<I % 4>(a[2]), value<I % 4>(a[3]), b.x, b.y);
        multiply(d, value<I % 4>(a[4]), value<I % 4>(a[5]), value<I % 4>(a[6]), value<I % 4>(a[7]), b.z, b.w);
        if constexpr (I % Per == Per - 1) {
            constexpr int G = I / Per;
            const float f = number<G>(c.scale[0]), e = number<G>(c.scale[1]);
#pragma unroll
            for (int i = 0; i < SUMS / 2; i++) {
                acc[i] = fmaf(d[i], f, acc[i]);
                acc[i + SUMS / 2] = fmaf(d[i + 2], e, acc[i + SUMS / 2]);
            }
            if constexpr (Lift) {
                const float p = number<G>(c.lift[0]), q = number<G>(c.lift[1]);
#pragma unroll
                for (int i = 0; i < SUMS / 2; i++) {
                    const float total = read_float(totals + (G * TOKENS + i) * 4);
                    acc[i] = fmaf(p, total, acc[i]);
                    acc[i + SUMS / 2] = fmaf(q, total, acc[i + SUMS / 2]);
                }
            }
        }
    }

    // The products of a chunk with the x of its columns at xs; totals: sums of x over its groups, TOKENS floats each.
    static __device__ __forceinline__ void add(float (&acc)[SUMS], const Chunk& c, u32 xs, u32 totals) {
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

    // x as the lanes multiply it: a plane of a token is 64 bytes, lane c of four takes 16 of them: its columns of the first instruction, then
    // of the second. place: where
    // columns 8 j to 8 j + 3 go, the next four lie 16 bytes further. Planes of
    // odd nibbles are four times as large.
    static __device__ __forceinline__ u32 place(u32 xs, int j) { return xs + (j >> 2) * 64 + (j & 1) * 32 + (j & 2) * 4; }

    static __device__ __forceinline__ void laid(uint4& v, int j) {
        if (j & 4) {  // times 4, added to -0: zeros keep their sign
            v.x = fma2(v.x, 0x40804080, 0x80008000), v.y = fma2(v.y, 0x40804080, 0x80008000);
            v.z = fma2(v.z, 0x40804080, 0x80008000), v.w = fma2(v.w, 0x40804080, 0x80008000);
        }
    }
};
#endif
