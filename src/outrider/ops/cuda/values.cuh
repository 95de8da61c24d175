// Values of weights: what a code of so many bits stands for, as a pair of bfloat16 that the matrix instruction takes (the layout:
// ops/triton/quant.py; the same numbers: ops/triton/unpack.py). A word holds, for half of a chunk's planes, two neighbouring columns of each.
//
// Each has: PLANE: columns of a plane; PLANES of a chunk; ABOVE: bits of a code beside its word; value<P>: plane P of the word's half;
// fourfold(P): that value is a quarter of what it stands for, and the x it meets is taken four times.
#ifndef OUTRIDER_VALUES
#define OUTRIDER_VALUES
#include "device.cuh"

// Offset 8 or 0: what a nibble stands above.
template <int Offset> struct Nibbles {
    static constexpr int PLANE = 32, PLANES = 8, ABOVE = 0;
    static __device__ constexpr bool fourfold(int p) { return p % 2 == 1; }

    // Nibble P of both halves of a word; for nibbles 2 and 3 it is moved down by 8. An even one under the exponent of 128 is 128 + q. An odd
    // one is, as it stands, the subnormal number q · 2^-129; times 2^127 it is q / 4: no shift.
    template <int P> static __device__ __forceinline__ u32 value(u32 w, u32) {
        w >>= P / 2 * 8;
        if constexpr (P % 2 == 0) return fma2(and_or<0x000F000F>(w, 0x43004300), 0x3F803F80, Offset ? 0xC308C308 : 0xC300C300);  // -136, -128
        else return fma2(w & 0x00F000F0, 0x7F007F00, Offset ? 0xC000C000 : 0);  // -2, 0
    }
};

// A nibble and the bits above it, which stand apart; Offset: what their number stands above.
template <int Plane, int Above, int Offset> struct Wider {
    static constexpr int PLANE = Plane, PLANES = 8, ABOVE = Above;
    static __device__ constexpr bool fourfold(int) { return false; }

    // The bits above word W of four, each column's in the half of the register that its nibbles are in.
    template <int W> static __device__ __forceinline__ u32 spread(u32 low, u32 high) {
        if constexpr (Above == 2) return __byte_perm(W < 2 ? low : high, 0, W % 2 ? 0x4342 : 0x4140);  // 16 bits a word
        else return __byte_perm(low, 0, 0x4440 + W) * 0x1001;                                             // 8
    }

    template <int P> static __device__ __forceinline__ u32 value(u32 w, u32 above) {
        constexpr int MOVE = 4 - Above * P;
        const u32 top = MOVE >= 0 ? above << (MOVE >= 0 ? MOVE : 0) : above >> (MOVE >= 0 ? 0 : -MOVE);
        const u32 number = and_or<(Above == 2 ? 0x00300030u : 0x00100010u)>(top, and_or<0x000F000F>(w >> 4 * P, 0x43004300));
        return fma2(number, 0x3F803F80, 0xC300C300 + Offset * 0x10001);  // -(128 + Offset)
    }
};

// e4m3 moved into bfloat16's fields has its exponent 120 too low: times 2^120 it is exact, subnormal numbers included.
struct Float8 {
    static constexpr int PLANE = 32, PLANES = 4, ABOVE = 0;
    static __device__ constexpr bool fourfold(int) { return false; }

    template <int P> static __device__ __forceinline__ u32 value(u32 w, u32) {
        const u32 rest = P ? w >> 4 : w << 4, sign = P ? w : w << 8;
        return fma2(and_or<0x80008000>(sign, rest & 0x07F007F0), 0x7B807B80, 0x80008000);  // added to -0: zeros keep their sign
    }
};

// A byte less 128 (its top bit is stored turned): the low seven bits under the exponent of 128, less 128 or 256 by the top one.
struct Integer8 {
    static constexpr int PLANE = 32, PLANES = 4, ABOVE = 0;
    static __device__ constexpr bool fourfold(int) { return false; }

    template <int P> static __device__ __forceinline__ u32 value(u32 w, u32) {
        w >>= P * 8;
        return fma2(and_or<0x00800080>(w, 0x43004300), 0xBF80BF80, and_or<0x007F007F>(w, 0x43004300));
    }
};

// e2m1: its exponent is 126 too low in bfloat16's fields.
struct Float4 {
    static constexpr int PLANE = 16, PLANES = 8, ABOVE = 0;
    static __device__ constexpr bool fourfold(int) { return false; }

    template <int P> static __device__ __forceinline__ u32 value(u32 w, u32) {
        const u32 rest = P == 3 ? w >> 6 : P == 2 ? w >> 2 : P == 1 ? w << 2 : w << 6;
        return fma2(and_or<0x80008000>(w << (12 - 4 * P), rest & 0x01C001C0), 0x7E807E80, 0x80008000);
    }
};

typedef Nibbles<8> Integer4;
typedef Nibbles<0> Unsigned4;
typedef Wider<32, 1, 16> Integer5;
typedef Wider<32, 1, 0> Unsigned5;
typedef Wider<16, 2, 32> Integer6;
#endif
