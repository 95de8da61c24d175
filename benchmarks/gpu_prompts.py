# ruff: noqa: B023, E501
"""Prompts on this GPU: attention, products, rotation and norms in the shapes they may take, whole passes, and the engine with its host.

    python benchmarks/gpu_prompts.py [--out FOLDER] [--sections attention products rope norms models engine] [--sizes 31B E2B 26B-A4B] [--tables]

Every shape must give the bits of the kernels that take few rows; a line with OTHER BITS names one that does not.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from gpu_common import BF16, RESULTS, attempt, begin, differs, graph_us, kernel_table, kernels, rand, say, sections, view
from gpu_many import PRODUCTS, SPECS, packed, pooled

from outrider import LLM, SamplingParams
from outrider.bench.gpu import SIZES, Rig, collect, time_ms
from outrider.config import EngineConfig
from outrider.engine.capture import Graph
from outrider.ops.triton import TritonOps, attention, norm, prompts, rope
from outrider.ops.triton.linear import product
from outrider.ops.triton.prompts import Shape
from outrider.ops.triton.tiles import choose_tile, for_rows

TRIES = {  # (head_dim, keys a block): shapes
    (256, 64): [(128, 8, 2)],
    (256, 32): [(128, 8, 2), (128, 8, 3)],
    (512, 64): [(64, 8, 1)],
    (512, 32): [(64, 8, 2)],
}
BATCHES = {"31B": (8, 32), "E2B": (8, 64), "26B-A4B": (8,)}  # through the engine
OUT = [Path()]


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
        jobs += [
            lambda q=q, spec=spec, small=small, t=t: prompts.attend(q, spec, small, True, None, Shape(*t))
            for t in TRIES[spec.head_dim, cut.bn]
        ]
        jobs.append(lambda q=q, spec=spec, small=small: attention.attend(q, spec, small, True))
    say(f"compiling {len(jobs)} kernels")
    pooled(jobs)
    for name, spec in SPECS.items():
        cut = attention.choose_cut(spec, BF16)
        for batch in (2, 8):
            kv = view(spec, [(0, 1024)] * batch)
            q = rand(batch * 1024, spec.heads * spec.head_dim, scale=spec.head_dim**-0.25)
            area = sum(min(p + 1, spec.window or p + 1) for p in range(1024))
            floor = 4 * batch * spec.heads * spec.head_dim * area / 800e6
            calls: dict[str, Callable[[], torch.Tensor]] = {"before": lambda: attention.attend(q, spec, kv, True)}
            for t in TRIES[spec.head_dim, cut.bn]:
                calls[str(t)] = lambda t=t: prompts.attend(q, spec, kv, True, None, Shape(*t))
            trials(f"{name} {batch} x 1024", calls, attention.attend(q, spec, kv, True), floor)


def products() -> None:
    """Our products and cuBLAS's in turns: under a lasting load the card lowers its clock, for both."""
    ops = TritonOps("cuda")
    more = {"31B out, full": (5376, 16384, False), "E2B small down": (1536, 6144, False), "26B out": (2816, 4096, False)}
    for name in (
        "31B gate_up",
        "31B down",
        "31B qkv",
        "31B out",
        "31B out, full",
        "E2B gate_up",
        "E2B down",
        "E2B small down",
        "E2B qkv",
        "E2B out",
        "26B out",
    ):
        n, k, gated = (PRODUCTS | more)[name]
        x, w = rand(8192, k), torch.empty((n * (2 if gated else 1), k), dtype=BF16, device="cuda").normal_(0, k**-0.5)
        extra: dict[str, Any] = dict(gated=gated, act="gelu_tanh" if gated else "", pdl=True)
        alone = product(x[:16], w, ops.seen, **extra)
        for rows in (2048, 8192):
            other = differs(product(x[:rows], w, ops.seen, **extra)[:16], alone, f"{name} {rows}")
            times = [
                (
                    graph_us(lambda i: torch.nn.functional.linear(x[:rows], w), 3, 3),
                    graph_us(lambda i: product(x[:rows], w, ops.seen, **extra), 3, 3),
                )
                for _ in range(3)
            ]
            blas, ours = (sorted(t)[1] for t in zip(*times, strict=True))
            shape = for_rows(choose_tile(n, k, gated, 2), n, k, rows, gated)
            flops = 2 * rows * n * k * (2 if gated else 1)
            RESULTS.setdefault("products", {})[f"{name} {rows}"] = (blas, ours)
            say(
                f"{name} {rows}: cuBLAS {blas:.0f} us ({flops / blas * 1e-6:.0f} TFLOP/s) | {ours:.0f} ({100 * blas / ours:.0f} %){other} | {astuple(shape)}"
            )


def norms() -> None:
    for width, more in ((5376, False), (1536, False), (2816, True)):
        x, y, w = rand(2048, width), rand(2048, width), [torch.rand(width, device="cuda") for _ in range(4)]
        line, found = [], []
        for early in (True, False):
            run = lambda i: norm.residual_norm(x, y, w[0], None, w[1], 1e-6, True, (w[2], w[3]) if more else None, early)  # noqa: E731
            found.append(torch.cat(run(0)))
            line.append(f"{'early' if early else 'late'} {graph_us(run, 6, 3):.1f}{differs(found[-1], found[0], f'norm {width}')}")
        say(f"norms of 2,048 rows of {width}: floor {x.numel() * (12 if more else 8) / 4.39e6:.1f} us | {' | '.join(line)}")


