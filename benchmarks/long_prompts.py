"""Long prompts made of passages that stand in shorter ones, for the shipped recipe (docs/training.md).

    python benchmarks/long_prompts.py prompts_train.jsonl.gz long.jsonl

Several passages with a question about one of them, and articles to summarise, of 350 to 1,000 tokens, as lines of a prompt file with the
category "long". The passages are found by the prompts' `source`: boolq, p3/quoref, p3/duorc and standardebooks.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

import numpy as np

ASK = (
    "{passages}\n\nQuestion: {question}",
    "Answer from the passages.\n\n{passages}\n\nQuestion: {question}\nAnswer:",
    "{question}\n\n{passages}",
)
SUM = ("Summarize: {text}", "Summarize the following article.\n\n{text}", "{text}\n\nTL;DR:", "Write a short summary of this text: {text}")


def long_prompts(source: Path, to: Path, count: int = 3000, seed: int = 0) -> None:
    with gzip.open(source, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
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
    with open(to, "w", encoding="utf-8") as out:
        for n in range(count):
            size, found = int(rng.integers(1500, 4200)), []
            source_texts = listed if n % 2 else long
            while sum(map(len, found)) < size and len(found) < 8:
                found.append(source_texts[rng.integers(len(source_texts))])
            if n % 2:
                text = ASK[rng.integers(len(ASK))].format(passages="\n\n".join(found), question=asked[rng.integers(len(asked))])
            else:
                text = SUM[rng.integers(len(SUM))].format(text="\n".join(found)[:size])
            out.write(json.dumps({"id": f"long{n}", "category": "long", "prompt": text}) + "\n")


if __name__ == "__main__":
    long_prompts(Path(sys.argv[1]), Path(sys.argv[2]))
