"""Is one version of the code as fast as another? Two processes with the same model, measured in turn, so that a slow
moment meets both.

    python benchmarks/speed_pair.py OLD/src NEW/src [--starts 7] [--rounds 9] [--model smollm2] [--batch 1]
    [--prompts 2] [--temperature 0]

Each process loads the model once and answers the same prompts (of Spec-Bench, evenly spread over it; so many batches of
them) whenever it is told to: plain, K = 4, auto. What is printed is the median of the rounds' ratios new / old (of
tokens per second while decoding); above 1 the new one is faster. Where a process's memory lies moves its speed by
several percent for as long as it lives, so a small difference needs several starts: then the last lines are the medians
of their ratios, with the range. OLD/src twice shows what the machine itself does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

WAYS: dict[str, int | None] = {"plain": 0, "K=4": 4, "auto": None}


def work(model: str, batch: int, tokens: int, batches: int, temperature: float) -> None:
    """In the child: a line names a way, the answer is tokens per second."""
    from outrider import LLM, SamplingParams
    from outrider.config import EngineConfig

    rows = (Path(__file__).parent / "data" / "spec_bench_question.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [
        str(json.loads(line)["turns"][0])[:600] for line in rows[:: len(rows) // (batches * batch)][: batches * batch]
    ]
    llm = LLM.load(model, engine=EngineConfig(max_batch=batch, max_context=1024, prefix_cache=False))
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=temperature)
    print("ready", flush=True)
    for line in sys.stdin:
        num_tokens = spent = 0.0
        for at in range(0, len(prompts), batch):
            done = llm.generate(prompts[at : at + batch], params, draft_tokens=WAYS[line.strip()])
            num_tokens += sum(c.stats.new_tokens - c.stats.first_emitted for c in done)
            spent += max(c.stats.decode_s for c in done)
        print(num_tokens / spent, flush=True)


class Contestant:
    """One version of the code in a process of its own."""

    def __init__(self, command: list[str], source: Path) -> None:
        env = {**os.environ, "PYTHONPATH": str(source.resolve())}
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == "ready", f"{source} did not start"

    def speed(self, way: str) -> float:
        """Tokens per second."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(way + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(pair: list[Contestant], way: str, rounds: int) -> list[list[float]]:
    """The speeds of both, round by round; each round begins with the other one."""
    for contestant in pair:
        contestant.speed(way)  # warm
    speeds: list[list[float]] = [[], []]
    for turn in range(rounds):
        for i in (0, 1) if turn % 2 == 0 else (1, 0):
            speeds[i].append(pair[i].speed(way))
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sources", nargs="*", type=Path)
    parser.add_argument("--starts", type=int, default=1, help="of both processes")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    if args.child:
        work(args.model, args.batch, args.tokens, args.prompts, args.temperature)
        return
    if len(args.sources) != 2:
        parser.error("two source folders: the old one and the new one")
    command = [sys.executable, __file__, "--child", "--model", args.model, "--batch", str(args.batch)]
    command += ["--tokens", str(args.tokens), "--prompts", str(args.prompts), "--temperature", str(args.temperature)]
    ratios: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(args.starts):
        pair = [Contestant(command, source) for source in args.sources]
        for way in WAYS:
            speeds = compare(pair, way, args.rounds)
            ratio = median(new / old for old, new in zip(*speeds))
            ratios[way].append(ratio)
            print(
                f"batch {args.batch} {way}: old {median(speeds[0]):.1f} tokens/s, new {median(speeds[1]):.1f}, ratio "
                f"{ratio:.4f}",
                flush=True,
            )
        for contestant in pair:
            contestant.close()
    if args.starts > 1:
        for way, each in ratios.items():
            print(f"{way}: {median(each):.4f} of {args.starts} starts, {min(each):.4f} to {max(each):.4f}")


if __name__ == "__main__":
    main()
