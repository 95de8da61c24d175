"""Code that commands share: options as typer types, loading, the line of statistics, the stable JSON object."""

from __future__ import annotations

import functools
import inspect
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, replace
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
import typer.main
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.models import ArgumentInfo, OptionInfo

from ..config import ALIASES, OPTIONS, KvDtype, LoadSettings, Option, options, user_file, user_file_place
from ..prompts import read_prompts
from ..types import GREEDY_EPS, OutriderError, RequestStats, SamplingParams, bad_input, require
from .quick import quick_start

if TYPE_CHECKING:
    from ..engine.machine_load import OtherLoad
    from ..llm import LLM, Completion

N = TypeVar("N", int, float)
Command = Callable[..., None]
if not os.environ.get("COLUMNS", "").strip("0"):
    os.environ.pop("COLUMNS", None)  # a terminal without a known width reports 0: rich would print nothing
# Paths, prompts and answers are printed verbatim: brackets and colons are not markup. Colours come from styles.
out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)

NAMES = "smollm2, a folder, a .gguf file, a Hugging Face id (org/name, org/name:Q4_K_M) or an alias."


def command_line() -> str:
    """The command line, quoted for a shell."""
    return shlex.join(["outrider", *sys.argv[1:]])


def model_names(incomplete: str) -> list[str]:
    """Shell completions of a model's name."""
    from .store import at_hand

    names = [*(item.name for item in at_hand() if item.kind == "model"), *user_file().get("aliases", {}), "smollm2"]
    return sorted({name for name in names if name.startswith(incomplete)})


Model = Annotated[str, typer.Argument(help=NAMES, autocompletion=model_names)]
MaxTokens = Annotated[int, "Maximum tokens to generate."]
Seed = Annotated[int, "Random seed."]
Adapters = Annotated[
    list[str] | None,
    typer.Option("--adapter", metavar="NAME=PATH", help="A LoRA adapter: PEFT folder, .gguf file or id (repeatable)."),
]
PlannedSequences = Annotated[
    int | None, "Sequences at once that memory is planned for. Default: as in serve, 254 on a GPU."
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]

PROMPTS = (  # default prompts
    "Why is the sky blue?",
    "Write a Python function that merges two sorted lists.",
    "List ten animals and one fact about each.",
    "Explain what a hash table is to a child.",
    "Write a short story about a lighthouse keeper.",
    "Translate into French: the weather is fine and the train is late.",
    "Give a recipe for pancakes with exact amounts.",
    "What are the causes of inflation?",
)


def note(line: str) -> None:
    """Prints a line that is not part of the result, on stderr."""
    err.print(line, style="dim", soft_wrap=not err.is_terminal)  # on a terminal words stay whole


def note_of(others: OtherLoad) -> None:
    """Reports the load of other programs during a timing, if there was any."""
    line = others.line()
    if line is not None:
        err.print(line, style="yellow")


