"""Decides what each decoding sequence drafts, one `DraftPlan` per sequence and step: the controller's choice, within
the drafter's limits and the request's settings. Torch-free."""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..config import SpecConfig
from ..spec.controller import Controller
from ..spec.ngram import NGRAM
from ..spec.plan import CyclePlan, DraftContext
from ..types import GREEDY_EPS, MAX_DRAFT, NO_DRAFT, DraftPlan
from .step import DecodeRows, Request, Sequence

if TYPE_CHECKING:
    from ..ops.backend import Capabilities
    from ..spec.drafter import Drafter

PLAIN = {0}  # requested K of a batch without drafts


@dataclass
class DraftPolicy:
    controller: Controller
    drafter: Drafter | None
    spec: SpecConfig
    can: Capabilities
    max_context: int
    graphs: bool  # steps run as CUDA graphs
    trees: bool  # the fastest executor runs trees at the cost of their rows
    # by drafter, positions that its drafts write at (`Drafter.block_rows`)
    block_rows: Mapping[str | None, int] = field(default_factory=dict)

    def admit(self, seq: Sequence) -> None:
        """Set the limits of this request's drafts, the same in every step. Drafts are chains where a row could have
        other bits in a tree (the backend says). Trees that were not requested must be fast (the executor says) and pay:
        on a CPU only where tokens are drawn (docs/drafting.md); on a GPU rows cost little."""
        request = seq.request
        seq.controller_state = self.controller.new_state()
        seq.draft_track = self.drafter.new_track(seq.id) if self.drafter is not None else None
        spec = self.spec
        members = self.drafter.members if self.drafter is not None else ()
        seq.offered = {one.name: one.max_tokens for one in members if request.drafter in (True, one.name)}
        draft_tokens = request.draft_tokens if request.draft_tokens is not None else spec.draft_tokens
        seq.draft_tokens = draft_tokens if request.drafter else 0
        from_hidden = self.drafter is not None and self.drafter.starts_from != "tokens"
        seq.drafts_from_hidden = from_hidden and bool(seq.offered) and seq.draft_tokens != 0
        nodes = request.tree if request.tree is not None else spec.tree
        if nodes is None:
            nodes = MAX_DRAFT if self._trees_pay(seq) else 0
        seq.tree_nodes = nodes if self.can.trees and request.drafter != NGRAM else 0

    def _trees_pay(self, seq: Sequence) -> bool:
        """True if trees are drafted for a request that did not ask for them."""
        params = seq.request.params
        if seq.draft_tokens is not None or not self.trees:
            return False
        if self.graphs:
            return seq.adapter is None and not params.processed
        return params.temperature_only and params.temperature >= GREEDY_EPS

    def choose(self, ready: list[Sequence]) -> tuple[list[DraftPlan], CyclePlan | None]:
        """Drafter and K of each decoding sequence: the requested K, else the controller's, with its proposal, which
        `commit` books if the step runs. Nothing changes a K after this."""
        requested = {seq.draft_tokens for seq in ready}
        if requested == PLAIN or not self.controller.drafters:
            return [NO_DRAFT] * len(ready), None
        widest = self.can.widest(len(ready), self.graphs)
        if None not in requested:
            return [self._fixed(seq, widest) if seq.draft_tokens else NO_DRAFT for seq in ready], None
        plans, cycle = self._controlled(ready, widest)
        if len(requested) > 1:
            plans = [plan if seq.draft_tokens is None else self._fixed(seq, widest) for plan, seq in zip(plans, ready)]
        return plans, cycle

    def _controlled(self, ready: list[Sequence], widest: int) -> tuple[list[DraftPlan], CyclePlan]:
        """The controller's plans and its proposal: the last one while it is valid, as far as it is still possible."""
        index = ready[0].ngram if len(ready) == 1 else None
        match_len = index.match() if index is not None else 0
        earlier = self.controller.reuse([seq.controller_state for seq in ready], match_len)
        if earlier is not None:
            plans = [self._shortened(plan, seq, widest) for plan, seq in zip(earlier, ready)]
            return plans, CyclePlan(earlier, reused=True)
        cycle = self.controller.propose([self._context(seq, widest) for seq in ready])
        return cycle.plans, cycle

    def host_draft(self, seq: Sequence, plan: DraftPlan) -> abc.Sequence[int] | None:
        """The tokens that the host proposes, and as many more as a step in flight may add; None: a network drafts."""
        if plan.drafter != NGRAM or seq.ngram is None:
            return None
        return seq.ngram.propose(plan.k + seq.num_inflight_tokens)[0]

    def positions(self, plan: DraftPlan) -> int:
        """Positions from the newest token on that a draft needs pages for."""
        return max(plan.max_drafted, self.block_rows.get(plan.drafter, 0) - 1)

    def _shortened(self, plan: DraftPlan, seq: Sequence, widest: int) -> DraftPlan:
        """A plan of some steps ago, as far as it is still possible."""
        if plan.drafter is None:
            return plan
        k = self._offer(seq, plan.drafter, min(plan.k, self._max_draft_len(seq, widest)))
        nodes = min(plan.nodes, self._nodes(seq, widest)) if plan.nodes else 0
        if k == plan.k and nodes == plan.nodes:
            return plan
        if k == 0:
            return NO_DRAFT
        return plan._replace(k=k, nodes=nodes if nodes > 1 else 0)

    def _context(self, seq: Sequence, widest: int) -> DraftContext:
        left = seq.remaining
        context = len(seq.tokens)
        adapter = adapter_of(seq)
        if seq.draft_tokens is not None:
            return DraftContext(
                state=seq.controller_state,
                drafter_available={},
                match_len=0,
                remaining=left,
                context=context,
                fixed=True,
                adapter=adapter,
            )
        max_k = self._max_draft_len(seq, widest)
        offers: dict[str, int] = {}
        for name in self.controller.drafters:
            k = self._offer(seq, name, max_k)
            if k > 0:
                offers[name] = k
        match = seq.ngram.match() if seq.ngram is not None and NGRAM in offers else 0
        unread = self.drafter.unread(seq.draft_track, seq.tokens) if self.drafter is not None else 0
        return DraftContext(
            state=seq.controller_state,
            drafter_available=offers,
            match_len=match,
            remaining=left,
            context=context,
            nodes=self._nodes(seq, widest),
            unread=unread,
            adapter=adapter,
        )

    def trust(self, scheduled: DecodeRows) -> dict[str, abc.Sequence[float]]:
        """Acceptance by each drafter's confidence, if some draft may end itself: with the adapter that all of them use,
        else with the base model."""
        # one loop: between two passes over the weights every function call runs on cold caches
        drafters: set[str] = set()
        adapters: set[str] = set()
        may_end = False
        for row in scheduled:
            plan = row.plan
            adapter = row.seq.adapter
            adapters.add(adapter.name if adapter is not None else "")
            if plan.drafter is not None:
                drafters.add(plan.drafter)
                may_end = may_end or plan.stop != 0.0 or plan.drop != 0.0
        if not may_end:
            return {}
        shared = adapters.pop() if len(adapters) == 1 else ""
        trust: dict[str, abc.Sequence[float]] = {}
        for drafter in drafters:
            trust[drafter] = self.controller.trust(drafter, shared)
        return trust

    def _fixed(self, seq: Sequence, widest: int) -> DraftPlan:
        max_k = min(seq.draft_tokens or 0, self._max_draft_len(seq, widest))
        for name in self.controller.drafters:
            k = self._offer(seq, name, max_k)
            if k > 0:
                nodes = self._nodes(seq, widest) if name != NGRAM else 0
                return DraftPlan(name, k, nodes=nodes if nodes > 1 else 0)
        return NO_DRAFT

    def _nodes(self, seq: Sequence, widest: int) -> int:
        """Maximum tokens of a tree now; 0: chains."""
        return max(0, min(seq.tree_nodes, self.max_context - len(seq.tokens) - seq.num_inflight_tokens - 1, widest))

    def _offer(self, seq: Sequence, name: str, max_k: int) -> int:
        """The number of tokens, up to the given maximum, that this drafter could draft for this sequence now."""
        if max_k <= 0:
            return 0
        if name == NGRAM:
            return max_k if seq.ngram is not None and seq.ngram.match() > 0 else 0
        if not seq.has_features or name in seq.failed_drafters:
            return 0
        if name in self.block_rows and len(seq.tokens) + self.block_rows[name] - 1 > self.max_context:
            return 0  # a block would be written beyond the context
        return min(max_k, seq.offered.get(name, 0))

    def copies(self, request: Request) -> bool:
        """May n-gram copies be drafted? They are only as new as the tokens the host has read, so next to a network
        with steps that are read one behind only if requested by name."""
        return request.drafter == NGRAM or (request.drafter is True and (self.drafter is None or not self.graphs))

    def _max_draft_len(self, seq: Sequence, widest: int) -> int:
        """Limited by the tokens that may be emitted, the context, and the number of independent rows."""
        ahead = seq.num_inflight_tokens
        left = min(seq.remaining - (ahead > 0), self.max_context - len(seq.tokens) - ahead)
        return min(left - 1, widest, MAX_DRAFT)


def adapter_of(seq: Sequence) -> str:
    return seq.adapter.name if seq.adapter is not None else ""
