"""The load of other programs. Bugs caught: this process's own work counts as theirs; systems without /proc/stat fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider.engine import machine_load
from outrider.engine.machine_load import OtherLoad

TICKS = os.sysconf("SC_CLK_TCK")


class Stat:
    """A /proc/stat of two processors, and this process's time."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch):
        self.path = path
        self.own = 0.0
        self.used = 0.0
        self.idle = 0.0
        monkeypatch.setattr(machine_load, "STAT", path)
        monkeypatch.setattr(machine_load.time, "process_time", lambda: self.own)
        self.advance(0.0, 0.0, 0.0)

    def advance(self, seconds: float, own: float, others: float) -> None:
        self.own += own
        self.used += own + others
        self.idle += 2 * seconds - own - others
        user, idle = (round(value * TICKS) for value in (self.used, self.idle))
        self.path.write_text(f"cpu  {user} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1 1 1\n")


@pytest.fixture
def stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stat:
    return Stat(tmp_path / "stat", monkeypatch)


@pytest.mark.linux
def test_own_work_is_not_theirs(stat: Stat) -> None:
    others = OtherLoad()
    stat.advance(10.0, own=20.0, others=0.0)
    assert others.share() == pytest.approx(0.0) and others.line() is None


@pytest.mark.linux
def test_theirs_is_said_with_its_share(stat: Stat) -> None:
    others = OtherLoad()
    stat.advance(10.0, own=10.0, others=8.0)
    assert others.share() == pytest.approx(0.4)
    assert "other programs use 40% of this machine" in (others.line() or "")


def test_too_early_or_without_the_file_nothing_is_said(stat: Stat) -> None:
    others = OtherLoad()
    assert others.share() is None
    stat.path.unlink()
    assert others.line() is None and OtherLoad().line() is None
