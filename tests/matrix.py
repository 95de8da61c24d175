"""The tests that could depend on the processor, again with the CPU kernels at each level and numpy's BLAS for each core
that this machine can run. Two at a time; `make test` ends with it.

    .venv/bin/python tests/matrix.py            all of them
    .venv/bin/python tests/matrix.py --full     the whole suite in each (hours)
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from outrider.ops.cpu.build import cpu_flags, runnable

ROOT = Path(__file__).resolve().parents[1]
CORES = {"Haswell": {"avx2", "fma"}, "Zen": {"avx2", "fma"}, "SkylakeX": {"avx512f", "avx512vl"}}  # and what each needs
KERNELS = (
    "tests/property/test_formats_exact.py",
    "tests/property/test_audio_exact.py",
    "tests/e2e/test_conformance.py",
    "-k",
    "formats_exact or alone_in_a_batch or test_conformance and (stop or no_limit or choosing or scores)",
)
BLAS = ("tests/parity/test_triton_attention.py", "-k", "rows_stand_alone or depends_on_rows")


def one(name: str, value: str, tests: tuple[str, ...]) -> str | None:
    """The output of a run that failed."""
    env = {**os.environ, name: value, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "pytest", *tests], cwd=ROOT, env=env, capture_output=True, text=True)
    print(f"{name}={value}: {(done.stdout.strip().splitlines() or ['no output'])[-1]}", flush=True)
    return done.stdout + done.stderr if done.returncode else None


def main() -> int:
    whole = ("tests/unit", "tests/e2e", "tests/property", "tests/parity") if "--full" in sys.argv else None
    runs = [("OUTRIDER_CPU_ISA", isa, whole or KERNELS) for isa in runnable()]
    runs += [("OPENBLAS_CORETYPE", core, whole or BLAS) for core, needs in CORES.items() if needs <= cpu_flags()]
    with ThreadPoolExecutor(2) as pool:
        failed = [output for output in pool.map(lambda run: one(*run), runs) if output is not None]
    print(*failed, sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
