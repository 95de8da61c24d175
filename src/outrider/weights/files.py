"""A checkpoint on this disk: its configuration, its tensors, its text files and its fingerprint. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..models.block_config import is_block
from ..models.config import ForeignDict, ModelConfig, text_part
from ..models.names import UNUSED, block_name
from ..types import OutriderError, TextFiles, bad_input, require
from . import gguf, gguf_config, gguf_text, safetensors
from .gguf_text import RANGES, advised
from .mapped import TensorEntry, TensorSource
from .repos import is_model
from .safetensors import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

C = TypeVar("C")
MISREAD = (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class Files:
    """A resolved checkpoint. `config` is a Hugging Face style dict, for GGUF built from the metadata."""

    name: str  # as given by the user
    path: Path  # a folder, or a .gguf file
    config: ForeignDict
    gguf: gguf.GGUF | None = None


def from_folder(path: Path, name: str) -> Files:
    """A folder with config.json. Weights may be missing: inspection and dummy weights do not need them."""
    if not (path / "config.json").is_file():
        inside = sorted(path.glob("*.gguf"))
        inside = [p for p in inside if is_model(p)] or inside  # a drafter or a projector may lie next to the model
        if len(inside) == 1:
            return from_gguf(inside[0], name)
        folders = [p.parent for where in ("*", "snapshots/*") for p in sorted(path.glob(f"{where}/config.json"))]
        candidates = [str(p.relative_to(path)) for p in (*inside, *folders)]
        if candidates:
            more = f" and {len(candidates) - 4} more" if len(candidates) > 4 else ""
            raise OutriderError(
                f"{path} has no config.json, but holds {', '.join(candidates[:4])}{more}: name one of them"
            )
        raise OutriderError(f"{path} has no config.json: is it a checkpoint folder?")
    config = read_json(path / "config.json")
    if (path / "generation_config.json").is_file():
        generation = read_json(path / "generation_config.json")
        for key in ("eos_token_id", "num_assistant_tokens"):  # stop tokens of chat models are only in this file
            if generation.get(key) is not None:
                config[key] = generation[key]
    return Files(name, path, config)


def from_gguf(path: Path, name: str) -> Files:
    opened = gguf.read(path)
    return Files(name, path, config=gguf_config.hf_config(opened), gguf=opened)


def same_tokens(a: Files, b: Files) -> bool:
    """True if two tokenizers agree up to padding and a few added tokens, whose drafts are rejected."""
    builders = [text_files(files).build for files in (a, b)]
    vocabs = [build().get_vocab(with_added_tokens=True).items() for build in builders if build is not None]
    return len(vocabs) == 2 and len(vocabs[0] & vocabs[1]) >= 0.99 * max(map(len, vocabs))


def check_draft_model(target: Files, draft: Files) -> int:
    """Number of token ids that a draft model and its target share. Raises an error if they differ in more than
    padding."""
    ours, theirs = (model_config(files).vocab_size for files in (target, draft))
    if ours != theirs and not same_tokens(target, draft):
        why = f"vocabularies of {theirs} and {ours} tokens, from two tokenizers"
        raise OutriderError(f"{draft.name} cannot draft for {target.name}: {why}")
    return min(ours, theirs)


def translate(reader: Callable[[dict[str, object]], C], files: Files) -> C:
    """Turns errors of reading a foreign dict, which may hold anything at any depth, into bad input."""
    what = f"{files.name}: its configuration makes no sense"
    with bad_input(MISREAD, lambda error: f"{what} ({type(error).__name__}: {str(error)[:80]})"):
        return reader(files.config)


def model_config(files: Files) -> ModelConfig:
    """Configuration of a model to run; refuses drafters. (An EAGLE-3 drafter claims to be a Llama.)"""
    require(not is_block(files.config), f"{files.name} is a drafter, not a target: pass it with --drafter")
    return translate(ModelConfig.from_hf, files)


def already_quantised(files: Files, how: str) -> OutriderError:
    what = f"is quantised already ({how})"
    return OutriderError(f"{files.name} {what}: --quantize rounds dense checkpoints; leave it out")


def open_source(files: Files) -> TensorSource:
    """The tensors. Those of a block drafter get one spelling; tensors used only in its training are left out."""
    source = stored_source(files)
    if not is_block(files.config):
        return source
    entries: dict[str, TensorEntry] = {}
    for stored, entry in source.entries.items():
        name = block_name(stored)
        require(name not in entries, f"{source.where}: tensor {name} is there twice, in two spellings")
        if not name.endswith(UNUSED):
            entries[name] = entry
    return replace(source, entries=entries)


def stored_source(files: Files) -> TensorSource:
    if files.gguf is not None:
        return gguf_config.source(files.gguf, files.config)
    return safetensors.open_folder(files.path, files.config)


def fingerprint(files: Files) -> str:
    """A cheap content hash of a model: configuration, and names, shapes and sampled bytes of its tensors."""
    return stored_source(files).fingerprint()


def text_files(files: Files) -> TextFiles:
    if files.gguf is not None:
        return gguf_text.text_files(files.gguf)
    return _folder_text(files.path, files.config)


def _folder_text(folder: Path, config: ForeignDict) -> TextFiles:
    path = folder / "tokenizer.json"

    def build() -> Tokenizer:
        from tokenizers import Tokenizer

        # the library raises bare Exception
        with bad_input(Exception, lambda error: f"{path} is not a tokenizer: {str(error)[:100]}"):
            return Tokenizer.from_file(str(path))

    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    specials = {}
    for key, value in settings.items():
        if key.endswith("_token"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                specials[key] = content
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template") if named else None
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        with bad_input(UnicodeDecodeError, lambda error: f"{jinja} is not UTF-8: {error.reason}"):
            template = jinja.read_text(encoding="utf-8")
    both = {**text_part(config), **{k: v for k, v in config.items() if v is not None}}
    eos = both.get("eos_token_id")
    bos = both.get("bos_token_id")
    return TextFiles(
        where=str(folder),
        build=build if path.is_file() else None,
        chat_template=template if isinstance(template, str) else None,
        specials=specials,
        bos_id=bos if isinstance(bos, int) else None,
        eos_ids=tuple(e for e in (eos if isinstance(eos, list) else [eos]) if isinstance(e, int)),
        add_bos=bool(settings.get("add_bos_token", False)),
        sampling=sampling_of(folder),
    )


def sampling_of(folder: Path) -> dict[str, float]:
    """Sampling settings of generation_config.json. With `do_sample: false` they have no effect, as in transformers."""
    path = folder / "generation_config.json"
    settings = read_json(path) if path.is_file() else {}
    return (
        advised(settings, {name: name for name in RANGES}, str(path)) if settings.get("do_sample") is not False else {}
    )
