"""Tiles and spans of quantised products at few rows, on a GPU: what is in use, what else there is, and the same matrix in bfloat16.

    python benchmarks/gpu_quant_tiles.py [--sizes E2B E4B 12B] [--format int4] [--rows 1 5] [--jobs 16] [--shapes gate_up down]
    TRITON_INTERPRET=1 python benchmarks/gpu_quant_tiles.py --sizes dry --jobs 1     # the script itself, without a GPU

Compiled by several processes side by side, then timed by one alone: microseconds of a product in a CUDA graph over copies that no cache
holds. A line for each matrix: floor (bytes at 4.39 TB/s), bf16 (the dense kernel, its floor in brackets), used (the rule), and the best
variants as rows of a program x warps / spans / stages. Spans are part of the order of sums: one number for all rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from gpu_common import graph_us
from gpu_quant import BANDWIDTH, made
from torch import Tensor

from outrider.bench.gpu import SIZES
from outrider.models.config import ModelConfig
from outrider.models.known import KNOWN
from outrider.ops.triton.linear import product
from outrider.ops.triton.quant import Extras, quant_linear
from outrider.ops.triton.quant_tiles import QuantTile
from outrider.ops.triton.repack import QuantWeight, repack
from outrider.weights.names import tensor_plan

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
PROGRAMS = ((64, 2), (64, 4), (32, 2), (32, 1), (16, 1))  # rows of a program, warps


def shapes(sizes: list[str], parts: list[str]) -> list[tuple[str, int, int]]:
    """(where, N, K) of every matrix of the layers that is not tiny."""
    if sizes == ["dry"]:
        return [("dry.gate_up", 128, 512), ("dry.down", 64, 512)]
    found: dict[tuple[str, int, int], str] = {}
    for size in sizes:
        for name, plan in tensor_plan(ModelConfig.from_hf(KNOWN[SIZES[size]])).items():
            part = name.rpartition(".")[2]
            if part in parts and plan.shape[0] * plan.shape[1] >= 3 << 20:
                found.setdefault((part, *plan.shape), size)  # type: ignore[arg-type]
    return [(f"{size}.{part}", n, k) for (part, n, k), size in found.items()]


def variants(n: int, chunks: int) -> list[QuantTile]:
    out = []
    for bn, warps in PROGRAMS:
        for splits in (1, 2, 3, 4, 6, 8, 12, 16, 24):
            span = -(-chunks // splits)
            programs = -(-n // bn) * -(-chunks // span)
            if splits != -(-chunks // span) or not (90 if CUDA else 1) <= programs * warps // 2 <= 2700:
                continue
            for stages in (2, 4) if span > 2 else (2,):
                out.append(QuantTile(bn, splits, stages, warps=warps, registers=160 if (bn, warps) in ((64, 2), (32, 1)) else None))
    return out


def held(format: str, n: int, k: int) -> QuantWeight:
    weight = repack(made(format, n, k, DEVICE))
    assert weight is not None
    return weight


def call(x: Tensor, w: QuantWeight, seen: Tensor, gated: bool, tile: QuantTile | None) -> Tensor:
    extras = Extras(act="gelu_tanh", gated=True) if gated else Extras()
    return quant_linear(x, w, seen, extras, CUDA, tile, None if tile is None else 8)


def in_bf16(x: Tensor, w: Tensor, seen: Tensor, gated: bool) -> Tensor:
    return product(x, w, seen, act="gelu_tanh" if gated else "", gated=gated, pdl=CUDA)


def compile_some(args: argparse.Namespace, which: int) -> None:
    """Every jobs-th variant, launched once."""
    seen = torch.zeros(1 << 16, dtype=torch.int32, device=DEVICE)
    done = 0
    for where, n, k in shapes(args.sizes, args.shapes):
        w, gated, x = held(args.format, n, k), where.endswith("gate_up"), torch.zeros((1, k), dtype=DTYPE, device=DEVICE)
        for tile in (None, *variants(n, w.chunks)):
            done += 1
            if done % args.jobs == which:
                call(x, w, seen, gated, tile)
        if done % args.jobs == which:
            in_bf16(x, torch.zeros((n, k), dtype=DTYPE, device=DEVICE), seen, gated)


def show(tile: QuantTile) -> str:
    return f"{tile.bn}x{tile.warps}/{tile.splits}/{tile.stages}"


def microseconds(run: Callable[[Any], object], weights: Sequence[Any]) -> float:
    return round(graph_us(lambda i: run(weights[i]), len(weights), 4), 2)


def timed(where: str, n: int, k: int, args: argparse.Namespace, seen: Tensor) -> dict[str, object]:
    """The line of one matrix. Of more than one row only what was among the best at the first number of rows."""
    first, gated = held(args.format, n, k), where.endswith("gate_up")
    many = [first] + [replace(first, words=first.words.clone()) for _ in range(max(4, int(1.5e8 / first.nbytes)) if CUDA else 0)]
    dense = [torch.zeros((n, k), dtype=DTYPE, device=DEVICE) for _ in range(max(2, int(2e8 / (2 * n * k))) if CUDA else 1)]
    floors = [round(bytes / BANDWIDTH * 1e6, 1) for bytes in (first.nbytes, 2 * n * k)]
    row: dict[str, object] = dict(matrix=where, n=n, k=k, floor=floors[0], bf16_floor=floors[1])
    tiles = variants(n, first.chunks)
    for rows in args.rows:
        x = torch.randn((rows, k), device=DEVICE).to(DTYPE)
        want = call(x, first, seen, gated, None).float()
        found: list[tuple[float, QuantTile]] = []
        for tile in tiles:
            off = float((call(x, first, seen, gated, tile).float() - want).norm() / want.norm())
            found.append((microseconds(partial(run_tile, x, seen, gated, tile), many) if off < 1e-2 else float("inf"), tile))
        found.sort(key=lambda item: item[0])
        by_spans: dict[int, str] = {}
        for us, tile in found:
            by_spans.setdefault(tile.splits, f"{us} {show(tile)}")
        row[f"{rows} rows"] = dict(
            bf16=microseconds(partial(run_dense, x, seen, gated), dense), used=microseconds(partial(run_tile, x, seen, gated, None), many),
            best={show(tile): us for us, tile in found[:5]}, by_spans=by_spans,
        )  # fmt: skip
        tiles = [tile for _, tile in found[:10]]
    return row


def run_tile(x: Tensor, seen: Tensor, gated: bool, tile: QuantTile | None, w: QuantWeight) -> None:
    call(x, w, seen, gated, tile)


def run_dense(x: Tensor, seen: Tensor, gated: bool, w: Tensor) -> None:
    in_bf16(x, w, seen, gated)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["E2B", "E4B", "12B"])
    parser.add_argument("--shapes", nargs="+", default=["gate_up", "down", "qkv", "out"])
    parser.add_argument("--format", default="int4")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--compile", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile >= 0:
        compile_some(args, args.compile)
        return
    command = [sys.executable, *sys.argv]
    for process in [subprocess.Popen([*command, "--compile", str(i)]) for i in range(args.jobs)]:
        process.wait()
    print("compiled", flush=True)
    seen = torch.zeros(1 << 16, dtype=torch.int32, device=DEVICE)
    with torch.inference_mode():
        for where, n, k in shapes(args.sizes, args.shapes):
            print(json.dumps(timed(where, n, k, args, seen)), flush=True)


if __name__ == "__main__":
    main()
