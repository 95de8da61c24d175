"""`outrider eval-drafter` and `outrider cluster`: measuring a drafter, and giving it a clustered head."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import EngineConfig
from ..engine.engine import Request
from ..llm import LLM
from ..models.pairing import fits
from ..types import OutriderError, SamplingParams
from ..weights.load import load_drafter, plain_all
from .clusters import balanced_kmeans, choose_top, cluster_of, fit_centroids, recall_curve
from .data import Prompt, Sequences, read_prompts
from .evaluate import MAX_K, Head, best_k, matches, states, summary
from .export import save_drafter
from .generate import Answerer, Answering
from .net import DraftNet, step_weights, target_weights
from .run import TOPS, Say, Target, default_clusters, encode, open_target


def answers(
    target: Target, prompts: list[Prompt], *, max_new: int, temperature: float, chat: bool, slots: int, drafter: str = "none",
    seed: int = 0,
) -> tuple[Sequences, list[int]]:  # fmt: skip
    """The target's own answers (with the engine's noise when sampled), and the seed of each.
    On a CPU the engine answers: its packed weights, with the drafter's help, are many times faster than dense decoding."""
    most, hot = max(1, target.config.max_context - max_new), temperature > 0
    encoded = encode(prompts, target.text, target.config.vocab_size, texts=False, max_tokens=most, chat=chat)
    rows, seeds = [encoded[i] for i in range(len(encoded))], [seed + int(i) for i in encoded.index]
    if target.model.device.type == "cuda":
        how = Answering(max_new, temperature or 1.0, min(slots, len(rows)), 0.0 if hot else 1.0, coupled=hot)
        done = Answerer(target.model, how, max(len(r) for r in rows), target.eos_ids).answer(rows, seeds)
        made = [a for _, _, a in sorted(done, key=lambda d: d[0])]
    else:
        made = engine_answers(target.name, drafter, rows, seeds, SamplingParams(temperature=temperature, max_tokens=max_new), slots)
    whole = [np.concatenate([row, answer]) for row, answer in zip(rows, made, strict=True)]
    return Sequences.of(whole, [len(r) for r in rows], encoded.index, [not hot] * len(rows), target.config.vocab_size), seeds


def engine_answers(
    name: str, drafter: str, rows: list[np.ndarray], seeds: list[int], params: SamplingParams, slots: int
) -> list[np.ndarray]:
    spare = EngineConfig().page_size  # the engine keeps a page aside
    context = max(len(r) for r in rows) + params.max_tokens + 1 + spare
    config = EngineConfig(max_batch=min(slots, len(rows)), max_context=context, prefix_cache=False)
    llm = LLM.load(name, drafter, 4, device="cpu", engine=config, say=lambda _: None)
    made: list[list[int]] = [[] for _ in rows]
    for i, (row, seed) in enumerate(zip(rows, seeds, strict=True)):
        llm.engine.submit(Request(str(i), row.tolist(), replace(params, seed=seed)))
    while llm.engine.busy:
        for event in llm.engine.step():
            made[int(event.id)] += event.tokens
    return [np.array(answer, dtype=np.int64) for answer in made]


def spread(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """At most so many, evenly over the file: prompt files are often sorted by category."""
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[int(i * len(prompts) / limit)] for i in range(limit)]


def load_net(drafter: str, target: Target) -> DraftNet:
    config, weights = load_drafter(drafter, "cpu", torch.float32)
    reason = fits(config, target.config)
    if reason is not None:
        raise OutriderError(f"{drafter} does not fit the target: {reason}")
    net = DraftNet(config, target.config)
    net.load(plain_all(weights))
    return net.to(target.model.device)


def heads(net: DraftNet, target: Target, weights: dict[str, Tensor], temperature: float = 1.0) -> tuple[Head, Head | None]:
    """The full head and the clustered one, where the drafter has it."""
    rows = target.model.head if net.config.tied_to_target else weights["embed"]
    full = Head(rows, temperature=temperature)
    if not net.config.clusters:
        return full, None
    return full, Head(rows, weights["centroids"], weights["token_ordering"], net.config.cluster_top, temperature)


