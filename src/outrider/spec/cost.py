"""What a cycle costs on this machine: step time by batch, K and context, plus the drafter's own time. Torch-free.

A `CostTable` holds measured times at a few knots and answers for everything between: linear in the batch and in the
context, monotone in K (a wider step is never taken to be cheaper: a dip is noise). `measure` fills it in at most three
seconds from a callable of the engine's; `observe` keeps it true while the engine runs; `save` / `load` keep it between
runs, keyed by machine, model and version.

Two things change a step's time: the machine (another process, a hotter chip: every cell alike) and a cell that was
mis-measured. Only the second matters for choosing K. So a surprise is first put down to the machine (`drift`), and to
the cell only when the step before was of another kind: then the two were timed under the same conditions and their
ratio means something.
"""

from __future__ import annotations

import json
import math
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median_low

from ..models.config import Foreign
from ..ops.cpu.build import processor
from ..types import MAX_DRAFT, OutriderError
from .plan import READING, reading

WIDTH = MAX_DRAFT + 1  # K = 0..16
Curve = list[float]  # seconds by K, WIDTH entries
Cell = tuple[str, int, int, int]  # (part: "verify" or a drafter's name, batch, k, context)
Probe = Callable[[str, int, int, int], object]  # runs such a part once, to its end

FORMAT = 6  # of stored tables: raised when what is timed changes, or how
DRIFT_GAIN = 0.1  # share of a surprise that is put down to the machine
CELL_GAIN = 0.15  # share that is put down to the cell, where the step before was of another kind
CLAMP = 0.25  # log of the largest surprise believed at once: one interrupted step must not move the table
ROUNDS = 24  # samples of a cell, while time is left
DISAGREE = (
    0.25  # log of how far a stored table's ratio of a drafted to a plain cycle may be off before it is measured again
)
REBUILD_EVERY = 16  # observations between two rebuilds of the cached curves


@dataclass(frozen=True)
class CostKey:
    """A stored table is only used where all three agree."""

    machine: str
    model: str
    version: str


def machine_name(accelerator: str | None = None, threads: int | None = None) -> str:
    """Processor, threads and accelerator: what a measured time depends on besides the model."""
    parts = [processor(), f"{threads or os.cpu_count()} threads"]
    return " / ".join(parts + ([accelerator] if accelerator else []))


