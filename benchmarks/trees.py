"""Do drafts that branch pay? Plain decoding, lines and trees in turn, in one process, on the same prompts.

    python benchmarks/trees.py [--per 1] [--tokens 256] [--temperatures 0,1] [--seconds 0] [--out trees.json]

Spec-Bench's prompts (`benchmarks/data`), so many of each category. Every prompt is answered three times, in an order
that changes from prompt to prompt; each way has a controller of its own, which starts from the same costs and card. All
three texts must be the same. Then, with --second: how often the drafter's second best token is right where its best is
wrong (on the answers' own text).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

from outrider import LLM, SamplingParams
from outrider.config import EngineConfig
from outrider.spec.choose import SamplingBatch
from outrider.spec.controller import Controller
from outrider.spec.mtp import MTPDrafter

WAYS: dict[str, tuple[int | None, int | None]] = {
    "plain": (0, 0),
    "lines": (None, 0),
    "trees": (None, 16),
}  # draft tokens, tree
Sums = dict[str, float]


def prompts(per: int) -> list[tuple[str, str]]:
    found = defaultdict(list)
    for line in (Path(__file__).parent / "data" / "spec_bench_question.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found[row["category"]].append(str(row["turns"][0]))
    spread = {name: texts[:: max(1, len(texts) // per)][:per] for name, texts in found.items()}
    return [(name, texts[i]) for i in range(per) for name, texts in spread.items() if i < len(texts)]


def answer(
    llm: LLM, controller: Controller, ids: list[int], params: SamplingParams, k: int | None, tree: int | None, *to: Sums
) -> list[int]:
    """One request, alone, with a controller of its own: its tokens. What it took is added to each of `to`."""
    engine, tokens, stats = llm.engine, list[int](), None
    engine.policy.controller = controller
    (request,) = llm.requests(ids, params, k, tree=tree)
    engine.submit(request)
    while engine.busy:
        for event in engine.step():
            tokens += event.tokens
            stats = event.stats or stats
    assert stats is not None
    for sums in to:
        sums["made"] += stats.new_tokens - stats.first_emitted
        sums["seconds"] += stats.decode_s
        for name in ("cycles", "drafted", "accepted", "trees", "branched"):
            sums[name] += getattr(stats, name)
    return tokens


@torch.inference_mode()
def second_best(llm: LLM, ids: list[int], answer: list[int], temperature: float, seed: int) -> tuple[int, int, int]:
    """At every token of an answer: how many, how often the best guess is right, how often the second where the best is
    wrong."""
    runner, drafter, text = llm.engine.runner, llm.drafter, [*ids, *answer]
    assert isinstance(drafter, MTPDrafter)
    slots, count = torch.tensor(runner.scratch_slots(1, len(text))), len(text)
    as_rows = lambda n: (torch.zeros(n, dtype=torch.int64), torch.tensor([0, n], dtype=torch.int32), n, count)  # noqa: E731
    view = runner.store.view(slots, torch.arange(count), *as_rows(count))
    features = runner.model.forward(torch.tensor(text), view, runner.taps).features
    at = torch.arange(len(ids) - 1, count - 1)  # the newest token of each guess
    params = SamplingParams(temperature=temperature, seed=seed)
    sampling = SamplingBatch.build([params], [[0]], [[]], runner.vocab, runner.device).select(torch.zeros_like(at))
    state = drafter.model.start(runner.store.view(slots, at - 1, *as_rows(len(at))), features[at - 1])
    g, _ = drafter.model.step(
        runner.model.embed(torch.tensor(text)[at]), features[at - 1, : runner.model.config.hidden], state
    )
    ids_of, logits = drafter.model.candidates(
        g, sampling.cluster_bonus(drafter.model.cluster_ids, at + 1, runner.model.ops)
    )
    best = sampling.scores(logits.float(), at + 1, ids_of).topk(2).indices
    tokens = best if ids_of is None else ids_of.gather(1, best)
    right = tokens == torch.tensor(text)[at + 1][:, None]
    runner.close_scratch()  # the engine has one slot, and wants it back
    return len(at), int(right[:, 0].sum()), int((right[:, 1] & ~right[:, 0]).sum())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--per", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--seconds", type=float, default=0.0, help="no further prompt after so many; 0: all")
    parser.add_argument("--second", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    llm = LLM.load(args.model, engine=EngineConfig(max_batch=1, prefix_cache=False))
    engine, start = llm.engine, llm.engine.controller
    temperatures = [float(t) for t in args.temperatures.split(",")]
    sums: dict[tuple[float, str, str], Sums] = defaultdict(lambda: defaultdict(float))
    seconds: dict[float, list[int]] = {t: [0, 0, 0] for t in temperatures}
    controllers = {(t, way): start.fresh(start.drafters) for t in temperatures for way in WAYS}
    turn = 0
    for category, text in prompts(args.per):
        ids = llm.chat_prompt([{"role": "user", "content": text}])
        if len(ids) + args.tokens > engine.max_context:
            continue
        for temperature in temperatures:
            if args.seconds and time.perf_counter() - began > args.seconds:
                break
            texts, order = {}, list(WAYS)
            order = order[turn % 3 :] + order[: turn % 3]
            turn += 1
            for way in order:
                params = SamplingParams(temperature=temperature, seed=turn, max_tokens=args.tokens)
                to = [sums[temperature, where, way] for where in (category, "all")]
                texts[way] = answer(llm, controllers[temperature, way], ids, params, *WAYS[way], *to)
            now = {way: s["made"] / s["seconds"] for way in WAYS if (s := sums[temperature, "all", way])["seconds"]}
            print(
                f"{category}, T {temperature}: so far " + ", ".join(f"{w} {v:.1f}" for w, v in now.items()),
                file=sys.stderr,
                flush=True,
            )
            assert texts["plain"] == texts["lines"] == texts["trees"], "the texts differ"
            if args.second:
                got = second_best(llm, ids, texts["plain"], temperature, turn)
                seconds[temperature] = [a + b for a, b in zip(seconds[temperature], got)]
    rows = []
    for temperature in temperatures:
        for category in dict.fromkeys(c for t, c, _ in sums if t == temperature):
            speed = {
                way: s["made"] / s["seconds"] for way in WAYS if (s := sums[temperature, category, way])["seconds"]
            }
            if len(speed) < len(WAYS):
                continue
            lines, trees = sums[temperature, category, "lines"], sums[temperature, category, "trees"]
            rows.append({
                "temperature": temperature, "category": category, **{way: round(v, 1) for way, v in speed.items()},
                "lines/plain": round(speed["lines"] / speed["plain"], 3),
                "trees/plain": round(speed["trees"] / speed["plain"], 3),
                "trees/lines": round(speed["trees"] / speed["lines"], 3),
                "a cycle, lines": round(1 + lines["accepted"] / lines["cycles"], 2),
                "a cycle, trees": round(1 + trees["accepted"] / trees["cycles"], 2),
                "rows, lines": round(lines["drafted"] / lines["cycles"], 2),
                "rows, trees": round(trees["drafted"] / trees["cycles"], 2),
                "of branches": round(trees["branched"] / max(1.0, trees["accepted"]), 3),
            })  # fmt: skip
            print(" ".join(f"{k} {v}" for k, v in rows[-1].items()))
        count, best, second = seconds[temperature]
        if count:
            print(f"T {temperature}: of {count} tokens the best guess is right {best / count:.3f}, the second where "
                  f"it is wrong "
                  f"{second / (count - best):.3f}")  # fmt: skip
    if args.out is not None:
        args.out.write_text(json.dumps({"rows": rows, "second": seconds}, indent=1))


if __name__ == "__main__":
    main()
