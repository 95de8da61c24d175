"""Settings, validated once, frozen. Torch-free.

A field whose annotation carries a text is also an option of commands and of a deployment's file: its name, default and
help text are defined only here (`OPTIONS`). Error messages name the field; commands rewrite it as the option that the
user typed (cli.common).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from .platforms.folders import config_file
from .types import MAX_DRAFT, OutriderError, bad_input, is_a, require

KvDtype = Literal["auto", "int8", "fp8"]
LoadFormat = Literal["auto", "dummy"]
TREE_RULE = f"tree must be 'auto', 'off' or a number of tokens in 2..{MAX_DRAFT}"
# Names that users of other engines know, and ours.
ALIASES = {
    "max_model_len": "max_context",
    "max_num_seqs": "max_batch",
    "gpu_memory_utilization": "gpu_memory",
    "num_speculative_tokens": "draft_tokens",
}


def known(what: str, value: object, kind: object) -> None:
    """Checks that a text is one of a Literal's values."""
    texts = ", ".join(text for text in get_args(kind) if text is not None)
    require(value in get_args(kind), f"unknown {what} {value!r}; known: {texts}")


def check_whole(settings: object, least: int | None, *names: str) -> None:
    """Checks that these fields are integers of at least this size; None where that is the default."""
    for name in names:
        value = getattr(settings, name)
        if value is None and getattr(type(settings), name) is None:
            continue
        require(is_a(value, Integral), f"{name} must be a whole number, got {value!r}")
        bound = "0 or more" if least == 0 else f"at least {least}"
        require(least is None or value >= least, f"{name} must be {bound}, got {value}")


def check_switch(settings: object, *names: str) -> None:
    """Checks that these fields are True, False or None: a text such as "no" would count as True."""
    for name in names:
        value = getattr(settings, name)
        require(value is None or isinstance(value, bool), f"{name} must be True or False, got {value!r}")


@dataclass(frozen=True)
class EngineConfig:
    max_batch: int | None = None  # sequences per batch; None: 256 on a GPU, else 8
    max_context: Annotated[
        int | None, "Maximum tokens of prompt and answer together. Default: what the model and memory allow."
    ] = None
    page_size: int = 32
    prefill_chunk: int | None = None  # prompt tokens per sequence and pass; None: the backend's best
    kv_tokens: int | None = None  # K/V positions in total; None: as many as fit in memory (engine.memory)
    kv_dtype: Annotated[
        KvDtype, "Keys and values: auto (16 bits) | int8 on a CPU, fp8 on a GPU: half the memory, a little less exact."
    ] = "auto"
    gpu_memory: Annotated[float, "Share of the GPU's memory for weights, K/V and work together."] = 0.9
    prefix_cache: bool = True
    prefix_store: Annotated[str | None, "Folder that keeps K/V of prompts across restarts. Default: none."] = None
    prefix_store_size: Annotated[float, "Maximum GiB in that folder; least recently used pages are deleted first."] = (
        20.0
    )
    graphs: bool | None = None  # run each decode cycle as one CUDA graph, results one cycle late; None: on a GPU

    def __post_init__(self) -> None:
        check_whole(self, 1, "max_batch", "max_context", "page_size", "prefill_chunk", "kv_tokens")
        known("kv_dtype", self.kv_dtype, KvDtype)
        check_switch(self, "prefix_cache", "graphs")
        page = self.page_size
        chunk = self.prefill_chunk
        store = self.prefix_store
        enough = self.kv_tokens is None or self.kv_tokens > page
        require(enough, f"kv_tokens must be more than page_size ({page}), got {self.kv_tokens}")
        named = store is None or (isinstance(store, (str, PathLike)) and bool(store))
        require(named, f"prefix_store must name a folder, got {store!r}")
        for name in ("gpu_memory", "prefix_store_size"):
            require(is_a(getattr(self, name), Real), f"{name} must be a number, got {getattr(self, name)!r}")
        require(0.0 < self.gpu_memory <= 1.0, f"gpu_memory must be in (0, 1], got {self.gpu_memory}")
        size = self.prefix_store_size
        require(0.0 < size < 1 << 20, f"prefix_store_size must be more than 0 GiB, got {size:g}")
        require(store is None or self.prefix_cache, "prefix_store needs prefix_cache")
        whole = chunk is None or not chunk % page
        require(whole, f"prefill_chunk ({chunk}) must be a multiple of page_size ({page})")


