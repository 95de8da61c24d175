"""Host swap space: K/V pages of preempted sequences are copied to host memory and back instead of being recomputed.

The host memory is a number of blocks, allocated when first needed (pinned on a GPU, so that copies are asynchronous)
and then reused. A sequence's pages lie one after the other in as many blocks as they need. Copies are ordered with the
device's other work: pages may be reused as soon as `out` has returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..types import GroupName

BLOCK = 16 << 20  # bytes; a power of two, as torch takes pinned memory in such pieces


@dataclass(eq=False)
class SwappedKV:
    """The K/V of one sequence on the host."""

    pages: Mapping[GroupName, tuple[int, int]]  # the first page's number, and how many there are
    blocks: list[Tensor] = field(default_factory=list)  # uint8


class Swap:
    def __init__(self, limit: int, device: torch.device):
        """limit: bytes."""
        self.device = device
        self.block = max(1, min(BLOCK, limit // 8))
        self.most = limit // self.block  # blocks
        self.made = 0
        self._free: list[Tensor] = []
        self.outs = self.ins = 0  # sequences so far

    @property
    def used(self) -> int:
        """Bytes of the blocks that sequences hold."""
        return (self.made - len(self._free)) * self.block

    def _take(self, size: int) -> list[Tensor] | None:
        count = -(-size // self.block)
        if count > len(self._free) + self.most - self.made:
            return None
        while len(self._free) < count:
            try:
                self._free.append(torch.empty(self.block, dtype=torch.uint8, pin_memory=self.device.type == "cuda"))
            except RuntimeError:  # no more memory: use the existing blocks
                self.most = self.made
                return None
            self.made += 1
        return [self._free.pop() for _ in range(count)]

    @torch.inference_mode()
    def out(
        self, layers: Sequence[tuple[GroupName, Tensor]], held: Mapping[GroupName, tuple[int, list[int]]]
    ) -> SwappedKV | None:
        """Copy pages out: `layers` are the K and V tensors as bytes, with their groups, `held` each group's first page
        and all its pages. None: not enough space."""
        size = sum(len(held[group][1]) * _bytes(tensor) for group, tensor in layers)
        blocks = self._take(size)
        if blocks is None:
            return None
        kept = SwappedKV({name: (first, len(pages)) for name, (first, pages) in held.items()}, blocks)
        where, at = self._indices({name: pages for name, (_, pages) in held.items()}), 0
        for group, tensor in layers:
            data = tensor.index_select(0, where[group]).view(-1)
            for piece, stored in self._pieces(kept, at, data):
                stored.copy_(piece, non_blocking=True)
            at += data.numel()
        self.outs += 1
        return kept

    @torch.inference_mode()
    def back(
        self, layers: Sequence[tuple[GroupName, Tensor]], kept: SwappedKV, pages: Mapping[GroupName, list[int]]
    ) -> None:
        """Copy them back into these pages, and free the blocks."""
        where, at = self._indices(pages), 0
        for group, tensor in layers:
            data = torch.empty(len(pages[group]) * _bytes(tensor), dtype=torch.uint8, device=self.device)
            for piece, stored in self._pieces(kept, at, data):
                piece.copy_(stored, non_blocking=True)
            tensor.index_copy_(0, where[group], data.view(-1, *tensor.shape[1:]))
            at += data.numel()
        self.ins += 1
        self.drop(kept)

    def drop(self, kept: SwappedKV) -> None:
        """Free its blocks without copying."""
        self._free += kept.blocks
        kept.blocks = []

    def _indices(self, pages: Mapping[GroupName, list[int]]) -> dict[GroupName, Tensor]:
        return {name: torch.tensor(where, dtype=torch.int64).to(self.device) for name, where in pages.items()}

    def _pieces(self, kept: SwappedKV, at: int, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(part of `data`, the bytes for it in the blocks), from the byte `at` of the sequence on."""
        begin, size = 0, data.numel()
        while begin < size:
            block, offset = divmod(at + begin, self.block)
            count = min(self.block - offset, size - begin)
            yield data[begin : begin + count], kept.blocks[block][offset : offset + count]
            begin += count


def _bytes(tensor: Tensor) -> int:
    """Bytes of one page of a layer's keys or values."""
    return tensor[0].numel()
