"""The table of routes: openapi.json says what answers are, and a failure shows the function that answers a path."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator

import pytest
from starlette.datastructures import State
from tests.server_fakes import VOCAB, FakeEngine, Served, tokenizer

from outrider.server.answer import Answer, Json
from outrider.server.app import create_app
from outrider.server.model_info import ServedModel
from outrider.server.openai import OpenAIWire
from outrider.server.routes import ROUTES
from outrider.server.settings import ServerSettings

TOK = tokenizer()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(FakeEngine(TOK), TOK) as server:
        yield server


def test_openapi_says_what_media_type_an_answer_has(served: Served) -> None:
    """It said JSON of /metrics, of a file's content and of streams."""
    paths = served.http.get("/openapi.json").json()["paths"]

    def media_types(path: str, method: str = "get") -> set[str]:
        return set(paths[path][method]["responses"]["200"]["content"])

    assert media_types("/metrics") == {"text/plain"}
    assert media_types("/v1/files/{id}/content") == {"application/jsonl"}
    assert media_types("/v1/chat/completions", "post") == {"application/json", "text/event-stream"}
    assert media_types("/v1/models") == {"application/json"}
    for path in ("/metrics", "/v1/models", "/health", "/version", "/load", "/slots", "/livez", "/v1/batches"):
        answer = served.http.get(path)
        assert answer.headers["content-type"].partition(";")[0] in media_types(path), path
    assert "/api/chat" not in paths and "/chat/completions" not in paths


def test_paths_without_their_version_are_the_same(served: Served) -> None:
    assert served.http.get("/models").json() == served.http.get("/v1/models").json()
    body = {"messages": [{"role": "user", "content": "hi"}]}
    bare = served.http.post("/chat/completions/input_tokens", json=body).json()
    assert bare == served.http.post("/v1/chat/completions/input_tokens", json=body).json()
    assert bare["object"] == "response.input_tokens" and bare["input_tokens"] > 0


def test_no_path_is_answered_twice() -> None:
    keys = [(route.path, route.method) for route in ROUTES]
    assert len(set(keys)) == len(keys)


def test_a_traceback_names_the_function_of_the_route(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app(ServedModel(FakeEngine(TOK), TOK, VOCAB, 2048), ServerSettings("fake"))
    endpoint = next(r.endpoint for r in app.routes if r.path == "/v1/files/{id}")  # type: ignore[attr-defined]
    request = type("Request", (), {"state": State(), "path_params": {}})()
    with caplog.at_level(logging.ERROR), pytest.raises(AttributeError) as raised:
        endpoint(request).send(None)
    names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert "get_file" in names


def test_a_path_of_the_page_is_a_file_of_the_page(served: Served) -> None:
    assert "text/html" in served.http.get("/").headers["content-type"]
    assert "javascript" in served.http.get("/page/app.js").headers["content-type"]
    assert served.http.get("/page/routes.py").status_code == 404


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_head_of_chunks_is_made_once_per_answer(served: Served, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Identity, model and fingerprint were written anew for every chunk."""
    heads: list[Json] = []
    head = OpenAIWire._head

    def counted(wire: OpenAIWire, answer: Answer, chunk: str = "") -> Json:
        heads.append(head(wire, answer, chunk))
        return heads[-1]

    monkeypatch.setattr(OpenAIWire, "_head", counted)
    text = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**text, "max_tokens": 20, "n": 2, "stream": True, "stream_options": options, "return_token_ids": True}
    events = served.http.post(path, json=body).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    assert len(chunks) > 4 and len(heads) == 1
    for chunk in chunks:
        fields = list(chunk)
        assert fields[:6] == [*heads[0], "choices"] and fields[-1] == "usage"
        assert {name: chunk[name] for name in heads[0]} == heads[0]
