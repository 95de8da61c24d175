"""The app: routes and the models behind them. The steps of a request on its way to the engine are in intake.py.

Clients take turns at every stage (fair.py), so a client's requests delay only that client.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from .. import __version__
from ..engine.text import LONG_TEXT
from .answer import Json, Wire
from .batches import Batches
from .call import Call, EventStream, timed_out, unless_gone, whole
from .errors import ApiError, api_error, read, shutting_down
from .fair import FairExecutor, FairGate, Lane, lanes
from .intake import Intake, check_headers
from .limits import Admission, Keys, RequestGuard
from .metrics import ServerMetrics
from .model_info import ServedModel
from .model_pool import LoadedModel, ModelPool
from .ollama import untagged
from .prepare import Preparer
from .recorder import PromptRecorder
from .routes import add_routes
from .schema import Named
from .settings import ServerSettings
from .stores import FileStore, ResponseStore
from .tracing import Tracing

log = logging.getLogger("outrider.server")
# threads that read bodies; requests of one client that wait to be read
NUM_READERS = 2
MAX_WAITING = 32
# bytes; and how many of that size are read at once, one per client
LARGE_BODY_BYTES = 256 << 10
MAX_LARGE_BODIES = 4
UNBOUNDED = 1 << 30
T = TypeVar("T")


@dataclass(frozen=True)
class ReceivedBody:
    raw: bytes
    client: str
    room: ExitStack  # closed when the body is no longer needed: then this client's next large body may arrive
    lanes: Mapping[Lane, FairExecutor]

    @property
    def long(self) -> bool:
        return len(self.raw) > LONG_TEXT

    async def work(self, function: Callable[[], T], media: bool = False) -> T:
        """Runs a function in a thread, in the client's turn. media: the function may decode images or clips."""
        lane: Lane = "long" if self.long else "short"
        if media:
            lane = "media"
        return await self.lanes[lane].run(self.client, function)

    async def parsed(self, parse: Callable[[bytes], T]) -> T:
        return await self.work(lambda: read(self.raw, parse))


def done(error: ApiError) -> tuple[int, Json] | None:
    return (error.status, error.body()) if error.retry_after is None else None


