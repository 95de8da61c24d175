"""Generates answers with several processes on one device, each with its own engine.

A small target leaves a GPU idle while the host schedules the next step; several hosts keep it busy. Process r takes
every N-th task from r on and appends to OUT/answers-r.jsonl, so a run that resumes with the same number of processes
continues where each of them was; with another number no finished work is repeated. A process exits when its parent is
gone.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Event
from pathlib import Path

from ..types import OutriderError
from .answers import RecordedAnswer, Report, Task, answer_to_file, answering_engine, read_answers
from .clock import Stop
from .config import TrainConfig
from .data import Sequences
from .memory import torch_dtype
from .target import describe

POLL = 0.25  # seconds between two looks at the processes


def all_answers(folder: Path) -> list[RecordedAnswer]:
    """The answers in all files of a run; an answer in two files counts once, whole if one of them is."""
    found: dict[tuple[int, int], RecordedAnswer] = {}
    for path in sorted(folder.glob("answers*.jsonl")):
        for key, answer in read_answers(path).items():
            if key not in found or answer.done:
                found[key] = answer
    return list(found.values())


def undone(folder: Path, tasks: Sequence[Task]) -> list[Task]:
    """The tasks that no file of the run has done."""
    done = {a.key for a in all_answers(folder) if a.done}
    return [t for t in tasks if t.key not in done]


def shared_out(folder: Path, tasks: Sequence[Task], count: int) -> list[tuple[Path, list[Task]]]:
    """For each process its file and its remaining tasks."""
    left = set(undone(folder, tasks))
    return [(folder / f"answers-{r}.jsonl", [t for t in tasks[r::count] if t in left]) for r in range(count)]


def answer_by_many(
    config: TrainConfig, target: str, longest: int, tasks: Sequence[Task], ends: float, *, report: Report, stop: Stop
) -> None:
    """Runs until all tasks are done, it is `ends` (of time.time) or a stop is requested; the answers so far are in the
    files. `longest`: tokens of a prompt and its answer."""
    context = multiprocessing.get_context("spawn")  # a device cannot be used on both sides of a fork
    shares = [share for share in shared_out(config.out, tasks, config.answer_processes) if share[1]]
    counts, halt = [context.Array("q", 2) for _ in shares], context.Event()  # answers done, tokens made
    processes = [
        context.Process(target=answer_share, args=(config, target, longest, share, ends, count, halt))
        for share, count in zip(shares, counts, strict=True)
    ]
    began, total = time.perf_counter(), sum(len(mine) for _, mine in shares)
    try:
        for process in processes:
            process.start()
        while any(p.is_alive() for p in processes):
            time.sleep(POLL)
            done, tokens = (sum(c[n] for c in counts) for n in (0, 1))
            report(done, total, tokens, time.perf_counter() - began)
            if stop.asked or any(p.exitcode for p in processes):
                halt.set()  # each writes what it has
        bad = [p.exitcode for p in processes if p.exitcode]
        if bad and not stop.asked:
            raise OutriderError(
                f"a process that answered prompts ended with code {bad[0]}: run the command again, or with fewer of "
                f"them"
            )
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()


def answer_share(
    config: TrainConfig,
    target: str,
    longest: int,
    share: tuple[Path, list[Task]],
    ends: float,
    counts: SynchronizedArray[int],
    halt: Event,
) -> None:
    """The main function of one process. Signals that a terminal sends reach it too, but only the parent decides."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    known, prompts = describe(target, config.adapter), Sequences.load(config.out / "prompts.npz")
    stop, parent = Stop(), multiprocessing.parent_process()

    def report(done: int, total: int, tokens: int, seconds: float) -> None:
        counts[0], counts[1] = done, tokens
        if halt.is_set() or parent is None or not parent.is_alive():
            stop.signal = signal.SIGTERM

    dtype, many = torch_dtype(config), config.answer_processes
    try:
        with answering_engine(known, config.device, dtype, config.slots, longest, processes=many) as engine:
            late, (path, tasks) = time.perf_counter() + ends - time.time(), share
            answer_to_file(engine, prompts, tasks, config.max_new, path, report=report, deadline=late, stop=stop)
    except OutriderError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
