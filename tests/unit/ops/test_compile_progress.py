"""Progress of compiling. Bugs caught: "10 to 20 s" where it takes 75, an estimate that has passed, lines in a log."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outrider.ops.cpu import build, compile_progress
from outrider.ops.cpu.compile_progress import Estimate, compiling, finishing_times


def test_jobs_share_the_cores() -> None:
    work = {"a": 4.0, "b": 6.0, "c": 30.0}
    assert finishing_times(work, cores=3, busy=0) == {"a": 4.0, "b": 6.0, "c": 30.0}
    # on one core: three share it for 12 s, two for 4, then one is alone
    assert finishing_times(work, cores=1, busy=0) == pytest.approx({"a": 12.0, "b": 16.0, "c": 40.0})
    assert finishing_times(work, cores=1, busy=1)["c"] > 60


@pytest.mark.parametrize("slower", [0.5, 1.0, 2.0, 4.0])
def test_the_estimate_follows_the_machine(slower: float) -> None:
    estimate = Estimate("avx2", cores=2)
    ends = {source: seconds * slower for source, seconds in estimate.expected.items()}
    last = max(ends.values())
    for tenth in range(1, int(10 * last)):
        passed = tenth / 10
        for source, end in ends.items():
            if end <= passed:
                estimate.finished(source, end)
        assert estimate.total(passed) >= passed
        if passed > min(ends.values()):  # one source is done, or late
            assert estimate.total(passed) == pytest.approx(last + compile_progress.LINK_SECONDS, rel=0.01)


def test_every_level_has_an_estimate() -> None:
    for isa in build.FLAGS:
        assert set(compile_progress.work_of(isa)) == set(build.UNITS)
        assert 10 < Estimate(isa, cores=2).total(0) < 60


def test_progress_is_shown_on_a_terminal_and_a_line_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    objects = {name: tmp_path / name for name in build.UNITS}
    with compiling("avx2", objects):
        pass
    shown = capsys.readouterr().err  # a log that said nothing for a minute looked like a program that hangs
    assert shown.startswith("compiling the CPU kernels for avx2, once: about ") and shown.count("\n") == 1
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with compiling("avx2", objects):
        pass
    shown = capsys.readouterr().err
    assert "Compiling the CPU kernels for avx2, once: 0 of about" in shown and shown.endswith("\r\x1b[K")
