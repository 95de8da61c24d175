"""The composition root: builds an engine from weights, tokenizer, drafter, controller, adapters and the encoders of
images and sound."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from . import __version__
from . import ops as ops_module
from .cache.prefix_store import PrefixStoreOptions
from .config import EngineConfig, LoadSettings
from .engine.adapters import AdapterPool, adaptable_weights
from .engine.audio import AudioEncoder
from .engine.engine import Engine
from .engine.images import ImageEncoder
from .engine.memory import KVBudget, KVOptions
from .engine.text import Tokenizer
from .models.audio import AudioModel
from .models.audio_config import NO_AUDIO, NO_AUDIO_MMPROJ
from .models.decoder import TextModel
from .models.split import SOLO, Collectives, TPRank
from .models.vision import VisionModel
from .models.vision_config import NO_MMPROJ, NO_VISION, VisionConfig
from .ops.cpu.ops import default_threads
from .ops.reference import Backend, ReferenceOps
from .parallel import ProcessGroup
from .spec import acceptance as cards
from .spec.controller import Controller
from .spec.cost import FORMAT, CostTable, machine_name
from .spec.drafter import Drafter
from .spec.loader import pick_drafter
from .spec.ngram import NGRAM
from .types import OutriderError
from .weights import hub
from .weights.adapter import load_adapter
from .weights.audio import audio_config, has_audio, load_audio
from .weights.files import Files, check_draft_model, fingerprint, text_files
from .weights.load import load_target
from .weights.vision import has_vision, load_vision, vision_config

log = logging.getLogger("outrider")
Say = Callable[[str], None]  # tells the user a line


class Assembled(NamedTuple):
    engine: Engine
    drafter_note: str  # one line for the user: which drafter is used
    weight_bytes: int
    cost_key: str | None  # key of its measured costs on disk; None: costs are not measured
    vision: ImageEncoder | str  # the image encoder, or the reason why there is none
    audio: AudioEncoder | str  # the audio encoder, likewise


@dataclass(frozen=True)
class Place:
    """The device, data type and kernels of a model."""

    device: torch.device
    dtype: torch.dtype
    ops: Backend
    threads: int | None  # of CPU kernels; None: chosen by the backend
    group: ProcessGroup | None  # processes that share the model

    @property
    def together(self) -> Collectives:
        return SOLO if self.group is None else self.group

    @property
    def tp(self) -> TPRank | None:
        return None if self.group is None else self.group.tp

    @property
    def leads(self) -> bool:
        """This process decides for all: it is alone or rank 0."""
        return self.group is None or self.group.tp.rank == 0

    @property
    def card(self) -> str | None:
        """The name of the GPU; None on a CPU."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None


class Agreement:
    """The K/V budget that all processes of a group share: the smallest."""

    def __init__(self, group: ProcessGroup | None):
        self.group = group
        self.reached = False

    def __call__(self, budget: KVBudget) -> KVBudget:
        if self.group is None:
            return budget
        self.reached = True
        smallest = self.group.all_reduce_min([-1 if value is None else value for value in astuple(budget)])
        return KVBudget(*(None if value < 0 else value for value in smallest))  # type: ignore[arg-type]


def assemble(model: str, settings: LoadSettings, say: Say, group: ProcessGroup | None = None) -> Assembled:
    """Build an engine, or with a group this process's part of it. An error in one process is raised in all."""
    agree = Agreement(group)
    try:
        return _assemble(model, settings, say, place=choose_place(settings, group), agree=agree)
    except OutriderError as error:
        if group is not None and not agree.reached:
            group.all_reduce_min((), str(error))  # raises here and everywhere
        raise


