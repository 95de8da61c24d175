"""Bodies that are wrong in a million places: the first place is enough, and nothing is built for the others.

Catches: a list or a map of any schema whose every item is validated, unknown fields without a bound, more values than a
parser can read without holding the interpreter, and separators inside of a text that are taken for values.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Iterator
from itertools import count

import pytest
from pydantic import BaseModel, ValidationError
from starlette.types import Message, Receive, Scope, Send
from tests.server_fakes import VOCAB, FakeEngine, Served, tokenizer
from tests.waiting import until

from outrider.server import errors, routes
from outrider.server.anthropic import MessagesRequest
from outrider.server.errors import ApiError, bad, read
from outrider.server.limits import Keys, RequestGuard
from outrider.server.model_info import ServedModel
from outrider.server.ollama import ChatBody, GenerateBody
from outrider.server.prepare import Preparer
from outrider.server.responses import ResponsesRequest
from outrider.server.schema import ChatRequest, CompletionRequest, FailFastModel
from outrider.server.scoring import EmbeddingsRequest
from outrider.server.settings import ServerSettings
from outrider.server.text_routes import DetokenizeRequest

MANY = 3000
ONES = "[" + ",".join("1" * MANY) + "]"
TEXTS = "[" + ",".join(['""'] * MANY) + "]"
KEYS = ",".join(f'"k{i}":"x"' for i in range(MANY))
CASES: list[tuple[type[BaseModel], str]] = [
    (CompletionRequest, f'{{"prompt":"x","stop":{ONES}}}'),
    (CompletionRequest, f'{{"prompt":"x","logit_bias":{{{KEYS}}}}}'),
    (CompletionRequest, f'{{"prompt":"x",{KEYS}}}'),
    (CompletionRequest, f'{{"prompt":"x","response_format":{{"type":"text",{KEYS}}}}}'),
    (CompletionRequest, f'{{"prompt":"x","allowed_token_ids":{TEXTS}}}'),
    (CompletionRequest, f'{{"prompt":"x","guided_choice":{ONES}}}'),
    (ChatRequest, f'{{"messages":[{{"role":"user","content":{ONES}}}]}}'),
    (ChatRequest, f'{{"messages":[{{"role":"assistant","tool_calls":{ONES}}}]}}'),
    (ChatRequest, f'{{"messages":{ONES}}}'),
    (ChatRequest, f'{{"messages":[{{"role":"user","content":"x"}}],"tools":{ONES}}}'),
    (DetokenizeRequest, f'{{"tokens":{TEXTS}}}'),
    (MessagesRequest, f'{{"messages":[{{"role":"user","content":{ONES}}}]}}'),
    (MessagesRequest, f'{{"messages":[{{"role":"user","content":[{{"type":"x","content":{ONES}}}]}}]}}'),
    (MessagesRequest, f'{{"messages":[{{"role":"user","content":"x"}}],{KEYS}}}'),
    (ResponsesRequest, f'{{"input":{ONES}}}'),
    (ResponsesRequest, f'{{"input":[{{"content":{ONES}}}]}}'),
    (ChatBody, f'{{"messages":{ONES}}}'),
    (GenerateBody, f'{{"context":{TEXTS}}}'),
    (EmbeddingsRequest, f'{{"input":"x",{KEYS}}}'),
]


@pytest.mark.parametrize("model, body", CASES)
def test_a_body_wrong_in_many_places_makes_few_errors(model: type[BaseModel], body: str) -> None:
    with pytest.raises(ValidationError) as error:
        model.model_validate_json(body)
    assert error.value.error_count() <= 512
    with pytest.raises(ApiError) as raised:
        read(body.encode(), model.model_validate_json)
    assert raised.value.status == 400 and len(raised.value.message) < 400


def containers(node: object) -> Iterator[dict[str, object]]:
    if isinstance(node, dict):
        if node.get("type") in ("list", "tuple", "set", "frozenset", "dict") and "JsonValue" not in str(node):
            yield node
        for key, child in node.items():
            if key != "metadata":
                yield from containers(child)
    elif isinstance(node, list):
        for child in node:
            yield from containers(child)


def all_models(of: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in of.__subclasses__():
        if model.__module__.startswith("outrider.server"):
            yield model
            yield from all_models(model)


def test_every_list_and_map_of_every_schema_fails_fast() -> None:
    assert routes
    strays = [m for m in all_models(BaseModel) if not issubclass(m, FailFastModel)]
    assert not strays
    seen = [node for model in all_models(FailFastModel) for node in containers(model.__pydantic_core_schema__)]
    assert len(seen) > 30 and all(node.get("fail_fast") for node in seen)


def test_a_body_of_too_many_values_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "MAX_VALUES", 100)
    monkeypatch.setattr(errors, "MAX_MEMBERS", 20)
    parsed = count()

    def parse(_: bytes) -> int:
        return next(parsed)

    for body in (
        "[" + "1," * 101 + "1]",
        "[" + "{}," * 21 + "1]",
        "{" + ",".join(f'"{i}":1' for i in range(21)) + "}",
        "[" * 21,
    ):
        with pytest.raises(ApiError) as refused:
            read(body.encode(), parse)
        assert (refused.value.status, refused.value.code) == (400, "body_too_complex")
    fine = ['{"prompt":"' + ",:[{" * 1000 + '\\",' + '\\\\"}', "[" + "1," * 99 + "1]", '{"a":"' + "," * 1000, '"\\']
    assert [read(body.encode(), parse) for body in fine] == [0, 1, 2, 3]


def separators_outside_of_texts(body: bytes) -> int:
    """By definition: byte by byte."""
    count = at = inside = 0
    while at < len(body):
        if inside and body[at] == ord("\\"):
            at += 1
        elif body[at] == ord('"'):
            inside = not inside
        else:
            count += not inside and body[at] in b",:"
        at += 1
    return count


def test_separators_are_counted_as_by_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and escapes go on over the border of two blocks."""
    monkeypatch.setattr(errors, "BLOCK", 7)
    rng = random.Random(0)
    for _ in range(300):
        texts = ['"' + "".join(rng.choices([",", "x", '\\"', "\\\\", ":"], k=rng.randrange(9))) + '"' for _ in range(6)]
        body = "".join(text + rng.choice([",", ":", ", "]) for text in texts).encode()
        right = separators_outside_of_texts(body)
        monkeypatch.setattr(errors, "MAX_VALUES", right)
        assert errors.check_size(body) is None
        monkeypatch.setattr(errors, "MAX_VALUES", right - 1)
        with pytest.raises(ApiError):
            errors.check_size(body)


