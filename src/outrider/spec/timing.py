"""Fills a cost table: times the most informative parts of a cycle, within a budget of seconds. Torch-free.

`measure` makes a table from a callable that runs a part once; `agrees` tells whether a stored table is still valid.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

import numpy as np

from .cost import CURVE_LENGTH, CostTable, Curve, at_k, monotone
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
    rounds: int = ROUNDS,
) -> CostTable:
    """Time the most informative cells within the budget; others are derived.

    whole: a drafter's probe runs a cycle (that of a tree always does). A cell's time is the median of its ratios to the
    plain step of the same round: next to a busy process the least samples would mislead, as only short steps run
    undisturbed."""
    (one, *_) = grid.batches
    ks = grid.ks
    first = min(grid.contexts)
    start = clock()
    order = _order(drafters, grid)
    times: dict[Cell, list[float]] = {}
    shares: dict[Cell, list[float]] = {}  # the same, in plain steps of the same round
    # A single user's choices rest on these, so they are timed most often.
    near = [cell for cell in order if cell[1] == one and cell[3] == first and cell[0].kind != "reading"]

    def run(cell: Cell) -> float:
        began = clock()
        probe(*cell)
        return max(1e-9, clock() - began)

    # Round by round, so that a slow moment affects one sample of each cell and not all samples of one.
    for turn in range(rounds):
        for cell in order if turn < 2 else near:
            left = budget_s - (clock() - start)
            part, batch, k, _ = cell
            guess = min(times[cell]) if cell in times else _guess(times, part, batch * (k + 1))
            mandatory = turn == 0 and batch == one and (part != VERIFY or k in (ks[0], ks[-1]))
            if not mandatory and guess * (2 if cell not in times else 1) > left:
                continue
            took = run(cell)
            # The first run of a shape compiles, allocates, fills caches. It counts only where time is out and it cannot
            # have compiled much.
            if cell not in times and not (mandatory and clock() - start > budget_s and took <= 4 * guess):
                took = run(cell)
            times.setdefault(cell, []).append(took)
            shares.setdefault(cell, []).append(took / times[order[0]][-1])
    plain = median_low(times[order[0]])
    usual = {cell: plain * median_low(ratios) for cell, ratios in shares.items()}
    read = {}
    for d in drafters:
        if d.reads:
            seconds = usual.pop((CostPart("reading", d.name), one, 1, first))
            read[d.name] = max(0.0, seconds - usual[d.draft, one, d.ks[0], first]) / READING
    for cell in [cell for cell in usual if cell[0].kind == "tree" or (whole and cell[0].kind == "draft")]:
        seconds = usual.pop(cell)
        verify = {k: t for (part, b, k, c), t in usual.items() if part == VERIFY and (b, c) == (cell[1], cell[3])}
        if verify:
            usual[cell] = max(0.0, seconds - _spread(verify)[cell[2]])
    return _assemble(usual, drafters, grid, key=key, read=read)


def _order(drafters: Sequence[TimedDrafter], grid: ProbeGrid) -> list[Cell]:
    """The cells worth timing, the most telling first."""
    (one, *larger) = grid.batches
    ks = grid.ks
    (first, *further) = sorted(grid.contexts)
    order = [(VERIFY, one, k, first) for k in ks]
    order += [(part, one, k, first) for d in drafters for part in d.parts for k in d.ks]
    order += [(VERIFY, one, k, c) for c in further for k in (0, 8)]
    # the largest batches early: those between are interpolated
    if len(larger) > 4:
        larger = list(dict.fromkeys([*grid.batches[:0:-2], *grid.batches[1::2]]))
    order += [(VERIFY, b, k, first) for b in larger for k in (0, 1, 4)]
    order += [(d.draft, b, 4, first) for d in drafters for b in larger]
    reading: list[Cell] = [(CostPart("reading", d.name), one, 1, first) for d in drafters if d.reads]
    return [*order[: len(ks) + 3], *reading, *order[len(ks) + 3 :]]


def agrees(
    table: CostTable,
    probe: Probe,
    drafter: str | None,
    context: int,
    budget_s: float = 0.25,
    clock: Callable[[], float] = time.perf_counter,
    whole: bool = False,
) -> bool:
    """Is a stored table still valid? Times a plain and a drafted cycle (without a drafter that takes time, a verify
    pass): only their ratio counts. Close agreement needs few samples."""
    timed = [TimedDrafter(drafter, one_pass=True)] if drafter is not None else []
    k = 4
    was = table.curve(drafter, 1, context)
    grid = ProbeGrid((1,), (context,), (0, k))
    for rounds, tolerance in ((2, DISAGREE / 3), (ROUNDS, DISAGREE)):
        now = measure(probe, timed, grid, budget_s=budget_s, key=None, clock=clock, whole=whole, rounds=rounds).curve(
            drafter, 1, context
        )
        if was[0] > 0.0 and abs(math.log(now[k] / now[0] * was[0] / was[k])) < tolerance:
            return True
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
    grid: ProbeGrid,
    key: str | None,
    read: Mapping[str, float],
) -> CostTable:
    groups: dict[tuple[CostPart, int, int], dict[int, float]] = {}
    for (part, batch, k, context), seconds in times.items():
        groups.setdefault((part, batch, context), {})[k] = seconds
    one = grid.batches[0]
    first = min(grid.contexts)
    base = _spread(groups[VERIFY, one, first])
    # Read at the same number of rows, the base curve replaces batches beyond those that were timed (those between are
    # interpolated) and gives the shape in K between the few widths that were timed.
    same_rows = {b: [at_k(base, b * (k + 1) / one - 1) for k in range(CURVE_LENGTH)] for b in grid.batches}
    largest = max(b for part, b, _ in groups if part == VERIFY)
    verify = {(b, first): monotone(same_rows[b]) for b in grid.batches if b > largest}
    for (part, batch, context), known in groups.items():
        if part == VERIFY:
            verify[batch, context] = monotone(_follow(same_rows[batch], known))
    near = {b: curve for (b, c), curve in verify.items() if c == first}
    for far in [c for b, c in verify if c != first]:  # attention's share grows with batch and context alike
        for batch, curve in near.items():
            if batch != one:
                pairs = zip(curve, verify[one, far], near[one], strict=True)
                verify[batch, far] = [t + max(0.0, f - n) * batch / one for t, f, n in pairs]
    parts: dict[str | CostPart, dict[int, Curve]] = {}
    for d in drafters:
        for (part, batch, _), known in groups.items():
            if part in d.parts:
                curve = [0.0, *[max(known.values())] * (CURVE_LENGTH - 1)] if d.one_pass else _spread({0: 0.0, **known})
                parts.setdefault(part, {})[batch] = curve
    return CostTable(verify, parts, key, reading=read)


def _spread(known: Mapping[int, float]) -> Curve:
    """Times at a few K -> at all K: linear between, the mean slope beyond."""
    ks, times = zip(*sorted(known.items()))
    slope = max(0.0, (times[-1] - times[0]) / max(1, ks[-1] - ks[0]))
    every = np.arange(CURVE_LENGTH)
    return monotone(np.interp(every, ks, times) + slope * np.maximum(0, every - ks[-1]))


def _follow(reference: Sequence[float], known: Mapping[int, float]) -> Curve:
    """The reference's shape, scaled through the known points (their ratio to it, linear in K)."""
    ks = sorted(known)
    ratios = np.interp(range(CURVE_LENGTH), ks, [known[k] / reference[k] for k in ks])
    return [t * float(ratio) for t, ratio in zip(reference, ratios, strict=True)]
