"""Events on their way to the streams: in order, none lost, and merged only if many streams are open."""

from __future__ import annotations

import asyncio
import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.engine.engine import Event
from outrider.server.outbox import FEW_STREAMS, Outbox
from outrider.server.runner import EngineError


class Heard:
    """A stream that keeps what it was told."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def put(self, id: str, item: Any) -> None:
        self.items.append(item)


def said(id: str, token: int, finish: str | None = None, logprobs: bool = False) -> Event:
    return Event(id, [token], ["plain"], [f" {token}"], [{token: -1.0}] if logprobs else None, finish)


async def tell(streams: int, steps: int, logprobs: bool = False) -> list[list[Any]]:
    loop = asyncio.get_running_loop()
    heard = [Heard() for _ in range(streams)]
    box = Outbox(lambda function: loop.call_soon_threadsafe(function))  # type: ignore[arg-type]

    def engine() -> None:
        for step in range(steps):
            finish = "length" if step == steps - 1 else None
            box.add([(one, str(i), said(str(i), step, finish, logprobs)) for i, one in enumerate(heard)])
            box.open(streams)
        box.flush()

    await asyncio.to_thread(engine)
    async with asyncio.timeout(60):
        while any(not one.items or one.items[-1].finish_reason is None for one in heard):
            await asyncio.sleep(0.001)
    return [one.items for one in heard]


@pytest.mark.parametrize("logprobs", [False, True])
def test_nothing_is_lost_or_out_of_order_where_many_are_open(logprobs: bool) -> None:
    for items in asyncio.run(tell(FEW_STREAMS + 8, 50, logprobs)):
        assert [t for e in items for t in e.tokens] == list(range(50))
        assert "".join(t for e in items for t in e.texts) == "".join(f" {i}" for i in range(50))
        assert all(len(e.kinds) == len(e.tokens) == len(e.texts) for e in items)
        assert [entry for e in items for entry in e.logprobs or ()] == (
            [{i: -1.0} for i in range(50)] if logprobs else []
        )
        assert [e.finish_reason for e in items] == [None] * (len(items) - 1) + ["length"]


async def now(calls: list[Any]) -> None:
    """Runs the loop's scheduled callbacks, and those that they schedule."""
    for call in calls:
        call()
    calls.clear()
    await asyncio.sleep(0)


def test_what_waits_is_bundled_where_many_are_open_and_only_there() -> None:
    for streams, bundled in ((FEW_STREAMS, False), (FEW_STREAMS + 1, True)):
        heard = [Heard() for _ in range(streams)]
        calls = list[Any]()
        box = Outbox(calls.append)
        for step in range(3):  # the loop has no time for them
            box.add([(one, str(i), said(str(i), step)) for i, one in enumerate(heard)])
            box.open(streams)
        assert len(calls) == 1
        box.flush()
        asyncio.run(now(calls))
        assert {len(one.items) for one in heard} == ({1} if bundled else {3})
        assert [t for e in heard[0].items for t in e.tokens] == [0, 1, 2]


def test_a_window_is_for_as_many_as_there_is_time_for_and_those_who_begin_or_end_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard = [Heard() for _ in range(4 * FEW_STREAMS)]
    calls = list[Any]()
    at = [0.0]
    box = Outbox(calls.append)
    clocks = SimpleNamespace(perf_counter=lambda: at[0], thread_time=time.thread_time)
    monkeypatch.setattr("outrider.server.outbox.time", clocks)

    def step(number: int, some: range, finish: str | None = None) -> list[int]:
        """Who heard something in the window behind this step."""
        before = [len(one.items) for one in heard]
        box.add([(heard[i], str(i), said(str(i), number, finish)) for i in some])
        at[0] += 0.003
        box.open(len(heard))
        box._each = 1e-4  # as if so long was written to each
        asyncio.run(now(calls))
        return [i for i, one in enumerate(heard) if len(one.items) > before[i]]

    old = range(3 * FEW_STREAMS)
    new = range(3 * FEW_STREAMS, 4 * FEW_STREAMS)
    turns = [step(number, old) for number in range(60)]
    assert all(0 < len(turn) < len(old) for turn in turns[5:]), "a window is not for everybody"
    for i in old:
        times = [number for number, turn in enumerate(turns) if i in turn]
        assert max(b - a for a, b in itertools.pairwise(times)) <= 0.06 / 0.003, "each has its turn in time"
    first = step(60, new[:3])
    last = step(61, range(5, 8), "length")
    assert set(new[:3]) <= set(first) and {5, 6, 7} <= set(last)
    box.flush()
    asyncio.run(now(calls))
    assert [t for e in heard[0].items for t in e.tokens] == list(range(60))


def test_an_error_ends_a_stream_behind_what_was_said() -> None:
    heard = [Heard() for _ in range(FEW_STREAMS + 1)]
    calls = list[Any]()
    box = Outbox(calls.append)
    box.add([(one, str(i), said(str(i), 7)) for i, one in enumerate(heard)])
    box.add([(heard[0], "0", EngineError("gone"))])
    box.flush()
    asyncio.run(now(calls))
    assert [type(item) for item in heard[0].items] == [Event, EngineError] and len(heard[1].items) == 1


def test_of_requests_that_were_aborted_nothing_is_kept() -> None:
    heard = Heard()
    calls = list[Any]()
    box = Outbox(calls.append)
    box.add([(heard, "a", said("a", 1))])
    box.forget("a")
    box.flush()
    asyncio.run(now(calls))
    assert not heard.items and not box._waiting and not box._known and not box._soon


def test_those_who_begin_or_end_need_no_window() -> None:
    heard = [Heard() for _ in range(FEW_STREAMS + 4)]
    calls = list[Any]()
    box = Outbox(calls.append)
    box.add([(one, str(i), said(str(i), 0)) for i, one in enumerate(heard)])
    box.flush()
    asyncio.run(now(calls))
    box.add([(one, str(i), said(str(i), 1, "stop" if i == 7 else None)) for i, one in enumerate(heard)])
    box.hurry()
    asyncio.run(now(calls))
    assert [len(one.items) for one in heard] == [2 if i == 7 else 1 for i in range(FEW_STREAMS + 4)]
    box.hurry()
    assert not calls


def test_a_stream_that_fails_takes_nobody_with_it() -> None:
    class Broken:
        def put(self, id: str, item: Any) -> None:
            raise RuntimeError("no")

    good = Heard()
    calls = list[Any]()
    box = Outbox(calls.append)
    for step in range(2):
        box.add([(Broken(), "0", said("0", step)), (good, "1", said("1", step))])
        box.open(2)
        asyncio.run(now(calls))
    assert [t for e in good.items for t in e.tokens] == [0, 1]
