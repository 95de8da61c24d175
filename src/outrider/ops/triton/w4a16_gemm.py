"""Products of more than 40 tokens with the weights of `w4a16_wgmma`, in CUDA C++ (`ops/cuda/w4a16_gemm.cu`): the bits
of `quant`, faster. `choose_tile` follows the number of tokens; spans are part of the order of sums and depend on the
weight alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from ..backend import Epilogue
from ..cuda.runtime import FOLDER, Flags, struct, tensor_map
from .gemm_config import NUM_SEMAPHORES
from .nvrtc_kernels import NvrtcKernels
from .quant import group_sums
from .repack import ROWS, Codes, QuantWeight
from .w4a16_wgmma import MAX_WGMMA_TOKENS, four_bits_in_groups
from .wna16_gemv import WorkUnits, aligned, common_flags, compared, units_of

SOURCE = FOLDER / "w4a16_gemm.cu"
PLANES = 8
WARPS = 8
THREADS = 384
GROUP = 8  # tiles of tokens that go through all weights together: their x stays in L2
EIGHTS = (4, 5, 7, 8, 10)  # of half of a tile's tokens: registers hold the sums of 160; each is compiled at first use
STAGES = ((6, 3), (5, 3), (4, 3), (4, 2), (3, 2))  # of x and of weights
# spans of a tile: one; added up by one block; by several
ONE_SPAN = 0
SERIAL = 1
PARALLEL = 2
Problem = struct(SOURCE.name, "Problem")


@dataclass(frozen=True)
class W4A16Tile:
    """How the kernel is compiled."""

    eights: int  # of half of a tile's tokens
    spans: int
    x_stages: int
    w_stages: int

    @property
    def tokens(self) -> int:
        return 16 * self.eights

    def shared(self, groups: int, has_zero_point: bool) -> int:
        """Bytes. groups: of a chunk."""
        weights = 128 * (128 + 4 * -(-groups // 2) * (1 + has_zero_point))
        stage = _up(weights + (groups * self.tokens * 4 if has_zero_point else 0), 1024)
        rings = _up(self.x_stages * (self.tokens * 128 + 16), 1024) + _up(self.w_stages * (stage + 16), 128)
        return 1024 + rings + (self.tokens * 512 if self.spans == SERIAL else 0)


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


@dataclass(frozen=True)
class W4A16Shape:
    """A product, as far as the choice of a tile depends on it."""

    rows: int
    units: WorkUnits
    groups: int
    has_zero_point: bool

    @property
    def pairs(self) -> int:
        """Tiles of the weight's rows: 128 for each block of a cluster."""
        return -(-self.units.tiles // 16)

    def cost(self, eights: int, spans: int, clusters: int) -> float:
        """Time of the busiest cluster, in units of 12 ns on an H200, where a chunk took 0.5 us and 13 ns per token."""
        tokens = 16 * eights
        units = self.units
        tiles = self.pairs * -(-self.rows // tokens)
        chunk = 1.1 * tokens + 40
        if spans != PARALLEL:
            return -(-tiles // clusters) * (units.chunks * chunk + 40 * units.splits + 160)
        if 2 * WARPS * tiles > NUM_SEMAPHORES:
            return math.inf
        return -(-tiles * units.splits // clusters) * (units.span * chunk + 3.4 * tokens)


@lru_cache(maxsize=4096)
def choose_tile(shape: W4A16Shape, clusters: int, room: int) -> W4A16Tile | None:
    """The one with the lowest estimate and as many stages as fit; None where none fits."""
    ways = (ONE_SPAN,) if shape.units.splits == 1 else (SERIAL, PARALLEL)
    order = sorted((shape.cost(e, s, clusters), -e, s) for e in EIGHTS for s in ways)
    tiles = (W4A16Tile(-eights, spans, *stages) for _, eights, spans in order for stages in STAGES)
    return next((t for t in tiles if t.shared(shape.groups, shape.has_zero_point) <= room), None)


class W4A16Gemm(NvrtcKernels):
    source = SOURCE
    arch_specific = True

    def product(self, x: Tensor, w: QuantWeight, extras: Epilogue, pdl: bool) -> Tensor | None:
        """x [R, K] · wᵀ -> [R, N], or [R, N / 2] where it is gate and up; None: not one of these."""
        if not suits(x, w, extras):
            return None
        rows = x.shape[0]
        n = w.shape[0]
        units = units_of(w)
        shape = W4A16Shape(rows, units, PLANES // w.per, has_zero_point=w.zero_point is not None)
        tile = choose_tile(shape, self.sms // 2, self.room)
        if tile is None:
            return None
        kernel = self.kernel("w4a16_gemm", flags_of(w, extras, tile))
        x = aligned(x, w)
        tiles_b = triton.cdiv(rows, tile.tokens)
        items = shape.pairs * tiles_b * (units.splits if tile.spans == PARALLEL else 1)
        out = x.new_empty((rows, n // 2 if extras.gated else n))
        partial_out = sums = out
        if tile.spans == PARALLEL:
            partial_out = x.new_empty(items * 256 * tile.tokens, dtype=torch.float32)
        if w.zero_point is not None:
            sums = group_sums(x, w, tile.tokens, pdl=pdl)
        problem = Problem(
            rows, n, units.chunks, units.span, units.splits, shape.pairs, tiles_b, GROUP, triton.cdiv(n, ROWS),
            sums.stride(0),
        )
        maps = [
            tensor_map(x.data_ptr(), rows, x.shape[1], stride=x.stride(0), tile_rows=tile.tokens // 2, paired=False),
            tensor_map(
                w.words.data_ptr(),
                w.words.numel() // 32,
                columns=64,
                stride=64,
                tile_rows=ROWS // (1 + extras.gated),
                paired=False,
            ),
        ]
        buffers = (w.scale, w.zero_point, sums, out, partial_out, self.semaphores)
        addresses = [0 if t is None else t.data_ptr() for t in buffers]
        shared = tile.shared(shape.groups, shape.has_zero_point)
        kernel(2 * min(items, self.sms // 2), THREADS, shared, [*maps, *addresses, problem], pdl)
        return out


def suits(x: Tensor, w: QuantWeight, extras: Epilogue) -> bool:
    """Whether the kernel supports this product, regardless of the device."""
    return four_bits_in_groups(w) and x.shape[0] > MAX_WGMMA_TOKENS and compared(x, w, extras)


def flags_of(w: QuantWeight, extras: Epilogue, tile: W4A16Tile) -> Flags:
    return dict(
        NT=tile.eights, X_STAGES=tile.x_stages, W_STAGES=tile.w_stages, SPANS=tile.spans,
        OFFSET=8 if w.codes is Codes.INT4 else 0, **common_flags(w, extras),
    )
