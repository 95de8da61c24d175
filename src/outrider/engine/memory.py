"""Plans the K/V memory: how many positions fit. On a CPU the default is small; on a GPU it takes what weights and
activations leave of the granted share (`EngineConfig.gpu_memory`), divided between full layers, which keep every
position, and sliding ones such that most sequences of a typical length fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..cache.store import row_width
from ..config import EngineConfig
from ..models.config import ModelConfig
from ..models.decoder import TextModel
from ..models.inspect import row_numbers, work_bytes
from ..ops.backend import Capabilities
from ..platforms.memory import available_bytes
from ..types import MAX_DRAFT, AttnSpec, OutriderError
from .prefill_budget import max_packed_rows, max_prefill_rows

UNKNOWN = 1 << 62  # bytes, if the system does not report how many are free
CPU_KV_BYTES = 2 << 30  # K/V of all sequences together on a CPU, unless one alone may need more
FREE_SHARE = 8  # one sequence's K/V may take an eighth of the free memory by default
MIN_CONTEXT = 4096  # tokens; the smallest default, unless the model's limit is lower
SERVED_CONTEXT = 8192  # tokens of context that a GPU's pages are divided for
# last rows of a captured pass, and pieces of 8,192 positions as attention cuts them (ops/triton/attention.py)
SUMMED_ROWS = 65
ATTENTION_PIECES = 88


@dataclass(frozen=True)
class KVBudget:
    max_context: int  # prompt and answer of one sequence
    tokens: int  # positions of K/V of full layers in all
    window_tokens: int | None = None  # of sliding layers; None: as many as all slots can ever hold
    pass_rows: int = 0  # rows of the largest prefill pass captured as a CUDA graph
    packed_rows: int = 0  # of several prompt chunks in one pass; 0: as many as are independent

    @classmethod
    def of(cls, config: EngineConfig, target: TextModel, dtype: torch.dtype, extra: Sequence[AttnSpec]) -> KVBudget:
        """For an engine with K/V of this type. extra: a drafter's own K/V layers."""
        model = target.config
        can = target.ops.capabilities
        device = target.device
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            return cls.on_gpu(config, model, can, dtype=dtype, free=free, total=total, extra=extra)
        batch = config.max_batch or can.sequences
        free = max(0, free_bytes(device) - penalty_bytes(batch, model.vocab_size))
        budget = plan_kv_memory(config, model, dtype, free=free, batch=batch, budget=None, extra=extra)
        passes = max_prefill_rows(model, can)
        return replace(budget, pass_rows=passes, packed_rows=max_packed_rows(model, can, passes, spare=0))

    @classmethod
    def on_gpu(
        cls,
        config: EngineConfig,
        model: ModelConfig,
        can: Capabilities,
        dtype: torch.dtype,
        *,
        free: int,
        total: int,
        extra: Sequence[AttnSpec] = (),
    ) -> KVBudget:
        """For a GPU of `total` bytes of which `free` are free with the weights loaded. The GPU need not be here:
        `outrider inspect` and `predict` plan for cards of a table."""
        batch = config.max_batch or can.sequences
        passes = max_prefill_rows(model, can)
        penalties = penalty_bytes(batch, model.vocab_size)
        work = work_bytes(model.vocab_size, min(can.graph_rows, batch * (MAX_DRAFT + 1)))
        outside = (1.0 - config.gpu_memory) * total
        room = int(free - outside) - work - captured_bytes(model, passes) - penalties
        budget = plan_kv_memory(
            config, model, dtype, free=max(0, free - penalties), batch=batch, budget=room, extra=extra
        )
        return replace(budget, pass_rows=passes, packed_rows=max_packed_rows(model, can, passes, spare=int(outside)))


@dataclass(frozen=True)
class KVOptions:
    """Settings of an engine's K/V that its configuration does not have."""

    dtype: torch.dtype | None = None  # None: the model's
    span_rows: int = 0  # most rows of an image
    # several processes that share a model must have the same budget
    agree: Callable[[KVBudget], KVBudget] = lambda budget: budget


def free_bytes(device: torch.device) -> int:
    """Free memory of the device, on a CPU within the container's limit; UNKNOWN if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = available_bytes() or UNKNOWN
    return min(free, container_bytes(Path("/sys/fs/cgroup")))


def container_bytes(root: Path) -> int:
    """Memory left within a container's limit (cgroups v2 or v1; page cache counts as free); UNKNOWN without one."""
    for limit, used, stat, files in (
        ("memory.max", "memory.current", "memory.stat", "file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_cache"),
    ):
        with suppress(OSError, ValueError):
            counts = dict(line.split() for line in (root / stat).read_text(encoding="ascii").splitlines())
            most = (root / limit).read_text(encoding="ascii").strip()
            if most != "max":
                used_bytes = int((root / used).read_text(encoding="ascii")) - int(counts.get(files, 0))
                return max(0, int(most) - max(0, used_bytes))
    return UNKNOWN


