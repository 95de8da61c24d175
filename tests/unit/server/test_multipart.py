"""Forms as clients send them, and hostile ones: the parts' own bytes, or one line that says what is wrong."""

from __future__ import annotations

import random

import httpx
import pytest

from outrider.server.errors import ApiError
from outrider.server.multipart import MAX_PARTS, FormPart, read_form, refuse_other_types

KIND = "multipart/form-data; boundary=x"


def read(raw: bytes, kind: str = KIND) -> dict[str, FormPart]:
    return read_form(kind, raw, "the part 'file'")


def part(name: str, content: bytes, more: str = "") -> bytes:
    return f'--x\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"


def test_bytes_arrive_as_a_client_sent_them() -> None:
    """Sound is binary: line ends, boundaries that are almost one and empty contents stay what they are."""
    rng = random.Random(3)
    contents = [rng.randbytes(70_000), b"\r\n--x\r", b"\r\n\r\n", b"", b"\n", b"--", b"\r\n--\r\n"]
    for content in contents:
        request = httpx.Request("POST", "http://a", files={"file": ("ü.wav", content)}, data={"model": "whisper-1"})
        parts = read(request.read(), request.headers["content-type"])
        assert parts == {"file": FormPart(content, "ü.wav"), "model": FormPart(b"whisper-1")}


def test_of_two_parts_with_a_name_the_last_counts_and_nameless_ones_are_left_out() -> None:
    raw = b"preamble\r\n" + part("a", b"1") + part("a", b"2") + b"--x\r\n\r\nnameless\r\n--x--\r\nepilogue"
    assert read(raw) == {"a": FormPart(b"2")}
    assert read(part("a", b"1", '; filename="b c.wav"') + b"--x--") == {"a": FormPart(b"1", "b c.wav")}


def test_a_part_that_looks_like_a_message_is_only_bytes() -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="file"\r\nContent-Type: message/rfc822\r\n\r\n'
    assert read(head + b"Subject: a\r\n\r\nb\r\n--x--\r\n")["file"].content == b"Subject: a\r\n\r\nb"


@pytest.mark.parametrize(
    ("raw", "kind", "said"),
    [
        (b"", KIND, "ends before its closing boundary"),
        (b"\xff" * 40, KIND, "ends before its closing boundary"),
        (part("a", b"1"), KIND, "ends before its closing boundary"),
        (part("a", b"1") + b"--x--", "multipart/form-data", "must be multipart/form-data"),
        (part("a", b"1") + b"--x--", "multipart/mixed; boundary=x", "must be multipart/form-data"),
        (b"", "multipart/form-data; boundary*=a'b'%ff", "ends before its closing boundary"),
        (b"".join(part(str(i), b"") for i in range(MAX_PARTS + 1)) + b"--x--", KIND, "more than 64 parts"),
    ],
)
def test_what_is_no_form_is_refused(raw: bytes, kind: str, said: str) -> None:
    with pytest.raises(ApiError, match=said) as error:
        read(raw, kind)
    assert error.value.status == 400


def test_noise_is_read_or_refused() -> None:
    rng = random.Random(5)
    good = part("file", b"RIFF", '; filename="a"') + part("model", b"m") + b"--x--\r\n"
    for _ in range(300):
        raw = bytearray(good)
        for _ in range(rng.randint(1, 9)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        try:
            read(bytes(raw))
        except ApiError as error:
            assert error.status == 400


def test_headers_of_a_part_are_bounded() -> None:
    assert read(part("a" * 5000, b"1") + b"--x--") == {}


def test_other_bodies_are_refused_by_their_type() -> None:
    refuse_other_types("Multipart/Form-Data; boundary=x")
    with pytest.raises(ApiError, match="send 'Content-Type: multipart/form-data'") as error:
        refuse_other_types("application/json")
    assert error.value.status == 415


def test_a_text_that_is_not_unicode_is_refused() -> None:
    assert FormPart(b" de ").text("language") == "de"
    with pytest.raises(ApiError, match="language is not valid UTF-8"):
        FormPart(b"\xff").text("language")
