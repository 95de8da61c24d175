# ruff: noqa: B023
"""Prompts on this GPU: attention, products and rotation in the shapes they may take, and whole passes of several numbers of rows.

    python benchmarks/gpu_prompts.py [--out FOLDER] [--sections attention cuts products rope models] [--sizes 31B E2B 26B-A4B] [--tables]

Every shape must give the bits of the kernels that take few rows; a line with OTHER BITS names one that does not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from gpu_common import BF16, FAILED, RESULTS, attempt, begin, finish, graph_us, kernel_table, kernels, rand, say, view
from gpu_many import PRODUCTS, SPECS, packed, pooled

from outrider.bench.gpu import Rig, time_ms
from outrider.engine.capture import Graph
from outrider.ops.triton import TritonOps, attention, linear, prompts, rope
from outrider.ops.triton.attention import Cut
from outrider.ops.triton.linear import product
from outrider.ops.triton.prompts import Shape
from outrider.ops.triton.tiles import choose_tile, for_rows
from outrider.types import AttnSpec, KVView

TRIES = {  # (head_dim, keys a block): shapes
    (256, 64): [(128, 8, 2), (128, 8, 2, True), (128, 8, 2, False, False), (64, 4, 2), (64, 4, 1), (64, 4, 1, True)],
    (256, 32): [(128, 8, 2), (128, 8, 3), (128, 8, 2, True), (128, 8, 3, True), (128, 8, 2, False, False), (64, 4, 2), (64, 4, 1)],
    (512, 64): [(64, 8, 1), (64, 8, 1, True)],
    (512, 32): [(64, 8, 2), (64, 8, 2, True), (64, 8, 1)],
}
NARROW = Cut(32, 32, coarse=256)  # another cut for heads of 512
OUT = [Path()]


def differs(got: torch.Tensor, want: torch.Tensor, what: str) -> str:
    if torch.equal(got, want):
        return ""
    FAILED.append(what)
    return f" OTHER BITS {int((got != want).sum())}/{want.numel()}"


def trials(title: str, calls: dict[str, Callable[[], torch.Tensor]], want: torch.Tensor, floor: float) -> None:
    """The first call is what is in use."""
    found = []
    for name, call in calls.items():
        try:
            other = differs(call(), want, f"{title} {name}")
            found.append((graph_us(lambda i: call(), 3, 3), name + other))
        except Exception as e:
            say(f"  {title} {name}: {type(e).__name__} {str(e)[:100]}")
    RESULTS.setdefault("trials", {})[title] = {"floor_us": floor, "found": found}
    say(f"{title}: floor {floor:.0f} us | " + " | ".join(f"{us:.0f} {name}" for us, name in found))


def attend() -> None:
    jobs: list[Callable[[], Any]] = []
    for spec in SPECS.values():
        small = view(spec, [(0, 256)])
        q = rand(256, spec.heads * spec.head_dim)
        cut = attention.choose_cut(spec, BF16)
        for each in {cut, NARROW} if spec.head_dim > 256 else {cut}:
            jobs += [
                lambda q=q, spec=spec, small=small, each=each, t=t: prompts.attend(q, spec, small, True, each, Shape(*t))
                for t in TRIES[spec.head_dim, each.bn]
            ]
            jobs.append(lambda q=q, spec=spec, small=small, each=each: attention.attend(q, spec, small, True, each))
    say(f"compiling {len(jobs)} kernels")
    pooled(jobs)
    for name, spec in SPECS.items():
        cut = attention.choose_cut(spec, BF16)
        for batch in (2, 8):
            kv = view(spec, [(0, 1024)] * batch)
            q = rand(batch * 1024, spec.heads * spec.head_dim, scale=spec.head_dim**-0.25)
            area = sum(min(p + 1, spec.window or p + 1) for p in range(1024))
            floor = 4 * batch * spec.heads * spec.head_dim * area / 800e6
            for each in dict.fromkeys((cut, NARROW)) if spec.head_dim > 256 else (cut,):
                calls: dict[str, Callable[[], torch.Tensor]] = {"before": lambda: attention.attend(q, spec, kv, True, each)}
                for t in TRIES[spec.head_dim, each.bn]:
                    calls[str(t)] = lambda t=t: prompts.attend(q, spec, kv, True, each, Shape(*t))
                trials(f"{name} {batch} x 1024, blocks of {each.bn}", calls, attention.attend(q, spec, kv, True, each), floor)


def cuts() -> None:
    """What blocks of 32 keys would cost a decoding step in heads of 512."""
    for name in ("31B full", "26B full"):
        spec = SPECS[name]
        now = attention.choose_cut(spec, BF16)
        for batch, rows, context in ((1, 1, 1024), (1, 5, 1024), (8, 1, 1024), (8, 5, 1024), (64, 1, 1024), (64, 5, 1024), (8, 1, 16384)):
            kv = view(spec, [(context - rows, rows)] * batch)
            q = rand(batch * rows, spec.heads * spec.head_dim, scale=spec.head_dim**-0.25)
            us = [graph_us(lambda i: attention.attend(q, spec, kv, True, cut), 12, 3) for cut in (now, NARROW)]
            say(f"{name} {batch} x {rows} @ {context}: blocks of 64 {us[0]:.1f} us, of 32 {us[1]:.1f}")


def products() -> None:
    ops = TritonOps("cuda")
    names = ("31B gate_up", "31B down", "31B qkv", "31B out", "E2B gate_up", "E2B down", "26B qkv")
    rows_of = (2048, 3072, 4096, 8192)

    def run(x: torch.Tensor, w: torch.Tensor, gated: bool, single: bool = False, together: int = 2048) -> torch.Tensor:
        linear.SINGLE, linear.TOGETHER = single, together
        return product(x, w, ops.seen, gated=gated, act="gelu_tanh" if gated else "", pdl=True)

    def shells(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        n, k, gated = PRODUCTS[name]
        return rand(8192, k), torch.empty((n * (2 if gated else 1), k), dtype=BF16, device="cuda").normal_(0, k**-0.5)

    for name in names:
        n, k, gated = PRODUCTS[name]
        x, w = shells(name)
        alone = run(x[:16], w, gated)
        for rows in rows_of:
            blas = graph_us(lambda i: torch.nn.functional.linear(x[:rows], w), 3, 3)
            calls = {"": dict(), "all rows together": dict(together=1 << 20)}
            if gated:
                calls |= {"a tile a program": dict(single=True)}
            line = []
            for title, extra in calls.items():
                if title == "all rows together" and rows <= 2048:
                    continue
                other = differs(run(x[:rows], w, gated, **extra)[:16], alone, f"{name} {rows} {title}")
                us = graph_us(lambda i: run(x[:rows], w, gated, **extra), 3, 3)
                line.append(f"{title} {us:.0f} ({100 * blas / us:.0f} %){other}")
            shape = for_rows(choose_tile(n, k, gated, 2), n, k, rows, gated)
            flops = 2 * rows * n * k * (2 if gated else 1)
            say(f"{name} {rows}: cuBLAS {blas:.0f} us ({flops / blas * 1e-6:.0f} TFLOP/s) | {' | '.join(line)} | {astuple(shape)}")
    linear.SINGLE, linear.TOGETHER = False, 2048


def rotate() -> None:
    for name, spec in SPECS.items():
        kv = view(spec, [(0, 1024)] * 2)
        qkv, norm = rand(2048, spec.qkv_rows), torch.rand(spec.head_dim, device="cuda")
        cos, sin = rope.rope_angles(kv.positions, torch.rand(spec.head_dim // 2, device="cuda"), True)
        found, line = [], []
        for some in (1, 2, 4):
            if spec.kv_heads % some:
                continue
            q = rope.rope_write(qkv, cos, sin, norm, norm, spec, kv, True, some)
            assert kv.keys[0] is not None and kv.values[0] is not None
            found.append(torch.cat([q.flatten(), kv.keys[0].flatten(), kv.values[0].flatten()]))
            us = graph_us(lambda i: rope.rope_write(qkv, cos, sin, norm, norm, spec, kv, True, some), 6, 3)
            line.append(f"{some} heads {us:.1f}{differs(found[-1], found[0], f'{name} rope {some}')}")
        say(f"{name} rotation of 2,048 rows, floor {qkv.numel() * 4 / 4.39e6:.1f} us: {' | '.join(line)}")


def models(sizes: list[str], tables: bool) -> None:
    """Whole passes, with the attention of before and with that of prompts."""
    for size in sizes:
        rig = Rig.of(size, slots=8, context=1088)
        seqs = rig.open(8, 1024, 32)
        suited: Callable[[AttnSpec, KVView, torch.dtype, int], bool] = prompts.suited
        row = {}
        for batch in (2, 4, 8):
            logits = []
            for title, ask in (("before", lambda *a: False), ("now", suited)):
                prompts.suited = ask  # type: ignore[assignment]
                run = Graph(packed(rig, seqs[:batch], 1024), rig.device, rig.pool)
                row[f"{batch} {title}"] = time_ms(run.replay, 3, 1)
                assert isinstance(run.result, torch.Tensor)
                logits.append(run.result.clone())
                if tables and title == "now" and batch == 8:
                    kernel_table(kernels(run.replay, OUT[0]), f"{size} {batch} x 1024")
                del run
            other = differs(logits[1], logits[0], f"{size} {batch} x 1024")
            was, now = row[f"{batch} before"], row[f"{batch} now"]
            say(f"{size} {batch} x 1,024 in one pass: {was:.1f} ms before, {now:.1f} now, 8 x 1,024: {now * 8 / batch:.0f}{other}")
        prompts.suited = suited
        RESULTS.setdefault("models", {})[size] = row
        rig.free()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/gpu_prompts")
    parser.add_argument("--sections", nargs="+", default=["attention", "cuts", "products", "rope", "models"])
    parser.add_argument("--sizes", nargs="+", default=["31B", "E2B", "26B-A4B"])
    parser.add_argument("--tables", action="store_true", help="the kernels of a pass of 8 x 1,024")
    args = parser.parse_args()
    OUT[0] = begin(args.out)
    jobs = {"attention": attend, "cuts": cuts, "products": products, "rope": rotate, "models": lambda: models(args.sizes, args.tables)}
    for section in args.sections:
        say(f"== {section}")
        attempt(section, jobs[section])
    finish(OUT[0] / "prompts.json")


if __name__ == "__main__":
    main()
