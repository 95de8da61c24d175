"""The routes. A protocol is a `Wire` (answer.py)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import BaseModel

from .. import __version__
from . import adapters, anthropic, model_info, ollama, responses, scoring, text_routes
from .answer import Json, Wire
from .batches import BatchRequest
from .errors import ApiError
from .multipart import read_form
from .openai import OpenAIWire
from .prepare import Preparer
from .schema import ChatRequest, CompletionRequest
from .transcription import TranscriptionWire

if TYPE_CHECKING:
    from .app import Server

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {p.name: p for p in sorted(PAGE.iterdir()) if p.suffix in (".html", ".css", ".js", ".svg")}
STATUSES = (400, 401, 404, 408, 413, 415, 429, 500, 503)
ERRORS: dict[int | str, dict[str, object]] = {s: {"description": "An error object"} for s in STATUSES}
COUNTED = "response.input_tokens"  # what OpenAI and llama.cpp call a count of tokens
ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Routes:
    """Adds routes to an app. Bodies are read by us, off the event loop; openapi.json only tells their shape."""

    app: FastAPI

    def post(
        self, path: str, shape: type[BaseModel] | None, answer: Handler, method: str = "POST", seen: bool | None = None
    ) -> None:
        async def handle(request: Request) -> Response:
            return await answer(request)

        extra = _request_body(shape) if shape is not None else {"parameters": [ID]} if "{id" in path else {}
        shown = path.startswith("/v1") if seen is None else seen
        add = self.app.add_api_route
        add(path, handle, methods=[method], responses=ERRORS, name=path, openapi_extra=extra, include_in_schema=shown)

    def tell(self, path: str, told: Callable[..., object], seen: bool = True, method: str = "GET") -> None:
        """told: of the client, and of the thing that the path's {id} names."""

        async def answer(request: Request) -> Response:
            found = told(request.state.client, *request.path_params.values())
            return found if isinstance(found, Response) else JSONResponse(found)

        self.post(path, None, answer, method, seen)


@cache
def _request_body(shape: type[BaseModel]) -> dict[str, object]:
    """What openapi.json says of a body; several routes have the same."""
    schema = shape.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


