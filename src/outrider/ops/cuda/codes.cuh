// Codes of weights: how a chunk of 16 rows comes into shared memory, back into a warp's registers and becomes sums. All that depends on the
// weight format is here and in values.cuh; units.cuh moves chunks and uses only these members of `Coded`:
//
// COLUMNS of a chunk; GROUPS of them, each with a factor; STAGE: bytes of a chunk in the ring, of which WORDS lie before the factors; HAS_ZERO_POINT:
// groups have an offset, so sums of x over them are needed; FACTORED: rows have one; Chunk: what a lane holds of one; HELD: sums while a unit
// is under way; copy, take, add, close; and place, laid: how x lies in shared memory.
#ifndef OUTRIDER_CODES
#define OUTRIDER_CODES
#include "values.cuh"

#define SUMS (TOKENS == 8 ? 4 : 2)  // of a lane: its two rows, one or two tokens

struct Lane {  // of a warp; of the matrix instruction rows g and g + 8, and the c-th of four that share them
    int index, g, c;
};

struct Weights {  // where the lower and the upper 8 rows of a unit lie; above: bits above the words' nibbles
    const char *words, *words_high, *scales, *scales_high, *lifts, *lifts_high, *above, *above_high;
    const float *factors, *factors_high;  // of whole rows
};

