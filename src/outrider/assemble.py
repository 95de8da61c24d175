"""The composition root: builds an engine from weights, tokenizer, drafter, controller, adapters and the encoders of
images and sound."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from typing import NamedTuple

import torch

from . import __version__
from . import ops as ops_module
from .cache.prefix_store import PrefixStore
from .config import LoadSettings
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
from .models.split import SOLO
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
from .spec.drafter import Drafter, DrafterPair
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


def assemble(model: str, settings: LoadSettings, say: Say, group: ProcessGroup | None = None) -> Assembled:
    """With a group: builds this process's part. An error in one process is raised in all."""
    agreed = False

    def agree(budget: KVBudget) -> KVBudget:
        nonlocal agreed
        if group is None:
            return budget
        agreed = True
        least = group.all_reduce_min([-1 if value is None else value for value in astuple(budget)])
        return KVBudget(*(None if value < 0 else value for value in least))  # type: ignore[arg-type]

    try:
        return _assemble(model, settings, say, group, agree)
    except OutriderError as error:
        if group is not None and not agreed:
            group.all_reduce_min((), str(error))  # raises here and everywhere
        raise


def _assemble(
    model: str, settings: LoadSettings, say: Say, group: ProcessGroup | None, agree: Callable[[KVBudget], KVBudget]
) -> Assembled:
    quantize = settings.quantize
    load_format = settings.load_format
    seed = settings.seed
    threads = settings.threads
    spec = settings.spec
    engine_config = settings.engine
    device = ops_module.place(settings.device) if group is None else group.device
    if device.index is not None:
        torch.cuda.set_device(device)  # kernels are launched on the current device, wherever their tensors are
    dtype: torch.dtype = getattr(torch, settings.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    if group is not None and device.type == "cpu":
        threads = threads or max(1, default_threads() // group.tp.world)  # the processes share the cores
    ops = ops_module.choose(device, settings.ops, threads)
    if ops.name == "cpu" or (group is not None and device.type == "cpu"):
        # the kernels have their own threads; torch's threads would spin next to them and halve the speed
        torch.set_num_threads(1)
    tp, together = (None, SOLO) if group is None else (group.tp, group)
    if settings.drafters[0].startswith("draft:"):  # another vocabulary is refused before weights are fetched or read
        check_draft_model(hub.resolve(model, weights=False), hub.resolve(settings.drafters[0][6:], weights=False))
    files = hub.resolve(model, weights=load_format == "auto")
    # A tokenizer of a large vocabulary is made while the kernels lay weights out and need no interpreter.
    tokenizing = ThreadPoolExecutor(1).submit(lambda: Tokenizer(text_files(files))) if load_format != "dummy" else None
    config, weights, _ = load_target(
        files, device, dtype, ops, quantize=quantize, load_format=load_format, seed=seed, tp=tp
    )
    if quantize is not None and load_format == "auto":
        say(f"weights rounded to {quantize}: `outrider inspect {model} --quantize {quantize}` measures what that costs")
    target = TextModel(config, weights, ops, together)
    common = lambda: tokenizing.result().common_token_ids() if tokenizing is not None else ()  # noqa: E731
    drafter, names, note = pick_drafter(files, settings, target, dtype, common)
    say(note)
    tokenizer = tokenizing.result() if tokenizing is not None else None
    size = sum(w.nbytes for w in weights.values())
    if group is not None:
        say(f"tensor parallel: {group.tp.world} processes, {size / 2**30:.2f} GiB of weights in the first")
    adapters = load_adapters(target, settings, say) if group is None else None
    learnt = (drafter.trained_for or "").partition("+")[2] if drafter is not None else ""
    if adapters is not None and learnt and learnt not in (adapters.get(name).digest.hex() for name in adapters.paths):
        say("the drafter was trained for another adapter, so expect fewer accepted drafts")
    leads = group is None or group.tp.rank == 0
    vision, span_rows = load_images(files, settings, ops, device, dtype, leads)
    audio = load_sound(files, settings, device, dtype, leads)
    if isinstance(audio, AudioEncoder):
        size += audio.model.nbytes
    if isinstance(vision, ImageEncoder):
        size += vision.model.nbytes
        if tokenizer is not None:
            tokenizer.image_text = vision.config.image_text(tokenizer.backend.id_to_token)
    runner = ops.compile(target) if group is None else target  # one call for a whole model cannot exchange sums
    members = drafter.members if drafter is not None else ()
    profiles = {member.name: member.profile for member in members if member.profile is not None}
    if ops.capabilities.graphs if engine_config.graphs is None else engine_config.graphs:
        # where steps are captured no draft ends by its confidence
        profiles = {name: replace(profile, trust=()) for name, profile in profiles.items()}
    controller = Controller(CostTable(), names, profiles)
    kv = KVOptions(ops.kv_dtype(dtype, engine_config.kv_dtype), span_rows, agree)
    engine = Engine(runner, tokenizer, engine_config, spec, drafter, controller, kv)
    engine.runner.adapters = adapters
    if engine_config.prefix_store is not None:
        content = fingerprint(files) if load_format == "auto" else f"dummy {files.name} {seed}"
        kernels = f"{ops.name} {ops.version}"
        if ops.name != "cpu":  # its version is a hash of its sources
            card = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
            kernels += f" {__version__} {torch.__version__} {card}"
        cut = "" if ops.capabilities.prompts_independent else f"chunk {engine.chunk}"
        identity = f"{content} {dtype} {kernels} {quantize} kv {engine.store.dtype} {engine_config.page_size} {cut}"
        identity += f" {drafter.content}" if drafter is not None and drafter.content else ""
        folder = Path(os.path.expanduser(engine_config.prefix_store))
        limit = int(engine_config.prefix_store_size * 2**30)
        engine.store.disk = PrefixStore(engine.store, folder, limit, identity)
    if device.type == "cuda":
        size_kv = f"{engine.kv_budget.tokens:,} tokens in {engine.store.nbytes / 2**30:.1f} GiB"
        say(f"K/V: {size_kv}; up to {engine.max_batch} sequences, {engine.max_context:,} tokens each")
    if spec.draft_tokens is not None or not names:
        return Assembled(engine, note, size, None, vision, audio)
    trained_for = drafter.trained_for if drafter is not None else None
    divided = "" if group is None else f" over {group.tp.world}"
    machine = machine_name(torch.cuda.get_device_name(device) if device.type == "cuda" else None, threads)
    key = (
        f"{machine}|{model} {dtype} {ops.name} {quantize} {note} {trained_for} batch {engine.max_batch} kv "
        f"{engine_config.kv_dtype}{divided}|{__version__} {FORMAT} {ops.version}"
    )
    return Assembled(engine, note, size, key, vision, audio)


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
    weights = load_vision(files, config, device, dtype, dummy)
    on_gpu = device.type == "cuda"
    threads = settings.threads or default_threads()
    model = VisionModel(config, weights, ops if on_gpu else ReferenceOps(), 1 if on_gpu else threads)
    return ImageEncoder(model, rows, settings.max_images, settings.max_image_pixels), rows


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
    weights = load_audio(files, config, device, dtype, dummy_seed)
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
    model: Files, settings: LoadSettings, target: TextModel, dtype: torch.dtype, always: TokenIds = tuple
) -> tuple[Drafter | None, tuple[str, ...], str]:
    """(the neural drafter or None, the names the controller may choose from, one line that says what and why). always:
    tokens that a draft model scores whatever their index in the vocabulary."""
    paths = [str(path) for path in settings.adapters.values()]

    def pick(drafter: str) -> tuple[Drafter | None, str]:
        if drafter == "none":
            return None, "drafter: none (plain decoding)"
        if drafter == "ngram":
            return None, "drafter: ngram (suffix matches in prompt and answer)"
        where, note = hub.auto_drafter(model, paths) if drafter == "auto" else (drafter, "as asked")
        if where is None:
            return None, f"drafter: ngram ({note})"
        try:
            return _load_drafter(model, where, note, target, dtype, settings, always)
        except OutriderError as error:
            if drafter != "auto":
                named = "/" in drafter or Path(drafter).exists()
                kinds = "" if named else " (a drafter may also be auto, none, ngram or draft:MODEL)"
                raise OutriderError(f"{error}{kinds}") from None
            return None, f"drafter: ngram ({where} cannot be used: {error})"

    picked = [pick(one) for one in settings.drafters]
    found = [(drafter, note) for drafter, note in picked if drafter is not None]
    drafter, note = found[0] if found else picked[0]
    if len(found) == 2:
        drafter = DrafterPair(found[0][0], found[1][0])
        note += f" and {found[1][1].removeprefix('drafter: ')}"
    members = drafter.members if drafter is not None else ()
    if settings.quantize_drafter is not None and not any(isinstance(member, BlockDrafter) for member in members):
        raise OutriderError(f"--quantize-drafter rounds a block drafter (DFlash, DSpark, EAGLE-3); {note}")
    names = () if settings.drafter == "none" else (*(member.name for member in members), "ngram")
    return drafter, names, note


def _load_drafter(
    model: Files, where: str, note: str, target: TextModel, dtype: torch.dtype, settings: LoadSettings, always: TokenIds
) -> tuple[Drafter, str]:
    ops = target.ops
    device = target.device
    load_format = settings.load_format
    seed = settings.seed
    if where.startswith("draft:"):
        name = where[6:]
        counts = [0, 0]

        def cheaper(part: str, weight: DeviceWeight) -> DeviceWeight:
            """A draft need not be exact: quantised, but for the embedding, of which a step reads one row."""
            made = weight if part == "embed" or len(weight.shape) < 2 else ops.coarse(weight)
            counts[made is weight] += 1
            return made

        vocab = check_draft_model(model, hub.resolve(name, weights=False))
        config, weights, _ = load_target(name, device, dtype, ops, load_format=load_format, seed=seed, keep=cheaper)
        padded = vocab < config.vocab_size
        lists = ops.capabilities.shortlists
        listed = draft_model.shortlist(vocab, always(), padded) if lists else None
        how = ["its weights rounded to 4 bits"] if counts[0] else []
        how += [f"{len(listed):,} of {config.vocab_size:,} tokens scored"] if listed is not None else []
        small = DraftModel(ops.compile(TextModel(config, weights, ops)), listed, target.config.vocab_size)
        return small, f"drafter: draft model {name} ({'; '.join([note, *how])})"
    files = hub.resolve(where, kind="drafter", weights=load_format == "auto")
    kinds = "a drafter is an MTP, DFlash, DSpark or EAGLE-3 one, or draft:MODEL"
    if files.config.get("model_type") == "medusa":
        raise OutriderError(f"{where} has Medusa heads; {kinds}")
    if is_block(files.config):
        mode = settings.quantize_drafter or settings.quantize
        note += f"; weights rounded to {mode}" if mode is not None else ""
        block = load_block(files, target, dtype, load_format=load_format, seed=seed, quantize=mode)
        made_block = BlockDrafter(block)
        if load_format == "auto":
            made_block.profile = cards.read(Path(files.path), fingerprint(files)) or made_block.profile
            made_block.content = f"{fingerprint(files)} {mode}"
        return made_block, f"drafter: {made_block.name} {where} ({note})"
    tp = target.together.tp
    rounded = ops.capabilities.draft_format
    own, parts = load_drafter(files, device, dtype, ops, quantize=rounded, load_format=load_format, seed=seed, tp=tp)
    reason = own.misfit(target.config)
    if reason is not None:
        raise OutriderError(f"drafter {where} does not fit {target.config.model_type}: {reason}")
    drafter = MTPNet(own, parts, ops, target)
    made = MTPDrafter(ops.compile_drafter(drafter) if tp.world == 1 else drafter, target)
    if load_format == "auto":
        made.profile = cards.read(Path(files.path), fingerprint(files))
        unlike = other_weights(model.name, where, own.target_hash, fingerprint(model))
        note += f"; {unlike}" if unlike is not None else ""
    return made, f"drafter: mtp {where} ({note})"


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