def table(heads: Sequence[str], rows: Iterable[Sequence[str | Text]], texts: Collection[str], **style: Any) -> Table:
    """Columns are right-aligned figures, except those in `texts`, which may wrap."""
    columns = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="dim", title_justify="left", **style)
    for head in heads:
        text = head in texts
        columns.add_column(head, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    for row in rows:
        columns.add_row(*row)
    return columns


def teller(quiet: bool) -> Callable[[str], None]:
    return (lambda _: None) if quiet else note


def needs(who: str, extra: str) -> AbstractContextManager[None]:
    """Wraps imports of packages that only an extra installs."""
    return bad_input(ModuleNotFoundError, lambda error: f"{who} {error.name}: pip install 'outrider[{extra}]'")


DRAFTING = ("drafter", "draft_tokens", "tree")
MACHINE = ("device", "dtype", "ops", "threads", "quantize", "quantize_drafter", "tensor_parallel")
ROOM = ("max_context", "kv_dtype", "gpu_memory")
RUNNING = (*DRAFTING, *MACHINE, *ROOM)
PLANNING = ("drafter", "quantize", "tensor_parallel", *ROOM, "vision", "audio")  # options of `serve` that decide memory
KEEPING = ("prefix_store", "prefix_store_size")
IMAGES = ("vision", "image_tokens", "max_images", "max_image_pixels")
SOUND = ("audio", "max_clips")
ImageFiles = Annotated[
    list[str] | None,
    typer.Option("--image", metavar="FILE", help="An image that the prompt is about (may be repeated)."),
]
AudioFiles = Annotated[
    list[str] | None,
    typer.Option("--audio", metavar="FILE", help="A sound file that the prompt is about (may be repeated)."),
]
SPELLINGS = (*ALIASES.items(), ("max_num_seqs", "max_concurrent"))  # names in other engines, and ours
VARIABLES = {"api_key": "OUTRIDER_API_KEY", "otel_endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT"}
SHARED = ("max_tokens", "temperature", "top_p", "top_k", "seed")  # [defaults] of the user's file may set them


def loading(*names: str) -> Callable[[Command], Command]:
    """Gives a command these load options; it receives their values as its parameter `load`, a `LoadSettings`."""
    switch = typer.Option("--audio-weights/--no-audio", help=OPTIONS["audio"].help)  # --audio names a file
    known = OPTIONS | {"audio": replace(OPTIONS["audio"], help=switch)}
    return offering("load", {name: known[name] for name in names}, LoadSettings.of)


def serving(settings: type) -> Callable[[Command], Command]:
    """Gives a command the options of server settings; it receives a function that makes the settings."""
    return offering("server", options(settings), lambda given: functools.partial(settings, **given))


def taking(settings: type) -> Callable[[Command], Command]:
    """Gives a command the fields of a dataclass as arguments and options; it receives them as its parameter `asked`."""
    return offering("asked", options(settings), lambda given: settings(**given))


def offering(
    parameter: str, named: Mapping[str, Option], make: Callable[[dict[str, object]], object]
) -> Callable[[Command], Command]:
    """Gives a command more options; it receives the object made from them as that parameter. An annotation's last item
    is the help of its option, or a typer option; other fields become no options."""
    described = (str, OptionInfo, ArgumentInfo)
    offered = {name: typed(name, option) for name, option in named.items() if isinstance(option.help, described)}

    def around(command: Command) -> Command:
        @functools.wraps(command)
        def run(**given: object) -> None:
            with bad_input(OutriderError, lambda error: as_options(str(error), offered)):
                settings = make({name: given.pop(name, one.default) for name, one in offered.items()})
            command(**{parameter: settings, **given})

        parameters = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != parameter]
        # what typer reads
        run.__signature__ = inspect.Signature([*parameters, *offered.values()])  # type: ignore[attr-defined]
        run.__annotations__ = {}
        return run

    return around


def as_options(message: str, names: Iterable[str]) -> str:
    """Replaces names of settings' fields in a message by options: max_context by --max-context."""
    fields = "|".join(names)
    return re.sub(rf"(?<![\w'-])({fields})(?![\w'-])", lambda found: "--" + found[0].replace("_", "-"), message)


def typed(name: str, option: Option) -> Parameter:
    kind = option.kind
    default = option.default
    about = option.help
    if kind == str | Sequence[str]:  # may be repeated
        kind = list[str]
        default = [default]
    elif kind in (int | str | None, KvDtype):  # text, checked by the settings
        kind = str
    if isinstance(about, str):
        spelled = (name.strip("_"), *(alias for alias, ours in SPELLINGS if ours == name))
        # a switch has a --no- form, since the user's file may have set it
        names = ["--" + one.replace("_", "-") for one in spelled] if kind is not bool else []
        about = typer.Option(*names, help=about, envvar=VARIABLES.get(name))
    default = Parameter.empty if default is MISSING else default
    annotated = Annotated[kind, about]  # type: ignore[valid-type]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotated)


