"""The functions that answer the routes. A protocol is a `Wire` (answer.py).

adapters.py and scoring.py answer routes, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fastapi import Request
from fastapi.responses import FileResponse, JSONResponse, Response

from .. import __version__
from . import model_info, ollama, text_routes
from .answer import Json, Wire
from .anthropic import AnthropicWire
from .batches import BatchRequest
from .errors import ApiError
from .limits import has_key
from .multipart import read_form
from .openai import OpenAIWire
from .prepare import Preparer
from .responses import ResponsesWire
from .schema import ChatRequest, CompletionRequest
from .transcription import TranscriptionWire

if TYPE_CHECKING:
    from .app import Server

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {p.name: p for p in sorted(PAGE.iterdir()) if p.suffix in (".html", ".css", ".js", ".svg")}
COUNTED = "response.input_tokens"  # the object name that OpenAI and llama.cpp give a token count
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def path_id(request: Request) -> str:
    """The {id} of a route's path."""
    return str(request.path_params["id"])


def client_of(request: Request) -> str:
    return str(request.state.client)


# ---- texts


async def chat_completions(server: Server, request: Request) -> Response:
    return await server.answer(request, OpenAIWire(ChatRequest))


async def completions(server: Server, request: Request) -> Response:
    return await server.answer(request, OpenAIWire(CompletionRequest))


async def create_message(server: Server, request: Request) -> Response:
    return await server.answer(request, AnthropicWire())


async def create_response(server: Server, request: Request) -> Response:
    return await server.answer(request, ResponsesWire(server.responses, client_of(request)))


async def ollama_chat(server: Server, request: Request) -> Response:
    return await _ollama_answer(server, request, ollama.OllamaWire(chat=True))


async def ollama_generate(server: Server, request: Request) -> Response:
    return await _ollama_answer(server, request, ollama.OllamaWire(chat=False))


async def _ollama_answer(server: Server, request: Request, wire: ollama.OllamaWire) -> Response:
    """Answers a request; one without a prompt loads its model."""
    small = 0 < int(request.headers.get("content-length", 0)) <= ollama.SMALL
    if small and ollama.asks_nothing(await request.body()):
        return await server.look(request, lambda _, preparer: wire.loaded(preparer.name))
    return await server.answer(request, wire)


async def transcribe(server: Server, request: Request) -> Response:
    content_type = request.headers.get("content-type", "")
    return await server.answer(request, TranscriptionWire(content_type, "transcribe"))


async def translate(server: Server, request: Request) -> Response:
    content_type = request.headers.get("content-type", "")
    return await server.answer(request, TranscriptionWire(content_type, "translate"))


# ---- counts of tokens


async def count_chat_tokens(server: Server, request: Request) -> Response:
    return await server.look(request, partial(_openai_count, OpenAIWire()))


async def count_response_tokens(server: Server, request: Request) -> Response:
    return await server.look(request, partial(_openai_count, ResponsesWire(server.responses, client_of(request))))


async def count_message_tokens(server: Server, request: Request) -> Response:
    return await server.look(request, partial(_count, AnthropicWire()))


def _openai_count(wire: Wire, raw: bytes, preparer: Preparer) -> Json:
    return {"object": COUNTED, **_count(wire, raw, preparer)}


def _count(wire: Wire, raw: bytes, preparer: Preparer) -> Json:
    """The number of tokens of a conversation's prompt."""
    body = wire.parse(raw)
    assert isinstance(body, ChatRequest), "a conversation"
    return {"input_tokens": len(preparer.conversation(body).ids)}


# ---- token ids and templates


async def tokenize(server: Server, request: Request) -> Response:
    return await server.look(request, text_routes.tokenize)


async def detokenize(server: Server, request: Request) -> Response:
    return await server.look(request, text_routes.detokenize)


async def apply_template(server: Server, request: Request) -> Response:
    return await server.look(request, text_routes.apply_template)


async def tokenizer_info(server: Server, request: Request) -> Response:
    return await server.look(request, text_routes.tokenizer_info)


async def get_props(server: Server, request: Request) -> Response:
    def props(_: bytes, preparer: Preparer) -> Json:
        return model_info.props(preparer, server.pool.first, server.settings)

    return await server.look(request, props)


# ---- stored responses


async def get_response(server: Server, request: Request) -> Response:
    client = client_of(request)
    return await _stored(server, client, lambda: server.responses.get(client, path_id(request)).response)


async def list_input_items(server: Server, request: Request) -> Response:
    client = client_of(request)
    return await _stored(server, client, lambda: server.responses.items(client, path_id(request)))


async def delete_response(server: Server, request: Request) -> Response:
    client = client_of(request)
    return await _stored(server, client, lambda: server.responses.delete(client, path_id(request)))


async def _stored(server: Server, client: str, read: Callable[[], Json]) -> Response:
    """Reads a stored response in the client's turn, off the event loop: it may have megabytes."""
    return await server.lanes["short"].run(client, lambda: JSONResponse(read()))


# ---- files


