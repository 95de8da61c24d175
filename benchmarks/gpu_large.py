# ruff: noqa: B023, E501
"""Full attention of long prompts, and 31B's products of 160 and 320 rows in the shapes they may take, on this GPU:

    PYTHONPATH=src python3 benchmarks/gpu_large.py [--sections prompts products]

Every shape must give the bits of the kernels that take few rows; a line with OTHER BITS names one that does not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch
from gpu_common import BF16, FAILED, attempt, begin, finish, graph_us, rand, say, view
from gpu_many import SPECS, pooled

from outrider.ops.triton import TritonOps, attention, long_prompts, tiles
from outrider.ops.triton.linear import product
from outrider.ops.triton.tiles import Shape, choose_tile, for_rows

FULL = {name: spec for name, spec in SPECS.items() if spec.window is None and spec.heads >= 16}


def differs(got: torch.Tensor, want: torch.Tensor, what: str) -> str:
    if torch.equal(got, want):
        return ""
    FAILED.append(what)
    return f" OTHER BITS {int((got != want).sum())}/{want.numel()}"


def attend() -> None:
    """Chunks that begin and end on both sides of where splits grow longer, then times."""
    for name, spec in FULL.items():
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
            was, now = (graph_us(lambda i: call(q, spec, kv, True), 2, 3) for call in (attention.attend, long_prompts.attend))
            say(f"{name} {batch} x {rows} rows at {context}: {was:.0f} us before, {now:.0f} in tiles of long prompts")


PRODUCTS = {  # (N, K, gated)
    "gate_up": (21504, 5376, True), "down": (5376, 21504, False), "qkv": (16384, 5376, False), "out": (5376, 8192, False), "head": (262144, 5376, False),
    "qkv, full": (18432, 5376, False), "out, full": (5376, 16384, False),
}  # fmt: skip
# rows, further rows, rows of weights, bk, stages, warps, fetched
TRIES = {
    160: [
        (128, 32, 128, 64, 5, 8, False), (128, 32, 128, 64, 3, 8, False), (128, 32, 128, 64, 3, 4, False), (128, 32, 128, 128, 2, 8, False),
        (128, 32, 64, 64, 4, 4, False), (64, 0, 128, 64, 4, 4, False), (64, 0, 128, 128, 4, 4, False), (64, 0, 128, 64, 6, 4, True), (64, 0, 128, 128, 3, 8, True),
        (128, 64, 128, 64, 4, 8, False), (64, 16, 128, 64, 5, 4, False), (64, 16, 256, 64, 4, 8, False), (64, 0, 256, 64, 4, 8, True),
    ],
    320: [
        (256, 64, 128, 64, 4, 8, False), (256, 64, 128, 64, 3, 8, False), (128, 32, 128, 64, 3, 8, False), (128, 32, 128, 64, 5, 8, False), (128, 64, 128, 64, 4, 8, False),
        (64, 0, 256, 64, 4, 8, True), (64, 0, 128, 64, 6, 4, True), (128, 0, 256, 64, 3, 8, True), (128, 32, 256, 64, 3, 8, False), (128, 32, 256, 64, 4, 16, False),
    ],
}  # fmt: skip


def products() -> None:
    ops = TritonOps("cuda")
    plan: dict[tuple[str, int], list[Shape]] = {}
    for name, (n, k, gated) in PRODUCTS.items():
        tile, sides = choose_tile(n, k, gated, 2), 2 if gated else 1
        for rows, tries in TRIES.items():
            some = [for_rows(tile, n, k, rows, gated)]
            for bm, more, wide, bk, stages, warps, fetched in tries:
                spans = tile.splits > 1
                if (bm + more + wide) * bk * 2 * stages > tiles.SHARED or (spans and fetched and sides == 2):
                    continue
                some.append(Shape(bm, wide // sides, bk, stages, warps, not fetched, more, spans and fetched, fetched))
            plan[name, rows] = list(dict.fromkeys(some))

    def run(name: str, x: torch.Tensor, w: torch.Tensor, shape: Shape | None) -> torch.Tensor:
        gated, head = PRODUCTS[name][2], name == "head"
        more: dict[str, Any] = dict(softcap=30.0, out_dtype=torch.float32) if head else {}
        return product(x, w, ops.seen, gated=gated, act="gelu_tanh" if gated else "", pdl=True, shape=shape, **more)

    weights = {
        name: [torch.empty((n * (2 if g else 1), k), dtype=BF16, device="cuda").normal_(0, k**-0.5) for _ in range(1 if n > 100_000 else 3)]
        for name, (n, k, g) in PRODUCTS.items()
    }
    inputs = {k: rand(320, k) for _, k, _ in PRODUCTS.values()}
    jobs: dict[Any, Callable[[], Any]] = {}
    for (name, rows), some in plan.items():
        n, k, gated = PRODUCTS[name]
        for shape in some:
            kind = (astuple(shape), gated, name == "head", choose_tile(n, k, gated, 2).splits)
            jobs.setdefault(kind, lambda name=name, k=k, rows=rows, shape=shape: run(name, inputs[k][:rows], weights[name][0], shape))
    say(f"compiling {len(jobs)} products")
    pooled(list(jobs.values()))
    for (name, rows), some in plan.items():
        n, k, gated = PRODUCTS[name]
        ws, x = weights[name], inputs[k]
        blas = graph_us(lambda i: torch.nn.functional.linear(x[:rows], ws[i % len(ws)]), 6, 4)
        alone = torch.cat([run(name, x[:1], ws[0], None), run(name, x[rows - 5 : rows], ws[0], None)])
        found = []
        for i, shape in enumerate(some):
            try:
                got = run(name, x[:rows], ws[0], shape)
                other = differs(torch.cat([got[:1], got[-5:]]), alone, f"{name} {rows} {astuple(shape)}")
                us = graph_us(lambda i: run(name, x[:rows], ws[i % len(ws)], shape), 6, 4)
                found.append((us, f"{us:.1f} {astuple(shape)}{' (now)' if i == 0 else ''}{other}"))
            except Exception as e:
                say(f"  {name} {rows} {astuple(shape)}: {type(e).__name__} {str(e)[:80]}")
        say(f"{name} {rows}: cuBLAS {blas:.1f} | " + " | ".join(line for _, line in sorted(found)[:6]) + f" | now {found[0][0]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    jobs = {"prompts": attend, "products": products}
    parser.add_argument("--sections", nargs="+", default=list(jobs))
    args = parser.parse_args()
    out = begin("runs/gpu_large")
    for section in args.sections:
        say(f"== {section}")
        attempt(section, jobs[section])
    finish(out / "large.json")


if __name__ == "__main__":
    main()
