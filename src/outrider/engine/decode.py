"""The function that a CUDA graph captures: one decode step over buffers at fixed addresses.

`State` holds what sequences carry from step to step, by slot. `Inputs` holds what the host uploads for a step, by batch
row. `DecodeStep` runs the cycle (engine.cycle) between them and never reads a value, so it never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..cache.store import KVStore
from ..models.decoder import TextModel
from ..ops.decode_io import HOST_DRAFT, DecodeOutputs
from ..ops.trees import TreeRows
from ..spec.choose import Filters, SamplingBatch
from ..spec.drafter import DraftBatch, Drafter
from ..spec.slot_sampling import NO_FEATURES, SamplingFeatures, SlotSampling
from ..types import GREEDY_EPS, MAX_DRAFT, Draft, KVPages, SamplingParams, Verdict
from .cycle import CycleInput, Rows, cycle

# how candidates are found: the cheapest method for all rows
Choosing = Literal["greedy", "sampled", "head 64", "head 1024", "sort"]
FILTERS: dict[Choosing, Filters] = {
    "greedy": Filters(),
    "sampled": Filters(sampled=True),
    "head 64": Filters(sampled=True, any=True, top_k=True, top_p=True, head=64),
    "head 1024": Filters(sampled=True, any=True, top_k=True, top_p=True, head=1024),
    "sort": Filters(sampled=True, any=True, top_k=True, top_p=True, head=None),
}
# drafted: by another graph just before, as masks depend on the drafts
DraftSource = Literal["drafter", "host", "both", "drafted"]
Override = Callable[[Verdict, Draft, Tensor], Verdict]  # (verdict, draft, length): only benchmarks have one


def choosing_of(params: Sequence[SamplingParams]) -> Choosing:
    """The cheapest method that finds the candidates of all these rows."""
    sampled = [p for p in params if p.temperature >= GREEDY_EPS]
    filtered = [p for p in sampled if p.top_k or p.top_p < 1.0 or p.min_p > 0.0]
    if not filtered:
        return "sampled" if sampled else "greedy"
    if any(p.top_p < 1.0 and not p.top_k for p in filtered):
        return "sort"
    max_k = max(p.top_k for p in filtered)
    if max_k <= 64:
        return "head 64"
    return "head 1024" if max_k <= 1024 else "sort"


@dataclass(frozen=True)
class Key:
    batch: int
    k: int
    context: int  # no position of a replay may reach it
    choosing: Choosing
    source: DraftSource | None  # where drafts come from; None: K = 0
    part: Literal["cycle", "draft"] = "cycle"  # draft: only the draft, which is written to Inputs.drafted
    asks: SamplingFeatures = NO_FEATURES
    nodes: int = 0  # tokens of a draft tree, k deep; 0: a chain of k
    adapted: bool = False  # some sequences use adapters: their rows read Inputs.ranges
    drafter: str | None = None  # which of two drafters drafts; None: there is one, or it drafts nothing

    @property
    def drafted(self) -> int:
        """Number of draft tokens of a sequence that are verified."""
        return self.nodes or self.k


@dataclass
class State:
    """Position and sampling state by slot, on the device. The last row is for padding rows of a batch."""

    last: Tensor  # int64 [S + 1] the newest token
    position: Tensor  # int64 [S + 1] its position
    features: Tensor  # [S + 1, H·(1 + taps)]
    sampling: SlotSampling

    @staticmethod
    def of(features: Tensor, sampling: SlotSampling) -> State:
        rows = torch.zeros(features.shape[0], dtype=torch.int64, device=features.device)
        return State(rows, torch.ones_like(rows), features, sampling=sampling)


@dataclass
class Inputs:
    """The host's inputs of a step, by batch row. Uploaded only when they change."""

    slots: Tensor  # int64 [N]
    limit: Tensor  # int64 [N] the K of the row
    cap: Tensor  # int64 [N] where its length stops growing: 1 for padding rows
    by_host: Tensor  # bool [N] the host drafts for this row
    base: Tensor  # int64 [N] position of the newest token that the host knew when it drafted
    guesses: Tensor  # int64 [N, HOST_DRAFT] the tokens it expects after that position
    drafted: Tensor  # int64 [N, MAX_DRAFT] left here by a graph of part "draft"
    ranges: Tensor  # int32 [2·N, 3] as ops.adapter_slots.row_ranges has them

    @staticmethod
    def of(device: torch.device, idle: int, rows: int) -> Inputs:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return Inputs(
            slots=zeros(rows) + idle,
            limit=zeros(rows),
            cap=zeros(rows) + 1,
            by_host=zeros(rows, dtype=torch.bool),
            base=zeros(rows),
            guesses=zeros(rows, HOST_DRAFT),
            drafted=zeros(rows, MAX_DRAFT),
            ranges=zeros(2 * rows, 3, dtype=torch.int32),
        )

    def known(self, batch: int, k: int, length: Tensor) -> Tensor:
        """[B, k]: the host's draft tokens after the positions `length` [B], where the sequences are now."""
        at = (length - self.base[:batch])[:, None] + torch.arange(k, device=length.device)
        return self.guesses[:batch].gather(1, at.clamp(0, HOST_DRAFT - 1))


