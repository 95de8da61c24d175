"""GGUF repositories on Hugging Face, and which GGUF files of a folder belong together. Torch-free.

`REPO:QUANT` (also behind hf.co/) names one file. One in Hugging Face's cache is used without a request. Drafters
(`…-assistant…gguf`) and projectors (`mmproj…gguf`) next to a model are told by their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten

from ..types import OutriderError, require

HOSTS = re.compile(r"(?:https?://)?(?:hf\.co|(?:www\.)?huggingface\.co)/")
# ids that the hub accepts: neither `--` nor `..`, no dash or dot at the ends
REPO = re.compile(r"((?!.*(?:--|\.\.))[A-Za-z0-9][\w.\-]{,95}/\w(?:[\w.\-]{,94}\w)?)(?::([\w.\-]+))?/?")
QUANT = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|T?Q\d_\d|BF16|F16|F32|MXFP4\w*))$", re.I)
SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
DRAFTER = re.compile(r"(^|[-_.])(assistant|drafter|mtp)([-_.]|$)", re.I)
USUAL = "Q4_K_M"  # fetched if no quantisation is named


def parse(name: str) -> tuple[str, str | None] | None:
    """(repository, quantisation or None) of `org/name`, `org/name:QUANT` and both behind hf.co/; None: no such name."""
    match = REPO.fullmatch(HOSTS.sub("", name, count=1))
    if match is None or match[1].endswith((".gguf", ".safetensors")):
        return None
    return match[1], match[2]


def stem(name: str | Path) -> str:
    """A GGUF file's name without its suffix and the number of its part."""
    return SPLIT.sub("", re.sub(r"\.gguf$", "", str(name), flags=re.I))


def quantisation(name: str | Path) -> str | None:
    match = QUANT.search(stem(name))
    return match[1].upper() if match else None


def base(name: str | Path) -> str:
    """A file's name without its quantisation, in lower case: equal for all files of a model."""
    return QUANT.sub("", stem(Path(name).name)).lower()


def is_mmproj(name: str | Path) -> bool:
    return "mmproj" in Path(name).name.lower()


def is_drafter(name: str | Path) -> bool:
    return not is_mmproj(name) and DRAFTER.search(stem(Path(name).name)) is not None


def is_model(name: str | Path) -> bool:
    return str(name).lower().endswith(".gguf") and not is_mmproj(name) and not is_drafter(name)


def companion(model: Path, kind: str) -> Path | None:
    """The `drafter` or `mmproj` next to a GGUF model: matched by name, or the only one next to the folder's only
    model."""
    test = is_drafter if kind == "drafter" else is_mmproj
    if test(model):
        return None
    files = sorted(p for p in model.parent.glob("*.gguf") if p.is_file())
    matches = [p for p in files if test(p) and p != model]
    named = [p for p in matches if base(model) in base(p)]
    alone = len({base(p) for p in files if is_model(p)}) == 1
    matches = named or (matches if alone and len({base(p) for p in matches}) == 1 else [])
    return next((p for p in matches if quantisation(p) == quantisation(model)), matches[0] if matches else None)


def choose(names: Iterable[str], repo: str, quant: str | None, drafter: bool = False) -> str:
    every = sorted(name for name in names if name.lower().endswith(".gguf") and not is_mmproj(name))
    files = [name for name in every if is_drafter(name) == drafter] or every
    require(bool(files), f"{repo} holds no GGUF model")
    by_quant = {
        quantisation(name) or stem(Path(name).name): name for name in reversed(files)
    }  # of several parts, the first
    usual = USUAL if USUAL in by_quant or len(by_quant) > 1 else next(iter(by_quant))
    wanted = usual if quant is None else quant
    chosen = next((file for key, file in by_quant.items() if key.upper() == wanted.upper()), None)
    if chosen is None:
        missing = f"no {quant}" if quant is not None else f"several quantisations, and no {USUAL}"
        there = ", ".join(sorted(by_quant))
        raise OutriderError(f"{repo} has {missing}: name one, as {repo}:{min(by_quant)} (there: {there})")
    if SPLIT.search(re.sub(r"\.gguf$", "", chosen, flags=re.I)):
        raise OutriderError(f"{repo}: {chosen} is one part of several: join them with `llama-gguf-split --merge`")
    return chosen


def in_cache(repo: str) -> list[Path]:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        return []
    return sorted(p for p in snapshot.rglob("*.gguf") if p.is_file())


def gguf_file(repo: str, quant: str | None, drafter: bool = False, fetch: bool = True) -> Path:
    """The file that `repo:quant` names, downloaded if necessary, with the drafter and mmproj next to it."""
    cached = {str(p): p for p in in_cache(repo)}
    if quant is not None and cached:
        with suppress(OutriderError):  # another quantisation: the hub may have this one
            return cached[choose(cached, repo, quant, drafter=drafter)]
    if not fetch:
        if cached and quant is None:
            return cached[choose(cached, repo, quant, drafter=drafter)]
        name = repo if quant is None else f"{repo}:{quant}"
        raise OutriderError(f"{repo} is a GGUF repository and not in the cache: `outrider pull {name}` fetches it")
    from huggingface_hub import HfApi, hf_hub_download

    with hub_errors(repo):
        names = [file.rfilename for file in HfApi().model_info(repo).siblings or ()]  # one request, no retries
        chosen = choose(names, repo, quant, drafter=drafter)
        path = Path(hf_hub_download(repo, chosen))
        if not drafter and any(is_drafter(name) for name in names):
            hf_hub_download(repo, choose([n for n in names if is_drafter(n)], repo, None, drafter=True))
        projectors = {quantisation(n) or "": n for n in sorted(names) if is_mmproj(n) and n.lower().endswith(".gguf")}
        if not drafter and projectors:
            best = next((projectors[q] for q in ("BF16", "F16") if q in projectors), min(projectors.values()))
            hf_hub_download(repo, best)
        return path


@contextmanager
def hub_errors(name: str, hint: str = "") -> Iterator[None]:
    """Turns the hub's errors into one line. hint: a similar name."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        yield
    except OutriderError:
        raise
    except GatedRepoError:
        raise OutriderError(f"{name} is gated: accept its terms on huggingface.co and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        why = f"neither a local path nor a repository on huggingface.co{hint} (private? set HF_TOKEN)"
        raise OutriderError(f"{name} is {why}") from None
    except Exception as error:  # its own, the system's, and those of the HTTP library that its version uses
        if constants.HF_HUB_OFFLINE:
            raise OutriderError(f"{name} is not in the cache{hint}, and HF_HUB_OFFLINE is set: unset it") from None
        why = shorten(str(error.__cause__ or error), 160, placeholder=" …")
        where = f"from huggingface.co and it is not in the cache{hint}"
        raise OutriderError(f"cannot fetch {name} {where} (no network?): {why}") from None
