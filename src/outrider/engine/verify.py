"""The rejection verifiers on a ragged batch: logits of the rows -> probabilities of the grid -> verdict.

Same contract as `cycle.verify_coupled`; they keep the target's distribution, not its text.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..spec.rejection import randomness, verify_block, verify_rejection
from ..types import Draft, Verdict
from .cycle import CycleInput, spread


def verify_rejection_rows(logits: Tensor, draft: Draft, x: CycleInput) -> Verdict:
    return _verify(verify_rejection, logits, draft, x)


def verify_block_rows(logits: Tensor, draft: Draft, x: CycleInput) -> Verdict:
    return _verify(verify_block, logits, draft, x)


def _verify(rule: Callable[[Tensor, Draft, Tensor, Tensor], Verdict], logits: Tensor, draft: Draft, x: CycleInput) -> Verdict:
    rows, sampling = x.rows, x.sampling
    mask = x.masks(draft.tokens) if x.masks is not None else None
    z = sampling.process(logits, rows.seq, rows.offset, draft.tokens, mask)
    p = spread(sampling.probs(z, rows.seq), rows, x.length.shape[0])  # [B, K + 1, V]
    u, noise = randomness(sampling.seed, x.length + 1, rows.k, p.shape[-1])
    return rule(p, draft, u, noise)