// Values: of values.cuh; Half: factors are float16, else bfloat16; Per: planes that share a factor, 0: there are none; ZeroPoint: they have an
// offset; Factor: a row's sums are multiplied by one of its own.
template <class Values, bool Half, int Per, bool ZeroPoint, bool Factor> struct Coded {
    static constexpr bool HAS_ZERO_POINT = ZeroPoint, FACTORED = Factor;
    static constexpr int PLANES = Values::PLANES, STEPS = Values::PLANE / 16;  // instructions of a plane
    static constexpr int COLUMNS = PLANES * Values::PLANE, GROUPS = Per ? PLANES / Per : 1;
    static constexpr int PAIRS = Per ? (GROUPS + 1) / 2 : 0;           // words of a row's factors in a chunk
    static constexpr int ABOVE = Values::ABOVE ? 512 : 0;              // bytes of 16 rows of a chunk: 32 of each
    static constexpr int WORDS = 1024 * STEPS + ABOVE;                 // 2 x 16 of every lane for each instruction, what is above them,
    static constexpr int STAGE = WORDS + 64 * PAIRS * (1 + ZeroPoint);      // then the rows' factors, then their offsets
    static constexpr int HELD = Per ? SUMS : 4;                        // without groups the instruction's own sums

    struct Chunk {
        uint4 words[STEPS][2];  // columns 16 s to 16 s + 15 of the planes, of the lane's two rows
        uint2 above[ABOVE ? 2 : 1];
        u32 scale[2][Per ? PAIRS : 1], zero_point[2][ZeroPoint ? PAIRS : 1];
    };

    // Into a stage: the lane's words at `mine`, factors at `pairs`. row: the lane's lower one, among all rows of all chunks.
    static __device__ __forceinline__ void copy(u32 mine, u32 pairs, const Weights& w, u32 row, const Lane& lane) {
        const char *low = w.words + (u64)(row * (4 * STEPS) + lane.c) * 16, *high = w.words_high + (u64)(row * (4 * STEPS) + lane.c) * 16;
#pragma unroll
        for (int s = 0; s < STEPS; s++) copy16_once(mine + s * 512, low + s * 64);
#pragma unroll
        for (int s = 0; s < STEPS; s++) copy16_once(mine + (STEPS + s) * 512, high + s * 64);
        if constexpr (ABOVE) {  // the lower 8 rows by 16 lanes, the upper ones by the others
            const u64 place = (u64)(row - lane.g) * 32 + (lane.index & 15) * 16;
            copy16_once(pairs - ABOVE + lane.index * 16, (lane.index & 16 ? w.above_high : w.above) + place);
        }
        if constexpr (Per) {
            if (lane.index < 16) {
                const u32 beside = pairs + (lane.index & 15) * (4 * PAIRS);
                const u64 place = (u64)(row - lane.g + (lane.index & 7)) * (4 * PAIRS);
                copy_few<4 * PAIRS>(beside, (lane.index & 8 ? w.scales_high : w.scales) + place);
                if constexpr (ZeroPoint) copy_few<4 * PAIRS>(beside + 64 * PAIRS, (lane.index & 8 ? w.lifts_high : w.lifts) + place);
            }
        }
    }

    static __device__ __forceinline__ void take_pairs(u32* v, u32 at) {
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
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int s = 0; s < STEPS; s++) k.words[s][r] = take16(mine + (r * STEPS + s) * 512);
            if constexpr (Values::ABOVE == 2) {
                const u32 at = pairs - ABOVE + r * 256 + lane.g * 32 + lane.c * 8;
                k.above[r] = make_uint2(take4(at), take4(at + 4));
            } else if constexpr (Values::ABOVE == 1) {
                const u32 at = pairs - ABOVE + r * 256 + lane.g * 32 + lane.c * 4;
                k.above[r] = make_uint2(take4(at), take4(at + 16));
            }
            if constexpr (Per) take_pairs(k.scale[r], beside + r * 32 * PAIRS);
            if constexpr (ZeroPoint) take_pairs(k.zero_point[r], beside + (64 + r * 32) * PAIRS);
        }
    }

    template <int G> static __device__ __forceinline__ float number(const u32* pairs) {  // of group G
        const u32 pair = pairs[G / 2];
        if constexpr (Half) return float_of_half((u16)(G % 2 ? pair >> 16 : pair));
        else return __uint_as_float(G % 2 ? pair & 0xFFFF0000u : pair << 16);
    }

    // Of plane I two neighbouring columns, as instruction S takes them: of row R of two, word W of the lane's four.
    template <int I, int S, int R, int W> static __device__ __forceinline__ u32 value(const Chunk& c) {
        u32 above = 0;
        if constexpr (ABOVE) above = (Values::ABOVE == 2 ? W < 2 : S == 0) ? c.above[R].x : c.above[R].y;
        return Values::template value<I % (PLANES / 2), W>(c.words[S][R], above);
    }

    template <int I, int S> static __device__ __forceinline__ void instruction(float (&d)[4], const Chunk& c, u32 b0, u32 b1) {
        constexpr int W = I < PLANES / 2 ? 0 : 1;  // words of the second half of the planes are next to those of the first
        multiply(d, value<I, S, 0, W>(c), value<I, S, 1, W>(c), value<I, S, 0, W + 2>(c), value<I, S, 1, W + 2>(c), b0, b1);
    }

    // Planes I and on: d sums those of a group, b is x of 32 columns.
    template <int I> static __device__ __forceinline__ void planes(float (&acc)[HELD], float (&d)[4], uint4 b, const Chunk& c, u32 xs, u32 totals) {
        if constexpr (STEPS == 2 || I % 2 == 0) b = read16(xs + I * STEPS / 2 * 64);
        if constexpr (Per == 0) {
            instruction<I, 0>(acc, c, b.x, b.y), instruction<I, 1>(acc, c, b.z, b.w);
        } else {
            if constexpr (I % Per == 0) d[0] = d[1] = d[2] = d[3] = 0.f;
            if constexpr (STEPS == 2) instruction<I, 0>(d, c, b.x, b.y), instruction<I, 1>(d, c, b.z, b.w);
            else if constexpr (I % 2 == 0) instruction<I, 0>(d, c, b.x, b.y);
            else instruction<I, 0>(d, c, b.z, b.w);
            if constexpr (I % Per == Per - 1) add_group<I / Per>(acc, d, c, totals);
        }
        if constexpr (I + 1 < PLANES) planes<I + 1>(acc, d, b, c, xs, totals);
    }

    template <int G> static __device__ __forceinline__ void add_group(float (&acc)[HELD], const float (&d)[4], const Chunk& c, u32 totals) {
        const float f = number<G>(c.scale[0]), e = number<G>(c.scale[1]);
#pragma unroll
        for (int i = 0; i < SUMS / 2; i++) {
            acc[i] = fmaf(d[i], f, acc[i]);
            acc[i + SUMS / 2] = fmaf(d[i + 2], e, acc[i + SUMS / 2]);
        }
        if constexpr (ZeroPoint) {
            const float p = number<G>(c.zero_point[0]), q = number<G>(c.zero_point[1]);
#pragma unroll
            for (int i = 0; i < SUMS / 2; i++) {
                const float total = read_float(totals + (G * TOKENS + i) * 4);
                acc[i] = fmaf(p, total, acc[i]);
                acc[i + SUMS / 2] = fmaf(q, total, acc[i + SUMS / 2]);
            }
        }
    }

    // The products of a chunk with the x of its columns at xs; totals: sums of x over its groups, TOKENS floats each.
    static __device__ __forceinline__ void add(float (&acc)[HELD], const Chunk& c, u32 xs, u32 totals) {
        float d[4];
        planes<0>(acc, d, make_uint4(0, 0, 0, 0), c, xs, totals);
    }

    // What a unit's chunks come to, with the factors of its lower and its upper row.
    static __device__ __forceinline__ void close(float (&sums)[SUMS], const float (&acc)[HELD], float lower, float upper) {
#pragma unroll
        for (int i = 0; i < SUMS / 2; i++) {
            sums[i] = acc[i], sums[i + SUMS / 2] = acc[i + HELD / 2];
            if constexpr (Factor) sums[i] = __fmul_rn(sums[i], lower), sums[i + SUMS / 2] = __fmul_rn(sums[i + SUMS / 2], upper);
        }
    }

    // x as the lanes multiply it: 32 columns of a token are 64 bytes, lane c of four takes 16 of them: its columns of the first instruction,
    // then of the second. place: where columns 8 j to 8 j + 3 go, the next four lie 16 bytes further.
    static __device__ __forceinline__ u32 place(u32 xs, int j) { return xs + (j >> 2) * 64 + (j & 1) * 32 + (j & 2) * 4; }

    static __device__ __forceinline__ void laid(uint4& v, int j) {
        if (Values::fourfold((u32)j / (2 * STEPS) % (PLANES / 2))) {  // times 4, added to -0: zeros keep their sign
            v.x = fma2(v.x, 0x40804080, 0x80008000), v.y = fma2(v.y, 0x40804080, 0x80008000);
            v.z = fma2(v.z, 0x40804080, 0x80008000), v.w = fma2(v.w, 0x40804080, 0x80008000);
        }
    }
};
#endif
