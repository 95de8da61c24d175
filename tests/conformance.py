"""Tools for the conformance cases: a client that expects a status, a table of cases, and a few comparisons."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file, save_file
from tests import tiny

HI = [{"role": "user", "content": "hello"}]


TOOL = {
    "type": "function",
    "function": {"name": "time", "description": "the time", "parameters": {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}},
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["a"]}
CONTEXT = 1536  # a token is a byte here: tools need room
PRINTABLE = range(ord("!"), ord("~") + 1)  # the first tokens after the special ones


def endless_target(folder: Path) -> Path:
    """A tiny Llama that by itself says printable letters without end, so that no case depends on a draw. The first of
    its hidden numbers is a positive constant, which the head's rows of all other tokens turn into a logit far below;
    where a grammar allows nothing else, they are chosen."""
    config = tiny.write_target("llama", folder) / "config.json"
    config.write_text(
        config.read_text().replace('"max_position_embeddings": 512', f'"max_position_embeddings": {CONTEXT}')
    )
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0.0
    embedding = tensors["model.embed_tokens.weight"]
    head = tensors["lm_head.weight"]
    embedding[:, 0] = 4 * embedding.std()
    head[:, 0] = 0.0
    first = len(tiny.SPECIAL)
    for others in (head[:first], head[first + len(PRINTABLE) :]):
        others[:] = 0.0
        others[:, 0] = -1000.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def asked(**body: Any) -> dict[str, Any]:
    return {"max_tokens": 8, "seed": 1, **body}


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
