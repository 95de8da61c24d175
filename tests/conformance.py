"""What the conformance cases are written with: a client that expects a status, a table of cases, and a few ways to
compare."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import httpx

HI = [{"role": "user", "content": "hello"}]


# Fields of grammars, which decide themselves where an answer ends. Elsewhere it ends by its limit: an end token that a
# random model happens to choose must not decide a case.
GRAMMARS = ("schema", "format", "tool", "function", "grammar", "guided", "structured")


def asked(**body: Any) -> dict[str, Any]:
    free = not any(word in name for word in GRAMMARS for name in body)
    return {"max_tokens": 8, "seed": 1, **({"ignore_eos": True} if free else {}), **body}


class Api:
    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=120)
        self.keyed: str | None = None  # the address of one that wants the key "secret"

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == status, f"{answer.status_code}: {answer.text[:300]}"
        return answer.json()

    def chat(self, status: int = 200, **body: Any) -> Any:
        return self.post("/v1/chat/completions", asked(**{"messages": HI, **body}), status)

    def text(self, status: int = 200, **body: Any) -> Any:
        return self.post("/v1/completions", asked(**{"prompt": "hello", **body}), status)

    def lines(self, path: str, body: Any) -> list[Any]:
        """The events of a stream."""
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text[:300]
        return [json.loads(x[6:]) for x in answer.text.split("\n") if x.startswith("data: {")]

    def stream(self, **body: Any) -> list[Any]:
        return self.lines("/v1/chat/completions", asked(**{"messages": HI, "stream": True, **body}))


CASES: dict[str, Callable[[Api], None]] = {}


def case(function: Callable[[Api], None]) -> Callable[[Api], None]:
    CASES[function.__name__] = function
    return function


def many(name: str, values: dict[str, Callable[[Api], Any]]) -> None:
    for key, check in values.items():
        CASES[f"{name}_{key}"] = check


def content(answer: Any) -> str:
    return answer["choices"][0]["message"]["content"] or ""


def same(a: Any, b: Any) -> None:
    assert a == b, f"{a!r} != {b!r}"


def holds(true: Any, what: Any = "") -> None:
    assert true, what


def matches(pattern: str, text: str) -> None:
    assert re.fullmatch(pattern, text), text


def is_a(text: str) -> None:
    assert set(json.loads(text)) == {"a"}, text
