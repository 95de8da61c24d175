"""Errors about values of the user's file name the file and the line. Bugs caught: "unknown option" without a place, an
option of the command line blamed on the file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outrider.cli.main import main


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "outrider" / "config.toml"
    path.parent.mkdir()
    return path


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["outrider", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    return capsys.readouterr().err.replace("\n", "")


GENERATE = ("generate", "m", "hello")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("[defaults]\n\nthreds = 2\n", 3, "unknown option 'threds' in [defaults]"),
        ("[generate]\nmax-tokens = 9\ntemprature = 1\n", 3, "unknown option 'temprature' in [generate]"),
        ("# mine\n[genrate]\nmax_tokens = 9\n", 2, "unknown table [genrate]"),
        ("[defaults]\ntemperature = -1\n", 2, "--temperature must be"),
        ("[defaults]\nseed = 1\n[generate]\nmax-tokens = 0\n", 4, "--max-tokens must be >= 1"),
        ("[generate]\nmax-tokens = 'many'\n", 2, "Invalid value for '--max-tokens'"),
        ("[defaults]\ndraft_tokens = 99\n", 2, "--draft-tokens"),
        ("[defaults]\nnum_speculative_tokens = 99\n", None, "unknown option 'num_speculative_tokens'"),
        ("threads = 2\n", 1, "'threads' stands outside a table"),
        ("[aliases]\n\ng = 3\n", 3, "alias 'g' must name a model"),
    ],
)
def test_the_line_is_named(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    line: int | None,
    message: str,
) -> None:
    config.write_text(text)
    said = refused(monkeypatch, capsys, *GENERATE)
    assert message in said and (f"{config}:{line}" if line is not None else str(config)) in said


def test_the_command_line_is_not_blamed_on_the_file(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text("[generate]\nmax-tokens = 9\n")
    assert "config.toml" not in refused(monkeypatch, capsys, *GENERATE, "--max-tokens", "0")
    assert "config.toml" not in refused(monkeypatch, capsys, *GENERATE, "--max-tokens=0")


def test_a_text_from_a_pipe_needs_a_dash(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Pipe:
        def isatty(self) -> bool:
            return False

    monkeypatch.setattr(sys, "stdin", Pipe())
    assert "standard input is read only if the prompt is '-'" in refused(monkeypatch, capsys, "generate", "m")
