"""The block formats of GGUF, decoded exactly as the format defines them.

A row of K weights is K / size blocks; a block is `nbytes` bytes. Numbers are little-endian; d, m are float16.
A weight is code * scale + offset, in float32 with one rounding per operation (which is ggml's order). Codes of the
formats in `CODE_TABLES` stand for the values of a small table; IQ1, IQ2 and IQ3 store eight or four codes as the index
of a point of a code book (`gguf_grids`), and signs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..gguf_blocks import BLOCKS
from .base import Format, Unit, Weight
from .gguf_grids import points


@dataclass(frozen=True)
class GGUFBlockFormat(Format):
    """One of the block formats; its tensor `blocks` is uint8 [N, bytes of a row], as stored in the file."""

    kind: str

    @property
    def name(self) -> str:
        return self.kind

    @property
    def units(self) -> Mapping[str, Unit]:
        size, nbytes = BLOCKS[self.kind]
        return {"blocks": Unit(size, nbytes)}

    def dequantise(self, weight: Weight) -> Tensor:
        blocks = weight.tensors["blocks"]
        return dequantize(self.kind, blocks.flatten(0, -2).cpu()).view(weight.shape).to(blocks.device)


@dataclass(frozen=True)
class CodeTable:
    """A weight is values[code] * unit * scale; both products with the scale are exact in float32."""

    values: tuple[int, ...]
    unit: float = 1.0


IQ4_TABLE = CodeTable((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
FP4_TABLE = CodeTable((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))  # e2m1, doubled
# -1, 0 or 1, and an eighth more; where the sign bit is set, an eighth less
IQ1_TABLE = CodeTable((-7, 1, 9, 0, -9, -1, 7, 0), 0.125)
IQ2_TABLE = CodeTable((8, 25, 43, 0, -8, -25, -43, 0), 0.125)
IQ3_XXS_TABLE = CodeTable((4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62), 0.25)
IQ3_S_TABLE = CodeTable((1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15))
CODE_TABLES = {
    "Q1_0": CodeTable((-1, 1)),
    "IQ1_S": IQ1_TABLE,
    "IQ1_M": IQ1_TABLE,
    "IQ2_XXS": IQ2_TABLE,
    "IQ2_XS": IQ2_TABLE,
    "IQ2_S": IQ2_TABLE,
    "IQ3_XXS": IQ3_XXS_TABLE,
    "IQ3_S": IQ3_S_TABLE,
    "IQ4_NL": IQ4_TABLE,
    "IQ4_XS": IQ4_TABLE,
    "MXFP4": FP4_TABLE,
    "NVFP4": FP4_TABLE,
}
# the code of 0 in the other formats, where it is not 0
ZERO = {"Q2_0": 1, "Q3_K": 4, "Q4_0": 8, "Q5_0": 16, "Q6_K": 32, "TQ1_0": 1, "TQ2_0": 1}


def dequantize(kind: str, rows: Tensor) -> Tensor:
    """uint8 [N, bytes per row] -> float32 [N, K]."""
    codes = codes_of(kind, rows)
    scale, offset = scales_of(kind, rows)
    if kind in CODE_TABLES:
        table = CODE_TABLES[kind]
        values = (torch.tensor(table.values) * table.unit)[codes.int()]
    else:
        values = codes.float().sub_(ZERO.get(kind, 0))
    values = values.unflatten(1, (scale.shape[1], -1)).mul_(scale[:, :, None])
    return (values if offset is None else values.add_(offset[:, :, None])).flatten(1)


# ---- codes ----------------------------------------------------------------------------------------------------------
def codes_of(kind: str, rows: Tensor) -> Tensor:
    """uint8 [N, bytes per row] -> uint8 (Q8_0: int8) [N, K], on any device."""
    size, nbytes = BLOCKS[kind]
    b = rows.unflatten(1, (-1, nbytes))  # [N, blocks, nbytes]
    if kind == "Q8_0":
        codes = b[..., 2:].contiguous().view(torch.int8)
    elif kind == "Q2_K":
        codes = _bit_pairs(b[..., 16:80])
    elif kind == "TQ2_0":
        codes = _bit_pairs(b[..., :64])
    elif kind == "Q3_K":  # bit s of the mask belongs to sub-block s
        codes = _bit_pairs(b[..., 32:96]) | (_bits(b[..., None, :32], 8, 1) << 2).flatten(-2)
    elif kind in ("Q4_K", "Q5_K"):
        codes = _nibbles(b[..., -128:], 4)  # each 32 bytes hold two sub-blocks
        if kind == "Q5_K":  # bit s belongs to sub-block s
            codes |= (_bits(b[..., None, 16:48], 8, 1) << 4).flatten(-2)
    elif kind == "Q6_K":
        codes = _nibbles(b[..., :128], 2) | (_bit_pairs(b[..., 128:192]) << 4)
    elif kind == "TQ1_0":
        codes = _trits(b)
    elif kind == "NVFP4":
        codes = _nibbles(b[..., 4:], 4)
    elif kind == "Q1_0":
        codes = _sign_bits(b[..., 2:].int()).to(torch.uint8)
    elif kind == "Q2_0":  # four neighbours in a byte, the first in the lowest bits
        codes = ((b[..., 2:, None] >> _steps(4, 2, b)) & 3).flatten(-2).to(torch.uint8)
    elif kind.startswith(("IQ1", "IQ2", "IQ3")):
        codes = _lattice_codes(kind, b)
    else:
        codes = _nibbles(b[..., -size // 2 :], size // 32)
        if kind in ("Q5_0", "Q5_1"):
            shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)
            codes |= (((b[..., -20:-16, None] >> shifts) & 1) << 4).flatten(-2)
    return codes.flatten(1)


def _nibbles(b: Tensor, pieces: int) -> Tensor:
    """Splits bytes into nibbles: in each piece of the last dimension all low halves, then all high halves."""
    b = b.unflatten(-1, (pieces, -1))
    return torch.cat((b & 15, b >> 4), dim=-1).flatten(-2)


def _bits(b: Tensor, count: int, width: int) -> Tensor:
    """[.., 1, M] -> [.., count, M]: `count` fields of `width` bits of every byte, the lowest first."""
    shifts = torch.arange(0, count * width, width, dtype=torch.uint8, device=b.device)
    return (b >> shifts[:, None]) & ((1 << width) - 1)


def _bit_pairs(b: Tensor) -> Tensor:
    """64 bytes -> 256 codes: in each half all lowest pairs of bits, then the next."""
    return _bits(b.unflatten(-1, (2, 1, 32)), 4, 2).flatten(-3)


def _trits(b: Tensor) -> Tensor:
    """TQ1_0: a byte is five (of the last four bytes four) digits of a fraction to the base of three."""
    digits = []
    for lo, hi, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = torch.tensor([3**i for i in range(count)], dtype=torch.uint8, device=b.device)
        digits.append((b[..., None, lo:hi] * powers[:, None]).flatten(-2))  # eight bits wrap
    return ((torch.cat(digits, dim=-1).short() * 3) >> 8).to(torch.uint8)


def _lattice_codes(kind: str, b: Tensor) -> Tensor:
    """IQ1, IQ2, IQ3: the indexes of a point's magnitudes, with the sign (IQ1: of the eighth) in the bit above."""
    at, count = {
        "IQ1_S": (2, 32), "IQ1_M": (0, 32), "IQ2_XXS": (2, 64), "IQ2_XS": (2, 64), "IQ2_S": (2, 32),
        "IQ3_XXS": (2, 64), "IQ3_S": (2, 64),
    }[kind]  # fmt: skip
    low = b[..., at : at + count].int()
    if kind == "IQ1_S":
        words = _words(b[..., 34:50])
        place = low | ((words[..., None] >> _steps(4, 3, b)) & 7).flatten(-2) << 8
        signs = (words[..., None] >> 15).expand(*words.shape, 32).flatten(-2)
    elif kind == "IQ1_M":
        high = ((b[..., 32:48, None].int() >> _steps(2, 4, b)) & 15).flatten(-2)
        place = low | (high & 7) << 8
        signs = (high >> 3).repeat_interleave(8, -1)
    elif kind == "IQ2_XXS":  # eight bytes: four points, then four times seven signs and the scale
        groups = low.unflatten(-1, (8, 8))
        place = groups[..., :4].flatten(-2)
        signs = _seven_signs(groups[..., 4:])
    elif kind == "IQ2_XS":
        words = _words(b[..., 2:66])
        place = words & 511
        signs = _sign_bits(_with_parity(words >> 9))
    elif kind == "IQ2_S":
        place = low | ((b[..., 66:74, None].int() >> _steps(4, 2, b)) & 3).flatten(-2) << 8
        signs = _sign_bits(b[..., 34:66].int())
    elif kind == "IQ3_XXS":
        place = low
        signs = _seven_signs(b[..., 66:98].int().unflatten(-1, (8, 4)))
    else:
        place = low | ((b[..., 66:74, None].int() >> _steps(8, 1, b)) & 1).flatten(-2) << 8
        signs = _sign_bits(b[..., 74:106].int())
    grid = torch.from_numpy(points("IQ1" if kind.startswith("IQ1") else kind)).to(b.device)
    sign = 3 if kind.startswith("IQ3") else 2
    return grid[place].flatten(-2) | (signs << sign).to(torch.uint8)


