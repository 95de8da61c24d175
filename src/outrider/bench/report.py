"""Turns cells into figures: medians over repeats, speed-up over plain decoding with bootstrap intervals, a table, an
HTML page.

Speed-up of a contestant in a category: seconds per token of plain decoding over its own, on the same prompts, each the
median over the repeats. The 95 % interval resamples prompts (percentile bootstrap, 1000 draws, fixed seed).
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .. import svg
from .harness import PLAIN, Cell

ALL = "all"
DRAWS = 1000


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
    acceptance: float | None  # of drafted tokens
    by_position: tuple[float, ...]  # acceptance by position, of those drafted there
    identical: float | None  # share of prompts answered with plain decoding's very tokens


def summarise(cells: Sequence[Cell]) -> list[Row]:
    rows = []
    for temperature, batch in sorted({(c.temperature, c.batch) for c in cells}):
        here = [c for c in cells if (c.temperature, c.batch) == (temperature, batch)]
        names = list(dict.fromkeys([PLAIN] * any(c.contestant == PLAIN for c in here) + [c.contestant for c in here]))
        for category in [ALL, *dict.fromkeys(c.category for c in here)]:
            chosen = [c for c in here if category in (ALL, c.category)]
            plain = _medians([c for c in chosen if c.contestant == PLAIN])
            for name in names:
                row = _row(name, category, temperature, batch, [c for c in chosen if c.contestant == name], plain)
                if row is not None:
                    rows.append(row)
    return rows


@dataclass(frozen=True)
class _Median:
    seconds: float
    tokens: int
    digest: str


def _medians(cells: Sequence[Cell]) -> dict[str, _Median]:
    """By group; groups too short to time (an answer of one step) are left out."""
    by: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.tokens > 0 and cell.seconds > 0:
            by.setdefault(cell.group, []).append(cell)
    return {
        g: _Median(median(c.seconds / c.tokens for c in cs) * cs[0].tokens, cs[0].tokens, cs[0].digest)
        for g, cs in by.items()
    }


def _row(
    name: str, category: str, temperature: float, batch: int, cells: Sequence[Cell], plain: Mapping[str, _Median]
) -> Row | None:
    found = _medians(cells)
    if not found:
        return None
    seconds, tokens = sum(m.seconds for m in found.values()), sum(m.tokens for m in found.values())
    both = [g for g in found if g in plain]
    speedup, low, high = (None, None, None) if not both else _interval([(plain[g], found[g]) for g in both])
    cycles, drafted, accepted = (sum(getattr(c, k) for c in cells) for k in ("cycles", "drafted", "accepted"))
    tried, right = (map(sum, zip(*(getattr(c, f"{k}_by_position") for c in cells))) for k in ("drafted", "accepted"))
    digests = {c.group: c.digest for c in cells}
    return Row(
        name,
        category,
        temperature,
        batch,
        len(found),
        1e3 * seconds / tokens,
        tokens / seconds,
        speedup,
        low,
        high,
        1e3 * median(c.ttft_s for c in cells),
        (accepted + cycles) / cycles if cycles else None,
        accepted / drafted if drafted else None,
        tuple(r / t for r, t in zip(right, tried, strict=True) if t),
        sum(digests[g] == plain[g].digest for g in both) / len(both) if both else None,
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
HEADS = tuple(COLUMNS)


def _texts(row: Row) -> tuple[str, ...]:
    share = lambda v: "–" if v is None else f"{100 * v:.0f} %"  # noqa: E731
    gain = "–" if row.speedup is None else f"{row.speedup:.2f}x"
    between = "–" if row.speedup is None else f"{row.low:.2f}–{row.high:.2f}"
    cycle = "–" if row.tokens_per_cycle is None else f"{row.tokens_per_cycle:.2f}"
    return (
        row.contestant,
        f"{row.ms_per_token:.2f}",
        f"{row.tokens_per_second:.1f}",
        gain,
        between,
        f"{row.ttft_ms:.0f}",
        cycle,
        share(row.acceptance),
        share(row.identical),
    )


def table(rows: Sequence[Row], temperature: float, batch: int) -> Table:
    out = Table(
        title=f"temperature {temperature:g}, batch {batch}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
    )
    out.add_column("category", no_wrap=True)
    for i, head in enumerate(HEADS):
        out.add_column(head, justify="left" if i == 0 else "right", no_wrap=True)
    last = None
    for row in rows:
        if (row.temperature, row.batch) == (temperature, batch):
            out.add_row("" if row.category == last else row.category, *_texts(row))
            last = row.category
    return out


def html(settings: Mapping[str, object], rows: Sequence[Row], command: str) -> str:
    """One self-contained page. Charts and tables scroll by themselves on a narrow screen."""
    model, machine, version, suite = (escape(str(settings[k])) for k in ("model", "machine", "version", "suite"))
    about = (
        ("machine", machine),
        ("prompts", f"{settings['prompts']} of {suite}, {settings['repeats']} repeats"),
        ("date", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())),
        ("command", f"<code>{escape(command)}</code>"),
        ("version", f"outrider {version}"),
    )
    parts = [f"<h1>{model}</h1><dl>" + "".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in about) + "</dl>"]
    for temperature, batch in sorted({(r.temperature, r.batch) for r in rows}):
        here = [r for r in rows if (r.temperature, r.batch) == (temperature, batch)]
        names = [n for n in dict.fromkeys(r.contestant for r in here) if n != PLAIN]
        categories = list(dict.fromkeys(r.category for r in here))
        by = {(r.contestant, r.category): r for r in here}
        parts.append(f"<h2>temperature {temperature:g}, batch {batch}</h2>")
        series = [(n, [_bar(by.get((n, c))) for c in categories]) for n in names]
        if any(e for _, values in series for e in values):
            chart = svg.bars("speed-up over plain decoding, with 95 % intervals", categories, series)
            parts.append(f"<div>{chart}</div>")
        curves = [
            (n, list(enumerate(by[n, ALL].by_position, 1))) for n in names if (n, ALL) in by and by[n, ALL].by_position
        ]
        if curves:
            title = "acceptance by position, of the tokens drafted there"
            parts.append(f"<div>{svg.lines(title, 'position', '', curves)}</div>")
        parts.append(_html_table(("category", *HEADS), [(r.category, *_texts(r)) for r in here]))
    meanings = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in COLUMNS.items())
    parts.append(f"<h2>The columns</h2><dl>{meanings}</dl>")
    style = (
        "body{font:15px system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 "
        "1rem;color:#222;background:#fff}"
        "table{border-collapse:collapse}td,th{padding:.25rem .7rem;border-bottom:1px solid #8884;text-align:right}"
        "td:first-child,th:first-child,td:nth-child(2),th:nth-child(2){text-align:left}"
        "div{overflow-x:auto;margin:1rem 0}svg{max-width:100%;min-width:34rem;height:auto;display:block}"
        "dl{display:grid;grid-template-columns:max-content 1fr;gap:.3rem 1rem}dd{margin:0;overflow-wrap:anywhere}"
        "@media(prefers-color-scheme:dark){body{color:#ddd;background:#161616}}"
    )
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>outrider '
        f"bench</title><style>{style}</style>"
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _bar(row: Row | None) -> tuple[float, float, float] | None:
    if row is None or row.speedup is None or row.low is None or row.high is None:
        return None
    return row.speedup, row.low, row.high


def _html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<div tabindex=0><table><tr>{top}</tr>{body}</table></div>"
