"""Decides what each decoding sequence drafts: the controller's choice, within the drafter's limits and the request's
settings.

`DraftPolicy.plan` makes one `DraftPlan` per sequence and step; executors carry it out. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config import SpecConfig
from ..spec.controller import Controller
from ..spec.plan import AUTO_NODES, DraftContext
from ..types import GREEDY_EPS, MAX_DRAFT, NO_DRAFT, DraftPlan
from .step import Request, Seq

if TYPE_CHECKING:
    from ..ops.backend import Capabilities
    from ..spec.drafter import Drafter


@dataclass
class DraftPolicy:
    controller: Controller
    drafter: Drafter | None
    spec: SpecConfig
    can: Capabilities
    max_context: int
    graphs: bool  # steps run as CUDA graphs
    trees: bool  # the fastest executor runs trees at the cost of their rows

    def plan(self, ready: list[Seq]) -> list[DraftPlan]:
        """Drafter and K of each decoding sequence: the requested K, else the controller's."""
        if not self.controller.drafters:
            return [NO_DRAFT] * len(ready)
        widest = self.can.widest(len(ready), self.graphs)
        asked = [self._asked(seq) for seq in ready]
        if None not in asked:
            return [self._fixed(seq, k, widest) if k else NO_DRAFT for seq, k in zip(ready, asked)]
        planned = self.controller.reuse_plan([seq.id for seq in ready])
        if planned is not None:
            planned = [c if c.k <= self._max_draft_len(s, widest) else NO_DRAFT for c, s in zip(planned, ready)]
        else:
            planned = self.controller.plan([self._context(s, k is not None, widest) for s, k in zip(ready, asked)])
        return [
            choice if k is None else self._fixed(seq, k, widest) if k else NO_DRAFT
            for seq, k, choice in zip(ready, asked, planned)
        ]

    def _context(self, seq: Seq, fixed: bool, widest: int) -> DraftContext:
        where = (seq.remaining, len(seq.tokens))
        if fixed:
            return DraftContext(seq.id, {}, 0, *where, True, adapter=adapter_of(seq))
        most = self._max_draft_len(seq, widest)
        offers = {name: n for name in self.controller.drafters if (n := self._offer(seq, name, most))}
        match = seq.ngram.match() if seq.ngram is not None and "ngram" in offers else 0
        unread = self.drafter.unread(seq.id, seq.tokens) if self.drafter is not None else 0
        return DraftContext(seq.id, offers, match, *where, False, self._nodes(seq, widest), unread, adapter_of(seq))

    def trust(self, ready: Sequence[Seq]) -> dict[str, Sequence[float]]:
        """Acceptance by each drafter's confidence; if the sequences share an adapter, with that adapter."""
        adapters, members = {adapter_of(seq) for seq in ready}, self.drafter.members if self.drafter is not None else ()
        adapter = adapters.pop() if len(adapters) == 1 else ""
        return {member.name: self.controller.trust(member.name, adapter) for member in members}

    def _asked(self, seq: Seq) -> int | None:
        """The requested K of this request; None: the fastest."""
        if not seq.request.drafter:
            return 0
        return seq.request.draft_tokens if seq.request.draft_tokens is not None else self.spec.draft_tokens

    def drafts_from_hidden(self, seq: Seq) -> bool:
        """May a draft of this request start from the target's hidden states?"""
        if self.drafter is None or self.drafter.starts_from == "tokens":
            return False
        return seq.request.drafter in (True, *(m.name for m in self.drafter.members)) and self._asked(seq) != 0

    def _fixed(self, seq: Seq, k: int, widest: int) -> DraftPlan:
        most = min(k, self._max_draft_len(seq, widest))
        for name in self.controller.drafters:
            if offered := self._offer(seq, name, most):
                nodes = self._nodes(seq, widest) if name != "ngram" and self._tree(seq) is not None else 0
                return DraftPlan(name, offered, nodes=nodes if nodes > 1 else 0)
        return NO_DRAFT

    def _tree(self, seq: Seq) -> int | None:
        return seq.request.tree if seq.request.tree is not None else self.spec.tree

    def _nodes(self, seq: Seq, widest: int) -> int:
        """Maximum tokens of a tree now; 0: chains, also where a row could have other bits in a tree (the backend
        says). Trees that were not requested must be fast (the executor says) and pay: on a CPU only where tokens are
        drawn (docs/drafting.md); on a GPU rows cost little."""
        asked, params = self._tree(seq), seq.request.params
        if not self.can.trees or seq.request.drafter == "ngram":
            return 0
        if asked is None:
            pays = not params.processed if self.graphs else params.temperature_only and params.temperature >= GREEDY_EPS
            asked = AUTO_NODES if self.trees and pays and not (self.graphs and seq.adapter) else 0
        return max(0, min(asked, self.max_context - len(seq.tokens) - seq.num_inflight_tokens - 1, widest))

    def _offer(self, seq: Seq, name: str, most: int) -> int:
        """How many tokens, up to the given maximum, this drafter could draft for this sequence now."""
        if most <= 0:
            return 0
        if name == "ngram":
            return most if seq.ngram is not None and seq.ngram.match() else 0
        members = self.drafter.members if self.drafter is not None else ()
        if not seq.has_features or seq.stats.drafter_off is not None or seq.request.drafter not in (True, name):
            return 0
        return next((min(most, member.max_tokens) for member in members if member.name == name), 0)

    def copies(self, request: Request) -> bool:
        """May n-gram copies be drafted? They are only as new as the tokens the host has read, so next to a network
        with steps that are read one behind only if requested by name."""
        return request.drafter == "ngram" or (request.drafter is True and (self.drafter is None or not self.graphs))

    def _max_draft_len(self, seq: Seq, widest: int) -> int:
        """Limited by the tokens that may be emitted, the context, and the number of independent rows."""
        ahead = seq.num_inflight_tokens
        left = min(seq.remaining - (ahead > 0), self.max_context - len(seq.tokens) - ahead)
        return min(left - 1, widest, MAX_DRAFT)


def adapter_of(seq: Seq) -> str:
    return seq.adapter.name if seq.adapter is not None else ""
