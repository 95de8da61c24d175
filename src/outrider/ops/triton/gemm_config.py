"""How each weight matrix is split, and which tiles serve how many rows.

`GemmReduction` belongs to a weight: its spans fix the order of sums. `GemmConfig` belongs to a pass: the rows and
columns of a program; it follows from the number of rows and changes no bit. The matrix instructions of one warp
(`mma.sync`, 16 rows) and of four (`wgmma`, 64 rows) add 16 columns at a time in the same way, bit for bit, so a pass
may use either. Measured on an H200 at 1 and 17 rows, with a rule for the shapes that were not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import triton

MAX_SMEM = 226 << 10  # bytes of shared memory per program on the card that tiles were measured on
NUM_SEMAPHORES = 1 << 16  # tiles of a product with one program per span
MAX_FEW_ROWS = 128  # rows up to which one kernel serves all products, and may add the changes of adapters


@dataclass(frozen=True)
class GemmReduction:
    """How one weight matrix is cut: a function of (N, K, gated, dtype) alone. `splits` and `bk` fix the spans of its
    sums; the other fields are a program's tile at 1 to 16 rows."""

    bn: int  # columns of the result; a gated product reads two rows of weights for each
    bk: int  # columns of the weights fetched at a time; a span is a whole number of them
    splits: int
    stages: int
    # the weights' rows are on the long side of the matrix instruction (64 or 128), the tokens on the short one
    swap_ab: bool = False
    many: tuple[int, int, int, int] | None = None  # (bn, bk, stages, warps) at 17..32 rows; None: by rule

    def span(self, k: int) -> int:
        return triton.cdiv(triton.cdiv(k, self.splits), self.bk) * self.bk


@dataclass(frozen=True)
class GemmConfig:
    """The tile of one program of a pass."""

    bm: int  # rows
    bn: int  # columns
    bk: int
    stages: int
    warps: int = 4
    swap_ab: bool = True
    bm2: int = 0  # additional rows, so that a program may have 320: four drafted tokens of 64 sequences
    serial_splitk: bool = False  # a program processes all spans of its tile; otherwise one program per span
    tma: bool = False  # gemm_streamk
    wgmma: bool = False  # gemm_wgmma: bn rows of the weights, or swap_ab: of x, meet 256 of the other
    cut: bool = False  # gemm_wgmma: tiles of an incomplete last wave are cut (stream-K)


class GemmPlan(NamedTuple):
    """A configuration and its estimated time."""

    micros: float
    config: GemmConfig


