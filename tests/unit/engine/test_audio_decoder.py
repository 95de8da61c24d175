"""Hostile and odd sound files: the right samples, or one line that says what is wrong; never a crash or a hang."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
from tests import hostile_audio, tiny_audio
from tests.hostile_audio import encoded
from tests.waiting import PATIENCE

from outrider.engine.audio import AudioDecoder, as_waveform
from outrider.engine.media import read_file
from outrider.models import audio_processing
from outrider.models.audio_processing import BLOCK, MAX_BYTES, MEMORY, resampled
from outrider.types import OutriderError

SECONDS = 30.0


@pytest.fixture(scope="module")
def decoder() -> Iterator[AudioDecoder]:
    decoder = AudioDecoder(seconds=PATIENCE)
    yield decoder
    decoder.close()


def librosa_load(data: bytes) -> np.ndarray:
    """librosa.load(data, sr=16000) in its three steps, with which it was compared bit for bit."""
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    mono = np.mean(samples.T, axis=0) if samples.shape[1] > 1 else samples[:, 0]
    if rate == 16_000:
        return mono
    out = soxr.resample(mono, rate, 16_000, "HQ")
    size = int(np.ceil(len(mono) * (16_000 / rate)))
    return np.pad(out[:size], (0, max(0, size - len(out))))


@pytest.mark.parametrize(
    ("kind", "subtype", "rate", "channels"),
    [
        ("WAV", "PCM_16", 16_000, 1), ("WAV", "PCM_16", 44_100, 2), ("WAV", "PCM_24", 48_000, 1),
        ("WAV", "FLOAT", 8_000, 3), ("WAV", "DOUBLE", 16_000, 2), ("WAV", "PCM_U8", 11_025, 1),
        ("WAVEX", "PCM_32", 96_000, 6), ("FLAC", "PCM_16", 22_050, 2), ("OGG", "VORBIS", 32_000, 2),
        ("OGG", "OPUS", 48_000, 1), ("MP3", "MPEG_LAYER_III", 44_100, 2),
    ],
)  # fmt: skip
def test_samples_are_those_of_librosa(decoder: AudioDecoder, kind: str, subtype: str, rate: int, channels: int) -> None:
    """Longer than a block, so that a block's border would be heard."""
    count = BLOCK + 4_321
    frames = np.stack([tiny_audio.samples(count, seed) for seed in range(channels)], 1)
    data = encoded(frames.squeeze(), rate, kind, subtype)
    assert np.array_equal(decoder.samples(data, SECONDS), librosa_load(data))


def test_exactly_thirty_seconds(decoder: AudioDecoder) -> None:
    assert len(decoder.samples(encoded(np.zeros(480_000, np.int16)), SECONDS)) == 480_000


def in_one_line(error: pytest.ExceptionInfo[OutriderError]) -> bool:
    text = str(error.value)
    return 10 < len(text) < 250 and "\n" not in text and "Traceback" not in text


def test_hostile_files_are_refused_in_one_line(decoder: AudioDecoder) -> None:
    """Nothing that they do ends the process: the same one answers all of them."""
    decoder.samples(encoded(tiny_audio.samples(400)), SECONDS)
    process = decoder._short._process
    count = 0
    for name, data in hostile_audio.refused():
        with pytest.raises(OutriderError) as error:
            decoder.samples(data, SECONDS)
            pytest.fail(f"{name}: was read")
        assert in_one_line(error), (name, error.value)
        assert decoder._short._process is process, f"{name}: the process has died"
        count += 1
    assert count >= 60


def test_broken_files_are_heard_or_refused(decoder: AudioDecoder) -> None:
    count = 0
    for name, data in hostile_audio.tolerated():
        try:
            samples = decoder.samples(data, SECONDS)
        except OutriderError as error:
            assert "\n" not in str(error) and 10 < len(str(error)) < 250, name
        else:
            assert samples.dtype == np.float32 and samples.ndim == 1 and 0 < len(samples) <= 480_000, name
            assert np.isfinite(samples).all(), name
        count += 1
    assert count >= 90
    assert len(decoder.samples(encoded(tiny_audio.samples(400)), SECONDS)) == 400


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty"),
        (bytes(MAX_BYTES + 1), "at most 33,554,432 are read"),
        (b"\0\0\0\x20ftypM4A ", "M4A and MP4 files"),
        (b"\x1aE\xdf\xa3", "WebM"),
        (b"hello, this is a text", "not a sound file"),
        (hostile_audio.wav(channels=255), "255 channels; 1 to 8 are read"),
        (hostile_audio.wav(rate=1), "a rate of 1 Hz"),
        (encoded(np.zeros(16_000 * 31, np.int16)), "longer than 30 s: cut it into shorter clips"),
        (hostile_audio.wav(b""), "no samples"),
    ],
)
def test_errors_say_what_and_how_to_mend_it(decoder: AudioDecoder, data: bytes, said: str) -> None:
    with pytest.raises(OutriderError, match=said):
        decoder.samples(data, SECONDS)


