"""Returns freed memory that the C library has kept to the system (malloc_trim), after a garbage collection: closed
connections are reference cycles, and the collector does not run by itself while no objects are created."""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any

M_ARENA_MAX = -8  # of glibc's mallopt


def share_one_heap() -> None:
    """Let all threads that start from now on allocate from one heap. glibc gives each its own, and malloc_trim does not
    return the end of such a heap: eight threads that had read sound kept 250 MB."""
    mallopt = _libc_function("mallopt")
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)


def trim() -> None:
    """Does nothing if the C library has no malloc_trim (musl)."""
    gc.collect()
    malloc_trim = _libc_function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _libc_function(name: str) -> Any:
    """A function that only glibc has; None elsewhere."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
