"""What is asked: prompts by category, from the package (quick) or from a folder of prompt files (full).

A prompt file is JSONL: {"id", "category", "prompt", "max_tokens", "check"?} or Spec-Bench's {"question_id", "category",
"turns"} (its first turn is asked; a record that has a prompt as well is asked that). `check` says how an answer is graded: see `quality`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ..models.config import ForeignDict
from ..types import OutriderError

FULL = ("spec_bench_question.jsonl", "own.jsonl", "humaneval.jsonl", "gsm8k_200.jsonl")
GRADED = ("gsm8k_200.jsonl", "humaneval.jsonl", "mmlu_228.jsonl")
REPOSITORY = Path(__file__).resolve().parents[3] / "benchmarks" / "data"


@dataclass(frozen=True)
class Prompt:
    id: str
    category: str
    text: str
    max_tokens: int
    check: Mapping[str, str] | None = None


def load_suite(suite: str, data: Path | None = None, limit: int | None = None, categories: Sequence[str] = ()) -> list[Prompt]:
    """`limit`: at most so many prompts of a category, the first ones."""
    if suite == "quick":
        lines = resources.files("outrider").joinpath("assets/bench/quick.jsonl").read_text(encoding="utf-8").splitlines()
        prompts = [_prompt(line, f"quick.jsonl:{n}") for n, line in enumerate(lines, 1)]
    elif suite == "full":
        prompts = [p for name in FULL for p in read_prompts(_folder(data) / name)]
    elif suite.endswith(".jsonl"):
        prompts = read_prompts(Path(suite))
    else:
        raise OutriderError(f"unknown suite {suite!r}: quick, full or a .jsonl file of prompts")
    known = sorted({p.category for p in prompts})
    for name in categories:
        if name not in known:
            raise OutriderError(f"suite {suite!r} has no category {name!r}; it has {', '.join(known)}")
    return thin([p for p in prompts if not categories or p.category in categories], limit)


def load_graded(count: int, data: Path | None = None) -> list[Prompt]:
    """`count` questions each of GSM8K, HumanEval and MMLU, spread over the files."""
    out = []
    for name in GRADED:
        prompts = read_prompts(_folder(data) / name)
        step = max(1, len(prompts) // count)
        out += prompts[::step][:count]
    return out


def thin(prompts: Iterable[Prompt], limit: int | None) -> list[Prompt]:
    seen: dict[str, int] = {}
    out = []
    for prompt in prompts:
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        if limit is None or seen[prompt.category] <= limit:
            out.append(prompt)
    return out


def read_prompts(path: Path) -> list[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise OutriderError(
            f"cannot read prompts from {path}: {error.strerror}; --data names the folder with the benchmark files"
        ) from None
    prompts = [_prompt(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if len({p.id for p in prompts}) < len(prompts):
        raise OutriderError(f"{path}: two prompts have the same id")
    return prompts


def _folder(data: Path | None) -> Path:
    folder = data or REPOSITORY
    if not folder.is_dir():
        raise OutriderError(f"no benchmark data at {folder}: pass --data (the repository's benchmarks/data), or use --suite quick")
    return folder


def _prompt(line: str, where: str) -> Prompt:
    try:
        row: ForeignDict = json.loads(line)
        if "turns" in row and "prompt" not in row:
            return Prompt(f"spec_bench/{row['question_id']}", str(row["category"]), str(row["turns"][0]), 256)
        check = row.get("check")
        return Prompt(str(row["id"]), str(row["category"]), str(row["prompt"]), int(row.get("max_tokens", 128)), check)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise OutriderError(f"{where}: not a prompt ({error!r}); needs id, category, prompt") from None
