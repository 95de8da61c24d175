"""Messages typed and pasted, through a real terminal pair."""

from __future__ import annotations

import os
import pty
import threading
from collections.abc import Iterator

import pytest

from outrider.cli.terminal import PASTE, PASTED, Terminal


@pytest.fixture
def pair() -> Iterator[tuple[Terminal, int]]:
    master, slave = pty.openpty()
    shown: list[str] = []
    terminal = Terminal(slave, shown.append)
    terminal.shown = shown  # type: ignore[attr-defined]
    yield terminal, master
    os.close(master)
    os.close(slave)


def read(pair: tuple[Terminal, int], *typed: str) -> str:
    """Type (in pieces, while the terminal reads) and return the message."""
    terminal, master = pair
    ready = threading.Event()
    write = terminal.write
    terminal.write = lambda text: (write(text), ready.set())

    def keys() -> None:
        ready.wait(60)
        for piece in typed:
            data = piece.encode()
            while data:
                data = data[os.write(master, data[:512]) :]

    thread = threading.Thread(target=keys, daemon=True)
    thread.start()
    message = terminal.read(">>> ")
    thread.join(60)
    return message


def test_a_long_paste_of_many_lines_is_one_message(pair: tuple[Terminal, int]) -> None:
    text = "\n".join(f"line {i}: {'é' * 60}" for i in range(120))
    assert len(text.encode()) > 7500
    assert read(pair, "See: ", PASTE + text.replace("\n", "\r") + PASTED, "\r") == "See: " + text


def test_a_line_beyond_4095_bytes_is_whole(pair: tuple[Terminal, int]) -> None:
    assert read(pair, PASTE + "x" * 20_000 + PASTED + "\r") == "x" * 20_000


def test_a_paste_without_brackets_is_one_message(pair: tuple[Terminal, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.cli.terminal.RUSH_S", 0.5)  # whoever pastes here may have to wait for a processor
    text = "\n".join(f"line {i} {'y' * 50}" for i in range(100))
    assert read(pair, text.replace("\n", "\r") + "\r") == text


def test_keys_that_edit(pair: tuple[Terminal, int]) -> None:
    assert read(pair, "helo\x7flo wrld\x17world\x1b[D\x1b[A!\x01\r") == "hello world!"
    assert read(pair, "all wrong\x15right é\x7f\x7f日\x7f.\r") == "right."


def test_the_end_and_what_is_left_over(pair: tuple[Terminal, int]) -> None:
    with pytest.raises(EOFError):
        read(pair, "\x04")
    assert read(pair, "a\x04b\r") == "ab"
    assert "".join(pair[0].shown).count("\x1b[?2004l") == 2  # type: ignore[attr-defined]
