"""Sound in prompts: `AudioEncoder.encode` decodes a clip (files in a subprocess), computes its features and runs the
audio model; the most recent clips are cached by content. `soft_prompt.expand` puts them into a prompt."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..models import audio_processing
from ..models.audio import AudioModel
from ..models.audio_config import MAX_SECONDS, SAMPLE_RATE
from ..models.audio_processing import (
    HEAD,
    MAX_BYTES,
    REFUSED,
    REPLY,
    TOO_LARGE,
    TooLarge,
    check_length,
    check_shape,
    mono_of,
    resampled,
)
from ..types import OutriderError, SoftSpan, bad_input, require
from .child_process import ChildLost, ChildProcess
from .media import data_url, read_file
from .soft_prompt import PlaceholderIds, SpanCache

DECODE_SECONDS = 60.0  # of wall time for one file: on a busy machine a long decode gets little processor time
# a clip of 30 s in stereo at 48 kHz, which takes a tenth of a second
SHORT_SAMPLES = 30 * 48_000 * 2
SHORT_SECONDS = 2.0
CACHED_CLIPS = 64  # clips whose soft tokens are kept
VERSION = b"1"  # of the preprocessing: other features, other digests
SPOILED = "the sound took too much memory or time to decode, and was refused"
CLIP_FORMS = "a clip is a path, the bytes of a file, a data URL or (samples, rate)"


class AudioEncoder:
    def __init__(self, model: AudioModel, max_clips: int) -> None:
        self.model = model
        self.config = model.config
        self.noun = "clip"
        self.max_items = max_clips
        self.max_seconds = MAX_SECONDS
        config = model.config
        self.ids = PlaceholderIds(config.audio_id, config.boa_id, config.audio_id, end=config.eoa_id)
        self.decoder = AudioDecoder()
        self._spans = SpanCache(CACHED_CLIPS)

    def encode(self, item: object) -> SoftSpan:
        """A path, the bytes of a file, a data URL, or samples with their rate; as a span at 0."""
        samples = self.samples(item)
        config = self.config
        if len(samples) < config.min_samples:
            seconds = config.min_samples / SAMPLE_RATE
            raise OutriderError(f"the sound is too short: {len(samples)} samples at 16 kHz; {seconds:.2g} s are needed")
        key = hashlib.blake2b(samples.tobytes(), digest_size=16, salt=b"audio" + VERSION).digest()

        def span() -> SoftSpan:
            return SoftSpan(0, self.model.encode(samples), key, bidirectional=False, pad_id=config.pad_id)

        return self._spans.get(key, span)

    def samples(self, item: object, max_seconds: float | None = None) -> np.ndarray:
        """float32 [n] at 16 kHz. max_seconds: None: as long as a clip may be."""
        if max_seconds is None:
            max_seconds = self.max_seconds
        if isinstance(item, str) and item[:5].lower() == "data:":
            item = data_url(item, "sound", MAX_BYTES)
        elif isinstance(item, str | os.PathLike):
            data = read_file(Path(item), "sound", MAX_BYTES)
            with bad_input(OutriderError, lambda error: f"{item}: {error}"):
                return self.decoder.samples(data, max_seconds)
        if isinstance(item, bytes | bytearray | memoryview):
            return self.decoder.samples(bytes(item), max_seconds)
        waveform, rate = as_waveform(item)
        with bad_input(ValueError, str):
            check_shape(waveform.shape[1], rate)
            check_length(len(waveform), rate, max_seconds)
            return resampled(mono_of(waveform), rate)

    def close(self) -> None:
        self.decoder.close()


def as_waveform(item: object) -> tuple[np.ndarray, float]:
    """Samples with their rate, as (samples, rate) or {"array": samples, "sampling_rate": rate}: float32 [n, channels]
    with full scale 1, and the rate."""
    if isinstance(item, Mapping) and set(item) >= {"array", "sampling_rate"}:
        item = (item["array"], item["sampling_rate"])
    if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[1], int | float | np.number):
        got = type(item).__name__
        raise OutriderError(f"{CLIP_FORMS}, got {got}")
    try:
        array = np.asarray(item[0])
    except Exception:
        array = np.empty(0)
    if array.ndim == 1:
        array = array[:, None]
    is_numeric = array.dtype.kind == "f" or array.dtype in (np.int16, np.int32)
    form = f"samples are floats of full scale 1, int16 or int32, [n] or [n, channels]; got {array.dtype} {array.shape}"
    require(is_numeric and array.ndim == 2 and array.size > 0, form)
    if array.dtype.kind == "i":
        array = array / np.float32(-float(np.iinfo(array.dtype).min))
    return array.astype(np.float32), float(item[1])


# ---- untrusted files -------------------------------------------------------------------------------------------------
class AudioDecoder:
    """Decodes files in subprocesses with limits on time and memory: a hostile file ends its process only, and is
    refused. Clips have a process of their own, so that they never wait for a long file."""

    def __init__(self, seconds: float = DECODE_SECONDS) -> None:
        """seconds: of wall time for one file."""
        self._short = DecodingProcess(SHORT_SAMPLES, min(seconds, SHORT_SECONDS))
        self._long = DecodingProcess(sys.maxsize, seconds)

    def samples(self, data: bytes, max_seconds: float) -> np.ndarray:
        """float32 [n] at 16 kHz. Thread-safe; blocks until done."""
        require(len(data) > 0, "the sound file is empty")
        require(len(data) <= MAX_BYTES, f"the sound file has {len(data):,} bytes; at most {MAX_BYTES:,} are read")
        try:
            return self._short.samples(data, max_seconds)
        except (ChildLost, TooLarge):
            pass
        try:
            return self._long.samples(data, max_seconds)
        except ChildLost:
            raise OutriderError(SPOILED) from None

    def close(self) -> None:
        self._short.close()
        self._long.close()


class DecodingProcess(ChildProcess):
    def __init__(self, max_samples: int, seconds: float) -> None:
        """max_samples: of a file, in all of its channels. seconds: of wall time for one file."""
        super().__init__(audio_processing.__file__, seconds=seconds)
        self._max_samples = max_samples

    def samples(self, data: bytes, max_seconds: float) -> np.ndarray:
        """Raises `TooLarge` or `ChildLost` if this process cannot decode the file."""
        reply = self.call(HEAD.pack(max_seconds, self._max_samples) + data)
        (outcome,) = REPLY.unpack_from(reply)
        if outcome == TOO_LARGE:
            raise TooLarge
        if outcome == REFUSED:
            raise OutriderError(reply[REPLY.size :].decode("utf-8", "replace"))
        return np.frombuffer(reply, "<f4", offset=REPLY.size)