def evaluate_drafter(
    model: str, drafter: str, prompts: Path, *, limit: int | None = None, max_new: int = 128, temperature: float = 0.0, chat: bool = True,
    full_head: bool = False, slots: int = 8, device: str = "cpu", dtype: torch.dtype = torch.float32, say: Say = print,
) -> dict[str, Any]:  # fmt: skip
    listed = spread(read_prompts(prompts), limit)
    target = open_target(model, device, dtype)
    net = load_net(drafter, target)
    began = time.perf_counter()
    data, seeds = answers(target, listed, max_new=max_new, temperature=temperature, chat=chat, slots=slots, drafter=drafter)
    say(f"{len(data)} answers, {data.answer_tokens} tokens, {time.perf_counter() - began:.0f} s")
    bits = net.config.weight_bits if device.startswith("cpu") else None  # as the engine holds it there
    weights = {k: v.detach() for k, v in net.cast(dtype, bits).items()}
    full, clustered = heads(net, target, weights, temperature or 1.0)
    head = full if full_head or clustered is None else clustered
    anchors = 16384 if device.startswith("cuda") else 1024  # small batches end when their last draft fails
    right = matches(target.model, net, weights, head, data, MAX_K, anchors, 8 * anchors, seeds if temperature > 0 else None)
    result = summary(right, [listed[i].category for i in data.index], MAX_K)
    config = replace(net.config, clusters=0) if full_head else net.config
    share = sum(step_weights(config).values()) / target_weights(target.config)
    return {**result, "draft_step_share": round(share, 4), "best_k": best_k(result["tokens_per_cycle"], share)}


def cluster_drafter(
    drafter: str, to: Path, *, clusters: int | None = None, top: int | None = None, target: str | None = None, prompts: Path | None = None,
    limit: int | None = 256, recall: float = 0.99, max_new: int = 96, seed: int = 0, device: str = "cpu", say: Say = print,
) -> dict[str, Any]:  # fmt: skip
    """Balanced k-means of the head's rows. Without a target the centroids are the clusters' means; with a target and
    prompts they are tuned on the drafter's own states there, and `top` is the cheapest that finds the full head's token."""
    config, loaded = load_drafter(drafter, "cpu", torch.float32)
    weights = plain_all(loaded)
    if (target is None) != (prompts is None):
        raise OutriderError("--target and --prompts belong together")
    if config.tied_to_target and target is None:
        raise OutriderError(f"{drafter} uses its target's head: give --target and --prompts")
    count = clusters or default_clusters(config.vocab_size)
    opened = open_target(target, device, torch.float32) if target is not None else None
    rows = opened.model.head.float() if opened is not None and config.tied_to_target else weights["embed"].to(device)
    order, means = balanced_kmeans(rows, count, seed=seed)
    say(f"{config.vocab_size} tokens in {count} clusters")
    chosen, curve = top or max(1, count // 64), []
    if opened is not None and prompts is not None:
        g, choices = _states(opened, replace(config, clusters=0), weights, prompts, limit, max_new)
        cut = max(1, g.shape[0] * 4 // 5)
        means = fit_centroids(g[:cut], cluster_of(order, count)[choices[:cut]], means, 300, 1e-2, seed=seed)
        curve = recall_curve(g[cut:], choices[cut:], means, order, tuple(t for t in TOPS if t <= count))
        chosen = top or choose_top(curve, recall).top
    made = replace(config, clusters=count, cluster_top=chosen)
    save_drafter(to, made, {**weights, "centroids": means.cpu(), "token_ordering": order.cpu()})
    size = config.vocab_size // count
    return {
        "clusters": count, "top": chosen, "share": chosen * size / config.vocab_size,
        "head_weights": (chosen * size + count) * config.head_hidden,
        "full_head_weights": config.vocab_size * config.head_hidden, "recall": [asdict(r) for r in curve],
    }  # fmt: skip


def _states(
    target: Target, config: Any, weights: dict[str, Tensor], prompts: Path, limit: int | None, max_new: int
) -> tuple[Tensor, Tensor]:
    """The drafter's states on the target's answers, and the full head's choice at each."""
    reason = fits(config, target.config)
    if reason is not None:
        raise OutriderError(f"the drafter does not fit the target: {reason}")
    net = DraftNet(config, target.config)
    net.load(plain_all(weights))
    net.to(target.model.device)
    data, _ = answers(target, spread(read_prompts(prompts), limit), max_new=max_new, temperature=0.0, chat=True, slots=8)
    cast = {k: v.detach() for k, v in net.cast(torch.float32).items()}
    return states(target.model, net, cast, heads(net, target, cast)[0], data)
