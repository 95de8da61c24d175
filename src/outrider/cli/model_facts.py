"""Facts of a model from its configuration: its files and sizes, drafters, and its memory on a card."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..bench.machines import Hardware
from ..config import LoadSettings
from ..models.block_config import BlockConfig, is_block
from ..models.builtin_configs import BUILTIN_CONFIGS
from ..models.config import DrafterConfig, ForeignDict, ModelConfig
from ..models.inspect import drafter_report, drafter_size, model_size
from ..ops.backend import GPU_CAPABILITIES
from ..server.fair import SPARE
from ..types import AttnSpec, OutriderError, require
from ..weights import hub
from ..weights.audio import audio_config
from ..weights.files import Files, check_draft_model, model_config, translate
from ..weights.sizes import StoredSize, stored_size
from ..weights.vision import vision_config
from .memory_plan import CPU_SEQUENCES, LoadedBytes, MemoryPlan, plan_memory, remedies


def on_card(model: str, load: LoadSettings, on: Hardware) -> ForeignDict:
    """Whether a model with these settings fits a machine, with how much context, and what would change that."""

    def planned(settings: LoadSettings) -> MemoryPlan:
        return plan_of(model, settings, on)

    plan = planned(load)
    files, config, _ = read(model)
    has_media = vision_config(files) is not None or audio_config(files) is not None
    limit = min(load.engine.max_context or config.max_context, config.max_context)
    options = remedies(load, planned, has_media) if plan.context < limit and not on.is_cpu else []
    about = {name: value for name, value in asdict(plan).items() if name != "reason"}
    named = [{"options": remedy.options, "context": remedy.context} for remedy in options]
    return {
        "name": on.label,
        "fits": plan.fits,
        **about,
        "reason": plan.reason.partition(": `outrider")[0] or None,
        "would_fit": named,
    }


CPU_ROUNDED = {"int4": 0.5625, "int8": 1.0625}  # bytes per weight that `--quantize` makes on a CPU, tables included


@dataclass(frozen=True)
class WeightBytes:
    total: float
    token: float  # bytes that one token reads


def loaded_weights(config: ModelConfig, stored: StoredSize, quantize: str | None, on: Hardware | None) -> WeightBytes:
    """Weights as a machine holds them; None: as stored in the checkpoint. stored: with `quantize`, on a GPU."""
    if on is not None and not on.is_cpu:
        return WeightBytes(stored.gpu, stored.gpu_token)
    if on is None:
        return WeightBytes(stored.total, stored.token)
    if quantize is None:
        return WeightBytes(stored.cpu, stored.cpu_token)
    if quantize not in CPU_ROUNDED:
        raise OutriderError(f"--quantize {quantize} is for GPUs: a CPU takes {' or '.join(CPU_ROUNDED)}")
    size = model_size(config)
    return WeightBytes(size.total * CPU_ROUNDED[quantize], size.active * CPU_ROUNDED[quantize])


def with_sequences(load: LoadSettings, max_concurrent: int | None, on: Hardware, least: int = 1) -> LoadSettings:
    """Settings of `outrider serve --max-concurrent N`; None: its default, at least `least` sequences."""
    if max_concurrent is None:
        default = CPU_SEQUENCES if on.is_cpu else GPU_CAPABILITIES.sequences - SPARE
        return load if least <= default else load.changed({"max_batch": least + SPARE})
    require(max_concurrent >= 1, f"--max-concurrent must be at least 1, got {max_concurrent}")
    return load.changed({"max_batch": max(max_concurrent, least) + SPARE})


def plan_of(model: str, load: LoadSettings, on: Hardware) -> MemoryPlan:
    """The memory that `outrider serve` would plan on this machine with these settings."""
    files, config, stored = read(model, None if on.is_cpu else load.quantize)
    vision = vision_config(files) if load.vision else None
    audio = audio_config(files) if load.audio else None
    helpers = [drafter_of(name, files, config, token=1.0, kv_item=2.0, on=on) for name in drafter_names(files, load)]
    usable = [helper for helper in helpers if helper.about["fits"]]
    loaded = LoadedBytes(
        weights=loaded_weights(config, stored, quantize=load.quantize, on=on).total,
        drafter=sum(helper.nbytes for helper in usable),
        media=sum(encoder.nbytes() for encoder in (vision, audio) if encoder is not None),
    )
    extra = [attn for helper in usable for attn in helper.kv]
    return plan_memory(config, loaded, on=on, engine=load.engine, gpus=load.tensor_parallel, extra=extra)


def read(name: str, quantize: str | None = None) -> tuple[Files, ModelConfig, StoredSize]:
    """A model's files and configuration, and the size of its weights (quantize: the GPU's format for dense matrices).
    Gemma 4's configurations are built in: nothing is downloaded for them."""
    files = hub.resolve(name, weights=False)
    config = model_config(files)
    return files, config, stored_size(files, config, quantize)


