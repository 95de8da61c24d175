"""Hostile images for attack_server.py: the files and requests of the image tests, and files that are as large as a
server's limits allow, each of which decodes for a second or more."""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
from tests.e2e.test_server_images import HOSTILE, PICTURE  # noqa: E402
from tests.unit.engine.test_image_decoder import BAD, GOOD, mutated, png, saved, scans  # noqa: E402

MUTATED = 168
SIDE = 8000  # 64 million pixels, the server's limit
Body = dict[str, Any]


LARGE = {
    "colours": lambda: png(SIDE, SIDE, 8, 2, bytes(SIDE * (1 + 3 * SIDE))),
    "alpha": lambda: png(SIDE, SIDE, 8, 6, bytes(SIDE * (1 + 4 * SIDE))),
    "sixteen bits": lambda: png(SIDE, SIDE, 16, 0, bytes(SIDE * (1 + 2 * SIDE))),
    "one bit": lambda: png(SIDE, SIDE, 1, 0, bytes(SIDE * (1 + SIDE // 8))),
    "scans": lambda: scans(50, 4000),  # few enough to be read
    "many scans": lambda: scans(600, 4000),
}


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def fine() -> str:
    """A sound picture, for the client that behaves."""
    return url(saved(PICTURE, "PNG"))


def large() -> list[str]:
    return [url(make()) for make in LARGE.values()]


def small() -> list[str]:
    files = [make() for make in GOOD.values()] + [make() for make, _ in BAD.values()]
    return [url(data) for data in files + [mutated(seed) for seed in range(MUTATED)]]


def asked(*images: object) -> Body:
    parts = [{"type": "image_url", "image_url": image} for image in images]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "x"}]}], "max_tokens": 2}


def bodies(rng: random.Random, small: list[str], large: list[str]) -> Iterator[tuple[str, Body]]:
    """Name and body of one request after the other, without end: mostly small files, so that each has its turn."""
    while True:
        rng.shuffle(small)
        for i, one in enumerate(small):
            yield "image file", asked({"url": one})
            if i % 3 == 0:
                yield "image request", asked(rng.choice(HOSTILE))
            if i % 12 == 0:
                yield "large image", asked({"url": rng.choice(large)})
            if i % 100 == 50:
                yield "many large images", asked(*({"url": rng.choice(large)} for _ in range(12)))
