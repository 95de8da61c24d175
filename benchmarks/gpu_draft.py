# ruff: noqa: E501
"""A drafter's round in one launch on this GPU: is it right, how long does a step take, and where does the time go.

    python benchmarks/gpu_draft.py [--out FOLDER] [--sizes E2B E4B 12B 26B-A4B 31B] [--cycles E2B]

Real shapes, random weights, a shallow target. For every size: the guesses against the step-by-step drafter (batch 1, 2 and 8,
greedy and with noise); microseconds a step, old and new, with the L2 cache flushed before the round as a verify pass would;
variants; cycles of the clock in each phase. --cycles: whole cycles of the full model with the old and the new drafter.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from outrider.bench.gpu import Rig, collect
from outrider.engine.graphs import Graph
from outrider.ops.triton.draft import FusedDrafter, unsupported
from outrider.spec.choose import SamplingBatch
from outrider.spec.drafter import DraftBatch
from outrider.spec.mtp import MTPDrafter
from outrider.types import SamplingParams

LAYERS = {"E2B": 10, "E4B": 12, "12B": 6, "26B-A4B": 6, "31B": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {}, "int8": dict(narrow=True), "bf16 16 warps": dict(warps=16), "int8 16 warps": dict(narrow=True, warps=16),
    "bf16 half tiles": dict(elements=8192), "int8 half tiles": dict(narrow=True, elements=16384), "probe": dict(probe=512),
    "probe int8": dict(narrow=True, probe=512),
}  # fmt: skip
TRIED = {  # each takes seconds to compile
    "E2B": ("bf16", "int8", "bf16 16 warps", "probe"),
    "31B": tuple(VARIANTS),
    "12B": ("bf16", "int8"),
    "E4B": ("bf16", "int8"),
    "26B-A4B": ("bf16",),
}
RESULTS: dict[str, Any] = {}
BEGAN = time.perf_counter()
COLD = SamplingParams()
WARM = SamplingParams(temperature=0.8, seed=11)


def say(*parts: object) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f}]", *parts, flush=True)


def batch_of(rig: Rig, seqs: list[Any], context: int, params: list[SamplingParams]) -> DraftBatch:
    n, device = len(params), rig.device
    slots = torch.tensor([s.slot for s in seqs[:n]], device=device)
    length = torch.full((n,), context, dtype=torch.int64, device=device)
    each, start = torch.arange(n, device=device), torch.arange(n + 1, dtype=torch.int32, device=device)
    kv = rig.store.view(slots, length - 1, each, start, 1, context + 64)
    rng = torch.Generator(device=device).manual_seed(context + n)
    features = torch.randn((n, rig.config.hidden), device=device, generator=rng).to(rig.model.dtype)
    sampling = SamplingBatch.build(params, [[]] * n, [[]] * n, rig.config.vocab_size, device)
    return DraftBatch([""] * n, [[]] * n, each * 7919 + 11, length, features, kv, sampling, False, rig.ops, rig.config.vocab_size)


def alarmed(fused: FusedDrafter) -> bool:
    return bool(int(fused.counter[64]))


def parity(rig: Rig, fused: FusedDrafter, batch: DraftBatch, steps: int) -> dict[str, Any]:
    """The step-by-step drafter follows the fused guesses: how far below its own best each of them is, in standard deviations of
    the scores (with noise: of the noisy scores); and how many are its own."""
    plain, sampling = rig.drafter.model, batch.sampling
    tokens = MTPDrafter(fused, rig.model).propose(batch, steps).tokens
    again = MTPDrafter(fused, rig.model).propose(batch, steps).tokens
    state = plain.start(batch.kv, batch.features)
    token, hidden, short, same = batch.last, batch.features, 0.0, 0
    for j in range(steps):
        g, hidden = plain.step(rig.model.embed(token), hidden, state)
        ids, z = plain.candidates(g)
        own = sampling.guess(z, batch.length + 1 + j, rig.ops, ids)
        token = tokens[:, j]
        same += int((own == token).sum())
        if not sampling.any_hot:
            at = token if ids is None else (ids == token[:, None]).int().argmax(1)
            there = torch.ones_like(at, dtype=torch.bool) if ids is None else (ids == token[:, None]).any(1)
            gap = (z.amax(1) - z.gather(1, at[:, None])[:, 0]) / z.std(1)
            short = max(short, float(torch.where(there, gap, 9.0).max()))
    return {
        "short": round(short, 4),
        "same": round(same / tokens.numel(), 3),
        "stable": bool(torch.equal(tokens, again)),
        "alarm": alarmed(fused),
    }


class Clock:
    """Microseconds of a call inside a graph behind a flush of L2, less the flush."""

    def __init__(self, device: torch.device):
        self.device, self.junk = device, torch.zeros(64 << 20, dtype=torch.float32, device=device)
        self.base = self._us(lambda: None)

    def _us(self, call: Any) -> float:
        def once() -> None:
            self.junk.add_(1.0)
            call()

        graph = Graph(once, self.device)
        for _ in range(2):
            graph.replay()
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(9)]
        for a, b in marks:
            a.record()
            graph.replay()
            b.record()
        torch.cuda.synchronize()
        return sorted(a.elapsed_time(b) * 1e3 for a, b in marks)[4]

    def us(self, call: Any) -> float:
        return self._us(call) - self.base


def phase_table(rig: Rig, fused: FusedDrafter, batch: DraftBatch, steps: int, step_us: float) -> dict[str, Any]:
    """Per phase (layers of a kind together): clock cycles of work (mean and most over programs) and of waiting (least: the
    barrier itself), turned into microseconds by the step's own time. What is fetched before a wait counts as the phase before."""
    before = int(fused.epochs[0])
    MTPDrafter(fused, rig.model).propose(batch, steps)
    torch.cuda.synchronize()
    ticks, size = fused.phases * steps + 1, fused.probe.shape[1]
    at = (torch.arange(ticks) + before) % size
    clocks = fused.probe.cpu()[:, at].double()  # [G, ticks, 2]
    work = clocks[:, 1:, 0] - clocks[:, :-1, 1]  # of tick t, after its wait
    wait = clocks[:, :, 1] - clocks[:, :, 0]
    each = (clocks[:, fused.phases * (steps - 1), 1] - clocks[:, fused.phases, 1]).mean() / (steps - 2)
    scale = step_us / float(each)
    names = ["pre"]
    for run in fused.runs:
        names += [f"{run.spec.group} {n}" for n in ("q", "attend", "out", "gate_up", "down")] * run.count
    names += ["head", "clusters"][: 2 if fused.config.clusters else 1]
    table: dict[str, list[float]] = {}
    for p, name in enumerate(names):
        which = torch.arange(1, steps - 1) * fused.phases + p
        row = table.setdefault(name, [0, 0.0, 0.0, 0.0])
        row[0] += 1
        row[1] += float(work[:, which].mean()) * scale
        row[2] += float(work[:, which].amax(0).mean()) * scale
        row[3] += float(wait[:, which + 1].amin(0).mean()) * scale
    out = {n: [r[0], *(round(v / r[0], 2) for v in r[1:])] for n, r in table.items()}
    return {"cycles a step": float(each), "us each: count, mean work, most work, barrier": out}


