"""Batch files without a model: every line gets exactly one result, whatever is wrong with it or with the run."""

from __future__ import annotations

import errno
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.server_fakes import VOCAB, FakeEngine, tokenizer

from outrider.server.app import Server
from outrider.server.batch import BatchFile, BatchProgress, Results, answer_file
from outrider.server.model_info import ServedModel
from outrider.server.settings import ServerSettings
from outrider.types import OutriderError

TOK = tokenizer()
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def run(source: Path, out: Path, engine: FakeEngine | None = None, seed: int = 0) -> BatchProgress:
    engine = engine or FakeEngine(TOK)
    backend = ServedModel(engine, TOK, VOCAB, engine.max_context)
    server = Server.offline(backend, ServerSettings("fake", max_concurrent=4))
    return answer_file(server, BatchFile(source, out, "fake", seed))


def row(id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    what: dict[str, Any] = (
        {"prompt": "Say it"} if url == TEXT else {"messages": [{"role": "user", "content": "Say it"}]}
    )
    return {"custom_id": id, "method": "POST", "url": url, "body": {"model": "fake", "max_tokens": 40, **what, **body}}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_both_routes_and_several_choices(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", row("a"), "", row("b", TEXT, n=3), row("c", seed=7))
    progress = run(source, tmp_path / "out.jsonl")
    assert (progress.total, progress.done, progress.failed) == (3, 3, 0)
    out = {r["custom_id"]: r for r in read(tmp_path / "out.jsonl")}
    assert out["a"]["response"]["status_code"] == 200 and out["a"]["error"] is None
    assert out["a"]["response"]["body"]["choices"][0]["message"]["content"]
    assert [c["index"] for c in out["b"]["response"]["body"]["choices"]] == [0, 1, 2]
    assert out["c"]["response"]["body"]["object"] == "chat.completion"


def test_bad_lines_get_a_result_and_the_others_run(tmp_path: Path) -> None:
    bad: dict[str, Any] = {
        "invalid_json": "{nope",
        "invalid_line": "[1]",
        "invalid_custom_id": {"method": "POST", "url": CHAT, "body": {}},
        "invalid_url": row("u", "/v1/images"),
        "invalid_method": {**row("m"), "method": "GET"},
        "invalid_body": {**row("y"), "body": 3},
        "duplicate_custom_id": row("good", TEXT),
    }
    refused = [
        row("f", flavour=1),
        row("s", stream=True),
        row("w", model="other"),
        row("l", max_tokens=0),
        row("t", temperature=9),
    ]
    source = write(tmp_path / "in.jsonl", row("good"), *bad.values(), *refused, row("also good"))
    progress = run(source, tmp_path / "out.jsonl")
    out = read(tmp_path / "out.jsonl")
    assert progress.failed == len(bad) + len(refused) and len(out) == progress.total == len(bad) + len(refused) + 2
    assert {r["error"]["code"] for r in out if r["error"]} == set(bad)
    by_id = {r["custom_id"]: r["response"] for r in out if r["response"]}
    assert {id: r["status_code"] for id, r in by_id.items()} == {
        "good": 200, "also good": 200, "f": 400, "s": 400, "w": 404, "l": 400, "t": 400
    }  # fmt: skip
    assert (
        by_id["f"]["body"]["error"]["code"] == "unknown_field" and "flavour" in by_id["f"]["body"]["error"]["message"]
    )


def test_a_resumed_run_does_what_is_left_and_says_the_same(tmp_path: Path) -> None:
    rows = [row(f"r{i}", TEXT if i % 2 else CHAT, temperature=1.0) for i in range(20)]
    source = write(tmp_path / "in.jsonl", *rows)
    whole = tmp_path / "whole.jsonl"
    cut = tmp_path / "cut.jsonl"
    run(source, whole)
    lines = whole.read_bytes().splitlines(keepends=True)
    cut.write_bytes(b"".join(lines[:7]) + lines[7][:-9])  # killed in the middle of writing the eighth
    engine = FakeEngine(TOK)
    progress = run(source, cut, engine)
    assert progress.resumed == 7 and len(engine.seen) == 13

    def texts(path: Path) -> dict[str, Any]:
        out = {r["custom_id"]: r["response"]["body"]["choices"] for r in read(path)}
        assert len(out) == len(read(path)) == 20
        return out

    assert texts(cut) == texts(whole)
    before = cut.read_bytes()
    assert run(source, cut).resumed == 20 and cut.read_bytes() == before


@pytest.mark.parametrize("kept", [1, 2])
def test_the_first_of_a_name_is_answered_after_a_second_was_refused(tmp_path: Path, kept: int) -> None:
    """Killed when only a later line had its result: resumed, the first one is answered all the same, and only it."""
    source = write(tmp_path / "in.jsonl", row("a"), row("a", TEXT), row("a"))
    out = tmp_path / "out.jsonl"
    run(source, out)
    lines = sorted(out.read_bytes().splitlines(keepends=True))
    out.write_bytes(lines[kept])
    run(source, out)
    assert sorted((r["id"][10], r["error"] is None) for r in read(out)) == [("1", True), ("2", False), ("3", False)]


@pytest.mark.parametrize("seed, change", [(1, lambda t: t), (0, lambda t: t.replace("Say it", "Say that"))])
def test_results_of_something_else_are_not_continued(tmp_path: Path, seed: int, change: Any) -> None:
    source = write(tmp_path / "in.jsonl", row("a"), row("b"))
    out = tmp_path / "out.jsonl"
    run(source, out)
    before = out.read_bytes()
    source.write_text(change(source.read_text()))
    with pytest.raises(OutriderError, match="other requests"):
        run(source, out, seed=seed)
    assert out.read_bytes() == before


def test_one_run_at_a_time_and_no_strange_files(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", row("a"))
    out = tmp_path / "out.jsonl"
    with closing(Results(out)), pytest.raises(OutriderError, match="another run"):
        run(source, out)
    for notes in (
        "my notes\n",
        '{"settings": 1}',
        '{"id": "x"}',
        '{"id": []}\n',
    ):  # some have no line end, as a result that was cut off
        out.write_text(notes)
        with pytest.raises(OutriderError, match="line 1: not a result"):
            run(source, out)
        assert out.read_text() == notes
    with pytest.raises(OutriderError, match="/dev/full: not a plain file"):
        run(source, Path("/dev/full"))
    with pytest.raises(OutriderError, match="cannot read"):
        run(tmp_path / "missing.jsonl", tmp_path / "new.jsonl")
    os.mkfifo(tmp_path / "fifo")  # read once to count its lines, it had none left to answer: 0 answered, exit code 0
    for pipe in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(OutriderError, match=f"cannot read {pipe}: not a plain file"):
            run(pipe, tmp_path / "new.jsonl")
    with pytest.raises(OutriderError, match="holds no request"):
        run(write(tmp_path / "empty.jsonl", ""), tmp_path / "new.jsonl")


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source = write(tmp_path / "in.jsonl", row("a"))
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        OutriderError, match=r"cannot write .*out.jsonl: No space left on device; the same command goes on"
    ):
        run(source, out)


def test_a_failing_step_fails_its_requests_only(tmp_path: Path) -> None:
    engine = FakeEngine(TOK)
    engine.fail_steps = 1
    source = write(tmp_path / "in.jsonl", *(row(f"r{i}") for i in range(20)))
    out = tmp_path / "out.jsonl"
    progress = run(source, out, engine)
    statuses = [r["response"]["status_code"] for r in read(out)]
    assert len(statuses) == 20 and 1 <= statuses.count(500) == progress.failed <= 8 and not engine.running
    engine.fail_steps = 99
    with pytest.raises(OutriderError, match="3 times in a row"):
        run(source, tmp_path / "other.jsonl", engine)
