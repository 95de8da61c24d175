"""The mel spectrogram that Gemma 4's conformer reads, with the bits of transformers' `Gemma4AudioFeatureExtractor`.

Samples are float32 at 16 kHz, full scale ±1. The bits are those of numpy 2 or newer, whose FFT of float32 is complex64.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .audio_config import FRAME_LENGTH, HOP_LENGTH, MEL_BINS, SAMPLE_RATE, num_mel_frames

FFT_LENGTH = 512
MEL_FLOOR = 1e-3  # added before the logarithm
PAD_MULTIPLE = 128  # clips are zero-padded to a multiple of this many samples


def log_mel(samples: np.ndarray) -> np.ndarray:
    """float32 [n] -> float32 [frames, 128], without the frames that reach beyond the clip's last sample."""
    num_samples = samples.shape[0]
    padded_end = -num_samples % PAD_MULTIPLE
    waveform = np.pad(samples.astype(np.float32, copy=False), (FRAME_LENGTH // 2, padded_end))
    num_frames = (waveform.shape[0] - (FRAME_LENGTH + 1)) // HOP_LENGTH + 1
    if num_frames <= 0:
        return np.zeros((0, MEL_BINS), np.float32)
    # the reference cuts frames of 321 samples and drops the last sample of each
    windows = np.lib.stride_tricks.sliding_window_view(waveform, FRAME_LENGTH + 1)
    frames = windows[: (num_frames - 1) * HOP_LENGTH + 1 : HOP_LENGTH, :-1] * hann_window()  # [frames, 320]
    magnitudes = np.abs(np.fft.rfft(frames, n=FFT_LENGTH, axis=-1))  # [frames, 257]
    mel = np.matmul(magnitudes, mel_filters())  # float64 [frames, 128]
    return np.log(mel + MEL_FLOOR).astype(np.float32)[: num_mel_frames(num_samples)]


def raw_frames(samples: np.ndarray, frame_length: int) -> np.ndarray:
    """float32 [n] -> float32 [tokens, frame_length], the last frame filled up with zeros."""
    padded = np.pad(samples.astype(np.float32, copy=False), (0, -samples.shape[0] % frame_length))
    return padded.reshape(-1, frame_length)


@cache
def hann_window() -> np.ndarray:
    """The periodic Hann window, float32 [320]."""
    return np.hanning(FRAME_LENGTH + 1)[:-1].astype(np.float32)


@cache
def mel_filters() -> np.ndarray:
    """Triangles on the HTK mel scale from 0 to 8,000 Hz, float64 [257, 128]."""
    top = SAMPLE_RATE / 2
    mel_edges = np.linspace(hertz_to_mel(0.0), hertz_to_mel(top), MEL_BINS + 2)
    edges = 700.0 * (np.power(10, mel_edges / 2595.0) - 1.0)  # Hz [130]
    bins = np.linspace(0, top, FFT_LENGTH // 2 + 1)  # Hz [257]
    widths = np.diff(edges)
    slopes = edges[None, :] - bins[:, None]  # [257, 130]
    falling = -slopes[:, :-2] / widths[:-1]
    rising = slopes[:, 2:] / widths[1:]
    return np.maximum(0.0, np.minimum(falling, rising))


def hertz_to_mel(hertz: float) -> float:
    return float(2595.0 * np.log10(1.0 + hertz / 700.0))
