"""`outrider batch --ray`: the pool's workers as Ray actors, each a whole engine.

Not Ray Data, which hands out whole blocks and runs a block again when its actor dies: each result has to be on disk
before its request is dropped, line by line.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from functools import partial

import ray
from ray.exceptions import RayActorError

from ..server.app import Server
from ..server.batch import Answerer, BatchFile, BatchLine, BatchProgress, Json, WorkerLost, WorkerPool, offline_answer
from ..types import OutriderError
from .config import ClusterConfig
from .run import connect


class BatchEngine:
    """One actor."""

    def __init__(self, fields: dict[str, object]) -> None:
        from .replica import load

        config = ClusterConfig.of(fields)
        self._server = Server.offline(load(config), config.back())

    async def start(self) -> None:
        self._server.pool.start()

    async def answer(self, line: BatchLine, url: str, body: Json) -> tuple[int, Json]:
        return await offline_answer(self._server, line, url, body=body)


async def worker(config: ClusterConfig) -> Answerer:
    actor = (
        ray.remote(BatchEngine)
        .options(num_cpus=config.cpus_per_replica, num_gpus=config.gpus_per_replica or 0, max_restarts=0)
        .remote(config.fields())
    )
    try:
        await actor.start.remote()
    except RayActorError as e:
        messages = re.findall(r"OutriderError: (.*)", str(e))
        if messages:
            raise OutriderError(messages[-1]) from None
        raise WorkerLost from e

    async def answer(*line: object) -> tuple[int, Json]:
        try:
            reply: tuple[int, Json] = await actor.answer.remote(*line)
            return reply
        except RayActorError as e:
            raise WorkerLost from e

    return answer


def whole(
    fields: Mapping[str, object], replicas: int | None, batch: BatchFile, say: Callable[[str], None]
) -> BatchProgress:
    """The whole job: joins or starts a Ray cluster, answers, and leaves it as it was."""
    connect("auto", say)
    try:
        default = int(ray.cluster_resources().get("GPU", 0)) or len([n for n in ray.nodes() if n["Alive"]])
        config = ClusterConfig.of({**fields, "replicas": default if replicas is None else replicas})
        say(f"{config.replicas} engines on Ray")
        placed = config.placed(ray.cluster_resources().get("GPU", 0.0))
        workers = placed.replicas.high
        pool = WorkerPool(partial(worker, placed), workers)
        # each engine always has a second batch waiting
        return asyncio.run(batch.run(pool.answer, 2 * workers * (placed.max_concurrent or 8)))
    finally:
        ray.shutdown()
