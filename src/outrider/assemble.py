"""The composition root: builds an engine from weights, tokenizer, drafter, controller, adapters and the encoders of
images and sound."""

from __future__ import annotations

import json
import logging
import os
import re
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
from .models.block_config import is_block
from .models.decoder import TextModel
from .models.drafter import MTPNet
from .models.split import SOLO, Collectives, TPRank
from .models.vision import VisionModel
from .models.vision_config import NO_MMPROJ, NO_VISION
from .ops.cpu.ops import default_threads
from .ops.formats import DeviceWeight
from .ops.reference import Backend, ReferenceOps
from .parallel import ProcessGroup
from .spec import acceptance as cards
from .spec import draft_model
from .spec.block import BlockDrafter, load_block
from .spec.controller import Controller
from .spec.cost import FORMAT, CostTable, machine_name
from .spec.draft_model import DraftModel
from .spec.drafter import Drafter, DrafterOrigin, DrafterPair
from .spec.mtp import MTPDrafter
from .types import OutriderError
from .weights import hub
from .weights.adapter import load_adapter
from .weights.audio import audio_config, has_audio, load_audio
from .weights.files import Files, check_draft_model, fingerprint, text_files
from .weights.load import load_drafter, load_target
from .weights.vision import has_vision, load_vision, vision_config

log = logging.getLogger("outrider")
Say = Callable[[str], None]  # tells the user a line
TokenIds = Callable[[], Iterable[int]]


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
    ops = place.ops
    spec = settings.spec
    engine_config = settings.engine
    first_drafter = settings.drafters[0]
    if first_drafter.startswith("draft:"):  # another vocabulary is refused before weights are fetched or read
        check_draft_model(hub.resolve(model, weights=False), hub.resolve(first_drafter[6:], weights=False))
    files = hub.resolve(model, weights=settings.load_format == "auto")
    loading_tokenizer: Future[Tokenizer] | None = None
    if settings.load_format != "dummy":
        # made while the kernels lay weights out and need no interpreter
        loading_tokenizer = ThreadPoolExecutor(1).submit(lambda: Tokenizer(text_files(files)))

    def common_token_ids() -> Iterable[int]:
        return () if loading_tokenizer is None else loading_tokenizer.result().common_token_ids()

    target, num_bytes = load_target_model(files, settings, place)
    if settings.quantize is not None and settings.load_format == "auto":
        measured = f"`outrider inspect {model} --quantize {settings.quantize}` measures what that costs"
        say(f"weights rounded to {settings.quantize}: {measured}")
    drafter, note = pick_drafter(files, settings, target, dtype=place.dtype, always=common_token_ids)
    names = drafter_names(drafter, settings)
    say(note)
    tokenizer = None if loading_tokenizer is None else loading_tokenizer.result()
    if place.group is not None:
        gib = num_bytes / 2**30
        say(f"tensor parallel: {place.group.tp.world} processes, {gib:.2f} GiB of weights in the first")
    adapters = load_adapters(target, settings, say) if place.group is None else None
    check_trained_adapter(drafter, adapters, say)
    vision, span_rows = load_images(files, settings, ops, device=place.device, dtype=place.dtype, leads=place.leads)
    audio = load_sound(files, settings, place.device, dtype=place.dtype, leads=place.leads)
    if isinstance(audio, AudioEncoder):
        num_bytes += audio.model.nbytes
    if isinstance(vision, ImageEncoder):
        num_bytes += vision.model.nbytes
        if tokenizer is not None:
            tokenizer.image_text = vision.config.image_text(tokenizer.backend.id_to_token)
    kv = KVOptions(ops.kv_dtype(place.dtype, engine_config.kv_dtype), span_rows, agree)
    engine = Engine(
        # one call for a whole model cannot exchange sums
        ops.compile(target) if place.group is None else target,
        tokenizer,
        engine_config,
        spec=spec,
        drafter=drafter,
        controller=Controller(CostTable(), names, acceptance_profiles(drafter, engine_config, ops)),
        kv=kv,
        adapters=adapters,
        prefix_store=prefix_store_options(files, settings, place, drafter=drafter, kv_dtype=kv.dtype or target.dtype),
    )
    if place.device.type == "cuda":
        size_kv = f"{engine.kv_budget.tokens:,} tokens in {engine.store.nbytes / 2**30:.1f} GiB"
        say(f"K/V: {size_kv}; up to {engine.max_batch} sequences, {engine.max_context:,} tokens each")
    measures_costs = spec.draft_tokens is None and bool(names)
    key = cost_key(model, settings, place, drafter=drafter, max_batch=engine.max_batch) if measures_costs else None
    return Assembled(engine, note, num_bytes, cost_key=key, vision=vision, audio=audio)


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
    return (*(member.name for member in members), "ngram")


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


