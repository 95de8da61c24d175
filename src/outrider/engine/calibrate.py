"""Measures what a cycle costs on this machine: times the executors on scratch sequences for the controller's cost
table, which is stored by machine, model and version. Later starts time a few cycles and measure again if it is off;
with CUDA graphs it is trusted, as a check would require captures.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ..spec.cost import CostTable
from ..spec.plan import CostPart
from ..spec.timing import ProbeGrid, TimedDrafter, agrees, measure
from .engine import Engine
from .graph_dispatch import BATCHES

BUDGET_S = 3.0
CAPTURING_S = 12.0  # where every cell is a graph to be captured first


def calibrate(engine: Engine, key: str, path: Path | None) -> CostTable:
    """The stored table of this key if it is still valid, or a fresh one, stored for the next start."""
    stored = CostTable.load(path, key) if path is not None else None
    captured = any(executor.async_results for executor in engine.executors)
    if stored is not None and captured:
        return stored  # checking would require captures
    contexts = [c for c in (256, 2048) if c + 32 < engine.max_context] or [max(1, engine.max_context // 2)]
    trees = any(executor.async_results and executor.trees for executor in engine.executors)
    members = engine.drafter.members if engine.drafter is not None else ()
    timed = [
        TimedDrafter(one.name, one_pass=one.one_pass, trees=trees, reads=one.starts_from == "tokens") for one in members
    ]
    whole = len(timed) > 0 and any(
        executor.probes_whole_cycles and all(executor.can_probe(drafter.draft) for drafter in timed)
        for executor in engine.executors
    )
    names: list[str | None] = [*(drafter.name for drafter in timed)] or [None]

    def probe(part: CostPart, batch: int, k: int, context: int) -> None:
        executor = next(executor for executor in engine.executors if executor.can_probe(part))
        executor.probe(part, batch, k, context=context)

    try:
        if stored is not None and all(agrees(stored, probe, name, context=contexts[0], whole=whole) for name in names):
            return stored
        grid = ProbeGrid([b for b in BATCHES if b <= engine.max_batch], contexts)
        budget_s = CAPTURING_S if captured else BUDGET_S
        table = measure(probe, timed, grid, budget_s=budget_s, key=key, whole=whole)
    finally:
        engine.runner.close_scratch()
    if path is not None:
        with suppress(OSError):  # without a writable cache the next start measures again
            table.save(path)
    return table
