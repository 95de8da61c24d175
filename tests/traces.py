"""Made-up traces: drafters of any quality, so that the controller can be judged without a model."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from tests.simulate import Trace

from outrider.spec.plan import CyclePlan, DraftContext, StepTiming
from outrider.types import MAX_DRAFT, NO_DRAFT, DraftPlan


def synthetic(
    count: int, seed: int, tokens: tuple[int, int] = (48, 256), easiness: tuple[float, float] = (0.35, 0.9),
    decay: float = 0.02,
    copying: float = 0.0, drafter: str = "mtp", confident: bool = False,
) -> list[Trace]:  # fmt: skip
    """Answers with a made-up drafter: each token has a difficulty that wanders slowly (easy and hard stretches), and is
    guessed right at draft position j when it is easier than `easiness` - decay·j. `copying`: share of n-gram matches.
    `confident`: with the drafter's confidence, roughly calibrated."""
    rng = random.Random(seed)
    out = []
    for index in range(count):
        n = rng.randint(*tokens)
        level = rng.uniform(*easiness)
        mood = 0.0
        hard = []
        for _ in range(n + MAX_DRAFT):
            mood = 0.9 * mood + rng.gauss(0.0, 0.06)
            hard.append(rng.random() + mood)
        runs = tuple(
            next((j for j in range(MAX_DRAFT) if hard[p + j] > level - decay * j), MAX_DRAFT) for p in range(n)
        )
        sure: list[tuple[float, ...]] = []
        for p in range(n if confident else 0):
            margins = [level - decay * j - hard[p + j] + rng.gauss(0.0, 0.15) for j in range(MAX_DRAFT)]
            sure.append(tuple(round(1.0 / (1.0 + math.exp(-6.0 * m)), 3) for m in margins))
        ngram = [-1] * n
        match = [0] * n
        p = 0
        while copying > 0.0 and p < n:
            if rng.random() < copying / 12:
                span = rng.randint(4, 24)
                for q in range(p, min(n, p + span)):
                    match[q] = 2 + q - p
                    ngram[q] = min(MAX_DRAFT, p + span - q - 1)
                p += span
            elif rng.random() < 0.1:
                match[p] = rng.randint(1, 3)
                ngram[p] = rng.choice((0, 0, 0, 1))
            p += 1
        copies = (tuple(ngram), tuple(match)) if copying else ((), ())
        out.append(Trace(f"{seed}-{index}", "synthetic", drafter, runs, *copies, tuple(sure)))
    return out


def broken(count: int, seed: int, tokens: tuple[int, int] = (48, 256), drafter: str = "mtp") -> list[Trace]:
    """A drafter with random weights: right once in a thousand tokens."""
    rng = random.Random(seed)
    lengths = [rng.randint(*tokens) for _ in range(count)]
    return [
        Trace(f"{seed}-{i}", "broken", drafter, tuple(int(rng.random() < 1e-3) for _ in range(n)))
        for i, n in enumerate(lengths)
    ]


class Fixed:
    """In the controller's place: always K tokens of one drafter, where it has any; K = 0 is plain decoding."""

    def __init__(self, drafter: str | None, k: int) -> None:
        self.drafter = drafter
        self.k = k

    def reuse(self, ids: Sequence[str], match_len: int = 0) -> list[DraftPlan] | None:
        return None

    def commit(self, cycle: CyclePlan) -> None:
        pass

    def propose(self, seqs: Sequence[DraftContext]) -> CyclePlan:
        out = []
        for view in seqs:
            k = min(self.k, view.drafter_available.get(self.drafter or "", 0), view.remaining - 1)
            out.append(DraftPlan(self.drafter, k) if k > 0 else NO_DRAFT)
        return CyclePlan(out)

    def observe(
        self, id: str, drafter: str | None, drafted: int, accepted: int, confidence: Sequence[float] | None = None
    ) -> None:
        pass

    def observe_step(self, timing: StepTiming) -> None:
        pass

    def trust(self, drafter: str) -> list[float]:
        return []

    def finish(self, id: str) -> None:
        pass
