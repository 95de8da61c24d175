"""`outrider batch`: answer a file of requests, resumable after a kill."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config import LoadSettings
from ..types import require
from . import common
from .common import err
from .progress import StageProgress

if TYPE_CHECKING:
    from ..server.batch import BatchProgress


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    requests: Annotated[Path, typer.Argument(help="Requests in OpenAI's batch format, one JSON object per line.")]
    out: Annotated[Path, "Results, one per line, in the order in which they finish. An existing file is continued."]
    model: Annotated[str | None, "What to load. Default: the model named by the first request."] = None
    name: Annotated[str | None, "The model name the requests use. Default: --model (a folder's last part)."] = None
    seed: Annotated[int, "Seed for requests without one, combined with custom_id."] = 0
    max_concurrent: Annotated[int, "Maximum sequences decoding at once."] = 16
    ray: Annotated[bool, "Use Ray: a running cluster (RAY_ADDRESS), else a new one on this machine."] = False
    replicas: Annotated[
        int | None, "With --ray: number of engines. Default: one per GPU; without GPUs one per machine."
    ] = None


@common.loading(*common.RUNNING, *common.IMAGES, *common.SOUND)
@common.taking(BatchOptions)
def batch(asked: BatchOptions, load: LoadSettings) -> None:
    """Answer a file of requests in the format of OpenAI's batches (chat and text completions).

    After a stop or a kill the same command resumes: no line is answered twice, none is lost. A line that can't be
    answered gets a result that says why. With --ray several engines share the file; one that dies is replaced.

    Example: outrider batch requests.jsonl --out results.jsonl
    """
    with common.needs("batch jobs need", "serve"):
        from ..server.app import Server
        from ..server.batch import BatchFile, answer_file, first_model, read_lines
        from ..server.model_info import ServedModel
        from ..server.settings import ServerSettings, public_name
    next(read_lines(asked.requests, ""), None)  # refuses what cannot be read before a model is loaded
    chosen = asked.model or first_model(asked.requests)
    settings = ServerSettings(model_name=asked.name or public_name(chosen), max_concurrent=asked.max_concurrent)
    require(asked.ray or asked.replicas is None, "--replicas is for --ray: one machine without Ray has one engine")
    common.check_file("--out", asked.out)
    if not asked.ray:
        llm = common.load_llm(chosen, replace(load, engine=replace(load.engine, max_batch=asked.max_concurrent)))
    began = time.monotonic()
    with StageProgress() as shown:

        def tell(p: BatchProgress) -> None:
            speed = p.new_tokens / max(1e-9, time.monotonic() - began)
            failed = f", {p.failed} failed" if p.failed else ""
            shown("answering", p.done, p.total, f"{speed:.0f} tokens/s{failed}")

        batch = BatchFile(asked.requests, asked.out, model=settings.model_name, seed=asked.seed, tell=tell)
        if asked.ray:
            options = {"model": chosen, "name": settings.model_name, "max_concurrent": asked.max_concurrent}
            with common.needs("--ray needs", "ray"):
                from ..cluster.batch import whole
            progress = whole(options | load.options(), asked.replicas, batch, say=common.note)
        else:
            progress = answer_file(Server.offline(ServedModel.of(llm), settings), batch)
    took = time.monotonic() - began
    answered = progress.done - progress.resumed - progress.failed
    resumed = f" ({progress.resumed} lines had a result already)" if progress.resumed else ""
    counts = f"{answered} answered, {progress.failed} failed, {progress.new_tokens} tokens in {took:.1f} s"
    err.print(f"{counts}{resumed}: {asked.out}")
