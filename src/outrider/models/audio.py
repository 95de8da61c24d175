"""From samples to soft tokens: Gemma 4's audio encoders in plain torch, as transformers 5 defines them.

E2B and E4B: two convolutions over a mel spectrogram divide the frames by four, then a conformer; 12B: a projection of
raw frames. Clips are encoded one at a time and unpadded, so that bits depend on no other clip. An encoder is causal: a
soft token depends on no later sound. Soft tokens are not multiplied by sqrt(hidden).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .audio_config import AudioConfig
from .audio_features import log_mel, raw_frames
from .vision_config import CLIPS


@dataclass(frozen=True)
class ClippedLinear:
    """A linear layer that clamps its input and its output, or neither."""

    weight: Tensor  # [out, in]
    input_range: tuple[float, float] | None = None
    output_range: tuple[float, float] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.input_range is not None:
            x = x.clamp(*self.input_range)
        y = F.linear(x, self.weight)
        return y if self.output_range is None else y.clamp(*self.output_range)


@dataclass(frozen=True)
class FeedForward:
    pre_norm: Tensor
    up: ClippedLinear
    down: ClippedLinear
    post_norm: Tensor


@dataclass(frozen=True)
class LocalAttention:
    pre_norm: Tensor
    query: ClippedLinear
    key: ClippedLinear
    value: ClippedLinear
    query_scale: Tensor  # float32 [head_dim]
    distance_keys: Tensor  # float32 [heads, past + 1, head_dim], the keys of distances past, past - 1, ..., 0
    out: ClippedLinear
    post_norm: Tensor


@dataclass(frozen=True)
class LightConv:
    pre_norm: Tensor
    start: ClippedLinear  # twice as wide: values and gates
    depthwise: Tensor  # [hidden, 1, kernel]
    conv_norm: Tensor
    end: ClippedLinear


@dataclass(frozen=True)
class ConformerLayer:
    first: FeedForward
    attention: LocalAttention
    conv: LightConv
    second: FeedForward
    norm_out: Tensor


class AudioModel:
    def __init__(self, config: AudioConfig, weights: dict[str, Tensor], threads: int = 1) -> None:
        """weights: by the names of `AudioConfig.tensors`, with softplus applied to each `per_dim_scale`. threads: of
        the CPU."""
        self.config = config
        self.weights = weights
        self.threads = threads
        self.nbytes = sum(weight.nbytes for weight in weights.values())
        projection = weights["embed_audio.embedding_projection.weight"]
        self.device = projection.device
        self.dtype = projection.dtype
        self.clamp = min(config.clamp, torch.finfo(self.dtype).max)
        with torch.inference_mode():
            self.layers = [self._gather(f"audio_tower.layers.{i}.") for i in range(config.layers)]

    def encode(self, samples: np.ndarray) -> Tensor:
        """float32 [n] at 16 kHz -> soft tokens [tokens, text hidden]."""
        config = self.config
        num_threads = torch.get_num_threads()
        torch.set_num_threads(max(num_threads, self.threads))
        try:
            with torch.inference_mode():
                if config.kind == "frames":
                    encoded = self._upload(raw_frames(samples, config.hidden)).to(self.dtype)
                else:
                    encoded = self.conformer(self._upload(log_mel(samples)))
                normed = rms_norm(encoded, None, config.eps)
                return F.linear(normed, self.weights["embed_audio.embedding_projection.weight"])
        finally:
            torch.set_num_threads(num_threads)

    def _upload(self, features: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(features)).to(self.device)

    def conformer(self, mel: Tensor) -> Tensor:
        """float32 [frames, 128] -> [tokens, output]."""
        x = self.subsample(mel)
        for layer in self.layers:
            x = self.layer(layer, x)
        return F.linear(x, self.weights["audio_tower.output_proj.weight"], self.weights["audio_tower.output_proj.bias"])

    def subsample(self, mel: Tensor) -> Tensor:
        """Two convolutions of stride 2: float32 [frames, 128] -> [tokens, hidden], tokens = ceil(frames / 4)."""
        prefix = "audio_tower.subsample_conv_projection."
        x = mel.to(self.dtype)[None, None]  # [1, 1, frames, 128]
        for name in ("layer0", "layer1"):
            x = F.conv2d(x, self.weights[f"{prefix}{name}.conv.weight"], stride=2, padding=1)
            channels_last = x.permute(0, 2, 3, 1)  # [1, frames, bins, channels]
            norm = self.weights[f"{prefix}{name}.norm.weight"]
            channels_last = F.relu(F.layer_norm(channels_last, norm.shape, norm, None, self.config.eps))
            x = channels_last.permute(0, 3, 1, 2).contiguous()
        flat = channels_last.reshape(channels_last.shape[1], -1)  # [tokens, 32 bins x channels]
        return F.linear(flat, self.weights[f"{prefix}input_proj_linear.weight"])

    def layer(self, layer: ConformerLayer, x: Tensor) -> Tensor:
        """x [tokens, hidden]: half a feed-forward network, attention, convolution, the other half."""
        x = self.feed_forward(layer.first, x)
        x = self.attend(layer.attention, x)
        x = self.convolve(layer.conv, x)
        x = self.feed_forward(layer.second, x)
        return rms_norm(self.clamped(x), layer.norm_out)

    def feed_forward(self, net: FeedForward, x: Tensor) -> Tensor:
        h = rms_norm(self.clamped(x), net.pre_norm)
        h = net.down(F.silu(net.up(h)))
        return x + rms_norm(self.clamped(h), net.post_norm) * self.config.residual_weight

    def attend(self, net: LocalAttention, x: Tensor) -> Tensor:
        """Each position attends to the last `past` positions, itself included, in blocks of `chunk` queries against
        `past + chunk` keys. Scores are float32."""
        config = self.config
        num_tokens = x.shape[0]
        num_blocks = -(-num_tokens // config.chunk)
        h = rms_norm(self.clamped(x), net.pre_norm)
        query = net.query(h).float().view(num_tokens, config.heads, -1)
        key = net.key(h).float().view(num_tokens, config.heads, -1) * KEY_SCALE
        value = net.value(h).float().view(num_tokens, config.heads, -1)
        query = query * net.query_scale

        num_padding = num_blocks * config.chunk - num_tokens  # rows that fill up the last block
        query = F.pad(query, (0, 0, 0, 0, 0, num_padding)).view(num_blocks, config.chunk, config.heads, -1)
        key_blocks = self._contexts(key, num_padding)  # [heads, blocks, keys, head_dim]
        value_blocks = self._contexts(value, num_padding)
        query_blocks = query.permute(2, 0, 1, 3)  # [heads, blocks, chunk, head_dim]

        by_content = query_blocks @ key_blocks.transpose(-1, -2)  # [heads, blocks, chunk, keys]
        by_distance = query_blocks @ net.distance_keys[:, None].transpose(-1, -2)  # [heads, blocks, chunk, past + 1]
        column, visible = self._geometry(num_blocks, x.device)
        by_distance = by_distance.gather(-1, column.expand(*by_content.shape))
        scores = torch.tanh((by_content + by_distance) / config.softcap) * config.softcap
        probabilities = F.softmax(scores.masked_fill(~visible, MASKED), dim=-1)

        mixed = (probabilities @ value_blocks).permute(1, 2, 0, 3)  # [blocks, chunk, heads, head_dim]
        mixed = mixed.reshape(num_blocks * config.chunk, -1)[:num_tokens]
        out = net.out(mixed.to(x.dtype))
        return x + rms_norm(self.clamped(out), net.post_norm)

    def _contexts(self, x: Tensor, num_padding: int) -> Tensor:
        """[tokens, heads, head_dim] -> [heads, blocks, past + chunk, head_dim]: every block's keys or values."""
        config = self.config
        padded = F.pad(x, (0, 0, 0, 0, config.past, num_padding))
        windows = padded.unfold(0, config.past + config.chunk, config.chunk)  # [blocks, heads, head_dim, keys]
        return windows.permute(1, 0, 3, 2).contiguous()

    def _geometry(self, num_blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Relative positions of a block's queries i and keys j: the column of their distance among the distance keys
        [chunk, keys], and whether i sees j [blocks, chunk, keys]."""
        config = self.config
        i = torch.arange(config.chunk, device=device)[:, None]
        j = torch.arange(config.past + config.chunk, device=device)[None]
        distance = i + config.past - j
        column = (config.past - distance).clamp(0, config.past)
        position = torch.arange(num_blocks, device=device)[:, None, None] * config.chunk + j - config.past
        visible = (distance >= 0) & (distance < config.past) & (position >= 0)
        return column, visible

    def convolve(self, net: LightConv, x: Tensor) -> Tensor:
        """A gated linear layer, a causal convolution over time for each column, a linear layer."""
        h = net.start(rms_norm(x, net.pre_norm, self.config.eps))
        h = F.glu(h, dim=-1)  # [tokens, hidden]
        kernel = net.depthwise.shape[-1]
        padded = F.pad(h.t()[None], (kernel - 1, 0))  # [1, hidden, kernel - 1 + tokens]
        h = F.conv1d(padded, net.depthwise, groups=h.shape[-1])[0].t()
        h = F.silu(rms_norm(self.clamped(h), net.conv_norm, self.config.eps))
        return x + net.end(h)

    def clamped(self, x: Tensor) -> Tensor:
        return x.clamp(-self.clamp, self.clamp)

    # ---- weights
    def _gather(self, prefix: str) -> ConformerLayer:
        return ConformerLayer(
            first=self._feed_forward(f"{prefix}feed_forward1."),
            attention=self._attention(prefix),
            conv=LightConv(
                pre_norm=self.weights[f"{prefix}lconv1d.pre_layer_norm.weight"],
                start=self._linear(f"{prefix}lconv1d.linear_start"),
                depthwise=self.weights[f"{prefix}lconv1d.depthwise_conv1d.weight"],
                conv_norm=self.weights[f"{prefix}lconv1d.conv_norm.weight"],
                end=self._linear(f"{prefix}lconv1d.linear_end"),
            ),
            second=self._feed_forward(f"{prefix}feed_forward2."),
            norm_out=self.weights[f"{prefix}norm_out.weight"],
        )

    def _feed_forward(self, prefix: str) -> FeedForward:
        return FeedForward(
            pre_norm=self.weights[f"{prefix}pre_layer_norm.weight"],
            up=self._linear(f"{prefix}ffw_layer_1"),
            down=self._linear(f"{prefix}ffw_layer_2"),
            post_norm=self.weights[f"{prefix}post_layer_norm.weight"],
        )

    def _attention(self, prefix: str) -> LocalAttention:
        config = self.config
        head_dim = config.hidden // config.heads
        positions = sinusoids(config.past, config.hidden).to(self.device, self.dtype)  # [past + 1, hidden]
        distance_keys = F.linear(positions, self.weights[f"{prefix}self_attn.relative_k_proj.weight"])
        by_head = distance_keys.float().view(config.past + 1, config.heads, head_dim).transpose(0, 1)
        scale = self.weights[f"{prefix}self_attn.per_dim_scale"].float()
        return LocalAttention(
            pre_norm=self.weights[f"{prefix}norm_pre_attn.weight"],
            query=self._linear(f"{prefix}self_attn.q_proj"),
            key=self._linear(f"{prefix}self_attn.k_proj"),
            value=self._linear(f"{prefix}self_attn.v_proj"),
            query_scale=scale * (head_dim**-0.5 / math.log(2)),
            distance_keys=by_head.contiguous(),
            out=self._linear(f"{prefix}self_attn.post"),
            post_norm=self.weights[f"{prefix}norm_post_attn.weight"],
        )

    def _linear(self, name: str) -> ClippedLinear:
        weight = self.weights[f"{name}.linear.weight"]
        if not self.config.clipped:
            return ClippedLinear(weight)
        input_min, input_max, output_min, output_max = (float(self.weights[f"{name}.{end}"]) for end in CLIPS)
        return ClippedLinear(weight, (input_min, input_max), (output_min, output_max))


KEY_SCALE = math.log(1 + math.e) / math.log(2)
MASKED = -1e9  # score of a key that a query does not see


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """Over the last dimension, in float32; the weight multiplies directly."""
    x_float = x.float()
    normed = x_float * torch.pow(x_float.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    if weight is not None:
        normed = normed * weight.float()
    return normed.to(x.dtype)


def sinusoids(max_distance: int, width: int) -> Tensor:
    """Embeddings of the distances max_distance, ..., 1, 0: sines, then cosines; float32 [max_distance + 1, width]."""
    num_timescales = width // 2
    increment = math.log(10_000.0) / max(num_timescales - 1, 1)
    inverse = torch.exp(torch.arange(num_timescales) * -increment)
    angles = torch.arange(max_distance, -1, -1)[:, None] * inverse
    return torch.cat((angles.sin(), angles.cos()), -1)
