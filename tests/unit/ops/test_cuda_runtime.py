"""Compiled CUDA kernels are kept between two starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider.ops.cuda import runtime


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names requested from a compiler that returns the name as machine code."""
    sources: list[str] = []

    def image(source: str, arch: str, flags: dict[str, int | str]) -> bytes:
        sources.append(f"{source} {arch} {flags}")
        return sources[-1].encode()

    monkeypatch.setattr(runtime, "image", image)
    monkeypatch.setattr(runtime, "compiler", lambda: None)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return sources


def test_a_kernel_is_compiled_once_for_each_set_of_flags(compiled: list[str]) -> None:
    first = runtime.kept_image("a", "90", {"TOKENS": 4})
    assert runtime.kept_image("a", "90", {"TOKENS": 4}) == first and len(compiled) == 1
    others = [
        runtime.kept_image("a", "90", {"TOKENS": 8}),
        runtime.kept_image("a", "90a", {"TOKENS": 4}),
        runtime.kept_image("b", "90", {"TOKENS": 4}),
    ]
    assert len({first, *others}) == 4 and len(compiled) == 4


def test_another_header_is_another_kernel(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.kept_image("a", "90", {})
    monkeypatch.setattr(runtime, "headers", lambda: {"units.cuh": "other"})
    runtime.kept_image("a", "90", {})
    assert len(compiled) == 2


def test_a_damaged_file_is_made_anew(compiled: list[str], tmp_path: Path) -> None:
    code = runtime.kept_image("a", "90", {})
    (file,) = (tmp_path / "cache" / "cuda").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert runtime.kept_image("a", "90", {}) == code and runtime.kept_image("a", "90", {}) == code
    assert len(compiled) == 2


def test_where_nothing_can_be_written_it_is_compiled_each_time(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    monkeypatch.setattr(runtime, "cache_path", lambda *parts: in_the_way.joinpath(*parts))
    assert runtime.kept_image("a", "90", {}) == runtime.kept_image("a", "90", {}) and len(compiled) == 2


def test_others_may_read_what_is_kept_and_nothing_else_is_left(compiled: list[str], tmp_path: Path) -> None:
    """A cache that an image was warmed with, and another user serves from."""
    runtime.kept_image("a", "90", {})
    (file,) = (tmp_path / "cache" / "cuda").iterdir()
    assert file.suffix == ".cubin" and file.stat().st_mode & 0o044 == 0o044 & ~umask()


def umask() -> int:
    old = os.umask(0o022)
    os.umask(old)
    return old
