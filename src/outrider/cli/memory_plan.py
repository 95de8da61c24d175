"""Memory of a model on any card, present or not: the plan that `serve` makes at its start, for `inspect` and
`predict`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from ..bench.machines import Hardware
from ..config import EngineConfig, LoadSettings
from ..engine.memory import KVBudget, penalty_bytes, plan_kv_memory
from ..models.config import ModelConfig
from ..models.split import TPRank, split_target
from ..ops.backend import GPU_CAPABILITIES
from ..server.fair import SPARE
from ..types import AttnSpec, OutriderError

KV_TYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
CPU_SEQUENCES = 8  # default of `outrider serve` on a CPU
NUM_REMEDIES = 3
MAX_GPU_MEMORY = 0.97  # share of a card available if no other program uses it
USEFUL_GAIN = 1.1  # a remedy must give at least this factor of context


@dataclass(frozen=True)
class LoadedBytes:
    """Bytes loaded before K/V takes the remaining memory."""

    weights: float
    drafter: float = 0.0
    media: float = 0.0  # the encoders of images and sound

    @property
    def total(self) -> float:
        return self.weights + self.drafter + self.media


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of one card, in bytes."""

    memory: int
    granted: int  # bytes that the engine may use (`--gpu-memory`)
    weights: int
    drafter: int
    media: int
    context: int  # maximum tokens of one sequence; 0: the model does not fit
    tokens: int  # K/V positions of all sequences together
    reason: str  # why it does not fit; empty if it does

    @property
    def fits(self) -> bool:
        return self.context > 0


def plan_memory(
    config: ModelConfig,
    loaded: LoadedBytes,
    on: Hardware,
    engine: EngineConfig,
    gpus: int = 1,
    extra: Sequence[AttnSpec] = (),
) -> MemoryPlan:
    """The plan of `outrider serve` with these settings. gpus: cards that share the weights (`--tensor-parallel`);
    drafter and encoders are whole on the first. extra: a drafter's own K/V layers."""
    dtype = KV_TYPES.get(engine.kv_dtype, torch.bfloat16)
    if gpus > 1:
        config, _ = split_target(config, TPRank(0, gpus), lambda name: 1)
    share = replace(loaded, weights=loaded.weights / gpus)
    total = on.memory_bytes
    free = int(total - share.total)
    granted = total if on.is_cpu else int(engine.gpu_memory * total)
    budget = KVBudget(0, 0)
    reason = f"{share.total / 1e9:.1f} GB are loaded before any K/V, and {granted / 1e9:.1f} GB may be used"
    if share.total < granted:
        try:
            if on.is_cpu:
                batch = engine.max_batch or CPU_SEQUENCES
                free_for_kv = max(0, free - penalty_bytes(batch, config.vocab_size))
                budget = plan_kv_memory(engine, config, dtype, free=free_for_kv, batch=batch, extra=extra)
            else:
                budget = KVBudget.on_gpu(
                    engine, config, can=GPU_CAPABILITIES, dtype=dtype, free=free, total=total, extra=extra
                )
            reason = ""
        except OutriderError as error:
            reason = str(error)
    return MemoryPlan(
        memory=total,
        granted=granted,
        weights=round(share.weights),
        drafter=round(share.drafter),
        media=round(share.media),
        context=budget.max_context,
        tokens=budget.tokens,
        reason=reason,
    )


@dataclass(frozen=True)
class Remedy:
    """Options with which a model fits, or has more context."""

    options: str
    context: int


Planner = Callable[[LoadSettings], MemoryPlan]


def remedies(settings: LoadSettings, plan_for: Planner, has_media: bool) -> list[Remedy]:
    """Options that make a model fit; if it fits already, options that leave notably more context. Each leaves more than
    the one before it. plan_for raises OutriderError for settings that this model cannot have."""
    best = plan_for(settings).context
    fitting: list[Remedy] = []
    for options, changed in changes(settings, has_media):
        plan = None
        with suppress(OutriderError):
            plan = plan_for(changed)
        more_cards = changed.tensor_parallel > settings.tensor_parallel
        if plan is None or (plan.context < max(1, USEFUL_GAIN * best) and not (more_cards and plan.fits)):
            continue
        fitting.append(Remedy(options, plan.context))
        best = max(best, plan.context)
        if more_cards or len(fitting) == NUM_REMEDIES:
            break
    return fitting


def changes(settings: LoadSettings, has_media: bool) -> Iterator[tuple[str, LoadSettings]]:
    """Options with their settings: single ones, then rounded weights, then combinations, then more cards."""
    savings = single_savings(settings, has_media)
    for options, change in savings:
        yield options, settings.changed(change)
    starts = [("", settings)]
    if settings.quantize is None:
        starts.append(("--quantize int4", settings.changed({"quantize": "int4"})))
        yield "--quantize int8", settings.changed({"quantize": "int8"})
        yield starts[1]
    for together, changed in starts:
        for options, change in savings:
            together = f"{together} {options}".strip()
            changed = changed.changed(change)
            yield together, changed
    if settings.tensor_parallel == 1:
        for gpus in (2, 4, 8):
            yield f"--tensor-parallel {gpus}", settings.changed({"tensor_parallel": gpus})


def single_savings(settings: LoadSettings, has_media: bool) -> list[tuple[str, dict[str, object]]]:
    """Options that need less memory without rounding weights, the least costly first."""
    savings: list[tuple[str, dict[str, object]]] = []
    if settings.engine.max_batch is None:
        savings.append((f"--max-concurrent {CPU_SEQUENCES}", {"max_batch": CPU_SEQUENCES + SPARE}))
    if has_media and (settings.vision or settings.audio):
        savings.append(("--no-vision --no-audio", {"vision": False, "audio": False}))
    if settings.engine.kv_dtype == "auto":
        savings.append(("--kv-dtype fp8", {"kv_dtype": "fp8"}))
    if settings.engine.gpu_memory < MAX_GPU_MEMORY:
        savings.append((f"--gpu-memory {MAX_GPU_MEMORY}", {"gpu_memory": MAX_GPU_MEMORY}))
    if settings.engine.max_context is not None:
        savings.append(("a smaller --max-context", {"max_context": None}))
    return savings
