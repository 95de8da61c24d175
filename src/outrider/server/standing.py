"""Decides which clients give way to others: those that leave requested answers unread, or open connections without a
request.

Each client has a number that halves every `HALF_LIFE_S`: abandoned answers, and connections without an answer, add to
it; answers read to the end subtract. Above `TOLERATED` the client is in the background: when rows are expensive, the
scheduler gives it a part in every eighth step while others run. Stopping an answer now and then is not enough.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from math import log2

HALF_LIFE_S = 30.0
TOLERATED = 8.0
UNREAD_TOKENS = 16  # computed for nothing: as much as an answer that was left
MAX_CLIENTS = 4096  # those that wasted something last


@dataclass(frozen=True)
class Waste:
    amount: float
    at: float  # seconds of the clock

    def now(self, now: float) -> float:
        return self.amount * 0.5 ** ((now - self.at) / HALF_LIFE_S)


class Standing:
    """Noted on the event loop; `background` may be read by any thread."""

    def __init__(self) -> None:
        self._waste: OrderedDict[str, Waste] = OrderedDict()  # by client, the latest last
        self._until: Mapping[str, float] = {}  # when a client leaves the background; replaced, never changed

    def left(self, client: str, unread_tokens: int) -> None:
        """Records that a client left an answer, and how many of its tokens it did not read."""
        self._add(client, 1.0 + unread_tokens / UNREAD_TOKENS)

    def unused(self, client: str) -> None:
        """Records a connection that ended without an answer, or with refusals only."""
        self._add(client, 1.0)

    def read(self, client: str) -> None:
        """Records that a client read an answer to its end."""
        if client in self._waste:
            self._add(client, -1.0)

    def background(self) -> frozenset[str]:
        """The clients that give way to others now."""
        until = self._until
        if not until:
            return frozenset()
        now = time.monotonic()
        return frozenset(client for client, end in until.items() if end > now)

    def _add(self, client: str, amount: float) -> None:
        now = time.monotonic()
        earlier = self._waste.pop(client, Waste(0.0, now))
        waste = Waste(max(0.0, earlier.now(now) + amount), now)
        if waste.amount > 0.0:
            self._waste[client] = waste
        if len(self._waste) > MAX_CLIENTS:
            self._waste.popitem(last=False)
        if waste.amount <= TOLERATED and client not in self._until:
            return
        until = {other: end for other, end in self._until.items() if end > now and other != client}
        if waste.amount > TOLERATED:
            until[client] = now + HALF_LIFE_S * log2(waste.amount / TOLERATED)
        self._until = until