def load_images(
    files: Files, settings: LoadSettings, ops: Backend, device: torch.device, dtype: torch.dtype, leads: bool
) -> tuple[ImageEncoder | str, int]:
    """The image encoder (or why there is none), and the most rows of an image. leads: this is rank 0, which encodes."""
    if not settings.vision:
        return "images are off: the model was loaded without its vision weights (--no-vision)", 0
    config = vision_config(files)
    if config is None:
        return NO_MMPROJ if files.gguf is not None else NO_VISION, 0
    dummy = settings.seed if settings.load_format == "dummy" else None
    if dummy is None and not has_vision(files):
        return NO_VISION, 0
    rows = config.tokens or settings.image_tokens
    if not leads:
        return "images are read by rank 0", rows
    weights = load_vision(files, config, device, dtype=dtype, dummy_seed=dummy)
    on_gpu = device.type == "cuda"
    threads = settings.threads or default_threads()
    model = VisionModel(config, weights, ops if on_gpu else ReferenceOps(), threads=1 if on_gpu else threads)
    return ImageEncoder(model, rows, settings.max_images, max_pixels=settings.max_image_pixels), rows


def load_sound(
    files: Files, settings: LoadSettings, device: torch.device, dtype: torch.dtype, leads: bool
) -> AudioEncoder | str:
    """The audio encoder, or why there is none. leads: this is rank 0, which encodes."""
    if not settings.audio:
        return "sound is off: the model was loaded without its audio weights (--no-audio)"
    config = audio_config(files)
    dummy_seed = settings.seed if settings.load_format == "dummy" else None
    if config is None or (dummy_seed is None and not has_audio(files)):
        return NO_AUDIO_MMPROJ if files.gguf is not None else NO_AUDIO
    if not leads:
        return "sound is read by rank 0"
    weights = load_audio(files, config, device, dtype=dtype, dummy_seed=dummy_seed)
    threads = 1 if device.type == "cuda" else settings.threads or default_threads()
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


def pick_drafter(
    model: Files, settings: LoadSettings, target: TextModel, *, dtype: torch.dtype, always: TokenIds = tuple
) -> PickedDrafter:
    """The drafter that the settings name. always: tokens that a draft model scores whatever their index in the
    vocabulary."""
    loader = DrafterLoader(model, settings, target, dtype=dtype, always=always)
    picks = [loader.pick(name) for name in settings.drafters]
    networks = [pick for pick in picks if pick.drafter is not None]
    drafter = networks[0].drafter if networks else None
    note = networks[0].note if networks else picks[0].note
    if len(networks) == 2:
        first, second = networks
        assert first.drafter is not None and second.drafter is not None
        drafter = DrafterPair(first.drafter, second.drafter)
        note = f"{first.note} and {second.note.removeprefix('drafter: ')}"
    members = drafter.members if drafter is not None else ()
    if settings.quantize_drafter is not None and not any(member.kv_specs for member in members):
        raise OutriderError(f"--quantize-drafter rounds a block drafter (DFlash, DSpark, EAGLE-3); {note}")
    return PickedDrafter(drafter, note)


class PickedDrafter(NamedTuple):
    drafter: Drafter | None  # None: no network drafts
    note: str  # a line for the user: which drafter is used, and why


