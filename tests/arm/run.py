"""`make test-arm`: check.c for every ARM level, cross-compiled with the flags of ops/cpu/build.py and run under qemu.

Needs gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user (Debian's names).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from outrider.ops.cpu.build import COMMON, FLAGS, WHEEL_LEVELS

CC = "aarch64-linux-gnu-gcc"
QEMU = "qemu-aarch64"
LIBRARIES = "/usr/aarch64-linux-gnu"
HERE = Path(__file__).parent


def check(level: str, folder: str) -> tuple[str, bool]:
    program = f"{folder}/check-{level}"
    common = [flag for flag in COMMON.split() if flag != "-fPIC"]
    built = subprocess.run(
        [CC, *common, *FLAGS[level].split(), str(HERE / "check.c"), "-o", program, "-lm"],
        capture_output=True,
        text=True,
    )
    if built.returncode:
        return f"{level}: {built.stderr[-2000:]}", False
    done = subprocess.run([QEMU, "-cpu", "max", "-L", LIBRARIES, program], capture_output=True, text=True, timeout=600)
    return f"{level}: {(done.stdout + done.stderr).strip()[-2000:]}", done.returncode == 0


def main() -> None:
    missing = [tool for tool in (CC, QEMU) if shutil.which(tool) is None]
    if missing:
        sys.exit(
            f"{' and '.join(missing)} not found: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
        )
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda level: check(level, folder), WHEEL_LEVELS["aarch64"]))
    for said, _ in results:
        print(said)
    sys.exit(0 if all(good for _, good in results) else 1)


if __name__ == "__main__":
    main()
