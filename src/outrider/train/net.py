"""The drafter as a trainable network: `models/drafter.py` over dense ops, batched over all anchors of whole sequences.

Anchor a is a position that the target has seen: hidden state a, keys 0..a. Step j takes the embedding of token a + j
(for all anchors at once: the sequence shifted by j) and predicts token a + j + 1. The K/V, the mask and the rotary
position are those of the anchor in every step, so each step is one causal attention of the last Tq positions over all
T. Parameters carry the canonical weight names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.block_config import BlockConfig
from ..models.config import DrafterConfig, ModelConfig
from ..models.decoder import TextModel
from ..models.drafter import MTPNet
from ..models.names import tensor_plan
from .data import TrainBatch
from .target import CapturedStates, DenseKV, spread_heads

Weights = Mapping[str, Tensor]  # by canonical name
Drafted = Iterator[Tensor]  # the head's inputs g [B, Tq, h] of draft tokens 1, 2, ...
HEADS = ("embed", "centroids")  # matrices that score tokens
QUANT_BLOCK = 32  # columns that share a scale if the layers are in 4 bits


class TrainNet(nn.Module):
    """A drafter's parameters in float32, by the canonical names of its plan. Each kind of drafter is a subclass."""

    config: DrafterConfig | BlockConfig
    reads: tuple[int, ...] = ()  # target layers whose K/V it reads

    def __init__(self, config: DrafterConfig | BlockConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.names = tuple(tensor_plan(config))
        self.taps = config.taps or ()
        generator = torch.Generator().manual_seed(seed)
        for name, plan in tensor_plan(config).items():
            attribute = name.replace(".", "_")
            if plan.role == "index":
                self.register_buffer(attribute, torch.arange(plan.shape[0]))
            elif plan.role in ("norm", "vector"):
                self.register_parameter(attribute, nn.Parameter(torch.ones(plan.shape)))
            else:
                std = plan.shape[-1] ** -0.5
                if name.endswith((".out", ".down")):  # additions to the residual stream start small
                    std *= (2 * len(config.layers)) ** -0.5
                self.register_parameter(attribute, nn.Parameter(torch.randn(plan.shape, generator=generator) * std))

    def unroll(self, w: Weights, model: TextModel, seen: CapturedStates, batch: TrainBatch, steps: int) -> Drafted:
        """The draft loop of training and evaluation, from all anchors at once. A kind may end before `steps`."""
        raise NotImplementedError

    def weight(self, name: str) -> Tensor:
        return getattr(self, name.replace(".", "_"))

    def load(self, weights: Weights) -> None:
        with torch.no_grad():
            for name in self.names:
                self.weight(name).copy_(weights[name])

    def export(self) -> dict[str, Tensor]:
        """The weights to write. Layers trained in 4 bits are written with the rounded values, so that every device
        drafts with them."""
        return {name: w.detach().clone() for name, w in self.cast(torch.float32, self.config.weight_bits).items()}

    def cast(self, dtype: torch.dtype, bits: int | None = None) -> dict[str, Tensor]:
        """Differentiable copies in the compute dtype, once per batch. `bits` = 4: the layers' matrices are rounded."""
        weights = {name: self.weight(name) for name in self.names}
        if bits == 4:
            some = [n for n, w in weights.items() if w.ndim == 2 and n not in HEADS and w.shape[1] % QUANT_BLOCK == 0]
            weights |= zip(some, four_bits_all([weights[n] for n in some], dtype), strict=True)
        return {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}


class DrafterModule(TrainNet):
    """An MTP drafter."""

    config: DrafterConfig

    def __init__(self, config: DrafterConfig, target: ModelConfig, seed: int = 0):
        super().__init__(config, seed)
        self.layers = config.bound_layers(target)
        self.reads = tuple(sorted({layer.attn.kv_layer for layer in self.layers}))

    def unroll(self, w: Weights, model: TextModel, seen: CapturedStates, batch: TrainBatch, steps: int) -> Drafted:
        """Step j reads the true token j positions later."""
        first = batch.first
        size, length, wide = seen.hidden.shape
        with torch.no_grad():
            ids = F.pad(batch.ids[:, first:], (0, steps))
            embedded = model.embed(ids.reshape(-1)).view(*ids.shape, -1)  # [B, Tq + steps, Hb]
        # heads are spread once for all steps
        keys, values = (
            {l.attn.kv_layer: spread_heads(side[l.attn.kv_layer], l.attn.heads) for l in self.layers}
            for side in (seen.keys, seen.values)
        )
        positions = torch.arange(first, length, device=seen.hidden.device).repeat(size)
        features = torch.cat((seen.hidden, *seen.taps), -1)[:, first:].flatten(0, 1)  # [B·Tq, Hb·(1 + taps)]
        net = MTPNet(replace(self.config, clusters=0), w, ops=model.ops, target=model)  # the loss scores the whole head
        state = net.start(DenseKV(size, positions, keys=keys, values=values), features)  # type: ignore[arg-type]
        hidden = features[:, :wide]
        for j in range(1, steps + 1):
            g, hidden = net.step(embedded[:, j : j + length - first].flatten(0, 1), hidden, state)
            yield g.unflatten(0, (size, -1))


def four_bits(w: Tensor) -> Tensor:
    """Rounds w [N, K] as the CPU packs "int4" (ops/cpu/packing.py): 16 levels between the smallest and largest value of
    each 32, scale and minimum in float16. The gradient passes as if nothing had been rounded."""
    with torch.no_grad():
        b = w.float().unflatten(-1, (-1, QUANT_BLOCK))
        low = b.amin(-1, keepdim=True)
        high = b.amax(-1, keepdim=True)
        scale = ((high - low) / 15).half().float()
        low = low.half().float()
        inverse = torch.where(scale > 0, 1 / scale.clamp_min(1e-12), 0.0)
        rounded = ((b - low) * inverse).round_().clamp_(0, 15).mul_(scale).add_(low).flatten(-2)
        change = rounded - w
    return w + change


def four_bits_all(matrices: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Applies `four_bits` to matrices whose rows are whole blocks as if they were one, in about twenty kernels per
    batch instead of per matrix."""
    if not matrices:
        return []
    flat = torch.cat([w.reshape(-1, QUANT_BLOCK) for w in matrices])
    pieces = four_bits(flat).to(dtype).flatten().split([w.numel() for w in matrices])
    return [piece.view(w.shape) for piece, w in zip(pieces, matrices, strict=True)]
