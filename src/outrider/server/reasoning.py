"""Thoughts apart from the answer: Gemma 4's thought channel and <think> tags.

Gemma 4 writes `<|channel>thought` + newline + thoughts + `<channel|>`, anywhere; a tool call ends an open channel.
Other models write `<think>` ... `</think>` at the start of the answer only. Blanks around the thoughts are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from .output import CharParser, EndOfText, OutputPart, Reading, TagParser
from .tools import GEMMA_OPEN

MAX_HEADER = 24  # characters of a channel's name


@dataclass(frozen=True)
class ThoughtFormat:
    open: str
    close: str
    header: bool  # the first line after `open` names the channel
    only_first: bool  # only at the start of the answer
    ended_by: tuple[str, ...] = ()  # tags that end thoughts and belong to the answer


GEMMA4_CHANNEL = ThoughtFormat("<|channel>", "<channel|>", header=True, only_first=False, ended_by=(GEMMA_OPEN,))
THINK_TAGS = ThoughtFormat("<think>", "</think>", header=False, only_first=True)


class Thoughts(CharParser):
    def __init__(self, form: ThoughtFormat, prompt_tail: str = "") -> None:
        self._form = form
        self._opening = TagParser(form.open)
        self._began = False  # a thought or content
        self._blank = ""  # white space held back: it is dropped at the edges of thoughts
        self._fresh = True  # nothing but white space since the last edge
        # some templates end the prompt with the opening tag: then the answer begins inside the thoughts
        self._inside = prompt_tail.rstrip().endswith(form.open + ("thought" if form.header else ""))
        if self._inside:
            self._begin()
        super().__init__()

    def _read(self) -> Reading[None]:
        inside = self._inside
        while True:
            if not inside:
                yield from self._content()
            closing = TagParser(self._form.close, *self._form.ended_by)
            tag = None
            if self._form.header and not inside:
                tag = yield from self._header(closing)
            if tag is None:
                tag = yield from self._until(closing, partial(self._text, "reasoning"))
            self._edge()
            if tag in self._form.ended_by:
                self._fresh = False
                self._out.append(OutputPart("content", tag))
            inside = False

    def _content(self) -> Reading[None]:
        """Up to an opening tag."""
        try:
            yield from self._until(self._opening, partial(self._text, "content"))
        except EndOfText:
            if not self._began:
                self._out.append(OutputPart("content", self._blank))
            raise
        self._begin()
        self._edge()

    def _header(self, closing: TagParser) -> Reading[str | None]:
        """The channel's name. An empty channel may close without a newline: then the tag that did."""
        name = ""
        while (char := (yield)) != "\n":
            free, tag = closing.feed(char)
            name += free
            if tag is not None:
                return tag
            if len(name) > MAX_HEADER:  # no channel's name: thoughts began on the first line
                self._text("reasoning", name)
                break
        return None

    def _edge(self) -> None:
        self._blank = ""
        self._fresh = True

    def _begin(self) -> None:
        self._began = True
        if self._form.only_first:
            self._opening.tags = ()

    def _text(self, kind: Literal["reasoning", "content"], text: str) -> None:
        for char in text:
            if char.isspace() and (kind == "reasoning" or self._fresh):
                self._blank += char
                continue
            if not self._began:
                self._begin()
                self._fresh = False  # leading blanks belong to the answer when no thought came before it
            self._out.append(OutputPart(kind, char if self._fresh else self._blank + char))
            self._blank = ""
            self._fresh = False
