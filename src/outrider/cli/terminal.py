"""Reads messages from a terminal with prompt_toolkit: line editing, history, completion of commands, pastes and fenced
multi-line texts."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ..ops.cpu.build import cache_path
from ..platforms.terminal import keys_hidden
from ..types import OutriderError
from .common import out

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import Output

FENCE = '"""'


def is_open(text: str) -> bool:
    """True if three quotes at the beginning of the text are not closed yet."""
    return text.startswith(FENCE) and not (text.rstrip().endswith(FENCE) and len(text.rstrip()) >= 2 * len(FENCE))


def unfenced(text: str) -> str:
    """The text between three quotes; any other text unchanged."""
    return text.rstrip().removeprefix(FENCE).removesuffix(FENCE) if text.startswith(FENCE) else text


def session(commands: Sequence[str], input: Input | None = None, output: Output | None = None) -> PromptSession[str]:
    """The prompt session. input, output: for tests; None: standard input and output."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter

    return PromptSession(
        multiline=True,
        key_bindings=_keys(),
        history=_history(),
        completer=WordCompleter([*commands], sentence=True),
        complete_while_typing=False,
        enable_history_search=True,
        input=input,
        output=output,
    )


def standard(commands: Sequence[str]) -> PromptSession[str] | None:
    """Standard input and output if both are terminals that understand escapes, else None."""
    if sys.stdin is None:
        raise OutriderError("standard input is closed: nothing can be read from it")
    if sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        return session(commands)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # like prompt_toolkit
    return None


def read(typed: PromptSession[str] | None) -> str:
    """The next message. Raises EOFError at Ctrl-D and KeyboardInterrupt at Ctrl-C, both on an empty line. From a pipe
    (None) each line is a message; three quotes begin and end one of several lines."""
    if typed is not None:
        return unfenced(typed.prompt(">>> ", prompt_continuation="... "))
    text = out.input("[bold]>>> [/bold]")
    with suppress(EOFError):  # the pipe ended first: answer the text read so far
        while is_open(text):
            text += "\n" + out.input("")
    return unfenced(text)


@contextmanager
def keys_wait() -> Iterator[None]:
    """Hides keys typed meanwhile; the next prompt reads them. Ctrl-C still interrupts."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    with keys_hidden(sys.stdin.fileno()):
        yield


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: KeyPressEvent) -> None:
        """Ends the message; inside an open fence, begins another line."""
        if is_open(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @keys.add("c-c")
    def clear(event: KeyPressEvent) -> None:
        """Clears a half-typed message; on an empty line it ends the conversation."""
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys


def _history() -> History:
    """History including earlier conversations; if its file is not writable, of this conversation only."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = cache_path("chat_history")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    return FileHistory(str(path)) if os.access(path, os.R_OK | os.W_OK) else InMemoryHistory()
