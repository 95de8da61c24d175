"""From pixels to soft tokens: Gemma 4's vision tower, the 12B's unified embedder and Gemma 3's SigLIP, in plain torch.

One image at a time and unpadded: padding would change the bits of an image with the images next to it. Soft tokens are
rows of the text model's input as they are, not multiplied by sqrt(hidden). After transformers 5's modeling_gemma4.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .vision_config import VisionConfig


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    h = x.float()
    h = h * torch.pow(h.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    return (h if weight is None else h * weight.float()).to(x.dtype)


class VisionModel:
    def __init__(self, config: VisionConfig, weights: Mapping[str, Tensor]) -> None:
        """weights: by the names of `VisionConfig.tensors`."""
        self.config, self.weights = config, weights
        some = next(iter(weights.values()))
        self.device, self.dtype = some.device, some.dtype

    @property
    def nbytes(self) -> int:
        return sum(w.nbytes for w in self.weights.values())

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        """uint8 [h, w, 3], both sides a multiple of `config.side` -> soft tokens [n, text hidden]."""
        config = self.config
        x = unit_range(pixels.to(self.device))
        if config.kind == "siglip":
            return self._siglip(x)
        encoded = self._unified(x) if config.kind == "unified" else self._tower(x)
        projection = self.weights["embed_vision.embedding_projection.weight"]
        return F.linear(rms_norm(encoded, None, config.eps), projection)

    def _unified(self, x: Tensor) -> Tensor:
        """[h, w, 3] -> [n, d]: one projection, three layer norms, positions by column and row."""
        merged, positions = patches(x, self.config.side)
        h = self._layer_norm(merged.to(self.dtype), "patch_ln1")
        h = F.linear(h, self._own("patch_dense.weight"), self._own("patch_dense.bias"))
        h = self._layer_norm(h, "patch_ln2")
        table = self._own("pos_embedding")
        h = h + (table[positions[:, 0], 0] + table[positions[:, 1], 1])
        return self._layer_norm(h, "pos_norm")

    def _own(self, name: str) -> Tensor:
        return self.weights["vision_embedder." + name]

    def _layer_norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self._own(f"{name}.weight"), self._own(f"{name}.bias"))

    def _tower(self, x: Tensor) -> Tensor:
        """[h, w, 3] -> [n, d]: patches, positions, encoder layers, mean of pool x pool patches."""
        config, weights = self.config, self.weights
        cut, positions = patches(x, config.patch)
        h = F.linear((2 * (cut - 0.5)).to(self.dtype), weights["vision_tower.patch_embedder.input_proj.weight"])
        table = weights["vision_tower.patch_embedder.position_embedding_table"]
        h = h + (table[0, positions[:, 0]] + table[1, positions[:, 1]])
        cos, sin = self._angles(positions)
        for i in range(config.layers):
            h = self._layer(f"vision_tower.encoder.layers.{i}.", h, cos, sin)
        rows, columns = x.shape[0] // config.side, x.shape[1] // config.side
        blocks = h.float().view(rows, config.pool, columns, config.pool, config.hidden)
        pooled = blocks.mean((1, 3)).view(-1, config.hidden).to(self.dtype)  # rounded to the working type, as trained
        scaled = pooled.float() * config.hidden**0.5
        if config.standardize:
            bias, scale = weights["vision_tower.std_bias"], weights["vision_tower.std_scale"]
            scaled = (scaled - bias.float()) * scale.float()
        return scaled.to(self.dtype)

    def _siglip(self, x: Tensor) -> Tensor:
        """[h, w, 3] -> [n, text hidden]: patches, positions, encoder layers, mean of pool x pool, norm, projection."""
        config, weights, tower = self.config, self.weights, "vision_tower."
        kernel = weights[f"{tower}embeddings.patch_embedding.weight"].permute(0, 2, 3, 1)  # channels last, as patches
        cut = patches((x - 0.5) / 0.5, config.patch)[0].to(self.dtype)
        h = F.linear(cut, kernel.reshape(config.hidden, -1), weights[f"{tower}embeddings.patch_embedding.bias"])
        h = h + weights[f"{tower}embeddings.position_embedding.weight"]
        for i in range(config.layers):
            h = self._siglip_layer(f"{tower}encoder.layers.{i}.", h)
        h = self._biased_norm(h, f"{tower}post_layernorm")
        across = x.shape[1] // config.side
        pooled = h.view(-1, config.pool, across, config.pool, config.hidden).mean((1, 3)).view(-1, config.hidden)
        scale = 1.0 + weights["multi_modal_projector.mm_soft_emb_norm.weight"].float()
        normed = rms_norm(pooled, scale, config.eps)
        return normed @ weights["multi_modal_projector.mm_input_projection_weight"]

    def _siglip_layer(self, here: str, x: Tensor) -> Tensor:
        config, linear = self.config, lambda h, name: self._biased(h, here + name)
        h = self._biased_norm(x, here + "layer_norm1")
        q, k, v = (linear(h, f"self_attn.{n}_proj").view(-1, config.heads, config.head_dim) for n in "qkv")
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)[0]
        x = x + linear(mixed.transpose(0, 1).reshape(x.shape), "self_attn.out_proj")
        h = self._biased_norm(x, here + "layer_norm2")
        return x + linear(F.gelu(linear(h, "mlp.fc1"), approximate="tanh"), "mlp.fc2")

    def _biased(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _biased_norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(
            x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], self.config.eps
        )

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [P, 2, D/4]: the first half of a head turns with x, the second with y."""
        half = self.config.head_dim // 2
        inv = 1.0 / (self.config.theta ** (torch.arange(0, half, 2, dtype=torch.float32, device=self.device) / half))
        angles = positions[:, :, None].float() * inv
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def _layer(self, here: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        config, eps = self.config, self.config.eps
        norm = lambda h, name: rms_norm(h, self.weights[f"{here}{name}.weight"], eps)  # noqa: E731
        h = norm(x, "input_layernorm")
        q = self._heads(here + "self_attn.q_proj", h, config.heads)
        k = self._heads(here + "self_attn.k_proj", h, config.kv_heads)
        v = rms_norm(self._heads(here + "self_attn.v_proj", h, config.kv_heads), None, eps)
        q, k = rotate(norm(q, "self_attn.q_norm"), cos, sin), rotate(norm(k, "self_attn.k_norm"), cos, sin)
        group = config.heads // config.kv_heads
        q, k, v = (t.repeat_interleave(n, 1).transpose(0, 1)[None] for t, n in ((q, 1), (k, group), (v, group)))
        mixed = F.scaled_dot_product_attention(q, k, v, scale=1.0)[0]
        attended = self._linear(here + "self_attn.o_proj", mixed.transpose(0, 1).reshape(x.shape[0], -1))
        x = x + norm(attended, "post_attention_layernorm")
        h = norm(x, "pre_feedforward_layernorm")
        gated = F.gelu(self._linear(here + "mlp.gate_proj", h), approximate="tanh")
        h = self._linear(here + "mlp.down_proj", gated * self._linear(here + "mlp.up_proj", h))
        return x + norm(h, "post_feedforward_layernorm")

    def _heads(self, name: str, x: Tensor, heads: int) -> Tensor:
        return self._linear(name, x).view(x.shape[0], heads, self.config.head_dim)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        weights, matrix = self.weights, self.weights[f"{name}.linear.weight"]
        if not self.config.clipped:
            return F.linear(x, matrix)
        x = torch.clamp(x, weights[f"{name}.input_min"], weights[f"{name}.input_max"])
        return torch.clamp(F.linear(x, matrix), weights[f"{name}.output_min"], weights[f"{name}.output_max"])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [P, heads, D]; cos, sin [P, 2, D/4]: NeoX pairs within each half of the head."""
    a, b = x.view(*x.shape[:2], 2, 2, -1).unbind(3)  # [P, heads, 2, D/4] each
    c, s = cos[:, None], sin[:, None]
    return torch.stack((a * c - b * s, b * c + a * s), 3).view(x.shape)


def unit_range(pixels: Tensor) -> Tensor:
    """uint8 -> float32 in [0, 1], with the bits of transformers' rescaling, which multiplies in float64."""
    return (pixels.double() * (1 / 255)).float()


def patches(x: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """[h, w, 3] -> values in the order (y, x, channel) [P, side * side * 3], and positions (x, y) [P, 2]; row by
    row."""
    rows, columns = x.shape[0] // side, x.shape[1] // side
    cut = x.view(rows, side, columns, side, 3).transpose(1, 2).reshape(rows * columns, -1)
    y, across = torch.arange(rows, device=x.device), torch.arange(columns, device=x.device)
    return cut, torch.stack((across.repeat(rows), y.repeat_interleave(columns)), 1)
