"""The cost table: measured step time by batch, K and context on this machine, plus the drafter's own time. Torch-free.

A `CostTable` interpolates between a few knots: linear in batch and context, monotone in K. `timing.measure` fills it,
`observe` updates it, `save` / `load` keep it. A deviation is first attributed to the machine (`drift`), and to a cell
only if the step before was of another kind: then both were timed under the same conditions.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from ..models.config import Foreign
from ..platforms.processor import processor_name
from ..types import MAX_DRAFT, OutriderError
from .plan import CostPart, StepTiming

CURVE_LENGTH = MAX_DRAFT + 1  # K = 0..16
Curve = list[float]  # seconds by K, CURVE_LENGTH entries
FORMAT = 10  # of stored tables: raised when what is timed changes, or how
DRIFT_GAIN = 0.1  # share of a deviation that is attributed to the machine
CELL_GAIN = 0.15  # share that is attributed to the cell, if the step before was of another kind
CLAMP = 0.25  # log of the largest deviation applied at once: one interrupted step must not move the table
REBUILD_EVERY = 16  # observations between two rebuilds of the cached curves


class SequenceDraft(NamedTuple):
    """One sequence's draft in a cycle, as far as the cost depends on it."""

    drafter: str | None
    verified: int  # tokens
    drafted: float  # tokens, with those that are left out before verification


def machine_name(accelerator: str | None = None, threads: int | None = None) -> str:
    """Processor, threads and accelerator: what a measured time depends on besides the model."""
    parts = [processor_name(), f"{threads or os.cpu_count()} threads"]
    return " / ".join(parts + ([accelerator] if accelerator else []))


