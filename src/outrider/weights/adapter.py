"""LoRA adapters: PEFT folders (adapter_config.json, adapter_model.safetensors) and GGUF adapters.

`read_adapter` reads them by tensor of the base checkpoint; `load_adapter` lays them out like the fused weights, `merge`
adds them into a checkpoint. Adapters that need more than W + scale · B A, or do not fit, are refused by name. The rules
are those of PEFT 0.21.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from ..models.config import ForeignDict, ModelConfig
from ..models.names import ignored, normalise, tensor_plan
from ..ops.formats import DeviceWeight
from ..ops.lowrank import Adapter, LowRank
from ..ops.reference import Backend
from ..types import OutriderError, bad_input, require
from . import gguf, hub, repos
from .files import MISREAD, model_config
from .gguf_config import ARCHITECTURES, hf_name, unpermute
from .mapped import TensorEntry
from .quant_scheme import recipe
from .safetensors import read_header, read_json, shard_names
from .source import FLOATS, tensor

log = logging.getLogger("outrider")
CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
ADAPTABLE = re.compile(r"(layers\.\d+\.(qkv|out|gate_up|down|ple_gate|ple_out))|ple_proj")
MAX_RANK = 4096
Pairs = dict[str, dict[str, tuple[str, TensorEntry]]]  # by module: the tensors A and B
REFUSED = (  # settings of PEFT that change what an adapter computes
    *("use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save", "target_parameters", "layer_replication"),
    *("alora_invocation_tokens", "use_qalora", "trainable_token_indices", "use_bdlora", "arrow_config"),
    *("kasa_config", "velora_config", "monteclora_config"),
)
CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that also change the base weights


@dataclass(frozen=True)
class LoraUpdate:
    """The change of one tensor of the base checkpoint: scale · B A."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    scale: float

    def delta(self) -> Tensor:
        return self.scale * (self.b.float() @ self.a.float())


@dataclass(frozen=True)
class LoraFile:
    updates: Mapping[str, LoraUpdate]  # by the base checkpoint's tensor (names.tensor_plan's sources)

    def digest(self) -> bytes:
        """Hash of the content: K/V computed with other values must never be reused for this adapter."""
        hasher = hashlib.blake2b(digest_size=16)
        for name in sorted(self.updates):
            one = self.updates[name]
            hasher.update(f"{name} {one.scale!r} {one.a.dtype} {tuple(one.a.shape)} {tuple(one.b.shape)}\n".encode())
            for matrix in (one.a, one.b):
                hasher.update(matrix.contiguous().view(torch.uint8).numpy().tobytes())
        return hasher.digest()


def adapted_hash(base: str, digest: bytes) -> str:
    """Fingerprint of a drafter's target: a base model's fingerprint with an adapter's content."""
    return f"{base}+{digest.hex()}"


def load_adapter(
    name: str,
    path: str | Path,
    config: ModelConfig,
    ops: Backend,
    dtype: torch.dtype,
    device: torch.device,
    bases: Mapping[str, DeviceWeight] = MappingProxyType({}),
) -> Adapter:
    """Loads an adapter in the backend's layout, on its device, or in host memory if the device has slots for adapters
    in use. bases: the weights that it changes, by canonical name; the backend may store the adapter in as few bits."""
    file = read_adapter(path, config)
    device = torch.device("cpu") if ops.capabilities.adapter_slots else device
    # 16-bit weights next to float32 activations keep the stored dtype
    halves = ops.capabilities.holds_halves and dtype == torch.float32
    out: dict[str, LowRank] = {}
    for canonical, plan in tensor_plan(config).items():
        updates = [file.updates.get(source) for source in plan.sources]
        if not any(updates):
            continue
        kinds = {u.a.dtype for u in updates if u is not None}
        stored_dtype = kinds.pop() if halves and len(kinds) == 1 else dtype
        none = [LoraUpdate(torch.zeros(0, columns), torch.zeros(rows, 0), 0.0) for rows, columns in plan.source_shapes]
        every = [update or nothing for update, nothing in zip(updates, none)]
        a = torch.cat([u.a.to(stored_dtype) for u in every])
        b = torch.block_diag(*[u.b.to(stored_dtype) for u in every])
        scale = torch.cat([torch.full((u.b.shape[0],), u.scale) for u in every])
        pieces = [(u.b.shape[0], u.b.shape[1]) for u in every]
        out[canonical] = ops.lowrank(
            a.to(device), b.to(device), scale.to(device), pieces=pieces, base=bases.get(canonical)
        )
    return Adapter(name, file.digest(), ops.pack_adapter(out))


