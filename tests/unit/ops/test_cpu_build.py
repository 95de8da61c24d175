"""Building, choosing and sharing the library: races, missing compilers, forks, threads that sleep."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.waiting import PATIENCE, until

from outrider.ops import choose, place
from outrider.ops.cpu import build, lib
from outrider.ops.cpu.ops import CpuOps, default_threads
from outrider.ops.reference import ReferenceOps
from outrider.types import OutriderError


def test_choose() -> None:
    assert isinstance(choose("cpu", "auto"), CpuOps)
    assert isinstance(choose(torch.device("cpu"), "cpu", threads=1), CpuOps)
    assert type(choose("cpu", "reference")) is ReferenceOps
    assert type(choose("mps", "auto")) is ReferenceOps
    with pytest.raises(OutriderError, match="known: auto"):
        choose("cpu", "fast")


def test_kernels_of_a_gpu_are_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in ("triton", "triton:dense"):
        with pytest.raises(OutriderError, match=f"--ops {name} runs on a GPU"):
            choose("cpu", name)


def test_a_call_that_lacks_memory_raises() -> None:
    """The functions are found by the name of their first parameter; renamed in C, their results were ignored."""
    library = CpuOps(threads=1).lib
    for name in ("or_forward", "or_decode_step", "or_draft", "or_draft_model_steps", "or_attend", "or_filter"):
        function = getattr(library, name)
        with pytest.raises(MemoryError, match=name):
            function.errcheck(1, function, ())
        function.errcheck(0, function, ())
    pool = library.or_pool_new(3)
    assert library.or_pool_size(pool) == 3, "this one returns a number"
    library.or_pool_free(pool)
    with pytest.raises(MemoryError, match="or_pool_new"):
        library.or_pool_new.errcheck(None, library.or_pool_new, ())


def test_no_long_in_the_kernels() -> None:
    """It has 32 bits on Windows: an offset into a large weight would overflow there, and only there."""
    for name in build.SOURCES:
        code = re.sub(r"/\*.*?\*/", "", (build.HERE / name).read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"\blong\b|\b\d+L\b", code), name


def test_the_check_for_arm_knows_the_kernels() -> None:
    """`make test-arm` needs a cross compiler, so nothing else noticed renamed types."""
    check = Path(__file__).parents[2] / "arm" / "check.c"
    command = [build.compiler(), "-fsyntax-only", *build.COMMON.split(), str(check)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(path.name for path in build.HERE.glob("*.[ch]")))
def test_a_change_to_any_source_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = build.file_name("generic")
    for path in build.HERE.glob("*.[ch]"):
        shutil.copy(path, tmp_path)
    (tmp_path / name).write_text("changed")
    monkeypatch.setattr(build, "HERE", tmp_path)
    assert build.file_name("generic") != before


def test_another_compiler_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code may differ in the last bit of a transcendental function; the name did not say which compiler it was."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "none")
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    fake_compiler(folders[0], monkeypatch, BUILDS)
    first = build.shared_object()
    fake_compiler(folders[1], monkeypatch, BUILDS)
    second = build.shared_object()
    assert first != second and second == build.shared_object()
    fake_compiler(folders[1], monkeypatch, BUILDS + "; true")  # an update
    assert build.shared_object() not in (first, second)
    without_compiler(monkeypatch, tmp_path)
    assert build.shared_object().parent == first.parent  # no compiler: any of them


@pytest.mark.parametrize("damaged", [b"", b"no library at all" * 99], ids=["empty", "other"])
def test_a_library_that_was_damaged_is_built_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damaged: bytes
) -> None:
    """A disk that was full or a copy that was cut off; before, every later start was many times slower."""
    sound = build.shared_object("generic")
    built = list[str]()

    def compiled(target: Path, isa: str, progress: object = None) -> None:
        built.append(isa)
        shutil.copyfile(sound, target)

    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "none")
    monkeypatch.setattr(build, "compile_to", compiled)
    (tmp_path / "kernels").mkdir()
    library = tmp_path / "kernels" / build.built_name("generic", build.compiler())
    library.write_bytes(damaged)
    assert lib.load("generic").or_sizes(0) > 0 and library.read_bytes() == sound.read_bytes() and built == ["generic"]


def test_a_library_that_may_not_be_run_from_its_place_is_not_built_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A cache on a disk mounted noexec: the same error again, after half a minute."""
    library = tmp_path / "kernels.so"
    library.write_bytes(b"")

    def refuse(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(lib, "shared_object", lambda isa: library)
    monkeypatch.setattr(lib.ctypes, "CDLL", refuse)
    with pytest.raises(OSError, match="failed to map"):
        lib.load("generic")
    assert library.exists()


def test_what_another_user_keeps_and_nobody_may_read_is_kept_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A home folder that is not this user's, as in a container run under another number."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build.os, "access", lambda *_: False)
    monkeypatch.setattr(build, "writable", lambda _: False)
    monkeypatch.setattr(build, "spare_root", lambda: tmp_path / "spare")
    assert build.cache_path("cuda", "x") == tmp_path / "spare" / "cuda" / "x"


def test_an_emulated_machine_has_levels_of_its_own_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under qemu a program for ARM reads the features of the x86 machine: avx512bf16 was the level, and no library."""
    monkeypatch.setattr(build, "machine", lambda: "aarch64")
    monkeypatch.setattr(build, "cpu_flags", lambda: set(" ".join(build.NEEDS.values()).split()) - {"i8mm", "asimddp"})
    assert build.runnable() == ("generic",)


def without_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(build, "zig_compiler", lambda: None)


@pytest.mark.skipif(build.zig_compiler() is None, reason="needs the package ziglang")
def test_the_package_ziglang_is_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without cc, gcc and clang a source install asked for one of them, on Windows too, where none is usual."""
    commands = list[list[str]]()

    def run(some: list[list[str]], folder: str) -> None:
        commands.extend(some)
        Path(folder, "kernels.so").write_bytes(b"linked")

    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "_run", run)
    build.compile_to(tmp_path / "kernels.so", "generic")
    assert build.compiler() == str(build.zig_compiler())
    assert [command[:2] for command in commands] == [[build.compiler(), "cc"]] * 4
    assert all("-ffp-contract=off" in command for command in commands) and "-shared" in commands[-1]


