"""How often drafts are right: acceptance by position and by the drafter's confidence, learnt as they are judged. Torch-free.

a_j is the chance that position j is right given that all before it were. A rejection hides the positions behind it:
they are not counted (censoring), and are estimated from the positions before.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..types import MAX_DRAFT

GLOBAL_WEIGHT = 4.0  # how many observations the card's prior is worth
GLOBAL_KEEP = 0.995  # forgetting, per observation of a position
BINS = 16  # of drafter confidence
MOST = 0.99  # no estimate above: a certain success would hide the cost of being wrong


class Arm:
    """Acceptance by position: weighted successes and trials."""

    __slots__ = ("good", "seen")

    def __init__(self) -> None:
        self.good = [0.0] * MAX_DRAFT
        self.seen = [0.0] * MAX_DRAFT

    def add(self, drafted: int, accepted: int, keep: float) -> None:
        good, seen = self.good, self.seen
        for j in range(accepted):
            good[j] = good[j] * keep + 1.0
            seen[j] = seen[j] * keep + 1.0
        if accepted < drafted:
            good[accepted] *= keep
            seen[accepted] = seen[accepted] * keep + 1.0

    def estimate(self, prior: Sequence[float], weight: float) -> list[float]:
        """Posterior means by position. What the positions before say about this source (odds against the prior) shifts
        the prior of the next: a request that is easy at position 1 is expected to be easy at position 5, seen or not."""
        out, shift = [], 1.0
        good, seen = self.good, self.seen
        for j in range(MAX_DRAFT):
            p = prior[j]
            expected = p if shift == 1.0 else p * shift / (1.0 - p + p * shift)
            n = seen[j]
            a = (good[j] + weight * expected) / (n + weight) if n else expected
            if a > MOST:
                a = MOST
            out.append(a)
            if n:
                shift = a * (1.0 - p) / ((1.0 - a) * p)
                shift = 8.0 if shift > 8.0 else 0.02 if shift < 0.02 else shift
        return out


class Source:
    """What all requests taught about one source of drafts: a drafter, or the n-gram drafter at one range of match lengths."""

    __slots__ = ("a", "accepted", "arm", "bins", "judged", "length", "next", "prior", "stale", "sure", "trust", "went")

    def __init__(self, prior: Sequence[float]) -> None:
        self.arm = Arm()
        self.prior = [min(MOST, max(0.005, prior[min(j, len(prior) - 1)])) for j in range(MAX_DRAFT)]
        self.a = list(self.prior)
        self.judged = 0  # drafts whose first position was judged
        self.accepted = 0
        self.stale = 0
        self.went: Arm | None = None  # how often a draft that ends by confidence goes on to position j
        self.length: list[float] | None = None  # expected tokens drafted by K; None: K, none has ended early
        self.bins = [[0.0, 0.0] for _ in range(BINS)]  # accepted and judged by confidence
        self.trust = [(i + 0.5) / BINS for i in range(BINS)]
        self.sure = 0  # judged tokens that came with a confidence
        self.next = 1.0  # acceptance of a drafted token, whatever its position

    def add(self, planned: int, drafted: int, accepted: int, confidence: Sequence[float] | None) -> None:
        self.arm.add(drafted if accepted < drafted or confidence is None else planned, accepted, GLOBAL_KEEP)
        self.judged += 1
        self.accepted += accepted
        self.stale += 1
        if confidence is not None:
            for j in range(min(drafted, accepted + 1, len(confidence))):
                cell = self.bins[min(BINS - 1, max(0, int(confidence[j] * BINS)))]
                cell[0] = cell[0] * GLOBAL_KEEP + (j < accepted)
                cell[1] = cell[1] * GLOBAL_KEEP + 1.0
                self.sure += 1
            if self.went is None and drafted < planned:
                self.went = Arm()
            if self.went is not None:
                self.went.add(planned, drafted, GLOBAL_KEEP)
        if self.judged < 64 or self.stale >= 16:
            self.refresh()

    def refresh(self) -> None:
        self.stale = 0
        self.a = [max(0.005, a) for a in self.arm.estimate(self.prior, GLOBAL_WEIGHT)]
        if self.sure:
            self.trust = [(good + 4.0 * (i + 0.5) / BINS) / (seen + 4.0) for i, (good, seen) in enumerate(self.bins)]
            self.next = (sum(good for good, _ in self.bins) + 1.0) / (sum(seen for _, seen in self.bins) + 1.0)
        if self.went is not None:
            self.length, path = [0.0], 1.0
            for q in self.went.estimate([0.95] * MAX_DRAFT, 2.0):
                path *= q
                self.length.append(self.length[-1] + path)
