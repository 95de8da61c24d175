"""The drafter protocol. A drafter sees a batch of sequences, read-only, and guesses K tokens for each.

Nothing a drafter returns can change an answer: the target decides. A drafter that raises, or returns ids outside
the vocabulary or numbers that are not finite, is switched off for the requests concerned (`spec.guard`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ..types import Draft, KVView
from .choose import SamplingBatch


@dataclass
class DraftBatch:
    """What a drafter may see of B sequences that have L tokens each, the newest not yet run through the target."""

    ids: Sequence[str]  # the requests' ids, for drafters that keep something per sequence
    tokens: Sequence[Sequence[int]]  # all L tokens of each sequence, on the host
    last: Tensor  # int64 [B] the newest token
    length: Tensor  # int64 [B] its position: L - 1, which is also how many positions of K/V are committed
    features: Tensor  # [B, H·(1 + taps)] the target's hidden state at position L - 2, then the tapped streams
    kv: KVView  # one row a sequence at position L - 2, the last one the target has seen
    sampling: SamplingBatch  # temperature and noise, to guess as the target will choose
    sampled: bool  # True: draw from q with own noise and return q (rejection verifiers); False: guess with the target's noise
    ops: Any
    vocab: int
    # where a draft may end itself (plan.Choice); a drafter that does not know its confidence ignores them
    stop: Sequence[float] | None = None  # [B]
    drop: Sequence[float] | None = None  # [B]
    trust: Sequence[float] | None = None  # [16] acceptance by confidence; None: drafts go on to the end


class Drafter(Protocol):
    name: str
    taps: tuple[int, ...]  # target layers whose residual streams it wants in `features`

    def propose(self, batch: DraftBatch, k: int) -> Draft:
        """Guess k >= 1 tokens for every sequence. All lengths may be shorter than k."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended: drop what was kept for it."""
        ...