@dataclass
class Output:
    """The results of a captured step: one packed array, so that one copy brings them to the host, with named columns.
    On the host, `views` are the step's `DecodeOutputs`."""

    key: Key
    # int64 [B, W]: the columns `tokens`, then for trees `path` (with the newest token's row) and `parents` (likewise),
    # then `num_tokens`
    packed: Tensor
    logprobs: Tensor | None = None  # float32 [B, K + 1, 1 + 2n] as `DecodeOutputs`

    @staticmethod
    def of(key: Key, device: torch.device, pin_memory: bool = False) -> Output:
        width = key.k + 1
        tree_width = width + key.nodes + 1 if key.nodes > 0 else 0
        packed = torch.zeros(
            (key.batch, width + tree_width + 1), dtype=torch.int64, device=device, pin_memory=pin_memory
        )
        logprobs = None
        if key.asks.logprobs >= 0:
            shape = (key.batch, width, 1 + 2 * key.asks.logprobs)
            logprobs = torch.zeros(shape, device=device, pin_memory=pin_memory)
        return Output(key, packed, logprobs)

    @property
    def tokens(self) -> Tensor:
        """int64 [B, K + 1]"""
        return self.packed[:, : self.key.k + 1]

    def write(self, verdict: Verdict, tree: TreeRows | None) -> None:
        columns = [verdict.tokens]
        if tree is not None and verdict.rows is not None:
            columns += [verdict.rows, tree.parent_rows.view(self.key.batch, -1)]
        torch.cat((*columns, verdict.counts[:, None]), 1, out=self.packed)

    def views(self) -> DecodeOutputs:
        """The columns as arrays, of an output on the host: they share its memory."""
        packed = self.packed.numpy()
        width = self.key.k + 1
        outputs = DecodeOutputs(
            tokens=packed[:, :width],
            num_tokens=packed[:, -1],
            num_drafted=np.zeros(self.key.batch, np.int64),
            logprobs=None if self.logprobs is None else self.logprobs.numpy(),
        )
        if self.key.nodes > 0:
            outputs.is_tree = np.zeros(self.key.batch, np.bool_)
            outputs.path = packed[:, width + 1 : 2 * width]
            outputs.parents = packed[:, 2 * width + 1 : -1]
        return outputs


def allowed(bits: Tensor, vocab: int) -> Tensor:
    """int32 [R, V / 32], one bit per token -> bool [R, V]."""
    each = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> each) & 1).to(torch.bool).flatten(1)[:, :vocab]


