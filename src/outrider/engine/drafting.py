"""Drafts of networks, made before the target's pass, each sequence's by the drafter that its plan names.

A drafter that fails (raises, or returns ids outside the vocabulary) loses its draft and never changes the output: it is
switched off for the requests concerned.
"""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from ..ops.backend import DraftResult
from ..spec.choose import SamplingBatch
from ..spec.drafter import DraftBatch, Drafter, DraftTexts
from ..spec.plan import READING, CostPart
from ..spec.slot_sampling import sampling_batch
from ..types import Draft, DraftTree, SamplingParams
from .cycle import CycleInput, Rows
from .model_runner import ModelRunner
from .step import DecodeRows, Trust


def confidences(row: list[float]) -> list[float] | None:
    """Confidences of a draft's tokens, without the padding; None: its drafter knows none (below 0)."""
    if row and row[0] < 0.0:
        return None
    return row[:-1] if row and row[-1] == 0.0 else row


class Drafting:
    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self.rows_of = lru_cache(maxsize=512)(partial(Rows.of, device=runner.device))  # layouts by K of each sequence

    def cycle_input(self, scheduled: DecodeRows, sampling: SamplingBatch) -> CycleInput:
        device = self.runner.device
        slots = torch.tensor([row.slot for row in scheduled], device=device)
        last = torch.tensor([row.seq.tokens[-1] for row in scheduled], device=device)
        position = torch.tensor([row.position for row in scheduled], device=device)
        layout = self.rows_of(tuple(row.plan.max_drafted for row in scheduled))
        reach = max(row.position + 1 + row.plan.max_drafted for row in scheduled)
        ops = self.runner.model.ops
        return CycleInput(layout, slots, last=last, position=position, sampling=sampling, ops=ops, max_context=reach)

    def propose(self, scheduled: DecodeRows, x: CycleInput, trust: Trust) -> Draft:
        """The drafts of a step as one batch of tensors, those that the host knows included."""
        by_drafter: dict[str | None, list[int]] = {}
        for i, row in enumerate(scheduled):
            if row.needs_draft:
                by_drafter.setdefault(row.plan.drafter, []).append(i)
        parts: list[tuple[list[int], Draft]] = []
        for name, which in by_drafter.items():
            rows = [scheduled[i] for i in which]
            try:
                draft = self._checked(self._of_network(scheduled, which, x, trust=trust), rows)
            except Exception as error:
                self.runner.switch_off(name or "", [row.seq for row in rows], error)
                continue
            if len(which) == len(scheduled):
                return replace(draft, lengths=torch.minimum(draft.lengths, x.rows.limit).clamp(min=0))
            parts.append((which, draft))
        return self._joined(scheduled, x, parts)

    def on_host(
        self, scheduled: DecodeRows, sampling: SamplingBatch, trust: Trust, *, alone: bool
    ) -> list[DraftResult]:
        """The drafts of these sequences as the host's, for a program that does not draft itself. alone: the step has no
        other sequence."""
        drafter = self.runner.drafter
        assert drafter is not None
        if drafter.host_rounds:
            return self._rounds_on_host(drafter, scheduled, sampling, trust=trust, alone=alone)
        with torch.inference_mode():
            self.runner.catch_up([row.seq for row in scheduled])
            draft = self.propose(scheduled, self.cycle_input(scheduled, sampling), trust)
        confidence = draft.confidence.tolist() if draft.confidence is not None else [[]] * len(scheduled)
        columns = zip(draft.tokens.tolist(), map(confidences, confidence), draft.lengths.tolist())
        return [DraftResult(tokens, likely or [], length) for tokens, likely, length in columns]

    def _rounds_on_host(
        self, drafter: Drafter, scheduled: DecodeRows, sampling: SamplingBatch, trust: Trust, *, alone: bool
    ) -> list[DraftResult]:
        plans = [row.plan for row in scheduled]
        tracks = [row.seq.draft_track for row in scheduled]
        tokens = [row.seq.tokens for row in scheduled]
        texts = DraftTexts(tracks, tokens, sampling, plans=plans, trust=trust.get(drafter.name))
        try:
            return drafter.draft_on_host(texts, max(plan.k for plan in plans), alone)
        except Exception as error:
            self.runner.switch_off(drafter.name, [row.seq for row in scheduled], error)
            return [DraftResult([], [], 0)] * len(scheduled)

    def _joined(self, scheduled: DecodeRows, x: CycleInput, parts: list[tuple[list[int], Draft]]) -> Draft:
        """The drafts of several drafters, and those that the host knows."""
        k = x.rows.k
        device = self.runner.device
        tokens = torch.zeros((len(scheduled), k), dtype=torch.int64, device=device)
        lengths = torch.zeros(len(scheduled), dtype=torch.int64, device=device)
        confidence: Tensor | None = None
        trees: list[DraftTree] | None = None
        for i, row in enumerate(scheduled):
            if row.plan.k > 0 and row.host_draft is not None:
                draft_tokens = row.host_draft[: row.plan.k]
                tokens[i, : row.plan.k] = torch.tensor(draft_tokens, dtype=torch.int64, device=device)
                lengths[i] = row.plan.k
        for which, draft in parts:
            at = torch.tensor(which, device=device)
            width = draft.tokens.shape[1]
            tokens[at, :width] = draft.tokens
            lengths[at] = torch.minimum(draft.lengths, x.rows.limit[at]).clamp(min=0)
            if draft.confidence is not None:
                if confidence is None:
                    confidence = torch.full((len(scheduled), k), -1.0, device=device)
                confidence[at] = 0.0
                confidence[at, :width] = draft.confidence
            if draft.trees is not None:
                trees = trees or [DraftTree((), range(k))] * len(scheduled)
                for i, tree in zip(which, draft.trees):
                    trees[i] = tree
        if trees is not None:
            trees = [tree if tree.tokens else DraftTree(row, range(k)) for row, tree in zip(tokens.tolist(), trees)]
        return Draft(tokens, lengths, confidence, trees=trees)

    def _checked(self, draft: Draft, scheduled: DecodeRows) -> Draft:
        size = len(scheduled)
        k = max(row.plan.k for row in scheduled)
        if draft.trees is not None:
            if not all(0 <= parent <= j for tree in draft.trees for j, parent in enumerate(tree.parents)):
                raise ValueError("a tree whose tokens do not follow one another")
            k = min(draft.tokens.shape[1], max(row.plan.max_drafted for row in scheduled))
        if draft.tokens.shape != (size, k):
            raise ValueError(f"draft of shape {tuple(draft.tokens.shape)}")
        if not bool(((draft.tokens >= 0) & (draft.tokens < self.runner.vocab)).all()):
            raise ValueError("token ids outside the vocabulary")
        return draft

    def _of_network(self, scheduled: DecodeRows, which: list[int], x: CycleInput, trust: Trust) -> Draft:
        """The drafts of these sequences, whose plans name one drafter."""
        assert self.runner.drafter is not None
        drafter = self.runner.drafter.member(scheduled[which[0]].plan.drafter)
        if len(which) < len(scheduled):
            at = torch.tensor(which, device=self.runner.device)
            scheduled = [scheduled[i] for i in which]
            x = replace(x, slots=x.slots[at], last=x.last[at], position=x.position[at], sampling=x.sampling.select(at))
        tracks = [row.seq.draft_track for row in scheduled]
        batch = self._draft_batch(drafter, tracks, [row.seq.tokens for row in scheduled], x=x)
        batch.plans = [row.plan for row in scheduled]
        batch.trust = trust.get(drafter.name)
        return drafter.propose(batch, max(row.plan.k for row in scheduled))

    def _draft_batch(
        self, drafter: Drafter, tracks: abc.Sequence[object], tokens: abc.Sequence[abc.Sequence[int]], x: CycleInput
    ) -> DraftBatch:
        runner = self.runner
        device = x.slots.device
        row_seq = torch.arange(len(tokens), device=device)
        row_start = torch.arange(len(tokens) + 1, dtype=torch.int32, device=device)
        # the longest draft of the batch may reach further than a sequence's own
        reach = x.max_context + (max(drafter.block_rows, x.rows.k) if drafter.kv_specs else 0)
        kv = runner.store.view(x.slots, x.position - 1, row_seq, row_start=row_start, max_rows=1, max_context=reach)
        assert runner.drafter is not None
        features = runner.drafter.features_of(drafter, runner.features[x.slots])
        return DraftBatch(
            tracks, tokens, x.sampling, last=x.last, position=x.position, features=features, kv=kv, ops=x.ops
        )

    # ---- timing
    def probe_input(self, batch: int, k: int, context: int) -> CycleInput:
        """A cycle of scratch sequences."""
        runner = self.runner
        device = runner.device
        reach = context + k + 1
        slots = torch.tensor(runner.scratch_slots(batch, reach), device=device)
        position = torch.full((batch,), context, dtype=torch.int64, device=device)
        last = torch.zeros_like(position)
        sampling = sampling_batch(
            [SamplingParams()] * batch, [[0]] * batch, [[]] * batch, vocab=runner.vocab, device=device
        )
        layout = self.rows_of((k,) * batch)
        ops = runner.model.ops
        return CycleInput(layout, slots, last=last, position=position, sampling=sampling, ops=ops, max_context=reach)

    @torch.inference_mode()
    def probe(self, part: CostPart, batch: int, k: int, context: int) -> None:
        """Draft for scratch sequences."""
        assert self.runner.drafter is not None
        drafter = self.runner.drafter.member(part.drafter)
        text = [0] * (context + 1)
        tracks = [drafter.new_track("scratch") for _ in range(batch)]
        unread = READING if part.kind == "reading" else 0
        for track in tracks:  # time its round, not the reading of the text
            drafter.assume(track, text[: max(0, context - unread)])
        x = self.probe_input(batch, k, context)
        if drafter.host_rounds:
            drafter.draft_on_host(DraftTexts(tracks, [text] * batch, x.sampling), k, batch == 1)
        else:
            drafter.propose(self._draft_batch(drafter, tracks, [text] * batch, x=x), k).tokens.tolist()
        for track in tracks:
            drafter.release(track)
