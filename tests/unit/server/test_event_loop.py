"""Work that would hold up the event loop is done elsewhere, or in pieces; memory goes back to the system."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from tests.server_fakes import FakeEngine, Served, tokenizer
from tests.waiting import until

from outrider.engine.engine import Event
from outrider.server import call, main, runner, scoring
from outrider.server.answer import encoded
from outrider.server.trim import trim

TOK = tokenizer()


def some_json(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(3) if depth else 0
    if kind == 1:
        return [some_json(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 2:
        return {f'"{i} é': some_json(rng, depth - 1) for i in range(rng.randrange(4))}
    return rng.choice([1, -0.25, 1e-7, 'é\n"', None, True, "", [], {}])


def test_json_in_pieces_is_json() -> None:
    rng = random.Random(0)
    for _ in range(500):
        value = some_json(rng, 8)
        assert encoded(value) == json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    with pytest.raises(ValueError, match="float"):
        encoded({"a": [[float("nan")]]})


def test_many_log_probabilities_and_vectors_are_written_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight answers of 2,000 tokens with 20 alternatives each, or 2,048 vectors, stopped every client for a second."""
    where: list[bool] = []

    def seen(value: object) -> bytes:
        where.append(threading.current_thread().name == loop_thread)
        return encoded(value)

    monkeypatch.setattr("outrider.server.answer.encoded", seen)
    monkeypatch.setattr(scoring, "encoded", seen)
    with Served(FakeEngine(TOK, say=lambda _: "word " * 40), TOK) as s:
        loop_thread = next(t.name for t in threading.enumerate() if "run" in t.name and "Thread-" in t.name)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
        response = s.http.post("/v1/chat/completions", json={**body, "logprobs": True, "top_logprobs": 2}).json()
        assert len(response["choices"][0]["logprobs"]["content"]) > call.FEW_SCORED
        s.http.post("/v1/chat/completions", json=body)
    assert where == [False, True], "an ordinary answer needs no other thread"
    body = scoring.OldEmbedBody(model="tiny", prompt="hi")
    result = scoring.Embeddings(body, [[0.5]], num_tokens=1, model="tiny")
    answer = asyncio.run(scoring.off_loop(scoring.ollama_old_body, result))
    assert answer.body == b'{"embedding":[0.5]}' and where[-1] is False


def test_a_stream_that_catches_up_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 events of a client that reads at last were written in one turn of the event loop."""
    monkeypatch.setattr(runner, "GIVE_WAY_S", -1.0)

    async def run() -> tuple[int, int]:
        stream = runner.RequestStream(SimpleNamespace(pause=lambda id, on: None), ["a"])  # type: ignore[arg-type]
        for i in range(100):
            stream.put("a", Event("a", [i], ["plain"], ["x"], None, "length" if i == 99 else None))
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        got = [await stream.next(1.0) for _ in range(100)]
        task.cancel()
        return turns, sum(e is not None for e in got)

    turns, got = asyncio.run(run())
    assert got == 100 and turns >= 100


def test_trim_frees_cycles() -> None:
    class Cycle:
        pass

    gc.disable()
    try:
        one = Cycle()
        one.__dict__["itself"] = one
        gone = weakref.ref(one)
        del one
        trim()
        assert gone() is None
    finally:
        gc.enable()


def test_memory_goes_back_after_connections_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr(main, "TIDY_S", 0.02)
    monkeypatch.setattr(main, "trim", lambda: trims.append(1))
    with Served(FakeEngine(TOK), TOK) as s:
        assert s.http.get("/health").status_code == 200
        until(lambda: len(trims) > 0, lambda: "nothing was given back")
        until(lambda: not s.server.connections.open, lambda: "it is still open")
        asyncio.run(asyncio.sleep(0.2))  # what was closed last is seen to
        before = len(trims)
        asyncio.run(asyncio.sleep(0.3))
        assert len(trims) <= before + 1, "nothing has happened"