def read_adapter(name: str | Path, config: ModelConfig) -> LoraFile:
    """name: a PEFT folder, a .gguf file or a Hugging Face id."""
    path = Path(os.path.expanduser(str(name)))
    if not os.path.exists(path):
        named = repos.parse(str(name))
        if named is None or named[1] is not None:
            kinds = "a PEFT folder, a .gguf file or hub id"
            raise OutriderError(f"adapter {str(name)!r:.120} does not exist: give {kinds}")
        path = hub.snapshot(named[0], ["adapter_*.json", "adapter_*.safetensors"])
    with bad_input(MISREAD, lambda error: f"{path}: its settings make no sense ({str(error)[:80]})"):
        file = _read_gguf(path, config) if path.is_file() else _read_peft(path, config)
    require(bool(file.updates), f"{path} changes nothing: it holds no LoRA matrices of the text model")
    return file


# ---- PEFT -----------------------------------------------------------------------------------------------------------
def _read_peft(folder: Path, config: ModelConfig) -> LoraFile:
    require((folder / CONFIG).is_file(), f"{folder} has no {CONFIG}: is it a PEFT adapter?")
    settings = read_json(folder / CONFIG)
    _check_settings(folder / CONFIG, settings)
    if not (folder / TENSORS).is_file():
        pickled = " (adapter_model.bin can run code when it is read: save the adapter as safetensors)"
        raise OutriderError(f"{folder} has no {TENSORS}{pickled if (folder / 'adapter_model.bin').is_file() else ''}")
    pairs: Pairs = {}
    for key, entry in read_header(folder / TENSORS, mapped=False).items():
        match = KEY.fullmatch(key)
        if match is None:
            raise OutriderError(f"{folder}: tensor {key[:120]} is no LoRA matrix, which is not supported")
        pairs.setdefault(match[1], {})[match[2]] = (key, entry)
    updates = dict[str, LoraUpdate]()
    sources = _sources(config)
    skipped = 0
    for module, pair in pairs.items():
        source = normalise(module + ".weight")
        if ignored(source, config) and not source.startswith("lm_head."):
            skipped += 1
            continue
        rank = _pattern(folder, settings, key="rank_pattern", module=module, default=settings.get("r", 8))
        alpha = _pattern(folder, settings, key="alpha_pattern", module=module, default=settings.get("lora_alpha", 8))
        a, b = _pair(folder, pair, source, sources=sources)
        require(a.shape[0] == rank, f"{folder}: tensor {pair['A'][0]} has rank {a.shape[0]}, {CONFIG} says {rank:g}")
        updates[source] = LoraUpdate(a, b, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank))
    if skipped:
        log.warning("%s: ignored %d modules of the vision or audio tower", folder.name, skipped)
    _check_complete(folder, settings, updates=updates, sources=sources)
    return LoraFile(updates)


def _check_settings(where: Path, settings: ForeignDict) -> None:
    if settings.get("peft_type") != "LORA":
        raise OutriderError(f"{where}: peft_type {str(settings.get('peft_type'))[:40]!r} is not supported, LORA is")
    refused = next((key for key in REFUSED if settings.get(key)), None)
    if refused:
        raise OutriderError(f"{where}: {refused} is not supported")
    if settings.get("bias", "none") != "none":
        raise OutriderError(f"{where}: bias {str(settings['bias'])[:40]!r} is not supported")
    start = str(settings.get("init_lora_weights", True)).lower()
    if start.startswith(CHANGED_BASE):
        raise OutriderError(f"{where}: init_lora_weights {start[:40]!r} changed the base weights: convert it with PEFT")


