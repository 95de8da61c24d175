"""Launch configurations of the quantised products.

`splits` are part of the order of sums: a function of the shape alone. Rows of a program, warps and stages are not, and
follow the number of tokens: on an H200 they changed no bit (docs/gpu.md has the measurements).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton

from .repack import QuantWeight

# bytes of shared memory per program, by architecture
SMEM_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}


@lru_cache
def max_smem(device: torch.device) -> int:
    """Shared memory of a program on this device in bytes; Hopper's if there is no device."""
    if device.type != "cuda":
        return 226 << 10
    major, minor = torch.cuda.get_device_capability(device)
    return (SMEM_KIB.get(10 * major + minor, 99) - 1) << 10


@lru_cache
def sm_count(device: torch.device) -> int:
    """Number of SMs; Hopper's if there is no device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@dataclass(frozen=True)
class QuantTile:
    bn: int  # rows of the weight per program: 16 per warp, or 32 with few tokens
    splits: int  # spans of the columns; part of the order of sums
    stages: int
    ahead: int = 2  # chunks prefetched before the previous kernel is done
    warps: int = 4
    more: int = 0  # tokens in addition to those of a tile: 40 are 32 and 8
    # maximum registers per thread, so that more programs fit an SM; None: the compiler's choice
    registers: int | None = None


def choose_quant_tile(n: int, k: int, bits: int) -> QuantTile:
    """Cuts a matrix into the number of programs of 64 rows that run at once, six on each of 132 SMs, with at least
    four chunks each."""
    tiles = triton.cdiv(n, 64)
    chunks = triton.cdiv(k * bits, 1024)
    return QuantTile(64, max(1, min(780 // tiles, chunks // 4)), 4)


def fit(tile: QuantTile, rows: int, w: QuantWeight, shared: int) -> tuple[int, QuantTile]:
    """Tokens of a tile, and the tile that goes with them. shared: bytes that a program may take."""
    columns = w.columns_of_chunk
    plane = w.plane
    bits = w.codes.bits
    has_zero_point = w.zero_point is not None
    above = w.high is not None
    # Five bits take no tile of 8 tokens: the byte above a word makes the compiler pair four neighbouring columns there
    # instead of two (kWidth), and sums round differently than in tiles of 16 to 128, which had the same bits on an
    # H200.
    # 4 bits: two warps with 32 rows each share everything but the weights
    if rows <= 8 and plane == 32 and not above:
        return 8, replace(tile, warps=2, stages=3, registers=160) if bits == 4 else tile
    # 31B's gate_up in int4 at 1,024 rows: 1,239 us on an H200, with half the weights per program 2,185
    if rows > 64 and shared >= 226 << 10:
        # zero-points and high bits take space too
        return 128, replace(tile, bn=128, warps=8, stages=2 if has_zero_point or above else 3)
    # four drafted tokens of eight sequences
    if 32 < rows <= 40 and bits == 4 and w.per == 1 and not has_zero_point and not above and shared >= 226 << 10:
        # 31B in int4, us, 64 tokens before: gate_up 121 -> 95, down 84 -> 64, qkv 56 -> 44, out 44 -> 33
        return 32, replace(tile, more=8, stages=3, registers=168 if tile.splits == 1 else None)
    bm = 64
    if rows <= 32:
        bm = 16 if rows <= 16 else 32
    each = tile.bn * plane * 4 + bm * columns * 2
    if shared < 100 << 10 and bm == 64:
        bm = 32
        each = tile.bn * plane * 4 + 32 * columns * 2
    # Three programs per SM are worth more than their stages: 31B gate_up in int4 at 40 rows takes 121 us with two, 152
    # with four.
    return bm, replace(tile, stages=max(2, min(4, shared // each + 1, (80 << 10) // each)))