@torch.inference_mode()
def one_size(size: str, clock: Clock, deadline: float, out: Path) -> None:
    rig = Rig.of(size, LAYERS[size], slots=8, context=4400, tokens=8 * 4400)
    row: dict[str, Any] = RESULTS.setdefault(size, {})
    try:
        model = rig.drafter.model
        assert unsupported(model) is None, unsupported(model)
        seqs = rig.open(8, 4096, 128)
        began = time.perf_counter()
        made = {name: FusedDrafter(model, **VARIANTS[name]) for name in TRIED[size]}
        batch = batch_of(rig, seqs, 300, [COLD])

        def compile_one(fused: FusedDrafter) -> None:
            with torch.inference_mode():
                MTPDrafter(fused, rig.model).propose(batch, 2)

        with ThreadPoolExecutor(10) as pool:
            jobs = [pool.submit(compile_one, f) for f in made.values()]
            for name, job in zip(list(made), jobs):
                if job.exception() is not None:
                    say(f"{size} {name}: {type(job.exception()).__name__}: {str(job.exception())[:300]}")
                    del made[name]
        torch.cuda.synchronize()
        row["compile_s"] = time.perf_counter() - began
        say(f"{size}: packed and compiled in {row['compile_s']:.1f} s; alarms {[n for n, f in made.items() if alarmed(f)]}")
        for name, limit in (("bf16", 0.05), ("int8", 0.3)):
            if name not in made:
                continue
            for n, context, params in (
                (1, 256, COLD),
                (1, 1024, COLD),
                (1, 4096, COLD),
                (2, 1024, COLD),
                (8, 1024, COLD),
                (1, 1024, WARM),
                (2, 300, WARM),
            ):
                got = parity(rig, made[name], batch_of(rig, seqs, context, [params] * n), 6)
                least = (
                    0.7 if name == "bf16" else 0.3
                )  # near ties may fall otherwise, and a draft that leaves the other's path stays off it
                good = got["short"] <= limit and got["same"] >= least and got["stable"] and not got["alarm"]
                row.setdefault("parity", []).append(
                    {"name": name, "batch": n, "context": context, "hot": params is WARM, "ok": good, **got}
                )
                say(
                    f"  {'ok  ' if good else 'FAIL'} {size} {name} batch {n} context {context}{' with noise' if params is WARM else ''}: {got}"
                )
        old = rig.drafter
        for context, k in ((1024, 4), (1024, 16), (256, 4), (4096, 4)):
            batch = batch_of(rig, seqs, context, [COLD])
            line = {"old": clock.us(lambda batch=batch, k=k: old.propose(batch, k)) / k}
            for name, fused in made.items():
                if name.startswith("probe") or ((context, k) != (1024, 16) and name not in ("bf16", "int8")):
                    continue
                if time.perf_counter() - BEGAN > deadline and name not in ("bf16", "int8"):
                    continue
                new = MTPDrafter(fused, rig.model)
                line[name] = clock.us(lambda new=new, batch=batch, k=k: new.propose(batch, k)) / k
            row[f"us a step, context {context}, K {k}"] = line
            say(
                f"  {size} context {context} K {k}: us a step",
                {n: round(v, 1) for n, v in line.items()},
                "ALARM" if any(alarmed(f) for f in made.values()) else "",
            )
        batch2 = batch_of(rig, seqs, 1024, [COLD] * 2)
        line = {"old": clock.us(lambda: old.propose(batch2, 4)) / 4}
        for name in ("bf16", "int8"):
            if name in made:
                new = MTPDrafter(made[name], rig.model)
                line[name] = clock.us(lambda new=new: new.propose(batch2, 4)) / 4
        row["us a step, batch 2, context 1024, K 4"] = line
        say(f"  {size} batch 2 context 1024 K 4: us a step", {n: round(v, 1) for n, v in line.items()})
        batch = batch_of(rig, seqs, 1024, [COLD])
        for name, plain in (("probe", "bf16"), ("probe int8", "int8")):
            if name in made and plain in made:
                table = phase_table(rig, made[name], batch, 8, row["us a step, context 1024, K 16"][plain])
                row[name] = table
                say(f"  {size} {plain}: {table['cycles a step']:.0f} cycles a step; us each (count, mean work, most work, barrier):")
                for phase, values in table["us each: count, mean work, most work, barrier"].items():
                    print(f"      {phase:18s} {values}")
    finally:
        rig.free()
        (out / "draft.json").write_text(json.dumps(RESULTS, indent=1, default=str))