@dataclass(frozen=True)
class DrafterLoader:
    """Loads drafters for one target."""

    model: Files
    settings: LoadSettings
    target: TextModel
    dtype: torch.dtype
    always: TokenIds  # tokens that a draft model scores whatever their index in the vocabulary

    def pick(self, name: str) -> PickedDrafter:
        """name: as `LoadSettings.drafter` has it."""
        if name == "none":
            return PickedDrafter(None, "drafter: none (plain decoding)")
        if name == "ngram":
            return PickedDrafter(None, "drafter: ngram (suffix matches in prompt and answer)")
        where: str | None = name
        reason = "as asked"
        if name == "auto":
            where, reason = hub.auto_drafter(self.model, [str(path) for path in self.settings.adapters.values()])
        if where is None:
            return PickedDrafter(None, f"drafter: ngram ({reason})")
        try:
            return self.load(where, reason)
        except OutriderError as error:
            if name == "auto":
                return PickedDrafter(None, f"drafter: ngram ({where} cannot be used: {error})")
            is_path = "/" in name or Path(name).exists()
            kinds = "" if is_path else " (a drafter may also be auto, none, ngram or draft:MODEL)"
            raise OutriderError(f"{error}{kinds}") from None

    def load(self, where: str, reason: str) -> PickedDrafter:
        """The drafter of a checkpoint, whatever its kind: a name or a path, or draft:MODEL."""
        if where.startswith("draft:"):
            return self._draft_model(where, reason)
        files = hub.resolve(where, kind="drafter", weights=self.settings.load_format == "auto")
        if files.config.get("model_type") == "medusa":
            kinds = "a drafter is an MTP, DFlash, DSpark or EAGLE-3 one, or draft:MODEL"
            raise OutriderError(f"{where} has Medusa heads; {kinds}")
        return self._block(files, where, reason) if is_block(files.config) else self._mtp(files, where, reason)

    def _draft_model(self, where: str, reason: str) -> PickedDrafter:
        ops = self.target.ops
        name = where.removeprefix("draft:")
        rounded_names: list[str] = []

        def cheaper(part: str, weight: DeviceWeight) -> DeviceWeight:
            """A draft need not be exact: quantised, but for the embedding, of which a step reads one row."""
            rounded = weight if part == "embed" or len(weight.shape) < 2 else ops.coarse(weight)
            if rounded is not weight:
                rounded_names.append(part)
            return rounded

        vocab = check_draft_model(self.model, hub.resolve(name, weights=False))
        config, weights, _ = load_target(
            name,
            self.target.device,
            self.dtype,
            ops=ops,
            load_format=self.settings.load_format,
            seed=self.settings.seed,
            keep=cheaper,
        )
        listed = None
        if ops.capabilities.shortlists:
            listed = draft_model.shortlist(vocab, self.always(), padded=vocab < config.vocab_size)
        details = [reason]
        if rounded_names:
            details.append("its weights rounded to 4 bits")
        if listed is not None:
            details.append(f"{len(listed):,} of {config.vocab_size:,} tokens scored")
        drafter = DraftModel(
            ops.compile(TextModel(config, weights, ops)),
            listed,
            self.target.config.vocab_size,
            origin=DrafterOrigin(where),
        )
        return PickedDrafter(drafter, f"drafter: draft model {name} ({'; '.join(details)})")

    def _block(self, files: Files, where: str, reason: str) -> PickedDrafter:
        settings = self.settings
        mode = settings.quantize_drafter or settings.quantize
        block = load_block(
            files, self.target, self.dtype, load_format=settings.load_format, seed=settings.seed, quantize=mode
        )
        origin = DrafterOrigin(where)
        profile = None
        if settings.load_format == "auto":
            origin = DrafterOrigin(where, content=f"{fingerprint(files)} {mode}")
            profile = cards.read(Path(files.path), fingerprint(files))
        drafter = BlockDrafter(block, origin=origin, profile=profile)
        rounded = "" if mode is None else f"; weights rounded to {mode}"
        return PickedDrafter(drafter, f"drafter: {drafter.name} {where} ({reason}{rounded})")

    def _mtp(self, files: Files, where: str, reason: str) -> PickedDrafter:
        settings = self.settings
        target = self.target
        ops = target.ops
        tp = target.together.tp
        config, weights = load_drafter(
            files,
            target.device,
            self.dtype,
            ops=ops,
            quantize=ops.capabilities.draft_format,
            load_format=settings.load_format,
            seed=settings.seed,
            tp=tp,
        )
        misfit = config.misfit(target.config)
        if misfit is not None:
            raise OutriderError(f"drafter {where} does not fit {target.config.model_type}: {misfit}")
        net = MTPNet(config, weights, ops, target=target)
        profile = None
        warning = None
        if settings.load_format == "auto":
            profile = cards.read(Path(files.path), fingerprint(files))
            warning = other_weights(self.model.name, where, config.target_hash, is_now=fingerprint(self.model))
        drafter = MTPDrafter(
            ops.compile_drafter(net) if tp.world == 1 else net,
            target,
            origin=DrafterOrigin(where, trained_for=config.target_hash),
            profile=profile,
        )
        warned = "" if warning is None else f"; {warning}"
        return PickedDrafter(drafter, f"drafter: mtp {where} ({reason}{warned})")


def other_weights(target: str, drafter: str, trained_for: str | None, is_now: str) -> str | None:
    """A warning if a drafter was trained for other weights of the model. Our own hold the hash of their target;
    Google's tell by name (a QAT target wants the QAT assistant)."""
    if trained_for is not None:
        if trained_for.partition("+")[0] == is_now:  # after the plus: the hash of an adapter
            return None
        return "trained for other weights of this model, so expect fewer accepted drafts"
    names = [Path(name).name.lower() for name in (target, drafter)]
    first, second = ("qat" in re.split(r"[-_.]", name) for name in names)
    if first == second or not all("gemma" in name for name in names):  # a folder called otherwise says nothing
        return None
    which = "target" if first else "drafter"
    return f"the {which} is quantisation-aware (QAT), the other is not: drafts may hardly ever be accepted"