class CostTable:
    """Seconds of a cycle. Verify rows are packed: what they cost follows their sum."""

    def __init__(
        self,
        verify: Mapping[tuple[int, int], Sequence[float]] | None = None,
        draft: Mapping[str, Mapping[int, Sequence[float]]] | None = None,
        key: CostKey | None = None,
        reading: Mapping[str, float] | None = None,
    ) -> None:
        """reading: seconds that a token of a text takes a drafter which reads it itself. Without figures: a careful
        guess (a row costs 15 % of a plain step, a drafted token 8 %), corrected by `observe`."""
        if verify is None:
            verify = {(b, 0): [0.85 + 0.15 * b * (k + 1) for k in range(WIDTH)] for b in (1, 32)}
        if draft is None:
            draft = {name: {1: [0.08 * k for k in range(WIDTH)]} for name in ("mtp", "draft_model", "medusa")}
        if not verify:
            raise OutriderError("a cost table needs at least one measured step")
        curves = [(f"verify {knot}", c) for knot, c in verify.items()] + [
            (f"{d} {b}", c) for d, cs in draft.items() for b, c in cs.items()
        ]
        for name, curve in curves:
            if len(curve) != WIDTH or any(not (t >= 0.0 and math.isfinite(t)) for t in curve):
                raise OutriderError(f"cost table: {name} needs {WIDTH} finite times >= 0")
        self.key, self.reading = key, dict(reading or {})
        self.drift = 0.0  # log of how much slower the machine is now than when the table was measured
        self.observed = 0
        self._verify = {knot: _monotone(curve) for knot, curve in verify.items()}
        self._draft = {name: {b: _monotone(c) for b, c in curves.items()} for name, curves in draft.items()}
        self._batches = sorted({b for b, _ in verify})
        self._factor: dict[
            tuple[str, int], Curve
        ] = {}  # (drafter or "", batch knot) -> correction of a whole cycle by K
        self._wrong: dict[
            tuple[str, int, int], float
        ] = {}  # (drafter or "", batch knot, K) -> log of what is to be corrected
        self._cache: dict[tuple[str | None, int, int], Curve] = {}
        self._drafts: dict[tuple[str, int], Curve] = {}
        self._last: tuple[str, int, int] | None = None
        self._pending = 0

    @staticmethod
    def linear(base: float, per_row: float, draft: Mapping[str, float] | None = None) -> CostTable:
        """A step of R rows takes base + per_row·R; a drafter its time a token. For tests and predictions."""
        verify = {
            (b, c): [base + per_row * b * (k + 1) for k in range(WIDTH)]
            for b in (1, 2, 4, 8, 16, 32)
            for c in (0, 8192)
        }
        return CostTable(verify, {n: {1: [t * k for k in range(WIDTH)]} for n, t in (draft or {}).items()})

    # ---- reading ---------------------------------------------------------------------------------------------------
    def verify(self, batch: int, k: float, context: int) -> float:
        """Seconds of one target step over `batch` sequences with k drafted tokens each (on average)."""
        return _at(self.curve(None, batch, context), k)

    def draft(self, drafter: str, batch: int, k: int) -> float:
        return self.draft_curve(drafter, batch)[k]

    def mixed(self, cycle: Sequence[tuple[str | None, int, float]], context: int) -> float:
        """Seconds of a cycle whose sequences draft differently: of each its drafter, the tokens verified and the tokens
        drafted."""
        seconds = self.verify(len(cycle), sum(k for _, k, _ in cycle) / len(cycle), context)
        for name in {name for name, _, steps in cycle if steps and name}:
            if not self.free(name):
                users = [steps for n, _, steps in cycle if n == name]
                seconds += self.draft(name, len(users), round(max(users)))
        return seconds

    def curve(self, drafter: str | None, batch: int, context: int) -> Curve:
        """Seconds of a whole cycle by K: draft and verify. Relative to the moment of measuring: `drift` is left out,
        since it scales every choice alike. Cached; treat as read-only."""
        key = (drafter, batch, context >> 7)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = self._build(drafter, batch, (context >> 7 << 7) + 64)
        return found

    def plain_now(self, context: int) -> float:
        """Seconds of a plain step of one sequence on the machine as it is now."""
        return self.curve(None, 1, context)[0] * math.exp(self.drift)

    def free(self, drafter: str) -> bool:
        """Whether proposing costs nothing worth counting (an n-gram match)."""
        return drafter not in self._draft

    def _build(self, drafter: str | None, batch: int, context: int) -> Curve:
        lo, hi, w = _bracket(self._batches, batch)
        curve = _between(self._contextual(lo, context), self._contextual(hi, context), w)
        plain, name, knot = curve[0], self._named(drafter), self._knot(batch)
        if name:
            curve = [plain, *(v + d for v, d in zip(curve[1:], self.draft_curve(name, batch)[1:], strict=True))]
        factor, base = self._factor.get((name, knot)), self._factor.get(("", knot))
        if factor is not None:
            curve = [t * f for t, f in zip(curve, factor, strict=True)]
        if base is not None:
            curve[0] = plain * base[0]  # a plain step takes as long, whichever drafter does not draft in it
        return _monotone(curve)

    def _contextual(self, batch: int, context: int) -> Curve:
        contexts = sorted(c for b, c in self._verify if b == batch)
        lo, hi, w = _bracket(contexts, context)
        low = self._verify[batch, lo]
        return [max(near, far) for near, far in zip(low, _between(low, self._verify[batch, hi], w), strict=True)]

    def draft_curve(self, drafter: str, batch: int) -> Curve:
        """Seconds of a draft alone, by K. Cached; treat as read-only."""
        found = self._drafts.get((drafter, batch))
        if found is None:
            curves = self._draft.get(drafter) or {1: [0.0] * WIDTH}
            lo, hi, w = _bracket(sorted(curves), batch)
            found = self._drafts[drafter, batch] = [max(0.0, t) for t in _between(curves[lo], curves[hi], w)]
        return found

    def _named(self, drafter: str | None) -> str:
        """The drafter whose time counts in a cycle; "": nobody's."""
        return drafter if drafter is not None and drafter in self._draft else ""

    def _knot(self, batch: int) -> int:
        return min(self._batches, key=lambda b: abs(math.log(b / batch)))

    # ---- refreshing ------------------------------------------------------------------------------------------------
    def observe(
        self, batch: int, k: float, context: int, seconds: float, drafter: str | None, mixed: float | None = None
    ) -> None:
        """One finished cycle (no prompt chunk in it): k drafted tokens a sequence by `drafter`, all of it in `seconds`.
        mixed: what the table predicted for a cycle whose sequences drafted differently; it says something of the
        machine, and nothing of any one cell."""
        if not seconds > 0.0:
            return
        name = self._named(drafter)
        cell = min(MAX_DRAFT, max(0, round(k)))
        if name and cell == 0:
            return  # what was drafted was left out again: neither a plain step nor a draft of any width
        predicted = mixed if mixed is not None else _at(self.curve(drafter, batch, context), k)
        surprise = math.log(seconds / predicted) - self.drift
        if (
            self.observed == 0
        ):  # the table may come from a busier or idler day: all of the first surprise is the machine's
            self.drift, self.observed, self._last = surprise, 1, (name, batch, cell)
            return
        surprise = min(CLAMP, max(-CLAMP, surprise))
        self.drift += DRIFT_GAIN * surprise
        kind = (name, batch, cell) if mixed is None else self._last
        if kind is not None and kind != self._last:
            at = (name, self._knot(batch), cell)
            self._wrong[at] = self._wrong.get(at, 0.0) + CELL_GAIN * surprise
            self._last = kind
        self.observed += 1
        self._pending += 1
        if self._pending >= REBUILD_EVERY:
            self._pending = 0
            self._cache.clear()
            for (name, knot, cell), log_gain in self._wrong.items():
                self._correct(name, knot, cell, log_gain)
            self._wrong.clear()

    def _correct(self, name: str, knot: int, cell: int, log_gain: float) -> None:
        """Move one cell, and its neighbours with it: wider cells by as much, narrower ones by half as much for every
        step away. What was wrong here is taken to be wrong there too until they are timed themselves; otherwise one
        that looks too dear would never be tried again."""
        name = "" if cell == 0 else name
        factor = self._factor.setdefault((name, knot), [1.0] * WIDTH)
        gain = math.exp(log_gain)
        for k in range(1, WIDTH) if cell else (0,):  # a plain step says nothing of drafted ones, nor they of it
            share = gain if k >= cell else math.exp(log_gain * 0.5 ** (cell - k))
            factor[k] = min(4.0, max(0.25, factor[k] * share))

    # ---- keeping ---------------------------------------------------------------------------------------------------
    def to_json(self) -> dict[str, object]:
        return {
            "key": asdict(self.key) if self.key else None,
            "verify": [{"batch": b, "context": c, "seconds": t} for (b, c), t in sorted(self._verify.items())],
            "draft": {n: [{"batch": b, "seconds": t} for b, t in sorted(cs.items())] for n, cs in self._draft.items()},
            "reading": self.reading,
            "factor": [{"drafter": n, "batch": b, "by_k": f} for (n, b), f in sorted(self._factor.items())],
        }

    @staticmethod
    def from_json(raw: Foreign) -> CostTable:
        try:
            table = CostTable(
                {(int(e["batch"]), int(e["context"])): e["seconds"] for e in raw["verify"]},
                {n: {int(e["batch"]): e["seconds"] for e in es} for n, es in raw["draft"].items()},
                CostKey(**raw["key"]) if raw["key"] else None,
                {str(n): float(t) for n, t in raw["reading"].items()},
            )
            for entry in raw["factor"]:
                if len(entry["by_k"]) != WIDTH:
                    raise ValueError("by_k")
                table._factor[str(entry["drafter"]), int(entry["batch"])] = [float(f) for f in entry["by_k"]]
        except (KeyError, TypeError, ValueError) as error:
            raise OutriderError(f"not a cost table ({error}): delete it and it is measured again") from error
        return table

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")  # two processes may finish together
        part.write_text(json.dumps(self.to_json()), encoding="utf-8")
        part.replace(path)

    @staticmethod
    def load(path: Path, key: CostKey) -> CostTable | None:
        """The stored table, or None when there is none for this key (or it cannot be read: it is only a cache)."""
        try:
            table = CostTable.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, OutriderError):
            return None
        return table if table.key == key else None


