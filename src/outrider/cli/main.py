"""Entry point. Bad input is one line on stderr and exit code 2; Ctrl-C is 130; nobody sees a traceback."""

from __future__ import annotations

import os
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
from .deploy import deploy
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

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Lossless speculative decoding: the same answers, faster.")
COMMANDS = (
    generate, chat, serve, deploy, batch, inspect, prove, bench, bench_gpu, predict, train, eval_drafter, cluster, load, make_dummy,
    demo, doctor,
)  # fmt: skip
for command in COMMANDS:
    app.command()(command)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if show:
        print(__version__)
        raise typer.Exit


def main() -> None:
    code = run()
    if left_a_team() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # One of several processes. Threads of the collectives may still want the interpreter, and abort the process when they find
        # it being taken down: so it is not taken down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def left_a_team() -> bool:
    """Whether a model was divided over processes; the others are told that this is the end."""
    if "outrider.parallel.team" not in sys.modules:
        return False
    from ..parallel.team import Team

    if Team.here is None:
        return False
    Team.here.close()
    return True


def run() -> int:
    """The command that the arguments name; returns the exit code."""
    try:
        app()
    except OutriderError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    main()
