"""Damaged checkpoints: 500 truncations and bit flips of a small file of each format give a one-line error or a model.

Nothing else: no traceback of another kind, no hang, no allocation that the file's size does not justify.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import tiny
from tests.unit.weights import ggufs

from outrider.engine.text import Tokenizer
from outrider.types import OutriderError
from outrider.weights.files import fingerprint, from_gguf
from outrider.weights.load import load_target

ROUNDS = 500
SEED = 20


def damaged(data: bytes, rng: random.Random, header: int) -> bytes:
    """Cut it, or flip one to four bits, mostly in the header: that is where harm is done."""
    if rng.random() < 0.25:
        return data[: rng.randrange(len(data))]
    broken = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(header if rng.random() < 0.8 else len(data))
        broken[at] ^= 1 << rng.randrange(8)
    return bytes(broken)


def storm(path: Path, header: int, attempt: Callable[[], Any]) -> tuple[int, int]:
    sound = path.read_bytes()
    rng = random.Random(SEED)
    attempt()  # the sound file loads
    ok = bad = 0
    limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + 400_000  # kilobytes
    for i in range(ROUNDS):
        path.write_bytes(damaged(sound, rng, header))
        began = time.process_time()
        try:
            attempt()
            ok += 1
        except OutriderError as error:
            assert "\n" not in str(error) and len(str(error)) < 500, (i, str(error))
            bad += 1
        assert time.process_time() - began < 10, f"round {i} took too long"
    path.write_bytes(sound)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < limit
    return ok, bad


def test_safetensors(tmp_path: Path) -> None:
    folder = tiny.write_target("smollm2", tmp_path / "m")
    path = folder / "model.safetensors"
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    ok, bad = storm(path, header, lambda: load_target(folder))
    assert ok > 5 and bad > 200  # flips in the data are not seen; most others are


@pytest.mark.parametrize("name, arch", [("qwen3", "qwen3"), ("gemma4_e4b", "gemma4")])
def test_gguf(tmp_path: Path, name: str, arch: str) -> None:
    model: Any = tiny.target(name)
    path = ggufs.write(tmp_path / "m.gguf", arch, model.config, model.state_dict(), tokenizer=True)
    header = len(from_gguf(path, "m").gguf.header)  # type: ignore[union-attr]

    def attempt() -> None:
        files = from_gguf(path, "m")
        _, _, text = load_target(files)
        fingerprint(files)
        if text.build is not None:
            tokenizer = Tokenizer(text)
            tokenizer.decode(tokenizer.encode("the end <|im_end|>"))

    ok, bad = storm(path, header, attempt)
    assert ok > 5 and bad > 150


def test_config_json(tmp_path: Path) -> None:
    folder = tiny.write_target("gemma4_e4b", tmp_path / "m")
    path = folder / "config.json"
    storm(path, len(path.read_bytes()), lambda: load_target(folder))
