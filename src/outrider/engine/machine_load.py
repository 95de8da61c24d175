"""The share of the machine's processors that other programs use while something is timed here. Torch-free."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")  # Linux only
IDLE_FIELDS = ("idle", "iowait")
FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
NOTABLE_SHARE = 0.1  # share from which timings suffer
SHORTEST_SECONDS = 0.2  # of a measurement: processor time is counted in hundredths of a second


@dataclass(frozen=True)
class Usage:
    """Processor time in seconds: since the start of the machine, and of this process."""

    machine: float  # used by all programs
    total: float  # used and idle
    process: float  # of this process

    @classmethod
    def now(cls) -> Usage | None:
        """None if the system does not say."""
        if sys.platform != "linux":
            return None
        try:
            words = STAT.read_text(encoding="ascii").splitlines()[0].split()
            ticks = os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError, AttributeError):
            return None
        seconds = {name: int(word) / ticks for name, word in zip(FIELDS, words[1:])}
        total = sum(seconds.values())
        waiting = sum(seconds.get(name, 0.0) for name in IDLE_FIELDS)
        return cls(machine=total - waiting, total=total, process=time.process_time())


class OtherLoad:
    """Measures from its construction on."""

    def __init__(self) -> None:
        self.before = Usage.now()

    def share(self) -> float | None:
        """Other programs' share of all processors, 0 to 1; None if the system does not say, or too early."""
        now = Usage.now()
        before = self.before
        if now is None or before is None:
            return None
        total = now.total - before.total
        if total < SHORTEST_SECONDS:
            return None
        others = (now.machine - before.machine) - (now.process - before.process)
        return min(1.0, max(0.0, others / total))

    def line(self) -> str | None:
        """A caution for the reader of a timing; None if the machine is idle otherwise."""
        share = self.share()
        if share is None or share < NOTABLE_SHARE:
            return None
        return f"other programs use {share:.0%} of this machine: on an idle one the figures are truer"
