"""Distributes a batch file's lines over several workers, each a remote engine. Independent of Ray.

Contract: every line gets one result, even if workers die. The lines that a dead worker had go to others, and another
worker replaces it. A line that was running in `MOST_DEATHS` deaths gets an error result: one poisonous request must not
end the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ..server.batch import Answerer, BatchLine, Json
from ..server.errors import ApiError
from ..types import OutriderError

MOST_DEATHS = 3


class WorkerLost(Exception):
    """The worker is gone."""


@dataclass(eq=False)
class _WorkerSlot:
    worker: asyncio.Task[Answerer] | None = None  # that is being made, or is there
    lines: int = 0  # that it has


class WorkerPool:
    def __init__(self, make: Callable[[], Awaitable[Answerer]], workers: int) -> None:
        """make: a worker; it and its calls raise WorkerLost if the worker dies."""
        self._make, self._slots = make, [_WorkerSlot() for _ in range(workers)]

    async def answer(self, line: BatchLine, url: str, body: Json) -> tuple[int, Json]:
        for _ in range(MOST_DEATHS):
            slot = min(self._slots, key=lambda s: s.lines)
            slot.worker = worker = slot.worker or asyncio.ensure_future(self._made())
            slot.lines += 1
            try:
                return await (await asyncio.shield(worker))(line, url, body)
            except WorkerLost:
                if slot.worker is worker:  # the first of its lines to learn of it
                    slot.worker = None
            finally:
                slot.lines -= 1
        message = f"{MOST_DEATHS} workers were lost while they had this request."
        raise ApiError(500, message, code="engine_error")

    async def _made(self) -> Answerer:
        """No line is to blame for a worker that is lost while it loads."""
        for _ in range(MOST_DEATHS):
            try:
                return await self._make()
            except WorkerLost:
                continue
        lost = f"{MOST_DEATHS} workers in a row were lost while loading the model"
        raise OutriderError(f"{lost}; results so far are kept")
