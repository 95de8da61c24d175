"""This machine's memory."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress


def total_bytes() -> int:
    """Size of the memory; 0 if unknown."""
    if sys.platform == "win32":
        return windows_memory()[0]
    if sys.platform == "darwin":
        from .processor import sysctl

        return sysctl("hw.memsize") or 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes() -> int:
    """Memory that programs can allocate without swapping; on macOS half of the total; 0 if unknown."""
    if sys.platform == "win32":
        return windows_memory()[1]
    with suppress(OSError, StopIteration, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:")) * 1024
    return total_bytes() // 2 if sys.platform == "darwin" else 0


def windows_memory() -> tuple[int, int]:
    """Total and available bytes; zeros without the system call."""
    kernel32 = getattr(getattr(ctypes, "windll", None), "kernel32", None)
    if kernel32 is None:
        return 0, 0
    status = (ctypes.c_uint64 * 8)()  # MEMORYSTATUSEX: two 32-bit numbers, then seven of 64
    status[0] = ctypes.sizeof(status)
    if not kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return 0, 0
    return int(status[1]), int(status[2])
