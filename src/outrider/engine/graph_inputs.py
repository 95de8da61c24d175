"""Uploads what captured steps read: the buffers of `decode.Inputs`, newest tokens and positions in `decode.State`, and
the masks of grammars. Only what changed since the last step is uploaded.
"""

from __future__ import annotations

from collections import abc

import torch
from torch import Tensor

from ..cache.store import upload
from ..ops.adapter_slots import row_ranges
from ..ops.decode_io import HOST_DRAFT
from ..spec.slot_sampling import NO_FEATURES
from .decode import Inputs, Key, State
from .model_runner import ModelRunner
from .step import DecodeRows


class GraphInputs:
    def __init__(self, runner: ModelRunner, state: State, max_batch: int, max_rows: int, max_position: int):
        """max_batch, max_rows: sequences and rows of the largest step. max_position: sequences end there."""
        self.runner = runner
        self.device = runner.device
        self.state = state
        self.idle = runner.store.spec.slots  # the table row that is all scratch page
        self.buffers = Inputs.of(self.device, self.idle, max_batch)
        # int32 [rows, V / 32]: masks of the rows of a step, allocated with the first grammar
        self.grammar_bits: Tensor | None = None
        self._max_rows = max_rows
        self._max_position = max_position
        self._uploaded: dict[str, tuple[object, ...]] = {}  # by buffer

    def write(self, rows: DecodeRows, key: Key) -> None:
        """Upload what changed. A sequence with tokens in flight has its state on the device, ahead of the host."""
        self.runner.join([row.seq for row in rows], key.asks)
        if key.asks != NO_FEATURES:
            self.runner.batch_sampling = None
        self._write_state(rows)
        num_idle = key.batch - len(rows)
        buffers = self.buffers
        self._put("slots", buffers.slots, [row.slot for row in rows] + [self.idle] * num_idle)
        self._put("cap", buffers.cap, [self._max_position] * len(rows) + [1] * num_idle)
        self._put("limit", buffers.limit, [row.plan.k for row in rows] + [0] * num_idle)
        if key.adapted and self.runner.adapters is not None and self.runner.adapters.slots is not None:
            adapter_slots = self.runner.adapters.slots.place([row.seq.adapter for row in rows])
            self.write_adapter_ranges([*adapter_slots, *[-1] * num_idle], key)
        if key.source in ("host", "both"):
            self._put("by_host", buffers.by_host, [row.host_draft is not None for row in rows] + [False] * num_idle)
            self._put("base", buffers.base, [row.position for row in rows] + [0] * num_idle)
            guesses = [[*(row.host_draft or ()), *[0] * HOST_DRAFT][:HOST_DRAFT] for row in rows]
            buffers.guesses[: len(rows)].copy_(upload(guesses, torch.int64, self.device))

    def _write_state(self, rows: DecodeRows) -> None:
        """Newest token and position of the sequences whose state the device does not have."""
        fresh = [row for row in rows if row.seq.num_inflight_tokens == 0]
        if not fresh:
            return
        columns = ([row.slot for row in fresh], [row.seq.tokens[-1] for row in fresh], [row.position for row in fresh])
        slots, last, position = upload(columns, torch.int64, self.device)
        self.state.last.index_copy_(0, slots, last)
        self.state.position.index_copy_(0, slots, position)

    def write_adapter_ranges(self, adapter_slots: abc.Sequence[int], key: Key) -> Tensor:
        """Upload the adapter slot of each sequence (-1: none). Returns the ranges that a step of this key reads."""
        ranges = row_ranges(adapter_slots, [key.drafted + 1] * key.batch)
        self._put("ranges", self.buffers.ranges, ranges)
        return self.buffers.ranges[: len(ranges)]

    def write_idle(self) -> None:
        """Make all rows idle: a warm-up runs on the scratch page alone."""
        self.buffers.slots.fill_(self.idle)
        self.buffers.limit.fill_(0)
        self.buffers.cap.fill_(1)
        self._uploaded.clear()

    def write_probe(self, batch: int, position: int) -> None:
        """Make this many rows idle sequences at this position, for timing."""
        self._put("slots", self.buffers.slots, [self.idle] * batch)
        self._put("cap", self.buffers.cap, [position] * batch)
        self.state.position[self.idle].fill_(position)

    def end_probe(self) -> None:
        self.state.position[self.idle].fill_(1)

    def allocate_grammar_bits(self) -> None:
        if self.grammar_bits is None:
            shape = (self._max_rows, -(-self.runner.vocab // 32))
            self.grammar_bits = torch.full(shape, -1, dtype=torch.int32, device=self.device)

    def write_grammar_bits(self, rows: DecodeRows, drafts: abc.Sequence[abc.Sequence[int]], key: Key) -> None:
        """The grammars' masks after each drafted token. drafts: by sequence."""
        assert self.grammar_bits is not None
        width = key.k + 1
        seqs = [row.seq for row in rows]
        if self._uploaded.get("bits") != (width, *seqs):  # rows of sequences without a grammar allow everything
            self.grammar_bits[: key.batch * width].fill_(-1)
            self._uploaded["bits"] = (width, *seqs)
        for i, row in enumerate(rows):
            matcher = row.seq.answer.matcher
            if matcher is not None:
                bits = torch.from_numpy(matcher.bits(drafts[i][: row.plan.k]))
                bits = bits.pin_memory() if self.device.type == "cuda" else bits
                self.grammar_bits[i * width : i * width + len(bits)].copy_(bits, non_blocking=True)

    def _put(self, name: str, buffer: Tensor, values: list[int] | list[bool] | list[tuple[int, int, int]]) -> None:
        """Upload one value per batch row, unless the device's values begin with these already."""
        if self._uploaded.get(name, ())[: len(values)] != tuple(values):
            buffer[: len(values)].copy_(upload(values, buffer.dtype, self.device))
            self._uploaded[name] = tuple(values)
