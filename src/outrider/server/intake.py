"""A request on its way to the engine: `Intake.call` takes its steps in order.

Nothing is computed for a request before it is allowed: sizes are checked before texts are read, and places are taken
before texts become tokens. Everything acquired on the way is in `resources`, which the call releases at its end.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from fastapi import Request

from ..engine.grammar import CompiledGrammar
from ..engine.step import Request as EngineRequest
from ..ops.lowrank import Adapter
from .answer import JSON_TYPE, Answer, Job, Wire
from .call import Call, TimeLimit
from .errors import ApiError
from .limits import prefix_namespace
from .metrics import route_of
from .model_pool import LoadedModel
from .schema import ChatRequest, CompletionRequest
from .scoring import adapter_of, score

if TYPE_CHECKING:
    from .app import ReceivedBody, Server

log = logging.getLogger("outrider.server")
MAX_WARNING = 600  # maximum characters of the header


def check_headers(request: Request, wire: Wire) -> None:
    """Refuses a body by its headers if it cannot be read."""
    content_type = request.headers.get("content-type", JSON_TYPE).partition(";")[0].strip().lower()
    wire.check_type(content_type, from_browser="origin" in request.headers)
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        message = "Compressed bodies can't be read here: send it without Content-Encoding."
        raise ApiError(415, message, code="unsupported_media_type")


def warn(request: Request, message: str) -> None:
    """Adds a sentence to the answer's X-Outrider-Warning header (limits.py)."""
    earlier = getattr(request.state, "warning", None)
    both = message if earlier is None else f"{earlier}; {message}"
    request.state.warning = both if len(both) <= MAX_WARNING else f"{both[:MAX_WARNING]} ..."


@dataclass(frozen=True)
class Intake:
    server: Server
    request: Request
    received: ReceivedBody
    wire: Wire
    resources: ExitStack
    began: float  # time.monotonic() at the request's arrival

    async def call(self) -> Call:
        body = await self._read()
        model, adapter_name = await self._borrow_model(body)
        num_answers = await self._admit(body, model)
        adapter = await self._load_adapter(model, adapter_name)
        job = await self._prepare(body, model, num_answers)
        await self._record()
        grammar = await self._compile_grammar(job, model)
        self._complete(job.requests, adapter_name, grammar, salt=body.cache_salt)
        self._log_prompts(job.requests, model)
        call = self._new_call(job, model, adapter_name)
        await score(model, call.answer, adapter, client=self._client)
        await self._submit(call, model)
        return call

    @property
    def _client(self) -> str:
        return self.received.client

    async def _read(self) -> ChatRequest | CompletionRequest:
        body = await self.received.work(lambda: self.wire.read(self.received.raw))
        if self.request.headers.get("x-outrider-stats", "").strip().lower() in ("1", "true", "yes"):
            body.outrider = body.outrider.model_copy(update={"stats": True})
        return body

    async def _borrow_model(self, body: ChatRequest | CompletionRequest) -> tuple[LoadedModel, str | None]:
        return await self.server.borrow(self.request, self.received, name=body.model, stack=self.resources)

    async def _admit(self, body: ChatRequest | CompletionRequest, model: LoadedModel) -> int:
        """Takes places for the request's answers; returns their number."""
        count = partial(model.prepare.answers, body)
        num_answers = await self.received.work(count) if self.received.long else count()
        for name in body.ignored:
            self.server.metrics.ignored.labels(name).inc()
        self._take_places(num_answers)
        return num_answers

    async def _load_adapter(self, model: LoadedModel, name: str | None) -> Adapter | None:
        """The adapter, read now if it has left memory: in the engine's thread all clients would wait for that."""
        return None if name is None else await self.received.work(partial(adapter_of, model, name))

    def _take_places(self, number: int) -> None:
        self.resources.enter_context(self.server.admission.enter(number, self._client))

    async def _prepare(self, body: ChatRequest | CompletionRequest, model: LoadedModel, num_answers: int) -> Job:
        """Tokenises texts and decodes media. Afterwards the client's next large body may arrive."""
        media = isinstance(body, ChatRequest) and body.has_media
        job = await self.received.work(lambda: model.prepare.job(body), media)
        if len(job.requests) > num_answers:  # a long sound file is several requests
            self._take_places(len(job.requests) - num_answers)
        self.received.room.close()
        return job

    async def _record(self) -> None:
        recorder = self.server.recorder
        if recorder is not None:
            await self.received.work(partial(recorder.take, self.request.state.path, self.received.raw))

    async def _compile_grammar(self, job: Job, model: LoadedModel) -> CompiledGrammar | None:
        if job.grammar is None:
            return None
        grammar = await model.grammars.get(job.grammar, self._client)
        if grammar.unenforced:
            warn(self.request, f"schema keywords that are not enforced: {grammar.unenforced}")
        return grammar

    def _complete(
        self,
        requests: Sequence[EngineRequest],
        adapter: str | None,
        grammar: CompiledGrammar | None,
        *,
        salt: str | None,
    ) -> None:
        """Sets the fields of engine requests that do not follow from the body alone. salt: the body's cache_salt."""
        namespace = b"" if self.server.settings.share_prefixes else prefix_namespace(self._client)
        if salt is not None:
            namespace = hashlib.blake2b(salt.encode(), key=namespace, digest_size=16).digest()
        for request in requests:
            request.adapter = adapter
            request.namespace = namespace
            request.client = self._client
            if grammar is not None:
                request.params = replace(request.params, grammar=grammar)

    def _log_prompts(self, requests: Sequence[EngineRequest], model: LoadedModel) -> None:
        if self.server.settings.log_prompts:
            for request in requests:
                log.info("prompt %s: %r", request.id, model.backend.tokenizer.decode(request.prompt))

    def _new_call(self, job: Job, model: LoadedModel, adapter: str | None) -> Call:
        name = model.name if adapter is None else f"{model.name}:{adapter}"
        answer = Answer(job, model.backend.tokenizer, name)
        call = Call(
            self.server,
            model,
            answer,
            wire=self.wire,
            resources=self.resources,
            route=route_of(self.request.state.path),
            limit=TimeLimit(self.began, self.server.time_limit(self.request)),
        )
        self._trace(answer, model)
        return call

    def _trace(self, answer: Answer, model: LoadedModel) -> None:
        tracing = self.server.tracing
        if tracing is not None:
            arrived = time.time() - (time.monotonic() - self.began)
            state = self.request.state
            headers = dict(self.request.headers)
            route = route_of(state.path)
            self.resources.callback(tracing.ended, headers, state.request_id, route, answer, model.name, arrived)

    async def _submit(self, call: Call, model: LoadedModel) -> None:
        """Hands the call to the engine if it is the client's turn, so that a refusal by the engine is a status, not an
        event in a stream. Otherwise the call waits for its turn while it is answered."""
        if not model.turns.would_wait(self._client):
            await call.begin()
