"""Building, choosing and sharing the library: races, missing compilers, forks, threads that sleep."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from outrider.ops import choose
from outrider.ops.cpu import build
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.reference import ReferenceOps
from outrider.types import OutriderError


def test_choose() -> None:
    assert isinstance(choose("cpu", "auto"), CpuOps)
    assert isinstance(choose(torch.device("cpu"), "cpu", threads=1), CpuOps)
    assert type(choose("cpu", "reference")) is ReferenceOps
    assert type(choose("mps", "auto")) is ReferenceOps
    with pytest.raises(OutriderError, match="known: auto"):
        choose("cpu", "fast")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.WARNING):
        assert type(choose("cpu", "auto")) is ReferenceOps
    assert len(caplog.records) == 1 and "no C compiler" in caplog.text
    with pytest.raises(OutriderError, match="no C compiler"):
        choose("cpu", "cpu")


def test_a_broken_compiler_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\necho 'kernels.c:1: no such thing' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CC", str(fake))
    with pytest.raises(build.BuildError, match="no such thing"):
        build.shared_object()
    assert list((tmp_path / "kernels").iterdir()) == []


def test_racing_starts_build_one_library(tmp_path: Path) -> None:
    """Several processes at once, with an empty cache: all succeed, one file is left."""
    fake = tmp_path / "cc"  # quick: writes what it was asked for
    fake.write_text('#!/bin/sh\nsleep 0.3\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && echo built > "$2"; shift; done\n')
    fake.chmod(0o755)
    env = {**os.environ, "OUTRIDER_CACHE": str(tmp_path / "cache"), "CC": str(fake)}
    code = "import sys; sys.modules['torch'] = None\nimport importlib.util as u\ns = u.spec_from_file_location('b', sys.argv[1])\n"
    code += "m = u.module_from_spec(s); s.loader.exec_module(m); print(m.shared_object())"
    runs = [subprocess.Popen([sys.executable, "-c", code, build.__file__], env=env, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    paths = {run.communicate()[0].strip() for run in runs}
    assert all(run.returncode == 0 for run in runs) and len(paths) == 1
    assert [str(p) for p in (tmp_path / "cache/kernels").iterdir()] == list(paths)


def test_isa_fits_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: {"avx2", "fma", "f16c"})
    assert build.best_isa() == "avx2"
    monkeypatch.setattr(build, "cpu_flags", set)
    assert build.best_isa() == "generic"


def test_threads_sleep_when_idle() -> None:
    ops = CpuOps(threads=3)
    ops.linear(torch.randn(4, 64), torch.randn(64, 64))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03


def test_a_forked_child_can_compute() -> None:
    ops = CpuOps(threads=2)
    x, w = torch.randn(5, 64), torch.randn(64, 64)
    want = ops.linear(x, w)
    pid = os.fork()
    if pid == 0:  # the child: only its exit status speaks
        os._exit(0 if torch.equal(ops.linear(x, w), want) else 1)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    pytest.fail("the child hangs")


def test_many_python_threads_share_one_team() -> None:
    from concurrent.futures import ThreadPoolExecutor

    ops = CpuOps(threads=2)
    w = ops.quantize(torch.randn(256, 64), "int8")
    xs = [torch.randn(1 + i % 5, 64) for i in range(64)]
    alone = [ops.linear(x, w) for x in xs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda x: ops.linear(x, w), xs))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_a_compile_is_told_on_a_terminal_and_only_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with build.told("Compiling"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with build.told("Compiling"):
        assert "Compiling" in capsys.readouterr().err