@dataclass(frozen=True)
class SpecConfig:
    draft_tokens: int | None = None  # None: the controller chooses K every cycle
    tree: int | None = None  # maximum tokens per draft tree; 0: chains only; None: trees where they pay

    def __post_init__(self) -> None:
        k = self.draft_tokens
        tree = self.tree
        require(k is None or 0 <= k <= MAX_DRAFT, f"draft_tokens must be in 0..{MAX_DRAFT} or 'auto', got {k}")
        # a tree of one token is a chain, which is 0
        require(not tree or 2 <= tree <= MAX_DRAFT, f"{TREE_RULE}, got {tree}")


@dataclass(frozen=True)
class LoadSettings:
    """How a model is loaded and run: the arguments of `LLM.load`, also when commands and clusters call it."""

    # a tuple: two drafters, see `drafters`
    drafter: Annotated[
        str | Sequence[str],
        "What drafts: auto (the drafter that belongs to the model, else ngram) | none | ngram (repeats of the text) | "
        "a folder or id of an MTP, DFlash, DSpark or EAGLE-3 drafter | draft:MODEL (a small model). "
        "Given twice: an MTP and a block drafter, of which every cycle uses the faster one.",
    ] = "auto"
    draft_tokens: Annotated[
        int | str | None,
        "Draft tokens per cycle, 0..16; 0: plain decoding; auto: the fastest K, chosen before every cycle.",
    ] = "auto"
    tree: Annotated[int | str | None, "Maximum tokens per draft tree, 2..16; off: no branches; auto: if it pays."] = (
        "auto"
    )
    device: Annotated[str | None, "cpu or cuda. Default: cuda if there is a GPU."] = None
    dtype: Annotated[
        str | None,
        "Data type of dense weights: float32 | bfloat16 | float16. Default: bfloat16 on a GPU, else float32.",
    ] = None
    ops: Annotated[
        str,
        "Kernels: auto | reference (plain torch) | cpu | cpu:LEVEL (`outrider doctor` lists them) | triton | "
        "triton:dense (16-bit weights).",
    ] = "auto"
    threads: Annotated[int | None, "CPU threads. Default and maximum: the cores available to this process."] = None
    quantize: Annotated[str | None, "Round a dense checkpoint while loading: int8 | int4, on a GPU also fp8."] = None
    quantize_drafter: Annotated[
        str | None, "Round the dense weights of a block drafter (DFlash, DSpark, EAGLE-3). Default: as --quantize."
    ] = None
    tensor_parallel: Annotated[int, "Split the model over N processes, one GPU each (or all on the CPU)."] = 1
    vision: Annotated[bool, "Load the vision weights of a model that takes images."] = True
    image_tokens: Annotated[
        int, "Maximum soft tokens per image: 70 | 140 | 280 | 560 | 1120. More tokens: finer detail, longer prompts."
    ] = 280
    max_images: Annotated[int, "Maximum images per prompt."] = 16
    max_image_pixels: Annotated[int, "Maximum pixels per image file, according to its header."] = 64_000_000
    audio: Annotated[bool, "Load the audio weights of a model that takes sound."] = True
    max_clips: Annotated[int, "Maximum sound clips per prompt."] = 8
    load_format: LoadFormat = "auto"  # dummy: seeded random weights from the config alone, without a tokenizer
    seed: int = 0  # of dummy weights
    adapters: Mapping[str, str] = field(default_factory=dict)  # LoRA adapters: {name: a folder, .gguf file or id}
    max_adapters: Annotated[int, "Maximum LoRA adapters in memory; the least recently used one is evicted."] = 8
    engine: EngineConfig = EngineConfig()

    def __post_init__(self) -> None:
        drafters = [self.drafter] if isinstance(self.drafter, (str, PathLike)) else self.drafter
        paths = isinstance(drafters, (list, tuple)) and all(isinstance(one, (str, PathLike)) for one in drafters)
        require(paths, f"drafter must be 'auto', 'none', 'ngram' or where one is, got {self.drafter!r}")
        require(1 <= len(drafters) <= 2, f"drafter may be one or two (an MTP and a block drafter), got {len(drafters)}")
        named = tuple(str(one) for one in drafters)
        if len(named) == 2:
            alone = next((one for one in named if one in ("none", "ngram") or one.startswith("draft:")), None)
            why = "these are the same" if alone is None else f"{alone} stands alone"
            both = alone is None and named[0] != named[1]
            require(both, f"two drafters are an MTP and a block one; {why}")
        object.__setattr__(self, "drafter", named[0] if len(named) == 1 else named)
        is_config = isinstance(self.engine, EngineConfig)
        require(is_config, f"engine must be an EngineConfig, got {self.engine!r}: engine=EngineConfig(max_context=...)")
        check_whole(self, None, "threads", "seed")
        check_whole(self, 0, "max_images", "max_image_pixels", "max_clips")
        check_whole(self, 1, "tensor_parallel", "max_adapters")
        check_switch(self, "vision", "audio")
        require(isinstance(self.ops, str), f"ops must be a text such as 'auto' or 'cpu', got {self.ops!r}")
        spec = self.spec  # constructing it checks its fields
        if self.drafter == "none":
            drafted = "draft_tokens" if spec.draft_tokens else "tree"
            nothing = not spec.draft_tokens and not spec.tree
            require(nothing, f"drafter none drafts nothing: leave out {drafted}, or choose a drafter")
        known("dtype", self.dtype, Literal["float32", "bfloat16", "float16", None])
        for name in ("quantize", "quantize_drafter"):
            known(name, getattr(self, name), Literal["int8", "int4", "fp8", None])
        known("load_format", self.load_format, LoadFormat)
        budget = self.image_tokens in (70, 140, 280, 560, 1120)
        require(budget, f"image_tokens must be 70, 140, 280, 560 or 1120, got {self.image_tokens}")
        named_paths = isinstance(self.adapters, Mapping) and all(isinstance(name, str) for name in self.adapters)
        require(named_paths, f"adapters are {{name: path}}, got {str(self.adapters)[:60]}")
        one = self.tensor_parallel == 1
        alone = "for a model in one process: leave"
        require(one or not self.adapters, f"adapters are {alone} them out next to tensor_parallel")
        require(one or self.engine.prefix_store is None, f"prefix_store is {alone} it out next to tensor_parallel")

    @property
    def drafters(self) -> tuple[str, ...]:
        """One drafter, or two, from which the controller chooses."""
        return (self.drafter,) if isinstance(self.drafter, str) else tuple(self.drafter)

    @property
    def spec(self) -> SpecConfig:
        return SpecConfig(parse_draft_tokens(self.draft_tokens), parse_tree(self.tree))

    @classmethod
    def of(cls, options: Mapping[str, object]) -> LoadSettings:
        """From options by name, including the engine's."""
        return cls().changed(options)

    def changed(self, changes: Mapping[str, object]) -> LoadSettings:
        """A copy with these fields changed, also the engine's and `ALIASES`; an engine of None changes nothing."""
        values: dict[str, object] = {}
        inner = [f.name for f in fields(self.engine)]
        known = [*(f.name for f in fields(self)), *inner, *ALIASES]
        for spelled, value in changes.items():
            if spelled not in known:
                close = get_close_matches(spelled, known) or known
                raise OutriderError(f"unknown field {spelled!r}; known: {', '.join(close)}")
            name = ALIASES.get(spelled, spelled)
            if name in values and values[name] != value:
                both = " and ".join(f"{n}={v!r}" for n, v in changes.items() if ALIASES.get(n, n) == name)
                raise OutriderError(f"{both} are the same setting with different values: give one of them")
            if name != "engine" or value is not None:
                values[name] = value
        engine = values.pop("engine", self.engine)
        engine_values = {name: values.pop(name) for name in inner if name in values}
        if isinstance(engine, EngineConfig):  # anything else is refused below
            engine = replace(engine, **engine_values)  # type: ignore[arg-type]
        return replace(self, **values, engine=engine)  # type: ignore[arg-type]  # they are checked as they are set

    def options(self) -> dict[str, object]:
        """The options from which `of` makes these settings."""
        return {name: getattr(self.engine if name in ENGINE else self, name) for name in OPTIONS}


