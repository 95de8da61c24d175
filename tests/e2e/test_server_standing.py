"""Who gives way to others on a real server: clients that leave their answers or their connections."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator

import httpx
import pytest
from tests.server_fakes import FakeEngine, Served, tokenizer
from tests.waiting import PATIENCE, until

TOK = tokenizer()
READER = "127.0.0.1"
OTHER = "127.0.0.2"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="addresses of the loopback network")


@pytest.fixture
def served() -> Iterator[Served]:
    engine = FakeEngine(TOK, lambda request: "word " * 400, draft=0, delay=0.002)
    with Served(engine, TOK, max_concurrent=4) as server:
        yield server


def client(served: Served, address: str) -> httpx.Client:
    return httpx.Client(base_url=served.url, timeout=PATIENCE, transport=httpx.HTTPTransport(local_address=address))


def background(served: Served) -> frozenset[str]:
    return served.state.pool.standing.background()


def test_who_leaves_answers_gives_way_and_who_reads_them_does_not(served: Served) -> None:
    with client(served, READER) as reader:
        while OTHER not in background(served):
            with client(served, OTHER) as leaver, contextlib.suppress(httpx.TimeoutException):
                leaver.post("/v1/chat/completions", json={**CHAT, "max_tokens": 300}, timeout=0.2)
            assert reader.post("/v1/chat/completions", json={**CHAT, "max_tokens": 3}).status_code == 200
        assert background(served) == {OTHER}
        reader.post("/v1/chat/completions", json={**CHAT, "max_tokens": 3})
        assert served.engine.background == {OTHER}, "the engine is told"
    served.settle()


def test_a_stream_that_is_stopped_while_it_is_read_counts_little(served: Served) -> None:
    with client(served, OTHER) as stopping:
        for _ in range(3):
            with stopping.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
                next(answer.iter_lines())
    served.settle()
    until(lambda: served.state.pool.standing._waste)
    assert not background(served)


def test_connections_without_an_answer_count_and_others_do_not(served: Served) -> None:
    def connect(data: bytes) -> None:
        with socket.socket() as silent:
            silent.bind((OTHER, 0))
            silent.connect((READER, served.port))
            silent.sendall(data)

    for _ in range(12):
        served.http.get("/health")  # a connection each
        connect(b"")
        connect(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n")
    until(lambda: background(served) == {OTHER})
    assert READER not in served.state.pool.standing._waste


def test_a_deadline_of_ours_is_not_the_client_s_fault() -> None:
    engine = FakeEngine(TOK, hold=2)
    with Served(engine, TOK, timeout=0.3) as served:
        for _ in range(10):
            answer = served.http.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 408 and "longer than" in json.dumps(answer.json())
        assert not background(served)
        engine.go.set()
