"""Whatever goes wrong is one line on stderr and exit code 2, for every command."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import common, main
from outrider.models.builtin_configs import BUILTIN_CONFIGS

MODEL = next(iter(BUILTIN_CONFIGS))


def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["outrider", *words])
    code = main.run()
    return code, capsys.readouterr().err


def test_a_terminal_without_a_width_gets_the_answer() -> None:
    words = [sys.executable, "-m", "outrider", "inspect", MODEL]
    got = subprocess.run(words, env={**os.environ, "COLUMNS": "0"}, capture_output=True, text=True, timeout=120)
    assert got.returncode == 0 and "parameters" in got.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["generate", "m", "x", "--threads", "x"], "Invalid value for '--threads'"),
        (["generate", "m", "x", "--colour", "red"], "No such option"),
        (["inspect"], "Missing argument 'model'"),
        (["nonsense"], "No such command 'nonsense'"),
        (["bench-server", "m", "--plot", "load.gif"], "--plot load.gif: name a file that ends in .svg"),
        (["bench-server", "m", "--json", "no/x"], "--json no/x cannot be written: No such file or directory"),
        (["batch", "FILE", "--model", "m", "--out", "FILE/x"], "--out FILE/x cannot be written: Not a directory"),
        (["batch", "FILE", "--model", "m", "--out", "."], "--out . cannot be written: Is a directory"),
        (
            ["train", "--target", "m", "--data", "d", "--out", "FILE/x"],
            "--out FILE/x cannot be written: Not a directory",
        ),
        (["bench", "m", "--out", "FILE/x"], "--out FILE/x cannot be written: Not a directory"),
        (
            ["generate", "m", "x", "--drafter", "none", "--draft-tokens", "4"],
            "--drafter none drafts nothing: leave out --draft-tokens",
        ),
        (["cluster", "d"], "`outrider cluster` is gone: `outrider train` learns a clustered head"),
        (["load", "m"], "`outrider load` is called `outrider bench-server` now"),
        (["inspect", "EMPTY"], "'num_hidden_layers' should be at least 1, got 0"),
        (["inspect", "ODD"], "its configuration makes no sense (ValueError"),
        (["predict", "ODD"], "its configuration makes no sense (ValueError"),
        (["serve", "ODD", "other=ODD"], "its configuration makes no sense (ValueError"),
        (["export", "d", "--out", "o"], "Missing option '--to'"),
        (["inspect", "FLAT"], "'hidden_size' should be at least 1, got 0"),
        (["predict", "EMPTY"], "'num_hidden_layers' should be at least 1, got 0"),
        (["eval-drafter", "m", "d", "--prompts", "FILE", "--limit", "0"], "--limit must be at least 1, got 0"),
        (["eval-drafter", "m", "d", "--prompts", "FILE", "--max-tokens", "0"], "--max-tokens must be >= 1, got 0"),
        (["prove", "m", "--temperatures", "0,-1"], "--temperature must be in [0, 100], got -1"),
        (["demo", "m", "--max-tokens", "0"], "--max-tokens must be >= 1, got 0"),
        (["train", "--target", "m", "--data", "d", "--out", "o", "--lr", "nan"], "--lr must be above 0, got nan"),
        (["train", "--target", "m", "--data", "d", "--out", "o", "--limit", "0"], "at least 1, got 0"),
    ],
)
def test_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], told: str
) -> None:
    (tmp_path / "FILE").write_text('{"prompt": "hello"}\n')
    config = {
        "model_type": "llama",
        "num_hidden_layers": 0,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
    }
    config |= {"vocab_size": 99, "rms_norm_eps": 1e-6}
    odd = config | {"num_hidden_layers": 1, "head_dim": "x"}
    flat = config | {"num_hidden_layers": 1, "hidden_size": 0}
    for name, made in (("EMPTY", config), ("ODD", odd), ("FLAT", flat)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(made))
    monkeypatch.chdir(tmp_path)
    code, err = called(monkeypatch, capsys, *[re.sub("EMPTY|ODD|FLAT", r"./\g<0>", w) for w in words])
    assert len([line for line in err.splitlines() if "\t" in line]) == 0
    lines = [line for line in err.splitlines() if line.startswith("outrider: ")]
    assert code == 2 and len(lines) == 1 and told in lines[0] and "Traceback" not in err, err


def test_a_full_disk_names_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Before long work, and where it fills up meanwhile: whatever kind of error the writer raises."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def no_room(**_: Any) -> None:
        raise full

    out = str(tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr(common.tempfile, "TemporaryFile", no_room)
        code, err = called(monkeypatch, capsys, "bench", "m", "--out", out)
    assert (code, err) == (2, f"outrider: --out {out} cannot be written: No space left on device\n")
    for error in (full, RuntimeError("I/O error: No space left on device (os error 28)")):
        monkeypatch.setattr(main, "app", lambda *_, error=error: (_ for _ in ()).throw(error))
        assert called(monkeypatch, capsys, "bench", "m", "--out", out) == (
            2,
            f"outrider: {out}: No space left on device\n",
        )


def test_a_number_of_processes_that_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command in one process does without it; one that is divided over several says what is wrong."""
    monkeypatch.setenv("WORLD_SIZE", "x")
    monkeypatch.setattr("sys.argv", ["outrider", "--version"])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 0
    monkeypatch.setenv("RANK", "y")
    code, err = called(monkeypatch, capsys, "generate", "m", "x", "--tensor-parallel", "2")
    assert (code, err) == (2, "outrider: RANK in the environment must be a whole number, got 'y'\n")


def test_without_arguments_and_with_questions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, capsys, "--version") == (0, "")
    assert called(monkeypatch, capsys, "generate", "--help") == (0, "")
    assert called(monkeypatch, capsys, "generate", "-h") == called(monkeypatch, capsys, "-h") == (0, "")
    code, err = called(monkeypatch, capsys)
    assert code in (0, 2) and "outrider:" not in err


def outrider(*words: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
    """In a process of its own, as `python -m outrider`."""
    return subprocess.run([sys.executable, "-m", "outrider", *words], stderr=subprocess.PIPE, timeout=120, **more)


@pytest.mark.parametrize(
    ("stdin", "told"),
    [
        (io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), "utf-8"), "not UTF-8: invalid start byte at byte 0"),
        (None, "closed: nothing can be read from it"),  # what Python makes of a descriptor 0 that is closed
    ],
    ids=["no text", "closed"],
)
def test_input_that_is_no_text_or_closed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stdin: io.TextIOWrapper | None, told: str
) -> None:
    monkeypatch.setattr("sys.stdin", stdin)
    assert called(monkeypatch, capsys, "generate", "m", "-") == (2, f"outrider: standard input is {told}\n")


def test_output_that_has_not_every_letter() -> None:
    done = outrider("inspect", MODEL, stdout=subprocess.PIPE, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and b" ? 5: " in done.stdout and done.stderr == b""  # a dot that ASCII has not


def test_a_reader_who_leaves_is_not_worth_a_word() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = outrider("inspect", MODEL, "--json", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_output_that_cannot_be_written_is_one_line() -> None:
    """Whether it is noticed while the command runs or, as of what is short, when it is over."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for words in (["generate", "--help"], ["--version"]):
        with open("/dev/full", "wb") as full:
            done = outrider(*words, stdout=full, env=buffered)
        assert (done.returncode, done.stderr) == (2, b"outrider: No space left on device\n")


def test_ctrl_c_while_modules_are_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.__main__ import main

    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "outrider.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "outrider.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