def add_routes(app: FastAPI, server: Server) -> None:
    routes = Routes(app)
    post = routes.post

    def speak(path: str, shape: type[BaseModel], wire: Callable[[Request], Wire]) -> None:
        post(path, shape, lambda request: server.answer(request, wire(request)))

    def responses_wire(request: Request) -> responses.ResponsesWire:
        return responses.ResponsesWire(server.responses, request.state.client)

    def speak_ollama(path: str, shape: type[BaseModel], chat: bool) -> None:
        async def answer(request: Request) -> Response:
            small = 0 < int(request.headers.get("content-length", 0)) <= ollama.SMALL
            if small and ollama.asks_nothing(await request.body()):
                return await server.look(request, lambda _, preparer: ollama.OllamaWire(chat).loaded(preparer.name))
            return await server.answer(request, ollama.OllamaWire(chat))

        post(path, shape, answer)

    def embed(path: str, shape: type[scoring.EmbeddingsRequest], told: Callable[..., Json]) -> None:
        post(path, shape, partial(scoring.embeddings, server, shape, told))

    def look(path: str, shape: type[BaseModel] | None, work: Callable[[bytes, Preparer], Json]) -> None:
        post(path, shape, lambda request: server.look(request, work), "GET" if shape is None else "POST")

    def count(path: str, shape: type[BaseModel], wire: Callable[[Request], Wire], **more: object) -> None:
        """The tokens of a conversation."""

        def tell(wire: Wire, raw: bytes, preparer: Preparer) -> Json:
            body = wire.parse(raw)
            assert isinstance(body, ChatRequest), "a conversation"
            return {**more, "input_tokens": len(preparer.conversation(body).ids)}

        post(path, shape, lambda request: server.look(request, partial(tell, wire(request))))

    for base in ("/v1", ""):  # some clients are given the address without /v1
        speak(f"{base}/chat/completions", ChatRequest, lambda _: OpenAIWire(ChatRequest))
        count(f"{base}/chat/completions/input_tokens", ChatRequest, lambda _: OpenAIWire(), object=COUNTED)
        speak(f"{base}/completions", CompletionRequest, lambda _: OpenAIWire(CompletionRequest))
        embed(f"{base}/embeddings", scoring.EmbeddingsRequest, scoring.openai_told)
        speak(f"{base}/responses", responses.ResponsesRequest, responses_wire)
        count(f"{base}/responses/input_tokens", responses.ResponsesRequest, responses_wire, object=COUNTED)
        seen = bool(base)
        path = f"{base}/responses/{{id}}"
        routes.tell(path, lambda client, id: server.responses.get(client, id).response, seen)
        routes.tell(f"{path}/input_items", server.responses.items, seen)
        routes.tell(path, server.responses.delete, seen, method="DELETE")
    _sound(routes, server)
    for path, add in (("/v1/messages", speak), ("/v1/messages/count_tokens", count)):
        add(path, anthropic.MessagesRequest, lambda _: anthropic.AnthropicWire())
    speak_ollama("/api/chat", ollama.ChatBody, chat=True)
    speak_ollama("/api/generate", ollama.GenerateBody, chat=False)
    embed("/api/embed", scoring.EmbedBody, scoring.ollama_told)
    embed("/api/embeddings", scoring.OldEmbedBody, lambda _, vectors, count, model: {"embedding": vectors[0]})
    look("/tokenize", text_routes.TokenizeRequest, text_routes.tokenize)
    look("/detokenize", text_routes.DetokenizeRequest, text_routes.detokenize)
    look("/apply-template", ChatRequest, text_routes.apply_template)
    look("/tokenizer_info", None, text_routes.tokenizer_info)
    look("/props", None, lambda _, preparer: model_info.props(preparer, server.pool.first, server.settings))
    post("/v1/load_lora_adapter", adapters.LoadAdapter, partial(adapters.load, server))
    post("/v1/unload_lora_adapter", adapters.UnloadAdapter, partial(adapters.unload, server))
    _stores(routes, server)
    _information(routes, server)
    _ollama_information(routes, server)
    routes.tell("/", lambda client: _page(client, "index.html"), seen=False)
    routes.tell("/page/{id}", _page, seen=False)


def _sound(routes: Routes, server: Server) -> None:
    async def transcribe(request: Request) -> Response:
        kind = request.headers.get("content-type", "")
        return await server.answer(request, TranscriptionWire(kind, "transcribe"))

    async def translate(request: Request) -> Response:
        kind = request.headers.get("content-type", "")
        return await server.answer(request, TranscriptionWire(kind, "translate"))

    for base in ("/v1", ""):
        routes.post(f"{base}/audio/transcriptions", None, transcribe)
        routes.post(f"{base}/audio/translations", None, translate)


def _stores(routes: Routes, server: Server) -> None:
    files = server.files
    batches = server.batches

    async def upload(request: Request) -> Response:
        kind = request.headers.get("content-type", "")
        async with server.received(request) as got:
            parts = await got.work(lambda: read_form(kind, got.raw, "the parts 'file' and 'purpose'"))
        return JSONResponse(files.upload(got.client, parts).told())

    async def create(request: Request) -> Response:
        async with server.received(request) as got:
            body = await got.parsed(BatchRequest.model_validate_json)
        return JSONResponse(batches.start(got.client, body).told())

    def content(client: str, id: str) -> Response:
        return FileResponse(files.get(client, id).path, media_type="application/jsonl")

    def delete(client: str, id: str) -> Json:
        file = files.get(client, id)
        if batches.uses(file):
            raise ApiError(409, "A batch that runs reads or writes this file: cancel it first.", "file_id")
        return files.delete(file)

    routes.post("/v1/files", None, upload)
    routes.tell("/v1/files", files.listed)
    routes.tell("/v1/files/{id}", lambda client, id: files.get(client, id).told())
    routes.tell("/v1/files/{id}/content", content)
    routes.tell("/v1/files/{id}", delete, method="DELETE")
    routes.post("/v1/batches", BatchRequest, create)
    routes.tell("/v1/batches", batches.listed)
    routes.tell("/v1/batches/{id}", lambda client, id: batches.get(client, id).told())
    routes.tell(
        "/v1/batches/{id}/cancel", lambda client, id: batches.cancel(batches.get(client, id)).told(), method="POST"
    )


