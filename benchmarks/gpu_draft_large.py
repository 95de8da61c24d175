# ruff: noqa: E501
"""The step of Gemma 4's larger drafters on this GPU: is it right, how long does it take, and which cut is best.

    python benchmarks/gpu_draft_large.py [--out FOLDER] [--sizes 31B 12B 26B-A4B] [--cycles 31B 12B] [--deadline 50]

Real shapes, random weights, a shallow target. Checked is the state g before the head, against a float32 drafter that is fed the
same tokens and hidden states (the plain bfloat16 drafter's own error stands beside it), and how far below the best score of that
drafter each guess is. Query norms are 0.25: at 1 the scores of random keys are ±16, softmax picks one key, and rounding decides
which. Times are microseconds a step with the L2 cache flushed before the round, as a verify pass would. --cycles: cycles of the
full model over its plain step, with the plain drafter and with int8.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor

from outrider.bench.gpu import Rig, collect
from outrider.engine.graphs import Graph
from outrider.models.gemma4_assistant import Gemma4Assistant
from outrider.ops.reference import ReferenceOps
from outrider.ops.triton.draft_steps import NARROW, WIDE, Cuts, SteppedDrafter, unsupported
from outrider.spec.choose import SamplingBatch
from outrider.spec.drafter import DraftBatch
from outrider.spec.mtp import MTPDrafter
from outrider.types import SamplingParams

RESULTS: dict[str, Any] = {}
FAILED: list[str] = []
BEGAN = time.perf_counter()
COLD, WARM = SamplingParams(), SamplingParams(temperature=0.8, seed=11)
TRIED: dict[str, tuple[Any, ...]] = {  # of each product, int8; bfloat16 takes half the rows
    "early": (True, False),
    "soon": (True, False),
    "head": ((16, 4, 4), (8, 4, 6), (8, 4, 8), (32, 8, 2), (16, 8, 3), (8, 2, 8), (4, 1, 16), (8, 1, 8)),
    "gate": ((16, 8), (16, 4), (32, 8), (32, 16)),
    "q": ((16, 4), (8, 4), (8, 2), (32, 8), (32, 4)),
    "down": ((16384, 1, 4), (16384, 2, 4), (16384, 4, 4), (8192, 1, 4), (32768, 2, 8), (8192, 4, 2)),
    "out": ((16384, 1, 4), (16384, 2, 4), (16384, 4, 4), (8192, 1, 4), (32768, 2, 8), (8192, 4, 2)),
    "units": (256, 128, 512),
    "warps": (8, 4),
    "pre": ((16, 4), (8, 4), (32, 8), (4, 2)),
}


def say(*parts: object) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f}]", *parts, flush=True)


def late(deadline: float) -> bool:
    return time.perf_counter() - BEGAN > deadline


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


def error(got: Tensor, want: Tensor) -> float:
    """Of the worst row."""
    return float(((got.float() - want).norm(dim=1) / want.norm(dim=1)).max())


def parity(rig: Rig, exact: Gemma4Assistant, stepped: SteppedDrafter, batch: DraftBatch, steps: int) -> dict[str, Any]:
    """Teacher forcing: at every step both get the float32 drafter's token and hidden state. `fed`: two steps in one round, the
    second by the round's own feedback. `short`: how far the guess is below the best score, in standard deviations of the scores."""
    plain, sampling, n = rig.drafter.model, batch.sampling, batch.last.shape[0]
    new = MTPDrafter(stepped, rig.model)
    state, bf_state = exact.start(batch.kv), plain.start(batch.kv)
    token, hidden = batch.last, batch.features
    out = {"g": 0.0, "plain g": 0.0, "short": 0.0, "same": 0.0, "plain same": 0.0}
    for j in range(steps):
        seen = replace(batch, last=token, features=hidden.to(rig.model.dtype), length=batch.length + j)
        e = rig.model.embed(token)
        g, hidden = exact.step(e.float(), seen.features.float(), state)
        z = exact.full_logits(g)
        own = sampling.guess(z, seen.length + 1, rig.ops, None)
        got = new.propose(seen, 1).tokens[:, 0]
        out["g"] = max(out["g"], error(stepped.g[:n], g))
        bf_g, _ = plain.step(e, seen.features, bf_state)
        out["plain g"] = max(out["plain g"], error(bf_g, g))
        out["plain same"] += float((sampling.guess(plain.full_logits(bf_g), seen.length + 1, rig.ops, None) == own).float().mean()) / steps
        out["same"] += float((got == own).float().mean()) / steps
        if not sampling.any_hot:
            out["short"] = max(out["short"], float(((z.amax(1) - z.gather(1, got[:, None])[:, 0]) / z.std(1)).max()))
        token = own
    both, again = new.propose(batch, 2).tokens, new.propose(batch, 2).tokens
    _, hidden = exact.step(rig.model.embed(batch.last).float(), batch.features.float(), state)
    g, _ = exact.step(rig.model.embed(both[:, 0]).float(), hidden, state)
    out["fed"] = error(stepped.g[:n], g)
    return {**{k: round(v, 4) for k, v in out.items()}, "stable": bool(torch.equal(both, again))}


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

    def step(self, drafter: MTPDrafter, batch: DraftBatch, k: int) -> float:
        return (self._us(lambda: drafter.propose(batch, k)) - self.base) / k


