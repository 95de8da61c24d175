"""What the model files share: rotary frequencies, one decoder layer's weights, and the frame around the layers.

A model is built from a frozen config, a mapping of canonical weight names and an ops object. Names are looked up
here, once, at construction; the forward passes see fields only.
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
from ..types import AttnSpec, KVView, Wanted
from .config import LayerSpec, ModelConfig, RopeSpec
from .split import SOLO, Together, piece

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


class TextModel:
    """The frame of a target model: embedding in, head out. The families write `forward`.

    One of several processes (`together`, models.split) has its part of the layers, and of embedding and head the rows of its tokens."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Held], ops: Ops, together: Together = SOLO):
        self.config, self.ops, self.together = config, ops, together
        share = together.share
        self.tokens = [piece(config.vocab_size, rank, share.world) for rank in range(share.world)]  # of each process
        self.total = together.total
        self.last_write = config.kv_layers[-1]  # rows that nobody wants go as far as this layer's K/V
        self.table: Held = weights["embed"]  # [V, H]
        self.head: Held = self.table if config.tied else weights["head"]
        norm = plain(weights["norm"])
        self.device = norm.device
        # A packed table has no dtype of its own: ask the op what it hands out.
        self.dtype: torch.dtype = ops.embed(torch.zeros(1, dtype=torch.int64, device=self.device), self.table, 1.0).dtype
        rope_of, self.inv_freqs = rope_variants(config.layers, self.device)
        self.blocks = gather_blocks(
            weights, config.layers, rope_of, qkv_bias=config.qkv_bias, out_bias=config.out_bias, mlp_bias=config.mlp_bias,
            first=share.rank == 0, qk_norm=config.qk_norm, sandwich=config.sandwich, layer_scalar=config.layer_scalar,
        )  # fmt: skip

    def embed(self, ids: Tensor) -> Tensor:
        """[R] -> the scaled input embedding [R, H]: also what an MTP drafter is fed."""
        return self.rows(ids, self.table, self.config.embed_scale)

    def rows(self, ids: Tensor, table: Held, scale: float) -> Tensor:
        """[R] -> [R, width]: rows of a table that is divided by tokens. Everybody looks up its own; nought is added to the rest."""
        if len(self.tokens) == 1:
            return self.ops.embed(ids, table, scale)
        lo, hi = self.tokens[self.together.share.rank]
        found = self.ops.embed((ids - lo).clamp(0, hi - lo - 1), table, scale)
        return self.total(found.masked_fill(((ids < lo) | (ids >= hi))[:, None], 0.0))

    def forward(
        self, ids: Tensor, kv: KVView, taps: tuple[int, ...] = (), wanted: Wanted | None = None
    ) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """ids [R] at kv.positions -> hidden [R, H] after the final norm, of the rows that are wanted (None: all of them, else [W, H]); with
        taps also their residual streams after those layers."""
        raise NotImplementedError

    def narrowed(
        self, wanted: Wanted, q: Tensor, x: Tensor, streams: dict[int, Tensor]
    ) -> tuple[Tensor, Tensor, KVView, list[tuple[Tensor, Tensor]], dict[int, Tensor]]:
        """Queries, residual stream, view, angles and taps of the wanted rows alone."""
        rows, kv = wanted.rows, wanted.kv
        return q[rows], x[rows], kv, self.angles(kv.positions), {tap: stream[rows] for tap, stream in streams.items()}

    def angles(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """cos, sin [R, D/2] of every rope variant."""
        return [self.ops.rope_angles(positions, freq) for freq in self.inv_freqs]

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] after the final norm -> float32 [R, V]."""
        return self.scores(hidden, self.config.softcap)

    def scores(self, hidden: Tensor, softcap: float | None) -> Tensor:
        return self.together.gather(self.ops.logits(hidden, self.head, softcap), [hi - lo for lo, hi in self.tokens])
