"""A model's description for clients: its card in /v1/models (OpenAI's, vLLM's, llama.cpp's and Anthropic's fields in
one), Ollama's /api/tags, /api/ps and /api/show, and llama.cpp's /props."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from .. import __version__
from ..engine.adapters import AdapterPool
from ..engine.audio import AudioEncoder
from ..engine.engine import Engine
from ..engine.images import ImageEncoder
from ..engine.text import Tokenizer
from ..models.config import ModelConfig, text_part
from ..types import OutriderError
from ..weights import hub
from ..weights.files import Files, fingerprint, model_config
from ..weights.sizes import StoredSize, stored_size
from .answer import Json
from .settings import ServerSettings, without_paths
from .spellings import OLLAMA, OPENAI

if TYPE_CHECKING:
    from ..llm import LLM
    from .model_pool import PoolSlot
    from .prepare import Preparer

NEVER = "2318-01-01T00:00:00Z"  # Ollama's clients expect a date; a model stays until its memory is needed
CONTEXT = ("max_model_len", "context_length", "context_window", "max_input_tokens", "max_tokens")  # names for it
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class ModelInfo:
    """Description of a checkpoint, loaded or not. Empty fields are unknown."""

    family: str = ""
    format: str = ""  # gguf | safetensors
    quantization: str = ""
    digest: str = ""  # of configuration, names, shapes and samples of the weights
    parameters: int = 0
    file_bytes: int = 0
    trained_context: int = 0
    hidden: int = 0
    layers: int = 0

    @classmethod
    def of(cls, files: Files, config: ModelConfig, stored: StoredSize) -> ModelInfo:
        kind = max(stored.formats, key=lambda name: stored.formats[name], default="")
        named = {**files.config, **text_part(files.config)}
        dtype = DTYPES.get(str(named.get("dtype") or named.get("torch_dtype")), "")
        try:
            digest = hashlib.sha256(fingerprint(files).encode()).hexdigest()
        except (OutriderError, OSError):  # a configuration without weights
            digest = ""
        return cls(
            config.model_type,
            "safetensors" if files.gguf is None else "gguf",
            dtype if kind == "dense" else kind.upper(),
            digest,
            stored.parameters,
            int(stored.total),
            config.max_context,
            config.hidden,
            len(config.layers),
        )

    @classmethod
    def named(cls, model: str) -> ModelInfo:
        """Description of a loaded model under this name."""
        try:
            files = hub.resolve(model)
            config = model_config(files)
            return cls.of(files, config, stored_size(files, config))
        except OutriderError:
            return cls()

    @property
    def parameter_size(self) -> str:
        if not self.parameters:
            return ""
        return f"{self.parameters / 1e9:.1f}B" if self.parameters >= 1e9 else f"{self.parameters / 1e6:.1f}M"

    @property
    def details(self) -> Json:
        return {
            "parent_model": "",
            "format": self.format,
            "family": self.family,
            "families": [self.family] if self.family else [],
            "parameter_size": self.parameter_size,
            "quantization_level": self.quantization,
        }


UNKNOWN = ModelInfo()


@dataclass(frozen=True)
class ServedModel:
    """The parts of an `LLM` that the server uses. `server.model_pool` has it in a `LoadedModel`, with the threads and
    processes that answer for it, and that in a `PoolSlot`, which stays while the model is unloaded."""

    engine: Engine
    tokenizer: Tokenizer
    vocab_size: int
    max_context: int
    note: str = ""  # one line about the drafter
    nbytes: int = 0  # weights and K/V; 0: unknown
    info: ModelInfo = UNKNOWN
    places: int = 0  # concurrent sequences; 0: as in the settings
    adapters: AdapterPool | None = None  # None: it takes no adapters
    vision: ImageEncoder | str = "this model takes no images"  # the image encoder, or why there is none
    audio: AudioEncoder | str = "this model takes no sound"  # the audio encoder, or why there is none

    @classmethod
    def of(cls, llm: LLM, say: Callable[[str], None] = lambda _: None) -> ServedModel:
        """Takes the parts from an LLM. say: receives one line if preparing the engine took noticeable time."""
        if llm.tokenizer is None:
            raise OutriderError(f"{llm.name} has no tokenizer, so it can't be served")
        note = without_paths(llm.drafter_note)
        ready = llm.engine.serve(say)
        if ready:
            say(ready)
        return cls(
            engine=llm.engine,
            tokenizer=llm.tokenizer,
            vocab_size=llm.config.vocab_size,
            max_context=llm.engine.max_context,
            note=note,
            nbytes=llm.nbytes,
            info=ModelInfo.named(llm.name),
            adapters=llm.adapters,
            vision=llm.vision,
            audio=llm.audio,
        )


def when(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def card(slot: PoolSlot, started: int) -> Json:
    info = slot.info
    context = slot.max_context or None
    meta = {
        "n_ctx_train": info.trained_context,
        "n_ctx": context,
        "n_embd": info.hidden,
        "n_params": info.parameters,
        "size": info.file_bytes,
        "family": info.family,
        "quantization": info.quantization,
        "digest": info.digest,
    }
    return {
        "id": slot.name,
        "object": "model",
        "created": started,
        "owned_by": "outrider",
        "root": slot.name,
        "parent": None,
        **dict.fromkeys(CONTEXT, context),
        "type": "model",
        "display_name": slot.name,
        "created_at": when(started),
        "meta": {k: v or None for k, v in meta.items()},
        "outrider": {"max_context": context, "drafter": slot.note, "state": slot.state, "bytes": slot.size},
    }


def cards(slots: list[PoolSlot], started: int) -> Json:
    """The models' cards, each followed by those of its adapters."""
    data: list[Json] = []
    for slot in slots:
        data.append(card(slot, started))
        for name in slot.adapters.paths if slot.adapters is not None else ():
            full = f"{slot.name}:{name}"
            data.append({**card(slot, started), "id": full, "root": name, "parent": slot.name, "display_name": full})
    return {"object": "list", "data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}


def ollama_tag(slot: PoolSlot, started: int) -> Json:
    return {
        "name": slot.name,
        "model": slot.name,
        "modified_at": when(started),
        "size": slot.info.file_bytes or slot.size,
        "digest": slot.info.digest,
        "details": slot.info.details,
    }


def ollama_loaded(slot: PoolSlot, started: int) -> Json:
    """An entry of /api/ps. `size_vram` is Ollama's name for the memory of weights and K/V."""
    tag = {**ollama_tag(slot, started), "size": slot.size, "size_vram": slot.size}
    return {**tag, "expires_at": NEVER, "context_length": slot.max_context}


def ollama_show(slot: PoolSlot, started: int) -> Json:
    info = slot.info
    family = slot.info.family or "outrider"
    known: Json = {
        "general.architecture": family,
        "general.parameter_count": info.parameters,
        "general.basename": slot.name,
        f"{family}.context_length": slot.max_context or info.trained_context,
        f"{family}.embedding_length": info.hidden,
        f"{family}.block_count": info.layers,
    }
    capabilities = ["completion", "tools"]
    template = ""
    sampling = ""
    if slot.model is not None:
        prepare = slot.model.prepare
        template = prepare.tokenizer.files.chat_template or ""
        capabilities += ["insert"] if prepare.infill is not None else []
        capabilities += ["vision"] if prepare.sees else []
        capabilities += ["audio"] if prepare.hears else []
        capabilities += ["thinking"] if "enable_thinking" in template or "<think>" in template else []
        sampling = "\n".join(f"{name} {value:g}" for name, value in prepare.defaults(OLLAMA).items())
    return {
        "modelfile": "",
        "license": "",
        "parameters": sampling,
        "template": template,
        "details": info.details,
        "model_info": known,
        "capabilities": capabilities,
        "modified_at": when(started),
    }


def props(preparer: Preparer, slot: PoolSlot, server: ServerSettings) -> Json:
    """/props in llama.cpp's form, with the default sampling of each protocol."""
    files = preparer.tokenizer.files
    protocols = (("openai", OPENAI), ("anthropic", OPENAI), ("ollama", OLLAMA))
    sampling = {name: preparer.defaults(protocol) for name, protocol in protocols}
    params = {"n_predict": -1, **sampling["openai"]}
    settings = {"n_ctx": preparer.backend.max_context, "params": params, "is_processing": False}
    return {
        "default_generation_settings": settings,
        "total_slots": server.max_concurrent,
        "model_alias": slot.name,
        "model_path": slot.name,
        "chat_template": files.chat_template,
        "bos_token": files.specials.get("bos_token"),
        "eos_token": files.specials.get("eos_token"),
        "modalities": {"vision": preparer.sees, "audio": preparer.hears},
        "build_info": f"outrider-{__version__}",
        "outrider": {"sampling_from": "model" if files.sampling else "protocol", "sampling": sampling},
    }
