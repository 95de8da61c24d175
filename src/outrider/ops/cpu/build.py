"""Finds the C kernels for this processor: shipped inside the wheel, or compiled once into the cache folder.

A library's name contains a hash of the sources and the flags; one that was compiled here also a hash of the compiler.
A change of any of them triggers a build, and running processes keep the library they have loaded. Starts may race: each
builds under its own name, then renames.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from ...platforms.folders import cache_root, spare_root, writable
from ...platforms.processor import cpu_flags, machine

HERE = Path(__file__).parent
SHIPPED = HERE / "prebuilt"  # libraries inside a wheel (setup.py)
UNITS = ("chunks.c", "tiles.c", "kernels.c")  # compiled in parallel
SOURCES = tuple(sorted(path.name for path in HERE.glob("*.[ch]")))  # all of them: a change to any gives another library
X86 = "-O3 -mavx2 -mfma -mf16c -mprfchw"
AVX512 = f"{X86} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni"
# Sums stay in the order of the source: put into trees they need more registers than there are, and five rows take 7 %
# longer.
AVX2 = f"{X86} -fno-tree-reassoc"
ARM = "-O2 -ftree-vectorize -march=armv8.2-a+dotprod+fp16"
FLAGS = {  # best first; the processor decides which it can run
    "amx": f"{AVX512} -mavx512bf16 -mamx-tile -mamx-int8",
    "avx512bf16": f"{AVX512} -mavx512bf16",
    "avx512": AVX512,
    "avxvnni": f"{AVX2} -mavxvnni",
    "avx2": AVX2,
    "i8mm": f"{ARM}+i8mm",
    "dotprod": ARM,
    "generic": "-O2 -ftree-vectorize",  # -O3 takes half a minute over 64-byte vectors and is no faster
}
NEEDS = {
    "amx": "avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16 amx_tile amx_int8 f16c fma",
    "avx512bf16": "avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16 f16c fma",
    "avx512": "avx512f avx512bw avx512vl avx512dq avx512_vnni f16c fma",
    "avxvnni": "avx2 fma f16c avx_vnni",
    "avx2": "avx2 fma f16c",
    "i8mm": "asimddp asimdhp i8mm",
    "dotprod": "asimddp asimdhp",
    "generic": "",
}
# by machine: what a wheel ships
WHEEL_LEVELS = {
    "x86_64": ("amx", "avx512bf16", "avx512", "avxvnni", "avx2", "generic"),
    "aarch64": ("i8mm", "dotprod", "generic"),
}
# No contraction: a sum must round the same in every tile it is part of. Floats are also read as the pairs of bfloat16
# that they hold, which strict aliasing would let a compiler reorder.
COMMON = "-std=c11 -D_GNU_SOURCE -fPIC -pthread -ffp-contract=off -fno-math-errno -fno-tree-ter -fno-strict-aliasing"
# Linux's system call, its request for the use of an extended register state, and the number of the tile registers
ARCH_PRCTL = 158
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_XTILEDATA = 18
CPU_SECONDS = 300  # of processor time for each compiler: on a busy machine wall time may be minutes longer

STALE_SECONDS = 24 * 3600  # no build takes a day


class BuildError(Exception):
    """Why there is no library: one line."""


class CompilerRefused(BuildError):
    """The compiler ran and failed: it may still support a lower level."""


def missing(isa: str) -> set[str]:
    """Features that a level needs and this processor, or its system, lacks."""
    lacking = set(NEEDS[isa].split()) - cpu_flags()
    if isa == "amx" and not lacking:
        refusal = request_tiles()
        if refusal is not None:
            lacking.add(f"permission for tiles ({refusal})")
    return lacking


@functools.cache
def request_tiles() -> str | None:
    """Asks Linux for the use of tile registers by all threads of this process; returns why it refuses, or None.

    Without the permission the first tile instruction ends the process. Threads that run already and processes that are
    forked later have it, too."""
    if sys.platform != "linux" or machine() != "x86_64":
        return "asked of Linux alone"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0:
        return None
    return f"arch_prctl: {os.strerror(ctypes.get_errno())}"


def runnable() -> tuple[str, ...]:
    """The levels that this processor can run, best first. Only those of its architecture: in a container for ARM that
    an x86 machine emulates, /proc/cpuinfo lists the machine's features."""
    levels = WHEEL_LEVELS.get(machine(), ("generic",))
    return tuple(isa for isa in levels if not missing(isa))


