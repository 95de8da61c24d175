"""Chooses drafter and K for every sequence in every cycle, so that speculation is never slower. Pure, torch-free.

`PlanRater` (rating.py) says how many tokens per second each choice yields; the controller takes the best one, jointly
over the batch, and learns from what the target accepts. Acceptance is exponentially weighted per request, drawn towards
the estimate over all requests with the same adapter, which starts from the drafter's profile.

Safety: a new drafter starts with short drafts; plain decoding is left only for a predicted gain of more than `margin`;
a request that has lost time must earn it back before it may risk more (`ControllerState.loss_budget`); exploring costs
at most `explore` of all time. All numbers are in `Tuning`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..types import MAX_DRAFT, NO_DRAFT, DraftPlan, OutriderError
from .acceptance import AcceptanceProfile, AcceptanceTable, DrafterStats, PositionStats, Source
from .cost import CostTable, SequenceDraft
from .ngram import NGRAM
from .plan import (
    Candidate,
    ControllerState,
    CycleBookings,
    CyclePlan,
    DraftContext,
    DraftOutcome,
    StepTiming,
    VerifiedTree,
)
from .rating import PlanRater, Rated
from .tuning import Tuning, match_range


class HeldPlan:
    """The plan of the last batch, which is valid for some more steps: planning takes a few percent of a step.

    A plan is held for some steps if the batch drafts, and for one, three, seven, then fifteen while the same sequences
    decode plainly.
    """

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.states: list[ControllerState] = []  # of the batch that it was made for
        self.plans: list[DraftPlan] = []
        self.steps_left = 0
        self.plain_steps = 0  # for how many steps the last plan without drafts was held; 0: the last one had drafts
        self.match = 0  # range of the n-gram match that a single sequence had

    def valid_for(self, states: Sequence[ControllerState], match_len: int) -> bool:
        if self.steps_left == 0 or self.states != states:
            return False
        return len(states) > 1 or match_range(match_len) <= self.match

    def hold(self, views: Sequence[DraftContext], plans: list[DraftPlan], *, once: bool, budget: float) -> None:
        """Hold this plan; `once`: for no further step. budget: the first request's `loss_budget` in plain steps."""
        states = [view.state for view in views]
        same_batch = states == self.states
        if len(views) == 1:
            # a request near its limit of losses is planned in every cycle
            holds = not once and plans[0].stop > 0.0 and budget > self.tuning.risk[0]
            self.steps_left = self.tuning.hold_one if holds else 0
            self.plain_steps = 0
            self.match = match_range(views[0].match_len)
        elif once:
            self.steps_left = 0
            self.plain_steps = 0
        elif any(plan.k for plan in plans):
            self.steps_left = self.tuning.hold + len(views) // self.tuning.hold_many
            self.plain_steps = 0
        else:
            self.plain_steps = min(self.tuning.hold_plain, 2 * self.plain_steps + 1) if same_batch else 1
            self.steps_left = self.plain_steps
        self.states = states
        self.plans = plans


