"""Places and threads that clients take in turn: one client's long queue delays that client only.

A client is an API key, or an address where there are no keys. Clients that wait are served round robin; within a client
by priority, then first come, first served. All of it belongs to the event loop, except the work that `FairExecutor`
runs in its threads.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Generic, Literal, TypeVar, cast

from .errors import ApiError

T = TypeVar("T")
MAX_RETRY_S = 600  # the longest Retry-After; clients that are told more give up


class WaitEstimate:
    """Estimates when places become free: the time between two releases is the time that a place was held lately,
    divided by the number held at once. Long ones count for more, since waiting is mostly for them."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def held(self, seconds: float, at_once: int) -> None:
        """Records that a place was held for so long, as one of `at_once`."""
        self._sum = 0.8 * self._sum + seconds * seconds / max(1, at_once)
        self._weight = 0.8 * self._weight + seconds

    def until_free(self, places: int = 1) -> int:
        """Whole seconds, for Retry-After."""
        return min(MAX_RETRY_S, max(1, round(places * self._sum / self._weight))) if self._weight else 1


class FairQueue(Generic[T]):
    """A queue in which clients take turns."""

    def __init__(self, most_waiting: int = sys.maxsize, what: str = "") -> None:
        """`most_waiting`: of one client. `what`: it waits for, named in a refusal."""
        self._most = most_waiting
        self._what = what
        self._of: dict[str, list[tuple[int, int, T]]] = {}  # by client: (priority, number, item)
        self._numbers = itertools.count()
        self.estimate = WaitEstimate()

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    @property
    def clients(self) -> list[str]:
        return list(self._of)

    def put(self, client: str, item: T, priority: int = 0) -> None:
        """priority: lower comes first, among those of its client."""
        waiting = len(self._of.get(client, ()))
        if waiting >= self._most:
            message = f"{waiting} requests of this client wait for {self._what} already."
            retry_after = self.estimate.until_free(len(self._of))
            raise ApiError(429, message, retry_after=retry_after, code="too_many_requests")
        bisect.insort(self._of.setdefault(client, []), (priority, next(self._numbers), item))

    def take(self, may: Callable[[str], bool]) -> tuple[str, T] | None:
        """The next item of the first eligible client in the round; the client goes to the end of the round."""
        client = next((c for c in self._of if may(c)), None)
        if client is None:
            return None
        items = self._of.pop(client)
        item = items.pop(0)[2]
        if items:
            self._of[client] = items
        return client, item

    def discard(self, client: str, item: T) -> None:
        left = [entry for entry in self._of.pop(client, ()) if entry[2] is not item]
        if left:
            self._of[client] = left

    def clear(self) -> list[T]:
        """Empties the queue; the items that waited."""
        items = [entry[2] for entries in self._of.values() for entry in entries]
        self._of = {}
        return items


class FairGate:
    """A few places, of which each client may hold one."""

    def __init__(self, places: int, most_waiting: int = sys.maxsize, what: str = "") -> None:
        self._places = places
        self._held: dict[str, list[float]] = {}  # by client: since when it has each of its places
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue(most_waiting, what)

    @property
    def _all_held(self) -> int:
        return sum(map(len, self._held.values()))

    def _may(self, client: str) -> bool:
        """Whether a place is there for this client."""
        return self._all_held < self._places and client not in self._held

    async def acquire(self, client: str, priority: int = 0) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(client, turn, priority)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(client)  # the place came at the moment of the cancellation
            else:
                self._waiting.discard(client, turn)
            raise

    def release(self, client: str) -> None:
        self._waiting.estimate.held(time.monotonic() - self._held[client][0], self._all_held)
        del self._held[client][0]
        if not self._held[client]:
            del self._held[client]
        self._serve()

    def _serve(self) -> None:
        while True:
            first = self._waiting.take(self._may)
            if first is None:
                return
            client, turn = first
            if not turn.done():
                self._held.setdefault(client, []).append(time.monotonic())
                turn.set_result(None)

    @asynccontextmanager
    async def enter(self, client: str) -> AsyncIterator[None]:
        await self.acquire(client)
        try:
            yield
        finally:
            self.release(client)


