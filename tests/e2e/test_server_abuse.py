"""Nothing one client sends may hurt another. Each test is a row of an attack that once worked, against real sockets.

Catches: grammars that burn a core for ever, texts tokenised before anybody asked whether they may, connections that
hold places by not reading or not writing, and answers that tell where files lie.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tests.server_fakes import VOCAB, FakeEngine, Served, masks, tokenizer
from tests.waiting import PATIENCE, until

from outrider.engine.grammar import GrammarCompiler
from outrider.server import grammar_sandbox, grammars
from outrider.server.errors import ApiError
from outrider.server.fair import FairExecutor, FairGate, TurnQueue
from outrider.server.grammar_source import GrammarSource, build, close_objects
from outrider.server.main import listen
from outrider.server.model_info import ServedModel
from outrider.server.protocol import cap
from outrider.server.settings import without_paths
from outrider.types import OutriderError

TOK = tokenizer()
GEMMA = tokenizer(gemma=True)
HI = [{"role": "user", "content": "hi"}]
BOMB = {"type": "integer", "multipleOf": 62615533}
LINKS = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"type": "null"}]} for i in range(3000)}
CHAIN = {"$defs": {**LINKS, "a3000": {"type": "null"}}, "$ref": "#/$defs/a0"}
BOMBS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": BOMB}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CHAIN}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["y" * 100] * 6000}}}}, "response_format"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": BOMB}}}}],
         "tool_choice": "required"}, "tools",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A trial ends before it has to stand back behind everybody: on a busy machine it would get nothing from then on,
    and take for ever."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammars, "CPU_SECONDS", grammar_sandbox.QUICK)
        with Served(FakeEngine(TOK), TOK, max_concurrent=2, max_queued=2) as s:
            yield s


def post(s: Served, **body: Any) -> httpx.Response:
    answer: httpx.Response = s.http.post("/v1/chat/completions", json={"messages": HI, **body})
    return answer


def raw(s: Served, data: bytes, small: bool = False, address: str = "127.0.0.1") -> socket.socket:
    connection = socket.socket()
    connection.bind((address, 0))
    if small:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", s.port))
    connection.sendall(data)
    return connection


def request(path: str, body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n".encode()
        + text
    )


# ---- grammars


@pytest.mark.parametrize(("fields", "field"), BOMBS, ids=["multipleOf", "refs", "enum", "tools"])
def test_a_grammar_bomb_is_a_400_that_names_the_field(served: Served, fields: dict[str, Any], field: str) -> None:
    answer = post(served, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text
    assert "compile" in answer.text or "characters" in answer.text
    assert post(served, **fields).json() == answer.json()  # the second time it is known


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has just ended
        return []


def test_others_are_served_while_a_bomb_is_tried_and_its_trial_ends_with_its_client() -> None:
    with Served(FakeEngine(TOK), TOK, max_concurrent=2, max_queued=2) as s:
        post(s, response_format={"type": "json_object"})  # the sandbox is up
        sandbox = s.model.grammars._sandbox

        def trials():
            return [child for process in children(sandbox._process.pid) for child in children(process)]

        schemas = [{"type": "integer", "multipleOf": 62615533 + 2 * i} for i in range(3)]
        forms = [{"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in schemas]
        bombs = [raw(s, request("/v1/chat/completions", {"messages": HI, "response_format": form})) for form in forms]
        until(trials)
        (bomb,) = trials()  # of one client one after the other
        os.kill(bomb, signal.SIGSTOP)  # from now on it takes for ever
        for _ in range(10):
            assert s.http.get("/health").status_code == 200
        assert post(s).status_code == 200
        assert trials() == [bomb]
        for made in bombs:
            made.close()
        until(lambda: not children(sandbox._process.pid))
        until(lambda: not Path(f"/proc/{bomb}").exists())
        s.settle()


def test_the_sandbox_may_die(served: Served) -> None:
    post(served, response_format={"type": "json_object"})
    pid = served.model.grammars._sandbox._process.pid
    assert (os.getsid(pid), os.getpgid(pid)) == (
        os.getsid(0),
        pid,
    )  # elsewhere its priority would not count against ours
    os.kill(pid, signal.SIGKILL)
    schema = {"type": "object", "properties": {"fresh": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    until(lambda: post(served, response_format=form, max_tokens=200).status_code == 200)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_BYTES", 3000)
    monkeypatch.setattr(grammars, "PATIENCE_S", PATIENCE)

    async def run() -> None:
        keeper = grammars.Grammars(TOK, VOCAB)
        compiled = [await keeper.get(GrammarSource("regex", f"a{{{i}}}b", "x"), "me") for i in range(1, 4)]
        assert len(keeper._cache) <= 3 and compiled[0].matcher().failed is None
        with pytest.raises(ApiError, match=r"x: .*characters"):
            await keeper.get(GrammarSource("regex", "a" * (1 << 20), "x"), "me")
        keeper.close()

    asyncio.run(run())


def test_undeclared_properties_are_not_generated() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    compiler = GrammarCompiler(TOK.json, VOCAB, TOK.eos_ids)
    matcher = compiler.compile(build(GrammarSource("json_schema", json.dumps(schema), "x")).text).matcher()
    whole = TOK.encode('{"a":{"b":1}}')
    extra = TOK.encode('{"a":{"b":1,"z":2}}')
    assert masks(matcher, whole)[1] == len(whole) and masks(matcher, extra)[1] < len(extra)
    opened = {**schema, "additionalProperties": True}
    assert close_objects(opened)["additionalProperties"] is True
    assert close_objects({"type": "object"}) == {"type": "object"}
    parts = {"allOf": [{"properties": {"a": {}}}, {"$ref": "#/$defs/d"}], "$defs": {"d": {"properties": {"b": {}}}}}
    assert close_objects(parts) == parts  # together they are one object: neither may be closed alone


# ---- admission before work


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> Any:
        raise AssertionError("tokenised")

    monkeypatch.setattr(type(served.model.prepare.tokenizer), "encode", never)
    monkeypatch.setattr(type(served.model.prepare.tokenizer), "prompt", never)
    long = "1" * 4_000_000
    answer = post(served, messages=[{"role": "user", "content": long}])
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    for prompt in (long, [1] * 500_000, [long]):
        answer = served.http.post("/v1/completions", json={"prompt": prompt})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"


def test_a_full_server_refuses_before_it_tokenises(monkeypatch: pytest.MonkeyPatch) -> None:
    with Served(FakeEngine(TOK, hold=5), TOK, max_concurrent=1, max_queued=0) as s:
        with s.http.stream("POST", "/v1/chat/completions", json={"messages": HI, "stream": True}) as stream:
            pieces = stream.iter_raw()
            next(pieces)
            monkeypatch.setattr(type(s.model.prepare), "job", lambda *_: pytest.fail("prepared"))
            answer = post(s)
            assert (
                answer.status_code == 429
                and answer.json()["error"]["code"] == "server_full"
                and answer.headers["retry-after"]
            )
        monkeypatch.undo()
        s.settle()


def test_clients_take_turns() -> None:
    async def run() -> None:
        gate = FairGate(1, 10, "a test")
        order = []

        async def one(client: str, i: int) -> None:
            async with gate.enter(client):
                order.append(f"{client}{i}")
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(one("a", i)) for i in range(4)] + [
            asyncio.create_task(one("b", i)) for i in range(2)
        ]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["a0", "b0", "a1", "b1", "a2"] or order == ["a0", "a1", "b0", "a2", "b1"]
        assert not gate._held and not gate._waiting
        full = FairGate(1, 2, "a test")
        await full.acquire("x")
        waiting = [asyncio.create_task(full.acquire("x")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="2 requests of this client wait"):
            await full.acquire("x")
        for task in waiting:
            task.cancel()

    asyncio.run(run())


def test_a_client_alone_has_the_engine_and_shares_it_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        now = 0.0
        monkeypatch.setattr("outrider.server.fair.time", SimpleNamespace(monotonic=lambda: now))
        turns = TurnQueue(4)
        for _ in range(4):
            await turns.acquire("many")
        fifth = asyncio.create_task(turns.acquire("many"))
        await asyncio.sleep(0)
        assert not fifth.done() and turns.waiting == 1
        await turns.acquire("one")  # the engine is full, and still a newcomer begins at once
        turns.release("many")
        turns.release("many")
        await asyncio.sleep(0)
        assert not fifth.done()  # two of four are its share while somebody else is about
        turns.release("one")
        turns.release("many")
        await asyncio.sleep(0)
        assert fifth.done()
        now = 60.0  # the other is gone
        await turns.acquire("many")
        await turns.acquire("many")
        urgent, idle = (asyncio.create_task(turns.acquire("x", p)) for p in (1, 9))
        idle.cancel()
        await asyncio.gather(urgent, idle, return_exceptions=True)
        assert turns.waiting == 0

    asyncio.run(run())


def test_cancelled_work_keeps_its_thread() -> None:
    async def run() -> None:
        desk = FairExecutor(1, 10)
        begun = threading.Event()
        done = threading.Event()
        task = asyncio.create_task(desk.run("a", lambda: (begun.set(), done.wait(PATIENCE))))
        assert await asyncio.to_thread(begun.wait, PATIENCE)
        task.cancel()
        other = asyncio.create_task(desk.run("b", lambda: 7))
        await asyncio.sleep(0.05)
        assert not other.done()  # the thread still works for the one who left
        done.set()
        assert await other == 7
        desk.close()

    asyncio.run(run())


# ---- connections


@pytest.mark.parametrize("settings", [dict(timeout=2.0), dict(stall_timeout=1.0)], ids=str)
def test_a_client_that_does_not_read_gives_back_its_places(settings: dict[str, float]) -> None:
    body = {
        "messages": HI,
        "stream": True,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 20,
        "max_tokens": 100000,
        "ignore_eos": True,
    }
    engine = FakeEngine(TOK, lambda r: "word " * 20000, draft=8)
    engine.max_context = 1 << 20
    with Served(engine, TOK, 1 << 20, max_concurrent=2, max_queued=0, **settings) as s:
        silent = raw(s, request("/v1/chat/completions", body), small=True)
        until(lambda: len(engine.seen) == 2)
        until(lambda: not s.state.admission.in_flight)
        until(lambda: post(s, max_tokens=5).status_code == 200)  # the time is short for this one, too
        silent.close()
        s.settle()


def test_connections_that_say_nothing_or_half_are_ended() -> None:
    with Served(FakeEngine(TOK), TOK, request_timeout=0.6, idle_timeout=0.6) as s:
        half_body = request("/v1/chat/completions", {"messages": HI})[:-5]
        kinds = {
            "nothing": b"",
            "half a head": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x",
            "half a body": half_body,
        }
        whole = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        open_ones = [raw(s, data) for data in (*kinds.values(), whole, whole + b"GET /hea")]
        dripping = raw(s, b"GET /health HTTP/1.1\r\n")
        for _ in range(30):  # a byte now and then buys nothing
            time.sleep(0.05)
            try:
                dripping.sendall(b"X")
            except OSError:
                break
        until(lambda: not s.server.connections.open)
        for connection in open_ones:
            connection.settimeout(PATIENCE)
            try:
                while connection.recv(4096):
                    pass
            except ConnectionResetError:
                pass
            connection.close()
        dripping.close()


def test_who_leaves_in_the_middle_of_a_body_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with Served(FakeEngine(TOK), TOK, max_connections=8) as s, caplog.at_level(logging.INFO):
        half_body = request("/v1/chat/completions", {"messages": HI})[:-5]
        for _ in range(4):
            raw(s, half_body).close()
        crowd = [raw(s, half_body) for _ in range(12)]  # more than there is room for: the first ones are ended by us
        until(lambda: len(s.server.connections.open) <= 8)
        for connection in crowd:
            connection.close()
        until(lambda: not s.server.connections.open)
        assert post(s, max_tokens=5).status_code == 200
    assert [r.getMessage() for r in caplog.records if r.exc_info or r.levelno >= logging.ERROR] == []


def test_at_the_cap_silent_connections_make_room() -> None:
    with Served(FakeEngine(TOK), TOK, max_connections=8) as s:
        silent = [raw(s, b"") for _ in range(30)]
        for _ in range(5):
            assert s.http.get("/health").status_code == 200
        assert len(s.server.connections.open) <= 8
        for connection in silent:
            connection.close()


@pytest.mark.skipif(sys.platform != "linux", reason="addresses of the loopback network")
def test_at_the_cap_the_client_with_the_most_connections_makes_room() -> None:
    """The connection that had waited longest was replaced, whoever's: a flood of connections ended the slow upload of
    another client."""
    whole = request("/v1/chat/completions", {"messages": HI, "max_tokens": 3})
    with Served(FakeEngine(TOK), TOK, max_connections=8) as s:
        slow = raw(s, whole[:-5])
        until(lambda: len(s.server.connections.waiting) == 1)
        flood = [raw(s, b"", address="127.0.0.2") for _ in range(30)]
        until(lambda: s.server.connections.closed >= 23)
        slow.sendall(whole[-5:])
        slow.settimeout(PATIENCE)
        assert b" 200 OK" in slow.recv(4096)
        for connection in (slow, *flood):
            connection.close()


@pytest.mark.skipif(sys.platform != "linux", reason="addresses of the loopback network")
def test_at_the_cap_answers_that_nobody_reads_make_room() -> None:
    """A client that asked for files on all connections and read none shut out the others for a minute."""
    with Served(FakeEngine(TOK), TOK, max_connections=8) as s:
        other = httpx.Client(base_url=s.url, transport=httpx.HTTPTransport(local_address="127.0.0.2"), timeout=PATIENCE)
        form = {"file": ("x.jsonl", b"x" * (2 << 20))}
        with other:
            file = other.post("/v1/files", files=form, data={"purpose": "batch"}).json()["id"]
        get = f"GET /v1/files/{file}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        unread = [raw(s, get, small=True, address="127.0.0.2") for _ in range(8)]
        until(lambda: len(s.server.connections.unread) == 8)
        late = raw(s, get, address="127.0.0.2")
        late.settimeout(PATIENCE)
        assert b"503" in late.recv(4096), "its own make no room"
        assert s.http.get("/health").status_code == 200
        for connection in (*unread, late):
            connection.close()


def test_a_cap_of_busy_connections_answers_503() -> None:
    with Served(FakeEngine(TOK, hold=5), TOK, max_connections=8, max_concurrent=8) as s:
        busy = [raw(s, request("/v1/chat/completions", {"messages": HI, "stream": True})) for _ in range(8)]
        until(lambda: len(s.server.connections.open) == 8 and not s.server.connections.waiting)
        late = raw(s, b"")
        late.settimeout(PATIENCE)
        assert b"503" in late.recv(4096)
        for connection in (*busy, late):
            connection.close()
        s.settle()


def test_the_cap_fits_the_file_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert cap(100) == 100 and cap(10**9) <= (hard if hard != resource.RLIM_INFINITY else 10**9)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_grammar_compiler_is_made_before_connections_come() -> None:
    """Made next to them, it held the interpreter, and so the event loop, for 0.2 s once in the life of a server."""
    compiler = grammars.Grammars(tokenizer(), VOCAB)
    assert "_compiler" not in vars(compiler)
    compiler.start()
    assert "_compiler" in vars(compiler)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_table_of_descriptors_has_its_size_before_connections_come() -> None:
    """If the table grew with a connection, accept() stood still for a third of a second, and the event loop with it."""
    tell = "re.search(r'FDSize:\\s+(\\d+)', open('/proc/self/status').read())[1]"
    script = f"import re; from outrider.server.protocol import cap; print({tell}, cap(900), {tell})"
    before, most, after = map(int, subprocess.check_output([sys.executable, "-c", script], text=True).split())
    assert before < 900 and after >= most + 64


# ---- smaller rows


def test_chats_refusals_are_counted_under_chat_and_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    before = served.state.metrics.text().decode()
    with caplog.at_level(logging.INFO, "outrider"):
        answer = served.http.post(
            "/v1/chat/completions", json={"messages": HI, "secret words": 1}, headers={"X-Request-Id": "abc-1"}
        )
    assert answer.status_code == 400 and answer.headers["x-request-id"] == "abc-1"
    count = lambda text, route: sum(
        map(float, re.findall(rf'requests_total{{route="{route}",status="400"}} (\S+)', text))
    )
    after = served.state.metrics.text().decode()
    assert count(after, "chat") == count(before, "chat") + 1 and count(after, "completions") == count(
        before, "completions"
    )
    lines = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
    assert any(
        "abc-1" in x and "/v1/chat/completions" in x and "unknown_field" in x for x in lines
    ) and "secret words" not in "".join(lines)


def test_odd_requests(served: Served) -> None:
    url = "/v1/chat/completions"
    json_type = {"Content-Type": "application/json"}
    odd = served.http.post(url, content=b'{"model":"\\ud800","messages":[]}', headers=json_type)
    assert odd.status_code in (400, 404) and "error" in odd.json()
    plain = served.http.post(url, content="{}", headers={"Content-Type": "text/plain"})
    assert plain.status_code == 415 and "application/json" in plain.json()["error"]["message"]
    curls = {"Content-Type": "application/x-www-form-urlencoded"}  # of `curl -d`, and of a form on any page of the web
    body = json.dumps({"messages": HI, "max_tokens": 2})
    assert served.http.post(url, content=body, headers=curls).status_code == 200
    assert served.http.post(url, content=body, headers={**curls, "Origin": "https://else.example"}).status_code in (
        403,
        415,
    )
    assert served.http.head("/health").status_code == 200 and served.http.head("/").content == b""
    assert post(served).status_code == 200  # one model is served: it need not be named
    deep = served.http.post(url, content=b"[" * 200_000, headers=json_type)
    assert deep.status_code == 400 and "error" in deep.json()
    many = served.http.post("/v1/completions", json={"prompt": ["a", {}, 3] * 1000})
    assert many.status_code == 400


def test_a_missing_key_says_how() -> None:
    with Served(FakeEngine(TOK), TOK, api_keys=("k",)) as s:
        answer = s.http.get("/v1/models")
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert s.http.get("/v1/models", headers={"x-api-key": "k"}).status_code == 200
        assert s.http.post("/v1/messages", json={}).json()["type"] == "error"  # as the clients of each route read it
        assert isinstance(s.http.post("/api/chat", json={}).json()["error"], str)


def test_paths_stay_private() -> None:
    class Llm:
        name = "x"
        tokenizer = TOK
        engine = FakeEngine(TOK)
        nbytes = 0
        drafter_note = "drafter: mtp /home/me/secret/drafter (as asked)"

        adapters = None
        vision = "no images"
        audio = "no sound"

        class config:
            vocab_size = VOCAB

    assert ServedModel.of(Llm()).note == "drafter: mtp drafter (as asked)"
    assert without_paths("a google/gemma b ~/x/y: c") == "a google/gemma b y: c"


def test_a_port_in_use_is_noticed_before_the_model_is_loaded() -> None:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with pytest.raises(OutriderError, match="cannot listen"):
        listen("127.0.0.1", port)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [
        sys.executable,
        "-c",
        "from outrider.cli.main import main; main()",
        "serve",
        "/nowhere",
        "--port",
        str(port),
    ]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 2 and "cannot listen" in run.stderr and "Traceback" not in run.stderr
    listener.close()


def test_while_draining_newcomers_hear_503() -> None:
    with Served(FakeEngine(TOK, hold=5), TOK, shutdown_grace=PATIENCE / 2) as s:
        reader = threading.Thread(target=lambda: post(s, stream=True))
        reader.start()
        until(lambda: s.state.admission.in_flight)
        s.server.should_exit = True
        until(lambda: s.state.admission.closing)
        answer = post(s)
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert s.http.get("/health").status_code == 503
        s.engine.go.set()
        reader.join(PATIENCE)
