"""Progress of compiling the C kernels: on a terminal the seconds passed and an estimate of all, elsewhere one line.

The estimate begins with the compilers' processor time, as measured on one Zen 4 core, shared out over this machine's
cores and the programs that run there. It then follows what was seen: a source that is done says how fast this machine
is, and one that is late says that it is slower.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# seconds of processor time by level and source (gcc 12); levels that are not listed take those of "generic"
WORK: Mapping[str, Mapping[str, float]] = {
    "avx512": {"chunks.c": 31.5, "tiles.c": 4.1, "kernels.c": 5.8},
    "avx2": {"chunks.c": 11.6, "tiles.c": 4.8, "kernels.c": 5.8},
    "generic": {"chunks.c": 15.6, "tiles.c": 2.3, "kernels.c": 8.8},
}
SAME_AS = {"amx": "avx512", "avx512bf16": "avx512", "avxvnni": "avx2"}
LINK_SECONDS = 0.5
EVERY = 0.5  # seconds between lines


def work_of(isa: str) -> Mapping[str, float]:
    return WORK.get(SAME_AS.get(isa, isa), WORK["generic"])


def finishing_times(work: Mapping[str, float], cores: float, busy: float) -> dict[str, float]:
    """When each of these jobs ends if all begin at once and share the cores with `busy` others."""
    times: dict[str, float] = {}
    passed = 0.0
    spent = 0.0  # processor time that each running job has had
    for name in sorted(work, key=lambda job: work[job]):
        running = len(work) - len(times)
        rate = min(1.0, cores / (running + busy))
        passed += (work[name] - spent) / rate
        spent = work[name]
        times[name] = passed
    return times


class Estimate:
    """The seconds that a compilation takes in all."""

    def __init__(self, isa: str, cores: float, busy: float = 0.0):
        self.expected = finishing_times(work_of(isa), cores, busy)
        self.done: dict[str, float] = {}  # seconds after the start

    def finished(self, source: str, seconds: float) -> None:
        self.done.setdefault(source, seconds)

    def total(self, passed: float) -> float:
        """After so many seconds."""
        seen = [self.done[source] / seconds for source, seconds in self.expected.items() if source in self.done]
        slower = seen[-1] if seen else 1.0  # than expected; the last one finished knows best
        late = [passed / seconds for source, seconds in self.expected.items() if source not in self.done]
        slower = max([slower, *late[:1]])
        return max(passed, max(self.expected.values()) * slower + LINK_SECONDS)

    def line(self, isa: str, passed: float) -> str:
        return f"Compiling the CPU kernels for {isa}, once: {passed:.0f} of about {self.total(passed):.0f} s"


def machine_state() -> tuple[float, float]:
    """The cores of this process and the number of other programs that compete for the machine's."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    # they are spread over all cores of the machine
    return cores, busy * cores / (os.cpu_count() or cores)


@contextmanager
def compiling(isa: str, objects: Mapping[str, Path]) -> Iterator[None]:
    """Shows the progress until the end of the block, then erases it; in a log or a pipe one line says what begins.
    `objects`: the file of each source, which its compiler writes last."""
    if sys.stderr is None:
        yield
        return
    if not sys.stderr.isatty():
        expected = Estimate(isa, *machine_state()).total(0.0)
        print(f"compiling the CPU kernels for {isa}, once: about {expected:.0f} s", file=sys.stderr, flush=True)
        yield
        return
    ended = threading.Event()

    def show() -> None:
        estimate = Estimate(isa, *machine_state())
        started = time.perf_counter()
        while True:
            passed = time.perf_counter() - started
            for source, path in objects.items():
                if path.exists():
                    estimate.finished(source, passed)
            print(f"\r\x1b[K{estimate.line(isa, passed)}", end="", file=sys.stderr, flush=True)
            if ended.wait(EVERY):
                return

    reporter = threading.Thread(target=show, name="compile progress", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
