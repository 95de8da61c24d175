"""The benchmark history as a page: charts and every recorded line of benchmarks/history/*.jsonl."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from outrider import svg

Row = dict[str, object]


def page(folder: Path) -> tuple[str, dict[str, str]]:
    """(Markdown, {picture's name: SVG}). What is not there is not drawn."""
    out = [
        "# Benchmark history",
        "",
        "Every figure that was recorded, with the command that made it: `benchmarks/history/*.jsonl`, drawn when this "
        "site is built.",
        "",
    ]
    rows = {path.stem: read(path) for path in sorted(folder.glob("*.jsonl"))}
    pictures: dict[str, str] = {}
    for name, title, chart in (
        ("gpu-cycles", "A cycle against a plain step, by K (H200)", cycles(rows.get("gpu", []))),
        ("cpu-rows", "One pass over several rows, milliseconds (two CPU cores)", passes(rows.get("cpu", []))),
    ):
        if chart is not None:
            pictures[f"{name}.svg"] = chart
            out += [f"## {title}", "", f"![{title}]({name}.svg)", ""]
    for name, entries in rows.items():
        out += [
            f"## {name}.jsonl",
            "",
            f"{len(entries)} lines, newest first.",
            "",
            "| date | commit | what | figures |",
            "|---|---|---|---|",
        ]
        for row in reversed(entries):
            what = row.get("run") or row.get("model") or row.get("command") or row.get("engine") or ""
            out.append(
                f"| {row.get('date') or row.get('at') or ''} | {row.get('commit', '')} | {cell(str(what))} | "
                f"{cell(figures(row))} |"
            )
        out.append("")
    return "\n".join(out), pictures


def read(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise SystemExit(f"{path}, line {number}: not JSON ({error.msg})") from None
    return rows


def cycles(rows: list[Row]) -> str | None:
    """Of each model the newest batch-1 line that has cycles by K."""
    newest: dict[str, Mapping[str, float]] = {}
    for row in rows:
        times = row.get("cycles_ms")
        if isinstance(times, dict) and row.get("batch") == 1 and times.get("0") and len(times) > 2:
            newest[str(row.get("model", "")).removeprefix("google/gemma-4-").removesuffix("-it")] = times
    series = [
        (name, [(float(k), t / times["0"]) for k, t in times.items() if float(k) > 0]) for name, times in newest.items()
    ]
    return svg.lines("cycle / plain step, by drafted tokens K", "K", "times a plain step", series) if series else None


def passes(rows: list[Row]) -> str | None:
    newest: dict[str, dict[float, float]] = {}
    for row in rows:
        for key, value in (row.get("figures") or {}).items():  # type: ignore[attr-defined]
            what, _, count = key.partition(", ")
            if what in ("pass", "llama.cpp") and count.endswith(" rows") and isinstance(value, int | float):
                newest.setdefault("Outrider" if what == "pass" else what, {})[float(count.split()[0])] = float(value)
    series = [(name, sorted(points.items())) for name, points in newest.items()]
    return svg.lines("one pass of smollm2", "rows (tokens verified at once)", "ms", series) if series else None


def figures(row: Row) -> str:
    known = {
        k: v
        for k, v in row.items()
        if k not in ("date", "at", "commit", "machine", "command", "run", "model", "engine")
    }
    inner = known.pop("figures", None)
    if isinstance(inner, dict):
        known = {**inner, **known}
    text = ", ".join(f"{k} {short(v)}" for k, v in known.items())
    return text if len(text) <= 400 else text[:400] + " …"


def short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "(" + ", ".join(f"{k}: {short(v)}" for k, v in value.items()) + ")"
    if isinstance(value, list):
        return "[" + " ".join(short(v) for v in value) + "]"
    return str(value)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
