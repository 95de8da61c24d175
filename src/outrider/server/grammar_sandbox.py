"""A sandbox process that tries grammars before the server compiles them (engine/child_process.py).

A few bytes of schema can cost a compiler any amount of time and memory, or overflow its stack, and no check inside a
process can stop that. So this process holds a tokenizer and, for each grammar, forks a child with limits on processor
time, address space and stack. Another child reports how it ended: compiled, or over which limit. Every grammar has a
connection of its own; closing it ends the trial. An ordinary trial takes milliseconds; a longer one gets only idle
processor time. Windows has no fork: there the process itself tries one grammar after the other, and the server kills it
when a trial is late.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys

from ..engine.child_process import LENGTH, frames
from ..engine.grammar import GrammarCompiler
from ..types import OutriderError
from .grammar_source import MAX_CHARS, GrammarSource, GrammarText, build

STACK = 1 << 20  # bytes; every thread of the server has more
# seconds of processor time after which a trial gets the lowest priority; seconds between two checks
QUICK = 0.1
LOOK = 0.05


class GrammarSandbox:
    def __init__(self, compiler: GrammarCompiler, seconds: float, memory: int) -> None:
        """`seconds` of processor time and `memory` in bytes are the limits of one trial."""
        self.compiler = compiler
        self.seconds = seconds
        self.memory = memory

    def answer(self, source: GrammarSource, connection: int, yielding: bool) -> dict[str, object]:
        """The grammar's text and size, or the reason for its refusal. Ends this process when the connection closes.

        `yielding`: after `QUICK` seconds the trial runs on idle processors only.
        """
        if sys.platform == "win32":
            raise NotImplementedError("Windows: answer_calls instead")
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self._try(source, writer)
            finally:
                os._exit(0)
        os.close(writer)
        output = b""
        while True:
            ready, _, _ = select.select([reader, connection], [], [], LOOK)
            if connection in ready:
                os.kill(pid, signal.SIGKILL)
                os._exit(0)
            if reader not in ready:
                if yielding:
                    _run_when_idle(pid)
                continue
            data = os.read(reader, 1 << 20)
            if not data:
                break
            output += data
        status = os.waitpid(pid, 0)[1]
        if output and status == 0:
            result: dict[str, object] = json.loads(output)
            return result
        if os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGXCPU):
            return {"error": f"it takes more than {self.seconds:g} seconds to compile and to try: make it simpler"}
        # out of memory or out of stack: the system does not say which
        limit = f"{self.memory >> 20} MB"
        return {"error": f"it needs more than {limit} or nests too deep to be compiled: make it simpler"}

    # ---- in the child

    def _try(self, source: GrammarSource, pipe: int) -> None:
        if sys.platform == "win32":
            raise NotImplementedError("Windows: answer_calls instead")
        import resource

        out: dict[str, object]
        try:
            os.nice(10)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_STACK, (STACK, STACK))
            with contextlib.suppress(ValueError):  # macOS accepts no limit below what is mapped
                resource.setrlimit(resource.RLIMIT_AS, (_address_space() + self.memory,) * 2)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, self.seconds)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            grammar = self._compile(source)
            used = max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            out = {"text": grammar.text, "unenforced": grammar.unenforced, "bytes": used}
        except OutriderError as e:
            out = {"error": str(e)}
        except MemoryError:
            os.kill(os.getpid(), signal.SIGABRT)
        except BaseException as e:
            out = {"error": f"it can't be compiled ({type(e).__name__})"}
        with open(pipe, "wb") as file:
            file.write(json.dumps(out).encode())

    def attempt(self, source: GrammarSource) -> dict[str, object]:
        """The grammar's text, or the reason for its refusal, without limits."""
        try:
            grammar = self._compile(source)
        except OutriderError as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": f"it can't be compiled ({type(error).__name__})"}
        return {"text": grammar.text, "unenforced": grammar.unenforced, "bytes": len(grammar.text)}

    def _compile(self, source: GrammarSource) -> GrammarText:
        grammar = build(source)
        length = len(grammar.text)
        if length > 4 * MAX_CHARS:
            raise OutriderError(f"it makes a grammar of {length} characters; {4 * MAX_CHARS} are allowed")
        self.compiler.compile(grammar.text).rehearse()
        return grammar


def answer_calls() -> None:
    """Tries grammars that arrive as calls of a `ChildProcess`."""
    calls = frames()
    setup = json.loads(next(calls))
    compiler = GrammarCompiler(setup["tokenizer"], setup["vocab"], setup["eos"])
    sandbox = GrammarSandbox(compiler, float(setup["seconds"]), int(setup["memory"]))
    for call in calls:
        kind, payload, field = json.loads(call)
        answer = json.dumps(sandbox.attempt(GrammarSource(kind, payload, field))).encode()
        sys.stdout.buffer.write(LENGTH.pack(len(answer)) + answer)
        sys.stdout.buffer.flush()


def main() -> None:
    if sys.platform == "win32":
        return answer_calls()
    control = socket.socket(fileno=0)
    size = int.from_bytes(control.recv(4, socket.MSG_WAITALL), "little")
    setup = json.loads(control.recv(size, socket.MSG_WAITALL))
    compiler = GrammarCompiler(setup["tokenizer"], setup["vocab"], setup["eos"])
    sandbox = GrammarSandbox(compiler, float(setup["seconds"]), int(setup["memory"]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a trial reports through its connection, not by its exit status
    while True:
        data, connections, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            break
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                with socket.socket(fileno=connections[0]) as connection, connection.makefile("rb") as lines:
                    kind, payload, field, yielding = json.loads(lines.readline())
                    connection.sendall(b"\n")  # the trial begins
                    result = sandbox.answer(GrammarSource(kind, payload, field), connection.fileno(), yielding)
                    connection.sendall(json.dumps(result).encode())
            finally:
                os._exit(0)
        os.close(connections[0])


def _run_when_idle(pid: int) -> None:
    """Leaves only idle processor time to trials that have used more than `QUICK` seconds."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, ValueError):  # it has just ended
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
            used = int(file.read().split()[0]) / 1e9
        if used > QUICK:
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def _address_space() -> int:
    """Bytes of address space in use."""
    if sys.platform == "win32":
        raise NotImplementedError("Windows: answer_calls instead")
    import resource

    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # no /proc: a generous guess
        return 4 << 30


if __name__ == "__main__":
    main()
