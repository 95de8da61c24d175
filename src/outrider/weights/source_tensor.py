"""One source tensor of the plan as the checkpoint stores it: dense rows, or the tensors of a quantised matrix.

`find` looks it up by name, `SourceTensor.weight` reads it. All tensors are found before the first one is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..ops.formats import BLOCKS, GGUFBlockFormat, Weight, dense, join, stack
from ..types import OutriderError
from .quant_reader import QuantReader
from .quant_scheme import QuantScheme
from .source import ITEM_BYTES, TensorEntry, TensorSource

FLOATS = ("F64", "F32", "F16", "BF16")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix [N, K]: its container's tensors by suffix."""

    module: str
    shape: tuple[int, ...]
    stored: QuantReader
    entries: Mapping[str, TensorEntry]

    def weight(self, where: str) -> Weight:
        at = f"{where}: tensor {self.module} ({self.stored.scheme})"
        return self.stored.read(
            at, self.shape, {suffix: tensor(entry) for suffix, entry in self.entries.items()}
        ).check(at)


@dataclass(frozen=True)
class SourceTensor:
    """The content of one source of a plan: `entry` (dense, or GGUF blocks), or matrices. Experts that are stored
    separately are `matrices` by expert, each with its rows in order; everything else has one."""

    name: str
    shape: tuple[int, ...]
    entry: TensorEntry | None
    matrices: tuple[tuple[Matrix, ...], ...] = ()

    def entries(self) -> Iterator[TensorEntry]:
        if self.entry is not None:
            yield self.entry
        for group in self.matrices:
            for matrix in group:
                yield from matrix.entries.values()

    @property
    def nbytes(self) -> int:
        return sum(e.nbytes for e in self.entries())

    def weight(self, where: str) -> Weight:
        """Views of the file wherever the container's layout allows it."""
        entry = self.entry
        if entry is not None:
            release = entry.release if entry.order is None and len(self.shape) > 1 else None
            if entry.kind not in BLOCKS:
                return replace(dense(tensor(entry)), release=release)
            blocks = ordered(torch.from_numpy(entry.data()).view(*self.shape[:-1], -1), entry)
            return Weight(GGUFBlockFormat(entry.kind), self.shape, {"blocks": blocks}, release)
        made = []
        for group in self.matrices:
            rows = join([m.weight(where) for m in group])
            if rows is None:
                raise OutriderError(
                    f"{where}: tensor {self.name}: {' and '.join(m.module for m in group)} are not of one format"
                )
            made.append(rows)
        return made[0] if made[0].shape == self.shape else stack(made)

    def release(self) -> None:
        """Releases the file's pages."""
        for entry in self.entries():
            entry.file.release(entry.start, entry.nbytes)


def tensor(entry: TensorEntry) -> Tensor:
    """The whole tensor, a view of the file where its alignment and order allow it."""
    raw = entry.data().reshape(-1)
    if raw.ctypes.data % ITEM_BYTES[entry.kind]:
        raw = raw.copy()
    return ordered(torch.from_numpy(raw).view(DTYPES[entry.kind]).view(entry.shape), entry)


def ordered(stored: Tensor, entry: TensorEntry) -> Tensor:
    return stored if entry.order is None else stored[torch.from_numpy(entry.order)]


def find(source: TensorSource, recipe: QuantScheme | None, name: str, shape: tuple[int, ...]) -> SourceTensor | None:
    """Finds a source tensor of the plan; None: it is missing. Errors name what a quantised matrix lacks."""
    entry = source.entries.get(name)
    if recipe is None or (entry is not None and entry.kind in (*FLOATS, *BLOCKS)):
        return None if entry is None else SourceTensor(name, shape, entry)
    module = name.removesuffix(".weight")
    matrix = _matrix(source, recipe, module, shape)
    if matrix is None and len(shape) == 3:
        return _experts(source, recipe, name, shape)
    if matrix is None:
        return None if entry is None else SourceTensor(name, shape, entry)
    return SourceTensor(name, shape, None, ((matrix,),))


def _matrix(source: TensorSource, recipe: QuantScheme, module: str, shape: tuple[int, ...]) -> Matrix | None:
    stored = recipe(module)
    if stored is None:
        return None
    there = {
        s: source.entries[f"{module}.{s}"]
        for s in (*stored.suffixes, *stored.optional)
        if f"{module}.{s}" in source.entries
    }
    if not there:
        return None
    for suffix in stored.suffixes:
        if suffix not in there:
            raise OutriderError(f"{source.where}: tensor {module}.{suffix} is missing: {stored.scheme} needs it")
    for suffix, entry in there.items():
        if entry.kind not in DTYPES:
            raise OutriderError(
                f"{source.where}: tensor {module}.{suffix} is stored as {entry.kind}, which {stored.scheme} does not "
                f"know"
            )
    return Matrix(module, shape, stored, there)


def _experts(source: TensorSource, recipe: QuantScheme, name: str, shape: tuple[int, ...]) -> SourceTensor | None:
    """Separately stored experts: `experts.3.gate_proj` and `experts.3.up_proj` are the rows of entry 3 of
    `experts.gate_up_proj`."""
    base, _, last = name.rpartition(".")
    count, rows, columns = shape
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last, (last,))
    groups: list[tuple[Matrix, ...]] = []
    for e in range(count):
        found = [_matrix(source, recipe, f"{base}.{e}.{part}", (rows // len(parts), columns)) for part in parts]
        group = tuple(m for m in found if m is not None)
        if len(group) < len(parts):
            return None
        groups.append(group)
    return SourceTensor(name, shape, None, tuple(groups))
