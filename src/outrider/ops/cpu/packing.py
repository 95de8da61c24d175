"""Quantised weights in the layout of formats.h: the file's own bits, repacked by the library while they are loaded.

Every block format of GGUF keeps its values and its width (6-bit scales become bytes: at most 1.03 times the file). Rows
of several tensors fused into one weight stay in their own formats (PackedKind.PARTS), or become float32 if these do not
divide into groups of 16 rows.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable, Sequence
from ctypes import Structure
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import torch
from torch import Tensor

from ..backend import ExpertWeights
from ..formats import DeviceWeight, Weight, dense
from ..formats.blocks import made
from ..noise import token_hash
from ..reference import as_tensor
from .lib import FILE_TYPES, CMoe, CWeight, PackedKind, at, dense_weight
from .memory import Arena

log = logging.getLogger("outrider")
Allocate = Callable[..., Tensor]  # (shape, dtype)
LANES = 16
BLOCK = 32
COARSE_BITS = 4.75  # bits of a weight; formats at or below are not re-quantised (the others: to four bits)
SLICE = 16 << 20  # bytes of the file that are packed before their pages are dropped


@dataclass(frozen=True)
class PackedWeight:
    shape: tuple[int, ...]
    c: Structure  # CWeight
    nbytes: int
    keep: tuple[object, ...]  # keeps the memory behind the pointers alive

    def view(self, *shape: int) -> PackedWeight:
        """Views the rows under another shape, e.g. by cluster [C, S, h]."""
        known = math.prod(d for d in shape if d != -1)
        shape = tuple(self.c.n * self.c.k // known if d == -1 else d for d in shape)
        assert shape[-1] == self.c.k and math.prod(shape) == self.c.n * self.c.k
        return PackedWeight(shape, self.c, self.nbytes, keep=self.keep)

    def moved(self, arena: Arena) -> PackedWeight:
        """A copy in `arena`, of rows of one kind."""
        copies = [arena.empty(tuple(t.shape), t.dtype).copy_(t) for t in self.keep if isinstance(t, Tensor)]
        c = CWeight(self.c.kind, self.c.n, self.c.k, self.c.dtype, *map(at, copies))
        return PackedWeight(self.shape, c, self.nbytes, keep=tuple(copies))


class Packer:
    """Packs weights with the library's threads; `arena` holds them."""

    def __init__(self, lib: ctypes.CDLL, pool: int, arena: Arena):
        self.lib = lib
        self.pool = pool
        self.arena = arena
        self.rounded = Arena()  # copies of weights that are freed: in `arena` they would keep their memory

    def pack(self, parts: Sequence[Weight]) -> PackedWeight | None:
        """Rows of all parts (GGUF blocks) in order, with the file's values; None if the width does not divide into
        blocks. Where a group of 16 would hold rows of two formats, the rows become float32."""
        if parts[0].shape[-1] % BLOCK:
            return None
        runs = [list(run) for _, run in groupby(parts, lambda part: part.format)]  # each becomes one weight
        if any(sum(p.shape[0] for p in run) % LANES for run in runs[:-1]):
            return self._decoded(parts)
        packed = [self._one(run) for run in runs]
        return packed[0] if len(packed) == 1 else join(packed)

    def _decoded(self, parts: Sequence[Weight]) -> PackedWeight:
        """Rows of several formats in float32."""
        heights = [part.shape[0] for part in parts]
        width = parts[0].shape[1]
        out = self.arena.empty((sum(heights), width), torch.float32)
        for rows, part in zip(out.split(heights), parts, strict=True):
            for lo, hi, some in part.slices(SLICE):
                rows[lo:hi] = some.dense()
        described = " and ".join(f"{height} rows of {part.format.name}" for height, part in zip(heights, parts))
        log.warning("%s do not fill groups of %d: kept in float32, %d MB", described, LANES, out.nbytes >> 20)
        return dense_rows(out, out.nbytes)

    def _one(self, parts: Sequence[Weight]) -> PackedWeight:
        rows = [math.prod(part.shape[:-1]) for part in parts]
        out = self._empty(parts[0].format.name, sum(rows), parts[0].shape[-1])
        for first, part in zip(accumulate(rows, initial=0), parts):
            self._fill(out, first, part)
        return out

    def _fill(self, out: PackedWeight, first: int, part: Weight) -> None:
        blocks = part.tensors["blocks"].flatten(0, -2)  # of experts all rows
        file_type = FILE_TYPES.index(part.format.name)
        flat = replace(part, shape=(len(blocks), part.shape[-1]), tensors={"blocks": blocks})
        for lo, hi, some in flat.slices(SLICE, LANES):
            data = some.tensors["blocks"].contiguous()
            self.lib.or_pack(self.pool, out.c, file_type, first + lo, at(data), data.shape[1], hi - lo)

    def _empty(self, name: str, n: int, k: int, empty: Allocate | None = None) -> PackedWeight:
        """Memory for a weight in the layout that GGUF's type `name` has."""
        file_type = FILE_TYPES.index(name)
        return self._layout(self.lib.or_file_kind(file_type), self.lib.or_file_table(file_type), n, k=k, empty=empty)

    def _layout(self, kind: int, table: int, n: int, k: int, empty: Allocate | None = None) -> PackedWeight:
        sizes = [self.lib.or_packed_bytes(kind, n, k, which) for which in (0, 1)]
        data, scale = ((empty or self.arena.empty)((size,), dtype=torch.uint8) for size in sizes)
        return PackedWeight((n, k), CWeight(kind, n, k, table, at(data), at(scale)), sum(sizes), keep=(data, scale))

    def halves(self, parts: Sequence[Weight]) -> PackedWeight:
        """Dense rows [N, K] of one 16-bit type, copied unchanged while the file is read."""
        n = sum(p.shape[0] for p in parts)
        k = parts[0].shape[1]
        out = self.arena.empty((n, k), parts[0].tensors["values"].dtype)
        for to, part in zip(out.split([p.shape[0] for p in parts]), parts):
            for lo, hi, some in part.slices(SLICE):
                to[lo:hi] = some.tensors["values"]
        return dense_rows(out, out.nbytes)

    def quantize(self, dense: Tensor, mode: str, empty: Allocate | None = None) -> PackedWeight | None:
        """A dense [N, K] weight, blockwise; None where K does not divide into blocks. Works in slices: float32 copies
        stay small. empty: where it is put, if not in the arena."""
        n, k = dense.shape
        if k % BLOCK:
            return None
        out = self._empty("Q8_0" if mode == "int8" else "Q4_1", n, k, empty=empty)
        step = max(LANES, (1 << 22) // k // LANES * LANES)
        for lo in range(0, n, step):
            self._fill(out, lo, quantize_rows(dense[lo : lo + step].float(), mode))
        return out

    def coarse(self, w: PackedWeight) -> PackedWeight:
        """Rounds the rows to Q4_0 with the scales that fit best. Returns w itself if it is as small, or in a file."""
        n = w.c.n
        k = w.c.k
        if k % BLOCK or w.c.kind == PackedKind.FILE or w.nbytes * 8 <= COARSE_BITS * -(-n // LANES) * LANES * k:
            return w
        out = self._empty("Q4_0", n, k, empty=self.rounded.empty)
        self.lib.or_coarse(self.pool, w.c, out.c)
        return out.view(*w.shape)

    def take(self, w: PackedWeight, order: Tensor) -> PackedWeight:
        """Rows `order` of a packed weight, bit for bit."""
        if w.c.kind == PackedKind.DENSE:
            (rows,) = w.keep
            assert isinstance(rows, Tensor)
            return self.halves([dense(rows[order])])
        assert w.c.kind not in (PackedKind.PARTS, PackedKind.FILE), "rows of one kind only"
        out = self._layout(w.c.kind, w.c.dtype, len(order), k=w.c.k)
        rows = order.long().contiguous()
        self.lib.or_take(w.c, at(rows), out.c)
        return out


def join(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Rows of several packed weights, one after the other."""
    n = sum(p.c.n for p in parts)
    k = parts[0].c.k
    array = (CWeight * len(parts))(*[p.c for p in parts])
    c = CWeight(PackedKind.PARTS, n, k, len(parts), at(array), None)
    return PackedWeight((n, k), c, sum(p.nbytes for p in parts), keep=(array, *parts))


def in_file(part: Weight) -> PackedWeight:
    """Rows in place in the file, for a table that is only looked up: the system reads the pages that are needed."""
    n, k = part.shape
    blocks = part.tensors["blocks"]
    assert blocks.is_contiguous()
    c = CWeight(PackedKind.FILE, n, k, FILE_TYPES.index(part.format.name), at(blocks), None)
    return PackedWeight((n, k), c, 0, keep=(part,))


def dense_rows(rows: Tensor, nbytes: int) -> PackedWeight:
    """Dense rows [N, K] in place; `nbytes`: their memory in addition to the file."""
    return PackedWeight(tuple(rows.shape), dense_weight(rows), nbytes, keep=(rows,))


def quantize_rows(dense: Tensor, mode: str) -> Weight:
    """float32 [N, K]: int8 by a block's largest magnitude (Q8_0), int4 between its least and largest value (Q4_1)."""
    b = dense.unflatten(-1, (-1, BLOCK))
    if mode == "int8":
        scale = (b.abs().amax(-1, keepdim=True) / 127).half()
        q = (b * _inverse(scale)).round_().clamp_(-127, 127).to(torch.int8)
        return made("Q8_0", tuple(dense.shape), [scale], codes=q)
    low, high = b.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).half()
    low = low.half()
    q = ((b - low.float()) * _inverse(scale)).round_().clamp_(0, 15).to(torch.uint8)
    return made("Q4_1", tuple(dense.shape), [scale, low], codes=q[..., :16] | (q[..., 16:] << 4))


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, 1.0 / scale.float(), 0.0)


def cluster_hashes(tokens: Tensor) -> Tensor:
    """Token ids [C, S] -> int32 [C / 16, S, 16], their part of the noise; a lane is a cluster (draft.h)."""
    clusters, size = tokens.shape
    padded = torch.zeros((-(-clusters // LANES) * LANES, size), dtype=torch.int64)
    padded[:clusters] = token_hash(tokens)
    return padded.view(-1, LANES, size).transpose(1, 2).to(torch.int32).contiguous()  # the lower 32 bits


# ---- a model's weights ----------------------------------------------------------------------------------------------
def c_weight(w: DeviceWeight) -> Structure:
    if isinstance(w, PackedWeight):
        return w.c
    dense = as_tensor(w)
    assert dense.is_contiguous(), "a dense weight must be contiguous: pass it through prepare()"
    return dense_weight(dense)


def routable(experts: ExpertWeights) -> bool:
    """Whether the library can run these experts: their rows are whole groups, the rows of dense ones as well."""
    gate_up = experts.gate_up
    down = experts.down
    whole = down.shape[2] % 32 == 0 or isinstance(down, Tensor)
    return whole and gate_up.shape[1] % 32 == 0 and down.shape[1] % LANES == 0


def c_moe(experts: ExpertWeights) -> Structure:
    matrices = {name: c_weight(getattr(experts, name)) for name in ("router", "gate_up", "down")}
    return CMoe(**matrices, expert_scale=at(experts.expert_scale), experts=experts.gate_up.shape[0], top=experts.top_k)


def table_scale(table: DeviceWeight, scale: float) -> float:
    """The embedding's factor, rounded to the table's dtype where it has one."""
    return float(torch.tensor(scale, dtype=table.dtype)) if isinstance(table, Tensor) and scale != 1.0 else scale
