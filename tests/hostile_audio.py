"""Sound files that attack a decoder, generated: truncated, with lying headers, of 255 channels, with samples that are
not numbers, bombs, and other kinds of files under a sound file's name."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator

import numpy as np
import soundfile
from tests import tiny_audio

NOT_NUMBERS = (np.nan, np.inf, -np.inf, 1e38, -3e30)


def encoded(samples: np.ndarray, rate: int = 16_000, kind: str = "WAV", subtype: str | None = None) -> bytes:
    """samples: [n] or [n, channels]."""
    out = io.BytesIO()
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    with soundfile.SoundFile(out, "w", rate, channels, subtype, format=kind) as file:
        for at in range(0, len(samples), 1 << 14):  # libsndfile's encoder of Vorbis overflows the stack on long writes
            file.write(samples[at : at + (1 << 14)])
    return out.getvalue()


def wav(
    data: bytes = b"\0\0" * 1600, *, channels: int = 1, rate: int = 16_000, bits: int = 16, tag: int = 1,
    data_size: int | None = None, riff_size: int | None = None,
) -> bytes:  # fmt: skip
    """A WAV file whose header says anything."""
    block = max(1, channels * bits // 8) & 0xFFFF
    fmt = struct.pack("<HHIIHH", tag, channels & 0xFFFF, rate, (rate * block) & 0xFFFFFFFF, block, bits)
    size = len(data) if data_size is None else data_size
    body = b"WAVEfmt " + struct.pack("<I", len(fmt)) + fmt + b"data" + struct.pack("<I", size) + data
    return b"RIFF" + struct.pack("<I", len(body) if riff_size is None else riff_size) + body


def valid() -> dict[str, bytes]:
    """One file of each kind."""
    samples = tiny_audio.samples(4_000)
    return {
        "wav": encoded(samples), "wav24": encoded(samples, subtype="PCM_24"), "float": encoded(samples, subtype="FLOAT"),
        "flac": encoded(samples, kind="FLAC"), "ogg": encoded(samples, kind="OGG"),
        "opus": encoded(samples, kind="OGG", subtype="OPUS"), "mp3": encoded(samples, kind="MP3"),
    }  # fmt: skip


def refused() -> Iterator[tuple[str, bytes]]:
    """(what it is, the file): each must be refused in one line."""
    for size in (1, 2, 3, 4, 8, 12, 36, 43):
        yield f"wav of {size} bytes", wav()[:size]
    for channels in (0, 9, 16, 255, 256, 1_024, 65_535):
        yield f"{channels} channels", wav(channels=channels, data=bytes(4_096))
    for rate in (0, 1, 100, 3_999, 384_001, 2**31 - 1, 2**32 - 1):
        yield f"{rate} Hz", wav(rate=rate)
    for bits in (0, 33, 64, 128, 65_535):
        yield f"{bits} bits", wav(bits=bits)
    for tag in (0, 5, 0x55, 0x161, 0x1234, 0xFFFF):
        yield f"format {tag:#x}", wav(tag=tag)
    yield "no samples", wav(b"")
    for value in NOT_NUMBERS:
        samples = tiny_audio.samples(4_000)
        samples[1_234] = value
        yield f"a sample of {value}", encoded(samples, subtype="FLOAT")
        yield f"a sample of {value} at 44.1 kHz", encoded(samples, 44_100, subtype="FLOAT")
        yield f"a sample of {value} in doubles", encoded(samples.astype(np.float64), subtype="DOUBLE")
    silence = np.zeros(16_000 * 3_600, np.int16)  # an hour
    flac = encoded(silence, kind="FLAC")
    assert len(flac) < 1 << 20
    yield "an hour of silence in a small flac", flac
    yield "the same whose header says nothing", unknown_length(flac)
    eight = np.zeros((16_000 * 400, 8), np.int16)
    yield "eight channels of silence", encoded(eight, kind="FLAC")
    yield "384 kHz for a minute", encoded(np.zeros(384_000 * 60, np.int16), 384_000, "FLAC")
    yield "an hour of silence in ogg", encoded(np.zeros(16_000 * 600, np.float32), kind="OGG")
    yield "31 seconds", encoded(np.zeros(16_000 * 31, np.int16))
    yield "one sample beyond 30 seconds", encoded(np.zeros(16_000 * 30 + 1, np.int16))
    yield "minutes of mp3", encoded(np.zeros(16_000 * 120, np.float32), kind="MP3")
    others = {
        "text": b"RIFF is a word", "nothing but zeros": bytes(4_096), "html": b"<html><audio src=x></audio></html>",
        "m4a": b"\0\0\0\x20ftypM4A \0\0\0\0" + bytes(64), "webm": b"\x1aE\xdf\xa3" + bytes(64),
        "png": b"\x89PNG\r\n\x1a\n" + bytes(64), "zip": b"PK\x03\x04" + bytes(64), "avi": b"RIFF\x40\0\0\0AVI " + bytes(64),
        "aiff": encoded(tiny_audio.samples(100), kind="AIFF", subtype="PCM_16"),
        "au": encoded(tiny_audio.samples(100), kind="AU", subtype="PCM_16"),
        "w64": encoded(tiny_audio.samples(100), kind="W64", subtype="PCM_16"), "midi": b"MThd" + bytes(64),
        "flac's mark alone": b"fLaC", "ogg's mark alone": b"OggS", "mp3's mark alone": b"\xff\xfb",
        "id3 alone": b"ID3\x04\0\0\0\0\0\0", "id3 of 256 MB": b"ID3\x04\0\0\x7f\x7f\x7f\x7f" + bytes(512),
        "flac of noise": b"fLaC" + np.random.default_rng(1).bytes(4_096),
        "ogg of noise": b"OggS" + np.random.default_rng(2).bytes(4_096),
        "svx": b"FORM\0\0\0\x40" + b"8SVX" + bytes(64), "caf": b"caff\0\1\0\0" + bytes(64),
    }  # fmt: skip
    yield from others.items()


def tolerated() -> Iterator[tuple[str, bytes]]:
    """(what it is, the file): each is heard or refused in one line; a decoder must survive it."""
    files = valid()
    for name, data in files.items():
        for part in (0.1, 0.3, 0.5, 0.9, 0.99):
            yield f"{name}, {part:.0%} of it", data[: int(len(data) * part)]
        rng = np.random.default_rng(len(data))
        for seed in range(6):
            broken = bytearray(data)
            for at in rng.integers(0, len(data), 1 + len(data) // 200):
                broken[at] = rng.integers(256)
            yield f"{name}, broken {seed}", bytes(broken)
        yield f"{name} twice", data + data
        yield f"{name} and noise", data + rng.bytes(2_000)
    for bits in (1, 7, 12):
        yield f"a wav of {bits} bits", wav(bits=bits)
    for size in (0, 10**9 * 2, 2**31 - 1, 2**31, 2**32 - 1):
        yield f"a data chunk of {size} bytes", wav(data_size=size)
        yield f"a RIFF chunk of {size} bytes", wav(riff_size=size)
    flac = bytearray(files["flac"])
    for count in (10**9, 2**36 - 1):
        flac[21:26] = ((flac[21] & 0xF0) << 32 | count).to_bytes(5, "big")
        yield f"a flac of {count} samples", bytes(flac)
    yield "mp3's marks without frames", b"\xff\xfb\x90\x00" * 4_096
    yield "noise behind mp3's mark", b"\xff\xfb\x90\x64" + np.random.default_rng(3).bytes(65_536)


def unknown_length(flac: bytes) -> bytes:
    """A flac whose header leaves the number of samples at 0, as an encoder writes it into a pipe."""
    data = bytearray(flac)
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    return bytes(data)
