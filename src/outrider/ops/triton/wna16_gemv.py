"""Products of up to 8 bfloat16 tokens with every code of `repack`, scales of groups, of rows or both, and no epilogue
except a gate, in CUDA C++ (`ops/cuda/wna16_gemv.cu`): the bits of `quant`, faster."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from ..backend import Epilogue
from ..cuda.runtime import FOLDER, Flags, struct
from .lowrank import Lora, Shrunk
from .nvrtc_kernels import NvrtcKernels
from .quant_config import choose_quant_tile
from .repack import ROWS, Codes, QuantWeight

SOURCE = FOLDER / "wna16_gemv.cu"
MAX_GEMV_TOKENS = 8
WARP_ROWS = 16  # rows of the weight that a warp takes
ACTS = {"": 0, "gelu_tanh": 1, "silu": 2}
Shape = struct("units.cuh", "Shape")
Weights = struct("codes.cuh", "Weights")
VALUES = {  # of values.cuh, and the columns of a plane that they have there
    Codes.INT4: ("Integer4", 32), Codes.UINT4: ("Unsigned4", 32), Codes.INT5: ("Integer5", 32),
    Codes.UINT5: ("Unsigned5", 32),
    Codes.INT6: ("Integer6", 16), Codes.INT8: ("Integer8", 32), Codes.FP8: ("Float8", 32), Codes.FP4: ("Float4", 16),
}


@dataclass(frozen=True)
class WeightChunk:
    """A chunk in shared memory: as `Coded` of codes.cuh."""

    columns: int
    groups: int  # 0: no scales except those of whole rows
    stage: int  # bytes of 16 rows
    has_zero_point: bool

    @staticmethod
    def of(w: QuantWeight) -> WeightChunk:
        groups = w.planes // w.per if w.per else 0
        has_zero_point = w.zero_point is not None
        words = WARP_ROWS * (4 * w.plane + (32 if w.high is not None else 0))
        stage = words + 64 * -(-groups // 2) * (1 + has_zero_point)
        return WeightChunk(w.columns_of_chunk, groups, stage, has_zero_point=has_zero_point)

    def room_of_x(self, chunks: int, tokens: int) -> int:
        """Bytes of the columns of this many chunks, and of their sums by group if these are needed."""
        sums = chunks * self.groups * 4 * tokens_of(tokens) if self.has_zero_point else 0
        return tokens * (chunks * self.columns * 2 + 64) + sums


@dataclass(frozen=True)
class WorkUnits:
    """Units of work: tiles of 16 rows, each over `splits` spans of chunks, of which the last may be shorter."""

    tiles: int
    chunks: int
    span: int

    @property
    def splits(self) -> int:
        return -(-self.chunks // self.span)

    @property
    def rest(self) -> int:
        """Chunks of the last span."""
        return self.chunks - (self.splits - 1) * self.span

    @property
    def longs(self) -> int:
        return self.tiles * (self.splits if self.rest == self.span else self.splits - 1)

    @property
    def shorts(self) -> int:
        return self.tiles * self.splits - self.longs

    def edges(self, blocks: int) -> tuple[list[int], list[int]]:
        """First long and first short unit of each block, and the ends of the last one's, as the kernel counts them.
        The last blocks have one long unit more, the first ones a short one."""
        late = blocks - self.longs % blocks
        longs = [b * (self.longs // blocks) + max(0, b - late) for b in range(blocks + 1)]
        shorts = [b * (self.shorts // blocks) + min(b, self.shorts % blocks) for b in range(blocks + 1)]
        return longs, shorts

    def widest(self, blocks: int) -> int:
        """Chunks of x that the block with most of them needs."""
        longs, shorts = (list(pairwise(e)) for e in self.edges(blocks))
        spans = [((hi - 1) // self.tiles + 1 - lo // self.tiles if hi > lo else 0) for lo, hi in longs]
        return max(s * self.span + (self.rest if hi > lo else 0) for s, (lo, hi) in zip(spans, shorts, strict=True))


@lru_cache(maxsize=4096)
def choose_block(units: WorkUnits, chunk: WeightChunk, tokens: int, sms: int, room: int) -> tuple[int, int] | None:
    """Warps of the single block of an SM, and bytes of its shared memory; None if x does not fit."""
    x = chunk.room_of_x(units.widest(sms), tokens)
    for warps in (24, 16):
        shared = warps * 2 * chunk.stage + x
        if shared <= room:
            return warps, shared
    return None


class WNA16Gemv(NvrtcKernels):
    source = SOURCE

    def product(
        self, x: Tensor, w: QuantWeight, extras: Epilogue, pdl: bool, lora: Shrunk | None = None
    ) -> Tensor | None:
        """x [R, K] · wᵀ -> [R, N], or [R, N / 2] if it is gate and up; lora: adapters to be added. None: not one of
        these."""
        if not supports(x, w, extras) or not whole_tiles(lora):
            return None
        rows = x.shape[0]
        n, k = w.shape
        units = units_of(w)
        block = choose_block(units, WeightChunk.of(w), rows, sms=self.sms, room=self.room)
        if block is None:
            return None
        kernel = self.kernel("wna16_gemv", flags_of(w, extras, rows, warps=block[0], lora=lora))
        x = aligned(x, w)
        out = x.new_empty((rows, n // 2 if extras.gated else n))
        sums = units.tiles * units.splits * WARP_ROWS * tokens_of(rows)
        partial_out = x.new_empty(sums, dtype=torch.float32) if units.splits > 1 else out
        blocks = self.sms
        warps, shared = block
        shape = Shape(
            rows, n, k, units.chunks, units.span, units.splits, units.tiles, x.stride(0), -(-(1 << 32) // units.tiles),
            units.longs // blocks, units.longs % blocks, units.shorts // blocks, units.shorts % blocks, units.rest,
        )
        addresses = [x.data_ptr(), out.data_ptr(), partial_out.data_ptr(), self.semaphores.data_ptr()]
        changes = Lora() if lora is None else lora.pointers(x)
        kernel(blocks, 32 * warps, shared, [*addresses, weights_of(w, extras.gated), shape, changes], pdl)
        return out


def supports(x: Tensor, w: QuantWeight, extras: Epilogue) -> bool:
    """Whether the kernel supports this product, regardless of the device."""
    return 0 < x.shape[0] <= MAX_GEMV_TOKENS and compared(x, w, extras)


def compared(x: Tensor, w: QuantWeight, extras: Epilogue) -> bool:
    """Whether the kernel supports this product for some number of tokens."""
    n, k = w.shape
    plain = all(part is None for part in (extras.bias, extras.mul, extras.softcap))
    if not plain or extras.out_dtype not in (None, torch.bfloat16):
        return False
    known = w.plane == VALUES[w.codes][1] and (w.zero_point is None or (w.columns_of_chunk == 256 and k % 16 == 0))
    whole = n % (2 * ROWS) == 0 if extras.gated else n % WARP_ROWS == 0 and n > WARP_ROWS
    return known and whole and k % 8 == 0 and x.dtype == torch.bfloat16


def whole_tiles(lora: Shrunk | None) -> bool:
    """Do the matrices that a weight is fused of end with a tile, and has each range a row?"""
    return lora is None or (all(end % WARP_ROWS == 0 for end in lora.ends) and len(lora.ranges) <= len(lora.x))


def aligned(x: Tensor, w: QuantWeight) -> Tensor:
    """In the order of the weight's columns, rows where 16 bytes begin."""
    if w.order is not None:
        x = x[:, w.order]
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)  # also if it is contiguous, but not aligned to 16 bytes
    return x


