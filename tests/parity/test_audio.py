"""Audio against transformers on tiny random models: features bit for bit, soft tokens and logits within 1e-4."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tests import tiny_audio

from outrider.models.audio import AudioModel
from outrider.models.audio_config import AudioConfig
from outrider.models.audio_features import hann_window, log_mel, mel_filters, raw_frames
from outrider.weights import hub
from outrider.weights.audio import load_audio

LENGTHS = [*range(0, 1501), 4_000, 16_000, 48_127, 48_128, 48_129, 479_999, 480_000]


@pytest.fixture(scope="module")
def extractor() -> transformers.Gemma4AudioFeatureExtractor:
    return transformers.Gemma4AudioFeatureExtractor()


def reference(extractor: transformers.Gemma4AudioFeatureExtractor, samples: np.ndarray) -> np.ndarray:
    """The valid frames of transformers' features of one clip."""
    features = extractor([samples], return_tensors="np")
    return features["input_features"][0][features["input_features_mask"][0]]


def test_window_and_filters_are_those_of_transformers(extractor: transformers.Gemma4AudioFeatureExtractor) -> None:
    assert np.array_equal(hann_window(), extractor.window) and hann_window().dtype == extractor.window.dtype
    assert np.array_equal(mel_filters(), extractor.mel_filters)
    assert mel_filters().shape == (257, 128) and not mel_filters()[:, 0].any()


@pytest.mark.parametrize("first", range(0, len(LENGTHS), 301))
def test_features_are_those_of_transformers(extractor: transformers.Gemma4AudioFeatureExtractor, first: int) -> None:
    """Bit for bit, at every length around the borders of frames and of padding."""
    for length in LENGTHS[first : first + 301]:
        samples = tiny_audio.samples(length, seed=length)
        ours = log_mel(samples)
        assert ours.dtype == np.float32 and ours.shape[1] == 128
        config = AudioConfig("conformer", 8, 8, 1e-6, 0, 0, 0, 0)
        assert config.num_tokens(length) == -(-ours.shape[0] // 4) <= 750
        assert (length >= config.min_samples) == bool(ours.shape[0])
        if length:  # transformers divides by zero samples
            theirs = reference(extractor, samples)
            assert np.array_equal(theirs, ours), length


def test_one_sample_beyond_thirty_seconds_is_cut_by_transformers_and_not_here(
    extractor: transformers.Gemma4AudioFeatureExtractor,
) -> None:
    samples = tiny_audio.samples(480_001)
    assert log_mel(samples).shape[0] == reference(extractor, samples).shape[0] + 1
    assert np.array_equal(log_mel(samples[:480_000]), reference(extractor, samples))


@pytest.mark.parametrize("kind", ["silence", "loud", "impulse", "float64", "quiet"])
def test_odd_signals(extractor: transformers.Gemma4AudioFeatureExtractor, kind: str) -> None:
    signals = {
        "silence": np.zeros(16_000, np.float32),
        "loud": tiny_audio.samples(16_000) * 100,
        "impulse": np.eye(1, 16_000, 777, dtype=np.float32)[0],
        "float64": tiny_audio.samples(16_000).astype(np.float64),
        "quiet": tiny_audio.samples(16_000) * np.float32(1e-9),
    }
    assert np.array_equal(log_mel(signals[kind]), reference(extractor, signals[kind]))


def test_padding_and_batches_change_no_bit(extractor: transformers.Gemma4AudioFeatureExtractor) -> None:
    clips = [tiny_audio.samples(length, seed=length) for length in (161, 5_000, 33_333)]
    features = extractor(clips, return_tensors="np")
    for clip, theirs, mask in zip(clips, features["input_features"], features["input_features_mask"]):
        assert np.array_equal(theirs[mask], log_mel(clip))
        assert not theirs[~mask].any()


def test_raw_frames_are_those_of_transformers() -> None:
    config = AudioConfig("frames", 8, 640, 1e-6, 0, 0, 0, 0)
    reference = tiny_audio.extractor(config)
    for length in (1, 639, 640, 641, 5_000):
        samples = tiny_audio.samples(length)
        theirs = reference([samples], return_tensors="np")["input_features"][0]  # type: ignore[operator]
        assert np.array_equal(raw_frames(samples, 640), theirs)
        assert config.num_tokens(length) == len(theirs)


# ---- encoders
def both(kind: str, folder: Path) -> tuple[AudioModel, transformers.PreTrainedModel]:
    files = hub.resolve(str(tiny_audio.write(kind, folder)))
    config = AudioConfig.from_hf(files.config)
    assert config is not None
    return AudioModel(config, load_audio(files, config, "cpu", torch.float32)), tiny_audio.target(kind)


@pytest.mark.parametrize("kind", tiny_audio.ALL_KINDS)
def test_soft_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Alone and in a padded batch, from one token on, at lengths around an attention block's borders."""
    ours, model = both(kind, tmp_path)
    config = ours.config
    lengths = [161, 640, 641, 12 * 640 - 1, 12 * 640, 12 * 640 + 1, 25 * 640 + 7, 48_000]
    clips = [tiny_audio.samples(length, seed=length) for length in lengths]
    for clip, padded in zip(clips, tiny_audio.soft_tokens(model, config, clips)):
        alone = tiny_audio.soft_tokens(model, config, [clip])[0]
        got = ours.encode(clip)
        assert got.shape == alone.shape == (config.num_tokens(len(clip)), config.text_hidden)
        assert float((got - alone).abs().max()) < 1e-4, len(clip)
        assert float((got - padded).abs().max()) < 1e-4, len(clip)


def test_the_longest_clip(tmp_path: Path) -> None:
    ours, model = both("gemma4_e2b", tmp_path)
    clip = tiny_audio.samples(480_000)
    theirs = tiny_audio.soft_tokens(model, ours.config, [clip])[0]
    got = ours.encode(clip)
    assert got.shape[0] == 750 and float((got - theirs).abs().max()) < 1e-4


def test_a_clip_is_heard_in_order(tmp_path: Path) -> None:
    """A beginning has the whole clip's tokens, its last aside: nothing looks ahead."""
    ours, _ = both("gemma4_e2b", tmp_path)
    clip = tiny_audio.clip(3.0)
    whole = ours.encode(clip)
    for length in (8_000, 12_345, 40_000):
        part = ours.encode(clip[:length])
        assert float((part[:-1] - whole[: part.shape[0] - 1]).abs().max()) < 1e-5, length


def test_clamps_bite_and_bfloat16_runs(tmp_path: Path) -> None:
    """The tests' clamps are narrow enough to matter; in bfloat16 the soft tokens are near those of float32."""
    ours, _ = both("gemma4_e2b", tmp_path)
    clip = tiny_audio.clip(1.0)
    exact = ours.encode(clip)
    wide = {k: v if not k.endswith(("_min", "_max")) else v * 1e3 for k, v in ours.weights.items()}
    assert float((AudioModel(ours.config, wide).encode(clip) - exact).abs().max()) > 1e-3
    half = AudioModel(ours.config, {k: v.bfloat16() for k, v in ours.weights.items()})
    assert half.encode(clip).dtype == torch.bfloat16
    assert float((half.encode(clip).float() - exact).abs().mean() / exact.abs().mean()) < 0.1
