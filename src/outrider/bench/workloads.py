"""Benchmark prompts by category, from the package (quick) or from a folder of prompt files (full).

`outrider.prompts` defines the file format. No two prompts of a suite have the same id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from ..prompts import Prompt, parse, read_prompts
from ..types import OutriderError, require

FULL = ("spec_bench_question.jsonl", "own.jsonl", "humaneval.jsonl", "gsm8k_200.jsonl")
REPOSITORY = Path(__file__).resolve().parents[3] / "benchmarks" / "data"


def load_suite(
    suite: str, data: Path | None = None, limit: int | None = None, categories: Sequence[str] = ()
) -> list[Prompt]:
    """`limit`: at most this many prompts per category, the first ones."""
    if suite == "quick":
        lines = (
            resources.files("outrider").joinpath("assets/bench/quick.jsonl").read_text(encoding="utf-8").splitlines()
        )
        prompts = list(parse(lines, "quick.jsonl"))
    elif suite == "full":
        prompts = [p for name in FULL for p in _read(_file(data, name))]
    elif suite.endswith((".jsonl", ".gz")):
        prompts = _read(Path(suite))
    else:
        raise OutriderError(f"unknown suite {suite!r}: quick, full or a .jsonl file of prompts")
    known = sorted({p.category for p in prompts})
    for name in categories:
        require(name in known, f"suite {suite!r} has no category {name!r}; it has {', '.join(known)}")
    return thin([p for p in prompts if not categories or p.category in categories], limit)


def thin(prompts: Iterable[Prompt], limit: int | None) -> list[Prompt]:
    seen: dict[str, int] = {}
    out = []
    for prompt in prompts:
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        if limit is None or seen[prompt.category] <= limit:
            out.append(prompt)
    return out


def _read(path: Path) -> list[Prompt]:
    prompts = read_prompts(path)
    require(len({p.id for p in prompts}) == len(prompts), f"{path}: two prompts have the same id")
    return prompts


def _file(data: Path | None, name: str) -> Path:
    path = (data or REPOSITORY) / name
    if not path.is_file():
        raise OutriderError(
            f"no benchmark data at {path}: pass --data (the repository's benchmarks/data), or use --suite quick"
        )
    return path
