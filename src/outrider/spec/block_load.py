"""Loads a block drafter, with a copy of the target's head where a draft reads it in fewer bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import LoadFormat
from ..models.block import BlockNet
from ..models.block_config import BlockConfig
from ..models.decoder import TextModel
from ..ops.formats import DeviceWeight
from ..ops.reference import as_tensor
from ..types import OutriderError
from ..weights.files import Files
from ..weights.load import load, translate


def load_block(
    files: Files,
    target: TextModel,
    dtype: torch.dtype,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    quantize: str | None = None,
) -> BlockNet:
    """quantize: the format of dense matrices; then also a copy of the target's head, if the drafter shares it."""
    config = translate(BlockConfig.from_hf, files).bound(target.config)
    if (files.path / "mask_embedding.pt").is_file():
        raise OutriderError(f"{files.name}: a mask embedding in a file of its own (mask_embedding.pt) is not supported")
    ops, device = target.ops, target.device
    mode = quantize or ops.capabilities.draft_format
    _, weights = load(files, config, device, dtype, ops, quantize=mode, load_format=load_format, seed=seed)
    if "d2t" in weights and load_format == "auto":
        order = torch.arange(config.draft_vocab, device=device)
        if files.gguf is not None:  # the ids themselves there, not offsets
            weights["d2t"] = as_tensor(weights["d2t"]) - order
        ids = order + as_tensor(weights["d2t"])
        if bool(((ids < 0) | (ids >= config.vocab_size)).any()):
            raise OutriderError(f"{files.path}: tensor d2t names tokens outside the vocabulary of {config.vocab_size}")
    return BlockNet(config, own_head(weights, target, quantize), ops, target).compiled()


def own_head(weights: dict[str, DeviceWeight], target: TextModel, quantize: str | None) -> dict[str, DeviceWeight]:
    """Adds a quantised copy of the target's head if the drafter has none of its own: a draft reads it once per pass."""
    whole = isinstance(target.head, Tensor) and target.together.tp.world == 1
    if quantize is not None and "head" not in weights and whole:
        weights["head"] = target.ops.quantize(as_tensor(target.head), quantize)
    return weights
