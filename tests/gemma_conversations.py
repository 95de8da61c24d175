"""Random conversations as clients of Gemma 4 send them: system and developer messages, parts, images and sound, thoughts,
tools, calls and their results."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.tool_schemas import TOOLS

TEXTS = (
    "What is the weather in Zürich?", "  leading and trailing space \n", "", "Zeile eins\n\nZeile drei", "日本語と emoji 🎉",
    "code: `x = {'a': [1, 2]}`", "quotes \" and ' and \\ backslash", "a <b> & c", "1. one\n2. two", "<|not_special|>",
)  # fmt: skip
VALUES: tuple[Any, ...] = ("Paris", "", 3, -2.5, True, None, ["a", 1], {"k": "v", "n": {"m": [1, {"x": "y"}]}}, [])


@dataclass(frozen=True)
class Conversation:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True


def conversation(seed: int) -> Conversation:
    rng = random.Random(seed)
    tools = [_tool(described) for described in rng.sample(TOOLS, rng.randint(1, 4))] if rng.random() < 0.6 else None
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": rng.choice(("system", "developer")), "content": _content(rng, media=False)})
    for turn in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": _content(rng, media=True)})
        if tools is not None and rng.random() < 0.6:
            messages += _calls(rng, tools, turn)
        if rng.random() < 0.8:
            messages.append(_answer(rng))
    if messages[-1]["role"] == "assistant" and rng.random() < 0.7:
        messages.append({"role": "user", "content": _content(rng, media=True)})
    variables: dict[str, Any] = {}
    if rng.random() < 0.6:
        variables["enable_thinking"] = rng.random() < 0.7
    if rng.random() < 0.2:
        variables["preserve_thinking"] = True
    return Conversation(messages, tools, variables, rng.random() < 0.9)


def _tool(described: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {key: described[key] for key in ("name", "description", "parameters")}}


def _content(rng: random.Random, media: bool) -> Any:
    if rng.random() < 0.6:
        return rng.choice(TEXTS)
    parts: list[Callable[[], dict[str, Any]]] = [lambda: {"type": "text", "text": rng.choice(TEXTS)}]
    if media:
        parts += [lambda: {"type": "image"}, lambda: {"type": "audio"}]
    return [rng.choice(parts)() for _ in range(rng.randint(1, 4))]


def _answer(rng: random.Random) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _content(rng, media=False)}
    if rng.random() < 0.4:
        message[rng.choice(("reasoning", "reasoning_content"))] = rng.choice(TEXTS)
    return message


def _calls(rng: random.Random, tools: list[dict[str, Any]], turn: int) -> list[dict[str, Any]]:
    calls = []
    results: list[dict[str, Any]] = []
    for index in range(rng.randint(1, 3)):
        name = rng.choice(tools)["function"]["name"]
        arguments = {f"key_{i}": rng.choice(VALUES) for i in range(rng.randint(0, 3))}
        ident = f"call_{turn}_{index}"
        calls.append({"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}})
        result = {"role": "tool", "tool_call_id": ident, "content": rng.choice(("sunny", '{"t": 21}', ""))}
        results.append(result | ({"name": name} if rng.random() < 0.5 else {}))
    message: dict[str, Any] = {"role": "assistant", "content": rng.choice((None, "", "Let me look."))}
    if rng.random() < 0.4:
        message["reasoning"] = rng.choice(TEXTS)
    return [message | {"tool_calls": calls}, *results]