def _pattern(folder: Path, settings: ForeignDict, key: str, module: str, default: object) -> float:
    """Value of the first pattern that matches the module's name, or its end after a dot."""
    table = settings.get(key) or {}
    where = folder / CONFIG
    if not isinstance(table, dict):
        raise OutriderError(f"{where}: {key} should be an object, got {str(table)[:40]}")
    try:
        value = next((v for pattern, v in table.items() if re.fullmatch(rf"(.*\.)?({pattern})", module)), default)
    except re.error as error:
        raise OutriderError(f"{where}: {key} {str(error.pattern)[8:-1][:60]!r} is not a regular expression") from None
    what = "r" if key == "rank_pattern" else "lora_alpha"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < abs(value) < 1e6:
        raise OutriderError(f"{where}: {what} should be a positive number, got {str(value)[:40]}")
    if what == "r" and (value != int(value) or not 1 <= value <= MAX_RANK):
        raise OutriderError(f"{where}: rank {value} is outside 1..{MAX_RANK}")
    return value


def _check_complete(
    folder: Path, settings: ForeignDict, updates: Mapping[str, LoraUpdate], sources: Mapping[str, tuple[int, ...]]
) -> None:
    """Checks that every layer of the base has an update of the modules in the settings; otherwise the adapter is for
    another base, or truncated."""
    listed = settings.get("target_modules")
    limits = ("layers_to_transform", "layers_pattern", "exclude_modules")
    if not isinstance(listed, list) or any(settings.get(key) is not None for key in limits):
        return
    ends = tuple(f".{name}.weight" for name in listed)
    missing = next((s for s in sources if s.endswith(ends) and s not in updates), None)
    if missing:
        raise OutriderError(f"{folder} holds nothing for {missing}, which it adapts: cut, or made for another base")


# ---- GGUF -----------------------------------------------------------------------------------------------------------
def _read_gguf(path: Path, config: ModelConfig) -> LoraFile:
    require(path.suffix == ".gguf", f"{path} is neither a PEFT folder nor a .gguf file")
    file = gguf.read(path, mapped=False)
    if (file.meta.get("general.type"), file.meta.get("adapter.type")) != ("adapter", "lora"):
        raise OutriderError(f"{path} is not a LoRA adapter (general.type adapter, adapter.type lora)")
    if file.arch != (config.model_type if config.model_type in ARCHITECTURES else config.family):
        raise OutriderError(f"{path} was made for a {file.arch[:40]} model, the base is {config.model_type}")
    alpha = file.meta.get("adapter.lora.alpha")
    if not isinstance(alpha, int | float) or not 0 < abs(alpha) < 1e6:
        raise OutriderError(f"{path}: adapter.lora.alpha should be a positive number, got {str(alpha)[:40]}")
    pairs: Pairs = {}
    for key, entry in file.tensors.items():
        require(key.endswith((".lora_a", ".lora_b")), f"{path}: tensor {key} is no LoRA matrix, which is not supported")
        pairs.setdefault(key[:-7], {})[key[-1].upper()] = (key, entry)
    updates = dict[str, LoraUpdate]()
    sources = _sources(config)
    for module, pair in pairs.items():
        source = normalise(hf_name(module, file.arch))
        a, b = _pair(path, pair, source, sources=sources)
        projection = source.split(".")[-2]
        if file.arch == "llama" and projection in ("q_proj", "k_proj"):  # rows are permuted, like those of the base
            attn = config.layers[int(source.split(".")[2])].attn
            b = b[torch.from_numpy(unpermute(attn.heads if projection == "q_proj" else attn.kv_heads, b.shape[0]))]
        updates[source] = LoraUpdate(a, b, alpha / a.shape[0])
    return LoraFile(updates)


