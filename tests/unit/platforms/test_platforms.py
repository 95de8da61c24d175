"""Modules for what systems have in different ways, and simulated machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cli.serve import require_protection
from outrider.ops.cpu import build
from outrider.platforms import folders, limits, locks, processor
from outrider.server.settings import ServerSettings
from outrider.types import OutriderError

ROOT = Path(__file__).resolve().parents[3]
SYSTEMS = ("win32", "darwin")


@pytest.mark.parametrize("system", SYSTEMS)
def test_commands_import_without_what_a_system_lacks(system: str) -> None:
    """`import fcntl` at the head of a module ended every command."""
    path = os.pathsep.join([str(ROOT / "tests" / "systems"), str(ROOT / "src")])
    modules = "config cli.generate cli.chat cli.serve cli.store cli.inspect cli.predict cli.bench cli.drafters cli.doctor train.run"
    modules += " server.main server.app server.batch server.grammar_sandbox engine.chat_template engine.images"
    imports = ", ".join(f"outrider.{name}" for name in modules.split())
    code = f"import {imports}; from outrider.platforms import processor; print(processor.sys.platform)"
    env = {**os.environ, "PYTHONPATH": path, "OUTRIDER_TEST_SYSTEM": system}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip() == system, done.stderr


@pytest.mark.parametrize("system", SYSTEMS)
def test_processes_for_templates_work_without_what_a_system_lacks(system: str) -> None:
    """A process got its calls through a socket as its stdin; Windows hands none to a process."""
    path = os.pathsep.join([str(ROOT / "tests" / "systems"), str(ROOT / "src")])
    code = (
        "from outrider.engine.chat_template import TemplateProcess\n"
        "import jinja2\n"
        "process = TemplateProcess('{{ a }}!', seconds=2.0)\n"
        "print(process.render({'a': 'one'}), process.render({'a': 'two'}))\n"
        "endless = TemplateProcess('{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}', 0.5)\n"
        "try:\n    endless.render({})\nexcept jinja2.TemplateError as error:\n    print(error)\n"
        "process.close()\nendless.close()\n"
    )
    env = {**os.environ, "PYTHONPATH": path, "OUTRIDER_TEST_SYSTEM": system}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["one! two!", "it takes more than 0.5 seconds or 512 MB"], done.stderr


def test_ctrl_c_that_a_destructor_drops_does_not_end_a_process_on_windows() -> None:
    """os.kill ends a process there, whatever the signal, with its number as the exit code."""
    path = os.pathsep.join([str(ROOT / "tests" / "systems"), str(ROOT / "src")])
    code = (
        "import os, time\n"
        "from outrider.__main__ import interrupt_soon\n"
        "os.kill = lambda pid, number: os._exit(number)\n"
        "try:\n"
        "    interrupt_soon()\n"
        "    while True:\n        time.sleep(0.01)\n"
        "except KeyboardInterrupt:\n    print('heard')\n"
    )
    env = {**os.environ, "PYTHONPATH": path, "OUTRIDER_TEST_SYSTEM": "win32"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "heard" and done.returncode == 0, done


class FakeSystem:
    """In the place of `sys` in one module."""

    def __init__(self, platform: str) -> None:
        self.platform = platform


def test_other_machines_are_refused_where_sandboxes_have_no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "sys", FakeSystem("linux"))
    require_protection(ServerSettings(model_name="m", host="0.0.0.0"))
    for system in SYSTEMS:
        monkeypatch.setattr(limits, "sys", FakeSystem(system))
        require_protection(ServerSettings(model_name="m", host="127.0.0.1"))
        with pytest.raises(OutriderError, match=r"--host 0\.0\.0\.0: .*; serve on 127\.0\.0\.1, or on Linux"):
            require_protection(ServerSettings(model_name="m", host="0.0.0.0"))


def test_folders_of_each_system(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OUTRIDER_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/ada lovelace")
    monkeypatch.setenv("LOCALAPPDATA", "/users/ada/local")
    monkeypatch.setenv("APPDATA", "/users/ada/roaming")
    cases = {
        "linux": ("/home/ada lovelace/.cache/outrider", "/home/ada lovelace/.config/outrider/config.toml"),
        "darwin": ("/home/ada lovelace/Library/Caches/outrider", "/home/ada lovelace/.config/outrider/config.toml"),
        "win32": ("/users/ada/local/outrider", "/users/ada/roaming/outrider/config.toml"),
    }
    for system, (cache, config) in cases.items():
        monkeypatch.setattr(folders, "sys", FakeSystem(system))
        assert str(folders.cache_root()) == cache and str(folders.config_file()) == config, system


def test_one_process_holds_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "results"
    with path.open("a+b") as first, path.open("a+b") as second:
        locks.lock_file(first)
        with pytest.raises(OSError):
            locks.lock_file(second)


@pytest.mark.linux
def test_threads_of_intel_hybrids_are_their_fast_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processor, "SYS", tmp_path)
    monkeypatch.setattr(processor, "CGROUP", tmp_path / "none")
    monkeypatch.setattr(processor.os, "sched_getaffinity", lambda _: set(range(16)))
    assert processor.performance_cores() is None and processor.default_threads() == 16
    for name, cores in (("cpu_core", "0-3,6-7\n"), ("cpu_atom", "4-5,8-15\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpus").write_text(cores)
    assert processor.performance_cores() == 6 and processor.default_threads() == 6
    monkeypatch.setattr(processor.os, "sched_getaffinity", lambda _: {0, 1, 4, 5})
    assert processor.default_threads() == 2
    monkeypatch.setattr(processor.os, "sched_getaffinity", lambda _: {4, 5})
    assert processor.default_threads() == 2, "only slow ones are allowed: they are used"
    monkeypatch.setattr(processor.os, "sched_getaffinity", lambda _: set(range(4)))
    assert processor.default_threads() == 4


@pytest.mark.linux
def test_threads_of_arm_chips_leave_out_the_small_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processor, "SYS", tmp_path)
    monkeypatch.setattr(processor, "CGROUP", tmp_path / "none")
    monkeypatch.setattr(processor.os, "sched_getaffinity", lambda _: set(range(8)))
    for core, capacity in enumerate([300, 300, 300, 300, 800, 800, 800, 1024]):
        folder = tmp_path / "system" / "cpu" / f"cpu{core}"
        folder.mkdir(parents=True)
        (folder / "cpu_capacity").write_text(f"{capacity}\n")
    assert processor.default_threads() == 4


@pytest.mark.parametrize(("levels", "fast", "threads"), [(2, 6, 6), (1, 8, 10), (None, None, 10)])
def test_threads_of_apple_chips(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, levels: int | None, fast: int | None, threads: int
) -> None:
    numbers = {"hw.nperflevels": levels, "hw.perflevel0.logicalcpu": fast}
    monkeypatch.setattr(processor, "sys", FakeSystem("darwin"))
    monkeypatch.setattr(processor, "CGROUP", tmp_path / "none")
    monkeypatch.setattr(processor, "sysctl", numbers.get)
    monkeypatch.delattr(processor.os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(processor.os, "cpu_count", lambda: 10)
    assert processor.default_threads() == threads


def test_windows_records_of_cores() -> None:
    """SYSTEM_CPU_SET_INFORMATION: 32 bytes, of which byte 18 is the efficiency class; later versions may be longer."""
    fast = (32).to_bytes(4, "little") + bytes(14) + b"\1" + bytes(13)
    slow = (40).to_bytes(4, "little") + bytes(36)
    assert processor.fast_cpu_sets(fast * 4 + slow * 8) == 4
    assert processor.fast_cpu_sets(fast * 4) is None and processor.fast_cpu_sets(b"") is None
    assert processor.fast_cpu_sets(bytes(64)) is None, "a size of 0 ends it"


def test_features_of_apple_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "sys", FakeSystem("darwin"))
    present = {"hw.optional.arm.FEAT_DotProd": 1, "hw.optional.arm.FEAT_FP16": 1, "hw.optional.arm.FEAT_I8MM": 0}
    monkeypatch.setattr(processor, "sysctl", present.get)
    assert processor.cpu_flags() == {"asimddp", "asimdhp"}
    monkeypatch.setattr(processor.platform, "machine", lambda: "arm64")
    assert processor.machine() == "aarch64"


@pytest.mark.linux
@pytest.mark.skipif(processor.machine() != "x86_64" or sys.platform != "linux", reason="asks an x86 processor")
def test_cpuid_and_linux_name_the_same_features(tmp_path: Path) -> None:
    """On Windows a wheel's cpuid.dll is all that tells AVX-512's VNNI and AVX-VNNI from AVX2."""
    source = Path(processor.__file__).with_name("cpuid.c")
    program = tmp_path / "cpuid"
    command = [
        build.compiler(),
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-DCPUID_PROGRAM",
        str(source),
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True)
    bits = int(subprocess.run([program], capture_output=True, check=True).stdout)
    assert processor.features_of_bits(bits) == processor.cpu_flags() & set(processor.CPUID_FEATURES)