# ---- measuring ---------------------------------------------------------------------------------------------------
def measure(
    probe: Probe,
    drafters: Sequence[str] = (),
    batches: Sequence[int] = (1, 4, 16),
    contexts: Sequence[int] = (256, 2048),
    ks: Sequence[int] = (0, 1, 2, 4, 8, 16),
    budget_s: float = 3.0,
    key: CostKey | None = None,
    clock: Callable[[], float] = time.perf_counter,
    whole: bool = False,
    trees: Sequence[str] = (),
    readers: Sequence[str] = (),
    alone: bool = False,
) -> CostTable:
    """Time the most telling cells first and stop within the budget; what is left over is read off what was measured.

    `drafters` are those whose drafting takes time (an n-gram match does not). `contexts` must fit the engine's cache.
    `whole`: a drafter's probe runs a cycle with it, not the draft alone. `trees`: drafters' trees of a fixed size by
    depth, of a single sequence (plan.branching); their probes always run a cycle. `readers`: drafters that read texts
    themselves (plan.reading). `alone`: nobody else uses the device, so the least sample of a cell is its time.
    Otherwise it is the median of its samples' ratios to the plain step of the same round. Beside a busy process a short
    step is often left in peace and a long one never: the least samples of the two are of different machines."""
    start, first = clock(), min(contexts)
    order = _order(drafters, batches, contexts, ks, trees, readers)
    times: dict[Cell, list[float]] = {}
    shares: dict[Cell, list[float]] = {}  # the same, in plain steps of the same round
    read_apart = [reading(d) for d in readers]
    # A single user's choices rest on these, so they are timed most often.
    near = [cell for cell in order if cell[1] == batches[0] and cell[3] == first and cell[0] not in read_apart]
    for rounds in range(
        ROUNDS
    ):  # round by round, so that a slow moment spoils one sample of each cell and not all samples of one
        for cell in order if rounds < 2 else near:
            left = budget_s - (clock() - start)
            part, batch, k, _ = cell
            guess = min(times[cell]) if cell in times else _guess(times, part, batch * (k + 1))
            mandatory = rounds == 0 and batch == batches[0] and (part != "verify" or k in (ks[0], ks[-1]))
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
    usual = {cell: min(times[cell]) if alone else plain * median_low(found) for cell, found in shares.items()}
    read = {}
    for d in readers:
        seconds = usual.pop((reading(d), batches[0], 1, first))
        read[d] = max(0.0, seconds - usual[d, batches[0], 1, first]) / READING
    if whole or trees:
        for cell in [cell for cell in usual if cell[0] in (trees if not whole else (*drafters, *trees))]:
            seconds = usual.pop(cell)
            verify = {
                k: t
                for (part, batch, k, context), t in usual.items()
                if part == "verify" and (batch, context) == (cell[1], cell[3])
            }
            if verify:
                usual[cell] = max(0.0, seconds - _spread(verify)[cell[2]])
    return _assemble(usual, (*drafters, *trees), batches, key, read)


