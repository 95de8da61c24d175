"""Texts that are read and not continued: scored prompts, and embeddings (/v1/embeddings, OpenAI's; /api/embed and
/api/embeddings, Ollama's).

They are computed in the engine's thread, a few rows between two steps, so that no stream waits long; the client holds
one of its places meanwhile. An embedding is the mean of the hidden states after the final norm of a generative model,
normalised to length one. It shows which texts are similar for this model; models trained for retrieval do better at
retrieval.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import struct
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from ..engine.scoring import Embedder, Scorer, ScoringJob
from ..ops.lowrank import Adapter
from ..types import OutriderError
from .answer import Answer, Json, encoded
from .call import unless_gone
from .errors import ApiError, bad, where
from .model_pool import LoadedModel
from .ollama import untagged
from .prepare import Preparer
from .runner import EngineError
from .schema import Strict
from .settings import without_paths
from .spellings import split_prompts

if TYPE_CHECKING:
    from .app import Server

log = logging.getLogger("outrider.server")
MOST = 2048  # inputs of a call, as OpenAI has it


async def run_scoring(model: LoadedModel, work: ScoringJob, client: str, priority: int = 0) -> None:
    """To the end of it. One place is held meanwhile."""
    await model.turns.acquire(client, priority)
    try:
        while await model.runner.call(work.step):
            await asyncio.sleep(0)
    except OutriderError as e:
        raise ApiError(429, f"{e}.", retry_after=1) from e
    except EngineError as e:
        raise ApiError(503, f"{e}.", retry_after=5, code="shutting_down") from e
    except Exception as e:
        log.error("the engine failed on a text that was to be read: %s", where(e))
        raise ApiError(500, "The engine failed on this request.", code="engine_error") from e
    finally:
        model.turns.release(client)
        model.runner.later(work.close)


def adapter_of(model: LoadedModel, name: str | None) -> Adapter | None:
    """The adapter that a text is read with."""
    if name is None or model.backend.adapters is None:
        return None
    try:
        return model.backend.adapters.get(name)
    except OutriderError as e:
        raise ApiError(404, f"{without_paths(str(e))}.", "model", "model_not_found") from None


async def score(model: LoadedModel, answer: Answer, client: str) -> None:
    """Log-probabilities of the prompts, if the request asks for them."""
    job = answer.job
    for prompt in job.prompts if job.prompt_logprobs is not None else ():
        scorer = Scorer(prompt, job.prompt_logprobs or 0)
        scorer.adapter = adapter_of(model, job.requests[0].adapter)
        await run_scoring(model, scorer, client, job.body.priority or 0)
        answer.scores[id(prompt)] = scorer.entries


# ---- embeddings


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


async def openai_embeddings(server: Server, request: Request) -> Response:
    body, vectors, tokens, name = await embed(server, request, EmbeddingsRequest)

    def told(vector: list[float]) -> object:
        packed = body.encoding_format == "base64"
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if packed else vector

    def answer() -> Json:
        data = [{"object": "embedding", "index": i, "embedding": told(v)} for i, v in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": name, "usage": usage}

    return await off_loop(answer)


async def ollama_embeddings(server: Server, request: Request) -> Response:
    _, vectors, tokens, name = await embed(server, request, EmbedBody)
    return await off_loop(lambda: {"model": name, "embeddings": vectors, "prompt_eval_count": tokens})


async def old_ollama_embeddings(server: Server, request: Request) -> Response:
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
            model, asked = await unless_gone(request, server.borrow(request, got, name, stack))
            adapter = adapter_of(model, asked)
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
