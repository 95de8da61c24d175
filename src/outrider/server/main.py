"""Runs the app under uvicorn: bounded connections, graceful shutdown, logs without prompts."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time

import uvicorn

from ..types import OutriderError
from .app import create_app
from .model_info import ServedModel
from .model_pool import ModelPool
from .protocol import BACKLOG, BoundedProtocol, Connections
from .settings import ServerSettings
from .trim import share_one_heap, trim

TIDY_S = 10.0


class HttpServer(uvicorn.Server):
    """On SIGTERM or Ctrl-C, new requests get 503; running ones get the grace time, then end with an error."""

    def __init__(self, models: ServedModel | ModelPool, settings: ServerSettings) -> None:
        self.app = create_app(models, settings)
        self._settings = settings
        self.connections = Connections(settings, self.app.state.server.pool.standing)
        super().__init__(
            uvicorn.Config(
                self.app,
                host=settings.host,
                port=settings.port,
                http=functools.partial(BoundedProtocol, self.connections),  # type: ignore[arg-type]
                ws="none",
                root_path=settings.root_path,
                proxy_headers=bool(settings.proxies),
                forwarded_allow_ips=settings.proxies,
                backlog=BACKLOG,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=int(min(settings.idle_timeout, 1 << 30)) + 1,  # inf: never
                timeout_graceful_shutdown=5,
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        # In a terminal and without a key file to reload, SIGHUP means that the terminal was closed: the server ends.
        reloads = self._settings.api_key_file is not None or not sys.stderr.isatty()
        here = threading.current_thread() is threading.main_thread()  # signals arrive in the main thread only
        if sys.platform != "win32" and reloads and here:
            loop.add_signal_handler(signal.SIGHUP, self.app.state.server.keys.reload)
        await super().startup(sockets)
        self._tidying = asyncio.create_task(self._tidy())

    async def _tidy(self) -> None:
        """Returns memory of closed connections and large bodies to the system, but only while no request runs: the
        garbage collector and malloc_trim hold locks that every thread needs."""
        before = (0, 0)
        admission = self.app.state.server.admission
        while True:
            await asyncio.sleep(TIDY_S)
            now = (self.connections.closed, self.server_state.total_requests)
            if now != before and not admission.in_flight:
                before = now
                await asyncio.to_thread(trim)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Keeps listening while running requests finish, so that new requests get a 503."""
        self._tidying.cancel()
        state = self.app.state.server
        state.admission.closing = True
        deadline = time.monotonic() + self._settings.shutdown_grace
        while state.admission.in_flight and time.monotonic() < deadline and not self.force_exit:
            await asyncio.sleep(0.02)
        await state.pool.stop()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Opens the server's socket before anything slow begins. Port 0: any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, so that asyncio disables Nagle's algorithm; else each answer waits 40 ms for its
    # reader's ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # on Windows SO_REUSEADDR would let two servers have one port
    exclusive = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
    listener.setsockopt(socket.SOL_SOCKET, exclusive, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)  # so that a second server on this port also fails now
    except OSError as e:
        listener.close()
        advice = "choose another --port or --host"
        raise OutriderError(f"cannot listen on {host}:{port}: {e.strerror or e}; {advice}") from None
    return listener


def address(settings: ServerSettings, listener: socket.socket) -> str:
    """The URL for clients."""
    scheme = "http" if settings.ssl_certfile is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


class JsonLines(logging.Formatter):
    """Formats log records as lines of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        level = record.levelname.lower()
        message = record.getMessage()
        return json.dumps({"time": when, "level": level, "logger": record.name, "message": message})


def set_up_logs(level: str, as_json: bool) -> None:
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if as_json else plain)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def serve(models: ServedModel | ModelPool, settings: ServerSettings, listener: socket.socket) -> None:
    set_up_logs(settings.log_level, settings.log_json)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time gains nothing from threads
    share_one_heap()
    # A step releases the GIL at every operation, and waits up to this long for it while another thread computes.
    sys.setswitchinterval(0.0002)
    server = HttpServer(models, settings)
    for model in server.app.state.server.pool.loaded:
        model.tokenizer_process.start()
        model.grammars.start()
    # Commands collect garbage seldom (cli); here failed requests may hold bodies of megabytes, and a collection stops
    # all threads, the longer the more objects connections have left: so collect often, which keeps it short
    # (docs/lab/log.md).
    gc.set_threshold(700, 10, 3)
    gc.collect()
    # these objects are permanent: a collection over all of them would stop all threads for a tenth of a second
    gc.freeze()
    server.run(sockets=[listener])
