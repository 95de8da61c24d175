"""From a sound file to the samples that an audio encoder reads: decode, mix to one channel, resample to 16 kHz as
librosa.load does (soundfile, the mean of the channels, soxr's HQ). Every problem with a file is a `ValueError` of one
line. All limits of files and clips stand at the top.

Run as a script, this file is the sandbox process that decodes untrusted files (engine/audio.py): it imports nothing of
this package; engine/child_process.py limits its memory and processor time.
"""

from __future__ import annotations

import io
import math
import struct
import sys
from typing import Any

import numpy as np

MAX_BYTES = 32 << 20  # of one file
MAX_CHANNELS = 8
MIN_RATE = 4_000  # Hz
MAX_RATE = 384_000
MAX_LEVEL = 65_536.0  # of a sample; full scale is 1
# of the decoding process; the seconds for one file
MEMORY = 1 << 30
CPU_SECONDS = 20

RATE = 16_000  # Hz, of the samples that encoders read
BLOCK = 1 << 16  # frames that are decoded at once: memory does not depend on what a header says
FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")
READABLE = "WAV, FLAC, Ogg or MP3"
HEAD = struct.Struct("<dq")  # maximum seconds, maximum samples to decode; then the file
REPLY = struct.Struct("<B")  # one of the outcomes; then float32 samples, or an error
DECODED = 0
REFUSED = 1
TOO_LARGE = 2  # more samples than HEAD allows
MISSING = "reading sound files needs the packages soundfile and soxr: pip install 'outrider[audio]'"


class TooLarge(Exception):
    """A file has more samples, of all channels, than are decoded here."""


def check_magic(data: bytes) -> None:
    """Refuses files of other kinds before a decoder sees them."""
    if data[4:8] == b"ftyp":
        raise ValueError(f"M4A and MP4 files (AAC) cannot be read here: convert the sound to {READABLE}")
    if data[:4] == b"\x1aE\xdf\xa3":
        raise ValueError(f"WebM and Matroska files cannot be read here: convert the sound to {READABLE}")
    riff = data[:4] in (b"RIFF", b"RIFX", b"RF64") and data[8:12] == b"WAVE"
    mpeg = len(data) > 2 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0
    if not riff and not mpeg and data[:4] not in (b"fLaC", b"OggS") and data[:3] != b"ID3":
        raise ValueError(f"not a sound file that can be read here ({READABLE})")


def check_shape(channels: int, rate: float) -> None:
    if not 1 <= channels <= MAX_CHANNELS:
        raise ValueError(f"the sound has {channels} channels; 1 to {MAX_CHANNELS} are read")
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ValueError(f"a rate of {rate:,.0f} Hz; {MIN_RATE:,} to {MAX_RATE:,} are read")


def check_length(frames: int, rate: float, max_seconds: float) -> None:
    if frames > max_seconds * rate:
        raise ValueError(f"the sound is longer than {max_seconds:g} s: cut it into shorter clips")


def check_size(frames: int, channels: int, max_samples: int) -> None:
    if frames * channels > max_samples:
        raise TooLarge


def decode(data: bytes, max_seconds: float, max_samples: int = sys.maxsize) -> np.ndarray:
    """A file's samples: float32 [n] at 16 kHz. What a header says is checked before anything is decoded, and again
    while it is."""
    check_magic(data)
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: without its library
        raise ValueError(MISSING) from None
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.format not in FORMATS:
                raise ValueError(f"{file.format[:20]} files cannot be read here: convert the sound to {READABLE}")
            check_shape(file.channels, file.samplerate)
            check_length(file.frames, file.samplerate, max_seconds)
            check_size(file.frames, file.channels, max_samples)
            rate = int(file.samplerate)
            mono = read_mono(file, max_seconds, max_samples)
    except (ValueError, TooLarge):
        raise
    except MemoryError:
        raise ValueError("the sound takes too much memory to decode") from None
    except Exception as error:  # libsndfile's errors are RuntimeErrors
        why = " ".join(str(error).rpartition(">: ")[2].split())[:80] or type(error).__name__
        raise ValueError(f"the sound file is broken ({why})") from None
    return resampled(mono, rate)


def read_mono(file: Any, max_seconds: float, max_samples: int) -> np.ndarray:
    """The mean of the channels, block by block; a file may have more frames than its header says, or fewer."""
    blocks: list[np.ndarray] = []
    num_frames = 0
    while True:
        block = file.read(BLOCK, dtype="float32", always_2d=True)
        if len(block) == 0:
            break
        num_frames += len(block)
        check_length(num_frames, file.samplerate, max_seconds)
        check_size(num_frames, file.channels, max_samples)
        blocks.append(mono_of(block))
    if num_frames == 0:
        raise ValueError("the sound has no samples")
    return np.concatenate(blocks)


def mono_of(frames: np.ndarray) -> np.ndarray:
    """float32 [n, channels] -> the mean of the channels [n]."""
    return np.ascontiguousarray(np.mean(frames.T, axis=0)) if frames.shape[1] > 1 else frames[:, 0].copy()


def resampled(samples: np.ndarray, rate: float) -> np.ndarray:
    """float32 [n] at `rate` -> at 16 kHz."""
    if not np.isfinite(samples).all():
        raise ValueError("the sound has samples that are NaN or infinite")
    if np.abs(samples).max(initial=0.0) > MAX_LEVEL:
        raise ValueError(f"the sound has samples beyond {MAX_LEVEL:,.0f} times full scale")
    if rate == RATE:
        return samples
    try:
        import soxr
    except ImportError:
        raise ValueError(MISSING) from None
    out: np.ndarray = soxr.resample(samples, rate, RATE, quality="HQ")
    length = math.ceil(len(samples) * (RATE / rate))
    return np.pad(out, (0, max(0, length - len(out))))[:length]


# ---- the decoding process -------------------------------------------------------------------------------------------
def answer(frame: bytes) -> bytes:
    """The reply to one frame: samples, or a one-line error."""
    max_seconds, max_samples = HEAD.unpack_from(frame)
    try:
        samples = decode(frame[HEAD.size :], max_seconds, max_samples)
        return REPLY.pack(DECODED) + samples.astype("<f4", copy=False).tobytes()
    except TooLarge:
        return REPLY.pack(TOO_LARGE)
    except Exception as error:
        return REPLY.pack(REFUSED) + (" ".join(str(error).split())[:200] or type(error).__name__).encode()
