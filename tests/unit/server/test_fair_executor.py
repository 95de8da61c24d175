"""Work beside the event loop: clients take turns, what is done comes back together, nothing is left over."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.waiting import PATIENCE, until

from outrider.server.errors import ApiError
from outrider.server.fair import FairExecutor


async def behind(executor: FairExecutor, client: str) -> tuple[asyncio.Task[Any], threading.Event]:
    """A piece of work that keeps the client's thread until it is told to end."""
    begun = threading.Event()
    end = threading.Event()
    task = asyncio.create_task(executor.run(client, lambda: (begun.set(), end.wait(PATIENCE))[1]))
    await asyncio.sleep(0)
    assert await asyncio.to_thread(begun.wait, PATIENCE)
    return task, end


def test_clients_take_turns_and_answers_come_back_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        executor = FairExecutor(1, 100)
        order = list[str]()
        results = list[int]()
        tell = executor._tell
        monkeypatch.setattr(executor, "_tell", lambda: (results.append(len(executor._done)), tell())[1])
        first, end = await behind(executor, "a")
        work = [asyncio.create_task(executor.run(who, lambda who=who: order.append(who))) for who in "aaaabb"]  # type: ignore[misc]
        await asyncio.sleep(0)
        end.set()
        until(lambda: len(executor._done) == 7)  # the loop is busy while the thread works
        await asyncio.gather(first, *work)
        assert order in (list("ababaa"), list("bababa"[:2] + "abaa")), "the one with more to do waits for itself"
        assert results == [7]
        assert not executor._waiting and not executor._busy and executor._idle == 1
        executor.close()

    asyncio.run(run())


def test_who_leaves_is_not_worked_for_and_too_many_are_refused() -> None:
    async def run() -> None:
        executor = FairExecutor(1, 2)
        done = list[int]()
        first, end = await behind(executor, "a")
        waiting = [asyncio.create_task(executor.run("a", lambda i=i: done.append(i))) for i in range(2)]  # type: ignore[misc]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="2 requests of this client wait"):
            await executor.run("a", lambda: None)
        waiting[0].cancel()
        await asyncio.sleep(0)
        other = asyncio.create_task(executor.run("b", lambda: 1 / 0))
        await asyncio.sleep(0)
        end.set()
        assert await first
        await waiting[1]
        with pytest.raises(ZeroDivisionError):
            await other
        assert done == [1]
        held, end = await behind(executor, "a")
        late = asyncio.create_task(executor.run("b", lambda: None))
        await asyncio.sleep(0)
        executor.close()
        with pytest.raises(asyncio.CancelledError):
            await late
        end.set()
        assert await held

    asyncio.run(run())
