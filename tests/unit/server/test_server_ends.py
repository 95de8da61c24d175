"""Ends of what the server runs beside itself: the engine's thread, the tokenizer process, the grammar sandbox and its
trials; and what ends the server."""

from __future__ import annotations

import asyncio
import io
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.types import Message
from tests.running import running
from tests.server_fakes import VOCAB, FakeEngine, tokenizer
from tests.waiting import PATIENCE

from outrider.engine import child_process
from outrider.engine.scoring import Scorer
from outrider.engine.step import Request
from outrider.server import grammar_sandbox, tokenizer_process
from outrider.server.app import create_app
from outrider.server.batch import receiving
from outrider.server.errors import ApiError
from outrider.server.grammar_source import GrammarSource
from outrider.server.main import HttpServer, address, listen
from outrider.server.model_info import ServedModel
from outrider.server.runner import EngineError, RequestStream, Runner
from outrider.server.scoring import run_scoring
from outrider.server.settings import ServerSettings
from outrider.types import OutriderError, SamplingParams

TOK = tokenizer()


def test_an_engine_that_was_stopped_says_so_to_those_who_call_it() -> None:
    async def work() -> None:
        runner = Runner(FakeEngine(TOK))
        runner.start()
        assert await runner.call(lambda engine: engine.busy) is False
        await runner.stop()
        async with asyncio.timeout(30):
            with pytest.raises(EngineError, match="shutting down"):
                await runner.call(lambda engine: engine.busy)

    asyncio.run(work())


@pytest.mark.parametrize(("fails", "last"), [(0, b"[DONE]"), (1, b'"error"')])
def test_who_has_read_the_end_of_a_stream_finds_its_place_free(fails: int, last: bytes) -> None:
    """On a server of one place the next question of the same client was refused where it came before the stream had
    been put away."""

    async def work() -> None:
        engine = FakeEngine(TOK)
        engine.fail_steps = fails
        app = create_app(
            ServedModel(engine, TOK, VOCAB, 2048), ServerSettings("fake", port=0, max_concurrent=1, max_queued=0)
        )
        held: list[int] = []

        async def send(message: Message) -> None:
            if last in message.get("body", b""):
                held.append(app.state.server.admission.in_flight)

        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": headers,
        }
        async with app.router.lifespan_context(app), asyncio.timeout(PATIENCE):
            await app(scope, receiving(body, asyncio.Event()), send)
        assert held == [0]

    asyncio.run(work())


def test_commands_without_end_leave_steps_between_them() -> None:
    """A command that came while another ran was carried out before the next step. Texts that are scored send them
    without end: a stream stood still until all of them were done."""
    most = 400

    async def work() -> int:
        engine = FakeEngine(TOK, say=lambda _: "word " * 40, draft=0, hold=2)
        runner = Runner(engine)
        runner.start()
        request = Request("r", TOK.encode("hi"), SamplingParams(max_tokens=30, ignore_eos=True))
        stream = RequestStream(runner, ["r"])
        await runner.submit(request, stream)
        num_commands = 0

        async def command_on() -> None:
            nonlocal num_commands
            while stream.open and num_commands < most:
                num_commands += 1
                if num_commands == 20:
                    engine.go.set()
                await runner.call(lambda _: time.sleep(0.002))

        tasks = [asyncio.create_task(command_on()) for _ in range(4)]
        while stream.open:
            await stream.next(PATIENCE)
        at_end = num_commands
        await asyncio.gather(*tasks)
        await runner.stop()
        return at_end

    assert asyncio.run(work()) < most


@pytest.mark.parametrize(
    ("error", "status"),
    [(EngineError("the server is shutting down"), 503), (OutriderError("no room"), 429), (ValueError("a prompt"), 500)],
)
def test_a_text_that_is_read_fails_with_a_status(
    error: Exception, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    released: list[str] = []

    async def acquire(client: str, priority: int) -> None: ...

    async def call(function: object) -> bool:
        raise error

    turns = SimpleNamespace(acquire=acquire, release=released.append)
    model: Any = SimpleNamespace(
        turns=turns, runner=SimpleNamespace(call=call, later=lambda function: released.append("work"))
    )
    with pytest.raises(ApiError) as raised:
        asyncio.run(run_scoring(model, Scorer([1, 2], 0), "me"))
    assert raised.value.status == status and released == ["me", "work"]
    assert "a prompt" not in raised.value.message + caplog.text


def test_a_closed_clerk_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    late = tokenizer_process.TokenizerProcess(lambda: "", lambda text, special: [len(text), special])
    late.close()
    monkeypatch.setattr(child_process.subprocess, "Popen", refuse)
    assert late.ids("abc", True) == [3, True]
    late._child.start()  # a server that ends while it starts
    late.close()


def test_a_trial_ends_with_its_connection() -> None:
    """Nothing else would end it: here one that would take an hour."""
    alive, its_life = os.pipe()  # has an end when no process holds the other side any more
    ours, its = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(alive)
            ours.close()
            compiler: Any = None
            sandbox = grammar_sandbox.GrammarSandbox(compiler, 1.0, 1)
            sandbox._try = lambda *_: time.sleep(3600)  # type: ignore[method-assign]
            sandbox.answer(GrammarSource("regex", "a", "x"), its.fileno(), yielding=True)
        finally:
            os._exit(1)
    os.close(its_life)
    its.close()
    try:
        ours.close()
        assert select.select([alive], [], [], 30)[0] == [alive] and os.read(alive, 1) == b""
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        os.close(alive)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_connections_may_idle_for_ever() -> None:
    server = HttpServer(
        ServedModel(FakeEngine(TOK), TOK, VOCAB, 128), ServerSettings("fake", port=0, idle_timeout=float("inf"))
    )
    assert server.config.timeout_keep_alive > 1 << 30


@pytest.mark.parametrize(
    ("terminal", "file", "reloads"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_a_terminal_that_is_closed_ends_the_server(
    terminal: bool, file: bool, reloads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGHUP reads keys again where there is a file of them, or no terminal it could come from."""
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    settings = ServerSettings("fake", port=0, api_key_file=keys if file else None)
    server = HttpServer(ServedModel(FakeEngine(TOK), TOK, VOCAB, 128), settings)
    heard: list[int] = []

    async def nothing(*_: object) -> None: ...

    def hear(signal: int, _: Callable[[], None]) -> None:
        heard.append(signal)

    async def work() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "add_signal_handler", hear)
        await server.startup()

    monkeypatch.setattr(uvicorn.Server, "startup", nothing)
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    asyncio.run(work())
    assert heard == [signal.SIGHUP] * reloads


def test_answers_do_not_wait_for_their_readers_acknowledgement() -> None:
    """On a socket that is not named as TCP asyncio leaves Nagle's algorithm on: every answer took 40 ms longer."""
    tok = tokenizer()
    server = HttpServer(ServedModel(FakeEngine(tok), tok, VOCAB, 2048), ServerSettings(model_name="fake"))
    with (
        running(server, [listen("127.0.0.1", 0)]) as url,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as made,
    ):
        made.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert made.recv(100).startswith(b"HTTP/1.1 200")
        (connection,) = server.connections.open
        assert connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("::1", "[::1]")])
def test_the_address_that_is_told_can_be_called(host: str, shown: str) -> None:
    with listen("127.0.0.1", 0) as listener:
        settings = ServerSettings(model_name="m", host=host)
        assert address(settings, listener) == f"http://{shown}:{listener.getsockname()[1]}"
