"""Are the tokens still the same? Records the answers of one version of the code, and compares those of another with
them.

    PYTHONPATH=old/src python benchmarks/same_tokens.py record tokens.json
    PYTHONPATH=new/src python benchmarks/same_tokens.py compare tokens.json

50 prompts x {greedy, T = 1} x {plain, K = 4, auto}, eight at a time. Verification is coupled, so the three ways of
drafting must also agree with each other; that is checked on the way. Exit code 1 where a token differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from outrider import LLM, SamplingParams
from outrider.config import EngineConfig

DATA = Path(__file__).parent / "data"
WAYS: dict[str, int | None] = {"plain": 0, "K=4": 4, "auto": None}


def prompts(count: int) -> list[str]:
    rows = [json.loads(line) for line in (DATA / "spec_bench_question.jsonl").read_text(encoding="utf-8").splitlines()]
    step = max(1, len(rows) // count)
    return [str(row["turns"][0])[:1500] for row in rows[::step][:count]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()

    llm = LLM.load(args.model, engine=EngineConfig(max_batch=8, max_context=2048), threads=args.threads)
    asked = prompts(args.prompts)
    made: dict[str, list[list[int]]] = {}
    wrong = 0
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=args.tokens, seed=7)
        for way, k in WAYS.items():
            name = f"T={temperature:g} {way}"
            made[name] = [c.token_ids for c in llm.generate(asked, params, draft_tokens=k)]
            differ = sum(a != b for a, b in zip(made[name], made[f"T={temperature:g} plain"]))
            wrong += differ
            print(f"{name}: {sum(map(len, made[name]))} tokens, {differ} answers differ from plain", flush=True)
    if args.what == "record":
        args.file.write_text(json.dumps(made), encoding="utf-8")
    else:
        before = json.loads(args.file.read_text(encoding="utf-8"))
        for name, answers in made.items():
            differ = sum(a != b for a, b in zip(answers, before[name])) + abs(len(answers) - len(before[name]))
            wrong += differ
            print(f"{name}: {differ} of {len(answers)} answers differ from the recorded ones")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
