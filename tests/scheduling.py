"""A scheduler without an engine: its cache only counts."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.scheduler import Scheduler
from outrider.engine.step import StepBatch


@dataclass
class Counted:
    slot: int
    held: int = 0
    room: int = 0  # every reservation is counted


class CountingCache:
    """A cache that only counts: the scheduler needs no more."""

    disk = None

    def __init__(self, slots: int, positions: int):
        self.free_slots = slots
        self.left = positions
        self.num_releases = 0
        self.opened = 0

    def open(self, chain: object, limit: int, granularity: int, unbroken: object) -> tuple[Counted, int]:
        self.free_slots -= 1
        self.opened += 1
        return Counted(self.free_slots), 0

    def exhausted_pool(self, seq: Counted, positions: int) -> object:
        return None if positions - seq.held <= self.left else self

    def reserve(self, seq: Counted, positions: int) -> bool:
        more = max(0, positions - seq.held)
        if more > self.left:
            return False
        self.left -= more
        seq.held += more
        return True

    def close(self, seq: Counted) -> None:
        self.free_slots += 1
        self.left += seq.held
        self.num_releases += seq.held

    def keep(self, seq: Counted, committed: int) -> None:
        return None


def next_step(scheduler: Scheduler) -> StepBatch:
    plan = scheduler.schedule()
    scheduler.commit_plan(plan)
    return plan.batch