class Controller:
    """`propose` and `commit` before a cycle; `observe` per sequence and `observe_step` once after it. What it knows of
    one sequence is in that sequence's `ControllerState`."""

    def __init__(
        self,
        cost: CostTable,
        drafters: tuple[str, ...],
        profiles: Mapping[str, AcceptanceProfile] | None = None,
        tuning: Tuning = Tuning(),
        copying: frozenset[str] = frozenset({NGRAM}),
    ) -> None:
        """copying: drafters that repeat earlier text. How often they are right depends on the length of the match, and
        not on the target."""
        self.cost = cost
        self.copying = copying
        self.drafters = drafters
        self.tuning = tuning
        self.acceptance = AcceptanceTable(tuning, profiles or {}, lambda name: self.cost.free(name), copying=copying)
        self.rater = PlanRater(cost=cost, acceptance=self.acceptance, drafters=drafters, copying=copying, tuning=tuning)
        self.warnings: list[str] = []  # each reported once, in the order of detection
        self.planned = False  # nothing is learnt before the first plan
        self._warned: set[tuple[str, str]] = set()  # (drafter, adapter) that do not fit
        self._time = 0.0  # all cycles so far, in table seconds
        self._explored = 0.0  # of it, lost to probes
        self._network_drafter: str | None = None  # of two, the one in use
        self._comparison_interval = 0  # cycles between two in which the other one drafts
        self._comparison_wait = 0  # cycles until the next of those
        self._cycle: list[SequenceDraft] = []  # the outcome of the cycle under way, a sequence each
        self._held_plan = HeldPlan(tuning)
        self._pending: list[DraftOutcome | StepTiming] = []  # observations to be learnt from

    def replace_costs(self, cost: CostTable) -> None:
        """Use these times from now on."""
        self.cost = cost
        self.rater.cost = cost

    def new_state(self) -> ControllerState:
        """The state of a new sequence."""
        return ControllerState(self.tuning.probe_first)

    # ---- before a cycle ----------------------------------------------------------------------------------------------
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
        batch = len(seqs)
        context = sum(view.context for view in seqs) // batch
        rated = self.rater.rate(seqs, context)
        margin = self.tuning.margin if batch == 1 else self.tuning.batch_margin
        plain_rate = batch / self.cost.curve(None, batch, context)[0] * (1.0 + margin)
        plain = Candidate(plain_rate, [NO_DRAFT] * batch)
        best = max([plain, *rated.values()], key=lambda candidate: candidate.rate)
        bookings = CycleBookings(seqs, context)
        rival = self._rival(rated, best, bookings) if len(rated) > 1 else None
        chosen = best if rival is None else rival
        plans = [
            self.rater.with_ending(plan, view=view, context=context, batch=batch, rate=best.rate)
            for view, plan in zip(seqs, chosen.plans)
        ]
        if best is plain:
            for i, view in enumerate(seqs):
                plans[i] = self._maybe_probe(view, bookings)
                if plans[i].k:
                    break  # one probe per cycle, since the whole batch pays for it
        elif batch == 1:
            bookings.drafting_alone = True
        return CyclePlan(plans, bookings)

    def commit(self, cycle: CyclePlan) -> None:
        """Book a proposal whose cycle is about to run: probes, comparisons, expected times, how long it is held."""
        self.planned = True
        if cycle.reused:
            self._held_plan.steps_left -= 1
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
        self._book_times(bookings, cycle.plans)
        once = bookings.compares or any(view.state.probing for view in bookings.views)
        budget = bookings.views[0].state.loss_budget
        self._held_plan.hold(bookings.views, cycle.plans, once=once, budget=budget)

    def reuse(self, states: Sequence[ControllerState], match_len: int = 0) -> list[DraftPlan] | None:
        """The last plan, if it is still valid for this batch (of a single sequence: unless it has a longer match now);
        None: propose again. The caller shortens a draft that has become longer than the remaining output, and commits
        it as a `CyclePlan` that is `reused`."""
        return self._held_plan.plans if self._held_plan.valid_for(states, match_len) else None

    def _rival(self, rated: Rated, best: Candidate, bookings: CycleBookings) -> Candidate | None:
        """In some cycles the network drafter not in use drafts: they teach about it, count as probes, become rarer."""
        tuning = self.tuning
        network = {name: rating for name, rating in rated.items() if name and not self.cost.free(name)}
        in_use = next((name for name, rating in network.items() if rating is best), None)
        if in_use is None or len(network) == 1:
            return None
        bookings.network_drafter = in_use
        wait = self._comparison_wait if in_use == self._network_drafter else tuning.compare_first
        rival = max((rating for rating in network.values() if rating is not best), key=lambda rating: rating.rate)
        drafts = [SequenceDraft(plan.drafter, verified=plan.k, drafted=plan.k) for plan in rival.plans]
        seconds = self.cost.mixed(drafts, bookings.context)
        loss = max(0.0, seconds * (1.0 - rival.rate / best.rate))
        if wait > 1 or self._explored + loss > tuning.explore * self._time:
            return None
        bookings.compares = True
        bookings.comparison_loss = loss
        return rival

    def _book_comparison(self, bookings: CycleBookings, in_use: str) -> None:
        tuning = self.tuning
        if in_use != self._network_drafter:
            self._network_drafter = in_use
            self._comparison_interval = tuning.compare_first
            self._comparison_wait = tuning.compare_first
        self._comparison_wait -= 1
        if bookings.compares:
            self._explored += bookings.comparison_loss
            self._comparison_interval = min(tuning.compare_last, 2 * self._comparison_interval)
            self._comparison_wait = self._comparison_interval

    def _maybe_probe(self, view: DraftContext, bookings: CycleBookings) -> DraftPlan:
        """A token of the drafter that costs least. It does not end early: a token left out would not be measured."""
        offered = [name for name in self.drafters if self.rater.offer(view, name) is not None]
        if not offered:
            return NO_DRAFT
        tuning = self.tuning
        batch = len(bookings.views)
        context = bookings.context
        name = min(offered, key=lambda name: self.cost.curve(name, batch, context)[1])
        times = self.cost.curve(name, batch, context)
        reading = self.rater.catch_up_seconds(view, name) * min(view.remaining, tuning.horizon)
        state = view.state
        bookings.waited.append(state)
        if state.wait > 1 or self._explored + times[1] - times[0] + reading > tuning.explore * self._time:
            return NO_DRAFT
        bookings.probing = state
        return DraftPlan(name, 1)

    def _book_times(self, bookings: CycleBookings, plans: list[DraftPlan]) -> None:
        """Note what the cycle about to run is expected to take, compared with a plain one."""
        views = bookings.views
        context = bookings.context
        batch = len(views)
        plain = self.cost.curve(None, batch, context)[0]
        if batch == 1:
            drafter = plans[0].drafter
            tree = plans[0].nodes > 0 and self.cost.has_trees(drafter or "")
            curve: Sequence[float] = self.cost.curve(drafter, 1, context=context, tree=tree)
        else:
            drafts = [SequenceDraft(plan.drafter, verified=plan.k, drafted=plan.k) for plan in plans]
            curve = [self.cost.mixed(drafts, context)]
        for view, plan in zip(views, plans, strict=True):
            state = view.state
            state.curve = curve
            state.plain = plain / batch
            state.step = plain
            state.planned = plan.k
            state.fixed = view.fixed
            state.source = self.rater.source(view, plan.drafter or "")
            state.committed = True
            self._time += curve[min(plan.k, len(curve) - 1)] / batch

    # ---- after a cycle -----------------------------------------------------------------------------------------------
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
            outcome = DraftOutcome(
                state=state, drafter=drafter, drafted=drafted, accepted=accepted, confidence=confidence, tree=tree
            )
            self._pending.append(outcome)

    def observe_step(self, timing: StepTiming) -> None:
        """The wall time of a cycle without prompt rows, after `observe` of each of its sequences."""
        if not self.planned:
            return
        self._pending.append(timing)
        if len(self._pending) >= self.tuning.max_pending:
            self.apply_observations()

    def apply_observations(self) -> None:
        """Learn from the observations since the last plan, several cycles at once: between two passes over the weights
        all code is out of the CPU caches, and the second call of a function costs a fraction of the first."""
        pending = self._pending
        self._pending = []  # first, so that each is learnt from once even if one raises
        for observation in pending:
            if isinstance(observation, DraftOutcome):
                self._learn(observation)
            else:
                self._time_step(observation)

    def trust(self, drafter: str, adapter: str = "") -> list[float]:
        """Acceptance by confidence, 16 bins: index with int(confidence · 16), at most 15. The list never changes."""
        return self.acceptance[Source(drafter, 0, adapter)].trust

    def _learn(self, outcome: DraftOutcome) -> None:
        state = outcome.state
        num_steps = outcome.num_drafter_steps
        draft = SequenceDraft(outcome.drafter, verified=outcome.drafted, drafted=num_steps)
        self._cycle.append(draft)
        if not state.committed:  # never planned here: its K was chosen elsewhere
            return
        state.tokens += outcome.accepted + 1
        if outcome.drafter is None or state.fixed or (outcome.drafted == 0 and outcome.confidence is None):
            return
        self._book_gain(outcome, outcome.drafter, num_steps)
        self._learn_acceptance(outcome, outcome.drafter, num_steps)

    def _book_gain(self, outcome: DraftOutcome, drafter: str, num_steps: float) -> None:
        """Credit the request with the plain steps that the draft won, or charge what it lost."""
        state = outcome.state
        num_tokens = outcome.accepted + 1
        k = state.planned if outcome.is_fixed_tree else outcome.drafted  # a fixed tree costs by its depth
        seconds = state.curve[min(k, len(state.curve) - 1)]
        if outcome.confidence is not None and num_steps != outcome.drafted and len(state.curve) > 1:
            # a token that was drafted and left out took time as well
            seconds += (num_steps - outcome.drafted) * self.cost.further(drafter)
        state.loss_budget += num_tokens - seconds / state.step
        if state.probing:  # the whole batch waits for a probe, and only this sequence gains by it
            self._explored = max(0.0, self._explored + seconds - state.step - outcome.accepted * state.plain)
            state.probing = False

    def _learn_acceptance(self, outcome: DraftOutcome, drafter: str, num_steps: float) -> None:
        state = outcome.state
        tuning = self.tuning
        tree = outcome.tree
        drafted = outcome.drafted
        accepted = outcome.accepted
        confidence = outcome.confidence
        source = state.source if state.source.drafter == drafter else Source(drafter, 0, state.source.adapter)
        stats = self.acceptance[source]
        if stats.worth is not None:
            stats.worth.add(emitted=accepted + 1, verified=drafted, drafted=num_steps, decay=tuning.keep)
            if drafter in state.yields:
                in_request = state.yields[drafter]
                in_request.add(emitted=accepted + 1, verified=drafted, drafted=num_steps, decay=tuning.request_keep)
        if tree is not None and confidence is not None:
            # Its main chain counts like a chain; its branches measure the value of branches.
            for j, right in tree.judged():
                stats.judge(confidence[j], right)
            drafted = tree.chain
            accepted = tree.chain_accepted
            confidence = confidence[: tree.chain]
        elif tree is not None:  # a main chain left out for other branches had a low confidence: it counts as rejected
            stats.branched(accepted, tree.chain_accepted)
            drafted = max(tree.chain, state.planned)
            accepted = tree.chain_accepted
        # An earlier plan may have been run again: it may have drafted, even if no token was verified.
        planned = max(1, state.planned, drafted)
        stats.add(planned=planned, drafted=drafted, accepted=accepted, confidence=confidence)
        positions = state.arms.get(source)
        if positions is None:
            positions = PositionStats()
            state.arms[source] = positions
        # A draft that ended itself emits no more than one rejected at that place, so it counts as rejected there.
        num_judged = drafted if accepted < drafted or confidence is None else planned
        positions.add(num_judged, accepted, tuning.request_keep)
        state.expected.pop(source, None)
        if stats.judged >= tuning.broken_after and (stats.judged == tuning.broken_after or stats.judged % 64 == 0):
            self._warn_if_broken(source, stats)

    def _warn_if_broken(self, source: Source, stats: DrafterStats) -> None:
        rate = stats.arm.good[0] / stats.arm.seen[0]
        key = (source.drafter, source.adapter)
        if source.drafter in self.copying or rate >= self.tuning.broken_below or key in self._warned:
            return
        self._warned.add(key)
        target = f"this target with adapter {source.adapter!r}" if source.adapter else "this target"
        self.warnings.append(
            f"drafter {source.drafter!r} does not fit {target}: {stats.accepted} tokens accepted in {stats.judged} "
            "drafts; decoding plainly (another base model, a fine-tune or a harsh quantisation does this; "
            "--drafter none silences it)"
        )

    def _time_step(self, timing: StepTiming) -> None:
        cycle = self._cycle[-timing.batch :]
        self._cycle = []
        predicted = None
        seconds = timing.seconds
        if timing.batch > 1:
            if len(cycle) == timing.batch and len(set(cycle)) > 1:
                predicted = self.cost.mixed(cycle, timing.context)
        elif timing.drafter is not None and cycle and cycle[0].drafter == timing.drafter:
            num_left_out = cycle[0].drafted - cycle[0].verified
            if num_left_out:
                seconds -= num_left_out * self.cost.further(timing.drafter)
        if seconds != timing.seconds:
            timing = timing._replace(seconds=seconds)
        self.cost.observe(timing, predicted)
