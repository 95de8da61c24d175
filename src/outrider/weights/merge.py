"""`outrider merge`: a checkpoint with an adapter added into its weights, W + scale · B A.

The sum is computed in float32 and rounded once to the stored dtype. The files keep their names and their order; other
files are copied. A quantised checkpoint is refused: rounding the sum to few bits would lose the adapter.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..models.names import normalise
from ..types import OutriderError
from . import hub
from .adapter import LoraFile, read_adapter
from .files import model_config
from .quant_scheme import recipe
from .safetensors import shard_names

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def merge(model: str, adapter: str, out: Path, say: Callable[[str], None]) -> int:
    """Writes the merged checkpoint to the folder `out`; returns how many tensors were changed."""
    files = hub.resolve(model)
    if files.gguf is not None or recipe(files.config, files.name) is not None:
        what = "a GGUF file" if files.gguf is not None else "quantised"
        raise OutriderError(f"{model} is {what}: merge into the checkpoint it was made from, then convert that")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutriderError(f"{out} exists and is not an empty folder: name a new one")
    file = read_adapter(adapter, model_config(files))
    shards, left = shard_names(files.path) or [], set(file.updates)
    if not shards:
        raise OutriderError(f"{files.path} holds no safetensors file: there are no weights to merge into")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path in sorted(files.path.iterdir()):
            if path.is_file() and path.suffix in (".json", ".jinja", ".model", ".txt", ".md"):
                shutil.copyfile(path, out / path.name)
        for shard in shards:
            left -= _merge_shard(files.path / shard, out / shard, file)
            say(f"wrote {out / shard}")
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise OutriderError(f"cannot write the merged checkpoint to {out}: {str(why)[:120]}") from None
    if left:
        raise OutriderError(f"{files.path}: tensor {min(left)} is missing from the checkpoint")
    return len(file.updates)


def _merge_shard(source: Path, to: Path, file: LoraFile) -> set[str]:
    tensors, changed = {}, set[str]()
    with safe_open(source, framework="pt") as stored:
        metadata = stored.metadata() or {"format": "pt"}
        for name in stored.keys():  # noqa: SIM118  # not a mapping
            value = stored.get_tensor(name)
            update = file.updates.get(normalise(name))
            if update is not None:
                if value.dtype not in FLOATS:
                    kind = str(value.dtype).removeprefix("torch.")
                    raise OutriderError(f"{source}: tensor {name} is stored as {kind}: merging needs dense weights")
                value = (value.float() + update.delta()).to(value.dtype)
                changed.add(normalise(name))
            tensors[name] = value.contiguous()
    save_file(tensors, to, metadata=metadata)
    return changed
