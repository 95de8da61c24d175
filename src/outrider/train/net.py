"""The drafter as a trainable network: the arithmetic of `models/drafter.py`, batched over all anchors of whole
sequences.

Anchor a is a position that the target has seen: hidden state a, keys 0..a. Step j takes the embedding of token a + j
(for all anchors at once: the sequence shifted by j) and predicts token a + j + 1. The K/V, the mask and the rotary
position are those of the anchor in every step, so each step is one causal attention of the last Tq positions over all
T. Parameters carry the canonical weight names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.block_config import BlockConfig
from ..models.compat import bind
from ..models.config import DrafterConfig, LayerSpec, ModelConfig
from ..models.decoder import TextModel
from ..models.inspect import DrafterSize, drafter_size
from ..models.layers import inverse_frequencies
from ..models.names import TensorPlan, tensor_plan
from ..ops.reference import activation
from ..spec.block_load import draft_size
from .capture import CapturedStates, causal_attention, spread_heads
from .data import TrainBatch

QUANT_BLOCK = 32  # columns that share a scale where the layers are held in 4 bits


@dataclass
class Context:
    """Shared by all steps over one batch."""

    # per drafter layer: K and V [B, heads, T, D]; cos and sin [Tq, 1, D/2] float32
    kv: list[tuple[Tensor, Tensor]]
    angles: list[tuple[Tensor, Tensor]]
    taps: list[Tensor]  # [B, Tq, Hb] at unit scale


def rms(x: Tensor, w: Tensor | None, eps: float) -> Tensor:
    if x.dtype == torch.float32:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return h if w is None else h * w
    return F.rms_norm(x, (x.shape[-1],), w, eps)


class TrainNet(nn.Module):
    """A drafter's parameters in float32, by the canonical names of its plan. A kind of drafter is a subclass."""

    config: DrafterConfig | BlockConfig
    taps: tuple[int, ...]  # target layers whose residual streams it reads
    reads: tuple[int, ...] = ()  # target layers whose K/V it reads

    def __init__(self, config: DrafterConfig | BlockConfig, plans: Mapping[str, TensorPlan], depth: int, seed: int):
        super().__init__()
        self.config = config
        self.names: dict[str, str] = {}  # canonical -> parameter or buffer
        generator = torch.Generator().manual_seed(seed)
        for name, plan in plans.items():
            attribute = name.replace(".", "_")
            self.names[name] = attribute
            if plan.role == "index":
                self.register_buffer(attribute, torch.arange(plan.shape[0]))
            elif plan.role in ("norm", "vector"):
                self.register_parameter(attribute, nn.Parameter(torch.ones(plan.shape)))
            else:
                std = plan.shape[-1] ** -0.5
                if name.endswith((".out", ".down")):  # what is added to the residual stream starts small
                    std *= (2 * depth) ** -0.5
                self.register_parameter(attribute, nn.Parameter(torch.randn(plan.shape, generator=generator) * std))

    @property
    def size(self) -> DrafterSize:
        """Weights that a draft step reads; for a block drafter, a pass that drafts all tokens."""
        return draft_size(self.config) if isinstance(self.config, BlockConfig) else drafter_size(self.config)

    def unroll(
        self, w: Mapping[str, Tensor], model: TextModel, seen: CapturedStates, batch: TrainBatch, steps: int
    ) -> Iterator[Tensor]:
        """The draft loop of training and evaluation: g [B, Tq, h] of draft tokens 1..steps, from all anchors at once;
        a kind may end before."""
        raise NotImplementedError

    def weight(self, name: str) -> Tensor:
        return getattr(self, self.names[name])

    def load(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name in self.names:
                self.weight(name).copy_(weights[name])

    def export(self) -> dict[str, Tensor]:
        """The weights to write: if the layers were trained in 4 bits, those values, so that every device drafts with
        them."""
        return {name: w.detach().clone() for name, w in self.cast(torch.float32, self.config.weight_bits).items()}

    def cast(self, dtype: torch.dtype, bits: int | None = None) -> dict[str, Tensor]:
        """Differentiable copies in the compute dtype, once per batch; `bits` = 4: the layers' matrices rounded to 4
        bits."""
        held = {name: self.weight(name) for name in self.names}
        if bits == 4:
            matrices = [
                n
                for n, w in held.items()
                if w.ndim == 2 and n not in ("embed", "centroids") and w.shape[1] % QUANT_BLOCK == 0
            ]
            held |= zip(matrices, four_bits_all([held[n] for n in matrices], dtype), strict=True)
        return {name: w.to(dtype) if w.is_floating_point() else w for name, w in held.items()}


class DrafterModule(TrainNet):
    """An MTP drafter; `step` computes in the dtype of the weights that `cast` gave."""

    config: DrafterConfig

    def __init__(self, config: DrafterConfig, target: ModelConfig, seed: int = 0):
        self.layers: tuple[LayerSpec, ...]
        super().__init__(config, tensor_plan(config), len(bind(config, target)), seed)
        self.layers, self.taps = bind(config, target), config.taps
        self.reads = tuple(sorted({layer.attn.kv_layer for layer in self.layers}))

    def context(self, seen: CapturedStates, first: int) -> Context:
        length, device, config = seen.hidden.shape[1], seen.hidden.device, self.config
        spread: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        positions = torch.arange(first, length, device=device) + 2 - config.position_offset
        kv, angles = [], []
        for layer in self.layers:
            at = (layer.attn.kv_layer, layer.attn.heads)
            if at not in spread:
                spread[at] = spread_heads(seen.keys[at[0]], at[1]), spread_heads(seen.values[at[0]], at[1])
            kv.append(spread[at])
            turn = positions.float()[:, None] * inverse_frequencies(layer.rope, device)[None, :]
            angles.append((turn.cos()[:, None], turn.sin()[:, None]))
        return Context(kv, angles, [rms(t[:, first:], None, config.norm_eps) for t in seen.taps])

    def step(self, w: Mapping[str, Tensor], ctx: Context, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """embedding, hidden [B, Tq, Hb] -> g for the head, next hidden [B, Tq, Hb]."""
        config, eps, gemma = self.config, self.config.norm_eps, self.config.gemma
        parts = [embedding, hidden] if gemma else [rms(embedding, None, eps), rms(hidden, None, eps), *ctx.taps]
        x = F.linear(torch.cat(parts, dim=-1), w["pre"])
        for i, layer in enumerate(self.layers):
            at, spec = f"layers.{i}.", layer.attn
            q = F.linear(rms(x, w[at + "attn_norm"], eps), w[at + "qkv"]).unflatten(-1, (spec.heads, spec.head_dim))
            if gemma:
                q = rms(q, w[at + "q_norm"], eps)
            q = rotate(q, *ctx.angles[i]).transpose(1, 2)  # [B, heads, Tq, D]
            y = causal_attention(q, *ctx.kv[i], spec.scale, spec.window)
            y = F.linear(y.transpose(1, 2).flatten(2), w[at + "out"])
            x = x + (rms(y, w[at + "post_attn_norm"], eps) if gemma else y)
            gate, up = F.linear(rms(x, w[at + "mlp_norm"], eps), w[at + "gate_up"]).chunk(2, dim=-1)
            y = F.linear(activation(config.activation, gate) * up, w[at + "down"])
            x = x + (rms(y, w[at + "post_mlp_norm"], eps) if gemma else y)
            if gemma:
                x = x * w[at + "scalar"]
        h = rms(x, w["norm"], eps)
        after = F.linear(h, w["post"]) if config.has_post else h
        return (after if config.tied_to_target else h), after

    def unroll(
        self, w: Mapping[str, Tensor], model: TextModel, seen: CapturedStates, batch: TrainBatch, steps: int
    ) -> Iterator[Tensor]:
        """The input of step j is the true token j positions later."""
        with torch.no_grad():
            ids = F.pad(batch.ids[:, batch.first :], (0, steps))
            embedded = model.embed(ids.reshape(-1)).view(*ids.shape, -1)  # [B, Tq + steps, Hb]
        ctx, hidden = self.context(seen, batch.first), seen.hidden[:, batch.first :]
        width = hidden.shape[1]
        for j in range(1, steps + 1):
            g, hidden = self.step(w, ctx, embedded[:, j : j + width], hidden)
            yield g


def four_bits(w: Tensor) -> Tensor:
    """w [N, K] rounded as the CPU packs "int4" (ops/cpu/packing.py): 16 levels from the smallest to the largest
    value of each 32, scale and smallest value in float16. The gradient passes as if nothing had been rounded."""
    with torch.no_grad():
        b = w.float().unflatten(-1, (-1, QUANT_BLOCK))
        low, high = b.amin(-1, keepdim=True), b.amax(-1, keepdim=True)
        scale, low = ((high - low) / 15).half().float(), low.half().float()
        inverse = torch.where(scale > 0, 1 / scale.clamp_min(1e-12), 0.0)
        rounded = ((b - low) * inverse).round_().clamp_(0, 15).mul_(scale).add_(low).flatten(-2)
        change = rounded - w
    return w + change


def four_bits_all(matrices: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """`four_bits` of matrices whose rows are whole blocks, as one: a block is independent of its row, so a drafter
    takes about twenty kernels per batch instead of per matrix."""
    if not matrices:
        return []
    flat = torch.cat([w.reshape(-1, QUANT_BLOCK) for w in matrices])
    pieces = four_bits(flat).to(dtype).flatten().split([w.numel() for w in matrices])
    return [piece.view(w.shape) for piece, w in zip(pieces, matrices, strict=True)]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, heads, D]; cos, sin [T, 1, D/2] float32."""
    if x.is_cuda:
        from .kernels import Rotate

        return Rotate.apply(x, cos[:, 0], sin[:, 0])
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
