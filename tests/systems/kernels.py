"""Runs kernel_driver.c on the kernels of wheels: natively, as a Windows program under Wine, for ARM under qemu.

    python tests/systems/kernels.py [--wheels DIR] [--levels "avx2 generic"] [native windows arm] [--record]

Every case's output bits are compared: one thread with three, Linux with Windows, GCC's code with Clang's, and all of them
with expected_bits.json. A level that this processor lacks is named and left out. Libraries come from the wheels in DIR
(default: dist/), if they were built from the sources at hand; others are compiled now (minutes a level).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from ctypes import sizeof
from dataclasses import dataclass
from pathlib import Path

from outrider.ops.cpu import build, lib
from outrider.ops.cpu.lowrank import NAMES
from outrider.ops.cpu.targets import TARGETS, compile_cpuid, compile_to, program_command
from outrider.ops.formats import BLOCKS
from outrider.platforms.processor import CPUID_FEATURES, cpu_flags, features_of_bits, machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DRIVER = HERE / "kernel_driver.c"
EXPECTED = HERE / "expected_bits.json"
WINE = ("wine",)
QEMU = ("qemu-aarch64-static", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu")
# what can be run, the program that it needs, and Debian's packages of that
KINDS = {
    "native": (None, ""),
    "windows": (WINE[0], "wine wine64"),
    "arm": (QEMU[0], "qemu-user-static libc6-arm64-cross"),
}
# Families that take sines and cosines from the system's C library: Windows's rounds some of them otherwise.
ANGLES = {"angles", "forward", "draft", "draft-model", "cycle", "block-context", "read-slots"}
MAX_LINES = 40  # of problems
# where a block of a file holds float16 scales; what is missing here has one at its beginning
SCALES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "IQ1_M": (),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
}


def write_header(folder: Path) -> None:
    """kernel_api.h: the library's structs and functions as its sources declare them."""
    lines = ["#pragma once", "#include <stddef.h>", "#include <stdint.h>", "typedef struct ThreadPool ThreadPool;"]
    numbers = {f"W_{kind.name}": kind.value for kind in (lib.PackedKind.DENSE, lib.PackedKind.FILE)}
    numbers |= {"DT_F32": 0, "DT_F16": 1, "DT_BF16": 2, "DT_I8": 3}
    numbers |= {f"F_{name}": number for number, name in enumerate(lib.FILE_TYPES)}
    numbers |= {"ADAPTED_WEIGHTS": len(NAMES), "ADAPTED_DOWN": NAMES.index("down")}
    numbers |= {"FILE_FORMATS": len(lib.FILE_TYPES), "STRUCTS": len(lib.CHECKED)}
    lines += [f"enum {{ {name} = {number} }};" for name, number in numbers.items()]
    for name in lib.STRUCTS:
        declaration = re.search(rf"typedef struct {{[^{{}}]*}} {name};", lib.C)
        assert declaration is not None, name
        lines.append(declaration[0])
    lines.append(f"static const int struct_sizes[STRUCTS] = {{{', '.join(str(sizeof(one)) for one in lib.CHECKED)}}};")
    lines.append("typedef struct { const char *name; int block, bytes, scales, scale_at[2]; } FileFormat;")
    rows = []
    for name in lib.FILE_TYPES:
        size, nbytes = BLOCKS[name]
        places = SCALES.get(name, (0,))
        rows.append(f'{{"{name}", {size}, {nbytes}, {len(places)}, {{{", ".join(map(str, places)) or 0}}}}}')
    lines.append(f"static const FileFormat file_formats[FILE_FORMATS] = {{{', '.join(rows)}}};")
    functions = re.findall(r"^(\w+ \*?)(or_\w+)(\([^)]*\)) \{", lib.C, re.MULTILINE)
    lines += [f"static {result}(*{name}){parameters};" for result, name, parameters in functions]
    lines.append("static const char *find_functions(void *library, void *(*find)(void *, const char *)) {")
    lines += [f'    if (!(*(void **)&{name} = find(library, "{name}"))) return "{name}";' for _, name, _ in functions]
    lines += ["    return NULL;", "}"]
    (folder / "kernel_api.h").write_text("\n".join(lines) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Run:
    """One library, and how a program for its system is started here."""

    target: str  # of TARGETS, or "gcc": this machine's compiler
    level: str
    start: tuple[str, ...] = ()

    @property
    def is_arm(self) -> bool:
        return self.target.endswith("aarch64")

    @property
    def bits(self) -> str:
        """The name of what it should compute, in expected_bits.json: compilers of one architecture agree."""
        return f"{'aarch64' if self.is_arm else 'x86_64'} {self.level}"

    def __str__(self) -> str:
        return f"{self.target} {self.level}"


def library_of(run: Run, wheels: Path, folder: Path) -> Path:
    """From a wheel of the sources at hand, or compiled now."""
    if run.target == "gcc":
        return build.build(run.level)
    target = TARGETS[run.target]
    name = build.file_name(run.level, target.machine)
    for wheel in wheels.glob(f"outrider-*{target.wheel_tag}.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.namelist():
                if entry.endswith(f"/prebuilt/{name}"):
                    library = folder / run.target / name
                    library.parent.mkdir(exist_ok=True)
                    library.write_bytes(archive.read(entry))
                    return library
    print(f"{run}: compiled now", flush=True)
    return compile_to(target, run.level, folder / run.target)


def driver_of(name: str, folder: Path) -> Path:
    """The driver as a program, for any processor of its kind: it calls kernels, and computes next to nothing itself."""
    program = folder / f"driver-{name}{'.exe' if name.startswith('windows') else ''}"
    if program.exists():
        return program
    if name == "gcc":
        command = [build.compiler(), "-O1", "-std=c11", "-D_GNU_SOURCE", str(DRIVER), "-o", str(program), "-ldl", "-lm"]
    else:
        target = TARGETS[name]
        command = program_command(target, "generic", DRIVER, str(program))
        if target.system == "linux":
            command.append("-ldl")
    subprocess.run([*command, f"-I{folder}"], check=True)
    return program


def cases_of(run: Run, wheels: Path, folder: Path) -> dict[str, str]:
    """The hash of each case. A case that fails is an error."""
    library = library_of(run, wheels, folder)
    program = driver_of(run.target, folder)
    path = f"Z:{library}" if run.start == WINE else str(library)
    env = {**os.environ, "WINEDEBUG": "-all"}
    done = subprocess.run([*run.start, str(program), path], env=env, capture_output=True, text=True, timeout=3600)
    cases = dict[str, str]()
    failed = []
    for line in done.stdout.splitlines():
        name, _, bits = line.strip().partition(" ")
        cases[name] = bits
        if bits.startswith("FAILED"):
            failed.append(line)
    if done.returncode != 0 or not cases:
        sys.exit(
            f"{run}: exit code {done.returncode} after {len(cases)} cases; {failed[:5]} {done.stderr.strip()[-500:]}"
        )
    return cases


def features_under_wine(folder: Path) -> str:
    """Runs cpuid.c as a Windows program; returns the features on which it and Linux disagree."""
    program = folder / "cpuid.exe"
    compile_cpuid(TARGETS["windows-x86_64"], program, "-DCPUID_PROGRAM")
    env = {**os.environ, "WINEDEBUG": "-all"}
    done = subprocess.run([*WINE, str(program)], env=env, capture_output=True, text=True, timeout=300, check=True)
    listed = cpu_flags() & set(CPUID_FEATURES)
    features = features_of_bits(int(done.stdout))
    print(f"windows-x86_64: cpuid.c finds {len(features)} features of {len(listed)} that Linux lists")
    return ", ".join(sorted(features ^ listed))


def threads_differ(cases: dict[str, str]) -> Iterator[str]:
    """Names of cases whose bits depend on the number of threads."""
    for name, bits in cases.items():
        alone = cases.get(name.replace("/threads3", "/threads1"))
        if alone != bits:
            yield name


def problems_of(run: Run, cases: dict[str, str], results: dict[Run, dict[str, str]]) -> Iterator[str]:
    """Cases that depend on the number of threads, or differ from the first library of the same level."""
    for name in threads_differ(cases):
        yield f"{run}: {name} depends on the number of threads"
    first = next(other for other in results if other.bits == run.bits)
    for name, bits in cases.items():
        if run.start == WINE and name.split("/")[0] in ANGLES:
            continue
        if results[first].get(name) != bits:
            yield f"{run}: {name} has other bits than {first}"


def digest(cases: dict[str, str]) -> dict[str, str]:
    """A hash for each family of cases."""
    families = dict[str, list[str]]()
    for name, bits in cases.items():
        families.setdefault(name.split("/")[0], []).append(f"{name} {bits}")
    return {family: hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] for family, lines in families.items()}


def runs_of(kinds: list[str], levels: set[str]) -> Iterator[Run]:
    """Libraries that can run here; prints which cannot, and why."""
    here = machine()
    if "native" in kinds:
        for name in ("gcc", f"linux-{here}"):
            for level in TARGETS[f"linux-{here}"].levels:
                if level not in levels:
                    continue
                lacks = build.missing(level)
                if lacks:
                    print(f"{name} {level}: left out, this processor lacks {', '.join(sorted(lacks))}")
                else:
                    yield Run(name, level)
    if "windows" in kinds:
        for level in TARGETS["windows-x86_64"].levels:
            if level in levels and not build.missing(level):
                yield Run("windows-x86_64", level, WINE)
    if "arm" in kinds and here != "aarch64":
        for level in TARGETS["linux-aarch64"].levels:
            if level in levels:
                yield Run("linux-aarch64", level, QEMU)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="default: all")
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist")
    parser.add_argument("--levels", default=" ".join(build.FLAGS))
    parser.add_argument("--record", action="store_true", help="write expected_bits.json anew")
    options = parser.parse_args()
    kinds = options.kinds or [*KINDS]
    if "windows" in kinds and "native" not in kinds:
        kinds = ["native", *kinds]  # what Windows's libraries are compared with
    for kind, (tool, packages) in KINDS.items():
        if kind in kinds and tool is not None and shutil.which(tool) is None:
            sys.exit(f"{tool} not found: apt-get install {packages}")
    results = dict[Run, dict[str, str]]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_header(folder)
        for run in runs_of(kinds, set(options.levels.split())):
            results[run] = cases_of(run, options.wheels, folder)
            print(f"{run}: {len(results[run])} cases", flush=True)
        differing = features_under_wine(folder) if "windows" in kinds else ""
    problems = [line for run, cases in results.items() for line in problems_of(run, cases, results)]
    if differing:
        problems.append(f"cpuid.c and Linux disagree on {differing}")
    digests = {run.bits: digest(cases) for run, cases in results.items() if run.start != WINE}
    expected = json.loads(EXPECTED.read_text(encoding="utf-8")) if EXPECTED.exists() else {}
    if options.record and not problems:
        EXPECTED.write_text(json.dumps({**expected, **digests}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for level, families in digests.items():
        if not options.record:
            other = [family for family, bits in families.items() if expected.get(level, {}).get(family) != bits]
            problems += [f"{level}: {family} has other bits than {EXPECTED.name}" for family in other]
    for line in problems[:MAX_LINES]:
        print(line, file=sys.stderr)
    total = sum(map(len, results.values()))
    print(f"{total} cases of {len(results)} libraries, {len(problems)} problems")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