def _order(
    drafters: Sequence[str], batches: Sequence[int], contexts: Sequence[int], ks: Sequence[int], trees: Sequence[str],
    readers: Sequence[str],
) -> list[Cell]:  # fmt: skip
    """The cells worth timing, the most telling first."""
    one, (first, *further) = batches[0], sorted(contexts)
    order = [("verify", one, k, first) for k in ks]
    order += [(d, one, k, first) for d in (*drafters, *trees) for k in (1, 4, 8)]
    order += [("verify", one, k, c) for c in further for k in (0, 8)]
    more = (
        [*batches[:0:-2], *batches[1::2]] if len(batches) > 5 else batches[1:]
    )  # the largest early: between batches is read off
    more = list(dict.fromkeys(more))
    order += [("verify", b, k, first) for b in more for k in (0, 1, 4)]
    order += [(d, b, 4, first) for d in drafters for b in more]
    order[len(ks) + 3 : len(ks) + 3] = [(reading(d), one, 1, first) for d in readers]
    return order


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
    """Is a stored table still true of this machine? Times a plain and a drafted cycle side by side: what both take more
    of today changes no choice, so only their ratio counts (its median, as in `measure`). Without a drafter whose time
    counts, the drafted cycle is a verify pass over k guesses that cost nothing. Agreement that is close needs few
    samples: somebody waits for the first token meanwhile."""
    drafted = [] if whole and drafter is not None else [("verify", 1, k, context)]
    drafted += [(drafter, 1, k, context)] if drafter is not None else []
    cells = [("verify", 1, 0, context), *drafted]
    curve = table.curve(drafter, 1, context)
    if not (curve[0] > 0.0 and curve[k] > 0.0):
        return False  # a cycle takes time: whoever stored this did not measure it
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


def _guess(times: Mapping[Cell, Sequence[float]], part: str, rows: int) -> float:
    """An upper guess of an untried cell: proportional to its rows from the nearest tried one."""
    known = [(b * (k + 1), min(t)) for (p, b, k, _), t in times.items() if p == part]
    if not known:
        return 0.0
    near, seconds = min(known, key=lambda e: abs(e[0] - rows))
    return seconds * max(1.0, rows / near)


