"""Low-rank adapters in the layout of lowrank.h, and the adapters of one pass as the library sees them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_int32, c_void_p
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lowrank import Adapter, LowRank
from ..reference import as_tensor
from .lib import DTYPES, CAdapters, CLowRank
from .memory import HUGE, Arena
from .packing import LANES

NAMES = ("qkv", "out", "gate_up", "down", "ple_gate", "ple_out")  # of a layer's weights, in the order of lowrank.h


def pack(a: Tensor, b: Tensor, scale: Tensor, pieces: Sequence[tuple[int, int]]) -> LowRank | None:
    """A by fours of rows, B by pieces and groups of 16 outputs, which lie side by side; the zeros between pieces are
    left out. None: sizes that are no whole groups."""
    if a.shape[1] % LANES or any(outputs % LANES for outputs, _ in pieces):
        return None
    rank, k = a.shape
    quads = F.pad(a, (0, 0, 0, -rank % 4)).reshape(-1, 4, k // LANES, LANES).transpose(1, 2).contiguous()
    groups, row, first = [], 0, 0
    for outputs, rank in pieces:
        own = b[row : row + outputs, first : first + rank]  # [outputs, rank]
        groups.append(own.reshape(outputs // LANES, LANES, rank).transpose(1, 2).reshape(-1))
        row, first = row + outputs, first + rank
    return LowRank(quads, torch.cat(groups), scale, tuple(pieces))


def side_by_side(parts: Mapping[str, LowRank]) -> dict[str, LowRank]:
    """The same in one mapping of huge pages, in the order in which a pass reads them (memory.py says why)."""
    if sum(part.nbytes for part in parts.values()) < HUGE:
        return dict(parts)
    arena, out = Arena(), {}
    for name, part in parts.items():
        a, b = (arena.empty(tuple(t.shape), t.dtype).copy_(t) for t in (as_tensor(part.a), as_tensor(part.b)))
        out[name] = replace(part, a=a, b=b)
    return out


def packed(part: LowRank) -> bool:
    return len(part.b.shape) == 1


def c_lowrank(part: LowRank) -> CLowRank:
    a, b, group, first, at = as_tensor(part.a), as_tensor(part.b), 0, 0, 0
    rank = sum(rank for _, rank in part.pieces)
    c = CLowRank(a.data_ptr(), b.data_ptr(), rank, a.shape[1] * LANES, DTYPES[a.dtype])
    for piece, (outputs, rank) in zip(c.piece, part.pieces):
        scale = float(part.scale[LANES * group])
        group += outputs // LANES
        piece.end, piece.first, piece.rank, piece.scale, piece.at = group, first, rank, scale, at
        first, at = first + rank, at + outputs * rank
    return c


def table(adapter: Adapter, layers: int) -> ctypes.Array[CLowRank] | None:
    """An adapter's changes, weight by weight; None: one of them is not supported by the library."""
    names = [f"layers.{i}.{name}" for i in range(layers) for name in NAMES] + ["ple_proj"]
    if not set(adapter.parts) <= set(names) or not all(packed(part) for part in adapter.parts.values()):
        return None
    found = [adapter.parts.get(name) for name in names]
    return (CLowRank * len(names))(*[CLowRank() if part is None else c_lowrank(part) for part in found])


class PassAdapters:
    """The adapters of a pass, and by sequence which of them it uses (-1: none). changes: of an adapter, its `table`."""

    def __init__(self, changes: Callable[[Adapter], ctypes.Array[CLowRank] | None], adapters: Sequence[Adapter | None]):
        self.changes, self.adapters, self.c = changes, list(adapters), CAdapters()
        used = list(dict.fromkeys(one for one in adapters if one is not None))
        number = {one: i for i, one in enumerate(used)}
        self.of = [-1 if one is None else number[one] for one in adapters]
        if used:
            self.tables = [found for one in used if (found := changes(one)) is not None]
            assert len(self.tables) == len(used), "an adapter that the library does not know"
            self.table = (c_void_p * len(used))(*[ctypes.addressof(found) for found in self.tables])
            self.c = CAdapters(ctypes.addressof(self.table), None, len(used))

    def by_row(self, counts: Sequence[int]) -> CAdapters:
        """For a pass in which sequence i has `counts[i]` rows."""
        rows = [which for which, count in zip(self.of, counts, strict=True) for _ in range(count)]
        self.rows = (c_int32 * len(rows))(*rows)
        self.c.of = ctypes.addressof(self.rows)
        return self.c
