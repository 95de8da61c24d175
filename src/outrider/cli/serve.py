"""`outrider serve`: the OpenAI-compatible server and its page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, TextIO, cast

import typer
from rich.text import Text

from ..config import LoadSettings
from ..platforms.limits import missing_protection
from ..server.settings import ServerSettings, read_keys
from ..types import OutriderError, require
from . import common
from .common import err

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
        from ..server.model_info import ServedModel
        from ..server.model_pool import ModelPool, read_names
    from ..ops import place

    listed = read_names(asked.models)
    load = common.with_adapters(load, asked.adapter)
    first, *others = listed
    if len(listed) > 1:
        several(listed, asked.name, load=load, memory=asked.memory)
    alone = "for one, --max-context bounds its K/V, and on a GPU --gpu-memory all"
    require(len(listed) > 1 or asked.memory is None, f"--memory is shared by several models: {alone}")
    settings = server(
        model_name=asked.name or first,
        api_key=asked.api_key,
        otel_endpoint=asked.otel_endpoint,
        max_concurrent=8 if asked.max_concurrent is None else asked.max_concurrent,
        allowed_origins=tuple(asked.allowed_origin or ()),
        trusted_hosts=tuple(asked.trusted_host or ()),
    )
    settings = replace(settings, api_keys=read_keys(settings.api_key, settings.api_key_file))
    common.follow_if_told(load)
    require_protection(settings)
    # before the model is loaded: a port in use should not cost a minute
    listener = listen(settings.host, settings.port)
    if asked.max_concurrent is not None:
        load = replace(load, engine=replace(load.engine, max_batch=asked.max_concurrent + SPARE))
    served: ServedModel | ModelPool
    if len(listed) == 1:
        llm = common.load_llm(listed[first], load)
        settings = replace(settings, max_concurrent=llm.engine.max_batch - SPARE)
        served = ServedModel.of(llm, err.print)
    else:
        limit = None if asked.memory is None else int(asked.memory * 2**30)
        cuda = place(load.device).type == "cuda"
        served = ModelPool.listed(
            listed, lambda model: common.load_llm(model, load), load.engine, limit=limit, settings=settings, cuda=cuda
        )
        served.load_first()
    if not settings.loopback and not settings.api_keys:
        err.print(f"warning: {settings.host} can be reached from other machines and no API key is set", style="yellow")
    names = Text(", ").join(Text(one, "bold") for one in (settings.model_name, *others))
    where = f" at {address(settings, listener)} (page at /, API at /v1)"
    err.print(Text.assemble("serving ", names, where))
    run(served, settings, listener)


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


def several(listed: Mapping[str, str], name: str | None, load: LoadSettings, memory: float | None) -> None:
    """Refuses options that make no sense with several models."""
    require(name is None, f"--name is for one model: write name=MODEL, as in {name}={next(iter(listed.values()))}")
    if load.drafter not in ("auto", "none", "ngram"):
        named = " ".join(f"--drafter {one}" for one in load.drafters)
        raise OutriderError(f"{named} can't fit {len(listed)} models: use auto, ngram or none")
    require(not load.adapters, f"--adapter is for one model: leave it out, or serve {next(iter(listed))} alone")
    if memory is not None and memory <= 0:
        raise OutriderError(f"--memory must be more than 0 GiB, got {memory:g}")
    require(load.tensor_parallel == 1, "--tensor-parallel serves one model: name only one")
