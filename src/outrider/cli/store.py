"""`outrider list`, `pull`, `rm`, `show` and `merge`: the models and drafters on this disk, and what they were used
with."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal as size

from ..config import model_of, user_file
from ..ops.cpu.build import cache_path
from ..types import OutriderError, require
from . import common
from .common import out


@dataclass(frozen=True)
class Item:
    """A model or drafter on this disk."""

    name: str  # usable as MODEL
    kind: str  # model | drafter | mmproj
    bytes: int
    path: str
    used: str = ""  # the day of its last use
    drafter: str = ""  # the drafter it was last used with


def listing(as_json: common.AsJson = False) -> None:
    """List the models and drafters on this disk.

    They are those in Hugging Face's cache, in our own, GGUF files of this folder, and what was used before."""
    items = list(at_hand())
    if as_json:
        print(json.dumps([asdict(item) for item in items]))
        return
    out.print(line("kind", "size", "last used", name="name", drafter=""), style="dim")
    for item in items:
        drafter = f"  (with {item.drafter})" if item.drafter else ""
        out.print(line(item.kind, size(item.bytes), item.used, name=item.name, drafter=drafter))
    for alias, model in user_file().get("aliases", {}).items():
        out.print(f"{alias} = {model}", style="dim")


def line(kind: str, nbytes: str, used: str, name: str, drafter: str) -> str:
    """A row of the list. The name comes last and is never folded, so that a long path can be copied."""
    return f"{kind:<8}{nbytes:>9}  {used:<10}  {name}{drafter}"


def pull(name: common.Model) -> None:
    """Fetch a model, and the drafter that belongs to it. REPO:Q4_K_M (hf.co/REPO:Q4_K_M) is one file of a GGUF
    repository.

    Example: outrider pull bartowski/SmolLM2-360M-Instruct-GGUF:Q4_K_M
    """
    from ..weights import hub

    files = hub.resolve(name)
    where, why = hub.auto_drafter(files)
    if where is not None and not Path(where).exists():
        hub.resolve(where, "drafter")
    out.print(f"{name}: {size(stored(files.path))} in {files.path}")
    out.print(f"drafter: {where} ({why})" if where is not None else f"drafter: none ({why})", style="dim")


def remove(name: common.Model) -> None:
    """Remove a model from Hugging Face's cache or our own. REPO:QUANT removes one file of a repository. Your own
    files stay."""
    from ..weights import hub, repos

    name = model_of(name)
    if os.path.exists(os.path.expanduser(name)):
        raise OutriderError(f"{name} is a file or folder of yours, not one of the caches': remove it yourself")
    freed = 0
    named = repos.parse(name)
    if name == "smollm2":
        path = hub.cache_path("smollm2", hub.SMOLLM2_FILE)
        freed = stored(path)
        path.unlink(missing_ok=True)
    elif named is not None and named[1] is not None:
        cached = {str(p): p for p in repos.in_cache(named[0])}
        if any(repos.quantisation(p) == named[1].upper() for p in cached):
            path = cached[repos.choose(cached, *named)]
            freed = stored(path)
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
    else:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound

        repo = named[0] if named is not None else name
        with suppress(CacheNotFound):
            cache = scan_cache_dir()
            revisions = [r.commit_hash for one in cache.repos if one.repo_id == repo for r in one.revisions]
            if revisions:
                strategy = cache.delete_revisions(*revisions)
                freed = strategy.expected_freed_size
                strategy.execute()
    require(freed > 0, f"{name} is not in the cache: `outrider list` shows what is")
    out.print(f"{name} removed: {size(freed)} freed")


