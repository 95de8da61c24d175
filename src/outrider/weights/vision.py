"""A checkpoint's vision weights: found by name, checked for completeness and loaded to the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..models.vision_config import VisionConfig
from ..types import OutriderError, require
from .files import Files, open_source, translate
from .gguf import read
from .mmproj import PROJECTORS, mmproj_config, read_mmproj
from .repos import companion
from .source import FLOATS
from .source_tensor import tensor

PREFIXES = ("vision_tower.", "embed_vision.", "vision_embedder.", "multi_modal_projector.")
UNIFIED = "vision_embedder.multimodal_embedder."  # where newer checkpoints of transformers keep the projection


def vision_config(files: Files) -> VisionConfig | None:
    """None: no vision weights. Those of a GGUF model are in the mmproj next to it, if that is supported."""
    if files.gguf is None:
        return translate(VisionConfig.from_hf, files)
    path = companion(files.path, "mmproj")
    if path is None or files.config.get("model_type") not in PROJECTORS.values():
        return None
    described = mmproj_config(read(path), files.config, files.gguf.meta.get("tokenizer.ggml.tokens"))
    return translate(VisionConfig.from_hf, replace(files, config=described))


def load_vision(
    files: Files, config: VisionConfig, device: torch.device | str, dtype: torch.dtype, dummy_seed: int | None = None
) -> dict[str, Tensor]:
    """By the names of `VisionConfig.tensors`; wrong tensors are errors. dummy_seed: random weights instead."""
    wanted = config.tensors()
    if dummy_seed is not None:
        return _dummy(wanted, device, dtype, dummy_seed)
    where, stored = _stored(files, config)
    found: dict[str, Tensor] = {}
    for name, shape in wanted.items():
        require(name in stored, f"{where}: tensor {name} is missing from the checkpoint's vision weights")
        found[name] = torch.empty(shape, dtype=dtype, device=device)
        found[name].copy_(stored.pop(name)().view(shape))
    if stored:
        raise OutriderError(f"{where}: tensor {min(stored)} is left over: vision_config does not describe it")
    return found


def _stored(files: Files, config: VisionConfig) -> tuple[str, dict[str, Callable[[], Tensor]]]:
    if files.gguf is not None:
        path = companion(files.path, "mmproj")
        assert path is not None, "it was there when the configuration was read"
        return str(path), read_mmproj(read(path), config)
    source, wanted = open_source(files), config.tensors()
    stored: dict[str, Callable[[], Tensor]] = {}
    for full, entry in source.entries.items():
        name = full.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
        name = name.replace(UNIFIED, "embed_vision.")
        if not name.startswith(PREFIXES):
            continue
        shape = wanted.get(name)
        if shape is not None and (entry.shape not in (shape, shape or (1,)) or entry.kind not in FLOATS):
            found = f"is {entry.kind} {list(entry.shape)}, the config asks for {list(shape)}"
            raise OutriderError(f"{source.where}: tensor {name} {found}")
        stored[name] = partial(tensor, entry)
    return source.where, stored


def has_vision(files: Files) -> bool:
    """Some checkpoints keep the configuration and leave the weights out."""
    names = () if files.gguf is not None else open_source(files).entries
    return files.gguf is not None or any(name.removeprefix("model.").startswith(PREFIXES) for name in names)


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
