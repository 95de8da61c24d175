"""Stage `long` of train_smollm2.py: the shipped drafter goes on learning for as long as --budget allows.

KEEP/data holds the answers of the main run (half greedy, half T = 0.8, every prompt once) and KEEP/extra.npz (made by
--prepare) the categories of the prompts and further long prompts. On the spot the target answers at T = 1 (most) and greedily
(prompts whose first answer was sampled). Categories are weighted towards what a drafter meets in use: less code, more reading,
summaries, translation. The vocabulary may be clustered anew by what is likely together. Layers learn as 4 bits hold them in
the last part. The drafter so far is written to $OUT at every evaluation; Spec-Bench is scored before and after, never trained on.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from train_common import BEGAN, DEVICE, DTYPE, bench_answers, brief, give, note, say
from train_tune import HELDOUT, answer, drawn_states, empty_cache

from outrider.train import run
from outrider.train.clusters import cluster_means, cluster_of, fit_centroids, likely_together
from outrider.train.data import Sequences, load_folder
from outrider.train.evaluate import Head, matches, summary
from outrider.train.export import save_drafter
from outrider.train.generate import Answering
from outrider.train.losses import LossMix
from outrider.train.net import DraftNet, step_weights, target_weights
from outrider.train.trainer import Trainer, TrainSettings
from outrider.weights.load import load_drafter

CATEGORIES = {
    "math": 0.9, "code": 0.7, "shell": 0.4, "sql": 1.0, "chat_multiturn": 0.7, "translation": 1.4, "summarization": 1.6, "reading": 1.4,
    "rag": 2.0, "qa": 1.4, "explain": 1.2, "long": 1.0,
}  # fmt: skip
SHARE_WARM = 0.15  # of the carried answers at T = 0.8 that are trained on
EARLY = 64  # tokens of an answer that count as its beginning
SCALES = (0.94, 1.0, 1.06)  # the drafter's logits times this


def seconds() -> float:
    return time.perf_counter() - BEGAN


class Data:
    """The prompts with their categories, what is held out, and what is trained on."""

    def __init__(self, keep: Path, target: run.Target, args: argparse.Namespace):
        carried = load_folder(keep / "data")
        order = np.argsort(carried.index, kind="stable")
        lines = carried.index[order]
        self.prompts: list[np.ndarray] = [carried[i][: carried.prompts[i]].astype(np.int64) for i in order]
        place = {int(line): n for n, line in enumerate(lines)}
        aside_lines = run.heldout_lines(np.unique(carried.index), min(HELDOUT, len(carried) // 5))
        names = ["all"] * len(self.prompts)
        extra = keep / "extra.npz"
        if extra.exists():
            with np.load(extra) as file:
                kinds, category = file["names"], file["category"]  # each access unpacks the file again
                names = [str(kinds[category[line]]) for line in lines]
                added = np.split(file["tokens"].astype(np.int64), np.cumsum(file["lengths"])[:-1])
            self.prompts += added
            names += ["long"] * len(added)
        self.weight = np.array([CATEGORIES.get(n, 1.0) for n in names])
        held = np.isin(carried.index, aside_lines)
        self.aside_at = np.array([place[int(i)] for i in aside_lines])
        self.open = np.setdiff1d(np.arange(len(self.prompts)), self.aside_at)
        at = np.array([place[int(i)] for i in carried.index])
        self.greedy_at = set(at[carried.greedy].tolist())
        rng = np.random.default_rng(5)
        kept = rng.random(len(carried)) < np.minimum(self.weight[at], 1.0) * np.where(carried.greedy, 1.0, SHARE_WARM)
        self.cold = carried.select(np.nonzero(carried.greedy & ~held & kept)[0])
        self.warm = carried.select(np.nonzero(~carried.greedy & ~held & kept)[0])
        self.aside = carried.select(np.nonzero(carried.greedy & held)[0][:256])
        self.target, self.args = target, args

    def pick(self, count: int, seed: int, among: np.ndarray, once: bool = False) -> np.ndarray:
        """`count` prompts by weight; unless `once`, a prompt may come more often (at T = 1 with another answer each time)."""
        rng, whole = np.random.default_rng(seed), self.weight[among]
        want = whole * count / whole.sum()
        want = np.minimum(want, 1.0) if once else want
        return rng.permutation(np.repeat(among, np.floor(want + rng.random(len(among))).astype(np.int64)))[:count]

    def made(self, lines: np.ndarray, how: Answering, most: float) -> Sequences:
        rows = Sequences.of([self.prompts[i] for i in lines], [1] * len(lines), lines, [False] * len(lines), self.target.config.vocab_size)
        return answer(self.target, rows, np.arange(len(lines)), how, most)


def views(net: DraftNet, target: run.Target) -> list[tuple[str, dict[str, Tensor], Head]]:
    """The drafter as it may run: full head, clustered head, clustered head with the layers in 4 bits."""
    plain, four = ({k: v.detach() for k, v in net.cast(DTYPE, bits).items()} for bits in (None, 4))
    rows, top = target.model.head, net.config.cluster_top
    return [
        ("full", plain, Head(rows)), ("clustered", plain, Head(rows, plain["centroids"], plain["token_ordering"], top)),
        ("clustered, 4 bits", four, Head(rows, four["centroids"], four["token_ordering"], top)),
    ]  # fmt: skip


def spec_bench(what: str, target: run.Target, net: DraftNet, keep: Path, args: Any, out: Path) -> None:
    for temperature in (0.0, 1.0):
        data, categories, seeds = bench_answers(target, keep, temperature, 256, args.bench_limit)
        for name, weights, head in views(net, target):
            right = matches(target.model, net, weights, head, data, 8, seeds=seeds if temperature else None)
            result, early = summary(right, categories, 8), summary([r[:EARLY] for r in right], categories, 8)
            say(f"{what}: Spec-Bench, T = {temperature:g}, {name}: {brief(result)}; first {EARLY}: {brief(early)}")
            note(out, "long.jsonl", {"what": what, "temperature": temperature, "view": name, "result": result, "early": early})


def held_out(target: run.Target, net: DraftNet, cold: Sequences, hot: Sequences, bits: int | None, scale: float = 1.0) -> dict[str, Any]:
    """Clustered head, greedy and coupled; score: the sum of tokens a cycle at K = 4."""
    weights = {k: v.detach() for k, v in net.cast(DTYPE, bits).items()}
    head = Head(target.model.head, weights["centroids"], weights["token_ordering"], net.config.cluster_top, 1 / scale)
    greedy = summary(matches(target.model, net, weights, head, cold, 8), ["all"] * len(cold), 8)
    sampled = summary(matches(target.model, net, weights, head, hot, 8, seeds=hot.index.tolist()), ["all"] * len(hot), 8)
    pair = greedy["tokens_per_cycle"][4], sampled["tokens_per_cycle"][4]
    return {"score": sum(pair), "greedy_4": pair[0], "sampled_4": pair[1], "greedy": greedy, "sampled": sampled,
            "acceptance_by_position": greedy["acceptance_by_position"]}  # fmt: skip


def recluster(target: run.Target, net: DraftNet, data: Sequences, count: int, steps: int) -> None:
    """Clusters of tokens that are likely in the same places; their centroids are fitted to drawn tokens before they learn along."""
    weights = {k: v.detach() for k, v in net.cast(DTYPE).items()}
    few = data.select(np.random.default_rng(3).permutation(len(data))[:count])
    g, token = drawn_states(target, net, weights, few, True)
    clusters = net.config.clusters
    order = likely_together(g[:: max(1, g.shape[0] // 300_000)], target.model.head, clusters)
    means = cluster_means(target.model.head, order, clusters)
    fitted = fit_centroids(g, cluster_of(order, clusters)[token], means, steps, 1e-2, 16384)
    with torch.no_grad():
        net.weight("token_ordering").copy_(order)
        net.weight("centroids").copy_(fitted)
    say(f"vocabulary clustered anew from {g.shape[0]} states")


def long(args: argparse.Namespace, out: Path, keep: Path, target: run.Target) -> None:
    source = args.drafter or "smollm2"
    config, weights = load_drafter(source, "cpu", torch.float32)
    net = DraftNet(replace(config, cluster_top=min(args.top, config.clusters)), target.config).to(DEVICE)
    net.load(weights)
    say(f"{source}: a draft step reads {sum(step_weights(net.config).values()) / target_weights(target.config):.3%} of a target step")
    spec_bench("before", target, net, keep, args, out)

    data = Data(keep, target, args)
    say(f"{len(data.prompts)} prompts; carried {len(data.cold)} greedy, {len(data.warm)} warm; {len(data.aside)} held out")
    few = data.aside_at[:256]
    hot_aside = data.made(few, Answering(args.max_new, 1.0, min(256, len(few)), 0.0, coupled=True), 60.0)
    hot_aside.index = hot_aside.index.astype(np.int32)
    hot = data.made(data.pick(args.hot, 7, data.open), Answering(args.max_new, 1.0, args.slots, 0.0, seed=7), args.answer_seconds)
    new = np.array([i for i in data.open if i not in data.greedy_at])
    cold = data.made(data.pick(args.cold, 8, new, once=True), Answering(args.max_new, 1.0, args.slots, 1.0, seed=8), args.answer_seconds)
    mixed = Sequences.join([hot, cold, data.cold, data.warm])
    say(f"training on {len(hot)} T = 1, {len(cold)} + {len(data.cold)} greedy, {len(data.warm)} T = 0.8: {mixed.answer_tokens} tokens")
    say(f"held out, before: {short(held_out(target, net, data.aside, hot_aside, None))}")
    if args.recluster:
        recluster(target, net, hot, args.cluster_sequences, args.cluster_steps)
        empty_cache()
        say(f"held out, new clusters: {short(held_out(target, net, data.aside, hot_aside, None))}")

    settings = TrainSettings(
        minutes=max(1.0, args.budget - args.reserve - seconds()) / 60, survival=0.7, loss=LossMix.parse(args.hot_loss),
        greedy_loss=LossMix.parse(args.greedy_loss), lr=args.long_lr, warmup=100, hold=0.1, final=0.0, log_every=50, seed=11,
        cluster_pull=args.cluster_pull, four_bits_from=args.four_bits_from, average=0.995, eval_every=args.eval_every, muon=args.muon,
        anchors=args.anchors, tokens=4 * args.anchors,
    )  # fmt: skip
    if args.steps_main:
        settings = replace(settings, minutes=None, steps=args.steps_main)
    net.config = replace(net.config, weight_bits=4 if settings.four_bits_from < 1 else None)
    story: dict[str, Any] = {
        "started_from": source, "sampled_sequences": len(hot), "greedy_sequences": len(cold) + len(data.cold),
        "warm_sequences": len(data.warm), "answer_tokens": mixed.answer_tokens, "reclustered": bool(args.recluster),
        "settings": asdict(settings) | {"loss": str(settings.loss), "greedy_loss": str(settings.greedy_loss)},
    }  # fmt: skip

    def told(row: dict[str, Any]) -> None:
        say(json.dumps(row) if "eval" not in row else f"step {row['step']} held out {short(row['eval'])}")
        note(out, "long-log.jsonl", row)

    def evaluate() -> dict[str, Any]:
        result = held_out(target, net, data.aside, hot_aside, trainer.bits)
        hand_in(net, keep, out, story | {"steps": trainer.progress.step}, result)
        return result

    trainer = Trainer(target.model, net, mixed, settings, evaluate=evaluate, log=told)
    say(f"training for {60 * (settings.minutes or 0):.0f} s")
    trainer.run()
    empty_cache()
    bits = trainer.bits
    raw = {n: p.detach().clone() for n, p in trainer.params.items()}
    tried = [("last", raw), ("average", {n: m.clone() for n, m in trainer.averaged().items()})]
    best: tuple[float, str, dict[str, Tensor], dict[str, Any]] | None = None
    for name, made in tried:
        put(net, made)
        result = held_out(target, net, data.aside, hot_aside, bits)
        say(f"{name}: held out {short(result)}")
        note(out, "long.jsonl", {"weights": name, "result": result})
        if best is None or result["score"] > best[0]:
            best = result["score"], name, made, result
    assert best is not None
    put(net, best[2])
    hand_in(net, keep, out, story | {"steps": trainer.progress.step, "weights": best[1]}, best[3])
    sharp: list[tuple[float, float, dict[str, Any]]] = []
    for scale in SCALES:
        result = held_out(target, net, data.aside, hot_aside, bits, scale) if scale != 1.0 else best[3]
        say(f"logits times {scale}: held out {short(result)}")
        sharp.append((result["sampled_4"], scale, result))
    _, scale, result = max(sharp, key=lambda s: s[0])
    with torch.no_grad():  # the state is normalised wherever it is read again: only the sampling temperature changes
        net.weight("post" if net.config.has_post else "norm").mul_(scale)
    story |= {"steps": trainer.progress.step, "weights": best[1], "logits_scale": scale}
    hand_in(net, keep, out, story, result)
    spec_bench("after", target, net, keep, args, out)
    say("done")


def short(result: dict[str, Any]) -> str:
    return f"K=4 greedy {result['greedy_4']:.4f} sampled {result['sampled_4']:.4f}"


@torch.no_grad()
def put(net: DraftNet, weights: dict[str, Tensor]) -> None:
    for name, value in weights.items():
        net.weight(name).copy_(value)


def hand_in(net: DraftNet, keep: Path, out: Path, story: dict[str, Any], result: dict[str, Any]) -> None:
    acceptance = {kind: result[kind]["acceptance_given_before"] for kind in ("greedy", "sampled")}
    save_drafter(keep / "long", net.config, net.export(), provenance=story | {"acceptance": acceptance})
    give(keep / "long", out)