def test_a_text_cut_in_the_middle_of_a_string_is_read_once() -> None:
    """A pattern that tried each quotation mark anew would take minutes."""
    body = b'{"a":[' + b'"' + b"," * (1 << 20)
    assert errors.check_size(body) is None


def test_arguments_of_a_call_are_bounded_as_a_body_is() -> None:
    """They are JSON inside of a text, where separators do not count."""
    tok = tokenizer()
    preparer = Preparer(ServedModel(FakeEngine(tok), tok, VOCAB, 1 << 22), ServerSettings("m"))
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": "[" + "{}," * (errors.MAX_MEMBERS + 1) + "1]"},
    }
    body = ChatRequest.model_validate({"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]})
    with pytest.raises(ApiError, match="too complex"):
        preparer.conversation(body)


def test_refused_bodies_do_not_wait_for_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal that is part of a cycle keeps its frames, and they a body of megabytes, until a full collection, which
    stops all threads for the longer."""
    monkeypatch.setattr("outrider.server.runner.trim", lambda: None)  # it collects
    monkeypatch.setattr("outrider.server.main.trim", lambda: None)
    tok = tokenizer()
    bodies = [b'{"prompt":"x","stop":[[1]]}', b"{", b'{"foo":1}', b'{"prompt":"\\ud800","stop":NaN}', b"[" * 2000]
    with Served(FakeEngine(tok), tok) as s:
        for body in bodies:
            gc.collect()
            before = alive()  # of other tests
            gc.disable()
            try:
                answer = s.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
                assert answer.status_code == 400, body
                assert s.http.post("/v1/completions", content=body, headers={"Host": "evil.example"}).status_code == 403
                until(lambda: alive() <= before)
            finally:
                gc.enable()


def alive() -> int:
    return sum(type(o) in (ApiError, ValidationError) for o in gc.get_objects())


def test_a_body_that_grows_too_large_is_told_as_such() -> None:
    """The app must not take it for one that ended early."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        raise bad("The body is not valid JSON.")

    async def more() -> Message:
        return {"type": "http.request", "body": b"x" * 1000, "more_body": True}

    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    settings = ServerSettings("m", max_body=1024)
    guard = RequestGuard(app, settings, lambda *_: None, Keys(settings))
    headers = [(b"host", b"localhost"), (b"transfer-encoding", b"chunked")]
    asyncio.run(guard({"type": "http", "method": "POST", "path": "/x", "headers": headers}, more, send))
    assert [m["status"] for m in messages if m["type"] == "http.response.start"] == [413]
