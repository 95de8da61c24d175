"""Acceptance over all requests, by source of drafts, and what it starts from: a drafter's profile. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..types import OutriderError
from .acceptance import BINS, DrafterStats
from .plan import Source
from .tuning import Tuning


@dataclass(frozen=True)
class Profiles:
    """By drafter: acceptance by position; by its confidence in 16 equal bins; number of tokens measured at each
    position. A prior without counts is used as it is."""

    prior: Mapping[str, Sequence[float]] = field(default_factory=dict)
    trust: Mapping[str, Sequence[float]] = field(default_factory=dict)
    counts: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in self.prior.items():
            if not values or any(not 0.0 <= v <= 1.0 for v in values):
                raise OutriderError(f"prior acceptance of drafter {name!r} must be numbers in [0, 1], one a position")
        for name, values in self.trust.items():
            if len(values) != BINS or any(not 0.0 <= v <= 1.0 for v in values):
                raise OutriderError(f"trust of drafter {name!r} must be {BINS} numbers in [0, 1]")


class AcceptanceTable(dict[Source, DrafterStats]):
    def __init__(self, tuning: Tuning, profiles: Profiles) -> None:
        super().__init__()
        self.tuning, self.profiles = tuning, profiles

    def add(self, source: Source, free: bool) -> DrafterStats:
        """The statistics of a new source; free: drafting takes no time (an n-gram match)."""
        name, tuning, known = source.drafter, self.tuning, self.profiles
        if source.adapter:  # it starts from the base model's statistics, which are soon outweighed
            plain = source._replace(adapter="")
            base = self.get(plain) or self.add(plain, free)
            others = [other for other in self if other.adapter and other[:2] == source[:2]]
            if len(others) >= tuning.adapters:
                del self[others[0]]
            made = DrafterStats(tuning, base.a, None if free else base.trust, None if free else ())
        else:
            unknown = name not in known.prior and not free  # neither a profile nor an n-gram drafter
            prior = tuning.ngram_prior[source.match] if name == "ngram" else tuning.default_prior
            counts = known.counts.get(name, () if unknown else None)
            made = DrafterStats(tuning, known.prior.get(name, prior), known.trust.get(name), counts)
        self[source] = made
        return made
