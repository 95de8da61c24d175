"""The front of a cluster: receives HTTP requests, sends each to one replica and relays its answer. Independent of Ray.

Contract: if a replica dies before the first byte of an answer was sent, the client does not notice; the request goes to
another replica, at most `retries` times. After the first byte, the stream ends with an error event in its own protocol.
If no replica takes a request within `wait` seconds, the answer is a 503 with Retry-After. When a client disconnects,
its request is cancelled in the replica. Hosts, origins, keys and sizes are checked here, by the same code as in a
single server (`limits.RequestGuard`); a replica, which is a single server's whole app, does everything else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from ..server.answer import Wire
from ..server.anthropic import AnthropicWire
from ..server.call import ClientGone, unless_gone
from ..server.errors import ApiError
from ..server.limits import SECURITY_HEADERS, Keys, RequestGuard
from ..server.metrics import route_of
from ..server.ollama import OllamaWire
from ..server.openai import OpenAIWire
from ..server.responses import ResponsesWire
from ..server.settings import ServerSettings
from .owner import LISTS, merged_list, owner_of, replica_tag
from .prefix import prefix_keys
from .totals import Snapshot, Totals

log = logging.getLogger("outrider.cluster")
LONG_BODY = 8 << 10  # bodies from this many bytes on are parsed in a thread
KEPT_HEADERS = (b"content-type", b"accept", b"x-outrider-stats", b"anthropic-version", b"user-agent")
GUARD_HEADERS = {name for name, _ in SECURITY_HEADERS} | {b"x-request-id"}  # the guard writes them
WIRES: dict[str, Callable[[], Wire]] = {
    "messages": AnthropicWire,
    "responses": ResponsesWire,
    "ollama_chat": OllamaWire,
    "ollama_generate": lambda: OllamaWire(chat=False),
}


@dataclass(frozen=True)
class Forward:
    """A request on its way to a replica."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    client: str  # the client's identity, for fairness and limits
    prefix: tuple[bytes, ...] = ()
    owner: str = ""  # tag of the replica that must answer (owner.py); empty: any


class ReplicaLost(Exception):
    """The replica that had the request died or is being removed."""


class WrongReplica(Exception):
    """The replica does not hold the object that the request names, though another one may."""


class ReplicaRefused(Exception):
    """Every replica and the queue are full."""


class ReplicaSet(Protocol):
    """The replicas, as the ingress sees them."""

    def send(self, request: Forward) -> AsyncIterator[str | list[Message]]:
        """Yields the name of the replica that accepted the request, then the messages of its answer. If closed early,
        the replica drops the request. Raises TimeoutError if there is no replica and none is starting."""
        ...

    async def snapshots(self) -> list[Snapshot]: ...

    async def gather(self, request: Forward) -> list[tuple[int, bytes]]:
        """Status and body of every replica's answer."""
        ...


