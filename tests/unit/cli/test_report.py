"""`outrider doctor --report`: a page that says what a machine is and whether its kernels are right."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from outrider.cli import report
from outrider.cli.main import app
from outrider.ops.cpu import build


def test_a_page_names_the_system_and_the_features_that_levels_need() -> None:
    page = "\n".join(report.lines(["torch            2.13.0"], measure=False))
    for word in ("system ", "features ", "cores ", "memory ", "sandboxes ", "torch "):
        assert word in page
    assert "### Check" not in page


def test_a_check_that_fails_is_a_line_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is worth most on a machine where something fails."""

    def fails(*_: object) -> tuple[bool, str]:
        raise OSError("no such library\nhere | there")

    monkeypatch.setattr(report, "level_check", fails)
    monkeypatch.setattr(report, "speed_check", lambda: (True, "20 GB/s"))
    monkeypatch.setattr(report, "model_check", lambda: (True, "40 tokens/s"))
    monkeypatch.setattr(build, "runnable", lambda: ("generic",))
    monkeypatch.setattr(build, "best_isa", lambda: "generic")
    lines = list(report.lines([]))
    assert "| level generic | **NO** | OSError: no such library here \\| there |" in lines
    assert "| the same answers with drafts | yes | 40 tokens/s |" in lines
    result = CliRunner().invoke(app(), ["doctor", "--report"])
    assert result.exit_code == 1 and "**NO**" in result.stdout


def test_a_level_is_compared_with_its_definition_and_with_itself() -> None:
    good, result = report.level_check(build.best_isa())
    assert good and "the same bits with any number of threads" in result


def test_a_page_is_no_json() -> None:
    result = CliRunner().invoke(app(), ["doctor", "--report", "--json"])
    assert result.exit_code != 0
