"""The function that a graph captures: one decode step over buffers that stay where they are.

`State` is what the sequences carry from step to step, by slot; `Inputs` is what the host says of a step, by row of the
batch. `decode_step` puts the cycle (engine.cycle) between them and never looks at a value, so that nothing in it waits
for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..cache.store import KVStore
from ..ops.trees import TreeRows
from ..spec.choose import OFF, SamplingBatch
from ..spec.drafter import DraftBatch, Drafter
from ..spec.protocols import Target
from ..types import MAX_DRAFT, Draft, KVPages, Verdict
from .cycle import CycleInput, Rows, cycle, verify_coupled
from .slot_sampling import NO_FEATURES, SamplingFeatures, SlotSamplingState

# guesses of the host for one sequence: a draft, and before it as many tokens as the step in flight may add
KNOWN = 2 * MAX_DRAFT + 1
# how candidates are found: the cheapest that serves all rows
Choosing = Literal["greedy", "sampled", "head 64", "head 1024", "sort"]
# drafted: by another graph just before, as masks depend on the drafts
DraftSource = Literal["drafter", "host", "both", "drafted"]
Override = Callable[[Verdict, Draft, Tensor], Verdict]  # (verdict, draft, length): only benchmarks have one


@dataclass(frozen=True)
class Key:
    """What a graph is captured for."""

    batch: int
    k: int
    context: int  # no position of a replay may reach it
    choosing: Choosing
    source: DraftSource | None  # where drafts come from; None: K = 0
    part: Literal["cycle", "draft"] = "cycle"  # draft: only the guess, which is left in Inputs.drafted
    asks: SamplingFeatures = NO_FEATURES
    nodes: int = 0  # tokens of a tree of drafts, k deep; 0: a line of k
    adapted: bool = False  # some sequences use adapters: their rows read Inputs.ranges

    @property
    def drafted(self) -> int:
        """Tokens of a sequence that are verified beside its newest."""
        return self.nodes or self.k


@dataclass
class State:
    """Where each slot's sequence stands, on the device. The last row is that of the rows that fill up a batch."""

    last: Tensor  # int64 [S + 1] the newest token
    position: Tensor  # int64 [S + 1] its position
    features: Tensor  # [S + 1, H·(1 + taps)]

    @staticmethod
    def of(features: Tensor) -> State:
        rows, device = features.shape[0], features.device
        return State(
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.ones(rows, dtype=torch.int64, device=device),
            features,
        )


@dataclass
class Inputs:
    """What the host tells a step, by batch row. Uploaded only when it changes."""

    slots: Tensor  # int64 [N]
    limit: Tensor  # int64 [N] the K of the row
    cap: Tensor  # int64 [N] where its length stops growing: 1 for rows that fill up
    by_host: Tensor  # bool [N] the host guesses for this row
    base: Tensor  # int64 [N] position of the newest token that the host knew when it guessed
    guesses: Tensor  # int64 [N, KNOWN] what it expects behind that position
    drafted: Tensor  # int64 [N, MAX_DRAFT] left here by a graph of part "draft"
    temperature: Tensor  # float32 [N], and so on as in SamplingBatch
    sampled: Tensor
    seed: Tensor
    top_k: Tensor
    top_p: Tensor
    min_logp: Tensor
    ranges: Tensor  # int32 [2·N, 3] as ops.adapter_slots.row_ranges has them

    @staticmethod
    def of(device: torch.device, idle: int, rows: int) -> Inputs:
        full = lambda value, dtype: torch.full((rows,), value, dtype=dtype, device=device)  # noqa: E731
        return Inputs(
            full(idle, torch.int64), full(0, torch.int64), full(1, torch.int64), full(False, torch.bool),
            full(0, torch.int64),
            torch.zeros((rows, KNOWN), dtype=torch.int64, device=device),
            torch.zeros((rows, MAX_DRAFT), dtype=torch.int64, device=device),
            full(1.0, torch.float32), full(False, torch.bool),
            full(0, torch.int64), full(OFF, torch.int64), full(1.0, torch.float64), full(float("-inf"), torch.float32),
            torch.zeros((2 * rows, 3), dtype=torch.int32, device=device),
        )  # fmt: skip

    def sampling(self, batch: int, choosing: Choosing) -> SamplingBatch:
        """The rows' parameters as views: what is uploaded later is seen. A filter that a row does not ask for is off in
        its values."""
        filters = choosing not in ("greedy", "sampled")
        heads = {"head 64": 64, "head 1024": 1024, "sort": None}
        return SamplingBatch(
            temperature=self.temperature[:batch], sampled=self.sampled[:batch], seed=self.seed[:batch],
            out_len=torch.zeros_like(self.seed[:batch]),
            top_k=self.top_k[:batch], top_p=self.top_p[:batch], min_logp=self.min_logp[:batch],
            any_sampled=choosing != "greedy", any_filter=filters, any_top_k=filters, any_top_p=filters,
            head=heads.get(choosing, 1), penalties=None, bias=None, bad_words=None, stops=None, min_tokens=None,
        )  # fmt: skip

    def known(self, batch: int, k: int, length: Tensor) -> Tensor:
        """[B, k]: what the host expects behind the positions `length` [B], where the sequences really stand."""
        at = (length - self.base[:batch])[:, None] + torch.arange(k, device=length.device)
        return self.guesses[:batch].gather(1, at.clamp(0, KNOWN - 1))


