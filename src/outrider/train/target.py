"""The target model of a training run: `describe` reads its files and tokenizer, `open_target` loads its weights dense,
`encode` turns prompts into token sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..engine.text import Tokenizer
from ..models.config import ModelConfig
from ..models.decoder import TextModel
from ..models.names import tensor_plan
from ..ops.formats import DeviceWeight
from ..ops.reference import as_tensor
from ..prompts import Prompt
from ..types import TextFiles, require
from ..weights import files as weight_files
from ..weights import hub
from ..weights.adapter import LoraFile, adapted_hash, read_adapter
from ..weights.files import model_config
from ..weights.load import load_target
from .capture import DenseOps
from .data import Sequences


@dataclass(frozen=True)
class Described:
    """A target before its weights are loaded."""

    name: str
    files: weight_files.Files
    config: ModelConfig
    text: TextFiles
    hash: str  # of its content, and of the adapter's
    adapter: str | None = None  # a LoRA adapter: a drafter is trained for the model with it


@dataclass(frozen=True)
class TrainTarget:
    model: TextModel  # over DenseOps
    config: ModelConfig
    hash: str


def describe(name: str, adapter: str | None = None) -> Described:
    files = hub.resolve(name)
    config, hash = model_config(files), weight_files.fingerprint(files)
    if adapter is not None:
        hash = adapted_hash(hash, read_adapter(adapter, config).digest())
    return Described(name, files, config, weight_files.text_files(files), hash, adapter)


def open_target(name: str | Described, device: str, dtype: torch.dtype) -> TrainTarget:
    known = describe(name) if isinstance(name, str) else name
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans again for every shape, and every batch has a different one
    config, weights, _ = load_target(known.files, device, dtype)
    if known.adapter is not None:
        add_adapter(weights, read_adapter(known.adapter, config), config)
    model = TextModel(config, weights, DenseOps())  # type: ignore[arg-type]  # its K/V is dense, not in pages
    return TrainTarget(model, config, known.hash)


def add_adapter(weights: dict[str, DeviceWeight], file: LoraFile, config: ModelConfig) -> None:
    """The adapter's changes become part of the dense weights, summed in float32."""
    for name, plan in tensor_plan(config).items():
        row, dense = 0, weights.get(name)
        for source, (rows, *_) in zip(plan.sources, plan.source_shapes):
            if source in file.updates:
                own = as_tensor(dense)[row : row + rows]  # type: ignore[arg-type]
                own.copy_(own.float() + file.updates[source].delta().to(own.device))
            row += rows


def encode(prompts: list[Prompt], text: TextFiles, vocab: int, *, max_tokens: int, chat: bool = True) -> Sequences:
    """Prompts through the chat template as token sequences; over-long prompts are left out."""
    tokenizer, rows, index = Tokenizer(text), [], []
    template = chat and tokenizer.has_chat_template
    for i, prompt in enumerate(prompts):
        if template:
            ids = tokenizer.chat([{"role": "user", "content": prompt.text}])
        else:
            ids = tokenizer.encode(prompt.text, bos=True)
        if 1 <= len(ids) <= max_tokens:
            rows.append(np.array(ids))
            index.append(i)
    require(bool(rows), f"none of the {len(prompts)} prompts fits {max_tokens} tokens (max_prompt in a recipe)")
    return Sequences.of(rows, [len(r) for r in rows], index, [False] * len(rows), vocab)
