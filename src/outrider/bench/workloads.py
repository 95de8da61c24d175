"""Benchmark prompts by category, from the package (quick) or from a folder of prompt files (full).

`outrider.prompts` defines the file format. No two prompts of a suite have the same id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..prompts import Prompt, read_prompts
from ..types import OutriderError, require

QUICK = Path(__file__).resolve().parents[1] / "assets" / "bench" / "quick.jsonl"
FULL = ("spec_bench_question.jsonl", "own.jsonl", "humaneval.jsonl", "gsm8k_200.jsonl")
REPOSITORY = Path(__file__).resolve().parents[3] / "benchmarks" / "data"


def load_suite(
    suite: str, data: Path | None = None, limit: int | None = None, categories: Sequence[str] = ()
) -> list[Prompt]:
    """`limit`: maximum prompts per category; the first are taken."""
    if suite == "quick":
        files = [QUICK]
    elif suite == "full":
        files = [(data or REPOSITORY) / name for name in FULL]
        missing = next((path for path in files if not path.is_file()), None)
        mend = "pass --data (the repository's benchmarks/data), or use --suite quick"
        require(missing is None, f"no benchmark data at {missing}: {mend}")
    elif suite.endswith((".jsonl", ".gz")):
        files = [Path(suite)]
    else:
        raise OutriderError(f"unknown suite {suite!r}: quick, full or a .jsonl file of prompts")
    prompts = [prompt for path in files for prompt in read_prompts(path)]
    require(len({p.id for p in prompts}) == len(prompts), f"{suite}: two prompts have the same id")
    known = sorted({p.category for p in prompts})
    for name in categories:
        require(name in known, f"suite {suite!r} has no category {name!r}; it has {', '.join(known)}")
    seen = Counter[str]()
    out = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if prompt.category in (categories or known) and (limit is None or seen[prompt.category] <= limit):
            out.append(prompt)
    return out
