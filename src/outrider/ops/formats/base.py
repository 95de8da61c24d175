"""Weights: a format, a shape and the format's tensors.

A `Format` defines what its tensors mean (`dequantise` is the definition that every kernel is checked against) and how
many columns of the matrix each of their elements covers (`units`). Sizes in bytes, tensor-parallel sharding and joining
of fused tensors follow from the units alone. Every tensor has the matrix's rows as its rows; scales of a whole tensor
or of a block of rows are expanded to rows when they are read.

A backend packs a `Weight` for its kernels (`DeviceWeight`) with `pack_weights(parts, device)`; if it has no kernel for
a format, the loader dequantises and passes a dense tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from ...types import OutriderError, require


class Packed(Protocol):
    """A matrix in a backend's own layout."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def view(self, *shape: int) -> Packed:
        """Views the rows under another shape, for instance by cluster [C, S, h]."""
        ...


SMALL = 1 << 22  # weights: a GPU reads this many bfloat16 in two microseconds, less than a launch takes


def stays_dense(shape: Sequence[int]) -> bool:
    """True if a GPU should keep this quantised matrix dense: it is so small that its bytes hardly count and unpacking
    costs more. `smollm2` from Q4_1 decoded 710 tokens per second on an H200, from bfloat16 1,371."""
    return len(shape) == 2 and prod(shape) <= SMALL


DeviceWeight = Tensor | Packed  # a weight as ops take it: a dense tensor, or the backend's own form


@dataclass(frozen=True)
class Unit:
    """`columns` weights of a row take `items` elements of `bytes` bytes each in the last dimension of a tensor.

    columns = 0: `items` elements for a whole row, however wide. shared: the tensor is one for all rows (an order of
    columns)."""

    columns: int
    items: int = 1
    bytes: int = 1
    shared: bool = False

    def width(self, columns: int) -> int:
        return self.items if self.columns == 0 else columns // self.columns * self.items


class Format(ABC):
    """One way to store a matrix. Implementations are frozen dataclasses: equal parameters are the same format."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Short and unique, for messages and tables: `Q4_0`, `int4 g32`, `fp8`."""

    @property
    @abstractmethod
    def units(self) -> Mapping[str, Unit]:
        """The format's tensors."""

    @abstractmethod
    def dequantise(self, weight: Weight) -> Tensor:
        """The definition: float32 values in the weight's shape."""

    def quantise(self, values: Tensor) -> Weight:
        """The nearest weight in this format: for `--quantize` and for dummy weights."""
        raise OutriderError(f"weights cannot be rounded to {self.name} here: load a checkpoint that holds them")

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Size of a matrix of this shape in bytes."""
        rows = prod(shape[:-1])
        columns = shape[-1]
        return sum(u.width(columns) * u.bytes * (1 if u.shared else rows) for u in self.units.values())

    def alignment(self) -> int:
        """Multiple at which columns may be cut; 0: nowhere."""
        cut = 1
        for unit in self.units.values():
            if unit.shared:
                return 0
            cut = max(cut, unit.columns)  # units of one format divide each other
        return cut


@dataclass(frozen=True)
class Weight:
    """A matrix [N, K] (or experts [E, N, K]) as stored. Tensors are often views of the file."""

    format: Format
    shape: tuple[int, ...]
    tensors: Mapping[str, Tensor]
    # rows [lo, hi) were read: drop their pages
    release: Callable[[int, int], None] | None = field(default=None, compare=False)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def to(self, device: torch.device | str) -> Weight:
        return replace(self, tensors={name: t.to(device) for name, t in self.tensors.items()}, release=None)

    def dense(self) -> Tensor:
        return self.format.dequantise(self)

    def rows(self, lo: int, hi: int) -> Weight:
        """Rows lo..hi-1 (of experts: experts lo..hi-1): views."""
        units = self.format.units
        tensors = {name: t if units[name].shared else t[lo:hi] for name, t in self.tensors.items()}
        return Weight(self.format, (hi - lo, *self.shape[1:]), tensors)

    def slices(self, nbytes: int, multiple: int = 1) -> Iterator[tuple[int, int, Weight]]:
        """Yields (lo, hi, `rows(lo, hi)`) in pieces of about `nbytes`, and releases the file's pages of a piece after
        it."""
        # an expert has many rows of the file
        count = self.shape[0]
        each = prod(self.shape[1:-1])
        step = max(1, nbytes * count // max(1, self.nbytes) // multiple) * multiple
        for lo in range(0, count, step):
            hi = min(count, lo + step)
            yield lo, hi, self.rows(lo, hi)
            if self.release is not None:
                self.release(lo * each, hi * each)

    def columns(self, lo: int, hi: int) -> Weight:
        """Columns lo..hi-1: views. Both must lie on a multiple of the format's alignment."""
        alignment = self.format.alignment()
        if alignment == 0 or lo % alignment or hi % alignment:
            where = f"at multiples of {alignment}" if alignment else "nowhere: its columns have an order of their own"
            raise OutriderError(f"a weight in {self.format.name} cannot be cut at columns {lo} to {hi}: only {where}")
        cut = {n: unit for n, unit in self.format.units.items() if unit.columns}
        tensors = {n: self.tensors[n][..., unit.width(lo) : unit.width(hi)] for n, unit in cut.items()}
        return Weight(self.format, (*self.shape[:-1], hi - lo), {**self.tensors, **tensors})

    def check(self, where: str) -> Weight:
        """Returns itself, or raises an error that names the tensor, if any tensor is missing or has another shape than
        the format requires."""
        rows = self.shape[:-1]
        columns = self.shape[-1]
        named = self.format.name
        for name, unit in self.format.units.items():
            require(name in self.tensors, f"{where}: its {name} is missing ({named})")
            if unit.columns and columns % unit.columns:
                raise OutriderError(f"{where}: rows of {columns} are no whole groups of {unit.columns} ({named})")
            want: tuple[int, ...] = ()
            if rows:
                want = (unit.width(columns),) if unit.shared else (*rows, unit.width(columns))
            got = tuple(self.tensors[name].shape)
            require(got == want, f"{where}: its {name} has shape {list(got)}, {named} asks for {list(want)}")
        return self


def join(parts: Sequence[Weight]) -> Weight | None:
    """The rows of all parts, one below the other; None if they differ in format (or in the order of columns)."""
    first = parts[0]
    if len(parts) == 1:
        return first
    kinds = [(p.format, p.shape[:-2], p.shape[-1], {n: t.dtype for n, t in p.tensors.items()}) for p in parts]
    if any(kind != kinds[0] for kind in kinds):
        return None
    tensors: dict[str, Tensor] = {}
    for name, unit in first.format.units.items():
        each = [p.tensors[name] for p in parts]
        if unit.shared:
            if not all(torch.equal(t, each[0]) for t in each):
                return None
            tensors[name] = each[0]
        else:
            tensors[name] = torch.cat([bits(t) for t in each], dim=-2).view(each[0].dtype)
    return Weight(first.format, (*first.shape[:-2], sum(p.shape[-2] for p in parts), first.shape[-1]), tensors)


def stack(parts: Sequence[Weight]) -> Weight:
    """Matrices of one format and shape as experts [E, N, K]."""
    first = parts[0]
    tensors = {n: torch.stack([bits(p.tensors[n]) for p in parts]).view(t.dtype) for n, t in first.tensors.items()}
    return Weight(first.format, (len(parts), *first.shape), tensors)


def bits(t: Tensor) -> Tensor:
    """One-byte floats as bytes, which torch can move and index on every device, unlike float8."""
    return t.view(torch.uint8) if t.element_size() == 1 else t
