"""`outrider bench-server`: throughput and latency of a server against concurrency, as table, JSON and plot."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from .. import svg
from ..types import OutriderError, bad_input
from . import common
from .common import check_file, err, needs, note, numbers, out, prompt_texts
from .launch import serving

if TYPE_CHECKING:
    from ..bench.load import Summary


@dataclass(frozen=True, kw_only=True)
class LoadTestOptions:
    target: Annotated[
        str, typer.Argument(help="A server's URL (http://127.0.0.1:8000), or a model to serve for the test.")
    ]
    concurrency: Annotated[str, "Concurrent streams, comma-separated."] = "1,4,8,16"
    requests: Annotated[int, "Requests at each concurrency."] = 32
    max_tokens: Annotated[int, "Tokens of each answer (the end token is ignored)."] = 128
    prompts: Annotated[
        Path | None, "A .jsonl file with the field prompt or turns. Default: eight built-in prompts."
    ] = None
    temperature: Annotated[float, "0: greedy."] = 0.0
    compare: Annotated[bool, "Repeat each concurrency with plain decoding."] = False
    api_key: Annotated[str | None, "For a server that needs one."] = None
    drafter: Annotated[str, "For a MODEL: as in `outrider serve`."] = "auto"
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None
    plot: Annotated[Path | None, "Write a chart to this file (.svg)."] = None


@common.taking(LoadTestOptions)
def bench_server(asked: LoadTestOptions) -> None:
    """Measure a server under load: throughput, time to the first token, time per token.

    Inter-token times are measured per token: a chunk of m tokens that comes after g seconds counts as m times g/m.
    The longest wait between two chunks is shown next to them, since that is what a reader sees.

    Example: outrider bench-server smollm2 --concurrency 1,4 --compare
    """
    with needs("the load generator needs", "serve"):
        from ..bench.load import run
    levels = numbers(asked.concurrency, int, "--concurrency")
    if min(levels) < 1 or asked.requests < 1 or asked.max_tokens < 1:
        raise OutriderError("--concurrency, --requests and --max-tokens must be at least 1")
    texts = prompt_texts(asked.prompts)
    if asked.json_file is not None:
        check_file("--json", asked.json_file)
    if asked.plot is not None:
        check_file("--plot", asked.plot, ".svg")
    rows: list[Summary] = []
    with server(asked.target, asked.drafter, most=max(levels), key=asked.api_key) as url:
        for level in levels:
            for drafts in ("auto", 0) if asked.compare else ("auto",):
                measured = run(
                    url,
                    texts,
                    level,
                    requests=asked.requests,
                    max_tokens=asked.max_tokens,
                    temperature=asked.temperature,
                    drafts=drafts,
                    key=asked.api_key,
                )
                rows.append(asyncio.run(measured))
                note(f"{level} at once, draft tokens {drafts}: {rows[-1]['tokens_per_s']:.1f} tokens/s")
    out.print(table(rows))
    if asked.json_file is not None:
        asked.json_file.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if asked.plot is not None:
        draw(rows, asked.plot)
    failed = sum(r["errors"] for r in rows)
    if failed:
        err.print(f"{failed} requests failed", style="red")
        raise typer.Exit(1)


@contextmanager
def server(target: str, drafter: str, most: int, key: str | None) -> Iterator[str]:
    """Yields a URL as it is; for a model, serves it on a free port while the test runs."""
    if target.startswith(("http://", "https://")):
        yield target.rstrip("/")
        return
    command = [sys.executable, "-m", "outrider", "serve", target, "--drafter", drafter, "--port", "0"]
    command += ["--max-concurrent", str(most), "--max-queued", "1024"]
    # its server must not outlive it
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with serving(command, target, key or "none", log_name="bench-server.log") as at:
            yield at.url
    finally:
        signal.signal(signal.SIGTERM, before)


def short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def median_and_95th(seconds: Mapping[str, float]) -> str:
    """Median and 95th percentile, in milliseconds."""
    return f"{short(1e3 * seconds['p50'])}/{short(1e3 * seconds['p95'])}"


def table(rows: list[Summary]) -> Table:
    cells = []
    for r in rows:
        cycle = f"{r['tokens_per_cycle']:.2f}" if r["tokens_per_cycle"] else "–"
        speed = [short(r[key]) for key in ("tokens_per_s", "stream_tokens_per_s")]
        times = [median_and_95th(r[key]) for key in ("ttft_s", "token_s", "wait_s")]
        cells.append((str(r["concurrency"]), str(r["draft_tokens"]), *speed, *times, cycle, str(r["errors"])))
    heads = ("streams", "draft", "tok/s", "each", "first ms", "token ms", "wait ms", "cycle", "errors")
    caption = "Milliseconds are median/95th percentile; more in --json"
    return common.table(heads, cells, (), caption=caption, padding=(0, 0, 0, 1))


def draw(rows: list[Summary], file: Path) -> None:
    throughput = list[svg.Series]()
    first = list[svg.Series]()
    per_token = list[svg.Series]()
    for drafts in dict.fromkeys(r["draft_tokens"] for r in rows):
        matching = [r for r in rows if r["draft_tokens"] == drafts]
        name = "plain" if drafts == 0 else "speculative"
        throughput.append((name, [(r["concurrency"], r["tokens_per_s"]) for r in matching]))
        for series, key in ((first, "ttft_s"), (per_token, "token_s")):
            for part, label in (("p50", "median"), ("p95", "95th")):
                series.append((f"{name}, {label}", [(r["concurrency"], 1e3 * r[key][part]) for r in matching]))
    titled = {"Throughput, tokens/s": throughput, "First token, ms": first, "Per token, ms": per_token}
    charts = [svg.lines(title, "streams at once", y_label="", series=series) for title, series in titled.items()]
    with bad_input(OSError, lambda error: f"can't write {file}: {error}"):
        file.write_text(svg.stacked(charts), encoding="utf-8")
