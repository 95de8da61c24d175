"""The app: reads, admits, prepares, schedules and answers a request. Each of these stages is a module.

No work is done for a request before it is allowed: sizes are checked before texts are read, admission comes before
tokenising, and clients take turns at every stage (fair.py), so that a client's requests delay only that client.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from .. import __version__
from ..engine.text import LONG
from .answer import JSON_TYPE, Answer, Json, Wire
from .batches import Batches
from .call import Call, EventStream, TimeLimit, timed_out, unless_gone, whole
from .errors import ApiError, api_error, read, shutting_down
from .fair import FairExecutor, FairGate, Lane, lanes
from .limits import Admission, Keys, RequestGuard, prefix_namespace
from .metrics import ServerMetrics, route_of
from .model_info import ServedModel
from .model_pool import LoadedModel, ModelPool
from .ollama import untagged
from .prepare import Preparer
from .recorder import PromptRecorder
from .routes import add_routes
from .schema import ChatRequest, Named
from .scoring import score
from .settings import ServerSettings
from .stores import FileStore, ResponseStore
from .tracing import Tracing

log = logging.getLogger("outrider.server")
# threads that read bodies; requests of one client that wait to be read
READERS = 2
MOST_WAITING = 32
# bytes; and how many of that size are read at once, one per client
BIG_BODY = 256 << 10
BIG_BODIES = 4
UNBOUNDED = 1 << 30
MAX_WARNING = 600  # characters of a header
T = TypeVar("T")


@dataclass(frozen=True)
class ReceivedBody:
    raw: bytes
    client: str
    room: ExitStack  # closed when the text is done with: other large bodies of this client may come then
    lanes: Mapping[Lane, FairExecutor]

    @property
    def long(self) -> bool:
        return len(self.raw) > LONG

    async def work(self, function: Callable[[], T], media: bool = False) -> T:
        """Off the event loop, in the client's turn. media: images or clips may be decoded."""
        lane: Lane = "media" if media else "long" if self.long else "short"
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
        self.lanes = lanes(READERS, max(MOST_WAITING, settings.max_concurrent))
        self.big_bodies = FairGate(BIG_BODIES, MOST_WAITING, "being read")
        self.metrics = ServerMetrics(pool, lambda: self.admission.in_flight)
        self.tracing = None if settings.otel_endpoint is None else Tracing.to(settings.otel_endpoint)
        self.recorder = None if settings.record_prompt is None else PromptRecorder(settings.record_prompt)
        self.started = int(time.time())
        self.responses = ResponseStore(settings.replica_tag)
        self.files = FileStore(settings.replica_tag)
        self.batches = Batches(self, self.files)

    @classmethod
    def offline(cls, backend: ServedModel, settings: ServerSettings) -> Server:
        """For files of requests: refuses nothing for its number or time; a second batch always waits."""
        settings = replace(
            settings, max_concurrent=2 * settings.max_concurrent, max_queued=UNBOUNDED, timeout=float(UNBOUNDED)
        )
        return cls(ModelPool.of(backend, settings), settings)

    async def answer(self, request: Request, wire: Wire) -> Response:
        """The answer to a request, whole or as a stream."""
        call = await self._call(request, wire)
        if not call.answer.job.body.stream:
            return await whole(request, call)
        return EventStream(call, call.chunks(), wire.media_type)

    async def completed(self, request: Request, wire: Wire) -> tuple[int, Json] | None:
        """The answer's status and body when it is done, for a caller without a connection. None: it may come again."""
        try:
            return 200, json.loads(await (await self._call(request, wire)).whole())
        except Exception as e:
            return done(api_error(e, request.state.request_id))

    async def look(self, request: Request, work: Callable[[bytes, Preparer], Json]) -> Response:
        """An answer that needs no engine: texts and token ids."""
        async with self.received(request) as got:
            several = len(self.pool.slots) > 1 and got.raw
            named = await got.parsed(Named.model_validate_json) if several else Named()
            with ExitStack() as stack:
                model, _ = await unless_gone(request, self.borrow(request, got, untagged(named.model), stack))
                # rendered off the loop, too: a long text has many tokens
                return await got.work(
                    lambda: JSONResponse(read(got.raw, lambda data: work(data, model.prepare))),
                    media=(model.prepare.sees and b"image" in got.raw) or (model.prepare.hears and b"audio" in got.raw),
                )

    @asynccontextmanager
    async def received(self, request: Request) -> AsyncIterator[ReceivedBody]:
        """A request's body, and a limit on the time for everything inside. A large one is read when it is its client's
        turn; until then it stays with its client."""
        client = request.state.client
        if self.admission.closing:
            raise shutting_down()
        try:
            with ExitStack() as room:
                async with asyncio.timeout(self.time_limit(request)):
                    chunked = "transfer-encoding" in request.headers  # of any size
                    if chunked or int(request.headers.get("content-length", 0)) > BIG_BODY:
                        await self.big_bodies.acquire(client)
                        room.callback(self.big_bodies.release, client)
                    yield ReceivedBody(await request.body(), client, room, self.lanes)
        except TimeoutError:
            raise timed_out(self.time_limit(request)) from None

    def time_limit(self, request: Request) -> float:
        """Seconds for each phase of a request; lines of a batch bring a limit of their own."""
        seconds: float = getattr(request.state, "time_limit", self.settings.timeout)
        return seconds

    async def borrow(
        self, request: Request, got: ReceivedBody, name: str | None, stack: ExitStack
    ) -> tuple[LoadedModel, str | None]:
        """The model of this name until `stack` is closed, and the adapter that the name asks for. A model that must be
        loaded first is waited for in a place of its own. What the sender should know becomes a header of the answer
        (limits.py)."""
        slot, request.state.warning = self.pool.resolve(name)
        ready = self.pool.ready(slot)
        if not ready:
            got.room.close()  # a load may take longer than other bodies of this client may take to arrive
        with nullcontext() if ready else self.admission.enter(1, got.client):
            model = await self.pool.acquire(slot)
        stack.callback(self.pool.release, slot)
        return model, slot.adapter(name)

    async def _call(self, request: Request, wire: Wire) -> Call:
        began = time.monotonic()
        kind = request.headers.get("content-type", JSON_TYPE).partition(";")[0].strip().lower()
        wire.check_type(kind, from_browser="origin" in request.headers)
        if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            message = "Compressed bodies can't be read here: send it without Content-Encoding."
            raise ApiError(415, message, code="unsupported_media_type")
        stack = ExitStack()
        try:
            async with self.received(request) as got:
                return await unless_gone(request, self._begin(request, got, wire, stack, began))
        except BaseException:
            stack.close()
            raise

    async def _begin(self, request: Request, got: ReceivedBody, wire: Wire, stack: ExitStack, began: float) -> Call:
        """Read, admit, prepare, compile, and submit if it is our turn. `stack` gives back what was taken on the way."""
        client = got.client
        body = await got.work(lambda: wire.read(got.raw))
        model, adapter = await self.borrow(request, got, body.model, stack)
        many = partial(model.prepare.answers, body)
        answers = await got.work(many) if got.long else many()
        for name in body.ignored:
            self.metrics.ignored.labels(name).inc()
        stack.enter_context(self.admission.enter(answers, client))
        if request.headers.get("x-outrider-stats", "").strip().lower() in ("1", "true", "yes"):
            body.outrider = body.outrider.model_copy(update={"stats": True})
        media = isinstance(body, ChatRequest) and body.has_media
        job = await got.work(lambda: model.prepare.job(body), media)
        if len(job.requests) > answers:  # a long file of sound has several pieces
            stack.enter_context(self.admission.enter(len(job.requests) - answers, client))
        got.room.close()
        if self.recorder is not None:
            await got.work(partial(self.recorder.take, request.state.path, got.raw))
        namespace = b"" if self.settings.share_prefixes else prefix_namespace(client)
        if body.cache_salt is not None:
            namespace = hashlib.blake2b(body.cache_salt.encode(), key=namespace, digest_size=16).digest()
        grammar = None if job.grammar is None else await model.grammars.get(job.grammar, client)
        if grammar is not None and grammar.unenforced:
            warn(request, f"schema keywords that are not enforced: {grammar.unenforced}")
        for r in job.requests:
            r.adapter = adapter
            r.namespace = namespace
            r.client = client
            if grammar is not None:
                r.params = replace(r.params, grammar=grammar)
            if self.settings.log_prompts:
                log.info("prompt %s: %r", r.id, model.backend.tokenizer.decode(r.prompt))

        answer = Answer(job, model.backend.tokenizer, model.name if adapter is None else f"{model.name}:{adapter}")
        route = route_of(request.state.path)
        call = Call(self, model, answer, wire, stack, route, TimeLimit(began, self.time_limit(request)))
        if self.tracing is not None:
            arrived = time.time() - (time.monotonic() - began)
            stack.callback(
                self.tracing.ended, dict(request.headers), request.state.request_id, route, answer, model.name, arrived
            )
        await score(model, answer, client)
        if not model.turns.would_wait(client):
            await call.begin()  # so that a refusal by the engine is a status, not an event in a stream
        return call

    async def close(self) -> None:
        await self.batches.close()
        self.files.close()
        await self.pool.stop()
        for lane in self.lanes.values():
            lane.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


