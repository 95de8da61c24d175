"""Attention of few queries under a window, in CUDA C++ (`ops/cuda/few_queries.cu`): the bits of `attention`, sooner.

`suits` is the rule, in one place: heads of 256 in bfloat16, K/V too, rows in a line, splits that are apart, and shapes that gain by it
(`gains`); and `FewQueries.of` the device: Hopper, where both were seen to give the same bits. Everything else goes to Triton; so does all
where NVRTC cannot be had, which one line of the log says.

K/V of positions before a sequence's first row are read before the kernel ahead is done: they are an earlier pass's, or were written ahead
of a kernel that is not launched early.
"""

from __future__ import annotations

import ctypes

import torch
import triton
from torch import Tensor

from ...types import AttnSpec, KVView
from ..cuda.runtime import FOLDER
from .attention import combine
from .attention_shapes import Cut, choose_cut, choose_shape, split_count
from .compiled import Compiled, Flags

SOURCE = FOLDER / "few_queries.cu"
DIM, WARPS, QUERIES = 256, 8, 16
Turn = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # cosines, sines, norms of queries and of keys


class Shape(ctypes.Structure):
    """What the kernel is told."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("slots", "tiles", "table_stride", "q_stride")),
        ("scale", ctypes.c_float), ("eps", ctypes.c_float), ("page_stride", ctypes.c_longlong),
    ]  # fmt: skip


def gains(spec: AttnSpec, kv: KVView) -> bool:
    """Measured in whole steps. 31B gains everywhere; with five rows E2B and 26B-A4B lose 0.4 %, and one sequence of 26B-A4B, which has the
    attention of 12B, up to 4 where that gains 0.4."""
    many = kv.row_start.shape[0] > 8
    return spec.kv_heads >= 16 or (kv.max_rows == 1 and (many or spec.kv_heads < 8))


def suits(q: Tensor, spec: AttnSpec, kv: KVView, cut: Cut) -> bool:
    """Whether the kernel knows this attention; the device aside. q: or q, k and v."""
    keys = kv.keys[spec.kv_layer]
    assert keys is not None
    known = (
        q.dtype == keys.dtype == torch.bfloat16
        and q.is_contiguous()
        and spec.head_dim == DIM
        and spec.window is not None
        and kv.paths is None
    )
    whole = cut.bn % kv.page_size == 0 and kv.page_size % (cut.bn // WARPS) == 0  # a split is whole pages, and a warp's keys lie in one
    return (
        known and whole and gains(spec, kv) and cut.bn == cut.fine and choose_shape(spec, cut, kv, kv.row_start.shape[0] - 1, q.dtype).split
    )


def turns(turn: Turn, spec: AttnSpec, kv: KVView) -> bool:
    """Whether queries are normed and rotated by every block that reads them: one row a sequence, so that no warp has two of them."""
    alone = kv.max_rows == 1 and spec.heads // spec.kv_heads <= WARPS
    return alone and all(t is None or (t.dtype == torch.float32 and t.is_contiguous()) for t in turn)


class FewQueries(Compiled):
    """The kernels of one device."""

    source, what = SOURCE, "attention of few rows under a window goes"

    def attend(self, q: Tensor, spec: AttnSpec, kv: KVView, pdl: bool) -> Tensor | None:
        """q [R, heads · D] -> the same; None: not one of these."""
        return self._launch(q, None, spec, kv, pdl)

    def rope_attend(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, spec: AttnSpec, kv: KVView, pdl: bool
    ) -> Tensor | None:
        """`rope_write` and `attend` in one launch: qkv [R, spec.qkv_rows] -> [R, heads · D]; None: not one of these, or slower so."""
        turn = (cos, sin, q_norm, k_norm)
        return self._launch(qkv, turn, spec, kv, pdl) if turns(turn, spec, kv) else None

    def _launch(self, q: Tensor, turn: Turn | None, spec: AttnSpec, kv: KVView, pdl: bool) -> Tensor | None:
        cut = choose_cut(spec, q.dtype, self.room)
        here = self.usable and q.device.type == self.device.type  # a tensor without memory is for Triton, which compiles for it
        kernel = self.kernel("few_queries", flags_of(spec, kv, cut, turn)) if here and suits(q, spec, kv, cut) else None
        if kernel is None:
            return None
        keys, values, table = kv.keys[spec.kv_layer], kv.values[spec.kv_layer], kv.tables[spec.group]
        assert keys is not None and values is not None
        slots, batch, rows = split_count(spec, kv, cut), kv.row_start.shape[0] - 1, q.shape[0]
        tiles = triton.cdiv(kv.max_rows * (spec.heads // spec.kv_heads), QUERIES)
        out = torch.empty((rows, spec.heads * DIM), dtype=q.dtype, device=q.device)
        part = torch.empty((rows, spec.heads, slots, DIM), dtype=torch.float32, device=q.device)
        part_ml = torch.empty((rows, spec.heads, slots, 2), dtype=torch.float32, device=q.device)
        shape = Shape(slots, tiles, table.stride(0), q.stride(0), spec.scale * 1.4426950408889634, spec.eps, keys.stride(0))
        tensors = (q, *(turn or (None,) * 4), keys, values, table, kv.positions, kv.row_start, part, part_ml)
        given = [0 if t is None else t.data_ptr() for t in tensors]
        kernel(slots * tiles * spec.kv_heads * batch, 32 * WARPS, shared_bytes(cut), [*given, shape], pdl)
        combine(part, part_ml, out, spec, kv, cut, pdl)
        return out


def shared_bytes(cut: Cut) -> int:
    """Keys, values, queries, weights, maxima."""
    return (2 * cut.bn + QUERIES) * 2 * DIM + QUERIES * 128 + WARPS * QUERIES * 4


def flags_of(spec: AttnSpec, kv: KVView, cut: Cut, turn: Turn | None) -> Flags:
    """What the source is compiled with."""
    _, _, q_norm, k_norm = turn or (None,) * 4
    flags = dict(
        D=DIM, KEYS=cut.bn, HEADS=spec.heads, KV_HEADS=spec.kv_heads, PAGE_KEYS=kv.page_size, WINDOW=spec.window or 0,
        TURN=turn is not None, Q_NORM=q_norm is not None, K_NORM=k_norm is not None, K_EQ_V=spec.k_eq_v, NORM_V=spec.norm_v,
        KEEPS=spec.writes,
    )  # fmt: skip
    return tuple((name, int(value)) for name, value in flags.items())
