"""Rates what sequences could draft: for every drafter the plan with the most tokens per second. Pure, torch-free.

A cycle that drafts K tokens yields E(K) = 1 + Σ_{j≤K} a_1·…·a_j tokens and costs C(K) seconds; C is the measured
`CostTable`, a_j the learnt acceptance at position j. `PlanRater` reads both and changes neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..types import MAX_DRAFT, NO_DRAFT, DraftPlan
from .acceptance import AcceptanceTable, CycleStats, DrafterStats, Source
from .cost import CostTable, at_k
from .plan import DEEPEST, TIMED, Candidate, ControllerState, CostPart, DraftContext
from .tuning import Tuning, match_range

Array = NDArray[np.float64]
Rated = dict[str | None, Candidate]  # by drafter
PLANNING_SECONDS = 2e-4  # per step, for planning a batch that drafts


class DraftOffer(NamedTuple):
    """A drafter that a sequence may use now."""

    max_tokens: int
    source: Source
    stats: DrafterStats


class DraftOption(NamedTuple):
    """One way to draft: K, the tokens of a tree (0: a chain), and the tokens per second that it yields."""

    k: int
    nodes: int
    rate: float


class PlanRater:
    def __init__(
        self,
        *,
        cost: CostTable,
        acceptance: AcceptanceTable,
        drafters: tuple[str, ...],
        copying: frozenset[str],
        tuning: Tuning,
    ) -> None:
        """copying: drafters that repeat earlier text."""
        self.cost = cost
        self.acceptance = acceptance
        self.drafters = drafters
        self.copying = copying
        self.tuning = tuning

    def rate(self, views: Sequence[DraftContext], context: int) -> Rated:
        """The best plan of every drafter for these sequences, whose mean length is `context`."""
        if len(views) == 1:
            return self._rate_one(views[0])
        return self._rate_batch(views, context)

    def source(self, view: DraftContext, name: str) -> Source:
        """The statistics that this drafter's drafts for a sequence belong to."""
        match = match_range(view.match_len) if name in self.copying else 0
        return Source(name, match, view.adapter)

    def offer(self, view: DraftContext, name: str) -> DraftOffer | None:
        """How many tokens this drafter may offer to a sequence, with its statistics; None: no tokens."""
        max_tokens = min(view.drafter_available.get(name, 0), MAX_DRAFT, view.remaining - 1)
        if max_tokens <= 0:
            return None
        source = self.source(view, name)
        stats = self.acceptance[source]
        if stats.judged < 8 and not self.cost.free(name) and not stats.carded:
            max_tokens = min(max_tokens, 2 + stats.accepted)  # unproven: drafts grow as tokens are accepted
        return DraftOffer(max_tokens, source, stats)

    def catch_up_seconds(self, view: DraftContext, name: str) -> float:
        """Seconds per output token that a drafter's reading of the text costs within the tokens left."""
        if not view.unread:
            return 0.0
        num_tokens = max(1, min(view.remaining, self.tuning.horizon))
        return view.unread * self.cost.reading.get(name, 0.0) / num_tokens

    def with_ending(self, plan: DraftPlan, *, view: DraftContext, context: int, batch: int, rate: float) -> DraftPlan:
        """The plan with the confidence at which its draft ends: a further token must be worth, at `rate` tokens per
        second, the time that it adds."""
        name = plan.drafter
        tuning = self.tuning
        if name is None or not self.acceptance[self.source(view, name)].calibrated:
            return plan
        k = max(2, self.cost.reach(name, batch, context=context, sure=tuning.sure))
        verify = self.cost.curve(None, batch, context)
        whole = self.cost.curve(name, batch, context)
        row_seconds = (verify[k] - verify[0]) / k / batch
        token_seconds = (whole[k] - whole[1]) / (k - 1) / batch
        stop = rate * token_seconds / tuning.next_token
        drop = rate * row_seconds
        if plan.nodes == 0:
            return plan._replace(stop=stop, drop=drop)
        prices = tuple(rate * (seconds - verify[0]) for seconds in verify)
        return plan._replace(stop=stop, drop=drop / 2, prices=prices)  # a tree's prices decide what is dropped

    # ---- a single sequence -------------------------------------------------------------------------------------------
    def _rate_one(self, view: DraftContext) -> Rated:
        """The best plan of every drafter, of those whose loss the sequence could bear."""
        rated: Rated = {}
        for name in self.drafters:
            offer = self.offer(view, name)
            if offer is None:
                continue
            catch_up = self.catch_up_seconds(view, name)
            options = self._ending_options if offer.stats.calibrated else self._fixed_options
            for option in options(view, offer):
                rate = option.rate / (1.0 + option.rate * catch_up) if catch_up else option.rate
                if name not in rated or rate > rated[name].rate:
                    rated[name] = Candidate(rate, [DraftPlan(name, option.k, nodes=option.nodes)])
        return rated

    def _ending_options(self, view: DraftContext, offer: DraftOffer) -> Iterator[DraftOption]:
        """Drafts that end themselves: K does not determine their gain, past cycles do."""
        source = offer.source
        times = self.cost.curve(source.drafter, 1, view.context)
        reach = self.cost.reach(source.drafter, 1, context=view.context, sure=self.tuning.sure)
        max_k = min(offer.max_tokens, reach)
        k = self._bearable_k(view.state, stats=offer.stats, times=times, max_k=max_k)
        if k == 0:
            return
        nodes = 0
        if offer.stats.proven:
            # near its limit of losses: one row more than the chain would have
            nodes = view.nodes if k == max_k else min(view.nodes, k + 1)
        rate = self._ending_rate(view.state, offer, times)
        yield DraftOption(k, nodes if nodes > 1 else 0, rate)

    def _fixed_options(self, view: DraftContext, offer: DraftOffer) -> Iterator[DraftOption]:
        """Drafts of a fixed size: the best K of a chain, and of a tree."""
        name = offer.source.drafter
        stats = offer.stats
        yield from self._best_fixed(view, offer, nodes=0, max_k=offer.max_tokens, lift=1.0)
        if view.nodes >= TIMED and stats.proven and self.cost.has_trees(name):
            max_k = min(offer.max_tokens, DEEPEST)
            yield from self._best_fixed(
                view, offer, nodes=view.nodes, max_k=max_k, lift=stats.in_trees / stats.in_chains
            )

    def _best_fixed(
        self, view: DraftContext, offer: DraftOffer, *, nodes: int, max_k: int, lift: float
    ) -> Iterator[DraftOption]:
        """The best K up to `max_k`, if any can be borne; `lift`: a tree's drafted tokens gained over a chain's."""
        expected = self._expected_tokens(view.state, offer.source, offer.stats)
        times = self.cost.curve(offer.source.drafter, 1, context=view.context, tree=nodes > 0)
        bearable = self._bearable_k(view.state, stats=offer.stats, times=times, max_k=max_k)
        rates = [(1.0 + lift * (expected[k] - 1.0)) / times[k] for k in range(1, bearable + 1)]
        if rates:
            best = max(rates)
            yield DraftOption(rates.index(best) + 1, nodes, best)

    def _ending_rate(self, state: ControllerState, offer: DraftOffer, times: Sequence[float]) -> float:
        """Tokens per second of drafts that end themselves in this request."""
        stats = offer.stats
        weight = self.tuning.yield_weight
        if stats.worth is None:  # nothing was drafted yet: start from the gain of the best fixed K by the profile
            expected = self._expected_tokens(state, offer.source, stats)
            k = max(range(1, len(expected)), key=lambda j: expected[j] / times[j])
            stats.worth = CycleStats(emitted=expected[k], verified=k, drafted=k, cycles=weight)
        name = offer.source.drafter
        in_request = state.yields.setdefault(name, CycleStats())
        means = in_request.blend(stats.worth, weight)
        return means.emitted / (
            at_k(times, means.verified) + (means.drafted - means.verified) * self.cost.further(name)
        )

    def _expected_tokens(self, state: ControllerState, source: Source, stats: DrafterStats) -> list[float]:
        """E(K) for K = 0..16 in this request."""
        expected = state.expected.get(source)
        if expected is None:
            positions = state.arms.get(source)
            chain = stats.a if positions is None else positions.estimate(stats.a, self.tuning.request_weights)
            expected = [1.0]
            path = 1.0
            for a in chain:
                path *= a
                expected.append(expected[-1] + path)
            state.expected[source] = expected
        return expected

    def _bearable_k(self, state: ControllerState, *, stats: DrafterStats, times: Sequence[float], max_k: int) -> int:
        """The longest draft whose loss this request could bear: without any acceptance it loses a few percent."""
        at_start, per_token = self.tuning.risk if stats.proven else self.tuning.unproven_risk
        allowed = (state.loss_budget + at_start + per_token * state.tokens) * times[0]
        k = max_k
        while k > 0 and times[k] - times[0] > allowed:
            k -= 1
        return k

    # ---- batches -----------------------------------------------------------------------------------------------------
    def _rate_batch(self, views: Sequence[DraftContext], context: int) -> Rated:
        """The best plan of every drafter that takes time. At most one such drafter runs in a cycle; free ones always
        may. A sequence's K ends where a token is worth less than its row costs."""
        batch = len(views)
        verify = np.asarray(self.cost.curve(None, batch, context))
        rated: Rated = {}
        for costly in [*(name for name in self.drafters if not self.cost.free(name)), None]:
            names = [name for name in self.drafters if name == costly or self.cost.free(name)]
            rows: list[list[float]] = []  # [B][17] expected tokens by K
            users: list[str | None] = []  # the drafter of each sequence
            for view in views:
                name, expected = self._best_of(names, view=view, batch=batch, context=context, plain=float(verify[0]))
                users.append(name)
                # a K beyond the maximum yields nothing, so it is never chosen
                rows.append(expected + [0.0] * (MAX_DRAFT + 1 - len(expected)))
            if not any(users) or (costly is not None and costly not in users):
                continue
            takes_time = np.asarray([user == costly for user in users])
            draft_seconds = np.zeros(MAX_DRAFT + 1)
            fill = 1.0
            if costly is not None:
                num_users = max(1, int(takes_time.sum()))
                draft_seconds = np.asarray(self.cost.draft_curve(CostPart("draft", costly), num_users))
                fill = self.acceptance[Source(costly)].fill
            rate, ks = choose_k(
                tokens=np.asarray(rows), takes_time=takes_time, verify=verify, draft_seconds=draft_seconds, fill=fill
            )
            plans = [DraftPlan(user, k) if k and user else NO_DRAFT for user, k in zip(users, ks, strict=True)]
            if costly is None or any(plan.drafter == costly for plan in plans):
                rated[costly] = Candidate(rate, plans)
        return rated

    def _best_of(
        self, names: Sequence[str], *, view: DraftContext, batch: int, context: int, plain: float
    ) -> tuple[str | None, list[float]]:
        """The drafter with most expected tokens for a sequence of a batch, of these, and E(K) up to its maximum K.
        plain: seconds of a plain step of the batch."""
        best: str | None = None
        best_expected = [1.0]
        for name in names:
            offer = self.offer(view, name)
            if offer is None or self.catch_up_seconds(view, name) > self.tuning.batch_catch_up * plain / batch:
                continue
            expected = self._expected_tokens(view.state, offer.source, offer.stats)
            times = self.cost.curve(name, batch, context)
            max_k = self._bearable_k(view.state, stats=offer.stats, times=times, max_k=offer.max_tokens)
            advantage = 1.0 if best is None else self.tuning.rival
            if max_k > 0 and expected[max_k] > best_expected[-1] * advantage:
                best = name
                best_expected = expected[: max_k + 1]
        return best, best_expected


