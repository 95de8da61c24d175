"""`outrider eval-drafter` and `export`: measure a drafter, write a block drafter in another layout."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..models.block_config import BlockConfig, is_block
from ..models.inspect import drafter_size, model_size
from ..models.names import tensor_plan
from ..prompts import Prompt, read_prompts
from ..spec import acceptance
from ..types import MAX_DRAFT, OutriderError, require
from ..weights import hub
from ..weights.files import Files, fingerprint, open_source
from ..weights.load import translate
from ..weights.quant_scheme import recipe
from ..weights.source import tensor
from .answers import Task, answer_tasks, answering_engine, as_sequences
from .block_net import drafter_config, load_net
from .config import CPU_SLOTS, GPU_SLOTS, EvalConfig, Say
from .data import Sequences
from .evaluate import Judge, Judged, best_k, cycle_costs, summary
from .export import LAYOUTS, Json, block_dict, read_json, write_folder
from .net import DrafterModule
from .seen_prompts import Overlap, training_overlap
from .target import Described, describe, encode, open_target
from .trainer import Row

USUAL_CONTEXT = 256  # assumed context of a cycle whose cost is looked up


@dataclass(frozen=True)
class TargetAnswers:
    """The target's own answers."""

    sequences: Sequences
    cycle_seconds: list[float] | None  # measured, by K; None: on a GPU, where answers are made without the drafter


def answers(known: Described, prompts: list[Prompt], config: EvalConfig, drafter: str = "none") -> TargetAnswers:
    """Answers prompts with the engine: on a CPU with the drafter, on a GPU many at a time without it. The seed of an
    answer is its prompt's line."""
    target = known.config
    max_new = config.max_tokens
    most = max(1, target.max_context - max_new)
    encoded = encode(prompts, known.text, target.vocab_size, max_tokens=most, chat=not config.raw)
    tasks = [
        Task(prompt=i, draw=0, temperature=config.temperature, seed=int(encoded.index[i])) for i in range(len(encoded))
    ]
    cuda = config.device.startswith("cuda")
    slots = min(GPU_SLOTS if cuda else CPU_SLOTS, len(encoded))
    helper = "none" if cuda else drafter
    longest = int(encoded.lengths.max()) + max_new
    seconds = None
    dtype = getattr(torch, config.dtype)
    with answering_engine(known, config.device, dtype, slots=slots, longest=longest, drafter=helper) as engine:
        if helper != "none":
            controller = engine.controller
            seconds = list(controller.cost.curve(controller.drafters[0], batch=1, context=USUAL_CONTEXT))
        recorded = list(answer_tasks(engine, encoded, tasks=tasks, max_new=max_new))
    return TargetAnswers(as_sequences(encoded, recorded, target.vocab_size), seconds)


def evaluate_drafter(model: str, drafter: str, config: EvalConfig, card: bool = False, say: Say = print) -> Row:
    """card: write the drafter's acceptance profile into its folder."""
    every = read_prompts(config.prompts)
    limit = config.limit
    require(limit is None or limit >= 1, f"--limit must be at least 1, got {limit}")
    count = min(limit or len(every), len(every))  # evenly over the file, since many files are sorted by category
    listed = [every[int(i * len(every) / count)] for i in range(count)]
    known = describe(model)
    drafter_config(drafter, known.config)  # refuses a wrong drafter before long work
    files = hub.resolve(drafter, kind="drafter")
    began = time.perf_counter()
    answered = answers(known, listed, config, drafter=drafter)
    data = answered.sequences
    say(f"{len(data)} answers, {data.answer_tokens} tokens, {time.perf_counter() - began:.0f} s")
    target = open_target(known, config.device, getattr(torch, config.dtype))
    net = load_net(drafter, target)
    if isinstance(net, DrafterModule):
        if config.device.startswith("cuda"):
            net.config = replace(net.config, weight_bits=None)  # a GPU keeps the formats of the file
        if config.full_head:
            net.config = replace(net.config, clusters=0)
    judged = Judge(target.model, net, full=False).drafts(data, temperature=config.temperature, weigh=card)
    categories = [listed[i].category for i in data.index]
    result = summary(judged.right, categories, MAX_DRAFT)
    result |= overlap_report(training_overlap(Path(files.path), listed, config.prompts), judged, data)
    if card:
        profile = acceptance.measure(judged.runs(), fingerprint(files))
        say(f"{acceptance.write(Path(files.path), profile)}: {profile.judged} tokens judged")
    share = drafter_size(net.config).step / model_size(target.config).active
    costs = answered.cycle_seconds
    measured = costs is not None
    if costs is None:
        costs = cycle_costs(share, once=getattr(net.config, "kind", "mtp") == "dflash")
    fastest = best_k(result["tokens_per_cycle"], costs)
    tokens = result["tokens_per_cycle"].get(fastest, 1.0)
    return {
        **result,
        "draft_step_share": round(share, 4),
        "best_k": fastest,
        "predicted_speedup": round(tokens * costs[0] / costs[fastest], 3),
        "costs_measured": measured,
    }


def overlap_report(overlap: Overlap, judged: Judged, data: Sequences) -> Row:
    """How many prompts the drafter was trained on, and its figures on the others if both kinds occur."""
    report: Row = {"trained_on": overlap.count, "same_file": overlap.same_file}
    if overlap.trained_on is None:
        return report
    unseen = [right for right, line in zip(judged.right, data.index, strict=True) if not overlap.trained_on[line]]
    if 0 < len(unseen) < len(data):
        figures = summary(unseen, ["all"] * len(unseen), MAX_DRAFT)
        report["unseen"] = {name: figures[name] for name in ("tokens_per_cycle", "answers", "tokens")}
    return report


def target_name(files: Files) -> str | None:
    """The target that a drafter's files name."""
    verifier = (files.config.get("speculators_config") or {}).get("verifier") or {}
    return verifier.get("name_or_path") or read_json(files.path / "provenance.json").get("target")


def usage(drafter: str, to: Path, raw: Json) -> list[str]:
    """Commands that serve the target with an exported drafter, in vLLM and here. raw: the new config.json."""
    config = BlockConfig.from_hf(raw)
    target = target_name(hub.resolve(drafter, kind="drafter")) or "TARGET"
    speculation = {"method": config.kind, "model": str(to), "num_speculative_tokens": config.max_tokens}
    return [
        shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(speculation)]),
        shlex.join(["outrider", "serve", target, "--drafter", str(to)]),
    ]


def export_drafter(drafter: str, to: Path, layout: str) -> Json:
    """Rewrites a block drafter's folder in another layout. Returns its new config.json."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise OutriderError(f"--out {to} is not empty: name a new folder, or remove this one first")
    files = hub.resolve(drafter, kind="drafter")
    require(is_block(files.config), f"{drafter} is no block drafter: only DFlash and EAGLE-3 have other layouts")
    config = translate(BlockConfig.from_hf, files)
    kind = config.kind
    require(kind in LAYOUTS[layout], f"{drafter}: {kind} drafters cannot be exported; DFlash and EAGLE-3 can")
    dense = files.gguf is None and recipe(files.config, files.name) is None
    require(dense, f"{drafter}: quantised weights cannot be exported")
    raw = block_dict(replace(config, layout=LAYOUTS[layout][kind]), target_name(files))
    source = open_source(files)
    for name in (name for plan in tensor_plan(config, source.entries).values() for name in plan.sources):
        require(name in source.entries, f"{source.where}: tensor {name} is missing from the checkpoint")
    write_folder(to, {name: tensor(entry).clone() for name, entry in source.entries.items()}, {"config.json": raw})
    return raw
