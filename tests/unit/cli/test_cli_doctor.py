"""`outrider doctor`: says what is missing and how to mend it; and shell completion answers."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.ops.cpu import build as kernels


def call(*arguments: str, **env: str) -> Any:
    return CliRunner().invoke(app(), list(arguments), env=env)


def findings(**env: str) -> tuple[int, dict[str, dict[str, str]]]:
    result = call("doctor", "--json", "--no-build", **env)
    return result.exit_code, {f["what"]: f for f in json.loads(result.stdout)}


def test_what_is_here(tmp_path: Path) -> None:
    code, report = findings(OUTRIDER_CACHE=str(tmp_path / "not" / "yet"))
    assert code == 0 and report["torch"]["state"] == "ok" and report["cache"]["state"] in ("ok", "note")
    assert "cores" in report["processor"]["found"] and "GPU" in report
    said = call("doctor", "--no-build").stdout
    assert "CPU kernels" in said and "Traceback" not in said


def test_a_cache_that_cannot_be_used_is_bad(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in its place")
    for where in (tmp_path / "file", tmp_path / "file" / "below"):
        code, report = findings(OUTRIDER_CACHE=str(where))
        assert code == 1 and report["cache"]["state"] == "bad" and "OUTRIDER_CACHE" in report["cache"]["advice"]


def test_no_compiler_is_bad_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none() -> str:
        raise kernels.BuildError("no C compiler (cc, gcc or clang) on the path")

    monkeypatch.setattr(kernels, "compiler", none)
    code, report = findings(OUTRIDER_CACHE=str(tmp_path))  # nothing shipped, nothing built before
    assert code == 1 and report["CPU kernels"]["state"] == "bad" and "gcc" in report["CPU kernels"]["advice"]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "uvicorn" else real(name, *rest)
    )
    code, report = findings()
    assert code == 0 and report["extra serve"]["state"] == "note" and "uvicorn" in report["extra serve"]["found"]
    assert "pip install 'outrider[serve]'" in call("doctor", "--no-build").stdout  # the brackets are no markup


def test_missing_sound_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "soundfile" else real(name, *rest)
    )
    _, report = findings()
    assert report["extra audio"]["state"] == "note" and report["extra audio"]["found"] == "without soundfile"
    assert report["extra audio"]["advice"] == "pip install 'outrider[audio]'"


def test_shell_completion() -> None:
    words = {"COMP_WORDS": "outrider do", "COMP_CWORD": "1", "_OUTRIDER_COMPLETE": "complete_bash"}
    assert "doctor" in CliRunner().invoke(app(), [], prog_name="outrider", env=words).stdout


def test_the_table_of_kernels_names_what_is_there() -> None:
    """A kernel that was renamed or taken out; a source that is not shipped. Without triton the CPU's alone."""
    rows = json.loads(call("doctor", "--kernels", "--json").stdout)
    assert rows and call("doctor", "--kernels").exit_code == 0
    root = Path(kernels.__file__).parents[1]
    assert len({row["kernel"] for row in rows}) == len(rows)
    for row in rows:
        for source in row["source"].split(", "):
            path = (
                root.parent / source
                if "/" in source
                else root / ("cuda" if source.endswith("cu") else "triton") / source
            )
            assert path.is_file(), row
            for name in re.findall(r"\w+_kernel|\w+_wgmma|\w+_gemv", row["kernel"]):
                assert name in path.read_text() or name in path.name or len(row["source"].split(", ")) > 1, row
