"""Places that clients take in turn: one client's long queue delays that client only.

A client is an API key, or an address where there are no keys. Clients that wait are served round robin; within a client by
priority, then first come, first served. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from .errors import ApiError

T = TypeVar("T")


@dataclass(order=True)
class _Waiting:
    priority: int  # lower comes first, among those of its client
    number: int
    turn: asyncio.Future[None] = field(compare=False)


class Places(ABC):
    """Places that clients hold and wait for."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._waiting: dict[str, list[_Waiting]] = {}  # in the order of turns
        self._numbers = itertools.count()

    @abstractmethod
    def _may(self, client: str) -> bool:
        """Whether a place is there for this client."""

    async def acquire(self, client: str, priority: int = 0) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        mine = _Waiting(priority, next(self._numbers), turn)
        bisect.insort(self._waiting.setdefault(client, []), mine)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(client)  # the place came at the moment of the cancellation
            else:
                self._forget(client, mine)
            raise

    def release(self, client: str) -> None:
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        self._serve()

    def _forget(self, client: str, mine: _Waiting) -> None:
        queue = self._waiting.get(client, [])
        if mine in queue:
            queue.remove(mine)
        if not queue:
            self._waiting.pop(client, None)

    def _serve(self) -> None:
        """Let in, one at a time, the first in the round who may come."""
        while True:
            client = next((c for c in self._waiting if self._may(c)), None)
            if client is None:
                return
            queue = self._waiting.pop(client)
            turn = queue.pop(0).turn
            if queue:
                self._waiting[client] = queue  # to the end of the round
            if not turn.done():
                self._held[client] = self._held.get(client, 0) + 1
                turn.set_result(None)


class FairGate(Places):
    """A few places, of which each client may hold one."""

    def __init__(self, places: int, most_waiting: int, what: str) -> None:
        """`most_waiting`: of one client. `what`: named in the refusal."""
        super().__init__()
        self._places, self._most, self._what = places, most_waiting, what

    async def acquire(self, client: str, priority: int = 0) -> None:
        waiting = len(self._waiting.get(client, ()))
        if waiting >= self._most:
            message = f"{waiting} requests of this client wait for {self._what} already."
            raise ApiError(429, message, retry_after=1, code="too_many_requests")
        await super().acquire(client, priority)

    def _may(self, client: str) -> bool:
        return sum(self._held.values()) < self._places and client not in self._held

    @asynccontextmanager
    async def enter(self, client: str) -> AsyncIterator[None]:
        await self.acquire(client)
        try:
            yield
        finally:
            self.release(client)


class Desk:
    """A few threads that clients take in turn, for work that would hold up the event loop: reading bodies, tokenising.
    What is long has a thread of its own, so that what is short never waits behind it."""

    def __init__(self, threads: int, most_waiting: int) -> None:
        self._lanes = {long: (FairGate(n, most_waiting, "being read"), ThreadPoolExecutor(n, f"outrider-desk{'-long' * long}"))
                       for long, n in ((False, threads), (True, 1))}  # fmt: skip

    async def run(self, client: str, work: Callable[[], T], long: bool = False) -> T:
        """One who is cancelled keeps the place until the work is done: a thread can't be stopped."""
        gate, threads = self._lanes[long]
        await gate.acquire(client)
        loop = asyncio.get_running_loop()
        future = threads.submit(work)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(gate.release, client))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        for _, threads in self._lanes.values():
            threads.shutdown(wait=False, cancel_futures=True)
