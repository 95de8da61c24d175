"""`outrider serve` with a watch on its event loop, for the stress tests: who held up the loop, and for how long.

    python tests/stress/watched_server.py EVENTS serve MODEL ...

A line of JSON goes to the file EVENTS whenever one turn of the event loop, or waiting for the interpreter's lock, took
longer than 30 ms, or a turn computed for more than 12 ms. `net_ms` leaves out the time in which threads of this process
were ready to run and had no processor (Linux counts it), so that it means the same on a busy machine; `what` names the
slowest callback of the turn, or where the other threads stood after the wait. `faults` counts page faults that waited
for a disk: while one does, threads that take or give back memory wait for it. `stolen_ms` is the time that the
host of a virtual machine gave to others meanwhile, added up over its processors. EVENTS.steps gets a line for every
step of the engine: when it ended; seconds of it, of its prompts and of its masks; its executor; the rows that decode and
the rows of prompts, by client.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import resource
import selectors
import sys
import threading
import time
import traceback
from collections import Counter, deque
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.engine.step import StepBatch

# seconds: by the clock, computing; how often the lock is asked for
SLOW = 0.030
LONG = 0.012
EVERY = 0.020
WAITING = re.compile(r"(threading|queue|selectors|thread|unix_events)\.py")  # threads that wait for work


class Watch:
    def __init__(self, events: IO[str]) -> None:
        self._events = events
        self._turn = 0.0
        self._slowest = (0.0, 0.0, "")
        self._seen = ""
        # times; until then: what all threads had waited for a processor, major page faults, seconds stolen
        self._waited = deque([(0.0, 0.0, 0, 0.0)], 500)
        self._collecting = self._collected = 0.0
        self._used = 0.0  # processor time of this thread at the beginning of the turn
        self._idle = True  # the loop waits for something to happen

    def start(self) -> None:
        run = asyncio.Handle._run
        select = selectors.EpollSelector.select

        def timed(handle: asyncio.Handle) -> None:
            began = time.monotonic()
            used = time.thread_time()
            run(handle)
            took = time.monotonic() - began
            if took > self._slowest[0]:
                self._slowest = (took, time.thread_time() - used, "" if took < LONG else named(handle))

        def turned(selector: Any, timeout: float | None = None) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return select(selector, timeout)
            took = time.monotonic() - self._turn
            computed = time.thread_time() - self._used
            if self._turn and (took > SLOW or computed > LONG):
                wall, used, what = self._slowest
                said = f"{what} {1e3 * wall:.0f} ms, {1e3 * used:.0f} of them computing; seen at {self._seen}"
                self._tell("turn", took, said, computed)
            self._idle = True
            ready = select(selector, timeout)
            self._idle = False
            self._used = time.thread_time()
            self._turn = time.monotonic()
            self._slowest = (0.0, 0.0, "")
            self._collected = 0.0
            self._seen = ""
            return ready

        asyncio.Handle._run = timed  # type: ignore[method-assign]
        selectors.EpollSelector.select = turned  # type: ignore[method-assign]
        gc.callbacks.append(self._garbage)
        threading.Thread(target=self._ask_for_lock, daemon=True).start()

    def _garbage(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.monotonic()
        else:
            self._collected += time.monotonic() - self._collecting

    def _ask_for_lock(self) -> None:
        main = threading.main_thread().ident or 0
        this_thread = threading.get_ident()
        while True:
            began = time.monotonic()
            self._waited.append((began, all_delays(), major_faults(), stolen()))
            time.sleep(EVERY)
            late = time.monotonic() - began - EVERY
            if not self._idle and time.monotonic() - self._turn > LONG and not self._seen:
                self._seen = innermost(sys._current_frames()[main])
            if late > SLOW:  # whoever had the lock stands behind what it was held for
                stacks = [innermost(frame) for thread, frame in sys._current_frames().items() if thread != this_thread]
                self._tell("lock", late, " | ".join(s for s in stacks if not WAITING.match(s))[:600])

    def _tell(self, kind: str, took: float, what: str, computed: float = 0.0) -> None:
        until = time.monotonic()
        none = (0.0, all_delays(), major_faults(), stolen())
        known = reversed(tuple(self._waited))  # a copy: the other thread adds to it
        _, delays, faults, taken = next((then for then in known if then[0] <= until - took), none)
        waited = max(0.0, all_delays() - delays)
        event = {
            "at": until,
            "kind": kind,
            "ms": round(1e3 * took, 1),
            "net_ms": round(1e3 * max(0.0, took - waited), 1),
        }
        event |= {"computed_ms": round(1e3 * computed, 1), "what": what, "garbage_ms": round(1e3 * self._collected, 1)}
        event |= {"faults": major_faults() - faults, "stolen_ms": round(1e3 * (stolen() - taken))}
        self._events.write(json.dumps(event) + "\n")
        self._events.flush()


def all_delays() -> float:
    """Seconds that the threads of this process have waited for a processor."""
    total = 0
    for task in os.scandir("/proc/self/task"):
        with contextlib.suppress(OSError, IndexError):  # it has ended
            total += int(Path(task.path, "schedstat").read_text().split()[1])
    return total / 1e9


def major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def stolen() -> float:
    """Seconds in which a processor of this virtual machine was ready to run and its host ran something else."""
    return int(Path("/proc/stat").read_text().split(None, 9)[8]) / os.sysconf("SC_CLK_TCK")


def named(handle: asyncio.Handle) -> str:
    task = getattr(handle._callback, "__self__", None)
    coroutine = task.get_coro() if isinstance(task, asyncio.Task) else None
    return repr(handle)[:120] if coroutine is None else repr(coroutine)[:120]


def innermost(frame: FrameType) -> str:
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=8, lookup_lines=False)
    return " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in stack)


def watch_steps(out: IO[str]) -> None:
    """Write a line about every step of every engine of this process to `out`."""
    from outrider.engine import engine as module
    from outrider.engine.grammar import GrammarMatcher

    step = module.Engine.step
    bits = GrammarMatcher.bits
    pick = module.pick
    mask_ns = Counter[int]()  # by thread
    picked = list[Any]()  # the batch of the step that runs, and its executor's name

    def timed_bits(matcher: GrammarMatcher, drafts: Any) -> Any:
        began = time.monotonic_ns()
        masks = bits(matcher, drafts)
        mask_ns[threading.get_ident()] += time.monotonic_ns() - began
        return masks

    def noted_pick(executors: Any, batch: Any) -> Any:
        chosen = pick(executors, batch)
        picked[:] = [batch, chosen[0].name]
        return chosen

    def timed_step(engine: module.Engine) -> list[module.Event]:
        began = time.monotonic()
        prompt_seconds = engine.runner.prompt_seconds
        mask_ns[threading.get_ident()] = 0
        picked.clear()
        events = step(engine)
        if picked:
            now = time.monotonic()
            batch, executor = picked
            seconds = (now - began, engine.runner.prompt_seconds - prompt_seconds, mask_ns[threading.get_ident()] / 1e9)
            record = [round(now, 4), *(round(s, 5) for s in seconds), executor, decode_rows(batch), prompt_rows(batch)]
            out.write(json.dumps(record) + "\n")
        return events

    module.Engine.step = timed_step  # type: ignore[method-assign]
    GrammarMatcher.bits = timed_bits  # type: ignore[method-assign]
    module.pick = noted_pick


def decode_rows(batch: StepBatch) -> dict[str, int]:
    """Rows of a step that decode, by client: the newest token of each sequence and what may be drafted after it."""
    rows = Counter[str]()
    for row in batch.decode:
        rows[row.seq.request.client] += 1 + row.plan.max_drafted
    return rows


def prompt_rows(batch: StepBatch) -> dict[str, int]:
    """Rows of a step that read prompts, by client."""
    rows = Counter[str]()
    for chunk in batch.prompts:
        rows[chunk.seq.request.client] += chunk.num_tokens
    return rows


def main() -> None:
    Watch(open(sys.argv[1], "a")).start()  # noqa: SIM115  # until the process ends
    watch_steps(open(sys.argv[1] + ".steps", "a"))  # noqa: SIM115
    from outrider.cli.main import main as outrider

    sys.argv = ["outrider", *sys.argv[2:]]
    outrider()


if __name__ == "__main__":
    main()
