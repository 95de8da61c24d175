"""`--help` at 80 columns. Bugs caught: names cut to `--draft-tokens,--…`, a new option that no panel of `serve` has."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import typer.main

from outrider.cli import help as help_module
from outrider.cli.main import COMMANDS, app, main


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    return typer.main.get_command(app()).commands  # type: ignore[attr-defined]


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["outrider", *words, "--help"])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_name_is_whole_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], commands: dict[str, Any], name: str
) -> None:
    text = shown(monkeypatch, capsys, name)
    assert all(len(line) <= 80 for line in text.splitlines())
    names = {word for p in commands[name].params if p.param_type_name == "option" for word in p.opts}
    assert names <= set(re.findall(r"--?[a-z][a-z-]*", text))


def test_the_program_lists_every_command_once_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One list of 21 commands, each with its whole docstring, said nothing to a newcomer."""
    text = shown(monkeypatch, capsys)
    assert all(len(line) <= 80 for line in text.splitlines())
    listed = [name for names in help_module.COMMAND_PANELS.values() for name in names]
    assert sorted(listed) == sorted(COMMANDS)
    assert all(text.count(f"\n  {name} ") == 1 for name in COMMANDS)
    assert "outrider demo" in text and "--version" in text


def test_options_of_serve_are_in_panels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], commands: dict[str, Any]
) -> None:
    titles = [title for title, _ in help_module.panels(commands["serve"])]
    assert titles == ["Model", "Speculation", "Memory", "API", "Limits", "Log"]
    text = " ".join(shown(monkeypatch, capsys, "serve").split())
    assert "--draft-tokens TEXT" in text and "vLLM: --num-speculative-tokens" in text
    assert "Usage: outrider serve [OPTIONS] MODEL..." in text
    names = [name for group in help_module.PANELS.values() for name in group]
    assert len(names) == len(set(names))
    known = {p.name for command in commands.values() for p in command.params}
    assert set(names) <= known
