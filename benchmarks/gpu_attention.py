# ruff: noqa: E501, B023
"""Shapes of attention for many sequences on this GPU: each alone, with the bits of a row alone; then whole steps of E2B with the best.

    PYTHONPATH=src python3 benchmarks/gpu_attention.py [--seconds 85]

`now` is what the rules choose (`abreast.choose_shape`, `attention.choose_shape`). K/V is cold: several layers take turns.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from typing import Any

import torch
from gpu_common import BF16, FAILED, attempt, begin, finish, graph_us, late, say

from outrider.bench.gpu import H200_BYTES_PER_S, Rig
from outrider.ops.triton import TritonOps, abreast, attention, prompts
from outrider.types import AttnSpec, KVView

GPU = torch.cuda.is_available()
OPS = TritonOps("cuda" if GPU else "cpu")
DEV = "cuda" if GPU else "cpu"
S, P, B = attention.Shape, prompts.Shape, abreast.Shape
SPECS = {"sliding": AttnSpec(8, 1, 256, 0, True, window=512), "full": AttnSpec(8, 1, 512, 0, True)}
BIG = {"31B full": AttnSpec(32, 4, 512, 0, True)}
CASES = [(kind, batch, rows) for batch, rows in ((64, 1), (128, 1), (64, 5)) for kind in SPECS]
CASES += [("31B full", 32, 5), ("31B full", 64, 5), ("31B full", 64, 1)]
CASES += [(kind, batch, rows) for batch, rows in ((32, 1), (128, 5), (32, 5), (48, 1)) for kind in SPECS]
CONTEXT = 1040 if GPU else 70
SLIDING = [S(False, 16, 4, 3), B(2, 4, 4, 2), B(4, 8, 3, 2), B(2, 4, 3), B(2, 8, 3)]
SLIDING5 = [B(2, 4, 3, 2, bq=64), S(False, 64, 4, 4, parts=2), S(False, 64, 4, 3, parts=2), P(64, 8, 3)]
FULL = [S(False, 16, 4, 4, parts=2), S(False, 16, 8, 3), B(2, 4, 3, 2, ahead=0), S(True, 16, 4, 2, 8)]
FULL5 = [S(False, 64, 8, 3, parts=2), S(False, 16, 4, 2)]
FULL31 = [S(False, 32, 8, 2), S(False, 16, 8, 2)]


def variants(kind: str, rows: int) -> list[Any]:
    if kind in BIG:
        return FULL31
    few = kind == "sliding"
    out = [*(SLIDING if few else FULL), *((SLIDING5 if few else FULL5) if rows > 1 else ())]
    return [v for v in out if GPU or not isinstance(v, P)]


def call(q: torch.Tensor, spec: AttnSpec, kv: KVView, shape: Any) -> torch.Tensor:
    if shape is None:  # what the rules choose
        return OPS.attend(q, spec, kv)
    if isinstance(shape, P):
        return prompts.attend(q, spec, kv, GPU, None, shape)
    if isinstance(shape, B):
        return abreast.attend(q, spec, kv, GPU, shape)
    return attention.attend(q, spec, kv, GPU, None, shape)


def view(spec: AttnSpec, batch: int, rows: int, layers: int, context: int) -> KVView:
    per = -(-context // 16)
    table = (1 + torch.randperm(batch * per, device=DEV)).view(batch, per).to(torch.int32)
    kv = [torch.empty((1 + batch * per, spec.kv_heads, 16, spec.head_dim), dtype=BF16, device=DEV).normal_() for _ in range(2 * layers)]
    at = torch.arange(context - rows, context, device=DEV).repeat(batch)
    seq = torch.arange(batch, device=DEV).repeat_interleave(rows)
    start = (torch.arange(batch + 1, device=DEV) * rows).to(torch.int32)
    return KVView(16, kv[::2], kv[1::2], {"full": table, "sliding": table}, at, seq, start, rows, context)


def name(shape: Any) -> str:
    if shape is None:
        return "now"
    if isinstance(shape, P):
        return f"prompts{astuple(shape)}"
    if isinstance(shape, B):
        return f"(abreast {shape.splits} q{shape.bq} w{shape.warps} s{shape.stages} parts{shape.parts} ahead{shape.ahead})"
    return f"({'split' if shape.split else 'whole'} q{shape.bq} w{shape.warps} s{shape.stages}{f' run{shape.run}' if shape.split else ''}{f' parts{shape.parts}' if shape.parts > 1 else ''})"


def compile_all() -> None:
    wanted = {(kind, v): None for kind, _, rows in CASES for v in variants(kind, rows)}
    views = {kind: view(spec, 2, 5, 1, 64) for kind, spec in {**SPECS, **BIG}.items()}

    def one(kind: str, shape: Any) -> None:
        spec = {**SPECS, **BIG}[kind]
        call(torch.zeros((10, spec.heads * spec.head_dim), dtype=BF16, device=DEV), spec, views[kind], shape)

    with ThreadPoolExecutor(16 if GPU else 1) as pool:
        for (kind, shape), future in {key: pool.submit(one, *key) for key in wanted}.items():
            error = future.exception()
            if error is not None:
                BROKEN.add((kind, shape))
                say(f"  {kind} {name(shape)}: {type(error).__name__} {str(error)[:110]}")
    if GPU:
        torch.cuda.synchronize()
    say(f"compiled {len(wanted)}")


BROKEN: set[Any] = set()
BEST: dict[Any, list[Any]] = {}


def alone() -> None:
    for kind, batch, rows in CASES:
        if late(0.6 * LIMIT[0]) and GPU:
            say(f"{kind} {batch}x{rows} left out: late")
            continue
        spec = {**SPECS, **BIG}[kind]
        seen = CONTEXT if spec.window is None else min(CONTEXT, spec.window + rows - 1)
        size = batch * seen * spec.kv_heads * spec.head_dim * 4
        layers = max(1, min(8, int(4e8 // size))) if GPU else 1
        kv = view(spec, batch if GPU else 2, rows, layers, CONTEXT)
        q = torch.empty((kv.positions.shape[0], spec.heads * spec.head_dim), dtype=BF16, device=DEV).normal_(0, spec.head_dim**-0.5)
        one = KVView(
            16,
            kv.keys,
            kv.values,
            {g: t[:1] for g, t in kv.tables.items()},
            kv.positions[rows - 1 : rows],
            kv.row_seq[:1],
            torch.tensor([0, 1], dtype=torch.int32, device=DEV),
            1,
            CONTEXT,
        )
        want = call(q[rows - 1 : rows], spec, one, None)
        whole, found = call(q, spec, kv, None), []
        if not torch.equal(whole[rows - 1 : rows], want):
            FAILED.append(f"{kind} {batch}x{rows}: other bits than alone")
        for shape in [None, *variants(kind, rows)]:
            if (kind, shape) in BROKEN:
                continue
            try:
                got = call(q, spec, kv, shape)
                other = "" if torch.equal(got, whole) else f" OTHER BITS {int((got != whole).sum())}/{got.numel()}"
                us = graph_us(lambda i: call(q, replace(spec, kv_layer=i % layers), kv, shape), 3 * layers, 3)
                found.append((us, f"{us:.1f} {name(shape)}{other}", shape))
                if other:
                    FAILED.append(f"{kind} {batch}x{rows} {name(shape)}")
            except Exception as e:
                say(f"  {kind} {batch}x{rows} {name(shape)}: {type(e).__name__} {str(e)[:80]}")
        BEST[kind, batch, rows] = [f[2] for f in sorted(found, key=lambda f: f[0]) if "OTHER" not in f[1] and f[2] is not None]
        now = next(f[0] for f in found if f[2] is None)
        say(
            f"{kind} {batch}x{rows}: floor {size / H200_BYTES_PER_S * 1e6:.1f} us | now {now:.1f} | "
            + " | ".join(f[1] for f in sorted(found, key=lambda f: f[0]))
        )


CHOSEN: dict[Any, Any] = {}  # (kind, batch, rows) -> shape


def chosen(self: TritonOps, q: torch.Tensor, spec: AttnSpec, kv: KVView) -> torch.Tensor:
    kind = "full" if spec.window is None else "sliding"
    shape = CHOSEN.get((kind, kv.row_start.shape[0] - 1, kv.max_rows))
    if shape is None or spec.head_dim != SPECS[kind].head_dim:
        return ORIGINAL(self, q, spec, kv)
    return call(q, spec, kv, shape)


ORIGINAL = TritonOps.attend


def steps(rig: Rig, seqs: list[Any], batch: int, k: int) -> None:
    """A whole step with what was best alone, one kind after the other."""
    rows = k + 1

    def time(title: str) -> float:
        run = rig.graph(seqs[:batch], k, CONTEXT - rows if GPU else 24, 1088 if GPU else 48)
        ms, logits = run.time(12), run.logits.clone()
        same = torch.equal(logits, first) if first is not None else True
        say(f"E2B {batch} K={k}: {ms:.3f} ms {title}{'' if same else ' OTHER LOGITS'}")
        if not same:
            FAILED.append(f"step {batch} {k} {title}")
        time.logits = logits  # type: ignore[attr-defined]
        return ms

    first = None
    CHOSEN.clear()
    best = time("now")
    first = time.logits  # type: ignore[attr-defined]
    for kind in SPECS:
        keep = None
        tries = BEST.get((kind, batch, rows), [])[:4]
        for shape in tries:
            if late(LIMIT[0]):
                break
            for r in {rows, 1}:  # the drafter's own rows too
                CHOSEN[kind, batch, r] = shape if r == rows or (kind, batch, 1) not in BEST else BEST[kind, batch, 1][0]
            try:
                ms = time(f"{kind} {name(shape)}")
            except Exception as e:
                say(f"  {name(shape)}: {type(e).__name__} {str(e)[:100]}")
                ms = 1e9
            if ms < best:
                best, keep = ms, shape
        CHOSEN.pop((kind, batch, rows), None)
        if keep is not None:
            CHOSEN[kind, batch, rows] = keep
    say(f"E2B {batch} K={k}: best {best:.3f} with {', '.join(f'{key[0]} {name(v)}' for key, v in CHOSEN.items())}")


LIMIT = [85.0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=85)
    args = parser.parse_args()
    LIMIT[0] = args.seconds
    if GPU:
        out = begin("runs/gpu_attention")
    else:
        from pathlib import Path

        out = Path("/tmp")
    with torch.inference_mode():
        compile_all()
        attempt("alone", alone)
        TritonOps.attend = chosen  # type: ignore[method-assign]
        if GPU:
            rig = Rig.of("E2B", slots=128, context=1088)
        else:
            from tests.gpu.place import HERE

            rig = Rig(HERE.raw("E2B"), HERE.assistant("E2B"), HERE.ops(), "cpu", torch.float64, slots=4, context=64)
        seqs = rig.open(128 if GPU else 2, 1024 if GPU else 24, 32 if GPU else 16)
        for batch, k in ((64, 0), (128, 0), (64, 4)):
            attempt(f"steps {batch} {k}", steps, rig, seqs, batch if GPU else 2, k)
    finish(out / "attention.json")


if __name__ == "__main__":
    main()
