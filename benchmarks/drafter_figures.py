"""The figures by which a drafter of the default model is judged, in one go, and their lines for the history.

    python benchmarks/drafter_figures.py smollm2 runs/further/drafter [--history benchmarks/history/training.jsonl]
    [--limit N]

Spec-Bench, first turns, answers of up to 256 tokens: tokens per cycle, greedy and at T = 1, with head and layers
as they are shipped (clustered, 4-bit values), how often the second guess is right where the first is wrong, what a
draft step reads and how large the file is. Each stands beside what is asked for. With --history a line is appended for
each temperature as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from outrider.ops import place
from outrider.train.tools import evaluate_drafter
from outrider.weights import hub

ASKED = {
    "greedy": 3.4,
    "T=1": 2.25,
    "second_guess": 0.35,
    "draft_step_share": 0.08,
    "megabytes": 24.0,
}  # the last two: at most
PROMPTS = Path(__file__).parent / "data" / "spec_bench_question.jsonl"


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("model")
    parse.add_argument("drafter")
    parse.add_argument("--prompts", type=Path, default=PROMPTS)
    parse.add_argument("--history", type=Path)
    parse.add_argument("--limit", type=int, help="so many questions, spread over the file")
    parse.add_argument("--max-tokens", type=int, default=256)
    args = parse.parse_args()
    device = str(place(None))
    cuda = device.startswith("cuda")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    figures: dict[str, float] = {}
    for name, temperature in (("greedy", 0.0), ("T=1", 1.0)):
        began = time.perf_counter()
        result = evaluate_drafter(
            args.model, args.drafter, args.prompts, limit=args.limit, max_new=args.max_tokens, temperature=temperature,
            device=device,
            dtype=torch.bfloat16 if cuda else torch.float32, say=lambda _: None,
        )  # fmt: skip
        figures[name] = result["tokens_per_cycle"][4]
        figures |= {key: result[key] for key in ("second_guess", "draft_step_share") if key in result}
        by = ", ".join(
            f"{kind} {value:.2f}" for kind, value in sorted(result["by_category"].items(), key=lambda item: -item[1])
        )
        print(
            f"{name}: K = 4 {figures[name]:.3f}, first position {result['acceptance_by_position'][0]:.3f}; {by}",
            flush=True,
        )
        if args.history:
            row = {
                "date": time.strftime("%Y-%m-%d"), "commit": commit or None,
                "machine": torch.cuda.get_device_name() if cuda else "cpu",
                "run": f"{args.drafter}: Spec-Bench {name} clustered, 4 bits",
                "command": "python " + " ".join(sys.argv),
                "figures": {**result, "seconds": round(time.perf_counter() - began, 1)},
            }  # fmt: skip
            with open(args.history, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    file = hub.resolve(args.drafter, kind="drafter").path / "model.safetensors"
    figures["megabytes"] = round(file.stat().st_size / 1e6, 1)
    for name, asked in ASKED.items():
        met = figures[name] <= asked if name in ("draft_step_share", "megabytes") else figures[name] >= asked
        print(f"{name}: {figures[name]:g}, asked for {asked:g}: {'met' if met else 'missed'}")


if __name__ == "__main__":
    main()
