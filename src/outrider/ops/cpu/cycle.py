"""A whole decode cycle of a compiled model in one call of the library (cycle.h): draft, verify, choose, accept.

Between two passes over the weights Python runs on cold caches: a cycle of single tensor operations loses half a
millisecond without a draft and more than one with it, this call a tenth. It equals `engine.cycle`, bit for bit, for
requests that are greedy or use temperature, top-k, top-p and min-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_double, c_int32, c_void_p

import torch
from torch import Tensor

from ...types import MAX_DRAFT, KVPages
from ..backend import HostSampling
from ..decode_io import DecodeInputs, DecodeOutputs
from ..lowrank import Adapter
from .block import CpuBlock, UnreadRows
from .forward import CompiledDrafter, CompiledModel
from .lib import GROUPS, CCall, CCycle, CDecodeInputs, CDecodeOutputs, CDraft, at
from .lowrank import PassAdapters
from .packing import c_weight


class CpuCycle:
    """For requests that are greedy or use temperature and filters alone. `cache`: tables with one row per slot.
    `features` [slots, H·(1 + taps)] float32: the drafter's inputs, by slot; updated by every run. `drafts`: are the
    drafter's rounds part of the call? Otherwise it takes only drafts of the host.

    A step is written to `inputs`, run by `run`, and read from `outputs`."""

    def __init__(
        self,
        model: CompiledModel,
        drafter: CompiledDrafter | None,
        cache: KVPages,
        features: Tensor,
        taps: Sequence[int],
        block: CpuBlock | None = None,
    ):
        """block: of a drafter that reads all rows; `unread` is what it has not yet read."""
        ops = model.ops
        config = model.config
        max_sequences = features.shape[0]
        self.ops = ops
        self.drafter = drafter
        self.hidden = config.hidden
        self.vocab = config.vocab_size
        self.drafts = drafter is not None
        self.layers = len(config.layers)
        self.taps = tuple(taps)
        pages = ops.pages(cache)
        self.keep = (model, drafter, cache, features, pages)  # keeps the memory behind the pointers alive
        c = self.c = CCycle(head=c_weight(model.head), streams=len(taps), most=MAX_DRAFT, cap=config.softcap or 0.0)
        c.features = at(features)
        c.call.stack = at(model.stack.c)
        batch = c.call.batch
        pages.bind(batch)
        for i, group in enumerate(GROUPS):
            table = cache.tables.get(group)
            if table is not None:
                batch.tables[i] = at(table)
                batch.width[i] = table.shape[1]
        if drafter is not None:
            draft = self.draft = CDraft.from_buffer_copy(drafter.c)  # a copy: this one reads this cache
            draft.call = CCall(at(drafter.stack.c), c.call.batch)
            c.draft = at(draft)
            c.shift = drafter.shift
        self.unread = None
        self.drafts_blocks = block is not None and block.drafts
        if block is not None:
            self.unread = UnreadRows(block, cache, pages, batch=c.call.batch)
            self.block_taps = (c_int32 * len(block.taps))(*[self.taps.index(tap) for tap in block.taps])
            c.block, c.unread, c.block_taps = map(at, (self.unread.net, self.unread.c, self.block_taps))
        self.inputs = DecodeInputs(max_sequences)
        self.outputs = DecodeOutputs.allocate(max_sequences)
        bind(getattr(c, "in"), CDecodeInputs, self.inputs)
        bind(c.out, CDecodeOutputs, self.outputs)
        self.trust = (c_double * 16)()
        self.bound_trust: Sequence[float] | None = None  # what `trust` holds
        self.max_rows = 0  # of the buffers below
        self.row_logprobs: Tensor | None = None
        self.sampling: HostSampling | None = None
        self.adapters = PassAdapters(model.stack.changes, ())
        self.stack = model.stack
        self.step = ops.lib.or_decode_step
        self.pool = ops.pool

    def takes(self, adapter: Adapter) -> bool:
        """May sequences use this adapter?"""
        return self.stack.changes(adapter) is not None

    def _grow(self, rows: int) -> None:
        """Allocate the buffers of a step with this many rows."""
        rows = 1 << (rows - 1).bit_length()
        self.max_rows = rows
        hidden = torch.empty((rows, self.hidden))
        z = torch.empty((rows, self.vocab))
        streams = [torch.empty((rows, self.hidden)) for _ in self.taps]
        chosen = torch.empty(rows, dtype=torch.int64)
        self.tapped = (c_void_p * max(1, len(streams)))(*map(at, streams))
        by_layer: list[int | None] = [None] * self.layers
        for layer, stream in zip(self.taps, streams):
            by_layer[layer] = at(stream)
        self.by_layer = (c_void_p * self.layers)(*by_layer)
        self.buffers = [hidden, z, chosen, *streams]
        c = self.c
        c.call.hidden, c.z, c.chosen, c.taps = map(at, (hidden, z, chosen, self.tapped))
        c.call.taps = at(self.by_layer) if streams else None
        self.row_logprobs = None

    def _allocate_logprobs(self, num_logprobs: int) -> None:
        """Allocate logprobs of that many tokens beside the chosen one."""
        width = 1 + 2 * num_logprobs
        self.row_logprobs = torch.empty((self.max_rows, width))
        logprobs = torch.empty((*self.outputs.tokens.shape, width))
        self.outputs.logprobs = logprobs.numpy()  # shares its memory
        self.c.row_logprobs = at(self.row_logprobs)
        self.c.out.logprobs = at(logprobs)

    def run(
        self,
        count: int,
        sampling: HostSampling,
        *,
        adapters: Sequence[Adapter | None],
        trust: Sequence[float] | None = None,
    ) -> None:
        """The step of the first `count` sequences of `inputs`. trust: acceptance by confidence, if drafts may end
        themselves; a list that does not change."""
        c = self.c
        inputs = self.inputs
        if self.adapters.adapters != adapters:
            self.adapters = PassAdapters(self.stack.changes, adapters)
            c.call.adapters = self.adapters.c
            inputs.adapter[:count] = self.adapters.of
        max_draft = inputs.max_draft[:count].tolist()
        max_nodes = inputs.max_nodes[:count].tolist()
        rows = count + sum(map(max, max_draft, max_nodes))
        if self.drafts_blocks:
            rows = max(rows, max(max_draft) * count)  # a block drafter's logits
        if rows > self.max_rows:
            self._grow(rows)
        num_logprobs = max(inputs.num_logprobs[:count].tolist())
        if num_logprobs >= 0 and (num_logprobs != c.likely or self.row_logprobs is None):
            self._allocate_logprobs(num_logprobs)
        if sampling is not self.sampling:
            self._bind_sampling(sampling)
        if trust is not self.bound_trust:
            self.bound_trust = trust
            if trust is not None:
                self.trust[:] = list(trust)
            c.trust = at(self.trust) if trust is not None else None
        c.seqs = count
        c.likely = num_logprobs
        self.step(self.pool, c)

    def _bind_sampling(self, sampling: HostSampling) -> None:
        self.sampling = sampling
        c = self.c
        c.temperature, c.sampled, c.seed = map(at, (sampling.temperature, sampling.sampled, sampling.seed))
        cut = sampling.cut
        filters = (None, None, None) if cut is None else (cut.top_k, cut.top_p, cut.min_logp)
        c.top_k, c.top_p, c.min_logp = map(at, filters)


def bind(c: Structure, layout: type[Structure], arrays: DecodeInputs | DecodeOutputs) -> None:
    """Set every field of a C struct from the arrays' attribute of the same name: pointers, and widths as numbers."""
    for name, kind in layout._fields_:  # type: ignore[misc]
        value = getattr(arrays, name)
        if kind is c_void_p:
            value = None if value is None else value.ctypes.data
        setattr(c, name, value)