@pytest.mark.skipif(build.zig_compiler() is None, reason="needs the package ziglang")
def test_on_windows_a_gcc_on_the_path_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build, "zig_compiler", lambda: tmp_path / "zig.exe")
    monkeypatch.setattr(build.sys, "platform", "win32")
    assert build.compiler() == str(tmp_path / "zig.exe")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    without_compiler(monkeypatch, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert type(choose("cpu", "auto")) is ReferenceOps
    assert len(caplog.records) == 1 and "no C compiler" in caplog.text
    with pytest.raises(OutriderError, match="no C compiler"):
        choose("cpu", "cpu")


def test_a_broken_compiler_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\necho 'kernels.c:1: no such thing' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CC", str(fake))
    with pytest.raises(build.BuildError, match="no such thing"):
        build.shared_object()
    assert list((tmp_path / "kernels").iterdir()) == []


def test_a_build_sweeps_what_killed_ones_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each left its objects and the compiler's own files in the cache for ever; one that runs now is not touched."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "kernels"
    for name in ("build-old", "build-now"):
        (folder / name).mkdir(parents=True)
        (folder / name / "tiles.c.o").write_text("")
    os.utime(folder / "build-old", (0, time.time() - 2 * build.STALE_SECONDS))
    fake_compiler(tmp_path, monkeypatch, 'echo x > "$TMPDIR/cc1.s"; ' + BUILDS)
    built = build.shared_object()
    assert {path.name for path in folder.iterdir()} == {"build-now", built.name}


def test_a_terminated_build_ends_its_compilers(tmp_path: Path) -> None:
    """They went on for minutes, and their folder stayed in the cache."""
    fake = tmp_path / "cc"
    fake.write_text(f"#!/bin/sh\nsleep 999 & echo $! >> {tmp_path}/pids; wait\n")
    fake.chmod(0o755)
    env = {**os.environ, "OUTRIDER_CACHE": str(tmp_path / "cache"), "CC": str(fake)}
    code = "from outrider.ops.cpu import build; build.shared_object('generic')"
    run = subprocess.Popen([sys.executable, "-c", code], env=env)
    pids = tmp_path / "pids"
    until(lambda: pids.exists() and len(pids.read_text().split()) == len(build.UNITS))
    run.terminate()
    assert run.wait(PATIENCE) == 143 and list((tmp_path / "cache" / "kernels").iterdir()) == []
    until(lambda: not any(Path("/proc", pid).exists() for pid in pids.read_text().split()))


def fake_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    fake = folder / "cc"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CC", str(fake))


BUILDS = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo built > "$2"; shift; done'


def test_a_cache_that_cannot_be_written_is_stood_in_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    fake_compiler(tmp_path, monkeypatch, BUILDS)
    first = build.shared_object()
    assert first.read_text() == "built\n" and first.parent == tmp_path / f"outrider-{os.getuid()}" / "kernels"
    monkeypatch.setattr(build, "compile_to", lambda *_: pytest.fail("kept for the next start"))
    assert build.shared_object() == first
    folder = tmp_path / f"outrider-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_read_only_cache_with_kernels_in_it_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    fake_compiler(tmp_path, monkeypatch, BUILDS)
    built = build.shared_object()
    monkeypatch.setattr(build, "writable", lambda root: False)
    assert build.shared_object() == built


def test_a_full_disk_is_said_as_such_and_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    included = "echo 'In file included from kernels.c:1:' >&2"
    full = "echo 'fatal error: x: No space left on device' >&2"
    fake_compiler(tmp_path, monkeypatch, f"echo x >> {tmp_path}/count; {included}; {full}; exit 1")
    with pytest.raises(build.BuildError, match=r"disk of .*kernels is full: .*OUTRIDER_CACHE"):
        build.shared_object()
    assert len((tmp_path / "count").read_text().split()) == len(
        build.UNITS
    )  # side by side, and no lesser level is tried
    fake_compiler(tmp_path, monkeypatch, f"{included}; echo 'vec.h:3: error: what is this' >&2; exit 1")
    with pytest.raises(build.BuildError, match=r"failed: vec.h:3: error: what is this"):
        build.shared_object()


def test_a_level_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("cpu", "cpu:generic").lib.or_isa() == 0  # type: ignore[attr-defined]
    monkeypatch.setattr(build, "cpu_flags", lambda: {"avx2", "fma", "f16c"})
    for name, says in (
        ("cpu:avx512", "cannot run avx512: it lacks avx512_vnni, .*; it can run avx2, generic"),
        ("cpu:sse9", "unknown level 'sse9'"),
    ):
        with pytest.raises(OutriderError, match=says):
            choose("cpu", name)
    with pytest.raises(OutriderError, match="unknown ops 'triton:avx2'"):
        choose("cpu", "triton:avx2")


def test_more_threads_than_cores_are_not_started(caplog: pytest.LogCaptureFixture) -> None:
    cores = default_threads()
    with caplog.at_level(logging.WARNING):
        assert choose("cpu", "cpu", threads=64 * cores).threads == cores  # type: ignore[attr-defined]
    assert f"--threads {64 * cores} is more than the {cores} cores" in caplog.text
    with pytest.raises(OutriderError, match="--threads must be at least 1"):
        choose("cpu", "cpu", threads=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_one_line() -> None:
    assert place(None) == place("cpu") == torch.device("cpu")
    for name, says in (
        ("cuda", "no such GPU here .*: leave out --device"),
        ("cuda:7", "--device cuda:7"),
        ("tpu", "known: cpu, cuda"),
    ):
        with pytest.raises(OutriderError, match=says):
            place(name)


def test_racing_starts_build_one_library(tmp_path: Path) -> None:
    """Several processes at once, with an empty cache: all succeed, one file is left."""
    fake = tmp_path / "cc"  # quick: writes what it was asked for
    fake.write_text('#!/bin/sh\nsleep 0.3\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && echo built > "$2"; shift; done\n')
    fake.chmod(0o755)
    env = {**os.environ, "OUTRIDER_CACHE": str(tmp_path / "cache"), "CC": str(fake)}
    code = "import sys; sys.modules['torch'] = None\nfrom outrider.ops.cpu import build; print(build.shared_object())"
    env["PYTHONPATH"] = str(build.HERE.parents[2])
    runs = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    paths = {run.communicate()[0].strip() for run in runs}
    assert all(run.returncode == 0 for run in runs) and len(paths) == 1
    assert [str(p) for p in (tmp_path / "cache/kernels").iterdir()] == list(paths)


def test_isa_fits_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: {"avx2", "fma", "f16c"})
    assert build.best_isa() == "avx2"
    monkeypatch.setattr(build, "cpu_flags", set)
    assert build.best_isa() == "generic"


def test_threads_sleep_when_idle() -> None:
    ops = CpuOps(threads=3)
    ops.linear(torch.randn(4, 64), torch.randn(64, 64))

    def idle() -> bool:
        before = time.process_time()
        time.sleep(0.3)
        return time.process_time() - before < 0.03

    until(idle)  # on a busy machine they get the processor late for the little that they wait awake


def test_a_forked_child_can_compute() -> None:
    ops = CpuOps(threads=2)
    x = torch.randn(5, 64)
    w = torch.randn(64, 64)
    want = ops.linear(x, w)
    pid = os.fork()
    if pid == 0:  # the child: only its exit status speaks
        os._exit(0 if torch.equal(ops.linear(x, w), want) else 1)
    late = time.monotonic() + PATIENCE
    while time.monotonic() < late:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    pytest.fail("the child hangs")


def test_many_python_threads_share_one_pool() -> None:
    from concurrent.futures import ThreadPoolExecutor

    ops = CpuOps(threads=2)
    w = ops.quantize(torch.randn(256, 64), "int8")
    xs = [torch.randn(1 + i % 5, 64) for i in range(64)]
    alone = [ops.linear(x, w) for x in xs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda x: ops.linear(x, w), xs))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_shipped_kernels_need_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches: a wheel whose libraries nobody finds, a library of other sources taken for these."""
    level = build.runnable()[0]
    library = tmp_path / "prebuilt" / build.file_name(level)
    library.parent.mkdir()
    library.write_bytes(b"")
    (library.parent / f"kernels-{level}-0123456789abcdef.so").write_bytes(b"")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    without_compiler(monkeypatch, tmp_path)
    with pytest.raises(build.BuildError, match="no C compiler"):
        build.shared_object()
    monkeypatch.setattr(build, "SHIPPED", library.parent)
    assert build.shared_object() == library


def test_levels_say_what_a_processor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: {"avx2", "fma", "f16c", "avx_vnni"})
    assert "avx512f" in build.missing("avx512") and not build.missing("generic")
    assert build.best_isa() == "avxvnni" and build.runnable() == ("avxvnni", "avx2", "generic")


def test_tiles_are_used_where_the_system_permits_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_CPU_ISA", raising=False)
    monkeypatch.setattr(build, "cpu_flags", lambda: set(build.NEEDS["amx"].split()))
    monkeypatch.setattr(build, "request_tiles", lambda: None)
    assert build.best_isa() == "amx"
    monkeypatch.setattr(build, "request_tiles", lambda: "arch_prctl: Operation not permitted")
    assert build.best_isa() == "avx512bf16"
    assert build.missing("amx") == {"permission for tiles (arch_prctl: Operation not permitted)"}
    monkeypatch.setenv("OUTRIDER_CPU_ISA", "amx")
    with pytest.raises(build.BuildError, match="cannot run amx: it lacks permission for tiles"):
        build.shared_object()


def test_a_processor_without_tiles_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: set(build.NEEDS["avx512bf16"].split()))
    monkeypatch.setattr(build, "request_tiles", lambda: pytest.fail("asked for nothing"))
    assert build.best_isa() == "avx512bf16"
    assert build.missing("amx") == {"amx_tile", "amx_int8"}


def test_doctor_lists_the_levels() -> None:
    from typer.testing import CliRunner

    from outrider.cli.main import app

    result = CliRunner().invoke(app(), ["doctor", "--no-build"])
    assert f"level {build.best_isa()}" in result.output and result.output.count("in use") == 1


def test_a_gpu_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--device cuda`, the default, ended in torch's ValueError: setting a device wants its number."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert place(None) == place("cuda") == torch.device("cuda:0") and place("cuda:1").index == 1


def test_the_environment_names_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CPU_ISA", "generic")
    assert build.best_isa() == "generic" and "-generic-" in build.shared_object().name
    monkeypatch.setenv("OUTRIDER_CPU_ISA", "abacus")
    with pytest.raises(build.BuildError, match="unknown level 'abacus'"):
        build.shared_object()


def test_a_compiler_is_limited_in_processor_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in wall time: one that waits is waited for."""
    monkeypatch.setattr(build, "CPU_SECONDS", 1)
    with pytest.raises(build.BuildError, match="took more than 1 s of processor time"):
        build._run([["/bin/sh", "-c", "while :; do :; done"]], str(tmp_path))
    build._run([["/bin/sleep", "1.5"]], str(tmp_path))


