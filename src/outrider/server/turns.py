"""Places in the engine, sequence by sequence, so that nobody waits for another's long answers.

`places` sequences run at once. While several clients are about, each may hold its share of them; a client that holds none finds
one of the `spare` places. So a client alone has the whole engine, a call for eight answers beside others gets them a few at a
time, and whoever asks for one answer begins at once. Clients that wait take turns. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

SPARE = 2  # the engine has as many sequences more than `--max-concurrent`
RECENT_S = 10.0  # a client is about while it has something here, and so long after


@dataclass(order=True)
class _Waiting:
    priority: int  # lower comes first, among the sequences of its client
    number: int
    turn: asyncio.Future[None] = field(compare=False)


class Turns:
    def __init__(self, places: int, spare: int = SPARE, clock: Callable[[], float] = time.monotonic) -> None:
        self._places, self._spare, self._clock = places, spare, clock
        self._held: dict[str, int] = {}
        self._waiting: dict[str, list[_Waiting]] = {}  # in the order of turns
        self._seen: dict[str, float] = {}
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def would_wait(self, client: str) -> bool:
        return bool(self._waiting.get(client)) or not self._may(client)

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
        self._seen[client] = self._clock()
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

    def _may(self, client: str) -> bool:
        mine, all_held = self._held.get(client, 0), sum(self._held.values())
        if not mine:
            return all_held < self._places + self._spare
        now = self._clock()
        self._seen = {c: t for c, t in self._seen.items() if now - t < RECENT_S}
        about = len({client, *self._held, *self._waiting, *self._seen})
        return all_held < self._places and mine < max(1, self._places // about)

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
