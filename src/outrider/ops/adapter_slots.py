"""LoRA slots: the adapters of a pass, stacked in tensors at fixed addresses.

A captured step can only read fixed addresses, so a backend with captured steps keeps the matrices of each adapter in
use in a slot of one tensor per weight (`SlotWeight`), and a list of row ranges says which rows of a pass use which
slot. Writes to a slot and passes are ordered on one stream. A larger rank, a weight that no adapter changed before, or
more adapters in one pass than there are slots require new tensors; `version` counts these, since graphs captured
earlier read the old ones. A product, its adapter and the epilogue are one operation (`adapted_linear`) in every pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..types import OutriderError
from .backend import Epilogue, MoeLayer
from .formats import DeviceWeight
from .lowrank import AdaptedOps, Adapter, LowRank

if TYPE_CHECKING:
    from .reference import Backend

RANGE_ROWS = 16  # rows of a range: those of one matrix instruction
RANK_STEP = 16  # ranks are zero-padded to this times a power of two, which changes no sum


@dataclass(frozen=True)
class SlotWeight:
    """The changes of one weight by slot. A weight may be fused of P matrices (q, k and v; gate and up)."""

    a: Tensor  # [slots, P, r, in]
    b: Tensor  # [slots, out, r]
    scale: Tensor  # float32 [slots, P]; 0: this matrix takes no addition
    rows: tuple[int, ...]  # rows of each of the P matrices

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + self.scale.nbytes


class AdapterSlots:
    """Adapters in slots. Used by the engine's thread only."""

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device):
        self.count = count
        self.dtype = dtype
        self.device = device
        self.version = 0
        self.weights: dict[str, SlotWeight] = {}
        self._slots: dict[bytes, int] = {}  # by an adapter's content, least recently used first

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in list(self.weights.values()))

    def reserve(self, adapter: Adapter) -> None:
        """Reserves space for an adapter's weights and ranks."""
        for name, part in adapter.parts.items():
            known = self.weights.get(name) or self._empty(part)
            rank = max(RANK_STEP, 1 << (max(r for _, r in part.pieces) - 1).bit_length())
            if known.a.shape[2] < rank:
                try:
                    self.weights[name] = self._grown(known, rank)
                except torch.OutOfMemoryError:
                    raise OutriderError(
                        f"adapter {adapter.name!r} does not fit: {self.count} slots of rank {rank} take more memory "
                        "than the GPU has left (--max-adapters, --gpu-memory)"
                    ) from None
                self.version += 1

    def place(self, adapters: Sequence[Adapter | None]) -> list[int]:
        """Slot of each adapter, -1 for None. An adapter without a slot takes that of the least recently used."""
        wanted = {adapter.digest: adapter for adapter in adapters if adapter is not None}
        for digest, adapter in wanted.items():
            slot = self._slots.pop(digest, None)
            if slot is None:
                slot = self._free(wanted)
                self.reserve(adapter)
                self._write(adapter, slot)
            self._slots[digest] = slot
        return [-1 if adapter is None else self._slots[adapter.digest] for adapter in adapters]

    def _free(self, wanted: Mapping[bytes, Adapter]) -> int:
        """A slot that this pass does not use."""
        if len(self._slots) < self.count:
            return min(set(range(self.count)) - set(self._slots.values()))
        oldest = next((digest for digest in self._slots if digest not in wanted), None)
        if oldest is not None:
            return self._slots.pop(oldest)
        self.count = 2 * self.count
        self.version = self.version + 1
        self.weights = {name: self._grown(known, known.a.shape[2]) for name, known in self.weights.items()}
        return len(self._slots)

    def _empty(self, part: LowRank) -> SlotWeight:
        """A weight without slots, of rank 0."""
        rows = tuple(rows for rows, _ in part.pieces)
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        a = like.view(0, len(rows), 0, part.a.shape[1])
        b = like.view(0, sum(rows), 0)
        return SlotWeight(a, b, like.float().view(0, len(rows)), rows=rows)

    def _grown(self, known: SlotWeight, rank: int) -> SlotWeight:
        """A copy with more slots or a larger rank."""
        more = self.count - known.a.shape[0]
        wider = rank - known.a.shape[2]
        a = F.pad(known.a, (0, 0, 0, wider, 0, 0, 0, more))
        b = F.pad(known.b, (0, wider, 0, 0, 0, more))
        return SlotWeight(a, b, F.pad(known.scale, (0, 0, 0, more)), rows=known.rows)

    @torch.inference_mode()
    def _write(self, adapter: Adapter, slot: int) -> None:
        for name, weight in self.weights.items():
            part = adapter.parts.get(name)
            if part is None:
                weight.scale[slot] = 0.0
                continue
            a, b, scale = (torch.zeros(t.shape[1:], dtype=t.dtype) for t in (weight.a, weight.b, weight.scale))
            own_a = part.a
            own_b = part.b
            row = 0
            first = 0
            assert isinstance(own_a, Tensor) and isinstance(own_b, Tensor), "slots hold dense matrices"
            for i, (rows, rank) in enumerate(part.pieces):
                if rank:
                    a[i, :rank] = own_a[first : first + rank]
                    b[row : row + rows, :rank] = own_b[row : row + rows, first : first + rank]
                    scale[i] = part.scale[row]
                row = row + rows
                first = first + rank
            for to, value in ((weight.a, a), (weight.b, b), (weight.scale, scale)):
                to[slot].copy_(value)


def row_ranges(slots: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first row, number of rows, slot) for a pass in which sequence i has `counts[i]` rows and uses slot
    `slots[i]`."""
    ranges = []
    start = 0
    for slot, count in zip(slots, counts, strict=True):
        ranges += [(start + at, min(RANGE_ROWS, count - at), slot) for at in range(0, count, RANGE_ROWS)]
        start += count
    return ranges


class SlotOps(AdaptedOps):
    """Ops with the adapters in slots. ranges: int32 [n, 3] of all rows, from `row_ranges`."""

    def __init__(self, base: Backend, names: Mapping[int, str], slots: AdapterSlots, ranges: Tensor):
        super().__init__(base, names, {})
        self.weights = slots.weights
        self.ranges = ranges

    def changed(self, w: DeviceWeight) -> SlotWeight | None:
        return self.weights.get(self.names.get(id(w), ""))

    def product(self, x: Tensor, w: DeviceWeight, end: Epilogue) -> Tensor | None:
        change = self.changed(w)
        return None if change is None else self.base.adapted_linear(x, w, change, ranges=self.ranges, end=end)

    def moe_with_shared_mlp(
        self, router_in: Tensor, x: Tensor, h: Tensor, stream: Tensor, layer: MoeLayer
    ) -> tuple[Tensor, Tensor]:
        gate_up, down = layer.mlp
        if self.changed(gate_up) is None and self.changed(down) is None:
            return self.base.moe_with_shared_mlp(router_in, x, h, stream=stream, layer=layer)
        dense = self.linear(self.gated_linear(h, gate_up, layer.experts.act), down)
        return self.base.moe_next_to(dense, router_in, x, stream=stream, layer=layer)
