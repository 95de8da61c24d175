"""The models of a server's command line: `MODEL` or `name=MODEL`, each with its name in the API and the memory that it
needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..config import EngineConfig
from ..engine.memory import free_bytes, plan_kv_memory
from ..llm import LLM
from ..types import OutriderError
from ..weights import hub
from ..weights.files import model_config
from ..weights.sizes import stored_size
from .fair import SPARE
from .model_info import ModelInfo, ServedModel
from .model_pool import ModelPool, PoolSlot
from .settings import ServerSettings, public_name

ALIAS = re.compile(r"([A-Za-z0-9][\w.:-]*)=(.+)")
SHARE = 0.8  # of the memory that is free at the start, by default


def read(given: Sequence[str]) -> dict[str, str]:
    """{name: what is loaded}"""
    out: dict[str, str] = {}
    for text in given:
        alias = None if Path(text).exists() else ALIAS.fullmatch(text)
        name, model = (alias[1], alias[2]) if alias else (public_name(text), text)
        if name in out:
            raise OutriderError(f"two models would be called {name!r}: name one of them, as in other={out[name]}")
        out[name] = model
    return out


def estimate(model: str, engine: EngineConfig) -> tuple[int, int, ModelInfo]:
    """(bytes of weights and K/V, tokens of context, what is known), nothing loaded. Fails for one that can't be had."""
    files = hub.resolve(model, weights=False)
    config = model_config(files)
    dtype = torch.float16  # of K/V, on nearly every machine
    budget = plan_kv_memory(engine, config, dtype, free_bytes(torch.device("cpu")))
    position = sum(2 * config.layers[i].attn.kv_heads * config.layers[i].attn.head_dim * 2 for i in config.kv_layers)
    stored = stored_size(files, config)
    return int(stored.total) + position * budget.tokens, budget.max_context, ModelInfo.of(files, config, stored)


def model_pool(
    listed: Mapping[str, str],
    load: Callable[[str], LLM],
    engine: EngineConfig,
    limit: int | None,
    settings: ServerSettings,
    cuda: bool,
) -> ModelPool:
    """Nothing is loaded yet. limit: bytes; without one, a share of what is free, and on a GPU one model at a time."""

    def slot(name: str, model: str) -> PoolSlot:
        def loaded() -> ServedModel:
            llm = load(model)
            return replace(ServedModel.of(llm), places=max(1, llm.engine.max_batch - SPARE))

        size, context, info = estimate(model, engine)
        return PoolSlot(name, loaded, size, context, info=info)

    most = limit if limit is not None else 0 if cuda else int(SHARE * free_bytes(torch.device("cpu")))
    return ModelPool([slot(*one) for one in listed.items()], most, settings)
