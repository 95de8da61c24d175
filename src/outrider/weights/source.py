"""A checkpoint as the loader sees it: named tensors inside memory-mapped files.

A tensor is rows of bytes: everything but the last dimension is flattened into rows. Reading touches pages of the
file; `release` gives them back to the system, so that loading never holds both file and tensors in memory.
"""

from __future__ import annotations

import hashlib
import mmap
import sys
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
import torch

from ..ops.formats import BLOCKS
from ..types import OutriderError

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS = {"I64": torch.int64, "I32": torch.int32}
OTHERS = {"I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
BYTE_FLOATS = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
DTYPES = {**FLOATS, **INTEGERS, **OTHERS, **BYTE_FLOATS}  # the dense types
ITEM_BYTES = {kind: dtype.itemsize for kind, dtype in DTYPES.items()}


class Mapped:
    """One file, mapped copy-on-write (never written to): numpy and torch then hand out ordinary arrays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as handle:
                self.size = handle.seek(0, 2)
                self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY) if self.size else None
        except OSError as error:
            raise OutriderError(f"cannot read {path}: {error.strerror or error}") from None
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
