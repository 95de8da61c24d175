"""Acceptance over all requests, by source of drafts; it starts from the drafters' profiles. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from .acceptance import DrafterStats
from .acceptance_profile import AcceptanceProfile
from .plan import Source
from .tuning import Tuning


class AcceptanceTable(dict[Source, DrafterStats]):
    def __init__(self, tuning: Tuning, profiles: Mapping[str, AcceptanceProfile]) -> None:
        super().__init__()
        self.tuning, self.profiles = tuning, profiles

    def add(self, source: Source, free: bool) -> DrafterStats:
        """The statistics of a new source; free: drafting takes no time (an n-gram match)."""
        tuning, profile = self.tuning, self.profiles.get(source.drafter)
        if source.adapter:  # it starts from the base model's statistics, which are soon outweighed
            plain = source._replace(adapter="")
            base = self.get(plain) or self.add(plain, free)
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