@dataclass(frozen=True)
class Option:
    kind: object  # its type
    default: object
    help: Any  # a text; of a command's own options it may be typer's description


def options(settings: type) -> dict[str, Option]:
    """The fields whose annotation carries a text, which is its last part."""
    hints = get_type_hints(settings, include_extras=True)
    annotated = {f.name: (f, hints[f.name]) for f in fields(settings) if get_origin(hints[f.name]) is Annotated}
    return {
        name: Option(get_args(hint)[0], field.default, get_args(hint)[-1]) for name, (field, hint) in annotated.items()
    }


ENGINE = options(EngineConfig)
OPTIONS = options(LoadSettings) | ENGINE


def parse_tree(text: str | int | None) -> int | None:
    """'auto', 'off' or a number, as users write it."""
    return SpecConfig(tree=_number(0 if text == "off" else text, TREE_RULE)).tree


def parse_draft_tokens(text: str | int | None) -> int | None:
    """'auto' or a number, as users write it."""
    number = _number(text, f"draft_tokens must be a number in 0..{MAX_DRAFT} or 'auto'")
    return SpecConfig(draft_tokens=number).draft_tokens


def _number(text: str | int | None, rule: str) -> int | None:
    if text is None or text == "auto":
        return None
    with bad_input(ValueError, lambda _: f"{rule}, got {text!r}"):
        return int(str(text))


