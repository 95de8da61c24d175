"""A drafter's measured acceptance, acceptance.json in its folder: the controller's prior. Torch-free.

{"weights": the drafter's fingerprint, "accepted": [a_j], "trust": [acceptance by confidence, 16 bins], "judged":
tokens measured, "seen": [by position]}. `outrider train` and `eval-drafter --card` write it; one of other weights is
ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..types import MAX_DRAFT, OutriderError
from .acceptance import BINS, DrafterStats
from .plan import Source
from .tuning import Tuning

FILE = "acceptance.json"
# acceptance of position 1 before anything is known; judged tokens that a position's neighbour counts for
FIRST, NEIGHBOUR = 0.5, 2.0


@dataclass(frozen=True)
class AcceptanceProfile:
    weights: str  # "": a family's figures, of no particular weights
    accepted: tuple[float, ...]
    trust: tuple[float, ...]  # empty: its confidences say nothing
    judged: int
    seen: tuple[float, ...] = ()  # judged tokens by position; empty in files of earlier versions

    @property
    def counts(self) -> tuple[float, ...]:
        """Measured tokens by position; if only the total is known, spread by how often drafts get that far."""
        if self.seen:
            return self.seen
        reached = [1.0]
        for a in self.accepted[:-1]:
            reached.append(reached[-1] * a)
        return tuple(self.judged * r / sum(reached) for r in reached)


Runs = tuple[Sequence[int], Sequence[Sequence[float]]]  # by position: tokens of a draft that are right; confidences


def measure(answers: Iterable[Runs], weights: str) -> AcceptanceProfile:
    """Measured from every position of every answer; an answer may have no confidences."""
    good, seen = [0.0] * MAX_DRAFT, [0.0] * MAX_DRAFT
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
        before = accepted[-1] if accepted else FIRST
        accepted.append(round((g + NEIGHBOUR * before) / (s + NEIGHBOUR), 4))
    trust = tuple(round(g / s, 4) for g, s in bins)
    return AcceptanceProfile(weights, tuple(accepted), trust, judged, tuple(seen))


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
        card = AcceptanceProfile(str(raw["weights"]), lists[0], lists[1], int(raw["judged"]), lists[2])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    sizes = len(card.trust) == BINS and card.accepted and len(card.seen) in (0, len(card.accepted))
    shares = all(0.0 <= p <= 1.0 for p in (*card.accepted, *card.trust)) and min(card.seen, default=0.0) >= 0.0
    return card if card.weights == weights and sizes and shares else None


class AcceptanceTable(dict[Source, DrafterStats]):
    """Acceptance over all requests, by source of drafts; it starts from the drafters' profiles."""

    def __init__(self, tuning: Tuning, profiles: Mapping[str, AcceptanceProfile], free: Callable[[str], bool]) -> None:
        """free: does a drafter's drafting take no time (an n-gram match)?"""
        super().__init__()
        self.tuning, self.profiles, self.free = tuning, profiles, free

    def __missing__(self, source: Source) -> DrafterStats:
        tuning, profile, free = self.tuning, self.profiles.get(source.drafter), self.free(source.drafter)
        if source.adapter:  # it starts from the base model's statistics, which are soon outweighed
            base = self[source._replace(adapter="")]
            others = [other for other in self if other.adapter and other[:2] == source[:2]]
            if len(others) >= tuning.adapters:
                del self[others[0]]
            made = DrafterStats(tuning, base.a, None if free else base.trust, None if free else ())
        elif profile is not None:
            counts = profile.counts if profile.weights else None  # a family's figures are taken as they are
            made = DrafterStats(tuning, profile.accepted, profile.trust or None, counts)
        else:
            prior = tuning.ngram_prior[source.match] if source.drafter == "ngram" else tuning.default_prior
            made = DrafterStats(tuning, prior, None, None if free else ())
        self[source] = made
        return made
