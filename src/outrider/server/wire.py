"""A protocol as one class: a `Wire` turns a body into our request and writes the answer, whole or as a stream, and
errors. Each call has its own `Wire`, which may keep state."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from .errors import ApiError

if TYPE_CHECKING:
    from .answer import Answer, AnswerChoice, Delta
    from .schema import ChatRequest, CompletionRequest

Json = dict[str, object]


def encoded(value: object) -> bytes:
    """As JSON, large lists in pieces: the encoder holds the interpreter until one call of it is done."""
    return "".join(_pieces(value, 5)).encode()


def _pieces(value: object, depth: int) -> Iterator[str]:
    named = value if isinstance(value, dict) else None
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not depth or not any(isinstance(v, dict | list) for v in inner):
        yield json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return
    before = "[" if named is None else "{"
    for name, v in zip(itertools.repeat("") if named is None else named, inner):
        yield before if named is None else f"{before}{json.dumps(name, ensure_ascii=False)}:"
        yield from _pieces(v, depth - 1)
        before = ","
    yield "]" if named is None else "}"


def sse(data: Json, event: str | None = None) -> str:
    name = f"event: {event}\n" if event is not None else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def arguments_of(text: str) -> object:
    """A call's arguments as an object that JSON can say: null for NaN, a ? for a lone surrogate. Of a call that was
    cut off, nothing is known."""
    try:
        found = json.loads(text or "{}", parse_constant=lambda word: None)
        return json.loads(json.dumps(found, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return {}


class Wire(Protocol):
    media_type: str
    still_working: str  # written when nothing came for a while

    def parse(self, raw: bytes) -> ChatRequest | CompletionRequest: ...
    def whole(self, answer: Answer) -> Json: ...
    def opening(self, answer: Answer) -> str: ...
    def delta(self, answer: Answer, choice: AnswerChoice, delta: Delta) -> str: ...
    def closing(self, answer: Answer) -> str: ...
    def error(self, error: ApiError) -> str: ...
