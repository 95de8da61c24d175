"""Entry point. Bad input is one line on stderr and exit code 2; Ctrl-C is 130; nobody sees a traceback."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .. import __version__
from ..types import OutriderError
from .batch import batch
from .bench import bench
from .bench_gpu import bench_gpu
from .chat import chat
from .cluster import cluster
from .demo import demo
from .doctor import doctor
from .eval_drafter import eval_drafter
from .generate import generate
from .inspect import inspect
from .load import load
from .make_dummy import make_dummy
from .predict import predict
from .prove import prove
from .serve import serve
from .train import train

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Lossless speculative decoding: the same answers, faster.",
)
COMMANDS = (
    generate, chat, serve, batch, inspect, prove, bench, bench_gpu, predict, train, eval_drafter, cluster, load, make_dummy, demo, doctor,
)  # fmt: skip
for command in COMMANDS:
    app.command()(command)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if show:
        print(__version__)
        raise typer.Exit


def main() -> None:
    try:
        app()
    except OutriderError as error:
        print(f"outrider: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
