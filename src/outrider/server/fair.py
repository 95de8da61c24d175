"""Places that clients take in turn: one client's long queue delays that client only.

A client is an API key, or an address where there are no keys. Clients that wait are served round robin; within a client
by priority, then first come, first served. All of it belongs to the event loop, except the work that `FairExecutor`
runs in its threads.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar, cast

from .errors import ApiError

T = TypeVar("T")
MAX_RETRY_S = 600  # the longest Retry-After; clients that are told more give up


class WaitEstimate:
    """How long it takes until places are free, from how long they were held lately: the seconds from one release to the
    next are the seconds that a place is held, divided by how many are held at once. Long ones count for more: they are
    the ones that are waited for."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def held(self, seconds: float, at_once: int) -> None:
        """A place was held so long, as one of `at_once`."""
        self._sum = 0.8 * self._sum + seconds * seconds / max(1, at_once)
        self._weight = 0.8 * self._weight + seconds

    def until_free(self, places: int = 1) -> int:
        """Whole seconds, for Retry-After."""
        return min(MAX_RETRY_S, max(1, round(places * self._sum / self._weight))) if self._weight else 1


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
        self._estimate, self._since = WaitEstimate(), dict[str, float]()

    async def acquire(self, client: str, priority: int = 0) -> None:
        waiting = len(self._waiting.get(client, ()))
        if waiting >= self._most:
            message = f"{waiting} requests of this client wait for {self._what} already."
            raise ApiError(
                429, message, retry_after=self._estimate.until_free(len(self._waiting)), code="too_many_requests"
            )
        await super().acquire(client, priority)
        self._since[client] = time.monotonic()

    def release(self, client: str) -> None:
        began = self._since.pop(client, None)
        if began is not None:
            self._estimate.held(time.monotonic() - began, sum(self._held.values()))
        super().release(client)

    def _may(self, client: str) -> bool:
        return sum(self._held.values()) < self._places and client not in self._held

    @asynccontextmanager
    async def enter(self, client: str) -> AsyncIterator[None]:
        await self.acquire(client)
        try:
            yield
        finally:
            self.release(client)


@dataclass(eq=False)
class _Piece:
    """Work for a thread, and who waits for what comes of it."""

    work: Callable[[], object]
    answer: asyncio.Future[object]


class _ClientQueue:
    """Threads and the work that waits for them. A thread goes from one piece to the next by itself, each client in its
    turn and one at a time; what is done goes back to the event loop together. So a hundred small pieces wake threads
    and loop a few times."""

    def __init__(self, threads: int, most_waiting: int, name: str) -> None:
        self._threads, self._idle, self._most = ThreadPoolExecutor(threads, name), threads, most_waiting
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Piece]] = {}  # in the order of turns
        self._busy: set[str] = set()  # clients that a thread works for
        self._done: list[tuple[_Piece, object, BaseException | None]] = []
        self._estimate = WaitEstimate()

    async def run(self, client: str, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        piece = _Piece(work, loop.create_future())
        with self._lock:
            waiting = self._waiting.setdefault(client, deque())
            if len(waiting) >= self._most:
                message = f"{len(waiting)} requests of this client wait for being read already."
                raise ApiError(
                    429, message, retry_after=self._estimate.until_free(len(self._waiting)), code="too_many_requests"
                )
            waiting.append(piece)
            start = bool(self._idle) and client not in self._busy
            self._idle -= start
        if start:
            self._threads.submit(self._work, loop)
        try:
            return cast(T, await piece.answer)
        except asyncio.CancelledError:
            self._forget(client, piece)
            raise

    def close(self) -> None:
        with self._lock:
            left, self._waiting = [piece for pieces in self._waiting.values() for piece in pieces], {}
        for piece in left:
            piece.answer.cancel()
        self._threads.shutdown(wait=False)

    def _forget(self, client: str, piece: _Piece) -> None:
        with self._lock:
            waiting = self._waiting.get(client, ())
            if piece in waiting:
                self._waiting[client].remove(piece)
                if not self._waiting[client]:
                    del self._waiting[client]

    # ---- on a thread

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while (taken := self._take()) is not None:
            client, piece = taken
            result: object = None
            error: BaseException | None = None
            began = time.monotonic()
            try:
                result = piece.work()
            except BaseException as e:
                error = e
            with self._lock:
                self._estimate.held(time.monotonic() - began, len(self._busy))
                self._busy.remove(client)
                self._done.append((piece, result, error))
                first = len(self._done) == 1
            del taken, piece, result, error  # a body may be megabytes
            if first:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(self._tell)

    def _take(self) -> tuple[str, _Piece] | None:
        """The first piece of the first client in the round whom no other thread works for."""
        with self._lock:
            client = next((c for c in self._waiting if c not in self._busy), None)
            if client is None:
                self._idle += 1
                return None
            pieces = self._waiting.pop(client)
            piece = pieces.popleft()
            if pieces:
                self._waiting[client] = pieces  # to the end of the round
            self._busy.add(client)
            return client, piece

    # ---- on the loop

    def _tell(self) -> None:
        with self._lock:
            done, self._done = self._done, []
        for piece, result, error in done:
            if piece.answer.done():
                continue  # whoever asked has left
            if isinstance(error, StopIteration):  # a future takes no such exception
                piece.answer.set_exception(RuntimeError(f"the work of a request ended with {error!r}"))
            elif error is not None:
                piece.answer.set_exception(error)
            else:
                piece.answer.set_result(result)


class FairExecutor:
    """A few threads that clients take in turn, for work that would hold up the event loop: reading bodies, tokenising.
    What is long has a thread of its own, so that what is short never waits behind it."""

    def __init__(self, threads: int, most_waiting: int) -> None:
        self._lanes = {
            False: _ClientQueue(threads, most_waiting, "outrider-desk"),
            True: _ClientQueue(1, most_waiting, "outrider-desk-long"),
        }

    async def run(self, client: str, work: Callable[[], T], long: bool = False) -> T:
        """One who is cancelled keeps the thread until the work is done: a thread can't be stopped."""
        return await self._lanes[long].run(client, work)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
