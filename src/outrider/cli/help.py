"""`--help`: commands and options in panels by their subject, names whole at 80 columns, vLLM's names beside ours."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from .common import out

COMMAND_PANELS: dict[str, tuple[str, ...]] = {
    "Use a model": ("generate", "chat", "serve", "launch", "batch", "deploy"),
    "Look and measure": ("demo", "doctor", "inspect", "predict", "prove", "bench", "bench-server"),
    "Models on this disk": ("list", "pull", "show", "rm", "merge"),
    "Drafters of your own": ("train", "eval-drafter", "export"),
}
PANELS: dict[str, tuple[str, ...]] = {  # in the order in which they are shown, after the command's other options
    "Sampling": (
        *("max_tokens", "temperature", "temperatures", "top_p", "top_k", "min_p", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty", "stop", "logprobs", "n", "seed"),
    ),
    "Model": (
        *("device", "dtype", "ops", "threads", "quantize", "tensor_parallel", "adapter", "max_adapters"),
        *("vision", "image_tokens", "audio", "memory"),
    ),
    "Speculation": ("drafter", "draft_tokens", "tree", "quantize_drafter"),
    "Memory": (
        *("max_context", "kv_dtype", "gpu_memory", "prefix_store", "prefix_store_size", "keep_prefixes"),
        "share_prefixes",
    ),
    "API": (
        *("host", "port", "name", "api_key", "api_key_file", "ssl_certfile", "ssl_keyfile", "allowed_origin"),
        *("trusted_host", "trusted_proxies", "root_path", "allow_image_hosts", "runtime_adapters"),
    ),
    "Limits": (
        *("max_concurrent", "max_queued", "timeout", "max_prompt", "max_body", "max_images", "max_image_pixels"),
        *("max_clips", "max_connections", "request_timeout", "idle_timeout", "stall_timeout", "finish_prompts"),
        "shutdown_grace",
    ),
    "Log": ("log_level", "log_json", "log_prompts", "otel_endpoint", "record_prompt"),
}
VLLM_NAMES = ("--max-model-len", "--max-num-seqs", "--gpu-memory-utilization", "--num-speculative-tokens")
VALUES: dict[object, str] = {int: "INT", float: "NUMBER", Path: "PATH"}
NAME_WIDTH = 27  # of the column of options' names
COMMAND_WIDTH = 16  # of the column of commands' names
MAX_WIDTH = 100


class HelpfulCommand(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        width = min(out.width, MAX_WIDTH)
        out.print(Text.assemble("Usage: ", (usage(self, ctx.command_path), "bold")))
        for paragraph in paragraphs(self.help or ""):
            out.print()
            out.print(Text(textwrap.fill(paragraph, width, break_on_hyphens=False)))
        arguments = shown(self, "argument")
        if arguments:
            print_panel("Arguments", arguments, width)
        for title, parameters in panels(self):
            print_panel(title, parameters, width)
        if any(p.param_type_name == "option" and p.secondary_opts for p in self.params):
            out.print("\nSwitches have a --no- form, which undoes what config.toml sets.")


class HelpfulGroup(TyperGroup):
    """The program itself: a line for each command."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        width = min(out.width, MAX_WIDTH)
        out.print(Text.assemble("Usage: ", ("outrider COMMAND [OPTIONS] [ARGUMENTS]", "bold")))
        out.print(f"\n{self.help}\nTry it: outrider demo. Options of a command: outrider COMMAND --help")
        for title, names in COMMAND_PANELS.items():
            out.print()
            out.print(title, style="bold")
            for name in names:
                if name in self.commands:
                    summary = first_sentence(self.commands[name].help or "")
                    print_entry(name, summary, name_width=COMMAND_WIDTH, width=width)
        print_panel("Options", shown(self, "option"), width)


def first_sentence(text: str) -> str:
    paragraph = next(paragraphs(text), "")
    end = paragraph.find(". ")
    return paragraph if end < 0 else paragraph[: end + 1]


def shown(command: TyperCommand | TyperGroup, kind: str) -> list[Any]:
    """The command's parameters of a kind, option or argument, that are not hidden."""
    parameters: list[Any] = list(command.params)
    return [p for p in parameters if p.param_type_name == kind and not p.hidden]


def usage(command: TyperCommand, path: str) -> str:
    words = [path, "[OPTIONS]"]
    for argument in shown(command, "argument"):
        name = argument_name(argument)
        words.append(name if argument.required else f"[{name}]")
    return " ".join(words)


def paragraphs(text: str) -> Iterator[str]:
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        yield " ".join(paragraph.split())


def panels(command: TyperCommand) -> Iterator[tuple[str, list[Any]]]:
    """The command's options by panel; options without a panel come first."""
    options = {option.name: option for option in shown(command, "option")}
    placed = {name for names in PANELS.values() for name in names}
    unplaced = [option for name, option in options.items() if name not in placed]
    if unplaced:
        yield "Options", unplaced
    for title, names in PANELS.items():
        chosen = [options[name] for name in names if name in options]
        if chosen:
            yield title, chosen


def print_panel(title: str, parameters: list[Any], width: int) -> None:
    out.print()
    out.print(title, style="bold")
    for parameter in parameters:
        is_option = parameter.param_type_name == "option"
        name = option_name(parameter) if is_option else argument_name(parameter)
        print_entry(name, about(parameter), name_width=NAME_WIDTH, width=width)


def print_entry(name: str, text: str, *, name_width: int, width: int) -> None:
    """A name and the text beside it; a name that is too long has a line of its own."""
    lines = textwrap.wrap(text, width - name_width, break_on_hyphens=False) or [""]
    if len(name) > name_width - 4:
        out.print(Text(f"  {name}", "cyan"))
    else:
        first = lines.pop(0)
        out.print(Text.assemble((f"  {name:<{name_width - 2}}", "cyan"), first))
    for line in lines:
        out.print(Text(" " * name_width + line))


def option_name(option: Any) -> str:
    names = sorted((name for name in option.opts if name not in VLLM_NAMES), key=len)
    if option.is_flag:
        return " / ".join([*names, *option.secondary_opts]) if option.default else ", ".join(names)
    return f"{', '.join(names)} {option.metavar or value_kind(option.type_descriptor.annotation)}"


def value_kind(annotation: object) -> str:
    """The word for an option's values."""
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    if get_origin(annotation) is list:
        annotation = get_args(annotation)[0]
    return VALUES.get(annotation, "TEXT")


def argument_name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def about(parameter: Any) -> str:
    """The help text, then default, other spellings and environment variable."""
    notes = []
    default = parameter.default
    is_flag = parameter.param_type_name == "option" and parameter.is_flag
    if not is_flag and default not in (None, "", [], ()):
        words = default if isinstance(default, (list, tuple)) else [default]
        notes.append(f"default: {', '.join(f'{w:g}' if isinstance(w, float) else str(w) for w in words)}")
    if parameter.param_type_name == "option" and parameter.required:
        notes.append("required")
    notes += [f"vLLM: {name}" for name in parameter.opts if name in VLLM_NAMES]
    if parameter.envvar:
        notes.append(f"env: {parameter.envvar}")
    text = " ".join((parameter.help or "").split())
    return f"{text} [{'; '.join(notes)}]" if notes else text
