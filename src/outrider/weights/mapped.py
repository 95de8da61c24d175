"""Memory-mapped files and the places of tensors in them. Torch-free: `weights.source` reads tensors from them.

Models are mapped. Adapters are read: a server loads them while it runs, and a mapped file that is truncated at that
moment ends the process (SIGBUS).

A tensor is rows of bytes: everything but the last dimension is flattened into rows. `release` gives pages of the file
back to the system, so that loading never holds both file and tensors in memory.
"""

from __future__ import annotations

import hashlib
import mmap
import sys
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from ..ops.gguf_blocks import BLOCKS
from ..types import bad_input, require

MAX_READ_HEADER = 64 << 20  # bytes of an adapter's header: a name and a shape for each of its tensors
ITEM_BYTES = {  # of the dense types
    **dict.fromkeys(("F64", "I64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16"), 2),
    **dict.fromkeys(("I8", "U8", "F8_E4M3", "F8_E5M2", "BOOL"), 1),
}


class Mapped:
    """One file, mapped copy-on-write and never written to, so that numpy and torch return ordinary arrays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with bad_input(OSError, lambda e: f"cannot read {path}: {e.strerror or e}"), open(path, "rb") as handle:
            self.size = handle.seek(0, 2)
            self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY) if self.size else None
        self.data = np.frombuffer(self._map, np.uint8) if self._map is not None else np.empty(0, np.uint8)

    def header(self) -> np.ndarray:
        """Bytes that begin with the file's header."""
        return self.data

    def release(self, start: int, length: int) -> None:
        """Releases the pages wholly or partly inside; the next access reads them from the file again."""
        if self._map is not None and length > 0 and sys.platform != "win32":
            first = start - start % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, min(start + length, self.size) - first)


class ReadFile:
    """One file that is read where it is accessed, by slices of `data`. If it is replaced, the old content is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with bad_input(OSError, lambda e: f"cannot read {path}: {e.strerror or e}"):
            self._file = open(path, "rb")  # noqa: SIM115  # closed with this object
            self.size = self._file.seek(0, 2)

    @property
    def data(self) -> ReadFile:
        return self

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self.size)
        data = np.empty(max(0, stop - start), np.uint8)
        with bad_input(OSError, lambda e: f"cannot read {self.path}: {e.strerror or e}"):
            self._file.seek(start)
            num_bytes = self._file.readinto(data.data)
        require(num_bytes == len(data), f"{self.path} became shorter while it was read; load it again")
        return data

    def header(self) -> np.ndarray:
        """Bytes that begin with the file's header, which in a file of this kind is short."""
        return self[:MAX_READ_HEADER]

    def release(self, start: int, length: int) -> None:
        """Does nothing: no memory is held."""


TensorFile = Mapped | ReadFile


def pointer(file: TensorFile) -> str | None:
    """Advice for a file that is only a pointer, as in a repository cloned without Git LFS."""
    lfs = file.data[:24].tobytes() == b"version https://git-lfs."
    return "a Git LFS pointer: `git lfs pull` fetches it" if lfs else None


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's location. `order`: the order of its rows (of a vector: elements); Llama's GGUF files permute q and
    k."""

    file: TensorFile
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
    header: bytes  # further bytes that are part of the model's fingerprint
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
