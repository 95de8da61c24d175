"""What a drafter's folder says about how often it is right: acceptance.json, the controller's prior. Torch-free.

{"weights": fingerprint of the drafter, "accepted": [a_j: chance that position j is right given that all before it
were], "trust": [acceptance by the drafter's confidence, 16 equal bins], "judged": tokens it was measured on, "second":
how often its second best token is right where the best is wrong; null: not measured}

Made from recorded traces (`outrider bench MODEL --record-traces FILE`, then `--card FILE`). A card of other weights is
not used: without one the controller starts from neutral figures and learns the same within some hundred tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..types import MAX_DRAFT, OutriderError
from .acceptance import BINS
from .simulate import Trace

FILE = "acceptance.json"


@dataclass(frozen=True)
class AcceptanceProfile:
    weights: str
    accepted: tuple[float, ...]
    trust: tuple[float, ...]
    judged: int
    second: float | None = None


def measure(traces: Iterable[Trace], weights: str, second: float | None = None) -> AcceptanceProfile:
    """From every position of every answer, whether decoding would have drafted there or not."""
    good, seen = [1.0] * MAX_DRAFT, [1.4] * MAX_DRAFT  # about what drafts are worth before anything is known
    bins = [[2.0 * (i + 0.5) / BINS, 2.0] for i in range(BINS)]
    judged = 0
    for trace in traces:
        for at, (run, sure) in enumerate(zip(trace.runs, trace.confidence or [()] * len(trace.runs), strict=True)):
            for j in range(min(run + 1, MAX_DRAFT, len(trace.runs) - at - 1)):
                good[j] += j < run
                seen[j] += 1.0
                judged += 1
                if j < len(sure):
                    cell = bins[min(BINS - 1, int(sure[j] * BINS))]
                    cell[0] += j < run
                    cell[1] += 1.0
    if not judged:
        raise OutriderError("no drafts in these traces: record them with the drafter whose card is wanted")
    accepted = tuple(round(g / s, 4) for g, s in zip(good, seen, strict=True))
    return AcceptanceProfile(weights, accepted, tuple(round(g / s, 4) for g, s in bins), judged, second)


def write(folder: Path, card: AcceptanceProfile) -> Path:
    path = folder / FILE
    try:
        path.write_text(json.dumps(asdict(card), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutriderError(f"{path}: {error.strerror}") from None
    return path


def read(folder: Path, weights: str) -> AcceptanceProfile | None:
    """The card of these weights, if there is one (it is only a prior: one that cannot be read is as good as none)."""
    try:
        raw = json.loads((folder / FILE).read_text(encoding="utf-8"))
        second = None if raw.get("second") is None else float(raw["second"])
        card = AcceptanceProfile(
            str(raw["weights"]),
            tuple(map(float, raw["accepted"])),
            tuple(map(float, raw["trust"])),
            int(raw["judged"]),
            second,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    fits = card.weights == weights and len(card.trust) == BINS and card.accepted
    return card if fits and all(0.0 <= p <= 1.0 for p in (*card.accepted, *card.trust, card.second or 0.0)) else None