class _Answer:
    """The answer to one request: the messages received, and those sent to the client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._head: Message | None = None  # held back until the body begins
        self.flowing = False
        self.stream = False

    async def take(self, message: Message, replica: str) -> None:
        if message["type"] == "http.response.start":
            headers = [(k, v) for k, v in message.get("headers", ()) if k.lower() not in GUARD_HEADERS]
            kind = next((v for k, v in headers if k.lower() == b"content-type"), b"application/json")
            self.stream = not kind.startswith(b"application/json")
            self._head = {**message, "headers": [*headers, (b"x-outrider-replica", replica.encode())]}
            return
        if self._head is not None:
            head = self._head
            self._head = None
            # this replica is shutting down; others are not
            if head["status"] == 503 and b'"shutting_down"' in message.get("body", b""):
                raise ReplicaLost
            self.flowing = True
            await self._send(head)
        await self._send(message)


class Ingress:
    def __init__(self, replicas: ReplicaSet, settings: ServerSettings, retries: int, wait: float) -> None:
        self._replicas = replicas
        self._retries = retries
        self._wait = wait
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"outrider_cluster_{name}", text, labels, registry=self.registry)

        self._retried = counter("retries", "Requests sent to another replica after a death, unseen.")
        self._broken = counter("broken_streams", "Streams ended by a replica's death.")
        self._unavailable = counter("unavailable", "Requests that found no replica.")
        self._left = counter("cancelled", "Clients that left before their answer's end.")
        self._answers = counter("answers", "Answers of the ingress, by route and status.", "route", "status")
        self._totals = Totals()
        self._guard = RequestGuard(self._route, settings, self._count, keys=Keys(settings))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard(scope, receive, send)

    def _count(self, path: str, status: int) -> None:
        self._answers.labels(route_of(path), str(status)).inc()

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoints = {"/metrics": self._metrics, "/health": self._health, "/readyz": self._health, "/livez": self._live}
        if scope["path"] in endpoints and scope["method"] == "GET":
            await (await endpoints[scope["path"]]())(scope, receive, send)
            return
        forward = await _read(scope, receive)
        if scope["path"] in LISTS and scope["method"] == "GET":
            await (await self._listed(forward))(scope, receive, send)
            return
        try:
            await unless_gone(Request(scope, receive), self._relay(forward, _Answer(send)))
        except ClientGone:
            self._left.inc()
        except asyncio.CancelledError:  # Ray Serve cancels when a client disconnects
            self._left.inc()
            raise

    # ---- one request

    async def _relay(self, forward: Forward, answer: _Answer) -> None:
        for attempt in range(self._retries + 1):
            try:
                await self._once(forward, answer, last=attempt == self._retries)
                return
            except WrongReplica:
                continue
            except ReplicaLost:
                if answer.flowing:
                    self._broken.inc()
                    await self._break(forward, answer)
                    return
                if attempt < self._retries:
                    self._retried.inc()
                    log.warning("a replica was lost before its answer began; retrying on another")
            except TimeoutError:
                break
            except ReplicaRefused:
                raise ApiError(429, "Every replica is full.", retry_after=1, code="server_full") from None
        self._unavailable.inc()
        raise ApiError(503, "No replica can take the request now.", retry_after=5, code="no_replica")

    async def _once(self, forward: Forward, answer: _Answer, last: bool) -> None:
        """One attempt. Raises TimeoutError if no replica accepted the request in time. `last`: no further attempt
        follows, so a replica without the named object may answer that its owner is gone."""
        async with aclosing(self._replicas.send(forward)) as messages:  # type: ignore[type-var]  # an async generator
            async with asyncio.timeout(self._wait):
                first = await anext(messages, None)
            if not isinstance(first, str):
                raise ReplicaLost
            if forward.owner and forward.owner != replica_tag(first) and not last:
                raise WrongReplica
            ended = False
            async for batch in messages:
                assert isinstance(batch, list)
                for message in batch:
                    await answer.take(message, first)
                    ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            if not ended:
                raise ReplicaLost

    async def _break(self, forward: Forward, answer: _Answer) -> None:
        error = ApiError(503, "The replica that wrote this answer is gone; ask again.", code="replica_lost")
        if not answer.stream:
            raise RuntimeError("a replica was lost in the middle of a body that is no stream")  # closes the connection
        wire = WIRES.get(route_of(forward.path), OpenAIWire)()
        await answer.take({"type": "http.response.body", "body": wire.error(error).encode(), "more_body": False}, "")

    # ---- about the cluster

    async def _metrics(self) -> Response:
        text = self._totals.text(await self._replicas.snapshots(), self.registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _health(self) -> Response:
        seen = await self._replicas.snapshots()
        ready = [s for s in seen if s.healthy]
        body = {
            "status": "ok" if ready else "no replica",
            "replicas": len(seen),
            "ready": len(ready),
            "in_flight": sum(s.load for s in seen),
        }
        return JSONResponse(body, status_code=200 if ready else 503, headers={} if ready else {"Retry-After": "5"})

    async def _listed(self, forward: Forward) -> Response:
        """Lists a client's stored objects on all replicas."""
        answers = await self._replicas.gather(forward)
        lists = [body for status, body in answers if status == 200]
        if not lists:
            raise ApiError(503, "No replica can take the request now.", retry_after=5, code="no_replica")
        return JSONResponse(merged_list(lists))

    async def _live(self) -> Response:
        return JSONResponse({"status": "alive"})


async def _read(scope: Scope, receive: Receive) -> Forward:
    body = await Request(scope, receive).body()
    state = scope["state"]
    forwarded = [(k, v) for k, v in scope["headers"] if k in KEPT_HEADERS]
    headers = (
        *forwarded,
        (b"x-request-id", state["request_id"].encode()),
        (b"content-length", str(len(body)).encode()),
    )
    prefix = prefix_keys(body) if scope["method"] == "POST" else ()
    owner = partial(owner_of, scope["path"], body)
    return Forward(
        method=scope["method"],
        path=scope["path"],
        query=scope.get("query_string", b""),
        headers=headers,
        body=body,
        client=state["client"],
        prefix=prefix,
        owner=owner() if len(body) <= LONG_BODY else await asyncio.to_thread(owner),
    )
