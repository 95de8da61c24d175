"""One speculative decoding cycle: draft K tokens, verify K + 1 rows, choose, accept. Plain decoding is K = 0.

The batch has B sequences of L tokens each. The newest token (`last`, at position `length` = L - 1) has not run yet.
Each sequence has its own K. The verify pass is ragged: sequence b has K_b + 1 rows, its newest token and its drafted
tokens. Nothing here waits for the device. The caller commits; K/V beyond the accepted length is overwritten later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..cache.store import ragged
from ..models.decoder import TextModel
from ..ops.reference import Backend
from ..ops.trees import TreeRows
from ..spec.choose import SamplingBatch, accept
from ..spec.drafter import Drafter
from ..types import Draft, KVPages, KVView, Verdict


@dataclass(frozen=True)
class Rows:
    """The ragged layout of one verify pass; a function of the K of each sequence."""

    ks: tuple[int, ...]  # the K of each sequence
    k: int  # the largest K
    seq: Tensor  # int64 [R] which sequence a row belongs to
    offset: Tensor  # int64 [R] 0: the newest token; j: the j-th drafted one
    start: Tensor  # int32 [B + 1]
    limit: Tensor  # int64 [B] `ks` on the device
    even: bool  # all the same K: rows are a grid, and no gathering is needed

    @staticmethod
    def of(ks: tuple[int, ...], device: torch.device) -> Rows:
        offsets, owners, starts = ragged([(0, k + 1) for k in ks])
        seq, offset, limit = (torch.tensor(values, device=device) for values in (owners, offsets, ks))
        start = torch.tensor(starts, dtype=torch.int32, device=device)
        even = len(set(ks)) == 1
        return Rows(ks=ks, k=max(ks), seq=seq, offset=offset, start=start, limit=limit, even=even)

    def flat(self, grid: Tensor) -> Tensor:
        """[B, K + 1] -> [R]"""
        return grid.reshape(-1) if self.even else grid[self.seq, self.offset]

    def grid(self, flat: Tensor) -> Tensor:
        """[R] -> [B, K + 1]; padding of shorter sequences is 0."""
        if self.even:
            return flat.view(-1, self.k + 1)
        grid = flat.new_zeros((self.limit.shape[0], self.k + 1))
        grid[self.seq, self.offset] = flat
        return grid

    def positions(self, length: Tensor) -> Tensor:
        if not self.even:
            return length[self.seq] + self.offset
        return (length[:, None] + self.offset[: self.k + 1]).reshape(-1) if self.k else length


@dataclass
class CycleInput:
    rows: Rows
    slots: Tensor  # int64 [B] cache slots
    last: Tensor  # int64 [B]
    position: Tensor  # int64 [B]
    sampling: SamplingBatch
    ops: Backend
    max_context: int  # host bound of length + K + 1
    masks: Callable[[Tensor], Tensor | None] | None = None  # drafts [B, K] -> grammar masks bool [R, V]
    tree: TreeRows | None = None  # where drafts branch; None: drafts are chains

    @property
    def positions(self) -> Tensor:
        rows = self.rows
        tree = self.tree
        return rows.positions(self.position) if tree is None else self.position[rows.seq] + tree.depth


@dataclass
class CycleOutput:
    verdict: Verdict
    features: Tensor  # [B, H·(1 + taps)] at the last accepted position: the next draft's input
    logits: Tensor  # [R, V] as the model gave them, for logprobs
    # Inputs of a drafter with its own K/V: the tapped layers' streams [R, H] of all rows, their view, and the next
    # token of each; for a tree only the path, D + 1 rows per sequence, each at its committed position.
    streams: tuple[Tensor, ...]
    kv: KVView
    following: Tensor


def cycle(
    model: TextModel,
    pages: KVPages,
    draft: Draft | None,
    drafter: Drafter | None,
    x: CycleInput,
    override: Callable[[Verdict, Draft, Tensor], Verdict] | None = None,
) -> CycleOutput:
    """pages: those of the B sequences. override: replaces the verdict by an assumed one, for benchmarks only."""
    rows = x.rows
    if draft is None:
        draft = Draft(x.position.new_empty((x.position.shape[0], 0)), torch.zeros_like(x.position))
    ids = rows.flat(torch.cat((x.last[:, None], draft.tokens), dim=1)) if rows.k else x.last  # [R]

    kv = pages.view(x.positions, rows.seq, rows.start, max_rows=rows.k + 1, max_context=x.max_context)
    if x.tree is not None:
        kv.kv_slots = rows.positions(x.position)
        kv.ancestors = x.tree.ancestors
    out = model.forward(ids, kv, drafter.taps if drafter is not None else ())  # K/V written
    features = out.features  # [R, H·(1 + taps)]
    logits = model.logits(out.hidden)  # [R, V]

    verdict = verify(logits, draft, x)
    if override is not None:
        verdict = override(verdict, draft, x.position)
    if verdict.rows is not None:
        specs = [model.config.layers[layer].attn for layer in model.config.kv_layers]
        model.ops.compact_kv(verdict.rows, verdict.accepted, x.position, specs=specs, kv=kv)
        features = features[rows.start[:-1] + verdict.rows[:, -1]]
    elif rows.k:
        features = features[rows.start[:-1] + verdict.accepted]  # [B] rows whose choice is the next newest token
    output = CycleOutput(verdict, features, logits, streams=out.streams, kv=kv, following=verdict.tokens)
    if drafter is None or not drafter.kv_specs:
        return output
    if verdict.rows is not None:
        return on_path(output, pages, x)
    return replace(output, following=rows.flat(verdict.tokens))


def on_path(out: CycleOutput, pages: KVPages, x: CycleInput) -> CycleOutput:
    """Keeps a tree's accepted path as the drafter's context; past its end the last row is repeated at its position."""
    rows = out.verdict.rows
    device = x.position.device
    assert rows is not None
    size, width = rows.shape
    at = (x.rows.start[:-1, None] + rows).reshape(-1)
    seq = torch.arange(size, device=device)
    start = torch.arange(size + 1, dtype=torch.int32, device=device)
    depth = torch.minimum(torch.arange(width, device=device), out.verdict.accepted[:, None])  # [B, D + 1]
    positions = (x.position[:, None] + depth).reshape(-1)
    kv = pages.view(positions, seq.repeat_interleave(width), start * width, max_rows=width, max_context=x.max_context)
    streams = tuple(stream.index_select(0, at) for stream in out.streams)
    return replace(out, streams=streams, kv=kv, following=out.following.reshape(-1))


def verify(logits: Tensor, draft: Draft, x: CycleInput) -> Verdict:
    """The target's choice at every row, by (seed, position) alone; drafts are accepted while they equal it. In a tree
    (SpecInfer, Miao et al. 2023) a row sees its own ancestors, and the path follows children that hold the choice."""
    rows = x.rows
    sampling = x.sampling
    tree = x.tree
    position = x.positions + 1 if sampling.any_sampled else x.position  # of the token being chosen; greedy: not read
    mask = x.masks(draft.tokens) if x.masks is not None else None
    if tree is not None:
        ids = rows.flat(torch.cat((x.last[:, None], draft.tokens), dim=1))  # [R]
        # [R, D]: the drafted tokens up to and including each row's own
        lines = ids[rows.start[:-1][rows.seq][:, None] + tree.ancestors[:, 1:]] if sampling.looks_back else None
        z = sampling.process(logits, rows.seq, tree.depth, drafts=draft.tokens, grammar=mask, lines=lines, ops=x.ops)
        chosen = sampling.choose(z, rows.seq, position, ops=x.ops)
        accepted, tokens, path = x.ops.accept_path(chosen, ids, tree, start=rows.start, limit=draft.lengths)
        return Verdict(accepted, tokens, accepted + 1, rows=path)
    z = sampling.process(logits, rows.seq, rows.offset, drafts=draft.tokens, grammar=mask, ops=x.ops)
    chosen = sampling.choose(z, rows.seq, position, ops=x.ops)  # [R]
    if not rows.k:
        none = torch.zeros_like(x.position)
        return Verdict(none, chosen[:, None], none + 1)
    return accept(rows.grid(chosen), draft)
