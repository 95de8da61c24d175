"""Prefill passes as CUDA graphs: one launch instead of hundreds.

A pass is captured for a number of rows, of sequences and a context bound, when first needed or, in a server, before
the first request. Chunks run in the smallest captured pass that holds them, else kernel by kernel. Padding rows belong
to an idle sequence on the scratch page, so rows must be independent. They cost device time: passes are captured only
up to the rows that the device computes while the host would launch kernel by kernel (`max_prefill_rows`). On a device
without graphs the captured function itself runs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..cache.store import ragged, upload
from ..types import KVView, OutputRows
from .capture import Graph, GraphCache, GraphPool
from .model_runner import ModelRunner
from .prefill_budget import CAPTURED_ROWS, WARMUP_ROWS
from .step import PromptChunks

log = logging.getLogger("outrider")
CAPTURED_SEQUENCES = (8, 64)
NEAR_PREFILL = 1024  # positions: passes below have separate graphs, since attention has faster kernels there
# A server captures WARMUP_ROWS before the first request comes, for few sequences and any context; some of it also for
# the near context, and for many sequences up to CROWDED_CONTEXT positions, since attention keeps partial sums of every
# last row by splits of its context.
NEAR_WARMUP_ROWS = (256, 1024)
CROWDED_WARMUP_ROWS = (512, 2048)
CROWDED_CONTEXT = 8192


@dataclass(frozen=True)
class PrefillKey:
    rows: int
    sequences: int  # without the idle one
    context: int  # no position may reach it
    wanted: bool  # the last hidden state of some sequence

    def covers(self, rows: int, sequences: int, end: int, wanted: bool) -> bool:
        return self.wanted == wanted and self.rows >= rows and self.sequences >= sequences and self.context >= end


class PrefillGraphs:
    def __init__(self, runner: ModelRunner, max_rows: int, pack: int, pool: GraphPool):
        """max_rows: of the largest captured pass (`max_prefill_rows`); 0: no captures. pack: rows of several chunks in
        one pass (`max_packed_rows`); 0: as many as are independent."""
        self.runner = runner
        self.device = runner.device
        self.cache: GraphCache[PrefillKey, Graph] = GraphCache(self.device, pool)
        self.idle = runner.store.spec.slots  # the table row that is all scratch page
        table = next(iter(runner.store.tables.values()))
        page = runner.store.spec.page_size
        self.max_rows = max_rows
        self.pack = pack
        self.furthest = table.shape[1] * page  # positions that a table can hold
        self.fixed = False  # requests are being served: no further captures
        self.ran = 0  # rows so far, with padding
        count = size(CAPTURED_ROWS[-1], CAPTURED_SEQUENCES[-1]) if max_rows else 0
        self._numbers = torch.zeros(count, dtype=torch.int64, device=self.device)

    def run(self, chunks: PromptChunks) -> None:
        key = self.key(chunks)
        graph = None if key is None else self.capture(key)
        if key is None or graph is None:
            self.ran += sum(chunk.num_tokens for chunk in chunks)
            self.runner.run(chunks)
            return
        self.ran += key.rows
        self.runner.store.flush()
        self._write_inputs(chunks, key)
        graph.replay()

    def key(self, chunks: PromptChunks) -> PrefillKey | None:
        """The key of the graph for these chunks, captured or not; None: no graph, now or later."""
        count = sum(chunk.num_tokens for chunk in chunks)
        end = max(chunk.start + chunk.num_tokens for chunk in chunks)
        wanted = any(chunk.wanted for chunk in chunks)
        if any(chunk.seq.adapter is not None for chunk in chunks):
            return None
        if not self.fixed and count <= self.max_rows and len(chunks) <= CAPTURED_SEQUENCES[-1]:
            rows = next(n for n in CAPTURED_ROWS if n >= count)
            sequences = next(n for n in CAPTURED_SEQUENCES if n >= len(chunks))
            context = NEAR_PREFILL if end <= NEAR_PREFILL < self.furthest else self.furthest
            key = PrefillKey(rows, sequences, context, wanted=wanted)
            if key not in self.cache.refused:
                return key
        there = [key for key in self.cache.graphs if key.covers(count, len(chunks), end, wanted=wanted)]
        return min(there, key=lambda key: (key.rows, key.sequences, key.context), default=None)

    def capture(self, key: PrefillKey) -> Graph | None:
        """The graph of this key, captured if necessary. After a failure only passes of fewer rows are captured."""
        if key in self.cache.graphs or key in self.cache.refused:
            return self.cache.graphs.get(key)
        self._write_inputs([], key)  # the warm-up runs on the scratch page alone
        graph = self.cache.capture(key, partial(prompt_pass, self.runner, self._numbers, key), self.runner.divided)
        if not isinstance(graph, str):
            self.cache.graphs[key] = graph
            return graph
        if key.rows <= self.max_rows:
            self.max_rows = max((n for n in CAPTURED_ROWS if n < key.rows), default=0)
            log.warning(
                "prompts: from now on CUDA graphs of at most %d rows: capturing %s failed (%s)",
                self.max_rows,
                key,
                graph,
            )
        return None

    def likely(self, served: bool = True) -> list[PrefillKey]:
        """The passes to capture before the first request, the largest first; `served` is False: those of few prompts,
        which end where a drafter starts."""
        ends = (False, True) if self.runner.drafter is not None else (False,)
        keys = warmup_keys(self.max_rows, self.furthest, ends)
        if served:
            return keys
        return [key for key in keys if key.sequences == CAPTURED_SEQUENCES[0] and key.wanted == ends[-1]]

    def views(self, key: PrefillKey) -> list[KVView]:
        """The views of attention in this pass, on the scratch page: of its rows, and of each sequence's last one."""
        count = key.sequences + 1
        rows = torch.zeros(key.rows, dtype=torch.int64, device=self.device)
        slots = torch.full((count,), self.idle, dtype=torch.int64, device=self.device)
        starts = torch.zeros(count + 1, dtype=torch.int32, device=self.device)
        pages = self.runner.store.pages_of(slots, key.context)
        view = pages.view(rows, rows, starts, max_rows=key.rows, max_context=key.context)
        last = replace(view, positions=slots, row_seq=slots, max_rows=1)
        return [view, last] if key.wanted else [view]

    def prepare(self) -> None:
        """Capture what a server will need, and nothing after that."""
        for key in self.likely():
            self.capture(key)
        self.fixed = True

    def _write_inputs(self, chunks: PromptChunks, key: PrefillKey) -> None:
        """The graph's inputs: ids, positions, sequence and next token of each row; then for each sequence, the idle one
        last, where its rows begin (and where the last ends), its slot, and the slot for its last hidden state."""
        idle = self.idle
        ids = [token for chunk in chunks for token in chunk.seq.tokens[chunk.start : chunk.start + chunk.num_tokens]]
        after: list[int] = []
        for chunk in chunks:
            after += chunk.seq.tokens[chunk.start + 1 : chunk.start + chunk.num_tokens + 1]
        positions, owner, starts = ragged([(chunk.start, chunk.num_tokens) for chunk in chunks])
        fill = key.rows - len(ids)
        spare = key.sequences - len(chunks)
        starts += [len(ids)] * spare + [key.rows]
        slots = [*(chunk.slot for chunk in chunks), *[idle] * (spare + 1)]
        ends = [*(chunk.slot if chunk.wanted else idle for chunk in chunks), *[idle] * (spare + 1)]
        nothing = [0] * fill
        rows = [*ids, *nothing, *positions, *nothing, *owner, *[key.sequences] * fill, *after, *nothing]
        numbers = [*rows, *starts, *slots, *ends]
        self._numbers[: len(numbers)].copy_(upload(numbers, torch.int64, self.device))


