"""Returns freed memory that the C library has kept to the system (malloc_trim), after a garbage collection: ended
connections are reference cycles, and the collector does not run by itself while no objects are created."""

from __future__ import annotations

import ctypes
import gc
import sys


def trim() -> None:
    """Where the C library has it (musl has not)."""
    gc.collect()
    if sys.platform == "linux" and (work := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        work(0)
