"""Progress of long commands on stderr, from the first second: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time

from rich.progress import Progress, TextColumn

from .common import err, note

EVERY = 5.0  # seconds between lines if stderr is not a terminal


class StageProgress:
    """Called with (stage, done, total, a line about it). A stage without a measure reports 0 of 1 until the next
    begins."""

    def __init__(self, quiet: bool = False):
        self.quiet = quiet
        self.bar: Progress | None = None
        self.stage = ""
        self.told = 0.0
        self.began = 0.0

    def __enter__(self) -> StageProgress:
        if not self.quiet and sys.stderr.isatty():
            note_column = TextColumn("{task.fields[note]}", markup=False)
            self.bar = Progress(*Progress.get_default_columns(), note_column, console=err, transient=True)
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def say(self, line: str) -> None:
        if not self.quiet:
            note(line)

    def __call__(self, stage: str, done: float, total: float, note: str) -> None:
        if self.quiet:
            return
        new = stage != self.stage
        if new:
            self.stage = stage
            self.began = time.perf_counter()
        if self.bar is not None:
            if new:
                for before in self.bar.task_ids:
                    self.bar.remove_task(before)
                self.bar.add_task(stage, total=None, note=note)
            self.bar.update(self.bar.task_ids[0], completed=done, total=total if done or total > 1 else None, note=note)
        elif new or time.perf_counter() - self.told >= EVERY:
            self.told = time.perf_counter()
            self.say(self.line(done, total, note))

    def line(self, done: float, total: float, note: str) -> str:
        if not done and total <= 1:
            return f"{self.stage} {note}".rstrip()
        passed = time.perf_counter() - self.began
        left = f", {(total - done) * passed / done:.0f} s left" if done and passed > 1 else ""
        amount = f"{done:.0f}/{total:.0f}" if total > 1 else f"{done / total:.0%}"
        return f"{self.stage} {amount}: {note}{left}"
