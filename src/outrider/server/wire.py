"""How an answer goes over the wire. Inside the server every answer has OpenAI's shape; a `Wire` translates it into the
protocol that was asked in: whole answers, chunks of a stream, errors.

A `Wire` is made anew for each call and may remember what it has written.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, cast

from .errors import ApiError

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
    """A call's arguments as an object; of a call that was cut off, nothing is known."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}


class AnswerToolCall(NamedTuple):
    """A function call; in a chunk, what is new of it."""

    which: int  # of its calls
    id: str  # empty where only arguments are new
    name: str
    arguments: str


class AnswerText(NamedTuple):
    """What one choice of an answer says; of a chunk, what is new."""

    thoughts: str
    text: str
    calls: list[AnswerToolCall]
    logprobs: list[Json]
    finish: str | None
    stopped_by: str | int | None  # the stop string or the stop token that ended it


def answer_texts(answer: Json) -> list[AnswerText]:
    """Choice by choice, of an answer in OpenAI's shape or a chunk of one."""
    out = []
    for choice in cast(list[dict[str, Any]], answer["choices"]):
        told = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
        calls = [
            AnswerToolCall(
                call.get("index", i),
                call.get("id") or "",
                call["function"].get("name", ""),
                call["function"].get("arguments", ""),
            )
            for i, call in enumerate(told.get("tool_calls") or ())
        ]
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        thoughts, text = told.get("reasoning_content") or "", told.get("content") or ""
        out.append(AnswerText(thoughts, text, calls, logprobs, choice["finish_reason"], choice.get("stop_reason")))
    return out


class Wire(Protocol):
    media_type: str
    still_working: str  # written when nothing came for a while

    def whole(self, answer: Json) -> Json: ...
    def chunk(self, chunk: Json) -> str: ...
    def done(self) -> str: ...
    def error(self, error: ApiError) -> str: ...
    def refusal(self, error: ApiError) -> Json: ...


class OpenAIWire:
    media_type = "text/event-stream"
    still_working = ": still working\n\n"

    def whole(self, answer: Json) -> Json:
        return answer

    def chunk(self, chunk: Json) -> str:
        return sse(chunk)

    def done(self) -> str:
        return "data: [DONE]\n\n"

    def error(self, error: ApiError) -> str:
        return sse(error.body())

    def refusal(self, error: ApiError) -> Json:
        return error.body()