MEASURED = {  # (N, K, gated)
    # E2B
    (262144, 1536, 0): GemmReduction(bn=64, bk=128, splits=1, stages=5, swap_ab=True, many=(128, 128, 5, 4)),  # embed
    (8960, 1536, 0): GemmReduction(bn=64, bk=64, splits=1, stages=8, swap_ab=True, many=(128, 64, 8, 4)),  # ple_proj
    (2560, 1536, 0): GemmReduction(bn=64, bk=128, splits=2, stages=7, swap_ab=True),  # qkv
    (1536, 2048, 0): GemmReduction(bn=64, bk=128, splits=3, stages=7, swap_ab=True),  # out
    (6144, 1536, 1): GemmReduction(bn=64, bk=64, splits=1, stages=8, swap_ab=True, many=(64, 128, 5, 4)),  # gate_up
    (1536, 6144, 0): GemmReduction(bn=64, bk=128, splits=5, stages=8, swap_ab=True),  # down
    (256, 1536, 0): GemmReduction(bn=16, bk=128, splits=6, stages=6, many=(16, 128, 3, 4)),  # ple_gate
    (1536, 256, 0): GemmReduction(bn=32, bk=128, splits=1, stages=6, many=(16, 128, 3, 4)),  # ple_out
    (5120, 1536, 0): GemmReduction(bn=64, bk=64, splits=1, stages=8, swap_ab=True),  # qkv
    (1536, 4096, 0): GemmReduction(bn=64, bk=128, splits=5, stages=8, swap_ab=True),  # out
    (2048, 1536, 0): GemmReduction(bn=64, bk=128, splits=2, stages=7, swap_ab=True),  # qkv
    (12288, 1536, 1): GemmReduction(bn=32, bk=128, splits=1, stages=3, swap_ab=True, many=(128, 128, 3, 8)),  # gate_up
    (1536, 12288, 0): GemmReduction(bn=64, bk=128, splits=4, stages=8, swap_ab=True),  # down
    (4096, 1536, 0): GemmReduction(bn=64, bk=128, splits=1, stages=8, swap_ab=True),  # qkv
    # E4B
    (262144, 2560, 0): GemmReduction(bn=64, bk=128, splits=1, stages=5, swap_ab=True, many=(128, 128, 5, 4)),  # embed
    (10752, 2560, 0): GemmReduction(bn=128, bk=64, splits=1, stages=8, swap_ab=True, many=(64, 128, 4, 4)),  # ple_proj
    (3072, 2560, 0): GemmReduction(bn=32, bk=128, splits=4, stages=6, many=(32, 128, 5, 4)),  # qkv
    (2560, 2048, 0): GemmReduction(bn=64, bk=128, splits=3, stages=6, swap_ab=True),  # out
    (10240, 2560, 1): GemmReduction(bn=32, bk=128, splits=1, stages=3, swap_ab=True, many=(64, 128, 3, 4)),  # gate_up
    (2560, 10240, 0): GemmReduction(bn=64, bk=128, splits=3, stages=8, swap_ab=True, many=(64, 128, 8, 4)),  # down
    (256, 2560, 0): GemmReduction(bn=16, bk=128, splits=6, stages=6, many=(16, 128, 5, 4)),  # ple_gate
    (2560, 256, 0): GemmReduction(bn=64, bk=256, splits=1, stages=2, many=(32, 128, 3, 4)),  # ple_out
    (6144, 2560, 0): GemmReduction(bn=64, bk=128, splits=1, stages=8, swap_ab=True, many=(64, 64, 8, 4)),  # qkv
    (2560, 4096, 0): GemmReduction(bn=64, bk=128, splits=3, stages=8, swap_ab=True),  # out
    (2048, 2560, 0): GemmReduction(bn=64, bk=128, splits=4, stages=5, swap_ab=True, many=(64, 128, 5, 4)),  # qkv
    (4096, 2560, 0): GemmReduction(bn=64, bk=128, splits=1, stages=8, swap_ab=True),  # qkv
    # 12B
    (262144, 3840, 0): GemmReduction(bn=64, bk=128, splits=1, stages=5, swap_ab=True, many=(128, 128, 5, 4)),  # embed
    (8192, 3840, 0): GemmReduction(bn=64, bk=128, splits=1, stages=8, swap_ab=True, many=(64, 128, 4, 4)),  # qkv
    (3840, 4096, 0): GemmReduction(bn=64, bk=128, splits=2, stages=8, swap_ab=True),  # out
    (15360, 3840, 1): GemmReduction(bn=64, bk=128, splits=1, stages=3, swap_ab=True, many=(128, 128, 3, 8)),  # gate_up
    (3840, 15360, 0): GemmReduction(bn=64, bk=128, splits=2, stages=8, swap_ab=True),  # down
    (8704, 3840, 0): GemmReduction(bn=64, bk=128, splits=1, stages=5, swap_ab=True, many=(128, 128, 5, 4)),  # qkv
    (3840, 8192, 0): GemmReduction(bn=64, bk=128, splits=2, stages=8, swap_ab=True, many=(64, 128, 8, 4)),  # out
    # 26B-A4B
    (262144, 2816, 0): GemmReduction(bn=64, bk=128, splits=1, stages=5, swap_ab=True, many=(128, 128, 5, 4)),  # embed
    (8192, 2816, 0): GemmReduction(bn=64, bk=128, splits=1, stages=8, swap_ab=True, many=(64, 128, 4, 4)),  # qkv
    (2816, 4096, 0): GemmReduction(bn=64, bk=64, splits=3, stages=8, swap_ab=True, many=(64, 64, 8, 4)),  # out
    (2112, 2816, 1): GemmReduction(bn=32, bk=128, splits=1, stages=8, swap_ab=True),  # gate_up
    (2816, 2112, 0): GemmReduction(bn=64, bk=64, splits=3, stages=8, swap_ab=True),  # down
    (128, 2816, 0): GemmReduction(bn=16, bk=128, splits=8, stages=6, many=(16, 128, 4, 4)),  # router
    (9216, 2816, 0): GemmReduction(bn=64, bk=64, splits=1, stages=8, swap_ab=True, many=(128, 128, 5, 4)),  # qkv
    (2816, 8192, 0): GemmReduction(bn=64, bk=128, splits=3, stages=8, swap_ab=True, many=(64, 128, 8, 4)),  # out
    # 31B
    (262144, 5376, 0): GemmReduction(bn=64, bk=128, splits=1, stages=5, swap_ab=True, many=(128, 128, 5, 4)),  # embed
    (16384, 5376, 0): GemmReduction(bn=64, bk=128, splits=1, stages=5, swap_ab=True, many=(64, 128, 4, 4)),  # qkv
    (5376, 8192, 0): GemmReduction(bn=64, bk=128, splits=1, stages=8, swap_ab=True),  # out
    (21504, 5376, 1): GemmReduction(bn=32, bk=128, splits=1, stages=2, many=(64, 64, 4, 4)),  # gate_up
    (5376, 21504, 0): GemmReduction(bn=64, bk=128, splits=3, stages=5, swap_ab=True),  # down
    (18432, 5376, 0): GemmReduction(bn=64, bk=64, splits=1, stages=5, many=(128, 128, 3, 4)),  # qkv
    (5376, 16384, 0): GemmReduction(bn=64, bk=128, splits=1, stages=8, swap_ab=True, many=(64, 128, 8, 4)),  # out
    # E2B-assistant
    (256, 3072, 0): GemmReduction(bn=32, bk=128, splits=6, stages=6, many=(32, 128, 6, 4)),  # pre
    (2048, 256, 0): GemmReduction(bn=64, bk=128, splits=1, stages=4, many=(32, 128, 6, 4)),  # centroids
    (1024, 256, 0): GemmReduction(bn=16, bk=128, splits=1, stages=6, many=(32, 64, 6, 4)),  # qkv
    (256, 1024, 0): GemmReduction(bn=64, bk=64, splits=4, stages=5, swap_ab=True),  # out
    (2048, 256, 1): GemmReduction(bn=32, bk=256, splits=1, stages=2, many=(64, 64, 6, 4)),  # gate_up
    (256, 2048, 0): GemmReduction(bn=16, bk=128, splits=4, stages=6, many=(32, 64, 6, 4)),  # down
    # E4B-assistant
    (256, 5120, 0): GemmReduction(bn=32, bk=128, splits=12, stages=6, many=(32, 128, 6, 4)),  # pre
    # 12B-assistant
    (262144, 1024, 0): GemmReduction(bn=32, bk=128, splits=1, stages=6, many=(128, 64, 6, 4)),  # embed
    (1024, 7680, 0): GemmReduction(bn=32, bk=128, splits=12, stages=6, many=(32, 128, 6, 4)),  # pre
    (3840, 1024, 0): GemmReduction(bn=16, bk=256, splits=1, stages=6, many=(128, 64, 6, 4)),  # post
    (4096, 1024, 0): GemmReduction(bn=16, bk=256, splits=1, stages=6, many=(128, 64, 6, 4)),  # qkv
    (1024, 4096, 0): GemmReduction(bn=16, bk=256, splits=4, stages=6, many=(64, 64, 6, 4)),  # out
    (8192, 1024, 1): GemmReduction(bn=64, bk=64, splits=1, stages=5, many=(64, 64, 6, 4)),  # gate_up
    (1024, 8192, 0): GemmReduction(bn=64, bk=128, splits=8, stages=8, swap_ab=True),  # down
    (8192, 1024, 0): GemmReduction(bn=64, bk=128, splits=1, stages=8, swap_ab=True),  # qkv
    # 26B-A4B-assistant
    (1024, 5632, 0): GemmReduction(bn=64, bk=128, splits=8, stages=6, swap_ab=True),  # pre
    (2816, 1024, 0): GemmReduction(bn=64, bk=64, splits=3, stages=6, swap_ab=True),  # post
    # 31B-assistant
    (1024, 10752, 0): GemmReduction(bn=32, bk=128, splits=12, stages=6, many=(32, 128, 6, 4)),  # pre
    (5376, 1024, 0): GemmReduction(bn=64, bk=128, splits=2, stages=5, swap_ab=True),  # post
    (16384, 1024, 0): GemmReduction(bn=64, bk=64, splits=1, stages=6, many=(128, 64, 6, 4)),  # qkv
    (1024, 16384, 0): GemmReduction(bn=64, bk=128, splits=8, stages=8, swap_ab=True),  # out
}


