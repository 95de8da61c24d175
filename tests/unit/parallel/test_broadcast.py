"""Rank 0 broadcasts a command and takes part in its collectives as one unit."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engines import tiny_engine

from outrider.engine.scoring import Scorer
from outrider.parallel.broadcast import Leader
from outrider.types import OutriderError

TEXT = [3, 5, 7, 9, 11]


class RecordingGroup:
    """A process group of one that records what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.losses: list[str] = []
        self.executors: list[Any] = []
        self.watch = SimpleNamespace(gone=None, lost=self.losses.append)

    def send(self, message: object) -> None:
        self.sent.append(message)


def test_scoring_that_fails_ends_the_run() -> None:
    """The other ranks wait in a collective for rank 0: without a word to the watch they would wait for ever."""
    engine = tiny_engine()
    group = RecordingGroup()
    Leader(engine, group)  # type: ignore[arg-type]

    def fails(*_: object) -> None:
        raise MemoryError("no memory")

    engine.model.forward = fails
    with pytest.raises(OutriderError, match="lost one another"):
        Scorer(TEXT, 1).step(engine)
    assert [command for command, _ in group.sent] == ["score"] and group.losses == ["MemoryError: no memory"]


def test_an_interrupt_waits_for_the_end_of_scoring() -> None:
    engine = tiny_engine()
    group = RecordingGroup()
    Leader(engine, group)  # type: ignore[arg-type]
    forward = engine.model.forward
    scored = []

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        result = forward(*arguments)
        scored.append("forward")
        return result

    engine.model.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        Scorer(TEXT, 1).step(engine)
    assert scored == ["forward"], "this rank ran the pass that the others run"
