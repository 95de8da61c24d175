"""The whole tree for systems that are not at hand: its C sources compile there without warnings (Clang's front end of
`ziglang`), and its types hold (mypy). `make check` leaves this out: it takes half a minute of two cores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.ops.cpu.targets import zig_command

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("linux-aarch64", "macos-arm64", "macos-x86_64", "windows-x86_64", "musl-x86_64")
SYSTEMS = ("win32", "darwin")


@pytest.mark.skipif(zig_command() is None, reason="needs the package ziglang")
@pytest.mark.parametrize("name", TARGETS)
def test_the_sources_have_no_warnings_on_any_system(name: str) -> None:
    """qsort lacked its header on macOS, threads.h asked Windows for sys/mman.h, and 49 places had warnings."""
    command = [sys.executable, str(ROOT / "tools" / "cross_compile.py"), "--best", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


@pytest.mark.parametrize("system", SYSTEMS)
def test_types_hold_for_other_systems(system: str, tmp_path: Path) -> None:
    """mypy knows which functions a system's Python lacks: 44 uses had no branch for Windows, three none for macOS."""
    command = [sys.executable, "-m", "mypy", "--platform", system, "--cache-dir", str(tmp_path)]
    command += [
        "--follow-imports",
        "silent",
        "-p",
        "outrider.platforms",
        "-p",
        "outrider.server",
        "-p",
        "outrider.engine",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    wrong = [line for line in done.stdout.splitlines() if "attr-defined" in line]
    assert not wrong, wrong
