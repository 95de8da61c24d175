"""A whole ARM Linux under qemu: the aarch64 wheel is installed, `outrider demo` runs, then tests (an hour or more).

    python tests/arm/system.py [--root DIR] [--wheels DIR] [--tokens N] [--demo] [--tests [PYTEST ARGUMENT ...]]

Needs root rights, debootstrap and qemu-user-static, and a wheel of `python tools/wheels.py linux-aarch64`. The system is
Debian's, with its own Python; packages come from PyPI. No compiler is installed. DIR is kept for the next time.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QEMU = Path("/usr/bin/qemu-aarch64-static")
BINFMT = Path("/proc/sys/fs/binfmt_misc")
# how the kernel recognises ARM's programs; F: it keeps the interpreter open, so that the root need not contain it
MAGIC = rb"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
MASK = rb"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
RULE = b":outrider-aarch64:M::" + MAGIC + b":" + MASK + b":" + os.fsencode(QEMU) + b":F"
TORCH = "torch==2.10.0"  # the last one that PyPI has for ARM without CUDA's libraries
PACKAGES = ("pytest", "pytest-timeout", "hypothesis", "jsonschema", "openai", "transformers==5.22.2", "gguf")
CPUINFO = """processor\t: 0
Features\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimdrdm asimddp i8mm bf16
model name\t: qemu max

"""
# more than a hundred tests of commands, the server, and answers with and without drafts; none needs a network
TESTS = (
    *("tests/e2e/test_cli.py", "tests/e2e/test_server.py", "tests/e2e/test_server_options.py"),
    *("tests/e2e/test_server_exact.py", "tests/e2e/test_server_prompts.py", "tests/e2e/test_server_engine.py"),
    *("tests/e2e/test_server_limits.py", "tests/e2e/test_server_stores.py", "tests/e2e/test_server_routes.py"),
    *("tests/e2e/test_server_identity.py", "tests/e2e/test_batch.py", "tests/e2e/test_block_drafter.py"),
)


def prepare(root: Path) -> None:
    """Debian for ARM in `root`, and a way to start its programs."""
    missing = [tool for tool in ("debootstrap", QEMU.name) if shutil.which(tool) is None]
    if missing:
        sys.exit(f"{' and '.join(missing)} not found: apt-get install debootstrap qemu-user-static")
    if os.getuid() != 0:
        sys.exit("only root may enter another system's root (chroot)")
    if not (BINFMT / "register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", BINFMT], check=True)
    if not any(BINFMT.glob("*aarch64*")):
        (BINFMT / "register").write_bytes(RULE)
    if not (root / "usr" / "bin" / "python3").exists():
        options = ["--arch=arm64", "--variant=minbase", "--include=python3,python3-venv,ca-certificates"]
        subprocess.run(["debootstrap", *options, "bookworm", root], check=True)
    for name in ("proc", "dev", "sys"):
        if not os.path.ismount(root / name):
            subprocess.run(["mount", "--bind", f"/{name}", root / name], check=True)
            subprocess.run(["mount", "--make-private", root / name], check=True)  # or the next one would show in /proc
    cpuinfo = root / "proc" / "cpuinfo"
    if not os.path.ismount(cpuinfo):  # qemu shows this machine's, not that of the processor it emulates
        (root / "cpuinfo").write_text(CPUINFO, encoding="ascii")
        subprocess.run(["mount", "--bind", root / "cpuinfo", cpuinfo], check=True)
    shutil.copy("/etc/resolv.conf", root / "etc")


def inside(root: Path, *command: str, check: bool = True) -> int:
    environment = ["PATH=/usr/bin:/bin", "HOME=/root", "LANG=C.UTF-8", "COLUMNS=100", "OMP_NUM_THREADS=2"]
    done = subprocess.run(["chroot", root, "/usr/bin/env", "-i", *environment, *command])
    if check and done.returncode != 0:
        sys.exit(f"exit code {done.returncode}: {' '.join(command)}")
    return done.returncode


def install(root: Path, wheels: Path) -> None:
    candidates = sorted(wheels.glob("outrider-*aarch64.whl"))
    if not candidates:
        sys.exit(f"no wheel for aarch64 in {wheels}: python tools/wheels.py linux-aarch64")
    wheel = shutil.copy(candidates[-1], root)
    if not (root / "env").exists():
        inside(root, "python3", "-m", "venv", "/env")
    pip = ("/env/bin/pip", "install", "-q", "--disable-pip-version-check")
    inside(root, *pip, TORCH, f"/{Path(wheel).name}[serve,audio]", *PACKAGES)
    inside(root, *pip, "--force-reinstall", "--no-deps", f"/{Path(wheel).name}")


def tests(root: Path, arguments: list[str]) -> int:
    """The suites as they are, on the installed package: no folder `src` is on the path."""
    checkout = root / "checkout"
    shutil.rmtree(checkout, ignore_errors=True)
    for name in ("tests", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
    for name in ("pyproject.toml", "README.md", "Makefile"):
        shutil.copy(ROOT / name, checkout)
    options = ["-o", "pythonpath=. benchmarks", "-o", "timeout=3600", "-rs", "--rootdir=/checkout"]
    words = shlex.join(["/env/bin/python", "-m", "pytest", *options, *(arguments or TESTS)])
    return inside(root, "sh", "-c", f"cd /checkout && exec {words}", check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT / "build" / "arm-system")
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer of the demo")
    parser.add_argument("--demo", action="store_true", help="only the demo")
    parser.add_argument("--tests", nargs="*", metavar="ARGUMENT", help="only tests; of pytest, default: the list here")
    options = parser.parse_args()
    root = options.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    prepare(root)
    install(root, options.wheels)
    code = 0
    if options.tests is None:
        inside(root, "/env/bin/outrider", "doctor")
        inside(root, "/env/bin/outrider", "demo", "--max-tokens", str(options.tokens))
    if not options.demo:
        code = tests(root, options.tests or [])
    sys.exit(code)


if __name__ == "__main__":
    main()
