"""Tiny models that hear and see: E2B and E4B with a conformer of clipped linears, the 12B with raw frames. The drafters
of `tiny.assistant` fit them."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path

import numpy as np
import torch
import transformers
from tests import tiny, tiny_vision
from torch import Tensor
from transformers import PreTrainedModel

from outrider.models.audio_config import AudioConfig

KINDS = ("gemma4_e2b", "gemma4_12b")
ALL_KINDS = (*KINDS, "gemma4_e4b")
# behind the byte-level tokenizer's 262
SPELLED = ("<|image>", "<|image|>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>")
AUDIO = 266
BOA = 267
EOA = 268
RATE = 16_000
TEMPLATE = tiny_vision.TEMPLATE.replace(
    "{% else %}{{ part['text'] }}", "{% elif part['type'] == 'audio' %}<|audio|>{% else %}{{ part['text'] }}"
)
CONFORMER = dict(
    hidden_size=32, num_hidden_layers=3, num_attention_heads=2, output_proj_dims=24,
    subsampling_conv_channels=[128, 4],
)  # fmt: skip


def target(kind: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """changes: of the audio configuration."""
    t = transformers
    config = tiny_vision.target(kind, seed).config
    audio = t.Gemma4AudioConfig(**CONFORMER | changes) if kind in tiny_vision.EDGE_TEXTS else None
    config.audio_config = audio or t.Gemma4UnifiedAudioConfig(**dict(audio_embed_dim=40) | changes)
    config.audio_token_id = AUDIO
    config.boa_token_id = BOA
    config.eoa_token_index = EOA
    model = tiny._finish(t.AutoModelForImageTextToText.from_config(config, attn_implementation="eager"), seed)
    for name, buffer in model.named_buffers():
        if name.endswith(("_min", "_max")):  # narrow enough to clip
            buffer.fill_(-1.5 if name.endswith("_min") else 1.25)
    return model


def write(kind: str, folder: Path, seed: int = 0, max_context: int | None = None) -> Path:
    """max_context: of the text model, which knows 512 positions otherwise."""
    tiny.write(target(kind, seed), folder)
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPELLED])
    assert [tokenizer.token_to_id(token) for token in SPELLED[4:]] == [AUDIO, BOA, EOA]
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    if max_context is not None:
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["max_position_embeddings"] = max_context
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def clip(seconds: float, seed: int = 0) -> np.ndarray:
    """Tones and noise, float32 at 16 kHz."""
    return samples(round(seconds * RATE), seed)


def samples(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    time = np.arange(count) / RATE
    tones = sum(0.2 * np.sin(2 * np.pi * hertz * time) for hertz in rng.uniform(80, 4000, 3))
    return (tones + 0.1 * rng.standard_normal(count)).astype(np.float32)


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    """A WAV file of 16 bits."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return out.getvalue()


def extractor(config: AudioConfig) -> object:
    """transformers' feature extractor."""
    if config.kind == "conformer":
        return transformers.Gemma4AudioFeatureExtractor()
    from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import Gemma4UnifiedAudioFeatureExtractor

    return Gemma4UnifiedAudioFeatureExtractor(feature_size=config.hidden, audio_samples_per_token=config.hidden)


def model_input(config: AudioConfig, clips: list[np.ndarray]) -> dict[str, Tensor]:
    """Features and masks of several clips, padded to the longest."""
    features = extractor(config)(list(clips), return_tensors="pt")  # type: ignore[operator]
    return {"input_features": features["input_features"], "input_features_mask": features["input_features_mask"]}


def soft_tokens(model: PreTrainedModel, config: AudioConfig, clips: list[np.ndarray]) -> list[Tensor]:
    """By transformers, of all clips in one padded batch."""
    with torch.no_grad():
        out = model.model.get_audio_features(**model_input(config, clips), return_dict=True)
    return [rows[mask] for rows, mask in zip(out.pooler_output, out.attention_mask)]
