"""`outrider eval-drafter`, `cluster-head` and `export`: measuring a drafter, giving it a clustered head, another layout
for a block drafter."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from ..models.block_config import BlockConfig, is_block
from ..models.compat import fits
from ..models.config import DrafterConfig
from ..models.inspect import model_size
from ..ops.reference import as_tensor
from ..prompts import Prompt, read_prompts
from ..spec.block_load import block_plan, renamed
from ..types import MAX_DRAFT, OutriderError
from ..weights import hub
from ..weights.files import open_source
from ..weights.load import as_tensors, load_drafter, translate
from ..weights.quant_scheme import recipe
from ..weights.source_tensor import tensor
from .answers import CPU_SLOTS, GPU_SLOTS, Task, answer_tasks, answering_engine, as_sequences
from .block_export import LAYOUTS, Json, block_dict
from .block_net import BlockModule, block_config, load_block_weights
from .clusters import balanced_kmeans, choose_top, cluster_of, fit_centroids, recall_curve
from .config import Say
from .data import Sequences
from .design import default_clusters
from .evaluate import best_k, second_guesses, states, summary
from .export import save_drafter, write_folder
from .finish import guess_rows, judged, views
from .net import DrafterModule, TrainNet
from .target import Described, TrainTarget, describe, encode, open_target
from .trainer import Row


def answers(
    known: Described,
    prompts: list[Prompt],
    *,
    max_new: int,
    temperature: float,
    chat: bool,
    slots: int | None = None,
    drafter: str = "none",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Sequences:
    """The target's own answers through the engine: on a CPU with the drafter's help, on a GPU many at a time without
    it. Each has its prompt's line as its seed."""
    most = max(1, known.config.max_context - max_new)
    encoded = encode(prompts, known.text, known.config.vocab_size, texts=False, max_tokens=most, chat=chat)
    tasks = [Task(i, 0, temperature, int(encoded.index[i])) for i in range(len(encoded))]
    many, helper = (GPU_SLOTS, "none") if device.startswith("cuda") else (CPU_SLOTS, drafter)
    wanted, longest = min(slots or many, len(encoded)), int(encoded.lengths.max()) + max_new
    with answering_engine(known, device, dtype, wanted, longest, helper) as engine:
        made = list(answer_tasks(engine, encoded, tasks, max_new))
    return as_sequences(encoded, made, known.config.vocab_size)


def spread(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """At most so many, evenly over the file: prompt files are often sorted by category."""
    if limit is not None and limit < 1:
        raise OutriderError(f"--limit must be at least 1, got {limit}")
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[int(i * len(prompts) / limit)] for i in range(limit)]


def check_mtp(drafter: str, target: Described | TrainTarget | None) -> tuple[DrafterConfig, dict[str, Tensor]]:
    config, weights = load_drafter(drafter, "cpu", torch.float32)
    reason = None if target is None else fits(config, target.config)
    if reason is not None:
        raise OutriderError(f"{drafter} does not fit the target: {reason}")
    return config, as_tensors(weights)


def load_net(drafter: str, target: TrainTarget, clustered: bool = True) -> TrainNet:
    """`clustered`: with the clusters of its head, where it has any."""
    if is_block(hub.resolve(drafter, kind="drafter").config):
        block, own = load_block_weights(drafter, target)
        made = BlockModule(block, target.config)
        made.load(own)
        return made.to(target.model.device)
    config, weights = check_mtp(drafter, target)
    net = DrafterModule(config if clustered else replace(config, clusters=0), target.config)
    net.load(weights)
    return net.to(target.model.device)


def evaluate_drafter(
    model: str,
    drafter: str,
    prompts: Path,
    *,
    limit: int | None = None,
    max_new: int = 128,
    temperature: float = 0.0,
    chat: bool = True,
    full_head: bool = False,
    slots: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    say: Say = print,
) -> Row:
    listed = spread(read_prompts(prompts), limit)
    known = describe(model)
    if is_block(hub.resolve(drafter, kind="drafter").config):
        block_config(drafter, known.config)
    else:
        check_mtp(drafter, known)
    began = time.perf_counter()
    data = answers(
        known,
        listed,
        max_new=max_new,
        temperature=temperature,
        chat=chat,
        slots=slots,
        drafter=drafter,
        device=device,
        dtype=dtype,
    )
    say(f"{len(data)} answers, {data.answer_tokens} tokens, {time.perf_counter() - began:.0f} s")
    target = open_target(known, device, dtype)
    net = load_net(drafter, target)
    if device.startswith("cuda") and isinstance(net, DrafterModule):
        net.config = replace(net.config, weight_bits=None)  # a GPU holds what the file says
    found = judged(target, net, data, most=MAX_DRAFT, full=full_head, temperature=temperature)
    result = summary(found.right, [listed[i].category for i in data.index], MAX_DRAFT)
    if temperature == 0:
        weights, whole, _ = views(net, target)
        result["second_guess"] = second_guesses(
            target.model, net, weights, whole.rows, data, guess_rows(target.model.device)
        )
    if full_head and isinstance(net, DrafterModule):
        net.config = replace(net.config, clusters=0)
    share = net.size.step / model_size(target.config).active
    once = isinstance(net, BlockModule) and net.config.kind == "dflash"
    fastest = best_k(result["tokens_per_cycle"], share, once=once)
    return {**result, "draft_step_share": round(share, 4), "best_k": fastest}


