"""Compile every kernel a model needs for the H200 on a machine without a GPU, and show what each one takes.

    python benchmarks/gpu_compile.py google/gemma-4-E2B-it [--rows 1 5 17] [--context 1024]

The model runs on shape-only tensors; launches become compilations for sm_90. Prints registers, spills and shared memory:
a kernel that spills, or asks for more than 227 KB, would be slow or refused on the device.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from outrider.models import build
from outrider.models.config import DrafterConfig, ModelConfig
from outrider.models.gemma4_assistant import Gemma4Assistant
from outrider.models.known import KNOWN
from outrider.ops.triton import TritonOps
from outrider.types import KVView
from outrider.weights.names import tensor_plan

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class NoDevice:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_benchmarker(self) -> None:
        return None


SEEN: dict[int, tuple[str, object, float]] = {}


def compile_only() -> None:
    driver.set_active(NoDevice())
    run = JITFunction.run

    def warm(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> object:
        began = time.perf_counter()
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if id(kernel) not in SEEN:
            tile = " ".join(
                f"{k}={v}"
                for k, v in kwargs.items()
                if k in ("BM", "BN", "BK", "BQ", "D", "GATED", "SPLIT", "WINDOW", "num_warps", "num_stages")
            )
            SEEN[id(kernel)] = (f"{self.fn.__name__} {tile}", kernel, time.perf_counter() - began)
        return kernel

    JITFunction.run = warm


def shapes(config: ModelConfig | DrafterConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    out = {}
    for name, plan in tensor_plan(config).items():
        kind = dtype if plan.role in ("matrix", "embedding") else torch.int64 if plan.role == "index" else torch.float32
        out[name] = torch.empty(plan.shape, dtype=kind, device="meta")
    return out


def view(config: ModelConfig, batch: int, rows: int, context: int, page: int, dtype: torch.dtype) -> KVView:
    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    kv = [
        empty(batch * context // page, s.attn.kv_heads, page, s.attn.head_dim, dtype=dtype) if s.attn.writes else None
        for s in config.layers
    ]
    total = batch * rows
    return KVView(
        page, kv, kv, {g: empty(batch, context // page, dtype=torch.int32) for g in ("full", "sliding")}, empty(total, dtype=torch.int64),
        empty(total, dtype=torch.int64), empty(batch + 1, dtype=torch.int32), rows, context,
    )  # fmt: skip


def resources(kernel: object) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    line = next((x for x in text.splitlines() if "REG:" in x), "")
    fields = dict(part.split(":") for part in line.split() if part.count(":") == 1)
    ptx = kernel.asm["ptx"]
    mma = "wgmma" if "wgmma.mma" in ptx else "mma" if "mma.sync" in ptx else "-"
    return f"regs {fields.get('REG', '?'):>3} stack {fields.get('STACK', '?'):>4} shared {kernel.metadata.shared:>6} {mma}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 17])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--dump", help="folder for PTX files")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    compile_only()
    ops = TritonOps("meta", pdl=not args.no_pdl)
    for name in args.models:
        config = ModelConfig.from_hf(KNOWN[name])
        model = build(config, shapes(config, dtype), ops)
        for rows in args.rows:
            kv = view(config, args.batch, rows, args.context, 16, dtype)
            hidden = model.forward(torch.empty(kv.positions.shape, dtype=torch.int64, device="meta"), kv)
            logits = model.logits(hidden[: args.batch * rows])
            flags = torch.empty(kv.positions.shape, dtype=torch.bool, device="meta")
            ops.gumbel_argmax(logits, kv.positions, kv.positions, None, flags)
        draft = DrafterConfig.from_hf(KNOWN[name + "-assistant"])
        assistant = Gemma4Assistant(draft, shapes(draft, dtype), ops, model)
        kv = view(config, args.batch, 1, args.context, 16, dtype)
        hidden = torch.empty((args.batch, config.hidden), dtype=dtype, device="meta")
        g, _ = assistant.step(hidden, hidden, assistant.start(kv))
        assistant.candidates(g)
    total = 0.0
    for i, (title, kernel, seconds) in enumerate(SEEN.values()):
        total += seconds
        print(f"{seconds:5.1f} s  {resources(kernel)}  {title}")
        if args.dump:
            os.makedirs(args.dump, exist_ok=True)
            Path(args.dump, f"{i:02d}_{title.split()[0]}.ptx").write_text(kernel.asm["ptx"])
    print(f"{len(SEEN)} kernels, {total:.1f} s")


if __name__ == "__main__":
    main()
