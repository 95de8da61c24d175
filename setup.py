"""Wheels carry the compiled CPU kernels, one library for each instruction set of the machine's architecture, so that
users need no compiler.

Everything else is in pyproject.toml. Without a compiler the wheel is built without them, and says so; an editable
install compiles at first use, from the sources.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

CPU = Path(__file__).parent / "src" / "outrider" / "ops" / "cpu"


def builder():
    """ops/cpu/build.py on its own: importing the package would need torch."""
    spec = importlib.util.spec_from_file_location("outrider_cpu_build", CPU / "build.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    def run(self):
        super().run()
        if self.editable_mode:
            return
        build = builder()
        levels = build.WHEEL_LEVELS.get(platform.machine(), ())
        folder = Path(self.build_lib) / "outrider" / "ops" / "cpu" / "prebuilt"

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
            list(pool.map(one, levels))


class PlatformWheel(bdist_wheel):
    """Any Python 3, but this operating system and processor."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
