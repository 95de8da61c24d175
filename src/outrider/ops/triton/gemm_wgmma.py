"""bfloat16 products of many rows on Hopper, in CUDA C++ (`ops/cuda/gemm_wgmma.cu`): the chains of sums of `gemm`, so
the same bits, at the speed of cuBLAS."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from ..backend import Epilogue
from ..cuda.runtime import FOLDER, Flags, TensorMap, struct, tensor_map
from .gemm_config import GemmReduction
from .nvrtc_kernels import NvrtcKernels
from .wna16_gemv import ACTS

SOURCE = FOLDER / "gemm_wgmma.cu"
BM = 128
BK = 64
THREADS = 384
GROUP = 8  # pairs of tiles of rows that go through all weights together: 2,048 rows, whose x stays in L2
Problem = struct(SOURCE.name, "Problem")


@dataclass(frozen=True)
class WgmmaTile:
    bn: int  # rows of the second operand: 256, 192 or 160
    swap_ab: bool = False  # the first operand is the weights, and the second one is x
    cut: bool = False  # the first tiles are cut where they do not come out even (stream-K)

    @property
    def stages(self) -> int:
        return 4 if self.bn == 256 else 5

    def shared(self) -> int:
        """Bytes: stages, their barriers, and what it takes to begin at a multiple of 1,024."""
        return self.stages * ((BM + self.bn) * BK * 2 + 16) + 1024


class GemmWgmma(NvrtcKernels):
    source = SOURCE
    arch_specific = True

    def product(
        self, x: Tensor, w: Tensor, end: Epilogue, pdl: bool, reduction: GemmReduction, tile: WgmmaTile
    ) -> Tensor | None:
        """x [R, K] · wᵀ [N, K] -> [R, N], or [R, N / 2] where half of w's rows are gates; None: not one of these."""
        if not suits(x, w, end):
            return None
        rows, k = x.shape
        n = w.shape[0] // (2 if end.gated else 1)
        clusters = self.sms // 2
        a, b = (w, x) if tile.swap_ab else (x, w)
        pairs = triton.cdiv(a.shape[0], 2 * BM)
        tiles_b = triton.cdiv(b.shape[0], tile.bn)
        even = pairs * tiles_b < clusters or pairs * tiles_b % clusters == 0
        tile = replace(tile, cut=tile.cut and not even)
        span = reduction.span(k)
        kernel = self.kernel("gemm_wgmma", flags_of(end, tile, span < k))
        out = x.new_empty((rows, n), dtype=end.out_dtype or x.dtype)
        sums = 2 * clusters * BM * tile.bn * (1 if span >= k else 2)
        room = x.new_empty(sums, dtype=torch.float32) if tile.cut else out
        cut = pairs * tiles_b % clusters + clusters if tile.cut else 0
        problem = Problem(
            rows, n, triton.cdiv(k, BK), span // BK, pairs, tiles_b, 1 if tile.swap_ab else GROUP, cut,
            end.softcap or 0.0,
        )
        maps = [map_of(a, BM, end.gated and a is w), map_of(b, tile.bn // 2, end.gated and b is w)]
        addresses = [0 if t is None else t.data_ptr() for t in (end.bias, out, room, self.semaphores)]
        kernel(2 * min(pairs * tiles_b, clusters), THREADS, tile.shared(), [*maps, *addresses, problem], pdl)
        return out


def map_of(x: Tensor, rows: int, paired: bool) -> TensorMap:
    return tensor_map(x.data_ptr(), x.shape[0], x.shape[1], stride=x.stride(0), tile_rows=rows, paired=paired)


def suits(x: Tensor, w: Tensor, end: Epilogue) -> bool:
    """Whether the kernel supports this product, regardless of the device."""
    n = w.shape[0] // (2 if end.gated else 1)
    plain = end.mul is None and (end.out_dtype in (None, torch.bfloat16) or not end.gated)
    aligned = all(t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 for t in (x, w))
    return x.dtype == w.dtype == torch.bfloat16 and n % 8 == 0 and plain and aligned


def flags_of(end: Epilogue, tile: WgmmaTile, spans: bool) -> Flags:
    bias = 0
    if end.bias is not None:
        bias = 1 if end.bias.dtype == torch.bfloat16 else 2
    return dict(
        BN=tile.bn, SWAP_AB=int(tile.swap_ab), STAGES=tile.stages, SPLITS=1 + spans, GATED=int(end.gated),
        ACT=ACTS[end.act], BIAS=bias,
        SOFTCAP=int(end.softcap is not None), FLOAT_OUT=int(end.out_dtype == torch.float32), CUT=int(tile.cut),
    )
