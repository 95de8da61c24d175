"""The engine thread. The engine is single-threaded; everything that touches it happens here.

Commands (submit, abort) arrive through a queue and are executed between steps, so an abort takes effect within one
step. Events go to asyncio while the engine waits for its device (outbox.py). An exception in a step fails the requests
in it with an `EngineError`, and the thread continues; after three failing steps in a row with no request finished
between them it gives up and `healthy` turns false. While idle, the engine returns unused memory to the system.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from ..engine.engine import Engine, Event
from ..engine.step import Progress, Request
from ..types import OutriderError
from .errors import where
from .outbox import FEW_STREAMS, Item, Outbox
from .trim import trim

log = logging.getLogger("outrider.server")
MAX_FAILURES = 3
TIDY_S = 10.0  # seconds between searches for unused memory
MAX_DETACHED = 2  # concurrent prompts whose prefill continues after their client left
MIN_DETACHED_TOKENS = 256  # a prefill with fewer tokens left is not continued
RETRY_PREFIX_TOKENS = 256  # leading tokens by which a retry is recognised
# intervals of publishing and logging progress
PROGRESS_S = 0.25
LOG_S = 10.0
GIVE_WAY_S = 0.001  # maximum time of writing before the event loop's other tasks run
MAX_UNREAD_EVENTS = 128  # unread events per call at which its sequences pause
T = TypeVar("T")


class EngineError(Exception):
    """The engine failed under this request. The message is safe to show; the traceback is in the log."""


class RequestStream:
    """The events of a group of requests (the choices of one call), merged. Closing it aborts what still runs.

    A slow reader pauses its sequences: at `MAX_UNREAD_EVENTS` unread events a sequence stops until they are read."""

    def __init__(self, runner: Runner, ids: Iterable[str]) -> None:
        self._runner = runner
        self._items: deque[tuple[str, Item]] = deque()
        self._waiter: asyncio.Future[None] | None = None  # set while the reader waits
        self._alarm: asyncio.TimerHandle | None = (
            None  # one timer for many waits: checks whether the current one is too long
        )
        self._until = self._since = 0.0  # end of the current wait; start of writing without a wait
        self._paused: set[str] = set()
        self.open = set(ids)

    async def next(self, timeout: float) -> Event | None:
        """Returns the next event, or None after `timeout` seconds without one. Raises what the engine raised. There is
        one reader."""
        loop = asyncio.get_running_loop()
        if not self._items:
            await self._wait(timeout)
            self._since = loop.time()
        elif (
            loop.time() - self._since > GIVE_WAY_S
        ):  # a reader that catches up would write for long: let others run first
            await asyncio.sleep(0)
            self._since = loop.time()
        if not self._items:
            return None
        id, item = self._items.popleft()
        if self._paused and len(self._items) <= MAX_UNREAD_EVENTS // 4:
            for paused in self._paused & self.open:
                self._runner.pause(paused, False)
            self._paused.clear()
        if isinstance(item, Exception):
            self.open.discard(id)
            raise item
        if item.finish_reason is not None:
            self.open.discard(id)
        return item

    async def _wait(self, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        self._until = loop.time() + timeout
        if self._alarm is not None and self._alarm.when() > self._until:
            self._alarm.cancel()
            self._alarm = None
        if self._alarm is None:
            self._alarm = loop.call_at(self._until, self._ring, loop)
        self._waiter = loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._alarm = None
        if self._waiter is None:
            return  # the next wait starts it again
        if loop.time() < self._until:
            self._alarm = loop.call_at(self._until, self._ring, loop)
        elif not self._waiter.done():
            self._waiter.set_result(None)

    def put(self, id: str, item: Item) -> None:
        if id not in self.open:
            return
        self._items.append((id, item))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if len(self._items) >= MAX_UNREAD_EVENTS and id not in self._paused:
            self._paused.add(id)
            self._runner.pause(id, True)

    @property
    def num_unread_tokens(self) -> int:
        return sum(len(item.tokens) for _, item in self._items if not isinstance(item, Exception))

    def close(self) -> None:
        for id in self.open:
            self._runner.abort(id)
        self.open = set()
        self._items.clear()  # unread events may be megabytes, and the call that holds this may live on
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)  # wakes a waiting reader: the stream has ended
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None


class Runner:
    def __init__(
        self,
        engine: Engine,
        unused_s: float = 300.0,
        detached_s: float = 600.0,
        background: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        """`unused_s`: prefixes unused for this long are dropped and their memory is released. `detached_s`: how long a
        prompt's prefill continues after its client left. `background`: clients that give way to others."""
        self._engine = engine
        self._background = background
        self._unused_s = unused_s
        self._detached_s = detached_s
        self.detached: dict[str, float] = {}  # deadline of each prefill whose client left
        self.progress: dict[str, Progress] = {}  # of all requests, published for the event loop at intervals
        self._published = self._logged = 0.0
        self._told: dict[str, int] = {}  # prompt tokens computed at the last log line
        self._tidy_at = 0.0  # time of the next search for unused memory
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}  # used by the engine thread only
        self._outbox = Outbox(self._call_soon)
        self._written = False  # the current step left time for writing
        engine.meanwhile = self._meanwhile
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failures = 0
        self._stopping = False
        self.healthy = True

    def start(self) -> None:
        """Must be called on the event loop that will read the streams."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Aborts running requests and ends the thread. May be called twice."""
        self._stopping = True
        if self._thread.is_alive():
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join, 30.0)

    async def submit(self, request: Request, stream: RequestStream) -> None:
        """Returns when the engine has accepted the request. Raises OutriderError if the engine refuses it."""
        if not self.healthy and not self._stopping:
            raise EngineError("the engine has stopped after repeated failures; restart the server")
        try:
            await self.call(lambda _: self._submit(request, stream))
        except BaseException:
            stream.close()  # the caller went away, or a sibling request was refused
            raise

    def abort(self, id: str) -> None:
        """Drops a request whose reader left. Its prefill may run to the end, for a retry."""
        self._commands.put(lambda: self._abort(id, may_detach=True))

    def pause(self, id: str, on: bool) -> None:
        self._commands.put(lambda: self._engine.pause(id, on))

    def later(self, function: Callable[[Engine], None]) -> None:
        """Like `call`, for callers that cannot wait."""
        self._commands.put(lambda: function(self._engine))

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Runs a function on the engine between two steps (an audit, a count)."""
        if self._stopping:
            raise EngineError("the server is shutting down")  # nothing reads the queue any more
        done: Future[T] = Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return  # the caller has left
            try:
                done.set_result(function(self._engine))
            except Exception as e:
                done.set_exception(e)

        self._commands.put(command)
        return await asyncio.wrap_future(done)

    # ---- on the engine thread

    def _run(self) -> None:
        while self._carry_out():
            if self._engine.busy and self.healthy:
                self._step()
        running = list(self._streams.items())
        for id, _ in running:
            self._abort(id)
        self._streams = dict(running)
        self._deliver([(id, EngineError("the server is shutting down")) for id, _ in running])
        self._outbox.flush()

    def _carry_out(self) -> bool:
        """Carries out the commands that are here; with nothing to compute, waits for one. False: the thread ends.

        Commands that come meanwhile wait for the next step: texts that are scored send one after the other without end.
        """
        idle = not (self._engine.busy and self.healthy)
        if idle:
            self._outbox.flush()
            self.progress = {}
            self._published = 0.0
        for _ in range(max(self._commands.qsize(), int(idle))):
            try:
                command = self._commands.get(idle, max(0.0, self._tidy_at - time.monotonic()))
            except queue.Empty:
                self._tidy()
                break
            if command is None:
                return False
            command()
        return True

    def _tidy(self) -> None:
        self._tidy_at = time.monotonic() + TIDY_S
        try:
            num_bytes = self._engine.tidy(self._unused_s)
        except Exception as e:
            log.error("releasing memory failed: %s", where(e))
            return
        if num_bytes > 0:
            trim()
            log.info("released %d MB of unused K/V to the system", num_bytes >> 20)

    def _meanwhile(self) -> None:
        self._written = True
        self._outbox.open(len(self._streams))

    def _step(self) -> None:
        self._written = False
        try:
            self._engine.background = self._background()
            events = self._engine.step()
        except Exception as e:
            self._fail(e)
            return
        out: list[tuple[str, Item]] = [(e.id, e) for e in events]
        for i, event in enumerate(events):
            if event.finish_reason is None:
                continue
            if event.finish_reason == "error":
                failed = EngineError("the engine failed on this request")
                out[i] = (event.id, OutriderError(event.error) if event.error else failed)
            elif event.finish_reason != "abort":
                self._failures = 0
        self._publish()
        self._deliver(out)
        # If nothing runs on a device, or there is little to write, now is as good a time as any.
        if not self._written or len(self._streams) <= FEW_STREAMS:
            self._outbox.open(len(self._streams))
        else:
            self._outbox.hurry()

    def _fail(self, error: Exception) -> None:
        """Fails all sequences of a step that raised: which of them it corrupted is unknown."""
        self._engine.metrics.failed_steps += 1
        self._failures += 1
        # our own errors say in one line what the machine lacks
        reason = str(error) if isinstance(error, OutriderError) else where(error)
        log.error("engine step failed, and %d requests with it: %s", len(self._streams), reason)
        ids = list(self._streams)
        aborts: list[Callable[[], None]] = [partial(self._engine.abort, id) for id in (*ids, *self.detached)]
        for work in (*aborts, self._engine.check):
            try:
                work()
            except Exception as e:
                log.error("abort or audit failed after a failed step: %s", where(e))
                self.healthy = False
        self.detached.clear()
        self.healthy = self.healthy and self._failures < MAX_FAILURES
        self._deliver([(id, EngineError("the engine failed while this request was running")) for id in ids])
        self._outbox.flush()

    # ---- prefill without a client, and progress

    def _drop_detached(self, ids: Iterable[str]) -> None:
        for id in list(ids):
            del self.detached[id]
            self._engine.abort(id)  # computed pages stay in the prefix cache

    def _publish(self) -> None:
        """After a step: ends client-less prefills that are done, late or in the way, and publishes the progress of
        all."""
        now = time.monotonic()
        if self.detached:
            known = self._engine.progress()
            crowded = self._engine.metrics.waiting > 0
            over = [
                id
                for id, until in self.detached.items()
                if crowded or now > until or id not in known or not known[id].prompt_left
            ]
            self._drop_detached(over)
        if now - self._published >= PROGRESS_S:
            self._published = now
            self.progress = self._engine.progress()
        if now - self._logged >= LOG_S:
            before = self._told
            seconds = now - self._logged
            self._logged = now
            self._told = {id: p.prompt_done for id, p in self.progress.items() if p.prompt_left}
            for id, done in self._told.items():
                if id in before:
                    total = len(self.progress[id].request.prompt)
                    speed = (done - before[id]) / seconds
                    log.info("prefill: %d of %d tokens, %.0f tokens/s", done, total, speed)

    def _submit(self, request: Request, stream: RequestStream) -> None:
        if self.detached:
            self._give_way_to(request)
        try:
            self._engine.submit(request)
        except OutriderError:
            raise
        except Exception as e:
            log.error("the engine failed to accept a request: %s", where(e))
            raise EngineError("the engine could not take this request") from None
        self._streams[request.id] = stream

    def _give_way_to(self, request: Request) -> None:
        """Drops client-less prefills that have ended, and those that this request is a retry of."""
        progress = self._engine.progress()
        begin = (request.namespace, request.prompt[:RETRY_PREFIX_TOKENS])
        over: list[str] = []
        for id in self.detached:
            earlier = progress[id].request if id in progress else None
            if earlier is None or (earlier.namespace, earlier.prompt[:RETRY_PREFIX_TOKENS]) == begin:
                over.append(id)
        self._drop_detached(over)

    def _abort(self, id: str, may_detach: bool = False) -> None:
        if self._streams.pop(id, None) is None:
            return  # finished meanwhile
        self._outbox.forget(id)
        try:
            crowded = len(self.detached) >= MAX_DETACHED or self._engine.metrics.waiting
            known = self._engine.progress().get(id) if may_detach and self._detached_s > 0 and not crowded else None
            if known is not None and known.prompt_left >= MIN_DETACHED_TOKENS:
                self.detached[id] = time.monotonic() + self._detached_s
                log.info("a client left; its prefill continues for a retry")
                return
            self._engine.abort(id)
        except Exception as e:
            log.error("abort failed: %s", where(e))

    def _deliver(self, items: Sequence[tuple[str, Item]]) -> None:
        out: list[tuple[RequestStream, str, Item]] = []
        for id, item in items:
            stream = self._streams.get(id)
            if stream is None:
                continue  # aborted: no reader
            if isinstance(item, Exception) or item.finish_reason is not None:
                del self._streams[id]
            out.append((stream, id, item))
        if out:
            self._outbox.add(out)

    def _call_soon(self, function: Callable[[], None]) -> None:
        assert self._loop is not None, "Runner.start() was not called"
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            log.debug("the event loop is closed; an event was dropped")
