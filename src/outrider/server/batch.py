"""Answers a file of requests: OpenAI's batch format in, one result per line out. A line goes through the server's own
pipeline, as if a client had sent it.

Contract: every line of the input has exactly one line in the output, whatever ends the run and however often it is
restarted. A result's `id` identifies the input line's number and content (and the run's model and seed), results are
appended and synced before their requests are dropped, and a torn last line is cut off at the next start. Results are in
the order in which they finished; `custom_id` joins them to their requests.

A request without a seed gets one made from its `custom_id` and the run's seed, so a resumed run gives the same texts as
an uninterrupted one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fastapi import Request
from starlette.types import Message, Receive

from ..engine.text import LONG_TEXT
from ..platforms.locks import lock_file
from ..types import OutriderError, bad_input, require
from .answer import Json
from .errors import ApiError, bad, check_size
from .openai import OpenAIWire
from .runner import MAX_FAILURES
from .schema import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from .app import Server

ROUTES: dict[str, type[ChatRequest | CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
RETRY_S = 0.5
MAX_DEATHS = 3
BatchRequestLine = tuple[str, str, Json]  # custom_id, url, body
Answerer = Callable[["BatchLine", str, Json], Awaitable[tuple[int, Json]]]  # (line, url, body) -> status and body


@dataclass(frozen=True)
class BatchLine:
    number: int  # from 1
    id: str
    text: bytes


@dataclass
class BatchProgress:
    total: int
    done: int = 0  # lines with a result, including earlier runs
    failed: int = 0  # results of this run with another status than 200
    resumed: int = 0  # lines that already had a result
    new_tokens: int = 0


class BadLine(Exception):
    """A line that is not a request."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


def read_lines(source: Path, salt: str) -> Iterator[BatchLine]:
    """The requests of a file, skipping blank lines. `salt`: model and seed, which answers depend on."""
    plain = not source.exists() or source.is_file() or source.is_dir()
    require(plain, f"cannot read {source}: not a plain file, and a run reads its requests more than once")
    with bad_input(OSError, lambda e: f"cannot read {source}: {e.strerror}"), source.open("rb") as file:
        for number, raw in enumerate(file, 1):
            text = raw.strip()
            if text:
                digest = hashlib.sha256(salt.encode() + b"\n" + text).hexdigest()[:12]
                yield BatchLine(number, f"batch_req_{number}_{digest}", text)


def first_model(source: Path) -> str:
    """The model named by the first line that names one."""
    for line in read_lines(source, ""):
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            name = json.loads(line.text)["body"]["model"]
            if isinstance(name, str) and name:
                return name
    raise OutriderError(f"no line of {source} names a model in its body; give --model")


BEGINNING = b'{"id": "batch_req_'  # of every result


