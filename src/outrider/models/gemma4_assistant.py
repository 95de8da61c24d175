"""Gemma 4's MTP drafter (`gemma4_assistant`, `gemma4_unified_assistant`).

It owns no K/V. Fed by the target's embedding of the newest token and the target's last hidden state (after the final
norm), a few query-only layers attend to the target's cache at one constant position; the hidden state it hands out is
fed back for the next token. With a clustered head only the tokens of the best clusters are scored.

Let the sequence have L tokens, the newest sampled but not yet run through the target: the view has one row a sequence
at position L - 2, the last visible key.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..ops.formats import Held
from ..ops.reference import plain
from ..types import DraftRound, KVView
from .config import DrafterConfig
from .layers import DraftHead, Ops, TextModel, gather_blocks, rope_variants
from .pairing import bind


class Gemma4Assistant(DraftHead):
    def __init__(self, config: DrafterConfig, weights: Mapping[str, Held], ops: Ops, target: TextModel):
        layers = bind(config, target.config)
        self.config, self.ops, self.target = config, ops, target
        norm = plain(weights["norm"])
        self.device, self.dtype = norm.device, target.dtype
        self.pre: Held = weights["pre"]  # [h, 2·Hb]
        self.post: Held = weights["post"]  # [Hb, h]
        rope_of, self.inv_freqs = rope_variants(layers, self.device)
        self.blocks = gather_blocks(weights, layers, rope_of, qk_norm=True, sandwich=True, layer_scalar=True)
        self.head: Held = weights["embed"]  # [V, h], or by cluster [C, S, h]
        if config.clusters:
            self.cluster(weights)

    def start(self, kv: KVView, features: Tensor | None = None) -> DraftRound:
        """Begin a round over one row a sequence. Drafters of other kinds also take features; this one needs none."""
        positions = kv.positions + 2 - self.config.position_offset
        return DraftRound(kv, [self.ops.rope_angles(positions, freq) for freq in self.inv_freqs])

    def step(self, token_embedding: Tensor, hidden: Tensor, state: DraftRound) -> tuple[Tensor, Tensor]:
        """token_embedding [B, Hb] = target.embed(newest token), hidden [B, Hb] -> g [B, h] for the head, next hidden [B, Hb]."""
        ops, kv, eps, act = self.ops, state.kv, self.config.norm_eps, self.config.activation
        x = ops.linear(torch.cat((token_embedding, hidden), dim=-1), self.pre)  # [B, h] the residual stream
        h = ops.rms_norm(x, self.blocks[0].attn_norm, eps)
        for block in self.blocks:
            q = ops.rope_write(ops.linear(h, block.qkv), *state.angles[block.rope], block.q_norm, None, block.spec, kv)
            y = self.target.total(ops.linear(ops.attend(q, block.spec, kv), block.out))
            x, h = ops.residual_norm(x, y, block.post_attn_norm, None, block.mlp_norm, eps)
            y = ops.linear(ops.gated_linear(h, block.gate_up, act), block.down)
            x, h = ops.residual_norm(x, y, block.post_mlp_norm, block.scalar, block.next_norm, eps)
        return h, ops.linear(h, self.post)
