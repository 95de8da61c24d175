"""The routes. A protocol is a `Wire` (wire.py)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import BaseModel

from .. import __version__
from . import adapters, anthropic, batches, embeddings, files, model_info, ollama, responses, text_routes
from .call import unless_gone
from .errors import ApiError, shutting_down
from .openai import OpenAIWire
from .prepare import Preparer
from .schema import ChatRequest, CompletionRequest, Named
from .wire import Json, Wire

if TYPE_CHECKING:
    from .app import Server

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {p.name: p for p in sorted(PAGE.iterdir()) if p.suffix in (".html", ".css", ".js", ".svg")}
STATUSES = (400, 401, 404, 408, 413, 415, 429, 500, 503)
ERRORS: dict[int | str, dict[str, object]] = {s: {"description": "An error object"} for s in STATUSES}


def add_routes(app: FastAPI, server: Server) -> None:
    def post(path: str, shape: type[BaseModel], answer: Callable[[Request], Awaitable[Response]]) -> None:
        """The body is read by us, off the event loop; its shape is told to those who read openapi.json."""

        async def handle(request: Request) -> Response:
            return await answer(request)

        seen = path.startswith("/v1")
        shown = _request_body(shape) if seen else None
        app.post(path, responses=ERRORS, response_model=None, name=path, openapi_extra=shown, include_in_schema=seen)(
            handle
        )

    def speak(path: str, shape: type[BaseModel], wire: Callable[[Request], Wire]) -> None:
        post(path, shape, lambda request: server.answer(request, wire(request)))

    def responses_wire(request: Request) -> responses.ResponsesWire:
        return responses.ResponsesWire(server.responses, request.state.client)

    def speak_ollama(path: str, shape: type[BaseModel], chat: bool) -> None:
        async def answer(request: Request) -> Response:
            if 0 < int(request.headers.get("content-length", 0)) <= ollama.SMALL:
                async with server.received(request) as got:
                    if ollama.asks_nothing(got.raw):
                        asked = await got.parsed(Named.model_validate_json)
                        if server.admission.closing:
                            raise shutting_down()
                        slot = server.resolve(request, ollama.untagged(asked.model))
                        with ExitStack() as stack:
                            model = await unless_gone(request, server.acquire(slot, got.client, stack))
                            return JSONResponse(ollama.OllamaWire(chat).loaded(model.name))
            return await server.answer(request, ollama.OllamaWire(chat))

        post(path, shape, answer)

    def count_chat(raw: bytes, preparer: Preparer) -> Json:
        return text_routes.count_tokens(ChatRequest.model_validate_json(raw), preparer)

    for base in ("/v1", ""):  # some clients are given the address without /v1
        speak(f"{base}/chat/completions", ChatRequest, lambda _: OpenAIWire(ChatRequest))
        post(f"{base}/chat/completions/input_tokens", ChatRequest, partial(server.look, work=count_chat))
        speak(f"{base}/completions", CompletionRequest, lambda _: OpenAIWire(CompletionRequest))
        post(f"{base}/embeddings", embeddings.EmbeddingsRequest, partial(embeddings.openai, server))
        speak(f"{base}/responses", responses.ResponsesRequest, responses_wire)
        post(
            f"{base}/responses/input_tokens",
            responses.ResponsesRequest,
            lambda r: server.look(r, responses_wire(r).count),
        )
        _stored_responses(app, server, base)
    speak("/v1/messages", anthropic.MessagesRequest, lambda _: anthropic.AnthropicWire())
    post("/v1/messages/count_tokens", anthropic.MessagesRequest, partial(server.look, work=anthropic.count_tokens))
    speak_ollama("/api/chat", ollama.ChatBody, chat=True)
    speak_ollama("/api/generate", ollama.GenerateBody, chat=False)
    post("/api/embed", embeddings.EmbedBody, partial(embeddings.ollama, server))
    post("/api/embeddings", embeddings.OldEmbedBody, partial(embeddings.old_ollama, server))
    post("/tokenize", text_routes.TokenizeRequest, partial(server.look, work=text_routes.tokenize))
    post("/detokenize", text_routes.DetokenizeRequest, partial(server.look, work=text_routes.detokenize))
    post("/apply-template", ChatRequest, partial(server.look, work=text_routes.apply_template))
    files.add_routes(app, server)
    batches.add_routes(app, server)
    adapters.add_routes(app, server)
    _information(app, server)
    _ollama_information(app, server)
    _page(app)


@cache
def _request_body(shape: type[BaseModel]) -> dict[str, object]:
    """What openapi.json says of a body; several routes have the same."""
    schema = shape.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


def _information(app: FastAPI, server: Server) -> None:
    @app.get("/models", response_model=None, include_in_schema=False)
    @app.get("/v1/models", response_model=None)
    async def models() -> Json:
        return model_info.cards(list(server.pool.slots.values()), server.started)

    @app.get("/models/{name:path}", response_model=None, include_in_schema=False)
    @app.get("/v1/models/{name:path}", responses={404: ERRORS[404]}, response_model=None)
    async def model(name: str) -> Json:
        cards = model_info.cards(list(server.pool.slots.values()), server.started)["data"]
        found = next((card for card in cast(list[Json], cards) if card["id"] == name), None)
        return found or model_info.card(server.pool.find(name), server.started)

    @app.get("/tokenizer_info", response_model=None, include_in_schema=False)
    async def tokenizer_info(request: Request) -> Response:
        return await server.look(request, lambda _, preparer: text_routes.tokenizer_info(preparer))

    @app.get("/props", response_model=None, include_in_schema=False)
    async def props(request: Request) -> Response:
        slot = server.pool.first
        total = server.settings.max_concurrent
        return await server.look(request, lambda _, preparer: model_info.props(preparer, slot, total))

    @app.get("/ping", response_model=None, include_in_schema=False)
    @app.get("/v1/health", response_model=None, include_in_schema=False)
    @app.get("/health", responses={503: {"description": "The engine has stopped"}}, response_model=None)
    @app.get("/readyz", responses={503: {"description": "Not for new requests"}}, response_model=None)
    async def health() -> Response:
        ok = server.pool.healthy and not server.admission.closing
        state = "ok" if ok else ("shutting down" if server.admission.closing else "engine stopped")
        return JSONResponse({"status": state, "in_flight": server.admission.in_flight}, status_code=200 if ok else 503)

    @app.get("/livez", response_model=None)
    async def live() -> Json:
        return {"status": "alive"}

    @app.get("/version", response_model=None)
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/load", response_model=None)
    async def load() -> dict[str, int]:
        return {"server_load": server.admission.in_flight}

    @app.get("/slots", response_model=None)
    async def slots() -> list[Json]:
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

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _ollama_information(app: FastAPI, server: Server) -> None:
    """What Ollama's clients ask before they chat."""

    @app.get("/api/version", response_model=None, include_in_schema=False)
    async def version() -> dict[str, str]:
        return {"version": ollama.VERSION, "outrider": __version__}

    @app.get("/api/tags", response_model=None, include_in_schema=False)
    async def tags() -> Json:
        return {"models": [model_info.ollama_tag(slot, server.started) for slot in server.pool.slots.values()]}

    @app.get("/api/ps", response_model=None, include_in_schema=False)
    async def loaded() -> Json:
        there = [slot for slot in server.pool.slots.values() if slot.model is not None]
        return {"models": [model_info.ollama_loaded(slot, server.started) for slot in there]}

    @app.post("/api/show", response_model=None, include_in_schema=False)
    async def show(request: Request) -> Json:
        async with server.received(request) as got:
            asked = await got.parsed(ollama.ShowBody.model_validate_json)
        slot = server.pool.find(ollama.untagged(asked.model or asked.name))
        return model_info.ollama_show(slot, server.started)


def _stored_responses(app: FastAPI, server: Server, base: str) -> None:
    seen = bool(base)

    @app.get(base + "/responses/{id}", responses={404: ERRORS[404]}, response_model=None, include_in_schema=seen)
    async def stored(request: Request, id: str) -> Json:
        return server.responses.get(request.state.client, id).response

    @app.get(
        base + "/responses/{id}/input_items", responses={404: ERRORS[404]}, response_model=None, include_in_schema=seen
    )
    async def items(request: Request, id: str) -> Json:
        return {"object": "list", "data": server.responses.get(request.state.client, id).items, "has_more": False}

    @app.delete(base + "/responses/{id}", responses={404: ERRORS[404]}, response_model=None, include_in_schema=seen)
    async def delete(request: Request, id: str) -> Json:
        return server.responses.delete(request.state.client, id)


def _page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE_FILES["index.html"], headers={"Cache-Control": "no-cache"})

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in PAGE_FILES:
            raise ApiError(404, "No such file.")
        return FileResponse(PAGE_FILES[name], headers={"Cache-Control": "no-cache"})
