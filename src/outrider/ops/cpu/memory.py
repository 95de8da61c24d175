"""Memory for weights on huge pages, where the system has them: streaming 100 MB per token through 4 KiB pages costs a
page-table walk every 4 KiB, which is twice as expensive in a virtual machine."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE = 2 << 20
ALIGN = 64
BLOCK = 64 << 20  # address space reserved at once; only touched pages take memory


def advise(address: int, size: int, advice: str = "MADV_HUGEPAGE", unit: int = HUGE) -> None:
    """Advises the system about the pages of `unit` bytes that are wholly in a range: to use huge pages there, if it has
    not been written yet (elsewhere it does no harm); MADV_DONTNEED: to free its memory, which reads as zero then."""
    lo = -(-address // unit) * unit
    hi = (address + size) // unit * unit
    if hi > lo and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(lo), ctypes.c_size_t(hi - lo), getattr(mmap, advice))


def anonymous(size: int) -> mmap.mmap:
    """Zeroed memory that is taken when it is touched."""
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


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
            mapping = anonymous(length)
            self.block = torch.frombuffer(mapping, dtype=torch.uint8)
            address = self.block.data_ptr()
            self.at = -address % HUGE
            self.end = length
            advise(address, length)
        out = self.block[self.at : self.at + size].view(dtype).view(shape)
        self.at += -(-size // ALIGN) * ALIGN
        return out


class HugePageWarmer:
    """Allocates the memory of tensors that fill from the front before it is needed, in a thread, and frees it when it
    is no longer needed. The system clears 2 MiB of each at the first touch, which for the 60 tensors of a small model's
    K/V takes a seventh of a second in the middle of a step. All calls come from the thread that uses the tensors."""

    REST_S = 0.02  # pause between two pieces, so that it delays no step

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """All have as many rows; the same rows of all are needed at once."""
        self._tensors = list(tensors)
        bytes_a_row = max(1, min(t.stride(0) * t.element_size() for t in self._tensors))
        self._rows = -(-HUGE // bytes_a_row)  # at least a huge page of each
        self._taken = 0  # rows before this one are allocated, or queued
        count = self._tensors[0].shape[0]
        self._there = bytearray(count)  # of each row: is its memory allocated, or queued?
        self._row_bytes = sum(t.stride(0) * t.element_size() for t in self._tensors)
        self.bytes = 0  # that the tensors hold; small ones are not counted
        self._end = count if bytes_a_row * count > 2 * HUGE else 0  # small tensors are not waited for

    def need(self, row: int) -> None:
        """This row is in use now: those after it shall be allocated soon."""
        if row + self._rows // 4 > self._taken and self._taken < self._end and sys.platform == "linux":
            first = self._taken
            self._taken = min(self._end, max(self._taken, row) + self._rows)
            self._there[first : self._taken] = b"\1" * (self._taken - first)
            self.bytes = self._row_bytes * sum(self._there)
            ahead = threading.Thread(target=self._take, args=(first, self._taken), name="outrider-ahead", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread available: memory is allocated when needed
                ahead.start()

    def _take(self, first: int, end: int) -> None:
        for tensor in self._tensors:
            step = tensor.stride(0) * tensor.element_size()
            lo = tensor.data_ptr() + first * step
            hi = tensor.data_ptr() + end * step
            for piece in range(lo - lo % mmap.PAGESIZE, hi, HUGE):
                if populate(piece, min(HUGE, hi - piece)):
                    return  # an older kernel: memory is allocated when needed
                time.sleep(self.REST_S)

    def give_back(self, free: Sequence[int]) -> int:
        """`free`: unused rows, ascending. Their memory goes back to the system, where it is worth a call; they are zero
        when they are used again. The first of them stay, so that the next sequences need not wait for memory. Returns
        the bytes freed."""
        unused = free[self._rows :]
        before = self.bytes
        first = free[self._rows - 1] + 1 if unused else self._end
        if first >= self._end or sum(self._there[row] for row in unused) < self._rows or sys.platform != "linux":
            return 0
        for lo, hi in runs(unused):
            if any(self._there[lo:hi]):
                for tensor in self._tensors:
                    step = tensor.stride(0) * tensor.element_size()
                    advise(tensor.data_ptr() + lo * step, (hi - lo) * step, "MADV_DONTNEED", unit=mmap.PAGESIZE)
                self._there[lo:hi] = bytes(hi - lo)
        self._taken = first
        self.bytes = self._row_bytes * sum(self._there)
        return before - self.bytes


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as half-open ranges."""
    out: list[tuple[int, int]] = []
    for number in numbers:
        if out and out[-1][1] == number:
            out[-1] = (out[-1][0], number + 1)
        else:
            out.append((number, number + 1))
    return out


def populate(address: int, size: int) -> int:
    """Allocate the memory of a range as if it had been written to, without changing its contents; 0: done."""
    # MADV_POPULATE_WRITE, Linux 5.14
    return int(ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), 23))
