"""The cycle: draft K, verify K + 1, choose, accept. One function on tensors; plain decoding is K = 0 of it.

B sequences with L tokens each, the newest (`last`, at position `length` = L - 1) not yet run. Each brings its own K.
The rows of the verify pass are the newest token and the drafted ones, ragged: sequence b has K_b + 1 of them.
Nothing here waits for the device. The caller commits: K/V beyond the accepted length is simply written again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..cache.store import KVStore
from ..spec.choose import SamplingBatch, accept
from ..types import Draft, Verdict


@dataclass(frozen=True)
class Rows:
    """The ragged layout of one verify pass; a function of the K of each sequence."""

    k: int  # the largest K
    seq: Tensor  # int64 [R] which sequence a row belongs to
    offset: Tensor  # int64 [R] 0: the newest token; j: the j-th drafted one
    start: Tensor  # int32 [B + 1]
    limit: Tensor  # int64 [B] the K of each sequence

    @staticmethod
    @lru_cache(maxsize=512)
    def of(ks: tuple[int, ...], device: torch.device) -> Rows:
        counts = [k + 1 for k in ks]
        start = [0]
        for n in counts:
            start.append(start[-1] + n)
        as_long = lambda values: torch.tensor(values, dtype=torch.int64, device=device)  # noqa: E731
        return Rows(
            max(ks),
            as_long([b for b, n in enumerate(counts) for _ in range(n)]),
            as_long([j for n in counts for j in range(n)]),
            torch.tensor(start, dtype=torch.int32, device=device),
            as_long(ks),
        )


@dataclass
class CycleInput:
    rows: Rows
    slots: Tensor  # int64 [B] cache slots
    last: Tensor  # int64 [B]
    length: Tensor  # int64 [B]
    sampling: SamplingBatch
    ops: Any
    max_context: int  # host bound of length + K + 1
    masks: Callable[[Tensor], Tensor | None] | None = None  # drafts [B, K] -> grammar masks bool [R, V]


@dataclass
class CycleOutput:
    verdict: Verdict
    features: Tensor  # [B, H·(1 + taps)] at the last accepted position: what the next draft starts from
    logits: Tensor  # [R, V] as the model gave them, for logprobs


def cycle(
    model: Any,
    store: KVStore,
    propose: Callable[[], Draft] | None,
    verify: Callable[[Tensor, Draft, CycleInput], Verdict],
    taps: tuple[int, ...],
    x: CycleInput,
) -> CycleOutput:
    rows = x.rows
    draft = propose() if propose is not None else empty_draft(x.length)  # tokens [B, K]
    block = torch.cat((x.last[:, None], draft.tokens), dim=1)  # [B, K + 1]
    ids = block[rows.seq, rows.offset]  # [R]
    positions = x.length[rows.seq] + rows.offset  # [R]

    kv = store.view(x.slots, positions, rows.seq, rows.start, rows.k + 1, x.max_context)
    hidden, features = forward(model, ids, kv, taps)  # [R, H], [R, H·(1 + taps)]; K/V written at `positions`
    logits = model.logits(hidden)  # [R, V]

    verdict = verify(logits, draft, x)
    last_row = rows.start[:-1] + verdict.accepted  # [B] the row whose choice is the next newest token
    return CycleOutput(verdict, features[last_row], logits)


def forward(model: Any, ids: Tensor, kv: Any, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    if not taps:
        hidden = model.forward(ids, kv)
        return hidden, hidden
    hidden, streams = model.forward(ids, kv, taps)
    return hidden, torch.cat((hidden, *streams), dim=-1)


def empty_draft(length: Tensor) -> Draft:
    return Draft(length.new_empty((length.shape[0], 0)), torch.zeros_like(length))


def verify_coupled(logits: Tensor, draft: Draft, x: CycleInput) -> Verdict:
    """The target chooses at every row with noise that depends on (seed, position) alone; a draft is right while it is equal."""
    rows, sampling = x.rows, x.sampling
    position = x.length[rows.seq] + rows.offset + 1  # of the token being chosen
    mask = x.masks(draft.tokens) if x.masks is not None else None
    z = sampling.process(logits, rows.seq, rows.offset, draft.tokens, mask)
    chosen = sampling.choose(z, rows.seq, position, x.ops)  # [R]
    return accept(spread(chosen, rows, x.length.shape[0]), draft)


def spread(flat: Tensor, rows: Rows, batch: int) -> Tensor:
    """[R, ...] -> [B, K + 1, ...]; the places that a shorter sequence does not have hold 0."""
    grid = flat.new_zeros((batch, rows.k + 1, *flat.shape[1:]))
    grid[rows.seq, rows.offset] = flat
    return grid
