"""The routes: a table of paths and the functions that answer them (endpoints.py)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from . import adapters, anthropic, endpoints, ollama, responses, scoring, text_routes
from .batches import BatchRequest
from .schema import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from .app import Server

STATUSES = (400, 401, 404, 408, 413, 415, 429, 500, 503)
ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
SSE = ("text/event-stream",)
NDJSON = ("application/x-ndjson",)
Endpoint = Callable[["Server", Request], Awaitable[Response]]


class JsonLinesResponse(Response):
    media_type = "application/jsonl"


class PageFileResponse(Response):
    media_type = "*/*"


@dataclass(frozen=True)
class Route:
    """A path and the function that answers it. `body` only describes the request in openapi.json; bodies are parsed off
    the event loop."""

    path: str
    endpoint: Endpoint
    method: str = "GET"
    body: type[BaseModel] | None = None
    response: type[Response] = JSONResponse
    other_types: tuple[str, ...] = ()  # media types of other forms of the answer, such as a stream
    documented: bool = True

    @property
    def without_version(self) -> Route:
        """Adds the route without /v1, for clients whose base URL lacks it."""
        return replace(self, path=self.path.removeprefix("/v1"), documented=False)


VERSIONED = (
    Route("/v1/chat/completions", endpoints.chat_completions, "POST", body=ChatRequest, other_types=SSE),
    Route("/v1/chat/completions/input_tokens", endpoints.count_chat_tokens, "POST", body=ChatRequest),
    Route("/v1/completions", endpoints.completions, "POST", body=CompletionRequest, other_types=SSE),
    Route("/v1/audio/transcriptions", endpoints.transcribe, "POST", other_types=(*SSE, "text/plain")),
    Route("/v1/audio/translations", endpoints.translate, "POST", other_types=(*SSE, "text/plain")),
    Route("/v1/embeddings", scoring.openai_embeddings, "POST", body=scoring.EmbeddingsRequest),
    Route("/v1/responses", endpoints.create_response, "POST", body=responses.ResponsesRequest, other_types=SSE),
    Route("/v1/responses/input_tokens", endpoints.count_response_tokens, "POST", body=responses.ResponsesRequest),
    Route("/v1/responses/{id}", endpoints.get_response),
    Route("/v1/responses/{id}/input_items", endpoints.list_input_items),
    Route("/v1/responses/{id}", endpoints.delete_response, "DELETE"),
    Route("/v1/models", endpoints.list_models),
    Route("/v1/models/{id:path}", endpoints.get_model),
)
ROUTES = (
    *VERSIONED,
    *(route.without_version for route in VERSIONED),
    Route("/v1/messages", endpoints.create_message, "POST", body=anthropic.MessagesRequest, other_types=SSE),
    Route("/v1/messages/count_tokens", endpoints.count_message_tokens, "POST", body=anthropic.MessagesRequest),
    Route("/v1/files", endpoints.upload_file, "POST"),
    Route("/v1/files", endpoints.list_files),
    Route("/v1/files/{id}", endpoints.get_file),
    Route("/v1/files/{id}/content", endpoints.get_file_content, response=JsonLinesResponse),
    Route("/v1/files/{id}", endpoints.delete_file, "DELETE"),
    Route("/v1/batches", endpoints.create_batch, "POST", body=BatchRequest),
    Route("/v1/batches", endpoints.list_batches),
    Route("/v1/batches/{id}", endpoints.get_batch),
    Route("/v1/batches/{id}/cancel", endpoints.cancel_batch, "POST"),
    Route("/v1/load_lora_adapter", adapters.load_adapter, "POST", body=adapters.LoadAdapter),
    Route("/v1/unload_lora_adapter", adapters.unload_adapter, "POST", body=adapters.UnloadAdapter),
    Route("/api/chat", endpoints.ollama_chat, "POST", body=ollama.ChatBody, other_types=NDJSON, documented=False),
    Route(
        "/api/generate",
        endpoints.ollama_generate,
        "POST",
        body=ollama.GenerateBody,
        other_types=NDJSON,
        documented=False,
    ),
    Route("/api/embed", scoring.ollama_embed, "POST", body=scoring.EmbedBody, documented=False),
    Route("/api/embeddings", scoring.ollama_old_embeddings, "POST", body=scoring.OldEmbedBody, documented=False),
    Route("/api/show", endpoints.ollama_show, "POST", body=ollama.ShowBody, documented=False),
    Route("/api/tags", endpoints.ollama_tags, documented=False),
    Route("/api/ps", endpoints.ollama_loaded_models, documented=False),
    Route("/api/version", endpoints.ollama_version, documented=False),
    Route("/tokenize", endpoints.tokenize, "POST", body=text_routes.TokenizeRequest, documented=False),
    Route("/detokenize", endpoints.detokenize, "POST", body=text_routes.DetokenizeRequest, documented=False),
    Route("/apply-template", endpoints.apply_template, "POST", body=ChatRequest, documented=False),
    Route("/tokenizer_info", endpoints.tokenizer_info, documented=False),
    Route("/props", endpoints.get_props, documented=False),
    Route("/health", endpoints.health),
    Route("/readyz", endpoints.health),
    Route("/v1/health", endpoints.health, documented=False),
    Route("/ping", endpoints.health, documented=False),
    Route("/livez", endpoints.livez),
    Route("/version", endpoints.version),
    Route("/load", endpoints.server_load),
    Route("/slots", endpoints.list_slots),
    Route("/metrics", endpoints.metrics, response=PlainTextResponse),
    Route("/", endpoints.index_page, response=HTMLResponse, documented=False),
    Route("/page/{id}", endpoints.page_file, response=PageFileResponse, documented=False),
)


def add_routes(app: FastAPI, server: Server) -> None:
    for route in ROUTES:
        app.add_api_route(
            route.path,
            bound(route.endpoint, server),
            methods=[route.method],
            name=route.endpoint.__name__,
            response_class=route.response,
            responses=described_responses(route.other_types),
            openapi_extra=described_request(route.path, route.body),
            include_in_schema=route.documented,
        )


def bound(endpoint: Endpoint, server: Server) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        return await endpoint(server, request)

    return handle


def described_responses(other_types: tuple[str, ...]) -> dict[int | str, dict[str, object]]:
    """Responses of a route for openapi.json, besides those of its response class."""
    responses: dict[int | str, dict[str, object]] = {s: {"description": "An error object"} for s in STATUSES}
    if other_types:
        content = {media_type: {"schema": {"type": "string"}} for media_type in other_types}
        responses[200] = {"description": "The answer, in the form that was asked for", "content": content}
    return responses


def described_request(path: str, body: type[BaseModel] | None) -> dict[str, object]:
    if body is not None:
        return {"requestBody": {"content": {"application/json": {"schema": json_schema(body)}}, "required": True}}
    return {"parameters": [ID]} if "{id" in path else {}


@cache
def json_schema(body: type[BaseModel]) -> dict[str, object]:
    """JSON schema of a body. Cached, since several routes share one."""
    return body.model_json_schema(ref_template="#/components/schemas/{model}")
