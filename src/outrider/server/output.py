"""Turns text into message parts: thoughts, content, tool calls. The parts do not depend on how the text was cut.

Under speculation one event carries many tokens, and a tag can begin in one event and end in another. So every parser
here takes spans of text and holds back only what may still become a tag: any cutting of a text gives the same parts
(adjacent pieces of one part are joined). `tests/property/test_output_chunking.py` checks this.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # waits for more text at every `yield`
Kind = Literal["reasoning", "content", "call", "args"]


@dataclass(frozen=True)
class OutputPart:
    kind: Kind
    text: str  # call: the function's name; args: a piece of its JSON arguments
    index: int = 0  # number of the call


class EndOfText(Exception):
    """Raised in a parser at the end of its text. complete: the model stopped by itself, so open parts are closed."""

    def __init__(self, complete: bool) -> None:
        self.complete = complete


class Tags:
    """Finds the first of a set of tags in a text. No tag may be a prefix or a part of another; the set may be empty."""

    def __init__(self, *tags: str) -> None:
        self._tag = re.compile("|".join(map(re.escape, tags)) or "(?!)")
        self._beginnings = {tag[:length] for tag in tags for length in range(1, len(tag))}
        self._longest = max(map(len, self._beginnings), default=0)

    def find(self, text: str, start: int) -> tuple[int, int]:
        """Begin and end of the first tag. Without one: twice the position where a tag may have begun, else the text's
        end."""
        match = self._tag.search(text, start)
        if match is not None:
            return match.span()
        for begin in range(max(start, len(text) - self._longest), len(text)):
            if text[begin:] in self._beginnings:
                return begin, begin
        return len(text), len(text)


class TextParser(ABC):
    """A parser as a coroutine: `_read` consumes text span by span as it arrives, and appends to `_out`."""

    def __init__(self) -> None:
        self.calls = 0
        self._out: list[OutputPart] = []
        self._text = ""
        self._position = 0  # text before it has been read
        self._reading = self._read()
        next(self._reading)

    @abstractmethod
    def _read(self) -> Reading[None]: ...

    def feed(self, text: str) -> list[OutputPart]:
        self._text = self._text[self._position :] + text
        self._position = 0
        next(self._reading)
        return self._take()

    def finish(self, complete: bool) -> list[OutputPart]:
        with suppress(StopIteration, EndOfText):
            self._reading.throw(EndOfText(complete))
        return self._take()

    # ---- reading

    def _span(self, tags: Tags) -> Reading[tuple[str, bool]]:
        """The text before the next tag, as far as it has arrived, and False; if the tag is next, the tag and True."""
        while True:
            start = self._position
            begin, end = tags.find(self._text, start)
            if begin > start:
                self._position = begin
                return self._text[start:begin], False
            if end > begin:
                self._position = end
                return self._text[begin:end], True
            yield

    def _until(self, tags: Tags, emit: Callable[[str], None]) -> Reading[str]:
        """Returns the next tag. Text before it, or before the end, goes to `emit`."""
        try:
            while True:
                span, is_tag = yield from self._span(tags)
                if is_tag:
                    return span
                emit(span)
        except EndOfText:
            emit(self._unread())
            raise

    def _char(self) -> Reading[str]:
        while self._position == len(self._text):
            yield
        char = self._text[self._position]
        self._position += 1
        return char

    def _unread(self) -> str:
        """Returns the text that was held back, and counts it as read."""
        text = self._text[self._position :]
        self._position = len(self._text)
        return text

    def _take(self) -> list[OutputPart]:
        out = self._out
        self._out = []
        return join(out)


class PlainText:
    """Takes the whole text as content."""

    calls = 0

    def feed(self, text: str) -> list[OutputPart]:
        return [OutputPart("content", text)] if text else []

    def finish(self, complete: bool) -> list[OutputPart]:
        return []


class ParserChain:
    """Splits off thoughts, then tool calls, from the content."""

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


Parser = TextParser | PlainText | ParserChain


def join(parts: Iterable[OutputPart]) -> list[OutputPart]:
    """Merges neighbours of the same part; drops empty pieces."""
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
    """The value of a JSON text; `otherwise` if it is not JSON or is nested too deep."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise
