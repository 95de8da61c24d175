# ruff: noqa: E501
"""The step of Gemma 4's larger drafters on this GPU: is it right, how long does it take, and which cut is best.

    python benchmarks/gpu_draft_large.py [--out FOLDER] [--sizes 31B 12B 26B-A4B] [--cycles 31B 12B] [--tune 31B] [--wide] [--table] [--deadline 50]

Real shapes, random weights, a shallow target. Checked is the state g before the head, against a float32 drafter that is fed the
same tokens and hidden states (the plain bfloat16 drafter's own error stands beside it), and how far below the best score of that
drafter each guess is. Query norms are 0.25: at 1 the scores of random keys are ±16, softmax picks one key, and rounding decides
which. Two sequences go step by step and must give the plain drafter's tokens. Times are microseconds a step with the L2 cache
flushed before the round, as a verify pass would. --tune: one cut after the other, each with the best of those before. --wide:
bfloat16 too. --table: the kernels of a step. --cycles: cycles of the full model over its plain step, with the plain drafter, with
int8, and with int8 as tuned.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from gpu_common import FAILED, RESULTS, attempt, begin, cycles, finish, kernel_table, kernels, late, save, say, verdict
from tests.rounds import Clock, batch_of, float32_drafter
from torch import Tensor

from outrider.bench.gpu import Rig, collect
from outrider.models.drafter import MTPNet
from outrider.ops.triton.draft_steps import Cuts, SteppedDrafter, unsupported
from outrider.spec.drafter import DraftBatch
from outrider.spec.mtp import MTPDrafter
from outrider.types import SamplingParams

BEST: dict[str, Cuts] = {}  # by size, as tuned
COLD, WARM = SamplingParams(), SamplingParams(temperature=0.8, seed=11)
TRIED: dict[str, tuple[Any, ...]] = {  # in this order; bfloat16 takes half the rows
    "ready_gate": (True, False),
    "gate": ((16, 8), (16, 4), (32, 8)),
    "ready_q": (False, True),
    "q": ((16, 4), (32, 8), (8, 2)),
    "attend": ((256, 8, 32), (256, 4, 32), (512, 4, 32), (512, 4, 16), (512, 8, 16)),
    "pre": ((16, 4), (8, 4)),
    "out": ((16384, 1, 4), (32768, 2, 8), (8192, 1, 4)),
    "down": ((16384, 1, 4), (32768, 2, 8), (8192, 1, 4)),
    "head": ((16, 4, 4), (32, 8, 2)),
}


def error(got: Tensor, want: Tensor) -> float:
    """Of the worst row."""
    return float(((got.float() - want).norm(dim=1) / want.norm(dim=1)).max())


def parity(rig: Rig, exact: MTPNet, stepped: SteppedDrafter, batch: DraftBatch, steps: int) -> dict[str, Any]:
    """Teacher forcing: at every step both get the float32 drafter's token and hidden state. `fed`: two steps in one round, the
    second by the round's own feedback. `short`: how far the guess is below the best score, in standard deviations of the scores."""
    plain, sampling = rig.drafter.model, batch.sampling
    new = MTPDrafter(stepped, rig.model)
    state, bf_state = exact.start(batch.kv, batch.features), plain.start(batch.kv, batch.features)
    token, hidden = batch.last, batch.features
    out = {"g": 0.0, "plain g": 0.0, "short": 0.0, "same": 0.0, "plain same": 0.0}
    for j in range(steps):
        seen = replace(batch, last=token, features=hidden.to(rig.model.dtype), length=batch.length + j)
        e = rig.model.embed(token)
        g, hidden = exact.step(e.float(), seen.features.float(), state)
        z = exact.candidates(g)[1]  # of the whole vocabulary: the large drafters have no clusters
        own = sampling.guess(z, seen.length + 1, rig.ops, None)
        got = new.propose(seen, 1).tokens[:, 0]
        out["g"] = max(out["g"], error(stepped.g[None], g))
        bf_g, _ = plain.step(e, seen.features, bf_state)
        out["plain g"] = max(out["plain g"], error(bf_g, g))
        out["plain same"] += float((sampling.guess(plain.candidates(bf_g)[1], seen.length + 1, rig.ops, None) == own).float().mean()) / steps
        out["same"] += float((got == own).float().mean()) / steps
        if not sampling.any_hot:
            out["short"] = max(out["short"], float(((z.amax(1) - z.gather(1, got[:, None])[:, 0]) / z.std(1)).max()))
        token = own
    both, again = new.propose(batch, 2).tokens, new.propose(batch, 2).tokens
    _, hidden = exact.step(rig.model.embed(batch.last).float(), batch.features.float(), state)
    g, _ = exact.step(rig.model.embed(both[:, 0]).float(), hidden, state)
    out["fed"] = error(stepped.g[None], g)
    return {**{k: round(v, 4) for k, v in out.items()}, "stable": bool(torch.equal(both, again))}


def last_step(drafter: MTPDrafter, batch: DraftBatch, out: Path) -> list[dict[str, Any]]:
    """The kernels of the last of four steps (weights of the first may lie in L2)."""
    events = kernels(lambda: drafter.propose(batch, 4), out)
    heads = [i for i, e in enumerate(events) if e["name"].startswith("head_kernel")]
    return events[heads[-2] + 1 : heads[-1] + 1]


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


def values(name: str, narrow: bool) -> list[Any]:
    def half(value: Any) -> Any:
        return (max(1, value[0] // 2), *value[1:]) if name in ("head", "gate", "q", "pre", "down", "out") else value

    return [value if narrow else half(value) for value in TRIED[name]]


def tune(rig: Rig, stepped: SteppedDrafter, batch: DraftBatch, clock: Clock, title: str) -> SteppedDrafter:
    def us_of(one: SteppedDrafter) -> float:
        return clock.step(MTPDrafter(one, rig.model), batch, 4)

    ready = [stepped.recut(replace(stepped.cuts, **{n: v}), True) for n in TRIED for v in values(n, stepped.narrow)]
    ready += [stepped.recut(replace(stepped.cuts, ready_gate=False, gate=v), True) for v in values("gate", stepped.narrow)]
    ready += [stepped.recut(replace(stepped.cuts, ready_q=True, q=v), True) for v in values("q", stepped.narrow)]
    compiled([(MTPDrafter(one, rig.model), batch, 2) for one in ready])
    best, base = stepped, us_of(stepped)
    say(f"  {title}: {base:.1f} us a step; then, one cut after the other:")
    least = base
    for name in TRIED:
        row, held = {}, best
        for value in values(name, stepped.narrow):
            one = held.recut(replace(held.cuts, **{name: value}), True)
            row[str(value)] = round(us_of(one), 1)
            if row[str(value)] < least - 0.2:
                best, least = one, row[str(value)]
        print(f"      {name:10s} -> {row}")
        RESULTS.setdefault("tuned", {}).setdefault(title, {})[name] = row
    say(f"  {title}: {base:.1f} -> {us_of(best):.1f} us a step: {best.cuts}")
    RESULTS["tuned"][title]["cuts"] = asdict(best.cuts)
    return best


@torch.inference_mode()
def one_size(size: str, clock: Clock, deadline: float, out: Path, tuned: bool, wide: bool, table: bool) -> None:
    rig = Rig.of(size, 6, slots=8, context=4400, tokens=8 * 4400)
    row: dict[str, Any] = RESULTS.setdefault(size, {})
    try:
        for name, w in rig.drafter_weights.items():
            if name.endswith("q_norm"):
                w.fill_(0.25)
        model = rig.drafter.model
        assert unsupported(model) is None, unsupported(model)
        seqs = rig.open(8, 4096, 128)
        made = {"int8": SteppedDrafter(model, pdl=rig.ops.pdl)}
        if wide:
            made["bf16"] = SteppedDrafter(model, narrow=False, pdl=rig.ops.pdl)
        alone, pair = batch_of(rig, seqs, 1024, [COLD]), batch_of(rig, seqs, 1024, [WARM, COLD])
        old, new = rig.drafter, {n: MTPDrafter(m, rig.model) for n, m in made.items()}
        assert all(compiled([(d, b, 2) for d in [old, *new.values()] for b in (alone, pair)])), "a kernel did not compile"
        say(f"{size}: compiled")
        exact = float32_drafter(rig)
        for name, drafter in made.items():
            limit, short = (0.08, 0.4) if name == "int8" else (0.02, 0.1)
            for context, params in ((256, COLD), (1024, COLD), (4096, COLD), (300, WARM)):
                got = parity(rig, exact, drafter, batch_of(rig, seqs, context, [params]), 3)
                good = got["g"] <= limit and got["fed"] <= 2 * limit and got["short"] <= short and got["stable"]
                title = f"{size} {name} context {context}{' with noise' if params is WARM else ''}"
                row.setdefault("parity", {})[title] = got
                verdict(title, good, str(got))
        if not torch.equal(new["int8"].propose(pair, 3).tokens, old.propose(pair, 3).tokens):
            FAILED.append(f"{size} two sequences")
        del exact
        collect()
        for context, k in ((1024, 4), (1024, 16), (256, 4), (4096, 4)):
            batch = batch_of(rig, seqs, context, [COLD])
            line = {name: clock.step(d, batch, k) for name, d in {"old": old, **new}.items()}
            row[f"us a step, context {context}, K {k}"] = line
            say(f"  {size} context {context} K {k}: us a step", {a: round(v, 1) for a, v in line.items()})
        for name, drafter in made.items():
            if table:
                apart = MTPDrafter(drafter.recut(drafter.cuts, False), rig.model)
                kernel_table(last_step(apart, alone, out), f"{size} {name} without PDL")
            if tuned and not late(deadline):
                best = tune(rig, drafter, alone, clock, f"{size} {name}")
                if name == "int8":
                    BEST[size] = best.cuts
                line = {str(k): round(clock.step(MTPDrafter(best, rig.model), alone, k), 1) for k in (4, 16)}
                say(f"  {size} {name} tuned, context 1024: us a step at K", line)
    finally:
        rig.free()
        save(out / "draft_large.json")


def variants(size: str, model: Any) -> dict[str, Any]:
    """int8, and int8 as tuned; another size's cuts where this one was not tuned."""
    int8 = SteppedDrafter(model, pdl=model.ops.pdl)
    tuned = BEST.get(size) or next(iter(BEST.values()), None)
    return {"int8": int8} | ({"tuned": int8.recut(tuned, model.ops.pdl)} if tuned else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/gpu_draft_large")
    parser.add_argument("--sizes", nargs="*", default=["31B", "12B", "26B-A4B"])
    parser.add_argument("--cycles", nargs="*", default=["31B", "12B"])
    parser.add_argument("--tune", nargs="*", default=["31B"])
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--deadline", type=float, default=50.0, help="seconds after which nothing is tuned any more")
    args = parser.parse_args()
    out = begin(args.out)
    clock = Clock(torch.device("cuda"))
    for size in args.sizes:
        attempt(size, one_size, size, clock, args.deadline, out, size in args.tune, args.wide, args.table)
    for size in args.cycles:
        attempt(f"cycles {size}", cycles, size, lambda model, size=size: variants(size, model))
    finish(out / "draft_large.json")


if __name__ == "__main__":
    main()