def best_isa() -> str:
    """The level in use: the best that this processor can run, or the one that OUTRIDER_CPU_ISA names."""
    return os.environ.get("OUTRIDER_CPU_ISA") or runnable()[0]


def cache_path(*parts: str) -> Path:
    """A file of the cache: where it is, or where it can be put (the spare folder, if the cache cannot be written)."""
    path = cache_root().joinpath(*parts)
    if os.access(path, os.R_OK) or writable(cache_root()):  # another user's cache may be unreadable
        return path
    with suppress(OSError):
        return spare_root().joinpath(*parts)
    return path


def compiler() -> str:
    """A C compiler on the path, or the path of the package ziglang's. On Windows what is called gcc there may lack
    half of what the kernels use: only `CC` comes before the package."""
    on_path = () if sys.platform == "win32" else ("cc", "gcc", "clang")
    for name in (os.environ.get("CC"), *on_path):
        if name and shutil.which(name):
            return name
    zig = zig_compiler()
    if zig is not None:
        return str(zig)
    raise BuildError("no C compiler (cc, gcc or clang) on the path, and no package ziglang")


def zig_compiler() -> Path | None:
    """The program of the package `ziglang` (pip install ziglang), a C compiler with its own headers and libraries."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        return None
    program = Path(spec.origin).with_name("zig.exe" if sys.platform == "win32" else "zig")
    return program if program.exists() else None


def shared_object(isa: str | None = None) -> Path:
    """The path of the built library: for this processor, or for a lower level if the compiler does not support it yet.
    An explicit level, here or by OUTRIDER_CPU_ISA, is used or refused."""
    levels = runnable()
    isa = isa or os.environ.get("OUTRIDER_CPU_ISA") or None
    if isa is not None:
        if isa not in FLAGS:
            raise BuildError(f"unknown level {isa!r}; known: {', '.join(FLAGS)}")
        if isa not in levels:
            lacking = ", ".join(sorted(missing(isa)))
            raise BuildError(f"this machine cannot run {isa}: it lacks {lacking}; it can run {', '.join(levels)}")
        levels = (isa,)
    for level in levels:
        try:
            return build(level)
        except CompilerRefused as error:
            failed = error
    raise failed


def file_name(isa: str, architecture: str | None = None) -> str:
    """The name of a shipped library, for this machine or another architecture."""
    digest = hashlib.sha256(repr((isa, FLAGS[isa], COMMON, architecture or machine())).encode())
    for name in SOURCES:
        digest.update((HERE / name).read_bytes())
    return f"kernels-{isa}-{digest.hexdigest()[:16]}.so"


def compiler_id(cc: str) -> str:
    """Identifies a compiler by its path, and by the size and date of its file, which an update changes."""
    path = os.path.realpath(shutil.which(cc) or cc)
    state = os.stat(path)
    identity = repr((path, state.st_size, state.st_mtime_ns))
    return hashlib.sha256(identity.encode()).hexdigest()[:8]


def built_name(isa: str, cc: str) -> str:
    """The name of a library that `cc` compiles here."""
    return file_name(isa).replace(".so", f"-{compiler_id(cc)}.so")


def found(isa: str) -> Path | None:
    """The library of a level: shipped, or compiled before by the compiler in use; without a compiler, by any."""
    shipped = SHIPPED / file_name(isa)
    if shipped.exists():
        return shipped
    try:
        built = cache_path("kernels", built_name(isa, compiler()))
    except BuildError:
        folder = cache_path("kernels")
        matches = sorted(folder.glob(file_name(isa).replace(".so", "-*.so")))
        return matches[0] if matches else None
    return built if built.exists() else None


def build(isa: str) -> Path:
    path = found(isa)
    if path is None:
        path = cache_path("kernels", built_name(isa, compiler()))
        from .compile_progress import compiling  # here: setup.py runs this file alone

        compile_to(path, isa, compiling)
    return path


Progress = Callable[[str, Mapping[str, Path]], AbstractContextManager[None]]


def compile_to(target: Path, isa: str, progress: Progress | None = None) -> None:
    """`progress`: given the level and the object file of each source, wraps the compilation."""
    cc = compiler()
    folder = target.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("build-*"):  # by builds that were killed
            with suppress(FileNotFoundError):  # another start sweeps too
                if time.time() - left.stat().st_mtime > STALE_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as scratch:
            objects = {name: Path(scratch, f"{name}.o") for name in UNITS}
            library = f"{scratch}/kernels.so"
            compilations, link = _commands(cc, isa, objects=objects, library=library)
            with progress(isa, objects) if progress is not None else nullcontext():
                _run(compilations, scratch)
                _run([link], scratch)
            os.chmod(library, 0o755)
            os.replace(library, target)
    except OSError as error:
        raise BuildError(
            f"cannot keep the kernels in {folder}: {error.strerror or error} (OUTRIDER_CACHE names another place)"
        ) from None


def _commands(cc: str, isa: str, objects: Mapping[str, Path], library: str) -> tuple[list[list[str]], list[str]]:
    """Returns a command for each source, and the one that links the library."""
    if cc != str(zig_compiler()):
        flags = [*COMMON.split(), *FLAGS[isa].split()]
        compilations = [[cc, *flags, "-c", str(HERE / name), "-o", str(out)] for name, out in objects.items()]
        return compilations, [cc, *flags, "-shared", *map(str, objects.values()), "-o", library, "-lm"]
    from .targets import compile_command, link_command, native_target  # here: it imports this module

    target = native_target()
    if target is None or isa not in target.levels:
        raise CompilerRefused(f"Zig's compiler makes no {isa} kernels for {sys.platform} on {machine()}")
    compilations = [compile_command(target, isa, unit=name, output=str(out)) for name, out in objects.items()]
    return compilations, link_command(target, [*map(str, objects.values())], library)


def _run(commands: list[list[str]], folder: str) -> None:
    """Runs compilers in parallel; the first failure is the error. Each has its own process group, so that what it
    started ends with it."""
    env = {**os.environ, "TMPDIR": folder, "LC_ALL": "C"}
    if sys.platform == "win32":
        return _run_plainly(commands, folder, env)
    running = list[subprocess.Popen[str]]()
    limited = ["/bin/sh", "-c", f'ulimit -S -t {CPU_SECONDS}; exec "$@"', "sh"]
    start = functools.partial(
        subprocess.Popen[str], env=env, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, process_group=0
    )
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})  # until all are known here
    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for c in commands:
            running.append(start([*limited, *c]))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        said = [process.communicate()[1] for process in running]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if before is not None:
            signal.signal(signal.SIGTERM, before)
        for process in running:
            if process.poll() != 0:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for process, text in zip(running, said):
        if process.returncode == -signal.SIGXCPU or "CPU time limit exceeded" in text:
            raise BuildError(f"{commands[0][0]} took more than {CPU_SECONDS} s of processor time")
        if process.returncode:
            raise _refused(commands[0][0], text, os.path.dirname(folder))


def _run_plainly(commands: list[list[str]], folder: str, env: dict[str, str]) -> None:
    """Runs compilers in parallel on a system without process groups, signal masks and limits."""
    start = functools.partial(
        subprocess.Popen[str], env=env, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    running = [start(command) for command in commands]
    try:
        outputs = [process.communicate(timeout=4 * CPU_SECONDS)[1] for process in running]
    except subprocess.TimeoutExpired:
        raise BuildError(f"{commands[0][0]} took more than {4 * CPU_SECONDS} s") from None
    finally:
        for process in running:
            process.kill()
            process.wait()
    for process, text in zip(running, outputs):
        if process.returncode != 0:
            raise _refused(commands[0][0], text, os.path.dirname(folder))


def _refused(cc: str, said: str, folder: str) -> BuildError:
    """The informative line of a compiler's error."""
    if os.strerror(errno.ENOSPC) in said:
        return BuildError(f"the disk of {folder} is full: free some space, or let OUTRIDER_CACHE name another place")
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no message"]
    return CompilerRefused(f"{cc} failed: {next((line for line in lines if 'error' in line.lower()), lines[0])[:200]}")
