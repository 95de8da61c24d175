"""From pixels to soft tokens: Gemma 4's vision tower, the 12B's unified embedder and Gemma 3's SigLIP, in plain torch.

Images are encoded one at a time and unpadded, so that bits depend on no other image. Soft tokens are not multiplied by
sqrt(hidden). Gemma 4's definition is transformers 5's, with stacked matrices and heads reordered for NeoX's rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..ops.reference import Backend, ReferenceOps
from .vision_config import CLIPS, VisionConfig

# the fastest one that supports the head size; cuDNN's uses Hopper's wgmma
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# captured shapes; for larger images launches are hidden
GRAPHS = 16
GRAPH_PIXELS = 1120 * 48 * 48 // 2


class ShapeGraphs:
    """An encoder with one CUDA graph per image shape seen before: launches take longer than kernels."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        self._run = run
        self._seen: set[torch.Size] = set()
        self._made: dict[torch.Size, tuple[Tensor, torch.cuda.CUDAGraph, Tensor]] = {}

    def __call__(self, pixels: Tensor) -> Tensor:
        if pixels.shape not in self._made:
            if pixels.shape not in self._seen or len(self._made) >= GRAPHS or pixels.numel() > 3 * GRAPH_PIXELS:
                self._seen = {*self._seen, pixels.shape} if len(self._seen) < 1024 else set()
                return self._run(pixels)
            static_pixels = pixels.clone()
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self._made.values()))[1].pool() if self._made else None
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                out = self._run(static_pixels)
            self._made[pixels.shape] = static_pixels, graph, out
        static_pixels, graph, out = self._made[pixels.shape]
        static_pixels.copy_(pixels)
        graph.replay()
        return out.clone()


@dataclass(frozen=True)
class StackedLinear:
    """Matrices with the same input, stacked along their rows. E2B's and E4B's clamp their inputs and outputs."""

    weight: Tensor  # [out, in]
    reads: tuple[float, float] | None
    gives: tuple[Tensor, Tensor] | None  # [out] each

    def __call__(self, x: Tensor, ops: Backend) -> Tensor:
        y = F.linear(x if self.reads is None else x.clamp(*self.reads), self.weight)
        return y if self.gives is None else ops.clamp_columns(y, *self.gives)


@dataclass(frozen=True)
class TowerLayer:
    qkv: tuple[StackedLinear, ...]  # one, or three if they clamp their inputs differently
    out: StackedLinear
    gate_up: tuple[StackedLinear, ...]
    down: StackedLinear
    norms: tuple[Tensor, Tensor, Tensor, Tensor]  # before and after attention, before and after the MLP; float32
    q_norm: Tensor
    k_norm: Tensor


