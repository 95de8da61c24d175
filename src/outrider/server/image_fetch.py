"""Images behind http(s) addresses, fetched only from hosts that the operator names (`--allow-image-hosts`).

A request must not make the server call its own network: every address that a host's name has must be public, and the
connection goes to one that was checked, so that a second look-up cannot lead elsewhere. Redirects are not followed;
size and time are bounded.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from ipaddress import IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

from ..types import OutriderError, bad_input, require

MAX_BYTES = 20 << 20
SECONDS = 10.0  # of wall time for one image, from the look-up to the last byte
OFF = "images are not fetched from the network; send a data URL (data:image/png;base64,...)"
TO_IPV4 = ip_network("64:ff9b::/96")  # a gateway
PORTS = {"http": 80, "https": 443}


def addresses(host: str, port: int) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def public(address: str) -> bool:
    """No private, loopback, link-local, multicast or reserved address, nor one of these inside an IPv6 address."""
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if inner is not None:
            return inner.is_global and not inner.is_multicast
        if found in TO_IPV4:
            return False
    return found.is_global and not found.is_multicast


def fetch_image(url: str, hosts: str) -> bytes:
    """The bytes behind an address. Blocks; every failure is a one-line error. hosts: those that may be asked, by
    commas: HOST, or HOST:PORT for another port than its scheme's."""
    named = frozenset(host.strip().lower() for host in hosts.split(",") if host.strip())
    require(bool(named), OFF)
    host, port, path, secure = _parts(url, named)
    deadline = time.monotonic() + SECONDS
    try:
        found = addresses(host, port)
        if not found or not all(map(public, found)):
            raise OutriderError(f"images are not fetched from {host[:80]}: its address is not public")
        return _get(host, port, path, secure, found[0], deadline)
    except TimeoutError:
        raise OutriderError(f"the image from {host[:80]} took more than {SECONDS:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = " ".join(str(error).split())[:80] or type(error).__name__
        raise OutriderError(f"cannot fetch the image from {host[:80]}: {why}") from None


def _parts(url: str, hosts: frozenset[str]) -> tuple[str, int, str, bool]:
    with bad_input((ValueError, KeyError), lambda _: f"{url[:60]!r} is not an address of an image"):
        parts = urlsplit(url)
        host = (parts.hostname or "").lower()
        port = parts.port or PORTS[parts.scheme]
    named = host if port == PORTS[parts.scheme] else f"{host}:{port}"
    if named not in hosts or "@" in parts.netloc:
        raise OutriderError(f"images are not fetched from {named[:80]!r}: --allow-image-hosts does not name it")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not path.isascii() or any(c <= " " for c in path):
        raise OutriderError("an image's address must be percent-encoded ASCII")
    return host, port, path, parts.scheme == "https"


def _get(host: str, port: int, path: str, secure: bool, address: str, deadline: float) -> bytes:
    left = lambda: max(0.01, deadline - time.monotonic())  # noqa: E731
    connection = http.client.HTTPConnection(host, port)
    connection.sock = socket.create_connection((address, port), left())
    try:
        if secure:
            connection.sock = ssl.create_default_context().wrap_socket(connection.sock, server_hostname=host)
        raw = connection.sock
        raw.settimeout(left())
        where = host if port in PORTS.values() else f"{host}:{port}"
        headers = {"Host": where, "Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "outrider"}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        if answer.status != 200:
            more = " (redirects are not followed)" if 300 <= answer.status < 400 else ""
            raise OutriderError(f"cannot fetch the image from {host[:80]}: status {answer.status}{more}")
        body = bytearray()
        while part := answer.read1(1 << 16):
            body += part
            require(len(body) <= MAX_BYTES, f"the image from {host[:80]} has more than {MAX_BYTES:,} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError
            raw.settimeout(left())
        return bytes(body)
    finally:
        connection.close()
