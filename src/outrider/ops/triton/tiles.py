"""How each weight matrix of the family is cut: measured on an H200 at 1 and 17 rows, with a rule for the shapes that were not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import triton


@dataclass(frozen=True)
class Tile:
    """How one weight matrix is cut. bk, slices and splits fix the order of sums: a function of (N, K, gated, dtype) alone."""

    bn: int
    bk: int  # columns a slice and step
    splits: int
    stages: int
    warps: int = 4
    slices: int = 1  # 1, or one a warp; 0: turned, the weights' rows on the long side of the matrix instruction
    many: tuple[int, int, int, int] | None = None  # (bn, bk, stages, warps) at 17..32 rows; bk as above where sliced. None: by rule


MEASURED = {  # (N, K, gated)
    (262144, 1536, 0): Tile(64, 128, 1, 5, 4, 0, many=(128, 128, 5, 4)),  # E2B embed
    (8960, 1536, 0): Tile(64, 64, 1, 8, 4, 0, many=(128, 64, 8, 4)),  # E2B ple_proj
    (2560, 1536, 0): Tile(64, 128, 3, 4, 4, 0, many=(64, 128, 4, 4)),  # E2B qkv
    (1536, 2048, 0): Tile(32, 128, 8, 6, many=(32, 128, 3, 4)),  # E2B out
    (6144, 1536, 1): Tile(64, 64, 1, 8, 4, 0, many=(64, 128, 5, 4)),  # E2B gate_up
    (1536, 6144, 0): Tile(32, 128, 8, 6, many=(32, 128, 5, 4)),  # E2B down
    (256, 1536, 0): Tile(16, 128, 6, 6, many=(16, 128, 3, 4)),  # E2B ple_gate
    (1536, 256, 0): Tile(32, 128, 1, 6, many=(16, 128, 3, 4)),  # E2B ple_out
    (5120, 1536, 0): Tile(64, 128, 3, 4, 4, 0, many=(64, 64, 8, 4)),  # E2B qkv
    (1536, 4096, 0): Tile(32, 128, 8, 6, many=(32, 128, 5, 4)),  # E2B out
    (2048, 1536, 0): Tile(32, 64, 1, 7, 4, 4, many=(16, 64, 7, 4)),  # E2B qkv
    (12288, 1536, 1): Tile(64, 128, 1, 3, 4, 0, many=(128, 128, 3, 8)),  # E2B gate_up
    (1536, 12288, 0): Tile(64, 64, 4, 8, 4, 0, many=(64, 128, 8, 4)),  # E2B down
    (4096, 1536, 0): Tile(64, 128, 2, 6, 4, 0, many=(64, 128, 6, 4)),  # E2B qkv
    (262144, 2560, 0): Tile(64, 128, 1, 5, 4, 0, many=(128, 128, 5, 4)),  # E4B embed
    (10752, 2560, 0): Tile(128, 64, 1, 8, 4, 0, many=(64, 128, 4, 4)),  # E4B ple_proj
    (3072, 2560, 0): Tile(32, 128, 4, 6, many=(32, 128, 5, 4)),  # E4B qkv
    (2560, 2048, 0): Tile(64, 128, 3, 6, 4, 0),  # E4B out
    (10240, 2560, 1): Tile(32, 128, 1, 3, many=(64, 128, 3, 4)),  # E4B gate_up
    (2560, 10240, 0): Tile(64, 128, 3, 8, 4, 0, many=(64, 128, 8, 4)),  # E4B down
    (256, 2560, 0): Tile(16, 128, 6, 6, many=(16, 128, 5, 4)),  # E4B ple_gate
    (2560, 256, 0): Tile(64, 256, 1, 2, many=(32, 128, 3, 4)),  # E4B ple_out
    (6144, 2560, 0): Tile(64, 128, 1, 8, 4, 0, many=(64, 64, 8, 4)),  # E4B qkv
    (2560, 4096, 0): Tile(64, 128, 3, 8, 4, 0),  # E4B out
    (2048, 2560, 0): Tile(64, 128, 4, 5, 4, 0, many=(64, 128, 5, 4)),  # E4B qkv
    (4096, 2560, 0): Tile(64, 128, 2, 8, 4, 0),  # E4B qkv
    (262144, 3840, 0): Tile(64, 128, 1, 5, 4, 0, many=(128, 128, 5, 4)),  # 12B embed
    (8192, 3840, 0): Tile(64, 128, 1, 8, 4, 0, many=(64, 128, 4, 4)),  # 12B qkv
    (3840, 4096, 0): Tile(64, 128, 2, 8, 4, 0),  # 12B out
    (15360, 3840, 1): Tile(64, 128, 1, 3, 4, 0, many=(128, 128, 3, 8)),  # 12B gate_up
    (3840, 15360, 0): Tile(64, 128, 2, 8, 4, 0),  # 12B down
    (8704, 3840, 0): Tile(64, 128, 1, 5, 4, 0, many=(128, 128, 5, 4)),  # 12B qkv
    (3840, 8192, 0): Tile(64, 128, 2, 8, 4, 0, many=(64, 128, 8, 4)),  # 12B out
    (262144, 2816, 0): Tile(64, 128, 1, 5, 4, 0, many=(128, 128, 5, 4)),  # 26B-A4B embed
    (8192, 2816, 0): Tile(64, 128, 1, 8, 4, 0, many=(64, 128, 4, 4)),  # 26B-A4B qkv
    (2816, 4096, 0): Tile(64, 64, 3, 8, 4, 0, many=(64, 64, 8, 4)),  # 26B-A4B out
    (2112, 2816, 1): Tile(16, 64, 1, 8, 4, 4, many=(16, 64, 4, 4)),  # 26B-A4B gate_up
    (2816, 2112, 0): Tile(64, 64, 3, 8, 4, 0),  # 26B-A4B down
    (128, 2816, 0): Tile(16, 128, 8, 6, many=(16, 128, 4, 4)),  # 26B-A4B router
    (9216, 2816, 0): Tile(64, 64, 1, 8, 4, 0, many=(128, 128, 5, 4)),  # 26B-A4B qkv
    (2816, 8192, 0): Tile(64, 128, 3, 8, 4, 0, many=(64, 128, 8, 4)),  # 26B-A4B out
    (262144, 5376, 0): Tile(64, 128, 1, 5, 4, 0, many=(128, 128, 5, 4)),  # 31B embed
    (16384, 5376, 0): Tile(64, 128, 1, 5, 4, 0, many=(64, 128, 4, 4)),  # 31B qkv
    (5376, 8192, 0): Tile(64, 128, 1, 8, 4, 0),  # 31B out
    (21504, 5376, 1): Tile(32, 128, 1, 4, many=(64, 64, 4, 4)),  # 31B gate_up
    (5376, 21504, 0): Tile(64, 64, 3, 5, many=(64, 128, 4, 4)),  # 31B down
    (18432, 5376, 0): Tile(64, 64, 1, 5, many=(128, 128, 3, 4)),  # 31B qkv
    (5376, 16384, 0): Tile(64, 128, 1, 8, 4, 0, many=(64, 128, 8, 4)),  # 31B out
    (256, 3072, 0): Tile(32, 128, 6, 6, many=(32, 128, 6, 4)),  # E2B-assistant pre
    (2048, 256, 0): Tile(64, 128, 1, 4, many=(32, 128, 6, 4)),  # E2B-assistant centroids
    (1024, 256, 0): Tile(16, 128, 1, 6, many=(32, 64, 6, 4)),  # E2B-assistant qkv
    (256, 1024, 0): Tile(16, 64, 1, 5, 4, 4, many=(32, 64, 4, 4)),  # E2B-assistant out
    (2048, 256, 1): Tile(32, 256, 1, 2, many=(64, 64, 6, 4)),  # E2B-assistant gate_up
    (256, 2048, 0): Tile(16, 128, 4, 6, many=(32, 64, 6, 4)),  # E2B-assistant down
    (256, 5120, 0): Tile(32, 128, 12, 6, many=(32, 128, 6, 4)),  # E4B-assistant pre
    (262144, 1024, 0): Tile(32, 128, 1, 6, many=(128, 64, 6, 4)),  # 12B-assistant embed
    (1024, 7680, 0): Tile(32, 128, 12, 6, many=(32, 128, 6, 4)),  # 12B-assistant pre
    (3840, 1024, 0): Tile(16, 256, 1, 6, many=(128, 64, 6, 4)),  # 12B-assistant post
    (4096, 1024, 0): Tile(16, 256, 1, 6, many=(128, 64, 6, 4)),  # 12B-assistant qkv
    (1024, 4096, 0): Tile(16, 256, 4, 6, many=(64, 64, 6, 4)),  # 12B-assistant out
    (8192, 1024, 1): Tile(64, 64, 1, 5, many=(64, 64, 6, 4)),  # 12B-assistant gate_up
    (1024, 8192, 0): Tile(32, 64, 4, 8, 4, 4, many=(32, 64, 4, 4)),  # 12B-assistant down
    (8192, 1024, 0): Tile(32, 64, 1, 5, 4, 4, many=(32, 64, 4, 4)),  # 12B-assistant qkv
    (1024, 5632, 0): Tile(32, 64, 4, 7, 4, 4, many=(32, 64, 4, 4)),  # 26B-A4B-assistant pre
    (2816, 1024, 0): Tile(32, 64, 1, 5, 4, 4, many=(32, 64, 4, 4)),  # 26B-A4B-assistant post
    (1024, 10752, 0): Tile(32, 128, 12, 6, many=(32, 128, 6, 4)),  # 31B-assistant pre
    (5376, 1024, 0): Tile(16, 64, 1, 5, 4, 4, many=(32, 64, 4, 4)),  # 31B-assistant post
    (16384, 1024, 0): Tile(64, 64, 1, 6, many=(128, 64, 6, 4)),  # 31B-assistant qkv
    (1024, 16384, 0): Tile(16, 64, 4, 7, 4, 4, many=(32, 64, 4, 4)),  # 31B-assistant out
}


@lru_cache(maxsize=4096)
def choose_tile(n: int, k: int, gated: bool, bytes_per: int) -> Tile:
    if bytes_per == 4:
        return Tile(32, 64, 1, 2)
    return MEASURED.get((n, k, int(gated))) or rule(n, k, gated)


def rule(n: int, k: int, gated: bool) -> Tile:
    """About as many programs as the 132 multiprocessors hold at once, each with enough bytes in flight; the fewer columns,
    the narrower the tiles, then the more spans."""
    bn = 32
    if not gated and n < 32 * 132:
        bn = 16
    tiles = triton.cdiv(n, bn)
    splits = 1 if gated or tiles >= 90 else max(1, min(round(132 / tiles), k // 512))
    return Tile(bn, 64, splits, 4 if bn == 32 else 6, slices=4)
