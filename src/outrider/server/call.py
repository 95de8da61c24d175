"""A submitted job. Its events are written as they come, until the end, the deadline or the client's disconnect.

A disconnect, a client that does not read, a time-out and a shutdown all end in `Call.close()`, which aborts running
sequences and frees their places.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..engine.engine import Event
from ..engine.step import Request as EngineRequest
from ..types import OutriderError
from .answer import JSON_TYPE, Answer, Wire
from .errors import ApiError, shutting_down
from .model_pool import LoadedModel
from .runner import EngineError, RequestStream

if TYPE_CHECKING:
    from .app import Server

log = logging.getLogger("outrider.server")
KEEP_ALIVE_S = 15.0
PROGRESS_COMMENT_S = 5.0  # between heartbeats during prefill; they report its progress
FEW_SCORED = 64  # maximum tokens with log-probabilities that are rendered on the event loop
T = TypeVar("T")


@dataclass(frozen=True)
class TimeLimit:
    """Limits each phase of a request: waiting, a prompt without progress, the answer."""

    arrived: float  # by time.monotonic()
    seconds: float


class Call:
    """Hands the job's sequences to the engine, each in its turn: the caller waits for the first, the others follow
    while it runs. resources: the call's model and places, returned at its end."""

    def __init__(
        self,
        server: Server,
        model: LoadedModel,
        answer: Answer,
        *,
        wire: Wire,
        resources: ExitStack,
        route: str,
        limit: TimeLimit,
    ) -> None:
        self._server = server
        self._model = model
        self._client = answer.job.requests[0].client
        self.answer = answer
        self.wire = wire
        self._resources = resources
        self._route = route
        self._job = answer.job
        self._timeout = limit.seconds
        self._began = time.monotonic()
        self.deadline = limit.arrived + limit.seconds
        self._stream = RequestStream(model.runner, (r.id for r in self._job.requests))
        self._holding: set[str] = set()  # requests with a place in the engine
        self._others: asyncio.Task[None] | None = None
        self._begun = self._closed = self._answering = False
        self._failed = False  # ended by an internal error or by the deadline
        self._read: tuple[int, int] | None = None  # prefill progress at the last look
        self.extended: Callable[[float], None] = lambda deadline: None
        resources.callback(self._end)

    # ---- to the engine

    async def begin(self) -> None:
        """Waits for the client's turn and hands the job to the engine, once."""
        if not self._begun:
            try:
                await self._submit(self._job.requests[0])
            except (OutriderError, EngineError) as e:
                raise self._failure(e) from e
            if len(self._job.requests) > 1:
                self._others = asyncio.ensure_future(self._submit_others())
            self._begun = True
            self._server.metrics.queued.observe(time.monotonic() - self._began)

    def _failure(self, error: OutriderError | EngineError) -> ApiError:
        self._failed = True
        if isinstance(error, OutriderError):
            return ApiError(400, str(error), code="request_failed")
        return shutting_down() if self._server.admission.closing else ApiError(500, f"{error}.", code="engine_error")

    async def _submit_others(self) -> None:
        for request in self._job.requests[1:]:
            try:
                await self._submit(request)
            except (OutriderError, EngineError) as e:
                self._stream.put(request.id, e)
                return

    async def _submit(self, request: EngineRequest) -> None:
        await self._model.turns.acquire(self._client, self._job.body.priority or 0)
        self._holding.add(request.id)
        await self._model.runner.submit(request, self._stream)

    def _release(self, id: str) -> None:
        if id in self._holding:
            self._holding.remove(id)
            self._model.turns.release(self._client)

    def _end(self) -> None:
        if self._others is not None:
            self._others.cancel()
        self._stream.close()
        for id in list(self._holding):
            self._release(id)

    def _progress(self) -> tuple[int, int] | None:
        """Prompt tokens of this job that are computed, and their total, as last published; None: no prompt is in
        prefill."""
        published = self._model.runner.progress
        progress = [published[r.id] for r in self._job.requests if r.id in published]
        if not any(p.prompt_left for p in progress):
            return None
        return sum(p.prompt_done for p in progress), sum(len(p.request.prompt) for p in progress)

    # ---- from the engine

    async def whole(self) -> bytes:
        """The body of the answer. Many log-probabilities are rendered off the event loop."""
        try:
            async for event in self._events():
                if event is not None:
                    self.answer.take(event)

            def render() -> bytes:
                return self.wire.body(self.answer)

            return await asyncio.to_thread(render) if self.answer.scored_tokens > FEW_SCORED else render()
        finally:
            self.close()

    async def chunks(self) -> AsyncIterator[str]:
        """The stream of the answer. Errors after the first byte are events of the stream."""
        wire = self.wire
        answer = self.answer
        try:
            opening = wire.opening(answer)
            if opening:
                yield opening
            try:
                async for event in self._events():
                    if event is None:
                        yield self._sign_of_life()
                        continue
                    new = answer.take(event)
                    text = "" if new is None else wire.delta(answer, *new)
                    if text:
                        yield text  # one cycle, one write
                end = wire.closing(answer)
            except ApiError as e:
                self._server.metrics.requests.labels(self._route, str(e.status)).inc()
                end = wire.error(e)
            self.close()  # before the last chunk: a client may send its next request as soon as it has read that
            yield end
        finally:
            self.close()

    def _sign_of_life(self) -> str:
        progress = ""
        if self._read is not None and self.wire.media_type == "text/event-stream":
            num_read, total = self._read
            progress = f": prompt {num_read} of {total} tokens\n\n"
        return progress + self.wire.still_working

    async def _events(self) -> AsyncIterator[Event | None]:
        """The engine's events; None as a heartbeat after a while without any."""
        waiting = asyncio.ensure_future(self.begin())
        try:
            while not (await asyncio.wait([waiting], timeout=min(self._left(), KEEP_ALIVE_S)))[0]:
                yield None
            waiting.result()
            stream = self._stream
            while stream.open and not self.answer.finished:
                event = await stream.next(min(self._left(), KEEP_ALIVE_S if self._answering else PROGRESS_COMMENT_S))
                if event is not None and not self._answering:
                    self._answering = True
                    self._read = None
                    self._extend()
                if event is not None and event.finish_reason is not None:
                    self._release(event.id)
                yield event
        except (OutriderError, EngineError) as e:  # discovered while running
            raise self._failure(e) from e
        finally:
            waiting.cancel()

    def _extend(self) -> None:
        self.deadline = time.monotonic() + self._timeout
        self.extended(self.deadline)

    def _left(self) -> float:
        """Seconds to the deadline. Prefill moves the deadline on: limits are for waiting and for answers."""
        if not self._answering:
            progress = self._progress()
            if progress is not None and progress != self._read:
                self._read = progress
                self._extend()
        left = self.deadline - time.monotonic()
        if left <= 0:
            self._failed = True
            raise timed_out(self._timeout)
        return left

    def close(self) -> None:
        """Ends the call for any reason; only the first time counts. Must not await: the task may be cancelled."""
        if self._closed:
            return
        self._closed = True
        metrics = self._server.metrics
        choices = self.answer.choices
        if self._stream.open:
            metrics.aborted.inc()
        self._note_standing()
        self._resources.close()
        for choice in choices:
            if choice.stats is not None:
                metrics.finished(choice.stats)
        metrics.end_to_end.observe(time.monotonic() - self._began)
        num_tokens = f"{self.answer.prompt_tokens} prompt + {sum(len(c.ids) for c in choices)} new tokens"
        seconds = time.monotonic() - self._began
        reasons = ",".join(c.finish or "abort" for c in choices)
        log.info("%s %d choice(s): %s in %.2f s, finished: %s", self._route, len(choices), num_tokens, seconds, reasons)

    def _note_standing(self) -> None:
        """Records how much of the answer its client read (standing.py)."""
        standing = self._server.pool.standing
        if self.answer.finished:
            standing.read(self._client)
        elif self._begun and not self._failed and not self._server.admission.closing:
            unread = self._stream.num_unread_tokens
            if not self._job.body.stream:
                unread += self.answer.new_tokens
            standing.left(self._client, unread)


