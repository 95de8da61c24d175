# ruff: noqa: B023, E501
"""Products of 160 rows and more in the shapes they may take, beside cuBLAS; long prompts' attention; whole steps before and after. On this GPU:

    PYTHONPATH=src python3 benchmarks/gpu_wide.py [--sections products prompts models] [--only NAME] [--rows 160 320]

Every shape must give the bits that a row has alone; a line with OTHER BITS names one that does not. Whole cycles run without
`dealt`, with what is chosen now, and with the fastest shape of each product.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch
from gpu_common import BF16, begin, differs, graph_us, rand, say, sections, view
from gpu_many import SPECS, pooled

from outrider.bench.gpu import Rig
from outrider.ops.triton import TritonOps, attention, linear, long_prompts, tiles
from outrider.ops.triton.linear import product
from outrider.ops.triton.tiles import Shape, Tile, choose_tile, for_rows

PRODUCTS = {  # (N, K, gated)
    "gate_up": (21504, 5376, True), "down": (5376, 21504, False), "qkv": (16384, 5376, False), "qkv full": (18432, 5376, False),
    "out": (5376, 8192, False), "out full": (5376, 16384, False), "head": (262144, 5376, False),
    "E2B gate_up": (12288, 1536, True), "E2B down": (1536, 12288, False), "E2B out": (1536, 2048, False), "E2B head": (262144, 1536, False),
    "12B down": (3840, 15360, False), "26B qkv": (8192, 2816, False),
}  # fmt: skip
ROWS = {name: (160, 320) for name in PRODUCTS} | {
    "E2B gate_up": (320,),
    "E2B head": (160, 320),
    "12B down": (320, 640),
    "26B qkv": (320, 640),
}
# rows, further rows, rows of weights, stages, warps: beside what is chosen
TRIES: dict[tuple[str, int], list[tuple[int, int, int, int, int]]] = {
    ("qkv full", 160): [(128, 32, 256, 3, 8)],
    ("head", 160): [(128, 32, 128, 5, 8)],
    ("E2B down", 320): [(128, 32, 128, 6, 8)],
}
BEST: dict[tuple[int, int, bool, int], Shape] = {}  # (N, K, gated, rows)


def before(tile: Tile, n: int, k: int, rows: int, gated: bool, bytes_per: int = 2) -> Shape:
    """The shape without those of `dealt`."""
    if rows <= 128 or bytes_per != 2:
        return for_rows(tile, n, k, rows, gated, bytes_per)
    sides = 2 if gated else 1
    return min([*tiles._many(tile, n, k, rows, sides), *tiles._fetched(tile, n, k, rows, sides)], key=lambda option: option[0])[1]


def run(name: str, x: torch.Tensor, w: torch.Tensor, seen: torch.Tensor, shape: Shape | None) -> torch.Tensor:
    gated = PRODUCTS[name][2]
    more: dict[str, Any] = dict(softcap=30.0, out_dtype=torch.float32) if "head" in name else {}
    return product(x, w, seen, gated=gated, act="gelu_tanh" if gated else "", pdl=True, shape=shape, **more)


def products(only: list[str], some_rows: list[int]) -> None:
    ops = TritonOps("cuda")
    plan: dict[tuple[str, int], list[Shape]] = {}
    for name, (n, k, gated) in PRODUCTS.items():
        for rows in ROWS[name]:
            if (not only or name in only) and (not some_rows or rows in some_rows):
                shapes = [before(choose_tile(n, k, gated, 2), n, k, rows, gated), for_rows(choose_tile(n, k, gated, 2), n, k, rows, gated)]
                for bm, more, wide, stages, warps in TRIES.get((name, rows), []):
                    shapes.append(Shape(bm, wide // (2 if gated else 1), 64, stages, warps, True, more, False, True))
                plan[name, rows] = list(dict.fromkeys(shapes))
    names = list(dict.fromkeys(name for name, _ in plan))
    jobs: dict[Any, Callable[[], Any]] = {}
    for (name, rows), shapes in plan.items():
        n, k, gated = PRODUCTS[name]
        tile = choose_tile(n, k, gated, 2)
        for shape in shapes:
            count = -(-rows // (shape.bm + shape.more)) * -(-n // shape.bn)
            kind = (astuple(shape), gated, "head" in name, tile.splits, count % min(count, 132) > 0, n * k > 12 << 20)
            # Compiled, not launched: a kernel that fails must fail where it is tried.
            jobs.setdefault(kind, lambda name=name, rows=rows, shape=shape: compile_one(name, rows, shape))
        for few in (1, 16):
            jobs.setdefault((name, few), lambda name=name, few=few: compile_one(name, few, None))
    say(f"compiling {len(jobs)} products")
    pooled(list(jobs.values()))
    say("compiled")
    for name in names:
        n, k, gated = PRODUCTS[name]
        size = n * k * (4 if gated else 2)
        ws = [rand(n * (2 if gated else 1), k, scale=k**-0.5) if size < 2e9 else
              torch.empty((n, k), dtype=BF16, device="cuda").normal_(0, k**-0.5) for _ in range(max(1, min(6, int(400e6 // size))))]  # fmt: skip
        for rows in [r for at, r in plan if at == name]:
            x = rand(rows, k)
            want = torch.cat([run(name, x[:16], ws[0], ops.seen, None), run(name, x[rows - 16 :], ws[0], ops.seen, None)])
            blas = graph_us(lambda i: torch.nn.functional.linear(x, ws[i % len(ws)]), 6, 4)
            found, first = [], run(name, x, ws[0], ops.seen, plan[name, rows][0])
            for at, shape in enumerate(plan[name, rows]):
                try:
                    whole = run(name, x, ws[0], ops.seen, shape)
                    other = differs(torch.cat([whole[:16], whole[-16:]]), want, f"{name} {rows} {astuple(shape)}")
                    other = other or differs(whole, first, f"{name} {rows} {astuple(shape)} inner rows")
                    us = min(graph_us(lambda i: run(name, x, ws[i % len(ws)], ops.seen, shape), 6, 6) for _ in range(2))
                    left = int(ops.seen.abs().sum())
                    found.append(
                        (
                            us,
                            shape,
                            f"{us:.1f} {astuple(shape)[:7]}{' (before)' if at == 0 else ' (now)' if at == 1 else ''}{' dealt' if shape.fetched and shape.more else ''}{other}{' COUNTERS LEFT' if left else ''}",
                        )
                    )
                    if not other and not left and us < min(f[0] for f in found[:1]) * 0.99:
                        best = BEST.get((n, k, gated, rows))
                        if best is None or us < min(f[0] for f in found if f[1] == best):
                            BEST[n, k, gated, rows] = shape
                except Exception as e:
                    say(f"  {name} {rows} {astuple(shape)}: {type(e).__name__} {str(e)[:120]}")
            floor = max(size / 4.39e6, 2 * rows * n * k * (2 if gated else 1) / 792e6)
            say(
                f"{name} {rows}: floor {floor:.1f} cuBLAS {blas:.1f} | "
                + " | ".join(line for _, _, line in sorted(found, key=lambda f: f[0]))
            )
        ws.clear()


def compile_one(name: str, rows: int, shape: Shape | None) -> None:
    n, k, gated = PRODUCTS[name]

    def shell(*size: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    head = "head" in name
    launch = linear._call(
        shell(rows, k), shell(n * (2 if gated else 1), k), shell(1 << 16, dtype=torch.int32), bias=None, mul=None, act="gelu_tanh" if gated else "",
        gated=gated, softcap=30.0 if head else None, out_dtype=torch.float32 if head else BF16, pdl=True, tile=None, shape=shape, shared=226 << 10,
    )  # fmt: skip
    launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)


def attend() -> None:
    """Long prompts: chunks that begin and end on both sides of where splits grow longer, then times."""
    for name, spec in {name: spec for name, spec in SPECS.items() if spec.window is None and spec.heads >= 16}.items():
        for spans in (
            [(1000 + 7 * i, 1 + i % 17) for i in range(17)],
            [(0, 300), (1024, 1024), (900, 200), (8000, 192), (5, 0), (8183, 9)],
        ):
            kv = view(spec, spans)
            for scale in (0.2, 2.0):
                q = rand(sum(c for _, c in spans), spec.heads * spec.head_dim, scale=scale)
                want = attention.attend(q, spec, kv, True, None, attention.Shape(False, 16, 8))
                say(f"{name} q x {scale}: {differs(long_prompts.attend(q, spec, kv, True), want, f'{name} {scale}') or 'same'}")
        for batch, rows, context in ((1, 8192, 8192), (2, 4096, 4096), (1, 2048, 8192), (1, 2048, 4096)):
            kv = view(spec, [(context - rows, rows)] * batch)
            q = rand(batch * rows, spec.heads * spec.head_dim)
            before, after = attention.attend(q, spec, kv, True), long_prompts.attend(q, spec, kv, True)
            other = differs(after, before, f"{name} {batch} x {rows} at {context}")
            was, now = (graph_us(lambda i: call(q, spec, kv, True), 2, 3) for call in (attention.attend, long_prompts.attend))
            say(f"{name} {batch} x {rows} rows at {context}: {was:.0f} us before, {now:.0f} in tiles of long prompts{other}")


def models(sizes: dict[str, tuple[int, ...]]) -> None:
    """Cycles of K = 4 and, of 31B, its pass over 8 x 1,024: without the shapes of `dealt`, as chosen now, and with the fastest shapes."""
    plain = linear.for_rows

    def best(tile: Tile, n: int, k: int, rows: int, gated: bool, bytes_per: int = 2) -> Shape:
        return BEST.get((n, k, gated, rows)) or plain(tile, n, k, rows, gated, bytes_per)

    for key, shape in BEST.items():
        say(f"    fastest of {key}: {astuple(shape)}")
    for size, batches in sizes.items():
        rig = Rig.of(size, slots=max(batches), context=1088)
        seqs = rig.open(max(batches), 1024, 32)
        for batch in batches:
            runs = []
            for choice in (before, plain, best):
                linear.for_rows = choice
                runs.append(rig.graph(seqs[:batch], 4, 1024, 1088))
            for _ in range(2):
                say(f"{size} K = 4, {batch} sequences: before, now, best " + ", ".join(f"{run.time(12, 3):.2f}" for run in runs))
            logits = [run.logits.clone() for run in runs]
            say(
                f"  logits{differs(logits[1], logits[0], f'{size} {batch}') or differs(logits[2], logits[0], f'{size} {batch} best') or ' the same'}"
            )
            runs.clear()
            del logits
        linear.for_rows = plain
        rig.free()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", default=["products", "prompts", "models"])
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--rows", nargs="+", type=int, default=[])
    args = parser.parse_args()
    out = begin("runs/gpu_wide")
    jobs: dict[str, Callable[[], None]] = {
        "products": lambda: products(args.only, args.rows),
        "prompts": attend,
        "models": lambda: models({"31B": (32, 64), "E2B": (32, 64, 128)}),
    }
    sections(args.sections, jobs, out / "wide.json")


if __name__ == "__main__":
    main()