def user_file_path() -> Path:
    return config_file()


def user_file() -> dict[str, dict[str, object]]:
    """The tables of the user's ~/.config/outrider/config.toml (XDG_CONFIG_HOME); empty if there is no such file."""
    path = user_file_path()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"cannot read {path}: {error}") from None
    with bad_input(tomllib.TOMLDecodeError, lambda error: f"{path} is not TOML: {error}"):
        tables = tomllib.loads(text)
    for name, table in tables.items():
        outside = "stands outside a table: write it under [defaults] or under a command, as [generate]"
        require(isinstance(table, dict), f"{user_file_place(None, name)}: {name!r} {outside}")
    for alias, model in tables.get("aliases", {}).items():
        is_name = isinstance(model, str) and bool(model)
        require(is_name, f"{user_file_place('aliases', alias)}: alias {alias!r} must name a model, got {model!r}")
    return tables


def user_file_place(table: str | None, key: str | None = None) -> str:
    """The path of the user's file and the line of a table or of one of its keys, as path:line; the path alone if the
    line is written in a way that is not looked for. `table` None: a key before the first table."""
    path = user_file_path()
    current: str | None = None
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError):
        return str(path)
    for number, line in enumerate(lines, 1):
        header = re.match(r"\s*\[\s*[\"']?([^\]\"']+?)[\"']?\s*\]", line)
        if header is not None:
            current = header[1]
            if key is None and current == table:
                return f"{path}:{number}"
        elif key is not None and current == table:
            assigned = re.match(r"\s*[\"']?([\w./:-]+)[\"']?\s*=", line)
            if assigned is not None and assigned[1].replace("-", "_") == key.replace("-", "_"):
                return f"{path}:{number}"
    return str(path)


def model_of(name: str) -> str:
    """Resolves an alias of the user's file. An existing path, and any other name, is returned as it is."""
    return name if os.path.exists(name) else str(user_file().get("aliases", {}).get(name, name))