def tokens_of(rows: int) -> int:
    """Columns of sums that the kernel is compiled for."""
    return 4 if rows <= 4 else MAX_GEMV_TOKENS


def units_of(w: QuantWeight) -> WorkUnits:
    """Work units with the same order of sums as in Triton's kernels."""
    span = -(-w.chunks // choose_quant_tile(w.padded, w.columns, w.codes.bits).splits)
    return WorkUnits(w.shape[0] // WARP_ROWS, w.chunks, span)


def weights_of(w: QuantWeight, gated: bool) -> ctypes.Structure:
    """Addresses of the lower and the upper 8 rows of the first tile, for each tensor; the upper ones of a gated tile
    are those of up."""
    lines = (w.shape[0] // 2 // ROWS) * w.chunks * ROWS if gated else WARP_ROWS // 2  # rows of chunks between the two
    both: list[int | None] = []
    for t in (w.words, w.scale, w.zero_point, w.high):
        both += [None, None] if t is None else [t.data_ptr(), t.data_ptr() + lines * t.shape[-1] * t.element_size()]
    if w.factor is not None:
        both += [w.factor.data_ptr(), w.factor.data_ptr() + 4 * (w.shape[0] // 2 if gated else WARP_ROWS // 2)]
    return Weights(*both)


def flags_of(w: QuantWeight, extras: Epilogue, rows: int, warps: int, lora: Shrunk | None = None) -> Flags:
    return dict(
        TOKENS=tokens_of(rows), VALUES=VALUES[w.codes][0], FACTOR=int(w.factor is not None), WARPS=warps,
        RANK=lora.rank if lora else 0, **common_flags(w, extras),
    )


def common_flags(w: QuantWeight, extras: Epilogue) -> dict[str, int]:
    """Those of all sources for quantised weights."""
    zero_point = int(w.zero_point is not None)
    return dict(GATED=int(extras.gated), ACT=ACTS[extras.act], HALF=int(w.half), PER=w.per, ZERO_POINT=zero_point)
