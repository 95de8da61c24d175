"""`outrider deploy`: several engines behind one address, on Ray Serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from ..types import require
from . import common
from .common import err, needs, note


@dataclass(frozen=True, kw_only=True)
class DeployOptions:
    what: Annotated[
        str, typer.Argument(metavar="MODEL|FILE.yaml", help="A model as in `outrider serve`, or a configuration file.")
    ]
    replicas: Annotated[str | None, "Number of engines, or bounds for autoscaling such as 2..8."] = None
    name: Annotated[str | None, "The model name clients use. Default: MODEL (a folder's last part)."] = None
    host: Annotated[str | None, "Address to listen on (127.0.0.1)."] = None
    port: Annotated[int | None, "Port to listen on (8000)."] = None
    set_: Annotated[list[str] | None, "Any other field of the file: --set max_concurrent=16 (repeatable)."] = None
    address: Annotated[
        str, "Ray: auto (RAY_ADDRESS, else one that runs here, else a new one) | local | HOST:PORT | ray://…."
    ] = "auto"
    check: Annotated[bool, "Only check the configuration and print it."] = False


@common.taking(DeployOptions)
def deploy(asked: DeployOptions) -> None:
    """Serve MODEL as several replicas behind one address, on a Ray cluster.

    Without a Ray cluster, one is started on this machine and ends with the command. On a running cluster the command
    returns when all replicas answer; run again with other settings it replaces them one by one, and no request fails.

    Example: outrider deploy smollm2 --replicas 2..8
    """
    import yaml

    with needs("deploying needs", "ray"):
        from ..cluster.config import ClusterConfig
    args: dict[str, object] = {"config" if asked.what.endswith((".yaml", ".yml")) else "model": asked.what}
    for word in asked.set_ or ():
        field, equals, value = word.partition("=")
        require(bool(equals), f"--set needs FIELD=VALUE, got {word!r}")
        args[field] = value
    options = {field: getattr(asked, field) for field in ("replicas", "name", "host", "port")}
    config = ClusterConfig.from_args(args | {field: value for field, value in options.items() if value is not None})
    if asked.check:
        print(yaml.safe_dump({"model": config.model, **config.fields()}, sort_keys=False), end="")
        return
    with needs("deploying needs", "ray"):
        from ..cluster import run
    run.up(config, asked.address, note=note, say=err.print)
