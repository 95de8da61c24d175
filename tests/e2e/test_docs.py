"""Every command in the docs: parsed by the real parser; and run, on a tiny model called smollm2, where a block is
marked so.

A comment before a fenced block says what to do with it:

    <!-- run -->            run it (bash or python) in a folder that holds a tiny model named smollm2
    <!-- file: NAME -->     write it to NAME in that folder
    <!-- serve --> / <!-- ask -->   start it and keep it running / run it against what was started
    <!-- skip: WHY -->      neither run nor parsed

Without one, each command of a shell block is parsed: options of `outrider` by its own parser, scripts and their
options, make targets and extras by what the repository has. So a renamed option fails here, on every page.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
import pytest
import typer
import typer.main
from tests import tiny
from tests.kernels import put_kernels
from tests.waiting import PATIENCE

from outrider.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"(?:<!-- *(?P<mark>[^>]*?) *-->\n+)?^```(?P<language>[a-z]*)[^\n]*\n(?P<body>.*?)^```", re.M | re.S)
FREE = {
    "curl",
    "docker",
    "git",
    "cd",
    "export",
    "pre-commit",
    "torchrun",
    "nsys",
    "ncu",
    "compute-sanitizer",
    "nginx",
    "for",
    "done",
    "wait",
    "echo",
    "uvx",
    "benchmarks/lm_eval/run.sh",
}
MARKS = ("run", "parse", "serve", "ask", "file", "skip")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    mark: str  # of MARKS, or empty
    argument: str
    language: str
    body: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    code_blocks = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            mark, _, argument = (match["mark"] or "").partition(":")
            if mark.strip() not in MARKS:
                mark = argument = ""
            line = text.count("\n", 0, match.start("language")) + 1
            code_blocks.append(
                Block(
                    str(page.relative_to(ROOT)), line, mark.strip(), argument.strip(), match["language"], match["body"]
                )
            )
    return code_blocks


def commands(block: Block) -> list[list[str]]:
    """The commands of a block as words. In blocks without a language only lines that look like ours count: the rest is
    output."""
    if block.mark in ("skip", "file") or block.language not in ("", "bash", "sh", "shell", "console"):
        return []
    out = []
    for raw in block.body.replace("\\\n", " ").splitlines():
        line = raw.strip().removeprefix("$ ")
        if not block.language and not re.match(r"(outrider|python|make|pip|torchrun|curl) ", line):
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # a quoted text that goes on in the next line
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words:
            out.append(words)
    return out


def mentioned() -> list[tuple[Block, list[str]]]:
    """Commands in running text: `outrider prove MODEL`. Those with [optional] parts or left-out ones are for people."""
    names = []
    for page in PAGES:
        text = BLOCK.sub(lambda m: "\n" * m[0].count("\n"), page.read_text(encoding="utf-8"))
        for match in re.finditer(r"`((?:outrider|make|python) [^`]*)`", text):
            command = " ".join(match[1].split())
            if not re.search(r"\[|\.\.\.|…|\||COMMAND|\bX\b|'\{", command):
                line = text.count("\n", 0, match.start()) + 1
                names.append((Block(str(page.relative_to(ROOT)), line, "", "", "", command), shlex.split(command)))
    return names


PARSED = [(block, words) for block in blocks() for words in commands(block)] + mentioned()


@pytest.mark.parametrize("block, words", PARSED, ids=[f"{b}-{' '.join(w)[:40]}" for b, w in PARSED])
def test_commands_are_what_the_repository_has(block: Block, words: list[str]) -> None:
    program = words[0]
    arguments = words[1:]
    if program == "outrider" or (program == "torchrun" and "outrider.cli.main" in arguments):
        if program == "torchrun":
            arguments = [a for a in arguments[arguments.index("outrider.cli.main") + 1 :] if a != "..."]
        parse(arguments)
    elif program in ("python", "python3"):
        script(arguments)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(arguments) <= set(targets), f"no make target {arguments}"
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for names in re.findall(r"(?:\.|outrider)\[([^\]]*)\]", " ".join(arguments)):
            assert set(names.split(",")) <= set(extras), f"no such extra: {names}"
    else:
        assert program in FREE, (
            f"{block}: nobody checks {program!r}; mark the block <!-- skip: why --> or teach this test"
        )


# ---- names in running text

# Records of what was measured and tried may name scripts that have gone since.
PAST = ("docs/lab/", "docs/adr/", "docs/gpu-measured.md", "docs/cpu-measured.md", "docs/training-measured.md")
FOREIGN = {"--help", "--from", "--torch-backend", "--tasks"}  # everybody's, uv's, lm-eval's


def test_options_and_files_in_the_text_exist() -> None:
    group = typer.main.get_command(app())
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    parameters = [*group.params, *(p for command in group.commands.values() for p in command.params)]
    options = {o for p in parameters for o in (*p.opts, *p.secondary_opts)} | FOREIGN
    scripts = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "benchmarks").glob("*.py"))
    files = [
        str(p.relative_to(ROOT))
        for top in ("src", "benchmarks", "tests", "tools", "deploy")
        for p in (ROOT / top).rglob("*.*")
    ]
    wrong = []
    for page in (page for page in PAGES if not str(page.relative_to(ROOT)).startswith(PAST)):
        for span in re.findall(r"`([^`\n]+)`", BLOCK.sub("", page.read_text(encoding="utf-8"))):
            if span.startswith("--"):
                named = re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", span)
                wrong += [
                    f"{page.name}: nothing has the option {o}"
                    for o in named
                    if o not in options and f'"{o}"' not in scripts
                ]
            elif re.fullmatch(r"[a-z0-9_/]+\.(py|h|c|toml|yaml|sh|js)", span) and span not in FILES:
                here = any(f"/{file}".endswith(f"/{span}") for file in files) or (ROOT / span).is_file()
                wrong += [] if here else [f"{page.name}: there is no file {span}"]
    assert not wrong, "\n".join(wrong)


FILES = {block.argument for block in blocks() if block.mark == "file"}


PYTHON = [block for block in blocks() if block.language == "python" and block.mark != "skip"]


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_blocks_are_python(block: Block) -> None:
    tree = ast.parse(block.body)
    for node in ast.walk(tree):  # what is imported from us exists
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outrider") and not node.level:
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, name.name) for name in node.names), f"{block}: {ast.unparse(node)}"


@cache
def commands_of_outrider() -> click.Group:
    return typer.main.get_command(app())  # type: ignore[return-value]


def parse(arguments: list[str]) -> None:
    group = commands_of_outrider()
    name = arguments[0]
    remaining = arguments[1:]
    if name.startswith("-"):
        assert name in {o for p in group.params for o in p.opts} | {"--help"}, f"no option {name}"
        return
    assert name in group.commands, f"no command outrider {name}"
    if not remaining:
        return  # the command's name alone
    try:
        group.commands[name].make_context(name, [a for a in remaining if a not in ("...", "…")])
    except (click.exceptions.Exit, typer.Exit):
        pass
    except Exception as error:
        pytest.fail(f"outrider {' '.join(arguments)}: {getattr(error, 'message', error)}")


def test_an_option_that_a_command_lacks_is_found() -> None:
    for command in (["train", "--target", "x", "--data", "y", "--out", "z", "--hold", "0.3"], ["chat", "--nothing"]):
        with pytest.raises(pytest.fail.Exception, match="No such option"):
            parse(command)


def script(arguments: list[str]) -> None:
    if arguments[0] in ("-m", "-c"):
        return
    path = ROOT / arguments[0]
    assert path.is_file(), f"{arguments[0]} does not exist"
    sources = "\n".join(p.read_text(encoding="utf-8") for p in path.parent.glob("*.py"))
    for option in (a.partition("=")[0] for a in arguments[1:] if a.startswith("--")):
        assert option in path.read_text(encoding="utf-8") or f'"{option}"' in sources, (
            f"{arguments[0]} has no option {option}"
        )


# ---- really run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader's: a model named smollm2, and `outrider` on the path."""
    folder = tmp_path_factory.mktemp("reader")
    tiny.write_target("llama", folder / "smollm2")
    put_kernels(folder / "cache")
    (folder / "bin").mkdir()
    command = folder / "bin" / "outrider"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m outrider.cli.main "$@"\n')
    command.chmod(0o755)
    for block in blocks():
        if block.mark == "file":
            (folder / block.argument).write_text(block.body)
    return folder


