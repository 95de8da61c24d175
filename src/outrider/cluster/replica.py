"""One replica: an engine and a single server's whole app around it, called with a request as data. Independent of Ray.

`answer` runs the app for one request and yields its ASGI messages as they come; messages that are ready at the same
time form one list. If it is closed or cancelled early, the app sees a disconnected client, and the engine drops the
request within a cycle.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from fastapi import FastAPI
from starlette.types import Message, Scope

from ..llm import LLM
from ..server.app import create_app
from ..server.batch import receiving
from ..server.fair import SPARE
from ..server.model_info import ServedModel
from ..server.settings import ServerSettings
from .config import ClusterConfig
from .ingress import Forward
from .owner import replica_tag
from .totals import Snapshot


def load(config: ClusterConfig) -> ServedModel:
    """Loads the model as `outrider serve` does."""
    assert config.max_concurrent is not None, "not placed"
    llm = LLM.load(
        config.model, config.load, engine=replace(config.load.engine, max_batch=config.max_concurrent + SPARE)
    )
    if llm.group is not None:
        llm.group.watch.grace = 0.0  # the ingress retries elsewhere: an error event from here would end the request
    return ServedModel.of(llm)


class Replica:
    def __init__(self, name: str, backend: ServedModel, settings: ServerSettings) -> None:
        self.name = name
        self._app: FastAPI = create_app(backend, replace(settings, replica_tag=replica_tag(name)))
        self._server = self._app.state.server
        self._lifespan: AbstractAsyncContextManager[object] = self._app.router.lifespan_context(self._app)

    async def start(self) -> None:
        await self._lifespan.__aenter__()

    async def stop(self) -> None:
        await self._lifespan.__aexit__(None, None, None)

    @property
    def healthy(self) -> bool:
        return bool(self._server.pool.healthy)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            self.name, self.healthy, self._server.admission.in_flight, metrics=self._server.metrics.text().decode()
        )

    async def whole(self, request: Forward) -> tuple[int, bytes]:
        """Status and body of a short answer."""
        messages = [message async for batch in self.answer(request) for message in batch]
        return int(messages[0]["status"]), b"".join(message.get("body", b"") for message in messages)

    async def answer(self, request: Forward) -> AsyncIterator[list[Message]]:
        out: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        work = asyncio.ensure_future(self._app(_scope(request), receiving(request.body, gone), out.put))
        work.add_done_callback(lambda _: out.put_nowait(None))  # after the last message
        try:
            ended = False
            while not ended:
                ready = [await out.get()]
                while not out.empty():
                    ready.append(out.get_nowait())
                ended = ready[-1] is None
                batch = [message for message in ready if message is not None]
                if batch:
                    yield batch
            work.result()
        finally:
            gone.set()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


def _scope(request: Forward) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "method": request.method,
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "headers": [(b"host", b"replica"), *request.headers],
        "client": (request.client, 0),
        "server": ("replica", 0),
        "state": {},
    }
