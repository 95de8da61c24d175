"""One client's requests are not served at the cost of the others: long texts, large bodies, unread answers, many
grammars.

Catches: texts tokenised under the interpreter's lock, answers computed on for nobody, memory for bodies nobody has a
turn for, a grammar lost because somebody else brought a thousand.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time

import pytest
from tests.server_fakes import VOCAB, FakeEngine, Served, tokenizer
from tests.waiting import PATIENCE, until

from outrider.engine import text
from outrider.server import app, grammars, runner
from outrider.server.errors import ApiError
from outrider.server.fair import FairGate, lanes
from outrider.server.grammar_source import GrammarSource
from outrider.server.tokenizer_process import TokenizerProcess

TOK = tokenizer()
HI = [{"role": "user", "content": "hi"}]


def raw(s: Served, path: str, body: bytes, address: str = "127.0.0.1", length: int | None = None) -> socket.socket:
    """A connection that has sent this much of its body, and reads nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(PATIENCE)
    connection.bind((address, 0))
    connection.connect(("127.0.0.1", s.port))
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    connection.sendall(
        f"{head}Connection: close\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body
    )
    return connection


def everything(made: socket.socket) -> bytes:
    parts = []
    while part := made.recv(1 << 16):
        parts.append(part)
    made.close()
    return b"".join(parts)


def stands_back(pid: int) -> bool:
    """Its priority counts against ours only within our session: a session of its own has an equal share of the
    processors (autogroups). Signals of the terminal must not reach it all the same."""
    return os.getsid(pid) == os.getsid(0) and os.getpgid(pid) == pid


def test_long_texts_are_tokenised_elsewhere_to_the_same_ids() -> None:
    tok = tokenizer()
    child = TokenizerProcess(lambda: tok.json, tok.ids_here)
    tok.elsewhere = child.ids
    long = "über 日本 🦊 <|im_end|> " * 600
    try:
        assert len(long) > text.LONG_TEXT and tok.encode(long, bos=True) == tokenizer().encode(long, bos=True)
        assert child._child._process is not None
        tok.encode("short")
        assert stands_back(child._child._process.pid)
        os.kill(child._child._process.pid, signal.SIGKILL)
        assert tok.encode(long) == tok.encode(long) == TOK.encode(long)  # it may die: here, then in a new one
        assert tok.chat([{"role": "user", "content": long}]) == tokenizer().chat([{"role": "user", "content": long}])
        with pytest.raises(UnicodeError):
            tok.encode("\ud800" * 9000)
        assert child.ids(long, False) == TOK.ids(long, False)
    finally:
        child.close()


def test_of_a_text_far_too_long_only_the_beginning_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    with Served(FakeEngine(TOK), TOK, max_prompt=1000) as s:
        tok = s.model.prepare.tokenizer
        monkeypatch.setattr(
            tok, "elsewhere", lambda text, special: (seen.append(len(text)), tok.ids_here(text, special))[1]
        )
        monkeypatch.setattr("outrider.server.prepare.LONG_TEXT", 2000)
        monkeypatch.setattr("outrider.engine.text.LONG_TEXT", 2000)
        answer = s.http.post("/v1/completions", json={"prompt": "a" * 6000})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded" and seen == [3000]


def test_what_is_short_does_not_wait_behind_what_is_long() -> None:
    async def run() -> None:
        desk = lanes(1, 10)
        done = threading.Event()
        long = asyncio.create_task(desk["long"].run("a", lambda: done.wait(PATIENCE)))
        seeing = [asyncio.create_task(desk["media"].run(c, lambda: done.wait(PATIENCE))) for c in "abcdefghij"]
        await asyncio.sleep(0)
        assert await desk["short"].run("b", lambda: 7) == 7 and not long.done() and not any(t.done() for t in seeing)
        done.set()
        assert await long
        for lane in desk.values():
            lane.close()
        gate = FairGate(2, 10, "a test")
        await gate.acquire("many")
        second = asyncio.create_task(gate.acquire("many"))
        await asyncio.sleep(0)
        assert not second.done()  # a place is free, but one is all that a client may hold
        await gate.acquire("one")
        gate.release("many")
        await second

    asyncio.run(run())