def cluster_drafter(
    drafter: str,
    to: Path,
    *,
    clusters: int | None = None,
    top: int | None = None,
    target: str | None = None,
    prompts: Path | None = None,
    limit: int | None = 256,
    recall: float = 0.99,
    max_new: int = 96,
    seed: int = 0,
    device: str = "cpu",
    say: Say = print,
) -> Row:
    """Balanced k-means of the head's rows. Without a target the centroids are the clusters' means; with a target and
    prompts they are tuned on the drafter's own states there, and `top` is the cheapest that finds the full head's
    token."""
    if (target is None) != (prompts is None):
        raise OutriderError("--target and --prompts belong together")
    for option, given in (("--clusters", clusters), ("--top", top)):
        if given is not None and given < 1:
            raise OutriderError(f"{option} must be at least 1, got {given}")
    known = None if target is None else describe(target)
    config, weights = check_mtp(drafter, known)
    if config.tied_to_target and target is None:
        raise OutriderError(f"{drafter} uses its target's head: give --target and --prompts")
    count = clusters or default_clusters(config.vocab_size)
    opened, data = None, None
    if known is not None and prompts is not None:
        data = answers(
            known, spread(read_prompts(prompts), limit), max_new=max_new, temperature=0.0, chat=True, device=device
        )
        opened = open_target(known, device, torch.float32)
    rows = (
        as_tensor(opened.model.head).float()
        if opened is not None and config.tied_to_target
        else weights["embed"].to(device)
    )
    order, means = balanced_kmeans(rows, count, seed=seed)
    say(f"{config.vocab_size} tokens in {count} clusters")
    chosen, curve = top or max(1, count // 64), []
    if opened is not None and data is not None:
        net = load_net(drafter, opened, clustered=False)
        cast, full, _ = views(net, opened)
        # where it drafts, and what the full head chooses there
        g, choices = states(opened.model, net, cast, full, data)
        cut = max(1, g.shape[0] * 4 // 5)
        means = fit_centroids(g[:cut], cluster_of(order, count)[choices[:cut]], means, 300, 1e-2, seed=seed)
        curve = recall_curve(g[cut:], choices[cut:], means, order)
        chosen = top or choose_top(curve, recall).top
    made = replace(config, clusters=count, cluster_top=chosen)
    save_drafter(to, made, {**weights, "centroids": means.cpu(), "token_ordering": order.cpu()})
    size = config.vocab_size // count
    return {
        "clusters": count,
        "top": chosen,
        "share": chosen * size / config.vocab_size,
        "head_weights": (chosen * size + count) * config.head_hidden,
        "full_head_weights": config.vocab_size * config.head_hidden,
        "recall": [asdict(r) for r in curve],
    }


def export_drafter(drafter: str, to: Path, layout: str) -> Json:
    """Rewrites a block drafter's folder in another layout. Returns its new config.json."""
    files = hub.resolve(drafter, kind="drafter")
    if not is_block(files.config):
        raise OutriderError(f"{drafter} is no block drafter: only DFlash and EAGLE-3 have other layouts")
    config = translate(BlockConfig.from_hf, files)
    if config.kind not in LAYOUTS[layout]:
        raise OutriderError(f"{drafter}: {config.kind} drafters cannot be exported; DFlash and EAGLE-3 can")
    if files.gguf is not None or recipe(files.config, files.name) is not None:
        raise OutriderError(f"{drafter}: quantised weights cannot be exported")
    known = files.config.get("speculators_config") or {}
    verifier = (known.get("verifier") or {}).get("name_or_path") or _provenance(files.path).get("target")
    raw = block_dict(replace(config, layout=LAYOUTS[layout][config.kind]), verifier)
    source = renamed(open_source(files))
    plans = block_plan(config, source.entries).values()
    for name in (name for plan in plans for name in plan.sources):
        if name not in source.entries:
            raise OutriderError(f"{source.where}: tensor {name} is missing from the checkpoint")
    write_folder(to, raw, {name: tensor(entry).clone() for name, entry in source.entries.items()})
    return raw


def _provenance(folder: Path) -> Json:
    try:
        return dict(json.loads((folder / "provenance.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
