"""Chooses drafter and K for every sequence in every cycle, so that speculation is never slower. Pure, torch-free.

A cycle that drafts K tokens yields E(K) = 1 + Σ_{j≤K} a_1·…·a_j tokens and costs C(K) seconds; the controller
picks the K in 0..16 with the most tokens per second, jointly over the batch. C is the measured `CostTable`. a_j, the
probability that position j is right given that all before it were, is learnt from what the target accepted:
exponentially weighted per request, drawn towards the estimate over all requests with the same adapter, which starts
from the model card's prior.

Safety: a new drafter starts with short drafts; plain decoding is left only for a predicted gain of more than `margin`;
a request that has lost time must earn it back before it may risk more (`ControllerState.loss_budget`); exploring costs
at most `explore` of all time. All numbers are in `Tuning`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..types import MAX_DRAFT, NO_DRAFT, DraftPlan, OutriderError
from .acceptance import AcceptanceProfile, AcceptanceTable, CycleStats, DrafterStats, PositionStats, Source
from .cost import CostTable, at_k
from .plan import (
    DEEPEST,
    TIMED,
    Candidate,
    ControllerState,
    CostPart,
    CycleBookings,
    CyclePlan,
    DraftContext,
    DraftOutcome,
    VerifiedTree,
)
from .tuning import Tuning, match_range

Rated = dict[str | None, Candidate]  # by drafter
PLANNING = 2e-4  # seconds per step for planning a batch that drafts
Array = NDArray[np.float64]


class Controller:
    """`propose` and `commit` before a cycle; `observe` per sequence and `observe_step` once after it. What it knows of
    one sequence is in that sequence's `ControllerState`."""

    def __init__(
        self,
        cost: CostTable,
        drafters: tuple[str, ...],
        profiles: Mapping[str, AcceptanceProfile] | None = None,
        tuning: Tuning = Tuning(),
    ) -> None:
        self.cost = cost
        self.drafters = drafters
        self.tuning = tuning
        self.acceptance = AcceptanceTable(tuning, profiles or {}, lambda name: self.cost.free(name))
        self.warnings: list[str] = []  # each reported once, in the order of detection
        self._told: set[tuple[str, str]] = set()
        self._time = 0.0  # all cycles so far, in table seconds
        self._explored = 0.0  # of it, lost to probes
        self._used: str | None = None  # the network drafter in use, of two,
        self._wait = self._interval = 0  # and the cycles until the other one is tried, and between two such cycles
        # of the cycle under way, a sequence each: drafter, tokens verified, drafted
        self._cycle: list[tuple[str | None, int, float]] = []
        self._resting: list[ControllerState] = []  # the batch that was planned last,
        self._held: list[DraftPlan] = []  # its plan,
        self._rest = 0  # for how many more steps that holds (of a single sequence: unless a longer match turns up),
        self._pause = 0  # for how many it held the time before,
        self._match = 0  # and the match that a single sequence had
        self._pending: list[Callable[[], None]] = []  # observations to be learnt from
        self.planned = False  # until the first plan nothing is learnt

    def new_state(self) -> ControllerState:
        """The state of a new sequence."""
        return ControllerState(self.tuning.probe_first)

    # ---- before a cycle ----
    def plan(self, seqs: Sequence[DraftContext]) -> list[DraftPlan]:
        """Propose and commit at once, for callers whose every plan runs."""
        cycle = self.propose(seqs)
        self.commit(cycle)
        return cycle.plans

    def propose(self, seqs: Sequence[DraftContext]) -> CyclePlan:
        """Drafter and K of each sequence. Nothing is booked until `commit`, so a proposal may be discarded."""
        self.apply_observations()
        if not seqs:
            return CyclePlan([])
        size = len(seqs)
        context = sum(view.context for view in seqs) // len(seqs)
        tuning = self.tuning
        rated = self._rate_one(seqs[0]) if size == 1 else self._rate_batch(seqs, context)
        margin = tuning.margin if size == 1 else tuning.batch_margin
        plain_rate = size / self.cost.curve(None, size, context)[0] * (1.0 + margin)
        plain = Candidate(plain_rate, [NO_DRAFT] * size)
        best = max([plain, *rated.values()], key=lambda candidate: candidate.rate)
        bookings = CycleBookings(seqs, context)
        rival = self._rival(rated, best, bookings) if len(rated) > 1 else None
        chosen = best if rival is None else rival
        plans = [self._ending(view, plan, context, size, best.rate) for view, plan in zip(seqs, chosen.plans)]
        if best is plain:
            for i, view in enumerate(seqs):
                plans[i] = self._maybe_probe(view, bookings)
                if plans[i].k:
                    break  # one probe per cycle, since the whole batch pays for it
        elif size == 1:
            bookings.drafting_alone = True
        return CyclePlan(plans, bookings)

    def commit(self, cycle: CyclePlan) -> None:
        """Book a proposal whose cycle is about to run: probes, comparisons, expected times, how long it is kept."""
        self.planned = True
        if cycle.reused:
            self._rest -= 1
        bookings = cycle.bookings
        if bookings is None:
            return
        tuning = self.tuning
        if bookings.network_drafter is not None:
            self._book_comparison(bookings, bookings.network_drafter)
        for state in bookings.waited:
            state.wait -= 1
        probing = bookings.probing
        if probing is not None:
            probing.interval = min(tuning.probe_last, 2 * probing.interval)
            probing.wait = probing.interval
            probing.probing = True
        if bookings.drafting_alone:
            state = bookings.views[0].state
            state.interval = tuning.probe_first
            state.wait = tuning.probe_first
        self._note(bookings, cycle.plans)
        once = bookings.compares or any(view.state.probing for view in bookings.views)
        self._hold(bookings.views, cycle.plans, once, bookings.views[0].state.loss_budget)

    def _rival(self, rated: Rated, best: Candidate, bookings: CycleBookings) -> Candidate | None:
        """In some cycles the network drafter not in use drafts: they teach about it, count as probes, become rarer."""
        tuning = self.tuning
        network = {name: one for name, one in rated.items() if name and not self.cost.free(name)}
        used = next((name for name, one in network.items() if one is best), None)
        if used is None or len(network) == 1:
            return None
        bookings.network_drafter = used
        wait = self._wait if used == self._used else tuning.compare_first
        rival = max((one for one in network.values() if one is not best), key=lambda one: one.rate)
        seconds = self.cost.mixed([(plan.drafter, plan.k, plan.k) for plan in rival.plans], bookings.context)
        loss = max(0.0, seconds * (1.0 - rival.rate / best.rate))
        if wait > 1 or self._explored + loss > tuning.explore * self._time:
            return None
        bookings.compares = True
        bookings.comparison_loss = loss
        return rival

    def _book_comparison(self, bookings: CycleBookings, used: str) -> None:
        tuning = self.tuning
        if used != self._used:
            self._used = used
            self._interval = tuning.compare_first
            self._wait = tuning.compare_first
        self._wait -= 1
        if bookings.compares:
            self._explored += bookings.comparison_loss
            self._interval = min(tuning.compare_last, 2 * self._interval)
            self._wait = self._interval

    def _rate_one(self, view: DraftContext) -> Rated:
        """By drafter, the plan with most tokens per second for a single sequence, of those whose loss it could bear."""
        rated: Rated = {}
        for name in self.drafters:
            offer = self._offer(view, name)
            if offer is None:
                continue
            cap, source, shared = offer
            toll = self._catch_up_cost(view, name)
            options = self._ending_option if shared.calibrated else self._fixed_options
            for k, nodes, rate in options(view, source, shared, cap):
                rate = rate / (1.0 + rate * toll) if toll else rate
                if name not in rated or rate > rated[name].rate:
                    rated[name] = Candidate(rate, [DraftPlan(name, k, nodes=nodes)])
        return rated

    def _ending_option(
        self, view: DraftContext, source: Source, shared: DrafterStats, cap: int
    ) -> Iterator[tuple[int, int, float]]:
        """K, tokens of a tree and tokens per second. For drafts that end themselves K does not determine the gain: past
        cycles do."""
        times = self.cost.curve(source.drafter, 1, view.context)
        most = min(cap, self.cost.reach(source.drafter, 1, view.context, self.tuning.sure))
        top = self._risk(view.state, shared, times, most)
        # near its limit of losses: one row more than the chain would have
        nodes = 0 if not shared.proven else view.nodes if top == most else min(view.nodes, top + 1)
        if top:
            yield top, nodes if nodes > 1 else 0, self._yield(view.state, source, shared, times)

    def _fixed_options(
        self, view: DraftContext, source: Source, shared: DrafterStats, cap: int
    ) -> Iterator[tuple[int, int, float]]:
        """The same for the best K, of a chain and of a tree of a fixed size."""
        name = source.drafter
        expected = self._expected(view.state, source, shared)
        kinds = [(0, cap, 1.0)]
        if view.nodes >= TIMED and shared.proven and self.cost.has_trees(name):
            kinds.append((view.nodes, min(cap, DEEPEST), shared.in_trees / shared.in_chains))
        for nodes, deepest, lift in kinds:
            curve = self.cost.curve(name, 1, view.context, nodes > 0)
            pairs = zip(expected[1 : self._risk(view.state, shared, curve, deepest) + 1], curve[1:])
            rates = [(1.0 + lift * (tokens - 1.0)) / seconds for tokens, seconds in pairs]
            if rates:
                yield rates.index(max(rates)) + 1, nodes, max(rates)

    def _catch_up_cost(self, view: DraftContext, name: str) -> float:
        """Seconds per output token that a drafter's reading of the text costs within the tokens left."""
        if not view.unread:
            return 0.0
        return view.unread * self.cost.reading.get(name, 0.0) / max(1, min(view.remaining, self.tuning.horizon))

    def _yield(self, state: ControllerState, source: Source, shared: DrafterStats, times: Sequence[float]) -> float:
        """Tokens per second of drafts that end themselves in this request."""
        # nothing was drafted yet: start from the gain of the best fixed K by the profile
        if shared.worth is None:
            expected = self._expected(state, source, shared)
            k = max(range(1, len(expected)), key=lambda j: expected[j] / times[j])
            shared.worth = CycleStats(expected[k], k, k, self.tuning.yield_weight)
        name = source.drafter
        mine = state.yields.get(name) or state.yields.setdefault(name, CycleStats())
        made, verified, drafted = mine.beside(shared.worth, self.tuning.yield_weight)
        return made / (at_k(times, verified) + (drafted - verified) * self.cost.further(name))

    def _ending(self, view: DraftContext, choice: DraftPlan, context: int, size: int, rate: float) -> DraftPlan:
        """The confidence at which a draft should end: a further token must be worth, at this rate, the time it adds."""
        name = choice.drafter
        tuning = self.tuning
        if name is None or name == "ngram" or not self.acceptance[Source(name, 0, view.adapter)].calibrated:
            return choice
        k = max(2, self.cost.reach(name, size, context, tuning.sure))
        verify = self.cost.curve(None, size, context)
        whole = self.cost.curve(name, size, context)
        row = (verify[k] - verify[0]) / k / size
        token = (whole[k] - whole[1]) / (k - 1) / size
        stop = rate * token / tuning.next_token
        drop = rate * row
        if not choice.nodes:
            return choice._replace(stop=stop, drop=drop)
        prices = tuple(rate * (t - verify[0]) for t in verify)
        return choice._replace(stop=stop, drop=drop / 2, prices=prices)  # costs decide the dropping

    def _offer(self, view: DraftContext, name: str) -> tuple[int, Source, DrafterStats] | None:
        """How many tokens this drafter may offer, its statistics and their key; None: none."""
        cap = min(view.drafter_available.get(name, 0), MAX_DRAFT, view.remaining - 1)
        if cap <= 0:
            return None
        source = Source(name, match_range(view.match_len) if name == "ngram" else 0, view.adapter)
        shared = self.acceptance[source]
        if shared.judged < 8 and not self.cost.free(name) and not shared.carded:
            cap = min(cap, 2 + shared.accepted)  # unproven: drafts grow as tokens are accepted
        return cap, source, shared

    def _expected(self, state: ControllerState, source: Source, shared: DrafterStats) -> list[float]:
        expected = state.expected.get(source)
        if expected is None:
            arm = state.arms.get(source)
            chain = shared.a if arm is None else arm.estimate(shared.a, self.tuning.request_weights)
            expected = [1.0]
            path = 1.0
            for a in chain:
                path *= a
                expected.append(expected[-1] + path)
            state.expected[source] = expected
        return expected

    def _risk(self, state: ControllerState, shared: DrafterStats, times: Sequence[float], cap: int) -> int:
        """The longest draft whose loss this request could bear: without any acceptance it loses a few percent."""
        start, rate = self.tuning.risk if shared.proven else self.tuning.unproven_risk
        allowed = (state.loss_budget + start + rate * state.tokens) * times[0]
        k = cap
        while k > 0 and times[k] - times[0] > allowed:
            k -= 1
        return k

    def _maybe_probe(self, view: DraftContext, bookings: CycleBookings) -> DraftPlan:
        """A token of the drafter that costs least. It does not end early: a token left out would not be measured."""
        offered = [name for name in self.drafters if self._offer(view, name) is not None]
        if not offered:
            return NO_DRAFT
        tuning = self.tuning
        size = len(bookings.views)
        context = bookings.context
        name = min(offered, key=lambda name: self.cost.curve(name, size, context)[1])
        times = self.cost.curve(name, size, context)
        reading = self._catch_up_cost(view, name) * min(view.remaining, tuning.horizon)
        state = view.state
        bookings.waited.append(state)
        if state.wait > 1 or self._explored + times[1] - times[0] + reading > tuning.explore * self._time:
            return NO_DRAFT
        bookings.probing = state
        return DraftPlan(name, 1)

    def reuse(self, states: Sequence[ControllerState], match_len: int = 0) -> list[DraftPlan] | None:
        """The last plan, if it is still valid for this batch (of a single sequence: unless it found a longer match);
        None: propose again. Planning takes a few percent of a step, so a plan is kept for some steps if the batch
        drafts, and for one, three, seven, then fifteen while the same sequences decode plainly. The caller shortens a
        draft that has become longer than the remaining output, and commits it as a `CyclePlan` that is `reused`."""
        if self._rest == 0 or self._resting != states or (len(states) == 1 and match_range(match_len) > self._match):
            return None
        return self._held

    def _hold(self, seqs: Sequence[DraftContext], plans: list[DraftPlan], once: bool, gained: float) -> None:
        """How long this plan is kept; `once`: not at all. gained: by the first request so far, in plain steps."""
        tuning = self.tuning
        who = [view.state for view in seqs]
        if len(seqs) == 1:  # a request near its limit of losses is planned every cycle
            keeps = not once and plans[0].stop and gained > tuning.risk[0]
            self._rest = tuning.hold_one if keeps else 0
            self._pause = 0
            self._match = match_range(seqs[0].match_len)
        elif once:
            self._rest = self._pause = 0
        elif any(plan.k for plan in plans):
            self._rest = tuning.hold + len(who) // tuning.hold_many
            self._pause = 0
        else:
            self._rest = self._pause = min(tuning.rest, 2 * self._pause + 1) if who == self._resting else 1
        self._resting = who
        self._held = plans

    def _rate_batch(self, seqs: Sequence[DraftContext], context: int) -> Rated:
        """By drafter that takes time (at most one runs in a cycle; free ones always may), the plan with most tokens per
        second for the whole batch: within a maximum K for all, each sequence's K after which a token is worth less than
        its row costs."""
        size = len(seqs)
        tuning = self.tuning
        verify = np.asarray(self.cost.curve(None, size, context))
        rated: Rated = {}
        for runs in [*(name for name in self.drafters if not self.cost.free(name)), None]:
            rows: list[list[float]] = []
            owners: list[str | None] = []
            for view in seqs:
                row = [1.0]
                owner = None
                for name in self.drafters:
                    if name == runs or self.cost.free(name):
                        offer = self._offer(view, name)
                        if offer is None or self._catch_up_cost(view, name) > tuning.batch_catch_up * verify[0] / size:
                            continue
                        cap, source, shared = offer
                        expected = self._expected(view.state, source, shared)
                        times = self.cost.curve(name, size, context)
                        cap = self._risk(view.state, shared, times, cap)
                        if cap > 0 and expected[cap] > row[-1] * (1.0 if owner is None else tuning.rival):
                            row = expected[: cap + 1]
                            owner = name
                # a K beyond the cap yields nothing, so it is never chosen
                rows.append(row + [0.0] * (MAX_DRAFT + 1 - len(row)))
                owners.append(owner)
            if (runs is not None and runs not in owners) or not any(owners):
                continue
            paid = np.asarray([o == runs for o in owners])
            drafting = np.zeros(MAX_DRAFT + 1)
            if runs is not None:
                drafting = np.asarray(self.cost.draft_curve(CostPart("draft", runs), max(1, int(paid.sum()))))
            fill = self.acceptance[Source(runs)].fill if runs is not None else 1.0
            rate, ks = choose_k(np.asarray(rows), paid, verify, drafting, fill)
            plans = [DraftPlan(o, k) if k and o else NO_DRAFT for o, k in zip(owners, ks, strict=True)]
            if runs is None or any(plan.drafter == runs for plan in plans):
                rated[runs] = Candidate(rate, plans)
        return rated

    def _note(self, bookings: CycleBookings, plans: list[DraftPlan]) -> None:
        """Account for the cycle about to run: its cost compared with a plain one."""
        seqs = bookings.views
        context = bookings.context
        size = len(seqs)
        only = plans[0]
        plain = self.cost.curve(None, len(seqs), context)[0]
        if size == 1:
            tree = only.nodes > 0 and self.cost.has_trees(only.drafter or "")
            curve: Sequence[float] = self.cost.curve(only.drafter, 1, context, tree)
        else:
            curve = [self.cost.mixed([(plan.drafter, plan.k, plan.k) for plan in plans], context)]
        for view, plan in zip(seqs, plans, strict=True):
            state = view.state
            state.curve = curve
            state.plain = plain / size
            state.step = plain
            state.planned = plan.k
            state.fixed = view.fixed
            match = match_range(view.match_len) if plan.drafter == "ngram" else 0
            state.source = Source(plan.drafter or "", match, view.adapter)
            state.committed = True
            self._time += curve[min(plan.k, len(curve) - 1)] / size

    # ---- after a cycle ----
    def observe(
        self,
        state: ControllerState,
        drafter: str | None,
        drafted: int,
        accepted: int,
        confidence: Sequence[float] | None = None,
        tree: VerifiedTree | None = None,
    ) -> None:
        """The outcome of one sequence's draft (None or 0: a plain step). `drafted` counts all tokens of a tree."""
        if not 0 <= accepted <= drafted <= MAX_DRAFT:
            raise OutriderError(f"accepted {accepted} of {drafted} drafted tokens, at most {MAX_DRAFT} in all")
        if self.planned:
            outcome = DraftOutcome(state, drafter, drafted, accepted, confidence, tree)
            self._pending.append(partial(self._learn, outcome))

    def observe_step(
        self, batch: int, k: float, context: int, seconds: float, drafter: str | None, tree: bool = False
    ) -> None:
        """The wall time of a cycle without prompt rows. k: tokens per sequence; tree: depth of fixed trees."""
        if not self.planned:
            return
        self._pending.append(partial(self._time_step, batch, k, context, seconds, drafter, tree))
        if len(self._pending) >= self.tuning.untold:
            self.apply_observations()

    def apply_observations(self) -> None:
        """Learn from the observations since the last plan, several cycles at once: between two passes over the weights
        all code is out of the CPU caches, and the second call of a function costs a fraction of the first."""
        # each once, even if one raises
        pending = self._pending
        self._pending = []
        for learn in pending:
            learn()

    def _learn(self, outcome: DraftOutcome) -> None:
        state, drafter, drafted, accepted, confidence, tree = outcome
        steps = tree.steps if tree is not None else drafted if confidence is None else len(confidence)
        self._cycle.append((drafter, drafted, steps))
        if not state.committed:  # never planned here: its K was chosen elsewhere
            return
        state.tokens += accepted + 1
        if drafter is None or state.fixed or (drafted == 0 and confidence is None):
            return
        fixed = tree is not None and confidence is None  # its size, and so its cost: by depth, not by tokens
        seconds = state.curve[min(state.planned if fixed else drafted, len(state.curve) - 1)]
        if confidence is not None and steps != drafted and len(state.curve) > 1:  # a token left out took time as well
            seconds += (steps - drafted) * self.cost.further(drafter)
        state.loss_budget += accepted + 1 - seconds / state.step
        if state.probing:
            # The whole batch waits for a probe, and only this sequence gains by it.
            self._explored = max(0.0, self._explored + seconds - state.step - accepted * state.plain)
            state.probing = False
        source = state.source if state.source.drafter == drafter else Source(drafter, 0, state.source.adapter)
        shared = self.acceptance[source]
        tuning = self.tuning
        if shared.worth is not None:
            shared.worth.add(accepted + 1, drafted, steps, tuning.keep)
            if drafter in state.yields:
                state.yields[drafter].add(accepted + 1, drafted, steps, tuning.request_keep)
        if tree is not None and confidence is not None:
            # Its main chain counts like a chain; its branches measure the value of branches.
            for j, right in tree.judged():
                shared.judge(confidence[j], right)
            drafted = tree.chain
            accepted = tree.chain_accepted
            confidence = confidence[: tree.chain]
        elif tree is not None:  # a main chain left out for other branches had a low confidence: it counts as rejected
            shared.branched(accepted, tree.chain_accepted)
            drafted = max(tree.chain, state.planned)
            accepted = tree.chain_accepted
        # An earlier plan may have been run again: it may have drafted, even if no token was verified.
        planned = max(1, state.planned, drafted)
        shared.add(planned, drafted, accepted, confidence)
        arm = state.arms.get(source) or state.arms.setdefault(source, PositionStats())
        # A draft that ended itself emits no more than one that was rejected at that place, so it counts as rejected
        # there.
        arm.add(drafted if accepted < drafted or confidence is None else planned, accepted, tuning.request_keep)
        state.expected.pop(source, None)
        if shared.judged >= tuning.broken_after and (shared.judged == tuning.broken_after or shared.judged % 64 == 0):
            self._judge(source, shared)

    def _judge(self, source: Source, shared: DrafterStats) -> None:
        rate = shared.arm.good[0] / shared.arm.seen[0]
        about = (source.drafter, source.adapter)
        if source.drafter == "ngram" or rate >= self.tuning.broken_below or about in self._told:
            return
        self._told.add(about)
        target = f"this target with adapter {source.adapter!r}" if source.adapter else "this target"
        self.warnings.append(
            f"drafter {source.drafter!r} does not fit {target}: {shared.accepted} tokens accepted in {shared.judged} "
            "drafts; decoding plainly (another base model, a fine-tune or a harsh quantisation does this; "
            "--drafter none silences it)"
        )

    def _time_step(self, batch: int, k: float, context: int, seconds: float, drafter: str | None, tree: bool) -> None:
        cycle = self._cycle[-batch:]
        self._cycle = []
        mixed = None
        if batch > 1 and len(cycle) == batch and len(set(cycle)) > 1:
            mixed = self.cost.mixed(cycle, context)
        elif batch == 1 and drafter is not None and cycle and cycle[0][2] != cycle[0][1] and cycle[0][0] == drafter:
            seconds -= (cycle[0][2] - cycle[0][1]) * self.cost.further(drafter)  # some were left out
        self.cost.observe(batch, k, context, seconds, drafter, mixed, tree)

    def trust(self, drafter: str, adapter: str = "") -> list[float]:
        """Acceptance by confidence, 16 bins: index with int(confidence · 16), at most 15. The list never changes."""
        return self.acceptance[Source(drafter, 0, adapter)].trust


