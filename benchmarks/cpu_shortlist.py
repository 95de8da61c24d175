"""What a draft model loses by its shortlist of tokens and by four bits (spec/draft_model.py), counted instead of timed.

    python benchmarks/cpu_shortlist.py --cover MODEL.gguf tokenizer.model ...
    python benchmarks/cpu_shortlist.py --target TARGET.gguf --draft DRAFT.gguf [--answers FILE.json]

--cover: the share of a text's tokens that are listed, and with those that stood earlier in it, for each vocabulary (a model, or a
`tokenizer.model` in tiktoken's format where tiktoken is installed). Otherwise: tokens a cycle at K = 4. The target's answers to prompts of
Spec-Bench (kept in --answers) are forced through the draft model, which is right at a position or not whatever was drafted before, so
cycles can be counted off: exact for coupled choosing, greedy and at T = 1.
"""

from __future__ import annotations

import argparse
import base64
import glob
import json
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from outrider.bench.rounding import predicted
from outrider.engine.text import Tokenizer
from outrider.llm import LLM
from outrider.ops.cpu.ops import CpuOps
from outrider.ops.noise import gumbel
from outrider.spec.draft_model import shortlist
from outrider.types import SamplingParams
from outrider.weights import hub
from outrider.weights.files import text_files
from outrider.weights.load import load_target

ROOT = Path(__file__).resolve().parents[1]
SUITE = ROOT / "benchmarks" / "data" / "spec_bench_question.jsonl"
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SEED, K = 5, 4


def joined(x: object) -> str:
    return " ".join(map(joined, x)) if isinstance(x, list) else str(x)


def vocabulary(name: str) -> tuple[Callable[[str], list[int]], int, set[int]]:
    if not name.endswith(".model"):
        tokenizer = Tokenizer(text_files(hub.resolve(name)))
        return lambda text: tokenizer.ids(text, False), tokenizer.vocab_size, tokenizer.everyday()
    import tiktoken

    ranks = {base64.b64decode(a): int(b) for a, b in (line.split() for line in Path(name).read_text().splitlines())}
    return tiktoken.Encoding("ranks", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={}).encode_ordinary, len(ranks) + 256, set()


def cover(names: list[str]) -> None:
    questions = [json.loads(line) for line in SUITE.open(encoding="utf-8")]
    texts = {
        "Spec-Bench": [joined(q["turns"]) + "\n" + joined(q.get("reference", "")) for q in questions],
        "Python": [Path(f).read_text(errors="replace")[:20000] for f in sorted(glob.glob(f"{sysconfig.get_paths()['stdlib']}/*.py"))[:60]],
        "docs": [Path(f).read_text() for f in sorted(glob.glob(f"{ROOT}/docs/*.md"))],
    }
    for name in names:
        encode, size, always = vocabulary(name)
        listed = shortlist(size, always)
        known = set(listed.tolist() if listed is not None else range(size))
        for what, parts in texts.items():
            count, out, new = 0, 0, 0
            for ids in map(encode, parts):
                beside = [t for t in ids if t not in known]
                count, out, new = count + len(ids), out + len(beside), new + len(set(beside))
            print(
                f"{name}: {len(known):,} of {size:,} | {what}, {count:,} tokens | {1 - out / count:.2%} | {1 - new / count:.2%}", flush=True
            )


def answers(target: str, path: Path | None) -> list[dict[str, object]]:
    if path is not None and path.exists():
        return json.loads(path.read_text())
    llm, made = LLM.load(target, drafter="ngram"), list[dict[str, object]]()
    for category, most in (("coding", 10), ("writing", 3), ("math_reasoning", 3), ("qa", 3), ("translation", 3)):
        prompts = [q["turns"][0] for q in map(json.loads, SUITE.open(encoding="utf-8")) if q["category"] == category][:most]
        for prompt in prompts:
            for t in (0.0, 1.0) if category == "coding" else (0.0,):
                ids = llm.asked(prompt)
                (answer,) = llm.generate([ids], SamplingParams(max_tokens=80, temperature=t, seed=SEED))
                made.append({"cat": category, "prompt": ids, "answer": answer.token_ids, "t": t})
    if path is not None:
        path.write_text(json.dumps(made))
    return made


def cycles(right: list[bool]) -> int:
    at = count = 0
    while at < len(right):
        run = 0
        while run < K and at + run < len(right) and right[at + run]:
            run += 1
        at, count = at + run + 1, count + 1
    return count


def accepted(draft: str, texts: list[dict[str, object]], coarse: bool) -> None:
    ops = CpuOps()
    keep = lambda name, w: w if name == "embed" or len(w.shape) < 2 or not coarse else ops.coarse(w)  # noqa: E731
    config, weights, files = load_target(draft, "cpu", torch.float32, ops, keep=keep)
    always, found = Tokenizer(files).everyday(), dict[tuple[str, int], list[int]]()
    for text in texts:
        prompt, answer = text["prompt"], text["answer"]
        n, z = len(answer), predicted(config, weights, ops, torch.tensor(prompt + answer))[-len(answer) :]
        noise = gumbel(torch.full((n, 1), SEED), torch.arange(n)[:, None] + len(prompt), torch.arange(z.shape[1])) if text["t"] else 0.0
        for count in (z.shape[1], 65536, 49152, 32768):
            hidden = torch.ones(z.shape, dtype=torch.bool)
            hidden[:, :count] = False
            hidden[:, sorted({*always, *prompt})] = False
            for i, token in enumerate(answer[:-1]):
                hidden[i + 1 :, token] = False
            right = (z.masked_fill(hidden, -1e30) + noise).argmax(-1) == torch.tensor(answer)
            kind = f"{'code' if text['cat'] == 'coding' else 'others'} T = {text['t']:.0f}"
            cell = found.setdefault((kind, count), [0, 0])
            cell[0], cell[1] = cell[0] + n, cell[1] + cycles(right.tolist())
    for (kind, count), (tokens, ran) in sorted(found.items()):
        print(
            f"{'Q4_0' if coarse else 'as in the file'} | {kind} | {count:,} tokens listed | {tokens / ran:.3f} tokens a cycle", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cover", nargs="+")
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--answers", type=Path)
    args = parser.parse_args()
    if args.cover:
        cover(args.cover)
        return
    texts = answers(args.target, args.answers)
    for coarse in (False, True):
        accepted(args.draft, texts, coarse)


if __name__ == "__main__":
    main()
