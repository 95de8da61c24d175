"""The eager executor: runs a step operation by operation. It defines the result and supports every step."""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from ..ops.decode_io import UNKNOWN, DecodeOutputs
from ..ops.trees import TreeRows
from ..spec.plan import VERIFY, CostPart
from ..types import Draft, DraftTree, Matcher, Verdict
from .cycle import CycleInput, Rows, cycle
from .drafting import Drafting, confidences
from .grammar import unpacked
from .model_runner import ModelRunner
from .step import DecodeRows, Executor, PendingStep, Plan, Sequence, StepBatch, Trust


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
        self.drafting = Drafting(runner)

    def plan(self, batch: StepBatch) -> Plan:
        return Plan(batch)

    def launch(self, plan: Plan) -> PendingStep:
        batch = plan.batch
        if batch.prompts:
            self.runner.prompts(batch.prompts)
        pending = PendingStep(self, batch, self.runner.clock())
        if batch.decode:
            pending.outputs = self._run(batch)
        return pending

    @torch.inference_mode()
    def _run(self, batch: StepBatch) -> DecodeOutputs:
        """Draft, run the cycle, and read its results, which is the only wait for the device."""
        runner = self.runner
        rows = batch.decode
        seqs = [row.seq for row in rows]
        runner.catch_up(seqs)
        x = self.drafting.cycle_input(rows, runner.sampling(seqs))
        draft = self._draft(rows, x, batch.trust) if x.rows.k > 0 else None
        ks = x.rows.ks
        parents: list[abc.Sequence[int]] = [range(k) for k in ks]  # of chains
        if draft is not None and draft.trees is not None:
            trees = [DraftTree(tree.tokens[:k], tree.parents[:k]) for tree, k in zip(draft.trees, ks)]
            x.tree = TreeRows.of(trees, draft.tokens)
            parents = [tree.parents for tree in trees]
        matchers = [seq.answer.matcher for seq in seqs]
        if any(matchers):
            x.masks = partial(self._masks, matchers, parents)
        runner.store.flush()
        pages = runner.store.pages_of(x.slots, x.max_context)
        model = runner.model_for([seq.adapter for seq in seqs], [k + 1 for k in ks])
        out = cycle(model, pages, draft if x.rows.k > 0 else None, drafter=runner.drafter, x=x)
        runner.features.index_copy_(0, x.slots, out.features)
        if runner.drafter is not None and runner.drafter.kv_specs:
            runner.extend(seqs, out.streams, out.kv, following=out.following)
        runner.slot_sampling.commit(x.sampling, x.slots, out.verdict.tokens, counts=out.verdict.counts)
        outputs = DecodeOutputs(
            tokens=out.verdict.tokens.cpu().numpy(),
            num_tokens=out.verdict.counts.cpu().numpy(),
            num_drafted=np.array(ks),
            logprobs=self._logprobs(seqs, x.rows, out.logits, verdict=out.verdict),
        )
        if draft is not None:
            self._write_draft(outputs, rows, draft, path=out.verdict.rows, parents=parents)
        return outputs

    def _draft(self, rows: DecodeRows, x: CycleInput, trust: Trust) -> Draft:
        """The drafts of a step. If their lengths are known on the host, `x` has no more rows than were drafted: on a
        CPU, where reading them is free, and with trees, which the host builds."""
        draft = self.drafting.propose(rows, x, trust)
        has_trees = draft.trees is not None or any(row.plan.nodes > 0 for row in rows)
        if self.runner.device.type != "cpu" and not has_trees:
            return draft
        x.rows = self.drafting.rows_of(tuple(draft.lengths.tolist()))
        confidence = None if draft.confidence is None else draft.confidence[:, : x.rows.k]
        return replace(draft, tokens=draft.tokens[:, : x.rows.k], confidence=confidence)

    def _write_draft(
        self,
        outputs: DecodeOutputs,
        rows: DecodeRows,
        draft: Draft,
        *,
        path: Tensor | None,
        parents: abc.Sequence[abc.Sequence[int]],
    ) -> None:
        """Add the draft to the outputs. path: of a tree, as `Verdict.rows` has it."""
        num_drafted: list[int] = outputs.num_drafted.tolist()
        if max(num_drafted) > 0:
            outputs.draft = draft.tokens.cpu().numpy()
            if path is not None:
                outputs.is_tree = np.ones(len(rows), np.bool_)
                outputs.path = path[:, 1:].cpu().numpy()
                outputs.parents = padded_rows(parents, outputs.draft.shape[1])
        if draft.confidence is not None:
            outputs.confidence = draft.confidence.cpu().numpy()
            known = [row.needs_draft for row in rows]  # other drafts have none
            outputs.num_confidences = count_confidences(outputs.confidence, num_drafted, known)

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

    # ---- timing
    @torch.inference_mode()
    def probe(self, part: CostPart, batch: int, k: int, context: int) -> None:
        if part != VERIFY:
            self.drafting.probe(part, batch, k, context=context)
            return
        runner = self.runner
        x = self.drafting.probe_input(batch, k, context)
        draft = Draft(x.last[:, None].expand(batch, k), torch.full_like(x.position, k)) if k else None
        runner.store.flush()
        out = cycle(runner.model, runner.store.pages_of(x.slots, x.max_context), draft, drafter=runner.drafter, x=x)
        out.verdict.tokens.tolist()  # waits for the device


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
