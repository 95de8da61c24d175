"""Acceptance statistics, by draft position and by the drafter's confidence: learnt online, and a drafter's profile.
Torch-free.

a_j is the probability that position j is accepted given that all before it were. Positions after a rejection are not
observed: they are not counted (censoring), and are estimated from the positions before.

A profile, acceptance.json in a drafter's folder, is the controller's prior: {"weights": the drafter's fingerprint,
"accepted": [a_j], "trust": [acceptance by confidence, 16 bins], "judged": tokens measured, "seen": [by position]}.
`outrider train` and `eval-drafter --card` write it; one of other weights is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from ..types import MAX_DRAFT, OutriderError
from .tuning import Tuning

FILE = "acceptance.json"
BINS = 16  # of drafter confidence
MAX_ACCEPTANCE = 0.99  # no estimate above: a certain success would hide the cost of being wrong
FIRST_ACCEPTANCE = 0.5  # prior of position 1
NEIGHBOUR_WEIGHT = 2.0  # pseudo-count for the previous position's rate


class Source(NamedTuple):
    """Key of acceptance statistics: a drafter, an n-gram match's range of lengths, and the target's adapter."""

    drafter: str
    match: int = 0
    adapter: str = ""


@dataclass(frozen=True)
class AcceptanceProfile:
    weights: str  # "": a family's figures, of no particular weights
    accepted: tuple[float, ...]
    trust: tuple[float, ...]  # empty: its confidences say nothing
    judged: int
    seen: tuple[float, ...] = ()  # judged tokens by position; empty in files of earlier versions

    @property
    def counts(self) -> tuple[float, ...]:
        """Measured tokens by position; if only the total is known, as many at each."""
        return self.seen or (self.judged / len(self.accepted),) * len(self.accepted)


Runs = tuple[Sequence[int], Sequence[Sequence[float]]]  # by position: tokens of a draft that are right; confidences


def measure(answers: Iterable[Runs], weights: str) -> AcceptanceProfile:
    """Measured from every position of every answer; an answer may have no confidences."""
    good = [0.0] * MAX_DRAFT
    seen = [0.0] * MAX_DRAFT
    bins = [[2.0 * (i + 0.5) / BINS, 2.0] for i in range(BINS)]
    judged = 0
    for runs, confidence in answers:
        for at, (run, sure) in enumerate(zip(runs, confidence or [()] * len(runs), strict=True)):
            for j in range(min(run + 1, MAX_DRAFT, len(runs) - at - 1)):
                good[j] += j < run
                seen[j] += 1.0
                judged += 1
                if j < len(sure):
                    cell = bins[min(BINS - 1, int(sure[j] * BINS))]
                    cell[0] += j < run
                    cell[1] += 1.0
    if not judged:
        raise OutriderError("no drafts to judge: the answers are too short")
    accepted: list[float] = []
    for g, s in zip(good, seen, strict=True):  # a position hardly reached is like the one before it
        before = accepted[-1] if accepted else FIRST_ACCEPTANCE
        accepted.append(round((g + NEIGHBOUR_WEIGHT * before) / (s + NEIGHBOUR_WEIGHT), 4))
    trust = tuple(round(g / s, 4) for g, s in bins)
    return AcceptanceProfile(weights, tuple(accepted), trust, judged=judged, seen=tuple(seen))


def write(folder: Path, card: AcceptanceProfile) -> Path:
    path = folder / FILE
    try:
        path.write_text(json.dumps(asdict(card), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutriderError(f"{path}: {error.strerror}") from None
    return path


def read(folder: Path, weights: str) -> AcceptanceProfile | None:
    """The profile of these weights, or None (an unreadable one counts as none: it is only a prior)."""
    try:
        raw = json.loads((folder / FILE).read_text(encoding="utf-8"))
        lists = [tuple(map(float, raw.get(name, ()))) for name in ("accepted", "trust", "seen")]
        card = AcceptanceProfile(str(raw["weights"]), lists[0], lists[1], judged=int(raw["judged"]), seen=lists[2])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    sizes = len(card.trust) == BINS and card.accepted and len(card.seen) in (0, len(card.accepted))
    shares = all(0.0 <= p <= 1.0 for p in (*card.accepted, *card.trust)) and min(card.seen, default=0.0) >= 0.0
    return card if card.weights == weights and sizes and shares else None


class CycleMeans(NamedTuple):
    """Tokens per cycle of drafts that end themselves."""

    emitted: float
    verified: float
    drafted: float


class CycleStats:
    """Exponentially weighted sums over cycles of drafts that end themselves: tokens emitted, verified and drafted, and
    cycles. Counts are summed, not seconds: the cost table gives the times, and it may change."""

    __slots__ = ("cycles", "drafted", "emitted", "verified")

    def __init__(
        self, *, emitted: float = 0.0, verified: float = 0.0, drafted: float = 0.0, cycles: float = 0.0
    ) -> None:
        """Means per cycle, and the number of cycles that they are worth."""
        self.emitted = emitted * cycles
        self.verified = verified * cycles
        self.drafted = drafted * cycles
        self.cycles = cycles

    def add(self, *, emitted: int, verified: int, drafted: float, decay: float) -> None:
        self.emitted = self.emitted * decay + emitted
        self.verified = self.verified * decay + verified
        self.drafted = self.drafted * decay + drafted
        self.cycles = self.cycles * decay + 1.0

    def blend(self, prior: CycleStats, weight: float) -> CycleMeans:
        """The means; the prior counts as `weight` cycles."""
        share = weight / prior.cycles
        cycles = self.cycles + weight
        return CycleMeans(
            emitted=(self.emitted + share * prior.emitted) / cycles,
            verified=(self.verified + share * prior.verified) / cycles,
            drafted=(self.drafted + share * prior.drafted) / cycles,
        )


class PositionStats:
    """Acceptance by position: weighted successes and trials."""

    __slots__ = ("good", "seen")

    def __init__(self) -> None:
        self.good = [0.0] * MAX_DRAFT
        self.seen = [0.0] * MAX_DRAFT

    def add(self, drafted: int, accepted: int, keep: float) -> None:
        good = self.good
        seen = self.seen
        for j in range(accepted):
            good[j] = good[j] * keep + 1.0
            seen[j] = seen[j] * keep + 1.0
        if accepted < drafted:
            good[accepted] *= keep
            seen[accepted] = seen[accepted] * keep + 1.0

    def estimate(self, prior: Sequence[float], weights: Sequence[float]) -> list[float]:
        """Posterior means by position. The odds of earlier positions against the prior shift the prior of the next: a
        request that is easy at position 1 is expected to be easy at position 5, observed or not."""
        out = []
        shift = 1.0
        good = self.good
        seen = self.seen
        for j in range(MAX_DRAFT):
            p = prior[j]
            expected = p if shift == 1.0 else p * shift / (1.0 - p + p * shift)
            n = seen[j]
            a = (good[j] + weights[j] * expected) / (n + weights[j]) if n else expected
            if a > MAX_ACCEPTANCE:
                a = MAX_ACCEPTANCE
            out.append(a)
            if n:
                shift = a * (1.0 - p) / ((1.0 - a) * p)
                if shift > 8.0:
                    shift = 8.0
                elif shift < 0.02:
                    shift = 0.02
        return out


class DrafterStats:
    """Statistics over all requests of one source of drafts (`Source`)."""

    def __init__(
        self,
        tuning: Tuning,
        prior: Sequence[float],
        trust: Sequence[float] | None = None,
        counts: Sequence[float] | None = None,
    ) -> None:
        """trust: acceptance by confidence, 16 bins. counts: tokens measured by position; None: no profile's prior."""
        self.tuning = tuning
        self.arm = PositionStats()
        self.prior = [min(MAX_ACCEPTANCE, max(0.005, prior[min(j, len(prior) - 1)])) for j in range(MAX_DRAFT)]
        self.a = list(self.prior)
        self.judged = 0  # drafts whose first position was judged
        self.accepted = 0
        self.proven = counts is None or sum(counts) >= tuning.proven_card
        self.weights = [tuning.prior_weight] * MAX_DRAFT  # of the prior, by position
        if counts is not None:
            by_position = [*counts, *[counts[-1] if counts else 0.0] * MAX_DRAFT][:MAX_DRAFT]
            self.weights = [min(tuning.prior_weight, 1.0 + c / tuning.prior_tokens) for c in by_position]
        self.carded = trust is not None and self.proven  # the profile calibrates confidences
        self.calibrated = self.carded  # confidences are calibrated, so drafts may end by them
        self.trust = list(trust) if trust is not None else [(i + 0.5) / BINS for i in range(BINS)]
        weight = tuning.trust_weight if trust is not None else 0.0
        self.bins = [[weight * t, weight] for t in self.trust]  # accepted and judged by confidence
        self.sure = 0  # judged tokens that came with a confidence
        self.fill = 1.0  # share of the planned tokens that are verified: less if drafts end themselves
        # Drafted tokens gained by trees of a fixed size, and by their main chains alone: at first a guess.
        self.in_trees = tuning.tree_lift * tuning.tree_lift_weight
        self.in_chains = tuning.tree_lift_weight
        self.worth: CycleStats | None = None  # statistics of drafts that end themselves; None until one is considered

    def add(self, *, planned: int, drafted: int, accepted: int, confidence: Sequence[float] | None) -> None:
        self.arm.add(drafted if accepted < drafted or confidence is None else planned, accepted, self.tuning.keep)
        self.judged += 1
        self.accepted += accepted
        self.proven = self.proven or self.accepted >= self.tuning.proven_accepted
        if confidence is not None:
            for j in range(min(drafted, accepted + 1, len(confidence))):
                self.judge(confidence[j], j < accepted)
            self.fill += (1.0 - self.tuning.keep) * 4.0 * (drafted / planned - self.fill)
            self.calibrated = self.calibrated or self.sure >= self.tuning.calibrated_after
        if self.judged % 16 and (self.judged >= 64 or self.carded):
            return  # the estimates of some drafts ago still do
        self.a = [max(0.005, a) for a in self.arm.estimate(self.prior, self.weights)]
        if self.sure:
            self.trust = [(good + 4.0 * (i + 0.5) / BINS) / (seen + 4.0) for i, (good, seen) in enumerate(self.bins)]

    def judge(self, confidence: float, right: bool) -> None:
        """Record a token that followed accepted ones, so that the target decided whether it was right."""
        cell = self.bins[min(BINS - 1, max(0, int(confidence * BINS)))]
        cell[0] = cell[0] * self.tuning.keep + right
        cell[1] = cell[1] * self.tuning.keep + 1.0
        self.sure += 1

    def branched(self, accepted: int, ahead: int) -> None:
        """Record the tokens that a tree of a fixed size gained, and how many of them were on its main chain."""
        self.in_trees = self.in_trees * self.tuning.keep + accepted
        self.in_chains = self.in_chains * self.tuning.keep + ahead


