"""Checks before the routes: keys, body size, host names; and the number of sequences in flight.

Plain ASGI, so that streaming and disconnects pass through untouched. The page, health and version are open; everything
else needs a key when keys are set.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..types import OutriderError
from .errors import ApiError, api_error, bad, shutting_down
from .fair import WaitEstimate
from .settings import LOOPBACK, ServerSettings, read_keys

log = logging.getLogger("outrider.server")
CLIENT_PREFIX = "key-"
REFUSALS = (400, 401, 403, 404, 405, 413, 415)  # statuses that are the client's fault
OPEN_PATHS = ("/", "/health", "/v1/health", "/ping", "/livez", "/readyz", "/version")
LOCAL_SCHEMES = ("vscode-webview", "app", "tauri")  # pages of programs on this machine
REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
HEADERS = re.compile(r"[A-Za-z0-9_, -]{1,2048}")
USUAL_HEADERS = b"authorization, content-type, x-api-key"
SLASHES = re.compile("/{2,}")
CountAnswer = Callable[[str, int], None]  # is told the path and status of an answer
# characters of a path that may be logged: never a client's text
ROUTE = re.compile(r"/(v1/|api/)?[a-z/_-]{0,32}")
POLICY = (
    b"default-src 'self'; img-src 'self' data:; media-src data:; "
    b"frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", POLICY),
)


class Admission:
    """Limits the sequences in flight, of all clients, and of one client to its share of them while it has some."""

    def __init__(self, settings: ServerSettings) -> None:
        self.max_sequences = settings.max_concurrent + settings.max_queued
        self.share = self.max_sequences - self.max_sequences // 8  # so that one client alone never shuts out the others
        self.in_flight = 0
        self.closing = False
        self._of: dict[str, int] = {}
        self._estimate = WaitEstimate()

    @contextmanager
    def enter(self, sequences: int, client: str = "") -> Iterator[None]:
        num_own = self._of.get(client, 0)
        if self.closing:
            raise shutting_down()
        if sequences > self.max_sequences:
            raise bad(f"This call asks for {sequences} answers at once; the server takes {self.max_sequences}.", "n")
        if self.in_flight + sequences > self.max_sequences:
            message = f"The server is full ({self.in_flight} of {self.max_sequences} sequences in flight)."
            wait = self._estimate.until_free(self.in_flight + sequences - self.max_sequences)
            raise ApiError(429, message, retry_after=wait, code="server_full")
        if num_own > 0 and num_own + sequences > self.share:
            count = f"This client has {num_own} of the server's {self.max_sequences} sequences in flight"
            # others' places don't help it
            wait = self._estimate.until_free((num_own + sequences - self.share) * self.in_flight // num_own)
            raise ApiError(429, f"{count}; {self.share} are its share.", retry_after=wait, code="client_full")
        self.in_flight += sequences
        entered = self.in_flight
        began = time.monotonic()
        self._of[client] = num_own + sequences
        try:
            yield
        finally:
            self._estimate.held(time.monotonic() - began, max(entered, self.in_flight))
            self.in_flight -= sequences
            self._of[client] -= sequences
            if not self._of[client]:
                del self._of[client]


def client_of(key: bytes) -> str:
    """Identity of the client that holds this key.

    A digest of the key, not its place in the list: it survives restarts and edits of the key file, agrees between the
    ingresses of a cluster, and never passes to the holder of another key.
    """
    return CLIENT_PREFIX + hashlib.blake2b(key, digest_size=16, person=b"outrider-client").hexdigest()


def has_key(client: str) -> bool:
    """True if the client is known by a key, not by its address."""
    return client.startswith(CLIENT_PREFIX)


def prefix_namespace(client: str) -> bytes:
    """Salt that separates the cached prefixes of this client from those of others. Clients without a key share one."""
    if not has_key(client):
        return b""
    return hashlib.blake2b(client.encode(), digest_size=16, person=b"outrider-prefix").digest()


class Keys:
    """The valid API keys: those of the command line, and those of a file, which is read again on SIGHUP."""

    def __init__(self, settings: ServerSettings) -> None:
        self._keys = [k.encode() for k in settings.api_keys]
        self._command_line_key = settings.api_key
        self._file = settings.api_key_file

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, presented: bytes) -> str | None:
        """The client of a key. Compares with every key, in constant time each, so that timing reveals nothing."""
        matches = [hmac.compare_digest(presented, key) for key in self._keys]
        return client_of(presented) if any(matches) else None

    def reload(self) -> None:
        """Read the file again. One that can't be read changes nothing: a typing error must not open the server."""
        if self._file is None:
            log.warning("no --api-key-file to reload")
            return
        if self._file.exists() and not self._file.is_file():  # opening a fifo would stop the event loop
            log.error("the API keys are unchanged: %s is not a regular file", self._file)
            return
        try:
            self._keys = [k.encode() for k in read_keys(self._command_line_key, self._file)]
        except OutriderError as e:
            log.error("the API keys are unchanged: %s", e)
        else:
            log.info("reloaded %d API keys", len(self._keys))


