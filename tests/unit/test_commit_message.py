"""Commit messages: the form that CONTRIBUTING.md shows, checked by tools/check_commit.py."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_commit", ROOT / "tools" / "check_commit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "message, wrong",
    [
        ("cache: prefix pages are found by API key\n\nThe why.\n", None),
        ("docs, tools: tables come from the history\n", None),
        ("# a comment of git's\nserver: keys\n", None),
        ("Merge branch 'x'\n", None),
        ("Prefix pages are found by API key\n", "area: what"),
        ("cache: " + "x" * 70 + "\n", "72 are allowed"),
        ("cache: pages.\n", "full stop"),
        ("cache: pages\nmore\n", "not blank"),
        ("", "area: what"),
    ],
)
def test_messages_are_judged(check: ModuleType, message: str, wrong: str | None) -> None:
    mistakes = check.mistakes(message)
    assert (not mistakes) if wrong is None else any(wrong in line for line in mistakes), mistakes


def test_the_newest_commit_is_in_the_form(check: ModuleType) -> None:
    """Only HEAD: earlier subjects were longer."""
    done = subprocess.run(["git", "log", "-1", "--format=%B"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    assert not check.mistakes(done.stdout)
