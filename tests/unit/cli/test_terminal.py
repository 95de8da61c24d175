"""Messages typed and pasted, through prompt_toolkit; keys typed during an answer, through a real terminal pair."""

from __future__ import annotations

import os
import pty
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from outrider.cli.terminal import is_open, keys_wait, read, session, unfenced

PASTE = "\x1b[200~"
PASTED = "\x1b[201~"


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PipeInput]:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    with create_pipe_input() as pipe:
        yield pipe


def terminal(keys: PipeInput) -> PromptSession[str]:
    return session(["/stats", "/system"], keys, DummyOutput())


def test_a_long_paste_of_many_lines_is_one_message(keys: PipeInput) -> None:
    text = "\n".join(f"line {i}: {'é' * 60}" for i in range(120))
    keys.send_text("See: " + PASTE + text.replace("\n", "\r") + PASTED + "\r")
    assert read(terminal(keys)) == "See: " + text


def test_three_quotes_begin_lines_and_end_them(keys: PipeInput) -> None:
    keys.send_text('"""one\rtwo\rthree"""\r')
    assert read(terminal(keys)) == "one\ntwo\nthree"
    assert (
        is_open('"""')
        and is_open('"""a"')
        and not is_open('""""""')
        and not is_open("a")
        and unfenced('"""a"""') == "a"
    )


def test_editing_history_and_completion(keys: PipeInput) -> None:
    first = terminal(keys)
    keys.send_text("hello wrld\x1b[D\x1b[D\x1b[Do\r")
    assert read(first) == "hello world"
    # another conversation has it, too
    assert [*terminal(keys).history.load_history_strings()] == ["hello world"]
    completer = first.completer
    assert completer is not None
    completions = completer.get_completions(Document("/sta"), CompleteEvent())
    assert [each.text for each in completions] == ["/stats"]


def test_ctrl_c_clears_a_half_typed_line_and_ends_on_an_empty_one(keys: PipeInput) -> None:
    made = terminal(keys)
    keys.send_text("half\x03whole\r")
    assert read(made) == "whole"
    for key, error in (("\x03", KeyboardInterrupt), ("\x04", EOFError)):
        keys.send_text(key)
        with pytest.raises(error):
            read(made)


def test_a_history_that_cannot_be_written_is_kept_in_memory(keys: PipeInput, tmp_path: Path) -> None:
    (tmp_path / "chat_history").mkdir()
    keys.send_text("hello\r")
    assert read(terminal(keys)) == "hello"


def test_keys_typed_during_an_answer_are_not_shown_and_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "r+b", buffering=0) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        before = termios.tcgetattr(slave)
        with keys_wait():
            os.write(master, b"next\r")
            assert os.read(slave, 100) == b"next\r"  # whole, with no line end needed, as prompt_toolkit will read it
            assert not termios.tcgetattr(slave)[3] & termios.ECHO
        assert termios.tcgetattr(slave) == before
    os.close(master)
