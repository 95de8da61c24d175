// Values of weights: dequantised codes of n bits, as a pair of bfloat16 that the matrix instruction takes (the layout:
// ops/triton/quant.py; the same numbers: ops/triton/unpack.py). A word holds, for half of a chunk's planes, two neighbouring columns of each.
//
// Each has: PLANE: columns of a plane; PLANES of a chunk; ABOVE: bits of a code outside its word; value<P, W>: plane P of the half that word W
// of four holds; fourfold(P): that value is a quarter of the weight, and x is multiplied by four. Words of four: the
// first half of the planes (0, 2), the second half (1, 3) of a lane's first two columns, then of its other two.
#ifndef OUTRIDER_VALUES
#define OUTRIDER_VALUES
#include "device.cuh"

template <int W> __device__ __forceinline__ u32 word(const uint4& four) { return W == 0 ? four.x : W == 1 ? four.y : W == 2 ? four.z : four.w; }

// Offset 8 or 0: subtracted from a nibble.
template <int Offset> struct Nibbles {
    static constexpr int PLANE = 32, PLANES = 8, ABOVE = 0;
    static __device__ constexpr bool fourfold(int p) { return p % 2 == 1; }

    // Nibble P of both halves of a word; for nibbles 2 and 3 it is moved down by 8. An even one under the exponent of 128 is 128 + q. An odd
    // one is, unchanged, the subnormal number q · 2^-129; times 2^127 it is q / 4: no shift.
    template <int P, int W> static __device__ __forceinline__ u32 value(const uint4& four, u32) {
        const u32 w = word<W>(four) >> P / 2 * 8;
        if constexpr (P % 2 == 0) return fma2(and_or<0x000F000F>(w, 0x43004300), 0x3F803F80, Offset ? 0xC308C308 : 0xC300C300);  // -136, -128
        else return fma2(w & 0x00F000F0, 0x7F007F00, Offset ? 0xC000C000 : 0);  // -2, 0
    }
};

// A nibble and a bit above it, which is stored separately: a byte of `above` for each word, four planes of a column, then of the next. Offset 16 or 0.
template <int Offset> struct Fives {
    static constexpr int PLANE = 32, PLANES = 8, ABOVE = 1;
    static __device__ constexpr bool fourfold(int) { return false; }

    template <int P, int W> static __device__ __forceinline__ u32 value(const uint4& four, u32 above) {
        const u32 top = __byte_perm(above, 0, 0x4440 + W) * 0x1001 << (4 - P);  // each column's in the half that its nibbles are in
        const u32 number = and_or<0x00100010>(top, and_or<0x000F000F>(word<W>(four) >> 4 * P, 0x43004300));
        return fma2(number, 0x3F803F80, 0xC300C300 + Offset * 0x10001);  // -(128 + Offset)
    }
};

// Two bits above: of both words of two columns 16 bits each, four planes of a column, then of the next. A plane's numbers of both halves are
// put together, one a byte, and each half takes its bytes out of them; 32 is subtracted from the number.
struct Integer6 {
    static constexpr int PLANE = 16, PLANES = 8, ABOVE = 2;
    static __device__ constexpr bool fourfold(int) { return false; }

    template <int P, int W> static __device__ __forceinline__ u32 value(const uint4& four, u32 above) {
        const u32 nibbles = __byte_perm(word<W / 2 * 2>(four), word<W / 2 * 2 + 1>(four), P < 2 ? 0x6240 : 0x7351) >> (P % 2 * 4);
        const u32 tops = __byte_perm(above, 0, 0x3120), top = P < 3 ? tops << (P < 3 ? 4 - 2 * P : 0) : tops >> 2;
        const u32 numbers = and_or<0x30303030>(top, nibbles & 0x0F0F0F0F);
        return fma2(__byte_perm(numbers, 0x43434343, W % 2 ? 0x4341 : 0x4240), 0x3F803F80, 0xC320C320);  // 128 + q, -160
    }
};

// e4m3 moved into bfloat16's fields has its exponent 120 too low: times 2^120 it is exact, subnormal numbers included.
struct Float8 {
    static constexpr int PLANE = 32, PLANES = 4, ABOVE = 0;
    static __device__ constexpr bool fourfold(int) { return false; }

    template <int P, int W> static __device__ __forceinline__ u32 value(const uint4& four, u32) {
        const u32 w = word<W>(four);
        const u32 rest = P ? w >> 4 : w << 4, sign = P ? w : w << 8;
        return fma2(and_or<0x80008000>(sign, rest & 0x07F007F0), 0x7B807B80, 0x80008000);  // added to -0: zeros keep their sign
    }
};

// A byte less 128 (its top bit is stored turned): the low seven bits under the exponent of 128, less 128 or 256 by the top one.
struct Integer8 {
    static constexpr int PLANE = 32, PLANES = 4, ABOVE = 0;
    static __device__ constexpr bool fourfold(int) { return false; }

    template <int P, int W> static __device__ __forceinline__ u32 value(const uint4& four, u32) {
        const u32 w = word<W>(four) >> P * 8;
        return fma2(and_or<0x00800080>(w, 0x43004300), 0xBF80BF80, and_or<0x007F007F>(w, 0x43004300));
    }
};

// e2m1: its exponent is 126 too low in bfloat16's fields.
struct Float4 {
    static constexpr int PLANE = 16, PLANES = 8, ABOVE = 0;
    static __device__ constexpr bool fourfold(int) { return false; }

    template <int P, int W> static __device__ __forceinline__ u32 value(const uint4& four, u32) {
        const u32 w = word<W>(four);
        const u32 rest = P == 3 ? w >> 6 : P == 2 ? w >> 2 : P == 1 ? w << 2 : w << 6;
        return fma2(and_or<0x80008000>(w << (12 - 4 * P), rest & 0x01C001C0), 0x7E807E80, 0x80008000);
    }
};

typedef Nibbles<8> Integer4;
typedef Nibbles<0> Unsigned4;
typedef Fives<16> Integer5;
typedef Fives<0> Unsigned5;
#endif
