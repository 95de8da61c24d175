"""Reference pages made from the code itself: the command line, the Python API, the settings. Markdown as text.

What a page says of an option is its --help; of a field, the comment behind it. So the pages cannot say anything else
than the code.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator

import typer.main

ENVIRONMENT = {
    "OUTRIDER_CACHE": "Where the default model, compiled kernels and measured costs are kept. Default: "
    "`~/.cache/outrider`.",
    "OUTRIDER_API_KEY": "The same as `outrider serve --api-key`, without the key in the process list.",
    "CC": "The C compiler for the CPU kernels. Default: the first of `cc`, `gcc`, `clang`.",
    "XDG_CONFIG_HOME": "Where `outrider/config.toml` is looked for: aliases of models and default options. Default: "
    "`~/.config`.",
    "HF_HOME, HF_TOKEN, HF_HUB_OFFLINE": "Hugging Face's own: where its downloads are kept, your token, no network.",
    "CUDA_VISIBLE_DEVICES": "NVIDIA's own: which GPU is `cuda`.",
}


# ---- the command line


def command_line() -> str:
    from outrider.cli.main import app

    group = typer.main.get_command(app())
    out = ["# The command line", "", "Made from the code: what `outrider COMMAND --help` says.", ""]
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        out += [f"## outrider {name}", ""]
        out += [_paragraphs(inspect.cleandoc(command.help or "")), ""]
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        usage = " ".join(
            ["outrider", name, *(p.name.upper() if p.required else f"[{p.name.upper()}]" for p in arguments)]
        )
        out += ["```text", f"{usage} [OPTIONS]", "```", "", "| option | default | |", "|---|---|---|"]
        for p in command.params:
            if p.name == "help":
                continue
            names = (
                ", ".join(f"`{o}`" for o in [*p.opts, *p.secondary_opts])
                if p.param_type_name == "option"
                else f"`{p.name.upper()}`"
            )
            default = "required" if p.required else _default(p.default)
            variable = f" Environment: `{p.envvar}`." if p.envvar else ""
            out.append(f"| {names} | {default} | {_cell(p.help or '')}{variable} |")
        out.append("")
    return "\n".join(out)


def _paragraphs(text: str) -> str:
    """Examples as code."""
    lines = [
        f"`{line[9:]}`" if line.startswith("Example: ") and "," not in line else line
        for line in text.replace("\b", "").splitlines()
    ]
    return "\n".join(lines)


def _default(value: object) -> str:
    if value is None or value is False or callable(value) or value == "":
        return ""
    return f"`{value}`" if value is not True else "on"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


# ---- the Python API


def python_api() -> str:
    from outrider import LLM, Completion, OutriderError, SamplingParams
    from outrider.engine.engine import Event
    from outrider.types import RequestStats

    out = ["# The Python API", "", "`from outrider import LLM, SamplingParams`. Made from the code.", ""]
    out += ["## LLM", "", inspect.cleandoc(LLM.__doc__ or ""), ""]
    for name in ("load", "generate", "stream", "chat", "chat_prompt"):
        function = getattr(LLM, name)
        call = f"LLM.{name}" if name == "load" else f"llm.{name}"
        out += [
            f"### {call}",
            "",
            "```python",
            _signature(call, function),
            "```",
            "",
            inspect.cleandoc(function.__doc__ or ""),
            "",
        ]
    for kind in (SamplingParams, Completion, Event, RequestStats):
        out += [f"## {kind.__name__}", "", *_dataclass(kind), ""]
    out += ["## OutriderError", "", inspect.cleandoc(OutriderError.__doc__ or ""), ""]
    return "\n".join(out)


def _signature(name: str, function: object) -> str:
    source = textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    args = node.args
    args.args = [a for a in args.args if a.arg not in ("self", "cls")]
    text = f"{name}({ast.unparse(args)})"
    if len(text) > 100:
        parts = ast.unparse(args).split(", ")
        text = f"{name}(\n    " + ",\n    ".join(parts) + ",\n)"
    return f"{text} -> {ast.unparse(node.returns)}" if node.returns is not None else text


def _dataclass(kind: type) -> Iterator[str]:
    doc = inspect.getdoc(kind) or ""
    if doc and not doc.startswith(f"{kind.__name__}("):
        yield doc
        yield ""
    yield "| field | default | |"
    yield "|---|---|---|"
    for name, type_, default, comment in fields(kind):
        yield f"| `{name}: {type_}` | {f'`{default}`' if default else ''} | {_cell(comment)} |".replace(
            " | None", " \\| None"
        )


def fields(kind: type) -> Iterator[tuple[str, str, str, str]]:
    """(name, type, default, the comment behind it) of a dataclass."""
    assert dataclasses.is_dataclass(kind)
    source = textwrap.dedent(inspect.getsource(kind))
    lines = source.splitlines()
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            tail = lines[(node.end_lineno or 1) - 1].encode()[node.end_col_offset or 0 :].decode().strip()
            default = "" if node.value is None or isinstance(node.value, ast.Call) else ast.unparse(node.value)
            yield (
                node.target.id,
                ast.unparse(node.annotation),
                default,
                tail.lstrip("# ") if tail.startswith("#") else "",
            )


# ---- settings


def configuration() -> str:
    from outrider.config import EngineConfig, SpecConfig
    from outrider.server.settings import ServerSettings

    out = [
        "# Configuration",
        "",
        "Every command's options stand in [the command line](cli.md). Below: the environment, and the",
        "settings behind the options, as Python sees them. Made from the code.",
        "",
    ]
    out += ["## Environment", "", "| variable | |", "|---|---|"]
    out += [f"| {', '.join(f'`{n}`' for n in names.split(', '))} | {text} |" for names, text in ENVIRONMENT.items()]
    out += [""]
    titles = {"The engine": EngineConfig, "Speculation": SpecConfig, "The server": ServerSettings}
    for title, kind in titles.items():
        out += [f"## {title}", "", f"`{kind.__module__}.{kind.__name__}`", "", *_dataclass(kind), ""]
    return "\n".join(out)
