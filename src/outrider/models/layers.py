"""What targets and drafters share: rotary frequencies, and one decoder layer's weights.

A model is built from a frozen config, a mapping of canonical weight names and an ops object. Names are looked up
once, at construction; the forward passes see fields only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.backend import Backend
from ..ops.formats import Held
from ..ops.reference import plain
from ..types import AttnSpec
from .config import LayerSpec, RopeSpec

Ops = Backend


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
    """Which variant each layer uses, and the frequencies of each variant: angles are computed once a pass and variant."""
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
    qkv: Held  # [spec.qkv_rows, H]
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Held  # [H, heads·D]
    out_bias: Tensor | None
    post_attn_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Held  # [2·I, H]
    gate_up_bias: Tensor | None
    down: Held  # [H, I]
    down_bias: Tensor | None
    post_mlp_norm: Tensor | None
    scalar: Tensor | None  # [1], multiplies the whole residual stream
    next_norm: Tensor  # the norm that reads what this layer leaves: the next layer's, or the final one


def gather_blocks(
    weights: Mapping[str, Held], layers: Sequence[LayerSpec], rope_of: Sequence[int], *,
    qkv_bias: bool = False, out_bias: bool = False, mlp_bias: bool = False, first: bool = True,
    qk_norm: bool = False, sandwich: bool = False, layer_scalar: bool = False,
) -> list[Block]:  # fmt: skip
    """first: the process that adds what is added once to a sum of all processes."""
    blocks = []
    for i, layer in enumerate(layers):

        def get(name: str, at: int = i) -> Held:
            return weights[f"layers.{at}.{name}"]

        def vector(name: str, at: int = i) -> Tensor:
            return plain(get(name, at))

        def maybe(name: str, present: bool) -> Tensor | None:
            return vector(name) if present else None

        last = i + 1 == len(layers)
        blocks.append(
            Block(
                spec=layer.attn, rope=rope_of[i],
                attn_norm=vector("attn_norm"), qkv=get("qkv"), qkv_bias=maybe("qkv_bias", qkv_bias),
                q_norm=maybe("q_norm", qk_norm), k_norm=maybe("k_norm", qk_norm and layer.attn.writes),
                out=get("out"), out_bias=maybe("out_bias", out_bias and first), post_attn_norm=maybe("post_attn_norm", sandwich),
                mlp_norm=vector("mlp_norm"), gate_up=get("gate_up"), gate_up_bias=maybe("gate_up_bias", mlp_bias),
                down=get("down"), down_bias=maybe("down_bias", mlp_bias and first), post_mlp_norm=maybe("post_mlp_norm", sandwich),
                scalar=maybe("scalar", layer_scalar),
                next_norm=plain(weights["norm"]) if last else vector("attn_norm", at=i + 1),
            )
        )  # fmt: skip
    return blocks
