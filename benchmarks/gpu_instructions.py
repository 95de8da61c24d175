"""Which bits of a quantised product hang on the matrix instruction: the same product by every tile, in float32, on a GPU.

    python benchmarks/gpu_instructions.py [--formats Q5_K int4]
    TRITON_INTERPRET=1 python benchmarks/gpu_instructions.py --formats Q5_1 --jobs 1      # the script itself, without a GPU

Two warps take Hopper's older instruction (mma.sync), four and eight its newer one (wgmma). x is even (normal), has outliers (one column
in a hundred 300 times as large), or is wide (exponents over 2^20). For each kind of x and each tile: how many of 8 x 2,048 numbers differ
from those of 16 tokens by four warps, and `again`: how many differ between two runs of the same kernel (a race).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from gpu_quant import made
from torch import Tensor

from outrider.ops.triton.quant import Extras, quant_linear
from outrider.ops.triton.quant_tiles import QuantTile, choose_quant_tile
from outrider.ops.triton.repack import QuantWeight, repack

CUDA = torch.cuda.is_available()
DEVICE, DTYPE, N, K = ("cuda", torch.bfloat16, 2048, 2048) if CUDA else ("cpu", torch.float32, 64, 256)
FORMATS = ("Q5_K", "Q5_1", "Q5_0", "Q4_K", "int4", "int4-g128", "Q6_K", "int8", "fp8", "nvfp4")


def inputs() -> dict[str, Tensor]:
    rng = torch.Generator(device=DEVICE).manual_seed(3)
    even = torch.randn((8, K), device=DEVICE, generator=rng)
    outliers = torch.where(torch.rand(K, device=DEVICE, generator=rng) < 0.01, 300.0, 1.0) * even
    wide = even * torch.exp2(20 * torch.rand((8, K), device=DEVICE, generator=rng) - 10)
    return {name: x.to(DTYPE) for name, x in dict(even=even, outliers=outliers, wide=wide).items()}


def tiles(w: QuantWeight) -> dict[str, tuple[QuantTile, int]]:
    base = replace(choose_quant_tile(w.padded, w.columns, w.bits), stages=2)
    few = {} if w.plane < 32 else {"8 by 2": (replace(base, warps=2), 8), "8 by 4": (base, 8)}
    if w.plane == 32 and w.bits == 4:
        few["8 by 2, 160 registers"] = (replace(base, warps=2, stages=3, registers=160), 8)
    return {**few, "16": (base, 16), "32": (base, 32), "64": (base, 64), "128": (replace(base, bn=128, warps=8), 128)}


def one(name: str) -> None:
    torch.manual_seed(1)
    w = repack(made(name, N, K, DEVICE))
    assert w is not None
    seen = torch.zeros(1 << 14, dtype=torch.int32, device=DEVICE)
    row: dict[str, object] = dict(format=name)

    def call(x: Tensor, tile: QuantTile, bm: int) -> Tensor:
        return quant_linear(x, w, seen, Extras(out_dtype=torch.float32), CUDA, tile, bm)

    for kind, x in inputs().items():
        want, found = call(x, *tiles(w)["16"]), {}
        for title, (tile, bm) in tiles(w).items():
            got, again = call(x, tile, bm), call(x, tile, bm)
            differ, twice = int((got != want).sum()), int((got != again).sum())
            off = float(((got - want).abs() / want.abs().amax(1, keepdim=True)).max())
            if differ or twice:
                found[title] = f"{differ} differ, by {off:.1e} of the largest" + (f"; {twice} again" if twice else "")
        row[kind] = found or "same"
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--jobs", type=int, default=16)
    args = parser.parse_args()
    if len(args.formats) == 1 or args.jobs == 1:
        for name in args.formats:
            one(name)
        return
    running = [subprocess.Popen([sys.executable, __file__, "--formats", name]) for name in args.formats]
    sys.exit(max(process.wait() for process in running))


if __name__ == "__main__":
    main()
