"""/v1/batches: answers the lines of an uploaded file as if its client had sent each, after the client's own requests.

Lines are read, named, seeded and written as `outrider batch` does (batch.py); answers come from the server's own
pipeline, so limits, grammars and errors are the same. Results of lines with a 200 go into the output file, the others
into the error file.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ..types import OutriderError, require
from .answer import Json
from .batch import ROUTES, BadLine, BatchLine, answer_lines, answered, answered_body, parse, read_lines
from .errors import INTERNAL, ApiError, bad, where
from .schema import Strict
from .stores import ClientStore, FileStore, StoredFile, largest_holder, stored_id

if TYPE_CHECKING:
    from .app import Server

log = logging.getLogger("outrider.server")
WINDOW_S = 24 * 3600  # in which a batch is answered; its lines have no other limit
LOWEST_PRIORITY = 1 << 20  # the priority of a line that names none: after all other requests of its client
MOST_RUNNING = 16  # batches that have not ended, of all clients
MOST_OF_CLIENT = 4
MOST_KEPT = 256
RUNNING = ("validating", "in_progress", "cancelling")


class BatchRequest(Strict):
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"] = "24h"
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None


@dataclass
class Batch:
    client: str
    request: BatchRequest
    source: StoredFile
    id: str
    status: str = "validating"
    times: dict[str, int] = field(default_factory=lambda: {"created": int(time.time())})
    total: int = 0
    completed: int = 0
    failed: int = 0
    results: StoredFile | None = None
    refused: StoredFile | None = None
    error: str | None = None
    task: asyncio.Task[None] | None = None

    def become(self, status: str) -> None:
        self.status = status
        self.times[status] = int(time.time())

    def told(self) -> Json:
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        wrong = {"code": "batch_failed", "message": self.error, "param": None, "line": None}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.request.endpoint,
            "input_file_id": self.source.id,
            "completion_window": self.request.completion_window,
            "status": self.status,
            "created_at": self.times["created"],
            "expires_at": self.times["created"] + WINDOW_S,
            **{f"{name}_at": self.times.get(name) for name in names},
            "output_file_id": self.results.id if self.results is not None else None,
            "error_file_id": self.refused.id if self.refused is not None else None,
            "errors": {"object": "list", "data": [wrong]} if self.error is not None else None,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.request.metadata,
        }


class Batches(ClientStore[Batch]):
    def __init__(self, server: Server, files: FileStore) -> None:
        super().__init__("batch", files.tag)
        self._server = server
        self._files = files

    def start(self, client: str, request: BatchRequest) -> Batch:
        if request.endpoint not in ROUTES:
            raise bad(f"endpoint must be one of {', '.join(ROUTES)}.", "endpoint")
        source = self._files.get(client, request.input_file_id)
        running = [b for b in self._of.values() if b.status in RUNNING]
        if len(running) >= MOST_RUNNING or sum(b.client == client for b in running) >= MOST_OF_CLIENT:
            message = f"{len(running)} batches run here; wait for one to end."
            raise ApiError(429, message, retry_after=60, code="too_many_batches")
        while len(self._of) >= MOST_KEPT:
            ended = [b for b in self._of.values() if b.status not in RUNNING]
            largest = largest_holder((b.client, 1) for b in ended)
            del self._of[next(b.id for b in ended if b.client == largest)]
        batch = Batch(client, request, source, id=stored_id("batch_", self.tag))
        self._of[batch.id] = batch
        batch.task = asyncio.get_running_loop().create_task(self._run(batch))
        return batch

    def cancel(self, batch: Batch) -> Batch:
        if batch.status in RUNNING and batch.task is not None:
            batch.become("cancelling")
            batch.task.cancel()
        return batch

    def uses(self, file: StoredFile) -> bool:
        return any(file in (b.source, b.results, b.refused) for b in self._of.values() if b.status in RUNNING)

    async def close(self) -> None:
        for batch in self._of.values():
            self.cancel(batch)
        await asyncio.gather(*(b.task for b in self._of.values() if b.task is not None), return_exceptions=True)

    # ---- a run

    async def _run(self, batch: Batch) -> None:
        try:
            salt = batch.id
            batch.total = await asyncio.to_thread(lambda: sum(1 for _ in read_lines(batch.source.path, salt)))
            require(batch.total > 0, "the file holds no request")
            batch.become("in_progress")
            lines = read_lines(batch.source.path, salt)
            most = self._server.settings.max_concurrent
            recorded = set[str]()
            try:
                async with asyncio.timeout(WINDOW_S):
                    async with aclosing(
                        answer_lines(lines, {}, 0, answer=partial(self._answer, batch), most=most)
                    ) as results:
                        async for rows in results:
                            for row in rows:
                                await self._record(batch, row)
                                recorded.add(str(row["id"]))
                batch.become("completed")
            except TimeoutError:
                await self._record_expired(batch, recorded)
                batch.become("expired")
        except asyncio.CancelledError:
            batch.become("cancelled")
        except Exception as e:
            is_ours = isinstance(e, OutriderError | ApiError)
            batch.error = str(e) if is_ours else INTERNAL
            batch.become("failed")
            log.error("%s failed: %s", batch.id, e if is_ours else where(e))

    async def _record(self, batch: Batch, row: Json) -> None:
        line = await asyncio.to_thread(_encoded_line, row)  # an answer may have megabytes
        fine = answered_body(row) is not None
        which = "results" if fine else "refused"
        file = getattr(batch, which)
        if file is None:
            file = self._files.new(batch.client, f"{batch.id}_{'output' if fine else 'error'}.jsonl", "batch_output")
            setattr(batch, which, file)
        self._files.append(file, line)
        batch.completed += fine
        batch.failed += not fine

    async def _record_expired(self, batch: Batch, recorded: set[str]) -> None:
        """Writes a result for every line that has none, which says why, as OpenAI does."""
        message = "The batch's completion window ended before this line was answered."
        error = {"code": "batch_expired", "message": message}
        lines = await asyncio.to_thread(lambda: [*read_lines(batch.source.path, batch.id)])
        for line in lines:
            if line.id in recorded:
                continue
            try:
                custom_id = parse(line)[0]
            except BadLine as e:
                custom_id = e.custom_id or ""
            await self._record(batch, {"id": line.id, "custom_id": custom_id, "response": None, "error": error})

    async def _answer(self, batch: Batch, line: BatchLine, url: str, body: Json) -> tuple[int, Json]:
        if url != batch.request.endpoint:
            raise BadLine("mismatched_url", f"'url' must be the batch's endpoint, {batch.request.endpoint}.")
        body = {"priority": LOWEST_PRIORITY, **body}
        return await answered(self._server, line, url, body=body, client=batch.client, time_limit=WINDOW_S)


def _encoded_line(row: Json) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