def kernel_table(drafter: MTPDrafter, batch: DraftBatch, title: str, out: Path) -> None:
    """Of the last of four steps (weights of the first may lie in L2)."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        drafter.propose(batch, 4)
        torch.cuda.synchronize()
    trace = out / "trace.json"
    prof.export_chrome_trace(str(trace))
    events = sorted((e for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    trace.unlink()
    heads = [i for i, e in enumerate(events) if e["name"].startswith("head_kernel")]
    last = events[heads[-2] + 1 : heads[-1] + 1]
    rows: dict[str, list[float]] = defaultdict(list)
    for e in last:
        rows[
            f"{e['name'][:30]} grid {e['args'].get('grid')} x{e['args'].get('block', ['?'])[0]} regs {e['args'].get('registers per thread')}"
        ].append(e["dur"])
    say(f"  {title}: {len(last)} kernels, {sum(e['dur'] for e in last):.1f} us in kernels")
    for name, d in rows.items():
        print(f"      {sum(d):7.1f} us {len(d):3d} x {sum(d) / len(d):7.2f}  {name}")
    RESULTS.setdefault("kernels", {})[title] = {n: d for n, d in rows.items()}


def compiled(jobs: list[tuple[MTPDrafter, DraftBatch, int]]) -> list[bool]:
    """All in parallel; False where one can't be."""

    def one(job: tuple[MTPDrafter, DraftBatch, int]) -> bool:
        try:
            with torch.inference_mode():
                job[0].propose(job[1], job[2])
            return True
        except Exception as problem:
            say(f"  left out: {type(problem).__name__}: {str(problem)[:160]}")
            return False

    with ThreadPoolExecutor(14) as pool:
        done = list(pool.map(one, jobs))
    torch.cuda.synchronize()
    return done


