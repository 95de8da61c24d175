"""A process that answers calls: its limit is of a whole call, and the next call starts another process."""

from __future__ import annotations

from pathlib import Path

import pytest

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
