"""What the engine says on its way to the streams: in order, nothing lost, and bundled only where many streams are open."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.engine.engine import Event
from outrider.server.runner import FEW, EngineError, Outbox


class Heard:
    """A stream that keeps what it was told."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def put(self, id: str, item: Any) -> None:
        self.items.append(item)


def said(id: str, token: int, finish: str | None = None, logprobs: bool = False) -> Event:
    return Event(id, [token], ["plain"], [f" {token}"], [{token: -1.0}] if logprobs else None, finish)


async def tell(streams: int, steps: int, logprobs: bool = False) -> list[list[Any]]:
    loop, heard = asyncio.get_running_loop(), [Heard() for _ in range(streams)]
    box = Outbox(lambda function: loop.call_soon_threadsafe(function))  # type: ignore[arg-type]

    def engine() -> None:
        for step in range(steps):
            finish = "length" if step == steps - 1 else None
            box.add([(one, str(i), said(str(i), step, finish, logprobs)) for i, one in enumerate(heard)])  # type: ignore[misc]

    await asyncio.to_thread(engine)
    async with asyncio.timeout(60):
        while any(not one.items or one.items[-1].finish_reason is None for one in heard):
            await asyncio.sleep(0.001)
    return [one.items for one in heard]


@pytest.mark.parametrize("logprobs", [False, True])
def test_nothing_is_lost_or_out_of_order_where_many_are_open(logprobs: bool) -> None:
    for items in asyncio.run(tell(FEW + 8, 50, logprobs)):
        assert [t for e in items for t in e.tokens] == list(range(50))
        assert "".join(t for e in items for t in e.texts) == "".join(f" {i}" for i in range(50))
        assert all(len(e.kinds) == len(e.tokens) == len(e.texts) for e in items)
        assert [entry for e in items for entry in e.logprobs or ()] == ([{i: -1.0} for i in range(50)] if logprobs else [])
        assert [e.finish_reason for e in items] == [None] * (len(items) - 1) + ["length"]


def test_what_waits_is_bundled_where_many_are_open_and_only_there() -> None:
    for streams, bundled in ((FEW, False), (FEW + 1, True)):
        heard = [Heard() for _ in range(streams)]
        waiting: list[Any] = []
        box = Outbox(waiting.append)
        for step in range(3):  # the loop has no time for them
            box.add([(one, str(i), said(str(i), step)) for i, one in enumerate(heard)])  # type: ignore[misc]
        assert len(waiting) == 1

        async def hand_over(call: Any) -> None:
            call()

        asyncio.run(hand_over(waiting[0]))
        assert {len(one.items) for one in heard} == ({1} if bundled else {3})
        assert [t for e in heard[0].items for t in e.tokens] == [0, 1, 2]


def test_an_error_ends_a_stream_behind_what_was_said() -> None:
    heard, waiting = [Heard() for _ in range(FEW + 1)], list[Any]()
    box = Outbox(waiting.append)
    box.add([(one, str(i), said(str(i), 7)) for i, one in enumerate(heard)])  # type: ignore[misc]
    box.add([(heard[0], "0", EngineError("gone"))])  # type: ignore[list-item]

    async def hand_over() -> None:
        waiting[0]()

    asyncio.run(hand_over())
    assert [type(item) for item in heard[0].items] == [Event, EngineError] and len(heard[1].items) == 1