class AcceptanceTable(dict[Source, DrafterStats]):
    """Acceptance over all requests, by source of drafts; it starts from the drafters' profiles."""

    def __init__(
        self,
        tuning: Tuning,
        profiles: Mapping[str, AcceptanceProfile],
        free: Callable[[str], bool],
        copying: frozenset[str],
    ) -> None:
        """free: does a drafter's drafting take no time (an n-gram match)? copying: drafters that repeat earlier
        text."""
        super().__init__()
        self.tuning = tuning
        self.profiles = profiles
        self.free = free
        self.copying = copying

    def __missing__(self, source: Source) -> DrafterStats:
        tuning = self.tuning
        profile = self.profiles.get(source.drafter)
        free = self.free(source.drafter)
        no_counts = None if free else ()
        if source.adapter:  # it starts from the base model's statistics, which are soon outweighed
            base = self[source._replace(adapter="")]
            others = [other for other in self if other.adapter and other[:2] == source[:2]]
            if len(others) >= tuning.adapters:
                del self[others[0]]
            trust = None if free else base.trust
            stats = DrafterStats(tuning, base.a, trust=trust, counts=no_counts)
        elif profile is not None:
            counts = profile.counts if profile.weights else None  # a family's figures are taken as they are
            stats = DrafterStats(tuning, profile.accepted, trust=profile.trust or None, counts=counts)
        else:
            prior = tuning.copy_prior[source.match] if source.drafter in self.copying else tuning.default_prior
            stats = DrafterStats(tuning, prior, counts=no_counts)
        self[source] = stats
        return stats
