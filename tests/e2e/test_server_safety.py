"""One client must not hurt the others, part two: each test is an attack that once worked, against real sockets.

Catches: bodies validated on the event loop, two lengths of one body, addresses that a client invents, host names that a
page has pointed at this machine, requests whose sender has closed its half of the connection, and a full disk behind
the server's output.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests import tiny
from tests.server_fakes import FakeEngine, Served, tokenizer
from tests.waiting import PATIENCE, until

from outrider.engine import grammar
from outrider.server import errors
from outrider.server.settings import ServerSettings
from outrider.types import OutriderError

TOK = tokenizer()
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(FakeEngine(TOK), TOK, host="0.0.0.0", trusted_hosts=("llm.example",)) as s:
        yield s


def talk(s: Served, data: bytes, half_close: bool = False) -> bytes:
    """Returns everything received until the server closes."""
    with socket.create_connection(("127.0.0.1", s.port), timeout=PATIENCE) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def request(
    body: dict[str, Any], headers: str = "", target: str = "/v1/chat/completions", host: str = "127.0.0.1"
) -> bytes:
    text = json.dumps(body).encode()
    kind = f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\nConnection: close\r\n{headers}"
    return f"POST {target} HTTP/1.1\r\nHost: {host}\r\n{kind}\r\n".encode() + text


ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses",
    "/v1/embeddings", "/tokenize",
    "/detokenize", "/apply-template", "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show",
)  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
def test_bodies_are_validated_off_the_event_loop_and_in_turn(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also /api/show, which had no gate for large bodies."""
    readers = []
    gates = []
    check = errors.check_size
    acquire = served.state.big_bodies.acquire

    async def noted(client: str, priority: int = 0) -> None:
        gates.append(client)
        await acquire(client, priority)

    monkeypatch.setattr(errors, "check_size", lambda raw: readers.append(threading.current_thread().name) or check(raw))
    monkeypatch.setattr(served.state.big_bodies, "acquire", noted)
    bad = {"stop": [1] * 150_000, "messages": [1], "prompt": 1, "input": 1, "tokens": [""], "model": 1, "content": 1}
    answer = served.http.post(path, json=bad)
    assert 400 <= answer.status_code < 500
    assert readers and all(name.startswith("outrider-reader") for name in readers)
    assert gates


def test_two_lengths_are_refused_and_the_connection_closed(served: Served) -> None:
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    said = talk(served, f"{head}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n".encode())
    assert said.startswith(b"HTTP/1.1 400") and b"two_lengths" in said and b"connection: close" in said.lower()


def test_forwarded_addresses_are_believed_from_named_proxies_only(served: Served) -> None:
    def client(s: Served, monkeypatch: pytest.MonkeyPatch) -> str:
        seen: list[str] = []
        enter = s.state.admission.enter

        def noted(sequences: int, client: str = "") -> Any:
            seen.append(client)
            return enter(sequences, client)

        monkeypatch.setattr(s.state.admission, "enter", noted)
        headers = {"X-Forwarded-For": "203.0.113.7"}
        assert s.http.post("/v1/chat/completions", json={"messages": HI}, headers=headers).status_code == 200
        return seen[0]

    with pytest.MonkeyPatch.context() as patch:
        assert client(served, patch) == "127.0.0.1"
    with (
        Served(FakeEngine(TOK), TOK, trusted_proxies="10.0.0.0/8, 127.0.0.1") as s,
        pytest.MonkeyPatch.context() as patch,
    ):
        assert client(s, patch) == "203.0.113.7"
    for wrong in ("*", "proxy.example", "127.0.0.1/8"):
        with pytest.raises(OutriderError, match="--trusted-proxies"):
            ServerSettings("m", trusted_proxies=wrong)


@pytest.mark.parametrize(
    "host, status",
    [("evil.example", 403), ("evil.example:80", 403), ("127.0.0.1", 200), ("[::1]:80", 200), ("192.168.1.7:8000", 200),
     ("llm.example", 200), ("outrider:8000", 200), (f"{socket.gethostname()}", 200)],
)  # fmt: skip
def test_without_a_key_a_page_cannot_bring_a_name_of_its_own(served: Served, host: str, status: int) -> None:
    """DNS rebinding: the page's origin and the host it calls are the same name, which now leads to this machine."""
    said = talk(served, request({"messages": HI, "max_tokens": 2}, f"Origin: http://{host}\r\n", host=host))
    assert int(said.split()[1]) == status, said