def choose_k(
    tokens: Array, dear: NDArray[np.bool_], verify: Array, drafting: Array, fill: float
) -> tuple[float, list[int]]:
    """The best rate in tokens per second, and the K of each sequence that reaches it. tokens [B, 17]: expected tokens
    of a cycle by K; dear [B]: sequences whose drafts take time, `drafting` [17] seconds by K, of which a share `fill`
    is verified; verify [17]: seconds of the target's step by the mean K."""
    size = len(tokens)
    steps = np.arange(MAX_DRAFT + 1)
    filled = np.where(dear, fill, 1.0)[:, None]
    rate = 0.0
    ks = [0] * size
    worth = size / verify[0]
    for _ in range(2):
        price = worth * (verify[-1] - verify[0]) / MAX_DRAFT / size
        net = np.where(tokens > 0.0, tokens - price * steps * filled, -1.0)
        top = np.maximum.accumulate(net, axis=1)
        chosen = np.maximum.accumulate(np.where(net >= top, steps, 0), axis=1)  # [B, 17]: K by widest K allowed
        made = np.take_along_axis(tokens, chosen, axis=1).sum(axis=0)  # [17]
        width = (chosen * filled).mean(axis=0)
        depth = np.where(dear[:, None], chosen, 0).max(axis=0)
        rates = made / (np.interp(width, steps, verify) + drafting[depth] + PLANNING)
        at = int(rates.argmax())
        if rates[at] > rate:
            rate = float(rates[at])
            ks = [int(k) for k in chosen[:, at]]
        worth = rate
    return rate, ks
