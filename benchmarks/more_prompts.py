"""A prompt file with more of the kinds in which the default model's drafter is weakest, made of the file's own
passages.

    python benchmarks/more_prompts.py prompts_train.jsonl.gz prompts_more.jsonl.gz prompts_judge.jsonl.gz

What is added, after the lines of the file itself: "long", several passages with a question about one of them, and
articles to summarise, of 350 to 1,000 tokens; "topic", open questions about what the passages are about. Passages are
found by the prompts' `source`: boolq (with titles, and some with their question), p3/quoref, p3/duorc, standardebooks,
and the English news sentences of ntrex-128. No benchmark's questions are read or written. The third file has the 512
prompts that the shipped drafter's own runs held out (data/smollm2_heldout.txt), which the second then lacks: a drafter
that goes on from it is judged by prompts that it has never learnt from (`outrider train --eval-data`).
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
    "{passages}\n{question}",
)
SUM = (
    "Summarize: {text}",
    "Summarize the following article.\n\n{text}",
    "{text}\n\nTL;DR:",
    "Write a short summary of this text: {text}",
)
TOPIC = (
    "Explain {a}.", "What is {a}, and why does it matter?", "Give me an overview of {a}, with examples.",
    "Tell me about the history of {a}.",
    "What are the most important facts about {a}?", "Write a short essay about {a}.",
    "Write a blog post about {a} for a general audience.",
    "How does {a} relate to {b}?", "Compare {a} and {b}.", "What would a teacher say about {a} in a first lesson?",
    "Describe {a} to somebody who has never heard of it, in detail.",
    "What questions do people ask about {a}? Answer three of them.",
)  # fmt: skip
PASSAGE = r"[A-Z][^\n]{2,60} -- [^\n]{200,}"
ARTICLES = ("p3/quoref", "p3/duorc", "standardebooks")
NEWS = r"(?s)(?:from English to \w+\.|English to \w+:)\s+(.*)"


def pick(rng: np.random.Generator, among: list[str]) -> str:
    return among[int(rng.integers(len(among)))]


class Passages:
    """The passages that the prompts of a file are about."""

    def __init__(self, rows: list[dict[str, str]]):
        alone = set()
        asked = set()
        articles = set()
        news = set()
        titles = set()
        self.own: dict[str, str] = {}  # a passage's own question
        for row in rows:
            text = row["prompt"]
            if row["source"] == "boolq":
                matches = [p.removeprefix("Passage: ").strip() for p in re.findall(PASSAGE, text)]
                questions = [q.strip() for q in re.findall(r"Question: ([^\n]+)", text)]
                alone.update(matches)
                asked.update(questions)
                titles.update(p.partition(" -- ")[0] for p in matches)
                if len(questions) == 1 and matches:  # it is about the first
                    self.own[matches[0]] = questions[0]
            elif row["source"] == "ntrex-128":
                news.update(s.strip() for s in re.findall(NEWS, text) if len(s) > 60)
            elif row["source"] in ARTICLES and row["category"] in ("reading", "summarization", "extraction"):
                pieces = text.split("\n\n")
                own = "\n\n".join(pieces[1:]) if row["source"] == "standardebooks" else max(pieces, key=len)
                articles.add(own.strip())
        self.alone = sorted(alone)
        self.asked = sorted(asked)
        self.news = sorted(news)
        self.titles = sorted(titles)
        self.articles = sorted(a for a in articles if len(a) > 700)

    def several(self, rng: np.random.Generator, among: list[str], size: int, most: int) -> list[str]:
        chosen: list[str] = []
        while sum(map(len, chosen)) < size and len(chosen) < most:
            chosen.append(pick(rng, among))
        return chosen

    def long(self, n: int, rng: np.random.Generator) -> str:
        size = int(rng.integers(1500, 4200))
        if n % 2:
            passages = self.several(rng, self.alone, size, 8)
            about = pick(rng, sorted(self.own)) if n % 4 == 1 else ""
            question = self.own.get(about) or pick(rng, self.asked)
            if about:
                passages[int(rng.integers(len(passages)))] = about
            return pick(rng, list(ASK)).format(passages="\n\n".join(passages), question=question)
        if n % 4 == 0:
            text = " ".join(self.several(rng, self.news, size, 30))
        else:
            text = "\n".join(self.several(rng, self.articles, size, 8))
        return pick(rng, list(SUM)).format(text=text[:size])

    def topic(self, rng: np.random.Generator) -> str:
        return pick(rng, list(TOPIC)).format(a=pick(rng, self.titles), b=pick(rng, self.titles))


HELD_OUT = Path(__file__).parent / "data" / "smollm2_heldout.txt"  # ids


def more_prompts(
    source: Path, to: Path, judge: Path, long: int = 4000, topics: int = 8000, seed: int = 0
) -> dict[str, int]:
    with gzip.open(source, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    held_out = set(HELD_OUT.read_text(encoding="utf-8").split())
    passages = Passages([row for row in rows if row["id"] not in held_out])
    rng = np.random.default_rng(seed)
    prompts = [("long", passages.long(n, rng)) for n in range(long)] + [
        ("topic", passages.topic(rng)) for _ in range(topics)
    ]
    with gzip.open(to, "wt", encoding="utf-8") as out, gzip.open(judge, "wt", encoding="utf-8") as apart:
        rows += [
            {"id": f"{kind}{n}", "category": kind, "source": "made", "prompt": text}
            for n, (kind, text) in enumerate(prompts)
        ]
        for row in rows:
            (apart if row["id"] in held_out else out).write(json.dumps(row) + "\n")
    parts = {
        "alone": passages.alone,
        "own": passages.own,
        "asked": passages.asked,
        "news": passages.news,
        "titles": passages.titles,
    }
    return {name: len(part) for name, part in parts.items()} | {"articles": len(passages.articles)}


if __name__ == "__main__":
    print(more_prompts(*map(Path, sys.argv[1:4])))
