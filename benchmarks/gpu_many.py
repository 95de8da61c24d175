# ruff: noqa: E501, B023, I001
"""Many rows on this GPU: bits and rates of the shapes a pass may take, products beside cuBLAS, attention and experts beside their bytes.

    python benchmarks/gpu_many.py [--out FOLDER] [--sections recut products attention experts models] [--quick] [--sizes 31B] [--tables]

Every shape must give a row the bits it has alone; a line with OTHER BITS names one that does not. What is fastest here belongs into
tiles.for_rows, attention.choose_shape and moe.grouping. --quick: only what these choose now.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from gpu_common import BF16, FAILED, RESULTS, begin, graph_us, kernel_table, kernels, rand, say, sections, view, weight_shapes  # fmt: skip

from outrider.bench.gpu import H200_BYTES_PER_S, Rig, time_ms
from outrider.cache.store import last_rows
from outrider.engine.capture import Graph
from outrider.ops.triton import TritonOps, attention, moe
from outrider.ops.triton.linear import product
from outrider.ops.triton.routing import list_pairs
from outrider.ops.triton.tiles import SHARED, Shape, Tile, choose_tile, for_rows
from outrider.types import AttnSpec

QUICK = [False]
OUT = [Path()]
PRODUCTS = {  # (N, K, gated)
    "31B gate_up": (21504, 5376, True), "31B down": (5376, 21504, False), "31B qkv": (16384, 5376, False), "31B out": (5376, 8192, False),
    "31B head": (262144, 5376, False), "E2B gate_up": (12288, 1536, True), "E2B down": (1536, 12288, False), "E2B qkv": (2560, 1536, False),
    "E2B out": (1536, 2048, False), "26B qkv": (8192, 2816, False), "26B gate_up": (2112, 2816, True), "26B router": (128, 2816, False),
}  # fmt: skip
ROWS = (64, 128, 320, 640, 2048)


def pooled(jobs: list[Callable[[], Any]]) -> None:
    with ThreadPoolExecutor(16) as pool:
        for future in [pool.submit(job) for job in jobs]:
            error = future.exception()
            if error is not None:
                say(f"  {type(error).__name__}: {str(error)[:160]}")
    torch.cuda.synchronize()


def shapes(rows: int, n: int, gated: bool, splits: int) -> list[Shape]:
    """rows, further rows, rows of weights, bk, stages, warps."""
    by_rows = {
        64: ((64, 0, 64, 64, 6, 4), (64, 0, 128, 64, 5, 4), (64, 0, 256, 64, 4, 8), (64, 0, 64, 128, 4, 4)),
        128: ((128, 0, 64, 64, 5, 4), (64, 0, 64, 64, 6, 4), (64, 0, 128, 64, 5, 4), (128, 0, 128, 64, 5, 8), (128, 0, 256, 64, 4, 8)),
    }
    many = ((128, 0, 128, 64, 4, 8), (256, 0, 128, 64, 4, 8), (128, 0, 256, 64, 4, 8), (64, 0, 256, 64, 4, 8), (64, 0, 128, 64, 5, 4),
            (64, 0, 64, 64, 6, 4), (256, 64, 128, 64, 3, 8), (256, 64, 128, 64, 4, 8), (128, 64, 128, 64, 4, 8), (256, 64, 64, 64, 4, 4))  # fmt: skip
    out = []
    for bm, more, wide, bk, stages, warps in by_rows.get(rows, many):
        if (wide > 64 and n * (2 if gated else 1) < wide) or (more and (splits > 1 or rows not in (320, 640))):
            continue
        for folded in (False, True) if splits > 1 else (False,):
            tiles = -(-rows // bm) * -(-n * (2 if gated else 1) // wide)
            if (not folded and splits > 1 and tiles > 264) or (folded and tiles < 40) or (folded and bm * wide > 16384):
                continue
            out.append(
                Shape(bm, wide // 2 if gated else wide, bk, min(stages, SHARED // ((bm + more + wide) * bk * 2)), warps, True, more, folded)
            )
    return out


def products() -> None:
    ops = TritonOps("cuda")
    plan: dict[tuple[str, int], list[Shape]] = {}
    for name, (n, k, gated) in PRODUCTS.items():
        tile = choose_tile(n, k, gated, 2)
        for rows in (64, 320) if name == "31B head" else ROWS:
            now = for_rows(tile, n, k, rows, gated)
            plan[name, rows] = [now] if QUICK[0] else list(dict.fromkeys((now, *shapes(rows, n, gated, tile.splits))))

    def weights(name: str, most: int = 8) -> list[torch.Tensor]:
        n, k, gated = PRODUCTS[name]
        size = n * k * (4 if gated else 2)
        return [
            torch.empty((n * (2 if gated else 1), k), dtype=BF16, device="cuda").normal_(0, k**-0.5)
            for _ in range(max(1, min(most, int(300e6 // size))))
        ]

    def run(name: str, x: torch.Tensor, w: torch.Tensor, shape: Shape | None, tile: Tile | None = None) -> torch.Tensor:
        gated = PRODUCTS[name][2]
        return product(x, w, ops.seen, gated=gated, act="gelu_tanh" if gated else "", pdl=True, shape=shape, tile=tile)

    wanted: dict[Any, Any] = {}
    for (name, rows), tries in plan.items():
        n, k, gated = PRODUCTS[name]
        tile = choose_tile(n, k, gated, 2)
        for shape in tries:
            wanted.setdefault((astuple(shape), gated, tile.splits, n * k * 2 >= 24 << 20, k % 128), (name, rows, shape))

    def compile_one(name: str, rows: int, shape: Shape | None) -> None:
        n, k, gated = PRODUCTS[name]
        run(
            name,
            torch.zeros((rows, k), dtype=BF16, device="cuda"),
            torch.empty((n * (2 if gated else 1), k), dtype=BF16, device="cuda"),
            shape,
        )

    jobs = [*wanted.values(), *((name, rows, None) for name in PRODUCTS for rows in (1, 17))]
    say(f"compiling {len(jobs)} products")
    pooled([lambda j=j: compile_one(*j) for j in jobs])
    say(
        "product | rows: cuBLAS us (TFLOP/s) | share of its rate and us of each shape (bm, bn, bk, stages, warps, turned, folded), best first"
    )
    for name, (n, k, gated) in PRODUCTS.items():
        ws, tile = weights(name), choose_tile(n, k, gated, 2)
        x = rand(2048, k)
        alone = torch.cat([run(name, x[i : i + 1], ws[0], None) for i in (0, 1)] + [run(name, x[2:18], ws[0], None)])
        few = {m: graph_us(lambda i: run(name, x[:m], ws[i % len(ws)], None), 8, 4) for m in (1, 16)}
        floor = n * k * (4 if gated else 2) / H200_BYTES_PER_S * 1e6
        say(
            f"{name} {n}x{k} splits {tile.splits} {'turned' if tile.turned else 'unturned'}: 1 row {few[1]:.1f} us, 16 rows {few[16]:.1f}, floor {floor:.1f}"
        )
        wide = run(name, x[:18], ws[0], None)
        if not torch.equal(wide, alone):
            say(f"  OTHER BITS at 18 rows ({int((wide != alone).sum())} of {alone.numel()})")
        for rows in (64, 320) if name == "31B head" else ROWS:
            blas = graph_us(lambda i: torch.nn.functional.linear(x[:rows], ws[i % len(ws)]), 6, 4)
            flops = 2 * rows * n * k * (2 if gated else 1)
            found = []
            for shape in plan[name, rows]:
                try:
                    got = run(name, x[:rows], ws[0], shape)[:18]
                    other = "" if torch.equal(got, alone) else f" OTHER BITS {int((got != alone).sum())}/{alone.numel()}"
                    us = graph_us(lambda i: run(name, x[:rows], ws[i % len(ws)], shape), 6, 4)
                    found.append((us, f"{100 * blas / us:.0f}% {us:.1f} {astuple(shape)}{other}"))
                    if other:
                        FAILED.append(f"{name} {rows} {astuple(shape)}")
                except Exception as e:
                    say(f"  {name} {rows} {astuple(shape)}: {type(e).__name__} {str(e)[:80]}")
            found.sort()
            now = for_rows(tile, n, k, rows, gated)
            chosen = next((i for i, f in enumerate(found) if str(astuple(now)) in f[1]), -1)
            RESULTS.setdefault("products", {})[f"{name} {rows}"] = {"cublas_us": blas, "chosen": chosen, "found": found}
            say(f"  {rows}: {blas:.1f} ({flops / blas * 1e-6:.0f}) | chosen is no. {chosen} | {' | '.join(f[1] for f in found[:3])}")
        ws.clear()


def recut() -> None:
    """Other cuts of the target's weights: for every number of spans the best tile at one row, and what it leaves to many rows."""
    ops = TritonOps("cuda")
    extra = lambda g: dict(gated=g, act="gelu_tanh" if g else "", pdl=True)  # noqa: E731
    table = {s: where for s, where in weight_shapes().items() if "assistant" not in where}
    plan: dict[Any, dict[int, list[Tile]]] = {}
    for (n, k, gated), _ in table.items():
        now, sides = choose_tile(n, k, gated, 2), 2 if gated else 1
        if now.splits == 1 and not gated:
            continue
        for splits in sorted({1, 2, 3, 4, now.splits}):
            if splits > now.splits or k // splits < 256:
                continue
            tiles = [now] if splits == now.splits else []
            for bn, bk, turned in (
                (64, 64, True),
                (64, 128, True),
                (32, 64, True),
                (32, 128, True),
                (16, 128, False),
                (16, 256, False),
                (32, 128, False),
                (64, 64, False),
            ):
                programs = -(-n // bn) * splits
                if (
                    (turned and bn * sides < 64)
                    or (gated and bn * sides > 128)
                    or (not gated and bn == 32 and turned)
                    or programs < 60
                    or programs > 3000
                ):
                    continue
                each = min(4, max(1, -(-programs // 132)))
                stages = max(2, min(8, SHARED // each // ((16 + bn * sides) * bk * 2), -(-k // splits // bk) + 1))
                tiles.append(Tile(bn, bk, splits, stages, turned))
            if tiles:
                plan.setdefault((n, k, gated), {})[splits] = tiles
    wides = {
        64: (Shape(64, 64, 64, 6), Shape(64, 128, 64, 5)),
        320: (Shape(64, 64, 64, 6), Shape(64, 128, 64, 5), Shape(128, 128, 64, 4, 8), Shape(64, 256, 64, 4, 8)),
        2048: (Shape(128, 128, 64, 4, 8), Shape(256, 128, 64, 4, 8), Shape(128, 256, 64, 4, 8)),
    }
    later = [(rows, w, folded) for rows, ws in wides.items() for w in ws for folded in (False, True)]

    def sensible(rows: int, w: Shape, folded: bool, n: int, splits: int, sides: int) -> bool:
        tiles = -(-rows // w.bm) * -(-n * sides // w.bn)
        return (folded and splits > 1 and tiles >= 40 and w.bm * w.bn <= 16384) or (not folded and (splits == 1 or tiles <= 264))

    def fit(w: Shape, folded: bool, sides: int) -> Shape:
        return replace(w, bn=w.bn // sides, folded=folded)

    jobs: dict[Any, Any] = {}
    for (n, k, gated), by in plan.items():
        for splits, tiles in by.items():
            late = n * k * (4 if gated else 2) >= 24 << 20
            for t in tiles:
                jobs.setdefault((1, replace(t, many=None), gated, late), (1, n, k, gated, t, None))
            if not gated:
                for rows, w, folded in later:
                    if sensible(rows, w, folded, n, splits, 1):
                        jobs.setdefault((w, folded, splits, late), (rows, n, k, gated, tiles[0], fit(w, folded, 1)))

    def compile_one(rows: int, n: int, k: int, gated: bool, t: Tile, shape: Shape | None) -> None:
        w = torch.empty((n * (2 if gated else 1), k), dtype=BF16, device="cuda")
        product(torch.zeros((rows, k), dtype=BF16, device="cuda"), w, ops.seen, **extra(gated), tile=t, shape=shape)

    say(f"compiling {len(jobs)} cuts")
    pooled([lambda j=j: compile_one(*j) for j in jobs.values()])
    say("weight: by spans, 1 row and 16 rows us (bn, bk, splits, stages, turned) ; us at 64, 320, 2048 rows")
    for (n, k, gated), by in plan.items():
        size = n * k * (4 if gated else 2)
        ws = [rand(n * (2 if gated else 1), k, scale=k**-0.5) for _ in range(max(1, min(16, int(200e6 // size))))]
        x = rand(2048, k)
        line = []
        for splits, tiles in by.items():
            found = []
            for t in tiles:
                try:
                    found.append((graph_us(lambda i: product(x[:1], ws[i % len(ws)], ops.seen, **extra(gated), tile=t), 16, 3), t))
                except Exception as e:
                    say(f"  {t}: {str(e)[:80]}")
            found.sort(key=lambda f: f[0])
            if not found:
                continue
            u16 = graph_us(lambda i: product(x[:16], ws[i % len(ws)], ops.seen, **extra(gated), tile=found[0][1]), 16, 3)
            after = []
            for rows, shapes_ in wides.items() if not gated else ():
                best = [
                    graph_us(lambda i: product(x[:rows], ws[i % len(ws)], ops.seen, tile=found[0][1], shape=fit(w, f, 1), pdl=True), 6, 3)
                    for w in shapes_ for f in (False, True) if sensible(rows, w, f, n, splits, 1)
                ]  # fmt: skip
                after.append(f"{min(best):.1f}" if best else "-")
            second = f" then {found[1][0]:.2f} {astuple(found[1][1])[:5]}" if len(found) > 1 else ""
            line.append(f"{found[0][0]:.2f} {u16:.2f} {astuple(found[0][1])[:5]}{second} ; {' '.join(after)}")
        now = choose_tile(n, k, gated, 2)
        RESULTS.setdefault("recut", {})[f"{n}x{k}{'g' if gated else ''}"] = line
        say(f"{table[n, k, gated]} {n}x{k} now {astuple(now)[:5]}")
        for part in line:
            print("     ", part)
        ws.clear()


SPECS = {
    "31B sliding": AttnSpec(32, 16, 256, 0, True, window=1024), "31B full": AttnSpec(32, 4, 512, 0, True),
    "E2B sliding": AttnSpec(8, 1, 256, 0, True, window=512), "E2B full": AttnSpec(8, 1, 512, 0, True),
    "26B sliding": AttnSpec(16, 8, 256, 0, True, window=1024), "26B full": AttnSpec(16, 2, 512, 0, True),
}  # fmt: skip


def attention_shapes(spec: AttnSpec, rows: int, batch: int) -> list[attention.Shape]:
    packed = rows * spec.heads // spec.kv_heads
    cut = attention.choose_cut(spec, BF16)
    out = []
    for bq, warps, stages in ((16, 4, 2), (16, 8, 2), (32, 4, 2), (32, 8, 2), (64, 4, 2), (64, 8, 2), (16, 4, 3)):
        if (
            (bq > 16 and packed * 2 <= bq)
            or (bq == 16 and packed > 200)
            or (spec.head_dim > 256 and bq * 8 > 64 * warps)
            or (bq == 64 and cut.bn == 64 and spec.head_dim > 256)
        ):
            continue
        programs = batch * spec.kv_heads * -(-packed // bq)
        if rows <= 64 and stages == 2:
            out += [
                attention.Shape(True, bq, warps, stages, run)
                for run in ((1, 2, 4, 8) if programs >= 8 and bq == (16 if packed <= 16 else 32) else (1,))
            ]
        if programs >= 48:
            out.append(attention.Shape(False, bq, warps, stages))
    return out


def attend() -> None:
    cases = [(1, 1, 1024), (1, 5, 1024), (8, 1, 1024), (8, 5, 1024), (32, 1, 1024), (64, 1, 1024), (64, 5, 1024)]
    plan: list[tuple[str, int, int, int]] = [(name, *case) for name in SPECS for case in cases]
    plan += [
        ("E2B full", 1, 1, 32768),
        ("E2B full", 8, 1, 32768),
        ("E2B full", 8, 5, 32768),
        ("31B full", 8, 5, 32768),
        ("E2B full", 1, 2048, 32768),
    ]
    wanted: dict[Any, Any] = {}
    views: dict[Any, Any] = {}
    tries: dict[Any, list[attention.Shape]] = {}
    for name, batch, rows, context in plan:
        spec = SPECS[name]
        cut = attention.choose_cut(spec, BF16)
        shell = view(AttnSpec(1, 1, 8, 0, True), [(context - rows, rows)])
        now = attention.choose_shape(spec, cut, shell, batch, BF16)
        tries[name, batch, rows, context] = [now] if QUICK[0] else list(dict.fromkeys((now, *attention_shapes(spec, rows, batch))))
        for shape in tries[name, batch, rows, context]:
            wanted.setdefault((name, shape), (spec, rows, shape))

    def compile_one(spec: AttnSpec, rows: int, shape: attention.Shape) -> None:
        rows = min(rows, 64)
        attention.attend(rand(rows, spec.heads * spec.head_dim), spec, view(spec, [(128, rows)]), True, None, shape)

    say(f"compiling {len(wanted)} attention shapes")
    pooled([lambda j=j: compile_one(*j) for j in wanted.values()])
    say("attention, batch x rows @ context: floor us (bytes, or 800 TFLOP/s) | us of each shape (split, bq, warps, stages), best first")
    for name, batch, rows, context in plan:
        spec = SPECS[name]
        if (spec.kv_heads, spec.head_dim, batch, context) not in views:
            views.clear()
            views[spec.kv_heads, spec.head_dim, batch, context] = view(spec, [(context - 1, 1)] * batch)
        base = views[spec.kv_heads, spec.head_dim, batch, context]
        at = torch.arange(context - rows, context, device="cuda").repeat(batch)
        kv = type(base)(
            16, base.keys, base.values, base.tables, at, torch.arange(batch, device="cuda").repeat_interleave(rows),
            (torch.arange(batch + 1, device="cuda") * rows).to(torch.int32), rows, context,
        )  # fmt: skip
        q = rand(batch * rows, spec.heads * spec.head_dim, scale=spec.head_dim**-0.5)
        seen = context if spec.window is None else min(context, spec.window + rows - 1)
        floor = batch * seen * spec.kv_heads * spec.head_dim * 4 / H200_BYTES_PER_S * 1e6
        area = sum(min(p + 1, spec.window or p + 1) for p in range(context - rows, context))
        floor = max(floor, 4 * batch * spec.heads * spec.head_dim * area / 800e6)
        one = type(base)(
            16, base.keys, base.values, {g: t[:1] for g, t in base.tables.items()}, at[rows - 1 : rows],
            torch.zeros(1, dtype=torch.int64, device="cuda"), torch.tensor([0, 1], dtype=torch.int32, device="cuda"), 1, context,
        )  # fmt: skip
        alone = attention.attend(q[rows - 1 : rows], spec, one, True)
        found = []
        for shape in tries[name, batch, rows, context]:
            try:
                got = attention.attend(q, spec, kv, True, None, shape)
                other = (
                    ""
                    if torch.equal(got[rows - 1 : rows], alone)
                    else f" OTHER BITS {int((got[rows - 1] != alone[0]).sum())}/{alone.numel()}"
                )
                us = graph_us(lambda i: attention.attend(q, spec, kv, True, None, shape), 24 if rows < 100 else 3, 3)
                found.append((us, f"{us:.1f} {astuple(shape)}{other}"))
                if other:
                    FAILED.append(f"{name} {batch}x{rows} {astuple(shape)}")
                del got
            except Exception as e:
                say(f"  {name} {batch}x{rows} {astuple(shape)}: {type(e).__name__} {str(e)[:80]}")
        now, found = tries[name, batch, rows, context][0], sorted(found)
        RESULTS.setdefault("attention", {})[f"{name} {batch}x{rows}@{context}"] = {"floor_us": floor, "found": found}
        split = next((f[1] for f in found if "(True" in f[1]), "-")
        say(
            f"{name} {batch}x{rows}@{context}: floor {floor:.1f} | now {next((f[0] for f in found if str(astuple(now)) in f[1]), -1):.1f} | {' | '.join(f[1] for f in found[:3])} | split {split}"
        )


def experts() -> None:
    E, H, I, TOP = 128, 2816, 704, 8
    sets = [(rand(E, 2 * I, H, scale=0.02), rand(E, H, I, scale=0.04)) for _ in range(2)]
    scale = torch.rand(E, device="cuda") + 0.5
    options = {
        16: [(16, 64, 6, 4), (16, 64, 8, 4), (16, 128, 5, 4), (16, 128, 4, 8)], 32: [(32, 64, 6, 4), (32, 128, 5, 4)],
        64: [(64, 64, 6, 4), (64, 128, 4, 4), (64, 128, 4, 8)], 128: [(128, 64, 4, 4), (128, 128, 4, 8), (128, 128, 3, 4), (128, 256, 3, 8), (64, 128, 4, 4)],
    }  # fmt: skip
    of = {1: (16,), 8: (16,), 16: (16,), 64: (16, 32), 320: (16, 32, 64), 1024: (64, 128), 2048: (64, 128)}
    now = lambda rows: (moe.grouping(rows * TOP, E),) * 2  # noqa: E731
    tries = {
        r: [now(r)]
        if QUICK[0]
        else list(dict.fromkeys((now(r), *((moe.Grouping(*a), moe.Grouping(*a)) for s in sizes for a in options[s]))))
        for r, sizes in of.items()
    }
    z, x = torch.randn((2048, E), device="cuda"), rand(2048, H)

    def run(rows: int, cut: Any, i: int) -> torch.Tensor:
        return moe.experts(list_pairs(z[:rows], scale, TOP, True), x[:rows], *sets[i % 2], "gelu_tanh", True, cut=cut)

    wanted = {(cut, rows == 1): (rows, cut) for rows, cuts in tries.items() for cut in cuts}
    say(f"compiling {len(wanted)} groupings")
    pooled([lambda j=j: run(*j, 0) for j in wanted.values()])
    alone = moe.experts(list_pairs(z[:1], scale, TOP, True), x[:1], *sets[0], "gelu_tanh", True)
    for rows, cuts in tries.items():
        busy = int(z[:rows].topk(TOP, -1).indices.unique().numel())
        floor = max(busy * 3 * H * I * 2 / H200_BYTES_PER_S * 1e6, rows * TOP * 6 * H * I / 800e6)
        found = []
        for cut in cuts:
            try:
                other = "" if torch.equal(run(rows, cut, 0)[:1], alone) else " OTHER BITS"
                us = graph_us(lambda i: run(rows, cut, i), 6, 4)
                found.append((us, f"{us:.1f} {astuple(cut[0])}{other}"))
                if other:
                    FAILED.append(f"experts {rows} {cut}")
            except Exception as e:
                say(f"  experts {rows} {cut}: {type(e).__name__} {str(e)[:80]}")
        found.sort()
        RESULTS.setdefault("experts", {})[rows] = {"floor_us": floor, "found": found}
        say(f"experts, {rows} rows, {busy} busy: floor {floor:.1f} us | {' | '.join(f[1] for f in found[:4])}")


LAYERS = {"E2B": 10, "E4B": 12, "12B": 6, "26B-A4B": 6, "31B": 6}
BATCHES = {"E2B": (1, 8, 32, 64, 128), "26B-A4B": (1, 8, 32, 64), "31B": (1, 8, 32, 64)}


def packed(rig: Rig, seqs: list[Any], count: int, whole: bool = False) -> Callable[[], torch.Tensor]:
    """A pass over `count` prompt tokens of each sequence, and the logits of the last ones. whole: all rows go through all layers."""
    batch = len(seqs)
    at = torch.arange(count, device="cuda").repeat(batch)
    kv = rig.store.view(
        torch.tensor([q.slot for q in seqs], device="cuda"), at, torch.arange(batch, device="cuda").repeat_interleave(count),
        (torch.arange(batch + 1, device="cuda") * count).to(torch.int32), count, count,
    )  # fmt: skip
    ids = torch.randint(3, 9999, (batch * count,), device="cuda")
    last = last_rows(kv, range(batch))
    if whole:
        return lambda: rig.model.logits(rig.model.forward(ids, kv).hidden[last.rows])
    return lambda: rig.model.logits(rig.model.forward(ids, kv, (), last).hidden)


def models(sizes: list[str], tables: bool) -> None:
    """Graph-level milliseconds of plain steps, cycles and packed prompts; logits alone against those in company."""
    for size in sizes:
        slots = max(BATCHES[size])
        shallow = Rig.of(size, LAYERS[size], slots=slots, context=1088)
        seqs = shallow.open(slots, 1024, 32)

        def warm(batch: int, k: int) -> None:
            with torch.inference_mode():
                if k < 0:
                    packed(shallow, seqs[:2], 1024)()
                else:
                    shallow.graph(seqs[:batch], k, 1024, 1088, eager=True).graph.replay()

        pooled([lambda b=b, k=k: warm(b, k) for b in BATCHES[size] for k in (4, 0)] + [lambda: warm(2, -1)])
        shallow.free()
        say(f"{size}: compiled")
        rig = Rig.of(size, slots=slots, context=1088)
        seqs = rig.open(slots, 1024, 32)
        first, row = None, {}
        for batch in BATCHES[size]:
            run = rig.graph(seqs[:batch], 0, 1024, 1088)
            row[f"{batch} plain"] = run.time(10)
            logits = run.logits[0].clone()
            first = logits if first is None else first
            cycle = rig.graph(seqs[:batch], 4, 1024, 1088)
            row[f"{batch} K=4"] = cycle.time(10)
            alike = torch.equal(logits, first) and torch.equal(cycle.logits[0], first)
            if not alike:
                FAILED.append(f"{size} batch {batch}: other logits than alone")
            floor = (rig.weight_bytes(batch) + batch * rig.kv_bytes(1024)) / H200_BYTES_PER_S * 1e3
            say(
                f"{size} batch {batch}: plain {row[f'{batch} plain']:.3f} ms (floor {floor:.2f}), K=4 cycle {row[f'{batch} K=4']:.3f} ms, logits as alone: {alike}"
            )
            if tables and batch == 64:
                rig.ops.pdl = False
                for k in (0, 4):
                    slow = rig.graph(seqs[:batch], k, 1024, 1088)
                    kernel_table(kernels(slow.graph.replay, OUT[0]), f"{size} batch 64 K={k} without PDL")
                    del slow
                rig.ops.pdl = True
            del run, cycle
        prompt = Graph(packed(rig, seqs[:2], 1024), rig.device, rig.pool)
        row["2 x 1024"] = time_ms(prompt.replay, 5, 1)
        say(f"{size} prompts: 2 x 1,024 in one pass {row['2 x 1024']:.1f} ms, so 8 x 1,024 {4 * row['2 x 1024']:.0f} ms")
        RESULTS.setdefault("models", {})[size] = row
        del prompt
        rig.free()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/gpu_many")
    parser.add_argument("--sections", nargs="+", default=["products", "recut", "attention", "experts"])
    parser.add_argument("--sizes", nargs="+", default=list(BATCHES))
    parser.add_argument("--tables", action="store_true", help="the kernels of a pass of 64 sequences")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    QUICK[0] = args.quick
    out = OUT[0] = begin(args.out)
    jobs = {
        "products": products,
        "recut": recut,
        "attention": attend,
        "experts": experts,
        "models": lambda: models(args.sizes, args.tables),
    }
    sections(args.sections, jobs, out / "many.json")


if __name__ == "__main__":
    main()
