"""Tensors straight into place: checked against the plan by name, then streamed in slices into fused tensors.

Peak memory is the loaded size plus one slice: file pages are given back as they are copied. Where the ops object
packs quantised rows it gets them as they are stored; otherwise they are dequantised slice by slice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ..models.config import DrafterConfig, ModelConfig
from ..ops.quant import BLOCKS, dequantize
from ..types import OutriderError, TextFiles
from . import hub
from .files import Files, open_source, text_files
from .names import Config, TensorPlan, ignored, tensor_plan
from .progress import progress
from .source import ITEM_BYTES, Entry, Source

Weight = Any
C = TypeVar("C", ModelConfig, DrafterConfig)
LoadFormat = Literal["auto", "dummy"]
SLICE = 8 << 20  # bytes of the file copied at once
INTEGERS, FLOATS = ("I64", "I32"), ("F64", "F32", "F16", "BF16", *BLOCKS)
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32}


def load_target(
    name: str | Path | Files,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    ops: Any = None,
    quantize: str | None = None,
    load_format: LoadFormat = "auto",
    seed: int = 0,
) -> tuple[ModelConfig, dict[str, Weight], TextFiles]:
    files = name if isinstance(name, Files) else hub.resolve(name, weights=load_format == "auto")
    config = translate(ModelConfig.from_hf, files)
    return config, load(files, config, device, dtype, ops, quantize, load_format, seed), text_files(files)


def load_drafter(
    name: str | Path | Files,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    ops: Any = None,
    quantize: str | None = None,
    load_format: LoadFormat = "auto",
    seed: int = 0,
) -> tuple[DrafterConfig, dict[str, Weight]]:
    files = name if isinstance(name, Files) else hub.resolve(name, kind="drafter", weights=load_format == "auto")
    config = translate(DrafterConfig.from_hf, files)
    return config, load(files, config, device, dtype, ops, quantize, load_format, seed)


def translate(reader: Callable[[dict[str, Any]], C], files: Files) -> C:
    """A foreign dict may hold anything at any depth; whatever trips over it is bad input."""
    try:
        return reader(files.config)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        raise OutriderError(f"{files.name}: its configuration makes no sense ({type(error).__name__}: {str(error)[:80]})") from None


def load(
    files: Files,
    config: Config,
    device: torch.device | str,
    dtype: torch.dtype,
    ops: Any,
    quantize: str | None,
    load_format: LoadFormat,
    seed: int,
) -> dict[str, Weight]:
    if quantize is not None and not hasattr(ops, "quantize"):
        raise OutriderError(f"these ops cannot hold {quantize} weights: choose others with --ops, or leave out --quantize")
    if load_format == "dummy":
        return dummy_weights(config, device, dtype, ops, quantize, seed)
    source, plans = open_source(files), tensor_plan(config)
    check(source, plans, config)
    weights: dict[str, Weight] = {}
    total = sum(source.entries[s].nbytes for plan in plans.values() for s in plan.sources)
    with progress(f"Loading {Path(files.name).name}", total) as advance:
        for name, plan in plans.items():
            entries = [source.entries[s] for s in plan.sources]
            weight = pack(plan, entries, ops)  # quantised files stay as they are; `quantize` is for dense ones
            if weight is None:
                weight = finish(plan, dense(plan, entries, device, dtype, source.plus_one_done), ops, held(config, name, quantize))
            weights[name] = weight
            advance(sum(e.nbytes for e in entries))
    return weights


def check(source: Source, plans: dict[str, TensorPlan], config: Config) -> None:
    """Missing, left-over, wrongly shaped or unreadable tensors, by name."""
    used: set[str] = set()
    missing = []
    for plan in plans.values():
        for name, shape in zip(plan.sources, plan.source_shapes, strict=True):
            used.add(name)
            entry = source.entries.get(name)
            if entry is None:
                missing.append(name)
                continue
            if entry.shape != shape:
                raise OutriderError(f"{source.where}: tensor {name} has shape {list(entry.shape)}, the config asks for {list(shape)}")
            if entry.kind not in (INTEGERS if plan.role == "index" else FLOATS):
                raise OutriderError(f"{source.where}: tensor {name} is stored as {entry.kind}, which cannot be read as a {plan.role}")
    if missing:
        raise OutriderError(f"{source.where}: {_some(missing)} missing from the checkpoint")
    extra = [name for name in source.entries if name not in used and not ignored(name, config)]
    if extra:
        raise OutriderError(f"{source.where}: {_some(extra)} left over: the config does not describe this checkpoint")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:3])}{more} {'are' if len(names) > 1 else 'is'}"


def pack(plan: TensorPlan, entries: list[Entry], ops: Any) -> Weight | None:
    """The ops object's own form of quantised rows; None where it has none for these."""
    if plan.role not in ("matrix", "embedding") or len(plan.shape) != 2 or not hasattr(ops, "pack"):
        return None
    if any(e.kind not in BLOCKS for e in entries):
        return None
    weight = ops.pack([e.quant_part() for e in entries])
    for entry in entries:
        entry.file.release(entry.start, entry.nbytes)
    return weight


