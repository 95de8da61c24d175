"""From text to message parts: thoughts, content, tool calls. The same parts however the text was cut.

Under speculation one event carries many tokens, and a tag can begin in one event and end in another. So every parser
here reads character by character and holds back only what may still turn out to be a tag: any cutting of the same text
gives the same parts (adjacent pieces of one part are joined). `tests/property/test_output_chunking.py` holds us to it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")
Reading = Generator[None, str, T]  # gets a character at every `yield`
Kind = Literal["reasoning", "content", "call", "args"]


@dataclass(frozen=True)
class OutputPart:
    kind: Kind
    text: str  # call: the function's name; args: a piece of its JSON arguments
    index: int = 0  # which call


class EndOfText(Exception):
    """Raised in a parser where its text ends. complete: the model stopped by itself, so what is open is closed."""

    def __init__(self, complete: bool) -> None:
        self.complete = complete


class CharParser(ABC):
    """A parser as a coroutine: `_read` gets one character after the other and appends to `_out`."""

    def __init__(self) -> None:
        self.calls = 0
        self._out: list[OutputPart] = []
        self._reading = self._read()
        next(self._reading)

    @abstractmethod
    def _read(self) -> Reading[None]: ...

    def feed(self, text: str) -> list[OutputPart]:
        for char in text:
            self._reading.send(char)
        return self._take()

    def finish(self, complete: bool) -> list[OutputPart]:
        with suppress(StopIteration, EndOfText):
            self._reading.throw(EndOfText(complete))
        return self._take()

    def _until(self, tags: TagParser, text: Callable[[str], None]) -> Reading[str]:
        """The next tag. What stands before it, or before the end, goes to `text`."""
        tag = None
        try:
            while tag is None:
                free, tag = tags.feed((yield))
                text(free)
        except EndOfText:
            text(tags.flush())
            raise
        return tag

    def _take(self) -> list[OutputPart]:
        out = self._out
        self._out = []
        return join(out)


class PlainText:
    """Everything is content."""

    calls = 0

    def feed(self, text: str) -> list[OutputPart]:
        return [OutputPart("content", text)] if text else []

    def finish(self, complete: bool) -> list[OutputPart]:
        return []


class ParserChain:
    """Thoughts first, then tool calls in what is left."""

    def __init__(self, thoughts: Parser, tools: Parser) -> None:
        self._thoughts = thoughts
        self._tools = tools

    @property
    def calls(self) -> int:
        return self._tools.calls

    def feed(self, text: str) -> list[OutputPart]:
        return join(self._pass(self._thoughts.feed(text)))

    def finish(self, complete: bool) -> list[OutputPart]:
        return join([*self._pass(self._thoughts.finish(complete)), *self._tools.finish(complete)])

    def _pass(self, parts: Iterable[OutputPart]) -> list[OutputPart]:
        out: list[OutputPart] = []
        for part in parts:
            out += self._tools.feed(part.text) if part.kind == "content" else [part]
        return out


Parser = CharParser | PlainText | ParserChain


class TagParser:
    """Finds tags in a stream of characters; holds back only what may begin one. No tag may be a prefix of another."""

    def __init__(self, *tags: str) -> None:
        self.tags = tags
        self.held = ""

    def feed(self, char: str) -> tuple[str, str | None]:
        """(text that is certainly not a tag, the tag that just ended or None)."""
        self.held += char
        free = ""
        while self.held and not any(tag.startswith(self.held) for tag in self.tags):
            free = free + self.held[0]
            self.held = self.held[1:]
        if self.held in self.tags:
            tag = self.held
            self.held = ""
            return free, tag
        return free, None

    def flush(self) -> str:
        held = self.held
        self.held = ""
        return held


def join(parts: Iterable[OutputPart]) -> list[OutputPart]:
    """Merge neighbours of one part; drop empty pieces."""
    out: list[OutputPart] = []
    for part in parts:
        if not part.text and part.kind != "call":
            continue
        if out and part.kind != "call" and (out[-1].kind, out[-1].index) == (part.kind, part.index):
            out[-1] = OutputPart(part.kind, out[-1].text + part.text, part.index)
        else:
            out.append(part)
    return out


def loaded(text: str | bytes, otherwise: object = None) -> object:
    """What JSON text says; `otherwise` if it is none, or nests too deep."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise
