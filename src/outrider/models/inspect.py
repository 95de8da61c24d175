"""Costs of a model by its configuration alone: parameters, bytes streamed, K/V, arithmetic intensity. Torch-free.

A pass reads every matrix of every layer, the head and one row of each table per token; of experts only the selected
ones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from .block_config import BlockConfig
from .config import DrafterConfig, ForeignDict, ModelConfig
from .names import tensor_plan

DECODE_ROWS = (1, 5, 9)
# GPU bytes besides weights, K/V and logits: the driver's context, activations of a prompt chunk, tables, graphs
WORK = 1 << 30


@dataclass(frozen=True)
class LayerSize:
    """Parameters of one layer. A token reads `matrices` + `expert`·top_k + `small`."""

    matrices: int  # dense matrices
    small: int  # norms, scalars, biases
    expert: int = 0  # one routed expert


@dataclass(frozen=True)
class ModelSize:
    config: ModelConfig
    layers: tuple[LayerSize, ...]
    embedding: int  # also of the head, tied or not, which is read for every token
    ple_table: int
    outside: int  # outside layers and tables: the final norm and the projection of the per-layer embeddings

    @property
    def total(self) -> int:
        experts = self.config.moe.experts if self.config.moe else 0
        body = sum(s.matrices + s.small + s.expert * experts for s in self.layers)
        return body + self.embedding * (1 if self.config.tied else 2) + self.ple_table + self.outside

    def streamed(self, rows: float) -> float:
        """Parameters read by a pass over `rows` tokens, if the router chooses experts at random for each."""
        config = self.config
        # tied: the head holds the row
        looked_up = rows * ((0 if config.tied else config.hidden) + len(self.layers) * config.ple_dim)
        body = sum(s.matrices + s.small for s in self.layers)
        return body + self.streamed_experts(rows) + self.embedding + self.outside + looked_up

    def streamed_experts(self, rows: float) -> float:
        """Parameters of the experts among them."""
        moe = self.config.moe
        if moe is None:
            return 0.0
        chosen = moe.experts * (1 - (1 - moe.top_k / moe.experts) ** rows)
        return chosen * sum(s.expert for s in self.layers)

    @property
    def active(self) -> int:
        return round(self.streamed(1))


def kv_bytes(config: ModelConfig | DrafterConfig, context: int, item: float = 2.0, read: bool = False) -> int:
    """K/V of a sequence of that length. `read`: what a pass reads of it, where layers that share K/V count again."""
    total = 0
    for layer in config.layers:
        attn = layer.attn
        if attn.writes or read:
            total += 2 * attn.kv_heads * attn.head_dim * (context if attn.window is None else min(context, attn.window))
    return round(total * item)


def flops(size: ModelSize, rows: int, context: int, head_rows: int) -> float:
    """Operations of `rows` new tokens after `context` earlier ones. head_rows: rows whose output is needed."""
    config = size.config
    last = size.config.kv_layers[-1]
    top_k = config.moe.top_k if config.moe else 0
    total = 2.0 * head_rows * size.embedding + 2.0 * rows * (size.outside - config.hidden)
    for i, (layer, part) in enumerate(zip(config.layers, size.layers, strict=True)):
        attn = layer.attn
        through = rows if i <= last else min(rows, head_rows)
        seen = context + (rows + 1) / 2  # keys that a row sees, on average
        seen = seen if attn.window is None else min(seen, attn.window)
        total += through * (2.0 * (part.matrices + top_k * part.expert) + 4.0 * attn.heads * attn.head_dim * seen)
    return total


def intensity(config: ModelConfig, rows: int, context: int, weight_bytes: float, head_rows: int | None = None) -> float:
    """Floating-point operations per byte moved: weights read once, K/V read and written."""
    size = model_size(config)
    moved = size.streamed(rows) * weight_bytes + kv_bytes(config, context, read=True) + rows * kv_bytes(config, 1)
    return flops(size, rows, context, head_rows=rows if head_rows is None else head_rows) / moved


@lru_cache(maxsize=8)
def model_size(config: ModelConfig) -> ModelSize:
    layers = [Counter[str]() for _ in config.layers]
    whole = Counter[str]()
    for name, plan in tensor_plan(config).items():
        outer, _, inner = name.partition(".")
        if outer != "layers":
            whole[name] += prod(plan.shape)
            continue
        index, _, part = inner.partition(".")
        if part.startswith("experts_"):
            kind = "expert"
        else:
            kind = "matrices" if plan.role == "matrix" else "small"
        layers[int(index)][kind] += prod(plan.shape)
    experts = config.moe.experts if config.moe is not None else 1
    sizes = tuple(LayerSize(size["matrices"], size["small"], size["expert"] // experts) for size in layers)
    outside = whole.total() - whole["embed"] - whole["head"] - whole["ple_embed"]
    return ModelSize(config, sizes, whole["embed"], ple_table=whole["ple_embed"], outside=outside)


@dataclass(frozen=True)
class DrafterSize:
    total: int  # parameters
    body: int  # parameters read by one step (a block drafter's pass, which drafts all tokens): layers and projections,
    head: int  # and of the head

    @property
    def step(self) -> int:
        return self.body + self.head


def drafter_size(config: DrafterConfig | BlockConfig) -> DrafterSize:
    """A step reads everything but the rows of the head that its clusters spare it; a tied head is the target's own."""
    sizes = {name: prod(plan.shape) for name, plan in tensor_plan(config).items() if plan.role != "index"}
    total = sum(sizes.values())
    centroids = sizes.get("centroids", 0)
    head = (config.draft_vocab if isinstance(config, BlockConfig) else config.vocab_size) * config.head_hidden
    body = total - sizes.get("embed", 0) - sizes.get("head", 0) - centroids
    scored = head // config.clusters * config.cluster_top if config.clusters else head
    return DrafterSize(total, body, centroids + scored)


