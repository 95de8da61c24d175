"""Images and sound by address: fetched from named hosts at public addresses only. The server here is on loopback, so most tests
say which addresses count as public; what is public is tested by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from unittest.mock import patch

import pytest

from outrider.server import media_fetch
from outrider.server.media_fetch import IMAGE, SOUND, public
from outrider.types import OutriderError

HOST = "pictures.example"


class Pictures(BaseHTTPRequestHandler):
    seen: ClassVar[list[tuple[str, str]]] = []
    stop: ClassVar[threading.Event]

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers["Host"]))
        if self.path == "/slow":
            self.stop.wait(30)
            return
        status = {"/away": 302, "/gone": 404}.get(self.path, 200)
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/cat?1")
        if self.path != "/endless":
            self.send_header("Content-Length", str({"/large": 5000}.get(self.path, 4)))
        self.end_headers()
        self.wfile.write(b"x" * 5000 if self.path in ("/large", "/endless") else b"meow")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    Pictures.seen = []
    Pictures.stop = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server.server_port
    Pictures.stop.set()
    server.shutdown()
    server.server_close()


def fetch(port: int, url: str, **more: object) -> bytes:
    options = {"addresses": lambda host, _: ["127.0.0.1"], "public": lambda _: True, "MAX_BYTES": 1000} | more
    with patch.multiple(media_fetch, **options):
        return media_fetch.fetch(url, f"{HOST}:{port}", IMAGE)


def test_a_named_host_is_asked_at_the_address_that_was_checked(port: int) -> None:
    """A second look-up, whose answer another may change, would be a way in."""
    looked: list[str] = []

    def resolve(host: str, _: int) -> list[str]:
        looked.append(host)
        return ["127.0.0.1"]

    assert fetch(port, f"http://{HOST}:{port}/cat?1", addresses=resolve) == b"meow"
    assert Pictures.seen == [("/cat?1", f"{HOST}:{port}")] and looked == [HOST]


@pytest.mark.parametrize(
    ("path", "said"),
    [("/away", "redirects are not followed"), ("/gone", "404"), ("/large", "more than"), ("/endless", "more than")],
)
def test_redirects_errors_and_large_files_are_refused(port: int, path: str, said: str) -> None:
    with pytest.raises(OutriderError, match=said):
        fetch(port, f"http://{HOST}:{port}{path}")
    assert len(Pictures.seen) == 1


def test_a_slow_host_is_given_up(port: int) -> None:
    with pytest.raises(OutriderError, match=r"more than 0\.3 s"):
        fetch(port, f"http://{HOST}:{port}/slow", SECONDS=0.3)


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/cat", "http://pictures.example/cat", "http://pictures.example.other.example:{port}/",
        "http://user@pictures.example:{port}/", "http://127.0.0.1:{port}/", "file:///etc/passwd", "ftp://pictures.example/",
        "http://pictures.example:99999/", "http://pictures.example:{port}/a\r\nX: y", "http://[::1/", "gopher:", "http:",
    ],
)  # fmt: skip
def test_other_hosts_ports_and_schemes_are_not_asked(port: int, url: str) -> None:
    with pytest.raises(OutriderError):
        fetch(port, url.replace("{port}", str(port)))
    assert not Pictures.seen


@pytest.mark.parametrize("found", [["127.0.0.1"], ["1.1.1.1", "127.0.0.1"], ["::ffff:127.0.0.1"], []])
def test_an_address_that_is_not_public_is_not_asked(port: int, found: list[str]) -> None:
    """If one of a host's addresses is private, none is connected to."""
    with pytest.raises(OutriderError, match="not public"):
        fetch(port, f"http://{HOST}:{port}/cat", addresses=lambda *_: found, public=public)
    assert not Pictures.seen


def test_what_is_public() -> None:
    inside = (
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:10.0.0.1", "2002:7f00:1::",
        "64:ff9b::7f00:1",
    )  # fmt: skip
    assert [address for address in inside if public(address)] == []
    assert public("1.1.1.1") and public("2606:4700:4700::1111")


def test_nothing_is_fetched_by_default() -> None:
    with pytest.raises(OutriderError, match="not fetched"):
        media_fetch.fetch("https://example.org/cat.png", "", IMAGE)


def test_errors_about_sound_speak_of_sound() -> None:
    with pytest.raises(OutriderError, match="sound is not fetched from the network"):
        media_fetch.fetch("https://example.org/a.wav", "", SOUND)
    with pytest.raises(OutriderError, match="is not an address of a sound"):
        media_fetch.fetch("ftp://example.org/a.wav", "example.org", SOUND)
