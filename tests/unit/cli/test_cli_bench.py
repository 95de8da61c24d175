"""`outrider bench`, as typed, on a tiny model with the real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from tests import tiny
from typer.testing import CliRunner

from outrider.cli.bench import bench
from outrider.types import OutriderError

app = typer.Typer()
app.command()(bench)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny.write_target("llama", folder / "m")
    prompts = [
        {"id": f"p{i}", "category": "echo", "prompt": "one two three one two three one two", "max_tokens": 12}
        for i in range(2)
    ]
    (folder / "p.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    return str(folder)


def call(model: str, *words: str, ok: bool = True) -> str:
    done = CliRunner().invoke(app, [f"{model}/m", "--suite", f"{model}/p.jsonl", "--ops", "reference", *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert (done.exit_code == 0) is ok, done.output
    return done.stdout


def test_figures_report_and_resume(model: str, tmp_path: Path) -> None:
    words = (
        "--drafters",
        "ngram",
        "--draft-tokens",
        "0,4,auto",
        "--repeats",
        "2",
        "--batch",
        "1,2",
        "--temperature",
        "0,0.8",
    )
    words += ("--out", str(tmp_path / "r"))
    data = json.loads(call(model, *words, "--json"))
    rows = {(r["contestant"], r["temperature"], r["batch"]): r for r in data["rows"] if r["category"] == "all"}
    assert set(rows) == {(c, t, b) for c in ("plain", "ngram/K=4", "ngram/auto") for t in (0.0, 0.8) for b in (1, 2)}
    assert all(r["identical"] == 1.0 and r["ms_per_token"] > 0 for r in rows.values())
    assert rows["ngram/K=4", 0.0, 1]["tokens_per_cycle"] >= 1.0 and rows["plain", 0.0, 1]["acceptance"] is None
    cells = (tmp_path / "r" / "cells.jsonl").read_text()
    assert (tmp_path / "r" / "report.html").read_text().count("<svg") >= 4
    with pytest.raises(OutriderError, match="--resume"):
        call(model, *words)
    lines = cells.splitlines(keepends=True)
    (tmp_path / "r" / "cells.jsonl").write_text("".join(lines[:-3]))
    call(model, *words, "--resume")
    again = (tmp_path / "r" / "cells.jsonl").read_text().splitlines(keepends=True)
    assert again[: len(lines) - 3] == lines[:-3] and len(again) == len(lines)


def test_trees_beside_lines(model: str, tmp_path: Path) -> None:
    words = (
        "--drafters",
        "ngram",
        "--draft-tokens",
        "0,4",
        "--tree",
        "off,9",
        "--repeats",
        "1",
        "--out",
        str(tmp_path / "r"),
        "--json",
    )
    rows = json.loads(call(model, *words))["rows"]
    assert {r["contestant"] for r in rows} == {"plain", "ngram/K=4 tree=off", "ngram/K=4 tree=9"} and all(
        r["identical"] == 1.0 for r in rows
    )
    with pytest.raises(OutriderError, match="tree must be"):
        call(model, "--tree", "off,99")


def test_another_text_fails_with_json_too(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--drafters", "ngram", "--draft-tokens", "0,4", "--repeats", "1", "--out", str(tmp_path / "r"), "--json")
    call(model, *words)
    path = tmp_path / "r" / "cells.jsonl"
    cells = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**c, "digest": c["contestant"]}) + "\n" for c in cells))
    with pytest.raises(OutriderError, match="gave another text than plain decoding on 100"):
        call(model, *words, "--resume")


def test_a_run_goes_on_in_its_own_settings_only(model: str, tmp_path: Path) -> None:
    words = ("--drafters", "ngram", "--draft-tokens", "0", "--repeats", "1", "--out", str(tmp_path / "r"))
    call(model, *words)
    for other, message in (
        (("--max-tokens", "4"), "max_tokens: None, now 4"),
        (("--dtype", "bfloat16"), "dtype: None, now 'bfloat16'"),
    ):
        with pytest.raises(OutriderError, match=f"was run with another {message}"):
            call(model, *words, *other, "--resume")


def test_drafters_of_one_name_are_told_apart(tmp_path: Path) -> None:
    tiny.write_target("gemma4_31b", tmp_path / "m")
    (tmp_path / "p.jsonl").write_text(json.dumps({"id": "p", "prompt": "one two three", "max_tokens": 4}))
    runs = [tiny.write_assistant("gemma4_31b", tmp_path / run / "drafter") for run in ("a", "b")]
    words = (
        "--drafters",
        f"{runs[0]},{runs[1]},{runs[0]}",
        "--draft-tokens",
        "2",
        "--repeats",
        "1",
        "--out",
        str(tmp_path / "r"),
        "--json",
    )
    rows = json.loads(call(str(tmp_path), *words))["rows"]
    assert {r["contestant"] for r in rows} == {f"{run}/K=2" for run in runs}


@pytest.mark.parametrize("words, message", [
    (("--draft-tokens", "99"), r"0\.\.16"),
    (("--batch", "x"), "numbers separated by commas"),
    (("--repeats", "0"), "at least 1"),
    (("--limit", "0"), "--limit must be at least 1, got 0"),
    (("--max-tokens", "0"), "--max-tokens must be at least 1, got 0"),
    (("--categories", "poems"), "no category"),
    (("--tree", ","), "--tree is empty"),
    (("--drafters", ","), "names none"),
])  # fmt: skip
def test_bad_input_is_one_line(model: str, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(OutriderError, match=message):
        call(model, "--out", str(tmp_path / "x"), *words)
