"""The command `outrider`, and `python -m outrider` where its script is not on the path.

Ctrl-C ends it with exit code 130 at any moment, without a traceback. During an import the process ends at once: nothing
can be raised safely there (C extensions swallow the exception or fail half initialised), and there is nothing to clean
up. Elsewhere Ctrl-C raises KeyboardInterrupt; if a destructor or a callback drops it, it is raised again.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing takes milliseconds, before our Ctrl-C handler is installed
if TYPE_CHECKING:
    import sys
    from types import FrameType

INTERRUPTED = 130


def end_at_once(number: int = 0, frame: FrameType | None = None) -> None:
    import os

    os._exit(INTERRUPTED)


def on_interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        # it came before the hook had returned: raised there it would be dropped
        if frame.f_code is send_again.__code__:
            return interrupt_soon()
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            end_at_once()
        frame = frame.f_back
    raise KeyboardInterrupt


def interrupt_soon() -> None:
    import signal
    import sys
    import threading

    timer = threading.Timer(0.02, signal.raise_signal, (signal.SIGINT,))
    if sys.platform != "win32":  # os.kill ends a process there
        import os

        timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))  # this also wakes a sleeping main thread
    timer.daemon = True
    timer.start()


def send_again(dropped: sys.UnraisableHookArgs) -> None:
    """`sys.unraisablehook`: raises a dropped KeyboardInterrupt again a moment later, outside that destructor."""
    import sys

    if not issubclass(dropped.exc_type, KeyboardInterrupt):
        return sys.__unraisablehook__(dropped)
    interrupt_soon()


def main() -> None:
    ours = False
    try:
        import signal
        import sys

        ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else a parent ignores it for us (nohup)
        if ours:
            signal.signal(signal.SIGINT, on_interrupt)
            sys.unraisablehook = send_again
        from .cli.main import main as command

        command()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    finally:
        if ours:  # the interpreter's shutdown drops exceptions, too
            signal.signal(signal.SIGINT, end_at_once)


if __name__ == "__main__":
    main()
