"""A process that answers calls: its limit is of a whole call, and the next call starts another process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.engine import child_process
from outrider.engine.child_process import ChildLost, ChildProcess

# answers a call with what it got; one of more than four bytes with bytes that never end
SCRIPT = """
import sys, time
read, write = sys.stdin.buffer.read, sys.stdout.buffer
while head := read(4):
    size = int.from_bytes(head, "little")
    data = read(size)
    if size <= 4:
        write.write(head + data)
        write.flush()
        continue
    write.write((1 << 30).to_bytes(4, "little"))
    while True:
        write.write(b"x")
        write.flush()
        time.sleep(0.01)
"""


def test_the_limit_is_of_the_whole_call(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    child = ChildProcess(str(script), seconds=3.0)
    try:
        assert child.call(b"abcd") == b"abcd"
        with pytest.raises(ChildLost):
            child.call(b"a byte now and then")
        assert child.call(b"dcba") == b"dcba"
    finally:
        child.close()
    with pytest.raises(ChildLost):
        child.call(b"late")


# reads only after a while, and answers with a number of bytes
SLOW_READER = """
import sys, time
read, write = sys.stdin.buffer.read, sys.stdout.buffer
while True:
    time.sleep(0.2)
    size = int.from_bytes(read(4), "little")
    write.write((4).to_bytes(4, "little") + len(read(size)).to_bytes(4, "little"))
    write.flush()
"""


def test_a_call_that_took_all_its_time_leaves_the_next_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(SLOW_READER)
    child = ChildProcess(str(script), seconds=60.0)
    clock = iter([0.0, 1.0, 59.9999])
    monkeypatch.setattr(child_process, "time", SimpleNamespace(monotonic=lambda: next(clock, 0.0)))
    try:
        assert int.from_bytes(child.call(b"a"), "little") == 1
        assert int.from_bytes(child.call(bytes(8 << 20)), "little") == 8 << 20  # more than a socket holds
    finally:
        child.close()


def test_an_interrupted_call_does_not_answer_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    child = ChildProcess(str(script))

    def interrupted(size: int) -> bytes:
        raise KeyboardInterrupt

    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(child, "_read", interrupted)
            child.call(b"one")
        assert child.call(b"two") == b"two"
    finally:
        child.close()