def show(name: common.Model, as_json: common.AsJson = False) -> None:
    """Show where a model lies, its size, and the drafter and projector that belong to it. `outrider inspect` says more
    of its layers."""
    from ..weights import hub, repos
    from ..weights.files import model_config

    files = hub.resolve(name, weights=False)
    config = model_config(files)
    where, why = hub.auto_drafter(files)
    mmproj = repos.companion(files.path, "mmproj") if files.gguf is not None else None
    last = used().get(files.name, {})
    nbytes = stored(files.path)
    data = {
        "name": name,
        "path": str(files.path) if files.path.exists() else None,
        "bytes": nbytes,
        "model_type": config.model_type,
        "quantisation": repos.quantisation(files.path) if files.gguf is not None else None,
        "max_context": config.max_context,
        "drafter": where,
        "drafter_note": why,
        "mmproj": str(mmproj) if mmproj is not None else None,
        "last_used": last.get("used"),
        "last_drafter": last.get("drafter"),
    }
    if as_json:
        print(json.dumps(data))
        return
    for key, value in (data | {"bytes": size(nbytes) if nbytes else None}).items():
        if value:
            out.print(f"{key.replace('_', ' '):<14}{value}")


def merge(
    model: common.Model,
    adapter: Annotated[str, typer.Option(metavar="PATH", help="A PEFT folder, a .gguf adapter or a Hugging Face id.")],
    to: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new folder for the merged checkpoint.")],
) -> None:
    """Write MODEL with a LoRA adapter added into its weights.

    Sums are computed in float32 and stored in the checkpoint's dtype. The merged checkpoint runs on every executor at
    full speed. Its answers can differ in the last bits from those of the adapter next to the base, since the sum is
    rounded once more. A quantised MODEL is refused.

    Example: outrider merge org/model --adapter ./my-adapter --out ./merged
    """
    from ..weights.adapter import merge as run

    changed = run(model, adapter, to, say=common.note)
    out.print(f"{to}: {changed} tensors changed")


def at_hand() -> Iterator[Item]:
    """All rows of `list`, without duplicates. Imports neither torch nor an HTTP client."""
    from ..weights import hub, repos

    uses = used()

    def item(name: str, path: Path, nbytes: int) -> Item:
        kind = "model"
        if repos.is_mmproj(path):
            kind = "mmproj"
        elif repos.is_drafter(path) or repos.is_drafter(name):
            kind = "drafter"
        last = uses.pop(name, {})
        return Item(
            name, kind, bytes=nbytes, path=str(path), used=last.get("used", ""), drafter=last.get("drafter", "")
        )

    smollm2 = hub.cache_path("smollm2", hub.SMOLLM2_FILE)
    if smollm2.is_file():
        yield item("smollm2", smollm2, stored(smollm2))
    for shipped in sorted(hub.ASSETS.glob("*/config.json")):
        yield Item(str(shipped.parent), "drafter", bytes=stored(shipped.parent), path=str(shipped.parent))
    for repo, folder in cached_repos():
        files = repos.in_cache(repo)
        for path in files:
            yield item(f"{repo}:{repos.quantisation(path) or repos.stem(path.name)}", path, stored(path))
        if not files:
            yield item(repo, folder, stored(folder / "snapshots"))
    for path in sorted(Path().glob("*.gguf")):
        yield item(str(path), path, stored(path))
    for name in list(uses):
        path = Path(name).expanduser()
        if path.exists():
            yield item(name, path, stored(path))


def cached_repos() -> Iterator[tuple[str, Path]]:
    """The id and folder of each model in Hugging Face's cache."""
    from huggingface_hub import constants

    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        if (folder / "snapshots").is_dir():
            yield folder.name.removeprefix("models--").replace("--", "/"), folder


def stored(path: Path) -> int:
    """Bytes of a file, or of a folder's files. Hard links to one file count once."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in {p.resolve() for p in files if p.is_file()})


def used() -> dict[str, dict[str, str]]:
    """The record that `note_use` writes; empty if the file is missing or damaged."""
    try:
        records = json.loads(cache_path("used.json").read_text(encoding="utf-8"))
        return {name: row for name, row in records.items() if isinstance(row, dict)}
    except (OSError, ValueError, AttributeError):
        return {}


def note_use(name: str, drafter: str) -> None:
    """Records that a model was loaded, and with which drafter. An unwritable cache loses only the record."""
    row = {"used": time.strftime("%Y-%m-%d"), "drafter": drafter.removeprefix("drafter: ").partition(" (")[0]}
    uses = used()
    if uses.get(name) == row:
        return
    path = cache_path("used.json")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(uses | {name: row}), encoding="utf-8")
        fresh.replace(path)
