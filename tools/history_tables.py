"""The measured tables of the docs, made from benchmarks/history/*.jsonl.

A page holds a table between `<!-- table: NAME -->` and `<!-- end -->`. `python tools/history_tables.py` writes all of
them again; with `--check` it only says which are out of date (tests/unit/test_history_tables.py does the same).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.S)
Row = dict[str, Any]


def history(name: str) -> list[Row]:
    lines = (ROOT / "benchmarks" / "history" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *map(list, rows))]
    return "\n".join(lines) + "\n"


def number(value: float | list[float] | None) -> str:
    """1,346 · 65.1 · 1,251–1,346 · a dash where nothing was measured."""
    if value is None:
        return "–"
    if isinstance(value, list):
        return "–".join(number(part) for part in value)
    return f"{value:,.0f}" if value >= 100 else f"{value:g}"


def newest(rows: Iterable[Row], key: str) -> Row:
    """The last recorded row that has this key."""
    return [row for row in rows if key in row][-1]


def both_engines(key: str) -> str:
    """The newest figure of every cell, and the commits they are from."""
    cells: dict[str, dict[str, str]] = {}
    commits: dict[str, str] = {}
    for row in history("gpu"):
        for what, engines in row.get(key, {}).items() if "outrider" in str(row.get(key)) else ():
            commits[row["commit"]] = row["date"]
            theirs = engines["vllm"]
            made = {b: f"{number(v)} / {number(theirs.get(b))}" for b, v in engines["outrider"].items()}
            cells.setdefault(what, {}).update(made)
    rows = [[what, *(made.get(b, "") for b in ("1", "8", "32", "64"))] for what, made in cells.items()]
    found = ", ".join(f"`{commit}` ({date})" for commit, date in commits.items())
    return table(["Outrider / vLLM 0.26", "1 sequence", "8", "32", "64"], rows) + f"\nNewest of commits {found}.\n"


def one_sequence() -> str:
    found = {r["model"]: r for r in history("gpu") if "transformers" in r and "cycles_ms" in r and r["batch"] == 1}
    rows = []
    for model in ("31B", "12B", "26B-A4B", "E4B", "E2B"):
        row = found[f"google/gemma-4-{model}-it"]
        plain = row["cycles_ms"]["0"]
        cost = " · ".join(f"{row['cycles_ms'][k] / plain:.2f}" for k in ("4", "8", "16"))
        gain = " · ".join(f"{row['synthetic_speedup'][k]:.2f}" for k in ("4", "8", "16"))
        peer = f"{row['transformers']['ar_ms']:.1f}"
        rows.append([model, f"{plain:.2f}", f"{row['floor_ms'] / plain:.0%}", cost, gain, peer])
    head = ["", "plain step, ms", "share of the floor", "cycle / plain step at K = 4 · 8 · 16"]
    head += ["speed-up at published acceptance", "transformers, ms"]
    last = found["google/gemma-4-31B-it"]
    return (
        table(head, rows) + f"\nCommit `{last['commit']}`, {last['date']}, `python benchmarks/bench_gpu.py --quick`.\n"
    )


def cpu_rows() -> str:
    """One pass by rows with AVX-512 and AVX2, and whole cycles."""
    rows = [r for r in history("cpu") if "pass_ms" in r["figures"] and "smollm2" in r["command"]]
    wide, narrow = (
        [r for r in rows if ("avx2" in r["command"]) is avx2 and r["commit"] == "d60b5de"][-1] for avx2 in (False, True)
    )
    out = []
    for name, row in (("AVX-512", wide), ("AVX2", narrow)):
        times = row["figures"]["pass_ms"]
        cells = [f"{times[m]:.2f} ({times[m] / times['1']:.2f}×)" for m in ("1", "5", "9", "17")]
        out.append([name, f"{row['figures']['memory_gb_s']:g}", *cells])
    head = ["kernels", "memory, GB/s", "1 row, ms", "5 rows", "9 rows", "17 rows"]
    return table(head, out) + f"\nCommit `{wide['commit']}`, {wide['date']}.\n"


def drafters() -> str:
    named = {
        "smollm2, shipped: greedy": "smollm2 as shipped, again: Spec-Bench greedy clustered, 4 bits",
        "smollm2, shipped: T = 1": "smollm2 as shipped, again: Spec-Bench T=1 clustered, 4 bits",
        "smollm2, DFlash of 9 minutes: greedy": "smollm2, recipe dflash: Spec-Bench greedy",
        "smollm2, DFlash of 9 minutes: T = 1": "smollm2, recipe dflash: Spec-Bench T=1",
        "Qwen2.5-Coder-0.5B: greedy": "qwen2.5-coder-0.5b: Spec-Bench greedy clustered, 4 bits",
        "Qwen2.5-Coder-0.5B: T = 1": "qwen2.5-coder-0.5b: Spec-Bench T=1 clustered, 4 bits",
    }
    runs = {row.get("run"): row for row in history("training")}
    rows = []
    for name, run in named.items():
        figures = runs[run]["figures"]
        cells = [f"{figures['tokens_per_cycle'][k]:.2f}" for k in ("1", "2", "3", "4", "6", "8")]
        rows.append([name, *cells, f"{figures['acceptance_by_position'][0]:.3f}"])
    return table(["drafter", "K = 1", "2", "3", "4", "6", "8", "first position"], rows)


def block_cycles() -> str:
    """Cycles of block drafters next to MTP's, as shares of a plain step."""
    made = [row for row in history("gpu") if "block_cycles_ms" in row]
    cells: dict[str, dict[str, float]] = {}
    for row in made:
        for size, times in row["block_cycles_ms"].items():
            cells.setdefault(size, {}).update(times)
    rows = []
    for size, times in cells.items():
        for batch in ("1", "8", "32"):
            kind = "dspark" if f"dspark bf16 7 {batch}" in times else "dflash"
            names = ("MTP 4", "MTP 7", f"{kind} bf16 7", f"{kind} fp8 7", f"{kind} bf16 15", f"{kind} fp8 15")
            plain = times.get(f"plain {batch}")
            cycles = [times.get(f"{name} {batch}") for name in names]
            if plain:
                shares = [f"{t / plain:.2f}" if t else "–" for t in cycles]
                rows.append([f"{size}, {kind}, {batch}", f"{plain:.2f}", *shares])
    head = ["target, drafter, sequences", "plain step, ms", "MTP, K = 4", "MTP, K = 7", "block, K = 7", "in fp8"]
    return (
        table([*head, "block, K = 15", "in fp8"], rows)
        + "".join(f"\n{row['date']}: `{row['command']}`" for row in made)
        + "\n"
    )


