"""Unpacks words of packed weights to planes of bfloat16, two neighbouring columns per register (layout: `quant`).

`planes_of` is inline PTX on a GPU and plain arithmetic elsewhere (the interpreter, other dtypes): the same numbers.
Cost of each kind, in instructions per two weights: int4 a shift, a mask and a subtraction; five and six bits two more
for the high bits; int8 the same with two masks; fp8 and fp4 move sign, exponent and mantissa into place and multiply by
a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _int4(offset: int) -> str:
    """Nibble q under the exponent of 128 is 128 + q: exact. offset is taken away with it."""
    take = {8: "0xC308C308", 0: "0xC300C300"}[offset]  # -136, -128
    text = "{.reg .b32 t, m, g, o, u; mov.b32 m, 0x000F000F; mov.b32 g, 0x43004300; mov.b32 o, 0x3F803F80; "
    text += f"mov.b32 u, {take};\n"
    for half in range(2):
        for p in range(4):
            text += f"shr.u32 t, ${8 + half}, {4 * p}; lop3.b32 t, t, m, g, 0xEA; "
            text += f"fma.rn.bf16x2 ${4 * half + p}, t, o, u;\n"
    return text + "}"


def _above(width: int, offset: int) -> str:
    """A nibble and one or two bits above it, which `high` holds for the four planes of both columns: under the exponent
    of 128 as well."""
    take = {0: "0xC300C300", 16: "0xC310C310", 32: "0xC320C320"}[offset]
    text = "{.reg .b32 t, u, v, m, g, o, z, c; mov.b32 m, 0x000F000F; mov.b32 g, 0x43004300; mov.b32 o, 0x3F803F80; "
    text += f"mov.b32 z, {take};\nmov.b32 c, {'0x00100010' if width == 1 else '0x00300030'};\n"
    for half in range(2):  # each column's bits into the half of the register that its nibbles are in
        text += f"mul.lo.u32 v, ${10 + half}, 0x1001;\n" if width == 1 else f"prmt.b32 v, ${10 + half}, 0, 0x4140;\n"
        for p in range(4):
            move = 4 - width * p
            text += f"shr.u32 t, ${8 + half}, {4 * p}; lop3.b32 t, t, m, g, 0xEA;\n"
            text += f"{'shl.b32' if move >= 0 else 'shr.u32'} u, v, {abs(move)}; lop3.b32 t, u, c, t, 0xEA;\n"
            text += f"fma.rn.bf16x2 ${4 * half + p}, t, o, z;\n"
    return text + "}"


def _int8() -> str:
    """A byte less 128: its low seven bits under the exponent of 128, less 128 or 256 by its top bit (stored turned)."""
    text = "{.reg .b32 s, t, v, m, h, g, n; mov.b32 m, 0x007F007F; mov.b32 h, 0x00800080; mov.b32 g, 0x43004300; "
    text += "mov.b32 n, 0xBF80BF80;\n"
    for half in range(2):
        for p in range(2):
            text += f"shr.u32 s, ${4 + half}, {8 * p}; lop3.b32 t, s, m, g, 0xEA; lop3.b32 v, s, h, g, 0xEA;\n"
            text += f"fma.rn.bf16x2 ${2 * half + p}, v, n, t;\n"
    return text + "}"


def _float(bits: int, mask: str, factor: str, shift: int) -> str:
    """e4m3 and e2m1 moved into bfloat16's fields have an exponent that is 120 or 126 too low: multiplied by 2^120 or
    2^126 they are exact, subnormals included."""
    planes = 16 // bits
    text = f"{{.reg .b32 s, t, m, h, f, z; mov.b32 m, {mask}; mov.b32 h, 0x80008000; mov.b32 f, {factor}; "
    text += "mov.b32 z, 0x80008000;\n"
    for half in range(2):
        for p in range(planes):
            move = f"shl.b32 s, ${2 * planes + half}, {16 - bits - bits * p}; shr.u32 t, s, {shift}"
            text += f"{move}; and.b32 t, t, m; lop3.b32 t, s, h, t, 0xEA;\n"
            text += f"fma.rn.bf16x2 ${planes * half + p}, t, f, z;\n"
    return text + "}"


def _pairs() -> str:
    """Two words of two neighbouring e4m3 each: the first ones, and the second ones. A byte's sign, repeated above it,
    and its seven bits are moved together; then as above."""
    text = "{.reg .b32 s, t, m, f, z; mov.b32 m, 0x87F087F0; mov.b32 f, 0x7B807B80; mov.b32 z, 0x80008000;\n"
    for which, pick in enumerate(("0xA280", "0xB391")):
        text += f"prmt.b32 s, $2, 0, {pick}; shl.b32 t, s, 4; and.b32 t, t, m; fma.rn.bf16x2 ${which}, t, f, z;\n"
    return text + "}"


INT4 = tl.constexpr(_int4(8))
UINT4 = tl.constexpr(_int4(0))
INT5 = tl.constexpr(_above(1, 16))
UINT5 = tl.constexpr(_above(1, 0))
INT6 = tl.constexpr(_above(2, 32))
INT8 = tl.constexpr(_int8())
FP8 = tl.constexpr(_float(8, "0x07F007F0", "0x7B807B80", shift=4))
FP4 = tl.constexpr(_float(4, "0x01C001C0", "0x7E807E80", shift=6))
EIGHT = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r")
EIGHT_ABOVE = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r")
FOUR = tl.constexpr("=r,=r,=r,=r,r,r")
PAIRS = tl.constexpr(_pairs())
PAIRS_TO_HALVES = tl.constexpr(
    "{.reg .b32 s; .reg .b16 a, b; prmt.b32 s, $2, 0, 0x3120; mov.b32 {a, b}, s; cvt.rn.f16x2.e4m3x2 $0, a; "
    "cvt.rn.f16x2.e4m3x2 $1, b;}"
)


@triton.jit
def plain_value(bits, CODES: tl.constexpr):
    """An integer code as float32."""
    if CODES == "int4":
        return (bits - 8).to(tl.float32)
    elif CODES == "uint4" or CODES == "uint5":
        return bits.to(tl.float32)
    elif CODES == "int5":
        return (bits - 16).to(tl.float32)
    elif CODES == "int6":
        return (bits - 32).to(tl.float32)
    elif CODES == "int8":
        return (bits & 127).to(tl.float32) - (bits & 128).to(tl.float32)
    elif CODES == "fp8":
        sign = (bits & 128) << 24
        body = (bits & 127) << 20
        return (sign | body).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    else:
        sign = (bits & 8) << 28
        body = (bits & 7) << 22
        return (sign | body).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def _plain_plane(
    words, above, i: tl.constexpr, CODES: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr
):
    BITS: tl.constexpr = 8 if CODES == "int8" or CODES == "fp8" else 4
    HALF: tl.constexpr = 16 // BITS
    first, second = tl.split(tl.reshape(words, (BN, P // 2, 2)))
    word = first if i < HALF else second
    low = (word >> (BITS * (i % HALF))) & ((1 << BITS) - 1)
    high = (word >> (BITS * (i % HALF) + 16)) & ((1 << BITS) - 1)
    WIDTH: tl.constexpr = 2 if CODES == "int6" else 1 if CODES == "int5" or CODES == "uint5" else 0
    if WIDTH > 0:
        first, second = tl.split(tl.reshape(above, (BN, P // 2, 2)))
        more = first if i < HALF else second
        low |= ((more >> (WIDTH * (i % HALF))) & ((1 << WIDTH) - 1)) << 4
        high |= ((more >> (WIDTH * (i % HALF + 4))) & ((1 << WIDTH) - 1)) << 4
    both = tl.reshape(tl.join(plain_value(low, CODES), plain_value(high, CODES)), (BN, P))
    return both.to(KIND)


@triton.jit
def planes_of(
    words, above, CODES: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, PLAIN: tl.constexpr
):
    """int32 [BN, P] -> 8 or 4 planes [BN, P]; above: of five and six bits those above the nibbles, likewise."""
    if PLAIN:
        a = _plain_plane(words, above, 0, CODES, P, BN, KIND)
        b = _plain_plane(words, above, 1, CODES, P, BN, KIND)
        c = _plain_plane(words, above, 2, CODES, P, BN, KIND)
        d = _plain_plane(words, above, 3, CODES, P, BN, KIND)
        if CODES == "int8" or CODES == "fp8":
            return a, b, c, d
        else:
            e = _plain_plane(words, above, 4, CODES, P, BN, KIND)
            f = _plain_plane(words, above, 5, CODES, P, BN, KIND)
            g = _plain_plane(words, above, 6, CODES, P, BN, KIND)
            h = _plain_plane(words, above, 7, CODES, P, BN, KIND)
            return a, b, c, d, e, f, g, h
    elif CODES == "int8" or CODES == "fp8":
        eight: tl.constexpr = INT8 if CODES == "int8" else FP8
        return tl.inline_asm_elementwise(eight, FOUR, [words], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2)
    elif CODES == "int4" or CODES == "uint4" or CODES == "fp4":
        four: tl.constexpr = INT4 if CODES == "int4" else UINT4 if CODES == "uint4" else FP4
        return tl.inline_asm_elementwise(four, EIGHT, [words], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2)
    else:
        more: tl.constexpr = INT5 if CODES == "int5" else UINT5 if CODES == "uint5" else INT6
        return tl.inline_asm_elementwise(
            more, EIGHT_ABOVE, [words, above], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2
        )
