"""Fetches images and clips behind http(s) addresses, only from hosts that the operator allows (`--allow-image-hosts`).

A request must not make the server call its own network: every address of the host must be public, and the connection
goes to a checked address, so that a second DNS look-up cannot lead elsewhere. Redirects are not followed; size and time
are limited.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

from ..types import OutriderError, bad_input, require

MAX_BYTES = 20 << 20
SECONDS = 10.0  # wall time for one file, from DNS look-up to last byte
TO_IPV4 = ip_network("64:ff9b::/96")  # a gateway
PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class MediaKind:
    """Words for one kind of media in errors, and its Accept header."""

    noun: str
    subject: str  # the beginning of a sentence about all of it
    example: str
    accept: str


READ_BYTES = 1 << 16
IMAGE = MediaKind(noun="image", subject="images are", example="data:image/png;base64,...", accept="image/*")
SOUND = MediaKind(noun="sound", subject="sound is", example="data:audio/wav;base64,...", accept="audio/*")


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    path: str  # with its query
    secure: bool


def addresses(host: str, port: int) -> list[str]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(socket_address[0]) for *_, socket_address in infos]


def public(address: str) -> bool:
    """True for public addresses; false for private, loopback, link-local, multicast and reserved ones, also if embedded
    in an IPv6 address."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is not None:
            return inner.is_global and not inner.is_multicast
        if ip in TO_IPV4:
            return False
    return ip.is_global and not ip.is_multicast


def fetch(url: str, hosts: str, kind: MediaKind) -> bytes:
    """The bytes behind a URL. Blocks; every failure is a one-line error. hosts: allowed hosts separated by commas, each
    HOST or HOST:PORT for a port other than the scheme's."""
    allowed_hosts = frozenset(host.strip().lower() for host in hosts.split(",") if host.strip())
    off = f"{kind.subject} not fetched from the network; send a data URL ({kind.example})"
    require(bool(allowed_hosts), off)
    address = _address(url, allowed_hosts, kind)
    host = address.host[:80]
    deadline = time.monotonic() + SECONDS
    try:
        ip_addresses = addresses(address.host, address.port)
        if not ip_addresses or not all(map(public, ip_addresses)):
            raise OutriderError(f"{kind.subject} not fetched from {host}: its address is not public")
        return _get(address, ip_addresses[0], kind, deadline=deadline)
    except TimeoutError:
        raise OutriderError(f"the {kind.noun} from {host} took more than {SECONDS:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = " ".join(str(error).split())[:80] or type(error).__name__
        raise OutriderError(f"cannot fetch the {kind.noun} from {host}: {why}") from None


def _address(url: str, allowed_hosts: frozenset[str], kind: MediaKind) -> Address:
    article = "an image" if kind is IMAGE else "a sound"
    with bad_input((ValueError, KeyError), lambda _: f"{url[:60]!r} is not an address of {article}"):
        parts = urlsplit(url)
        host = (parts.hostname or "").lower()
        port = parts.port or PORTS[parts.scheme]
    named = host if port == PORTS[parts.scheme] else f"{host}:{port}"
    if named not in allowed_hosts or "@" in parts.netloc:
        raise OutriderError(f"{kind.subject} not fetched from {named[:80]!r}: --allow-image-hosts does not name it")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not path.isascii() or any(c <= " " for c in path):
        raise OutriderError(f"the address of {article} must be percent-encoded ASCII")
    return Address(host, port, path, secure=parts.scheme == "https")


def _get(address: Address, ip_address: str, kind: MediaKind, deadline: float) -> bytes:
    """ip_address: a checked address of the host."""

    def seconds_left() -> float:
        return max(0.01, deadline - time.monotonic())

    host = address.host
    connection = http.client.HTTPConnection(host, address.port)
    connection.sock = socket.create_connection((ip_address, address.port), seconds_left())
    try:
        if address.secure:
            connection.sock = ssl.create_default_context().wrap_socket(connection.sock, server_hostname=host)
        raw = connection.sock
        raw.settimeout(seconds_left())
        host_header = host if address.port in PORTS.values() else f"{host}:{address.port}"
        headers = {"Host": host_header, "Accept": kind.accept, "Accept-Encoding": "identity", "User-Agent": "outrider"}
        connection.request("GET", address.path, headers=headers)
        response = connection.getresponse()
        if response.status != 200:
            redirect = " (redirects are not followed)" if 300 <= response.status < 400 else ""
            message = f"cannot fetch the {kind.noun} from {host[:80]}: status {response.status}{redirect}"
            raise OutriderError(message)
        body = bytearray()
        while True:
            part = response.read1(READ_BYTES)
            if not part:
                return bytes(body)
            body += part
            require(len(body) <= MAX_BYTES, f"the {kind.noun} from {host[:80]} has more than {MAX_BYTES:,} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError
            raw.settimeout(seconds_left())
    finally:
        connection.close()
