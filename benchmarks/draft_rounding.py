"""What rounding a drafter to int8 with one factor a row costs in acceptance: the shipped smollm2 drafter, on any machine.

    python benchmarks/draft_rounding.py [--limit 24] [--max-new 96]

The larger Gemma 4 drafters run so on a GPU (ops/triton/draft_steps.py). The same answers of the target are walked with the
drafter in float32 and with every matrix and the full head rounded; tokens a cycle (by K) are exact for these answers.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor

from outrider.ops.triton.draft_steps import rounded
from outrider.prompts import read_prompts
from outrider.train.evaluate import Head, judge_drafts, summary
from outrider.train.finish import views
from outrider.train.target import describe, open_target
from outrider.train.tools import answers, load_net, spread
from outrider.weights import hub

BENCH = Path(__file__).parent / "data" / "spec_bench_question.jsonl"


def near(dense: Tensor) -> Tensor:
    words, factors = rounded(dense.float().contiguous())
    return words.view(torch.int8).float() * factors[:, None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max-new", type=int, default=96)
    args = parser.parse_args()
    drafter, _ = hub.auto_drafter("smollm2")
    assert drafter is not None
    listed = spread(read_prompts(BENCH), args.limit)
    target = open_target("smollm2", "cpu", torch.float32)
    net = load_net(drafter, target)
    data = answers(describe("smollm2"), listed, max_new=args.max_new, temperature=0.0, chat=True, slots=8, drafter=drafter)
    exact = {k: v.detach() for k, v in net.cast(torch.float32).items()}
    narrow = {k: near(v) if v.dim() == 2 and v.is_floating_point() else v for k, v in exact.items()}
    rows = views(net, target)[1].rows
    out: dict[str, Any] = {"answers": len(data), "tokens": data.answer_tokens}
    for name, weights, head in (("float32", exact, Head(rows)), ("int8", narrow, Head(near(rows)))):
        right = judge_drafts(target.model, net, weights, head, data, 8, 1024, 8192).right
        got = summary(right, ["all"] * len(data), 8)
        out[name] = {k: got["tokens_per_cycle"][k] for k in (2, 4, 8)}
    print(json.dumps(out))


if __name__ == "__main__":
    main()
