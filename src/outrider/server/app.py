"""The routes. Thin: a body goes through `prepare`, its requests through `runner`, their events through `stream`.

A client that goes away, a time-out and a shutdown all end in `Stream.close()`, which aborts what still runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from .. import __version__
from ..types import OutriderError
from .errors import ApiError, from_validation
from .limits import Admission, Guard
from .metrics import ServerMetrics
from .prepare import Backend, Job, Preparer
from .runner import EngineError, Event, Runner, Stream, where
from .schema import ChatRequest, CompletionRequest
from .settings import ServerSettings
from .stream import Writer, single_tokens, sse

log = logging.getLogger("outrider.server")
PAGE = Path(__file__).parent / "page"
PAGE_FILES = {p.name: p for p in sorted(PAGE.iterdir()) if p.suffix in (".html", ".css", ".js", ".svg")}
KEEP_ALIVE_S = 15.0
T = TypeVar("T")


class Server:
    """One model behind the routes of one app."""

    def __init__(self, backend: Backend, settings: ServerSettings) -> None:
        self.backend, self.settings = backend, settings
        self.runner = Runner(backend.engine)
        self.admission = Admission(settings)
        self.prepare = Preparer(backend, settings)
        self.metrics = ServerMetrics(backend.engine.metrics, self.runner, lambda: self.admission.in_flight)
        self.started = int(time.time())
        self.fingerprint = f"outrider-{__version__}"

    # ---- one call

    async def answer(self, request: Request, prepare: Callable[[], Job], chat: bool) -> Response:
        """Prepare, admit, submit, and answer whole or as a stream."""
        deadline = time.monotonic() + self.settings.timeout
        if self.admission.closing:
            raise ApiError(503, "The server is shutting down.", retry_after=5)
        job = await asyncio.to_thread(prepare)
        if self.settings.log_prompts:
            for r in job.requests:
                log.info("prompt %s: %r", r.id, self.backend.tokenizer.decode(r.prompt))
        slots = ExitStack()
        slots.enter_context(self.admission.enter(len(job.requests)))
        try:
            stream = await self._submit(request, job)
        except BaseException:
            slots.close()
            raise
        writer = Writer(job, self.backend.tokenizer, self.settings.model_name, chat, self.fingerprint)
        call = Call(self, job, stream, writer, slots, deadline, chat)
        if job.stream:
            return EventStream(call)
        return JSONResponse(await unless_gone(request, call.whole()))

    async def _submit(self, request: Request, job: Job) -> Stream:
        try:
            return await unless_gone(request, self.runner.submit(job.requests))
        except OutriderError as e:
            raise ApiError(400, str(e)) from e
        except EngineError as e:
            raise ApiError(500, str(e)) from e


class Call:
    """A submitted job: reads its events until the end, the deadline, or the client's departure."""

    def __init__(self, server: Server, job: Job, stream: Stream, writer: Writer, slots: ExitStack, deadline: float, chat: bool) -> None:
        self._server, self._job, self._stream, self._writer, self._slots = server, job, stream, writer, slots
        self._deadline, self._route = deadline, "chat" if chat else "completions"
        self._began = time.monotonic()
        self._closed = False

    async def whole(self) -> dict[str, Any]:
        try:
            async for event in self._events():
                if event is not None and self._writer.choice(event.id).finish is None:
                    self._writer.choice(event.id).take(event)
            return self._writer.whole()
        finally:
            self.close()

    async def sse(self) -> AsyncIterator[str]:
        """Errors after the first byte can only be told inside the stream."""
        try:
            for chunk in self._writer.opening():
                yield chunk
            try:
                events = self._events()
                async for event in smooth(events, self._stream) if self._job.options.stream_smoothing else events:
                    if event is None:
                        yield ": still working\n\n"
                        continue
                    chunks = self._writer.chunks(event)
                    if chunks:
                        yield "".join(chunks)  # one cycle, one write
                for chunk in self._writer.closing():
                    yield chunk
            except ApiError as e:
                self._server.metrics.requests.labels(self._route, str(e.status)).inc()
                yield sse(e.body())
        finally:
            self.close()

    async def _events(self) -> AsyncIterator[Event | None]:
        """The engine's events; None as a sign of life when nothing came for a while."""
        try:
            while self._stream.open and any(c.finish is None for c in self._writer.choices):
                left = self._deadline - time.monotonic()
                if left <= 0:
                    raise ApiError(408, f"The request took longer than {self._server.settings.timeout:g} seconds.", code="timeout")
                yield await self._stream.next(min(left, KEEP_ALIVE_S))
        except OutriderError as e:  # the engine found out on the way that this request can't be done
            raise ApiError(400, str(e), code="request_failed") from e
        except EngineError as e:
            status = 503 if self._server.admission.closing else 500
            raise ApiError(status, f"{e}.", code="engine_error") from e

    def close(self) -> None:
        """However the call ended; only the first time counts. Must not await: the task may be cancelled."""
        if self._closed:
            return
        self._closed = True
        if self._stream.open:
            self._server.metrics.aborted.inc()
        self._stream.close()
        self._slots.close()
        choices = self._writer.choices
        for choice in choices:
            if choice.stats is not None:
                self._server.metrics.finished(choice.stats)
        log.info(
            "%s %d choice(s): %d prompt + %d new tokens in %.2f s, finished: %s",
            self._route, len(choices), self._job.prompt_tokens, sum(c.new_tokens for c in choices), time.monotonic() - self._began,
            ",".join(c.finish or "abort" for c in choices),
        )  # fmt: skip


