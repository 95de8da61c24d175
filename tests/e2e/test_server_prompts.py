"""Long prompts: they are read to the end when their client leaves, have no time limit while they move, and tell how far
they are."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.server_fakes import FakeEngine, Served, tokenizer
from tests.waiting import PATIENCE, until

TOK = tokenizer()
LONG = {"messages": [{"role": "user", "content": "word " * 200}], "max_tokens": 4, "seed": 1}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A prompt is read 100 tokens per step, the first step at once, the others when the test says so."""
    monkeypatch.setattr("outrider.server.call.PROGRESS_COMMENT_S", 0.05)
    monkeypatch.setattr("outrider.server.call.KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr("outrider.server.runner.PROGRESS_S", 0.0)
    engine = FakeEngine(TOK, say=lambda _: "Z")
    engine.prompt_step = 100
    with Served(engine, TOK, timeout=30.0) as s:
        yield s


def leave(s: Served, body: dict[str, Any] = LONG, path: str = "/v1/chat/completions") -> None:
    """Send a request, wait until the engine has it, and hang up."""
    data = json.dumps(body).encode()
    before = len(s.engine.seen)
    with socket.create_connection(("127.0.0.1", s.port)) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        until(lambda: len(s.engine.seen) > before, lambda: "the engine has no request")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_read_to_its_end_when_its_client_leaves(slow: Served, stream: bool) -> None:
    engine = slow.engine
    runner = slow.model.runner
    leave(slow, {**LONG, "stream": stream})
    until(lambda: bool(runner.detached), lambda: "it was aborted")
    assert not engine.aborted and slow.http.get("/slots").json()[0]["client_left"]
    engine.may_read.set()
    until(lambda: not engine.running, lambda: "it goes on for ever")
    assert len(engine.aborted) == 1 and len(engine.cached) == 1, "read, and no token decoded"
    engine.may_read.clear()
    retry = slow.http.post("/v1/chat/completions", json=LONG)  # with nothing left to read it does not wait
    assert retry.json()["choices"][0]["message"]["content"] == "Z"


def test_a_retry_takes_the_place_of_a_prompt_without_a_client(slow: Served) -> None:
    engine = slow.engine
    runner = slow.model.runner
    leave(slow)
    until(lambda: bool(runner.detached), lambda: "it was aborted")
    first = next(iter(runner.detached))
    leave(slow)
    until(
        lambda: engine.aborted == [first] and len(runner.detached) == 1, lambda: f"{engine.aborted}, {runner.detached}"
    )
    for i in range(3):
        leave(slow, {**LONG, "messages": [{"role": "user", "content": f"{i} word " * 200}]})
    until(lambda: len(engine.aborted) >= 3, lambda: f"{engine.aborted}")
    assert len(runner.detached) == 2, "no more than two go on"
    short = {**LONG, "messages": [{"role": "user", "content": "word " * 40}]}
    count = len(engine.aborted)
    leave(slow, short)
    until(lambda: len(engine.aborted) > count, lambda: "a short prompt goes on")


def test_it_can_be_switched_off_and_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in (0.0, 0.2):
        engine = FakeEngine(TOK)
        engine.prompt_step = 100
        with Served(engine, TOK, finish_prompts=seconds) as s:
            leave(s)
            until(lambda: len(engine.aborted) == 1, lambda: "it goes on")


def test_time_limits_begin_with_the_answer(slow: Served) -> None:
    """A prompt that moves has no time limit; one that stands still has."""
    slow.state.settings.__dict__["timeout"] = 1.5
    engine = slow.engine
    # 26 steps, longer than the limit
    engine.prompt_step = 40
    engine.delay = 0.1
    engine.may_read.set()
    text = slow.http.post("/v1/chat/completions", json={**LONG, "stream": True}).text
    assert '"Z"' in text and "timeout" not in text
    engine.cached.clear()
    engine.may_read.clear()
    text = slow.http.post("/v1/chat/completions", json={**LONG, "stream": True}).text
    assert '"code":"timeout"' in text and '"Z"' not in text


def test_an_unstreamed_request_keeps_its_connection_alive(slow: Served) -> None:
    parts: list[bytes] = []
    for path, body in (
        ("/v1/chat/completions", LONG),
        ("/v1/messages", {**LONG, "seed": None}),
        ("/api/chat", {"messages": LONG["messages"], "stream": False}),
    ):
        slow.engine.cached.clear()
        slow.engine.may_read.clear()
        parts.clear()
        body = {k: v for k, v in body.items() if v is not None} | (
            {"model": "fake"} if path != "/v1/chat/completions" else {}
        )
        with slow.http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
            for part in answer.iter_raw():
                parts.append(part)
                if len(parts) == 3:
                    assert b"".join(parts) == b"   "
                    slow.engine.may_read.set()
        assert '"Z"' in json.dumps(json.loads(b"".join(parts)))


def test_a_failure_after_the_first_space_cuts_the_connection(slow: Served) -> None:
    slow.state.settings.__dict__["timeout"] = 0.5
    with pytest.raises(httpx.RemoteProtocolError):
        slow.http.post("/v1/chat/completions", json=LONG)


def test_progress_is_told(slow: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.server.runner.LOG_S", 0.05)
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
        slow.engine.cached.clear()
        slow.engine.may_read.clear()
        body = {"model": "fake", "stream": True, "max_tokens": 4, "messages": LONG["messages"]}
        if path == "/v1/responses":
            body = {"model": "fake", "stream": True, "input": "word " * 200}
        with caplog.at_level("INFO", "outrider.server"), slow.http.stream("POST", path, json=body) as answer:
            told = ""
            for text in answer.iter_text():
                told += text
                if ": prompt 100 of" in told and not slow.engine.may_read.is_set():
                    slot = httpx.get(f"{slow.url}/slots", timeout=PATIENCE).json()[0]
                    assert (
                        slot["state"] == "prompt" and slot["n_prompt_tokens_processed"] == 100 < slot["n_prompt_tokens"]
                    )
                    slow.engine.may_read.set()
        assert ": prompt 100 of" in told and '"Z"' in told
    assert any("prefill: 100 of" in r.message for r in caplog.records)
    assert "word" not in caplog.text


@pytest.mark.parametrize("share", [False, True])
def test_each_key_has_prefixes_of_its_own(share: bool) -> None:
    """And the same ones after a restart, wherever the key stands in the list."""
    spaces = []
    for keys in (("one", "two"), ("two", "one")):
        engine = FakeEngine(TOK)
        with Served(engine, TOK, api_keys=keys, share_prefixes=share) as s:
            for key in ("one", "two"):
                headers = {"Authorization": f"Bearer {key}"}
                body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
                assert s.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
        spaces.append([request.namespace for request in engine.seen])
    assert spaces[0] == spaces[1]
    assert spaces[0] == [b"", b""] if share else len(set(spaces[0])) == 2 and b"one" not in spaces[0][0]
