"""Texts that are read but not continued: scored prompts, and embeddings (OpenAI's /v1/embeddings, Ollama's /api/embed
and /api/embeddings).

They are computed in the engine's thread, a few rows between two steps, so that no stream waits long; meanwhile the
client holds one of its places. An embedding is the mean of a generative model's hidden states after the final norm,
scaled to length one. It shows which texts are similar for this model; dedicated models are better for retrieval.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import struct
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from ..engine.scoring import Embedder, Scorer, ScoringJob
from ..ops.lowrank import Adapter
from ..types import OutriderError
from .answer import Answer, Json, encoded
from .call import unless_gone
from .errors import ApiError, bad_if, where
from .model_pool import LoadedModel
from .ollama import untagged
from .prepare import Preparer
from .runner import EngineError
from .schema import Strict
from .settings import without_paths
from .spellings import Prompts

if TYPE_CHECKING:
    from .app import Server

log = logging.getLogger("outrider.server")
MAX_INPUTS = 2048  # maximum inputs of a call, as in OpenAI's API


async def run_scoring(model: LoadedModel, work: ScoringJob, client: str, priority: int = 0) -> None:
    """Runs scoring work to its end, holding one place in the engine."""
    work.client = client
    await model.turns.acquire(client, priority)
    try:
        while await model.runner.call(work.step):
            await asyncio.sleep(0)
    except OutriderError as e:
        raise ApiError(429, f"{e}.", retry_after=1) from e
    except EngineError as e:
        raise ApiError(503, f"{e}.", retry_after=5, code="shutting_down") from e
    except Exception as e:
        log.error("the engine failed while scoring a text: %s", where(e))
        raise ApiError(500, "The engine failed on this request.", code="engine_error") from e
    finally:
        model.turns.release(client)
        model.runner.later(work.close)


def adapter_of(model: LoadedModel, name: str) -> Adapter | None:
    """The adapter of this name, read from its file if it is not in memory: call it in a thread."""
    if model.backend.adapters is None:
        return None
    try:
        return model.backend.adapters.get(name)
    except OutriderError as e:
        raise ApiError(404, f"{without_paths(str(e))}.", "model", code="model_not_found") from None


async def score(model: LoadedModel, answer: Answer, adapter: Adapter | None, *, client: str) -> None:
    """Log-probabilities of the prompts, if the request asks for them."""
    job = answer.job
    for prompt in job.prompts if job.prompt_logprobs is not None else ():
        scorer = Scorer(prompt, job.prompt_logprobs or 0)
        scorer.adapter = adapter
        await run_scoring(model, scorer, client, priority=job.body.priority or 0)
        answer.scores[id(prompt)] = scorer.entries


# ---- embeddings


class EmbeddingsRequest(Strict):
    input: Prompts = Field(description="A text, token ids, or a list of either.")
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
    """Body of Ollama's older route."""

    input: Prompts = Field(alias="prompt")


@dataclass(frozen=True)
class Embeddings:
    """The vectors of a request's inputs."""

    body: EmbeddingsRequest
    vectors: list[list[float]]
    num_tokens: int
    model: str


def openai_body(result: Embeddings) -> Json:
    def shown(vector: list[float]) -> object:
        packed = result.body.encoding_format == "base64"
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if packed else vector

    data = [{"object": "embedding", "index": i, "embedding": shown(v)} for i, v in enumerate(result.vectors)]
    usage = {"prompt_tokens": result.num_tokens, "total_tokens": result.num_tokens}
    return {"object": "list", "data": data, "model": result.model, "usage": usage}


def ollama_body(result: Embeddings) -> Json:
    return {"model": result.model, "embeddings": result.vectors, "prompt_eval_count": result.num_tokens}


def ollama_old_body(result: Embeddings) -> Json:
    return {"embedding": result.vectors[0]}


async def openai_embeddings(server: Server, request: Request) -> Response:
    return await off_loop(openai_body, await embed(server, request, EmbeddingsRequest))


async def ollama_embed(server: Server, request: Request) -> Response:
    return await off_loop(ollama_body, await embed(server, request, EmbedBody))


async def ollama_old_embeddings(server: Server, request: Request) -> Response:
    return await off_loop(ollama_old_body, await embed(server, request, OldEmbedBody))


async def off_loop(body: Callable[[Embeddings], Json], result: Embeddings) -> Response:
    """Encodes an answer in a thread: thousands of vectors take seconds."""
    return Response(await asyncio.to_thread(lambda: encoded(body(result))), media_type="application/json")


async def embed(server: Server, request: Request, shape: type[EmbeddingsRequest]) -> Embeddings:
    """Reads a request for embeddings and computes them."""
    async with server.received(request) as got:
        body = await got.parsed(shape.model_validate_json)
        with ExitStack() as stack:
            borrowed = server.borrow(request, got, name=untagged(body.model), stack=stack)
            model, adapter_name = await unless_gone(request, borrowed)
            stack.enter_context(server.admission.enter(1, got.client))
            adapter: Adapter | None = None
            if adapter_name is not None:
                adapter = await got.work(partial(adapter_of, model, adapter_name))
            ids = await got.work(lambda: tokens(model.prepare, body))
            got.room.close()

            async def computed() -> list[list[float]]:
                vectors: list[list[float]] = []
                for one in ids:
                    work = Embedder(one)
                    work.adapter = adapter
                    await run_scoring(model, work, got.client)
                    vectors.append(work.vector(body.dimensions))
                    size = len(vectors[-1])
                    short = body.dimensions is not None and size < body.dimensions
                    bad_if(short, f"dimensions: this model's vectors have {size}.", "dimensions")
                return vectors

            vectors = await unless_gone(request, computed())
    return Embeddings(body, vectors, num_tokens=sum(map(len, ids)), model=model.name)


def tokens(preparer: Preparer, body: EmbeddingsRequest) -> list[list[int]]:
    """Token ids of each input."""
    inputs = body.input
    bad_if(not inputs or not all(inputs), "The input is empty.", "input")
    bad_if(len(inputs) > MAX_INPUTS, f"input: {len(inputs)} texts; at most {MAX_INPUTS} can be sent at once.", "input")
    keep = preparer.kept(body.truncate_prompt_tokens, body.truncation_side)
    for one in inputs if keep is None else ():
        preparer.check_length(one, "input")
    encoded = [preparer.fitting(preparer.prompt_ids(one, "input", keep), "input", keep) for one in inputs]
    bad_if(not all(encoded), "An input has no tokens.", "input")
    return encoded
