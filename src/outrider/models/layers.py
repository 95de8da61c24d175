"""Code that targets and drafters share: rotary frequencies, and one decoder layer's weights.

A model is built from a frozen config, a mapping of canonical weight names and an ops object. Names are looked up
once, at construction; the forward passes see fields only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..ops.formats import DeviceWeight
from ..ops.reference import as_tensor
from ..types import AttnSpec
from .config import LayerSpec, RopeSpec


def inverse_frequencies(rope: RopeSpec, device: torch.device) -> Tensor:
    """[head_dim / 2] float32. The exponent runs over head_dim even where only the first `rotated` pairs turn."""
    freq = rope.theta ** -(torch.arange(0, rope.head_dim, 2, dtype=torch.int64).float() / rope.head_dim)
    freq[rope.rotated :] = 0.0
    if rope.scaling == "linear":
        freq = freq / rope.factor
    elif rope.scaling == "llama3":  # stretch long waves, keep short ones, blend between
        wavelength = 2 * math.pi / freq
        low, high = rope.low_freq_factor, rope.high_freq_factor
        keep = ((rope.original_context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        freq = (1 - keep) * freq / rope.factor + keep * freq
    return freq.to(device)


def rope_variants(layers: Sequence[LayerSpec], device: torch.device) -> tuple[list[int], list[Tensor]]:
    """The rope variant of each layer, and the frequencies of each variant."""
    kinds: list[RopeSpec] = []
    for layer in layers:
        if layer.rope not in kinds:
            kinds.append(layer.rope)
    return [kinds.index(layer.rope) for layer in layers], [inverse_frequencies(rope, device) for rope in kinds]


@dataclass(frozen=True)
class Block:
    """The weights of one decoder layer, whatever the family; None where it has no such part."""

    spec: AttnSpec
    rope: int  # index into the pass's angles
    attn_norm: Tensor
    qkv: DeviceWeight  # [spec.qkv_rows, H]
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: DeviceWeight  # [H, heads·D]
    out_bias: Tensor | None
    post_attn_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: DeviceWeight  # [2·I, H]
    gate_up_bias: Tensor | None
    down: DeviceWeight  # [H, I]
    down_bias: Tensor | None
    post_mlp_norm: Tensor | None
    scalar: Tensor | None  # [1], multiplies the whole residual stream
    next_norm: Tensor  # the norm of this layer's output: the next layer's, or the final one


def gather_blocks(
    weights: Mapping[str, DeviceWeight], layers: Sequence[LayerSpec], rope_of: Sequence[int], first: bool = True
) -> list[Block]:
    """first: this process adds the terms that an all-reduce must count once (biases)."""
    once = () if first else ("out_bias", "down_bias")
    blocks = []
    for i, (layer, rope) in enumerate(zip(layers, rope_of, strict=True)):
        here, last = f"layers.{i}.", i + 1 == len(layers)
        names = [f.name for f in fields(Block) if f.name not in ("spec", "rope", "next_norm")]
        own = {name: None if name in once else weights.get(here + name) for name in names}
        following = as_tensor(weights["norm" if last else f"layers.{i + 1}.attn_norm"])
        blocks.append(Block(layer.attn, rope, next_norm=following, **own))  # type: ignore[arg-type]  # as it is planned
    return blocks


def vector(weights: Mapping[str, DeviceWeight], name: str) -> Tensor | None:
    return as_tensor(weights[name]) if name in weights else None
