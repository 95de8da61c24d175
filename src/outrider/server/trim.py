"""What the C library keeps of freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import sys


def trim() -> None:
    """Where the C library has it (musl has not)."""
    if sys.platform == "linux" and (work := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        work(0)
