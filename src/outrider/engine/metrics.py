"""The engine's counters. Torch-free; the server exports them as Prometheus text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..types import Counts

if TYPE_CHECKING:
    from ..spec.plan import VerifiedTree
    from .step import Sequence


@dataclass
class Metrics(Counts):
    requests: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by finish reason
    drafted_by_drafter: Counter[str] = field(default_factory=Counter)
    accepted_by_drafter: Counter[str] = field(default_factory=Counter)
    drafted_by_adapter: Counter[str] = field(default_factory=Counter)  # only of requests with an adapter
    accepted_by_adapter: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    failed_steps: int = 0
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

    def count(
        self,
        seq: Sequence,
        *,
        emitted: int,
        drafted: int,
        accepted: int,
        tree: VerifiedTree | None,
        drafter: str | None,
    ) -> None:
        """Count one cycle of a sequence. emitted: tokens that belong to its output."""
        depth = drafted if tree is None else tree.deepest
        for counts in (seq.stats, self):
            counts.new_tokens += emitted
            counts.cycles += 1
            if drafted:
                counts.drafted += drafted
                counts.accepted += accepted
                counts.cycles_by_drafted[depth] += 1
                counts.cycles_by_accepted[accepted] += 1
                if tree is not None:
                    counts.trees += 1
                    counts.branched += accepted - tree.chain_accepted
        if not drafted:
            return
        if drafter is not None:
            self.drafted_by_drafter[drafter] += drafted
            self.accepted_by_drafter[drafter] += accepted
        if seq.adapter is not None:
            self.drafted_by_adapter[seq.adapter.name] += drafted
            self.accepted_by_adapter[seq.adapter.name] += accepted
