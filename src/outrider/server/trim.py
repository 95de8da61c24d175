"""Returns freed memory that the C library has kept to the system (malloc_trim), after a garbage collection: closed
connections are reference cycles, and the collector does not run by itself while no objects are created."""

from __future__ import annotations

import ctypes
import gc
import sys


def trim() -> None:
    """Does nothing if the C library has no malloc_trim (musl)."""
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if malloc_trim is not None:
        malloc_trim(0)
