"""Experiments around `outrider train` that reproduce tables in docs/training.md; each starts from the folder of a finished run.

    python benchmarks/train_experiments.py ablate --target smollm2 --run RUN --steps 100     # one change each against a base
    python benchmarks/train_experiments.py heads  --target smollm2 --run RUN                 # clusters of several sizes, fitted afterwards
    python benchmarks/train_experiments.py block  --target smollm2 --run RUN --data prompts.jsonl.gz   # one pass for several positions?
    python benchmarks/train_experiments.py trees  --target smollm2 --run RUN --data prompts.jsonl.gz   # losses for second guesses
    python benchmarks/train_experiments.py long-prompts prompts_train.jsonl.gz long.jsonl    # long prompts made of passages in the prompts

RUN/data.npz is what the target answered (`block` and `trees`, in train_blocks.py, make it from --data where it is missing).
`heads` for Gemma's vocabulary: a run with --style gemma --clusters 0.
Results are printed and appended to RUN/experiments.jsonl.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch
import train_blocks
from torch import Tensor

from outrider.models.inspect import drafter_size, model_size
from outrider.ops.reference import plain
from outrider.train import design
from outrider.train.answers import heldout_prompts
from outrider.train.clusters import balanced_kmeans, cluster_of, fit_centroids, recall_curve
from outrider.train.data import Sequences, make_batch, plan_epoch, read_prompts
from outrider.train.evaluate import Head, judge_drafts, states, summary
from outrider.train.losses import LossMix
from outrider.train.net import DraftNet
from outrider.train.run import split
from outrider.train.target import Target, open_target
from outrider.train.tools import answers, describe, load_net
from outrider.train.trainer import Trainer, TrainSettings

BENCH = Path(__file__).parent / "data" / "spec_bench_question.jsonl"
BASE: dict[str, Any] = dict(reads=(4, 9, 14, 19, 24, 29), intermediate=352, taps=(), position_offset=2, start="target")
VARIANTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # name, change of the drafter, change of the settings
    ("base", {}, {}),
    ("8 layers", dict(reads=(3, 7, 11, 14, 18, 22, 25, 29), intermediate=176), {}),
    ("6 upper layers 14..29", dict(reads=(14, 17, 20, 23, 26, 29)), {}),
    ("4 layers 14,20,26,29", dict(reads=(14, 20, 26, 29), intermediate=768), {}),
    ("all read layer 29", dict(reads=(29,) * 6), {}),
    ("lr 4e-3", {}, dict(lr=4e-3)),
    ("AdamW", {}, dict(muon=False)),
    ("loss soft", {}, dict(loss=LossMix(1, 0, 0, 0))),
    ("loss hard", {}, dict(loss=LossMix(0, 0, 1, 0))),
    ("loss 0.1 soft + 0.9 tv", {}, dict(loss=LossMix(0.1, 0.9, 0, 0))),
    ("loss soft + lk", {}, dict(loss=LossMix(0.5, 0, 0, 0.5))),
    ("taps 9,19", dict(taps=(9, 19)), {}),
    ("survival weights", {}, dict(survival=0.7)),
    ("random start", dict(start="random"), {}),
    ("position L-1", dict(position_offset=1), {}),
    ("unroll 3", {}, dict(unroll=3)),
    ("unroll 1", {}, dict(unroll=1)),
    ("plain text", {}, {}),
]
ASK = (
    "{passages}\n\nQuestion: {question}",
    "Answer from the passages.\n\n{passages}\n\nQuestion: {question}\nAnswer:",
    "{question}\n\n{passages}",
)
SUM = ("Summarize: {text}", "Summarize the following article.\n\n{text}", "{text}\n\nTL;DR:", "Write a short summary of this text: {text}")


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def open_run(args: argparse.Namespace) -> tuple[Target, Sequences, Sequences, Callable[[dict[str, Any]], None]]:
    """The target, what to train on, greedy held-out answers, and where results go."""
    run = Path(args.run)
    target = open_target(args.target, device(), torch.bfloat16 if device() == "cuda" else torch.float32)
    prompts = Sequences.load(run / "prompts.npz")
    data, aside = split(Sequences.load(run / "data.npz"), prompts.index[heldout_prompts(len(prompts), args.heldout)])

    def note(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        with open(run / "experiments.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    return target, data, aside.select(np.nonzero(aside.greedy)[0]), note


def score(target: Target, net: DraftNet, data: Sequences, head: Head | None = None, categories: list[str] | None = None) -> dict[str, Any]:
    weights = {k: v.detach() for k, v in net.cast(target.model.dtype).items()}
    found = judge_drafts(target.model, net, weights, head or Head(rows_of(target, net, weights)), data, 8)
    return summary(found.right, categories or ["all"] * len(data), 8)


def rows_of(target: Target, net: DraftNet, weights: dict[str, Tensor]) -> Tensor:
    return plain(target.model.head) if net.config.tied_to_target else weights["embed"]


# ---- one change each ------------------------------------------------------------------------------------------------
def build_net(target: Target, data: Sequences, change: dict[str, Any]) -> DraftNet:
    shape = BASE | change
    config = design.plain(
        target.config, reads=shape["reads"], intermediate=shape["intermediate"], taps=shape["taps"],
        position_offset=shape["position_offset"],
    )  # fmt: skip
    net = DraftNet(config, target.config, 0).to(target.model.device)
    if shape["start"] == "target":
        design.start_from_target(net, target.model)
        few = plan_epoch(data, 16384, 65536, 0, 0)[:2]
        design.fit_inputs(net, target.model, [make_batch(data, b, 1).to(target.model.device) for b in few])
    return net


def ablate(args: argparse.Namespace) -> None:
    target, data, aside, note = open_run(args)
    listed = read_prompts(BENCH, args.questions)
    bench = answers(
        describe(args.target), listed, max_new=256, temperature=0.0, chat=True, device=device(), dtype=target.model.dtype
    )  # fmt: skip
    kinds = [listed[i].category for i in bench.index]
    for name, shape, change in VARIANTS:
        if args.only and name not in args.only.split(";"):
            continue
        chosen = texts_of(data, target.config.vocab_size) if name == "plain text" else data
        settings = TrainSettings(**{"steps": args.steps, "warmup": 20, "log_every": 60, "muon": True, **change})
        net = build_net(target, chosen, shape)
        began = time.perf_counter()
        Trainer(target.model, net, chosen, settings).run()
        took = round(time.perf_counter() - began, 1)
        note({"name": name, "seconds": took, "held_out": score(target, net, aside), "bench": score(target, net, bench, None, kinds)})


def texts_of(data: Sequences, vocab: int) -> Sequences:
    """The prompts as plain text: every position an anchor, nothing of the target's own answers."""
    keep = np.nonzero(data.prompts >= 64)[0]
    rows = [data[int(i)][: data.prompts[i]][-256:] for i in keep]
    return Sequences.of(rows, [1] * len(rows), data.index[keep], [False] * len(rows), vocab)


