"""Products of 9 to 40 tokens with 4-bit integers in groups, in CUDA C++ (`ops/cuda/w4a16_wgmma.cu`): the bits of
`quant`, faster. `choose_block` follows the number of tokens; spans are part of the order of sums and depend on the
weight alone, and `blocks_of_a_span` assigns them to blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..backend import Epilogue
from ..cuda.runtime import FOLDER, Flags, struct
from .lowrank import Lora, Shrunk
from .nvrtc_kernels import NvrtcKernels
from .quant import group_sums
from .repack import Codes, QuantWeight
from .wna16_gemv import MAX_GEMV_TOKENS, WorkUnits, aligned, common_flags, compared, units_of, weights_of, whole_tiles

SOURCE = FOLDER / "w4a16_wgmma.cu"
MAX_WGMMA_TOKENS = 40  # tokens; at 48 registers leave two groups of warps instead of three, and Triton is as fast
PLANES = 8
Cut = struct(SOURCE.name, "Cut")


@dataclass(frozen=True)
class WgmmaBlock:
    """How the kernel is compiled."""

    eights: int  # of tokens
    warps: int
    tiles: int  # of a warp
    stages: int

    def shared(self, groups: int, has_zero_point: bool) -> int:
        """Bytes. groups: of a chunk."""
        unit = 2048 + 64 * -(-groups // 2) * (1 + has_zero_point)
        sums = groups * 32 if has_zero_point else 0
        return self.stages * (self.warps * self.tiles * unit + self.eights * (4096 + sums))


@lru_cache(maxsize=1024)
def choose_block(rows: int, groups: int, has_zero_point: bool, room: int) -> WgmmaBlock | None:
    """Three groups of four warps, two tiles each: registers hold the sums of 40 tokens for that many. None where they
    do not fit."""
    blocks = (WgmmaBlock(eights=-(-rows // 8), warps=12, tiles=2, stages=stages) for stages in (3, 2))
    return next((b for b in blocks if b.shared(groups, has_zero_point) <= room), None)


def blocks_of_a_span(units: WorkUnits, blocks: int) -> int:
    """Blocks that each whole span has, so that those left over have a like share of a shorter last one; 0: there are
    too few."""
    if units.rest == units.span:
        return blocks // units.splits
    return min(blocks * units.span // units.chunks, (blocks - 1) // (units.splits - 1))


class W4A16Wgmma(NvrtcKernels):
    source = SOURCE
    arch_specific = True

    def product(
        self, x: Tensor, w: QuantWeight, extras: Epilogue, pdl: bool, lora: Shrunk | None = None
    ) -> Tensor | None:
        """x [R, K] · wᵀ -> [R, N], or [R, N / 2] if it is gate and up; lora: adapters to be added. None: not one of
        these."""
        if not suits(x, w, extras) or not whole_tiles(lora):
            return None
        rows = x.shape[0]
        n, k = w.shape
        units = units_of(w)
        groups = PLANES // w.per
        has_zero_point = w.zero_point is not None
        block = choose_block(rows, groups, has_zero_point, room=self.room)
        per = blocks_of_a_span(units, self.sms)
        if block is None or per == 0:
            return None
        kernel = self.kernel("w4a16_wgmma", flags_of(w, extras, block, lora=lora))
        x = aligned(x, w)
        out = x.new_empty((rows, n // 2 if extras.gated else n))
        partial_out = sums = out
        changes = Lora() if lora is None else lora.pointers(x)
        if units.splits > 1:
            partial_out = x.new_empty(units.tiles * units.splits * block.eights * 128, dtype=torch.float32)
        if has_zero_point:
            sums = group_sums(x, w, 8 * block.eights, pdl=pdl)
            changes.x_ready = False  # the kernel ahead is not `shrink`
        longs = units.splits if units.rest == units.span else units.splits - 1
        cut = Cut(
            rows, n, k, units.chunks, units.span, units.splits, units.tiles, x.stride(0), sums.stride(0), longs, per
        )
        addresses = [t.data_ptr() for t in (x, sums, out, partial_out, self.semaphores)]
        shared = block.shared(groups, has_zero_point)
        kernel(self.sms, 32 * block.warps, shared, [*addresses, weights_of(w, extras.gated), cut, changes], pdl)
        return out


def suits(x: Tensor, w: QuantWeight, extras: Epilogue) -> bool:
    """Whether the kernel supports this product, regardless of the device."""
    return four_bits_in_groups(w) and MAX_GEMV_TOKENS < x.shape[0] <= MAX_WGMMA_TOKENS and compared(x, w, extras)


def four_bits_in_groups(w: QuantWeight) -> bool:
    return w.codes in (Codes.INT4, Codes.UINT4) and w.plane == 32 and w.per > 0 and w.factor is None


def flags_of(w: QuantWeight, extras: Epilogue, block: WgmmaBlock, lora: Shrunk | None = None) -> Flags:
    return dict(
        NT=block.eights, WARPS=block.warps, TILES=block.tiles, STAGES=block.stages, RANK=lora.rank if lora else 0,
        OFFSET=8 if w.codes is Codes.INT4 else 0, **common_flags(w, extras),
    )
