"""Reads tensors of a checkpoint out of its mapped files (`weights.mapped`).

`find` looks up one source of a plan (dense rows, or a quantised matrix), `SourceTensor.read` reads it; all are found
before the first one is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from ..models.names import Role
from ..ops.formats import BLOCKS, GGUFBlockFormat, Weight, dense, join, scaled_nvfp4, stack
from ..types import OutriderError, require
from .mapped import ITEM_BYTES, TensorEntry, TensorSource
from .quant_scheme import QuantScheme

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS = {"I64": torch.int64, "I32": torch.int32}
BYTES = {"I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
DTYPES = {**FLOATS, **INTEGERS, **BYTES, "I16": torch.int16, "BOOL": torch.bool}  # the dense types


@dataclass(frozen=True)
class SourceTensor:
    """One source of a plan: the checkpoint's tensors for it, and how to read them."""

    entries: tuple[TensorEntry, ...]
    read: Callable[[], Weight]  # views of the file wherever the container's layout allows it
    alignment: int = 1  # columns may be cut at multiples of this; 0: nowhere

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def release(self) -> None:
        for entry in self.entries:
            entry.file.release(entry.start, entry.nbytes)


def aligned(pieces: Sequence[SourceTensor], least: int = 1) -> int:
    """Multiple at which columns of fused matrices may be cut; 0: nowhere."""
    each = [piece.alignment for piece in pieces]
    return 0 if 0 in each else max(least, *each)


def tensor(entry: TensorEntry) -> Tensor:
    """The whole tensor, a view of the file if its alignment and order allow it."""
    raw = entry.data().reshape(-1)
    if raw.ctypes.data % ITEM_BYTES[entry.kind]:
        raw = raw.copy()
    return ordered(torch.from_numpy(raw).view(DTYPES[entry.kind]).view(entry.shape), entry)


def ordered(stored: Tensor, entry: TensorEntry) -> Tensor:
    return stored if entry.order is None else stored[torch.from_numpy(entry.order)]


def find(
    source: TensorSource, recipe: QuantScheme | None, name: str, shape: tuple[int, ...], role: Role
) -> SourceTensor | None:
    """Finds a source tensor of the plan; None if it is missing. Errors name what a tensor or a quantised matrix
    lacks."""
    entry = source.entries.get(name)
    scheme = recipe if role in ("matrix", "embedding") else None
    stored = None
    if scheme is not None and (entry is None or entry.kind not in (*FLOATS, *BLOCKS)):
        stored = _matrix(source, scheme, name.removesuffix(".weight"), shape=shape)
        if stored is None and len(shape) == 3:
            return _experts(source, scheme, name=name, shape=shape)
    if stored is not None or entry is None:
        return stored
    plain = _plain(source.where, entry, name, shape=shape, role=role)
    factor = factor_of(source.entries, name)
    return plain if factor is None else _with_factor(source.where, plain, factor)


def _plain(where: str, entry: TensorEntry, name: str, shape: tuple[int, ...], role: Role) -> SourceTensor:
    if entry.shape != shape:
        raise OutriderError(f"{where}: tensor {name} has shape {list(entry.shape)}, the config asks for {list(shape)}")
    if entry.kind not in (INTEGERS if role == "index" else (*FLOATS, *BLOCKS)):
        raise OutriderError(f"{where}: tensor {name} is stored as {entry.kind}, which cannot be read as a {role}")
    return SourceTensor((entry,), partial(_read_plain, entry), BLOCKS[entry.kind][0] if entry.kind in BLOCKS else 1)


def _read_plain(entry: TensorEntry) -> Weight:
    release = entry.release if entry.order is None and len(entry.shape) > 1 else None
    if entry.kind not in BLOCKS:
        return replace(dense(tensor(entry)), release=release)
    blocks = ordered(torch.from_numpy(entry.data()).view(*entry.shape[:-1], -1), entry)
    return Weight(GGUFBlockFormat(entry.kind), entry.shape, tensors={"blocks": blocks}, release=release)


def factor_of(entries: Mapping[str, TensorEntry], name: str) -> TensorEntry | None:
    """The factor of an NVFP4 matrix of a GGUF file, a tensor of its own; None if it has none."""
    entry = entries.get(name)
    return None if entry is None or entry.kind != "NVFP4" else entries.get(f"{name.removesuffix('.weight')}.scale")


def _with_factor(where: str, plain: SourceTensor, factor: TensorEntry) -> SourceTensor:
    """An NVFP4 matrix [N, K] whose values are multiplied by one number."""
    if factor.kind != "F32" or prod(factor.shape) != 1:
        raise OutriderError(
            f"{where}: the factor of an NVFP4 matrix is {factor.kind} {list(factor.shape)}, not one F32"
        )

    def read() -> Weight:
        return scaled_nvfp4(plain.read(), tensor(factor).reshape(1, 1))

    return SourceTensor((*plain.entries, factor), read, plain.alignment)


def _matrix(source: TensorSource, recipe: QuantScheme, module: str, shape: tuple[int, ...]) -> SourceTensor | None:
    stored = recipe(module)
    if stored is None:
        return None
    every = {s: source.entries.get(f"{module}.{s}") for s in (*stored.suffixes, *stored.optional)}
    there = {s: entry for s, entry in every.items() if entry is not None}
    if not there:
        return None
    for suffix in stored.suffixes:
        require(suffix in there, f"{source.where}: tensor {module}.{suffix} is missing: {stored.scheme} needs it")
    for suffix, entry in there.items():
        if entry.kind not in DTYPES:
            kind = f"is stored as {entry.kind}, which {stored.scheme} does not know"
            raise OutriderError(f"{source.where}: tensor {module}.{suffix} {kind}")
    at = f"{source.where}: tensor {module} ({stored.scheme})"

    def read() -> Weight:
        return stored.read(at, shape, {suffix: tensor(entry) for suffix, entry in there.items()}).check(at)

    return SourceTensor(tuple(there.values()), read, stored.format.alignment())


def _experts(source: TensorSource, recipe: QuantScheme, name: str, shape: tuple[int, ...]) -> SourceTensor | None:
    """Separately stored experts: `experts.3.gate_proj` and `.up_proj` are entry 3 of `experts.gate_up_proj`."""
    base, _, last = name.rpartition(".")
    count, rows, columns = shape
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last, (last,))
    groups: list[list[SourceTensor]] = []
    for e in range(count):
        matrices = [
            _matrix(source, recipe, f"{base}.{e}.{part}", shape=(rows // len(parts), columns)) for part in parts
        ]
        groups.append([m for m in matrices if m is not None])
        if len(groups[-1]) < len(parts):
            return None

    def read() -> Weight:
        tensors = [join([m.read() for m in group]) for group in groups]
        if None in tensors:
            both = " and ".join(f"{base}.{tensors.index(None)}.{part}" for part in parts)
            raise OutriderError(f"{source.where}: tensor {name}: {both} are not of one format")
        return stack([weight for weight in tensors if weight is not None])

    every = [m for group in groups for m in group]
    return SourceTensor(tuple(entry for m in every for entry in m.entries), read, aligned(every))
