"""Trees of drafts on a GPU: bits, the cycle of a 31B, and what they bring to a model with a trained drafter.

    PYTHONPATH=src python3 benchmarks/gpu_trees.py [--sections bits tokens cycles] [--file SmolLM2.gguf] [--out DIR]
    [--dry]

bits: rows on the accepted paths of trees have the logits of plain decoding. cycles: a plain step, lines and trees of
31B and E2B. tokens: `smollm2` with its shipped drafter; plain, lines and trees in turn on the same prompts, greedy and
at T = 1. Texts must be equal.
--dry: on a CPU with tiny models, to try the script itself.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from gpu_common import RESULTS, Rig, attempt, collect, finish, say, verdict
from gpu_rig import plain_run, tree_run
from outrider import LLM, SamplingParams
from outrider.config import EngineConfig
from outrider.engine.tree import Tree
from outrider.ops.reference import ReferenceOps
from outrider.ops.trees import FixedTree
from outrider.spec.controller import Controller
from outrider.spec.cost import CostTable
from outrider.types import Draft
from trees import answer, prompts

SHAPE = [0, 1, 2, 3, 4, 0, 1, 6, 2, 8, 0, 11, 12, 13, 14, 3]  # 16 tokens, 5 deep: the row that each follows
# draft tokens (None: auto), tokens of a tree (0: lines, None: auto)
WAYS: dict[str, tuple[int | None, int | None]] = {
    "plain": (0, 0), "lines as before": (None, 0), "lines auto": (None, 0),
    "trees auto": (None, None), "trees 4 deep": (4, 16), "trees 6 deep": (6, 16),
}  # fmt: skip


def rig_of(size: str, layers: int | None, dry: bool) -> Rig:
    if not dry:
        return Rig.of(size, layers, slots=2, context=2048, compiled=True)
    from tests.engines import VARIANTS, assistant  # tiny shapes

    raw = VARIANTS["edge" if size == "E2B" else "dense"]
    return Rig(raw, assistant(raw, size == "E2B"), ReferenceOps(), "cpu", torch.float32, slots=2, context=512)


def bits(size: str, layers: int | None, dry: bool) -> None:
    with rig_of(size, layers, dry) as rig:
        context, steps = (100, 12) if dry else (1020, 48)
        for batch in (1, 2):
            seqs = rig.open(batch, context, 160)
            tokens, logits = plain_run(rig, seqs, context, steps)
            got = tree_run(rig, seqs, context, SHAPE, tokens, logits)
            rig.close(seqs)
            note = f"{got.tokens} tokens in {got.cycles} cycles, {got.accepted:.2f} drafts taken a cycle"
            ok = got.equal_tokens and (got.equal_logits or dry)  # torch's own products round by the number of rows
            verdict(
                f"tree = line, bits, {size}, {layers or 'all'} layers, batch {batch}", ok and got.accepted > 1.0, note
            )


def cycles(size: str, dry: bool) -> None:
    """Median milliseconds of one graph; drafted: with the drafter's part, otherwise the drafts are at hand."""
    with rig_of(size, None, dry) as rig:
        context = 100 if dry else 1024
        seqs = rig.open(1, context, 128)
        tree = Tree.of([SHAPE[:15]], rig.device)
        some = torch.arange(1, 17, device=rig.device)[None]

        def line(last: torch.Tensor, length: torch.Tensor) -> Draft:
            return Draft(some, torch.full_like(length, 16))

        def planted(last: torch.Tensor, length: torch.Tensor) -> FixedTree:
            return FixedTree(some[:, :15], tree.depth, tree.ancestors, tree.parent_rows)

        def of(k: int, **how: Any) -> float:
            return rig.graph(seqs, k, context, context + 256, **how).time(3 if dry else 15)

        row = {
            "plain": of(0),
            "17 rows in a line": of(16, propose=line),
            "16 rows in a tree": of(5, propose=planted, nodes=15),
        }
        row["line of 5, drafted"] = of(5)
        row |= {f"tree of 16 rows, {k} deep, drafted": of(k, nodes=15) for k in (5, 8)}
        row["plain again"] = of(0)
        RESULTS[f"cycles {size}"] = row
        base = min(row["plain"], row["plain again"])
        for name, ms in row.items():
            say(f"  {size} {name}: {ms:.3f} ms, {ms / base:.3f} x plain")
        five = row["tree of 16 rows, 5 deep, drafted"] / base
        if not dry and size == "31B":
            verdict("31B, 16 nodes with the newest token, 5 deep: cycle <= 1.20 x plain", five <= 1.20, f"{five:.3f}")


