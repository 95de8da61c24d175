"""Limits of processes that run untrusted work, and what protection a system lacks."""

from __future__ import annotations

import os
import sys


def missing_protection() -> str | None:
    """Protection that the sandboxes of templates, grammars and media files lack on this system; None if they have all.
    A server that other machines can reach needs all of it."""
    if sys.platform == "win32":
        return "Windows has neither fork nor resource limits here, so memory and processor time have no bounds"
    if sys.platform == "darwin":
        return "macOS does not enforce a process's limit of memory"
    return None


def lower_priority(amount: int) -> None:
    """Lowers this process's priority, so that it leaves most of the processor to others."""
    if hasattr(os, "nice"):
        os.nice(amount)