def held(config: Config, name: str, quantize: str | None) -> str | None:
    """A drafter that was trained for it holds its layers in 4 bits where 8 were asked for; its head keeps 8."""
    if quantize == "int8" and isinstance(config, DrafterConfig) and config.weight_bits == 4 and name not in ("embed", "centroids"):
        return "int4"
    return quantize


def finish(plan: TensorPlan, tensor: Tensor, ops: Any, quantize: str | None) -> Weight:
    """What the ops object makes of a dense weight."""
    if plan.role not in ("matrix", "embedding") or len(plan.shape) != 2:
        return tensor
    if quantize is not None:
        return ops.quantize(tensor, quantize)
    return ops.prepare(tensor) if hasattr(ops, "prepare") else tensor


def kept_dtype(plan: TensorPlan, dtype: torch.dtype) -> torch.dtype:
    if plan.role == "index":
        return torch.int64
    return torch.float32 if plan.role in ("norm", "vector") else dtype


def dense(plan: TensorPlan, entries: list[Entry], device: torch.device | str, dtype: torch.dtype, plus_one_done: bool) -> Tensor:
    out = torch.empty(plan.shape, dtype=kept_dtype(plan, dtype), device=device)
    at = 0
    for entry, shape in zip(entries, plan.source_shapes, strict=True):
        rows = out if len(entries) == 1 else out[at : at + shape[0]]
        fill(rows.view(entry.rows, entry.columns), entry)
        at += shape[0]
    if plan.plus_one and not plus_one_done:
        out += 1.0
    return out


def fill(out: Tensor, entry: Entry) -> None:
    """Copy rows [rows, columns] in slices, converting as they go, and give the file's pages back."""
    step = max(1, SLICE // max(1, entry.row_bytes))
    for lo in range(0, entry.rows, step):
        hi = min(entry.rows, lo + step)
        raw = entry.read(lo, hi)
        if entry.kind in BLOCKS:
            piece = torch.from_numpy(dequantize(entry.kind, raw))
        else:
            if raw.ctypes.data % ITEM_BYTES[entry.kind]:  # the format does not promise alignment
                raw = raw.copy()
            piece = torch.from_numpy(raw).view(DTYPES[entry.kind])
        out[lo:hi].copy_(piece)
        entry.release(lo, hi)


def dummy_weights(
    config: Config, device: torch.device | str, dtype: torch.dtype, ops: Any = None, quantize: str | None = None, seed: int = 0
) -> dict[str, Weight]:
    """Seeded random weights of the right shapes, made on the device: finite logits, no checkpoint needed."""
    weights: dict[str, Weight] = {}
    generator = torch.Generator(device=device)
    for index, (name, plan) in enumerate(tensor_plan(config).items()):
        generator.manual_seed(seed * 1_000_003 + index)
        if plan.role == "index":
            weights[name] = torch.randperm(plan.shape[0], generator=generator, device=device)
            continue
        tensor = torch.empty(plan.shape, dtype=kept_dtype(plan, dtype), device=device)
        if plan.role == "norm":
            tensor.normal_(1.0, 0.05, generator=generator)
        elif plan.role == "vector":
            tensor.fill_(1.0)
        else:  # small biases: they would drown the embedding
            tensor.normal_(0.0, 0.002 if plan.role == "bias" else 0.02, generator=generator)
        weights[name] = finish(plan, tensor, ops, held(config, name, quantize))
    return weights
