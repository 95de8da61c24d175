"""The engine's counters. Torch-free; the server exports them as Prometheus text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..types import Counts

if TYPE_CHECKING:
    from ..cache.store import KVStore
    from .model_runner import ModelRunner
    from .scheduler import Scheduler
    from .step import Emitted, Seq


@dataclass
class Metrics(Counts):
    requests: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    drafted_by_drafter: dict[str, int] = field(default_factory=dict)
    accepted_by_drafter: dict[str, int] = field(default_factory=dict)
    drafted_by_adapter: dict[str, int] = field(default_factory=dict)  # only of requests with an adapter
    accepted_by_adapter: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    drafter_failures: int = 0
    preemptions: int = 0
    prefix_pages_read: int = 0  # pages of K/V read back from the prefix store,
    prefix_pages_written: int = 0  # and written to it
    step_seconds: float = 0.0
    prefill_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    kv_bytes: int = 0  # memory in use by K/V
    free_pages: dict[str, int] = field(default_factory=dict)

    def count(self, seq: Seq, emitted: int, brought: Emitted, drafter: str | None) -> None:
        """Count one cycle of a sequence and the number of tokens it emitted."""
        drafted, accepted, tree = brought.drafted, len(brought.tokens) - 1, brought.branches
        for counts in (seq.stats, self):
            counts.new_tokens += emitted
            counts.cycles += 1
            if drafted:
                counts.drafted += drafted
                counts.accepted += accepted
                counts.cycles_by_drafted[drafted if tree is None else tree.deepest] += 1
                counts.cycles_by_accepted[accepted] += 1
                if tree is not None:
                    counts.trees += 1
                    counts.branched += accepted - tree.chain_accepted
        if drafted and drafter is not None:
            self.drafted_by_drafter[drafter] = self.drafted_by_drafter.get(drafter, 0) + drafted
            self.accepted_by_drafter[drafter] = self.accepted_by_drafter.get(drafter, 0) + accepted
        if seq.adapter is not None and drafted:
            for by_name, count in ((self.drafted_by_adapter, drafted), (self.accepted_by_adapter, accepted)):
                by_name[seq.adapter.name] = by_name.get(seq.adapter.name, 0) + count

    def look(self, scheduler: Scheduler, store: KVStore, runner: ModelRunner) -> None:
        """Copy the counters of scheduler, cache and runner."""
        self.running, self.waiting = len(scheduler.running), len(scheduler.waiting)
        self.preemptions = scheduler.preemptions
        if store.disk is not None:
            self.prefix_pages_read, self.prefix_pages_written = store.disk.pages_read, store.disk.pages_written
        self.free_pages = {name: group.pool.free for name, group in store.groups.items()}
        self.kv_bytes, self.prefill_seconds = store.taken(), runner.prompt_seconds
