"""Gives freed memory that the C library has kept back to the system (malloc_trim), and before that what only the
garbage collector can free: connections that have ended are cycles, and where nothing new is made it does not run."""

from __future__ import annotations

import ctypes
import gc
import sys


def trim() -> None:
    """Where the C library has it (musl has not)."""
    gc.collect()
    if sys.platform == "linux" and (work := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        work(0)
