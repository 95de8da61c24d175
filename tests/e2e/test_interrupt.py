"""Ctrl-C at any moment of a command: exit code 130, no traceback. Moments are counted in processor time, so a busy
machine changes nothing.

`OUTRIDER_TESTS=slow` makes it 200 starts.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests import tiny
from tests.waiting import PATIENCE, until

TICK = os.sysconf("SC_CLK_TCK")
SLOW = "slow" in os.environ.get("OUTRIDER_TESTS", "")


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Commands inherit SIGINT as it is here; where the tests were started in the background, it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far; infinite when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("inf")
    return float("inf") if fields[0] == "Z" else (int(fields[11]) + int(fields[12])) / TICK


def interrupted(command: list[str], when: Callable[[int], bool], **environment: str) -> tuple[int | None, str]:
    """Its exit code as a shell shows it, and its stderr; SIGINT is sent once `when` is true of its process. The code is
    None where the command had ended by then."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env)
    until(lambda: when(process.pid))
    ended = cpu_seconds(process.pid) == float("inf")
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=PATIENCE)[1]
    if ended:
        return None, said
    return 128 - process.returncode if process.returncode < 0 else process.returncode, said


def clean(said: str) -> bool:
    return "Traceback" not in said and "Exception ignored" not in said and "KeyboardInterrupt" not in said


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = tiny.write_target("llama", tmp_path_factory.mktemp("interrupt") / "target")
    options = ("--max-tokens", "300", "--threads", "1", "--drafter", "none")
    return [sys.executable, "-m", "outrider", "generate", str(model), "Hello", *options]


def used_by(command: list[str]) -> float:
    """Processor time of a command from its start to its end."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_utime + used.ru_stime


@pytest.mark.timeout(7200 if SLOW else 600)
def test_ctrl_c_at_any_moment(command: list[str]) -> None:
    """Imports, loading, the first tokens, the answer."""
    least = used_by([sys.executable, "-c", "pass"]) + 0.02  # Python's own start is not ours to guard
    top = used_by(command)
    chosen = random.Random(0)
    count = 200 if SLOW else 5
    codes = Counter[int | None]()
    while codes[130] < count:
        moment = least + (0.85 * top - least) * (chosen.random() if SLOW else codes[130] / count)
        code, said = interrupted(command, lambda pid, moment=moment: cpu_seconds(pid) >= moment)  # type: ignore[misc]
        codes[code] += 1
        if code is None:  # processor time varies between runs, most of all on a busy machine
            top = min(top, moment)
            continue
        assert code == 130 and clean(said), f"{moment:.2f} of {top:.2f} s: {code}\n{said}"
    print(codes)


def test_ctrl_c_while_kernels_are_compiled(command: list[str], tmp_path: Path) -> None:
    """The compiler is ended, too, and nothing is left in the cache."""
    cc = tmp_path / "cc"
    started = tmp_path / "started"
    cache = tmp_path / "cache"
    cc.write_text(f"#!/bin/sh\necho $$ >> {started}\nsleep 600\n")
    cc.chmod(0o755)
    code, said = interrupted(command, lambda _: started.exists(), CC=str(cc), OUTRIDER_CACHE=str(cache))
    assert code == 130 and clean(said), said
    assert not [path for path in cache.rglob("*") if path.is_file()]
    until(lambda: all(cpu_seconds(int(pid)) == float("inf") for pid in started.read_text().split()))


DROPS = """
import signal, sys, time
from outrider import __main__ as entry
class Dropping:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
def command():
    held = Dropping()
    del held
    time.sleep(60)
sys.modules["outrider.cli.main"] = type(sys)("outrider.cli.main")
sys.modules["outrider.cli.main"].main = command
entry.main()
"""
DROPS_TWICE = (
    """
import signal, threading
start = threading.Timer.start
def at_once(timer):
    threading.Timer.start = start
    signal.raise_signal(signal.SIGINT)  # a thread that is faster than the hook
threading.Timer.start = at_once
"""
    + DROPS
)
ENDS = """
import atexit, signal, sys
from outrider import __main__ as entry
def command():
    atexit.register(signal.raise_signal, signal.SIGINT)
    raise SystemExit(0)
sys.modules["outrider.cli.main"] = type(sys)("outrider.cli.main")
sys.modules["outrider.cli.main"].main = command
entry.main()
"""
IMPORTS = """
import signal, sys
from outrider import __main__ as entry
class Finder:
    def find_spec(self, name, *_):
        if name == "outrider.cli.main":
            try:
                signal.raise_signal(signal.SIGINT)
            except BaseException:
                pass  # what a C extension does
sys.meta_path.insert(0, Finder())
sys.argv = ["outrider", "--version"]
entry.main()
"""


PROGRAMS = {"destructor": DROPS, "hook": DROPS_TWICE, "exit": ENDS, "import": IMPORTS}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_ctrl_c_where_exceptions_are_dropped(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