def test_a_target_in_absolute_form(served: Served) -> None:
    for target in ("http://127.0.0.1:1/v1/chat/completions", "http://llm.example//v1/chat/completions/"):
        assert talk(served, request({"messages": HI, "max_tokens": 2}, target=target)).startswith(b"HTTP/1.1 200")
    assert talk(served, b"GET http://x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 200")
    evil = request(
        {"messages": HI}, "Origin: http://evil.example\r\n", target="http://evil.example/v1/chat/completions"
    )
    assert talk(served, evil).startswith(b"HTTP/1.1 403")


def test_a_grammar_that_costs_while_decoding_ends_its_request_only(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has passed its trial; then its masks turn out slow."""
    body = {"messages": HI, "max_tokens": 20, "grammar": 'root ::= e\ne ::= e e | [a-z ] | ""'}
    assert served.http.post("/v1/chat/completions", json=body).status_code == 200
    monkeypatch.setattr(grammar, "MASK_SECONDS", 0.0)
    monkeypatch.setattr(grammar, "MASK_BURST", 0.0)
    answer = served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "take too long" in answer.json()["error"]["message"]
    assert served.http.post("/v1/chat/completions", json={"messages": HI}).status_code == 200
    served.settle()


@pytest.mark.parametrize(
    "name", ["bos_token", "eos_token", "messages", "tools", "self", "range", "raise_exception", "a b"]
)
def test_template_variables_cannot_replace_what_is_the_templates_own(served: Served, name: str) -> None:
    answer = served.http.post(
        "/v1/chat/completions", json={"messages": HI, "chat_template_kwargs": {name: "<|im_end|>"}}
    )
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "chat_template_kwargs"


def test_a_server_renders_in_a_process_with_limits(served: Served) -> None:
    assert served.http.post("/v1/chat/completions", json={"messages": HI}).status_code == 200
    process = served.model.template._child._process
    assert process is not None and process.poll() is None
    process.kill()
    process.wait()
    assert served.http.post("/v1/chat/completions", json={"messages": HI}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_closed_its_half_gets_its_answer(served: Served, stream: bool) -> None:
    said = talk(
        served, request({"messages": HI, "stream": stream}).replace(b"Connection: close\r\n", b""), half_close=True
    )
    final = said.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    assert final.startswith(b"HTTP/1.1 200") and (b"[DONE]" if stream else b'"usage"') in final
    served.settle()


def test_a_client_that_has_left_is_not_answered(served: Served) -> None:
    """To the server the same, at first: the other half is closed, too."""
    engine = served.engine
    engine.hold = 0
    try:
        before = len(engine.aborted)
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(request({"messages": HI}))
            until(lambda: engine.running)
        until(lambda: len(engine.aborted) > before)
    finally:
        engine.hold = None
    served.settle()


def test_a_full_disk_behind_its_output_does_not_end_the_server(tmp_path: Path) -> None:
    model = tiny.write_target("llama", tmp_path / "m")
    with socket.socket() as free, open("/dev/full", "w") as full:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [
            sys.executable,
            "-m",
            "outrider.cli.main",
            "serve",
            str(model),
            "--port",
            str(port),
            "--max-context",
            "64",
        ]
        process = subprocess.Popen(command, stdout=full, stderr=full)
    try:

        def healthy() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE).status_code == 200
            return False

        until(lambda: process.poll() is not None or healthy())
        assert process.poll() is None
        assert (
            httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "x"}, timeout=PATIENCE).status_code
            == 200
        )
        process.terminate()
        process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()


def test_a_mistake_of_the_server_is_json(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(*_: object) -> None:
        raise AssertionError("not foreseen")

    monkeypatch.setattr("outrider.server.scoring.tokens", mistaken)
    with httpx.Client(base_url=f"http://127.0.0.1:{served.port}", timeout=PATIENCE) as http:
        for path, message in (
            ("/v1/embeddings", lambda body: body["error"]["message"]),
            ("/api/embed", lambda body: body["error"]),
        ):
            answer = http.post(path, json={"input": "hi", "model": "fake"})
            assert answer.status_code == 500 and "log has the details" in message(answer.json())
        assert http.get("/health").status_code == 200
