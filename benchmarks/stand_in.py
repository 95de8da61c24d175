"""A stand-in for a GPU, to see on any machine what the server costs an engine whose steps take no processor time.

`replace(engine, ...)` swaps an engine's executors for one whose steps take the given time by the clock, one after
another as on a device, and hand out random tokens. Like a real launch, its own lets go of the interpreter again and
again: where another thread computes meanwhile it has to wait for it each time. Scheduler, commit, text and server are
the real ones.
"""

from __future__ import annotations

import random
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

from outrider.engine.engine import Engine
from outrider.engine.prefill_budget import LIKELY, ROWS, PrefillBudget
from outrider.engine.step import Emitted, PendingStep, Plan, ScheduledSeq, StepBatch

LAUNCHES = 20  # how often a captured step or pass lets go of the interpreter
LAUNCH_S = 8e-6  # processor time between two of them
SOME = bytes(6 << 10)


@dataclass
class StandIn:
    """An executor (engine/step.py) whose steps take `step` seconds, and `row` more for every row of a prompt's
    chunk."""

    step: float
    row: float
    vocab: int
    name: str = "stand-in"
    async_results: bool = True
    trees: bool = False
    _free_at: float = 0.0  # when the device has done what was launched so far

    def plan(self, batch: StepBatch) -> Plan:
        return Plan(batch)

    def launch(self, plan: Plan) -> PendingStep:
        batch = plan.batch
        rows = sum(item.count for item in batch.prompts)
        self._let_go(LAUNCHES * -(-rows // ROWS[-1]))  # several captured passes
        began = time.perf_counter()
        self._let_go(LAUNCHES)
        self._free_at = max(time.perf_counter(), self._free_at) + rows * self.row + (self.step if batch.decode else 0.0)
        pending = PendingStep(self, batch, [item.seq.held for item in batch.decode], began, rows)
        pending.payload, pending.inflight_tokens = self._free_at, [item.plan.k + 1 for item in batch.decode]
        return pending

    def read(self, pending: PendingStep) -> list[Emitted]:
        assert isinstance(pending.payload, float)
        time.sleep(max(0.0, pending.payload - time.perf_counter()))
        return [Emitted(self._tokens(item), item.plan.k) for item in pending.batch.decode]

    def probe(self, part: object, batch: int, k: int, context: int) -> None:
        time.sleep(self.step)

    def prepare(self) -> str:
        return ""

    def can_probe(self, part: object) -> bool:
        return True

    def _tokens(self, item: ScheduledSeq) -> list[int]:
        return [random.randrange(8, self.vocab) for _ in range(item.plan.k + 1)]

    @staticmethod
    def _let_go(times: int) -> None:
        for _ in range(times):
            until = time.perf_counter() + LAUNCH_S
            while time.perf_counter() < until:
                pass
            zlib.crc32(SOME)  # of so much it lets go of the interpreter, and does not sleep


def replace(engine: Engine, step: float, row: float) -> None:
    """Prompts are cut as they are on a GPU."""
    engine.scheduler.prefill = engine.timer.prefill = PrefillBudget(1024, 2048, 8192, 512, LIKELY)
    engine.executors = [StandIn(step, row, engine.model.config.vocab_size)]


def threads() -> dict[str, float]:
    """Seconds of processor time of this process's threads so far, by their names."""
    names = {str(t.native_id): t.name for t in threading.enumerate()}
    spent: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        if task.name in names:
            spent[names[task.name]] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return spent
