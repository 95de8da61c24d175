"""Small line charts as SVG text, readable on light and dark pages. They need no plotting library, so every report has
its plots."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape
from itertools import accumulate

WIDTH = 760
COLOURS = ("#3b6ea8", "#d07b33", "#4a9a5b", "#a8496f", "#7a6cc0", "#8a8a8a")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#555}.t{font-size:14px;font-weight:600;fill:#222}"
    "line{stroke:#8884;stroke-width:1}@media(prefers-color-scheme:dark){text{fill:#aaa}.t{fill:#eee}}"
)
Series = tuple[str, Sequence[tuple[float, float]]]


def lines(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> str:
    """Line chart of these points; the axes begin at the smallest x, and at the smaller of 0 and the smallest y."""
    points = [p for _, line in series for p in line]
    lo_x = min(p[0] for p in points)
    hi_x = max(p[0] for p in points)
    lo_y = min(0.0, *(p[1] for p in points))
    hi_y = max(p[1] for p in points)
    height = 400 + 20 * ((len(series) + 3) // 4)
    left = 70
    bottom = 360

    def x(value: float) -> float:
        return left + (WIDTH - left - 30) * (value - lo_x) / ((hi_x - lo_x) or 1.0)

    def y(value: float) -> float:
        return bottom - (bottom - 40) * (value - lo_y) / ((hi_y - lo_y) or 1.0)

    label = f'role="img" aria-label="{escape(title)}"'
    out = [_open(height, label), f'<style>{STYLE}</style><text x="14" y="16" class="t">{escape(title)}</text>']
    for tick in (t for t in _ticks(lo_x, hi_x) if t == int(t)):
        out += [_line(x(tick), y1=40, x2=x(tick), y2=bottom), _text(x(tick), bottom + 15, f"{tick:g}", anchor="middle")]
    for tick in _ticks(lo_y, hi_y):
        out += [_line(left, y(tick), WIDTH - 30, y2=y(tick)), _text(left - 6, y(tick) + 4, f"{tick:g}", anchor="end")]
    for i, (name, line) in enumerate(series):
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[i % 6]}" stroke-width="2"/>')
        out += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.5" fill="{COLOURS[i % 6]}"/>' for a, b in line]
        at = left + 150 * (i % 4)
        down = bottom + 50 + 20 * (i // 4)
        out.append(f'<rect x="{at}" y="{down - 9}" width="10" height="10" fill="{COLOURS[i % 6]}"/>')
        out.append(_text(at + 15, down, name))
    out += [_text((left + WIDTH) / 2, bottom + 32, x_label, anchor="middle"), _text(14, 30, y_label)]
    return "\n".join([*out, "</svg>"])


def stacked(charts: Sequence[str]) -> str:
    """Several charts below each other in one image."""
    *tops, height = accumulate((int(re.findall(r' height="(\d+)"', chart)[0]) for chart in charts), initial=0)
    placed = [chart.replace("<svg ", f'<svg y="{top}" ', 1) for chart, top in zip(charts, tops)]
    return "\n".join([_open(height), *placed, "</svg>"])


def _open(height: int, label: str = "") -> str:
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {label}>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _ticks(low: float, high: float) -> list[float]:
    step = 10 ** math.floor(math.log10(max(high - low, 1e-9)))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if (high - low) / s <= 8)
    return [round(step * i, 10) for i in range(math.ceil(low / step), int(high / step) + 1)]
