"""Parses tool calls as they stream: Gemma 4's own syntax, and JSON in <tool_call> tags (SmolLM2, Qwen, Hermes).

    <|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>
    <tool_call>[{"name": "weather", "arguments": {"city": "Paris", "days": 3}}]</tool_call>

Both parsers emit a `call` with the name, then pieces of the arguments as JSON text as they arrive. Text that turns out
not to be a call is returned as content.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from contextlib import suppress

from .output import EndOfText, OutputPart, Reading, Tags, TextParser, join, loaded

GEMMA_OPEN = "<|tool_call>"
GEMMA_CLOSE = "<tool_call|>"
GEMMA_QUOTE = '<|"|>'
GEMMA_RESPONSE = "<|tool_response>"
JSON_OPEN = "<tool_call>"
JSON_CLOSE = "</tool_call>"
NAME = r"[A-Za-z0-9_.-]{1,128}"
JSON_HEAD = re.compile(rf'\{{\s*"name"\s*:\s*"({NAME})"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{{')
GEMMA_HEAD = re.compile(rf"\s*call\s*:\s*({NAME})\s*")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
WORDS = {"true": "true", "false": "false", "null": "null", "None": "null", "True": "true", "False": "false"}
CLOSERS = {"{": "}", "[": "]", '"': '"'}
BEGINNINGS = {"": "{,[]", "{": '"}'}  # characters that may follow, apart from white space
MAX_HEAD = 160  # maximum characters between the opening tag and the arguments
STRING_SYNTAX = Tags('"', "\\")
JSON_SYNTAX = Tags("{", "}", "[", "]", '"', JSON_CLOSE)  # outside of strings


class _Calls(TextParser):
    """Base of both parsers: passes on content outside of calls, drops white space around calls, numbers the calls."""

    open_tag: Tags

    def __init__(self) -> None:
        self._blank = ""
        super().__init__()

    def finish(self, complete: bool) -> list[OutputPart]:
        out = super().finish(complete)
        return out if self.calls else join([*out, OutputPart("content", self._blank)])

    def _read(self) -> Reading[None]:
        while True:
            yield from self._until(self.open_tag, self._content)
            yield from self._block()

    @abstractmethod
    def _block(self) -> Reading[None]:
        """Reads from an opening tag to its closing tag. Takes the end of the text for the end of the block."""

    def _content(self, text: str) -> None:
        visible = text.rstrip()
        if visible:
            self._out.append(OutputPart("content", self._blank + visible))
            self._blank = ""
        self._blank += text[len(visible) :]

    def _call(self, name: str) -> None:
        self._blank = ""
        self._out.append(OutputPart("call", name, self.calls))
        self.calls += 1

    def _args(self, text: str) -> None:
        self._out.append(OutputPart("args", text, self.calls - 1))


class GemmaCalls(_Calls):
    """Translates Gemma 4's arguments to JSON on the fly."""

    open_tag = Tags(GEMMA_OPEN)
    close_tag = Tags(GEMMA_CLOSE)
    quote = Tags(GEMMA_QUOTE)

    def _block(self) -> Reading[None]:
        head = ""
        named = None
        try:
            while named is None:
                char = yield from self._char()
                named = GEMMA_HEAD.fullmatch(head) if char == "{" else None
                head += char
                if named is None and (char == "{" or len(head) > MAX_HEAD or head.endswith(GEMMA_CLOSE)):
                    raise EndOfText(True)
        except EndOfText:
            self._content(GEMMA_OPEN + head)  # not a call
            return
        self._call(named[1])
        self._stack: list[str] = []  # closers of the open brackets
        self._push("{")
        try:
            yield from self._arguments()
            yield from self._until(self.close_tag, _drop)
        except EndOfText as e:
            self._args("".join(reversed(self._stack)) if e.complete else "")

    def _arguments(self) -> Reading[None]:
        while self._stack:
            there = self._in_list or (yield from self._key())
            if not there or (yield from self._value()):
                self._pop()

    def _key(self) -> Reading[bool]:
        """Reads a key up to its colon. False: the object has ended."""
        text = ""
        while True:
            char = yield from self._char()
            if char == ":":
                break
            if char == "}" and not text.strip():
                return False
            text += char if char != "," or text.strip() else ""
            if text.endswith(GEMMA_CLOSE):
                raise EndOfText(True)
        key = text.strip().removeprefix(GEMMA_QUOTE).removesuffix(GEMMA_QUOTE).strip('"')
        self._args(f"{self._comma}{_dumps(key)}:")
        return True

    def _value(self) -> Reading[bool]:
        """Reads a value; returns True if the list or object ended with it. A missing value in an object becomes
        null."""
        text = ""
        comma, missing = (self._comma, "") if self._in_list else ("", "null")
        try:
            while True:
                char = yield from self._char()
                if not text and (char.isspace() or (char == "," and self._in_list)):
                    continue
                if char in ",}]" or (not text and char in CLOSERS):
                    break
                text += char
                if text == GEMMA_QUOTE:
                    break
                if text.endswith(GEMMA_CLOSE):
                    raise EndOfText(True)
        except EndOfText as e:
            if e.complete:
                self._scalar(comma, text.removesuffix(GEMMA_CLOSE).strip(), missing)
            raise
        if char in ",}]":
            self._scalar(comma, text.strip(), missing)
            return char != ","
        self._args(comma)
        self._push('"' if text else char)
        if self._stack[-1] == '"':
            yield from self._until(self.quote, self._escaped_args) if text else self._string()
            self._pop()
        return False

    def _scalar(self, comma: str, text: str, missing: str) -> None:
        """Converts a bare word: numbers and JSON words stay, anything else becomes a string."""
        if text in WORDS:
            json_text = WORDS[text]
        elif NUMBER.fullmatch(text):
            json_text = text
        else:
            json_text = _dumps(text) if text else missing
        self._args(comma + json_text if json_text else "")
        self._comma = ","

    def _string(self) -> Reading[None]:
        """Reads a string in JSON's quotes to its end. Escapes stay as they are."""
        while True:
            span, is_syntax = yield from self._span(STRING_SYNTAX)
            if span == '"':
                return
            if not is_syntax:
                self._escaped_args(span)
                continue
            self._args(span)
            self._args((yield from self._char()))

    def _escaped_args(self, text: str) -> None:
        self._args(_dumps(text)[1:-1])

    @property
    def _in_list(self) -> bool:
        return self._stack[-1] == "]"

    def _push(self, opening: str) -> None:
        self._args(opening)
        self._stack.append(CLOSERS[opening])
        self._comma = ""

    def _pop(self) -> None:
        self._args(self._stack.pop())
        self._comma = ","