def _assemble(
    times: Mapping[Cell, float],
    drafters: Sequence[str],
    batches: Sequence[int],
    key: CostKey | None,
    read: Mapping[str, float],
) -> CostTable:
    groups: dict[tuple[str, int, int], dict[int, float]] = {}
    for (part, batch, k, context), seconds in times.items():
        groups.setdefault((part, batch, context), {})[k] = seconds
    base_batch = min(b for p, b, _ in groups if p == "verify")
    base_context = min(c for p, b, c in groups if p == "verify" and b == base_batch)
    base = _spread(groups["verify", base_batch, base_context])
    # the base curve, read at the same number of rows, stands in for batches there was no time for ...
    same_rows = {
        b: [_at(base, b * (k + 1) / base_batch - 1) for k in range(WIDTH)]
        for b in {*batches, *(b for _, b, _ in groups)}
    }
    timed = {b for p, b, _ in groups if p == "verify"}  # batches between two of these are read off them
    verify: dict[tuple[int, int], Curve] = {
        (b, base_context): _monotone(same_rows[b]) for b in batches if b > max(timed) or b in timed
    }
    for (part, batch, context), known in groups.items():
        if part == "verify":  # ... and gives the shape in K between the few widths that were timed
            verify[batch, context] = _monotone(_follow(same_rows[batch], known))
    far = {c: verify[base_batch, c] for b, c in verify if b == base_batch and c != base_context}
    for batch in {b for b, _ in verify if b != base_batch}:  # attention's share grows with batch and context alike
        for context, curve in far.items():
            if (batch, context) not in verify and (batch, base_context) in verify:
                extra = [
                    max(0.0, f - n) * batch / base_batch
                    for f, n in zip(curve, verify[base_batch, base_context], strict=True)
                ]
                verify[batch, context] = [t + e for t, e in zip(verify[batch, base_context], extra, strict=True)]
    draft: dict[str, dict[int, Curve]] = {}
    for name in drafters:
        for (part, batch, _), known in groups.items():
            if part == name:
                draft.setdefault(name, {})[batch] = _spread({0: 0.0, **known})
    return CostTable(verify, draft, key, read)


def _spread(known: Mapping[int, float]) -> Curve:
    """Times at a few K -> at all: linear between, the mean slope beyond."""
    ks = sorted(known)
    if len(ks) == 1:
        return [known[ks[0]]] * WIDTH
    slope = max(0.0, (known[ks[-1]] - known[ks[0]]) / (ks[-1] - ks[0]))
    curve = []
    for k in range(WIDTH):
        lo, hi, w = _bracket(ks, k)
        curve.append(known[ks[-1]] + slope * (k - ks[-1]) if k > ks[-1] else known[lo] + w * (known[hi] - known[lo]))
    return _monotone(curve)


def _follow(reference: Sequence[float], known: Mapping[int, float]) -> Curve:
    """The reference's shape, bent through the known points (their ratio to it, linear in K)."""
    ratio = {k: t / reference[k] for k, t in known.items()}
    ks = sorted(ratio)
    curve = []
    for k in range(WIDTH):
        lo, hi, w = _bracket(ks, min(max(k, ks[0]), ks[-1]))
        curve.append(reference[k] * (ratio[lo] + w * (ratio[hi] - ratio[lo])))
    return curve


def _bracket(knots: Sequence[int], x: float) -> tuple[int, int, float]:
    """The two knots around x and the weight of the upper one; beyond the last pair the line goes on, below the first it
    stops."""
    if len(knots) == 1 or x <= knots[0]:
        return knots[0], knots[0], 0.0
    i = min(bisect_right(knots, x), len(knots) - 1)
    lo, hi = knots[i - 1], knots[i]
    return lo, hi, (x - lo) / (hi - lo)


def _at(curve: Sequence[float], k: float) -> float:
    """The curve at a fractional K; beyond its end the last slope goes on."""
    i = min(max(int(k), 0), len(curve) - 2)
    return curve[i] + (k - i) * (curve[i + 1] - curve[i])


def _between(low: Sequence[float], high: Sequence[float], weight: float) -> Curve:
    return [a + weight * (b - a) for a, b in zip(low, high, strict=True)]


def _monotone(curve: Sequence[float]) -> Curve:
    return list(accumulate(map(float, curve), max, initial=0.0))[1:]