class Server:
    """The models of a `ModelPool` behind the routes of one app."""

    def __init__(self, pool: ModelPool, settings: ServerSettings) -> None:
        self.pool = pool
        self.settings = settings
        self.admission = Admission(settings)
        self.keys = Keys(settings)
        # one client may fill all places at once
        self.lanes = lanes(NUM_READERS, max(MAX_WAITING, settings.max_concurrent))
        self.big_bodies = FairGate(MAX_LARGE_BODIES, MAX_WAITING, "being read")
        self.metrics = ServerMetrics(pool, lambda: self.admission.in_flight)
        self.tracing = None if settings.otel_endpoint is None else Tracing.to(settings.otel_endpoint)
        self.recorder = None if settings.record_prompt is None else PromptRecorder(settings.record_prompt)
        self.started = int(time.time())
        self.responses = ResponseStore(settings.replica_tag)
        self.files = FileStore(settings.replica_tag)
        self.batches = Batches(self, self.files)

    @classmethod
    def offline(cls, backend: ServedModel, settings: ServerSettings) -> Server:
        """A server for files of requests, without limits on their number or duration."""
        settings = replace(
            settings, max_concurrent=2 * settings.max_concurrent, max_queued=UNBOUNDED, timeout=float(UNBOUNDED)
        )
        return cls(ModelPool.of(backend, settings), settings)

    async def answer(self, request: Request, wire: Wire) -> Response:
        """Answers a request, whole or as a stream."""
        call = await self._call(request, wire)
        if not call.answer.job.body.stream:
            return await whole(request, call)
        return EventStream(call, call.chunks(), wire.media_type)

    async def completed(self, request: Request, wire: Wire) -> tuple[int, Json] | None:
        """Status and body of a finished answer, for a caller without a connection. None: the caller should try again
        later."""
        try:
            call = await self._call(request, wire)
            text = await call.whole()
            return 200, json.loads(text) if len(text) <= LONG_TEXT else await asyncio.to_thread(json.loads, text)
        except Exception as e:
            return done(api_error(e, request.state.request_id))

    async def look(self, request: Request, work: Callable[[bytes, Preparer], Json]) -> Response:
        """Answers without the engine, from texts and token ids alone."""
        async with self.received(request) as received:
            several = len(self.pool.slots) > 1 and received.raw
            named = await received.parsed(Named.model_validate_json) if several else Named()
            with ExitStack() as stack:
                borrowed = self.borrow(request, received, name=untagged(named.model), stack=stack)
                model, _ = await unless_gone(request, borrowed)
                sees = model.prepare.sees and b"image" in received.raw
                hears = model.prepare.hears and b"audio" in received.raw

                def render() -> Response:
                    return JSONResponse(read(received.raw, lambda data: work(data, model.prepare)))

                # off the loop, too: a long text has many tokens
                return await received.work(render, media=sees or hears)

    @asynccontextmanager
    async def received(self, request: Request) -> AsyncIterator[ReceivedBody]:
        """Reads a request's body and limits the time of everything inside. A large body stays with its client until it
        is the client's turn."""
        client = request.state.client
        if self.admission.closing:
            raise shutting_down()
        try:
            with ExitStack() as room:
                async with asyncio.timeout(self.time_limit(request)):
                    chunked = "transfer-encoding" in request.headers  # its size is unknown
                    if chunked or int(request.headers.get("content-length", 0)) > LARGE_BODY_BYTES:
                        await self.big_bodies.acquire(client)
                        room.callback(self.big_bodies.release, client)
                    raw = await request.body()
                    yield ReceivedBody(raw, client, room=room, lanes=self.lanes)
        except TimeoutError:
            raise timed_out(self.time_limit(request)) from None

    def time_limit(self, request: Request) -> float:
        """Seconds for each phase of a request; lines of a batch have another limit."""
        seconds: float = getattr(request.state, "time_limit", self.settings.timeout)
        return seconds

    async def borrow(
        self, request: Request, received: ReceivedBody, *, name: str | None, stack: ExitStack
    ) -> tuple[LoadedModel, str | None]:
        """Borrows the model of this name, and the adapter that the name asks for, until `stack` is closed. If the model
        must be loaded first, the request waits in a queue of its own. Notes for the client become a header of the
        answer (limits.py)."""
        slot, request.state.warning = self.pool.resolve(name)
        ready = self.pool.ready(slot)
        if not ready:
            received.room.close()  # other bodies of this client must not time out while a model loads
        with nullcontext() if ready else self.admission.enter(1, received.client):
            model = await self.pool.acquire(slot)
        stack.callback(self.pool.release, slot)
        return model, slot.adapter(name)

    async def _call(self, request: Request, wire: Wire) -> Call:
        began = time.monotonic()
        check_headers(request, wire)
        resources = ExitStack()
        try:
            async with self.received(request) as received:
                intake = Intake(self, request, received, wire=wire, resources=resources, began=began)
                return await unless_gone(request, intake.call())
        except BaseException:
            resources.close()
            raise

    async def close(self) -> None:
        await self.batches.close()
        self.files.close()
        await self.pool.stop()
        for lane in self.lanes.values():
            lane.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


def create_app(models: ServedModel | ModelPool, settings: ServerSettings) -> FastAPI:
    server = Server(ModelPool.of(models, settings) if isinstance(models, ServedModel) else models, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.pool.start()
        yield
        server.admission.closing = True
        await server.close()

    # no /docs page: it would load scripts from other hosts
    app = FastAPI(title="Outrider", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.server = server
    add_routes(app, server)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        route = f"{request.method} {request.state.path[:100]}"
        messages = {
            404: f"No such route: {route}. OpenAI's and Anthropic's routes are under /v1, Ollama's under /api.",
            405: f"{route}: this method is not allowed here, {(error.headers or {}).get('Allow', 'another')} is.",
        }
        message = messages.get(error.status_code, "The request could not be read.")
        response = ApiError(error.status_code, message).response(request.state.path)
        response.headers.update(error.headers or {})
        return response

    app.add_middleware(RequestGuard, settings=settings, keys=server.keys, count=server.metrics.count)
    return app
