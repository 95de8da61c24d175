"""Does `auto` depend on the minute in which its table of costs was measured? One in quiet, others beside busy loops; then all in turn.

    python benchmarks/cost_tables.py [--passes 3] [--tokens 96] [--seconds 200]

The tables are measured as a first start does, beside so many busy processes. Then, in quiet, 8 prompts of Spec-Bench are answered under
each, in an order that changes from prompt to prompt; each table has a controller of its own, which goes on learning from answer to answer.
Printed for the first four answers and for those behind them: the median of the answers' tokens a second over those under the first
quiet table. A second quiet table says what the machine's own moods are worth. For another version of the code: PYTHONPATH=OTHER/src.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections import defaultdict
from statistics import median

from trees import Sums, answer, prompts

from outrider import LLM, SamplingParams
from outrider.config import EngineConfig
from outrider.engine.calibrate import calibrate
from outrider.spec.cost import CostKey, CostTable

LOADS = {"quiet": 0, "1 busy": 1, "2 busy": 2, "2 busy again": 2, "quiet again": 0}


def spin() -> None:
    while True:
        sum(range(1000))


def measured(llm: LLM, busy: int) -> CostTable:
    beside = [multiprocessing.get_context("spawn").Process(target=spin, daemon=True) for _ in range(busy)]
    for process in beside:
        process.start()
    time.sleep(1.5)
    try:
        return calibrate(llm.engine, CostKey("", "", ""), None)
    finally:
        for process in beside:
            process.kill()
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=200.0, help="no further prompt after so many")
    args = parser.parse_args()
    llm = LLM.load(args.model, engine=EngineConfig(max_batch=1, prefix_cache=False))
    start, began = llm.engine.controller, time.perf_counter()
    tables = {name: measured(llm, busy) for name, busy in LOADS.items()}
    for name, table in tables.items():
        plain, whole = table.curve(None, 1, 256), table.curve(start.drafters[0], 1, 256)
        of = [f"{verify[k] / plain[0]:.2f}" for verify in (plain, whole) for k in (2, 4, 8)]
        print(f"{name}: plain {1e3 * plain[0]:.2f} ms; 3, 5, 9 rows {' '.join(of[:3])}, drafted {' '.join(of[3:])} x plain", flush=True)
    found = [text for _, text in prompts(1)]
    ids = [llm.chat_prompt([{"role": "user", "content": text}]) for text in found[:: max(1, len(found) // 8)][:8]]
    names = list(tables)
    for share, temperature in ((0.5, 0.0), (1.0, 1.0)):
        speeds: dict[tuple[str, bool], list[float]] = defaultdict(list)
        sums: dict[str, Sums] = defaultdict(lambda: defaultdict(float))
        ways = {name: start.fresh(start.drafters) for name in names}
        for name, controller in ways.items():
            controller.cost = CostTable.from_json(tables[name].to_json())
        for turn in range(args.passes * len(ids)):
            if time.perf_counter() - began > share * args.seconds:
                break
            texts = []
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                params = SamplingParams(temperature=temperature, seed=turn, max_tokens=args.tokens, ignore_eos=True)
                one: Sums = defaultdict(float)
                texts.append(answer(llm, ways[name], ids[turn % len(ids)], params, None, None, one, sums[name]))
                speeds[name, turn < 4].append(one["made"] / one["seconds"])
            assert texts.count(texts[0]) == len(texts), "the texts differ"
        for name in names:
            over = [median(a / b for a, b in zip(speeds[name, early], speeds[names[0], early])) for early in (True, False)]
            s = sums[name]
            print(f"T {temperature:g}, {name}: {s['made'] / s['seconds']:.1f} tokens/s, {s['drafted'] / s['cycles']:.2f} rows a cycle; x quiet: "
                  f"first four {over[0]:.3f}, the {len(speeds[name, False])} behind them {over[1]:.3f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
