"""Code shared by the commands: options that list numbers, and text that is printed verbatim."""

from __future__ import annotations

import pytest
from rich.table import Table

from outrider.cli.common import note, numbers, out, parts
from outrider.types import OutriderError


def test_options_that_list_numbers() -> None:
    assert numbers(" 1, 4,", int, "--k") == (1, 4) and parts("a,, b") == ("a", "b")
    with pytest.raises(OutriderError, match="--k must be numbers separated by commas, got '1,x'"):
        numbers("1,x", int, "--k")
    with pytest.raises(OutriderError, match="--k is empty"):
        numbers(" ", int, "--k")


def test_brackets_and_colons_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    note("a[i] = b[/i]; :warning: [bold]")
    out.print("x[0]", ":smile:")
    table = Table("name")
    table.add_row("d[red]")
    out.print(table)
    said = capsys.readouterr()
    assert said.err == "a[i] = b[/i]; :warning: [bold]\n"
    assert said.out.startswith("x[0] :smile:\n") and "d[red]" in said.out
