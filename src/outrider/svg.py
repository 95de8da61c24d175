"""Small charts as SVG text, readable on light and dark pages: bars with intervals, and lines. They need no plotting
library, so every report has its plots."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape

COLOURS = ("#3b6ea8", "#d07b33", "#4a9a5b", "#a8496f", "#7a6cc0", "#8a8a8a")
Series = tuple[str, Sequence[tuple[float, float]]]


def bars(
    title: str, groups: Sequence[str], series: Sequence[tuple[str, Sequence[tuple[float, float, float] | None]]]
) -> str:
    """Horizontal bars, one group per row: (value, low, high) for each series. A line marks 1: as fast as plain
    decoding."""
    high = max([e[2] for _, values in series for e in values if e] + [1.0]) * 1.08
    bar, gap, left, width = 13, 10, 150, 760
    row = bar * len(series) + gap
    height = 58 + row * len(groups) + 20 * ((len(series) + 3) // 4)
    x = lambda v: left + (width - left - 60) * v / high  # noqa: E731
    out = [_open(width, height, title)]
    top, end = 34, 34 + row * len(groups)
    for tick in _ticks(0.0, high):
        out += [_line(x(tick), top, x(tick), end, "g"), _text(x(tick), end + 14, f"{tick:g}", "middle")]
    for g, name in enumerate(groups):
        y = top + g * row + gap / 2
        out.append(_text(left - 8, y + bar * len(series) / 2 + 4, name, "end"))
        for s, (_, values) in enumerate(series):
            entry = values[g]
            if entry is None:
                continue
            value, low, up = entry
            at = y + s * bar
            out.append(
                f'<rect x="{left}" y="{at:.1f}" width="{x(value) - left:.1f}" height="{bar - 2}" '
                f'fill="{COLOURS[s % 6]}"/>'
            )
            out.append(_line(x(low), at + 5, x(up), at + 5, "i"))
            out.append(f'<text x="{x(up) + 4:.1f}" y="{at + 9:.1f}" class="s">{value:.2f}</text>')
    out.append(_line(x(1.0), top, x(1.0), end, "one"))
    out += _legend([name for name, _ in series], left, end + 34)
    return "\n".join([*out, "</svg>"])


def lines(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> str:
    """Lines with their points; the axes begin at the least x, and at 0 or the least y."""
    points = [p for _, line in series for p in line]
    lo_x, hi_x = min(p[0] for p in points), max(p[0] for p in points)
    lo_y, hi_y = min(0.0, *(p[1] for p in points)), max(p[1] for p in points)
    width, height, left, bottom = 760, 400 + 20 * ((len(series) + 3) // 4), 70, 360
    x = lambda v: left + (width - left - 30) * (v - lo_x) / ((hi_x - lo_x) or 1.0)  # noqa: E731
    y = lambda v: bottom - (bottom - 40) * (v - lo_y) / ((hi_y - lo_y) or 1.0)  # noqa: E731
    out = [_open(width, height, title)]
    for tick in (t for t in _ticks(lo_x, hi_x) if t == int(t)):
        out += [_line(x(tick), 40, x(tick), bottom, "g"), _text(x(tick), bottom + 15, f"{tick:g}", "middle")]
    for tick in _ticks(lo_y, hi_y):
        out += [_line(left, y(tick), width - 30, y(tick), "g"), _text(left - 6, y(tick) + 4, f"{tick:g}", "end")]
    for i, (_, line) in enumerate(series):
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[i % 6]}" stroke-width="2"/>')
        out += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.5" fill="{COLOURS[i % 6]}"/>' for a, b in line]
    out += [_text((left + width) / 2, bottom + 32, x_label, "middle"), _text(14, 30, y_label)]
    out += _legend([name for name, _ in series], left, bottom + 50)
    return "\n".join([*out, "</svg>"])


def stacked(charts: Sequence[str]) -> str:
    """Several charts below each other in one picture."""
    sizes = [tuple(map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', chart)[0])) for chart in charts]
    width, height, top, placed = max(w for w, _ in sizes), sum(h for _, h in sizes), 0, []
    for chart, (_, high) in zip(charts, sizes, strict=True):
        placed.append(chart.replace("<svg ", f'<svg y="{top}" ', 1))
        top += high
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return "\n".join([start, *placed, "</svg>"])


def _open(width: int, height: int, title: str) -> str:
    style = (
        "text{font:12px system-ui,sans-serif;fill:#555}.s{font-size:10px}.t{font-size:14px;font-weight:600;fill:#222}"
        ".g{stroke:#8884;stroke-width:1}"
        ".i{stroke:#222;stroke-width:1.5}.one{stroke:#222;stroke-dasharray:4 3}"
        "@media(prefers-color-scheme:dark){text{fill:#aaa}.t{fill:#eee}.i,.one{stroke:#eee}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">'
        f'<style>{style}</style><text x="14" y="16" class="t">{escape(title)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _legend(names: Sequence[str], left: float, top: float) -> list[str]:
    out = []
    for i, name in enumerate(names):
        at, y = left + 150 * (i % 4), top + 20 * (i // 4)
        out.append(f'<rect x="{at}" y="{y - 9}" width="10" height="10" fill="{COLOURS[i % 6]}"/>')
        out.append(_text(at + 15, y, name))
    return out


def _ticks(low: float, high: float) -> list[float]:
    step = 10 ** math.floor(math.log10(max(high - low, 1e-9)))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if (high - low) / s <= 8)
    return [round(step * i, 10) for i in range(math.ceil(low / step), int(high / step) + 1)]
