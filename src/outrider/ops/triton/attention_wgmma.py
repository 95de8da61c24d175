"""Attention of prompts with heads of 512 on Hopper, in CUDA C++ (`ops/cuda/attention_wgmma.cu`): the sums of
`attention`, so the same bits."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ...types import AttnSpec, KVView
from ..cuda.runtime import FOLDER, TensorMap, struct, tensor_map
from .attention_config import MIN_QUERIES, ReductionSpec, choose_reduction
from .common import LOG2E
from .nvrtc_kernels import NvrtcKernels

SOURCE = FOLDER / "attention_wgmma.cu"
BQ = 64
KEYS = 256
THREADS = 384
# bytes: queries, weights, stages and their barriers, maxima and sums of weights
SHARED = BQ * 512 * 2 + BQ * KEYS * 2 + 4 * (32768 + 16) + 6 * BQ * 4
Problem = struct(SOURCE.name, "Problem")


class AttentionWgmma(NvrtcKernels):
    source = SOURCE
    arch_specific = True

    def attend(
        self, q: Tensor, spec: AttnSpec, kv: KVView, pdl: bool, cut: ReductionSpec | None = None, span_end: int = 0
    ) -> Tensor | None:
        """`attention.attend` by wgmma; None: another shape, or it cannot be compiled. cut: for measuring."""
        packed = kv.max_rows * (spec.heads // spec.kv_heads)
        if cut is None and packed <= MIN_QUERIES:
            return None
        cut = cut or choose_reduction(spec, q.dtype, self.room)
        if not suits(spec, kv, q.dtype, cut=cut):
            return None
        kernel = self.kernel("attention_wgmma", {"PAGE": kv.page_size})
        out = torch.empty_like(q)
        table = kv.tables[spec.group]
        pairs = triton.cdiv(packed, 2 * BQ)
        problem = Problem(
            spec.heads, spec.kv_heads, pairs, table.stride(0), span_end, cut.near, cut.far, spec.scale * LOG2E
        )
        maps = [map_of(side[spec.kv_layer]) for side in (kv.keys, kv.values)]
        addresses = [t.data_ptr() for t in (q, table, kv.positions, kv.row_start, out)]
        blocks = 2 * pairs * spec.kv_heads * (kv.row_start.shape[0] - 1)
        kernel(blocks, THREADS, SHARED, [*maps, *addresses, problem], pdl)
        return out


def map_of(cache: Tensor | None) -> TensorMap:
    """Tensor map of a layer's keys or values [pages, kv_heads, page, D], by up to 32 positions of a page."""
    assert cache is not None
    width = cache.shape[-1]
    return tensor_map(
        cache.data_ptr(), cache.numel() // width, width, stride=width, tile_rows=min(cache.shape[2], 32), paired=False
    )


def suits(spec: AttnSpec, kv: KVView, dtype: torch.dtype, cut: ReductionSpec) -> bool:
    """Whether the kernel supports this pass, regardless of the device and of the number of rows."""
    keys = kv.keys[spec.kv_layer]
    splits = (cut.bn, cut.fine, cut.mid, cut.coarse) == (64, 64, 128, 256) and (cut.near | cut.far) % KEYS == 0
    plain = dtype == torch.bfloat16 and keys is not None and keys.dtype == dtype and keys.is_contiguous()
    paged = kv.page_size >= 8 and kv.page_size & (kv.page_size - 1) == 0
    return plain and splits and paged and spec.head_dim == 512 and spec.window is None and kv.ancestors is None