def warn(request: Request, message: str) -> None:
    """Adds a sentence to the answer's X-Outrider-Warning header (limits.py)."""
    earlier = getattr(request.state, "warning", None)
    both = message if earlier is None else f"{earlier}; {message}"
    request.state.warning = both if len(both) <= MAX_WARNING else f"{both[:MAX_WARNING]} ..."


def create_app(models: ServedModel | ModelPool, settings: ServerSettings) -> FastAPI:
    server = Server(ModelPool.of(models, settings) if isinstance(models, ServedModel) else models, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.pool.start()
        yield
        server.admission.closing = True
        await server.close()

    # no /docs: its page would load scripts from other hosts
    app = FastAPI(title="Outrider", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.server = server
    add_routes(app, server)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        asked = f"{request.method} {request.state.path[:100]}"
        known = {
            404: f"No such route: {asked}. OpenAI's and Anthropic's routes are under /v1, Ollama's under /api.",
            405: f"{asked}: this method is not allowed here, {(error.headers or {}).get('Allow', 'another')} is.",
        }
        message = known.get(error.status_code, "The request could not be read.")
        response = ApiError(error.status_code, message).response(request.state.path)
        response.headers.update(error.headers or {})
        return response

    app.add_middleware(RequestGuard, settings=settings, keys=server.keys, count=server.metrics.count)
    return app