@dataclass
class Output:
    """Where a step leaves what the host reads."""

    # int64 [B, K + 2]: emitted tokens, their number last. Of a tree [B, 2·(K + 1) + nodes + 2]: tokens, the row that
    # chose each, every row's parent, the number.
    tokens: Tensor
    logprobs: Tensor | None = None  # float32 [R, 1 + 2·n]: of the chosen token, then the n likeliest: values, ids

    @staticmethod
    def of(key: Key, device: torch.device) -> Output:
        rows, n, told = key.batch * (key.drafted + 1), key.asks.logprobs, key.k + key.nodes + 2 if key.nodes else 0
        return Output(
            torch.zeros((key.batch, key.k + 2 + told), dtype=torch.int64, device=device),
            torch.zeros((rows, 1 + 2 * n), device=device) if n >= 0 else None,
        )


def allowed(bits: Tensor, vocab: int) -> Tensor:
    """int32 [R, V / 32], a bit a token -> bool [R, V]."""
    each = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> each) & 1).to(torch.bool).flatten(1)[:, :vocab]


def decode_step(
    model: Target, store: KVStore, drafter: Drafter | None, state: State, inputs: Inputs, key: Key, out: Output,
    override: Override | None = None, propose: Callable[[Tensor, Tensor], Draft | TreeRows] | None = None,
    advance: bool = True,
    history: SlotSamplingState | None = None, bits: Tensor | None = None,
) -> Callable[[], Tensor | None]:  # fmt: skip
    """The function that is captured. Leaves what was emitted in `out` and the next inputs in `state` (advance=False:
    the state stays, every run does the same work); returns the logits [R, V]. propose: a stand-in drafter. history,
    bits [R, V / 32]: what some requests ask for (key.asks)."""
    b, k, device, vocab = key.batch, key.k, out.tokens.device, model.config.vocab_size
    rows, slots, limit, cap = Rows.of((key.drafted,) * b, device), inputs.slots[:b], inputs.limit[:b], inputs.cap[:b]
    bare = inputs.sampling(b, key.choosing)  # what a drafter guesses by
    each, each_start = torch.arange(b, device=device), torch.arange(b + 1, dtype=torch.int32, device=device)
    ids, nothing = [""] * b, [[]] * b  # type: ignore[var-annotated]

    def guess(last: Tensor, length: Tensor, pages: KVPages) -> Draft | TreeRows:
        if propose is not None:
            return propose(last, length)
        if key.source == "drafted":
            return Draft(inputs.drafted[:b, :k], limit)
        if key.source == "host":
            return Draft(inputs.known(b, k, length), limit)
        assert drafter is not None
        kv = pages.view(length - 1, each, each_start, 1, key.context)
        batch = DraftBatch(
            ids, nothing, last, length, state.features.index_select(0, slots), kv, bare, False, model.ops, vocab
        )
        if key.nodes:
            return drafter.build_fixed_tree(batch, k, key.nodes)
        tokens = drafter.propose(batch, k).tokens
        if key.source == "both":
            tokens = torch.where(inputs.by_host[:b, None], inputs.known(b, k, length), tokens)
        return Draft(tokens, limit)

    def once() -> Tensor | None:
        last, length = state.last.index_select(0, slots), state.position.index_select(0, slots)
        # gathered once: drafter and target look through them at different positions
        pages = store.pages_of(slots, key.context)
        if key.part == "draft":
            inputs.drafted[:b, : key.drafted].copy_(guess(last, length, pages).tokens)
            out.tokens[:, :k].copy_(inputs.drafted[:b, :k])
            return None
        sampling = bare if history is None else history.select(bare, slots, length, key.asks)
        x = CycleInput(rows, slots, last, length, sampling, model.ops, key.context)
        if bits is not None:
            x.masks = lambda drafts: allowed(bits[: b * (k + 1)], vocab)
        draft = guess(last, length, pages) if k else None
        if isinstance(draft, TreeRows):
            x.tree, draft = draft, Draft(draft.tokens, limit)
        done = cycle(model, pages, draft, verify_coupled, drafter, x, override)
        if drafter is not None and drafter.kv_specs:
            drafter.extend(done.streams, done.kv, done.following)
        verdict, told = done.verdict, [done.verdict.tokens]
        if x.tree is not None and verdict.rows is not None:
            told += [verdict.rows, x.tree.parent_rows.view(b, -1)]
        torch.cat((*told, verdict.counts[:, None]), 1, out=out.tokens)
        if out.logprobs is not None:
            out.logprobs.copy_(model.ops.logprob_rows(done.logits, rows.flat(verdict.tokens), key.asks.logprobs))
        if advance:
            newest = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0] if k else verdict.tokens[:, 0]
            state.last.index_copy_(0, slots, newest)
            state.position.index_copy_(0, slots, torch.minimum(length + verdict.counts, cap))
            if drafter is not None:
                state.features.index_copy_(0, slots, done.features)
            if history is not None:
                history.commit(sampling, slots, verdict.tokens, verdict.counts)
        return done.logits

    return once