def _words(b: Tensor) -> Tensor:
    """Pairs of bytes -> int32."""
    b = b.int().unflatten(-1, (-1, 2))
    return b[..., 0] | b[..., 1] << 8


def _steps(count: int, width: int, like: Tensor) -> Tensor:
    return torch.arange(0, count * width, width, dtype=torch.int32, device=like.device)


def _seven_signs(b: Tensor) -> Tensor:
    """int32 [.., groups, 4 bytes] -> [.., groups * 32]: four times seven signs from the lowest bit on."""
    word = b[..., 0] | b[..., 1] << 8 | b[..., 2] << 16 | (b[..., 3] & 15) << 24
    return _sign_bits(_with_parity((word[..., None] >> _steps(4, 7, b)) & 127).flatten(-2))


def _with_parity(seven: Tensor) -> Tensor:
    """An eighth sign makes the number of signs even."""
    folded = seven ^ seven >> 4
    folded = folded ^ folded >> 2
    return seven | ((folded ^ folded >> 1) & 1) << 7


def _sign_bits(b: Tensor) -> Tensor:
    """int32 [.., M] -> [.., M * 8], the lowest bit first."""
    return ((b[..., None] >> _steps(8, 1, b)) & 1).flatten(-2)


# ---- scales ---------------------------------------------------------------------------------------------------------
def scales_of(kind: str, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """uint8 [N, bytes per row] -> float32 [N, groups]: scales, and offsets if the format has them."""
    b = rows.unflatten(1, (-1, BLOCKS[kind][1]))
    if kind == "Q2_K":
        pairs = b[..., :16]
        minima = _half(b, 82) * (pairs >> 4).float()
        return (_half(b, 80) * (pairs & 15).float()).flatten(1), (-minima).flatten(1)
    if kind in ("Q4_K", "Q5_K"):  # eight 6-bit scales and eight 6-bit minima in 12 bytes
        low = b[..., 4:8]
        mid = b[..., 8:12]
        high = b[..., 12:16]
        scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), dim=-1)
        minima = torch.cat((mid & 63, (high >> 4) | ((mid >> 6) << 4)), dim=-1)
        return (_half(b, 0) * scales.float()).flatten(1), (-(_half(b, 2) * minima.float())).flatten(1)
    if kind == "MXFP4":
        return _half_exponents(b[..., :1]).flatten(1), None
    if kind == "NVFP4":
        return _half_e4m3(b[..., :4]).flatten(1), None
    if kind in ("Q4_1", "Q5_1"):
        return _half(b, 0).flatten(1), _half(b, 2).flatten(1)
    if kind == "IQ1_M":  # the float16 lies in the highest bits of four words of scales
        words = _words(b[..., 48:56])
        nibbles = (words >> 12) << _steps(4, 4, b)
        factor = nibbles.sum(-1, keepdim=True).to(torch.int16).view(torch.float16).float()
        return (factor * _odd(((words[..., None] >> _steps(4, 3, b)) & 7).flatten(-2))).flatten(1), None
    at = {"Q3_K": 108, "Q6_K": 208, "TQ1_0": 52, "TQ2_0": 64}.get(kind, 0)
    factors = _factors(kind, b)
    return (_half(b, at) if factors is None else _half(b, at) * factors).flatten(1), None


