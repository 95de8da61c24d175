"""Entry point. Bad input is one line on stderr and exit code 2; Ctrl-C is 130; no traceback is shown."""

from __future__ import annotations

import atexit
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import __version__
from ..types import OutriderError
from . import common
from .help import HelpfulCommand, HelpfulGroup

COMMANDS = (
    *("generate", "chat", "serve", "launch", "deploy", "batch", "list", "pull", "rm", "show", "inspect", "merge"),
    *("prove", "bench", "bench-server", "predict", "train", "eval-drafter", "export", "demo", "doctor"),
)
FUNCTIONS = {
    **{"list": "store.listing", "pull": "store.pull", "rm": "store.remove", "show": "store.show"},
    **{"merge": "store.merge", "demo": "generate.demo"},
    **{n: f"drafters.{n.replace('-', '_')}" for n in ("train", "eval-drafter", "export")},
}
TRAINED = "gone: `outrider train` learns a clustered head with its drafter (`clusters` in a recipe)"
MOVED = {
    **{"cluster": TRAINED, "cluster-head": TRAINED, "load": "called `outrider bench-server` now"},
    "make-dummy": "gone: `LLM.load(..., load_format='dummy')` makes random weights in memory",
}


def app(names: Sequence[str] = COMMANDS) -> typer.Typer:
    """The command line with these commands. Each is a function in a module of the same name, except `FUNCTIONS`."""
    shell = typer.Typer(
        cls=HelpfulGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Lossless speculative decoding: the same answers, faster.",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name in names:
        plain = name.replace("-", "_")
        module, _, function = FUNCTIONS.get(name, f"{plain}.{plain}").partition(".")
        command = getattr(importlib.import_module(f".{module}", __package__), function)
        shell.command(name, cls=HelpfulCommand)(command)
    shell.callback(invoke_without_command=True)(version)
    return shell


def version(show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if show:
        print(__version__)
        raise typer.Exit


def main() -> None:
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # closed by the parent process
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # characters outside the terminal's encoding become question marks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8" if sys.platform == "win32" else None, errors="replace")
    code = run()
    try:
        sys.stdout.flush()
    except OSError as error:
        # the reader of the output has left, as in `outrider ... | head`: silent
        gone = isinstance(error, BrokenPipeError)
        if not gone and code != 2:  # with 2 an error was already printed
            print(f"outrider: {error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code or (1 if gone else 2)
    world = os.environ.get("WORLD_SIZE", "")
    distributed = sys.modules.get("torch.distributed")
    divided = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if divided or (world.isdecimal() and int(world) > 1):
        # One of several processes. Threads of the collectives may still use the interpreter, and abort the process
        # during its shutdown: so close the group (and what else asked for it), and skip the shutdown.
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def run() -> int:
    """Imports and runs only the command that the arguments name; returns the exit code."""
    named = sys.argv[1] if len(sys.argv) > 1 else None
    try:
        if named in MOVED:
            raise OutriderError(f"`outrider {named}` is {MOVED[named]}")
        shell = app((named,) if named in COMMANDS else COMMANDS)
        defaults = common.defaults(shell, named, COMMANDS)
        # The parser's own guess at the name follows how Python was started; shells complete `outrider`.
        return int(shell(prog_name="outrider", standalone_mode=False, default_map=defaults) or 0)
    except OutriderError as error:
        return refused(f"{error}{common.origin_of(str(error), named, sys.argv[1:])}")
    except OSError as error:  # of a file that was not checked before: a full disk, a read-only folder
        return refused(error.strerror or str(error), error.filename or out_option())
    # the parser's general error, which has no public name
    except typer.BadParameter.__mro__[1] as error:  # type: ignore[misc]
        command = f"outrider {named}" if named in COMMANDS else "outrider"
        # without arguments the help was printed, and there is nothing else to say
        message = " ".join(error.format_message().split()).rstrip(".")
        if message:
            origin = common.origin_of(message, named, sys.argv[1:])
            advice = origin or f" (see `{command} --help`)"
            print(f"outrider: {message}{advice}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print(file=sys.stderr)
        return 130
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:  # torch and safetensors have errors of their own for a full disk
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        return refused(os.strerror(errno.ENOSPC), out_option())


def refused(why: str, where: str = "") -> int:
    print(f"outrider: {f'{where}: ' if where else ''}{why}", file=sys.stderr)
    return 2


def out_option() -> str:
    """The path of --out: an error of an open file does not name its path."""
    from argparse import ArgumentParser

    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--out", nargs="?", default="")
    return parser.parse_known_args()[0].out or ""


if __name__ == "__main__":
    main()