SPARE = 2  # the engine has as many sequences more than `--max-concurrent`
RECENT_S = 10.0  # a client is active while it has a request here, and for this long after


class TurnQueue(FairGate):
    """Places in the engine, one per sequence: `places` sequences run at once. While several clients are active, each
    may hold its share of them; a client that holds none can use one of the `SPARE` places. So a single client has the
    whole engine, and a client's first request starts at once."""

    def __init__(self, places: int) -> None:
        super().__init__(places)
        self._seen: dict[str, float] = {}  # when a client last gave back a place

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def would_wait(self, client: str) -> bool:
        return client in self._waiting.clients or not self._may(client)

    def release(self, client: str) -> None:
        self._seen[client] = time.monotonic()
        super().release(client)

    def _may(self, client: str) -> bool:
        num_held = len(self._held.get(client, ()))
        if num_held == 0:
            return self._all_held < self._places + SPARE
        now = time.monotonic()
        self._seen = {c: t for c, t in self._seen.items() if now - t < RECENT_S}
        about = len({client, *self._held, *self._waiting.clients, *self._seen})
        return self._all_held < self._places and num_held < max(1, self._places // about)


Piece = tuple[Callable[[], object], asyncio.Future[object]]  # work for a thread, and the future of its result


class FairExecutor:
    """A few threads that clients use in turn. A thread goes from one piece of work to the next by itself; what is done
    goes back to the event loop together. A hundred small pieces wake both a few times."""

    def __init__(self, threads: int, most_waiting: int, name: str = "outrider-reader") -> None:
        self._threads = ThreadPoolExecutor(threads, name)
        self._idle = threads
        self._lock = threading.Lock()
        self._waiting: FairQueue[Piece] = FairQueue(most_waiting, "being read")
        self._busy: set[str] = set()  # clients that a thread works for
        self._done: list[tuple[asyncio.Future[object], object, BaseException | None]] = []

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """Runs work in a thread. If the caller is cancelled, started work keeps its thread until its end."""
        loop = asyncio.get_running_loop()
        piece: Piece = (work, loop.create_future())
        with self._lock:
            self._waiting.put(client, piece)
            start = bool(self._idle) and client not in self._busy
            self._idle -= start
        if start:
            self._threads.submit(self._work, loop)
        try:
            return cast(T, await piece[1])
        except asyncio.CancelledError:
            with self._lock:
                self._waiting.discard(client, piece)
            raise
        finally:
            del piece  # an error of the work, its traceback, this frame and the future would be a cycle

    def close(self) -> None:
        with self._lock:
            left = self._waiting.clear()
        for _, answer in left:
            answer.cancel()
        self._threads.shutdown(wait=False)

    # ---- on a thread

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            with self._lock:
                next_piece = self._waiting.take(lambda client: client not in self._busy)
                if next_piece is None:
                    self._idle += 1
                    return
                client, (work, answer) = next_piece
                self._busy.add(client)
            result: object = None
            error: BaseException | None = None
            began = time.monotonic()
            try:
                result = work()
            except StopIteration as e:  # a future takes no such exception
                error = RuntimeError(f"the work of a request ended with {e!r}")
            except BaseException as e:
                error = e
            with self._lock:
                self._waiting.estimate.held(time.monotonic() - began, len(self._busy))
                self._busy.remove(client)
                self._done.append((answer, result, error))
                first = len(self._done) == 1
            del next_piece, work, answer, result, error  # a body may be megabytes
            if first:
                with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits any more
                    loop.call_soon_threadsafe(self._tell)

    # ---- on the loop

    def _tell(self) -> None:
        with self._lock:
            done = self._done
            self._done = []
        for answer, result, error in done:
            if answer.done():
                continue  # its caller has left
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)


Lane = Literal["short", "long", "media"]


def lanes(threads: int, most_waiting: int) -> dict[Lane, FairExecutor]:
    """Executors for work that would block the event loop: reading bodies, tokenising. Long work has its own thread;
    images and sound have several, which mostly wait for decoding processes."""
    num_threads: dict[Lane, int] = {"short": threads, "long": 1, "media": 8}
    return {lane: FairExecutor(n, most_waiting, f"outrider-reader-{lane}") for lane, n in num_threads.items()}