# ---- clustered heads ------------------------------------------------------------------------------------------------
def timed(call: Callable[[], object], times: int = 20) -> float:
    """Microseconds of one call; on a GPU inside a CUDA graph."""
    for _ in range(3):
        call()
    if device() == "cpu":
        began = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - began) / times * 1e6
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / (5 * times) * 1e6


def heads(args: argparse.Namespace) -> None:
    target, data, aside, note = open_run(args)
    net = load_net(args.drafter or str(Path(args.run) / "drafter"), target)
    weights = {k: v.detach() for k, v in net.cast(target.model.dtype).items()}
    rows, whole = rows_of(target, net, weights), model_size(target.config).active
    full = score(target, net, aside)
    state = torch.randn(1, rows.shape[1], device=rows.device, dtype=rows.dtype)
    share = drafter_size(replace(net.config, clusters=0)).step / whole
    note({"head": "full", "result": full, "share": share, "us": timed(lambda: (state @ rows.T).float().argmax(-1))})
    few = data.select(np.random.default_rng(0).permutation(len(data))[: args.sequences])
    g, chosen = states(target.model, net, weights, Head(rows), few)
    held = states(target.model, net, weights, Head(rows), aside)
    for count in (int(x) for x in args.clusters.split(",")):
        order, means = balanced_kmeans(rows, count)
        fitted = fit_centroids(g, cluster_of(order, count)[chosen], means, 300, 1e-2, 16384)
        tops = tuple(t for t in (8, 16, 32, 48, 64, 96) if t <= count)
        curves = [recall_curve(*held, c, order, tops) for c in (means, fitted)]
        pieces, centroids = rows[order].view(count, -1, rows.shape[1]), fitted.to(rows.dtype)
        for raw, point in zip(*curves, strict=True):
            made = score(target, net, aside, Head(rows, centroids, order, point.top))

            def clustered(top: int = point.top, centroids: Tensor = centroids, pieces: Tensor = pieces) -> Tensor:
                best = (state @ centroids.T).float().topk(top, dim=-1).indices[0]
                return (pieces[best].flatten(0, 1) @ state[0]).float().argmax(-1)

            config = replace(net.config, clusters=count, cluster_top=point.top)
            note({
                "clusters": count, **asdict(point), "recall_of_means": raw.recall, "tokens_per_cycle": made["tokens_per_cycle"][4],
                "lost": 1 - made["tokens_per_cycle"][4] / full["tokens_per_cycle"][4], "first": made["acceptance_by_position"][0],
                "share_of_step": drafter_size(config).step / whole, "us": timed(clustered),
            })  # fmt: skip


# ---- long prompts ---------------------------------------------------------------------------------------------------
def long_prompts(source: Path, to: Path, count: int = 3000, seed: int = 0) -> None:
    """Several passages with a question about one of them, and articles to summarise, of 350 to 1,000 tokens."""
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


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["ablate", "heads", "block", "trees", "long-prompts"])
    p.add_argument("files", nargs="*", type=Path, help="long-prompts: prompt file and where to write")
    p.add_argument("--target", default="smollm2")
    p.add_argument("--run", default="runs/smollm2")
    p.add_argument("--drafter", default="")
    p.add_argument("--heldout", type=int, default=512)
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--only", default="", help="ablate: these, separated by ;")
    p.add_argument("--clusters", default="512,1024,2048")
    p.add_argument("--sequences", type=int, default=6000, help="heads: sequences to fit centroids on")
    p.add_argument("--questions", type=int, default=None, help="ablate, block, trees: so many of Spec-Bench only")
    train_blocks.add_options(p)
    args = p.parse_args()
    if args.what == "long-prompts":
        long_prompts(*args.files)
    else:
        {"ablate": ablate, "heads": heads, "block": train_blocks.block, "trees": train_blocks.trees}[args.what](args)


if __name__ == "__main__":
    main()