def _information(routes: Routes, server: Server) -> None:
    admission = server.admission

    def cards(_: str) -> Json:
        return model_info.cards(list(server.pool.slots.values()), server.started)

    def card(client: str, name: str) -> Json:
        known = cast(list[Json], cards(client)["data"])
        found = next((card for card in known if card["id"] == name), None)
        return found or model_info.card(server.pool.find(name), server.started)

    def health(_: str) -> Response:
        ok = server.pool.healthy and not admission.closing
        state = "ok" if ok else ("shutting down" if admission.closing else "engine stopped")
        return JSONResponse({"status": state, "in_flight": admission.in_flight}, status_code=200 if ok else 503)

    def slots(_: str) -> list[Json]:
        """What runs: how far prompts are read, as llama.cpp's server tells it. No text."""
        told = [(model, id, p) for model in server.pool.loaded for id, p in model.runner.progress.items()]
        return [
            {
                "id": i,
                "model": model.name,
                "is_processing": True,
                "n_ctx": model.backend.max_context,
                "state": "prompt" if p.prompt_left else "decode",
                "n_prompt_tokens": len(p.request.prompt),
                "n_prompt_tokens_processed": p.prompt_done,
                "n_decoded": p.new_tokens,
                "client_left": id in model.runner.detached,
            }
            for i, (model, id, p) in enumerate(told)
        ]

    for base in ("/v1", ""):
        routes.tell(f"{base}/models", cards, seen=bool(base))
        routes.tell(f"{base}/models/{{id:path}}", card, seen=bool(base))
    for path in ("/health", "/readyz", "/v1/health", "/ping"):
        routes.tell(path, health, seen=path in ("/health", "/readyz"))
    routes.tell("/livez", lambda _: {"status": "alive"})
    routes.tell("/version", lambda _: {"version": __version__})
    routes.tell("/load", lambda _: {"server_load": admission.in_flight})
    routes.tell("/slots", slots)
    kind = "text/plain; version=0.0.4; charset=utf-8"
    routes.tell("/metrics", lambda _: Response(server.metrics.text(), media_type=kind))


def _ollama_information(routes: Routes, server: Server) -> None:
    """What Ollama's clients ask before they chat."""
    pool = server.pool
    started = server.started

    async def show(request: Request) -> Response:
        async with server.received(request) as got:
            asked = await got.parsed(ollama.ShowBody.model_validate_json)
        slot = pool.find(ollama.untagged(asked.model or asked.name))
        return JSONResponse(model_info.ollama_show(slot, started))

    def loaded(_: str) -> Json:
        there = [slot for slot in pool.slots.values() if slot.model is not None]
        return {"models": [model_info.ollama_loaded(slot, started) for slot in there]}

    routes.tell("/api/version", lambda _: {"version": ollama.VERSION, "outrider": __version__}, seen=False)
    slots = pool.slots.values()
    tag = model_info.ollama_tag
    routes.tell("/api/tags", lambda _: {"models": [tag(slot, started) for slot in slots]}, seen=False)
    routes.tell("/api/ps", loaded, seen=False)
    routes.post("/api/show", ollama.ShowBody, show)


def _page(_: str, name: str) -> Response:
    if name not in PAGE_FILES:
        raise ApiError(404, "No such file.")
    return FileResponse(PAGE_FILES[name], headers={"Cache-Control": "no-cache"})
