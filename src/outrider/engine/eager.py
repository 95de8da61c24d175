"""The eager executor: runs a step operation by operation. It defines the result and supports every request and drafter.

A drafter that fails (raises, or returns ids outside the vocabulary) loses its draft and never changes the output: it is
switched off for the requests concerned.
"""

from __future__ import annotations

import logging
from collections import abc
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from ..ops.backend import DraftResult
from ..ops.decode_io import UNKNOWN, DecodeOutputs
from ..ops.trees import TreeRows
from ..spec.choose import SamplingBatch
from ..spec.drafter import DraftBatch, Drafter
from ..spec.plan import READING, VERIFY, CostPart
from ..spec.slot_sampling import sampling_batch
from ..types import Draft, DraftTree, Matcher, SamplingParams, Verdict
from .cycle import CycleInput, Rows, cycle
from .grammar import unpacked
from .model_runner import ModelRunner
from .step import DecodeRows, Executor, PendingStep, Plan, Sequence, StepBatch, Trust
from .step_io import mean_context, mean_drafted

log = logging.getLogger("outrider")


def confidences(row: list[float]) -> list[float] | None:
    """Confidences of a draft's tokens, without the padding; None: its drafter knows none (below 0)."""
    if row and row[0] < 0.0:
        return None
    return row[:-1] if row and row[-1] == 0.0 else row


def count_confidences(confidence: ndarray, ks: abc.Sequence[int], known: abc.Sequence[bool]) -> ndarray:
    """int64 [B]: how many confidences [B, N] a draft of k tokens has, with that of a token that ended it."""
    counts = np.full(len(ks), UNKNOWN)
    for i, k in enumerate(ks):
        row = confidences(confidence[i, : k + 1].tolist()) if known[i] else None
        if row is not None:
            counts[i] = len(row)
    return counts


