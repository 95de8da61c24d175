"""Passes the events of requests from the engine's thread to the event loop, which writes them to their streams.

Both threads share the GIL, and writing one step's events to many streams may take longer than the step. So:

- a few open streams are written to after every step, and all streams when the engine is idle (`flush`);
- many streams are written to while the engine waits for its device (`open`), for at most a share of a step;
  streams that begin or end need not wait for that and come first (`hurry`), then those that have waited longest;
- events of one request from several steps, if not yet written, are merged into one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from ..engine.engine import Event

log = logging.getLogger("outrider")
FEW_STREAMS = 16  # maximum streams that are written to after every step
SHARE = 0.3  # share of the time between two windows that is for writing
MAX_WAIT_S = 0.05  # seconds that an event should wait at most
# seconds that writing to one stream takes, until that was measured; and at least
WRITE_S = 1e-4
MIN_WRITE_S = 1e-5


Item = Event | Exception  # what a stream receives


class Receiver(Protocol):
    def put(self, id: str, item: Item) -> None: ...


class Outbox:
    def __init__(self, call_soon: Callable[[Callable[[], None]], None]) -> None:
        self._call_soon = call_soon
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[Receiver, list[Item]]] = {}  # by request, the longest waiting first
        self._known: set[str] = set()  # requests with at least one event
        self._soon: set[str] = set()  # waiting streams that begin or end
        self._writing = False  # the event loop is still writing
        self._opened = 0.0  # time of the last window
        self._between = 0.0  # recent seconds between two windows
        self._each = WRITE_S  # recent seconds of writing to one stream

    # ---- on the engine's thread

    def add(self, items: Sequence[tuple[Receiver, str, Item]]) -> None:
        with self._lock:
            for to, id, item in items:
                self._waiting.setdefault(id, (to, []))[1].append(item)
                ends = isinstance(item, Exception) or item.finish_reason is not None
                if ends or id not in self._known:
                    self._soon.add(id)
                    (self._known.discard if ends else self._known.add)(id)

    def forget(self, id: str) -> None:
        """Drops a request whose stream is closed."""
        with self._lock:
            self._waiting.pop(id, None)
            self._known.discard(id)
            self._soon.discard(id)

    def open(self, streams: int) -> None:
        """Begins a window for writing. streams: number of streams to write to."""
        now = time.perf_counter()
        gap = now - self._opened
        self._opened = now
        self._between = 0.8 * self._between + 0.2 * min(gap, MAX_WAIT_S)
        with self._lock:
            if self._writing or not self._waiting:
                return
            self._writing = True
        room = max(SHARE * self._between / self._each, len(self._waiting) * self._between / MAX_WAIT_S)
        self._call_soon(lambda: self._hand_over(None if streams <= FEW_STREAMS else max(1, round(room))))

    def hurry(self) -> None:
        """Writes streams that begin or end without waiting for the next window, which may come only after kernels are
        compiled."""
        with self._lock:
            if self._writing or not self._soon:
                return
            self._writing = True
            count = len(self._soon)
        self._call_soon(lambda: self._hand_over(count))

    def flush(self) -> None:
        """Writes all events at once."""
        if self._waiting:
            self._call_soon(lambda: self._hand_over(None))

    # ---- on the loop

    def _hand_over(self, most: int | None) -> None:
        """Writes to this many streams; None: to all, and step by step if they are few."""
        with self._lock:
            order = sorted(self._waiting, key=lambda id: id not in self._soon)[:most]
            deliveries = {id: self._waiting.pop(id) for id in order}
            self._soon.difference_update(order)
        apart = most is None and len(deliveries) <= FEW_STREAMS
        for id, (to, items) in deliveries.items():
            try:
                for item in items if apart else together(items):
                    to.put(id, item)
            except Exception:  # an error of one stream must not affect the others
                log.exception("failed to deliver events of request %s", id)
        loop = asyncio.get_running_loop()
        loop.call_soon(self._written, len(deliveries), time.thread_time())  # after the tasks that this woke

    def _written(self, count: int, began: float) -> None:
        if count:
            # may include other work of the loop
            each = min((time.thread_time() - began) / count, 1.5 * self._each)
            self._each = max(MIN_WRITE_S, 0.8 * self._each + 0.2 * each)
        with self._lock:
            self._writing = False


def together(items: Sequence[Item]) -> list[Item]:
    """Merges one request's events of several steps into one. An error behind them ends the stream."""
    events = [item for item in items if not isinstance(item, Exception)]
    errors = [item for item in items if isinstance(item, Exception)]
    if len(events) < 2:
        return [*events, *errors]
    logprobs = [e.logprobs for e in events if e.logprobs is not None]
    event = replace(
        events[-1],
        tokens=[token for e in events for token in e.tokens],
        kinds=[kind for e in events for kind in e.kinds],
        texts=[text for e in events for text in e.texts],
        logprobs=[entry for entries in logprobs for entry in entries] if logprobs else None,
        tree=next((e.tree for e in reversed(events) if e.tree is not None), None),
    )
    return [event, *errors]
