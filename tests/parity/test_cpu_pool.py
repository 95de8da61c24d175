"""The threads of the C kernels: any number gives the same bits, and those that share a core do not wait against each
other."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
from tests.parity.test_cpu_kernels import seeded

from outrider.ops.cpu.ops import CpuOps


def test_threads_do_not_change_a_bit() -> None:
    x = seeded(9, 256)
    dense = seeded(320, 256)
    answers = []
    for threads in (1, 2, 3, 5):
        ops = CpuOps(threads=threads)
        answers.append(torch.cat((ops.linear(x, ops.quantize(dense, "int4")), ops.linear(x, dense)), 1))
    assert all(torch.equal(answers[0], a) for a in answers[1:])


@pytest.mark.skipif(sys.platform != "linux", reason="only there can threads be kept on one core")
def test_members_that_share_a_core_do_not_wait_against_each_other() -> None:
    """Happens while other programs keep the other cores busy. Measures processor time, so that a busy machine changes
    little."""
    x = seeded(9, 256)
    dense = seeded(320, 256)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        used = []
        for threads in (1, 2):
            ops = CpuOps(threads=threads)
            w = ops.quantize(dense, "int4")
            ops.linear(x, w)
            each = []
            for _ in range(5):
                began = time.process_time()
                for _ in range(40):
                    ops.linear(x, w)
                each.append((time.process_time() - began) / 40)
            used.append(min(each))
    finally:
        os.sched_setaffinity(0, cores)
    took = [f"{1e6 * each:.0f} µs" for each in used]
    assert used[1] < used[0] + max(120e-6, used[0]), (
        f"{took[1]} for a product by two members on one core, {took[0]} by one"
    )
