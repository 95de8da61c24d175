"""Wheels carry the compiled CPU kernels, one library for each instruction set of the machine's architecture, so that
users need no compiler.

Everything else is in pyproject.toml. Without a compiler the wheel is built without them, and says so; an editable
install compiles at first use, from the sources. OUTRIDER_WHEEL names another system to build for, with Zig's compiler
(ops/cpu/targets.py).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent / "src"))
from outrider.ops.cpu import build, targets
from outrider.platforms.processor import machine

TARGET = targets.TARGETS[os.environ["OUTRIDER_WHEEL"]] if "OUTRIDER_WHEEL" in os.environ else None


class BuildWithKernels(build_py):
    def run(self):
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / "outrider" / "ops" / "cpu" / "prebuilt"
        if TARGET is not None:
            levels = os.environ.get("OUTRIDER_WHEEL_LEVELS", "").split() or TARGET.levels
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda level: targets.compile_to(TARGET, level, folder), levels))
            if TARGET.system == "win32":
                with tempfile.TemporaryDirectory() as scratch:  # the linker puts an import library next to it
                    targets.compile_cpuid(TARGET, Path(scratch, "cpuid.dll"))
                    shutil.move(Path(scratch, "cpuid.dll"), folder.parents[2] / "platforms")
            return

        def one(level):
            try:
                build.compile_to(folder / build.file_name(level), level)
            except build.CompilerRefused as error:  # a compiler that does not know the newest processors yet
                print(f"warning: no {level} kernels in this wheel: {error}", file=sys.stderr)

        try:
            build.compiler()
        except build.BuildError as error:
            print(f"warning: no kernels in this wheel: {error}", file=sys.stderr)
            return
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(one, build.WHEEL_LEVELS.get(machine(), ())))


class WithKernels(Distribution):
    """Its files belong to one system: auditwheel refuses a wheel with libraries among those of any system."""

    def has_ext_modules(self):
        return True


class PlatformWheel(bdist_wheel):
    """Any Python 3, but this operating system and processor."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2] if TARGET is None else TARGET.wheel_tag


setup(distclass=WithKernels, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
