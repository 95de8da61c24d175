"""Turns cells into figures: medians over repeats, speed-up over plain decoding with bootstrap intervals, an HTML
page.

Speed-up of a contestant in a category: seconds per token of plain decoding over its own, on the same prompts, each the
median over the repeats. The 95 % interval resamples prompts (percentile bootstrap, 1000 draws, fixed seed).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median

from jinja2 import Environment

from .. import svg
from .harness import PLAIN, Cell

ALL = "all"
DRAWS = 1000
TEMPLATE = Path(__file__).resolve().parents[1] / "assets" / "bench" / "report.html"


@dataclass(frozen=True)
class Row:
    """One contestant in one category (or all) at one temperature and batch."""

    contestant: str
    category: str
    temperature: float
    batch: int
    prompts: int
    ms_per_token: float
    tokens_per_second: float
    speedup: float | None
    low: float | None
    high: float | None
    ttft_ms: float
    tokens_per_cycle: float | None
    acceptance: float | None  # share of drafted tokens accepted
    by_position: tuple[float, ...]  # share of the tokens drafted at each position
    identical: float | None  # share of prompts answered with plain decoding's very tokens


def summarise(cells: Sequence[Cell]) -> list[Row]:
    rows = []
    for temperature, batch in sorted({(c.temperature, c.batch) for c in cells}):
        here = [c for c in cells if (c.temperature, c.batch) == (temperature, batch)]
        names = sorted(dict.fromkeys(c.contestant for c in here), key=lambda name: name != PLAIN)
        for category in [ALL, *dict.fromkeys(c.category for c in here)]:
            chosen = [c for c in here if category in (ALL, c.category)]
            plain = _medians([c for c in chosen if c.contestant == PLAIN])
            for name in names:
                own_cells = [c for c in chosen if c.contestant == name]
                medians = _medians(own_cells)
                if medians:
                    rows.append(_row(category, own_cells, found=medians, plain=plain))
    return rows


@dataclass(frozen=True)
class _Median:
    seconds: float
    tokens: int
    digest: str


def _medians(cells: Sequence[Cell]) -> dict[str, _Median]:
    """Medians by group; groups too short to time (answers of one step) are left out."""
    by: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.tokens > 0 and cell.seconds > 0:
            by.setdefault(cell.group, []).append(cell)
    return {
        g: _Median(median(c.seconds / c.tokens for c in cs) * cs[0].tokens, cs[0].tokens, cs[0].digest)
        for g, cs in by.items()
    }


def _row(category: str, cells: Sequence[Cell], found: Mapping[str, _Median], plain: Mapping[str, _Median]) -> Row:
    """A row for one contestant at one temperature and batch. found, plain: its medians and plain decoding's."""
    seconds = sum(m.seconds for m in found.values())
    tokens = sum(m.tokens for m in found.values())
    both = [g for g in found if g in plain]
    speedup, low, high = (None, None, None) if not both else _interval([(plain[g], found[g]) for g in both])
    cycles, drafted, accepted = (sum(getattr(c, k) for c in cells) for k in ("cycles", "drafted", "accepted"))
    tried, right = (map(sum, zip(*(getattr(c, f"{k}_by_position") for c in cells))) for k in ("drafted", "accepted"))
    digests = {c.group: c.digest for c in cells}
    return Row(
        cells[0].contestant,
        category,
        temperature=cells[0].temperature,
        batch=cells[0].batch,
        prompts=len(found),
        ms_per_token=1e3 * seconds / tokens,
        tokens_per_second=tokens / seconds,
        speedup=speedup,
        low=low,
        high=high,
        ttft_ms=1e3 * median(c.ttft_s for c in cells),
        tokens_per_cycle=(accepted + cycles) / cycles if cycles else None,
        acceptance=accepted / drafted if drafted else None,
        by_position=tuple(r / t for r, t in zip(right, tried, strict=True) if t),
        identical=sum(digests[g] == plain[g].digest for g in both) / len(both) if both else None,
    )


def _interval(pairs: Sequence[tuple[_Median, _Median]]) -> tuple[float, float, float]:
    def ratio(chosen: Sequence[tuple[_Median, _Median]]) -> float:
        theirs = sum(p.seconds for p, _ in chosen) / sum(p.tokens for p, _ in chosen)
        return theirs / (sum(o.seconds for _, o in chosen) / sum(o.tokens for _, o in chosen))

    rng = random.Random(0)
    draws = sorted(ratio(rng.choices(pairs, k=len(pairs))) for _ in range(DRAWS)) if len(pairs) > 1 else [ratio(pairs)]
    return ratio(pairs), draws[int(0.025 * (len(draws) - 1))], draws[int(0.975 * (len(draws) - 1) + 0.5)]


# ---- showing
COLUMNS = {
    "contestant": "plain decoding, or drafter/K; auto: the controller chooses K",
    "ms/tok": "milliseconds per token of the answer, its first token apart; median over the repeats",
    "tok/s": "tokens per second, all sequences of a batch together",
    "speed-up": "time per token of plain decoding divided by this contestant's, on the same prompts",
    "95 %": "confidence interval of the speed-up, by resampling prompts",
    "TTFT ms": "time to the first token: reading the prompt",
    "tok/cycle": "tokens that one pass of the target emits; 1 is plain decoding",
    "right": "share of draft tokens that the target accepted",
    "same": "share of prompts answered with the very tokens of plain decoding",
}


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def texts(row: Row) -> tuple[str, ...]:
    """A text for each of `COLUMNS`."""
    gain = "–" if row.speedup is None else f"{row.speedup:.2f}x"
    between = "–" if row.speedup is None else f"{row.low:.2f}–{row.high:.2f}"
    cycle = "–" if row.tokens_per_cycle is None else f"{row.tokens_per_cycle:.2f}"
    speed = (f"{row.ms_per_token:.2f}", f"{row.tokens_per_second:.1f}", gain, between, f"{row.ttft_ms:.0f}")
    return row.contestant, *speed, cycle, percent(row.acceptance), percent(row.identical)


def by_setting(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each temperature and batch, with a title."""
    for (temperature, batch), some in groupby(rows, key=lambda r: (r.temperature, r.batch)):
        yield f"temperature {temperature:g}, batch {batch}", list(some)


def html(settings: Mapping[str, object], rows: Sequence[Row], command: str) -> str:
    """One self-contained page. On a narrow screen its charts and tables scroll separately."""
    sections = []
    for title, here in by_setting(rows):
        drafted = [r for r in here if r.category == ALL and r.by_position]
        curves = [(r.contestant, list(enumerate(r.by_position, 1))) for r in drafted]
        about = "acceptance by position, of the tokens drafted there"
        chart = svg.lines(about, "position", y_label="", series=curves) if curves else ""
        sections.append((title, chart, [(r, dict(zip(COLUMNS, texts(r)))) for r in here]))
    fastest = max((r.speedup or 0.0 for r in rows), default=1.0)
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    page = Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    shown = {"settings": settings, "command": command, "date": date, "sections": sections}
    return page.render(shown, columns=COLUMNS, fastest=fastest)
