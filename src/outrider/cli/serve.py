"""`outrider serve`: the OpenAI-compatible server and its page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, TextIO, cast

import typer
from rich.text import Text

from ..config import LoadSettings
from ..platforms.limits import missing_protection
from ..server.settings import ServerSettings, read_keys
from ..types import OutriderError, require
from . import common
from .common import err

if TYPE_CHECKING:
    from ..server.model_info import ServedModel
    from ..server.model_pool import ModelPool

SEVERAL = f"{common.NAMES} Or name=MODEL. Further models are loaded on their first request."
Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help=SEVERAL, autocompletion=common.model_names)]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    models: Models
    name: Annotated[str | None, "The model name clients use. Default: MODEL (a folder's last part)."] = None
    memory: Annotated[float | None, "GiB for the weights and K/V of all models. Default: 80 % of free memory."] = None
    api_key: Annotated[str | None, "Key that clients must send as a bearer token."] = None
    otel_endpoint: Annotated[str | None, "Send request traces to this OTLP/HTTP collector."] = None
    max_concurrent: Annotated[int | None, "Maximum sequences decoding at once. Default: 254 on a GPU, else 8."] = None
    allowed_origin: Annotated[
        list[str] | None, "Allow cross-origin requests from this origin (repeatable; * allows any)."
    ] = None
    trusted_host: Annotated[
        list[str] | None, "Accept this Host header on loopback, for use behind a proxy (repeatable)."
    ] = None
    adapter: common.Adapters = None


@common.serving(ServerSettings)
@common.loading(*common.RUNNING, *common.IMAGES, *common.SOUND, *common.KEEPING, "max_adapters")
@common.taking(ServeOptions)
def serve(asked: ServeOptions, server: Callable[..., ServerSettings], load: LoadSettings) -> None:
    """Serve MODEL: the APIs of OpenAI, Anthropic and Ollama, and a page that shows the drafting live.

    Sampling options that a request leaves out come from the model's generation_config.json. If that has none, the
    temperature is 0.7; on Ollama's routes it is 0.8 with top-k 40 and top-p 0.9. GET /props shows them.

    If several models are named, the first is loaded at the start and each other one at its first request. When memory
    runs short, the least recently used model without requests is unloaded.

    Example: outrider serve smollm2, then open http://127.0.0.1:8000
    """
    sys.stdout = cast(TextIO, Unfailing(sys.stdout))
    sys.stderr = cast(TextIO, Unfailing(sys.stderr))
    with common.needs("the server needs", "serve"):
        from ..server.fair import SPARE
        from ..server.main import address, listen
        from ..server.main import serve as run
        from ..server.model_pool import read_names

    models = read_names(asked.models)
    load = common.with_adapters(load, asked.adapter)
    check_options(models, load, name=asked.name, memory_gib=asked.memory)
    settings = server_settings(asked, next(iter(models)), server)
    common.follow_if_told(load)
    require_protection(settings)
    # before the model is loaded: a port in use should not cost a minute
    listener = listen(settings.host, settings.port)
    if asked.max_concurrent is not None:
        load = replace(load, engine=replace(load.engine, max_batch=asked.max_concurrent + SPARE))
    served, settings = load_models(models, load, settings, memory_gib=asked.memory)
    announce(models, settings, address(settings, listener))
    run(served, settings, listener)


def check_options(models: Mapping[str, str], load: LoadSettings, name: str | None, memory_gib: float | None) -> None:
    """Refuse options that make no sense with one model, or with several. models: by the name they are served under."""
    if len(models) == 1:
        alone = "for one, --max-context bounds its K/V, and on a GPU --gpu-memory all"
        require(memory_gib is None, f"--memory is shared by several models: {alone}")
        return
    require(name is None, f"--name is for one model: write name=MODEL, as in {name}={next(iter(models.values()))}")
    if load.drafter not in ("auto", "none", "ngram"):
        named = " ".join(f"--drafter {one}" for one in load.drafters)
        raise OutriderError(f"{named} can't fit {len(models)} models: use auto, ngram or none")
    require(not load.adapters, f"--adapter is for one model: leave it out, or serve {next(iter(models))} alone")
    if memory_gib is not None and memory_gib <= 0:
        raise OutriderError(f"--memory must be more than 0 GiB, got {memory_gib:g}")
    require(load.tensor_parallel == 1, "--tensor-parallel serves one model: name only one")


def server_settings(asked: ServeOptions, first_name: str, server: Callable[..., ServerSettings]) -> ServerSettings:
    settings = server(
        model_name=asked.name or first_name,
        api_key=asked.api_key,
        otel_endpoint=asked.otel_endpoint,
        max_concurrent=8 if asked.max_concurrent is None else asked.max_concurrent,
        allowed_origins=tuple(asked.allowed_origin or ()),
        trusted_hosts=tuple(asked.trusted_host or ()),
    )
    return replace(settings, api_keys=read_keys(settings.api_key, settings.api_key_file))


def load_models(
    models: Mapping[str, str], load: LoadSettings, settings: ServerSettings, memory_gib: float | None
) -> tuple[ServedModel | ModelPool, ServerSettings]:
    """The only model, or a pool whose first model is loaded; and the settings, with the only model's batch size."""
    from ..ops import place
    from ..server.fair import SPARE
    from ..server.model_info import ServedModel
    from ..server.model_pool import ModelPool

    if len(models) == 1:
        llm = common.load_llm(next(iter(models.values())), load)
        return ServedModel.of(llm, err.print), replace(settings, max_concurrent=llm.engine.max_batch - SPARE)
    pool = ModelPool.listed(
        models,
        lambda model: common.load_llm(model, load),
        load.engine,
        limit=None if memory_gib is None else int(memory_gib * 2**30),
        settings=settings,
        cuda=place(load.device).type == "cuda",
    )
    pool.load_first()
    return pool, settings


def announce(models: Mapping[str, str], settings: ServerSettings, address: str) -> None:
    if not settings.loopback and not settings.api_keys:
        err.print(f"warning: {settings.host} can be reached from other machines and no API key is set", style="yellow")
    _, *others = models
    names = Text(", ").join(Text(name, "bold") for name in (settings.model_name, *others))
    err.print(Text.assemble("serving ", names, f" at {address} (page at /, API at /v1)"))


def require_protection(settings: ServerSettings) -> None:
    """Refuses requests from other machines if this system's sandboxes lack limits."""
    missing = missing_protection()
    if missing is not None and not settings.loopback:
        raise OutriderError(f"--host {settings.host}: {missing}; serve on 127.0.0.1, or on Linux")


class Unfailing:
    """An output stream whose failures are ignored: a full disk behind the log must not end a server."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()