class EventStream(StreamingResponse):
    """Closes its call also when the client left before the first chunk, when the generator never began."""

    def __init__(self, call: Call) -> None:
        super().__init__(call.sse(), media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.close()


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, but cancel it when the client disconnects."""

    async def departure() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(departure())
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "The client went away.")
        return task.result()
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def smooth(events: AsyncIterator[Event | None], stream: Stream) -> AsyncIterator[Event | None]:
    """Spread the tokens of a cycle over the time until the next one is due. Same text, same parts; only the pace changes."""
    last, gap = time.monotonic(), 0.0
    async for event in events:
        now = time.monotonic()
        gap, last = (0.7 * gap + 0.3 * (now - last)) if gap else now - last, now
        singles = [] if event is None else single_tokens(event)
        if len(singles) < 2:
            yield event
            continue
        for single in singles:
            yield single
            if single is not singles[-1] and not stream.waiting:
                await asyncio.sleep(min(gap / len(singles), 0.05))


def create_app(backend: Backend, settings: ServerSettings) -> FastAPI:
    server = Server(backend, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.runner.start()
        yield
        server.admission.closing = True
        await server.runner.stop()

    # no /docs: its page would load scripts from other hosts
    app = FastAPI(title="Outrider", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.server = server
    _routes(app, server)
    _errors(app, server)
    app.add_middleware(Guard, settings=settings)
    return app


def _routes(app: FastAPI, server: Server) -> None:
    errors: dict[int | str, dict[str, Any]] = {s: {"description": "An error object"} for s in (400, 401, 404, 408, 413, 429, 500, 503)}

    @app.post("/v1/chat/completions", responses=errors, response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        stats = wants_stats(request)
        return await _counted(server, "chat", server.answer(request, lambda: server.prepare.chat(body, stats), chat=True))

    @app.post("/v1/completions", responses=errors, response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        stats = wants_stats(request)
        return await _counted(server, "completions", server.answer(request, lambda: server.prepare.completion(body, stats), chat=False))

    def card() -> dict[str, Any]:
        note = server.backend.note
        return {"id": server.settings.model_name, "object": "model", "created": server.started, "owned_by": "outrider",
                "outrider": {"max_context": server.backend.max_context, "drafter": note}}  # fmt: skip

    @app.get("/v1/models", response_model=None)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}", responses={404: errors[404]}, response_model=None)
    async def model(name: str) -> dict[str, Any]:
        if name != server.settings.model_name:
            raise ApiError(404, "No such model here.", "model", "model_not_found")
        return card()

    @app.get("/health", responses={503: {"description": "The engine has stopped"}}, response_model=None)
    async def health() -> Response:
        ok = server.runner.healthy and not server.admission.closing
        state = "ok" if ok else ("shutting down" if server.admission.closing else "engine stopped")
        return JSONResponse({"status": state, "in_flight": server.admission.in_flight}, status_code=200 if ok else 503)

    @app.get("/version", response_model=None)
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE_FILES["index.html"], headers={"Cache-Control": "no-cache"})

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in PAGE_FILES:
            raise ApiError(404, "No such file.")
        return FileResponse(PAGE_FILES[name], headers={"Cache-Control": "no-cache"})


def wants_stats(request: Request) -> bool:
    return request.headers.get("x-outrider-stats", "").strip().lower() in ("1", "true", "yes")


async def _counted(server: Server, route: str, answer: Awaitable[Response]) -> Response:
    try:
        response = await answer
    except ApiError as e:
        server.metrics.requests.labels(route, str(e.status)).inc()
        raise
    except Exception as e:
        log.error("unexpected: %s", where(e))
        server.metrics.requests.labels(route, "500").inc()
        raise ApiError(500, "Internal error; the server's log has the details.") from None
    server.metrics.requests.labels(route, "200").inc()
    return response


def _errors(app: FastAPI, server: Server) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        server.metrics.requests.labels(request.url.path.rsplit("/", 1)[-1], "400").inc()
        return from_validation(error).response()

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        known = {404: "No such route.", 405: "This method is not allowed here."}
        text = known.get(error.status_code, "The body could not be read as JSON.")
        response = ApiError(error.status_code, text).response()
        response.headers.update(error.headers or {})
        return response
