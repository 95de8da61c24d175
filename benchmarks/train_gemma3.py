"""The clustered head on a real Gemma vocabulary: a drafter for Gemma-3-270M in Gemma 4's layout, and its head in pieces.

    python benchmarks/train_gemma3.py --target gemma-3-270m.gguf      # KEEP/prompts.npz: encoded texts to continue

Three sliding layers and a full one on the target's last K/V of each kind, hidden 256, a 262,144-token head of its own.
Then, for 1024, 2048 and 4096 clusters and top 8..64: tokens a cycle against the full head, and what a draft step reads.
Neither the target nor anything trained on it is kept in this repository (Gemma Terms); the table is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch
from torch import Tensor

from outrider.train import design, run
from outrider.train.clusters import balanced_kmeans, cluster_of, fit_centroids, recall_curve
from outrider.train.data import Sequences, load_folder, make_batch, plan_epoch
from outrider.train.evaluate import Head, matches, states, summary
from outrider.train.generate import Answering, answer_all
from outrider.train.net import DraftNet, step_weights, target_weights
from outrider.train.trainer import Trainer, TrainSettings

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
BEGAN = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:7.1f}] {text}", flush=True)


def timed_head(call: Any) -> float:
    """Microseconds of one call at batch 1, inside a CUDA graph."""
    if DEVICE.type != "cuda":
        return float("nan")
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / 100 * 1e6


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--target", default="gemma3.gguf")
    p.add_argument("--keep", default="/root/keep/gemma3")
    p.add_argument("--limit", type=int, default=14000)
    p.add_argument("--max-new", type=int, default=96)
    p.add_argument("--slots", type=int, default=1024)
    p.add_argument("--minutes", type=float, default=1.2)
    p.add_argument("--steps", type=int, default=0)
    p.add_argument("--hidden", type=int, default=256)
    p.add_argument("--anchors", type=int, default=6144)
    p.add_argument("--cluster-steps", type=int, default=300)
    p.add_argument("--clusters", default="1024,2048,4096")
    args = p.parse_args()
    out, keep = Path(os.environ.get("OUT", "runs/out")), Path(args.keep)
    for folder in (out, keep):
        folder.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = True

    def note(row: dict[str, Any]) -> None:
        with open(out / "gemma3.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    target = run.open_target(args.target, str(DEVICE), DTYPE)
    model = target.model
    say(f"target loaded: {len(target.config.layers)} layers, hidden {target.config.hidden}, vocabulary {target.config.vocab_size}")
    prompts = Sequences.load(keep / "prompts.npz")
    rows = [prompts[i] for i in range(min(args.limit, len(prompts)))]
    made = [0, 0.0]

    def report(done: int, count: int, tokens: int, seconds: float) -> None:
        if seconds - made[1] > 4 or done == count:
            made[:] = [tokens, seconds]
            say(f"answered {done}/{count}, {tokens / seconds:.0f} tok/s")

    answer_all(model, rows, Answering(args.max_new, 0.8, args.slots, 0.5, seed=2), keep / "data", target.eos_ids, report=report)
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    data, aside = run.split(load_folder(keep / "data"), 512)
    say(f"{len(data)} sequences, {data.answer_tokens} answer tokens; {len(aside)} held out")

    config = design.gemma(target.config, hidden=args.hidden, intermediate=8 * args.hidden, heads=4, target_hash=target.hash)
    net = DraftNet(config, target.config, 0).to(DEVICE)
    design.start_gemma(net, model, make_batch(data, plan_epoch(data, args.anchors, 4 * args.anchors, 0, 0)[0], 1).to(DEVICE))
    settings = TrainSettings(
        steps=args.steps or 1,
        minutes=None if args.steps else args.minutes,
        unroll=4,
        lr=2e-3,
        warmup=50,
        muon=True,
        anchors=args.anchors,
        tokens=4 * args.anchors,
        log_every=50,
    )

    def told(row: dict[str, Any]) -> None:
        say(json.dumps(row))
        note(row)

    trainer = Trainer(model, net, data, settings, log=told)
    trainer.run()

    weights = {k: v.detach() for k, v in net.cast(DTYPE).items()}
    rows_of_head: Tensor = weights["embed"]
    whole = target_weights(target.config)
    cost = step_weights(config)
    result = summary(matches(model, net, weights, Head(rows_of_head), aside, 8, args.anchors), ["all"] * len(aside), 8)
    base = result["tokens_per_cycle"][4]
    state = torch.randn(1, args.hidden, device=DEVICE, dtype=DTYPE)
    micro = timed_head(lambda: (state @ rows_of_head.T).float().argmax(-1))
    note({"head": "full", "result": result, "weights_a_step": cost, "share": sum(cost.values()) / whole, "head_us": micro})
    say(
        f"full head: K=4 {base:.3f}, first {result['acceptance_by_position'][0]:.3f}, "
        f"step {sum(cost.values()) / whole:.1%} of the target, head {micro:.1f} us"
    )

    def states_of(sequences: Sequences) -> tuple[Tensor, Tensor]:
        return states(model, net, weights, Head(rows_of_head), sequences, 4, args.anchors)

    g, c = states_of(data.select(np.random.default_rng(0).permutation(len(data))[:4000]))
    held_g, held_c = states_of(aside)
    say(f"{g.shape[0]} states to fit on")
    for count in (int(x) for x in args.clusters.split(",")):
        order, means = balanced_kmeans(rows_of_head, count)
        say(f"{count} clusters made")
        fitted = fit_centroids(g, cluster_of(order, count)[c], means, args.cluster_steps, 1e-2, 16384)
        tops = tuple(t for t in (8, 16, 32, 64) if t <= count)
        raw, tuned = (recall_curve(held_g, held_c, m, order, tops) for m in (means, fitted))
        by_cluster = rows_of_head[order].view(count, -1, args.hidden)
        centroids = fitted.to(DTYPE)
        for mean_point, point in zip(raw, tuned, strict=True):
            head = Head(rows_of_head, centroids, order, point.top)
            result = summary(matches(model, net, weights, head, aside, 8, args.anchors), ["all"] * len(aside), 8)

            def clustered(top: int = point.top, centroids: Tensor = centroids, pieces: Tensor = by_cluster) -> Tensor:
                best = (state @ centroids.T).float().topk(top, dim=-1).indices
                return (pieces[best[0]] @ state[0]).float().argmax()

            micro = timed_head(clustered)
            cost = step_weights(replace(config, clusters=count, cluster_top=point.top))
            value = result["tokens_per_cycle"][4]
            note({
                "head": count, "top": point.top, "share_of_vocabulary": point.share, "recall_of_means": mean_point.recall,
                "recall": point.recall, "result": result, "loss": 1 - value / base, "weights_a_step": cost,
                "share": sum(cost.values()) / whole, "head_us": micro,
            })  # fmt: skip
            say(
                f"{count} clusters, top {point.top} ({point.share:.2%}): recall {mean_point.recall:.4f} -> {point.recall:.4f}, "
                f"K=4 {value:.3f} ({value / base - 1:+.2%}), step {sum(cost.values()) / whole:.2%} of the target, head {micro:.1f} us"
            )


if __name__ == "__main__":
    main()
