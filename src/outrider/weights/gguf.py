"""GGUF files: header, metadata, tensors. Our own reader over a memory map; every size is checked before allocation.

Layout: "GGUF", version u32, tensor count u64, key count u64, keys (string, type, value), tensors (string, dims, type,
offset), padding to `general.alignment`, data. Strings are u64 length + UTF-8; dims are stored innermost first.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from ..ops.gguf_blocks import BLOCKS
from ..types import OutriderError
from .mapped import ITEM_BYTES, Mapped, ReadFile, TensorEntry, TensorFile, pointer

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING = 8
ARRAY = 9
Value = bool | int | float | str | list[str] | np.ndarray  # of a key
TENSOR_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip
WHOLE_NUMBERS = ("I8", "I16", "I32", "I64")  # types of index tensors, not of weights


@dataclass(frozen=True)
class GGUF:
    path: Path
    meta: dict[str, Value]
    tensors: dict[str, TensorEntry]  # by GGUF name; shapes outermost first
    header: bytes

    @property
    def arch(self) -> str:
        return str(self.meta.get("general.architecture", "unknown"))


def read(path: Path, mapped: bool = True) -> GGUF:
    file = Mapped(path) if mapped else ReadFile(path)
    try:
        return _Reader(file).read()
    except (struct.error, IndexError):
        raise _Reader(file).bad("it ends inside its header (truncated?)") from None


class _Reader:
    def __init__(self, file: TensorFile) -> None:
        self.file = file
        self.at = 0
        self.view = memoryview(file.header())  # type: ignore[arg-type]

    def bad(self, what: str) -> OutriderError:
        return OutriderError(f"{self.file.path} is not a sound GGUF file: {what}; fetch it again")

    def scalar(self, form: str) -> bool | int | float:
        (value,) = struct.unpack_from(form, self.view, self.at)
        self.at += struct.calcsize(form)
        return value

    def number(self, form: str) -> int:
        return int(self.scalar(form))

    def count(self, unit: int, what: str) -> int:
        """A u64 count of items of at least `unit` bytes each: they must fit into the rest of the file."""
        value = self.number("<Q")
        if value > (self.file.size - self.at) // unit:
            raise self.bad(f"{what} runs past the end (truncated?)")
        return value

    def string(self, what: str) -> str:
        length = self.count(1, what)
        self.at += length
        return bytes(self.view[self.at - length : self.at]).decode("utf-8", errors="replace")

    def strings(self, count: int, key: str) -> list[str]:
        """Reads strings in one tight loop: a vocabulary has hundreds of thousands."""
        view = self.view
        at = self.at
        size = self.file.size
        length = struct.Struct("<Q").unpack_from
        out = []
        for _ in range(count):
            end = at + 8 + length(view, at)[0]
            if end > size:
                raise self.bad(f"an item of {key!r} runs past the end (truncated?)")
            out.append(str(view[at + 8 : end], "utf-8", "replace"))
            at = end
        self.at = at
        return out

    def name(self, what: str) -> str:
        name = self.string(what)
        if len(name) > 100 or not name.isprintable():
            raise self.bad(f"{what} is garbled ({name[:20]!r}…)")
        return name

    def value(self, kind: int, key: str) -> Value:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string(f"the value of {key!r}")
        if kind != ARRAY:
            raise self.bad(f"key {key!r} has unknown type {kind}")
        inner = self.number("<I")
        if inner == STRING:
            return self.strings(self.count(8, f"array {key!r}"), key)
        if inner not in SCALARS:
            raise self.bad(f"array {key!r} has unknown type {inner}")
        width = struct.calcsize(SCALARS[inner])
        length = self.count(width, f"array {key!r}")
        kinds = np.dtype(np.bool_) if inner == 7 else np.dtype(SCALARS[inner])
        array = np.frombuffer(self.view[self.at : self.at + length * width], np.uint8).copy().view(kinds)
        self.at += length * width
        return array

    def read(self) -> GGUF:
        if bytes(self.view[:4]) != b"GGUF":
            raise OutriderError(f"{self.file.path} is not a GGUF file ({pointer(self.file) or 'wrong magic'})")
        self.at = 4
        version = self.number("<I")
        if version not in (2, 3):
            raise OutriderError(f"{self.file.path}: GGUF version {version} is not supported (little-endian 2, 3 are)")
        tensors = self.count(24, "the tensor list")
        keys = self.count(13, "the metadata")
        meta: dict[str, Value] = {}
        for _ in range(keys):
            key = self.name("a key")
            if key in meta:
                raise self.bad(f"key {key!r} is there twice")
            meta[key] = self.value(self.number("<I"), key)
        infos = [self.tensor_info() for _ in range(tensors)]
        align = meta.get("general.alignment", 32)
        if type(align) is not int or not 8 <= align <= 1 << 20 or align & (align - 1):
            raise self.bad(f"alignment {align!r} makes no sense")
        header = bytes(self.view[: self.at])
        base = -(-self.at // align) * align
        entries: dict[str, TensorEntry] = {}
        for name, kind, shape, offset in infos:
            entry = TensorEntry(self.file, kind, shape=shape, start=base + offset)
            if name in entries:
                raise self.bad(f"tensor {name!r} is there twice")
            if entry.start + entry.nbytes > self.file.size:
                raise self.bad(f"tensor {name!r} runs past the end (truncated?)")
            entries[name] = entry
        return GGUF(self.file.path, meta, tensors=entries, header=header)

    def tensor_info(self) -> tuple[str, str, tuple[int, ...], int]:
        name = self.name("a tensor's name")
        dims = self.number("<I")
        if not 1 <= dims <= 4:
            raise self.bad(f"tensor {name!r} has {dims} dimensions")
        shape = tuple(self.number("<Q") for _ in range(dims))[::-1]
        code = self.number("<I")
        offset = self.number("<Q")
        if code not in TENSOR_TYPES:
            names = ", ".join(sorted(kind for kind in TENSOR_TYPES.values() if kind not in WHOLE_NUMBERS))
            raise OutriderError(f"{self.file.path}: tensor {name!r} has the unsupported type {code} (known: {names})")
        kind = TENSOR_TYPES[code]
        if prod(shape) > self.file.size * 256 or offset > self.file.size:
            raise self.bad(f"tensor {name!r} is larger than the file")
        if kind in BLOCKS and shape[-1] % BLOCKS[kind][0]:
            raise self.bad(f"tensor {name!r}: rows of {shape[-1]} are no whole {kind} blocks")
        assert kind in BLOCKS or kind in ITEM_BYTES
        return name, kind, shape, offset
