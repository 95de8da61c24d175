"""Compile the kernels for cards that are not here, with Triton's own assembler, and show what each takes.

    python benchmarks/gpu_archs.py [--all]

For each architecture: shared memory must stay within what its programs may take, and the stack (spilled registers) below SPILLS bytes.
Prints one JSON line a kernel; `tests/unit/ops/test_triton_archs.py` runs the short list. --all: every format and number of rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from outrider.ops.triton.quant import Extras, quant_kernel, quant_linear
from outrider.ops.triton.repack import Codes, QuantWeight

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB a program may take
SPILLS = 256  # bytes of stack a thread
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
# kind: (codes, planes of a group, columns of a plane, offset, whole-row factor)
FORMATS = {
    "int4 g32": (Codes.INT4, 1, 32, False, False),
    "fp8": (Codes.FP8, 0, 32, False, True),
    "Q4_K": (Codes.UINT4, 1, 32, True, False),
    "int4 g128": (Codes.INT4, 4, 32, False, False),
    "int8 g128": (Codes.INT8, 4, 32, False, False),
    "nvfp4": (Codes.FP4, 1, 16, False, True),
    "Q6_K": (Codes.INT8, 1, 16, False, False),
}
SHORT = [("int4 g32", 1), ("int4 g32", 64), ("fp8", 16)]


class Stub:
    """As much of a driver as compiling asks for."""

    target = GPUTarget("cuda", 90, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_benchmarker(self) -> None:
        return None


def weight(kind: str, n: int, k: int) -> QuantWeight:
    codes, per, plane, lifted, whole = FORMATS[kind]
    planes = 32 // codes.bits
    chunks, tiles, pairs = -(-k // (planes * plane)), n // 64, (planes // per + 1) // 2 if per else 0

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    numbers = empty(tiles, chunks, pairs, 64) if per else None
    return QuantWeight(
        (n, k), codes, plane, per, empty(tiles, chunks, 64, plane), numbers, numbers if lifted else None,
        empty(n, dtype=torch.float32) if whole else None, half=lifted,
    )  # fmt: skip


def resources(kernel: object) -> tuple[int, int]:
    """Registers and stack bytes of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])  # type: ignore[attr-defined]
        file.flush()
        text = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    line = next(x for x in text.splitlines() if "REG:" in x)
    fields = dict(part.split(":") for part in line.split() if part.count(":") == 1)
    return int(fields["REG"]), int(fields["STACK"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    stub, last = Stub(), []
    driver.set_active(stub)
    run = JITFunction.run

    def warm(self: JITFunction, *a: object, grid: object, warmup: bool, **kw: object) -> object:
        last.append(run(self, *a, grid=grid, warmup=True, **kw))
        return last[-1]

    JITFunction.run = warm
    seen = torch.empty(1 << 16, dtype=torch.int32, device="meta")
    for arch, room in SHARED.items():
        stub.target = GPUTarget("cuda", arch, 32)
        quant_kernel.device_caches.clear()
        for kind, rows in [(f, r) for f in FORMATS for r in (1, 16, 32, 64)] if args.all else SHORT:
            x = torch.empty((rows, 5376), dtype=torch.bfloat16, device="meta")
            gated = Extras(act="gelu_tanh", gated=True) if rows == 1 else Extras()
            quant_linear(x, weight(kind, 21504, 5376), seen, gated, pdl=arch >= 90, shared=(room - 1) << 10)
            registers, stack = resources(last[-1])
            shared = last[-1].metadata.shared
            fits = shared <= room << 10 and stack <= SPILLS
            print(
                json.dumps(dict(sm=arch, kernel=f"{kind}, {rows} rows", registers=registers, stack=stack, shared=shared, fits=fits)),
                flush=True,
            )


if __name__ == "__main__":
    main()
