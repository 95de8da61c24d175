"""What stands before the routes: keys, body size, host names; and the count of what is in flight.

Plain ASGI, so that streaming and disconnects pass through untouched. The page, /health and /version are open; everything
else needs a key when keys are set.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, bad
from .settings import LOOPBACK, ServerSettings

OPEN_PATHS = ("/", "/health", "/version")
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
)


class Admission:
    """At most `most` sequences in flight. The engine queues; this only counts."""

    def __init__(self, settings: ServerSettings) -> None:
        self.most = settings.max_concurrent + settings.max_queued
        self.in_flight = 0
        self.closing = False

    @contextmanager
    def enter(self, sequences: int) -> Iterator[None]:
        if self.closing:
            raise ApiError(503, "The server is shutting down.", retry_after=5)
        if sequences > self.most:
            raise bad(f"This call asks for {sequences} answers at once; the server takes {self.most}.", "n")
        if self.in_flight + sequences > self.most:
            raise ApiError(429, f"The server is full ({self.in_flight} of {self.most} sequences in flight).", retry_after=1)
        self.in_flight += sequences
        try:
            yield
        finally:
            self.in_flight -= sequences


class Guard:
    """Middleware: host, origin, key and body size, in that order."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app, self._settings = app, settings
        self._keys = [k.encode() for k in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._host(headers)
            self._key(scope["path"], headers)
            length = headers.get(b"content-length", b"0")
            if not length.isdigit() or int(length) > self._settings.max_body:
                raise self._too_large()
        except ApiError as e:
            await e.response()(scope, receive, send)
            return
        got, refused = 0, False

        async def counted() -> Message:
            nonlocal got, refused
            message = await receive()
            got += len(message.get("body", b""))
            refused = got > self._settings.max_body  # a chunked body has no length to check beforehand
            return {"type": "http.disconnect"} if refused else message

        async def secured(message: Message) -> None:
            if refused:
                return  # whatever the app makes of the cut body, the answer is ours
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *SECURITY_HEADERS]
            await send(message)

        try:
            await self.app(scope, counted, secured)
        except ClientDisconnect:
            if not refused:
                raise
        if refused:
            await self._too_large().response()(scope, receive, send)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._settings.max_body} bytes.", code="body_too_large")

    def _host(self, headers: dict[bytes, bytes]) -> None:
        """A web page elsewhere must not drive this server: no foreign origins, and on loopback no foreign host names (DNS rebinding)."""
        host = headers.get(b"host", b"").decode("latin-1")
        if self._settings.loopback and _hostname(host) not in LOOPBACK:
            raise ApiError(403, "This server listens on loopback only; call it by localhost or 127.0.0.1.")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and urlsplit_netloc(origin) != host:
            raise ApiError(403, "Requests from other origins are not allowed.")

    def _key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if not self._keys or path in OPEN_PATHS or path.startswith("/page/"):
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        # compare with every key, in constant time each, so that timing tells nothing
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(401, "A valid API key is needed: send 'Authorization: Bearer KEY'.", code="invalid_api_key")


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def urlsplit_netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
