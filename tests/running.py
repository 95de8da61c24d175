"""A server of this process that runs in a thread while a test or a benchmark talks to it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.server.main import HttpServer


@contextmanager
def running(server: HttpServer, sockets: list[socket.socket] | None = None) -> Iterator[str]:
    """Its address, for as long as the block lasts."""
    thread = threading.Thread(target=server.run, kwargs={"sockets": sockets}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{(sockets or server.servers[0].sockets)[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
    assert not thread.is_alive(), "the server did not stop"
