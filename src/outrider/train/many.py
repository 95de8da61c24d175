"""Generates answers with several processes on one device, each with its own engine.

A small target leaves a GPU idle while the host schedules the next step; several hosts keep it busy. Process r takes
every N-th task from r on and appends to OUT/answers-r.jsonl, so a run that resumes with the same number of processes
continues where each of them was; with another number no finished work is repeated. A process exits when its parent is
gone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path

from ..types import OutriderError
from .answers import RecordedAnswer, Report, Task, answer_to_file, answering_engine, read_answers
from .clock import Stop, listening
from .config import TrainConfig
from .data import Sequences
from .memory import torch_dtype
from .target import describe

POLL = 0.25  # seconds between two looks at the processes


@dataclass(frozen=True)
class AnswerShare:
    """The input of one process."""

    config: TrainConfig
    target: str
    longest: int  # tokens of a prompt and its answer
    tasks: list[Task]
    path: Path
    ends: float  # of time.time()


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


def answer_by_many(shares: Sequence[AnswerShare], *, report: Report, stop: Stop) -> None:
    """Runs until all shares are done, the time is over or a stop is requested; the answers so far are in the files."""
    context = multiprocessing.get_context("spawn")  # a device cannot be used on both sides of a fork
    counts = [context.Array("q", 2) for _ in shares]  # answers done, tokens made
    processes = [
        context.Process(target=answer_share, args=(s, c, os.getpid())) for s, c in zip(shares, counts, strict=True)
    ]
    began, total = time.perf_counter(), sum(len(s.tasks) for s in shares)
    try:
        for process in processes:
            process.start()
        told = False
        while any(p.is_alive() for p in processes):
            time.sleep(POLL)
            done, tokens = (sum(c[n] for c in counts) for n in (0, 1))
            report(done, total, tokens, time.perf_counter() - began)
            if not told and (stop.asked or any(p.exitcode for p in processes)):
                told = True
                for process in processes:
                    process.terminate()  # it writes what it has
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


def answer_share(share: AnswerShare, counts: SynchronizedArray[int], parent: int) -> None:
    """The main function of one process. Ctrl-C reaches it too, but only the parent decides to stop."""
    with listening() as stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        config, known = share.config, describe(share.target, share.config.adapter)
        prompts = Sequences.load(config.out / "prompts.npz")

        def report(done: int, total: int, tokens: int, seconds: float) -> None:
            counts[0], counts[1] = done, tokens
            if os.getppid() != parent:
                stop.signal = stop.signal or signal.SIGTERM

        try:
            with answering_engine(
                known,
                config.device,
                torch_dtype(config),
                config.slots,
                share.longest,
                processes=config.answer_processes,
            ) as engine:
                ends = time.perf_counter() + share.ends - time.time()
                answer_to_file(
                    engine, prompts, share.tasks, config.max_new, share.path, report=report, deadline=ends, stop=stop
                )
        except OutriderError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
