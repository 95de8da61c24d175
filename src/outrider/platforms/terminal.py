"""Modes of a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keys_hidden(terminal: int) -> Iterator[None]:
    """Hides typed keys but keeps them for the next reader. Consoles on Windows do so by themselves."""
    if sys.platform == "win32":
        yield
        return
    import termios

    before = termios.tcgetattr(terminal)
    quiet = [*before]
    quiet[0] &= ~termios.ICRNL  # keep the key code that prompt_toolkit reads as Enter
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