class JsonCalls(_Calls):
    """Parses one object or a list of objects with `name` and `arguments` (or `parameters`). Arguments behind the name
    are passed on as they arrive; an object in another order, when it is complete."""

    open_tag = Tags(JSON_OPEN)
    close_tag = Tags(JSON_CLOSE)

    def _block(self) -> Reading[None]:
        """Reads a block. Without a call it is content; beside calls, text that is not JSON of the right shape is
        dropped."""
        self._raw = [JSON_OPEN]
        before = self.calls
        try:
            while (yield from self._object()):
                pass
        except _Broken:
            if self.calls > before:
                yield from self._until(self.close_tag, _drop)
        except EndOfText:
            self._raw.append(self._unread())
        if self.calls == before and "".join(self._raw[1:]).strip() != "[]" + JSON_CLOSE:
            self._content("".join(self._raw))

    def _object(self) -> Reading[bool]:
        """Reads the next object, up to its last brace or, outside of strings, the closing tag. False: the block has
        ended."""
        text = ""
        stage = "head"
        nesting = _Nesting()
        try:
            while True:
                span, _ = yield from self._span(STRING_SYNTAX if nesting.quoted else JSON_SYNTAX)
                self._raw.append(span)  # a long text by += would be copied for every span
                if span == JSON_CLOSE and not nesting.quoted:
                    with suppress(_Broken):
                        self._end(stage, text, nesting)
                    return False
                first = span.lstrip()[:1]
                if stage == "head" and first and first not in BEGINNINGS.get(text.strip(), first):
                    self._read_again(span[span.index(first) + 1 :])  # a tag may begin there
                    raise _Broken
                if not text and span != "{":
                    continue
                text += span
                nesting.feed(span)
                if stage == "args":
                    self._args(span)
                    stage = "rest" if len(nesting.open) == 1 else "args"
                elif stage == "head" and span == "{":
                    head = JSON_HEAD.fullmatch(text)
                    if head is not None:
                        self._call(head[1])
                        self._args(span)
                        stage = "args"
                if not nesting.open:
                    self._end(stage, text, nesting)
                    return True
        except EndOfText as e:
            if e.complete:
                with suppress(_Broken):
                    self._end(stage, text, nesting)
            raise

    def _read_again(self, rest: str) -> None:
        """Returns the end of the last span to the unread text."""
        self._position -= len(rest)
        self._raw.append(self._raw.pop().removesuffix(rest))

    def _end(self, stage: str, text: str, nesting: _Nesting) -> None:
        """Ends an object: closes its open brackets and strings."""
        if stage == "args":
            self._args("".join(reversed(nesting.open[1:])))
        elif stage == "head" and text:
            self._whole(text + "".join(reversed(nesting.open)))

    def _whole(self, text: str) -> None:
        """Emits the call that a complete object describes."""
        call = loaded(text)
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(name, str) or not re.fullmatch(NAME, name):
            raise _Broken
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):  # some models write a string that holds JSON
            arguments = loaded(arguments)
        self._call(name)
        whole = _dumps(arguments if isinstance(arguments, dict) else {})
        self._args(whole.encode("utf-8", "replace").decode())  # a ? for each lone surrogate


class _Nesting:
    """Closers of the open strings and brackets of a JSON text."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self._escaped = False

    @property
    def quoted(self) -> bool:
        return bool(self.open) and self.open[-1] == '"'

    def feed(self, span: str) -> None:
        """Follows a span: one character of JSON's syntax, or text without any."""
        if self.quoted:
            if span == '"' and not self._escaped:
                self.open.pop()
            self._escaped = span == "\\" and not self._escaped
        elif span in CLOSERS:
            self.open.append(CLOSERS[span])
        elif span in ("}", "]") and self.open:
            self.open.pop()


def _drop(text: str) -> None:
    pass


class _Broken(Exception):
    """Raised for text that is not JSON of the right shape."""


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