@lru_cache(maxsize=4096)
def choose_reduction(n: int, k: int, gated: bool, bytes_per: int) -> GemmReduction:
    if bytes_per == 4:
        return GemmReduction(bn=32, bk=64, splits=1, stages=2)
    return MEASURED.get((n, k, int(gated))) or rule(n, k, gated)


def rule(n: int, k: int, gated: bool) -> GemmReduction:
    """Configuration of a shape that was not measured: 64 rows of weights per program, and about as many programs as the
    132 SMs hold: the fewer columns, the more spans."""
    bn = 32 if gated else 64
    splits = max(1, min(round(132 / triton.cdiv(n, bn)), k // 256))
    return GemmReduction(bn, bk=64, splits=splits, stages=6, swap_ab=True)


@lru_cache(maxsize=4096)
def triton_plan(tile: GemmReduction, n: int, k: int, rows: int, gated: bool, bytes_per: int = 2) -> GemmPlan:
    """Triton's configuration for this number of rows; estimated only above 128 rows, where there is a choice."""
    if rows <= MAX_FEW_ROWS or bytes_per == 4:
        return GemmPlan(0.0, few_rows_config(tile, n, k, rows=rows, gated=gated, bytes_per=bytes_per))
    sides = 2 if gated else 1
    plans = [*_many_row_plans(tile, n, k, rows=rows, sides=sides), *_streamk_plans(tile, n, k, rows=rows, sides=sides)]
    return min(plans, key=lambda plan: plan.micros)


@lru_cache(maxsize=4096)
def wgmma_plan(tile: GemmReduction, n: int, k: int, rows: int, gated: bool) -> GemmPlan:
    """The configuration of gemm_wgmma for this number of rows."""
    return min(_wgmma_plans(tile, n, k, rows=rows, sides=2 if gated else 1), key=lambda plan: plan.micros)


def few_rows_config(tile: GemmReduction, n: int, k: int, rows: int, gated: bool, bytes_per: int) -> GemmConfig:
    """The configuration for up to 128 rows, or any number in float32."""
    sides = 2 if gated else 1
    if rows <= 16:
        return GemmConfig(bm=16, bn=tile.bn, bk=tile.bk, stages=tile.stages, warps=4, swap_ab=tile.swap_ab)
    if bytes_per == 4:
        return GemmConfig(bm=32, bn=tile.bn, bk=tile.bk, stages=tile.stages, warps=4, swap_ab=False)
    if rows <= 32 and tile.many is not None:
        bn, bk, stages, warps = tile.many
        return GemmConfig(bm=32, bn=bn, bk=bk, stages=stages, warps=warps, swap_ab=tile.swap_ab)
    tiles = triton.cdiv(n * sides, 128)
    # few weights: more programs are worth more than sharing
    if rows > 32 and n * k * sides <= 1 << 20 and k % 128 == 0:
        return GemmConfig(bm=32, bn=64 // sides, bk=128, stages=3)
    wide = 128 if tiles >= 96 or tile.splits * tiles >= 120 else 64  # rows of weights per program
    bm = 128
    if rows <= 64 or wide == 64:
        bm = 32 if rows <= 32 else 64
    # two programs for the rows would read each weight twice in 64s
    if rows > 64 and wide == 64 and tile.splits * tiles >= 36:
        wide = 128
        bm = 128 if gated and tiles >= 90 else 64
    if bm >= 64 and gated and k <= 2048 and tiles >= 180:
        wide = 256
    serial_splitk = tile.splits > 1 and triton.cdiv(rows, bm) * triton.cdiv(n * sides, wide) >= 100
    return _swap_ab_config(
        bm,
        more=0,
        wide=wide,
        sides=sides,
        serial_splitk=serial_splitk,
        bk=128 if wide == 64 and bm == 64 and k % 128 == 0 else 64,
    )


def _swap_ab_config(bm: int, more: int, wide: int, sides: int, serial_splitk: bool, bk: int = 64) -> GemmConfig:
    if bk > 64 or bm * wide > 16384:
        most = 4
    else:
        most = 5 if bm * wide == 16384 else 6
    stages = max(2, min(most, MAX_SMEM // ((bm + more + wide) * bk * 2)))
    return GemmConfig(
        bm=bm,
        bn=wide // sides,
        bk=bk,
        stages=stages,
        warps=8 if bm * wide >= 16384 else 4,
        swap_ab=True,
        bm2=more,
        serial_splitk=serial_splitk,
    )


def fit_smem(shape: GemmConfig, sides: int, bytes_per: int, shared: int) -> GemmConfig:
    """Adapts a shape to a card where a program may use less shared memory: fewer stages, then smaller tiles. Neither
    changes a bit."""
    if shared >= MAX_SMEM:
        return shape
    if shape.tma:  # a card before Hopper, or with less shared memory: the same tile by plain loads
        shape = replace(shape, tma=False, swap_ab=True)
    each = (shape.bm + shape.bm2 + shape.bn * sides) * shape.bk * bytes_per
    if 2 * each > shared or (shape.bm + shape.bm2) * shape.bn * sides * 4 > shared:
        shape = _swap_ab_config(
            min(64, shape.bm), more=0, wide=min(128, shape.bn * sides), sides=sides, serial_splitk=shape.serial_splitk
        )
        each = (shape.bm + shape.bn * sides) * shape.bk * bytes_per
    return replace(shape, stages=max(2, min(shape.stages, shared // each)))


# (rows, further rows, rows of weights): share of the matrix units' rate that a program of this shape reaches
POINTER_RATES = {
    (256, 0, 128): 0.87, (128, 0, 256): 0.87, (256, 64, 128): 0.8, (128, 64, 128): 0.82, (128, 32, 128): 0.72,
    (128, 0, 128): 0.79,
    (64, 0, 256): 0.68, (64, 0, 128): 0.6, (64, 0, 64): 0.45,
}


def _logits(n: int) -> int:
    """Additional microseconds of a tile of logits: its results are float32."""
    return 6 if n > 100_000 else 0


# Stream-K programs: (rows, further rows, rows of weights): share of the rate, stages, warps, and how many there may
# be. With a few SMs idle the others have a higher clock.
STREAMK_RATES = {
    (128, 32, 64): (0.85, 7, 4, 96),
    (128, 32, 128): (0.79, 6, 8, 132),
    (256, 64, 64): (1.05, 4, 4, 96),
    (256, 64, 128): (0.93, 4, 8, 132),
}
# those that take several tiles and parts of one
SPLITK_RATES = {(128, 32, 128): (0.7, 5, 8), (128, 32, 256): (0.72, 3, 8), (256, 64, 128): (0.8, 3, 8)}
SPLITK_GATED_RATES = {(128, 32, 128): (0.79, 5, 4)}
STREAMK_MAX_ROWS = 640  # up to which these were measured
# Tiles up to which each is a program's own, on smaller cards too: cut ones need more shared memory than the stages of
# STREAMK_RATES leave.
STREAMK_MAX_WHOLE_TILES = 132


def _streamk_plans(tile: GemmReduction, n: int, k: int, rows: int, sides: int) -> Iterator[GemmPlan]:
    """Candidates of stream-K, like `_many_row_plans`. Tiles are cut only if each has its own weights; otherwise weights
    would be read from memory once per row of tiles."""
    spans = tile.splits
    if rows > STREAMK_MAX_ROWS:
        return
    if sides == 1:
        for (bm, more, wide), (rate, stages, warps, most) in STREAMK_RATES.items():
            if triton.cdiv(rows, bm + more) * triton.cdiv(n, wide) * spans <= most:
                each = (bm + more) * wide * (k / spans) * 2 / (rate * 6e6) + 2.5
                each += 5 + spans * rows * n * 8 / 3e6 if spans > 1 else 0
                yield GemmPlan(
                    each, GemmConfig(bm, wide, bk=64, stages=stages, warps=warps, swap_ab=True, bm2=more, tma=True)
                )
    for (bm, more, wide), (rate, stages, warps) in (SPLITK_RATES if sides == 1 else SPLITK_GATED_RATES).items():
        tiles = triton.cdiv(n * sides, wide)
        if spans == 1 and rows <= bm + more and tiles > STREAMK_MAX_WHOLE_TILES:
            # the next tile's loads do not overlap with this one's stores
            each = (bm + more) * wide * k * 2 / (rate * 6e6) + 11
            config = GemmConfig(bm, wide // sides, bk=64, stages=stages, warps=warps, swap_ab=True, bm2=more, tma=True)
            yield GemmPlan((tiles / 132 + 0.1) * each, config)


# Tiles of gemm_wgmma: (bn, swap_ab): share of the rate. With several spans a second accumulator takes registers.
WGMMA_RATES = {(256, False): 0.97, (192, False): 0.96, (160, True): 0.92}
SWAP_MAX_ROWS = 640  # up to which x was on the short side
CUT_MAX_WAVES = 11  # up to which cut tiles were measured
CUT_MAX_ROWS = 2048  # with more rows cut tiles gain nothing: idle SMs leave their power to the others


def _wgmma_plans(tile: GemmReduction, n: int, k: int, rows: int, sides: int) -> Iterator[GemmPlan]:
    """Candidates of gemm_wgmma, like `_many_row_plans`: clusters of two blocks on 132 SMs. Passing on the sums of cut
    tiles costs 0.4 of a tile."""
    for (bn, swap_ab), rate in WGMMA_RATES.items():
        if (swap_ab and rows > SWAP_MAX_ROWS) or (bn == 256 and tile.splits > 1):
            continue
        a, b = (n * sides, rows) if swap_ab else (rows, n * sides)
        waves = triton.cdiv(a, 256) * triton.cdiv(b, bn) / 66
        cut = 1 < waves < CUT_MAX_WAVES and rows <= CUT_MAX_ROWS and waves + 0.4 < math.ceil(waves)
        each = 128 * bn * k * 2 / (rate * 6e6) + 2.5 + _logits(n)
        shape = GemmConfig(bm=256, bn=bn, bk=64, stages=0, warps=0, swap_ab=swap_ab, wgmma=True, cut=cut)
        # the estimates of Triton's kernels are too low by up to 20 %
        yield GemmPlan(((waves + 0.4 if cut else math.ceil(waves)) * each + 5) / 1.11, shape)


def _many_row_plans(tile: GemmReduction, n: int, k: int, rows: int, sides: int) -> Iterator[GemmPlan]:
    """Shapes for more than 128 rows, with estimates in microseconds: the waves of programs on 132 SMs of 6 TFLOP/s, a
    program's start and end, and the traffic of partial sums if spans have their own programs. Right to 5 % on the
    shapes of 31B."""
    for (bm, more, wide), rate in POINTER_RATES.items():
        tiles = triton.cdiv(rows, bm + more) * triton.cdiv(n * sides, wide)
        for serial_splitk in (False, True) if tile.splits > 1 else (False,):
            if (
                (more and (serial_splitk or n > 100_000))
                or (serial_splitk and bm * wide > 16384)
                or (not serial_splitk and tile.splits > 1 and tile.splits * rows * n > 1 << 24)
            ):
                continue
            spans = tile.splits if not serial_splitk else 1
            each = (bm + more) * wide * (k / spans) * 2 / (rate * 6e6) + 2.5
            each = each + (tile.splits if serial_splitk else 0) + _logits(n)
            reduction_us = 3 + tile.splits * rows * n * sides * 8 / 3e6 if spans > 1 else 0
            config = _swap_ab_config(bm, more, wide, sides=sides, serial_splitk=serial_splitk)
            yield GemmPlan(triton.cdiv(tiles * spans, 132) * each + reduction_us, config)
