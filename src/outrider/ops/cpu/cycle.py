"""A whole decode cycle of a compiled model in one call of the library (cycle.h): draft, verify, choose, accept.

Between two passes over the weights Python runs on cold caches: a cycle of single tensor operations loses half a
millisecond without a draft and more than one with it, this call a tenth. It equals `engine.cycle`, bit for bit, for
requests that are greedy or use temperature, top-k, top-p and min-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_char, c_double, c_float, c_int32, c_int64, c_void_p
from struct import Struct

import torch
from torch import Tensor

from ...types import MAX_DRAFT, KVPages
from ..backend import CycleRequest, CycleResult, HostSampling
from ..lowrank import Adapter
from .block import CpuBlock, UnreadRows
from .forward import CompiledDrafter, CompiledModel
from .lib import GROUPS, CCall, CCycle, CDraft, at
from .lowrank import PassAdapters
from .packing import c_weight

ASKED = Struct("=qqdddiiiiiiiiii")  # CycleRequest in cycle.h
# its output fields: steps; k and accepted
STEPS = Struct("=32xd")
VERIFIED = Struct("=44xi4xi")


class CpuCycle:
    """For requests that are greedy or use temperature and filters alone. `cache`: tables with one row per slot.
    `features` [slots, H·(1 + taps)] float32: the drafter's inputs, by slot; updated by every run. `drafts`: are the
    drafter's rounds part of the call? Otherwise it takes only given drafts."""

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
            self.unread = UnreadRows(block, cache, pages, c.call.batch)
            self.block_taps = (c_int32 * len(block.taps))(*[self.taps.index(tap) for tap in block.taps])
            c.block, c.unread, c.block_taps = map(at, (self.unread.net, self.unread.c, self.block_taps))
        most = features.shape[0]
        self.asked = bytearray(most * ASKED.size)
        self.guesses = (c_int64 * (most * MAX_DRAFT))()
        self.confidence = (c_float * (most * MAX_DRAFT))()
        self.parents = (c_int32 * (most * MAX_DRAFT))()
        self.path = (c_int32 * (most * MAX_DRAFT))()
        self.prices = (c_double * (most * (MAX_DRAFT + 1)))()
        self.priced: list[Sequence[float] | None] = [None] * most  # what `prices` holds; tuples, which do not change
        self.trust = (c_double * 16)()
        c.requests = at((c_char * len(self.asked)).from_buffer(self.asked))
        c.drafts = at(self.guesses)
        c.confidence, c.parents, c.path, c.prices = map(at, (self.confidence, self.parents, self.path, self.prices))
        self.trusted: Sequence[float] | None = None  # what `trust` holds
        self.room = 0
        self.told = (c_float * 0)()  # logprobs by row
        self.sampling: HostSampling | None = None
        self.shape = (0, -1)  # what `seqs` and `likely` hold
        self.adapters = PassAdapters(model.stack.changes, ())
        self.stack = model.stack
        self.step = ops.lib.or_decode_step
        self.pool = ops.pool

    def takes(self, adapter: Adapter) -> bool:
        """May sequences use this adapter?"""
        return self.stack.changes(adapter) is not None

    def _grow(self, rows: int) -> None:
        self.room = rows = 1 << (rows - 1).bit_length()
        hidden = torch.empty((rows, self.hidden))
        z = torch.empty((rows, self.vocab))
        streams = self.streams = [torch.empty((rows, self.hidden)) for _ in self.taps]
        self.chosen = (c_int64 * rows)()
        self.tapped = (c_void_p * max(1, len(streams)))(*map(at, streams))
        by_layer: list[int | None] = [None] * self.layers
        for layer, stream in zip(self.taps, streams):
            by_layer[layer] = at(stream)
        self.by_layer = (c_void_p * self.layers)(*by_layer)
        self.buffers = [hidden, z]
        c = self.c
        c.call.hidden, c.z, c.chosen, c.taps = map(at, (hidden, z, self.chosen, self.tapped))
        c.call.taps = at(self.by_layer) if streams else None

    def run(
        self, asked: Sequence[CycleRequest], sampling: HostSampling, trust: Sequence[float] | None
    ) -> list[CycleResult]:
        """`trust`: acceptance by confidence, if drafts may end themselves; a list that does not change."""
        c = self.c
        rows = len(asked)
        most_likely = -1
        deepest = 0
        used = [one.adapter for one in asked]
        if used != self.adapters.adapters:
            self.adapters = PassAdapters(self.stack.changes, used)
            c.call.adapters = self.adapters.c
        for i, (slot, last, length, plan, guess, likely, _, block) in enumerate(asked):
            _, k, stop, drop, nodes, prices = plan
            top = -1 if likely is None else likely
            if top > most_likely:
                most_likely = top
            ASKED.pack_into(
                self.asked, i * ASKED.size, last, length, stop, drop, 0.0, slot, k, guess is not None, 0, nodes,
                prices is not None, self.adapters.of[i], top, block, 0
            )  # fmt: skip
            if guess is not None:
                self.guesses[i * MAX_DRAFT : i * MAX_DRAFT + k] = list(guess)
            if prices is not None and prices is not self.priced[i]:  # a plan is valid for several cycles
                self.priced[i] = prices
                self.prices[i * (MAX_DRAFT + 1) : (i + 1) * (MAX_DRAFT + 1)] = list(prices)
            rows += k if k > nodes else nodes
            if block and k > deepest:
                deepest = k
        rows = max(rows, deepest * len(asked))  # a block drafter's logits
        if rows > self.room:
            self._grow(rows)
        if sampling is not self.sampling:
            self.sampling = sampling
            c.temperature, c.sampled, c.seed = map(at, (sampling.temperature, sampling.sampled, sampling.seed))
            cut = sampling.cut
            c.top_k, c.top_p, c.min_logp = map(at, (None,) * 3 if cut is None else (cut.top_k, cut.top_p, cut.min_logp))
        if trust is not self.trusted:
            self.trusted = trust
            if trust is not None:
                self.trust[:] = list(trust)
            c.trust = at(self.trust) if trust is not None else None
        if self.shape != (len(asked), most_likely):
            self.shape = c.seqs, c.likely = len(asked), most_likely
        width = 1 + 2 * most_likely
        if rows * width > len(self.told):
            self.told = (c_float * (self.room * width))()
            c.logprobs = at(self.told)
        self.step(self.pool, c)
        out = []
        row = 0
        for i, (_, _, _, plan, guess, likely, _, _) in enumerate(asked):
            k, right = VERIFIED.unpack_from(self.asked, i * ASKED.size)
            sure = None
            tree = None
            confidence = None
            first = i * MAX_DRAFT
            if plan.nodes:
                columns = slice(first, first + k)
                (steps,) = STEPS.unpack_from(self.asked, i * ASKED.size)
                sure = self.confidence[columns]
                tree = (self.parents[columns], self.path[first : first + right], steps, self.guesses[columns])
            elif guess is None and plan.k:
                sure = self.confidence[first : first + min(plan.k, k + 1)]  # with the token that ended the draft, if it
                if sure[-1] == 0.0:  # was drafted
                    sure.pop()
            if likely is not None:
                path = range(1, right + 1) if tree is None else tree[1]
                confidence = [self.told[(row + j) * width : (row + j + 1) * width] for j in (0, *path)]
            tokens = self.chosen[row : row + right + 1]
            drafts = self.guesses[first : first + k] if k else []
            out.append(CycleResult(k, tokens, sure, tree, confidence, drafts))
            row += k + 1
        return out