class VisionModel:
    def __init__(
        self, config: VisionConfig, weights: dict[str, Tensor], ops: Backend | None = None, threads: int = 1
    ) -> None:
        """weights: by the names of `VisionConfig.tensors`; a tower's layers are popped. ops: of norms, activations and
        rotation (None: torch). threads: of the CPU."""
        self.config = config
        self.weights = weights
        self.ops = ops or ReferenceOps()
        self.threads = threads
        self.nbytes = sum(w.nbytes for w in weights.values())
        some = next(iter(weights.values()))
        self.device = some.device
        self.dtype = some.dtype
        tower = config.kind == "tower"
        self._graphs = ShapeGraphs(self._encode) if self.device.type == "cuda" else None
        self.layers = [self._gather(f"vision_tower.encoder.layers.{i}.") for i in range(config.layers if tower else 0)]

    def encode(self, pixels: Tensor) -> Tensor:
        """uint8 [h, w, 3], both sides a multiple of `config.side` -> soft tokens [n, text hidden]."""
        before = torch.get_num_threads()
        torch.set_num_threads(max(before, self.threads))
        try:
            with torch.inference_mode(), sdpa_kernel(BACKENDS, set_priority=True):
                return (self._graphs or self._encode)(pixels.to(self.device))
        finally:
            torch.set_num_threads(before)

    def _encode(self, pixels: Tensor) -> Tensor:
        config = self.config
        x = unit_range(pixels)
        if config.kind == "siglip":
            return self._siglip(x)
        encoded = self._unified(x) if config.kind == "unified" else self._tower(x)
        projection = self.weights["embed_vision.embedding_projection.weight"]
        return F.linear(self.ops.rms_norm(encoded, None, config.eps), projection)

    def _unified(self, x: Tensor) -> Tensor:
        """[h, w, 3] -> [n, d]: one projection, three layer norms, positions by column and row."""
        merged, positions = patches(x, self.config.side)
        here = "vision_embedder."
        eps = 1e-5
        h = self._layer_norm(merged.to(self.dtype), here + "patch_ln1", eps)
        h = self._layer_norm(self._biased(h, here + "patch_dense"), here + "patch_ln2", eps)
        table = self.weights[here + "pos_embedding"]
        h = h + (table[positions[:, 0], 0] + table[positions[:, 1], 1])
        return self._layer_norm(h, here + "pos_norm", eps)

    def _tower(self, x: Tensor) -> Tensor:
        """[h, w, 3] -> [n, d]: patches, positions, encoder layers, mean of pool x pool patches."""
        config = self.config
        weights = self.weights
        cut, positions = patches(x, config.patch)
        h = F.linear((2 * (cut - 0.5)).to(self.dtype), weights["vision_tower.patch_embedder.input_proj.weight"])
        table = weights["vision_tower.patch_embedder.position_embedding_table"]
        h = h + (table[0, positions[:, 0]] + table[1, positions[:, 1]])
        cos, sin = self._angles(positions)
        normed = self.ops.rms_norm(h, self.layers[0].norms[0], config.eps)
        for i, layer in enumerate(self.layers):
            following = self.layers[i + 1].norms[0] if i + 1 < len(self.layers) else None
            h, normed = self._layer(layer, h, normed, angles=(cos, sin), following=following)
        rows = x.shape[0] // config.side
        columns = x.shape[1] // config.side
        blocks = h.float().view(rows, config.pool, columns, config.pool, config.hidden)
        pooled = blocks.mean((1, 3)).view(-1, config.hidden).to(self.dtype)  # rounded to the working type, as trained
        scaled = pooled.float() * config.hidden**0.5
        if config.standardize:
            bias = weights["vision_tower.std_bias"]
            scale = weights["vision_tower.std_scale"]
            scaled = (scaled - bias.float()) * scale.float()
        return scaled.to(self.dtype)

    def _siglip(self, x: Tensor) -> Tensor:
        """[h, w, 3] -> [n, text hidden]: patches, positions, encoder layers, mean of pool x pool, norm, projection."""
        config = self.config
        weights = self.weights
        tower = "vision_tower."
        kernel = weights[f"{tower}embeddings.patch_embedding.weight"].permute(0, 2, 3, 1)  # channels last, as patches
        cut = patches((x - 0.5) / 0.5, config.patch)[0].to(self.dtype)
        h = F.linear(cut, kernel.reshape(config.hidden, -1), weights[f"{tower}embeddings.patch_embedding.bias"])
        h = h + weights[f"{tower}embeddings.position_embedding.weight"]
        for i in range(config.layers):
            h = self._siglip_layer(f"{tower}encoder.layers.{i}.", h)
        h = self._layer_norm(h, f"{tower}post_layernorm", config.eps)
        across = x.shape[1] // config.side
        pooled = h.view(-1, config.pool, across, config.pool, config.hidden).mean((1, 3)).view(-1, config.hidden)
        scale = 1.0 + weights["multi_modal_projector.mm_soft_emb_norm.weight"].float()
        normed = self.ops.rms_norm(pooled, scale, config.eps)
        return normed @ weights["multi_modal_projector.mm_input_projection_weight"]

    def _siglip_layer(self, here: str, x: Tensor) -> Tensor:
        config = self.config

        def linear(h: Tensor, name: str) -> Tensor:
            return self._biased(h, here + name)

        h = self._layer_norm(x, here + "layer_norm1", config.eps)
        q, k, v = (linear(h, f"self_attn.{n}_proj").view(-1, config.heads, config.head_dim) for n in "qkv")
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)[0]
        x = x + linear(mixed.transpose(0, 1).reshape(x.shape), "self_attn.out_proj")
        h = self._layer_norm(x, here + "layer_norm2", config.eps)
        return x + linear(F.gelu(linear(h, "mlp.fc1"), approximate="tanh"), "mlp.fc2")

    def _biased(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _layer_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], eps)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [P, D/2] float32: the first half of the pairs turns with x, the second with y."""
        half = self.config.head_dim // 2
        inv = 1.0 / (self.config.theta ** (torch.arange(0, half, 2, dtype=torch.float32, device=self.device) / half))
        angles = (positions[:, :, None].float() * inv).flatten(1)
        return angles.cos().to(self.dtype).float(), angles.sin().to(self.dtype).float()

    def _layer(
        self, layer: TowerLayer, x: Tensor, h: Tensor, angles: tuple[Tensor, Tensor], following: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x [P, d]: the residual stream; h: its norm. Returns both after the layer, with the norm `following`."""
        config = self.config
        ops = self.ops
        _, post, before, after = layer.norms
        heads = (config.heads, config.kv_heads)
        q, k, v = ops.rotate_heads(
            _all(layer.qkv, h, ops), angles, (layer.q_norm, layer.k_norm), heads=heads, eps=config.eps
        )
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        if config.heads > config.kv_heads:
            k, v = (t.repeat_interleave(config.heads // config.kv_heads, 1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, scale=1.0)[0]
        attended = layer.out(mixed.transpose(0, 1).reshape(x.shape[0], -1), ops)
        x, h = ops.residual_norm(x, attended, post, scale=None, next_w=before, eps=config.eps)
        gate, up = _all(layer.gate_up, h, ops).chunk(2, -1)
        y = layer.down(ops.act_mul(gate, up, "gelu_tanh"), ops)
        return ops.residual_norm(x, y, after, scale=None, next_w=following, eps=config.eps)

    def _gather(self, here: str) -> TowerLayer:
        config = self.config
        q = self.config.head_dim // 4
        pairs = torch.arange(config.head_dim, device=self.device).view(2, 2, q).transpose(0, 1).reshape(-1)

        def take(name: str) -> Tensor:
            return self.weights.pop(f"{here}{name}.weight").float()

        def stack(*names: str) -> tuple[StackedLinear, ...]:
            return self._stack([here + name for name in names])

        for name, heads in (("q", config.heads), ("k", config.kv_heads)):
            matrix = f"{here}self_attn.{name}_proj.linear.weight"
            self.weights[matrix] = self.weights[matrix].view(heads, config.head_dim, -1)[:, pairs].flatten(0, 1)
        norms = [take(f"{n}_layernorm") for n in ("input", "post_attention", "pre_feedforward", "post_feedforward")]
        return TowerLayer(
            qkv=stack("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            out=stack("self_attn.o_proj")[0],
            gate_up=stack("mlp.gate_proj", "mlp.up_proj"),
            down=stack("mlp.down_proj")[0],
            norms=(norms[0], norms[1], norms[2], norms[3]),
            q_norm=take("self_attn.q_norm")[pairs],
            k_norm=take("self_attn.k_norm")[pairs],
        )

    def _stack(self, names: Sequence[str]) -> tuple[StackedLinear, ...]:
        matrices = [self.weights.pop(f"{name}.linear.weight") for name in names]
        if not self.config.clipped:
            return (StackedLinear(torch.cat(matrices), None, None),)
        bounds = [[self.weights.pop(f"{name}.{end}") for end in CLIPS] for name in names]
        stacked = []
        for matrix, (_, _, *gives) in zip(matrices, bounds):
            stacked.append([matrix, *(bound.expand(matrix.shape[0]).contiguous() for bound in gives)])
        reads = [(float(low), float(high)) for low, high, *_ in bounds]
        if len(set(reads)) > 1:
            return tuple(StackedLinear(w, r, (low, high)) for (w, low, high), r in zip(stacked, reads))
        weight, low, high = (torch.cat(parts) for parts in zip(*stacked))
        return (StackedLinear(weight, reads[0], (low, high)),)


def _all(linears: Sequence[StackedLinear], x: Tensor, ops: Backend) -> Tensor:
    return linears[0](x, ops) if len(linears) == 1 else torch.cat([linear(x, ops) for linear in linears], -1)


def unit_range(pixels: Tensor) -> Tensor:
    """uint8 -> float32 in [0, 1], with the bits of transformers' rescaling, which multiplies in float64."""
    return (pixels.double() * (1 / 255)).float()


def patches(x: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """[h, w, 3] -> values (y, x, channel) [P, side * side * 3] and positions (x, y) [P, 2], row by row."""
    rows = x.shape[0] // side
    columns = x.shape[1] // side
    cut = x.view(rows, side, columns, side, 3).transpose(1, 2).reshape(rows * columns, -1)
    y = torch.arange(rows, device=x.device)
    across = torch.arange(columns, device=x.device)
    return cut, torch.stack((across.repeat(rows), y.repeat_interleave(columns)), 1)
