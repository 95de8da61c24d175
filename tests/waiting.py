"""How tests wait: for a condition, and so long that only what hangs is given up."""

from __future__ import annotations

import time
from collections.abc import Callable

# seconds after which a test takes what it waits for to hang; whoever runs it may have other work for the processors
PATIENCE = 120.0


def until(true: Callable[[], object], told: Callable[[], str] = lambda: "it did not come true") -> None:
    """Wait for a condition. There is no shorter wait on purpose: how fast a machine is, is not what tests show."""
    late = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < late, told()
        time.sleep(0.01)
