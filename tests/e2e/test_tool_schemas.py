"""Published tools through the server with Gemma 4's own chat template: forced calls, automatic calls, and the header
that names what a grammar does not enforce."""

from __future__ import annotations

import json
import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.server_fakes import FakeEngine, Served, tokenizer
from tests.tool_schemas import CLIENT_SCHEMAS, TOOLS, compact_choice, expected_note, relaxed

from outrider.engine.step import Request
from outrider.engine.text import Tokenizer

HI: Any = [{"role": "user", "content": "Please help."}]
TEMPLATES = Path(__file__).parents[1] / "data" / "gemma4" / "templates"
CONTEXT = 1 << 15
FUNCTION_KEYS = {"name", "description", "parameters"}
PICKY = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 3}}}, "required": ["a"]}


class CompactEngine(FakeEngine):
    """Ends its calls soon where a grammar lets it."""

    def _choose(self, run: Any, mask: Any, position: int) -> int:
        return compact_choice(self.tokenizer, mask, random.Random(f"{run.request.params.seed}-{position}"))


def gemma(template: str = "gemma4_v5.jinja") -> Tokenizer:
    files = tokenizer(gemma=True).files
    return Tokenizer(replace(files, chat_template=(TEMPLATES / template).read_text()))


def tool(described: dict[str, Any], strict: bool | None = None) -> dict[str, Any]:
    function = {"description": "d"} | {key: described[key] for key in described.keys() & FUNCTION_KEYS}
    return {"type": "function", "function": function | ({} if strict is None else {"strict": strict})}


def picky(strict: bool | None = None) -> dict[str, Any]:
    return tool({"name": "picky", "description": "d", "parameters": PICKY}, strict)


def arguments_of(answer: Any, name: str) -> Any:
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == name
    return json.loads(call["function"]["arguments"])


def test_published_tools_with_gemma_4s_template() -> None:
    """A forced call of most of them was a 400; automatic ones are parsed to the same arguments."""
    tok = gemma()
    engine = CompactEngine(tok)
    engine.max_context = CONTEXT
    prompts: list[str] = []

    def say(request: Request) -> str:
        prompts.append(tok.decode(request.prompt, keep_special=True))
        return said

    said = ""
    engine.say = say
    with Served(engine, tok, max_context=CONTEXT) as s:
        for described in TOOLS + CLIENT_SCHEMAS:
            name = described["name"]
            body = {"messages": HI, "tools": [tool(described)], "seed": 1, "max_tokens": 8000}
            forced = s.http.post(
                "/v1/chat/completions", json={**body, "tool_choice": "required", "parallel_tool_calls": False}
            )
            assert forced.status_code == 200, forced.text
            note = expected_note(described, True)
            assert (
                (note in forced.headers["x-outrider-warning"]) if note else "x-outrider-warning" not in forced.headers
            )
            arguments = arguments_of(forced, name)
            jsonschema.Draft202012Validator(relaxed(described)).validate(arguments)
            said = f"<|tool_call>call:{name}{spelled(arguments)}<tool_call|>"
            automatic = s.http.post("/v1/chat/completions", json=body)
            assert automatic.status_code == 200, automatic.text
            assert arguments_of(automatic, name) == arguments and "x-outrider-warning" not in automatic.headers
            assert f"declaration:{name}" in prompts[-1]


def spelled(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{spelled(child)}" for key, child in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(spelled, value)) + "]"
    return json.dumps(value)


@pytest.mark.parametrize("template", sorted(path.name for path in TEMPLATES.iterdir()))
def test_no_revision_of_the_template_refuses_a_published_tool(template: str) -> None:
    tok = gemma(template)
    for described in TOOLS + CLIENT_SCHEMAS:
        assert described["name"] in tok.render(HI, tools=[tool(described)])


@pytest.mark.parametrize("route", ["chat", "stream", "messages", "responses"])
@pytest.mark.parametrize("gemma_calls", [False, True])
def test_what_is_not_enforced_is_named_in_header_and_log(
    route: str, gemma_calls: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tok = tokenizer(gemma_calls)
    chat = {
        "messages": HI,
        "tools": [picky()],
        "tool_choice": "required",
        "stream": route == "stream",
        "max_tokens": 50,
    }
    flat = {"type": "function", "name": "picky", "parameters": PICKY}
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("/v1/chat/completions", chat),
        "stream": ("/v1/chat/completions", chat),
        "messages": ("/v1/messages", {"messages": HI, "max_tokens": 50, "tool_choice": {"type": "any"},
                                      "tools": [{"name": "picky", "input_schema": PICKY}]}),
        "responses": ("/v1/responses", {"input": "x", "tools": [flat], "tool_choice": "required", "max_output_tokens": 50}),
    }  # fmt: skip
    path, body = bodies[route]
    with Served(CompactEngine(tok), tok) as s, caplog.at_level(logging.WARNING, "outrider"):
        for _ in range(2):  # the second grammar comes from the cache
            answer = s.http.post(path, json=body)
            assert answer.status_code == 200
            assert answer.headers["x-outrider-warning"] == "schema keywords that are not enforced: picky: not"
    assert [record.message for record in caplog.records].count(
        "tools: schema keywords that are not enforced: picky: not"
    ) == 1


def test_strict_asks_for_a_refusal() -> None:
    tok = tokenizer(gemma=True)
    with Served(CompactEngine(tok), tok) as s:
        body = {"messages": HI, "tool_choice": "required", "max_tokens": 50}
        refused = s.http.post("/v1/chat/completions", json={**body, "tools": [picky(strict=True)]})
        assert refused.status_code == 400 and "'not' is not supported" in refused.json()["error"]["message"]
        assert s.http.post("/v1/chat/completions", json={**body, "tools": [picky(strict=False)]}).status_code == 200
        anthropic = {"name": "picky", "input_schema": PICKY, "strict": True}
        body = {"messages": HI, "max_tokens": 50, "tool_choice": {"type": "any"}, "tools": [anthropic]}
        assert s.http.post("/v1/messages", json=body).status_code == 400
        flat = {"type": "function", "name": "picky", "parameters": PICKY, "strict": True}
        body = {"input": "x", "tools": [flat], "tool_choice": "required"}
        assert s.http.post("/v1/responses", json=body).status_code == 400
        plain = s.http.post(
            "/v1/chat/completions", json={"messages": HI, "tools": [picky(strict=True)], "max_tokens": 5}
        )
        assert plain.status_code == 200  # nothing is forced
