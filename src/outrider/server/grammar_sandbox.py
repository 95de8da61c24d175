"""A sandbox process that tries grammars before the server compiles them: `python -m outrider.server.grammar_sandbox`.

A few bytes of schema can cost a compiler any amount of time and memory, or overflow its stack, and nothing inside a
process can stop that. So this process holds a tokenizer and forks a child for each grammar under limits of
processor time, address space and stack; the answer is whether the child compiled it, or which limit it exceeded.
It reads lines of JSON from stdin (the set-up, then grammars and cancellations) and writes to stdout. It ends when
stdin closes. Its children leave most of the processor to decoding: an ordinary grammar takes milliseconds, and a
longer one gets only idle processor time. For a refused schema a second child looks for the part at fault.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import signal
import sys
import time
from dataclasses import dataclass

from ..engine.grammar import GrammarCompiler
from ..types import OutriderError
from .grammar_source import MAX_CHARS, GrammarSource, build, parts

STACK = 1 << 20  # bytes; any thread of the server has more
# seconds of processor time after which a trial gets the lowest priority; seconds between two checks
QUICK, LOOK = 0.1, 0.05


@dataclass
class SandboxChild:
    id: str
    pid: int
    source: GrammarSource
    deadline: float
    look_at: float  # when to check whether to lower its priority
    said: bytes = b""
    late: bool = False
    cancelled: bool = False
    failed: str = ""  # why the whole was refused, where this child looks for the part at fault


class GrammarSandbox:
    def __init__(self, compiler: GrammarCompiler, seconds: float, memory: int, patience: float) -> None:
        """Of one trial: seconds of processor time, bytes, and seconds by the clock: on a busy machine it waits for
        its own."""
        self.compiler, self.seconds, self.memory, self.patience = compiler, seconds, memory, patience
        self.children: dict[int, SandboxChild] = {}  # by the pipe it speaks through

    def wait(self) -> bool:
        """Until something can be read from stdin (true) or the children have something."""
        wake = min((min(c.deadline, c.look_at) for c in self.children.values()), default=math.inf)
        ready, _, _ = select.select(
            [0, *self.children], [], [], None if wake == math.inf else max(0.0, wake - time.monotonic())
        )
        for child in self.children.values():
            if time.monotonic() > child.look_at:
                _look(child)
            if time.monotonic() > child.deadline and not child.late:
                child.late, child.deadline = True, math.inf
                os.kill(child.pid, signal.SIGKILL)
        for pipe in [p for p in ready if p in self.children]:
            data = os.read(pipe, 1 << 20)
            self.children[pipe].said += data
            if not data:
                self._ended(self.children.pop(pipe), pipe)
        return 0 in ready

    def order(self, order: dict[str, str]) -> None:
        if "cancel" in order:
            for child in self.children.values():
                if child.id == order["cancel"]:
                    child.cancelled = True
                    os.kill(child.pid, signal.SIGKILL)
            return
        self._fork(order["id"], GrammarSource(order["kind"], order["payload"], order["field"]))  # type: ignore[arg-type]

    def close(self) -> None:
        for child in self.children.values():
            os.kill(child.pid, signal.SIGKILL)

    def _fork(self, id: str, source: GrammarSource, failed: str = "") -> None:
        """`failed`: the whole was refused for this reason; now look for the part."""
        mine, its = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(mine)
            if failed:
                self._blame(source, its)
            self._try(source, its)
        os.close(its)
        now = time.monotonic()
        self.children[mine] = SandboxChild(id, pid, source, now + self.patience, now + LOOK, failed=failed)

    def _ended(self, child: SandboxChild, pipe: int) -> None:
        os.close(pipe)
        _, status = os.waitpid(child.pid, 0)
        if child.failed:  # the last part it spoke of is the one it failed at, however it ended
            where = ("\n" + child.said.decode("utf-8", "replace")).split("\n")[-2]  # empty: each is fine alone
            _say(
                {
                    "id": child.id,
                    "error": f"{child.failed} (at {where[:200]})" if where and not child.late else child.failed,
                }
            )
        elif child.said and status == 0:
            answer = json.loads(child.said)
            if "error" in answer:
                self._refuse(child, str(answer["error"]))
            else:
                _say({"id": child.id, **answer})
        elif child.late:
            _say({"id": child.id, "late": True})
        elif os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGXCPU):
            self._refuse(child, f"it takes more than {self.seconds:g} seconds to compile and to try: make it simpler")
        else:  # out of memory or out of stack: which of them, the system doesn't say
            self._refuse(
                child, f"it needs more than {self.memory >> 20} MB or nests too deep to be compiled: make it simpler"
            )

    def _refuse(self, child: SandboxChild, why: str) -> None:
        if child.cancelled or not any(True for _ in parts(child.source)):
            _say({"id": child.id, "error": why})
        else:
            self._fork(child.id, child.source, why)

    # ---- in the child; neither returns

    def _try(self, source: GrammarSource, pipe: int) -> None:
        out: dict[str, object]
        try:
            self._limits(self.seconds)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            text = self._compile(source)
            out = {"text": text, "bytes": max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024}
        except OutriderError as e:
            out = {"error": str(e)}
        except MemoryError:
            os.kill(os.getpid(), signal.SIGABRT)
        except BaseException as e:
            out = {"error": f"it can't be compiled ({type(e).__name__})"}
        _write(pipe, json.dumps(out).encode())
        os._exit(0)

    def _blame(self, source: GrammarSource, pipe: int) -> None:
        """Says which part it compiles, before it does: whatever ends it, the last one said is the part at fault."""
        try:
            self._limits(self.seconds / 2)
            for where, part in parts(source):
                _write(pipe, f"{' '.join(where.split())}\n".encode("utf-8", "replace"))
                self._compile(part)
            _write(pipe, b"\n\n")  # each is fine alone
        finally:
            os._exit(0)

    def _compile(self, source: GrammarSource) -> str:
        text = build(source)
        if len(text) > 4 * MAX_CHARS:
            raise OutriderError(f"it makes a grammar of {len(text)} characters; {4 * MAX_CHARS} are allowed")
        self.compiler.compile(text).rehearse()
        return text

    def _limits(self, seconds: float) -> None:
        os.nice(10)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_STACK, (STACK, STACK))
        resource.setrlimit(resource.RLIMIT_AS, (_size() + self.memory,) * 2)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a dying compiler has to say is of no use


def main() -> None:
    with contextlib.suppress(PermissionError):  # it leads a session already
        # a terminal's signals are not for us; done here, because not every event loop can start a group
        os.setpgid(0, 0)
    line, pending = _first_line()
    setup = json.loads(line)
    compiler = GrammarCompiler(setup["tokenizer"], setup["vocab"], setup["eos"])
    sandbox = GrammarSandbox(compiler, float(setup["seconds"]), int(setup["memory"]), float(setup["patience"]))
    while True:
        *orders, pending = pending.split(b"\n")
        for order in orders:
            sandbox.order(json.loads(order))
        if sandbox.wait():
            data = os.read(0, 1 << 20)
            if not data:
                break
            pending += data
    sandbox.close()


def _first_line() -> tuple[bytes, bytes]:
    """The first line of stdin and what came with it."""
    read: list[bytes] = []
    while not read or b"\n" not in read[-1]:
        read.append(os.read(0, 1 << 20))
        if not read[-1]:
            sys.exit()
    line, _, rest = b"".join(read).partition(b"\n")
    return line, rest


def _look(child: SandboxChild) -> None:
    """Gives the trial of an expensive grammar only idle processor time from now on."""
    child.look_at = math.inf
    if sys.platform == "linux":
        with contextlib.suppress(OSError, ValueError):  # it has just ended
            with open(f"/proc/{child.pid}/schedstat", encoding="ascii") as file:
                used = int(file.read().split()[0]) / 1e9
            if used < QUICK:
                child.look_at = time.monotonic() + LOOK
            else:
                os.sched_setscheduler(child.pid, os.SCHED_IDLE, os.sched_param(0))


def _size() -> int:
    """Bytes of address space in use."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # no /proc: a roomy guess
        return 4 << 30


def _write(pipe: int, data: bytes) -> None:
    while data:
        data = data[os.write(pipe, data) :]


def _say(message: dict[str, object]) -> None:
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
