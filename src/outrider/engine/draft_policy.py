"""What each decoding sequence drafts: the controller's choice within the drafter's limits and the request's wishes.

`DraftPolicy.plan` makes a `DraftPlan` for each sequence of a step, once; executors carry it out. Torch-free.
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
    trees: bool  # the fastest executor runs trees at the price of their rows

    def plan(self, ready: list[Seq]) -> list[DraftPlan]:
        """Drafter and K of each decoding sequence: the K that was asked for, else the controller's."""
        widest = self.can.widest(len(ready), self.graphs)
        asked = [self._asked(seq) for seq in ready]
        if None not in asked:
            return [self._fixed(seq, k or 0, widest) for seq, k in zip(ready, asked)]
        planned = self.controller.reuse_plan([seq.id for seq in ready])
        if planned is not None:
            planned = [c if c.k <= self._max_draft_len(s, widest) else NO_DRAFT for c, s in zip(planned, ready)]
        else:
            views = []
            for s, k in zip(ready, asked):
                offers = self._offers(s, widest) if k is None else ({}, 0)
                nodes, unread = (self._nodes(s, widest), self._unread(s)) if k is None else (0, 0)
                where = (s.remaining, len(s.tokens))
                views.append(DraftContext(s.id, *offers, *where, k is not None, nodes, unread, adapter_of(s)))
            planned = self.controller.plan(views)
        return [choice if k is None else self._fixed(seq, k, widest) for seq, k, choice in zip(ready, asked, planned)]

    def trust(self, ready: Sequence[Seq]) -> list[float]:
        """Acceptance by the drafter's confidence for these sequences, by what their adapter taught if they share
        one."""
        assert self.drafter is not None
        adapters = {adapter_of(seq) for seq in ready}
        return self.controller.trust(self.drafter.name, adapters.pop() if len(adapters) == 1 else "")

    def _unread(self, seq: Seq) -> int:
        return self.drafter.unread(seq.id, seq.tokens) if self.drafter is not None else 0

    def _asked(self, seq: Seq) -> int | None:
        """The K this request shall have; None: whatever is fastest."""
        if not seq.request.drafter:
            return 0
        return seq.request.draft_tokens if seq.request.draft_tokens is not None else self.spec.draft_tokens

    def drafts_from_hidden(self, seq: Seq) -> bool:
        """May a draft of this request start from the target's hidden states?"""
        if self.drafter is None or self.drafter.starts_from == "tokens":
            return False
        return seq.request.drafter in (True, self.drafter.name) and self._asked(seq) != 0

    def _fixed(self, seq: Seq, k: int, widest: int) -> DraftPlan:
        if k == 0:
            return NO_DRAFT
        offers, _ = self._offers(seq, widest)
        name = next((n for n in self.controller.drafters if offers.get(n)), None)
        if name is None:
            return NO_DRAFT
        if name == "ngram":
            return DraftPlan(name, min(k, offers[name]))
        nodes = self._nodes(seq, widest) if self._tree(seq) is not None else 0
        return DraftPlan(name, min(k, offers[name]), nodes=nodes if nodes > 1 else 0)

    def _tree(self, seq: Seq) -> int | None:
        """Most tokens of a tree of drafts that was asked for; None: whatever is fastest."""
        return seq.request.tree if seq.request.tree is not None else self.spec.tree

    def _nodes(self, seq: Seq, widest: int) -> int:
        """Most tokens that a tree may have now; 0: drafts stay lines, as they do where a row could have other bits in a
        tree (the backend says), and where choosing is not coupled. What nobody asked for must also be fast (the
        executor says) and pay: on a CPU second guesses bring 14 to 21 % where tokens are drawn, and nothing to greedy
        decoding (docs/drafting.md); on a GPU rows cost little."""
        asked, params = self._tree(seq), seq.request.params
        if not self.can.trees or self.spec.verify != "coupled" or seq.request.drafter == "ngram":
            return 0
        if asked is None:
            pays = not params.processed if self.graphs else seq.temperature_only and params.temperature >= GREEDY_EPS
            asked = AUTO_NODES if self.trees and pays and not (self.graphs and seq.adapter) else 0
        return max(0, min(asked, self.max_context - len(seq.tokens) - seq.num_inflight_tokens - 1, widest))

    def _offers(self, seq: Seq, widest: int) -> tuple[dict[str, int], int]:
        """How many tokens each drafter could guess for this sequence now, and how long a suffix the n-gram index found
        again."""
        offers: dict[str, int] = {}
        longest, match, asked = self._max_draft_len(seq, widest), 0, seq.request.drafter
        if asked and longest > 0:
            if (
                self.drafter is not None
                and seq.has_features
                and seq.stats.drafter_off is None
                and asked in (True, self.drafter.name)
            ):
                offers[self.drafter.name] = min(longest, self.drafter.max_tokens)
            if seq.ngram is not None:
                match = seq.ngram.match()
                if match:
                    offers["ngram"] = longest
        return offers, match

    def copies(self, request: Request) -> bool:
        """May copies of earlier text be drafted? A network's draft needs nothing from the host; a copy is as old as
        what the host has seen. So beside a network in steps that are read one behind, copies are made only where they
        were asked for by name."""
        return request.drafter == "ngram" or (request.drafter is True and (self.drafter is None or not self.graphs))

    def _max_draft_len(self, seq: Seq, widest: int) -> int:
        """Most tokens a draft may have: what may be emitted, what the context holds, and what keeps rows
        independent."""
        return min(
            seq.remaining - 1 - (seq.num_inflight_tokens > 0),
            self.max_context - len(seq.tokens) - seq.num_inflight_tokens - 1,
            widest,
            MAX_DRAFT,
        )


def adapter_of(seq: Seq) -> str:
    return seq.adapter.name if seq.adapter is not None else ""
