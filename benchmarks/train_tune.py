"""Stage `tune` of train_smollm2.py: the shipped drafter goes on learning, half on answers sampled at T = 1.

Greedy drafting needs the target's first choice; coupled sampling at T = 1 needs its whole distribution, also in the
unlikely places where sampled text goes. KEEP holds prompts.npz and data/ (greedy answers of earlier runs).
Held-out prompts are those of the main run. Then the centroids are refitted (to drawn tokens as well as to best ones), the
temperature of the drafter's own distribution is chosen on held-out answers, and Spec-Bench is scored as in `finish`.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from train_common import DEVICE, DTYPE, bench_answers, brief, give, note, say, score

from outrider.train import run
from outrider.train.clusters import cluster_of, fit_centroids, recall_curve
from outrider.train.data import Sequences, load_folder
from outrider.train.evaluate import Head, matches, states, summary
from outrider.train.export import save_drafter
from outrider.train.generate import Answerer, Answering
from outrider.train.losses import LossMix, exact_logits
from outrider.train.net import DraftNet, step_weights, target_weights
from outrider.train.trainer import Trainer, TrainSettings
from outrider.weights.load import load_drafter

HELDOUT = 512  # as in the main run
LONGEST = 512  # prompts to be answered at T = 1
SCALES = (0.9, 1.0, 1.1, 1.2)  # the drafter's logits times this


def empty_cache() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def answer(target: run.Target, prompts: Sequences, lines: np.ndarray, how: Answering, seconds: float) -> Sequences:
    """Prompts `lines` answered for so long; what is unfinished then is dropped."""
    rows = [prompts[i] for i in lines]
    machine = Answerer(target.model, how, max(len(r) for r in rows), target.eos_ids)
    began, made = time.perf_counter(), []
    for n, greedy, tokens in machine.answer(rows, [int(i) for i in lines]):
        made.append((np.concatenate([rows[n], tokens]), len(rows[n]), int(lines[n]), greedy))
        if time.perf_counter() - began > seconds:
            break
    del machine
    empty_cache()
    sequences, given, index, greedy_ = zip(*made, strict=True)
    data = Sequences.of(sequences, given, index, greedy_, target.config.vocab_size)
    took = time.perf_counter() - began
    say(
        f"{len(data)} of {len(rows)} answered at T = {how.temperature:g}, "
        f"{data.answer_tokens} tokens, {data.answer_tokens / took:.0f} tok/s"
    )
    return data


def drawn_states(target: run.Target, net: DraftNet, weights: dict[str, Tensor], data: Sequences, hot: bool) -> tuple[Tensor, Tensor]:
    """The drafter's states on `data` and the full head's token at each: its best one, or one drawn from it (`hot`)."""
    g, best = states(target.model, net, weights, Head(target.model.head), data)
    if not hot:
        return g, best
    drawn = []
    for part in g.split(4096):
        z = exact_logits(target.model, part)
        drawn.append((z - torch.empty_like(z).exponential_().clamp_min_(1e-20).log_()).argmax(-1))
    return g, torch.cat(drawn)


def refit(
    target: run.Target, net: DraftNet, cold: Sequences, hot: Sequences, aside: tuple[Sequences, Sequences], args: Any, out: Path
) -> None:
    """The best of: the centroids as trained along, and those refitted from there at two rates."""
    weights = {k: v.detach() for k, v in net.cast(DTYPE).items()}
    rng = np.random.default_rng(0)
    few = [d.select(rng.permutation(len(d))[: args.cluster_sequences // 2]) for d in (cold, hot)]
    g, token = (
        torch.cat(x) for x in zip(*(drawn_states(target, net, weights, d, h) for d, h in zip(few, (False, True), strict=True)), strict=True)
    )
    judged = [drawn_states(target, net, weights, d, h) for d, h in zip(aside, (False, True), strict=True)]
    order, count = net.weight("token_ordering"), net.config.clusters
    label = cluster_of(order, count)[token]
    tried: list[tuple[float, str, Tensor]] = []
    for name, rate in (("as trained", 0.0), ("refitted, 5e-4", 5e-4), ("refitted, 2e-3", 2e-3)):
        made = net.weight("centroids").detach().clone()
        if rate:
            made = fit_centroids(g, label, made, 2 * args.cluster_steps, rate, 16384)
        tops = tuple(t for t in (8, 16, 24, args.top, 64, 96) if t <= count)
        curves = [recall_curve(*j, made, order, tops) for j in judged]
        at = tops.index(args.top)
        tried.append((sum(c[at].recall for c in curves) / 2, name, made))
        say(f"centroids {name}: recall at top {args.top}: best token {curves[0][at].recall:.4f}, drawn token {curves[1][at].recall:.4f}")
        note(out, "tune.jsonl", {"centroids": name, "best": [asdict(r) for r in curves[0]], "drawn": [asdict(r) for r in curves[1]]})
    chosen = max(tried, key=lambda t: t[0])
    say(f"centroids: {chosen[1]}")
    with torch.no_grad():
        net.weight("centroids").copy_(chosen[2])


def rescale(target: run.Target, net: DraftNet, aside_hot: Sequences, out: Path) -> float:
    """How sharp the drafter's distribution should be. Its state is normalised wherever it is read again, so a factor on
    the last matrix changes nothing but the sampling temperature."""
    weights = {k: v.detach() for k, v in net.cast(DTYPE).items()}
    seeds, best = [int(i) for i in aside_hot.index], (0.0, 1.0)
    for scale in SCALES:
        head = Head(target.model.head, weights["centroids"], weights["token_ordering"], net.config.cluster_top, 1 / scale)
        right = matches(target.model, net, weights, head, aside_hot, 4, seeds=seeds)
        value = summary(right, ["all"] * len(aside_hot), 4)["tokens_per_cycle"][4]
        say(f"logits times {scale}: held out, T = 1, K = 4: {value:.4f}")
        note(out, "tune.jsonl", {"scale": scale, "tokens_per_cycle": value})
        best = max(best, (value, scale))
    with torch.no_grad():
        net.weight("post" if net.config.has_post else "norm").mul_(best[1])
    return best[1]


def judge(what: str, target: run.Target, net: DraftNet, keep: Path, args: Any, out: Path, full: bool) -> None:
    """Spec-Bench, greedy and at T = 1 with coupled noise, clustered head and (if wanted) the full one."""
    weights = {k: v.detach() for k, v in net.cast(DTYPE).items()}
    heads = [("clustered", Head(target.model.head, weights["centroids"], weights["token_ordering"], net.config.cluster_top))]
    if full:
        heads.append(("full", Head(target.model.head)))
    for temperature in (0.0, 1.0):
        data, categories, seeds = bench_answers(target, keep, temperature, 256, args.bench_limit)
        for name, head in heads:
            result = score(target, net, data, categories, 8 if temperature else 16, head, seeds if temperature else None)
            say(f"{what}: Spec-Bench, T = {temperature:g}, {name} head: {brief(result)}")
            note(
                out, "tune.jsonl", {"what": what, "temperature": temperature, "head": name, "top": net.config.cluster_top, "result": result}
            )


def tune(args: argparse.Namespace, out: Path, keep: Path, target: run.Target) -> None:
    source = args.drafter or "smollm2"
    config, weights = load_drafter(source, "cpu", torch.float32)
    config = replace(config, cluster_top=args.top)
    net = DraftNet(config, target.config).to(DEVICE)
    net.load(weights)
    share = sum(step_weights(config).values()) / target_weights(target.config)
    say(f"{source}: a draft step reads {share:.3%} of a target step")
    judge("before", target, net, keep, args, out, full=False)

    prompts = Sequences.load(keep / "prompts.npz")
    aside_lines = run.heldout_lines(np.arange(len(prompts)), HELDOUT)
    old = load_folder(keep / "data")
    outside = ~np.isin(old.index, aside_lines)
    cold, aside = old.select(np.nonzero(old.greedy & outside)[0]), old.select(np.nonzero(old.greedy & ~outside)[0])
    open_lines = np.setdiff1d(np.nonzero(prompts.lengths <= LONGEST)[0], aside_lines)
    lines = np.random.default_rng(7).permutation(open_lines)[: args.limit or 20000]
    hot = answer(target, prompts, lines, Answering(args.max_new, 1.0, args.slots, 0.0, seed=7), args.answer_seconds)
    few = aside_lines[prompts.lengths[aside_lines] <= LONGEST][:256]
    aside_hot = answer(target, prompts, few, Answering(args.max_new, 1.0, min(256, len(few)), 0.0, coupled=True, seed=0), 60.0)

    want = round(len(hot) * (1 - args.hot_share) / max(args.hot_share, 1e-9)) if args.hot_share < 1 else 0
    cold = cold.select(np.random.default_rng(8).permutation(len(cold))[:want])
    data = Sequences.join([hot, cold]) if len(cold) else hot
    settings = TrainSettings(
        minutes=args.seconds / 60, survival=0.7, loss=LossMix.parse(args.tune_loss), lr=args.tune_lr, warmup=30, hold=0.0, final=0.0,
        muon=False, log_every=50, seed=11,
    )  # fmt: skip
    if args.steps_main:
        settings = replace(settings, minutes=None, steps=args.steps_main)
    say(f"{len(hot)} sampled and {len(cold)} greedy sequences; {len(aside)} greedy and {len(aside_hot)} sampled held out")

    def told(row: dict[str, Any]) -> None:
        say(json.dumps(row))
        note(out, "tune-log.jsonl", row)

    trainer = Trainer(target.model, net, data, settings, log=told)
    trainer.run()
    empty_cache()
    refit(target, net, cold if len(cold) else hot, hot, (aside, aside_hot), args, out)
    scale = rescale(target, net, aside_hot, out)
    judge("after", target, net, keep, args, out, full=True)
    story = {
        "tuned_from": source, "sampled_sequences": len(hot), "greedy_sequences": len(cold), "answer_tokens": data.answer_tokens,
        "steps": trainer.progress.step, "logits_scale": scale, "settings": asdict(settings) | {"loss": str(settings.loss)},
    }  # fmt: skip
    save_drafter(keep / "tuned", net.config, net.export(), provenance=story)
    give(keep / "tuned", out)
