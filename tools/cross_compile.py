"""Compiles the kernels' three units for every system and level that gets a wheel, with all warnings on.

    python tools/cross_compile.py [--best] [--optimised] [TARGET ...]

Needs the package `ziglang`. Exit code 1 if a compiler says anything.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product

from outrider.ops.cpu.build import UNITS
from outrider.ops.cpu.targets import TARGETS, WARNINGS, ZIG_OPTIMISED, compile_command, zig_command


def compile_unit(name: str, level: str, unit: str, optimised: bool) -> tuple[str, str]:
    """What was compiled, and what the compiler said."""
    with tempfile.TemporaryDirectory() as folder:
        optimisation = ZIG_OPTIMISED if optimised else "-O0"
        options = [*optimisation.split(), *WARNINGS.split()]
        command = compile_command(TARGETS[name], level, unit, f"{folder}/unit.o", *options)
        env = {**os.environ, "ZIG_LOCAL_CACHE_DIR": folder}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    status = f"exit code {done.returncode}\n" if done.returncode else ""
    return f"{name} {level} {unit}", status + done.stderr.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--optimised", action="store_true", help="as wheels are (minutes)")
    parser.add_argument("--best", action="store_true", help="only the first level of each target")
    options = parser.parse_args()
    unknown = set(options.targets) - set(TARGETS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if zig_command() is None:
        sys.exit("the package ziglang is not installed: pip install ziglang")
    jobs = []
    for name in options.targets or TARGETS:
        levels = TARGETS[name].levels[: 1 if options.best else None]
        jobs += [(name, level, unit) for level, unit in product(levels, UNITS)]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda job: compile_unit(*job, optimised=options.optimised), jobs))
    failures = [(what, output) for what, output in results if output]
    for what, output in failures:
        print(f"{what}:\n{output}\n", file=sys.stderr)
    print(f"{len(results) - len(failures)} of {len(results)} compilations without a warning")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