def defaults(shell: typer.Typer, named: str | None, commands: Sequence[str]) -> dict[str, dict[str, object]]:
    """Values of a command's options from the user's file, in the parser's form: [defaults] for options that the command
    has, then the command's own table."""
    tables = user_file()
    known = ("aliases", "defaults", *commands)
    for name in tables:
        listed = f"known: {', '.join(known)}"
        require(name in known, f"{user_file_place(name)}: unknown table [{name}]; {listed}")
    shared = {key.replace("-", "_"): value for key, value in tables.get("defaults", {}).items()}
    common = (*OPTIONS, *SHARED)
    for key in shared:
        place = user_file_place("defaults", key)
        require(key in common, f"{place}: unknown option {key!r} in [defaults]; known: {', '.join(common)}")
    if named is None or named not in commands or not (shared or named in tables):
        return {}
    command = typer.main.get_command(shell).commands[named]  # type: ignore[attr-defined]
    typed = ((word, p) for p in command.params if p.param_type_name == "option" for word in p.opts)
    options = {word[2:].replace("-", "_"): p for word, p in typed if word.startswith("--")}
    values = {key.replace("-", "_"): value for key, value in tables.get(named, {}).items()}
    for key in values:
        place = user_file_place(named, key)
        require(key in options, f"{place}: unknown option {key!r} in [{named}]: see `outrider {named} --help`")
    chosen = {key: value for key, value in (shared | values).items() if key in options}
    read = ((options[key], value) for key, value in chosen.items())
    return {named: {p.name: [v] if p.multiple and isinstance(v, str) else v for p, v in read}}


def origin_of(message: str, named: str | None, arguments: Sequence[str]) -> str:
    """Ending of an error about an option that the user's file sets; empty for other options."""
    try:
        tables = user_file()
    except OutriderError:
        return ""
    on_command_line = {word.partition("=")[0] for word in arguments}
    for option in re.findall(r"--([a-z][a-z-]*[a-z])", message):
        name = option.replace("-", "_")
        spellings = {name, *(alias for alias, ours in SPELLINGS if ours == name)}
        if any("--" + spelling.replace("_", "-") in on_command_line for spelling in spellings):
            continue
        for table in (named or "defaults", "defaults"):
            for key in tables.get(table, {}):
                if key.replace("-", "_") in spellings:
                    return f" (set in {user_file_place(table, key)})"
    return ""


def sampling(**given: object) -> SamplingParams:
    """Sampling parameters from options; a note names options without effect under greedy decoding."""
    with bad_input(OutriderError, lambda error: as_options(str(error), given)):
        params = SamplingParams(**given).validate()  # type: ignore[arg-type]  # the parser has read them
    idle = [name for name in ("top_p", "top_k", "min_p") if getattr(params, name) != getattr(SamplingParams, name)]
    if idle and params.temperature < GREEDY_EPS:
        listed = as_options(", ".join(idle), idle)
        note(f"{listed}: without effect at temperature 0 (--temperature 1 draws as the model has it)")
    return params


def with_adapters(load: LoadSettings, given: list[str] | None) -> LoadSettings:
    """Settings with the adapters of `--adapter NAME=PATH`; a path alone is named by its last part."""
    adapters: dict[str, str] = {}
    for text in given or ():
        name, sign, path = text.partition("=")
        if not sign or Path(text).exists():
            name = Path(text).name.removesuffix(".gguf")
            path = text
        require(name not in adapters, f"--adapter: two adapters would have the name {name!r}: write NAME=PATH")
        adapters[name] = path
    return replace(load, adapters=adapters)


def load_llm(model: str, load: LoadSettings, quiet: bool = False) -> LLM:
    """Loads the model and prints the choices made, once."""
    follow_if_told(load)
    say = teller(quiet)
    from .store import note_use

    with quick_start(load.device):
        from ..llm import LLM

        llm = LLM.load(model, load, say=say)
    note_use(model, llm.drafter_note)
    max_context = load.engine.max_context
    if max_context is not None and max_context > llm.config.max_context:
        say(f"context: {llm.engine.max_context} tokens (--max-context {max_context} is more than this model knows)")
    return llm


def follow_if_told(load: LoadSettings) -> None:
    """Follows rank 0 if this process has another rank: under torchrun every process runs the same command. Followers
    never return from here."""
    if load.tensor_parallel > 1:
        from ..llm import worker
        from ..parallel import is_worker

        if is_worker():
            worker(load.device)


