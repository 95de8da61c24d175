"""What the commands share: files of prompts, and options that list numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.cli.common import numbers, parts, prompt_texts
from outrider.types import OutriderError


def test_the_first_turn_of_every_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": "a"}, {"turns": ["b", "c"]}, {"prompt": "d", "turns": []}, {"prompt": None, "turns": ["e"]}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert prompt_texts(path) == ["a", "b", "d", "e"]
    path.write_text(json.dumps({"turns": []}))
    with pytest.raises(OutriderError, match="line 1: needs a field 'prompt'"):
        prompt_texts(path)


def test_options_that_list_numbers() -> None:
    assert numbers(" 1, 4,", int, "--k") == (1, 4) and parts("a,, b") == ("a", "b")
    with pytest.raises(OutriderError, match="--k must be numbers separated by commas, got '1,x'"):
        numbers("1,x", int, "--k")
    with pytest.raises(OutriderError, match="--k is empty"):
        numbers(" ", int, "--k")