def padded_rows(rows: abc.Sequence[abc.Sequence[int]], width: int) -> ndarray:
    """int64 [B, width]: the rows, with zeros behind each."""
    padded = np.zeros((len(rows), width), np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


class EagerExecutor(Executor):
    name = "eager"

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self._rows_of = lru_cache(maxsize=512)(partial(Rows.of, device=runner.device))  # layouts by K of each sequence

    def plan(self, batch: StepBatch) -> Plan:
        return Plan(batch)

    def launch(self, plan: Plan) -> PendingStep:
        batch = plan.batch
        if batch.prompts:
            self.runner.prompts(batch.prompts)
        pending = PendingStep(self, batch, self.runner.clock())
        if batch.decode:
            pending.outputs = self._run(batch)
            pending.width = mean_drafted(pending.outputs, batch.decode)
            pending.context = mean_context(batch.decode)
        return pending

    @torch.inference_mode()
    def _run(self, batch: StepBatch) -> DecodeOutputs:
        runner = self.runner
        rows = batch.decode
        seqs = [row.seq for row in rows]
        runner.catch_up(seqs)
        x = self._input(rows, runner.sampling(seqs))
        draft = None
        ks = [row.plan.k for row in rows]
        widths = tuple(row.plan.max_drafted for row in rows)
        if x.rows.k:
            draft = self.propose(rows, x, batch.trust)
            # on a CPU reading the lengths is free, and the host builds trees anyway: verify no more rows than
            # were drafted
            if runner.device.type == "cpu" or draft.trees is not None or any(row.plan.nodes for row in rows):
                ks = draft.lengths.tolist()
                widths = tuple(ks)
                x.rows = self._rows_of(widths)
                sure = None if draft.confidence is None else draft.confidence[:, : x.rows.k]
                draft = replace(draft, tokens=draft.tokens[:, : x.rows.k], confidence=sure)
        parents: list[abc.Sequence[int]] = [range(k) for k in ks]  # of chains
        if draft is not None and draft.trees is not None:
            trees = [DraftTree(tree.tokens[:k], tree.parents[:k]) for tree, k in zip(draft.trees, ks)]
            x.tree = TreeRows.of(trees, draft.tokens)
            parents = [tree.parents for tree in trees]
        if any(s.answer.matcher for s in seqs):
            x.masks = partial(self._masks, [s.answer.matcher for s in seqs], parents)
        runner.store.flush()
        pages = runner.store.pages_of(x.slots, x.max_context)
        model = runner.model_for([s.adapter for s in seqs], [k + 1 for k in widths])
        out = cycle(model, pages, draft if x.rows.k else None, runner.drafter, x)
        runner.features.index_copy_(0, x.slots, out.features)
        if runner.drafter is not None and runner.drafter.kv_specs:
            runner.extend(seqs, out.streams, out.kv, out.following)
        runner.slot_sampling.commit(x.sampling, x.slots, out.verdict.tokens, out.verdict.counts)
        # the only host sync of a cycle
        outputs = DecodeOutputs(
            tokens=out.verdict.tokens.cpu().numpy(),
            num_tokens=out.verdict.counts.cpu().numpy(),
            num_drafted=np.array(ks),
            logprobs=self._logprobs(seqs, x.rows, out.logits, out.verdict),
        )
        if draft is not None and x.rows.k > 0:
            outputs.draft = draft.tokens.cpu().numpy()
            if out.verdict.rows is not None:
                outputs.is_tree = np.ones(len(rows), np.bool_)
                outputs.path = out.verdict.rows[:, 1:].cpu().numpy()
                outputs.parents = padded_rows(parents, outputs.draft.shape[1])
        if draft is not None and draft.confidence is not None:
            outputs.confidence = draft.confidence.cpu().numpy()
            # a copy of earlier text has none
            known = [row.plan.drafter not in (None, "ngram") for row in rows]
            outputs.num_confidences = count_confidences(outputs.confidence, ks, known)
        return outputs

    def _masks(
        self, matchers: abc.Sequence[Matcher | None], parents: abc.Sequence[abc.Sequence[int]], drafts: Tensor
    ) -> Tensor:
        """bool [R, V]: what the sequences' grammars allow at every row of these drafts [B, K]."""
        trees = [DraftTree(tokens, row_parents) for tokens, row_parents in zip(drafts.tolist(), parents)]
        return grammar_masks(matchers, trees, self.runner.vocab).to(self.runner.device)

    def _logprobs(self, seqs: abc.Sequence[Sequence], rows: Rows, logits: Tensor, verdict: Verdict) -> ndarray | None:
        """[B, K + 1, 1 + 2n]: `Backend.logprob_rows` of the emitted tokens, in a tree along its path."""
        wanted = [seq.request.params.logprobs for seq in seqs]
        num_logprobs = max((n for n in wanted if n is not None), default=None)
        if num_logprobs is None:
            return None
        path = verdict.rows
        if path is None:  # rows past a sequence's last one repeat it
            path = torch.minimum(torch.arange(verdict.tokens.shape[1], device=logits.device), rows.limit[:, None])
        which = (rows.start[:-1, None] + path).reshape(-1)
        table = self.runner.model.ops.logprob_rows(logits[which], verdict.tokens.reshape(-1), num_logprobs)
        return table.view(*verdict.tokens.shape, -1).cpu().numpy()

    def _input(self, scheduled: DecodeRows, sampling: SamplingBatch) -> CycleInput:
        device = self.runner.device
        lines = [(x.slot, x.seq.tokens[-1], x.position) for x in scheduled]
        slots, last, position = (torch.tensor(values, device=device) for values in zip(*lines))
        rows = self._rows_of(tuple(item.plan.max_drafted for item in scheduled))
        reach = max(item.position + 1 + item.plan.max_drafted for item in scheduled)
        return CycleInput(rows, slots, last, position, sampling, self.runner.model.ops, reach)

    # ---- drafting: every sequence's draft from the drafter chosen for it, as one batch of tensors
    def propose(self, scheduled: DecodeRows, x: CycleInput, trust: Trust) -> Draft:
        k = x.rows.k
        device = self.runner.device
        by_drafter: dict[str | None, list[int]] = {}
        for i, item in enumerate(scheduled):
            if item.plan.k and item.host_draft is None:
                by_drafter.setdefault(item.plan.drafter, []).append(i)
        made: list[tuple[list[int], Draft]] = []
        for name, rest in by_drafter.items():
            try:
                draft = self._checked(self._neural(scheduled, rest, x, trust), [scheduled[i] for i in rest])
            except Exception as error:
                self.runner.switch_off(name or "", [scheduled[i].seq for i in rest], error)
                continue
            if len(rest) == len(scheduled):
                return replace(draft, lengths=torch.minimum(draft.lengths, x.rows.limit).clamp(min=0))
            made.append((rest, draft))
        tokens = torch.zeros((len(scheduled), k), dtype=torch.int64, device=device)
        lengths = torch.zeros(len(scheduled), dtype=torch.int64, device=device)
        confidence: Tensor | None = None
        trees: list[DraftTree] | None = None
        for i, item in enumerate(scheduled):
            if item.plan.k and item.host_draft is not None:
                draft_tokens = item.host_draft[: item.plan.k]
                tokens[i, : item.plan.k] = torch.tensor(draft_tokens, dtype=torch.int64, device=device)
                lengths[i] = item.plan.k
        for rest, draft in made:
            at = torch.tensor(rest, device=device)
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
                for i, tree in zip(rest, draft.trees):
                    trees[i] = tree
        if trees is not None:
            trees = [tree if tree.tokens else DraftTree(row, range(k)) for row, tree in zip(tokens.tolist(), trees)]
        return Draft(tokens, lengths, confidence, trees)

    @torch.inference_mode()
    def drafts(self, scheduled: DecodeRows, sampling: SamplingBatch, trust: Trust) -> list[DraftResult]:
        """Drafts for a step that another executor runs."""
        self.runner.catch_up([item.seq for item in scheduled])
        draft = self.propose(scheduled, self._input(scheduled, sampling), trust)
        sure = draft.confidence.tolist() if draft.confidence is not None else [[]] * len(scheduled)
        made = zip(draft.tokens.tolist(), map(confidences, sure), draft.lengths.tolist())
        return [DraftResult(tokens, likely or [], length) for tokens, likely, length in made]

    def _checked(self, draft: Draft, scheduled: DecodeRows) -> Draft:
        size = len(scheduled)
        k = max(item.plan.k for item in scheduled)
        if draft.trees is not None:
            if not all(0 <= parent <= j for tree in draft.trees for j, parent in enumerate(tree.parents)):
                raise ValueError("a tree whose tokens do not follow one another")
            k = min(draft.tokens.shape[1], max(item.plan.max_drafted for item in scheduled))
        if draft.tokens.shape != (size, k):
            raise ValueError(f"draft of shape {tuple(draft.tokens.shape)}")
        if not bool(((draft.tokens >= 0) & (draft.tokens < self.runner.vocab)).all()):
            raise ValueError("token ids outside the vocabulary")
        return draft

    def _neural(self, scheduled: DecodeRows, which: list[int], x: CycleInput, trust: Trust) -> Draft:
        assert self.runner.drafter is not None
        drafter = self.runner.drafter.member(scheduled[which[0]].plan.drafter)
        if len(which) < len(scheduled):
            at = torch.tensor(which, device=self.runner.device)
            scheduled = [scheduled[i] for i in which]
            x = replace(x, slots=x.slots[at], last=x.last[at], position=x.position[at], sampling=x.sampling.select(at))
        tracks = [item.seq.draft_track for item in scheduled]
        tokens = [item.seq.tokens for item in scheduled]
        batch = self._draft_batch(drafter, tracks, tokens, x)
        batch.plans = [item.plan for item in scheduled]
        batch.trust = trust.get(drafter.name)
        return drafter.propose(batch, max(item.plan.k for item in scheduled))

    def _draft_batch(
        self, drafter: Drafter, tracks: abc.Sequence[object], tokens: abc.Sequence[abc.Sequence[int]], x: CycleInput
    ) -> DraftBatch:
        runner = self.runner
        each, start = (torch.arange(n, device=x.slots.device) for n in (len(tokens), len(tokens) + 1))
        # the longest draft of the batch may reach further than a sequence's own
        reach = x.max_context + (max(drafter.block_rows, x.rows.k) if drafter.kv_specs else 0)
        kv = runner.store.view(x.slots, x.position - 1, each, start.to(torch.int32), 1, reach)
        assert runner.drafter is not None
        features = runner.drafter.features_of(drafter, runner.features[x.slots])
        return DraftBatch(tracks, tokens, x.sampling, x.last, x.position, features, kv, x.ops)

    # ---- timing
    @torch.inference_mode()
    def probe(self, part: CostPart, batch: int, k: int, context: int) -> None:
        runner = self.runner
        drafter = self.runner.drafter
        slots = torch.tensor(runner.scratch_slots(batch, context + k + 1), device=runner.device)
        position = torch.full((batch,), context, dtype=torch.int64, device=runner.device)
        sampling = sampling_batch([SamplingParams()] * batch, [[0]] * batch, [[]] * batch, runner.vocab, runner.device)
        last = torch.zeros_like(position)
        rows = self._rows_of((k,) * batch)
        x = CycleInput(rows, slots, last, position, sampling, runner.model.ops, context + k + 1)
        if part == VERIFY:
            draft = Draft(last[:, None].expand(batch, k), torch.full_like(position, k)) if k else None
            runner.store.flush()
            pages = runner.store.pages_of(slots, x.max_context)
            out = cycle(runner.model, pages, draft, drafter, x)
            out.verdict.tokens.tolist()  # waits for the device
            return
        assert drafter is not None
        drafter = drafter.member(part.drafter)
        tracks = [drafter.new_track("scratch") for _ in range(batch)]
        unread = READING if part.kind == "reading" else 0
        for track in tracks:  # time its round, not the reading of the text
            drafter.assume(track, [0] * max(0, context - unread))
        drafter.propose(self._draft_batch(drafter, tracks, [[0] * (context + 1)] * batch, x), k).tokens.tolist()
        for track in tracks:
            drafter.release(track)


def grammar_masks(matchers: abc.Sequence[Matcher | None], trees: abc.Sequence[DraftTree], vocab: int) -> Tensor:
    """bool [R, V]: what each row's grammar (None: anything) allows after the drafted tokens on its path."""
    parts = []
    for matcher, tree in zip(matchers, trees):
        mask = torch.ones((len(tree.parents) + 1, vocab), dtype=torch.bool)
        if matcher is not None:
            paths = tree.ancestors
            for leaf in set(range(len(paths))) - set(tree.parents):
                masks = unpacked(matcher.bits([tree.tokens[row - 1] for row in paths[leaf][1:]]), vocab)
                # none for rows after a draft that left the grammar: they are never reached
                for row, allowed in zip(paths[leaf], torch.from_numpy(masks)):
                    mask[row] = allowed
        parts.append(mask)
    return torch.cat(parts)
