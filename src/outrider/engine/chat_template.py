"""Chat templates. A template is untrusted code: it runs in jinja's sandbox, in a server in a subprocess with limits on
CPU time, memory and output (`TemplateProcess`). Run as a script, this file is that process (child_process.py): the
template, then variables arrive as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

if __name__ != "__main__":  # the process itself imports nothing of this package
    from .child_process import ChildLost, ChildProcess
if TYPE_CHECKING:
    from jinja2.parser import Parser

# limits of one rendering: CPU time, bytes, characters
SECONDS = 2.0
MEMORY = 512 << 20
OUTPUT = 16 << 20
# Names that a template's variables can't have: what it writes as control tokens, and what the sandbox itself
# defines.
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "range", "dict"}
    | {"lipsum", "cycler", "joiner", "namespace", "loop", "self", "super", "caller", "varargs", "kwargs"}
)


def reserved(name: str) -> bool:
    return name in RESERVED or name.endswith("_token") or not name.isidentifier()


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class ChatTemplate:
    """May raise anything: a template is bad input."""

    def __init__(self, source: str) -> None:
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise
        env.globals["strftime_now"] = _strftime_now
        self._template = env.from_string(source)

    def render(self, variables: dict[str, Any]) -> str:
        return self._template.render(variables)


class TemplateProcess:
    def __init__(self, source: str, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        """Limits of one rendering: CPU time, and bytes of the whole process."""
        self._limits = f"{seconds:g} seconds or {memory >> 20} MB"
        self._child = ChildProcess(__file__, lambda: json.dumps([source, seconds, memory]).encode())

    def render(self, variables: dict[str, Any]) -> str:
        """Thread-safe; blocks until done. Raises jinja2.TemplateError if it fails or exceeds its limits."""
        try:
            said: dict[str, str] = json.loads(self._child.call(json.dumps(variables).encode()))
        except ChildLost:
            why = "the model is being unloaded" if self._child.closed else f"it takes more than {self._limits}"
            raise jinja2.TemplateError(why) from None
        if "error" in said:
            raise jinja2.TemplateError(said["error"])
        return said["text"]

    def close(self) -> None:
        self._child.close()


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja's own filter escapes HTML, which is no part of a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _answer(template: ChatTemplate | None, source: str, variables: dict[str, Any]) -> dict[str, str]:
    try:
        text = (template or ChatTemplate(source)).render(variables)
    except Exception as error:
        return {"error": " ".join(str(error).split())[:200] or type(error).__name__}
    return {"text": text} if len(text) <= OUTPUT else {"error": f"it writes more than {OUTPUT} characters"}


def _limit_memory(memory: int) -> None:
    """Windows has no such limits: a server there is reached from its own machine only (platforms/limits.py)."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(ValueError, OSError):  # macOS accepts no limit below what is mapped
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def _start_clock(seconds: float) -> Callable[[], object]:
    """Ends this process after so much processor time, on Windows so many seconds; returns what stops the clock."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)
        return functools.partial(signal.setitimer, signal.ITIMER_PROF, 0.0)
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()
    return timer.cancel


def answers(frames: Iterator[bytes]) -> Iterator[bytes]:
    """In the process itself, which ends by the signal of a timer that has run out."""
    source, seconds, memory = json.loads(next(frames))
    _limit_memory(memory)
    template: ChatTemplate | None = None
    for variables in map(json.loads, frames):
        stop_clock = _start_clock(seconds)
        with contextlib.suppress(Exception):  # a broken one is reported with each answer
            template = template or ChatTemplate(source)
        said = _answer(template, source, variables)
        stop_clock()
        yield json.dumps(said).encode()
