"""Files of prompts: every form, and every mistake in one line."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path

import pytest

from outrider.prompts import read_prompts
from outrider.types import OutriderError


def test_prompts_of_every_form(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "category": "x"}, {"text": "b", "id": 7}, {"turns": ["c", "d"], "question_id": 81}]
    text = "\n\n".join(json.dumps(r) for r in rows)
    (tmp_path / "p.jsonl").write_text(text)
    with gzip.open(tmp_path / "p.jsonl.gz", "wt") as file:
        file.write(text)
    for name in ("p.jsonl", "p.jsonl.gz"):
        read = read_prompts(tmp_path / name)
        assert [(p.text, p.category, p.id) for p in read] == [
            ("a", "x", "1"),
            ("b", "all", "7"),
            ("c", "all", "spec_bench/81"),
        ]
    assert len(read_prompts(tmp_path / "p.jsonl", 2)) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n[1]\n', ":2: a JSON object"),
        (b'{"prompt": "a"}\n{"prompt": 3}\n', ":2: no text"),
        (b'{"turns": []}\n', ":1: no text"),
        (b'{"prompt": "a", "max_tokens": 0}\n', ":1: max_tokens must be a whole number, 1 or more, got 0"),
        (b'{"prompt": "a"\n', ":1: not JSON"),
        (b"\n\n", "holds no prompts"),
        (b'{"prompt": "\xff"}\n', "cannot read prompts"),
        (b'{"prompt": "a"}\n' + b"[" * 200_000, ":2: cannot be read"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", ":1: cannot be read"),
    ],
)
def test_a_bad_prompt_file_names_the_line(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(OutriderError, match=message):
        read_prompts(tmp_path / "p.jsonl")
    (tmp_path / "p.gz").write_bytes(content)  # not gzip at all
    with pytest.raises(OutriderError):
        read_prompts(tmp_path / "p.gz")


def test_damaged_gzip_is_one_line(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"prompt": "a"}\n' * 50, mtime=0)
    for damaged in (
        whole[:-9],
        whole[:12] + b"\xff" * 8 + whole[20:],
        whole[:-6] + b"\0" * 6,
    ):  # cut off; its data; its sums
        (tmp_path / "p.jsonl.gz").write_bytes(damaged)
        with pytest.raises(OutriderError, match=r"cannot read prompts from .*p\.jsonl\.gz: ") as caught:
            read_prompts(tmp_path / "p.jsonl.gz")
        assert "\n" not in str(caught.value)


def test_what_counts_as_absent_and_a_mark_of_the_encoding(tmp_path: Path) -> None:
    rows = [{"prompt": "ä", "max_tokens": None}, {"prompt": "b", "note": []}]
    text = "\n".join(json.dumps(row) for row in rows).encode("utf-8-sig")
    (tmp_path / "p.jsonl").write_bytes(text)
    (tmp_path / "p.gz").write_bytes(gzip.compress(text))
    for name in ("p.jsonl", "p.gz"):
        first, second = read_prompts(tmp_path / name)
        assert (first.text, first.max_tokens, second.text) == ("ä", 128, "b")


def test_turns_and_the_first_of_them(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = [
        {"prompt": "a"},
        {"turns": ["b", "c"]},
        {"prompt": "d", "turns": []},
        {"prompt": None, "turns": ["e"], "more": 1},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    read = read_prompts(path)
    assert [p.text for p in read] == ["a", "b", "d", "e"] and [p.row for p in read] == rows
    assert [p.turns for p in read] == [["a"], ["b", "c"], ["d"], ["e"]]


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/full", "/dev/null"])
def test_a_device_is_no_file_of_prompts(path: str) -> None:
    """They were read until memory ended."""
    with pytest.raises(OutriderError, match=f"cannot read prompts from {path}: it is a device"):
        read_prompts(path)


def test_a_pipe_is_read_and_one_that_nobody_writes_to_is_empty(tmp_path: Path) -> None:
    """`--prompts <(jq ...)`; a fifo without a writer was waited for without end."""
    os.mkfifo(tmp_path / "p")
    with pytest.raises(OutriderError, match="holds no prompts"):
        read_prompts(tmp_path / "p")
    ends = os.pipe()
    writer = threading.Timer(0.2, lambda: (os.write(ends[1], b'{"prompt": "a"}'), os.close(ends[1])))
    writer.start()
    assert [p.text for p in read_prompts(f"/dev/fd/{ends[0]}")] == ["a"]
    os.close(ends[0])


def test_a_file_that_there_is_not(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path, tmp_path / "none.gz"):
        with pytest.raises(OutriderError, match="cannot read prompts from") as caught:
            read_prompts(path)
        assert "\n" not in str(caught.value)
