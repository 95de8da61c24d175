"""The drawn pictures of the docs: python tools/figures.py writes docs/images/*.svg.

The chart of choosing K is computed from the newest measured cycles in benchmarks/history/gpu.jsonl.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]
from history import read  # noqa: E402
from outrider import svg  # noqa: E402

DRAFT = "#fdeebb"
TARGET = "#dfe3ff"
GOOD = "#d5efe0"
BAD = "#f3d9d4"
INK = "#1b1c24"
LINE = "#8a8da0"
HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" role="img" aria-label="{label}">'
    "<style>text{{font:13px system-ui,sans-serif;fill:#1b1c24}} .b{{font-weight:600}} "
    ".s{{font-size:11px;fill:#565a6e}}</style>"
    '<rect width="{w}" height="{h}" rx="10" fill="#fff"/>'
    '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path '
    'd="M0 0L8 4L0 8z" fill="#8a8da0"/></marker></defs>'
)


def box(x: int, y: int, w: int, h: int, fill: str, *texts: str) -> str:
    lines = "".join(
        f'<text x="{x + w / 2:g}" y="{y + h / 2 + 4.5 + 17 * (i - (len(texts) - 1) / 2):g}" '
        f'text-anchor="middle">{escape(t)}</text>'
        for i, t in enumerate(texts)
    )
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="7" fill="{fill}" stroke="{LINE}"/>{lines}'


def arrow(x1: int, y1: int, x2: int, y2: int) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{LINE}" stroke-width="1.6" marker-end="url(#a)"/>'


def note(x: float, y: float, text: str, anchor: str = "middle", kind: str = "s") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'


def cycle() -> str:
    label = (
        "One cycle: the drafter guesses four tokens, the target checks five positions in one pass, three guesses "
        "are kept and the target's own token follows."
    )
    out = [HEAD.format(w=760, h=270, label=label)]
    out += [note(20, 28, "1  the drafter guesses K = 4 tokens", "start", "b"), box(20, 40, 70, 34, "#fff", "The")]
    for i, word in enumerate(("fox", "can", "count", "eggs")):
        out += [box(110 + 90 * i, 40, 80, 34, DRAFT, word)]
    out += [note(500, 61, "small: it reads the target's own K/V cache", "start")]
    out += [
        note(
            20, 108, "2  the target runs over all five at once, and says what it would have said at each", "start", "b"
        )
    ]
    for i, (word, colour) in enumerate((("fox", GOOD), ("can", GOOD), ("count", GOOD), ("to", BAD), ("…", "#fff"))):
        out += [box(110 + 90 * i, 120, 80, 34, TARGET if colour == "#fff" else colour, word)]
    out += [note(575, 141, "one pass over the weights,", "start"), note(575, 156, "as for a single token", "start")]
    out += [
        note(20, 188, "3  kept: every guess up to the first that differs, then the target's own token", "start", "b")
    ]
    for i, (word, colour) in enumerate((("fox", GOOD), ("can", GOOD), ("count", GOOD), ("to", TARGET))):
        out += [box(110 + 90 * i, 200, 80, 34, colour, word)]
    out += [
        note(480, 221, "four tokens for little more than the price of one", "start"),
        note(20, 258, "The rest is dropped: its place in the cache is simply written again.", "start"),
    ]
    return "".join([*out, "</svg>"])


def coupled() -> str:
    label = (
        "Coupled choosing: the target's choice at a position is a function of its logits, the seed and the "
        "position; a draft is kept while it equals that choice."
    )
    out = [HEAD.format(w=760, h=230, label=label)]
    out += [
        box(20, 30, 150, 46, TARGET, "target's logits z", "at position p"),
        box(20, 100, 150, 46, "#fff", "seed, position p"),
    ]
    out += [box(230, 100, 150, 46, "#fff", "noise g(seed, p)", "one number a token"), arrow(170, 123, 228, 123)]
    out += [
        box(440, 30, 150, 46, TARGET, "argmax(z + g)", "the target's choice"),
        arrow(170, 53, 438, 53),
        arrow(380, 115, 460, 78),
    ]
    out += [box(230, 170, 150, 46, DRAFT, "drafter's guess", "with the same noise"), arrow(305, 146, 305, 168)]
    out += [
        box(440, 170, 150, 46, GOOD, "equal? keep it", "not? the target's"),
        arrow(380, 193, 438, 193),
        arrow(515, 76, 515, 168),
    ]
    out += [
        note(610, 50, "depends on nothing else:", "start"),
        note(610, 66, "not on K, not on the", "start"),
        note(610, 82, "drafter, not on the batch", "start"),
    ]
    return "".join([*out, "</svg>"])


def choosing() -> str:
    newest: dict[int, float] = {}
    for row in read(ROOT / "benchmarks" / "history" / "gpu.jsonl"):
        times = row.get("cycles_ms")
        if (
            row.get("model") == "google/gemma-4-31B-it"
            and isinstance(times, dict)
            and row.get("batch") == 1
            and "16" in times
        ):
            newest = {int(k): t / times["0"] for k, t in times.items() if k != "0"}
    steps = [i / 100 for i in range(0, 96)]
    series = [("plain", [(100 * a, 1.0) for a in steps])]
    for k in (4, 8, 16):
        series.append((f"K = {k}", [(100 * a, sum(a**j for j in range(k + 1)) / newest[k]) for a in steps]))
    return svg.lines(
        "speed-up by how often a drafted token is right",
        "chance that a drafted token is right, in percent",
        "times plain",
        series,
    )


if __name__ == "__main__":
    for name, picture in (("cycle", cycle()), ("coupled", coupled()), ("choosing-k", choosing())):
        (ROOT / "docs" / "images" / f"{name}.svg").write_text(picture + "\n", encoding="utf-8")
