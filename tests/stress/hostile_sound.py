"""Hostile sound for attack_server.py: the files and requests of the sound tests, in messages and as transcriptions, and
files as large as a server's limits allow, each of which decodes for a second or more."""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
from tests.e2e.test_server_audio import HOSTILE, HOSTILE_URLS, WAV  # noqa: E402
from tests.hostile_audio import encoded, refused, tolerated  # noqa: E402

TEN_MINUTES = 600 * 16_000
# the server's limits: 4 MiB of body, ten minutes, eight channels, 384 kHz
LARGE: dict[str, Callable[[], bytes]] = {
    "ten minutes of silence": lambda: encoded(np.zeros(TEN_MINUTES, np.int16), kind="FLAC"),
    "ten minutes of speech-like Opus": lambda: encoded(tones(150), kind="OGG", subtype="OPUS"),
    "eight channels": lambda: encoded(np.zeros((TEN_MINUTES // 8, 8), np.int16), kind="FLAC"),
    "384 kHz": lambda: encoded(np.zeros(384_000 * 30, np.int16), 384_000, "FLAC"),
    "an hour": lambda: encoded(np.zeros(6 * TEN_MINUTES, np.int16), kind="FLAC"),
}


@dataclass(frozen=True)
class Sounds:
    small: list[bytes]
    large: list[bytes]


@dataclass(frozen=True)
class SoundRequest:
    name: str
    path: str
    options: dict[str, Any]  # of httpx


def tones(seconds: int) -> np.ndarray:
    times = np.arange(seconds * 16_000) / 16_000
    noise = np.random.default_rng(0).standard_normal(len(times))
    return (0.3 * np.sin(2 * np.pi * (200 + 50 * np.sin(times)) * times) + 0.05 * noise).astype(np.float32)


def fine() -> str:
    """A clip for the client that behaves, in base64."""
    return base64.b64encode(WAV).decode()


def all_sounds() -> Sounds:
    files = [data for _, data in refused()] + [data for _, data in tolerated()]
    return Sounds([data for data in files if len(data) < 1 << 20], [make() for make in LARGE.values()])


def in_chat(name: str, *parts: object) -> SoundRequest:
    content = [*parts, {"type": "text", "text": "x"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    return SoundRequest(name, "/v1/chat/completions", {"json": body})


def clip_part(data: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def transcription(name: str, data: bytes) -> SoundRequest:
    form = {"files": {"file": ("a.wav", data)}, "data": {"max_completion_tokens": "2"}}
    return SoundRequest(name, "/v1/audio/transcriptions", form)


def requests(rng: random.Random, sounds: Sounds) -> Iterator[SoundRequest]:
    """One request after the other, without end: mostly small files, so that each has its turn."""
    small = list(sounds.small)
    parts = [{"type": "input_audio", "input_audio": content} for content in HOSTILE]
    parts += [{"type": "audio_url", "audio_url": content} for content in HOSTILE_URLS]
    while True:
        rng.shuffle(small)
        for i, data in enumerate(small):
            yield in_chat("sound file", clip_part(data))
            if i % 2 == 0:
                yield transcription("transcription", data)
            if i % 3 == 0:
                yield in_chat("sound request", rng.choice(parts))
            if i % 12 == 0:
                yield transcription("large transcription", rng.choice(sounds.large))
            if i % 24 == 0:
                yield in_chat("large sound", clip_part(rng.choice(sounds.large)))
            if i % 100 == 50:
                yield in_chat("many clips", *[clip_part(rng.choice(small)) for _ in range(12)])
