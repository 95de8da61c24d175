"""KEEP/extra.npz for stage `long`: categories of the prompts, and long prompts composed of passages that the prompts contain.

    python benchmarks/train_extra.py prompts_train.jsonl.gz extra.npz     # needs the tokenizer of smollm2

The prompts are short of long ones (their mean is 137 tokens), and drafts far behind a long prompt are another task: several
passages with a question about one of them, and articles to summarise, of 350 to 1,000 tokens.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np

from outrider.train import run
from outrider.train.data import Prompt
from outrider.weights import hub
from outrider.weights.files import text_files

ASK = (
    "{passages}\n\nQuestion: {question}",
    "Answer from the passages.\n\n{passages}\n\nQuestion: {question}\nAnswer:",
    "{question}\n\n{passages}",
)
SUM = ("Summarize: {text}", "Summarize the following article.\n\n{text}", "{text}\n\nTL;DR:", "Write a short summary of this text: {text}")
COUNT = 3000


def compose(rows: list[dict[str, str]], seed: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    passages, questions, articles = set(), set(), set()
    for row in rows:
        text = row["prompt"]
        if row["source"] == "boolq":
            passages |= {p.strip() for p in re.findall(r"[A-Z][^\n]{2,60} -- [^\n]{200,}", text)}
            questions |= {q.strip() for q in re.findall(r"Question: ([^\n]+)", text)}
        elif row["source"] in ("p3/quoref", "p3/duorc", "standardebooks") and row["category"] in ("reading", "summarization", "extraction"):
            pieces = text.split("\n\n")
            articles.add(("\n\n".join(pieces[1:]) if row["source"] == "standardebooks" else max(pieces, key=len)).strip())
    listed, asked, long = sorted(passages), sorted(questions), sorted(a for a in articles if len(a) > 700)
    print(f"{len(listed)} passages, {len(asked)} questions, {len(long)} articles")
    out = []
    for n in range(COUNT):
        size = int(rng.integers(1500, 4200))
        pieces = []
        source = listed if n % 2 else long
        while sum(map(len, pieces)) < size and len(pieces) < 8:
            pieces.append(source[rng.integers(len(source))])
        if n % 2:
            text = ASK[rng.integers(len(ASK))].format(passages="\n\n".join(pieces), question=asked[rng.integers(len(asked))])
        else:
            text = SUM[rng.integers(len(SUM))].format(text="\n".join(pieces)[:size])
        out.append(Prompt(str(n), "long", text))
    return out


def main() -> None:
    source, to = Path(sys.argv[1]), Path(sys.argv[2])
    with gzip.open(source, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    text = text_files(hub.resolve("smollm2"))
    kept = np.load(sys.argv[3])["index"] if len(sys.argv) > 3 else np.arange(len(rows))  # prompts.npz: lines that were not left out
    names = sorted({row["category"] for row in rows})
    category = np.array([names.index(rows[i]["category"]) for i in kept], dtype=np.uint8)
    made = run.encode(compose(rows), text, 49152, texts=False, max_tokens=1024)
    np.savez_compressed(to, names=np.array(names), category=category, tokens=made.tokens.astype(np.uint16), lengths=made.lengths)
    print(f"{len(category)} categories, {len(made)} long prompts of {made.lengths.mean():.0f} tokens")


if __name__ == "__main__":
    main()
