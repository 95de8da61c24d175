# ruff: noqa: E501
"""A small drafter's round in one launch on this GPU: is it right, how long does a step take, and where does the time go.

    python benchmarks/gpu_draft.py [--out FOLDER] [--sizes E2B E4B] [--cycles E2B]

Real shapes, random weights, a shallow target. For every size: the guesses and the last state against a float32 drafter (beside
those of the step-by-step path); microseconds a step, old and new, with the L2 cache flushed before the round as a verify pass
would; variants; clock cycles of each phase. --cycles: whole cycles of the full model with the old and the new drafter.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from gpu_common import FAILED, RESULTS, attempt, begin, cycles, finish, save, say, verdict
from tests.rounds import Clock, batch_of, float32_drafter, follow, gentle, plain_round

from outrider.bench.gpu import Rig, collect
from outrider.ops.triton.draft import FusedDrafter, unsupported
from outrider.spec.drafter import DraftBatch
from outrider.spec.mtp import MTPDrafter
from outrider.types import SamplingParams

LAYERS = {"E2B": 10, "E4B": 12}
VARIANTS: dict[str, dict[str, Any]] = {
    "new": {}, "16 splits": dict(splits=(16, 32)), "no pdl": dict(pdl=False), "probe": dict(probe=512),
}  # fmt: skip
TRIED = {"E2B": tuple(VARIANTS), "E4B": ("new",)}  # each takes three seconds to compile, whatever the number of cores
CASES = [
    (1, 256, False),
    (1, 1024, False),
    (1, 4096, False),
    (1, 1024, True),
    (2, 300, True),  # step by step
]
COLD = SamplingParams()
WARM = SamplingParams(temperature=0.8, seed=11)


def made(model: Any, name: str) -> FusedDrafter:
    return FusedDrafter(model, **{"pdl": model.ops.pdl, **VARIANTS[name]})


def phase_table(rig: Rig, fused: FusedDrafter, batch: DraftBatch, steps: int, step_us: float) -> dict[str, Any]:
    """Per phase (layers of a kind together): clock cycles of work (mean and most over programs) and of waiting (least: the
    barrier itself), turned into microseconds by the step's own time. What is fetched before a wait counts as the phase before."""
    for _ in range(2):
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
    names += ["head", "rank", "score"]
    table: dict[str, list[float]] = {}
    for p, name in enumerate(names):
        which = torch.arange(1, steps - 1) * fused.phases + p
        row = table.setdefault(name, [0, 0.0, 0.0, 0.0])
        row[0] += 1
        row[1] += float(work[:, which].mean()) * scale
        row[2] += float(work[:, which].amax(0).mean()) * scale
        row[3] += float(wait[:, which + 1].amin(0).mean()) * scale
    first = float((clocks[:, fused.phases, 1] - clocks[:, 0, 1]).mean()) * scale
    out = {n: [r[0], *(round(v / r[0], 2) for v in r[1:])] for n, r in table.items()}
    return {"cycles a step": float(each), "first step us": first, "us each: count, mean work, most work, barrier": out}


