"""Products of several hundred rows with TMA (Hopper and later): the chains of sums of `linear`, so the same bits.

TMA loads whole tiles of x and of the weights into shared memory, with zeros past their ends. Threads compute no
addresses and need no masks; these keep `linear_kernel` from the tensor cores' peak rate.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .common import epilogue, pdl_start


@triton.jit(do_not_specialize=["M"])
def tma_kernel(
    x, w, bias, mul, out, M, N, K, mul_stride, k_span, softcap,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    MUL: tl.constexpr,
    SOFTCAP: tl.constexpr, SPLITS: tl.constexpr, SEVERAL: tl.constexpr, GROUP_M: tl.constexpr, PDL: tl.constexpr,
):
    """x [M, K], w [N, K] (GATED: [2, N, K], the gate first; one instruction takes rows of both), both as descriptors ->
    out [M, N]. SEVERAL: a program takes more than one tile, and fetches for the next while it stores this one."""
    pdl_start(PDL)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    SIDES: tl.constexpr = 2 if GATED else 1
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=SEVERAL):
        # GROUP_M tiles of rows go through all weights before the next ones begin: their x stays in L2.
        group = tile // (GROUP_M * tiles_n)
        high = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
        inside = tile - group * (GROUP_M * tiles_n)
        row, col = (group * GROUP_M + inside % high) * BM, (inside // high) * BN
        acc = tl.zeros((BM, BN * SIDES), dtype=tl.float32)
        if SPLITS == 1:
            for k in range(0, K, BK):
                a = x.load([row, k])
                if GATED:
                    b = tl.reshape(w.load([0, col, k]), (2 * BN, BK))
                else:
                    b = w.load([col, k])
                acc = tl.dot(a, b.T, acc)
        else:  # spans in order, each a separate chain
            for s in range(SPLITS):
                sums = tl.zeros((BM, BN), dtype=tl.float32)
                for k in range(s * k_span, tl.minimum(s * k_span + k_span, K), BK):
                    sums = tl.dot(x.load([row, k]), w.load([col, k]).T, sums)
                acc += sums
        up = acc
        if GATED:
            acc, up = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN)), (0, 2, 1)))
        rows, cols = row + tl.arange(0, BM), col + tl.arange(0, BN)
        epilogue(acc, up, bias, mul, out, rows, cols, M, N, mul_stride, softcap, GATED, ACT, BIAS, MUL, SOFTCAP)


def matrix_descriptor(x: Tensor, rows: int, columns: int, gated: bool = False) -> TensorDescriptor:
    """A TMA descriptor of a matrix with tiles of this size. gated: as many rows of its upper and of its lower half."""
    if gated:
        half = x.shape[0] // 2
        return TensorDescriptor(x, [2, half, x.shape[1]], [half * x.stride(0), x.stride(0), 1], [2, rows, columns])
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [rows, columns])


def tma_aligned(x: Tensor) -> bool:
    """Whether TMA can load it: rows must begin at whole 16 bytes."""
    return x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
