"""`outrider serve`: the OpenAI-compatible server and its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config import LoadSettings
from ..types import OutriderError
from . import common
from .common import err

if TYPE_CHECKING:
    from ..server.catalogue import Listed
    from ..server.prepare import Backend
    from ..server.shelf import Shelf


Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...", help="smollm2, a folder, a .gguf file, or a Hugging Face id; or name=MODEL. Several are loaded when asked for."
    ),
]


@common.loading(*common.DRAFTING, *common.MACHINE, *common.ROOM, "swap", "load_format")
def serve(
    models: Models,
    host: Annotated[str, typer.Option(help="Address to listen on. Anything but loopback should have an API key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one, which is printed.")] = 8000,
    name: Annotated[str | None, typer.Option(help="The model name clients use. Default: MODEL (a folder's last part).")] = None,
    memory: Annotated[float | None, typer.Option(help="GiB for weights and K/V of several models. Default: 80 % of what is free.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OUTRIDER_API_KEY", help="Clients must send it as a bearer token.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="More keys, one a line; read again on SIGHUP.")] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="Serve https with this certificate (PEM, with its chain).")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its key, where the certificate's file does not hold it.")] = None,
    otel_endpoint: Annotated[
        str | None, typer.Option(envvar="OTEL_EXPORTER_OTLP_ENDPOINT", help="Spans of requests go to this OTLP/HTTP collector.")
    ] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Sequences that decode at once. Default: 254 on a GPU, else 8.")] = None,
    max_queued: Annotated[int, typer.Option(help="Sequences that wait behind them; more get 429.")] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds for one request, waiting included.")] = 600.0,
    max_body: Annotated[int, typer.Option(help="Most bytes of a request body; more get 413.")] = 4 << 20,
    max_prompt: Annotated[int, typer.Option(help="Most tokens of a prompt. 0: as many as the context holds.")] = 0,
    log_prompts: Annotated[bool, typer.Option(help="Write prompts to the log (off: no prompt text is ever logged).")] = False,
    shutdown_grace: Annotated[float, typer.Option(help="Seconds for running requests to finish on shutdown.")] = 10.0,
    log_level: Annotated[str, typer.Option(help="debug | info | warning | error.")] = "info",
    log_json: Annotated[bool, typer.Option(help="Logs as one JSON object a line.")] = False,
    allowed_origin: Annotated[list[str] | None, typer.Option(help="A page of this origin may call, too (repeatable; * is any).")] = None,
    trusted_host: Annotated[list[str] | None, typer.Option(help="A host name we may be called by on loopback (behind a proxy).")] = None,
    root_path: Annotated[str, typer.Option(help="The path a proxy serves us under.")] = "",
    max_connections: Annotated[int, typer.Option(help="Open connections; at the cap the one that keeps us waiting longest goes.")] = 512,
    request_timeout: Annotated[float, typer.Option(help="Seconds for a request's head to arrive, and for its body.")] = 30.0,
    idle_timeout: Annotated[float, typer.Option(help="Seconds a connection stays open between requests.")] = 60.0,
    stall_timeout: Annotated[float, typer.Option(help="Seconds a client may leave its answer unread.")] = 20.0,
    keep_prefixes: Annotated[float, typer.Option(help="Minutes that a text's beginning stays in memory after its last use (CPU).")] = 5.0,
    *,
    load: LoadSettings,
) -> None:
    """Serve MODEL with OpenAI's API at /v1 and a page at / that shows the drafting live.

    Of several models the first is loaded at the start, the others when somebody asks for them; where memory runs short, the one that
    was used least recently and has no request makes room.

    Example: outrider serve smollm2, then open http://127.0.0.1:8000
    """
    with common.needs("the server needs", "serve"):
        from ..server import catalogue
        from ..server.main import listen
        from ..server.main import serve as run
        from ..server.model import Model
        from ..server.prepare import Backend
        from ..server.settings import ServerSettings, read_keys
        from ..server.turns import SPARE
    from ..ops import place

    listed = catalogue.read(models)
    if len(listed) > 1:
        several(listed, name, load, memory)
    settings = ServerSettings(
        model_name=name or listed[0].name, host=host, port=port, api_keys=read_keys(api_key, api_key_file),
        api_key=api_key, api_key_file=api_key_file, ssl_certfile=ssl_certfile, ssl_keyfile=ssl_keyfile, otel_endpoint=otel_endpoint,
        max_concurrent=8 if max_concurrent is None else max_concurrent, max_queued=max_queued,
        timeout=timeout, max_body=max_body, max_prompt=max_prompt,
        log_level=log_level, log_json=log_json, allowed_origins=tuple(allowed_origin or ()), trusted_hosts=tuple(trusted_host or ()),
        root_path=root_path, log_prompts=log_prompts, shutdown_grace=shutdown_grace, max_connections=max_connections,
        request_timeout=request_timeout, idle_timeout=idle_timeout, stall_timeout=stall_timeout,
        keep_prefixes=keep_prefixes,
    )  # fmt: skip
    common.follow_if_told(load)
    listener = listen(host, port)  # before the model is loaded: a port in use should not cost a minute
    if max_concurrent is not None:
        load = replace(load, engine=replace(load.engine, max_batch=max_concurrent + SPARE))
    served: Backend | Shelf
    if len(listed) == 1:
        llm = common.load_llm(listed[0].model, load)
        settings = replace(settings, max_concurrent=llm.engine.max_batch - SPARE)
        served = Backend.of(llm, err.print)
    else:
        limit = None if memory is None else int(memory * 2**30)
        cuda = place(load.device).type == "cuda"
        served = catalogue.shelf(listed, lambda model: common.load_llm(model, load), load.engine, limit, settings, cuda)
        served.first.take(Model(served.first.name, served.first.load(), settings))
    if not settings.loopback and not settings.api_keys:
        err.print(f"[yellow]warning: {host} can be reached from other machines and no API key is set[/yellow]")
    scheme = "http" if ssl_certfile is None else "https"
    names = ", ".join(f"[bold]{one}[/bold]" for one in (settings.model_name, *(other.name for other in listed[1:])))
    err.print(f"serving {names} at {scheme}://{host}:{listener.getsockname()[1]} (page at /, API at /v1)")
    run(served, settings, listener)


def several(listed: Sequence[Listed], name: str | None, load: LoadSettings, memory: float | None) -> None:
    """What makes no sense with more than one model."""
    if name is not None:
        raise OutriderError(f"--name is for one model: write name=MODEL, as in {name}={listed[0].model}")
    if load.drafter not in ("auto", "none", "ngram"):
        raise OutriderError(f"--drafter {load.drafter} can't fit {len(listed)} models: use auto, ngram or none")
    if memory is not None and memory <= 0:
        raise OutriderError(f"--memory must be more than 0 GiB, got {memory:g}")
    if load.tensor_parallel > 1:
        raise OutriderError("--tensor-parallel serves one model: name only one")