def test_what_a_failed_compiler_started_is_ended(tmp_path: Path) -> None:
    left = tmp_path / "left"
    script = f"sleep 600 2>/dev/null & echo $! > {left}; echo error: no such thing >&2; exit 1"
    with pytest.raises(build.CompilerRefused, match="error: no such thing"):
        build._run([["/bin/sh", "-c", script]], str(tmp_path))
    state = Path(f"/proc/{int(left.read_text())}/stat")
    until(lambda: not state.exists() or state.read_text().split()[2] == "Z")


@pytest.mark.parametrize("level", build.WHEEL_LEVELS.get(platform.machine(), ()))
def test_the_sources_have_no_warnings(level: str) -> None:
    """Every level by the compiler at hand, also those that this processor cannot run. `-w` hid 30 places."""
    cc = build.compiler()
    flags = [*build.COMMON.split(), *build.FLAGS[level].split()]
    assert "-w" not in flags
    for unit in build.UNITS:
        command = [
            cc,
            *flags,
            *["-O0", "-fsyntax-only", "-Wall", "-Wextra", "-Wno-psabi", "-Werror"],
            str(build.HERE / unit),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if "unrecognized command" in done.stderr or "unknown argument" in done.stderr:
            pytest.skip(f"{cc} does not know {level}")
        assert done.returncode == 0, done.stderr[:2000]


def test_lines_of_the_sources_have_120_columns_at_most() -> None:
    for path in sorted(build.HERE.glob("*.[ch]")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert len(line) <= 120, f"{path.name}:{number}"
