"""Do drafts that branch pay? Plain decoding, chains and trees in turn, in one process, on the same prompts.

    python benchmarks/trees.py [--per 1] [--tokens 256] [--temperatures 0,1] [--seconds 0] [--out trees.json]
    python benchmarks/trees.py --sections bits cycles [--sizes 31B E2B]      # on a GPU, with dummy weights

tokens: Spec-Bench's prompts (`benchmarks/data`), so many of each category. Every prompt is answered three times, in an
order that changes from prompt to prompt; each way has a controller of its own, which starts from the same costs and
card. All three texts must be the same. bits: rows on the accepted paths of trees have the logits of plain decoding.
cycles: one captured graph of a plain step, of chains and of trees.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from gpu_common import RESULTS, attempt, finish, say, verdict
from gpu_rig import Rig, plain_run, tree_run
from outrider import LLM, SamplingParams
from outrider.config import EngineConfig
from outrider.ops.trees import TreeRows
from outrider.spec.controller import Controller
from outrider.spec.cost import CostTable
from outrider.types import Draft, DraftTree

# draft tokens (None: auto), tokens of a tree (0: chains)
WAYS: dict[str, tuple[int | None, int | None]] = {"plain": (0, 0), "chains": (None, 0), "trees": (None, 16)}
SHAPE = [0, 1, 2, 3, 4, 0, 1, 6, 2, 8, 0, 11, 12, 13, 14, 3]  # 16 tokens, 5 deep: the row that each follows
Sums = dict[str, float]


def prompts(per: int) -> list[tuple[str, str]]:
    by_category = defaultdict(list)
    for line in (Path(__file__).parent / "data" / "spec_bench_question.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        by_category[row["category"]].append(str(row["turns"][0]))
    spread = {name: texts[:: max(1, len(texts) // per)][:per] for name, texts in by_category.items()}
    return [(name, texts[i]) for i in range(per) for name, texts in spread.items() if i < len(texts)]


def answer(llm: LLM, controller: Controller, ids: list[int], params: SamplingParams, way: str, to: list[Sums]) -> Any:
    """One request, alone, with a controller of its own: its tokens. What it took is added to each of `to`."""
    engine = llm.engine
    tokens = list[int]()
    stats = None
    engine.policy.controller = controller
    (request,) = llm.requests(ids, params, WAYS[way][0], tree=WAYS[way][1])
    engine.submit(request)
    while engine.busy:
        for event in engine.step():
            tokens += event.tokens
            stats = event.stats or stats
    assert stats is not None
    for sums in to:
        sums["made"] += stats.new_tokens - stats.first_emitted
        sums["seconds"] += stats.decode_s
        for name in ("cycles", "drafted", "accepted", "branched"):
            sums[name] += getattr(stats, name)
    return tokens


def tokens(args: argparse.Namespace) -> None:
    llm = LLM.load(args.model, engine=EngineConfig(max_batch=1, max_context=2048, prefix_cache=False), say=say)
    start = llm.engine.controller
    names = list(WAYS)
    for temperature in (float(t) for t in args.temperatures.split(",")):
        sums: dict[tuple[str, str], Sums] = defaultdict(lambda: defaultdict(float))
        tables = {way: CostTable.from_json(start.cost.to_json()) for way in WAYS}
        controllers = {way: Controller(cost, start.drafters, start.acceptance.profiles) for way, cost in tables.items()}
        began = time.perf_counter()
        encoded = [(c, llm.chat_prompt([{"role": "user", "content": text}])) for c, text in prompts(args.per)]
        encoded = [(c, ids) for c, ids in encoded if len(ids) + args.tokens <= llm.engine.max_context]
        for turn, (category, ids) in enumerate([encoded[0], *encoded]):  # the first one twice: on a GPU it captures
            if turn == 1:
                sums.clear()
            if args.seconds and turn > 1 and time.perf_counter() - began > args.seconds:
                break
            params = SamplingParams(temperature=temperature, seed=turn, max_tokens=args.tokens)
            texts = {
                way: answer(llm, controllers[way], ids, params, way, [sums[category, way], sums["all", way]])
                for way in names[turn % 3 :] + names[: turn % 3]
            }
            if any(text != texts["plain"] for text in texts.values()):
                verdict(f"T {temperature}: the same text whichever way", False, f"prompt {turn}, {category}")
        for category in dict.fromkeys(c for c, _ in sums):
            row = {}
            for way in WAYS:
                s = sums[category, way]
                row[way] = {"tokens/s": s["made"] / max(1e-9, s["seconds"])}
                row[way] |= {n: s[n] / max(1.0, s["cycles"]) for n in ("drafted", "accepted", "branched")}
                row[way]["over plain"] = row[way]["tokens/s"] / max(1e-9, row["plain"]["tokens/s"])
            RESULTS[f"tokens T {temperature} {category}"] = row
            say(f"T {temperature} {category}:", {w: {n: round(v, 3) for n, v in r.items()} for w, r in row.items()})


def bits(size: str, layers: int) -> None:
    with Rig.of(size, layers, slots=2, context=2048, compiled=True) as rig:
        for batch in (1, 2):
            seqs = rig.open(batch, 1020, 160)
            got = tree_run(rig, seqs, 1020, SHAPE, *plain_run(rig, seqs, 1020, 48))
            rig.close(seqs)
            note = f"{got.tokens} tokens in {got.cycles} cycles, {got.accepted:.2f} drafts taken a cycle"
            ok = got.equal_tokens and got.equal_logits and got.accepted > 1.0
            verdict(f"tree = chain, bits, {size}, {layers} layers, batch {batch}", ok, note)


def cycles(size: str) -> None:
    """Median milliseconds of one graph; drafted: with the drafter's part, otherwise the drafts are at hand."""
    with Rig.of(size, None, slots=2, context=2048, compiled=True) as rig:
        seqs = rig.open(1, 1024, 128)
        tree = TreeRows.of([DraftTree((), SHAPE[:15])], torch.zeros((1, 15), dtype=torch.int64, device=rig.device))
        some = torch.arange(1, 17, device=rig.device)[None]

        def chain(last: torch.Tensor, length: torch.Tensor) -> Draft:
            return Draft(some, torch.full_like(length, 16))

        def planted(last: torch.Tensor, length: torch.Tensor) -> TreeRows:
            return TreeRows(some[:, :15], tree.depth, tree.ancestors, tree.parent_rows)

        def of(k: int, **how: Any) -> float:
            return rig.graph(seqs, k, 1024, 1280, **how).time(15)

        row = {"plain": of(0), "17 rows in a chain": of(16, propose=chain)}
        row |= {"16 rows in a tree": of(5, propose=planted, nodes=15), "chain of 5, drafted": of(5)}
        row |= {f"tree of 16 rows, {k} deep, drafted": of(k, nodes=15) for k in (5, 8)}
        RESULTS[f"cycles {size}"] = row
        for name, ms in row.items():
            say(f"  {size} {name}: {ms:.3f} ms, {ms / row['plain']:.3f} x plain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", default=["tokens"], choices=["tokens", "bits", "cycles"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sizes", nargs="+", default=["31B", "E2B"], choices=["31B", "E2B"])
    parser.add_argument("--per", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--seconds", type=float, default=0.0, help="of a temperature; 0: all prompts")
    parser.add_argument("--out", type=Path, default=Path("runs/trees.json"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if "tokens" in args.sections:
        attempt("tokens", tokens, args)
    for size in args.sizes:
        if "bits" in args.sections:
            attempt(f"bits {size}", bits, size, 12 if size == "E2B" else 6)
        if "cycles" in args.sections:
            attempt(f"cycles {size}", cycles, size)
    finish(args.out)


if __name__ == "__main__":
    main()
