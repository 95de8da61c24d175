"""Tool calls out of text, as they stream: Gemma 4's own syntax, and JSON in <tool_call> tags (SmolLM2, Qwen, Hermes).

    <|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>
    <tool_call>[{"name": "weather", "arguments": {"city": "Paris", "days": 3}}]</tool_call>

Both parsers emit a `call` with the name as soon as it is known and then pieces of the arguments as JSON text. Text that
turns out not to be a call is returned as content.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod

from .output import OutputPart, TagParser, join

GEMMA_OPEN, GEMMA_CLOSE, GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
GEMMA_RESPONSE = "<|tool_response>"
JSON_OPEN, JSON_CLOSE = "<tool_call>", "</tool_call>"
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
WORDS = {"true": "true", "false": "false", "null": "null", "None": "null", "True": "true", "False": "false"}
MAX_HEAD = 160  # characters between the opening tag and the arguments


class _Nesting:
    """Which strings and brackets of a JSON text are open."""

    def __init__(self) -> None:
        self._open: list[str] = []  # what closes them
        self.in_string = self._escaped = False

    def feed(self, char: str) -> None:
        if self.in_string:
            self.in_string = self._escaped or char != '"'
            self._escaped = not self._escaped and char == "\\"
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self._open.append("}" if char == "{" else "]")
        elif char in "}]" and self._open:
            self._open.pop()

    @property
    def outside(self) -> bool:
        return not self.in_string and not self._open

    @property
    def closers(self) -> str:
        """What is missing where the text was cut off."""
        return ('"' if self.in_string else "") + "".join(reversed(self._open))


class _Calls(ABC):
    """What both parsers share: content outside of calls, white space around calls dropped, the numbering."""

    _close: TagParser  # of the block that is open

    def __init__(self, open_tag: str) -> None:
        self.calls = 0
        self._open = TagParser(open_tag)
        self._blank = ""
        self._inside = False
        self._out: list[OutputPart] = []

    def feed(self, text: str) -> list[OutputPart]:
        for char in text:
            if self._inside:
                self._call_char(char)
            else:
                free, tag = self._open.feed(char)
                self._content(free)
                if tag:
                    self._blank, self._inside = "", True
                    self._begin()
        return self._take()

    def finish(self, complete: bool) -> list[OutputPart]:
        """`complete`: the model stopped by itself, so an open call is closed; otherwise its arguments stay cut off."""
        if self._inside:
            self._end(complete)
        else:
            self._content(self._open.flush())
            if not self.calls:
                self._out.append(OutputPart("content", self._blank))
        return self._take()

    def _content(self, text: str) -> None:
        for char in text:
            if char.isspace():
                self._blank += char
            else:
                self._out.append(OutputPart("content", self._blank + char))
                self._blank = ""

    def _give_back(self, raw: str) -> None:
        """It was no call: the text is content after all."""
        self._inside = False
        self._content(raw)

    def _call(self, name: str) -> None:
        self._out.append(OutputPart("call", name, self.calls))
        self.calls += 1

    def _args(self, text: str) -> None:
        self._out.append(OutputPart("args", text, self.calls - 1))

    def _tail_char(self, char: str) -> None:
        if self._close.feed(char)[1]:
            self._inside = False

    def _take(self) -> list[OutputPart]:
        out, self._out = self._out, []
        return join(out)

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _call_char(self, char: str) -> None: ...

    @abstractmethod
    def _end(self, complete: bool) -> None: ...


class GemmaCalls(_Calls):
    """Translates Gemma 4's arguments to JSON on the fly. States: head, key, value, bare, quoted (<|"|>), string (JSON's
    own "), tail."""

    def __init__(self) -> None:
        super().__init__(GEMMA_OPEN)
        self._begin()

    def _begin(self) -> None:
        self._state = "head"
        self._text = ""  # the head, key or bare value being read
        self._stack: list[str] = []  # the brackets that are open
        self._first = True  # no member yet in the innermost bracket
        self._quote = TagParser(GEMMA_QUOTE)
        self._close = TagParser(GEMMA_CLOSE)
        self._escaped = False

    def _call_char(self, char: str) -> None:
        getattr(self, f"_{self._state}_char")(char)

    def _head_char(self, char: str) -> None:
        if char == "{":
            before, colon, name = self._text.partition(":")
            if before.strip() == "call" and colon and NAME.fullmatch(name.strip()):
                self._call(name.strip())
                self._push("{")
                return
        self._text += char
        if char == "{" or len(self._text) > MAX_HEAD or self._text.endswith(GEMMA_CLOSE):
            self._give_back(GEMMA_OPEN + self._text)

    def _key_char(self, char: str) -> None:
        if char == "}" and not self._text.strip():
            self._pop()
        elif char == ":":
            key = self._text.strip().removeprefix(GEMMA_QUOTE).removesuffix(GEMMA_QUOTE).strip('"')
            self._comma()
            self._args(json.dumps(key, ensure_ascii=False) + ":")
            self._state, self._text = "value", ""
        elif char == "," and not self._text.strip():
            return
        else:
            self._text += char
            if self._text.endswith(GEMMA_CLOSE):
                self._close_all()

    def _value_char(self, char: str) -> None:
        if char.isspace() or (char == "," and self._in_list):
            return
        if char == "]" and self._in_list:
            self._pop()
            return
        if char in "{[":
            self._element()
            self._push(char)
        elif char == '"':
            self._element()
            self._args('"')
            self._state, self._escaped = "string", False
        else:
            self._state, self._text = "bare", ""
            self._bare_char(char)

    def _bare_char(self, char: str) -> None:
        if char in ",}]":
            self._scalar()
            self._state = "value" if self._in_list else "key"
            if char != ",":
                self._pop()
            return
        self._text += char
        if self._text == GEMMA_QUOTE:
            self._element()
            self._args('"')
            self._state, self._text = "quoted", ""
        elif self._text.endswith(GEMMA_CLOSE):
            self._text = self._text.removesuffix(GEMMA_CLOSE)
            self._scalar()
            self._close_all()

    def _quoted_char(self, char: str) -> None:
        free, tag = self._quote.feed(char)
        self._args(json.dumps(free, ensure_ascii=False)[1:-1])
        if tag:
            self._args('"')
            self._after_value()

    def _string_char(self, char: str) -> None:
        if self._escaped or char == "\\":
            self._escaped = not self._escaped
            self._args(char)
        elif char == '"':
            self._args('"')
            self._after_value()
        else:
            self._args(json.dumps(char, ensure_ascii=False)[1:-1])

    @property
    def _in_list(self) -> bool:
        return bool(self._stack) and self._stack[-1] == "["

    def _push(self, bracket: str) -> None:
        self._args(bracket)
        self._stack.append(bracket)
        self._first, self._text = True, ""
        self._state = "key" if bracket == "{" else "value"

    def _pop(self) -> None:
        self._args("}" if self._stack.pop() == "{" else "]")
        self._first = False
        if self._stack:
            self._after_value()
        else:
            self._state = "tail"

    def _after_value(self) -> None:
        self._state, self._text = ("value" if self._in_list else "key"), ""

    def _comma(self) -> None:
        if not self._first:
            self._args(",")
        self._first = False

    def _element(self) -> None:
        if self._in_list:
            self._comma()

    def _scalar(self) -> None:
        """A bare word: a number or a JSON word as it is, anything else as a string."""
        text = self._text.strip()
        self._text = ""
        if text or not self._in_list:
            self._element()
            known = WORDS.get(text) or (text if NUMBER.fullmatch(text) else None)
            self._args(known or (json.dumps(text, ensure_ascii=False) if text else "null"))

    def _close_all(self) -> None:
        self._args("".join("}" if b == "{" else "]" for b in reversed(self._stack)))
        self._inside = False

    def _end(self, complete: bool) -> None:
        if self._state == "head":
            self._give_back(GEMMA_OPEN + self._text)
        elif complete and self._state != "tail":
            if self._state == "quoted":
                self._args(json.dumps(self._quote.flush(), ensure_ascii=False)[1:-1] + '"')
            elif self._state == "string":
                self._args('"')
            elif self._state == "bare" or (self._state == "value" and not self._in_list):
                self._scalar()
            self._close_all()


