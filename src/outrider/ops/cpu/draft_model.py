"""A draft model's round in one call of the library (draft_model.h): read the tokens not yet seen, then draft.

Step by step in torch, a draft token costs half a millisecond on top of its four or five for the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_double, c_float, c_int32, c_int64
from itertools import accumulate, takewhile

from torch import Tensor

from ...types import KVPages
from ..backend import DraftRequest, DraftResult, HostSampling
from ..formats import DeviceWeight
from .forward import CompiledModel
from .lib import CChain, CPages, at
from .packing import c_weight


class CpuChain:
    """`head`: the rows of the model's head, of the tokens `listed`, that are scored for all sequences (None: all)."""

    def __init__(self, model: CompiledModel, head: DeviceWeight, listed: Tensor | None):
        self.ops = model.ops
        self.cap = model.config.softcap or 0.0
        self.keep = (model, head, listed)  # keeps the memory behind the pointers alive
        self.c = CChain(head=c_weight(head), all=c_weight(model.head), cap=self.cap)
        self.c.call.stack = at(model.stack.c)
        self.c.listed = at(listed)
        self.layer = model.config.kv_layers[0]
        self.first: Tensor | None = None  # identifies the cache of the pointers in `pages`
        self.pages: CPages | None = None

    def run(
        self,
        behind: Sequence[DraftRequest],
        cache: KVPages,
        k: int,
        sampling: HostSampling,
        trust: Sequence[float] | None,
    ) -> list[DraftResult]:
        """Up to k draft tokens for each. cache: the draft model's own; its tables are not read. Others: as CpuCycle."""
        size = len(behind)
        c = self.c
        batch = self.c.call.batch
        counts = [len(b.tokens) for b in behind]
        rows = sum(counts)
        wide = max(len(b.pages) for b in behind)
        ids = (c_int64 * rows)(*[t for b in behind for t in b.tokens])
        positions = (c_int64 * rows)(*[p for b, n in zip(behind, counts) for p in range(b.start, b.start + n)])
        row_seq = (c_int64 * rows)(*[i for i, n in enumerate(counts) for _ in range(n)])
        row_start = (c_int32 * (size + 1))(*accumulate(counts, initial=0))
        table = (c_int32 * (size * wide))(*[p for b in behind for p in (*b.pages, *[0] * (wide - len(b.pages)))])
        if cache.keys[self.layer] is not self.first:  # the pool has grown
            self.first = cache.keys[self.layer]
            self.pages = CPages(cache)
            self.pages.bind(batch)
        batch.rows = rows
        batch.seqs = size
        batch.ids, batch.positions, batch.row_seq, batch.row_start = map(at, (ids, positions, row_seq, row_start))
        for group in (0, 1):
            batch.tables[group] = at(table)
            batch.width[group] = wide
        tokens = [t for b in behind for t in b.seen]
        seen = (c_int64 * max(1, len(tokens)))(*tokens)
        seen_start = (c_int32 * (size + 1))(*accumulate((len(b.seen) for b in behind), initial=0))
        guess = (c_int64 * size)(*[b.start + n for b, n in zip(behind, counts)])
        out = (c_int64 * (size * k))()
        sure = (c_float * (size * k))()
        lengths = (c_int64 * size)()
        made_here = (seen, seen_start, guess, out, sure, lengths)
        c.seen, c.seen_start, c.position, c.out, c.confidence, c.lengths = map(at, made_here)
        c.temperature, c.sampled, c.seed = map(at, (sampling.temperature, sampling.sampled, sampling.seed))
        c.steps = k
        c.stop = None
        c.drop = None
        c.trust = None
        if trust is not None:
            thresholds = (c_double * size)(*[b.stop for b in behind]), (c_double * size)(*[b.drop for b in behind])
            ends = (*thresholds, (c_double * 16)(*trust))
            c.stop, c.drop, c.trust = map(at, ends)
        self.ops.lib.or_draft_model_steps(self.ops.pool, c)
        drafts = []
        for i in range(size):
            run = list(takewhile(lambda p: p > 0.0, sure[i * k : i * k + k]))
            drafts.append(DraftResult(out[i * k : i * k + len(run)], run, min(lengths[i], len(run))))
        return drafts
