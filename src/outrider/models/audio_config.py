"""The audio part of a Gemma 4 checkpoint's configuration, translated once. Torch-free.

E2B and E4B have a conformer over a mel spectrogram; the 12B projects raw frames; 26B and 31B take no sound.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, TypedDict

from .config import TYPES, VOCAB, Foreign, misread, text_part
from .vision_config import CLIPS, Shapes

SAMPLE_RATE = 16_000
MEL_BINS = 128
FRAME_LENGTH = 320  # samples of a mel frame, 20 ms
HOP_LENGTH = 160
TOKEN_SECONDS = 0.04  # sound of one soft token
MAX_SECONDS = 30.0  # of a clip, as the models were trained
NO_AUDIO = "this model takes no sound: its checkpoint has no audio weights (Gemma 4 E2B, E4B and 12B have them)"
NO_AUDIO_MMPROJ = "this model takes no sound: no mmproj file with audio tensors lies next to the GGUF file"


@dataclass(frozen=True)
class AudioConfig:
    kind: Literal["conformer", "frames"]
    text_hidden: int
    hidden: int  # width of the conformer; samples of a frame
    eps: float
    audio_id: int
    boa_id: int  # begin and end of audio
    eoa_id: int
    pad_id: int  # per-layer embeddings of audio positions are read at this id
    layers: int = 0
    heads: int = 0
    channels: tuple[int, int] = (128, 32)  # of the two convolutions
    output: int = 0  # width of the conformer's output projection
    chunk: int = 12  # query positions of an attention block
    past: int = 12  # positions that a block reads before its first; a query attends to the last `past`, itself included
    conv_kernel: int = 5
    softcap: float = 50.0
    residual_weight: float = 0.5  # of each feed-forward network
    clamp: float = 1e10  # residual streams are clamped to ± this
    clipped: bool = True  # linears clamp their inputs and outputs

    @staticmethod
    def from_hf(raw: Foreign) -> AudioConfig | None:
        """None: the configuration describes no audio encoder, or the vocabulary has no audio tokens."""
        audio = raw.get("audio_config")
        kind = raw.get("model_type")
        if not isinstance(audio, dict) or kind not in ("gemma4", "gemma4_unified"):
            return None
        vocab = int(text_part(raw).get("vocab_size", VOCAB[TYPES[kind]]))
        config = _frames(raw, audio) if kind == "gemma4_unified" else _conformer(raw, audio)
        return config if max(config.audio_id, config.boa_id, config.eoa_id) < vocab else None

    @property
    def min_samples(self) -> int:
        """Samples of the shortest clip: one frame of which every sample is real."""
        return FRAME_LENGTH + 1 - HOP_LENGTH if self.kind == "conformer" else 1

    def num_tokens(self, num_samples: int) -> int:
        """Soft tokens of a clip of `num_samples` samples at 16 kHz."""
        if self.kind == "frames":
            return -(-num_samples // self.hidden)
        return -(-num_mel_frames(num_samples) // 4)

    def tensors(self) -> Shapes:
        """The checkpoint's tensors by name, without the wrapping `model.`, and their shapes."""
        width = self.output or self.hidden
        projection: Shapes = {"embed_audio.embedding_projection.weight": (self.text_hidden, width)}
        return projection if self.kind == "frames" else {**self._conformer_tensors(), **projection}

    def _conformer_tensors(self) -> Shapes:
        d = self.hidden
        first, second = self.channels
        conv = "audio_tower.subsample_conv_projection."
        shapes: Shapes = {
            f"{conv}layer0.conv.weight": (first, 1, 3, 3),
            f"{conv}layer0.norm.weight": (first,),
            f"{conv}layer1.conv.weight": (second, first, 3, 3),
            f"{conv}layer1.norm.weight": (second,),
            f"{conv}input_proj_linear.weight": (d, MEL_BINS // 4 * second),
        }
        linears = {
            "feed_forward1.ffw_layer_1": (4 * d, d), "feed_forward1.ffw_layer_2": (d, 4 * d),
            "self_attn.q_proj": (d, d), "self_attn.k_proj": (d, d), "self_attn.v_proj": (d, d),
            "self_attn.post": (d, d), "lconv1d.linear_start": (2 * d, d), "lconv1d.linear_end": (d, d),
            "feed_forward2.ffw_layer_1": (4 * d, d), "feed_forward2.ffw_layer_2": (d, 4 * d),
        }  # fmt: skip
        for i in range(self.layers):
            layer = f"audio_tower.layers.{i}."
            for norm in NORMS:
                shapes[f"{layer}{norm}.weight"] = (d,)
            shapes[f"{layer}self_attn.per_dim_scale"] = (d // self.heads,)
            shapes[f"{layer}self_attn.relative_k_proj.weight"] = (d, d)
            shapes[f"{layer}lconv1d.depthwise_conv1d.weight"] = (d, 1, self.conv_kernel)
            for name, shape in linears.items():
                shapes[f"{layer}{name}.linear.weight"] = shape
                if self.clipped:
                    shapes |= {f"{layer}{name}.{end}": () for end in CLIPS}
        return shapes | {
            "audio_tower.output_proj.weight": (self.output, d),
            "audio_tower.output_proj.bias": (self.output,),
        }

    def flops(self, tokens: int) -> float:
        """Arithmetic of a clip of `tokens` soft tokens."""
        if self.kind == "frames":
            return 2.0 * tokens * self.hidden * self.text_hidden
        first, second = self.channels
        total = 2.0 * tokens * (2 * MEL_BINS // 2 * first * 9 + MEL_BINS // 4 * second * first * 9)
        total += 2.0 * 2 * tokens * self.layers * (self.chunk + self.past) * self.hidden  # scores and sums of values
        for name, shape in self.tensors().items():
            if len(shape) == 2:
                total += 2.0 * prod(shape) * (self.past + 1 if "relative_k_proj" in name else tokens)
        return total

    def nbytes(self, item: int = 2) -> int:
        return item * sum(prod(shape) for shape in self.tensors().values())


NORMS = (
    "feed_forward1.pre_layer_norm", "feed_forward1.post_layer_norm", "norm_pre_attn", "norm_post_attn",
    "lconv1d.pre_layer_norm", "lconv1d.conv_norm", "feed_forward2.pre_layer_norm", "feed_forward2.post_layer_norm",
    "norm_out",
)  # fmt: skip


def num_mel_frames(num_samples: int) -> int:
    """Mel frames of which every sample is real: 160 zeros go before the clip, frames of 321 samples start every 160."""
    return max(0, (num_samples + HOP_LENGTH - (FRAME_LENGTH + 1)) // HOP_LENGTH + 1)


class TokenIds(TypedDict):
    audio_id: int
    boa_id: int
    eoa_id: int
    pad_id: int


def _ids(raw: Foreign) -> TokenIds:
    return {
        "audio_id": int(raw.get("audio_token_id") or 258881),
        "boa_id": int(raw.get("boa_token_id") or 256000),
        "eoa_id": int(raw.get("eoa_token_index") or raw.get("eoa_token_id") or 258883),
        "pad_id": int(text_part(raw).get("pad_token_id") or 0),
    }


def _frames(raw: Foreign, audio: Foreign) -> AudioConfig:
    return AudioConfig(
        kind="frames",
        text_hidden=int(text_part(raw)["hidden_size"]),
        hidden=int(audio.get("audio_embed_dim") or 640),
        eps=float(audio.get("rms_norm_eps", 1e-6)),
        **_ids(raw),
    )


def _conformer(raw: Foreign, audio: Foreign) -> AudioConfig:
    channels = audio.get("subsampling_conv_channels") or (128, 32)
    hidden = int(audio.get("hidden_size", 1024))
    heads = int(audio.get("num_attention_heads", 8))
    look_ahead = int(audio.get("attention_context_right", 0))
    activation = audio.get("hidden_act", "silu")
    config = AudioConfig(
        kind="conformer",
        text_hidden=int(text_part(raw)["hidden_size"]),
        hidden=hidden,
        eps=float(audio.get("rms_norm_eps", 1e-6)),
        layers=int(audio.get("num_hidden_layers", 12)),
        heads=heads,
        channels=(int(channels[0]), int(channels[1])),
        output=int(audio.get("output_proj_dims", 1536)),
        chunk=int(audio.get("attention_chunk_size", 12)),
        past=int(audio.get("attention_context_left", 13)) - 1,
        conv_kernel=int(audio.get("conv_kernel_size", 5)),
        softcap=float(audio.get("attention_logit_cap", 50.0)),
        residual_weight=float(audio.get("residual_weight", 0.5)),
        clamp=float(audio.get("gradient_clipping", 1e10)),
        clipped=bool(audio.get("use_clipped_linears", True)),
        **_ids(raw),
    )
    if heads < 1 or hidden % heads or hidden % 2 or config.chunk < 1 or config.past < 1 or config.softcap <= 0:
        raise misread(f"audio_config has {heads} heads in {hidden} columns, which cannot be run")
    if look_ahead != 0 or activation != "silu" or config.past != config.chunk:
        raise misread("audio_config has a look-ahead, another activation or other blocks than Gemma 4's")
    return config