def penalty_bytes(batch: int, vocab: int) -> int:
    """Bytes of the penalties' tables (`SlotSampling`): for each slot and the padding row, which tokens the prompt has
    (bool) and how often each was emitted (int32); and of the rows that a step of all sequences gathers from them."""
    return (batch + 1 + batch) * vocab * (1 + 4)


def captured_bytes(model: ModelConfig, rows: int) -> int:
    """Bytes of captured prefill passes: one layer's activations of every row of the largest, and partial attention
    sums by split of the context."""
    if not rows:
        return 0
    sums = max(layer.attn.heads * layer.attn.head_dim for layer in model.layers)
    return 2 * rows * row_numbers(model) + 4 * SUMMED_ROWS * ATTENTION_PIECES * sums


def spare_bytes(config: EngineConfig, device: torch.device) -> int:
    """Bytes of a GPU outside the share granted (`EngineConfig.gpu_memory`); 0 on a CPU."""
    return int((1.0 - config.gpu_memory) * torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else 0


def plan_kv_memory(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    free: int,
    batch: int = 8,
    budget: int | None = None,
    extra: Sequence[AttnSpec] = (),
) -> KVBudget:
    """The configured context; if not configured, as much as the model supports and the memory holds. batch: number of
    sequences if not configured; budget: bytes for K/V on a GPU; extra: a drafter's own K/V layers."""
    batch = config.max_batch or batch
    size = torch.empty((), dtype=dtype).element_size()
    specs = [*(model.layers[i].attn for i in model.kv_layers), *extra]
    each = [2 * attn.kv_heads * row_width(attn.head_dim, dtype) * size for attn in specs]  # bytes per position
    per_token = sum(each)
    full = sum(n for n, attn in zip(each, specs) if attn.window is None)  # windows do not grow with the context
    max_context = min(config.max_context or model.max_context, model.max_context)
    if budget is not None and config.kv_tokens is None:
        window = max(attn.window or 0 for attn in specs)
        return _divided(config, max_context, full, sliding=per_token - full, window=window, batch=batch, budget=budget)
    if config.max_context is None and budget is None:
        max_context = min(
            model.max_context, max(MIN_CONTEXT, max(CPU_KV_BYTES, free // FREE_SHARE) // per_token - config.page_size)
        )
    if full * max_context > free:
        raise _too_long(max_context, full * max_context, free)
    tokens = config.kv_tokens
    if tokens is None:
        tokens = min(batch * max_context, max(max_context, CPU_KV_BYTES // per_token)) + config.page_size
    return KVBudget(max_context, tokens)


def _divided(
    config: EngineConfig, max_context: int, full: int, sliding: int, window: int, batch: int, budget: int
) -> KVBudget:
    """A GPU's budget divided between full and sliding layers. full, sliding: bytes per position of all such layers."""
    page = config.page_size
    window_positions = window + MAX_DRAFT + 1 + 2 * page  # positions that a decoding sequence keeps in sliding layers
    chunk = config.prefill_chunk or 1024
    # Space for prompts to write ahead of their window: a 24th, with which 31B on an H200 serves 40 sequences of 8k.
    # Fewer sequences leave more for prompts.
    spare = max(chunk, min(8 * chunk, budget // (24 * sliding))) if sliding else 0
    bytes_per_sequence = min(max_context, SERVED_CONTEXT) * full + window_positions * sliding
    served = max(1, min(batch, (budget - spare * sliding) // max(1, bytes_per_sequence)))
    if full:  # one sequence must be able to use the whole context, even if few others then fit
        left = budget - spare * sliding - (max_context + page) * full
        served = max(1, min(served, left // max(1, window_positions * sliding))) if sliding else served
    window_tokens = served * window_positions + spare
    tokens = (budget - window_tokens * sliding) // full if full else batch * max_context + page
    tokens = min(tokens, batch * max_context + page)
    if tokens < max_context + page:
        if config.max_context is None and tokens <= 2 * page:
            reason = f"weights and working memory leave {max(0, budget) / 2**30:.1f} GiB for K/V, too little"
            raise OutriderError(f"{reason}: `outrider inspect MODEL --gpu CARD` lists options that need less")
        if config.max_context is not None:
            raise _too_long(max_context, (max_context + page) * full + window_tokens * sliding, budget)
        max_context = tokens - page
    return KVBudget(max_context, tokens, window_tokens if sliding else None)


def _too_long(context: int, need: int, free: int) -> OutriderError:
    sizes = f"{need / 2**30:.1f} GiB of K/V and {max(0, free) / 2**30:.1f} GiB of memory are free"
    return OutriderError(f"{context} tokens of context need {sizes}: lower --max-context")
