"""/v1/embeddings (OpenAI's), /api/embed and /api/embeddings (Ollama's): one vector per text, from hidden states of a
generative model.

A vector is the mean of the hidden states after the final norm, normalised to length one. It shows which texts are
similar for this model; models trained for retrieval do better at retrieval.
"""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from ..engine.scoring import Embedder
from ..ops.lowrank import Adapter
from .adapters import adapter_named
from .call import unless_gone
from .errors import bad
from .model_pool import LoadedModel
from .ollama import untagged
from .prepare import Preparer
from .schema import Strict
from .scoring import adapter_of, run_scoring
from .spellings import split_prompts
from .wire import Json, encoded

if TYPE_CHECKING:
    from .app import Server

MOST = 2048  # inputs of a call, as OpenAI has it


class EmbeddingsRequest(Strict):
    input: str | list[object] = Field(description="A text, token ids, or a list of either.")
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None  # vLLM's
    truncation_side: Literal["left", "right"] | None = None


class EmbedBody(EmbeddingsRequest):
    """Ollama's; `truncate` and `options` say how a model is run."""

    model_config = ConfigDict(extra="ignore")


class OldEmbedBody(EmbedBody):
    """Ollama's older route."""

    input: str = Field(alias="prompt")


def split(given: str | list[object]) -> list[str | list[object]]:
    try:
        out = split_prompts(given, "input")
    except ValueError as e:
        raise bad(f"{e}.", "input") from None
    if not out or any(not one for one in out):
        raise bad("The input is empty.", "input")
    if len(out) > MOST:
        raise bad(f"input: {len(out)} texts; at most {MOST} can be sent at once.", "input")
    return out


async def openai(server: Server, request: Request) -> Response:
    body, vectors, tokens, name = await embed(server, request, EmbeddingsRequest)

    def told(vector: list[float]) -> object:
        packed = body.encoding_format == "base64"
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if packed else vector

    def answer() -> Json:
        data = [{"object": "embedding", "index": i, "embedding": told(v)} for i, v in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": name, "usage": usage}

    return await off_loop(answer)


async def ollama(server: Server, request: Request) -> Response:
    _, vectors, tokens, name = await embed(server, request, EmbedBody)
    return await off_loop(lambda: {"model": name, "embeddings": vectors, "prompt_eval_count": tokens})


async def old_ollama(server: Server, request: Request) -> Response:
    _, vectors, _, _ = await embed(server, request, OldEmbedBody)
    return await off_loop(lambda: {"embedding": vectors[0]})


async def off_loop(answer: Callable[[], Json]) -> Response:
    """Thousands of vectors take seconds to write."""
    return Response(await asyncio.to_thread(lambda: encoded(answer())), media_type="application/json")


async def embed(
    server: Server, request: Request, shape: type[EmbeddingsRequest]
) -> tuple[EmbeddingsRequest, list[list[float]], int, str]:
    """(the request, a vector for each input, their tokens in all, the model's name)"""
    async with server.received(request) as got:
        body = await got.parsed(shape.model_validate_json)
        name = untagged(body.model)
        with ExitStack() as stack:
            slot, model = await unless_gone(request, server.borrow(request, got, name, stack))
            adapter = adapter_of(model, adapter_named(slot, name))
            stack.enter_context(server.admission.enter(1, got.client))
            ids = await got.work(lambda: tokens(model.prepare, body))
            got.room.close()
            vectors = await unless_gone(request, _vectors(model, ids, got.client, body.dimensions, adapter))
    return body, vectors, sum(map(len, ids)), model.name


async def _vectors(
    model: LoadedModel, ids: list[list[int]], client: str, dimensions: int | None, adapter: Adapter | None
) -> list[list[float]]:
    out: list[list[float]] = []
    for one in ids:
        work = Embedder(one)
        work.adapter = adapter
        await run_scoring(model, work, client)
        vector = work.vector(dimensions)
        if dimensions is not None and len(vector) < dimensions:
            raise bad(f"dimensions: this model's vectors have {len(vector)}.", "dimensions")
        out.append(vector)
    return out


def tokens(preparer: Preparer, body: EmbeddingsRequest) -> list[list[int]]:
    """The token ids of each input."""
    keep, inputs = preparer.kept(body.truncate_prompt_tokens, body.truncation_side), split(body.input)
    for one in inputs if keep is None else ():
        preparer.check_length(one, "input")
    found = [preparer.fitting(preparer.prompt_ids(one, "input", keep), "input", keep) for one in inputs]
    if not all(found):
        raise bad("An input has no tokens.", "input")
    return found