def tokens(file: str, per: int, length: int, seconds: float, dry: bool) -> None:
    graphs = EngineConfig(max_batch=1, max_context=2048, prefix_cache=False, graphs=True)
    drafter = str(Path(__file__).resolve().parents[1] / "src/outrider/assets/drafters/smollm2")
    llm = LLM.load(file, drafter=drafter, engine=graphs, say=say)
    start = llm.engine.controller
    say(
        "costs, us by K:",
        {
            f"{n} tree={tree}": [round(1e6 * t) for t in start.cost.curve(n, 1, 300, tree)[:9]]
            for n, tree in ((None, False), ("mtp", False), ("mtp", True))
        },
    )
    card = json.loads((Path(drafter) / "acceptance.json").read_text())
    copy = lambda: CostTable.from_json(start.cost.to_json())  # noqa: E731
    before = lambda: Controller(copy(), start.drafters, {"mtp": card["accepted"]}, trust={"mtp": card["trust"]})  # noqa: E731
    texts = [
        (c, ids)
        for c, t in prompts(per)
        if len(ids := llm.chat_prompt([{"role": "user", "content": t}])) + length < 1900
    ]
    for temperature in (0.0, 1.0):
        controllers = {way: before() if way == "lines as before" else start.fresh(start.drafters) for way in WAYS}
        sums: dict[str, dict[str, float]] = {way: defaultdict(float) for way in WAYS}
        began, equal, turn = time.perf_counter(), 0, 0
        for turn, (_, ids) in enumerate([texts[0], *texts]):  # the first one twice: it captures
            if turn == 1:
                sums = {way: defaultdict(float) for way in WAYS}
            if time.perf_counter() - began > seconds and turn > 1:
                break
            answers, order = {}, list(WAYS)[turn % len(WAYS) :] + list(WAYS)[: turn % len(WAYS)]
            for way in order:
                params = SamplingParams(temperature=temperature, seed=turn, max_tokens=length)
                answers[way] = answer(llm, controllers[way], ids, params, *WAYS[way], sums[way])
            equal += all(a == answers["plain"] for a in answers.values())
        verdict(
            f"T {temperature}: the same text whichever way",
            equal == turn + 1 or equal == turn,
            f"{equal} of {turn} prompts and more",
        )
        speed = {way: s["made"] / max(1e-9, s["seconds"]) for way, s in sums.items()}
        for way, s in sums.items():
            per_cycle = (s["accepted"] + s["cycles"]) / max(1.0, s["cycles"])
            say(
                f"  T {temperature} {way}: {speed[way]:.0f} tokens per second, {speed[way] / speed['plain']:.2f} x "
                f"plain, "
                f"{per_cycle:.2f} tokens per cycle, {1e6 * s['seconds'] / max(1.0, s['cycles']):.0f} us a cycle, trees "
                f"{s['trees']:.0f}"
            )  # fmt: skip
        RESULTS[f"tokens T {temperature}"] = {way: {**s, "speed": speed[way]} for way, s in sums.items()}
        by_k = {
            way: [(k, n) for k, n in enumerate(c.snapshot()["by_k"]) if n]
            for way, c in controllers.items()
            if "auto" in way
        }  # type: ignore[arg-type]
        say("  drafted tokens per cycle, how often:", by_k)
    del llm
    collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sections", nargs="+", default=["bits", "tokens", "cycles"], choices=["bits", "cycles", "tokens"]
    )
    parser.add_argument("--file", default="smollm2")
    parser.add_argument("--sizes", nargs="+", default=["31B", "E2B"], choices=["31B", "E2B"], help="whose cycles")
    parser.add_argument("--per", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--seconds", type=float, default=25.0, help="of each temperature")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_trees"))
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.dry:
        say(torch.cuda.get_device_name(), "torch", torch.__version__)
    if "bits" in args.sections:
        attempt("bits E2B", bits, "E2B", 12, args.dry)
        attempt("bits 31B", bits, "31B", 6, args.dry)
    if "tokens" in args.sections:
        attempt("tokens", tokens, args.file, args.per, args.tokens, args.seconds, args.dry)
    if "cycles" in args.sections:
        for size in args.sizes:
            attempt(f"cycles {size}", cycles, size, args.dry)
    finish(args.out / "trees.json")


if __name__ == "__main__":
    main()