def standard_input() -> str:
    """The whole input, as text."""
    if sys.stdin is None:
        raise OutriderError("standard input is closed: nothing can be read from it")
    with bad_input(UnicodeDecodeError, lambda e: f"standard input is not UTF-8: {e.reason} at byte {e.start}"):
        return typer.get_text_stream("stdin", "utf-8", "strict").read().removeprefix("\ufeff")


def prompt_texts(path: Path | None) -> list[str]:
    """The first question of each line of a file; without a file, the built-in prompts."""
    return [prompt.text for prompt in read_prompts(path)] if path is not None else list(PROMPTS)


def parts(text: str) -> tuple[str, ...]:
    """Values of an option such as a,b,c."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str, kind: Callable[[str], N], option: str) -> tuple[N, ...]:
    with bad_input(ValueError, lambda _: f"{option} must be numbers separated by commas, got {text!r}"):
        values = tuple(kind(part) for part in parts(text))
    require(bool(values), f"{option} is empty: give for instance 1,4")
    return values


def stats_line(stats: RequestStats, finish: str) -> str:
    parts = [
        f"{stats.new_tokens} tokens ({finish})",
        f"first after {stats.ttft_s * 1e3:.0f} ms",
        f"{stats.decode_tps:.1f} tok/s",
    ]
    if stats.drafted:
        counts = zip(stats.accepted_by_position, stats.drafted_by_position)
        by_position = " ".join(f"{100 * accepted / drafted:.0f}" for accepted, drafted in counts if drafted)
        parts.append(f"{stats.tokens_per_cycle:.2f} tokens per cycle")
        parts.append(f"{100 * stats.accepted / stats.drafted:.0f} % of drafts right (by position {by_position})")
    if stats.trees:
        parts.append(f"{stats.branched} tokens from branches")
    if stats.drafter_off:
        parts.append(f"drafter switched off: {stats.drafter_off}")
    return " · ".join(parts)


def writable(option: str, path: Path) -> AbstractContextManager[None]:
    return bad_input(OSError, lambda error: f"{option} {path} cannot be written: {error.strerror or error}")


def check_folder(option: str, path: Path) -> None:
    """Checks before long work that a folder can be written or created."""
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    with writable(option, path), tempfile.TemporaryFile(dir=there) as trial:
        trial.write(bytes(4096))


def check_file(option: str, path: Path, suffix: str = "") -> None:
    """Checks before long work that a file of this kind can be written."""
    require(path.suffix.lower() == suffix or not suffix, f"{option} {path}: name a file that ends in {suffix}")
    new = not path.exists()
    with writable(option, path):
        path.open("ab").close()
    if new:
        path.unlink()
        check_folder(option, path.parent)


def times(speedup: float) -> str:
    """A ratio of speeds in words that also fit a slowdown."""
    if not speedup:
        return "too short to compare"
    return f"{speedup:.2f}x faster" if speedup >= 0.995 else f"slower: {speedup:.2f}x the speed of plain decoding"


def completion_json(completion: Completion) -> dict[str, object]:
    stats = completion.stats
    last = max((i + 1 for i, d in enumerate(stats.drafted_by_position) if d), default=0)
    counts = ("prompt_tokens", "cached_tokens", "new_tokens", "cycles", "drafted", "accepted", "trees", "branched")
    figures = {
        **{name: getattr(stats, name) for name in counts},
        "ttft_ms": round(stats.ttft_s * 1e3, 3),
        "prefill_s": round(stats.prefill_s, 6),
        "decode_s": round(stats.decode_s, 6),
        "decode_tps": round(stats.decode_tps, 3),
        "tokens_per_cycle": round(stats.tokens_per_cycle, 4),
        "accepted_by_position": stats.accepted_by_position[:last],
        "drafted_by_position": stats.drafted_by_position[:last],
    }
    row: dict[str, object] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stats": figures,
    }
    if completion.logprobs:
        row["logprobs"] = [{str(t): v for t, v in entry.items()} for entry in completion.logprobs]
    return row
