"""Memory that threads have freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import threading
import numpy as np
from outrider.server.trim import share_one_heap, trim

def resident_mb():
    return next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmRSS"))

def read():
    for size in (24 << 20, 20 << 20):
        parts = [np.ones(size // 16, np.uint8) for _ in range(16)]
        del parts

large = np.ones(31 << 20, np.uint8)
del large  # glibc keeps blocks of this size in its heaps from now on
if sys.argv[1] == "one heap":
    share_one_heap()
before = resident_mb()
barrier = threading.Barrier(9)

def work():
    read()
    barrier.wait()  # all have allocated before one ends and leaves its heap to another

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
barrier.wait()
for thread in threads:
    thread.join()
trim()
print(resident_mb() - before)
"""


def left_mb(way: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, way], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


@pytest.mark.linux
def test_what_many_threads_freed_is_returned() -> None:
    assert left_mb("one heap") < 40
