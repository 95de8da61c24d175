"""An MTP drafter's network: Gemma 4's assistants and our own drafters.

Its inputs are the target's embedding of the newest token and the target's last hidden state; a few query-only layers
attend to the target's cache at one constant position, L - 2 of L tokens, and the output is fed back. With a clustered
head only the tokens of the best clusters are scored. Our own (style "plain") read the K/V of chosen target layers
(`reads`), normalise their inputs to unit scale, also residual streams of further layers (`taps`), have plain pre-norm
blocks, and use the target's own embedding as head (`tied_to_target`): they predict the target's next hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..ops.formats import DeviceWeight
from ..ops.reference import Backend, as_tensor
from ..types import DraftEnd, DraftNoise, DraftRound, KVView
from .config import DrafterConfig
from .decoder import TextModel, gather_blocks, rope_variants


class MTPNet:
    most = 0  # maximum sequences of a whole round in one call; 0 unless a backend replaces this class
    has_runner_ups = False

    def __init__(self, config: DrafterConfig, weights: Mapping[str, DeviceWeight], ops: Backend, target: TextModel):
        layers = config.bound_layers(target.config)
        self.config = config
        self.ops = ops
        self.target = target
        self.device = as_tensor(weights["norm"]).device
        self.dtype = target.dtype
        self.pre: DeviceWeight = weights["pre"]  # [h, (2 + taps)·Hb]
        self.post: DeviceWeight | None = weights["post"] if config.has_post else None  # [Hb, h]
        rope_of, self.inv_freqs = rope_variants(layers, self.device)
        self.blocks = gather_blocks(weights, layers, rope_of)
        # [V, Hb or h], or by cluster [C, S, …]
        self.head: DeviceWeight = target.head if config.tied_to_target else weights["embed"]
        self.centroids: DeviceWeight | None = None  # [C, Hb or h]
        self.cluster_ids: Tensor | None = None  # [C, S] token ids, with centroids
        # A vocabulary-parallel head scores all tokens.
        if config.clusters and not (config.tied_to_target and target.together.tp.world > 1):
            order = as_tensor(weights["token_ordering"]).long()
            self.centroids = weights["centroids"]
            self.cluster_ids = order.view(config.clusters, -1)
            # Sort the head's rows by cluster once: scoring a cluster then reads contiguous memory.
            self.head = ops.take_rows(self.head, order).view(config.clusters, -1, config.head_hidden)

    def start(self, kv: KVView, features: Tensor) -> DraftRound:
        """kv: one row per sequence at the last computed position; features [B, Hb·(1 + taps)] at it."""
        positions = kv.positions + 2 - self.config.position_offset
        return DraftRound(kv, [self.ops.rope_angles(positions, freq) for freq in self.inv_freqs], self.tapped(features))

    def tapped(self, features: Tensor) -> Tensor | None:
        """[B, taps·Hb] at unit scale, of features [B, Hb·(1 + taps)]."""
        if not self.config.taps:
            return None
        wide = self.config.backbone_hidden
        streams = features[:, wide:].reshape(-1, wide)
        return self.ops.rms_norm(streams, None, self.config.norm_eps).view(features.shape[0], -1)

    def inputs(self, token_embedding: Tensor, hidden: Tensor, state: DraftRound) -> Tensor:
        parts = [token_embedding, hidden]
        if not self.config.gemma:
            parts = [self.ops.rms_norm(part, None, self.config.norm_eps) for part in parts]
        return torch.cat(parts if state.taps is None else [*parts, state.taps], dim=-1)

    def step(self, token_embedding: Tensor, hidden: Tensor, state: DraftRound) -> tuple[Tensor, Tensor]:
        """target.embed(newest token) [B, Hb], hidden [B, Hb] -> g for the head, the next hidden [B, Hb]."""
        ops = self.ops
        kv = state.kv
        eps = self.config.norm_eps
        act = self.config.activation
        x = ops.linear(self.inputs(token_embedding, hidden, state), self.pre)  # [B, h] the residual stream
        h = ops.rms_norm(x, self.blocks[0].attn_norm, eps)
        for block in self.blocks:
            norms = (block.q_norm, None)
            angles = state.angles[block.rope]
            q = ops.rope_write(ops.linear(h, block.qkv), angles, norms, spec=block.spec, kv=kv)
            attended = ops.attend(q, block.spec, kv)
            y = self.target.all_reduce(ops.linear(attended, block.out))
            x, h = ops.residual_norm(x, y, block.post_attn_norm, scale=None, next_w=block.mlp_norm, eps=eps)
            y = ops.linear(ops.gated_linear(h, block.gate_up, act), block.down)
            x, h = ops.residual_norm(x, y, block.post_mlp_norm, scale=block.scalar, next_w=block.next_norm, eps=eps)
        nxt = h if self.post is None else ops.linear(h, self.post)
        return (nxt if self.config.tied_to_target else h), nxt

    def candidates(self, g: Tensor, cluster_bonus: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        """Ids [B, N] of the tokens worth scoring (None: all), and their float32 logits [B, N]. cluster_bonus [B, C]:
        added to the clusters' scores (ops.cluster_bonus)."""
        if self.centroids is None or self.cluster_ids is None:
            tied = self.config.tied_to_target
            return None, self.target.scores(g, None) if tied else self.ops.logits(g, self.head, None)
        # [B, top], [B, top, S]
        best, z = self.ops.clustered_logits(
            g, self.centroids, self.head, top=self.config.cluster_top, cluster_bonus=cluster_bonus
        )
        return self.cluster_ids[best].flatten(1), z.flatten(1)

    def draft(
        self, last: Tensor, features: Tensor, kv: KVView, steps: int, noise: DraftNoise, end: DraftEnd | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """A whole round in one call: tokens [B, steps], confidences or None, lengths [B] (`most`)."""
        raise NotImplementedError("this drafter goes step by step")

    def runner_ups(self, steps: int) -> tuple[Tensor, Tensor]:
        """Best scores [B, steps, P] and their tokens, by part of the head, at each step of the last round."""
        raise NotImplementedError("this drafter goes step by step")
