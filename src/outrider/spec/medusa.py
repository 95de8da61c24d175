"""Medusa heads (Cai et al. 2024): head i reads the target's last hidden state and predicts the token i + 2 positions
ahead.

    x = h;  x = x + silu(W_j·x + b_j) for each residual layer j;  logits = head·x

The newest token is known by then, so head 0 predicts the one after it: a chain of the heads' own drafts, no tree. A
folder holds config.json with model_type "medusa", `medusa_num_heads`, `medusa_num_layers` (or vLLM's `num_heads`,
`num_hidden_layers`) and one safetensors file, with the original names `{head}.{layer}.linear.weight|bias` and
`{head}.{layers}.weight`, or vLLM's `blocks.{head}.layers.{layer}.weight|bias` and `lm_heads.{head}.weight`. With
`"tied_to_target": true` there are no head matrices: the target's own head is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.names import TensorPlan
from ..ops.formats import DeviceWeight
from ..ops.reference import as_tensor
from ..types import MAX_DRAFT, Draft, OutriderError
from ..weights.files import Files, open_source
from ..weights.load import check, dense, transform
from .drafter import DraftBatch, Drafter, draft_round
from .protocols import Target


@dataclass(frozen=True)
class MedusaConfig:
    heads: int
    layers: int
    tied: bool

    @staticmethod
    def from_hf(raw: Mapping[str, object], where: str, target: Target) -> MedusaConfig:
        heads = raw.get("medusa_num_heads", raw.get("num_heads"))
        layers = raw.get("medusa_num_layers", raw.get("num_hidden_layers", 1))
        if not isinstance(heads, int) or not 1 <= heads <= MAX_DRAFT or not isinstance(layers, int) or layers < 1:
            raise OutriderError(
                f"{where}: config.json needs medusa_num_heads (1..{MAX_DRAFT}) and medusa_num_layers (at least 1)"
            )
        for key, ours in (("hidden_size", target.config.hidden), ("vocab_size", target.config.vocab_size)):
            if raw.get(key) is not None and raw[key] != ours:
                raise OutriderError(f"{where}: Medusa heads of {key} {raw[key]} do not fit a target of {ours}")
        return MedusaConfig(heads, layers, bool(raw.get("tied_to_target", False)))


@dataclass(frozen=True)
class MedusaHead:
    layers: tuple[tuple[DeviceWeight, Tensor | None], ...]  # ([H, H], [H]) each
    out: DeviceWeight | None  # [V, H]; None: the target's


class Medusa(Drafter):
    name = "medusa"

    def __init__(self, target: Target, heads: tuple[MedusaHead, ...]):
        self.target, self.heads = target, heads

    @staticmethod
    def load(files: Files, target: Target, device: torch.device | str, dtype: torch.dtype) -> Medusa:
        config = MedusaConfig.from_hf(files.config, files.name, target)
        source, ops = open_source(files), target.ops
        hidden, vocab = target.config.hidden, target.config.vocab_size
        block, out = "{0}.{1}.linear", "{0}." + str(config.layers)
        if "blocks.0.layers.0.weight" in source.entries:
            block, out = "blocks.{0}.layers.{1}", "lm_heads.{0}"
        biased = block.format(0, 0) + ".bias" in source.entries
        plans: dict[str, TensorPlan] = {}
        for i in range(config.heads):
            for j in range(config.layers):
                plans[f"{i}.{j}.w"] = TensorPlan((hidden, hidden), (block.format(i, j) + ".weight",), "matrix")
                if biased:
                    plans[f"{i}.{j}.b"] = TensorPlan((hidden,), (block.format(i, j) + ".bias",), "bias")
            if not config.tied:
                plans[f"{i}.out"] = TensorPlan((vocab, hidden), (out.format(i) + ".weight",), "matrix")
        pieces = check(source, plans, target.config)
        w = {
            name: transform(name, plan, dense(plan, [p.read() for p in pieces[name]], device, dtype, False), ops, None)
            for name, plan in plans.items()
        }
        heads = []
        for i in range(config.heads):
            layers = tuple(
                (w[f"{i}.{j}.w"], as_tensor(w[f"{i}.{j}.b"]) if biased else None) for j in range(config.layers)
            )
            heads.append(MedusaHead(layers, w.get(f"{i}.out")))
        return Medusa(target, tuple(heads))

    def logits(self, hidden: Tensor, head: MedusaHead) -> Tensor:
        """[B, V] float32."""
        ops, x = self.target.ops, hidden  # [B, H]
        for weight, bias in head.layers:
            x = x + F.silu(ops.linear(x, weight, bias))
        return self.target.logits(x) if head.out is None else ops.logits(x, head.out, None)

    def propose(self, batch: DraftBatch, k: int) -> Draft:
        count = min(k, len(self.heads))
        hidden = batch.features[:, : self.target.config.hidden]
        drafted = draft_round(batch, count, lambda j, token, cluster_bonus: (None, self.logits(hidden, self.heads[j])))
        tokens = F.pad(drafted.tokens, (0, k - count))
        return Draft(tokens, drafted.lengths, None if drafted.q is None else F.pad(drafted.q, (0, 0, 0, k - count)))
