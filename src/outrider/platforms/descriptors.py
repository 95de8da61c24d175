"""Limits on open files and connections of this process."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress


def allow(count: int) -> int | None:
    """Raises this process's limit to `count` if the system permits. Returns the limit; None: unlimited."""
    if sys.platform == "win32":  # sockets are not counted
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        with suppress(ValueError, OSError):
            more = count if hard == resource.RLIM_INFINITY else min(count, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def reserve(count: int) -> None:
    """Gives the descriptor table its size now. If it grew with a connection, accepting that one would wait for a grace
    period of Linux's kernel, a third of a second on a busy machine."""
    if sys.platform == "win32":
        return
    import fcntl

    with suppress(OSError), socket.socket() as any_one:
        os.close(fcntl.fcntl(any_one, fcntl.F_DUPFD_CLOEXEC, count - 1))
