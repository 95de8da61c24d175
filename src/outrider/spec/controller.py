"""Chooses the drafter and K for every sequence, every cycle, so that speculation is never slower. Pure, torch-free.

A cycle that drafts K tokens yields E(K) = 1 + Σ_{j≤K} a_1·…·a_j tokens and costs C(K) seconds; the controller picks
the K in 0..16 (0 is plain decoding) with the most tokens a second, jointly over the batch. C comes from the
measured `CostTable`. a_j, the chance that position j is right given that all before it were, is learnt from what
the target accepted: exponentially weighted per request, drawn towards the running estimate over all requests, which
itself starts from the model card's prior. A rejection hides the positions behind it; they are not counted.

Verification is coupled (same seed, same text whatever was drafted), so nothing decided here can change a text.

Safety, in order: a new drafter starts with short drafts until something was accepted; plain decoding is left only
for a predicted gain of more than `MARGIN`; a request that has lost time to drafting must earn it back before it may
risk more (`SeqState.loss_budget`); exploring may cost at most `EXPLORE` of all time, with intervals that double.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from ..types import MAX_DRAFT, NO_DRAFT, DraftPlan, OutriderError
from .acceptance import BINS, KEEP_CYCLES, CycleStats, DrafterStats, PositionStats
from .batch_k import choose_k
from .cost import CostTable
from .plan import DEEPEST, TIMED, DraftContext, SeqState, VerifiedTree, branching

DEFAULT_PRIOR = (
    0.65,
    0.70,
    0.72,
    0.74,
    0.76,
)  # a_j where no drafter's card says better; later positions take the last value
# The same for copies of earlier text, by the length of the match (see _bucket), a little below what answers of a
# 135M model show: the longer a copy has lasted, the surer it goes on.
NGRAM_PRIOR = ((0.45, 0.6, 0.7), (0.6, 0.72, 0.78), (0.75, 0.8, 0.85), (0.86, 0.88, 0.9), (0.95, 0.97))
# how many observations of this request the estimate over all requests is worth
REQUEST_WEIGHTS = (8.0,) * MAX_DRAFT
REQUEST_KEEP = 0.97  # what an observation in this request still weighs when the next one is made
RISK, RISK_RATE = (
    1.0,
    0.04,
)  # plain steps a request may lose to drafting: from the start, and for each token it has emitted
# the same while nothing says that the drafter is any good: 3 % of an answer of 32 tokens
UNPROVEN_RISK = (0.25, 0.02)
MARGIN = 0.01  # predicted gain below which a single sequence keeps decoding plainly
# The same for a batch: so much, more for each sequence in it (every one of them pays for a wrong guess), and no
# more than this.
BATCH_MARGIN = (0.02, 0.006, 0.12)
REST, HOLD = 15, 2  # how many steps a batch's plan is kept at most: while it decodes plainly, and while it drafts
# sequences that make a drafting batch's plan last a step longer: planning takes time by the sequence
HOLD_MANY = 16
HOLD_ONE = 3  # the same for a single sequence whose drafts end themselves
UNTOLD = 16  # observations that may pile up before they are learnt from
HYSTERESIS = 0.01  # predicted gain below which the last choice is kept
EXPLORE = 0.008  # share of all time that probing may cost
PROBE_FIRST, PROBE_LAST = 8, 512  # cycles between probes: doubles while they fail
BROKEN_AFTER, BROKEN_BELOW = (
    12,
    0.02,
)  # first positions judged, and the acceptance under which a drafter is called broken
YIELD_WEIGHT = 10.0  # how many cycles of this request the yield over all requests is worth
HORIZON = 128  # tokens of an answer, where it may be longer, that a drafter's reading of its text must pay in
BATCH_CATCH_UP = 0.15  # plain time that reading may take of a sequence in a batch
NEXT = 0.7  # chance of a token that is not drafted yet, given that all before it are right
# chance of each token in a stretch that the drafter is sure of: says how far a draft that ends itself may reach
SURE = 0.96


class Controller:
    """One per engine. `plan` before a cycle, `observe` per sequence and `observe_step` once after it, `finish` at a
    request's end."""

    def __init__(
        self,
        cost: CostTable,
        drafters: tuple[str, ...],
        prior: Mapping[str, Sequence[float]] | None = None,
        trust: Mapping[str, Sequence[float]] | None = None,
        counts: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """`prior`: each drafter's acceptance by position, `trust`: by its confidence in 16 equal bins, `counts`:
        how many tokens were judged at each position, as its card has them. A prior without counts is taken as it
        is."""
        for name, values in (prior or {}).items():
            if not values or any(not 0.0 <= v <= 1.0 for v in values):
                raise OutriderError(f"prior acceptance of drafter {name!r} must be numbers in [0, 1], one a position")
        self.cost, self.drafters = cost, drafters
        for name, values in (trust or {}).items():
            if len(values) != BINS or any(not 0.0 <= v <= 1.0 for v in values):
                raise OutriderError(f"trust of drafter {name!r} must be {BINS} numbers in [0, 1]")
        self._prior, self._trust, self._counts = dict(prior or {}), dict(trust or {}), dict(counts or {})
        self._reaches: dict[tuple[str, int, int], tuple[Sequence[float], int]] = {}
        self._shared: dict[tuple[str, int], DrafterStats] = {}
        self._seqs: dict[str, SeqState] = {}
        self._warnings: list[str] = []
        self._told: set[str] = set()
        self._time = 0.0  # all cycles so far, in table seconds
        self._explored = 0.0  # of it, lost to probes
        self._cycle: list[
            tuple[str | None, int, float]
        ] = []  # of the cycle under way, a sequence each: drafter, tokens verified, drafted
        self._resting: list[str] = []  # the batch that was planned last,
        self._held: list[DraftPlan] = []  # its plan,
        self._rest = 0  # for how many more steps that holds,
        self._pause = 0  # and for how many it held the time before
        self._histogram = [0] * (MAX_DRAFT + 1)
        self._untold: list[Callable[[], None]] = []  # observations to be learnt from

    def fresh(self, drafters: tuple[str, ...]) -> Controller:
        """A controller that has observed nothing yet, with the same priors and a copy of the cost table."""
        cost = CostTable.from_json(self.cost.to_json())
        return Controller(cost, drafters, self._prior, self._trust, self._counts)

    # ---- before a cycle
    # ----------------------------------------------------------------------------------------------
    def plan(self, seqs: Sequence[DraftContext]) -> list[DraftPlan]:
        if len(seqs) == 1:
            return [self._single(seqs[0])]
        self._apply_observations()
        return self._joint_or_rest(seqs) if seqs else []

    def _single(self, view: DraftContext) -> DraftPlan:
        seq = self._seq(view.id)
        if seq.hold > 0 and _bucket(view.match_len) <= seq.match:
            offered = view.drafter_available.get(seq.choice.drafter or "", 0)
            if seq.choice.k <= min(offered, view.remaining - 1):
                seq.hold -= 1
                return seq.choice
        self._apply_observations()
        plain = self.cost.curve(None, 1, view.context)[0]
        base = 1.0 / plain
        best, best_rate = NO_DRAFT, base * (1.0 + MARGIN)
        kept, kept_rate = seq.last, base if seq.last.k == 0 else 0.0
        least: DraftPlan | None = (
            None  # where drafting does not pay: the draft that loses least, which a probe would try
        )
        least_rate = 0.0
        for name in self.drafters:
            cap, key, shared = self._offer(view, name)
            if cap <= 0:
                continue
            times, toll = self.cost.curve(name, 1, view.context), self._catch_up_cost(view, name)
            if (
                shared.calibrated
            ):  # drafts end themselves, so no K says what one brings: what counts is what they have brought
                most = min(cap, self._reach(name, 1, view.context))
                top = self._risk(seq, shared, times, plain, most)
                top_rate = self._with_catch_up(self._yield(seq, name, shared, times), toll)
                # near its limit of losses: one row more than the line would have
                nodes = 0 if not shared.proven else view.nodes if top == most else min(view.nodes, top + 1)
                offer = DraftPlan(name, top, nodes=nodes if nodes > 1 else 0)
                if top > 0 and top_rate > best_rate:
                    best, best_rate = offer, top_rate
                if top > 0 and name == seq.last.drafter:
                    kept, kept_rate = offer, top_rate
            else:
                expected = self._expected(seq, key, shared)
                top, top_rate = 0, 0.0
                kinds = [(0, cap, 1.0, times)]
                if view.nodes >= TIMED and shared.proven and not self.cost.free(branching(name)):
                    kinds.append(
                        (view.nodes, min(cap, DEEPEST), shared.lift, self.cost.curve(branching(name), 1, view.context))
                    )
                for nodes, deepest, lift, curve in kinds:
                    limit = self._risk(seq, shared, curve, plain, deepest)
                    for k in range(1, deepest + 1):
                        rate = self._with_catch_up((1.0 + lift * (expected[k] - 1.0)) / curve[k], toll)
                        if k <= limit and (name, k, nodes) == (seq.last.drafter, seq.last.k, seq.last.nodes):
                            kept_rate = rate
                        if rate > top_rate:
                            top, top_rate = k, rate
                            if k <= limit and rate > best_rate:
                                best, best_rate = DraftPlan(name, k, nodes=nodes), rate
            if top_rate > least_rate:
                least, least_rate = DraftPlan(name, 1 if top_rate < base else max(1, top)), top_rate
        if kept_rate >= best_rate * (1.0 - HYSTERESIS) and (kept.k == 0 or kept_rate > base):
            best = kept
        seq.last = best
        if best.k > 0:
            seq.interval = seq.wait = PROBE_FIRST
            best = self._ending(best, view.context, 1, best_rate)
        elif least is not None:  # a probe's draft goes to its end: tokens left out of it would teach nothing
            loss = self.cost.curve(least.drafter, 1, view.context)[least.k] - plain
            best = self._maybe_probe(
                seq, least, loss + self._catch_up_cost(view, least.drafter or "") * min(view.remaining, HORIZON)
            )
        runs = (
            branching(best.drafter)
            if best.drafter and best.nodes and not self.cost.free(branching(best.drafter))
            else best.drafter
        )
        self._note(view, seq, best, plain, self.cost.curve(runs, 1, view.context), plain)
        seq.choice, seq.match = best, _bucket(view.match_len)
        seq.hold = (
            HOLD_ONE if best.stop and seq.loss_budget > RISK else 0
        )  # a request near its limit of losses is planned every cycle
        return seq.choice

    def _catch_up_cost(self, view: DraftContext, name: str) -> float:
        """Seconds a token of the answer that a drafter's reading of the text so far will have cost: whoever begins
        to draft with it must believe that it pays, in the tokens that are left, or in so many where nobody knows
        how many will come."""
        return (
            view.unread * self.cost.reading.get(name, 0.0) / max(1, min(view.remaining, HORIZON))
            if view.unread
            else 0.0
        )

    @staticmethod
    def _with_catch_up(rate: float, toll: float) -> float:
        return rate / (1.0 + rate * toll) if toll else rate

    def _reach(self, name: str, size: int, context: int) -> int:
        """How far a draft that ends itself may go: the best K in a stretch that the drafter is sure of."""
        curve = self.cost.curve(name, size, context)
        known = self._reaches.get((name, size, context >> 7))
        if known is not None and known[0] is curve:
            return known[1]
        made, path, rates = 1.0, 1.0, [0.0]
        for k in range(1, MAX_DRAFT + 1):
            path *= SURE
            made += path
            rates.append(made / curve[k])
        best = max(range(1, MAX_DRAFT + 1), key=rates.__getitem__)
        self._reaches[name, size, context >> 7] = (curve, best)
        return best

    def _yield(self, seq: SeqState, name: str, shared: DrafterStats, times: Sequence[float]) -> float:
        """Tokens a second that drafts which end themselves bring in this request."""
        # nothing was drafted yet: start from what the best fixed K would bring by the card
        if shared.worth is None:
            expected = self._expected(seq, (name, 0), shared)
            k = max(range(1, len(expected)), key=lambda j: expected[j] / times[j])
            shared.worth = CycleStats(expected[k], k, k, YIELD_WEIGHT)
        mine = seq.yields.get(name) or seq.yields.setdefault(name, CycleStats())
        made, verified, drafted = mine.beside(shared.worth, YIELD_WEIGHT)
        at = min(int(verified), MAX_DRAFT - 1)
        seconds = times[at] + (verified - at) * (times[at + 1] - times[at])
        return made / (seconds + (drafted - verified) * self._further(name))

    def _further(self, drafter: str) -> float:
        """Seconds that one more drafted token takes this drafter, for one sequence."""
        return self.cost.draft(drafter, 1, 2) - self.cost.draft(drafter, 1, 1)

    def _ending(self, choice: DraftPlan, context: int, size: int, rate: float) -> DraftPlan:
        """Where a confident drafter should end: a further token must be worth, at this rate, the time it adds."""
        shared = self._shared.get((choice.drafter or "", 0))
        if choice.drafter is None or choice.drafter == "ngram" or shared is None or not shared.calibrated:
            return choice
        k = max(2, self._reach(choice.drafter, size, context))
        verify, whole = self.cost.curve(None, size, context), self.cost.curve(choice.drafter, size, context)
        row, token = (verify[k] - verify[0]) / k / size, (whole[k] - whole[1]) / (k - 1) / size
        # Never above 0.95 and 0.8: a token that the drafter is nearly sure of is drafted and verified whatever the
        # rate.
        stop, drop = min(0.95, rate * token / NEXT), min(0.8, rate * row)
        if not choice.nodes:
            return DraftPlan(choice.drafter, choice.k, stop, drop)
        return choice._replace(
            stop=stop, drop=drop / 2, prices=tuple(rate * (t - verify[0]) for t in verify)
        )  # prices do the dropping

    def _offer(self, view: DraftContext, name: str) -> tuple[int, tuple[str, int], DrafterStats]:
        """How many tokens this drafter may offer, whose statistics count, and what is known of it."""
        cap = min(view.drafter_available.get(name, 0), MAX_DRAFT, view.remaining - 1)
        key = (name, _bucket(view.match_len) if name == "ngram" else 0)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = self._source(key)
        if (
            shared.judged < 8 and not self.cost.free(name) and not shared.carded
        ):  # unproven: drafts grow as tokens are accepted
            cap = min(cap, 2 + shared.accepted)
        return cap, key, shared

    def _expected(self, seq: SeqState, key: tuple[str, int], shared: DrafterStats) -> list[float]:
        """E(0..16): tokens of a cycle by K."""
        expected = seq.expected.get(key)
        if expected is None:
            arm = seq.arms.get(key)
            chain = shared.a if arm is None else arm.estimate(shared.a, REQUEST_WEIGHTS)
            expected, path = [1.0], 1.0
            for a in chain:
                path *= a
                expected.append(expected[-1] + path)
            seq.expected[key] = expected
        return expected

    def _source(self, key: tuple[str, int]) -> DrafterStats:
        name = key[0]
        unknown = name not in self._prior and not self.cost.free(name)  # neither a card nor copies of earlier text
        return DrafterStats(
            self._prior_of(*key), self._trust.get(name), self._counts.get(name, () if unknown else None)
        )

    def _prior_of(self, name: str, bucket: int) -> Sequence[float]:
        if name in self._prior:
            return self._prior[name]
        return NGRAM_PRIOR[bucket] if name == "ngram" else DEFAULT_PRIOR

    def _risk(self, seq: SeqState, shared: DrafterStats, times: Sequence[float], plain: float, cap: int) -> int:
        """The longest draft whose total loss this request could still bear: so that even a prompt on which nothing
        is ever accepted stays within a few percent of plain decoding."""
        start, rate = (RISK, RISK_RATE) if shared.proven else UNPROVEN_RISK
        allowed = (seq.loss_budget + start + rate * seq.tokens) * plain
        k = cap
        while k > 0 and times[k] - plain > allowed:
            k -= 1
        return k

    def _maybe_probe(self, seq: SeqState, choice: DraftPlan, loss: float) -> DraftPlan:
        seq.wait -= 1
        if seq.wait > 0 or self._explored + loss > EXPLORE * self._time:
            return NO_DRAFT
        seq.interval = min(PROBE_LAST, seq.interval * 2)
        seq.wait = seq.interval
        seq.probing = True
        return choice

    def reuse_plan(self, ids: Sequence[str]) -> list[DraftPlan] | None:
        """The last plan of a batch, if it still holds; None: it is time to plan. Planning takes a few percent of a
        step, so a plan is kept for two steps where the batch drafts, and where the same sequences go on decoding
        plainly for one, three, seven, then fifteen. The caller leaves out a draft that has become longer than what
        is left of the answer."""
        if self._rest == 0 or self._resting != ids:
            return None
        self._rest -= 1
        return self._held

    def _joint_or_rest(self, seqs: Sequence[DraftContext]) -> list[DraftPlan]:
        choices, who = self._joint(seqs), [view.id for view in seqs]
        if any(self._seqs[id].probing for id in who):
            self._rest = self._pause = 0
        elif any(c.k for c in choices):
            self._rest, self._pause = HOLD + len(who) // HOLD_MANY, 0
        else:
            self._rest = self._pause = min(REST, 2 * self._pause + 1) if who == self._resting else 1
        self._resting, self._held = who, choices
        return choices

    def _joint(self, seqs: Sequence[DraftContext]) -> list[DraftPlan]:
        """The plan with most expected tokens a second for the whole batch: a widest K that holds for all, and
        within it for each sequence the K behind which a further token is worth less than its row costs. What a row
        costs in tokens depends on the rate that the plan reaches, so there are two passes."""
        size, context = len(seqs), sum(v.context for v in seqs) // len(seqs)
        verify = np.asarray(self.cost.curve(None, size, context))
        states = [self._seq(view.id) for view in seqs]
        margin = min(BATCH_MARGIN[0] + BATCH_MARGIN[1] * size, BATCH_MARGIN[2])
        best: tuple[float, list[DraftPlan]] = (size / verify[0] * (1.0 + margin), [NO_DRAFT] * size)
        dear = [name for name in self.drafters if not self.cost.free(name)]
        for runs in [*dear, None]:  # at most one drafter that takes time runs in a cycle; free ones always may
            rows: list[list[float]] = []
            owners: list[str | None] = []
            for view, seq in zip(seqs, states, strict=True):
                row, owner = [1.0], None
                for name in self.drafters:
                    if name == runs or self.cost.free(name):
                        cap, key, shared = self._offer(view, name)
                        if cap <= 0 or self._catch_up_cost(view, name) > BATCH_CATCH_UP * float(verify[0]) / size:
                            continue
                        expected, times = self._expected(seq, key, shared), self.cost.curve(name, size, context)
                        cap = self._risk(seq, shared, times, float(verify[0]), cap)
                        if cap > 0 and expected[cap] > row[-1] * (1.0 if owner is None else 1.02):
                            row, owner = expected[: cap + 1], name
                rows.append(
                    row + [0.0] * (MAX_DRAFT + 1 - len(row))
                )  # a K beyond the cap yields nothing, and so is never chosen
                owners.append(owner)
            if (runs is not None and runs not in owners) or not any(owners):
                continue
            paid, drafting = np.asarray([o == runs for o in owners]), np.zeros(MAX_DRAFT + 1)
            if runs is not None:
                drafting = np.asarray(self.cost.draft_curve(runs, max(1, int(paid.sum()))))
            fill = self._shared[runs, 0].fill if runs is not None else 1.0
            rate, ks = choose_k(np.asarray(rows), paid, verify, drafting, fill)
            if rate > best[0]:
                best = (rate, [DraftPlan(o, k) if k and o else NO_DRAFT for o, k in zip(owners, ks, strict=True)])
        choices = [self._ending(choice, context, size, best[0]) for choice in best[1]]
        return self._settle(seqs, states, choices, context, float(verify[0]))

    def _settle(
        self,
        seqs: Sequence[DraftContext],
        states: Sequence[SeqState],
        choices: list[DraftPlan],
        context: int,
        plain: float,
    ) -> list[DraftPlan]:
        """Probes for a batch that decodes plainly, and the books: what this cycle costs against a plain one."""
        size = len(seqs)
        if not any(c.k for c in choices):
            for i, (view, seq) in enumerate(zip(seqs, states, strict=True)):
                name = next((name for name in self.drafters if self._offer(view, name)[0] > 0), None)
                if name is not None:
                    choices[i] = self._maybe_probe(
                        seq, DraftPlan(name, 1), self.cost.curve(name, size, context)[1] - plain
                    )
                if choices[i].k:
                    break  # one probe a cycle, since the neighbours of a probe pay for it too
        seconds = self.cost.mixed([(c.drafter, c.k, c.k) for c in choices], context)
        for view, seq, choice in zip(seqs, states, choices, strict=True):
            self._note(view, seq, choice, plain / size, [seconds], plain)
        return choices

    def _note(
        self, view: DraftContext, seq: SeqState, choice: DraftPlan, share: float, curve: Sequence[float], plain: float
    ) -> None:
        """Keep the books of the cycle about to run: `curve` its seconds by K (or the one entry of a batch)."""
        seq.curve, seq.plain, seq.step, seq.planned, seq.fixed = curve, share, plain, choice.k, view.fixed
        seq.key = (choice.drafter or "", _bucket(view.match_len) if choice.drafter == "ngram" else 0)
        self._time += curve[min(choice.k, len(curve) - 1)] / plain * share

    # ---- after a cycle
    # -----------------------------------------------------------------------------------------------
    def observe(
        self, id: str, drafter: str | None, drafted: int, accepted: int, confidence: Sequence[float] | None = None,
        tree: VerifiedTree | None = None,
    ) -> None:  # fmt: skip
        """What became of one sequence's draft (drafter None or drafted 0: a plain step). Of a tree, `drafted`
        counts all its tokens."""
        if not 0 <= accepted <= drafted <= MAX_DRAFT:
            raise OutriderError(
                f"accepted {accepted} of {drafted} drafted tokens: must be 0 <= accepted <= drafted <= {MAX_DRAFT}"
            )
        self._untold.append(partial(self._learn, id, drafter, drafted, accepted, confidence, tree))

    def observe_step(self, batch: int, k: float, context: int, seconds: float, drafter: str | None) -> None:
        """The wall time of a cycle without prompt rows. `k`: drafted tokens a sequence (their mean)."""
        self._untold.append(partial(self._time_step, batch, k, context, seconds, drafter))
        if len(self._untold) >= UNTOLD:
            self._apply_observations()

    def _apply_observations(self) -> None:
        """Learn from what was observed since the last plan, several cycles at once: between two passes over the
        weights all code is out of the processor's caches, and the second call of a function costs a fraction of the
        first."""
        told, self._untold = self._untold, []  # each once, whatever comes of it
        for learn in told:
            learn()

    def _learn(
        self, id: str, drafter: str | None, drafted: int, accepted: int, confidence: Sequence[float] | None,
        tree: VerifiedTree | None
    ) -> None:  # fmt: skip
        self._histogram[drafted] += 1
        steps = tree.steps if tree is not None else drafted if confidence is None else len(confidence)
        self._cycle.append((drafter, drafted, steps))
        seq = self._seqs.get(id)
        if seq is None:  # never planned here: its K was chosen elsewhere
            return
        seq.tokens += accepted + 1
        if drafter is None or seq.fixed or (drafted == 0 and confidence is None):
            return
        fixed = tree is not None and confidence is None  # its size, and so its cost: by depth, not by tokens
        seconds = seq.curve[min(seq.planned if fixed else drafted, len(seq.curve) - 1)]
        if (
            confidence is not None and steps != drafted and len(seq.curve) > 1
        ):  # a token that was left out took time as well
            seconds += (steps - drafted) * self._further(drafter)
        gain = accepted + 1 - seconds / seq.step
        seq.loss_budget += gain
        if seq.probing:
            # The whole batch waits for a probe, and only this sequence gains by it.
            self._explored = max(0.0, self._explored + seq.step * (accepted + 1 - gain - 1.0) - accepted * seq.plain)
            seq.probing = False
        key = seq.key if seq.key[0] == drafter else (drafter, 0)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = self._source(key)
        if shared.worth is not None:
            shared.worth.add(accepted + 1, drafted, steps, KEEP_CYCLES)
            if drafter in seq.yields:
                seq.yields[drafter].add(accepted + 1, drafted, steps, REQUEST_KEEP)
        if (
            tree is not None and confidence is not None
        ):  # its main chain teaches what a line would have; the branches, what they are worth
            for j, right in tree.judged():
                shared.judge(confidence[j], right)
            drafted, accepted, confidence = tree.chain, tree.chain_accepted, confidence[: tree.chain]
        elif (
            tree is not None
        ):  # a main chain that was left out for other branches was not believed in: it counts as refused
            shared.branched(accepted, tree.chain_accepted)
            drafted, accepted = max(tree.chain, seq.planned), tree.chain_accepted
        planned = max(
            1, seq.planned, drafted
        )  # a plan that was made before the last may have been run again: it drafted, if not a token
        shared.add(planned, drafted, accepted, confidence)
        arm = seq.arms.get(key) or seq.arms.setdefault(key, PositionStats())
        # A draft that ended itself emits no more than one that was refused at that place, so it counts as refused
        # there.
        arm.add(drafted if accepted < drafted or confidence is None else planned, accepted, REQUEST_KEEP)
        seq.expected.pop(key, None)
        if shared.judged == BROKEN_AFTER or (shared.judged > BROKEN_AFTER and shared.judged % 64 == 0):
            self._judge(drafter, shared)

    def _judge(self, drafter: str, shared: DrafterStats) -> None:
        rate = shared.arm.good[0] / shared.arm.seen[0]
        if drafter != "ngram" and rate < BROKEN_BELOW and drafter not in self._told:
            self._told.add(drafter)
            self._warnings.append(
                f"drafter {drafter!r} does not fit this target: {shared.accepted} tokens accepted in {shared.judged} "
                f"drafts; decoding "
                "plainly (another base model, a fine-tune or a harsh quantisation does this; --drafter none silences "
                "it)"
            )

    def _time_step(self, batch: int, k: float, context: int, seconds: float, drafter: str | None) -> None:
        cycle, self._cycle, mixed = self._cycle[-batch:], [], None
        if batch > 1 and len(cycle) == batch and len(set(cycle)) > 1:
            mixed = self.cost.mixed(cycle, context)
        elif (
            batch == 1 and drafter is not None and cycle and cycle[0][2] != cycle[0][1] and cycle[0][0] == drafter
        ):  # some were left out
            seconds -= (cycle[0][2] - cycle[0][1]) * self._further(drafter)
        self.cost.observe(batch, k, context, seconds, drafter, mixed)

    def trust(self, drafter: str) -> list[float]:
        """Acceptance by confidence, in 16 equal bins: index with int(confidence · 16), at most 15. The list never
        changes: what was learnt since comes in another one."""
        shared = self._shared.get((drafter, 0))
        return shared.trust if shared is not None else [(i + 0.5) / BINS for i in range(BINS)]

    def finish(self, id: str) -> None:
        self._apply_observations()
        self._seqs.pop(id, None)

    # ---- looking in
    # --------------------------------------------------------------------------------------------------
    @property
    def warnings(self) -> list[str]:
        """Each said once, in the order they were noticed."""
        return list(self._warnings)

    def snapshot(self) -> dict[str, object]:
        self._apply_observations()
        return {
            "acceptance": {
                f"{n}:{b}" if n == "ngram" else n: [round(a, 4) for a in d.a] for (n, b), d in self._shared.items()
            },
            "drafts": {f"{n}:{b}" if n == "ngram" else n: d.judged for (n, b), d in self._shared.items()},
            "by_k": list(self._histogram),
            "explored_share": self._explored / self._time if self._time else 0.0,
            "drift": self.cost.drift,
            "running": len(self._seqs),
        }

    def _seq(self, id: str) -> SeqState:
        seq = self._seqs.get(id)
        if seq is None:
            seq = self._seqs[id] = SeqState(PROBE_FIRST)
        return seq


def _bucket(match_len: int) -> int:
    return 0 if match_len <= 2 else 1 if match_len <= 4 else 2 if match_len <= 8 else 3 if match_len <= 20 else 4
