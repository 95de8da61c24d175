"""Memory for weights on huge pages where the system offers them: streaming 100 MB a token through 4 KiB pages costs a
walk of the page table every 4 KiB, which a virtual machine pays twice over.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor

HUGE = 2 << 20
ALIGN = 64
BLOCK = 64 << 20  # address space asked for at once; only what is touched takes memory


def advise(address: int, size: int) -> None:
    """Ask for huge pages under a range that has not been written yet (elsewhere it does no harm)."""
    lo, hi = -(-address // HUGE) * HUGE, (address + size) // HUGE * HUGE
    if hi > lo and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(lo), ctypes.c_size_t(hi - lo), mmap.MADV_HUGEPAGE)


class Arena:
    """Hands out tensors from large anonymous mappings; a mapping lives as long as a tensor on it."""

    def __init__(self) -> None:
        self.block: Tensor | None = None  # uint8
        self.at = self.end = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        if self.block is None or self.at + size > self.end:
            length = -(-(size + HUGE) // BLOCK) * BLOCK
            self.block = torch.frombuffer(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
            address = self.block.data_ptr()
            self.at, self.end = -address % HUGE, length
            advise(address, length)
        out = self.block[self.at : self.at + size].view(dtype).view(shape)
        self.at += -(-size // ALIGN) * ALIGN
        return out
