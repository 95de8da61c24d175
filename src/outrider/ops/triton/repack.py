"""Repacks weights into the layout of the quantised kernels (`quant`), on the device, when they are loaded.

`repack(weight)` takes the formats below. The values stay as the format defines them, except for scales that are
products of two numbers (K-quants) or float32 (FP8 by block): these are rounded to float16, a relative error of 2^-12.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from ..formats import Float8Format, GGUFBlockFormat, IntegerFormat, NvFp4Format, Weight
from ..formats.gguf import IQ1_TABLE, IQ2_TABLE, IQ3_S_TABLE, IQ3_XXS_TABLE, IQ4_TABLE, CodeTable, codes_of, scales_of
from ..formats.integer import halves

ROWS = 64  # rows of a weight that lie together
SLICE = 1 << 25  # weights unpacked at once
GROUPS = (0, 16, 32, 64, 128, 256)  # columns that share a scale; 0: whole rows


class Codes(Enum):
    INT4 = "int4"
    UINT4 = "uint4"
    FP4 = "fp4"
    INT8 = "int8"
    FP8 = "fp8"
    INT5 = "int5"
    UINT5 = "uint5"
    INT6 = "int6"

    @property
    def bits(self) -> int:
        """Bits of a code inside its word."""
        return 8 if self in (Codes.INT8, Codes.FP8) else 4

    @property
    def above(self) -> int:
        """Bits of a code outside its word."""
        return {Codes.INT5: 1, Codes.UINT5: 1, Codes.INT6: 2}.get(self, 0)


@dataclass(frozen=True)
class GGUFCodes:
    """How a GGUF format's codes and scales become those of the kernels: words[code] is a word of `codes`, the file's
    scale is multiplied by `unit` (a power of two)."""

    codes: Codes
    words: tuple[int, ...] | None = None  # None: the codes themselves
    unit: float = 1.0
    group: int = 0  # columns of a scale; 0: as in the file


def signed(codes: Codes, table: CodeTable, divisor: int = 1, group: int = 0) -> GGUFCodes:
    """A table's values, divided by `divisor`, as signed integers: INT8 in two's complement, the others from an
    offset on."""
    offset = {Codes.INT5: 16, Codes.INT6: 32}.get(codes, 0)
    words = tuple((value // divisor + offset) & 255 for value in table.values)
    return GGUFCodes(codes, words, table.unit * divisor, group=group)


TRITS = GGUFCodes(Codes.INT4, (7, 8, 9, 10))
GGUF_CODES = {
    "Q1_0": GGUFCodes(Codes.INT4, (7, 9)),
    "Q2_0": TRITS,
    "Q4_0": GGUFCodes(Codes.INT4),
    "Q4_1": GGUFCodes(Codes.UINT4),
    "Q8_0": GGUFCodes(Codes.INT8),
    "Q5_0": GGUFCodes(Codes.INT5),
    "Q5_1": GGUFCodes(Codes.UINT5),
    "Q2_K": GGUFCodes(Codes.UINT4),
    "Q3_K": GGUFCodes(Codes.INT4, tuple(range(4, 12))),
    "Q4_K": GGUFCodes(Codes.UINT4),
    "Q5_K": GGUFCodes(Codes.UINT5),
    "Q6_K": GGUFCodes(Codes.INT6),
    "IQ1_S": signed(Codes.INT5, IQ1_TABLE),
    "IQ1_M": signed(Codes.INT6, IQ1_TABLE),
    "IQ2_XXS": signed(Codes.INT8, IQ2_TABLE),
    "IQ2_XS": signed(Codes.INT8, IQ2_TABLE),
    "IQ2_S": signed(Codes.INT8, IQ2_TABLE),
    "IQ3_XXS": signed(Codes.INT6, IQ3_XXS_TABLE, divisor=2, group=16),
    "IQ3_S": signed(Codes.INT5, IQ3_S_TABLE),
    "IQ4_NL": signed(Codes.INT8, IQ4_TABLE),
    "IQ4_XS": signed(Codes.INT8, IQ4_TABLE),
    "TQ1_0": TRITS,
    "TQ2_0": TRITS,
    "MXFP4": GGUFCodes(Codes.FP4, unit=2.0, group=16),
    "NVFP4": GGUFCodes(Codes.FP4, unit=2.0),
}


@dataclass(frozen=True)
class QuantWeight:
    """A matrix [N, K] that `quant_linear` multiplies."""

    shape: tuple[int, int]
    codes: Codes
    plane: int  # columns of a plane
    per: int  # planes of a group; 0: factors are of whole rows
    words: Tensor  # int32 [N / 64, chunks, 64, plane]
    scale: Tensor | None  # int32 [N / 64, chunks, 64, pairs]: a float16 or bfloat16 for each of two groups
    zero_point: Tensor | None  # the same: what is added for each unit of the group's sum of x
    factor: Tensor | None  # float32 [N, filled up to whole 64]
    half: bool  # scale and zero_point are float16
    order: Tensor | None = None  # int64 [K]: the columns of x that the weight's stand for
    # uint8 or int16 [N / 64, chunks, 64, plane]: of five and six bits those above each word's nibbles
    high: Tensor | None = None

    @property
    def planes(self) -> int:
        return 32 // self.codes.bits

    @property
    def chunks(self) -> int:
        return self.words.shape[1]

    @property
    def columns_of_chunk(self) -> int:
        return self.planes * self.plane

    @property
    def columns(self) -> int:
        return self.chunks * self.columns_of_chunk

    @property
    def padded(self) -> int:
        return self.words.shape[0] * ROWS

    @property
    def nbytes(self) -> int:
        tensors = (self.words, self.high, self.scale, self.zero_point, self.factor, self.order)
        return sum(t.nbytes for t in tensors if t is not None)

    def view(self, *shape: int) -> QuantWeight:
        raise NotImplementedError("quantised weights of the GPU have no other shape: a head by clusters stays dense")


@dataclass(frozen=True)
class Parts:
    """Rows of unlike formats, one below the other: a product for each."""

    shape: tuple[int, int]
    parts: tuple[QuantWeight, ...]

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parts)

    def view(self, *shape: int) -> Parts:
        raise NotImplementedError("rows of unlike formats have no other shape")


@dataclass(frozen=True)
class Grid:
    """The common form of all formats: integers (or small floats) by column, numbers by group."""

    codes: Codes
    group: int  # 0: the whole row
    values: Callable[[int, int], Tensor]  # rows lo..hi-1 as uint8 [hi - lo, K], one code a byte
    scale: Tensor  # [N, K / group]
    zero_point: Tensor | None = None
    factor: Tensor | None = None  # [N, 1]
    order: Tensor | None = None


@dataclass(frozen=True)
class ChunkLayout:
    """How the words of a matrix [N, K] lie: in tiles of 64 rows and in chunks of columns, of one word per column of a
    plane."""

    n: int
    k: int
    bits: int
    plane: int  # columns of a plane

    @property
    def planes(self) -> int:
        return 32 // self.bits

    @property
    def columns(self) -> int:
        """Columns of a chunk."""
        return self.planes * self.plane

    @property
    def chunks(self) -> int:
        return -(-self.k // self.columns)

    @property
    def tiles(self) -> int:
        return -(-self.n // ROWS)


def repack(weight: Weight) -> QuantWeight | None:
    """The weight as the kernels read it; None for a format (or a width) that they do not support."""
    if len(weight.shape) != 2:
        return None
    grid = _grid(weight)
    if grid is None or grid.group not in GROUPS:
        return None
    n, k = weight.shape
    layout = ChunkLayout(n, k, grid.codes.bits, plane=16 if grid.group == 16 else 32)
    grid = _group_within_chunks(grid, layout)
    words, high = _pack_codes(grid, layout, device=next(iter(weight.tensors.values())).device)
    per = grid.group // layout.plane
    scale = None
    zero_point = None
    factor = grid.factor
    half = False
    if per == 0:  # the scale of a whole row
        factor = grid.scale.float() if factor is None else factor * grid.scale.float()
    else:
        half = grid.scale.dtype != torch.bfloat16
        grid = _scale_within_float16(grid)
        factor = grid.factor
        dtype = torch.float16 if half else torch.bfloat16
        scale = pairs(grid.scale.to(dtype), layout, groups=layout.planes // per)
        if grid.zero_point is not None:
            zero_point = pairs(grid.zero_point.to(dtype), layout, groups=layout.planes // per)
    if factor is not None:
        factor = torch.nn.functional.pad(factor.reshape(-1), (0, layout.tiles * ROWS - n)).contiguous()
    return QuantWeight(
        shape=(n, k),
        codes=grid.codes,
        plane=layout.plane,
        per=per,
        words=words,
        scale=scale,
        zero_point=zero_point,
        factor=factor,
        half=half,
        order=None if grid.order is None else grid.order.long(),
        high=high,
    )


def _group_within_chunks(grid: Grid, layout: ChunkLayout) -> Grid:
    """The grid with no group wider than a chunk. Whole rows with a zero point get a group per chunk."""
    columns = layout.columns
    if grid.group == 0 and grid.zero_point is not None:
        scale = grid.scale.expand(-1, layout.chunks)
        return replace(grid, group=columns, scale=scale, zero_point=grid.zero_point.expand(-1, layout.chunks))
    if grid.group > columns:
        chunks_per_group = grid.group // columns
        zero_point = None if grid.zero_point is None else grid.zero_point.repeat_interleave(chunks_per_group, 1)
        scale = grid.scale.repeat_interleave(chunks_per_group, 1)
        return replace(grid, group=columns, scale=scale, zero_point=zero_point)
    return grid


def _scale_within_float16(grid: Grid) -> Grid:
    """The grid with float32 scales divided by the largest of their row, so that float16 holds them well."""
    if grid.scale.dtype != torch.float32:
        return grid
    largest = grid.scale.abs().amax(1, keepdim=True).clamp_min(1e-30)
    return replace(
        grid,
        scale=grid.scale / largest,
        zero_point=None if grid.zero_point is None else grid.zero_point / largest,
        factor=largest if grid.factor is None else grid.factor * largest,
    )


def _pack_codes(grid: Grid, layout: ChunkLayout, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """`QuantWeight.words` and `high`, some tiles at a time."""
    words = torch.empty((layout.tiles, layout.chunks, ROWS, layout.plane), dtype=torch.int32, device=device)
    high = None
    high_bits = grid.codes.above
    if high_bits > 0:
        high = torch.empty(words.shape, dtype=torch.uint8 if high_bits == 1 else torch.int16, device=device)
    step = max(1, SLICE // (ROWS * layout.chunks * layout.columns))
    for first in range(0, layout.tiles, step):
        end = min(layout.tiles, first + step)
        block = grid.values(first * ROWS, min(layout.n, end * ROWS))
        low = block & 15 if high is not None else block
        words[first:end] = pack(low, end - first, layout, bits=layout.bits)
        if high is not None:
            high[first:end] = pack(block >> 4, end - first, layout, bits=high_bits, column=4 * high_bits)
    return words, high


def pack(codes: Tensor, tiles: int, layout: ChunkLayout, bits: int, column: int = 16) -> Tensor:
    """uint8 [N, K] -> int32 [tiles, chunks, 64, plane], the second column of a pair `column` bits above the first; what
    is missing is 0."""
    n, k = codes.shape
    chunks = layout.chunks
    planes = layout.planes
    plane = layout.plane
    codes = torch.nn.functional.pad(codes, (0, chunks * planes * plane - k, 0, tiles * ROWS - n))
    # half of the planes, plane in it, pair, column of the pair
    c = codes.view(tiles, ROWS, chunks, 2, planes // 2, plane // 2, 2)
    words = torch.zeros((tiles, ROWS, chunks, plane // 2, 2), dtype=torch.int32, device=codes.device)
    for half in range(2):
        for p in range(planes // 2):
            for h in range(2):
                words[..., half] |= c[:, :, :, half, p, :, h].int() << (bits * p + column * h)
    return words.view(tiles, ROWS, chunks, plane).transpose(1, 2)


def pairs(numbers: Tensor, layout: ChunkLayout, groups: int) -> Tensor:
    """16-bit [N, G] -> int32 [tiles, chunks, 64, pairs]: two groups of a chunk in a word, the first in its lower half.
    groups: of a chunk."""
    n, count = numbers.shape
    tiles = layout.tiles
    chunks = layout.chunks
    width = groups + groups % 2
    padded = torch.nn.functional.pad(numbers, (0, chunks * groups - count, 0, tiles * ROWS - n))
    padded = padded.view(tiles, ROWS, chunks, groups)
    padded = torch.nn.functional.pad(padded, (0, width - groups)).contiguous()
    return padded.view(torch.int32).transpose(1, 2).contiguous()  # [tiles, chunks, 64, pairs]


def _grid(weight: Weight) -> Grid | None:
    format = weight.format
    t = weight.tensors
    if isinstance(format, IntegerFormat):
        scale = t["scale"]
        middle = 1 << (format.bits - 1)
        zero_point = None
        if format.has_zero_point:
            zero_point = -scale.float() * (t["zero"].float() - middle)
            small = scale.float().abs()
            if scale.dtype == torch.bfloat16 and bool(((small > 6.2e-5) & (small < 6e4)).all()):
                scale = scale.to(torch.float16)  # exact, and the offset keeps three more bits
        four = format.bits == 4
        order = t.get("order")

        def integer_codes(lo: int, hi: int) -> Tensor:
            return halves(t["q"][lo:hi]) if four else t["q"][lo:hi] ^ 128

        return Grid(
            codes=Codes.INT4 if four else Codes.INT8,
            group=format.group,
            values=integer_codes,
            scale=scale,
            zero_point=zero_point,
            order=order,
        )
    if isinstance(format, Float8Format):
        return Grid(Codes.FP8, format.group, lambda lo, hi: t["q"][lo:hi].view(torch.uint8), scale=t["scale"])
    if isinstance(format, NvFp4Format):
        scale = t["scale"].to(torch.bfloat16)
        factor = t["factor"]
        return Grid(Codes.FP4, group=16, values=lambda lo, hi: halves(t["q"][lo:hi]), scale=scale, factor=factor)
    if not isinstance(format, GGUFBlockFormat) or format.kind not in GGUF_CODES:
        return None
    return _gguf_grid(format.kind, t["blocks"], weight.shape[1])


def _gguf_grid(kind: str, rows: Tensor, columns: int) -> Grid:
    form = GGUF_CODES[kind]
    factors, offsets = scales_of(kind, rows)
    factors = factors * form.unit
    group = columns // factors.shape[1]
    if form.group:
        factors = factors.repeat_interleave(group // form.group, 1)
        group = form.group
    words = None if form.words is None else torch.tensor(form.words, dtype=torch.uint8, device=rows.device)
    dtype = torch.bfloat16 if form.codes is Codes.FP4 else torch.float16  # powers of two have a wide range

    def block_codes(lo: int, hi: int) -> Tensor:
        codes = codes_of(kind, rows[lo:hi]).view(torch.uint8)
        return codes if words is None else words[codes.int()]

    return Grid(
        codes=form.codes,
        group=group,
        values=block_codes,
        scale=factors.to(dtype),
        zero_point=None if offsets is None else offsets.to(dtype),
    )