def work_bytes(vocab: int, rows: int) -> int:
    """GPU memory besides weights and K/V of a step of `rows` rows: two float32 copies of logits, a fixed part."""
    return WORK + 2 * 4 * vocab * rows


def row_numbers(config: ModelConfig) -> int:
    moe = config.moe
    widest = max(2 * layer.attn.qkv_rows + 2 * layer.intermediate for layer in config.layers)
    pairs = 0 if moe is None else moe.top_k * (2 * config.hidden + moe.intermediate)
    return widest + 8 * config.hidden + pairs


def layer_row(config: ModelConfig, i: int, size: LayerSize) -> ForeignDict:
    layer = config.layers[i]
    attn = config.layers[i].attn
    experts = config.moe.experts if config.moe else 0
    return {
        "index": i,
        "type": layer.kind,
        **{key: getattr(attn, key) for key in ("heads", "kv_heads", "head_dim", "window")},
        "kv_from": attn.kv_layer,
        "k_eq_v": attn.k_eq_v and attn.writes,
        "intermediate": layer.intermediate,
        "experts": experts,
        "experts_per_token": config.moe.top_k if config.moe else 0,
        "parameters": size.matrices + size.small + experts * size.expert,
    }


def report(
    config: ModelConfig,
    weight_bytes: float = 2.0,
    context: int = 1024,
    total_bytes: float | None = None,
    kv_item: float = 2.0,
) -> ForeignDict:
    """The figures that `outrider inspect` shows.

    weight_bytes: per weight that a token reads; context: length at which passes are compared; total_bytes: of all
    weights; kv_item: bytes per number of K/V.
    """
    size = model_size(config)
    head = 0 if config.tied else size.embedding
    total = size.total * weight_bytes if total_bytes is None else total_bytes
    return {
        "model_type": config.model_type,
        "family": config.family,
        "parameters": size.total,
        "active_parameters": size.active,
        "parameters_by_part": {
            "embedding": size.embedding,
            "head": head,
            "per_layer_embedding": size.ple_table,
            "layers": size.total - size.embedding - head - size.ple_table - size.outside,
            "other": size.outside,
        },
        "vocabulary": config.vocab_size,
        "hidden": config.hidden,
        "max_context": config.max_context,
        "bits_per_weight": round(8 * total / size.total, 3),
        "bytes": round(total),
        "bytes_per_token": round(size.active * weight_bytes),
        "kv_bytes_per_token": kv_bytes(config, 1, kv_item),
        "kv_bytes_per_late_token": kv_bytes(config, config.max_context, kv_item)
        - kv_bytes(config, config.max_context - 1, kv_item),
        "kv_bytes_full_context": kv_bytes(config, config.max_context, kv_item),
        "context": context,
        "intensity": {
            "prefill": round(intensity(config, context, 0, weight_bytes=weight_bytes, head_rows=1), 3),
            **{
                f"decode_{rows}": round(intensity(config, rows, context, weight_bytes=weight_bytes), 3)
                for rows in DECODE_ROWS
            },
        },
        "layers": [layer_row(config, i, size.layers[i]) for i in range(len(config.layers))],
        "drafter": None,
    }


def drafter_report(
    kind: str, reason: str | None, parameters: int, *, step: float, target_token: float, **more: object
) -> ForeignDict:
    """reason: why it does not fit; step, target_token: bytes that a draft step and a target's token read."""
    return {
        "model_type": kind,
        "fits": reason is None,
        "reason": reason,
        "parameters": parameters,
        "bytes_per_step": round(step),
        "share_of_target": round(step / target_token, 4),
        "reads": [],
        "clusters": 0,
        "clusters_scored": 0,
        "draft_tokens": None,
        **more,
    }