class EventStream(StreamingResponse):
    """A streamed response that ends at the call's deadline even while a write blocks, and closes its call even if the
    client left before the first chunk. A failure that the stream cannot express cuts the connection, so that clients
    try again."""

    def __init__(self, call: Call, content: AsyncIterator[str | bytes], media_type: str) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type=media_type, headers=headers)
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        grace = 1.0  # to a client that reads, the call itself reports its deadline first
        try:
            async with asyncio.timeout_at(self._call.deadline + grace) as limit:  # the loop's clock is time.monotonic

                def extended(deadline: float) -> None:
                    with suppress(RuntimeError):  # already over
                        limit.reschedule(deadline + grace)

                self._call.extended = extended
                await super().__call__(scope, receive, send)
        except (TimeoutError, ApiError) as e:
            why = e.reason if isinstance(e, ApiError) else "deadline"
            log.info("a streamed answer was cut off: %s", why)
            abort = scope.get("state", {}).get("abort")
            if abort is not None:
                abort()
        finally:
            self._call.close()


async def spaced(work: asyncio.Future[bytes]) -> AsyncIterator[bytes]:
    """Sends the status, and spaces before the JSON, while an unstreamed answer takes long: clients and proxies give up
    on a connection that is silent for minutes."""
    try:
        yield b" "
        while not (await asyncio.wait([work], timeout=KEEP_ALIVE_S))[0]:
            yield b" "
        yield work.result()
    finally:
        work.cancel()


async def whole(request: Request, call: Call) -> Response:
    """The answer in one piece; if it takes long and is JSON, with heartbeats before it."""
    work = asyncio.ensure_future(unless_gone(request, call.whole()))
    media_type = call.wire.whole_type
    try:
        if (await asyncio.wait([work], timeout=KEEP_ALIVE_S if media_type == JSON_TYPE else None))[0]:
            return Response(work.result(), media_type=media_type)
    except BaseException:
        work.cancel()
        call.close()
        raise
    return EventStream(call, spaced(work), "application/json")


def timed_out(timeout: float) -> ApiError:
    return ApiError(408, f"The request took longer than {timeout:g} seconds.", code="timeout")


class ClientGone(ApiError):
    def __init__(self) -> None:
        super().__init__(499, "The client went away.", code="client_gone")


async def unless_gone(request: Request, work: Coroutine[object, object, T]) -> T:
    """Awaits `work`, but cancels it when the client disconnects."""

    async def departure() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(departure())
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
        del task, gone, other  # else an error, its traceback, this frame and the task would form a cycle
