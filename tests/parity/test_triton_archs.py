"""Products and attention compile for every card people own, within its shared memory and without spilling much. No GPU
is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from outrider.ops.triton.gemm_config import MAX_SMEM, MEASURED, fit_smem, triton_plan

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_archs.py"


@pytest.mark.timeout(600)
def test_kernels_fit_every_architecture() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}  # other tests interpret; this one compiles
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {row["sm"] for row in rows} == {80, 86, 89, 90, 100, 120}
    assert not [row for row in rows if not row["fits"]], rows
    # Bytes of K/V made the compiler pair four neighbours instead of two, at some numbers of rows: other sums, other
    # tokens with drafts.
    eight = [row for row in rows if "K/V in fp8" in row["kernel"] and row["shared"]]
    assert {row["sm"] for row in eight} == {89, 90, 100, 120} and all(row["widths"] == [2] for row in eight), eight
    # The same of the byte above a word of five-bit weights.
    products = [
        row
        for row in rows
        if row["sm"] == 90 and row["kernel"].startswith(("int4 g32", "fp8", "Q5_K")) and row["widths"]
    ]
    assert len(products) >= 4 and all(row["widths"] == [2] for row in products), products


@pytest.mark.parametrize("kib", [98, 162])
def test_dense_tiles_fit_smaller_cards(kib: int) -> None:
    """E2B's out took 120 KiB of the 99 that an RTX 4090 has. On the card they were measured on nothing changes."""
    for (n, k, gated), tile in MEASURED.items():
        for rows in (1, 17, 33, 65, 128, 320, 512, 2048):
            measured = triton_plan(tile, n, k, rows, bool(gated)).config
            shape = fit_smem(measured, 1 + gated, 2, kib << 10)
            assert (shape.bm + shape.bm2 + shape.bn * (1 + gated)) * shape.bk * 2 * shape.stages <= kib << 10, (
                n,
                k,
                rows,
                shape,
            )
            assert (
                fit_smem(measured, 1 + gated, 2, MAX_SMEM) == measured and shape.serial_splitk == measured.serial_splitk
            )