@dataclass
class DecodeStep:
    """The captured function: emitted tokens to `out`, the next inputs to `state`; returns the logits [R, V]."""

    model: TextModel
    store: KVStore
    drafter: Drafter | None
    state: State
    inputs: Inputs
    key: Key
    out: Output
    bits: Tensor | None = None  # int32 [R, V / 32]: grammars' masks (key.asks.grammar)
    # for benchmarks: another verdict, a stand-in drafter, and False: the state stays, every run does the same work
    override: Override | None = None
    propose: Callable[[Tensor, Tensor], Draft | TreeRows] | None = None
    advance: bool = True

    def __post_init__(self) -> None:
        b = self.key.batch
        device = self.out.packed.device
        self.rows = Rows.of((self.key.drafted,) * b, device)
        self.slots = self.inputs.slots[:b]
        self.limit = self.inputs.limit[:b]
        self.cap = self.inputs.cap[:b]
        self.each = torch.arange(b, device=device)
        self.each_start = torch.arange(b + 1, dtype=torch.int32, device=device)

    def _guess(self, last: Tensor, length: Tensor, pages: KVPages, sampling: SamplingBatch) -> Draft | TreeRows:
        key = self.key
        b = self.key.batch
        k = self.key.k
        inputs = self.inputs
        if self.propose is not None:
            return self.propose(last, length)
        if key.source == "drafted":
            return Draft(inputs.drafted[:b, :k], self.limit)
        if key.source == "host":
            return Draft(inputs.known(b, k, length), self.limit)
        assert self.drafter is not None
        drafter = self.drafter.member(key.drafter)
        kv = pages.view(length - 1, self.each, self.each_start, max_rows=1, max_context=key.context)
        features = self.drafter.features_of(drafter, self.state.features.index_select(0, self.slots))
        nothing: list[list[int]] = [[]] * b
        batch = DraftBatch(
            [None] * b, nothing, sampling, last=last, position=length, features=features, kv=kv, ops=self.model.ops
        )
        if key.nodes:
            return drafter.build_fixed_tree(batch, k, key.nodes)
        tokens = drafter.propose(batch, k).tokens
        if key.source == "both":
            tokens = torch.where(inputs.by_host[:b, None], inputs.known(b, k, length), tokens)
        return Draft(tokens, self.limit)

    def _masks(self, drafts: Tensor) -> Tensor:
        """bool [R, V]: the grammars' masks that the host has uploaded for these drafts."""
        assert self.bits is not None
        return allowed(self.bits[: self.key.batch * (self.key.k + 1)], self.model.config.vocab_size)

    def __call__(self) -> Tensor | None:
        key = self.key
        b = self.key.batch
        k = self.key.k
        state = self.state
        slots = self.slots
        rows = self.rows
        model = self.model
        drafter = self.drafter
        out = self.out
        last = state.last.index_select(0, slots)
        length = state.position.index_select(0, slots)
        # gathered once: drafter and target look through them at different positions
        pages = self.store.pages_of(slots, key.context)
        sampling = state.sampling.select(slots, length, FILTERS[key.choosing], asks=key.asks)
        if key.part == "draft":
            self.inputs.drafted[:b, : key.drafted].copy_(self._guess(last, length, pages, sampling=sampling).tokens)
            out.tokens[:, :k].copy_(self.inputs.drafted[:b, :k])
            return None
        x = CycleInput(rows, slots, last, position=length, sampling=sampling, ops=model.ops, max_context=key.context)
        if self.bits is not None:
            x.masks = self._masks
        draft = self._guess(last, length, pages, sampling=sampling) if k else None
        if isinstance(draft, TreeRows):
            x.tree = draft
            draft = Draft(draft.tokens, self.limit)
        done = cycle(model, pages, draft, drafter=drafter, x=x, override=self.override)
        verdict = done.verdict
        if drafter is not None and drafter.kv_specs:
            drafter.extend(done.streams, done.kv, done.following)
        out.write(verdict, x.tree)
        if out.logprobs is not None:
            logprobs = model.ops.logprob_rows(done.logits, rows.flat(verdict.tokens), key.asks.logprobs)
            out.logprobs.copy_(logprobs.reshape(out.logprobs.shape))
        if self.advance:
            newest = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0] if k else verdict.tokens[:, 0]
            state.last.index_copy_(0, slots, newest)
            state.position.index_copy_(0, slots, torch.minimum(length + verdict.counts, self.cap))
            if drafter is not None:
                state.features.index_copy_(0, slots, done.features)
            if key.asks != NO_FEATURES:
                state.sampling.commit(sampling, slots, verdict.tokens, counts=verdict.counts)
        return done.logits
