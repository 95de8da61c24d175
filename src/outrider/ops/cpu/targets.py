"""Compiles the kernels for another system: Zig's Clang (`pip install ziglang`) has the headers and libraries of all.

No import of torch: setup.py and tools use it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ...platforms.processor import machine
from .build import FLAGS, HERE, UNITS, file_name, zig_compiler

# No contraction: a sum must round the same in every tile it is part of. Assertions of undefined behaviour are off.
ZIG_COMMON = "-std=c11 -D_GNU_SOURCE -ffp-contract=off -fno-math-errno -fno-sanitize=all -fno-strict-aliasing"
ZIG_OPTIMISED = "-O3 -DNDEBUG"
# ops/cpu/build.py's levels as Zig names them: a processor and its features, none of which the build machine adds
ZIG_CPUS = {
    "amx": "x86_64_v4+avx512vnni+avx512bf16+amx_tile+amx_int8",
    "avx512bf16": "x86_64_v4+avx512vnni+avx512bf16",
    "avx512": "x86_64_v4+avx512vnni",
    "avxvnni": "x86_64_v3+avxvnni",
    "avx2": "x86_64_v3",
    "i8mm": "generic+v8_2a+dotprod+fullfp16+i8mm",
    "dotprod": "generic+v8_2a+dotprod+fullfp16",
    "generic": "baseline",
}
X86_LEVELS = ("avx512bf16", "avx512", "avxvnni", "avx2", "generic")
ARM_LEVELS = ("i8mm", "dotprod", "generic")


@dataclass(frozen=True)
class Target:
    system: str  # as sys.platform names it
    machine: str  # as build.py names it
    zig: str
    levels: tuple[str, ...]
    wheel_tag: str = ""  # empty: no wheel


TARGETS = {
    "linux-x86_64": Target(
        "linux", "x86_64", "x86_64-linux-gnu.2.17", levels=("amx", *X86_LEVELS), wheel_tag="manylinux_2_17_x86_64"
    ),
    "linux-aarch64": Target(
        "linux", "aarch64", "aarch64-linux-gnu.2.17", levels=ARM_LEVELS, wheel_tag="manylinux_2_17_aarch64"
    ),
    "macos-arm64": Target(
        "darwin", "aarch64", "aarch64-macos.13.0", levels=ARM_LEVELS[:2], wheel_tag="macosx_13_0_arm64"
    ),
    "macos-x86_64": Target(
        "darwin", "x86_64", "x86_64-macos.13.0", levels=X86_LEVELS[1:], wheel_tag="macosx_13_0_x86_64"
    ),
    "windows-x86_64": Target("win32", "x86_64", "x86_64-windows-gnu", levels=X86_LEVELS, wheel_tag="win_amd64"),
    "musl-x86_64": Target("linux", "x86_64", "x86_64-linux-musl", levels=("avx2",)),
}
CPUID = HERE.parents[1] / "platforms" / "cpuid.c"
SYSTEM_LIBRARIES = {"win32": ["-lapi-ms-win-core-synch-l1-2-0"], "darwin": [], "linux": ["-lm", "-lpthread"]}
WARNINGS = "-Wall -Wextra -Wno-psabi"
# Zig's own option for Windows, which Clang does not use when it only compiles
QUIET_ZIG = "-Wno-unused-command-line-argument"


def zig_command() -> list[str] | None:
    """How Zig's C compiler is started, or None if the package `ziglang` is not installed."""
    program = zig_compiler()
    return None if program is None else [str(program), "cc"]


def native_target() -> Target | None:
    """The wheel target of this system and processor."""
    for target in TARGETS.values():
        if target.wheel_tag and (target.system, target.machine) == (sys.platform, machine()):
            return target
    return None


def compile_command(target: Target, level: str, unit: str, output: str, *options: str) -> list[str]:
    """The command that compiles one of `build.UNITS`; `options` replace the optimisation of a wheel."""
    assert level in FLAGS and unit in UNITS
    return [*_start(target, level), *(options or ZIG_OPTIMISED.split()), "-c", str(HERE / unit), "-o", output]


def link_command(target: Target, objects: list[str], library: str) -> list[str]:
    """The command that links a library. What it takes from Windows's C library is compiled here, too: for any
    processor, so that it is compiled once and sines have the same bits in every level."""
    options = ("-O3", "-s", "-shared", *SYSTEM_LIBRARIES[target.system])
    return [*_start(target, "generic"), *objects, "-o", library, *options]


def compile_to(target: Target, level: str, folder: Path) -> Path:
    """Compiles and links a level's library into `folder`, by the name under which that system looks for it."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / file_name(level, target.machine)
    with tempfile.TemporaryDirectory() as scratch:
        objects = [str(Path(scratch, f"{unit}.o")) for unit in UNITS]
        for unit, output in zip(UNITS, objects):
            subprocess.run(compile_command(target, level, unit, output, *ZIG_OPTIMISED.split(), "-w"), check=True)
        linked = str(Path(scratch, "kernels.so"))  # the linker puts an import library for Windows next to it
        subprocess.run(link_command(target, objects, library=linked), check=True)
        shutil.move(linked, library)
    return library


def compile_cpuid(target: Target, output: Path, *options: str) -> None:
    """Compiles platforms/cpuid.c, which lists the processor's features where the system does not."""
    options = options or ("-shared",)
    subprocess.run([*_start(target, "generic"), "-O2", "-s", *options, str(CPUID), "-o", str(output)], check=True)


def program_command(target: Target, level: str, source: Path, program: str) -> list[str]:
    """The command that makes a program of one source file, for tests."""
    return [
        *_start(target, level),
        *ZIG_OPTIMISED.split(),
        "-w",
        str(source),
        "-o",
        program,
        *SYSTEM_LIBRARIES[target.system],
    ]


def _start(target: Target, level: str) -> list[str]:
    zig = zig_command()
    assert zig is not None, "ziglang is not installed"
    position_independent = [] if target.system == "win32" else ["-fPIC"]
    cpu = f"-mcpu={ZIG_CPUS[level]}"
    return [*zig, "-target", target.zig, cpu, *ZIG_COMMON.split(), *position_independent, QUIET_ZIG]
