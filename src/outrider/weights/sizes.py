"""What a checkpoint's weights take, from its configuration alone (of a GGUF file, from its header)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from ..models.config import DrafterConfig, ModelConfig
from .files import Files, open_source
from .names import Config, TensorPlan, tensor_plan
from .recipe import recipe
from .source import Entry

ITEM = {"float32": 4.0, "float64": 8.0}  # every other dtype of a checkpoint has two bytes


@dataclass(frozen=True)
class StoredSize:
    total: float  # bytes
    token: float  # bytes that one token reads: of tables one row, of experts those chosen
    parameters: int
    formats: Mapping[str, float] = field(default_factory=dict)  # bytes by format

    @property
    def mean(self) -> float:
        """Bytes of a weight."""
        return self.total / max(1, self.parameters)


def item_bytes(config: Mapping[str, object]) -> float:
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    named = [c[key] for c in (config, inner) for key in ("dtype", "torch_dtype") if isinstance(c.get(key), str)]
    return ITEM.get(str(named[0]), 2.0) if named else 2.0


def stored_size(files: Files, config: Config) -> StoredSize:
    how, item = recipe(files.config, files.name), item_bytes(files.config)
    entries: Mapping[str, Entry] = open_source(files).entries if files.gguf is not None else {}
    total, token, parameters = 0.0, 0.0, 0
    formats: dict[str, float] = {}
    for name, plan in tensor_plan(config).items():
        if plan.role == "index":
            continue
        for source, shape in zip(plan.sources, plan.source_shapes, strict=True):
            stored = how(source.removesuffix(".weight")) if how is not None and plan.role == "matrix" else None
            entry = entries.get(source)
            if entry is not None:
                size, kind = float(entry.nbytes), entry.kind
            elif stored is not None:
                size, kind = float(stored.format.nbytes(shape)), stored.format.name
            else:
                size, kind = prod(shape) * item, "dense"
            total, parameters = total + size, parameters + prod(shape)
            formats[kind] = formats.get(kind, 0.0) + size
            token += size * share(name, plan, config)
    return StoredSize(total, token, parameters, formats)


def share(name: str, plan: TensorPlan, config: Config) -> float:
    """How much of a weight one token reads."""
    if isinstance(config, DrafterConfig):
        return 1.0
    assert isinstance(config, ModelConfig)
    if name == "ple_embed" or (name == "embed" and not config.tied):
        return 1.0 / plan.shape[0]
    if config.moe is not None and ".experts_" in name:
        return config.moe.top_k / config.moe.experts
    return 1.0