def choose_k(
    *, tokens: Array, takes_time: NDArray[np.bool_], verify: Array, draft_seconds: Array, fill: float
) -> tuple[float, list[int]]:
    """The best rate in tokens per second, and the K of each sequence that reaches it.

    tokens [B, 17]: expected tokens of a cycle by K. takes_time [B]: sequences whose drafts take time, `draft_seconds`
    [17] by the longest K; a share `fill` of their tokens is verified. verify [17]: seconds of the target's step by the
    mean K.
    """
    batch = len(tokens)
    steps = np.arange(MAX_DRAFT + 1)
    verified_share = np.where(takes_time, fill, 1.0)[:, None]
    best_rate = 0.0
    best_ks = [0] * batch
    rate = batch / verify[0]
    for _ in range(2):  # the price of a row follows the rate, which follows the choice
        row_price = rate * (verify[-1] - verify[0]) / MAX_DRAFT / batch
        net = np.where(tokens > 0.0, tokens - row_price * steps * verified_share, -1.0)
        best_net = np.maximum.accumulate(net, axis=1)
        ks = np.maximum.accumulate(np.where(net >= best_net, steps, 0), axis=1)  # [B, 17]: K by the widest K allowed
        emitted = np.take_along_axis(tokens, ks, axis=1).sum(axis=0)  # [17]
        width = (ks * verified_share).mean(axis=0)
        depth = np.where(takes_time[:, None], ks, 0).max(axis=0)
        rates = emitted / (np.interp(width, steps, verify) + draft_seconds[depth] + PLANNING_SECONDS)
        widest = int(rates.argmax())
        if rates[widest] > best_rate:
            best_rate = float(rates[widest])
            best_ks = [int(k) for k in ks[:, widest]]
        rate = best_rate
    return best_rate, best_ks
