"""A checkpoint's vision weights: found by name, all of them and no others, and brought to the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.vision_config import VisionConfig
from ..types import OutriderError
from .files import Files, open_source
from .source_tensor import FLOATS, tensor

PREFIXES = ("vision_tower.", "embed_vision.", "vision_embedder.", "multi_modal_projector.")
OTHER_NAMES = {  # newer checkpoints of transformers keep the unified projection with its embedder
    "embed_vision.embedding_projection.weight": "vision_embedder.multimodal_embedder.embedding_projection.weight"
}


def load_vision(
    files: Files, config: VisionConfig, device: torch.device | str, dtype: torch.dtype, dummy_seed: int | None = None
) -> dict[str, Tensor]:
    """By the names of `VisionConfig.tensors`. Missing, left-over and wrongly shaped tensors are errors, by name.
    dummy_seed: random weights instead of the checkpoint's."""
    wanted = config.tensors()
    if dummy_seed is not None:
        return _dummy(wanted, device, dtype, dummy_seed)
    if files.gguf is not None:
        raise OutriderError(
            f"{files.name} is a GGUF file: images need the safetensors checkpoint (mmproj is not read yet)"
        )
    source = open_source(files)
    stored = {name.removeprefix("model."): entry for name, entry in source.entries.items()}
    stored = {
        name.replace("vision_tower.vision_model.", "vision_tower."): entry
        for name, entry in stored.items()
        if name.startswith(PREFIXES)
    }
    found: dict[str, Tensor] = {}
    for name, shape in wanted.items():
        entry = stored.pop(name, None) or stored.pop(OTHER_NAMES.get(name, ""), None)
        if entry is None:
            raise OutriderError(f"{source.where}: tensor {name} is missing from the checkpoint's vision weights")
        if entry.shape not in (shape, shape or (1,)) or entry.kind not in FLOATS:
            raise OutriderError(
                f"{source.where}: tensor {name} is {entry.kind} {list(entry.shape)}, the config asks for {list(shape)}"
            )
        found[name] = torch.empty(shape, dtype=dtype, device=device)
        found[name].copy_(tensor(entry).view(shape))
        entry.file.release(entry.start, entry.nbytes)
    if stored:
        raise OutriderError(f"{source.where}: tensor {min(stored)} is left over: vision_config does not describe it")
    return found


def has_vision(files: Files) -> bool:
    """Some checkpoints keep the configuration and leave the weights out."""
    return any(name.removeprefix("model.").startswith(PREFIXES) for name in open_source(files).entries)


def _dummy(
    wanted: dict[str, tuple[int, ...]], device: torch.device | str, dtype: torch.dtype, seed: int
) -> dict[str, Tensor]:
    made, generator = {}, torch.Generator(device=device)
    for i, (name, shape) in enumerate(wanted.items()):
        generator.manual_seed(seed * 1_000_003 + i)
        weight = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith(("_min", "_max")):
            weight.fill_(-1e4 if name.endswith("_min") else 1e4)
        elif "norm" in name or "_ln" in name or name.endswith("std_scale"):
            weight.normal_(0.0 if name.endswith("bias") else 1.0, 0.05, generator=generator)
        else:
            weight.normal_(0.0, 0.02, generator=generator)
        made[name] = weight
    return made
