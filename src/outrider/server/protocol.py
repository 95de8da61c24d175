"""Limits connections, as a thin layer over uvicorn's HTTP/1.1 protocol.

A connection waits for a request's head, for its body, for its answer to be written, or for the next request. Each wait
has a limit, counted from its beginning: a client that sends a byte now and then does not prolong it. When
`max_connections` are open, a new one replaces one that waits for its client, of the address with the most connections
the one that has waited longest; if none waits, one whose answer is not read, of an address with more connections than
its own; else it gets 503. All of this runs on the event loop.

A client that has sent its request may close its half of the connection and still read (`nc -N`), which looks exactly
like a client that has left. An interim response (100 Continue) tells them apart: the system of one that has left
answers with a reset.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections import Counter
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from ..platforms import descriptors
from .errors import ApiError
from .settings import ServerSettings
from .standing import Standing

log = logging.getLogger("outrider.server")
# bytes that the system (which doubles it) and this process may buffer for a client that does not read
SEND_BUFFER = 32 << 10
WRITE_BUFFER = 16 << 10
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# first and longest interval between two probes for a reset; doubled each time
PROBE_S = 0.02
PROBE_MOST_S = 5.0
# file descriptors for everything else, and for connections accepted in one batch
RESERVE = 64
BACKLOG = 64


class Connections:
    """State shared by the connections of one server."""

    def __init__(self, settings: ServerSettings, standing: Standing) -> None:
        self.settings = settings
        self.standing = standing
        self.max_connections = cap(settings.max_connections)
        # for their client, the longest first: for something it sends, and for it to read
        self.waiting: dict[BoundedProtocol, None] = {}
        self.unread: dict[BoundedProtocol, None] = {}
        self.open: set[BoundedProtocol] = set()
        self.closed = 0  # number of closed connections

    def to_replace(self, newcomer: BoundedProtocol) -> BoundedProtocol | None:
        """The connection that makes room for a new one: a client with many does not shut out those with few."""
        counts = Counter(one.address for one in self.open)
        if self.waiting:
            return max(self.waiting, key=lambda one: counts[one.address])  # the first of several: the longest waiting
        unread = max(self.unread, key=lambda one: counts[one.address], default=None)
        return unread if unread is not None and counts[unread.address] > counts[newcomer.address] else None


def cap(wanted: int) -> int:
    """Maximum connections by the process's limit of file descriptors, which is raised if permitted. The system's
    descriptor table gets its size now: if it grew with a connection, accepting that one would wait for a grace period
    of the kernel, a third of a second on a busy machine."""
    need = wanted + RESERVE + BACKLOG
    limit = descriptors.allow(need)
    room = wanted if limit is None else limit - RESERVE - BACKLOG
    most = max(8, min(wanted, room))
    descriptors.reserve(most + RESERVE + BACKLOG)
    return most


class BoundedProtocol(H11Protocol):
    def __init__(self, shared: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared = shared
        self._phase = ""
        self._timer: asyncio.TimerHandle | None = None
        self._answered = False  # at least one answer was not a refusal

    # ---- the connection

    @property
    def address(self) -> str:
        return "" if self.client is None else self.client[0]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        shared = self._shared
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            transport.set_write_buffer_limits(WRITE_BUFFER)
        shared.open.add(self)
        if len(shared.open) > shared.max_connections:
            replaced = shared.to_replace(self)
            if replaced is None:
                self._end(503, "Too many connections; try again in a moment.")
                return
            replaced.give_way()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.open.discard(self)
        self._shared.closed += 1
        if not self._answered and self.client is not None and not self._shared.settings.proxies:
            self._shared.standing.unused(self.client[0])
        self._enter("closed", None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns True to keep the connection open for the answer."""
        cycle = self.cycle
        sent = cycle is not None and not cycle.more_body and not cycle.response_started
        if not sent or cycle.scope["http_version"] != "1.1" or self.scheme == "https":  # TLS is never half-closed
            return False
        cycle.keep_alive = False
        self.transport.write(CONTINUE)
        self.loop.call_later(PROBE_S, self._probe, cycle, PROBE_S)
        return True

    def _probe(self, cycle: RequestResponseCycle, waited: float) -> None:
        """Probes for a reset until the answer begins; from then on, writing discovers it."""
        if cycle.response_started or self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if waited >= 1.0:
            self.transport.write(CONTINUE)
        then = min(2 * waited, PROBE_MOST_S)
        self.loop.call_later(then, self._probe, cycle, then)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    # ---- waiting for the client

    def _watch(self) -> None:
        """Determines what the connection waits for. uvicorn closes idle connections; a wait that interrupts idling is
        limited here."""
        settings = self._shared.settings
        if self.flow.write_paused:
            self._enter("unread", settings.stall_timeout)
        elif self.transport.is_closing():
            self._enter("closed", None)
        elif self.cycle is None or self.cycle.response_complete:
            idle = self.cycle is not None and self.timeout_keep_alive_task is not None
            self._enter("idle" if idle else "head", settings.idle_timeout if idle else settings.request_timeout)
        else:
            state = self.cycle.scope["state"]
            if state.get("abort") is None:
                state["abort"] = self.transport.abort
                state["answered"] = self._note_answer
            body = self.cycle.more_body
            self._enter("body" if body else "answer", settings.request_timeout if body else None)

    def _note_answer(self) -> None:
        self._answered = True

    def _enter(self, phase: str, seconds: float | None) -> None:
        if phase == self._phase:
            return
        self._phase = phase
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._shared.waiting.pop(self, None)
        self._shared.unread.pop(self, None)
        if seconds is not None:
            group = self._shared.unread if phase == "unread" else self._shared.waiting
            group[self] = None
            self._timer = self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        if self._phase == "idle":
            self.transport.close()
        elif self._phase == "unread":
            seconds = self._shared.settings.stall_timeout
            log.info("closed a connection: its client did not read its answer for %g s", seconds)
            self.transport.abort()
        else:
            log.info("refused a connection: its request's %s did not arrive in time", self._phase)
            self._end(408, "The request did not arrive in time.")

    def give_way(self) -> None:
        """Another connection needs the place."""
        self._shared.open.discard(self)
        self._enter("closed", None)
        self.transport.abort()

    def _end(self, status: int, message: str) -> None:
        """Sends an answer outside of any request, if the client still listens, and closes."""
        body = json.dumps(ApiError(status, message).body()).encode()
        head = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "Content-Type: application/json"]
        head += [f"Content-Length: {len(body)}", "Connection: close", *(["Retry-After: 1"] if status == 503 else [])]
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
            self.transport.close()
        else:
            self.transport.abort()  # the body never came: the route sees a disconnect

    def send_400_response(self, msg: str) -> None:
        self._end(400, "This is not a valid HTTP request.")

    def _unsupported_upgrade_warning(self) -> None:
        """No warning for Java's client, which offers HTTP/2 with every first request."""