async def upload_file(server: Server, request: Request) -> Response:
    content_type = request.headers.get("content-type", "")
    async with server.received(request) as got:
        parts = await got.work(lambda: read_form(content_type, got.raw, "the parts 'file' and 'purpose'"))
    return JSONResponse(server.files.upload(got.client, parts).told())


async def list_files(server: Server, request: Request) -> Response:
    return JSONResponse(server.files.listed(client_of(request)))


async def get_file(server: Server, request: Request) -> Response:
    return JSONResponse(server.files.get(client_of(request), path_id(request)).told())


async def get_file_content(server: Server, request: Request) -> Response:
    file = server.files.get(client_of(request), path_id(request))
    return FileResponse(file.path, media_type="application/jsonl")


async def delete_file(server: Server, request: Request) -> Response:
    file = server.files.get(client_of(request), path_id(request))
    if server.batches.uses(file):
        raise ApiError(409, "A batch that runs reads or writes this file: cancel it first.", "file_id")
    return JSONResponse(server.files.delete(file))


# ---- batches


async def create_batch(server: Server, request: Request) -> Response:
    async with server.received(request) as got:
        body = await got.parsed(BatchRequest.model_validate_json)
    return JSONResponse(server.batches.start(got.client, body).told())


async def list_batches(server: Server, request: Request) -> Response:
    return JSONResponse(server.batches.listed(client_of(request)))


async def get_batch(server: Server, request: Request) -> Response:
    return JSONResponse(server.batches.get(client_of(request), path_id(request)).told())


async def cancel_batch(server: Server, request: Request) -> Response:
    batch = server.batches.get(client_of(request), path_id(request))
    return JSONResponse(server.batches.cancel(batch).told())


# ---- models


async def list_models(server: Server, request: Request) -> Response:
    return JSONResponse(model_info.cards(list(server.pool.slots.values()), server.started))


async def get_model(server: Server, request: Request) -> Response:
    name = path_id(request)
    cards = cast(list[Json], model_info.cards(list(server.pool.slots.values()), server.started)["data"])
    for card in cards:
        if card["id"] == name:
            return JSONResponse(card)
    return JSONResponse(model_info.card(server.pool.find(name), server.started))


async def ollama_show(server: Server, request: Request) -> Response:
    async with server.received(request) as got:
        body = await got.parsed(ollama.ShowBody.model_validate_json)
    slot = server.pool.find(ollama.untagged(body.model or body.name))
    return JSONResponse(model_info.ollama_show(slot, server.started))


async def ollama_tags(server: Server, request: Request) -> Response:
    return JSONResponse({"models": [model_info.ollama_tag(s, server.started) for s in server.pool.slots.values()]})


async def ollama_loaded_models(server: Server, request: Request) -> Response:
    slots = [slot for slot in server.pool.slots.values() if slot.model is not None]
    return JSONResponse({"models": [model_info.ollama_loaded(slot, server.started) for slot in slots]})


async def ollama_version(server: Server, request: Request) -> Response:
    return JSONResponse({"version": ollama.VERSION, "outrider": __version__})


# ---- the server itself


async def health(server: Server, request: Request) -> Response:
    closing = server.admission.closing
    ok = server.pool.healthy and not closing
    state = "ok"
    if closing:
        state = "shutting down"
    elif not server.pool.healthy:
        state = "engine stopped"
    body = {"status": state, "in_flight": server.admission.in_flight}
    return JSONResponse(body, status_code=200 if ok else 503)


async def livez(server: Server, request: Request) -> Response:
    return JSONResponse({"status": "alive"})


async def version(server: Server, request: Request) -> Response:
    return JSONResponse({"version": __version__})


async def server_load(server: Server, request: Request) -> Response:
    return JSONResponse({"server_load": server.admission.in_flight})


async def metrics(server: Server, request: Request) -> Response:
    return Response(server.metrics.text(), media_type=PROMETHEUS)


async def list_slots(server: Server, request: Request) -> Response:
    """Running sequences, and how far their prompts are read, in llama.cpp's fields. No text. Where clients have keys,
    each sees its own."""
    client = client_of(request)
    slots: list[Json] = []
    for model in server.pool.loaded:
        for id, progress in model.runner.progress.items():
            if has_key(client) and progress.request.client != client:
                continue
            slots.append(
                {
                    "id": len(slots),
                    "model": model.name,
                    "is_processing": True,
                    "n_ctx": model.backend.max_context,
                    "state": "prompt" if progress.prompt_left else "decode",
                    "n_prompt_tokens": len(progress.request.prompt),
                    "n_prompt_tokens_processed": progress.prompt_done,
                    "n_decoded": progress.new_tokens,
                    "client_left": id in model.runner.detached,
                }
            )
    return JSONResponse(slots)


async def index_page(server: Server, request: Request) -> Response:
    return _page_response("index.html")


async def page_file(server: Server, request: Request) -> Response:
    return _page_response(path_id(request))


def _page_response(name: str) -> Response:
    if name not in PAGE_FILES:
        raise ApiError(404, "No such file.")
    return FileResponse(PAGE_FILES[name], headers={"Cache-Control": "no-cache"})
