"""Who is gone, and how the others are ended."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.models.split import TPRank
from outrider.parallel import watch
from outrider.parallel.process_group import ProcessGroup
from outrider.parallel.watch import Watch


class Still(Watch):
    """Without its thread, which would end this process."""

    def _run(self) -> None:
        pass


def lost(children: Sequence[subprocess.Popen[bytes]]) -> str | None:
    there = Still(TPRank(0, 2), "", 0, children)
    thread = threading.Thread(
        target=there.lost, args=("Connection reset by peer\nat line 3",)
    )  # the main thread would stay in it
    thread.start()
    thread.join()
    return there.gone


def test_a_failed_exchange_names_the_process_that_ended() -> None:
    child = subprocess.Popen(["sh", "-c", "exit 7"])
    child.wait()
    gone = lost([child])
    assert (
        gone
        == f"process 1 of --tensor-parallel 2 (pid {child.pid}) ended with exit code 7: the run cannot go on without it"
    )


def test_where_nobody_ended_it_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL_S", 0.001)
    assert lost([]) == "the processes of --tensor-parallel 2 lost one another (Connection reset by peer)"


def test_those_who_load_are_ended_at_once() -> None:
    child = subprocess.Popen(["sleep", "3600"])
    group: Any = ProcessGroup.__new__(ProcessGroup)
    group._open = True
    group.watch = SimpleNamespace(ending=False)
    group.children = [child]
    try:
        group.abandon()
        assert child.wait(30) == -signal.SIGKILL and group.watch.ending
        group.close()  # nobody is left who could be told
    finally:
        child.kill()