def choose_place(settings: LoadSettings, group: ProcessGroup | None) -> Place:
    device = ops_module.place(settings.device) if group is None else group.device
    if device.index is not None:
        torch.cuda.set_device(device)  # kernels are launched on the current device, wherever their tensors are
    dtype: torch.dtype = getattr(torch, settings.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    threads = settings.threads
    if group is not None and device.type == "cpu":
        threads = threads or max(1, default_threads() // group.tp.world)  # the processes share the cores
    ops = ops_module.choose(device, settings.ops, threads)
    if ops.name == "cpu" or (group is not None and device.type == "cpu"):
        # the kernels have their own threads; torch's threads would spin next to them and halve the speed
        torch.set_num_threads(1)
    return Place(device=device, dtype=dtype, ops=ops, threads=threads, group=group)


def _assemble(model: str, settings: LoadSettings, say: Say, place: Place, agree: Agreement) -> Assembled:
    check_draft_vocabulary(model, settings)
    files = hub.resolve(model, weights=settings.load_format == "auto")
    images = image_config(files, settings)
    loading_tokenizer = start_loading_tokenizer(files, settings, None if isinstance(images, str) else images)

    def common_token_ids() -> Iterable[int]:
        return () if loading_tokenizer is None else loading_tokenizer.result().common_token_ids()

    target, num_bytes = load_target_model(files, settings, place)
    if settings.quantize is not None and settings.load_format == "auto":
        measured = f"`outrider inspect {model} --quantize {settings.quantize}` measures what that costs"
        say(f"weights rounded to {settings.quantize}: {measured}")
    drafter, drafter_note = pick_drafter(files, settings, target, dtype=place.dtype, always=common_token_ids)
    names = drafter_names(drafter, settings)
    say(drafter_note)
    tokenizer = None if loading_tokenizer is None else loading_tokenizer.result()
    if place.group is not None:
        gib = num_bytes / 2**30
        say(f"tensor parallel: {place.group.tp.world} processes, {gib:.2f} GiB of weights in the first")
    adapters = load_adapters(target, settings, say) if place.group is None else None
    check_trained_adapter(drafter, adapters, say)
    vision = images if isinstance(images, str) else load_images(files, settings, images, place=place)
    audio = load_sound(files, settings, place)
    encoders = [encoder for encoder in (vision, audio) if not isinstance(encoder, str)]
    num_bytes += sum(encoder.model.nbytes for encoder in encoders)
    span_rows = 0 if isinstance(images, str) else max_image_rows(images, settings)
    kv = KVOptions(place.ops.kv_dtype(place.dtype, settings.engine.kv_dtype), span_rows, agree)
    engine = Engine(
        # one call for a whole model cannot exchange sums
        place.ops.compile(target) if place.group is None else target,
        tokenizer,
        settings.engine,
        spec=settings.spec,
        drafter=drafter,
        controller=Controller(CostTable(), names, acceptance_profiles(drafter, settings.engine, place.ops)),
        kv=kv,
        adapters=adapters,
        prefix_store=prefix_store_options(files, settings, place, drafter=drafter, kv_dtype=kv.dtype or target.dtype),
    )
    if place.device.type == "cuda":
        size_kv = f"{engine.kv_budget.tokens:,} tokens in {engine.store.nbytes / 2**30:.1f} GiB"
        say(f"K/V: {size_kv}; up to {engine.max_batch} sequences, {engine.max_context:,} tokens each")
    measures_costs = settings.spec.draft_tokens is None and bool(names)
    key = cost_key(model, settings, place, drafter=drafter, max_batch=engine.max_batch) if measures_costs else None
    return Assembled(engine, drafter_note, num_bytes, cost_key=key, vision=vision, audio=audio)


def check_draft_vocabulary(model: str, settings: LoadSettings) -> None:
    """Refuse a draft model with another vocabulary before weights are fetched or read."""
    drafter = settings.drafters[0]
    if drafter.startswith("draft:"):
        check_draft_model(hub.resolve(model, weights=False), hub.resolve(drafter.removeprefix("draft:"), weights=False))


def start_loading_tokenizer(
    files: Files, settings: LoadSettings, images: VisionConfig | None
) -> Future[Tokenizer] | None:
    """The tokenizer, loaded by a thread while the kernels lay weights out and need no interpreter. None: dummy models
    have none."""
    if settings.load_format == "dummy":
        return None
    image_text = None if images is None else images.image_text
    return ThreadPoolExecutor(1).submit(lambda: Tokenizer(text_files(files), image_text=image_text))


def load_target_model(files: Files, settings: LoadSettings, place: Place) -> tuple[TextModel, int]:
    """The target, not yet compiled, and the bytes of its weights."""
    config, weights, _ = load_target(
        files,
        place.device,
        place.dtype,
        ops=place.ops,
        quantize=settings.quantize,
        load_format=settings.load_format,
        seed=settings.seed,
        tp=place.tp,
    )
    return TextModel(config, weights, place.ops, together=place.together), sum(
        weight.nbytes for weight in weights.values()
    )


def check_trained_adapter(drafter: Drafter | None, adapters: AdapterPool | None, say: Say) -> None:
    """Say so if the drafter was trained for an adapter that is not loaded."""
    if drafter is None or adapters is None or drafter.origin.trained_for is None:
        return
    digest = drafter.origin.trained_for.partition("+")[2]
    if digest:
        loaded = [adapters.get(name).digest.hex() for name in adapters.paths]
        if digest not in loaded:
            say("the drafter was trained for another adapter, so expect fewer accepted drafts")


def drafter_names(drafter: Drafter | None, settings: LoadSettings) -> tuple[str, ...]:
    """The names that the controller may choose from."""
    if settings.drafter == "none":
        return ()
    members = drafter.members if drafter is not None else ()
    return (*(member.name for member in members), NGRAM)


def acceptance_profiles(
    drafter: Drafter | None, config: EngineConfig, ops: Backend
) -> dict[str, cards.AcceptanceProfile]:
    """How often each drafter is right, before anything was observed."""
    members = drafter.members if drafter is not None else ()
    profiles = {member.name: member.profile for member in members if member.profile is not None}
    captured = ops.capabilities.graphs if config.graphs is None else config.graphs
    if captured:  # no draft of a captured step ends by its confidence
        return {name: replace(profile, trust=()) for name, profile in profiles.items()}
    return profiles


def prefix_store_options(
    files: Files, settings: LoadSettings, place: Place, drafter: Drafter | None, kv_dtype: torch.dtype
) -> PrefixStoreOptions | None:
    """The folder of prefixes on disk and the key of their bits; None: they are not stored."""
    config = settings.engine
    if config.prefix_store is None:
        return None
    ops = place.ops
    content = fingerprint(files) if settings.load_format == "auto" else f"dummy {files.name} {settings.seed}"
    kernels = f"{ops.name} {ops.version}"
    if ops.name != "cpu":  # its version is a hash of its sources
        kernels += f" {__version__} {torch.__version__} {place.card or ''}"
    chunk = config.prefill_chunk or ops.capabilities.prompt_chunk
    cut = "" if ops.capabilities.prompts_independent else f"chunk {chunk}"
    identity = f"{content} {place.dtype} {kernels} {settings.quantize} kv {kv_dtype} {config.page_size} {cut}"
    if drafter is not None and drafter.origin.content:
        identity += f" {drafter.origin.content}"
    folder = Path(os.path.expanduser(config.prefix_store))
    return PrefixStoreOptions(folder, max_bytes=int(config.prefix_store_size * 2**30), identity=identity)


def cost_key(model: str, settings: LoadSettings, place: Place, drafter: Drafter | None, max_batch: int) -> str:
    """The key of measured costs, as JSON: if any part of it changes, costs are measured again."""
    members = drafter.members if drafter is not None else ()
    drafters = [
        {"kind": one.name, "source": one.origin.source, "trained_for": one.origin.trained_for} for one in members
    ]
    return json.dumps(
        {
            "machine": machine_name(place.card, place.threads),
            "model": model,
            "dtype": str(place.dtype),
            "ops": [place.ops.name, place.ops.version],
            "quantize": settings.quantize,
            "quantize_drafter": settings.quantize_drafter,
            "drafters": drafters,
            "max_batch": max_batch,
            "kv_dtype": settings.engine.kv_dtype,
            "processes": 1 if place.group is None else place.group.tp.world,
            "version": [__version__, FORMAT],
        },
        sort_keys=True,
    )


def image_config(files: Files, settings: LoadSettings) -> VisionConfig | str:
    """The configuration of the image encoder, or the reason why there is none."""
    if not settings.vision:
        return "images are off: the model was loaded without its vision weights (--no-vision)"
    config = vision_config(files)
    if config is None:
        return NO_MMPROJ if files.gguf is not None else NO_VISION
    if settings.load_format != "dummy" and not has_vision(files):
        return NO_VISION
    return config


def max_image_rows(config: VisionConfig, settings: LoadSettings) -> int:
    return config.tokens or settings.image_tokens


def load_images(files: Files, settings: LoadSettings, config: VisionConfig, place: Place) -> ImageEncoder | str:
    """The image encoder, or the reason why this process has none."""
    if not place.leads:
        return "images are read by rank 0"
    dummy_seed = settings.seed if settings.load_format == "dummy" else None
    weights = load_vision(files, config, place.device, dtype=place.dtype, dummy_seed=dummy_seed)
    on_gpu = place.device.type == "cuda"
    threads = settings.threads or default_threads()
    model = VisionModel(config, weights, place.ops if on_gpu else ReferenceOps(), threads=1 if on_gpu else threads)
    rows = max_image_rows(config, settings)
    return ImageEncoder(model, rows, settings.max_images, max_pixels=settings.max_image_pixels)


def load_sound(files: Files, settings: LoadSettings, place: Place) -> AudioEncoder | str:
    """The audio encoder, or the reason why this process has none."""
    if not settings.audio:
        return "sound is off: the model was loaded without its audio weights (--no-audio)"
    config = audio_config(files)
    dummy_seed = settings.seed if settings.load_format == "dummy" else None
    if config is None or (dummy_seed is None and not has_audio(files)):
        return NO_AUDIO_MMPROJ if files.gguf is not None else NO_AUDIO
    if not place.leads:
        return "sound is read by rank 0"
    weights = load_audio(files, config, place.device, dtype=place.dtype, dummy_seed=dummy_seed)
    threads = 1 if place.device.type == "cuda" else settings.threads or default_threads()
    return AudioEncoder(AudioModel(config, weights, threads), settings.max_clips)


def load_adapters(target: TextModel, settings: LoadSettings, say: Say) -> AdapterPool:
    """Loads the settings' adapters, before K/V takes the rest of a GPU's memory."""
    to = (target.config, target.ops, target.dtype, target.device, adaptable_weights(target))
    pool = AdapterPool(target, lambda name, path: load_adapter(name, path, *to), settings.max_adapters)
    for name, path in settings.adapters.items():
        adapter = pool.add(name, str(path))
        if pool.slots is not None:
            pool.slots.place([adapter])
    if settings.adapters:
        slots = "" if pool.slots is None else f" in {pool.slots.count} slots"
        say(f"adapters: {', '.join(settings.adapters)} ({pool.nbytes / 2**20:.1f} MiB{slots})")
    return pool