class Bench:
    """One size: its rig, and the fused drafters that compile while others do."""

    def __init__(self, size: str):
        self.size = size
        self.rig = Rig.of(size, LAYERS[size], slots=8, context=4400, tokens=8 * 4400)
        self.seqs = self.rig.open(8, 4096, 128)
        gentle(self.rig)
        assert self.rig.drafter is not None
        self.model = self.rig.drafter.model
        assert unsupported(self.model) is None, unsupported(self.model)
        self.row: dict[str, Any] = RESULTS.setdefault(size, {})
        self.fused = {name: made(self.model, name) for name in TRIED[size]}

    def compiling(self, pool: ThreadPoolExecutor) -> list[tuple[str, Any]]:
        batch = batch_of(self.rig, self.seqs, 300, [COLD])

        @torch.inference_mode()
        def one(fused: FusedDrafter) -> None:
            MTPDrafter(fused, self.rig.model).propose(batch, 2)

        @torch.inference_mode()
        def old() -> None:
            for n in (1, 2):
                for params in (COLD, WARM):
                    plain_round(self.model, self.rig, batch_of(self.rig, self.seqs, 300, [params] * n), 1)

        return [("old", pool.submit(old)), *((name, pool.submit(one, f)) for name, f in self.fused.items())]

    def compiled(self, jobs: list[tuple[str, Any]]) -> None:
        for name, job in jobs:
            error = job.exception()
            if error is not None:
                say(f"{self.size} {name}: {type(error).__name__}: {str(error)[:400]}")
                FAILED.append(f"{self.size} {name}")
                self.fused.pop(name, None)
        torch.cuda.synchronize()
        say(f"{self.size}: compiled; alarms {[n for n, f in self.fused.items() if f.alarmed]}")

    @torch.inference_mode()
    def parity(self) -> None:
        reference = float32_drafter(self.rig)
        for n, context, hot in CASES:
            batch = batch_of(self.rig, self.seqs, context, [WARM if hot else COLD] * n)
            first, g = plain_round(self.model, self.rig, batch, 1)
            tokens, _ = plain_round(self.model, self.rig, batch, 6)
            seen = follow(reference, self.rig, batch, tokens)
            line = {"old": [follow(reference, self.rig, batch, first).error(g), seen.short, seen.same]}
            good = True
            for name, fused in list(self.fused.items())[:1]:
                drafter = MTPDrafter(fused, self.rig.model)
                one = follow(reference, self.rig, batch, drafter.propose(batch, 1).tokens)
                error = one.error(fused.states[:n]) if n <= fused.most else 0.0
                tokens = drafter.propose(batch, 6).tokens
                stable = all(torch.equal(tokens, drafter.propose(batch, 6).tokens) for _ in range(3))
                seen = follow(reference, self.rig, batch, tokens)
                line[name] = [error, seen.short, seen.same]
                good &= error <= 1e-2 and (seen.short <= 0.1) and seen.same >= (0.6 if hot else 0.5) and stable and not fused.alarmed
            self.row.setdefault("parity", []).append({"batch": n, "context": context, "hot": hot, "ok": good, **line})
            show = {k: [round(v, 5) for v in values] for k, values in line.items()}
            verdict(f"{self.size} batch {n} context {context}{' with noise' if hot else ''}", good, f"state error, short, same: {show}")

    @torch.inference_mode()
    def speed(self, clock: Clock) -> None:
        old = self.rig.drafter
        assert old is not None
        timed = [n for n in self.fused if not n.startswith("probe")]
        for n, context, k in ((1, 1024, 16), (1, 1024, 4), (1, 256, 4), (1, 4096, 4)):
            batch = batch_of(self.rig, self.seqs, context, [COLD] * n)
            line = {"old": clock.step(old, batch, k)}
            for name in timed if (n, context) == (1, 1024) else timed[:1]:
                new = MTPDrafter(self.fused[name], self.rig.model)
                line[name] = clock.step(new, batch, k)
            self.row[f"us a step, batch {n}, context {context}, K {k}"] = line
            alarm = "ALARM" if any(f.alarmed for f in self.fused.values()) else ""
            say(f"  {self.size} batch {n} context {context} K {k}: us a step", {n: round(v, 1) for n, v in line.items()}, alarm)
        batch = batch_of(self.rig, self.seqs, 1024, [COLD])
        if "probe" in self.fused:
            table = phase_table(self.rig, self.fused["probe"], batch, 8, self.row["us a step, batch 1, context 1024, K 16"]["new"])
            self.row["probe"] = table
            say(
                f"  {self.size}: {table['cycles a step']:.0f} cycles a step, first step {table['first step us']:.1f} us; us each (count, mean work, most work, barrier):"
            )
            for phase, values in table["us each: count, mean work, most work, barrier"].items():
                print(f"      {phase:18s} {values}")

    def best(self) -> str:
        line = self.row.get("us a step, batch 1, context 1024, K 16", {})
        return min((n for n in line if n != "old"), key=lambda n: line[n], default="new")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/gpu_draft")
    parser.add_argument("--sizes", nargs="*", default=["E2B", "E4B"])
    parser.add_argument("--cycles", nargs="*", default=["E2B"])
    args = parser.parse_args()
    out = begin(args.out)
    clock = Clock(torch.device("cuda"))
    benches = [b for b in (attempt(size, Bench, size) for size in args.sizes) if b is not None]
    with ThreadPoolExecutor(12) as pool:
        jobs = [(b, b.compiling(pool)) for b in benches]
        for b, mine in jobs:
            b.compiled(mine)
    variant = "new"
    for b in benches:
        attempt(f"{b.size} parity", b.parity)
        attempt(f"{b.size} speed", b.speed, clock)
        variant = b.best() if b.size == "E2B" else variant
        save(out / "draft.json")
    for b in benches:
        b.fused.clear()
        b.rig.free()
    benches.clear()
    collect()
    for size in args.cycles:
        attempt(f"cycles {size}", cycles, size, lambda model: {variant: made(model, variant)})
    finish(out / "draft.json")


if __name__ == "__main__":
    main()
