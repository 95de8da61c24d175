"""Places in the engine, sequence by sequence, so that nobody waits for another's long answers.

`places` sequences run at once. While several clients are about, each may hold its share of them; a client that holds
none finds one of the `spare` places. So a client alone has the whole engine, a call for eight answers beside others
gets them a few at a time, and whoever asks for one answer begins at once. Clients that wait take turns. Lives on the
event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .fair import Places

SPARE = 2  # the engine has as many sequences more than `--max-concurrent`
RECENT_S = 10.0  # a client is about while it has something here, and so long after


class TurnQueue(Places):
    def __init__(self, places: int, spare: int = SPARE, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._places, self._spare, self._clock = places, spare, clock
        self._seen: dict[str, float] = {}

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def would_wait(self, client: str) -> bool:
        return bool(self._waiting.get(client)) or not self._may(client)

    def release(self, client: str) -> None:
        self._seen[client] = self._clock()
        super().release(client)

    def _may(self, client: str) -> bool:
        mine, all_held = self._held.get(client, 0), sum(self._held.values())
        if not mine:
            return all_held < self._places + self._spare
        now = self._clock()
        self._seen = {c: t for c, t in self._seen.items() if now - t < RECENT_S}
        about = len({client, *self._held, *self._waiting, *self._seen})
        return all_held < self._places and mine < max(1, self._places // about)