class Results:
    """The output file, open for one run at a time. Only whole lines count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        plain = not path.exists() or path.is_file() or path.is_dir()
        require(plain, f"cannot write {path}: not a plain file, and results are read again when a run goes on")
        with bad_input(OSError, lambda e: f"cannot write {path}: {e.strerror}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = path.open("a+b")
        try:
            lock_file(self._file)
        except OSError:
            self._file.close()
            raise OutriderError(f"another run is writing {path}; wait for it or choose another --out") from None

    def close(self) -> None:
        with suppress(OSError):  # a full disk was reported when it was written
            self._file.close()

    def finished(self) -> set[str]:
        """Ids of the lines with a result. Cuts off an incomplete last line: its request runs again."""
        ids: set[str] = set()
        whole = 0
        self._file.seek(0)
        for number, raw in enumerate(self._file, 1):
            # an incomplete line behind results can only be a result
            if not raw.endswith(b"\n") and (ids or raw.startswith(BEGINNING[: len(raw)])):
                break
            whole += len(raw)
            try:
                id = str(json.loads(raw)["id"]) if raw.startswith(BEGINNING) else None
            except (ValueError, RecursionError):
                id = None
            if id is None:
                raise OutriderError(f"{self._path}, line {number}: not a result of a batch; choose another --out")
            require(id not in ids, f"{self._path}, line {number}: a second result for {id}; choose another --out")
            ids.add(id)
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)
        return ids

    def append(self, rows: Sequence[Json]) -> None:
        if rows:
            lines = [json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n" for row in rows]
            again = "the same command goes on where this one was"
            with bad_input(OSError, lambda e: f"cannot write {self._path}: {e.strerror}; {again}"):
                self._file.write(b"".join(lines))
                self._file.flush()
                os.fsync(self._file.fileno())


async def answer_lines(
    lines: Iterator[BatchLine], names: dict[str, int], seed: int, answer: Answerer, most: int
) -> AsyncGenerator[list[Json], None]:
    """Yields results as they come, for at most `most` lines at once. Closing it cancels running lines. names:
    custom_ids of lines with a result, and their line numbers. answer: may raise BadLine or ApiError."""
    running: set[asyncio.Future[Json]] = set()
    try:
        while True:
            for line in islice(lines, most - len(running)):  # in order: of two equal custom_ids the first counts
                request = await _parsed(line)
                running.add(asyncio.ensure_future(_result(line, request, names=names, seed=seed, answer=answer)))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            yield await asyncio.gather(*done)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@dataclass(frozen=True)
class BatchFile:
    """Answers a file of requests with any engine. Calls `tell` at every change."""

    source: Path
    out: Path
    model: str
    seed: int = 0
    tell: Callable[[BatchProgress], None] = lambda _: None

    async def run(self, answer: Answerer, most: int) -> BatchProgress:
        """Answers lines without a result, each once, `most` at a time. Engines continue while results are written."""
        salt = f"{self.model} {self.seed}"
        known = [line.id for line in read_lines(self.source, salt)]
        require(bool(known), f"{self.source} holds no request")
        with closing(Results(self.out)) as results:
            finished = results.finished()
            strange = finished.difference(known)
            others = "other requests, of another model or of another --seed"
            example = min(strange, default="")
            require(not strange, f"{self.out} holds results of {others} ({example}): choose another --out")
            progress = BatchProgress(len(known), done=len(finished), resumed=len(finished))
            names: dict[str, int] = {}
            for line in read_lines(self.source, salt) if finished else ():
                with suppress(BadLine):
                    if line.id in finished:
                        names.setdefault(parse(line)[0], line.number)
            self.tell(progress)
            fresh = (line for line in read_lines(self.source, salt) if line.id not in finished)

            async def checked(line: BatchLine, url: str, body: Json) -> tuple[int, Json]:
                model = body.get("model")
                if isinstance(model, str) and model not in ("", self.model):
                    message = f"The model '{model[:100]}' does not exist; this run has '{self.model}'."
                    raise ApiError(404, message, "model", code="model_not_found")
                return await answer(line, url, body)

            results_of_lines = answer_lines(fresh, names, self.seed, answer=checked, most=most)
            async with aclosing(results_of_lines) as batches_of_rows:
                async for rows in batches_of_rows:
                    results.append(rows)
                    progress.done += len(rows)
                    for row in rows:
                        body = answered_body(row)
                        if body is None:
                            progress.failed += 1
                        else:
                            progress.new_tokens += int(body["usage"]["completion_tokens"])
                    self.tell(progress)
        return progress


async def _parsed(line: BatchLine) -> BatchRequestLine | BadLine:
    """Parses a line; a long one off the event loop."""
    try:
        return parse(line) if len(line.text) <= LONG_TEXT else await asyncio.to_thread(parse, line)
    except BadLine as error:
        return error


async def _result(
    line: BatchLine, request: BatchRequestLine | BadLine, *, names: dict[str, int], seed: int, answer: Answerer
) -> Json:
    """Takes the line's custom_id here: a later line with the same one may have been refused before this one was
    answered."""
    custom_id: str | None = None
    try:
        if isinstance(request, BadLine):
            raise request
        custom_id, url, body = request
        if names.get(custom_id, line.number) < line.number:
            raise BadLine("duplicate_custom_id", f"An earlier line has the custom_id '{custom_id[:100]}' too.")
        names[custom_id] = line.number
        if body.get("stream"):
            raise bad("A batch can't stream; drop 'stream'.", "stream")
        status, answer_body = await answer(line, url, seeded(body, seed, custom_id))
    except BadLine as e:
        error = {"code": e.code, "message": f"Line {line.number}: {e}"}
        return {"id": line.id, "custom_id": custom_id or e.custom_id, "response": None, "error": error}
    except ApiError as e:
        status = e.status
        answer_body = e.body()
    response = {"status_code": status, "request_id": line.id, "body": answer_body}
    return {"id": line.id, "custom_id": custom_id, "response": response, "error": None}


def answered_body(row: Json) -> Any:
    """The answer in a result, if there is one."""
    response: Any = row["response"]
    return response["body"] if response is not None and response["status_code"] == 200 else None


def answer_file(server: Server, batch: BatchFile) -> BatchProgress:
    """Answers a file with a server that refuses nothing because of load (`Server.offline`), and closes the server at
    the end."""

    async def run() -> BatchProgress:
        server.pool.start()
        try:
            return await batch.run(partial(offline_answer, server), server.settings.max_concurrent)
        finally:
            await server.close()

    return asyncio.run(run())


async def offline_answer(server: Server, line: BatchLine, url: str, body: Json) -> tuple[int, Json]:
    result = await answered(server, line, url, body=body, client="")
    advice = "results so far are kept, start again to go on"
    require(server.pool.healthy, f"the engine failed {MAX_FAILURES} times in a row; {advice}")
    return result


async def answered(
    server: Server, line: BatchLine, url: str, body: Json, *, client: str, time_limit: float | None = None
) -> tuple[int, Json]:
    """Answers a line as if the client had sent it. `time_limit`: seconds for each of its phases, instead of the
    server's."""
    text = json.dumps(body) if len(line.text) <= LONG_TEXT else await asyncio.to_thread(json.dumps, body)
    raw = text.encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    state: dict[str, object] = {"client": client, "path": url, "request_id": line.id}
    if time_limit is not None:
        state["time_limit"] = time_limit
    scope = {"type": "http", "method": "POST", "path": url, "query_string": b"", "headers": headers, "state": state}
    while True:
        request = Request(scope, receiving(raw, asyncio.Event()))
        result = await server.completed(request, OpenAIWire(ROUTES[url]))
        if result is not None:
            return result
        await asyncio.sleep(RETRY_S)  # the server is full, or shutting down, which cancels this task


