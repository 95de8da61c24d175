"""Fills a cost table: times the most informative parts of a cycle, within a budget of seconds. Torch-free.

`measure` makes a table from a callable that runs a part once; `agrees` tells whether a stored table is still valid.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from .cost import CURVE_LENGTH, CostTable, Curve, at_k, bracket, monotone
from .plan import READING, VERIFY, CostPart

Cell = tuple[CostPart, int, int, int]  # (part, batch, k, context)
Probe = Callable[[CostPart, int, int, int], object]  # runs such a part once, to its end
ROUNDS = 24  # samples of a cell, while time is left
# log of how far a stored table's ratio of a drafted to a plain cycle may be off before it is measured again
DISAGREE = 0.25


@dataclass(frozen=True)
class TimedDrafter:
    """A drafter whose drafting takes time (an n-gram match does not), and its timed parts."""

    name: str
    one_pass: bool = False  # one pass drafts all tokens: its time does not grow with K
    trees: bool = False  # also cycles with trees of a fixed size, of a single sequence
    reads: bool = False  # also its reading of a text

    @property
    def draft(self) -> CostPart:
        return CostPart("draft", self.name)

    @property
    def parts(self) -> tuple[CostPart, ...]:
        return (self.draft, CostPart("tree", self.name)) if self.trees else (self.draft,)

    @property
    def ks(self) -> tuple[int, ...]:
        return (4,) if self.one_pass else (1, 4, 8)


@dataclass(frozen=True)
class ProbeGrid:
    """The cells of a table to be timed. Contexts must fit the engine's cache."""

    batches: Sequence[int] = (1, 4, 16)
    contexts: Sequence[int] = (256, 2048)
    ks: Sequence[int] = (0, 1, 2, 4, 8, 16)


def measure(
    probe: Probe,
    drafters: Sequence[TimedDrafter] = (),
    grid: ProbeGrid = ProbeGrid(),
    budget_s: float = 3.0,
    key: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
    whole: bool = False,
) -> CostTable:
    """Time the most informative cells within the budget; others are derived.

    whole: a drafter's probe runs a cycle (that of a tree always does). A cell's time is the median of its ratios to the
    plain step of the same round: next to a busy process the least samples would mislead, as only short steps run
    undisturbed."""
    batches, ks = grid.batches, grid.ks
    start, first = clock(), min(grid.contexts)
    order = _order(drafters, grid)
    times: dict[Cell, list[float]] = {}
    shares: dict[Cell, list[float]] = {}  # the same, in plain steps of the same round
    # A single user's choices rest on these, so they are timed most often.
    near = [cell for cell in order if cell[1] == batches[0] and cell[3] == first and cell[0].kind != "reading"]
    # Round by round, so that a slow moment affects one sample of each cell and not all samples of one.
    for rounds in range(ROUNDS):
        for cell in order if rounds < 2 else near:
            left = budget_s - (clock() - start)
            part, batch, k, _ = cell
            guess = min(times[cell]) if cell in times else _guess(times, part, batch * (k + 1))
            mandatory = rounds == 0 and batch == batches[0] and (part != VERIFY or k in (ks[0], ks[-1]))
            if not mandatory and guess * (2 if cell not in times else 1) > left:
                continue
            began = clock()
            probe(*cell)
            took = clock() - began
            # The first run of a shape compiles, allocates, fills caches. It counts only where time is out and it cannot
            # have compiled much.
            if cell not in times and not (mandatory and clock() - start > budget_s and took <= 4 * guess):
                began = clock()
                probe(*cell)
                took = clock() - began
            times.setdefault(cell, []).append(took)
            shares.setdefault(cell, []).append(took / max(times[order[0]][-1], 1e-9))
    plain = median_low(times[order[0]])
    usual = {cell: plain * median_low(found) for cell, found in shares.items()}
    read = {}
    for d in drafters:
        if d.reads:
            seconds = usual.pop((CostPart("reading", d.name), batches[0], 1, first))
            read[d.name] = max(0.0, seconds - usual[d.draft, batches[0], d.ks[0], first]) / READING
    for cell in [cell for cell in usual if cell[0].kind == "tree" or (whole and cell[0].kind == "draft")]:
        seconds = usual.pop(cell)
        verify = {k: t for (part, b, k, c), t in usual.items() if part == VERIFY and (b, c) == (cell[1], cell[3])}
        if verify:
            usual[cell] = max(0.0, seconds - _spread(verify)[cell[2]])
    return _assemble(usual, drafters, batches, key, read)


def _order(drafters: Sequence[TimedDrafter], grid: ProbeGrid) -> list[Cell]:
    """The cells worth timing, the most telling first."""
    (one, *rest), ks, (first, *further) = grid.batches, grid.ks, sorted(grid.contexts)
    order = [(VERIFY, one, k, first) for k in ks]
    order += [(part, one, k, first) for d in drafters for part in d.parts for k in d.ks]
    order += [(VERIFY, one, k, c) for c in further for k in (0, 8)]
    # the largest batches early: those between are interpolated
    more = list(dict.fromkeys([*grid.batches[:0:-2], *grid.batches[1::2]])) if len(rest) > 4 else rest
    order += [(VERIFY, b, k, first) for b in more for k in (0, 1, 4)]
    order += [(d.draft, b, 4, first) for d in drafters for b in more]
    reading: list[Cell] = [(CostPart("reading", d.name), one, 1, first) for d in drafters if d.reads]
    return [*order[: len(ks) + 3], *reading, *order[len(ks) + 3 :]]


