"""The C sources are valid for every system that gets a wheel, without warnings: Clang's front end of `ziglang`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.ops.cpu import build

pytest.importorskip("ziglang")

TARGETS = {  # zig's name of a system, and the flags of a level that its processors have
    "x86_64-linux-gnu": "-mavx2 -mfma -mf16c",
    "aarch64-linux-gnu": "-mcpu=generic+v8_2a+dotprod+fullfp16",
    "x86_64-macos": "-mavx2 -mfma -mf16c",
    "aarch64-macos": "-mcpu=generic+v8_2a+dotprod+fullfp16+i8mm",
    "x86_64-windows-gnu": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512bf16 -mf16c -mfma",
}
# functions of headers that one unit does not call
QUIET = "-Wno-psabi -Wno-unused-function -Wno-unneeded-internal-declaration -Wno-unused-but-set-variable -Wno-unused-command-line-argument"


@pytest.mark.parametrize("target", TARGETS)
def test_the_sources_are_valid_for_every_system(target: str, tmp_path: Path) -> None:
    """qsort lacked its header on macOS, and threads.h asked Windows for sys/mman.h."""
    env = {**os.environ, "ZIG_LOCAL_CACHE_DIR": str(tmp_path), "ZIG_GLOBAL_CACHE_DIR": str(tmp_path)}
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", target, *TARGETS[target].split()]
    compiler += [*["-O0", "-fno-sanitize=all", "-std=c11", "-D_GNU_SOURCE", "-Wall"], *QUIET.split()]
    for name in build.UNITS:
        command = [*compiler, "-c", str(build.HERE / name), "-o", str(tmp_path / f"{name}.o")]
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert result.returncode == 0 and result.stderr == "", result.stderr[-3000:]


def test_systems_differ_in_platform_files_only() -> None:
    """The pool was written for Linux, with #ifdefs in the middle of it."""
    for path in sorted(build.HERE.glob("*.[ch]")):
        if not path.name.startswith("platform"):
            text = path.read_text(encoding="utf-8")
            for word in ("__linux__", "__APPLE__", "_WIN32", "<pthread.h>", "<unistd.h>", "<sys/"):
                assert word not in text, f"{path.name}: {word}"
