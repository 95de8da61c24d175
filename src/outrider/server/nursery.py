"""A process of its own in which grammars are tried before the server compiles them: `python -m outrider.server.nursery`.

A few bytes of schema can take a compiler any time and any memory, or overflow its stack, and nothing inside a process can
stop that. So this process holds a tokenizer, forks a child for each grammar, and the child lives under limits: processor
time, address space, stack. Whatever happens to it is the answer. Lines of JSON come on stdin (the set-up, then grammars and
cancellations) and go out on stdout. It ends with its stdin; its children leave most of the processor to those who decode.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
from dataclasses import dataclass

from ..engine.grammar import GrammarCompiler
from ..types import OutriderError
from .grammar_source import MAX_CHARS, Source, build

STACK = 1 << 20  # bytes; any thread of the server has more


@dataclass
class Child:
    id: str
    pid: int
    deadline: float
    said: bytes = b""
    late: bool = False


def main() -> None:
    line, pending = _first_line()
    setup = json.loads(line)
    compiler = GrammarCompiler(setup["tokenizer"], setup["vocab"], setup["eos"])
    seconds, memory = float(setup["seconds"]), int(setup["memory"])
    children: dict[int, Child] = {}  # by the pipe it speaks through
    lines = pending.split(b"\n")
    while True:
        *orders, pending = lines
        for order in orders:
            _order(json.loads(order), compiler, children, seconds, memory)
        lines = [pending]
        wait = min((c.deadline for c in children.values()), default=None)
        ready, _, _ = select.select([0, *children], [], [], None if wait is None else max(0.0, wait - time.monotonic()))
        for child in children.values():
            if time.monotonic() > child.deadline and not child.late:
                child.late, child.deadline = True, float("inf")
                os.kill(child.pid, signal.SIGKILL)
        for pipe in [p for p in ready if p in children]:
            data = os.read(pipe, 1 << 20)
            children[pipe].said += data
            if not data:
                _report(children.pop(pipe), pipe, seconds, memory)
        if 0 in ready:
            data = os.read(0, 1 << 20)
            if not data:
                break
            lines = (pending + data).split(b"\n")
    for child in children.values():
        os.kill(child.pid, signal.SIGKILL)


def _first_line() -> tuple[bytes, bytes]:
    """The first line of stdin and what came with it."""
    parts: list[bytes] = []
    while not parts or b"\n" not in parts[-1]:
        parts.append(os.read(0, 1 << 20))
        if not parts[-1]:
            sys.exit()
    line, _, rest = b"".join(parts).partition(b"\n")
    return line, rest


def _order(order: dict[str, str], compiler: GrammarCompiler, children: dict[int, Child], seconds: float, memory: int) -> None:
    if "cancel" in order:
        for child in children.values():
            if child.id == order["cancel"]:
                os.kill(child.pid, signal.SIGKILL)
        return
    source = Source(order["kind"], order["payload"], order["field"])  # type: ignore[arg-type]
    mine, its = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(mine)
        _try(source, compiler, its, seconds, memory)
    os.close(its)
    children[mine] = Child(order["id"], pid, time.monotonic() + 10 * seconds)  # it may have to wait for its second


def _try(source: Source, compiler: GrammarCompiler, pipe: int, seconds: float, memory: int) -> None:
    """In the child. Never returns."""
    out: dict[str, object]
    try:
        os.nice(10)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_STACK, (STACK, STACK))
        resource.setrlimit(resource.RLIMIT_AS, (_size() + memory,) * 2)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a dying compiler has to say is of no use
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        text = build(source)
        if len(text) > 4 * MAX_CHARS:
            raise OutriderError(f"it makes a grammar of {len(text)} characters; {4 * MAX_CHARS} are allowed")
        compiler.compile(text)
        out = {"text": text, "bytes": max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024}
    except OutriderError as e:
        out = {"error": str(e)}
    except MemoryError:
        os.kill(os.getpid(), signal.SIGABRT)
    except BaseException as e:
        out = {"error": f"it can't be compiled ({type(e).__name__})"}
    data = json.dumps(out).encode()
    while data:
        data = data[os.write(pipe, data) :]
    os._exit(0)


def _report(child: Child, pipe: int, seconds: float, memory: int) -> None:
    os.close(pipe)
    _, status = os.waitpid(child.pid, 0)
    if child.said and status == 0:
        _say({"id": child.id, **json.loads(child.said)})
    elif child.late or os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGXCPU):
        _say({"id": child.id, "error": f"it takes more than {seconds:g} seconds to compile: make it simpler"})
    else:  # out of memory or out of stack: which of them, the system doesn't say
        _say({"id": child.id, "error": f"it needs more than {memory >> 20} MB or nests too deep to be compiled: make it simpler"})


def _size() -> int:
    """Bytes of address space in use."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # no /proc: a roomy guess
        return 4 << 30


def _say(message: dict[str, object]) -> None:
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
