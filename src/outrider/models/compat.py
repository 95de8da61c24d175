"""Whether a drafter can run on a target (`fits` returns the reason where it cannot), which of the target's layers it
reads (`reads`), and what to warn of where it was trained for other weights (`other_weights`). Torch-free:
configurations are enough.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from ..types import OutriderError
from .config import DrafterConfig, LayerSpec, ModelConfig


def reads(config: DrafterConfig, target: ModelConfig) -> tuple[int, ...]:
    """The target layer whose K/V each drafter layer attends to."""
    if config.reads is not None:
        return config.reads
    return tuple(target.donor(layer.kind) for layer in config.layers)


def fits(config: DrafterConfig, target: ModelConfig) -> str | None:
    """None when the drafter can run on this target, else the reason why not."""
    if config.backbone_hidden != target.hidden:
        made, has = config.backbone_hidden, f"{target.model_type} has {target.hidden}"
        return f"the drafter was made for a hidden size of {made}, {has}"
    if config.vocab_size != target.vocab_size:
        return f"the drafter's vocabulary has {config.vocab_size} tokens, the target's {target.vocab_size}"
    if any(not 0 <= tap < len(target.layers) for tap in config.taps):
        return f"the drafter taps layers {list(config.taps)}, the target has {len(target.layers)}"
    try:
        read = reads(config, target)
    except OutriderError as error:  # no donor
        return str(error)
    if len(read) != len(config.layers):
        return f"the drafter has {len(config.layers)} layers but names {len(read)} layers to read"
    for i, (at, layer) in enumerate(zip(read, config.layers, strict=True)):
        if at not in target.kv_layers:
            return f"drafter layer {i} reads the K/V of target layer {at}, which owns none"
        ours, theirs = layer.attn, target.layers[at].attn
        for what, mine, its in (
            ("head size", ours.head_dim, theirs.head_dim),
            ("K/V heads", ours.kv_heads, theirs.kv_heads),
            ("window", ours.window, theirs.window),
        ):
            if mine != its:
                return f"drafter layer {i} expects {what} {mine}, target layer {at} has {its}"
        if ours.heads % theirs.kv_heads:
            multiple = f"not a multiple of the target's {theirs.kv_heads} K/V heads"
            return f"drafter layer {i} has {ours.heads} heads, {multiple}"
        if layer.rope != target.layers[at].rope:
            return f"drafter layer {i} rotates its queries otherwise than target layer {at} its keys (rope differs)"
    return None


def other_weights(target: str, drafter: str, trained_for: str | None, is_now: str) -> str | None:
    """A warning if a drafter was trained for other weights of the model. Our own hold the hash of their target;
    Google's tell by name (a QAT target wants the QAT assistant)."""
    if trained_for is not None:
        if trained_for.partition("+")[0] == is_now:  # after the plus: the hash of an adapter
            return None
        return "trained for other weights of this model, so expect fewer accepted drafts"
    names = [Path(name).name.lower() for name in (target, drafter)]
    first, second = ("qat" in re.split(r"[-_.]", name) for name in names)
    if first == second or not all("gemma" in name for name in names):  # a folder called otherwise says nothing
        return None
    which = "target" if first else "drafter"
    return f"the {which} is quantisation-aware (QAT), the other is not: drafts may hardly ever be accepted"


def bind(config: DrafterConfig, target: ModelConfig) -> tuple[LayerSpec, ...]:
    """The drafter's layers with the K/V layer of each resolved; raises when it does not fit."""
    reason = fits(config, target)
    if reason is not None:
        raise OutriderError(f"drafter {config.model_type} does not fit the target: {reason}")
    pairs = zip(reads(config, target), config.layers, strict=True)
    return tuple(replace(layer, attn=replace(layer.attn, kv_layer=at)) for at, layer in pairs)
