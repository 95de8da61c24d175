"""A checkpoint as the loader sees it: named tensors inside memory-mapped files.

A tensor is rows of bytes: everything but the last dimension is flattened into rows. `release` gives pages of the file
back to the system, so that loading never holds both file and tensors in memory. `find` looks up one source of a plan
(dense rows, or a quantised matrix), `SourceTensor.read` reads it; all are found before the first one is read.
"""

from __future__ import annotations

import hashlib
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..models.names import Role
from ..ops.formats import BLOCKS, GGUFBlockFormat, Weight, dense, join, stack
from ..types import OutriderError, bad_input, require
from .quant_scheme import QuantScheme

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS = {"I64": torch.int64, "I32": torch.int32}
BYTES = {"I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
DTYPES = {**FLOATS, **INTEGERS, **BYTES, "I16": torch.int16, "BOOL": torch.bool}  # the dense types
ITEM_BYTES = {kind: dtype.itemsize for kind, dtype in DTYPES.items()}


class Mapped:
    """One file, mapped copy-on-write (never written to): numpy and torch then hand out ordinary arrays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with bad_input(OSError, lambda e: f"cannot read {path}: {e.strerror or e}"), open(path, "rb") as handle:
            self.size = handle.seek(0, 2)
            self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY) if self.size else None
        self.data = np.frombuffer(self._map, np.uint8) if self._map is not None else np.empty(0, np.uint8)

    @property
    def pointer(self) -> str | None:
        """Advice for a file that is only a pointer, as in a repository cloned without Git LFS."""
        lfs = self.data[:24].tobytes() == b"version https://git-lfs."
        return "a Git LFS pointer: `git lfs pull` fetches it" if lfs else None

    def release(self, start: int, length: int) -> None:
        """Releases the pages wholly or partly inside; the next access reads them from the file again."""
        if self._map is not None and length > 0 and sys.platform != "win32":
            first = start - start % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, min(start + length, self.size) - first)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's location. `order`: of its rows (of a vector its elements); Llama's GGUF files permute q and k."""

    file: Mapped
    kind: str  # a dense type of ITEM_BYTES or a block format of ops.formats.BLOCKS
    shape: tuple[int, ...]
    start: int
    order: np.ndarray | None = field(default=None, compare=False)

    @property
    def row_bytes(self) -> int:
        size, nbytes = BLOCKS.get(self.kind) or (1, ITEM_BYTES[self.kind])
        return prod(self.shape[-1:]) // size * nbytes

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes

    def data(self) -> np.ndarray:
        """uint8 [rows, row_bytes], a view of the file (stored order)."""
        return self.file.data[self.start : self.start + self.nbytes].reshape(prod(self.shape[:-1]), self.row_bytes)

    def release(self, lo: int, hi: int) -> None:
        """Releases these rows, in stored order."""
        self.file.release(self.start + lo * self.row_bytes, (hi - lo) * self.row_bytes)


@dataclass(frozen=True)
class TensorSource:
    """All tensors of a checkpoint, by Hugging Face name (text tower normalised to `model.`)."""

    where: str
    entries: dict[str, TensorEntry]
    header: bytes  # bytes besides the tensors that are part of the model's fingerprint
    plus_one_done: bool = False  # the norms already contain Gemma 3's +1 (GGUF)

    def fingerprint(self) -> str:
        """A content hash: header, names, shapes, types and 64 bytes from the start, middle and end of each tensor."""
        digest = hashlib.sha256(self.header)
        for name in sorted(self.entries):
            entry = self.entries[name]
            digest.update(f"{name} {entry.kind} {entry.shape}\n".encode())
            data = entry.file.data[entry.start : entry.start + entry.nbytes]
            middle = len(data) // 2
            for piece in (data[:64], data[middle : middle + 64], data[-64:]):
                digest.update(piece.tobytes())
        return digest.hexdigest()[:32]


@dataclass(frozen=True)
class SourceTensor:
    """One source of a plan: the tensors of the checkpoint that hold it, and how they are read."""

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
    """Columns of fused matrices may be cut at multiples of this; 0: nowhere."""
    each = [piece.alignment for piece in pieces]
    return 0 if 0 in each else max(least, *each)


def tensor(entry: TensorEntry) -> Tensor:
    """The whole tensor, a view of the file where its alignment and order allow it."""
    raw = entry.data().reshape(-1)
    if raw.ctypes.data % ITEM_BYTES[entry.kind]:
        raw = raw.copy()
    return ordered(torch.from_numpy(raw).view(DTYPES[entry.kind]).view(entry.shape), entry)


def ordered(stored: Tensor, entry: TensorEntry) -> Tensor:
    return stored if entry.order is None else stored[torch.from_numpy(entry.order)]


def find(
    source: TensorSource, recipe: QuantScheme | None, name: str, shape: tuple[int, ...], role: Role
) -> SourceTensor | None:
    """Finds a source tensor of the plan; None: it is missing. Errors name what a tensor or a quantised matrix lacks."""
    entry = source.entries.get(name)
    scheme = recipe if role in ("matrix", "embedding") else None
    stored = None
    if scheme is not None and (entry is None or entry.kind not in (*FLOATS, *BLOCKS)):
        stored = _matrix(source, scheme, name.removesuffix(".weight"), shape)
        if stored is None and len(shape) == 3:
            return _experts(source, scheme, name, shape)
    return stored if stored is not None or entry is None else _plain(source.where, entry, name, shape, role)


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
    return Weight(GGUFBlockFormat(entry.kind), entry.shape, {"blocks": blocks}, release)


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
        matrices = [_matrix(source, recipe, f"{base}.{e}.{part}", (rows // len(parts), columns)) for part in parts]
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
