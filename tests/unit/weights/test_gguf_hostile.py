"""Hostile GGUF headers: lying counts, overflows, duplicates, unknown types. Each is one line that says what is wrong."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from outrider.ops.formats import BLOCKS
from outrider.types import OutriderError
from outrider.weights.load import load_target


def header(keys: list[bytes], tensors: list[bytes], num_keys: int = -1, num_tensors: int = -1) -> bytes:
    """A GGUF file of these keys and tensors; the counts may be lies."""
    counts = (len(tensors) if num_tensors < 0 else num_tensors, len(keys) if num_keys < 0 else num_keys)
    head = b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(keys + tensors)
    return head + b"\0" * (-len(head) % 32 + 4096)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def number(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def described(name: str, shape: list[int], code: int, offset: int = 0) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", code, offset)


LLAMA = text("general.architecture") + struct.pack("<I", 8) + text("llama")
HOSTILE = {
    "tensors": (header([LLAMA], [], num_tensors=2**64 - 1), "tensor list runs past the end"),
    "keys": (header([LLAMA], [], num_keys=2**64 - 1), "metadata runs past the end"),
    "text": (header([text("a") + struct.pack("<IQ", 8, 2**62)], []), "'a' runs past the end"),
    "array": (header([text("a") + struct.pack("<IIQ", 9, 0, 2**62)], []), "'a' runs past the end"),
    "array of arrays": (header([text("a") + struct.pack("<IIQ", 9, 9, 1)], []), "unknown type 9"),
    "alignment of 0": (header([LLAMA, number("general.alignment", 0)], []), "alignment 0 makes no sense"),
    "huge alignment": (header([LLAMA, number("general.alignment", 2**31)], []), "alignment 2147483648"),
    "key twice": (header([LLAMA, LLAMA], []), "'general.architecture' is there twice"),
    "tensor twice": (header([LLAMA], [described("x", [32], 0), described("x", [32], 0)]), "'x' is there twice"),
    "no dimension": (header([LLAMA], [described("x", [], 0)]), "0 dimensions"),
    "overflow": (header([LLAMA], [described("x", [2**32, 2**32], 0)]), "larger than the file"),
    "offset": (header([LLAMA], [described("x", [32], 0, offset=2**64 - 1)]), "larger than the file"),
    "part of a block": (header([LLAMA], [described("x", [33], 2)]), "no whole Q4_0 blocks"),
    "long name": (header([LLAMA], [described("x" * 2000, [32], 0)]), "garbled"),
    "line feed": (header([LLAMA], [described("a\nb", [32], 0)]), "garbled"),
    "long architecture": (header([LLAMA[:32] + text("a" * 10_000)], []), "'a{40}' is not supported"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    data, match = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    with pytest.raises(OutriderError, match=match) as caught:
        load_target(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("code", [4, 9, 15, 31, 99, 2**32 - 1])
def test_an_unknown_type_is_refused_with_the_names_of_all_known_ones(code: int, tmp_path: Path) -> None:
    """IQ4 was supported and missing from the list."""
    path = tmp_path / "unknown.gguf"
    path.write_bytes(header([LLAMA], [described("x", [256], code)]))
    with pytest.raises(OutriderError, match=f"unsupported type {code} ") as caught:
        load_target(path)
    for name in (*BLOCKS, "F32", "F16", "BF16"):
        assert name in str(caught.value)