def agrees(
    table: CostTable,
    probe: Probe,
    drafter: str | None,
    context: int,
    k: int = 4,
    budget_s: float = 0.5,
    clock: Callable[[], float] = time.perf_counter,
    whole: bool = False,
) -> bool:
    """Is a stored table still valid? Times a plain and a drafted cycle side by side (without a drafter that takes
    time, a verify pass over k tokens): only their ratio counts. Close agreement needs few samples."""
    drafted = [] if whole and drafter is not None else [(VERIFY, 1, k, context)]
    drafted += [(CostPart("draft", drafter), 1, k, context)] if drafter is not None else []
    cells = [(VERIFY, 1, 0, context), *drafted]
    curve = table.curve(drafter, 1, context)
    if not (curve[0] > 0.0 and curve[k] > 0.0):
        return False  # a cycle takes time: this was not measured
    ratios, start = list[float](), clock()
    for rounds in range(ROUNDS):
        times = []
        for cell in cells:
            began = clock()
            probe(*cell)
            times.append(clock() - began)
        if min(times) <= 0.0:
            return False  # a clock too coarse to time one step
        if rounds:  # the first run of a shape compiles, allocates, fills caches
            ratios.append(sum(times[1:]) / times[0])
        late = rounds > 0 and clock() - start > budget_s
        if rounds >= 2 or late:
            off = abs(math.log(median_low(ratios) * curve[0] / curve[k]))
            if off < (DISAGREE if rounds >= 6 or late else DISAGREE / 3):
                return True
        if late:
            break
    return False


def _guess(times: Mapping[Cell, Sequence[float]], part: CostPart, rows: int) -> float:
    """An upper bound of an untimed cell: proportional to its rows from the nearest timed one."""
    known = [(b * (k + 1), min(t)) for (p, b, k, _), t in times.items() if p == part]
    if not known:
        return 0.0
    near, seconds = min(known, key=lambda e: abs(e[0] - rows))
    return seconds * max(1.0, rows / near)


def _assemble(
    times: Mapping[Cell, float],
    drafters: Sequence[TimedDrafter],
    batches: Sequence[int],
    key: str | None,
    read: Mapping[str, float],
) -> CostTable:
    groups: dict[tuple[CostPart, int, int], dict[int, float]] = {}
    for (part, batch, k, context), seconds in times.items():
        groups.setdefault((part, batch, context), {})[k] = seconds
    base_batch = min(b for p, b, _ in groups if p == VERIFY)
    base_context = min(c for p, b, c in groups if p == VERIFY and b == base_batch)
    base = _spread(groups[VERIFY, base_batch, base_context])
    # the base curve, read at the same number of rows, replaces batches that were not timed ...
    same_rows = {
        b: [at_k(base, b * (k + 1) / base_batch - 1) for k in range(CURVE_LENGTH)]
        for b in {*batches, *(b for _, b, _ in groups)}
    }
    timed = {b for p, b, _ in groups if p == VERIFY}  # batches between two of these are interpolated
    known_batches = [b for b in batches if b > max(timed) or b in timed]
    verify = {(b, base_context): monotone(same_rows[b]) for b in known_batches}
    for (part, batch, context), known in groups.items():
        if part == VERIFY:  # ... and gives the shape in K between the few widths that were timed
            verify[batch, context] = monotone(_follow(same_rows[batch], known))
    far = {c: verify[base_batch, c] for b, c in verify if b == base_batch and c != base_context}
    for batch in {b for b, _ in verify if b != base_batch}:  # attention's share grows with batch and context alike
        for context, curve in far.items():
            if (batch, context) not in verify and (batch, base_context) in verify:
                near = zip(verify[batch, base_context], curve, verify[base_batch, base_context], strict=True)
                verify[batch, context] = [t + max(0.0, f - n) * batch / base_batch for t, f, n in near]
    draft: dict[str, dict[int, Curve]] = {}
    trees: dict[str, dict[int, Curve]] = {}
    for d in drafters:
        for (part, batch, _), known in groups.items():
            if part in d.parts:
                curve = [0.0, *[max(known.values())] * (CURVE_LENGTH - 1)] if d.one_pass else _spread({0: 0.0, **known})
                (trees if part.kind == "tree" else draft).setdefault(d.name, {})[batch] = curve
    return CostTable(verify, draft, key, read, trees)


def _spread(known: Mapping[int, float]) -> Curve:
    """Times at a few K -> at all K: linear between, the mean slope beyond."""
    ks = sorted(known)
    if len(ks) == 1:
        return [known[ks[0]]] * CURVE_LENGTH
    slope = max(0.0, (known[ks[-1]] - known[ks[0]]) / (ks[-1] - ks[0]))
    curve = []
    for k in range(CURVE_LENGTH):
        lo, hi, w = bracket(ks, k)
        curve.append(known[ks[-1]] + slope * (k - ks[-1]) if k > ks[-1] else known[lo] + w * (known[hi] - known[lo]))
    return monotone(curve)


def _follow(reference: Sequence[float], known: Mapping[int, float]) -> Curve:
    """The reference's shape, scaled through the known points (their ratio to it, linear in K)."""
    ratio = {k: t / reference[k] for k, t in known.items()}
    ks = sorted(ratio)
    curve = []
    for k in range(CURVE_LENGTH):
        lo, hi, w = bracket(ks, min(max(k, ks[0]), ks[-1]))
        curve.append(reference[k] * (ratio[lo] + w * (ratio[hi] - ratio[lo])))
    return curve