def rotate() -> None:
    for name, spec in SPECS.items():
        kv = view(spec, [(0, 1024)] * 2)
        qkv, norm = rand(2048, spec.qkv_rows), torch.rand(spec.head_dim, device="cuda")
        cos, sin = rope.rope_angles(kv.positions, torch.rand(spec.head_dim // 2, device="cuda"), True)
        found, line = [], []
        for some in (1, 2, 4, 8):
            q = rope.rope_write(qkv, cos, sin, norm, norm, spec, kv, True, some)
            assert kv.keys[0] is not None and kv.values[0] is not None
            found.append(torch.cat([q.flatten(), kv.keys[0].flatten(), kv.values[0].flatten()]))
            us = graph_us(lambda i: rope.rope_write(qkv, cos, sin, norm, norm, spec, kv, True, some), 6, 3)
            line.append(f"{some} heads {us:.1f}{differs(found[-1], found[0], f'{name} rope {some}')}")
        say(f"{name} rotation of 2,048 rows, floor {qkv.numel() * 4 / 4.39e6:.1f} us: {' | '.join(line)}")


def models(sizes: list[str], tables: bool) -> None:
    """Whole passes: with all rows through all layers, and with those that nobody reads as far as their K/V."""
    for size in sizes:
        rig = Rig.of(size, slots=8, context=1088)
        seqs = rig.open(8, 1, 1023)  # with pages for every position: those before a window are given back, and would be shared
        row = {}
        for batch in (2, 8):
            logits = []
            for title, whole in (("all", True), ("last", False)):
                torch.manual_seed(3)  # the same ids
                run = Graph(packed(rig, seqs[:batch], 1024, whole), rig.device, rig.pool)
                row[f"{batch} {title}"] = time_ms(run.replay, 3, 1)
                assert isinstance(run.result, torch.Tensor)
                logits.append(run.result.clone())
                del run
            other = differs(logits[1], logits[0], f"{size} {batch} x 1024")
            was, now = row[f"{batch} all"], row[f"{batch} last"]
            say(
                f"{size} {batch} x 1,024 in one pass: all rows {was:.1f} ms, the last ones {now:.1f}, 8 x 1,024: {now * 8 / batch:.0f}{other}"
            )
        if tables:
            rig.ops.pdl = False  # a kernel that is let in early seems to last as long as it waits
            slow = Graph(packed(rig, seqs, 1024), rig.device, rig.pool)
            kernel_table(kernels(slow.replay, OUT[0]), f"{size} 8 x 1024, one kernel after the other")
            del slow
        RESULTS.setdefault("models", {})[size] = row
        rig.free()


def engine(sizes: list[str]) -> None:
    """Seconds for prompts of 1,024 tokens with 1 and with 16 tokens of each answer, best of two (benchmarks/engine_throughput.py's measure)."""
    for size in sizes:
        most = max(BATCHES[size])
        room = EngineConfig(max_batch=most, max_context=1024 + 144, kv_tokens=most * (1024 + 176), prefix_cache=False)
        llm = LLM.load(SIZES[size], drafter="none", draft_tokens=0, device="cuda", load_format="dummy", engine=room)
        for batch in BATCHES[size]:
            attempt(f"engine {size} {batch}", through, llm, size, batch)
        del llm
        collect()


def through(llm: LLM, size: str, batch: int) -> None:
    rng = random.Random(1)
    ids = [[rng.randrange(5, 200000) for _ in range(1024)] for _ in range(batch)]

    def seconds(tokens: int) -> float:
        began = time.perf_counter()
        llm.generate(ids, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
        return time.perf_counter() - began

    seconds(8)
    found = {tokens: min(seconds(tokens) for _ in range(2)) for tokens in (16, 1)}
    RESULTS.setdefault("engine", {})[f"{size} {batch}"] = found
    say(f"{size} {batch} x 1,024 through the engine: with 16 tokens {found[16]:.3f} s, with 1 {found[1]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/gpu_prompts")
    parser.add_argument("--sections", nargs="+", default=["attention", "products", "rope", "norms", "models", "engine"])
    parser.add_argument("--sizes", nargs="+", default=["31B", "E2B", "26B-A4B"])
    parser.add_argument("--tables", action="store_true", help="the kernels of a pass of 8 x 1,024")
    args = parser.parse_args()
    OUT[0] = begin(args.out)
    jobs: dict[str, Callable[[], None]] = {
        "attention": attend, "products": products, "rope": rotate, "norms": norms, "models": lambda: models(args.sizes, args.tables),
        "engine": lambda: engine(args.sizes),
    }  # fmt: skip
    sections(args.sections, jobs, OUT[0] / "prompts.json")


if __name__ == "__main__":
    main()
