"""The load generator: its arithmetic, and a run against the fake engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.server_fakes import FakeEngine, Served, tokenizer

from outrider.bench.load import Timing, percentiles, run, summary
from outrider.cli.bench_server import bench_server, draw
from outrider.types import OutriderError


def test_times_are_per_token_not_per_chunk() -> None:
    """Three chunks of 1, 4 and 2 tokens: counting per chunk would give 0.4 s, twice over."""
    timing = Timing(10.0, [(10.1, 1), (10.5, 4), (10.9, 2)])
    assert timing.per_token == pytest.approx([0.1] * 4 + [0.2] * 2) and timing.waits == pytest.approx([0.4, 0.4])
    row = summary([timing, Timing(0.0, error="429")], 2.0, 1, "auto")
    assert row["tokens_per_s"] == pytest.approx(3.5) and row["errors"] == 1 and row["first_error"] == "429"
    assert row["ttft_s"]["p50"] == pytest.approx(0.1) and row["stream_tokens_per_s"] == pytest.approx(6 / 0.8)


def test_percentiles() -> None:
    assert (
        percentiles(list(range(100)))["p95"] == 95
        and percentiles([])["p50"] == 0.0
        and percentiles([3.0])["p99"] == 3.0
    )


def test_a_run(tmp_path: Path) -> None:
    tok = tokenizer()
    with Served(FakeEngine(tok, delay=0.001), tok) as s:
        row = asyncio.run(run(s.url, ["one", "two"], concurrency=4, requests=10, max_tokens=20))
        plain = asyncio.run(run(s.url, ["one", "two"], concurrency=1, requests=2, max_tokens=20, drafts=0))
        figures = tmp_path / "figures.json"
        bench_server(target=s.url, concurrency="1,2", requests=2, max_tokens=8, json_file=figures)
    assert row["errors"] == 0 and row["requests"] == 10 and 0 < row["ttft_s"]["p50"] <= row["ttft_s"]["p99"]
    assert row["tokens_per_cycle"] > 1 == plain["tokens_per_cycle"]
    assert [r["concurrency"] for r in json.loads(figures.read_text())] == [1, 2]
    draw([row, plain], tmp_path / "plot.svg")
    picture = (tmp_path / "plot.svg").read_text()
    assert picture.count("<polyline") == 10 and "speculative, 95th" in picture


def test_bad_input() -> None:
    with pytest.raises(OutriderError, match="OpenAI-compatible"):
        asyncio.run(run("http://127.0.0.1:9", ["x"], 1, 1, 1))
    with pytest.raises(OutriderError, match="--concurrency"):
        bench_server(target="http://127.0.0.1:9", concurrency="many")
