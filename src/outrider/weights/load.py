"""Loads weights: checks a checkpoint's tensors against the plan, then streams them in slices into fused tensors.

File pages are released as they are copied. Quantised matrices are offered to the ops object as they are stored
(`Backend.pack_weights`), else dequantised slice by slice. A tensor-parallel process reads only its shard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict, TypeVar, Unpack

import torch
from torch import Tensor

from ..config import LoadFormat
from ..models.block_config import BlockConfig
from ..models.config import DrafterConfig, ModelConfig
from ..models.names import Config, TensorPlan, ignored, only_looked_up, roundable, tensor_plan
from ..models.split import Shard, Shards, TPRank, split_drafter, split_target
from ..ops.formats import BLOCKS, DenseFormat, DeviceWeight, Weight
from ..ops.formats import dense as dense_weight
from ..ops.formats.base import bits
from ..ops.reference import Backend, ReferenceOps
from ..types import OutriderError, TextFiles, bad_input
from . import hub
from .files import Files, already_quantised, model_config, open_source, text_files, translate
from .mapped import TensorSource
from .quant_scheme import QuantScheme, recipe
from .source import SourceTensor, aligned, find

C = TypeVar("C", ModelConfig, DrafterConfig, BlockConfig)
SLICE = 8 << 20  # bytes of the file copied at once
HALVES = (DenseFormat(torch.float16), DenseFormat(torch.bfloat16))


class LoadOptions(TypedDict, total=False):
    quantize: str | None  # format to which dense matrices are quantised
    load_format: LoadFormat
    seed: int  # seed of dummy weights
    tp: TPRank | None  # loads one rank's part; the configuration is then that part's
    keep: Callable[[str, DeviceWeight], DeviceWeight] | None  # transforms each weight after it is loaded


def load_target(
    name: str | Path | Files,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    ops: Backend | None = None,
    **how: Unpack[LoadOptions],
) -> tuple[ModelConfig, dict[str, DeviceWeight], TextFiles]:
    files = hub.resolve(name, "model", weights=how.get("load_format") != "dummy")
    config, weights = load(files, model_config(files), device, dtype=dtype, ops=ops, **how)
    return config, weights, text_files(files)


def load_drafter(
    name: str | Path | Files,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    ops: Backend | None = None,
    **how: Unpack[LoadOptions],
) -> tuple[DrafterConfig, dict[str, DeviceWeight]]:
    files = hub.resolve(name, "drafter", weights=how.get("load_format") != "dummy")
    return load(files, translate(DrafterConfig.from_hf, files), device, dtype=dtype, ops=ops, **how)


def load(
    files: Files,
    config: C,
    device: torch.device | str,
    dtype: torch.dtype,
    ops: Backend | None,
    **options: Unpack[LoadOptions],
) -> tuple[C, dict[str, DeviceWeight]]:
    ops = ops or ReferenceOps()
    quantize = options.get("quantize")
    tp = options.get("tp")
    keep = options.get("keep")
    if quantize is not None and quantize not in ops.capabilities.quantizes:
        formats = " and ".join(ops.capabilities.quantizes)
        can = f"{ops.name} holds {formats}" if formats else "choose others with --ops"
        raise OutriderError(f"the {ops.name} ops cannot hold {quantize} weights: {can}, or leave out --quantize")
    how = recipe(files.config, files.name)
    if options.get("load_format") == "dummy":
        rank_config, cuts = divided(config, tp, lambda name: 32 if quantize is not None or how is not None else 1)
        return rank_config, dummy_weights(
            config, device, dtype=dtype, ops=ops, quantize=quantize, seed=options.get("seed", 0), how=how, cuts=cuts
        )
    source = open_source(files)
    plans = tensor_plan(config, source.entries)
    pieces = check(source, plans, config, how=how)
    least = 1 if quantize is None else 32  # for quantising in groups of 32
    rank_config, cuts = divided(config, tp, lambda name: aligned(pieces[name], least))
    kinds = {entry.kind for each in pieces.values() for piece in each for entry in piece.entries}
    stored = sorted(kind for kind in kinds if kind in BLOCKS)
    if quantize is not None and stored and isinstance(config, ModelConfig):
        raise already_quantised(files, ", ".join(stored))
    halves = ops.capabilities.holds_halves and dtype == torch.float32 and quantize is None

    def loaded(name: str, plan: TensorPlan) -> DeviceWeight:
        parts = [piece.read() for piece in pieces[name]]
        if name in cuts:
            where = [f"{source.where}: tensor {each}" for each in plan.sources]
            parts = [shard_of(*each) for each in zip(parts, cuts[name], where)]
        # An MTP drafter's steps read dense matrices, or the one format they are compiled for.
        if not isinstance(config, DrafterConfig) or all(isinstance(p.format, DenseFormat) for p in parts):
            table = only_looked_up(config, name)
            weight = packed(plan, parts, ops=ops, device=device, table=table, halves=halves)
            if weight is not None:
                return weight
        filled = dense(plan, parts, device, dtype=dtype, plus_one_done=source.plus_one_done)
        return transform(config, name, plan=plan, tensor=filled, ops=ops, quantize=quantize)

    weights: dict[str, DeviceWeight] = {}
    size = sum(p.nbytes for each in pieces.values() for p in each)
    with progress(f"Loading {Path(files.name).name}", size) as advance:
        for name, plan in plans.items():
            weight = loaded(name, plan)
            for piece in pieces[name]:
                piece.release()
            weights[name] = weight if keep is None else keep(name, weight)
            advance(sum(p.nbytes for p in pieces[name]))
    return rank_config, weights


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields `advance(bytes)`. Prints nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress

    columns = *Progress.get_default_columns(), DownloadColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)


def divided(config: C, tp: TPRank | None, columns: Callable[[str], int]) -> tuple[C, Shards]:
    """Configuration of one rank's part, and its shard of each weight. columns(name): multiples at which columns may be
    cut."""
    if tp is None or tp.world == 1:
        return config, {}
    if isinstance(config, ModelConfig):
        return split_target(config, tp, columns)
    return split_drafter(config, tp) if isinstance(config, DrafterConfig) else (config, {})


def shard_of(weight: Weight, cut: Shard, where: str) -> Weight:
    advice = "leave out --tensor-parallel, or take another number"
    with bad_input(OutriderError, lambda error: f"{where}: {error}; {advice}"):
        return shard_weight(weight, cut)


def shard_weight(weight: Weight, cut: Shard) -> Weight:
    if cut.columns:
        ((lo, hi),) = cut.spans
        return weight.columns(lo, hi)
    units = weight.format.units
    tensors = dict[str, Tensor]()
    for name, t in weight.tensors.items():
        if units[name].shared:
            tensors[name] = t
            continue
        if t.dim() > 1:
            parts = [bits(t)[..., lo:hi, :] for lo, hi in cut.spans]
        else:
            parts = [t[lo:hi] for lo, hi in cut.spans]
        joined = parts[0]
        if len(parts) > 1:
            joined = torch.cat(parts, dim=-2 if t.dim() > 1 else 0)
        tensors[name] = joined.view(t.dtype)
    at = max(0, len(weight.shape) - 2)
    rows = sum(hi - lo for lo, hi in cut.spans)
    return Weight(weight.format, (*weight.shape[:at], rows, *weight.shape[at + 1 :]), tensors)


def shard_tensor(whole: Tensor, plan: TensorPlan, cuts: Sequence[Shard]) -> Tensor:
    sources = whole.split([shape[0] for shape in plan.source_shapes])
    return torch.cat([shard_weight(dense_weight(each), cut).tensors["values"] for each, cut in zip(sources, cuts)])


def check_shares(name: str, world: int) -> None:
    """Raises an error if the model cannot be divided over `world` processes, by its configuration."""
    config = model_config(hub.resolve(name, weights=False))
    for rank in reversed(range(world)):  # the last rank has the smallest share
        split_target(config, TPRank(rank, world), lambda name: 1)


def check(
    source: TensorSource, plans: Mapping[str, TensorPlan], config: Config, how: QuantScheme | None = None
) -> dict[str, list[SourceTensor]]:
    """The pieces of every plan. Missing, left-over, wrongly shaped and unreadable tensors are errors, by name."""
    used: set[int] = set()
    missing: list[str] = []
    pieces: dict[str, list[SourceTensor]] = {}
    for key, plan in plans.items():
        pieces[key] = []
        for name, shape in zip(plan.sources, plan.source_shapes, strict=True):
            piece = find(source, how, name, shape=shape, role=plan.role)
            if piece is None:
                missing.append(name)
                continue
            pieces[key].append(piece)
            used.update(map(id, piece.entries))
    if missing:
        raise OutriderError(f"{source.where}: {_some(missing)} missing from the checkpoint")
    extra = [name for name, entry in source.entries.items() if id(entry) not in used and not ignored(name, config)]
    if extra:
        raise OutriderError(f"{source.where}: {_some(extra)} left over: the config does not describe this checkpoint")
    return pieces


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:3])}{more} {'are' if len(names) > 1 else 'is'}"


def packed(
    plan: TensorPlan, parts: list[Weight], ops: Backend, device: torch.device | str, table: bool, halves: bool
) -> DeviceWeight | None:
    """The ops object's packed form of a quantised matrix; None if it has none, or nothing is quantised. `table`: rows
    are only looked up, so the memory-mapped file may be used. `halves`: also offer dense 16-bit matrices."""
    if plan.role not in ("matrix", "embedding") or (plan.role == "embedding" and not ops.capabilities.quantizes_tables):
        return None
    offered = halves and all(p.format in HALVES for p in parts)
    if not offered and all(isinstance(p.format, DenseFormat) for p in parts):
        return None
    weight = ops.look_up(parts[0], device) if table and len(parts) == 1 else None
    return ops.pack_weights(parts, device) if weight is None else weight


def transform(
    config: Config, name: str, plan: TensorPlan, tensor: Tensor, ops: Backend, quantize: str | None
) -> DeviceWeight:
    """A weight in the ops object's form, quantised if requested. With int8, a drafter trained for 4 bits keeps its
    layers in 4 bits; its head gets 8."""
    if plan.role not in ("matrix", "embedding"):
        return tensor
    trained = isinstance(config, DrafterConfig) and config.weight_bits == 4 and name not in ("embed", "centroids")
    if quantize is not None and (ops.capabilities.quantizes_tables or roundable(config, name, plan)):
        return ops.quantize(tensor, "int4" if trained and quantize == "int8" else quantize)
    return ops.prepare(tensor)


def kept_dtype(plan: TensorPlan, dtype: torch.dtype) -> torch.dtype:
    if plan.role == "index":
        return torch.int64
    return torch.float32 if plan.role in ("norm", "vector") else dtype


def dense(
    plan: TensorPlan, parts: list[Weight], device: torch.device | str, dtype: torch.dtype, plus_one_done: bool
) -> Tensor:
    rows = [part.shape[0] for part in parts]
    out = torch.empty((sum(rows), *parts[0].shape[1:]), dtype=kept_dtype(plan, dtype), device=device)
    for piece, part in zip(out.split(rows), parts):
        fill(piece, part)
    if plan.plus_one and not plus_one_done:
        out += 1.0
    return out


def fill(out: Tensor, weight: Weight) -> None:
    """Copies or dequantises into rows [N, K] (experts [E, N, K])."""
    for lo, hi, some in weight.slices(SLICE):
        out[lo:hi].copy_(some.tensors["values"] if isinstance(some.format, DenseFormat) else some.dense())


def dummy_weights(
    config: Config,
    device: torch.device | str,
    dtype: torch.dtype,
    ops: Backend | None = None,
    quantize: str | None = None,
    seed: int = 0,
    how: QuantScheme | None = None,
    cuts: Shards | None = None,
) -> dict[str, DeviceWeight]:
    """Seeded random weights, made on the device and rounded to the formats of the checkpoint's scheme."""
    ops = ops or ReferenceOps()
    weights: dict[str, DeviceWeight] = {}
    generator = torch.Generator(device=device)
    for index, (name, plan) in enumerate(tensor_plan(config).items()):
        generator.manual_seed(seed * 1_000_003 + index)
        if plan.role == "index":
            order = torch.randperm(plan.shape[0], generator=generator, device=device)
            weights[name] = torch.zeros_like(order) if name == "d2t" else order  # draft ids equal target ids
            continue
        tensor = torch.empty(plan.shape, dtype=kept_dtype(plan, dtype), device=device)
        if plan.role == "norm":
            tensor.normal_(1.0, 0.05, generator=generator)
        elif name.endswith(("scalar", "_scale")):
            tensor.fill_(1.0)
        else:  # small biases, or they would dominate the embedding
            tensor.normal_(0.0, 0.002 if plan.role == "bias" else 0.02, generator=generator)
        if cuts and name in cuts:
            tensor = shard_tensor(tensor, plan, cuts[name])
        stored = how(plan.sources[0].removesuffix(".weight")) if how is not None and plan.role == "matrix" else None
        whole = stored is not None and plan.shape[-1] % max(1, stored.format.alignment()) == 0  # groups of columns
        rounded = ops.pack_weights([stored.format.quantise(tensor)], device) if stored and whole else None
        weights[name] = (
            transform(config, name, plan=plan, tensor=tensor, ops=ops, quantize=quantize)
            if rounded is None
            else rounded
        )
    return weights
