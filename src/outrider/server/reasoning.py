"""Separates thoughts from the answer: Gemma 4's thought channel, and <think> tags.

Gemma 4 writes `<|channel>thought` + newline + thoughts + `<channel|>`, anywhere; a tool call ends an open channel.
Other models write `<think>` ... `</think>` at the start of the answer only. Blanks around the thoughts are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from .output import EndOfText, OutputPart, Reading, Tags, TextParser
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


class Thoughts(TextParser):
    def __init__(self, form: ThoughtFormat, prompt_tail: str = "") -> None:
        self._form = form
        self._opening = Tags(form.open)
        self._closing = Tags(form.close, *form.ended_by)
        self._end_of_header = Tags("\n", form.close, *form.ended_by)
        self._began = False  # true after the first thought or content
        self._blank = ""  # white space held back: it is dropped at the edges of thoughts
        self._fresh = True  # only white space since the last edge
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
            tag = ""
            if self._form.header and not inside:
                tag = yield from self._header()
            if not tag:
                tag = yield from self._until(self._closing, partial(self._emit, "reasoning"))
            self._edge()
            if tag in self._form.ended_by:
                self._fresh = False
                self._out.append(OutputPart("content", tag))
            inside = False

    def _content(self) -> Reading[None]:
        """Reads up to an opening tag. Which tags open may change with the first text (`_begin`)."""
        try:
            while True:
                span, is_tag = yield from self._span(self._opening)
                if is_tag:
                    break
                self._emit("content", span)
        except EndOfText:
            self._emit("content", self._unread())
            if not self._began:
                self._out.append(OutputPart("content", self._blank))
            raise
        self._begin()
        self._edge()

    def _header(self) -> Reading[str]:
        """Skips the channel's name. Returns the tag that closed the channel if it is empty and without a newline, else
        ""."""
        name = ""
        while True:
            span, is_tag = yield from self._span(self._end_of_header)
            if is_tag:
                return "" if span == "\n" else span
            name += span
            if len(name) > MAX_HEADER:  # too long for a channel's name: thoughts begin on the first line
                self._emit("reasoning", name)
                return ""

    def _edge(self) -> None:
        self._blank = ""
        self._fresh = True

    def _begin(self) -> None:
        self._began = True
        if self._form.only_first:
            self._opening = Tags()

    def _emit(self, kind: Literal["reasoning", "content"], text: str) -> None:
        """Holds back white space in thoughts, and before the first text of an answer, until text follows."""
        bare = text.strip()
        if not bare and (kind == "reasoning" or self._fresh):
            self._blank += text
            return
        if not self._began:
            self._begin()
            self._fresh = False  # without thoughts before it, leading blanks belong to the answer
        text = text.lstrip() if self._fresh else self._blank + text
        self._blank = ""
        if kind == "reasoning":
            visible = text.rstrip()
            self._blank = text[len(visible) :]
            text = visible
        self._fresh = False
        self._out.append(OutputPart(kind, text))