@torch.inference_mode()
def cycles(size: str) -> None:
    """The full model: plain step and cycles, with the old drafter and with the new one."""
    rig = Rig.of(size, slots=1, context=2048)
    try:
        seqs, old = rig.open(1, 1024, 128), rig.drafter
        row: dict[str, Any] = {"ar": rig.graph(seqs, 0, 1024, 1280).time()}
        for name, drafter in (
            ("old", old),
            *((n, MTPDrafter(FusedDrafter(old.model, **VARIANTS[n]), rig.model)) for n in ("bf16", "int8")),
        ):
            rig.drafter = drafter
            for k in (4, 8, 16):
                row[f"{name} {k}"] = rig.graph(seqs, k, 1024, 1280).time() / row["ar"]
        RESULTS[f"cycles {size}"] = row
        say(f"{size} cycle / AR at 1k:", {n: round(v, 3) for n, v in row.items()})
    finally:
        rig.free()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/gpu_draft")
    parser.add_argument("--sizes", nargs="*", default=["E2B", "31B", "12B", "E4B", "26B-A4B"])
    parser.add_argument("--cycles", nargs="*", default=["E2B"])
    parser.add_argument("--deadline", type=float, default=75.0, help="seconds after which variants are left out")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    say(torch.cuda.get_device_name(), "torch", torch.__version__)
    clock = Clock(torch.device("cuda"))
    for job in [*((one_size, (size, clock, args.deadline, out)) for size in args.sizes), *((cycles, (size,)) for size in args.cycles)]:
        try:
            job[0](*job[1])
        except Exception:
            traceback.print_exc()
            RESULTS.setdefault("failed", []).append({"job": str(job[1][0]), "error": traceback.format_exc()})
        collect()
    (out / "draft.json").write_text(json.dumps(RESULTS, indent=1, default=str))
    bad = [
        f"{s} {p['name']} {p['batch']}@{p['context']}"
        for s, r in RESULTS.items()
        if isinstance(r, dict)
        for p in r.get("parity", [])
        if not p["ok"]
    ]
    say("FAILED:" if bad or "failed" in RESULTS else "all checks passed", *bad, *(f["job"] for f in RESULTS.get("failed", [])))


if __name__ == "__main__":
    main()
