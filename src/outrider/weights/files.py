"""A checkpoint on this disk: its configuration, its tensors, its text files and its fingerprint. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..models.config import ForeignDict, text_part
from ..types import OutriderError, TextFiles
from . import gguf, gguf_config, gguf_text, safetensors
from .safetensors import read_json
from .source import TensorSource

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Files:
    """A resolved checkpoint. `config` is a Hugging Face style dict (for GGUF made from the metadata)."""

    name: str  # what the user asked for
    path: Path  # a folder, or a .gguf file
    config: ForeignDict
    gguf: gguf.GGUF | None = None


def from_folder(path: Path, name: str) -> Files:
    """A folder with config.json (weights may be absent: that is enough to inspect it or to run it on dummy weights)."""
    if not (path / "config.json").is_file():
        inside = sorted(path.glob("*.gguf"))
        if len(inside) == 1:
            return from_gguf(inside[0], name)
        folders = [p.parent for where in ("*", "snapshots/*") for p in sorted(path.glob(f"{where}/config.json"))]
        if found := [str(p.relative_to(path)) for p in (*inside, *folders)]:
            more = f" and {len(found) - 4} more" if len(found) > 4 else ""
            raise OutriderError(f"{path} has no config.json, but holds {', '.join(found[:4])}{more}: name one of them")
        raise OutriderError(f"{path} has no config.json: is it a checkpoint folder?")
    config = read_json(path / "config.json")
    if (path / "generation_config.json").is_file():
        generation = read_json(path / "generation_config.json")
        for key in ("eos_token_id", "num_assistant_tokens"):  # the stop tokens of chat models stand only here
            if generation.get(key) is not None:
                config[key] = generation[key]
    return Files(name, path, config)


def from_gguf(path: Path, name: str) -> Files:
    opened = gguf.read(path)
    return Files(name, path, gguf_config.hf_config(opened), opened)


def open_source(files: Files) -> TensorSource:
    if files.gguf is not None:
        return gguf_config.source(files.gguf, files.config)
    return safetensors.open_folder(files.path, files.config)


def fingerprint(files: Files) -> str:
    """A cheap content hash of a model: configuration, names, shapes and sampled bytes of its tensors."""
    return open_source(files).fingerprint()


def text_files(files: Files) -> TextFiles:
    if files.gguf is not None:
        return gguf_text.text_files(files.gguf)
    return _folder_text(files.path, files.config)


def _folder_text(folder: Path, config: ForeignDict) -> TextFiles:
    path = folder / "tokenizer.json"

    def build() -> Tokenizer:
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise OutriderError(f"{path} is not a tokenizer: {str(error)[:100]}") from None

    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    specials = {}
    for key, value in settings.items():
        if key.endswith("_token"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                specials[key] = content
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
        )
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    both = {**text_part(config), **{k: v for k, v in config.items() if v is not None}}
    eos, bos = both.get("eos_token_id"), both.get("bos_token_id")
    return TextFiles(
        where=str(folder),
        build=build if path.is_file() else None,
        chat_template=template if isinstance(template, str) else None,
        specials=specials,
        bos_id=bos if isinstance(bos, int) else None,
        eos_ids=tuple(e for e in (eos if isinstance(eos, list) else [eos]) if isinstance(e, int)),
        add_bos=bool(settings.get("add_bos_token", False)),
    )