def test_a_process_that_hangs_or_dies_is_replaced() -> None:
    slow = AudioDecoder(seconds=0.0)
    clip = encoded(tiny_audio.samples(400))
    errors = []
    for _ in range(2):
        with pytest.raises(OutriderError, match="too much memory or time") as refused:
            slow.samples(clip, SECONDS)
        errors.append(refused.value)
    assert errors[0] is not errors[1], "an error that is raised again keeps the frames, and files, of all refusals"
    slow.close()
    decoder = AudioDecoder(seconds=PATIENCE)
    decoder.samples(clip, SECONDS)
    process = decoder._short._process
    assert process is not None
    process.kill()
    process.wait()
    assert len(decoder.samples(clip, SECONDS)) == 400
    decoder.close()


def test_clips_do_not_wait_for_long_files(decoder: AudioDecoder) -> None:
    """Ten minutes, and thirty seconds of eight channels, are decoded in a process of their own."""
    clip = encoded(tiny_audio.samples(400))
    long = encoded(np.zeros(600 * 16_000, np.int16), kind="FLAC")
    wide = encoded(np.zeros((30 * 48_000, 3), np.int16), 48_000, "FLAC")
    with decoder._long._lock, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(decoder.samples, file, 600.0) for file in (long, wide)]
        assert len(decoder.samples(clip, SECONDS)) == 400
        assert not any(task.done() for task in waiting)
        decoder._long._lock.release()
        try:
            assert [len(task.result()) for task in waiting] == [600 * 16_000, 30 * 16_000]
        finally:
            decoder._long._lock.acquire()


@pytest.mark.linux
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_is_limited() -> None:
    decoder = AudioDecoder(seconds=PATIENCE)
    decoder.samples(encoded(tiny_audio.samples(400)), SECONDS)
    process = decoder._short._process
    assert process is not None
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    address_space = next(line for line in limits.splitlines() if line.startswith("Max address space"))
    assert address_space.split()[3] == str(MEMORY)
    decoder.close()


def test_without_the_extra_a_file_is_refused_and_sixteen_kilohertz_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("soundfile", "soxr"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"pip install 'outrider\[audio\]'"):
        audio_processing.decode(tiny_audio.wav(tiny_audio.samples(100)), SECONDS)
    samples = tiny_audio.samples(100)
    assert resampled(samples, 16_000) is samples
    with pytest.raises(ValueError, match=r"pip install 'outrider\[audio\]'"):
        resampled(samples, 8_000)


@pytest.mark.parametrize("kind", ["float64", "int16", "int32"])
def test_arrays(kind: str) -> None:
    """Integers are scaled to full scale 1; the bits of 16-bit samples are those of a file."""
    exact = np.round(tiny_audio.samples(64) * 2**15) / 2**15
    array = exact if kind == "float64" else (exact * 2 ** {"int16": 15, "int32": 31}[kind]).astype(kind)
    for item in ((array, 16_000), {"array": array, "sampling_rate": 16_000}, (array[:, None], np.int64(16_000))):
        waveform, rate = as_waveform(item)
        assert waveform.dtype == np.float32 and waveform.shape == (64, 1) and rate == 16_000
        assert np.array_equal(waveform[:, 0], exact.astype(np.float32))


@pytest.mark.parametrize(
    "item", [3.5, None, np.zeros(5), (np.zeros(5),), (np.zeros(5), "16000"), ([], 16_000), (np.zeros((2, 2, 2)), 8_000),
             (np.zeros(5, complex), 16_000), (np.zeros(5, np.uint8), 16_000), (["a"], 16_000)]
)  # fmt: skip
def test_what_is_no_clip(item: object) -> None:
    with pytest.raises(OutriderError) as error:
        as_waveform(item)
    assert in_one_line(error)


def test_what_has_no_end_is_refused() -> None:
    with pytest.raises(OutriderError, match="it is a device"):
        read_file(Path("/dev/zero"), "sound", MAX_BYTES)
