"""Safetensors folders: one file, or shards with an index. Headers are checked here, before any tensor is read."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

from ..models.config import ForeignDict
from ..models.names import normalise
from ..types import OutriderError, require
from .mapped import ITEM_BYTES, Mapped, ReadFile, TensorEntry, TensorSource, pointer

MAX_HEADER = 100_000_000  # the format's own limit
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
VOLATILE = ("transformers_version", "architectures", "torch_dtype", "dtype")  # config keys that do not change the model


def read_json(path: Path) -> ForeignDict:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise OutriderError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise OutriderError(f"{path} is not valid JSON: {str(error)[:80]}") from None
    if not isinstance(value, dict):
        raise OutriderError(f"{path} should hold a JSON object, not a {type(value).__name__}")
    return value


def shard_names(folder: Path) -> list[str] | None:
    """Weight files of a folder; None if it has none."""
    if (folder / INDEX).is_file():
        table = read_json(folder / INDEX).get("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(v, str) for v in table.values()):
            raise OutriderError(f"{folder / INDEX} has no usable weight_map")
        names = sorted(set(table.values()))
        bad = next((n for n in names if Path(n).name != n or n in ("", ".", "..")), None)
        if bad is not None:
            raise OutriderError(f"{folder / INDEX} names {bad!r}, which is not a file of this folder")
        return names
    if (folder / SINGLE).is_file():
        return [SINGLE]
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    require(len(shards) <= 1, f"{folder} holds {len(shards)} safetensors files and no {INDEX}: fetch the index too")
    return shards or None


def open_folder(folder: Path, config: ForeignDict) -> TensorSource:
    names = shard_names(folder)
    if names is None:
        raise OutriderError(f"{folder} holds no safetensors file ({SINGLE} or {INDEX})")
    entries: dict[str, TensorEntry] = {}
    for name in names:
        path = folder / name
        require(path.is_file(), f"shard {name} is missing from {folder}: fetch the checkpoint again")
        entries.update(read_header(path))
    if (folder / INDEX).is_file():
        for listed, shard in read_json(folder / INDEX)["weight_map"].items():
            if normalise(listed) not in entries:
                raise OutriderError(f"tensor {listed} should be in {folder / shard} and is not: fetch the shard again")
    lasting = {k: v for k, v in config.items() if not k.startswith("_") and k not in VOLATILE}
    return TensorSource(str(folder), entries, json.dumps(lasting, sort_keys=True).encode())


def read_header(path: Path, mapped: bool = True) -> dict[str, TensorEntry]:
    """{normalised name: entry} of one file. Every offset is proven to lie in the file and to match its shape."""
    file = Mapped(path) if mapped else ReadFile(path)

    def bad(what: str) -> OutriderError:
        return OutriderError(f"{path} is not a sound safetensors file: {what}; fetch it again")

    advice = pointer(file)
    require(advice is None, f"{path} is not a safetensors file ({advice})")
    if file.size < 8:
        raise bad("it is shorter than a header")
    length = int.from_bytes(file.data[:8].tobytes(), "little")
    if length > min(MAX_HEADER, file.size - 8):
        raise bad("its header runs past the end (truncated?)")
    try:
        header = json.loads(file.data[8 : 8 + length].tobytes())
    except (ValueError, RecursionError):
        raise bad("its header is not JSON") from None
    if not isinstance(header, dict):
        raise bad("its header is not a JSON object")
    base = 8 + length
    entries = {}
    room = file.size - base
    for name, info in header.items():
        if name == "__metadata__":
            continue
        if not isinstance(info, dict):
            raise bad(f"the entry of {name[:80]!r} is malformed")
        kind = info.get("dtype")
        shape = _naturals(info.get("shape"))
        span = _naturals(info.get("data_offsets"))
        if not isinstance(kind, str) or shape is None or span is None or len(span) != 2:
            raise bad(f"the entry of {name[:80]!r} is malformed")
        start, end = span
        if not start <= end <= room:
            raise bad(f"tensor {name[:80]!r} runs past the end (truncated?)")
        if kind in ITEM_BYTES and end - start != prod(shape) * ITEM_BYTES[kind]:
            raise bad(f"tensor {name[:80]!r} has {end - start} bytes, which is not {kind} {shape}")
        key = normalise(name)
        if key in entries:
            raise bad(f"tensor {name[:80]!r} is there twice")
        entries[key] = TensorEntry(file, kind, shape=tuple(shape), start=base + start)
    return entries


def _naturals(value: object) -> list[int] | None:
    """A short list of natural numbers that can occur in a file; None for anything else."""
    if not isinstance(value, list) or len(value) > 8:
        return None
    return value if all(type(v) is int and 0 <= v < 1 << 48 for v in value) else None
