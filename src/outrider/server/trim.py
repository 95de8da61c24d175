"""Gives freed memory that the C library has kept back to the system (malloc_trim); does nothing where the library
cannot."""

from __future__ import annotations

import ctypes
import sys


def trim() -> None:
    """Where the C library has it (musl has not)."""
    if sys.platform == "linux" and (work := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        work(0)
