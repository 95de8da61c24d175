"""A script in a process of its own that answers one call after the other, for code not trusted with memory and time.

A frame is 4 bytes of length and as many bytes, on stdin (first the set-up, if any) and stdout: the script's `answers`
gets an iterator of the frames and yields an answer for every call. It limits itself and ends with its stdin. One that
has died or was late is replaced by the next call. A module of this package instead of a script reads its stdin itself,
a socket that can bring it connections instead of calls (`connect`).

On Windows, which hands no sockets to a process, pipes take their place, and there are no connections.

A script that decodes untrusted files defines `answer`, `MEMORY` and `CPU_SECONDS` instead of `answers`: then this file
limits the process, and gives a call that takes long idle processor time only.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LENGTH = struct.Struct("<I")
# one arena: what a thread has freed goes back to the system
SINGLE_THREAD_ENV = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX")
# seconds of processor time after which a call of `limited` gets idle time only; between two looks
QUICK_S = 0.25
POLL_S = 0.05


class ChildLost(Exception):
    """The process has died, was late, or is closed."""


class PipeConnection:
    """A process's stdin and stdout, with a socket's methods. A pipe has no timeout: a late answer ends the process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._input = process.stdin
        self._output = process.stdout
        self._seconds: float | None = None

    def settimeout(self, seconds: float | None) -> None:
        self._seconds = seconds

    def sendall(self, data: bytes) -> None:
        with self._deadline():
            self._input.write(data)
            self._input.flush()

    def recv(self, size: int) -> bytes:
        with self._deadline():
            return os.read(self._output.fileno(), size)

    def close(self) -> None:
        for pipe in (self._input, self._output):
            with contextlib.suppress(OSError):
                pipe.close()

    @contextlib.contextmanager
    def _deadline(self) -> Iterator[None]:
        timer = None if self._seconds is None else threading.Timer(self._seconds, self._process.kill)
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()


class ChildProcess:
    def __init__(self, script: str, setup: Callable[[], bytes] | None = None, seconds: float | None = None) -> None:
        """script: a file that imports nothing of this package, or the name of a module of it. seconds: how long one
        call may take, by the clock, once the process has started."""
        self._script = script
        self._setup = setup
        self._seconds = None if seconds is None else max(1e-3, seconds)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | PipeConnection
        self._ends: float | None = None  # of the call under way
        self.closed = False

    def call(self, data: bytes) -> bytes:
        """From any thread; blocks until it is done."""
        with self._lock:
            try:
                self._start()
                self._ends = None if self._seconds is None else time.monotonic() + self._seconds
                self._connection.settimeout(self._seconds)
                self._send(data)
                return self._read(*LENGTH.unpack(self._read(LENGTH.size)))
            except BaseException as error:  # an interrupt, too: what the process still says answers no later call
                self._end()
                if isinstance(error, OSError | EOFError):
                    raise ChildLost from None
                raise

    def connect(self) -> socket.socket:
        """A connection whose other end the process gets with a byte on its stdin. From any thread."""
        if sys.platform == "win32":
            raise NotImplementedError("Windows hands no sockets to a process: call instead")
        parent_socket, its = socket.socketpair()
        with self._lock, its:
            try:
                self._start()
                assert isinstance(self._connection, socket.socket)
                socket.send_fds(self._connection, [b"."], [its.fileno()])
            except (OSError, EOFError):
                self._end()
                raise ChildLost from None
        return parent_socket

    def start(self) -> None:
        """Now rather than with the first call."""
        with self._lock:
            try:
                self._start()
            except (OSError, EOFError):
                self._end()

    def close(self) -> None:
        """Calls under way are lost, and later ones."""
        self.closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _start(self) -> None:
        if self.closed:
            raise EOFError
        if self._process is None or self._process.poll() is not None:
            self._end()
            paths = filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
            package = {} if self._script.endswith(".py") else {"PYTHONPATH": os.pathsep.join(paths)}
            command = [sys.executable, "-P", "-m" if package else __file__, self._script]
            env = {**os.environ, **dict.fromkeys(SINGLE_THREAD_ENV, "1"), **package}
            self._launch(command, env)
            self._connection.settimeout(self._seconds)  # of the set-up
            if self._setup is not None:
                self._send(self._setup())

    def _launch(self, command: list[str], env: dict[str, str]) -> None:
        """Starts the process in a process group of its own, so that the terminal's Ctrl-C does not reach it."""
        if sys.platform == "win32":
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
                env=env,
            )
            self._connection = PipeConnection(self._process)
            return
        self._connection, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                command, stdin=its.fileno(), stdout=its.fileno(), stderr=subprocess.DEVNULL, process_group=0, env=env
            )

    def _send(self, data: bytes) -> None:
        self._connection.sendall(LENGTH.pack(len(data)))
        self._connection.sendall(data)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            if self._ends is not None:
                self._connection.settimeout(max(1e-3, self._ends - time.monotonic()))
            part = self._connection.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _end(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            process.wait()
            self._connection.close()


def frames() -> Iterator[bytes]:
    while head := sys.stdin.buffer.read(LENGTH.size):
        yield sys.stdin.buffer.read(*LENGTH.unpack(head))


def stand_back(worker: threading.Thread) -> None:
    """Wait for a thread to end, which gets idle processor time only once it has had `QUICK_S` seconds."""
    while worker.is_alive():
        worker.join(POLL_S)
        if sys.platform != "linux":
            continue
        with contextlib.suppress(OSError, ValueError):  # it has ended
            with open(f"/proc/self/task/{worker.native_id}/schedstat", encoding="ascii") as file:
                used = int(file.read().split()[0]) / 1e9
            if used > QUICK_S and worker.native_id is not None:
                os.sched_setscheduler(worker.native_id, os.SCHED_IDLE, os.sched_param(0))
                worker.join()


def limited(answer: Callable[[bytes], bytes], memory: int, cpu_seconds: int) -> Iterator[bytes]:
    """The answer to every frame, within bytes of memory and seconds of processor time for each."""
    if sys.platform == "win32":  # the caller ends a call that is late
        yield from map(answer, frames())
        return
    import resource

    os.nice(10)  # decoding tokens has priority
    with contextlib.suppress(ValueError, OSError):  # macOS accepts no limit below what is mapped
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    replies: list[bytes] = []
    for frame in frames():
        spent = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
        resource.setrlimit(resource.RLIMIT_CPU, (spent + cpu_seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        worker = threading.Thread(target=lambda: replies.append(answer(frame)))  # noqa: B023  # ends in this turn
        worker.start()
        stand_back(worker)
        yield replies.pop()


def main(script: str) -> None:
    """The process itself."""
    names = runpy.run_path(script, run_name="__main__")
    if "answers" in names:
        replies = names["answers"](frames())
    else:
        replies = limited(names["answer"], names["MEMORY"], names["CPU_SECONDS"])
    for answer in replies:
        sys.stdout.buffer.write(LENGTH.pack(len(answer)) + answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1])
