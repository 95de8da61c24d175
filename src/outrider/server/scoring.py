"""Scores texts that are not continued (scored prompts, embeddings), in the engine's thread.

A few rows are computed between two steps of the engine, so that no stream waits long; the client holds one of its
places meanwhile.
"""

from __future__ import annotations

import asyncio
import logging

from ..engine.scoring import Scorer, ScoringJob
from ..ops.lowrank import Adapter
from ..types import OutriderError
from .answer import Answer
from .errors import ApiError, where
from .model_pool import LoadedModel
from .runner import EngineError
from .settings import without_paths

log = logging.getLogger("outrider.server")


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
