"""Products of 9 to 40 tokens with weights of four bits, in CUDA C++ (`ops/cuda/more_rows.cu`): the bits of `quant`, sooner.

`suits` is the rule: what `few_rows` takes of 4-bit integers in groups, with more tokens. `choose_block` follows the number of tokens;
spans are part of the order of sums and the weight's alone, and `blocks_of_a_span` says who takes them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..cuda.runtime import FOLDER
from .compiled import Flags
from .few_rows import ACTS, MOST_TOKENS, Products, Units, aligned, compared, units_of, weights_of
from .quant import Extras, group_sums
from .repack import Codes, QuantWeight

SOURCE = FOLDER / "more_rows.cu"
MOST = 40  # tokens; at 48 registers leave two groups of warps instead of three, and Triton is as fast
PLANES = 8
NUMBERS = ("m", "n", "k", "chunks", "span", "splits", "tiles", "x_stride", "sums_stride", "longs", "per")


class Cut(ctypes.Structure):
    """What the kernel is told: `Cut` of more_rows.cu."""

    _fields_ = [(name, ctypes.c_int) for name in NUMBERS]


@dataclass(frozen=True)
class Block:
    """How the kernel is compiled."""

    eights: int  # of tokens
    warps: int
    tiles: int  # of a warp
    stages: int

    def shared(self, groups: int, lifted: bool) -> int:
        """Bytes. groups: of a chunk."""
        unit = 2048 + 64 * -(-groups // 2) * (1 + lifted)
        return self.stages * (self.warps * self.tiles * unit + self.eights * (4096 + (groups * 32 if lifted else 0)))


@lru_cache(maxsize=1024)
def choose_block(rows: int, groups: int, lifted: bool, room: int) -> Block | None:
    """Three groups of four warps, two tiles each: registers hold the sums of 40 tokens for that many. None where they do not fit."""
    blocks = (Block(-(-rows // 8), 12, 2, stages) for stages in (3, 2))
    return next((b for b in blocks if b.shared(groups, lifted) <= room), None)


def blocks_of_a_span(units: Units, blocks: int) -> int:
    """Blocks that each whole span has, so that those left over have a like share of a shorter last one; 0: there are too few."""
    if units.rest == units.span:
        return blocks // units.splits
    return min(blocks * units.span // units.chunks, (blocks - 1) // (units.splits - 1))


class MoreRows(Products):
    """The kernels of one device."""

    source, what, own = SOURCE, "4-bit weights at 9 to 40 tokens go", True

    def product(self, x: Tensor, w: QuantWeight, extras: Extras, pdl: bool) -> Tensor | None:
        """x [R, K] · wᵀ -> [R, N], or [R, N / 2] where it is gate and up; None: not one of these."""
        if not self.usable or not suits(x, w, extras):
            return None
        rows, n, k = x.shape[0], *w.shape
        units, groups, lifted = units_of(w), PLANES // w.per, w.lift is not None
        block, per = choose_block(rows, groups, lifted, self.room), blocks_of_a_span(units, self.processors)
        kernel = None if block is None or per == 0 else self.kernel("more_rows", flags_of(w, extras, block))
        if block is None or kernel is None:
            return None
        x = aligned(x, w)
        out = torch.empty((rows, n // 2 if extras.gated else n), dtype=x.dtype, device=x.device)
        part = sums = out
        if units.splits > 1:
            part = torch.empty(units.tiles * units.splits * block.eights * 128, dtype=torch.float32, device=x.device)
        if lifted:
            sums = group_sums(x, w, 8 * block.eights, pdl)
        longs = units.splits if units.rest == units.span else units.splits - 1
        cut = Cut(rows, n, k, units.chunks, units.span, units.splits, units.tiles, x.stride(0), sums.stride(0), longs, per)
        addresses = [t.data_ptr() for t in (x, sums, out, part, self.seen)]
        shared = block.shared(groups, lifted)
        kernel(self.processors, 32 * block.warps, shared, [*addresses, weights_of(w, extras.gated), cut], pdl)
        return out


def suits(x: Tensor, w: QuantWeight, extras: Extras) -> bool:
    """Whether the kernel knows this product; the device aside."""
    four = w.codes in (Codes.INT4, Codes.UINT4) and w.plane == 32 and w.per > 0 and w.factor is None
    return four and MOST_TOKENS < x.shape[0] <= MOST and compared(x, w, extras)


def flags_of(w: QuantWeight, extras: Extras, block: Block) -> Flags:
    """What the source is compiled with."""
    flags: dict[str, int | str] = dict(
        NT=block.eights, WARPS=block.warps, TILES=block.tiles, STAGES=block.stages, GATED=int(extras.gated), ACT=ACTS[extras.act],
        OFFSET=8 if w.codes is Codes.INT4 else 0, HALF=int(w.half), PER=w.per, LIFT=int(w.lift is not None),
    )  # fmt: skip
    return tuple(flags.items())
