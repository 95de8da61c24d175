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
    def __init__(self, places: int, most_waiting: int, what: str) -> None:
        """`most_waiting`: of one client. `what`: named in the refusal."""
        self._free, self._places, self._most, self._what = places, places, most_waiting, what
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}  # in the order of turns

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    def would_wait(self, weight: int) -> bool:
        return bool(self._waiting) or min(weight, self._places) > self._free

    async def acquire(self, client: str, weight: int = 1) -> int:
        """Wait for `weight` places (all of them, if it asks for more than there are). Returns how many to release."""
        weight = min(weight, self._places)
        queue = self._waiting.setdefault(client, deque())
        if len(queue) >= self._most:
            message = f"{len(queue)} requests of this client wait for {self._what} already."
            raise ApiError(429, message, retry_after=1, code="too_many_requests")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append((weight, turn))
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(weight)  # the place came at the moment of the cancellation
            else:
                self._forget(client, weight, turn)
            raise
        return weight

    def release(self, weight: int) -> None:
        self._free += weight
        self._serve()

    @asynccontextmanager
    async def enter(self, client: str) -> AsyncIterator[None]:
        weight = await self.acquire(client)
        try:
            yield
        finally:
            self.release(weight)

    def _forget(self, client: str, weight: int, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(client)
        if queue is not None and (weight, turn) in queue:
            queue.remove((weight, turn))
            if not queue:
                del self._waiting[client]
        self._serve()

    def _serve(self) -> None:
        """Let in whoever's turn it is; one who needs more places than are free is waited for, so that it is not starved."""
        while self._waiting:
            client, queue = next(iter(self._waiting.items()))
            if not queue:
                del self._waiting[client]
                continue
            weight, turn = queue[0]
            if not turn.done() and weight > self._free:
                return
            queue.popleft()
            del self._waiting[client]
            if queue:
                self._waiting[client] = queue  # to the end of the round
            if not turn.done():
                self._free -= weight
                turn.set_result(None)


class Desk:
    """A few threads that clients take in turn, for work that would hold up the event loop: reading bodies, tokenising."""

    def __init__(self, threads: int, most_waiting: int) -> None:
        self._gate = FairGate(threads, most_waiting, "being read")
        self._threads = ThreadPoolExecutor(threads, "outrider-desk")

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """One who is cancelled keeps the place until the work is done: a thread can't be stopped."""
        weight = await self._gate.acquire(client)
        loop = asyncio.get_running_loop()
        future = self._threads.submit(work)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._gate.release, weight))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
