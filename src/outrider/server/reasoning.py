"""Thoughts apart from the answer: Gemma 4's thought channel and <think> tags.

Gemma 4 writes `<|channel>thought` + newline + thoughts + `<channel|>`, anywhere; a tool call ends an open channel.
Other models write `<think>` ... `</think>` at the start of the answer only. Blanks around the thoughts are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from .output import OutputPart, TagParser, join
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


class Thoughts:
    """States: `content`, `header` (the channel's name is being read), `reasoning`."""

    calls = 0

    def __init__(self, form: ThoughtFormat, prompt_tail: str = "") -> None:
        self._form = form
        self._state = "reasoning" if opened_by(form, prompt_tail) else "content"
        self._open = TagParser(form.open)
        self._close = TagParser(form.close, *form.ended_by)
        self._blank = ""  # white space held back: it is dropped at the edges of thoughts
        self._fresh = True  # nothing but white space since the last edge
        self._began = self._state != "content"  # a thought or content has begun
        self._header = ""

    def feed(self, text: str) -> list[OutputPart]:
        out: list[OutputPart] = []
        for char in text:
            self._char(char, out)
        return join(out)

    def finish(self, complete: bool) -> list[OutputPart]:
        out: list[OutputPart] = []
        if self._state == "reasoning":
            self._text("reasoning", self._close.flush(), out)
        elif self._state == "content":
            self._text("content", self._open.flush(), out)
            if not self._began:
                out.append(OutputPart("content", self._blank))
        self._blank = ""
        return join(out)

    def _char(self, char: str, out: list[OutputPart]) -> None:
        if self._state == "content":
            if self._form.only_first and self._began:
                self._text("content", char, out)
                return
            free, tag = self._open.feed(char)
            self._text("content", free, out)
            if tag:
                self._began = True
                self._edge("header" if self._form.header else "reasoning")
        elif self._state == "header" and char == "\n":
            self._edge("reasoning")
        else:
            free, tag = self._close.feed(char)
            if self._state == "reasoning":
                self._text("reasoning", free, out)
            else:
                self._header += free
                if len(self._header) > MAX_HEADER:  # no channel's name: thoughts began on the first line
                    self._edge("reasoning")
                    self._text("reasoning", self._header, out)
            if tag:  # an empty channel may close without a newline
                self._edge("content")
                if tag in self._form.ended_by:
                    self._fresh = False
                    out.append(OutputPart("content", tag))

    def _edge(self, state: str) -> None:
        self._state, self._blank, self._fresh = state, "", True
        if state == "header":
            self._header = ""

    def _text(self, kind: str, text: str, out: list[OutputPart]) -> None:
        for char in text:
            if char.isspace() and (kind == "reasoning" or self._fresh):
                self._blank += char
                continue
            if kind == "content" and not self._began:
                self._began = True  # leading blanks belong to the answer when no thought came before it
                char = self._blank + char
            elif not self._fresh:
                char = self._blank + char
            self._blank, self._fresh = "", False
            out.append(OutputPart("reasoning" if kind == "reasoning" else "content", char))


def opened_by(form: ThoughtFormat, prompt_tail: str) -> bool:
    """Some templates end the prompt with the opening tag, so that the answer begins inside the thoughts."""
    tail = prompt_tail.rstrip()
    return tail.endswith(form.open + "thought" if form.header else form.open)
