"""Keys, limits, time-outs, clients that leave, failures and shutdown of the server, on an engine that says what a script
says."""

from __future__ import annotations

import json
import logging
import socket
import threading
from typing import Any

import httpx
import openai
import pytest
from tests.server_fakes import FakeEngine, Served, tokenizer
from tests.waiting import PATIENCE, until

from outrider.engine.step import Request
from outrider.server.limits import Admission
from outrider.server.settings import ServerSettings, public_name, read_keys
from outrider.types import OutriderError

TOK = tokenizer()
HI: list[Any] = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": HI, **fields}


def text_of(chunks: Any) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_keys() -> None:
    with Served(FakeEngine(TOK), TOK, api_keys=("alpha", "beta")) as s:
        for key in ("alpha", "beta"):
            assert s.client(key).chat.completions.create(model="fake", messages=HI)
        for key in ("", "alph", "alphaa", "Alpha"):
            with pytest.raises((openai.AuthenticationError, openai.APIConnectionError, httpx.LocalProtocolError)):
                s.client(key or "x").chat.completions.create(model="fake", messages=HI)
        http = s.http
        assert all(http.get(path).status_code == 200 for path in ("/health", "/version", "/", "/page/app.js"))
        assert all(http.get(path).status_code == 401 for path in ("/metrics", "/v1/models", "/openapi.json"))


def test_foreign_hosts_and_origins(served: Served) -> None:
    def ask(**headers):
        return served.http.get("/v1/models", headers=headers).status_code

    assert ask(Host="evil.example") == 403 and ask(Origin="https://evil.example") == 403
    assert ask(Host=f"localhost:{served.port}") == 200 and ask(Origin=served.url) == 200


def test_body_limit_also_for_chunked_bodies() -> None:
    with Served(FakeEngine(TOK), TOK, max_body=2000, max_prompt=100) as s:
        url = "/v1/chat/completions"
        assert s.http.post(url, json=chat(user="x" * 3000)).status_code == 413
        chunks = (b"x" * 500 for _ in range(8))
        assert s.http.post(url, content=chunks, headers={"Content-Type": "application/json"}).status_code == 413
        long = s.http.post(url, json=chat(messages=[{"role": "user", "content": "x" * 200}]))
        assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"


def test_full_is_429_with_retry_after() -> None:
    with Served(FakeEngine(TOK, batch=1, hold=5), TOK, max_concurrent=1, max_queued=1) as s:
        streams = [s.client().chat.completions.create(model="fake", messages=HI, stream=True) for _ in range(2)]
        full = s.http.post("/v1/chat/completions", json=chat())
        assert (
            full.status_code == 429
            and int(full.headers["retry-after"]) >= 1
            and full.json()["error"]["type"] == "rate_limit_error"
        )
        too_many = s.http.post("/v1/chat/completions", json=chat(n=3))
        assert too_many.status_code == 400
        s.engine.go.set()
        assert all(text_of(stream) for stream in streams)
        s.settle()
        assert s.client().chat.completions.create(model="fake", messages=HI, max_tokens=2)


def test_timeout_is_408_or_told_in_the_stream() -> None:
    with Served(FakeEngine(TOK, hold=5), TOK, timeout=2.0) as s:  # time enough to reach the engine
        stream = s.client().chat.completions.create(model="fake", messages=HI, stream=True)
        slow = s.http.post("/v1/chat/completions", json=chat())
        assert slow.status_code == 408 and slow.json()["error"]["type"] == "timeout_error"
        with pytest.raises(openai.APIError, match="took longer"):
            list(stream)
        s.settle()
        assert len(s.engine.aborted) == 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_aborted_at_once(stream: bool) -> None:
    engine = FakeEngine(TOK, lambda r: "long " * 300, delay=0.01, draft=0)
    with Served(engine, TOK) as s:
        body = json.dumps(chat(stream=stream)).encode()
        with socket.create_connection(("127.0.0.1", s.port)) as raw:
            raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            raw.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
            until(lambda: engine.metrics.cycles)
        left_at = engine.metrics.cycles
        s.settle()
        assert len(engine.aborted) == 1 and engine.metrics.cycles - left_at < 500  # of 1500