def adapter_steps() -> str:
    row = newest(history("gpu"), "adapter_steps_ms")
    columns = ("1 x K=0", "8 x K=0", "1 x K=4", "8 x K=4")
    rows = [
        [size, *(f"{t[c][0]:.2f} → {t[c][1]:.2f} ({t[c][1] / t[c][0]:.2f}×)" if c in t else "–" for c in columns)]
        for size, t in row["adapter_steps_ms"].items()
    ]
    head = ["ms without → with", "1 sequence", "8 sequences", "1, K = 4", "8, K = 4"]
    return table(head, rows) + f"\nCommit `{row['commit']}`, {row['date']}, `{row['command']}`.\n"


TABLES: dict[str, Callable[[], str]] = {
    "h200-engine": lambda: both_engines("engine_tok_s"),
    "h200-prompts": lambda: both_engines("prompt_and_16_s"),
    "h200-one-sequence": one_sequence,
    "h200-blocks": block_cycles,
    "h200-adapters": adapter_steps,
    "cpu-rows": cpu_rows,
    "drafters": drafters,
}


def filled(text: str) -> str:
    return PLACE.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}{m[3]}", text)


def main() -> None:
    check = "--check" in sys.argv[1:]
    stale = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if filled(text) != text:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(filled(text), encoding="utf-8")
    if check and stale:
        raise SystemExit(f"out of date: {', '.join(stale)}; run python tools/history_tables.py")


if __name__ == "__main__":
    main()