def drafter_names(files: Files, load: LoadSettings) -> list[str]:
    """The drafters to describe: those named; for `auto`, the model's own if its configuration is at hand."""
    if load.drafter in ("none", "ngram"):
        return []
    if load.drafter != "auto":
        return list(load.drafters)
    where, _ = hub.auto_drafter(files)
    at_hand = where is not None and (where in BUILTIN_CONFIGS or Path(where).exists())
    return [where] if where is not None and at_hand else []


@dataclass(frozen=True)
class DrafterFacts:
    about: ForeignDict  # `show`'s report
    nbytes: float  # weights
    kv: tuple[AttnSpec, ...] = ()  # layers with their own K/V


def drafter_of(
    name: str, target_files: Files, target: ModelConfig, *, token: float, kv_item: float, on: Hardware | None = None
) -> DrafterFacts:
    """token: bytes that a token of the target reads. A step of a block drafter drafts all tokens (EAGLE-3: one); a
    drafter without a head also reads the target's."""
    if name.startswith("draft:"):
        files, model, stored = read(name[6:])
        reason = None
        try:
            check_draft_model(target_files, files)
        except OutriderError as error:
            reason = str(error)
        parameters = model_size(model).total
        weights = loaded_weights(model, stored, quantize=None, on=on)
        about = drafter_report(model.model_type, reason, parameters, step=weights.token, target_token=token)
        return DrafterFacts(about, weights.total, tuple(model.layers[i].attn for i in model.kv_layers))
    files = hub.resolve(name, "drafter", weights=False)
    if is_block(files.config):
        return block_facts(files, target, token=token, kv_item=kv_item)
    config = translate(DrafterConfig.from_hf, files)
    reason = config.misfit(target)
    size = drafter_size(config)
    stored = stored_size(files, config)
    facts = {
        "reads": list(config.read_layers(target)) if reason is None else None,
        "clusters": config.clusters,
        "clusters_scored": config.cluster_top,
        "draft_tokens": config.draft_tokens,
    }
    step = size.step * (stored.total / stored.parameters)
    about = drafter_report(config.model_type, reason, size.total, step=step, target_token=token, **facts)
    return DrafterFacts(about, stored.total)


def block_facts(files: Files, target: ModelConfig, token: float, kv_item: float) -> DrafterFacts:
    block = translate(BlockConfig.from_hf, files)
    reason = block.misfit(target)
    block = replace(block, taps=block.tapped(target))
    stored = stored_size(files, block)
    kv = sum(2 * layer.attn.kv_heads * layer.attn.head_dim for layer in block.layers)
    facts: ForeignDict = {
        "layout": block.layout,
        "taps": list(block.taps or ()),
        "block": block.block,
        "layers": len(block.layers),
        "kv_bytes_per_token": round(kv * kv_item),
        "draft_tokens": block.max_tokens,
    }
    about = drafter_report(block.kind, reason, stored.parameters, step=stored.token, target_token=token, **facts)
    return DrafterFacts(about, stored.total, tuple(layer.attn for layer in block.layers))
