"""Runs the app under uvicorn: graceful shutdown, logs without prompts."""

from __future__ import annotations

import asyncio
import logging
from socket import socket

import uvicorn

from .app import create_app
from .prepare import Backend
from .settings import ServerSettings


class HttpServer(uvicorn.Server):
    """On SIGTERM or Ctrl-C: no new requests; running ones get the grace time, then they are aborted and told so."""

    def __init__(self, backend: Backend, settings: ServerSettings) -> None:
        self.app = create_app(backend, settings)
        self._settings = settings
        super().__init__(
            uvicorn.Config(
                self.app,
                host=settings.host,
                port=settings.port,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(settings.shutdown_grace) + 5,
            )
        )

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        state = self.app.state.server
        state.admission.closing = True

        async def end() -> None:
            await asyncio.sleep(self._settings.shutdown_grace)
            await state.runner.stop()

        timer = asyncio.create_task(end())
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def serve(backend: Backend, settings: ServerSettings) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    HttpServer(backend, settings).run()
