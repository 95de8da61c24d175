"""Multi-token prediction (MTP) over the target's own K/V cache: no second cache, no prefill (models/drafter.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..models.decoder import TextModel
from ..models.drafter import MTPNet
from ..ops.decode_io import Proposer
from ..ops.trees import BRANCH, WIDTH, Frontier, TreeRows, max_nodes
from ..types import Draft, DraftNoise
from .acceptance import AcceptanceProfile
from .drafter import DraftBatch, Drafter, DrafterOrigin, Score, draft_round
from .tree import Step, build_fixed_tree, build_tree, spread_view, widened

if TYPE_CHECKING:
    from ..ops.cpu.cycle import CpuCycle


class MTPDrafter(Drafter):
    name = "mtp"
    in_graph = True

    def __init__(
        self,
        model: MTPNet,
        target: TextModel,
        *,
        origin: DrafterOrigin = DrafterOrigin(),
        profile: AcceptanceProfile | None = None,
    ):
        self.model = model
        self.target = target
        self.net = model
        self.taps = model.config.taps
        self.origin = origin
        self.profile = profile

    def proposers_in(self, cycle: CpuCycle) -> dict[str, Proposer]:
        return {self.name: Proposer.MTP} if cycle.drafts else {}

    def propose(self, batch: DraftBatch, k: int) -> Draft:
        """One call if the network runs whole rounds for this many sequences; else step by step."""
        sampling = batch.sampling
        if batch.branches:
            return build_tree(batch, k, self.branching(batch))
        if batch.last.shape[0] > self.model.most or sampling.cut is not None:
            return draft_round(batch, k, self.score(batch), clusters=self.model.cluster_ids)
        end = None
        if batch.plans is not None and batch.trust is not None:
            ends = ([p.stop for p in batch.plans], [p.drop for p in batch.plans], batch.trust)
            stop, drop, trust = (torch.tensor(t, dtype=torch.float64) for t in ends)
            end = (stop, drop, trust)
        noise = DraftNoise(sampling.temperature, sampling.sampled, sampling.seed, position=batch.position + 1)
        tokens, confidence, lengths = self.model.draft(
            batch.last, batch.features, batch.kv, steps=k, noise=noise, end=end
        )
        return Draft(tokens, lengths, confidence=confidence)

    def score(self, batch: DraftBatch) -> Score:
        model = self.model
        state = self.model.start(batch.kv, batch.features)
        hidden = batch.features[:, : self.target.config.hidden]  # [B, H]

        def step(j: int, token: Tensor, cluster_bonus: Tensor | None) -> tuple[Tensor | None, Tensor]:
            nonlocal hidden
            g, hidden = model.step(self.target.embed(token).to(hidden.dtype), hidden, state)
            return model.candidates(g, cluster_bonus)

        return step

    def branching(self, batch: DraftBatch) -> Step:
        """The steps of a tree, several nodes at once: without K/V of its own a node is a token and a state."""
        model = self.model
        ops = batch.ops
        clusters = self.model.cluster_ids
        hidden = batch.features[:, : self.target.config.hidden]  # [W, H] of the level before

        def step(level: int, seq: Tensor, token: Tensor, before: Tensor) -> tuple[Tensor | None, Tensor]:
            nonlocal hidden
            state = model.start(spread_view(batch.kv, seq), batch.features[seq])
            cluster_bonus = batch.sampling.select(seq).cluster_bonus(clusters, batch.position[seq] + 1 + level, ops)
            g, hidden = model.step(self.target.embed(token).to(hidden.dtype), hidden[before], state)
            return model.candidates(g, cluster_bonus)

        return step

    def max_nodes(self, depth: int) -> int:
        return BRANCH * depth if self.model.has_runner_ups else max_nodes(depth)

    def build_fixed_tree(self, batch: DraftBatch, depth: int, nodes: int) -> TreeRows:
        """If whole rounds return runner-ups, a chain with those as branches; else scored level by level."""
        model = self.model
        clusters = self.model.cluster_ids
        sampling = batch.sampling
        if model.has_runner_ups and batch.last.shape[0] <= model.most and sampling.cut is None:
            self.propose(batch, depth)
            return batch.ops.build_fixed_tree(batch.ops.chain_with_runner_ups(*model.runner_ups(depth)), nodes, depth)
        features = batch.features.repeat_interleave(WIDTH, 0)
        state = model.start(widened(batch.kv), features)
        hidden = features[:, : self.target.config.hidden]

        def score(level: int, front: Frontier) -> tuple[Tensor | None, Tensor]:
            nonlocal hidden
            cluster_bonus = sampling.cluster_bonus(clusters, batch.position + 1 + level, batch.ops)
            before = hidden if level == 0 else hidden.index_select(0, front.before)
            g, hidden = model.step(self.target.embed(front.tokens).to(hidden.dtype), before, state)
            return model.candidates(g, None if cluster_bonus is None else cluster_bonus.repeat_interleave(WIDTH, 0))

        return build_fixed_tree(batch, depth, nodes, score=score)
