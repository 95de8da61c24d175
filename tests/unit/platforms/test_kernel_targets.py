"""The C sources are valid for every system that gets a wheel, without warnings: Clang's front end of `ziglang`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.ops.cpu import build
from outrider.ops.cpu.targets import TARGETS, ZIG_CPUS, zig_command

ROOT = Path(__file__).resolve().parents[3]
QUICK = ("linux-aarch64", "macos-arm64", "macos-x86_64", "windows-x86_64", "musl-x86_64")


@pytest.mark.skipif(zig_command() is None, reason="needs the package ziglang")
@pytest.mark.parametrize("name", QUICK)
def test_the_sources_have_no_warnings_on_any_system(name: str) -> None:
    """qsort lacked its header on macOS, threads.h asked Windows for sys/mman.h, and 49 places had warnings."""
    command = [sys.executable, str(ROOT / "tools" / "cross_compile.py"), "--best", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def test_every_level_of_a_target_is_known() -> None:
    assert ZIG_CPUS.keys() == build.FLAGS.keys()
    for target in TARGETS.values():
        assert set(target.levels) <= set(build.WHEEL_LEVELS[target.machine])


def test_systems_differ_in_platform_files_only() -> None:
    """The pool was written for Linux, with #ifdefs in the middle of it."""
    for path in sorted(build.HERE.glob("*.[ch]")):
        if not path.name.startswith("platform"):
            text = path.read_text(encoding="utf-8")
            for word in ("__linux__", "__APPLE__", "_WIN32", "<pthread.h>", "<unistd.h>", "<sys/"):
                assert word not in text, f"{path.name}: {word}"
