"""Low-rank adapters in the layout of lowrank.h, and the adapters of one pass as the library sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import Array, Structure, c_int32, c_void_p
from dataclasses import replace
from math import frexp

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import DeviceWeight
from ..lowrank import Adapter, LowRank
from ..reference import as_tensor
from .lib import DTYPES, CAdapters, CLowRank, PackedKind, at
from .memory import HUGE, Arena
from .packing import LANES, PackedWeight, Packer, dense_rows

NAMES = ("qkv", "out", "gate_up", "down", "ple_gate", "ple_out")  # of a layer's weights, in the order of lowrank.h


def pack(
    packer: Packer, a: Tensor, b: Tensor, scale: Tensor, pieces: Sequence[tuple[int, int]], base: DeviceWeight | None
) -> LowRank | None:
    """A as a weight of its own, B by pieces and groups of 16 outputs without the zeros between pieces. Both are int8
    next to a quantised base, whose activations are int8 as well; next to 16 bits float32 becomes float16. None: outputs
    that are no whole groups."""
    if any(outputs % LANES for outputs, _ in pieces):
        return None
    short = base is not None and not (isinstance(base, Tensor) and base.dtype == torch.float32)
    short = short and max(float(t.abs().max()) for t in (a, b)) < 6e4  # what float16 holds, as a value or a scale
    coded = short and isinstance(base, PackedWeight) and base.c.kind != PackedKind.DENSE
    if short and not coded and a.dtype == torch.float32:
        a = a.half()
        b = b.half()
    groups = []
    heights = []
    row = 0
    first = 0
    for outputs, rank in pieces:
        block = b[row : row + outputs, first : first + rank]
        scales = scale[row : row + outputs].float()
        low = a[first : first + rank]
        if coded and rank:
            step = block.float().abs().amax(1) / 127
            block = (block.float() / step.clamp_min(1e-38)[:, None]).round().to(torch.int8)
            # the scales of A are float16: a power of two brings it into their range, and B's take it back exactly
            power = 2.0 ** frexp(float(low.abs().max()))[1]
            low = low.float() / power
            scales = scales * step * power
        block = F.pad(block, (0, rank % 2 * coded)).reshape(outputs // LANES, LANES, -1, 1 + coded).transpose(1, 2)
        parts = (scales.view(torch.uint8).view(-1, 4 * LANES), block.contiguous().view(torch.uint8).flatten(1))
        groups.append(torch.cat(parts, dim=1).flatten())
        heights.append(F.pad(low, (0, 0, 0, -rank % LANES * coded)))
        row = row + outputs
        first = first + rank
    a = torch.cat(heights)
    rows = packer.quantize(a, "int8", torch.empty) if coded else dense_rows(a, a.nbytes)
    return None if rows is None else LowRank(rows, torch.cat(groups), scale, pieces=tuple(pieces))


def side_by_side(parts: Mapping[str, LowRank]) -> dict[str, LowRank]:
    """Copies all parts into one mapping of huge pages, in the order in which a pass reads them (memory.py says why)."""
    if sum(part.nbytes for part in parts.values()) < HUGE:
        return dict(parts)
    arena = Arena()
    out = {}
    for name, part in parts.items():
        if isinstance(part.a, PackedWeight):
            b = as_tensor(part.b)
            part = replace(part, a=part.a.moved(arena), b=arena.empty(tuple(b.shape), b.dtype).copy_(b))
        out[name] = part
    return out


def c_lowrank(part: LowRank) -> Structure:
    assert isinstance(part.a, PackedWeight)
    c = CLowRank(part.a.c, at(as_tensor(part.b)))
    group = 0
    first = 0
    offset = 0
    coded = part.a.c.kind == PackedKind.Q8_0
    item = 4 if part.a.c.dtype == DTYPES[torch.float32] else 2
    for piece, (outputs, rank) in zip(c.piece, part.pieces):
        groups = outputs // LANES
        group += groups
        piece.end = group
        piece.first = first
        piece.rank = rank
        piece.at = offset
        first += -(-rank // LANES) * LANES if coded else rank
        offset += groups * LANES * (4 + (-(-rank // 2) * 2 if coded else rank * item))
    return c


def table(adapter: Adapter, layers: int) -> Array[Structure] | None:
    """An adapter's changes, weight by weight; None: one of them is not supported by the library."""
    names = [f"layers.{i}.{name}" for i in range(layers) for name in NAMES] + ["ple_proj"]
    parts = [adapter.parts.get(name) for name in names]
    if sum(part is not None and isinstance(part.a, PackedWeight) for part in parts) < len(adapter.parts):
        return None
    return (CLowRank * len(names))(*[CLowRank() if part is None else c_lowrank(part) for part in parts])


class PassAdapters:
    """The adapters of a pass, and by sequence which of them it uses (-1: none). changes: of an adapter, its `table`."""

    def __init__(self, changes: Callable[[Adapter], Array[Structure] | None], adapters: Sequence[Adapter | None]):
        self.changes = changes
        self.adapters = list(adapters)
        self.c = CAdapters()
        used = list(dict.fromkeys(one for one in adapters if one is not None))
        number = {one: i for i, one in enumerate(used)}
        self.of = [-1 if one is None else number[one] for one in adapters]
        if used:
            self.tables = [table for table in map(changes, used) if table is not None]
            assert len(self.tables) == len(used), "an adapter that the library does not know"
            self.table = (c_void_p * len(used))(*map(at, self.tables))
            self.c = CAdapters(at(self.table), None, len(used))

    def by_row(self, counts: Sequence[int]) -> Structure:
        """For a pass in which sequence i has `counts[i]` rows."""
        rows = [which for which, count in zip(self.of, counts, strict=True) for _ in range(count)]
        self.rows = (c_int32 * len(rows))(*rows)
        self.c.of = at(self.rows)
        return self.c