def environment(folder: Path) -> dict[str, str]:
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {
        "PATH": path, "PYTHONPATH": str(ROOT / "src"), "OUTRIDER_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }  # fmt: skip


def run(block: Block, folder: Path, body: str | None = None) -> str:
    program = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    done = subprocess.run(
        [*program, body or block.body], cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{block}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


RUN = [block for block in blocks() if block.mark == "run"]


@pytest.mark.parametrize("block", RUN, ids=str)
def test_marked_blocks_run(block: Block, folder: Path) -> None:
    run(block, folder)


def test_the_quick_start_serves_and_answers(folder: Path) -> None:
    """The blocks marked serve and ask, on another port than the page says."""
    [start] = [b for b in blocks() if b.mark == "serve"]
    command = [*shlex.split(start.body), "--port", "0", "--max-context", "256"]
    server = subprocess.Popen(command, cwd=folder, env=environment(folder), stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    said: list[str] = []
    try:
        while not (said and "serving" in said[-1]):
            said.append(server.stderr.readline())
            assert said[-1], "".join(said)
        [port] = re.findall(r"://[\d.]+:(\d+)", said[-1])
        for ask in (b for b in blocks() if b.mark == "ask"):
            got = run(ask, folder, ask.body.replace(":8000", f":{port}"))
            assert '"choices"' in got if ask.language != "python" else got.strip(), f"{ask}: {got}"
    finally:
        server.terminate()
        server.communicate(timeout=PATIENCE)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the docs extra is not installed: pip install 'outrider[docs]'")
    [options] = re.findall(
        r"^\t.*/mkdocs build(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )  # as `make docs` builds it
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        *shlex.split(options, comments=True),
        "--site-dir",
        str(tmp_path / "site"),
    ]
    quiet = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | quiet, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr and "--quiet" not in command  # which hides a dead anchor
    heavy = [p.name for p in (tmp_path / "site").rglob("*.html") if p.stat().st_size > 300_000]
    assert not heavy, f"over 300 KB: {heavy}"
    searched = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())["docs"]
    places = {entry["location"].partition("#")[0] for entry in searched}
    assert "how-it-works.html" in places
    assert not {p for p in places if p.startswith(("lab/", "history/", "changelog"))}, "records are not searched"
    cli = (tmp_path / "site" / "reference" / "cli.html").read_text()
    assert f"Outrider {tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['version']}" in cli
    assert "outrider doctor" in cli and "outrider batch" in cli and "--max-concurrent" in cli
    assert "http://" not in re.sub(
        r"https?://(127\.0\.0\.1|www\.w3\.org|outrider)\S*", "", (tmp_path / "site" / "index.html").read_text()
    )