class JsonCalls(_Calls):
    """One object or a list of objects with `name` and `arguments` (or `parameters`), in either order.

    States: outer (between objects), key, colon, value, tail (everything up to the closing tag is dropped).
    """

    def __init__(self) -> None:
        super().__init__(JSON_OPEN)
        self._begin()

    def _begin(self) -> None:
        self._raw = ""  # the block so far, to be given back if it is no call
        self._before = self.calls  # calls of earlier blocks
        self._close = TagParser(JSON_CLOSE)
        self._state = "outer"

    def _object(self) -> None:
        self._state, self._key = "key", ""
        self._name: str | None = None
        self._early = ""  # arguments that came before the name
        self._had_args = False

    def _call_char(self, char: str) -> None:
        self._raw += char
        getattr(self, f"_{self._state}_char")(char)

    def _outer_char(self, char: str) -> None:
        free, tag = self._close.feed(char)
        if tag:
            self._inside = False
            if self.calls == self._before and self._raw.strip() != "[]" + JSON_CLOSE:
                self._give_back(JSON_OPEN + self._raw)
        elif free.removesuffix("{").strip(" \t\r\n,[]"):
            self._broken()
        elif char == "{":
            self._object()

    def _key_char(self, char: str) -> None:
        if self._key:
            self._key += char
            if char == '"':
                self._state = "colon"
        elif char == '"':
            self._key = char
        elif char == "}":
            self._object_end()
        elif char not in " \t\r\n,":
            self._broken()

    def _colon_char(self, char: str) -> None:
        if char == ":":
            self._state, self._value, self._nesting = "value", "", _Nesting()
        elif not char.isspace():
            self._broken()

    def _value_char(self, char: str) -> None:
        if not self._value and char.isspace():
            return
        if self._nesting.outside and self._value and char in ",}] \t\r\n":  # a number or a word ended
            self._value_end()
            if char == "}" and self._inside and self._state == "key":
                self._object_end()
            return
        self._value += char
        self._nesting.feed(char)
        if self._is_args and self._value[0] == "{":
            self._stream(char)
        if self._nesting.outside and char in '}]"':
            self._value_end()

    @property
    def _is_args(self) -> bool:
        return self._key in ('"arguments"', '"parameters"')

    def _stream(self, text: str) -> None:
        self._had_args = True
        if self._name is None:
            self._early += text
        else:
            self._args(text)

    def _value_end(self) -> None:
        key, value = self._key, self._value
        self._state, self._key = "key", ""
        if key == '"name"':
            name = _loads(value)
            if not isinstance(name, str) or not NAME.fullmatch(name) or self._name is not None:
                self._broken()
                return
            self._name = name
            self._call(name)
            self._args(self._early)
        elif key in ('"arguments"', '"parameters"') and value[0] != "{":
            inner = _loads(value)  # some models write the arguments as a string that holds JSON
            self._stream(inner if isinstance(inner, str) and isinstance(_loads(inner), dict) else "{}")

    def _object_end(self) -> None:
        if self._name is None:
            self._broken()
            return
        if not self._had_args:
            self._args("{}")
        self._state = "outer"

    def _broken(self) -> None:
        """Not JSON of the right shape: give the block back if no call came out of it, else drop the rest of it."""
        if self.calls == self._before:
            self._give_back(JSON_OPEN + self._raw)
        else:
            self._state = "tail"

    def _end(self, complete: bool) -> None:
        if self.calls == self._before:
            self._give_back(JSON_OPEN + self._raw)
        elif complete and self._state == "value" and self._is_args and self._value[:1] == "{":
            self._args(self._nesting.closers)
        elif complete and self._state in ("key", "colon", "value") and self._name is not None and not self._had_args:
            self._args("{}")


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
