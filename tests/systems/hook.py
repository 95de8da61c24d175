"""Takes away from outrider's own modules what Windows or macOS lack; other packages keep it (they run on this Linux).

`install("win32")` makes `sys.platform` another for our modules, hides modules such as fcntl and functions such as
os.fork, and files under /proc, /sys and /dev/shm. In processes that tests start, `sitecustomize.py` in this folder does
so if OUTRIDER_TEST_SYSTEM names a system.
"""

from __future__ import annotations

import builtins
import os
import sys
from types import ModuleType
from typing import Any

MODULES = {
    "win32": {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "readline", "curses", "syslog"},
    "darwin": set[str](),
}
NAMES = {
    "win32": {
        "os": set(
            [
                "fork",
                "forkpty",
                "getuid",
                "geteuid",
                "getgid",
                "nice",
                "sched_getaffinity",
                "sched_setaffinity",
                "sched_setscheduler",
                "sched_param",
                "SCHED_IDLE",
                "sysconf",
                "getloadavg",
                "killpg",
                "setsid",
                "setpgid",
                "getpgid",
                "O_NONBLOCK",
                "O_NOFOLLOW",
                "O_DIRECTORY",
                "pread",
                "pwrite",
                "posix_fadvise",
                "posix_fallocate",
                "sendfile",
                "copy_file_range",
                "memfd_create",
                "mkfifo",
                "statvfs",
                "uname",
                "wait4",
                "WTERMSIG",
                "WIFSIGNALED",
                "WEXITSTATUS",
                "register_at_fork",
                "pidfd_open",
                "fchmod",
                "chown",
            ]
        ),
        "signal": set(
            [
                "SIGHUP",
                "SIGKILL",
                "SIGCHLD",
                "SIGPROF",
                "SIGXCPU",
                "SIGUSR1",
                "SIGUSR2",
                "SIGALRM",
                "SIGPIPE",
                "SIGQUIT",
                "setitimer",
                "ITIMER_PROF",
                "ITIMER_REAL",
                "pthread_sigmask",
                "pthread_kill",
                "alarm",
                "pause",
                "sigwait",
                "SIG_BLOCK",
                "SIG_SETMASK",
            ]
        ),
        "socket": {"AF_UNIX", "send_fds", "recv_fds", "SCM_RIGHTS", "SO_REUSEPORT"},
        "mmap": {"MAP_PRIVATE", "MAP_ANONYMOUS", "MADV_HUGEPAGE", "MADV_DONTNEED"},
        "asyncio": {"open_unix_connection", "start_unix_server"},
    },
    "darwin": {
        "os": set(
            [
                "sched_getaffinity",
                "sched_setaffinity",
                "sched_setscheduler",
                "sched_param",
                "SCHED_IDLE",
                "pidfd_open",
                "memfd_create",
                "copy_file_range",
                "posix_fadvise",
                "posix_fallocate",
            ]
        ),
        "mmap": {"MADV_HUGEPAGE"},
    },
}
FILES = ("/proc/", "/sys/", "/dev/shm/")
OURS = os.sep + os.path.join("src", "outrider") + os.sep


class Reduced(ModuleType):
    """A module without some names."""

    def __init__(self, module: ModuleType, hidden: set[str], changed: dict[str, object]) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(_module=module, _hidden=hidden, _changed=changed, _replaced={})

    def __getattr__(self, name: str) -> Any:
        if name in self._hidden:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on this system")
        return self._changed[name] if name in self._changed else getattr(self._module, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self._module):
            self._replaced.setdefault(name, getattr(self._module, name))
        setattr(self._module, name, value)

    def __delattr__(self, name: str) -> None:
        """What pytest's monkeypatch undoes a replacement by: the name seems to be inherited, not this object's own."""
        if name in self._replaced:
            setattr(self._module, name, self._replaced.pop(name))
        else:
            delattr(self._module, name)


def is_ours(names: dict[str, Any] | None) -> bool:
    return OURS in str((names or {}).get("__file__", ""))


def install(system: str) -> None:
    """For modules of ours that are imported from now on."""
    hidden_modules = MODULES[system]
    reduced = {
        name: Reduced(__import__(name), hidden, {"name": "nt"} if (name, system) == ("os", "win32") else {})
        for name, hidden in NAMES[system].items()
    }
    reduced["sys"] = Reduced(sys, {"getwindowsversion"}, {"platform": system})
    imported = builtins.__import__

    def importing(name: str, namespace: Any = None, local: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level == 0 and is_ours(namespace):
            if name in hidden_modules:
                raise ModuleNotFoundError(f"No module named {name!r} on this system", name=name)
            if name in reduced:
                return reduced[name]
        return imported(name, namespace, local, fromlist, level)

    builtins.__import__ = importing

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(FILES):
            frame = sys._getframe(1)
            while frame is not None and f"{os.sep}lib{os.sep}python3" in frame.f_code.co_filename:
                frame = frame.f_back
            if frame is not None and OURS in frame.f_code.co_filename:
                raise FileNotFoundError(2, "No such file or directory", arguments[0])

    sys.addaudithook(watch)
