"""A gate with a few places that clients take in turn: one client's long queue delays that client only.

A client is an API key, or an address where there are no keys. Clients that wait are served round robin; within a client
first come, first served. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from .errors import ApiError

T = TypeVar("T")


class FairGate:
    def __init__(self, places: int, most_waiting: int, what: str, each: int = 1) -> None:
        """`most_waiting`: of one client. `what`: named in the refusal. `each`: places that one client may hold."""
        self._free, self._most, self._what, self._each = places, most_waiting, what, each
        self._held: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order of turns

    async def acquire(self, client: str) -> None:
        queue = self._waiting.get(client, deque())
        if len(queue) >= self._most:
            message = f"{len(queue)} requests of this client wait for {self._what} already."
            raise ApiError(429, message, retry_after=1, code="too_many_requests")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._waiting[client] = queue
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(client)  # the place came at the moment of the cancellation
            else:
                self._forget(client, turn)
            raise

    def release(self, client: str) -> None:
        self._free += 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        self._serve()

    @asynccontextmanager
    async def enter(self, client: str) -> AsyncIterator[None]:
        await self.acquire(client)
        try:
            yield
        finally:
            self.release(client)

    def _forget(self, client: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(client)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[client]

    def _serve(self) -> None:
        while self._free:
            client = next((c for c in self._waiting if self._held.get(c, 0) < self._each), None)
            if client is None:
                return
            queue = self._waiting.pop(client)
            turn = queue.popleft()
            if queue:
                self._waiting[client] = queue  # to the end of the round
            if not turn.done():
                self._free -= 1
                self._held[client] = self._held.get(client, 0) + 1
                turn.set_result(None)


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