def _factors(kind: str, b: Tensor) -> Tensor | None:
    """float32 [N, blocks, groups]: what a block's float16 is multiplied by; None: one."""
    if kind == "Q3_K":  # sixteen times six bits: eight bytes with the low halves, four with the top two bits
        low = _nibbles(b[..., 96:104], 1)
        return (low | _bits(b[..., None, 104:108], 4, 2).flatten(-2) << 4).float() - 32
    if kind == "Q6_K":
        return b[..., 192:208].contiguous().view(torch.int8).float()
    if kind == "IQ4_XS":  # 16 bits with the top two bits of eight scales, 4 bytes with their low halves
        high = _bits(b[..., 2:4].unflatten(-1, (2, 1, 1)), 4, 2).flatten(-3)
        return (_byte_nibbles(b[..., 4:8]) | (high << 4)).float() - 32
    if kind == "IQ1_S":
        return _odd((_words(b[..., 34:50]) >> 12) & 7)
    if kind == "IQ2_XXS":
        return _odd(b[..., 9:66:8] >> 4)
    if kind == "IQ2_XS":
        return _odd(_byte_nibbles(b[..., 66:74]))
    if kind == "IQ2_S":
        return _odd(_byte_nibbles(b[..., 74:82]))
    if kind == "IQ3_XXS":
        return _odd(b[..., 69:98:4] >> 4)
    return _odd(_byte_nibbles(b[..., 106:110])) if kind == "IQ3_S" else None


def _odd(scale: Tensor) -> Tensor:
    return 2 * scale.float() + 1


def _byte_nibbles(b: Tensor) -> Tensor:
    """Both halves of every byte, the lower one first."""
    return torch.stack((b & 15, b >> 4), dim=-1).flatten(-2)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of every block: float32 [N, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _half_exponents(exponent: Tensor) -> Tensor:
    """Half of two to the power of (byte - 127): two exponents are below float32's normal range."""
    wide = exponent.int()
    return torch.where(wide < 2, 0x200000 << wide, (wide - 1) << 23).view(torch.float32)


def _half_e4m3(b: Tensor) -> Tensor:
    """Half of an unsigned e4m3, whose only NaN is read as 0."""
    exponent = ((b >> 3) & 15).int()
    mantissa = (b & 7).float()
    power = torch.where(exponent == 0, 1, exponent) - 11  # of the mantissa's last bit, halved
    values = torch.ldexp(torch.where(exponent == 0, mantissa, mantissa + 8), power)
    return torch.where(b == 127, 0.0, values)
