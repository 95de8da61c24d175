"""Passes over chunks of prompts as CUDA graphs: hundreds of launches as one, so that the host is done long before the device.

A pass is captured for a number of rows, a number of sequences and a bound of the context, when it is first needed. Rows beyond those of the
chunks belong to an idle sequence on the scratch page and stand at position 0. So only backends whose rows are independent have captured
passes: there a row has the bits that it has in any other pass. Many rows go in several passes of at most `ROWS[-1]`: on a small model
launching one large pass kernel by kernel takes the host longer than these take the device, and on a large one they take no longer.

On a device without graphs the captured function itself runs: the same code is tested on the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..cache.store import KVStore, upload
from ..ops.backend import Capabilities
from ..types import Wanted
from .capture import Graph, Pool
from .cycle import forward
from .decode import Pages
from .machine import Machine
from .step import Lane

log = logging.getLogger("outrider")
ROWS = (16, 64, 128, 256, 512, 1024, 2048)
SEQUENCES = (8, 64)
NEAR = 1024  # positions: a pass that stays below them is a graph of its own, since attention has faster kernels there


@dataclass(frozen=True)
class PassKey:
    """What a pass is captured for."""

    rows: int
    sequences: int  # beside the idle one
    context: int  # no position may reach it
    wanted: bool  # the last hidden state of some sequence


class Passes:
    def __init__(self, machine: Machine, can: Capabilities, pool: Pool):
        self.machine, self.pool, self.device = machine, pool, machine.device
        self.idle = machine.store.spec.slots  # the table row that is all scratch page
        self.most, self.furthest = most_rows(can), furthest(machine.store)
        self.broken: str | None = None  # why capturing failed: from then on passes are launched kernel by kernel
        self._graphs: dict[PassKey, Graph] = {}
        self._numbers = torch.zeros(size(ROWS[-1], SEQUENCES[-1]) if self.most else 0, dtype=torch.int64, device=self.device)

    def run(self, lanes: Sequence[Lane]) -> None:
        """One pass over some chunks."""
        key = self.key(lanes)
        if key is None or not self.ready(key):
            self.machine.run(lanes)
            return
        self.machine.store.flush()
        self._say(lanes, key)
        self._graphs[key].replay()

    def key(self, lanes: Sequence[Lane]) -> PassKey | None:
        """The graph these chunks run in; None: there is none for so many."""
        count, end = sum(lane.count for lane in lanes), max(lane.start + lane.count for lane in lanes)
        if self.broken is not None or count > self.most or len(lanes) > SEQUENCES[-1]:
            return None
        rows, sequences = next(n for n in ROWS if n >= count), next(n for n in SEQUENCES if n >= len(lanes))
        context = NEAR if end <= NEAR < self.furthest else self.furthest
        return PassKey(rows, sequences, context, any(lane.wanted for lane in lanes))

    def ready(self, key: PassKey) -> bool:
        """Capture it if that has not been done. A failure ends the use of captured passes, with one line."""
        if key in self._graphs:
            return True
        self._say([], key)  # the warm-up runs on the scratch page alone
        try:
            with torch.inference_mode():
                self._graphs[key] = Graph(lambda: self._pass(key), self.device, self.pool)
        except Exception as error:
            if self.device.type != "cuda":
                raise
            self.broken = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning("prompts run without CUDA graphs: capturing %s failed (%s)", key, self.broken)
            return False
        return True

    def probe(self, rows: int, context: int, wanted: bool) -> None:
        """One pass of few sequences to its end, on the scratch page."""
        key = PassKey(rows, SEQUENCES[0], context, wanted)
        if self.broken is None and self.ready(key):
            self._say([], key)
            self._graphs[key].replay()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    def drop(self) -> None:
        self._graphs.clear()

    def _say(self, lanes: Sequence[Lane], key: PassKey) -> None:
        """What the graph reads: ids, positions and sequence of each row; then of each sequence, the idle one last, where its rows begin
        (and where the last ends), its slot, and the slot that its last hidden state is for."""
        idle = self.idle
        ids = [token for lane in lanes for token in lane.seq.tokens[lane.start : lane.start + lane.count]]
        positions = [p for lane in lanes for p in range(lane.start, lane.start + lane.count)]
        owner = [i for i, lane in enumerate(lanes) for _ in range(lane.count)]
        fill, spare = key.rows - len(ids), key.sequences - len(lanes)
        starts = [0]
        for lane in lanes:
            starts.append(starts[-1] + lane.count)
        starts += [len(ids)] * spare + [key.rows]
        slots = [*(lane.slot for lane in lanes), *[idle] * (spare + 1)]
        ends = [*(lane.slot if lane.wanted else idle for lane in lanes), *[idle] * (spare + 1)]
        nothing = [0] * fill
        line = [*ids, *nothing, *positions, *nothing, *owner, *[key.sequences] * fill, *starts, *slots, *ends]
        self._numbers[: len(line)].copy_(upload(line, torch.int64, self.device))

    def _pass(self, key: PassKey) -> None:
        """The function that is captured: it looks at no value."""
        machine, count = self.machine, key.sequences + 1
        numbers = self._numbers[: size(key.rows, key.sequences)]
        ids, positions, owner, starts, slots, ends = numbers.split([key.rows] * 3 + [count + 1, count, count])
        pages = Pages.of(machine.store, slots, key.context)
        kv = pages.view(slots, positions, owner, starts.to(torch.int32), key.rows, key.context)
        if not key.wanted:
            forward(machine.model, ids, kv, machine.taps, Wanted(positions[:0], kv))
            return
        last, each = (starts[1:] - 1).clamp(min=0), torch.arange(count + 1, dtype=torch.int32, device=self.device)
        seen = replace(kv, positions=positions.index_select(0, last), row_seq=each[:-1].long(), row_start=each, max_rows=1)
        _, features = forward(machine.model, ids, kv, machine.taps, Wanted(last, seen))
        machine.features.index_copy_(0, ends, features)


def most_rows(can: Capabilities) -> int:
    """Rows of the largest pass that is captured."""
    return ROWS[-1] if can.prompts_independent and can.independent_rows >= ROWS[-1] else 0


def furthest(store: KVStore) -> int:
    """Positions that a table has room for."""
    return next(iter(store.tables.values())).shape[1] * store.spec.page_size


def likely(can: Capabilities, store: KVStore) -> list[tuple[int, int]]:
    """(rows, context) of the passes that a server will want, the largest first: the smaller ones find their memory there."""
    contexts = sorted({min(NEAR, furthest(store)), furthest(store)})
    return [(rows, context) for rows in reversed(ROWS) if rows <= most_rows(can) for context in contexts]


def size(rows: int, sequences: int) -> int:
    """Numbers that describe a pass."""
    return 3 * rows + 3 * (sequences + 1) + 1
