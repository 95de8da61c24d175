"""Quantised weights in the layout of formats.h: the file's own bits, repacked by the library while they are loaded.

Every block format of GGUF keeps its values and its width (6-bit scales become bytes: at most 1.03 times the file). Rows
of several tensors fused into one weight stay in their own formats (PackedKind.PARTS).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from ..formats import Weight, dense
from ..formats.gguf import from_rows, stored_rows
from ..noise import token_hash
from .lib import CWeight, PackedKind, dense_weight
from .memory import Arena

LANES, BLOCK = 16, 32
COARSE_BITS = 4.75  # a weight; what is no wider is left as it is where others are rounded to four
SLICE = 16 << 20  # bytes of the file that are packed before their pages are dropped


@dataclass(frozen=True)
class PackedWeight:
    shape: tuple[int, ...]
    c: CWeight
    nbytes: int
    keep: tuple[object, ...]  # keeps the memory behind the pointers alive

    @property
    def ref(self) -> int:
        return ctypes.addressof(self.c)

    def view(self, *shape: int) -> PackedWeight:
        """The same rows under another shape, e.g. by cluster [C, S, h]."""
        known = math.prod(d for d in shape if d != -1)
        shape = tuple(self.c.n * self.c.k // known if d == -1 else d for d in shape)
        assert shape[-1] == self.c.k and math.prod(shape) == self.c.n * self.c.k
        return PackedWeight(shape, self.c, self.nbytes, self.keep)

    def moved(self, arena: Arena) -> PackedWeight:
        """A copy in `arena`, of rows of one kind."""
        own = [arena.empty(tuple(t.shape), t.dtype).copy_(t) for t in self.keep if isinstance(t, Tensor)]
        at = [t.data_ptr() for t in own]
        c = CWeight(self.c.kind, self.c.n, self.c.k, self.c.dtype, at[0], at[1] if at[1:] else None)
        return PackedWeight(self.shape, c, self.nbytes, tuple(own))


class Packer:
    """Packs weights with the library's threads; `arena` holds them."""

    def __init__(self, lib: ctypes.CDLL, team: int, arena: Arena):
        self.lib, self.team, self.arena = lib, team, arena
        self.rounded = Arena()  # copies of weights that are freed: in `arena` they would keep their memory

    def pack(self, parts: Sequence[Weight]) -> PackedWeight | None:
        """Rows of all parts (GGUF blocks) in order; None where the width does not divide into blocks."""
        if parts[0].shape[-1] % BLOCK:
            return None
        runs = [list(run) for _, run in groupby(parts, lambda part: part.format)]  # each becomes one weight
        if any(sum(p.shape[0] for p in run) % LANES for run in runs[:-1]):  # a group would have rows of two kinds
            runs = [[quantize_rows(p.dense().numpy(), "int8") for p in parts]]
        made = [self._one(run) for run in runs]
        return made[0] if len(made) == 1 else join(made)

    def _one(self, parts: Sequence[Weight]) -> PackedWeight:
        rows = [math.prod(part.shape[:-1]) for part in parts]
        out = self._empty(PackedKind[parts[0].format.name], sum(rows), parts[0].shape[-1])
        for first, part in zip(accumulate(rows, initial=0), parts):
            self._fill(out, first, part)
        return out

    def _fill(self, out: PackedWeight, first: int, part: Weight) -> None:
        stored = stored_rows(part)
        rows, row_bytes = stored.shape
        step = max(LANES, SLICE // max(1, row_bytes) // LANES * LANES)
        for lo in range(0, rows, step):
            hi = min(rows, lo + step)
            data = np.ascontiguousarray(stored[lo:hi])
            self.lib.or_pack(self.team, out.ref, first + lo, data.ctypes.data, row_bytes, hi - lo)
            if part.release is not None:
                part.release(lo, hi)

    def _empty(self, kind: int, n: int, k: int, arena: Arena | None = None) -> PackedWeight:
        sizes = [self.lib.or_packed_bytes(kind, n, k, which) for which in (0, 1)]
        data, scale = ((arena or self.arena).empty((size,), torch.uint8) for size in sizes)
        return PackedWeight(
            (n, k), CWeight(kind, n, k, 0, data.data_ptr(), scale.data_ptr()), sum(sizes), (data, scale)
        )

    def halves(self, parts: Sequence[Weight]) -> PackedWeight:
        """Dense rows [N, K] of one 16-bit type, copied unchanged while the file is read."""
        n, k = sum(p.shape[0] for p in parts), parts[0].shape[1]
        out, at = self.arena.empty((n, k), parts[0].tensors["values"].dtype), 0
        for part in parts:
            step = max(1, SLICE // (2 * k))
            for lo in range(0, part.shape[0], step):
                hi = min(part.shape[0], lo + step)
                out[at + lo : at + hi] = part.tensors["values"][lo:hi]
                if part.release is not None:
                    part.release(lo, hi)
            at += part.shape[0]
        return dense_rows(out, out.numel() * out.element_size())

    def quantize(self, dense: Tensor, mode: str) -> PackedWeight | None:
        """A dense [N, K] weight, blockwise; None where K does not divide into blocks. Works in slices: float32 copies
        stay small."""
        n, k = dense.shape
        if k % BLOCK:
            return None
        out = self._empty(PackedKind.Q8_0 if mode == "int8" else PackedKind.Q4_1, n, k)
        step = max(LANES, (1 << 22) // k // LANES * LANES)
        for lo in range(0, n, step):
            self._fill(out, lo, quantize_rows(dense[lo : lo + step].float().numpy(), mode))
        return out

    def coarse(self, w: PackedWeight) -> PackedWeight:
        """The same rows in four bits (Q4_0), with the scales that fit best; the weight itself where it is about as
        small already, or lies in a file."""
        n, k = w.c.n, w.c.k
        if k % BLOCK or w.c.kind == PackedKind.FILE or w.nbytes * 8 <= COARSE_BITS * -(-n // LANES) * LANES * k:
            return w
        out = self._empty(PackedKind.Q4_0, n, k, self.rounded)
        if self.lib.or_coarse(self.team, w.ref, out.ref):
            raise MemoryError("scratch of rounding")
        return out.view(*w.shape)

    def take(self, w: PackedWeight, order: np.ndarray) -> PackedWeight:
        """Rows `order` of a packed weight, bit for bit."""
        if w.c.kind == PackedKind.DENSE:
            (rows,) = w.keep
            assert isinstance(rows, Tensor)
            return self.halves([dense(rows[torch.from_numpy(order)])])
        assert w.c.kind not in (PackedKind.PARTS, PackedKind.FILE), "rows of one kind only"
        out = self._empty(w.c.kind, len(order), w.c.k)
        rows = np.ascontiguousarray(order, dtype=np.int64)
        self.lib.or_take(w.ref, rows.ctypes.data, out.ref)
        return out


def join(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Rows of several packed weights, one after the other."""
    n, k = sum(p.c.n for p in parts), parts[0].c.k
    array = (CWeight * len(parts))(*[p.c for p in parts])
    return PackedWeight(
        (n, k),
        CWeight(PackedKind.PARTS, n, k, len(parts), ctypes.addressof(array), None),
        sum(p.nbytes for p in parts),
        (array, *parts),
    )


def in_file(part: Weight) -> PackedWeight:
    """Rows in place in the file, for a table that is only looked up: the system reads the pages that are needed."""
    (n, k), blocks = part.shape, part.tensors["blocks"]
    assert blocks.is_contiguous()
    return PackedWeight(
        (n, k), CWeight(PackedKind.FILE, n, k, PackedKind[part.format.name], blocks.data_ptr(), None), 0, (part,)
    )


def dense_rows(rows: Tensor, nbytes: int) -> PackedWeight:
    """Dense rows [N, K] in place; `nbytes`: their memory in addition to the file."""
    return PackedWeight(tuple(rows.shape), dense_weight(rows), nbytes, (rows,))


def int8_rows(dense: Tensor) -> PackedWeight:
    """[N, K] in the layout of W_Q8, in memory of its own."""
    n, k = dense.shape
    blocks = quantize_rows(dense.float().numpy(), "int8").tensors["blocks"].view(n, k // BLOCK, 2 + BLOCK)
    blocks = torch.nn.functional.pad(blocks, (0, 0, 0, 0, 0, -n % LANES))
    groups = blocks.view(-1, LANES, k // BLOCK, 2 + BLOCK).transpose(1, 2)  # [groups, KB, 16, 34]
    codes = groups[..., 2:].unflatten(3, (8, 4)).transpose(2, 3).contiguous()  # [groups, KB, 8, 16, 4]
    scale = groups[..., :2].contiguous()
    c = CWeight(PackedKind.Q8_0, n, k, 0, codes.data_ptr(), scale.data_ptr())
    return PackedWeight((n, k), c, codes.nbytes + scale.nbytes, (codes, scale))


def quantize_rows(dense: np.ndarray, mode: str) -> Weight:
    """float32 [N, K]: int8 by the largest magnitude of a block (Q8_0); int4 between a block's smallest and largest
    value (Q4_1)."""
    b = np.ascontiguousarray(dense, dtype=np.float32).reshape(len(dense), -1, BLOCK)
    if mode == "int8":
        scale = (np.abs(b).max(-1) / 127).astype(np.float16)
        q = np.clip(np.rint(b * _inverse(scale)), -127, 127).astype(np.int8).view(np.uint8)
        return _part("Q8_0", (scale,), q)
    low, high = b.min(-1), b.max(-1)
    low, scale = low.astype(np.float16), ((high - low) / 15).astype(np.float16)
    q = np.clip(np.rint((b - low.astype(np.float32)[:, :, None]) * _inverse(scale)), 0, 15).astype(np.uint8)
    return _part("Q4_1", (scale, low), q[:, :, :16] | (q[:, :, 16:] << 4))


def _inverse(scale: np.ndarray) -> np.ndarray:
    return np.divide(1.0, scale, out=np.zeros(scale.shape, np.float32), where=scale > 0, dtype=np.float32)[:, :, None]


def _part(kind: str, halves: tuple[np.ndarray, ...], q: np.ndarray) -> Weight:
    """float16 [N, KB] each and codes uint8 [N, KB, bytes] -> rows as a file would hold them."""
    blocks = np.concatenate([h[:, :, None].view(np.uint8) for h in halves] + [q], axis=2)
    return from_rows(kind, blocks.reshape(len(blocks), -1))


def cluster_hashes(tokens: Tensor) -> Tensor:
    """Token ids [C, S] -> int32 [C / 16, S, 16], what the noise needs of each: a lane is a cluster
    (`cluster_bonus_phase`, draft.h)."""
    clusters, size = tokens.shape
    padded = torch.zeros((-(-clusters // LANES) * LANES, size), dtype=torch.int64)
    padded[:clusters] = token_hash(tokens)
    words = padded.view(-1, LANES, size).transpose(1, 2).numpy().astype(np.uint32)  # the lower 32 bits
    return torch.from_numpy(np.ascontiguousarray(words).view(np.int32))