class CostTable:
    """Seconds of a cycle. Verify rows are packed: their cost follows their total number."""

    def __init__(
        self,
        verify: Mapping[tuple[int, int], Sequence[float]] | None = None,
        draft: Mapping[str | CostPart, Mapping[int, Sequence[float]]] | None = None,
        key: str | None = None,
        reading: Mapping[str, float] | None = None,
    ) -> None:
        """verify by batch and context, draft by part (a bare name: its drafts) and batch, reading: seconds per token.
        Without figures a guess: a row costs 15 % of a plain step, a drafted token 8 %."""
        if verify is None:
            verify = {(b, 0): [0.85 + 0.15 * b * (k + 1) for k in range(CURVE_LENGTH)] for b in (1, 32)}
        if draft is None:
            draft = {name: {1: [0.08 * k for k in range(CURVE_LENGTH)]} for name in ("mtp", "draft_model")}
        if not verify:
            raise OutriderError("a cost table needs at least one measured step")
        by_part = {CostPart("draft", p) if isinstance(p, str) else p: curves for p, curves in draft.items()}
        for curve in [*verify.values(), *(curve for curves in by_part.values() for curve in curves.values())]:
            if len(curve) != CURVE_LENGTH or any(not (t >= 0.0 and math.isfinite(t)) for t in curve):
                raise OutriderError(f"cost table: a curve needs {CURVE_LENGTH} finite times >= 0")
        self.key = key
        self.reading = dict(reading or {})
        self.drift = 0.0  # log of how much slower the machine is now than when the table was measured
        self.observed = 0
        self._verify = {knot: monotone(curve) for knot, curve in verify.items()}
        self._draft = {part: {b: monotone(c) for b, c in curves.items()} for part, curves in by_part.items()}
        self._batches = sorted({b for b, _ in verify})
        # correction of a whole cycle by K, for a drafting part (None: plain) and a batch knot
        self._factor: dict[tuple[CostPart | None, int], Curve] = {}
        self._wrong: dict[tuple[CostPart | None, int, int], float] = {}  # log of what is to be corrected, also by K
        self._cache: dict[tuple[str | None, bool, int, int], Curve] = {}
        self._drafts: dict[tuple[CostPart, int], Curve] = {}
        self._reaches: dict[tuple[str, int, int, float], int] = {}
        self._last: tuple[CostPart | None, int, int] | None = None

    # ---- reading ---------------------------------------------------------------------------------------------------
    def verify(self, batch: int, k: float, context: int) -> float:
        """Seconds of one target step over `batch` sequences with k drafted tokens each (on average)."""
        return at_k(self.curve(None, batch, context), k)

    def draft(self, drafter: str, batch: int, k: int) -> float:
        return self.draft_curve(CostPart("draft", drafter), batch)[k]

    def mixed(self, cycle: Sequence[SequenceDraft], context: int) -> float:
        """Seconds of a cycle whose sequences draft differently."""
        mean_verified = sum(draft.verified for draft in cycle) / len(cycle)
        seconds = self.verify(len(cycle), mean_verified, context)
        for name in {draft.drafter for draft in cycle if draft.drafted and draft.drafter}:
            if not self.free(name):
                drafted = [draft.drafted for draft in cycle if draft.drafter == name]
                seconds += self.draft(name, len(drafted), round(max(drafted)))
        return seconds

    def curve(self, drafter: str | None, batch: int, context: int, tree: bool = False) -> Curve:
        """Seconds of a whole cycle by K: draft and verify; tree: with a tree of a fixed size, by depth. Relative to the
        moment of measuring: `drift` is left out, since it scales every choice alike. Cached; treat as read-only."""
        key = (drafter, tree, batch, context >> 7)
        curve = self._cache.get(key)
        if curve is None:
            curve = self._build(self._part(drafter, tree), batch, (context >> 7 << 7) + 64)
            self._cache[key] = curve
        return curve

    def reach(self, drafter: str, batch: int, context: int, sure: float) -> int:
        """How far a draft that ends itself may go: the best K for tokens each right with probability `sure`."""
        key = (drafter, batch, context >> 7, sure)
        if key not in self._reaches:
            curve = self.curve(drafter, batch, context)
            expected = list(accumulate(sure**k for k in range(CURVE_LENGTH)))
            self._reaches[key] = max(range(1, CURVE_LENGTH), key=lambda k: expected[k] / curve[k])
        return self._reaches[key]

    def further(self, drafter: str) -> float:
        """Seconds that one more drafted token takes this drafter, for one sequence."""
        return self.draft(drafter, 1, 2) - self.draft(drafter, 1, 1)

    def free(self, drafter: str) -> bool:
        """Whether drafting costs no measurable time (an n-gram match)."""
        return CostPart("draft", drafter) not in self._draft

    def has_trees(self, drafter: str) -> bool:
        return CostPart("tree", drafter) in self._draft

    def _build(self, part: CostPart | None, batch: int, context: int) -> Curve:
        lo, hi, w = bracket(self._batches, batch)
        curve = _between(self._contextual(lo, context), self._contextual(hi, context), w)
        plain = curve[0]
        knot = self._knot(batch)
        if part is not None:
            curve = [plain, *(v + d for v, d in zip(curve[1:], self.draft_curve(part, batch)[1:], strict=True))]
        factor = self._factor.get((part, knot))
        base = self._factor.get((None, knot))
        if factor is not None:
            curve = [t * f for t, f in zip(curve, factor, strict=True)]
        if base is not None:
            curve[0] = plain * base[0]  # a plain step takes as long with any drafter
        return monotone(curve)

    def _contextual(self, batch: int, context: int) -> Curve:
        contexts = sorted(c for b, c in self._verify if b == batch)
        lo, hi, w = bracket(contexts, context)
        low = self._verify[batch, lo]
        return [max(near, far) for near, far in zip(low, _between(low, self._verify[batch, hi], w), strict=True)]

    def draft_curve(self, part: CostPart, batch: int) -> Curve:
        """Seconds of a draft alone, by K. Cached; treat as read-only."""
        curve = self._drafts.get((part, batch))
        if curve is None:
            curves = self._draft.get(part) or {1: [0.0] * CURVE_LENGTH}
            lo, hi, w = bracket(sorted(curves), batch)
            curve = [max(0.0, seconds) for seconds in _between(curves[lo], curves[hi], w)]
            self._drafts[part, batch] = curve
        return curve

    def _part(self, drafter: str | None, tree: bool) -> CostPart | None:
        """The timed part of a drafter in a cycle; None: none."""
        part = CostPart("tree" if tree else "draft", drafter)
        return part if part in self._draft else None

    def _knot(self, batch: int) -> int:
        return min(self._batches, key=lambda b: abs(math.log(b / batch)))

    # ---- refreshing ------------------------------------------------------------------------------------------------
    def observe(self, timing: StepTiming, predicted: float | None = None) -> None:
        """Learn from one finished cycle. predicted: its seconds, if its sequences drafted differently; such a cycle
        updates the drift, and no cell."""
        if not timing.seconds > 0.0:
            return
        part = self._part(timing.drafter, timing.tree)
        cell = min(MAX_DRAFT, max(0, round(timing.k)))
        if part is not None and cell == 0:
            return  # the draft was dropped before verification: neither a plain step nor a draft of any width
        one_cell = predicted is None
        if predicted is None:
            curve = self.curve(timing.drafter, timing.batch, context=timing.context, tree=timing.tree)
            predicted = at_k(curve, timing.k)
        surprise = math.log(timing.seconds / predicted) - self.drift
        kind = (part, timing.batch, cell)
        if self.observed == 0:  # the table may be old: the first deviation is attributed to the machine altogether
            self.drift = surprise
            self.observed = 1
            self._last = kind
            return
        surprise = min(CLAMP, max(-CLAMP, surprise))
        self.drift += DRIFT_GAIN * surprise
        if one_cell and kind != self._last:
            corrected = (part, self._knot(timing.batch), cell)
            self._wrong[corrected] = self._wrong.get(corrected, 0.0) + CELL_GAIN * surprise
            self._last = kind
        self.observed += 1
        if self.observed % REBUILD_EVERY == 1:
            self._cache.clear()
            self._reaches.clear()
            for (part, knot, cell), log_gain in self._wrong.items():
                self._correct(part, knot, cell=cell, log_gain=log_gain)
            self._wrong.clear()

    def _correct(self, part: CostPart | None, knot: int, cell: int, log_gain: float) -> None:
        """Move one cell, wider ones by as much, narrower ones by half as much per step away: otherwise a cell that
        looks too expensive would never be tried again."""
        factor = self._factor.setdefault((part if cell else None, knot), [1.0] * CURVE_LENGTH)
        gain = math.exp(log_gain)
        # a plain step does not predict drafted ones, nor the reverse
        for k in range(1, CURVE_LENGTH) if cell else (0,):
            share = gain if k >= cell else math.exp(log_gain * 0.5 ** (cell - k))
            factor[k] = min(4.0, max(0.25, factor[k] * share))

    # ---- keeping ---------------------------------------------------------------------------------------------------
    def to_json(self) -> dict[str, object]:
        drafts = [[*part, b, t] for part, curves in self._draft.items() for b, t in sorted(curves.items())]
        return {
            "key": self.key,
            "verify": [[b, c, t] for (b, c), t in sorted(self._verify.items())],
            "draft": drafts,
            "reading": self.reading,
            "factor": [[part, b, by_k] for (part, b), by_k in self._factor.items()],
        }

    @staticmethod
    def from_json(raw: Foreign) -> CostTable:
        try:
            draft: dict[str | CostPart, dict[int, Curve]] = {}
            for kind, name, batch, seconds in raw["draft"]:
                draft.setdefault(CostPart(kind, name), {})[int(batch)] = seconds
            verify = {(int(b), int(c)): t for b, c, t in raw["verify"]}
            reading = {str(n): float(t) for n, t in raw["reading"].items()}
            table = CostTable(verify, draft, raw["key"], reading=reading)
            for part, batch, by_k in raw["factor"]:
                if len(by_k) != CURVE_LENGTH:
                    raise ValueError("by_k")
                table._factor[CostPart(*part) if part is not None else None, int(batch)] = [float(f) for f in by_k]
        except (KeyError, TypeError, ValueError) as error:
            raise OutriderError(f"not a cost table ({error}): delete it and it is measured again") from error
        return table

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")  # two processes may finish together
        part.write_text(json.dumps(self.to_json()), encoding="utf-8")
        part.replace(path)

    @staticmethod
    def load(path: Path, key: str) -> CostTable | None:
        """The stored table, or None when there is none for this key (or it cannot be read: it is only a cache)."""
        try:
            table = CostTable.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, OutriderError):
            return None
        return table if table.key == key else None


def bracket(knots: Sequence[int], x: float) -> tuple[int, int, float]:
    """The two knots around x, and the upper one's weight; extrapolated above the last, clamped below the first."""
    if len(knots) == 1 or x <= knots[0]:
        return knots[0], knots[0], 0.0
    i = min(bisect_right(knots, x), len(knots) - 1)
    lo = knots[i - 1]
    hi = knots[i]
    return lo, hi, (x - lo) / (hi - lo)


def at_k(curve: Sequence[float], k: float) -> float:
    """The curve at a fractional K; extrapolated with the last slope."""
    i = min(max(int(k), 0), len(curve) - 2)
    return curve[i] + (k - i) * (curve[i + 1] - curve[i])


def _between(low: Sequence[float], high: Sequence[float], weight: float) -> Curve:
    return [a + weight * (b - a) for a, b in zip(low, high, strict=True)]


def monotone(curve: Sequence[float]) -> Curve:
    """No cell above a wider one. A cell that was timed at a busy moment is too high, so the wider one counts."""
    return list(accumulate(map(float, reversed(curve)), min))[::-1]
