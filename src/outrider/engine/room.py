"""How much context there is room for: the model's own limit, what was asked for, and the memory for K/V."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import EngineConfig
from ..models.config import ModelConfig
from ..types import OutriderError

KV_BYTES = 2 << 30  # K/V of all sequences together, unless one alone may need more
SHARE = 8  # of the free memory, one sequence's K/V may take an eighth without being asked to
USUAL = 4096  # tokens; no default is less, unless the model is


@dataclass(frozen=True)
class Room:
    max_context: int  # prompt and answer of one sequence
    tokens: int  # positions of K/V in all


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had there; a very large number where nobody tells."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return 1 << 62


def room(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, free: int) -> Room:
    """Without a wish: as much as the model knows and an eighth of the free memory holds."""
    size = torch.empty((), dtype=dtype).element_size()
    each = {i: 2 * model.layers[i].attn.kv_heads * model.layers[i].attn.head_dim * size for i in model.kv_layers}
    per_token = sum(each.values())
    if config.max_context is None:
        max_context = min(model.max_context, max(USUAL, max(KV_BYTES, free // SHARE) // per_token - config.page_size))
    else:
        max_context = min(config.max_context, model.max_context)
    growing = sum(n for i, n in each.items() if model.layers[i].attn.window is None) * max_context  # windows do not grow with the context
    if growing > free:
        raise OutriderError(
            f"{max_context} tokens of context need {growing / 2**30:.1f} GiB of K/V and {free / 2**30:.1f} GiB of memory are free: "
            f"lower --max-context"
        )
    tokens = config.kv_tokens or min(config.max_batch * max_context, max(max_context, KV_BYTES // per_token)) + config.page_size
    return Room(max_context, tokens)