def prompt_pass(runner: ModelRunner, numbers: Tensor, key: PrefillKey) -> None:
    """The captured function: it reads no value. numbers: as `PrefillGraphs._write_inputs` writes them."""
    count = key.sequences + 1
    parts = numbers[: size(key.rows, key.sequences)].split([key.rows] * 4 + [count + 1, count, count])
    ids, positions, owner, after, starts, slots, ends = parts
    pages = runner.store.pages_of(slots, key.context)
    kv = pages.view(positions, owner, starts.to(torch.int32), max_rows=key.rows, max_context=key.context)
    if not key.wanted:
        runner.forward(ids, kv, OutputRows(positions[:0], kv), following=after)
        return
    last = (starts[1:] - 1).clamp(min=0)
    each = torch.arange(count + 1, dtype=torch.int32, device=numbers.device)
    seen = replace(kv, positions=positions.index_select(0, last), row_seq=each[:-1].long(), row_start=each, max_rows=1)
    runner.features.index_copy_(0, ends, runner.forward(ids, kv, OutputRows(last, seen), following=after))


def warmup_keys(max_rows: int, furthest: int, ends: Sequence[bool]) -> list[PrefillKey]:
    """A server's passes, the largest first: up to this many rows and `furthest` positions, last states by `ends`."""
    few, many = CAPTURED_SEQUENCES
    rows = [n for n in WARMUP_ROWS if n <= max_rows]
    shapes = {(n, few, furthest) for n in rows}
    shapes |= {(n, few, min(NEAR_PREFILL, furthest)) for n in NEAR_WARMUP_ROWS if n <= max_rows}
    if rows:
        shapes |= {(min(n, rows[-1]), many, min(CROWDED_CONTEXT, furthest)) for n in CROWDED_WARMUP_ROWS}
    keys: list[PrefillKey] = []
    for num_rows, sequences, context in sorted(shapes, reverse=True):
        keys += [PrefillKey(num_rows, sequences, context, wanted=wanted) for wanted in ends]
    return keys


def size(rows: int, sequences: int) -> int:
    return 4 * rows + 3 * (sequences + 1) + 1
