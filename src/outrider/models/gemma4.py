"""Gemma 4, text only, all five sizes: dense (31B, 12B), mixture of experts (26B-A4B), edge (E2B, E4B).

What differs between sizes is configuration: sliding and full layers have their own head size, RoPE and K/V heads; full
layers may take v from the k projection; edge models share the K/V of their last owning layers and add per-layer
embeddings (PLE). Norms stand before and after each sublayer, and a scalar multiplies the whole stream after a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..ops.formats import Held
from ..ops.reference import plain
from ..types import KVView, Wanted
from .config import ModelConfig
from .layers import Ops, TextModel
from .moe import gather_experts, mix_experts
from .split import SOLO, Together


@dataclass(frozen=True)
class PerLayerBlock:
    """How one layer takes in its per-layer embedding."""

    gate: Held  # [ple, H]
    out: Held  # [H, ple]
    post_norm: Tensor


@dataclass(frozen=True)
class PerLayerInput:
    """Where the per-layer embeddings of all layers come from."""

    table: Held  # [V, L·ple]
    proj: Held  # [L·ple, H]
    norm: Tensor  # [ple]


class Gemma4(TextModel):
    def __init__(self, config: ModelConfig, weights: Mapping[str, Held], ops: Ops, together: Together = SOLO):
        super().__init__(config, weights, ops, together)
        count = range(len(config.layers))
        self.experts = gather_experts(weights, config) if config.moe else None
        self.ple_input: PerLayerInput | None = None
        self.ple_blocks: list[PerLayerBlock] = []
        if config.ple_dim:
            self.ple_input = PerLayerInput(weights["ple_embed"], weights["ple_proj"], plain(weights["ple_norm"]))
            self.ple_blocks = [
                PerLayerBlock(weights[f"layers.{i}.ple_gate"], weights[f"layers.{i}.ple_out"], plain(weights[f"layers.{i}.ple_post_norm"]))
                for i in count
            ]

    def per_layer_inputs(self, source: PerLayerInput, ids: Tensor, x: Tensor) -> Tensor:
        """[L, R, ple]: the token's own part and a projection of its embedding, computed once a pass."""
        ops, config = self.ops, self.config
        projected = ops.linear(x, source.proj)
        if len(self.tokens) > 1:  # the rows of these tokens, as a table of their own
            own = self.rows(ids, source.table, 1.0)
            ids, source = torch.arange(ids.shape[0], device=ids.device), replace(source, table=own)
        return ops.per_layer_inputs(ids, source.table, projected, config.hidden**-0.5, source.norm, config.norm_eps)

    def forward(
        self, ids: Tensor, kv: KVView, taps: tuple[int, ...] = (), wanted: Wanted | None = None
    ) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """ids [R] at kv.positions -> hidden [R, H] after the final norm, of the rows that are wanted (None: all of them, else [W, H]); with
        taps also their residual streams after those layers."""
        ops, total, moe, eps, act = self.ops, self.total, self.config.moe, self.config.norm_eps, self.config.activation
        angles = self.angles(kv.positions)
        x = self.embed(ids)  # [R, H] the residual stream
        ple = None if self.ple_input is None else self.per_layer_inputs(self.ple_input, ids, x)
        h = ops.rms_norm(x, self.blocks[0].attn_norm, eps)  # [R, H] what the next sublayer reads
        streams: dict[int, Tensor] = {}
        for i, block in enumerate(self.blocks):
            qkv = ops.linear(h, block.qkv)
            q = ops.rope_write(qkv, *angles[block.rope], block.q_norm, block.k_norm, block.spec, kv)  # [R, heads·D]
            if wanted is not None and i == self.last_write:  # nobody reads what the other rows would become
                if not wanted.rows.shape[0]:
                    return (x[:0], (x[:0],) * len(taps)) if taps else x[:0]
                q, x, kv, angles, streams = self.narrowed(wanted, q, x, streams)
                ple = None if ple is None else ple[:, wanted.rows]
            y = total(ops.linear(ops.attend(q, block.spec, kv), block.out))
            if self.experts is None or moe is None:
                x, h = ops.residual_norm(x, y, block.post_attn_norm, None, block.mlp_norm, eps)
                y = total(ops.linear(ops.gated_linear(h, block.gate_up, act), block.down))
            else:  # experts beside the dense MLP; they and their router read norms of their own
                routed = self.experts[i]
                norms = (block.mlp_norm, routed.router_norm, routed.norm)
                x, h, router_in, expert_in = ops.residual_norms(x, y, block.post_attn_norm, norms, eps)
                y = mix_experts(ops, routed, block.gate_up, block.down, h, router_in, expert_in, moe.top_k, act, eps, self.together)

            if ple is None:
                x, h = ops.residual_norm(x, y, block.post_mlp_norm, block.scalar, block.next_norm, eps)
            else:
                x, _ = ops.residual_norm(x, y, block.post_mlp_norm, None, None, eps)
                side = self.ple_blocks[i]
                y = ops.linear(ops.linear_act_mul(x, side.gate, ple[i], act), side.out)
                x, h = ops.residual_norm(x, y, side.post_norm, block.scalar, block.next_norm, eps)
            if i in taps:
                streams[i] = x
        return (h, tuple(streams[i] for i in taps)) if taps else h
