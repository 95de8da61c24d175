"""Our own MTP drafter, free of Gemma 4's layout where that pays.

Like Gemma 4's assistant it owns no K/V: query-only layers attend to the target's cache at one constant position, fed
by the target's embedding of the newest token and the target's last hidden state; what it hands out is fed back. Unlike it

- every layer reads the K/V of a target layer of its own choosing (`reads`), not only of the last one;
- the inputs are brought to unit scale (scale-free RMSNorm), so embedding and hidden state weigh alike; residual
  streams of further target layers at the last seen position (`taps`) may be fed beside them, once a round;
- layers are plain pre-norm blocks: the target's K needs no q norm to be matched, and two norms a layer are saved;
- the head is the target's own embedding (`tied_to_target`): the drafter predicts the target's next hidden state in
  the target's space, and that prediction is both what the head reads and what is fed back.

With clusters only the tokens of the best `cluster_top` clusters are scored; over a head that is divided over processes all tokens are.
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


class OutriderDrafter(DraftHead):
    def __init__(self, config: DrafterConfig, weights: Mapping[str, Held], ops: Ops, target: TextModel):
        layers = bind(config, target.config)
        self.config, self.ops, self.target = config, ops, target
        self.norm = plain(weights["norm"])
        self.device, self.dtype = self.norm.device, target.dtype
        self.pre: Held = weights["pre"]  # [h, (2 + taps)·Hb]
        self.post: Held | None = weights["post"] if config.has_post else None  # [Hb, h]
        rope_of, self.inv_freqs = rope_variants(layers, self.device)
        self.blocks = gather_blocks(weights, layers, rope_of)
        self.head: Held = target.head if config.tied_to_target else weights["embed"]  # [V, Hb or h], or by cluster [C, S, …]
        if config.clusters and not (config.tied_to_target and target.together.share.world > 1):  # its rows are divided by tokens
            self.cluster(weights)

    def start(self, kv: KVView, features: Tensor) -> DraftRound:
        """kv: one row a sequence at the last position that the target has seen; features [B, Hb·(1 + taps)] at it."""
        positions = kv.positions + 2 - self.config.position_offset
        wide, taps = self.config.backbone_hidden, None
        if self.config.taps:
            streams = features[:, wide:].reshape(-1, wide)
            taps = self.ops.rms_norm(streams, None, self.config.norm_eps).view(features.shape[0], -1)
        return DraftRound(kv, [self.ops.rope_angles(positions, freq) for freq in self.inv_freqs], taps)

    def step(self, token_embedding: Tensor, hidden: Tensor, state: DraftRound) -> tuple[Tensor, Tensor]:
        """token_embedding [B, Hb] = target.embed(newest token), hidden [B, Hb] -> g for the head, next hidden [B, Hb]."""
        ops, eps, act = self.ops, self.config.norm_eps, self.config.activation
        parts = [ops.rms_norm(token_embedding, None, eps), ops.rms_norm(hidden, None, eps)]
        x = ops.linear(torch.cat(parts if state.taps is None else [*parts, state.taps], dim=-1), self.pre)  # [B, h]
        h = ops.rms_norm(x, self.blocks[0].attn_norm, eps)
        for block in self.blocks:
            q = ops.rope_write(ops.linear(h, block.qkv), *state.angles[block.rope], None, None, block.spec, state.kv)
            y = self.target.total(ops.linear(ops.attend(q, block.spec, state.kv), block.out))
            x, h = ops.residual_norm(x, y, None, None, block.mlp_norm, eps)
            y = ops.linear(ops.gated_linear(h, block.gate_up, act), block.down)
            x, h = ops.residual_norm(x, y, None, None, block.next_norm, eps)
        nxt = h if self.post is None else ops.linear(h, self.post)
        return (nxt if self.config.tied_to_target else h), nxt
