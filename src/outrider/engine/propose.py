"""Who guesses: every sequence's draft from the drafter chosen for it, as one batch of tensors.

A drafter that fails (raises, or returns ids outside the vocabulary or numbers that are not finite) costs its guess, never the
answer: it is switched off for the requests concerned.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..cache.store import KVStore
from ..spec.drafter import DraftBatch, Drafter
from ..types import Draft
from .cycle import CycleInput
from .metrics import Metrics
from .scheduler import DecodeRow, Seq

log = logging.getLogger("outrider")


class Proposer:
    def __init__(self, model: Any, store: KVStore, drafter: Drafter | None, features: Tensor, sampled: bool, metrics: Metrics):
        self.model, self.store, self.drafter, self.features, self.sampled, self.metrics = model, store, drafter, features, sampled, metrics
        self.device = model.device

    def propose(self, rows: Sequence[DecodeRow], x: CycleInput, trust: Sequence[float] | None) -> Draft:
        """`trust`: acceptance by confidence, where drafts may end themselves (spec.plan.Choice)."""
        k = x.rows.k
        by_ngram = [i for i, r in enumerate(rows) if r.drafter == "ngram" and r.k]
        rest = [i for i, r in enumerate(rows) if r.drafter and r.drafter != "ngram" and r.k]
        draft: Draft | None = None
        if rest and self.drafter is not None:
            try:
                draft = self._checked(self._neural(rows, rest, x, trust), len(rest), max(rows[i].k for i in rest))
            except Exception as error:
                self._failed([rows[i].seq for i in rest], error)
            else:
                if len(rest) == len(rows):
                    return Draft(draft.tokens, torch.minimum(draft.lengths, x.rows.limit).clamp(min=0), draft.q, draft.confidence)
        tokens = torch.zeros((len(rows), k), dtype=torch.int64, device=self.device)
        lengths = torch.zeros(len(rows), dtype=torch.int64, device=self.device)
        q: Tensor | None = None
        confidence: Tensor | None = None
        for i in by_ngram:
            guess, _ = rows[i].seq.extra.ngram.propose(rows[i].k)
            if guess:
                tokens[i, : len(guess)] = torch.tensor(guess, dtype=torch.int64, device=self.device)
                lengths[i] = len(guess)
        if draft is not None:
            at = torch.tensor(rest, device=self.device)
            width = draft.tokens.shape[1]
            tokens[at, :width] = draft.tokens
            lengths[at] = torch.minimum(draft.lengths, x.rows.limit[at]).clamp(min=0)
            if draft.q is not None:
                q = torch.zeros((len(rows), k, draft.q.shape[-1]), dtype=draft.q.dtype, device=self.device)
                q.scatter_(2, tokens[:, :, None], 1.0)  # the others are point masses
                q[at, :width] = draft.q
            if draft.confidence is not None:
                confidence = torch.zeros((len(rows), k), device=self.device)
                confidence[at, :width] = draft.confidence
        return Draft(tokens, lengths, q, confidence)

    def _checked(self, draft: Draft, size: int, k: int) -> Draft:
        if draft.tokens.shape != (size, k):
            raise ValueError(f"draft of shape {tuple(draft.tokens.shape)}")
        if draft.q is not None and not bool(torch.isfinite(draft.q).all()):
            raise ValueError("probabilities are not finite")
        if not bool(((draft.tokens >= 0) & (draft.tokens < self.model.config.vocab_size)).all()):
            raise ValueError("token ids outside the vocabulary")
        return draft

    def _neural(self, rows: Sequence[DecodeRow], which: list[int], x: CycleInput, trust: Sequence[float] | None) -> Draft:
        assert self.drafter is not None
        pick = None if len(which) == len(rows) else torch.tensor(which, device=self.device)
        take = lambda t: t if pick is None else t[pick]  # noqa: E731
        length, count = take(x.length), len(which)
        seq_rows = torch.arange(count, device=self.device)
        start = torch.arange(count + 1, dtype=torch.int32, device=self.device)
        batch = DraftBatch(
            ids=[rows[i].seq.id for i in which],
            tokens=[rows[i].seq.tokens for i in which],
            last=take(x.last),
            length=length,
            features=self.features[take(x.slots)],
            kv=self.store.view(take(x.slots), length - 1, seq_rows, start, 1, x.max_context),
            sampling=x.sampling if pick is None else x.sampling.select(pick),
            sampled=self.sampled,
            ops=x.ops,
            vocab=self.model.config.vocab_size,
        )
        if trust is not None and not self.sampled:
            batch.stop, batch.drop, batch.trust = [rows[i].stop for i in which], [rows[i].drop for i in which], trust
        return self.drafter.propose(batch, max(rows[i].k for i in which))

    def _failed(self, seqs: list[Seq], error: Exception) -> None:
        assert self.drafter is not None
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        log.warning("drafter %s switched off for %d request(s): %s", self.drafter.name, len(seqs), reason)
        for seq in seqs:
            seq.drafter_off = True
            seq.stats.drafter_off = reason
        self.metrics.drafter_failures += 1