def refusal(state: dict[str, object], error: ApiError, path: str) -> Response:
    """The answer of an error. Made outside of the error's frames: as a reference cycle it would keep the request's body
    until a full collection."""
    state["refusal"] = error.reason
    response = error.response(path)
    if error.code == "two_lengths":
        response.headers["connection"] = "close"
    return response


class Exchange:
    """One request and its answer: the address is brought into one form, the bytes of the body are counted, and the
    answer gets our headers, is counted and logged."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, max_body: int, count: CountAnswer) -> None:
        self._receive = receive
        self._send = send
        self._count = count
        self._max_body = max_body
        self._num_received = 0
        self.begun = False  # the answer has begun
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request_id = self.headers.get("x-request-id", "")
        self.id = request_id if REQUEST_ID.fullmatch(request_id) else uuid.uuid4().hex
        self.cors: list[tuple[bytes, bytes]] = []  # headers for a page of another origin
        self._is_head = scope["method"] == "HEAD"
        root = scope.get("root_path", "")  # what a proxy serves us under
        self.path = self._normal_path(scope["path"].removeprefix(root))
        client = str((scope.get("client") or ("local",))[0])
        self.state = {**scope.get("state", {}), "request_id": self.id, "client": client, "path": self.path}
        self.method = "GET" if self._is_head else scope["method"]
        self.scope = {**scope, "path": root + self.path, "method": self.method, "state": self.state}

    def _normal_path(self, path: str) -> str:
        # a target in absolute form, as it is sent to proxies: its host is the one meant
        if path.startswith(("http://", "https://")):
            self.headers["host"], _, path = path.partition("://")[2].partition("/")
        return "/" + SLASHES.sub("/", path.strip("/"))  # an address may be given with a / too many

    @property
    def is_preflight(self) -> bool:
        """A browser asks what a page of another origin may send."""
        return self.method == "OPTIONS" and "access-control-request-method" in self.headers and bool(self.cors)

    def check_length(self) -> None:
        """Refuse a body whose announced length is too large or no number."""
        length = self.headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or int(length) > self._max_body:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        message = f"The body is larger than {self._max_body} bytes (--max-body)."
        return ApiError(413, message, code="body_too_large")

    async def receive(self) -> Message:
        message = await self._receive()
        self._num_received += len(message.get("body", b""))
        if self._num_received > self._max_body:  # a chunked body has no length to check beforehand
            raise self._too_large()
        return message

    async def send(self, message: Message) -> None:
        self.begun = True
        if message["type"] == "http.response.start":
            self._note_status(message["status"])
            message["headers"] = [*message.get("headers", ()), *self._added_headers()]
        elif self._is_head:
            message = {**message, "body": b""}
        await self._send(message)

    def _note_status(self, status: int) -> None:
        note_answer = self.state.get("answered")
        if status not in REFUSALS and callable(note_answer):
            note_answer()
        if self.method == "POST" or status >= 400:  # of those that worked only the ones that were work
            self._count(self.path, status)
        if status >= 400:
            shown = self.path if ROUTE.fullmatch(self.path) else "(other)"
            why = self.state.get("refusal", "refused")
            log.info("refused: id %s, route %s %s, %d %s", self.id, self.method, shown, status, why)

    def _added_headers(self) -> list[tuple[bytes, bytes]]:
        added = [*SECURITY_HEADERS, (b"x-request-id", self.id.encode()), *self.cors]
        warning = self.state.get("warning")
        if warning is not None:
            added.append((b"x-outrider-warning", warning.encode("latin-1", "replace")))
        return added


class RequestGuard:
    """Middleware: host, origin, key and body size, in that order. What is raised behind it is answered, counted and
    logged here."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, count: CountAnswer, keys: Keys) -> None:
        self.app = app
        self._settings = settings
        self._count = count
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send, max_body=self._settings.max_body, count=self._count)
        exchange.cors = self._cross(exchange.headers)
        try:
            await self._answer(exchange)
        except Exception as error:
            if exchange.begun:
                raise  # too late for another answer: the connection is cut
            refused = refusal(exchange.state, api_error(error, exchange.id), exchange.path)
            await refused(exchange.scope, receive, exchange.send)

    async def _answer(self, exchange: Exchange) -> None:
        """Check the request and pass it on; a preflight is answered here."""
        headers = exchange.headers
        # two lengths: a proxy in between may believe the other
        if "content-length" in headers and "transfer-encoding" in headers:
            raise bad("Content-Length and Transfer-Encoding exclude each other.", code="two_lengths")
        self._host(headers)
        if exchange.is_preflight:
            await Response(status_code=204)(exchange.scope, exchange.receive, exchange.send)
            return
        self._origin(headers)
        exchange.state["client"] = self._key(exchange.path, headers) or exchange.state["client"]
        exchange.check_length()
        # a client that left in the middle of a body gets no answer, and needs no traceback
        with suppress(ClientDisconnect):
            await self.app(exchange.scope, exchange.receive, exchange.send)

    def _host(self, headers: dict[str, str]) -> None:
        """Refuses foreign host names on loopback (DNS rebinding)."""
        host = headers.get("host", "")
        origin = headers.get("origin", "")
        if self._settings.loopback and _hostname(host) not in (*LOOPBACK, *self._settings.trusted_hosts):
            raise ApiError(403, "This server listens on loopback only; call it by localhost or 127.0.0.1.")
        open_to_all = not self._settings.loopback and not self._keys
        if origin and open_to_all and not self._own(_hostname(host)) and not self._may_call(origin):
            named = "by a name only with an API key or with --trusted-host NAME."
            raise ApiError(403, f"Pages can call this server by its address; {named}", code="foreign_host")

    def _origin(self, headers: dict[str, str]) -> None:
        """A web page elsewhere must not drive this server. Its preflight is answered, so that it can read why."""
        host = headers.get("host", "")
        origin = headers.get("origin", "")
        if origin and origin.partition("://")[2] != host and not self._may_call(origin):
            message = "Requests from other origins are not allowed; see --allowed-origin."
            raise ApiError(403, message, code="foreign_origin")

    def _own(self, name: str) -> bool:
        """A name that no page elsewhere can have pointed to this machine (DNS rebinding): an address, this machine's
        name, one in no domain, or one that was named to us."""
        machine = socket.gethostname().lower()
        with suppress(ValueError):
            return bool(ip_address(name))
        return "." not in name or name in (machine, f"{machine}.local", *self._settings.trusted_hosts)

    def _may_call(self, origin: str) -> bool:
        allowed = self._settings.allowed_origins
        if "*" in allowed or origin.rstrip("/") in {a.rstrip("/") for a in allowed}:
            return True
        return self._settings.loopback and local_origin(origin)

    def _cross(self, headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
        """The CORS headers without which a browser hides our answer, or refusal, from a page of another origin. Such a
        page may send any headers: those of OpenAI's and Anthropic's browser clients are many."""
        origin = headers.get("origin", "")
        if not origin:
            return []
        wanted = headers.get("access-control-request-headers", "")
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"vary", b"Origin"),
            (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
            (b"access-control-max-age", b"600"),
            (b"access-control-allow-headers", wanted.encode() if HEADERS.fullmatch(wanted) else USUAL_HEADERS),
            (b"access-control-expose-headers", b"x-request-id, x-outrider-warning, retry-after"),
        ]

    def _key(self, path: str, headers: dict[str, str]) -> str | None:
        """The client, by its key; None if there are no keys or none is needed."""
        if not self._keys or path in OPEN_PATHS or path.startswith("/page/"):
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")  # as Anthropic's clients send it
        client = self._keys.find(key.encode("latin-1").strip())
        if client is None:
            raise ApiError(401, "A valid API key is needed: send 'Authorization: Bearer KEY'.", code="invalid_api_key")
        return client


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def local_origin(origin: str) -> bool:
    """A page that this machine serves, on any port, or one of a program that runs here: an editor, a desktop app."""
    scheme, _, host = origin.partition("://")
    if scheme in LOCAL_SCHEMES:
        return bool(host)
    return scheme in ("http", "https") and _hostname(host) in LOOPBACK
