"""`make wheels`: a wheel with kernels for each system, into dist/, and what each of their libraries is linked with.

    python tools/wheels.py [--levels "avx2 generic"] [--out DIR] [TARGET ...]

Needs the package `ziglang`. Exit code 1 if a library needs another than the system's own.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from outrider.ops.cpu.targets import TARGETS, zig_command

ROOT = Path(__file__).resolve().parents[1]
# what every machine of a system has
SYSTEM_LIBRARIES = {
    "linux": {
        "libc.so.6",
        "libm.so.6",
        "libpthread.so.0",
        "libdl.so.2",
        "ld-linux-x86-64.so.2",
        "ld-linux-aarch64.so.1",
    },
    "darwin": {"/usr/lib/libSystem.B.dylib"},
    "win32": {"kernel32.dll", "ntdll.dll", "msvcrt.dll", "ucrtbase.dll", "api-ms-win-core-synch-l1-2-0.dll"},
}


def linked_libraries(data: bytes, system: str) -> set[str]:
    """Names of libraries in a binary's tables, found as texts: of ELF, Mach-O and PE files without a parser of each."""
    patterns = {
        "linux": rb"(?<![\w./-])((?:lib|ld-)[\w+-]+\.so(?:\.\d+)*)\0",
        "darwin": rb"((?:/usr/lib|/System|@rpath)/[\w./+-]+?(?:\.dylib|\.framework/[\w/]+))\0",
        "win32": rb"([\w-]+\.(?:dll|DLL))\0",
    }
    names = {name.decode() for name in re.findall(patterns[system], data)}
    return {name.lower() for name in names} if system == "win32" else names


def check(wheel: Path, system: str) -> list[str]:
    """Foreign libraries of a wheel's own ones."""
    foreign = list[str]()
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith((".so", ".dylib", ".dll")):
                allowed = SYSTEM_LIBRARIES[system]
                names = linked_libraries(archive.read(entry), system)
                own = {Path(entry.filename).name.lower(), "kernels.dll"}
                forwarded = {name for name in names if name.startswith("api-ms-win-crt-")}  # Windows 10's C library
                left = names - allowed - own - forwarded
                print(
                    f"    {Path(entry.filename).name}: {entry.file_size >> 10} KB, {', '.join(sorted(names)) or 'none'}"
                )
                foreign += [f"{entry.filename}: {name}" for name in sorted(left)]
    return foreign


def build(name: str, out: Path, levels: str) -> Path:
    """Builds from a copy, so that no build folder stays in the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / file, source)
        env = {**os.environ, "OUTRIDER_WHEEL": name, "OUTRIDER_WHEEL_LEVELS": levels}
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-build-isolation"]
        subprocess.run([*command, "--no-deps", "-w", folder, str(source)], env=env, check=True)
        [wheel] = Path(folder).glob("outrider-*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, out / wheel.name))


def main() -> None:
    wheels = [name for name, target in TARGETS.items() if target.wheel_tag]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(wheels)}; default: all")
    parser.add_argument("--levels", default="", help="only these levels, for a quick look")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    unknown = set(options.targets) - set(wheels)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if zig_command() is None:
        sys.exit("the package ziglang is not installed: pip install ziglang")
    foreign = list[str]()
    for name in options.targets or wheels:
        wheel = build(name, options.out, options.levels)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
        foreign += check(wheel, TARGETS[name].system)
    for line in foreign:
        print(f"foreign library: {line}", file=sys.stderr)
    sys.exit(1 if foreign else 0)


if __name__ == "__main__":
    main()