def receiving(body: bytes, gone: asyncio.Event) -> Receive:
    """A request whose body has arrived, and whose client disconnects when `gone` is set."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        message = next(messages, None)
        if message is not None:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    return receive


class WorkerLost(Exception):
    """A worker died. Raised by its constructor or by its calls."""


@dataclass(eq=False)
class _WorkerSlot:
    worker: asyncio.Task[Answerer] | None = None  # starting or running
    lines: int = 0  # lines it is answering


class WorkerPool:
    """Answers lines with several workers. If one dies, another replaces it and its lines go to others. A line that was
    running in `MAX_DEATHS` deaths is refused, so that one poisonous request cannot end the run."""

    def __init__(self, make: Callable[[], Awaitable[Answerer]], workers: int) -> None:
        """make: starts a worker. It, and calls of the worker, raise WorkerLost if the worker dies."""
        self._make = make
        self._slots = [_WorkerSlot() for _ in range(workers)]

    async def answer(self, line: BatchLine, url: str, body: Json) -> tuple[int, Json]:
        for _ in range(MAX_DEATHS):
            slot = min(self._slots, key=lambda s: s.lines)
            slot.worker = worker = slot.worker or asyncio.ensure_future(self._made())
            slot.lines += 1
            try:
                return await (await asyncio.shield(worker))(line, url, body)
            except WorkerLost:
                if slot.worker is worker:  # this line is the first to see the death
                    slot.worker = None
            finally:
                slot.lines -= 1
        message = f"{MAX_DEATHS} workers were lost while they had this request."
        raise ApiError(500, message, code="engine_error")

    async def _made(self) -> Answerer:
        """Starts a worker. If it dies while loading, no line is to blame."""
        for _ in range(MAX_DEATHS):
            try:
                return await self._make()
            except WorkerLost:
                continue
        lost = f"{MAX_DEATHS} workers in a row were lost while loading the model"
        raise OutriderError(f"{lost}; results so far are kept")


def seeded(body: Json, seed: int, custom_id: str) -> Json:
    """Adds a seed to a body without one, from the run's seed and the line's custom_id."""
    if body.get("seed") is not None:
        return body
    digest = hashlib.sha256(f"{seed} {custom_id}".encode("utf-8", "replace")).digest()
    return {**body, "seed": int.from_bytes(digest[:4], "big") >> 1}


def parse(line: BatchLine) -> BatchRequestLine:
    """Reads a line; raises BadLine if it is not a request."""
    try:
        check_size(line.text)
        row = json.loads(line.text)
    except ApiError as error:
        raise BadLine("line_too_complex", error.message) from None
    except (ValueError, RecursionError):
        raise BadLine("invalid_json", "not valid JSON.") from None
    if not isinstance(row, dict):
        raise BadLine("invalid_line", "not a JSON object.")
    custom_id = row.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadLine("invalid_custom_id", "'custom_id' must be a string that is not empty.")
    if row.get("method", "POST") != "POST":
        raise BadLine("invalid_method", "'method' must be POST.", custom_id)
    url = row.get("url")
    if not isinstance(url, str) or url not in ROUTES:
        raise BadLine("invalid_url", f"'url' must be one of {', '.join(ROUTES)}.", custom_id)
    body = row.get("body")
    if not isinstance(body, dict):
        raise BadLine("invalid_body", "'body' must be a JSON object.", custom_id)
    return custom_id, url, body
