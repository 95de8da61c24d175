"""Time limit and stop requests of a run, checked between two pieces of work (a step of the engine, a training step, a
batch of an evaluation), never in the middle of one.

The budget is wall-clock time of the whole command: loading, answering, training, evaluation and export together. Ctrl-C
and SIGTERM set a flag, so the current piece of work finishes and everything is saved; a second Ctrl-C stops at once.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(frozen=True)
class Budget:
    """The time of the whole command. `minutes` None: unlimited."""

    minutes: float | None
    began: float

    @property
    def spent(self) -> float:
        """Seconds since the command began."""
        return time.perf_counter() - self.began

    @property
    def seconds(self) -> float:
        return float("inf") if self.minutes is None else 60 * self.minutes

    @property
    def left(self) -> float:
        return self.seconds - self.spent

    @property
    def overdrawn(self) -> bool:
        """True if an evaluation exceeds the time by a tenth; it was planned to end in time and is given up."""
        return self.left < -0.1 * self.seconds


Halt = Callable[[], bool]  # returns True to give up an evaluation


class Halted(Exception):
    """Raised when an evaluation is given up: a stop was requested, or the time is over."""


@dataclass
class Stop:
    """A request from outside to end the run early."""

    signal: int = 0  # the signal that requested the stop; 0: none

    @property
    def asked(self) -> bool:
        return self.signal != 0


@contextmanager
def listening() -> Iterator[Stop]:
    """Lets SIGINT and SIGTERM request a stop inside this context. Signals reach the main thread only."""
    stop = Stop()
    heard = threading.current_thread() is threading.main_thread()

    def asked(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.signal = number

    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM) if heard}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
