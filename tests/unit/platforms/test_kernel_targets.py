"""Targets of the C kernels: the systems that get a wheel, and the levels of each."""

from __future__ import annotations

from outrider.ops.cpu import build
from outrider.ops.cpu.targets import TARGETS, ZIG_CPUS


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