def variants(cuts: Cuts, narrow: bool) -> list[tuple[str, Cuts]]:
    out = []
    for name, values in TRIED.items():
        for value in values:
            if not narrow and name in ("head", "gate", "q", "pre"):
                value = (max(1, value[0] // 2), *value[1:])
            if not narrow and name in ("down", "out"):
                value = (value[0] // 2, *value[1:])
            if getattr(cuts, name) != value:
                out.append((name, replace(cuts, **{name: value})))
    return out


def tune(rig: Rig, stepped: SteppedDrafter, batch: DraftBatch, clock: Clock, title: str) -> SteppedDrafter:
    """One product at a time against the same base, then the best of each together."""
    base = clock.step(MTPDrafter(stepped, rig.model), batch, 4)
    tried = variants(stepped.cuts, stepped.narrow)
    made = [stepped.recut(cuts, True) for _, cuts in tried]
    good = compiled([(MTPDrafter(m, rig.model), batch, 2) for m in made])
    best: dict[str, tuple[float, Any]] = {}
    table: dict[str, dict[str, float]] = defaultdict(dict)
    for (name, cuts), one, ok in zip(tried, made, good):
        if ok:
            us = clock.step(MTPDrafter(one, rig.model), batch, 4)
            table[name][str(getattr(cuts, name))] = round(us, 1)
            if us < min(base - 0.3, best.get(name, (base, None))[0]):
                best[name] = (us, getattr(cuts, name))
    say(f"  {title}: base {base:.1f} us a step; with one thing changed:")
    for name, row in table.items():
        print(f"      {name:6s} {getattr(stepped.cuts, name)!s:16s} -> {row}")
    together = stepped.recut(replace(stepped.cuts, **{name: value for name, (_, value) in best.items()}), True)
    if best and compiled([(MTPDrafter(together, rig.model), batch, 2)])[0]:
        us = clock.step(MTPDrafter(together, rig.model), batch, 4)
        say(f"  {title}: all the best together {us:.1f} us a step: {together.cuts}")
        RESULTS.setdefault("tuned", {})[title] = {"base": base, "each": table, "together": us, "cuts": asdict(together.cuts)}
        return together if us < base else stepped
    return stepped


@torch.inference_mode()
def one_size(size: str, clock: Clock, deadline: float, out: Path) -> None:
    rig = Rig.of(size, 6, slots=8, context=4400, tokens=8 * 4400)
    row: dict[str, Any] = RESULTS.setdefault(size, {})
    try:
        for name, w in rig.drafter_weights.items():
            if name.endswith("q_norm"):
                w.fill_(0.25)
        model = rig.drafter.model
        assert unsupported(model) is None, unsupported(model)
        seqs = rig.open(8, 4096, 128)
        made = {"bf16": SteppedDrafter(model, narrow=False, pdl=rig.ops.pdl), "int8": SteppedDrafter(model, pdl=rig.ops.pdl)}
        batches = {n: batch_of(rig, seqs, 1024, [COLD] * n) for n in (1, 2, 8)}
        assert all(compiled([(MTPDrafter(m, rig.model), b, 2) for m in made.values() for b in batches.values()])), (
            "a kernel did not compile"
        )
        say(f"{size}: compiled")
        wide = {k: w.float() if w.is_floating_point() else w for k, w in rig.drafter_weights.items()}
        exact = Gemma4Assistant(model.config, wide, ReferenceOps(), rig.model)
        for name, limit, short in (("bf16", 0.02, 0.1), ("int8", 0.08, 0.4)):
            for n, context, params in ((1, 256, COLD), (1, 1024, COLD), (1, 4096, COLD), (2, 1024, COLD), (8, 1024, COLD), (2, 300, WARM)):
                got = parity(rig, exact, made[name], batch_of(rig, seqs, context, [params] * n), 3)
                good = got["g"] <= limit and got["fed"] <= 2 * limit and got["short"] <= short and got["stable"]
                title = f"{size} {name} batch {n} context {context}{' with noise' if params is WARM else ''}"
                row.setdefault("parity", {})[title] = got
                if not good:
                    FAILED.append(title)
                say(f"  {'ok  ' if good else 'FAIL'} {title}: {got}")
        del exact, wide
        collect()
        old, new = rig.drafter, {n: MTPDrafter(m, rig.model) for n, m in made.items()}
        for n, context, k in ((1, 1024, 4), (1, 1024, 16), (1, 256, 4), (1, 4096, 4), (2, 1024, 4), (4, 1024, 4), (8, 1024, 4)):
            batch = batch_of(rig, seqs, context, [COLD] * n)
            line = {name: clock.step(d, batch, k) for name, d in {"old": old, **new}.items()}
            row[f"us a step, batch {n}, context {context}, K {k}"] = line
            say(f"  {size} batch {n} context {context} K {k}: us a step", {a: round(v, 1) for a, v in line.items()})
        kernel_table(MTPDrafter(made["int8"].recut(NARROW, False), rig.model), batches[1], f"{size} int8 without PDL", out)
        if size == "31B":
            kernel_table(MTPDrafter(made["bf16"].recut(WIDE, False), rig.model), batches[1], f"{size} bf16 without PDL", out)
        for name in ("int8", "bf16"):
            if late(deadline) or (name == "bf16" and size != "31B"):
                continue
            best = tune(rig, made[name], batches[1], clock, f"{size} {name}")
            if best is not made[name]:
                line = {str(k): round(clock.step(MTPDrafter(best, rig.model), batches[1], k), 1) for k in (4, 16)}
                say(f"  {size} {name} tuned, context 1024: us a step at K", line)
    finally:
        rig.free()
        (out / "draft_large.json").write_text(json.dumps(RESULTS, indent=1, default=str))


@torch.inference_mode()
def cycles(size: str) -> None:
    rig = Rig.of(size, slots=1, context=2048)
    try:
        seqs, old = rig.open(1, 1024, 128), rig.drafter
        row: dict[str, Any] = {"ar": rig.graph(seqs, 0, 1024, 1280).time()}
        for name, drafter in (("old", old), ("int8", MTPDrafter(SteppedDrafter(old.model, pdl=rig.ops.pdl), rig.model))):
            rig.drafter = drafter
            for k in (4, 8, 16):
                row[f"{name} {k}"] = rig.graph(seqs, k, 1024, 1280).time() / row["ar"]
        RESULTS[f"cycles {size}"] = row
        say(f"{size} cycle / AR at 1k:", {n: round(v, 3) for n, v in row.items()})
    finally:
        rig.free()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/gpu_draft_large")
    parser.add_argument("--sizes", nargs="*", default=["31B", "12B", "26B-A4B"])
    parser.add_argument("--cycles", nargs="*", default=["31B", "12B"])
    parser.add_argument("--deadline", type=float, default=50.0, help="seconds after which nothing is tuned any more")
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
            FAILED.append(f"{job[0].__name__} {job[1][0]}")
        collect()
    (out / "draft_large.json").write_text(json.dumps(RESULTS, indent=1, default=str))
    say("FAILED:" if FAILED else "all checks passed", *FAILED)


if __name__ == "__main__":
    main()