def test_an_answer_waits_for_its_reader_and_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_UNREAD_EVENTS", 20)
    # a step of no time at all would end an answer before the loop, which tells the engine to pause, had its turn on a
    # busy machine
    engine = FakeEngine(TOK, lambda r: "word " * 800, draft=0, delay=0.0005, hold=3900)
    body = {"messages": HI, "stream": True, "max_tokens": 4000, "logprobs": True, "top_logprobs": 9, "n": 2}
    with Served(engine, TOK, 1 << 20, max_concurrent=4, stall_timeout=300) as s:
        silent = raw(s, "/v1/chat/completions", json.dumps(body).encode())
        until(lambda: len(engine.running) == 2)

        def made():
            return sum(len(r.out) for r in engine.running.values())

        def waits() -> bool:
            before = made()
            time.sleep(0.3)  # the system takes some of it before it takes no more
            return made() == before and not engine.busy

        until(waits)
        assert len(engine.running) == 2 and all(r.paused for r in engine.running.values())
        assert made() < 500, "a row in every step for all that buffers hold: 1,000 with 256 kB of the system's"
        engine.go.set()
        answer = s.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 5})
        assert answer.status_code == 200
        lines = [line for line in everything(silent).decode().splitlines() if line.startswith("data: {")]
        chosen = [json.loads(line[6:])["choices"][0] for line in lines]
        for index in range(2):
            assert "".join(c["delta"].get("content") or "" for c in chosen if c["index"] == index) == "word " * 800
        s.settle()


def test_one_large_body_of_a_client_is_read_at_a_time() -> None:
    large = json.dumps({"messages": HI, "max_tokens": 2, "user": "x" * (app.LARGE_BODY_BYTES + 1)}).encode()
    with Served(FakeEngine(TOK), TOK) as s:
        half = raw(s, "/v1/chat/completions", large[:1000], length=len(large))
        until(lambda: s.state.big_bodies._held)
        behind = raw(s, "/v1/chat/completions", large)
        until(lambda: s.state.big_bodies._waiting)
        assert b" 200 " in everything(raw(s, "/v1/chat/completions", large, address="127.0.0.2"))[:20]
        assert s.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 2}).status_code == 200
        assert s.state.big_bodies._waiting
        half.close()
        assert b" 200 " in everything(behind)[:20]
        until(lambda: not s.state.big_bodies._held)


def test_who_brings_many_grammars_loses_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_BYTES", 1 << 20)

    async def run() -> None:
        keeper = grammars.Grammars(TOK, VOCAB)
        source = GrammarSource("regex", "mine", "x")
        await keeper._compile(source, {"text": build_regex("mine"), "bytes": 1000, "unenforced": ""}, "me")
        for i in range(20):
            await keeper._compile(
                GrammarSource("regex", f"{i}", "x"),
                {"text": build_regex(f"{i}"), "bytes": 200_000, "unenforced": ""},
                "many",
            )
        assert source.digest in keeper._cache and len(keeper._cache) < 8
        keeper.close()

    asyncio.run(run())


def test_where_the_machine_is_busy_a_grammar_may_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar of 500 KB got "try again" whenever it was sent beside others: its trial ran on idle processors only.
    Sent again it has an ordinary priority, and if that is not enough a refusal that names the limit."""
    monkeypatch.setattr(grammars, "PATIENCE_S", 0.0)
    monkeypatch.setattr(grammars, "LAST_PATIENCE_S", 0.0)
    source = GrammarSource("json_schema", json.dumps({"type": "integer", "multipleOf": 62615533}), "x")
    now = [100.0]
    trials: list[bool] = []

    async def run() -> None:
        cache = grammars.Grammars(TOK, VOCAB, clock=lambda: now[0])
        trial = cache._trial

        async def counted(source: GrammarSource, yielding: bool, patience: float) -> dict[str, object]:
            trials.append(yielding)
            return await trial(source, yielding, patience)

        monkeypatch.setattr(cache, "_trial", counted)

        async def refusal() -> ApiError:
            with pytest.raises(ApiError) as error:
                await cache.get(source, "me")
            return error.value

        busy = await refusal()
        assert busy.status == 503 and "too busy" in busy.message and busy.retry_after and not cache._cache
        now[0] += busy.retry_after - 1
        assert (await refusal()).status == 503 and trials == [True], "too early: no second trial"
        now[0] += 1
        final = await refusal()
        assert final.status == 400 and "x: it can't be tried within 0 s, with 1 s of processor time" in final.message
        assert trials == [True, False]
        assert (await refusal()).message == final.message and len(trials) == 2, "cached"
        assert not cache._busy
        cache.close()

    asyncio.run(run())


def test_a_grammar_that_was_too_large_once_is_compiled_when_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "PATIENCE_S", 0.0)
    monkeypatch.setattr(grammars, "LAST_PATIENCE_S", PATIENCE)
    source = GrammarSource("json_schema", json.dumps({"enum": [f"{i}" for i in range(100)]}), "x")
    now = [100.0]

    async def run() -> None:
        cache = grammars.Grammars(TOK, VOCAB, clock=lambda: now[0])
        with pytest.raises(ApiError, match="too busy"):
            await cache.get(source, "me")
        now[0] += grammars.RETRY_S
        assert (await cache.get(source, "me")).matcher().failed is None
        cache.close()

    asyncio.run(run())


def build_regex(pattern: str) -> str:
    from outrider.server.grammar_source import build

    return build(GrammarSource("regex", pattern, "x")).text
