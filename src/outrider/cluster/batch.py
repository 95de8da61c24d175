"""`outrider batch --ray`: the pool's workers as Ray actors, each a whole engine.

It uses actors rather than Ray Data, because each result has to be on disk before its request is dropped, line by line.
Ray Data hands out whole blocks, runs a block again when its actor dies, and needs pyarrow and pandas. The queue of
lines over actors that are replaced is pool.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import ray
from ray.exceptions import RayActorError

from ..server.app import Server
from ..server.batch import BatchLine, BatchProgress, BatchRunner, Json, keep_books, salt_of
from ..types import OutriderError
from .config import ClusterConfig
from .pool import Worker, WorkerLost, WorkerPool
from .run import connect

SHARES = 8  # engine batches per assignment to a worker


class BatchEngine:
    """One actor."""

    def __init__(self, fields: dict[str, object], seed: int) -> None:
        from .replica import load

        config = ClusterConfig.of(fields)
        self._runner = BatchRunner(Server.offline(load(config), config.back()), seed)

    def ready(self) -> bool:
        return True

    def answer(self, lines: Sequence[BatchLine]) -> Iterator[list[Json]]:
        for rows in self._runner.rows(iter(lines), set()):
            if rows:
                yield rows


class RayWorker:
    def __init__(self, config: ClusterConfig, seed: int) -> None:
        made = ray.remote(BatchEngine).options(
            num_cpus=config.cpus_per_replica, num_gpus=config.gpus_per_replica or 0, max_restarts=0
        )
        self._actor = made.remote(config.fields(), seed)
        try:
            ray.get(self._actor.ready.remote())
        except RayActorError as e:
            told = re.findall(r"OutriderError: (.*)", str(e))
            if told:
                raise OutriderError(told[-1]) from None
            raise WorkerLost from e

    def answer(self, lines: Sequence[BatchLine]) -> Iterator[list[Json]]:
        try:
            for ref in self._actor.answer.options(num_returns="streaming").remote(list(lines)):
                yield ray.get(ref)
        except RayActorError as e:
            raise WorkerLost from e


def whole(
    fields: Mapping[str, object],
    replicas: int | None,
    requests: Path,
    out: Path,
    seed: int,
    tell: Callable[[BatchProgress], None],
    say: Callable[[str], None],
) -> BatchProgress:
    """The whole job: join a Ray cluster or start one, answer, and leave it as it was."""
    connect("auto", say)
    try:
        default = int(ray.cluster_resources().get("GPU", 0)) or len([n for n in ray.nodes() if n["Alive"]])
        config = ClusterConfig.of({**fields, "replicas": default if replicas is None else replicas})
        say(f"{config.replicas} engines on Ray")
        return run(config, requests, out, seed, tell)
    finally:
        ray.shutdown()


def run(
    config: ClusterConfig, requests: Path, out: Path, seed: int, tell: Callable[[BatchProgress], None]
) -> BatchProgress:
    """Runs the job on the Ray cluster that this process has joined."""
    placed = config.placed(ray.cluster_resources().get("GPU", 0.0))

    def make() -> Worker:
        return RayWorker(placed, seed)

    pool = WorkerPool(make, placed.replicas.high, SHARES * (placed.max_concurrent or 8))
    return keep_books(requests, out, salt_of(placed.served_name, seed), pool.rows, tell)
