"""Multi-token prediction over the target's own cache: no second cache, no prefill.

The drafter is fed the target's embedding of the newest token and the target's hidden state of the position before it;
it attends to the target's K/V at one constant position; its own hidden state and guess are fed back for the next step.
"""

from __future__ import annotations

from typing import Any

import torch

from ..types import Draft
from .card import Card
from .drafter import DraftBatch


class MTPDrafter:
    name = "mtp"
    card: Card | None = None  # how often it is right, as its folder says

    def __init__(self, model: Any, target: Any):
        self.model, self.target = model, target
        self.taps: tuple[int, ...] = model.config.taps
        self.whole_rounds = hasattr(model, "draft")  # the ops may run all K steps in one call

    def propose(self, batch: DraftBatch, k: int) -> Draft:
        model, sampling = self.model, batch.sampling
        if self.whole_rounds and not batch.sampled and not sampling.any_filter:
            at = batch.length + 1
            end = None
            if batch.trust is not None:
                end = tuple(torch.tensor(t, dtype=torch.float64) for t in (batch.stop, batch.drop, batch.trust))
            tokens, confidence, lengths = model.draft(
                batch.last, batch.features, batch.kv, k, sampling.temperature, sampling.hot, sampling.seed, at, end, sampling.any_hot
            )
            return Draft(tokens, lengths, confidence=confidence)
        state = model.start(batch.kv, batch.features)
        token, guesses, qs = batch.last, [], []
        hidden = batch.features[:, : self.target.config.hidden]  # [B, H]
        for j in range(k):
            g, hidden = model.step(self.target.embed(token), hidden, state)
            at = batch.length + 1 + j  # the position the guessed token will have
            # Rejection wants tokens drawn from q: candidates may not depend on the noise that draws among them.
            lean = None if batch.sampled else sampling.lean(model.cluster_ids, at, batch.ops)
            ids, logits = model.candidates(g, lean)  # [B, N] ids (None: the whole vocabulary), float32 logits
            if batch.sampled:
                token, q = sampling.draw(logits, at, batch.length + 1, batch.ops, batch.vocab, ids)
                qs.append(q)
            else:
                token = sampling.guess(logits, at, batch.ops, ids)
            guesses.append(token)
        return Draft(torch.stack(guesses, 1), torch.full_like(batch.length, k), torch.stack(qs, 1) if qs else None)

    def forget(self, request_id: str) -> None:
        pass