# ---- both -----------------------------------------------------------------------------------------------------------
def _sources(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape by tensor of the base; () for tensors that adapters cannot change."""
    shapes: dict[str, tuple[int, ...]] = {}
    for canonical, plan in tensor_plan(config).items():
        fits = ADAPTABLE.fullmatch(canonical) is not None
        shapes |= {s: shape if fits else () for s, shape in zip(plan.sources, plan.source_shapes)}
    return shapes


def _matrix(where: Path, key: str, entry: TensorEntry) -> Tensor:
    require(entry.kind in FLOATS, f"{where}: tensor {key} is stored as {entry.kind}: adapters hold F32, F16 or BF16")
    matrix = tensor(entry)
    if matrix.dtype == torch.float64:
        matrix = matrix.float()
    if not bool(torch.isfinite(matrix.float()).all()):
        raise OutriderError(f"{where}: tensor {key} holds values that are not finite: fetch the adapter again")
    return matrix.clone()


def _pair(
    where: Path, pair: Mapping[str, tuple[str, TensorEntry]], source: str, sources: Mapping[str, tuple[int, ...]]
) -> tuple[Tensor, Tensor]:
    """A [r, in] and B [out, r] of the base's tensor `source`."""
    key = next(iter(pair.values()))[0]
    module = source.removesuffix(".weight")
    shape = sources.get(source, sources.get(module))
    if ".experts" in source or source.startswith(("lm_head.", "model.embed_tokens.")):
        shape = ()
    if shape is None:
        raise OutriderError(f"{where}: tensor {key[:120]}: the base has no module {module[:120]}: made for another?")
    if not shape:
        raise OutriderError(f"{where}: tensor {key[:120]}: adapters of {module[:120]} are not supported")
    if len(pair) == 1:
        partner = {"A": "B", "B": "A", "a": "b", "b": "a"}[key[key.rindex("lora_") + 5]]
        raise OutriderError(f"{where}: tensor {key} has no partner lora_{partner}: fetch the adapter again")
    a, b = (_matrix(where, *pair[part]) for part in "AB")
    rank = a.shape[0] if a.dim() == 2 else 0
    for part, matrix, want in (("A", a, (rank, shape[1])), ("B", b, (shape[0], rank))):
        if not rank or tuple(matrix.shape) != want:
            fits = f"the base asks for [{shape[0]}, {shape[1]}] = B A"
            raise OutriderError(f"{where}: tensor {pair[part][0]} has shape {list(matrix.shape)}: {fits}")
    return a, b


# ---- merged ---------------------------------------------------------------------------------------------------------
def merge(model: str, adapter: str, out: Path, say: Callable[[str], None]) -> int:
    """Writes a checkpoint with an adapter added into its weights to the folder `out`; returns the number of changed
    tensors. The sum is computed in float32 and rounded once to the stored dtype. Files keep their names and order;
    other files are copied. Refuses a quantised checkpoint: rounding the sum to few bits would lose the adapter."""
    from safetensors import SafetensorError

    files = hub.resolve(model)
    if files.gguf is not None or recipe(files.config, files.name) is not None:
        what = "a GGUF file" if files.gguf is not None else "quantised"
        raise OutriderError(f"{model} is {what}: merge into the checkpoint it was made from, then convert that")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutriderError(f"{out} exists and is not an empty folder: name a new one")
    file = read_adapter(adapter, model_config(files))
    shards = shard_names(files.path) or []
    left = set(file.updates)
    require(bool(shards), f"{files.path} holds no safetensors file: there are no weights to merge into")
    what = f"cannot write the merged checkpoint to {out}"
    unwritten = (OSError, SafetensorError)
    with bad_input(unwritten, lambda e: f"{what}: {str(getattr(e, 'strerror', None) or e)[:120]}"):
        out.mkdir(parents=True, exist_ok=True)
        for path in sorted(files.path.iterdir()):
            if path.is_file() and path.suffix in (".json", ".jinja", ".model", ".txt", ".md"):
                shutil.copyfile(path, out / path.name)
        for shard in shards:
            left -= _merge_shard(files.path / shard, out / shard, file)
            say(f"wrote {out / shard}")
    if left:
        raise OutriderError(f"{files.path}: tensor {min(left)} is missing from the checkpoint")
    return len(file.updates)


def _merge_shard(source: Path, to: Path, file: LoraFile) -> set[str]:
    from safetensors import safe_open
    from safetensors.torch import save_file

    tensors = {}
    changed = set[str]()
    with safe_open(source, framework="pt") as stored:
        metadata = stored.metadata() or {"format": "pt"}
        for name in stored.keys():  # noqa: SIM118  # not a mapping
            value = stored.get_tensor(name)
            update = file.updates.get(normalise(name))
            if update is not None:
                if value.dtype not in FLOATS.values():
                    kind = str(value.dtype).removeprefix("torch.")
                    raise OutriderError(f"{source}: tensor {name} is stored as {kind}: merging needs dense weights")
                value = (value.float() + update.delta()).to(value.dtype)
                changed.add(normalise(name))
            tensors[name] = value.contiguous()
    save_file(tensors, to, metadata=metadata)
    return changed