def test_a_failing_step_fails_its_requests_and_serving_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with Served(
        FakeEngine(TOK, hold=30), TOK
    ) as s:  # longer than what is asked for whole; a stream still runs when the step fails
        s.engine.fail_steps = 1
        with pytest.raises(openai.InternalServerError, match="engine failed"), caplog.at_level(logging.INFO):
            s.client().chat.completions.create(model="fake", messages=[{"role": "user", "content": "my secret"}])
        assert "secret" not in caplog.text and "RuntimeError" in caplog.text
        assert s.client().chat.completions.create(model="fake", messages=HI, max_tokens=5)
        stream = s.client().chat.completions.create(model="fake", messages=HI, stream=True)
        next(iter(stream))
        s.engine.fail_steps = 1
        with pytest.raises(openai.APIError, match="engine failed"):
            list(stream)
        assert s.http.get("/health").status_code == 200
        for _ in range(2):  # three in a row, with the stream's
            s.settle()
            s.engine.fail_steps = 1
            assert s.http.post("/v1/chat/completions", json=chat()).status_code == 500
        assert s.http.get("/health").status_code == 503
        assert s.http.post("/v1/chat/completions", json=chat()).status_code == 500


def test_logs_hold_no_prompt_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    secret: list[Any] = [{"role": "user", "content": "attack at dawn"}]
    for log_prompts in (False, True):
        caplog.clear()
        with Served(FakeEngine(TOK), TOK, log_prompts=log_prompts) as s, caplog.at_level(logging.DEBUG, "outrider"):
            s.client().chat.completions.create(model="fake", messages=secret)
            s.http.post("/v1/chat/completions", json=chat(messages=secret, foo="attack at dawn"))
        assert (
            "attack at dawn" in "".join(r.getMessage() for r in caplog.records if r.name.startswith("outrider"))
        ) is log_prompts


@pytest.mark.parametrize("grace, whole", [(PATIENCE / 2, True), (0.2, False)])
def test_shutdown_lets_streams_finish_then_ends_them(grace: float, whole: bool) -> None:
    got: list[str] = []
    errors: list[openai.APIError] = []
    with Served(FakeEngine(TOK, lambda r: "word " * 20, hold=20), TOK, shutdown_grace=grace) as s:

        def read() -> None:
            try:
                got.append(text_of(s.client().chat.completions.create(model="fake", messages=HI, stream=True)))
            except openai.APIError as e:
                errors.append(e)

        reader = threading.Thread(target=read)
        reader.start()
        until(lambda: s.engine.metrics.cycles)
        s.server.should_exit = True
        until(lambda: s.state.admission.closing)
        if whole:
            s.engine.go.set()
    reader.join(PATIENCE)
    assert (got == ["word " * 20]) is whole
    assert bool(errors) is not whole and (
        whole or (errors[0].code, errors[0].message) == ("shutting_down", "The server is shutting down.")
    )


def test_a_request_refused_by_the_engine_is_400(served: Served) -> None:
    def refuse(request: Request) -> None:
        raise OutriderError("no room for this one")

    served.engine.submit = refuse
    try:
        answer = served.http.post("/v1/chat/completions", json=chat(stream=True))
        assert answer.status_code == 400 and "no room" in answer.text
    finally:
        del served.engine.submit


# ---- settings


def test_settings() -> None:
    with pytest.raises(OutriderError, match="--port"):
        ServerSettings("m", port=70000)
    with pytest.raises(OutriderError, match="printable ASCII"):
        ServerSettings("m", api_keys=("a b",))
    with pytest.raises(OutriderError, match="--api-key is empty"):  # an unset variable must not open the server
        ServerSettings("m", api_key="")
    assert (
        public_name("/home/me/models/gemma") == "gemma"
        and public_name("google/gemma-4-E2B-it") == "google/gemma-4-E2B-it"
    )


def test_key_files(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# mine\nalpha\n\n beta \n")
    assert read_keys("own", file) == ("own", "alpha", "beta")
    file.write_text("# none\n")
    with pytest.raises(OutriderError, match="contains no API key"):
        read_keys(None, file)


def test_admission_counts_what_leaves() -> None:
    admission = Admission(ServerSettings("m", max_concurrent=1, max_queued=1))
    with pytest.raises(ValueError), admission.enter(2):
        assert admission.in_flight == 2
        raise ValueError
    assert admission.in_flight == 0
