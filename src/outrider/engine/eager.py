"""The step operation by operation: the definition, which takes every request, every drafter and every verifier.

A drafter that fails (raises, or returns ids outside the vocabulary or numbers that are not finite) costs its guess, never the
answer: it is switched off for the requests concerned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..config import Verify
from ..spec.choose import SamplingBatch
from ..spec.draft_model import DraftModel
from ..spec.drafter import DraftBatch
from ..spec.plan import READING, Branches, reading
from ..spec.rejection import verify_block, verify_rejection
from ..types import Draft, SamplingParams, Verdict
from .cycle import CycleInput, Rows, cut, cycle, logprobs, verify_coupled, verify_drawn
from .machine import Machine
from .metrics import Metrics
from .step import Emitted, Executor, Flight, Lane, Seq, StepBatch
from .tree import Tree, grammar_masks

log = logging.getLogger("outrider")
VERIFY: dict[Verify, Callable[[Tensor, Draft, CycleInput], Verdict]] = {
    "coupled": verify_coupled,
    "rejection": partial(verify_drawn, verify_rejection),
    "block": partial(verify_drawn, verify_block),
}


def confidences(row: list[float]) -> list[float]:
    """Of a draft's tokens, without the place behind it where nothing was drafted."""
    return row[:-1] if row and row[-1] == 0.0 else row


def switch_off(drafter: str, lanes: Sequence[Lane], error: Exception, metrics: Metrics) -> None:
    """The drafter failed on these: they go on plainly."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    log.warning("drafter %s switched off for %d request(s): %s", drafter, len(lanes), reason)
    for lane in lanes:
        lane.seq.stats.drafter_off = reason
    metrics.drafter_failures += 1


class EagerExecutor(Executor):
    """It takes trees as well, and grows them node by node."""

    name = "eager"

    def __init__(self, machine: Machine, verify: Verify, metrics: Metrics):
        self.machine, self.verify, self.sampled, self.metrics = machine, VERIFY[verify], verify != "coupled", metrics

    def takes(self, batch: StepBatch) -> bool:
        return True

    def launch(self, batch: StepBatch) -> Flight:
        if batch.prompts:
            self.machine.prompts(batch.prompts)
        flight = Flight(self, batch, [lane.seq.held for lane in batch.decode], self.machine.clock())
        if batch.decode:
            flight.payload = self._run(batch)
            lanes = batch.decode
            flight.width, flight.context = sum(lane.k for lane in lanes) / len(lanes), sum(len(x.seq.tokens) for x in lanes) // len(lanes)
        return flight

    def read(self, flight: Flight) -> list[Emitted]:
        return flight.payload or []  # type: ignore[return-value]

    @torch.inference_mode()
    def _run(self, batch: StepBatch) -> list[Emitted]:
        machine, lanes = self.machine, batch.decode
        seqs = [lane.seq for lane in lanes]
        x = self._input(lanes, machine.sampling(seqs))
        draft: Draft | None = None
        if x.rows.k:
            draft = self.propose(lanes, x, batch.trust)
            # on a CPU reading the lengths is free, and a tree is built by the host anyway: verify no more rows than were drafted
            if machine.device.type == "cpu" or draft.parents is not None or any(lane.nodes for lane in lanes):
                for lane, k in zip(lanes, draft.lengths.tolist()):
                    lane.k = k
                x.rows = Rows.of(tuple(lane.k for lane in lanes), machine.device)
                draft = cut(draft, x.rows.k)
        parents = [list(range(lane.k)) for lane in lanes]  # of lines
        if draft is not None and draft.parents is not None:
            parents = [line[: lane.k] for line, lane in zip(draft.parents.tolist(), lanes)]
            x.tree = Tree.of(parents, machine.device)
        if any(s.answer.matcher for s in seqs):
            matchers = [s.answer.matcher for s in seqs]
            x.masks = lambda drafts: grammar_masks(matchers, parents, drafts.tolist(), machine.vocab).to(machine.device)
        machine.store.flush()
        pages = machine.store.pages_of(x.slots, x.max_context)
        out = cycle(machine.model, pages, draft if x.rows.k else None, self.verify, machine.taps, x)
        machine.features.index_copy_(0, x.slots, out.features)
        x.sampling.commit(out.verdict.tokens, out.verdict.counts)
        tokens, counts = out.verdict.tokens.tolist(), out.verdict.counts.tolist()  # the only wait of a cycle
        emitted = [line[:n] for line, n in zip(tokens, counts)]
        top = self._logprobs(seqs, x.rows, out.logits, out.verdict, emitted)
        sure = draft.confidence.tolist() if draft is not None and draft.confidence is not None else None
        confidence = [  # a copy of earlier text has none
            None if sure is None or lane.drafter in (None, "ngram") else confidences(sure[i][: lane.k + 1]) for i, lane in enumerate(lanes)
        ]
        trees: list[Branches | None] = [None] * len(lanes)
        if out.verdict.rows is not None and draft is not None:
            drafted = draft.tokens.tolist()
            paths = out.verdict.rows.tolist()
            trees = [Branches.of(parents[i], path[1 : counts[i]], None, drafted[i][: lanes[i].k]) for i, path in enumerate(paths)]
        return [Emitted(*each) for each in zip(emitted, top, confidence, trees, strict=True)]

    def _logprobs(
        self, seqs: Sequence[Seq], rows: Rows, logits: Tensor, verdict: Verdict, emitted: list[list[int]]
    ) -> Sequence[list[dict[int, float]] | None]:
        asked = [s.request.params.logprobs for s in seqs]
        most = max((n for n in asked if n is not None), default=None)
        if most is None:
            return [None] * len(seqs)
        start: Sequence[int]
        logprob_rows = self.machine.model.ops.logprob_rows
        if verdict.rows is not None:  # of a tree, the rows of the path
            width = verdict.rows.shape[1]
            which = (rows.start[:-1, None] + verdict.rows).reshape(-1)
            table, start = logprob_rows(logits[which], verdict.tokens.reshape(-1), most).tolist(), range(0, len(seqs) * width, width)
        else:
            table, start = logprob_rows(logits, rows.flat(verdict.tokens), most).tolist(), rows.start.tolist()
        return [None if n is None else logprobs(table[start[i] :], emitted[i], n) for i, n in enumerate(asked)]

    def _input(self, lanes: Sequence[Lane], sampling: SamplingBatch) -> CycleInput:
        device = self.machine.device
        as_long = lambda values: torch.tensor(values, dtype=torch.int64, device=device)  # noqa: E731
        return CycleInput(
            rows=Rows.of(tuple(lane.most for lane in lanes), device),
            slots=as_long([lane.slot for lane in lanes]),
            last=as_long([lane.seq.tokens[-1] for lane in lanes]),
            length=as_long([lane.start for lane in lanes]),
            sampling=sampling,
            ops=self.machine.model.ops,
            max_context=max(lane.start + 1 + lane.most for lane in lanes),
        )

    # ---- drafting: every sequence's draft from the drafter chosen for it, as one batch of tensors -----------------------------
    def propose(self, lanes: Sequence[Lane], x: CycleInput, trust: Sequence[float] | None) -> Draft:
        """`trust`: acceptance by confidence, where drafts may end themselves (spec.plan.Choice)."""
        k, device = x.rows.k, self.machine.device
        rest = [i for i, lane in enumerate(lanes) if lane.k and lane.guess is None]
        draft: Draft | None = None
        if rest:
            try:
                draft = self._checked(self._neural(lanes, rest, x, trust), [lanes[i] for i in rest])
            except Exception as error:
                assert self.machine.drafter is not None
                switch_off(self.machine.drafter.name, [lanes[i] for i in rest], error, self.metrics)
            else:
                if len(rest) == len(lanes):
                    return replace(draft, lengths=torch.minimum(draft.lengths, x.rows.limit).clamp(min=0))
        tokens = torch.zeros((len(lanes), k), dtype=torch.int64, device=device)
        lengths = torch.zeros(len(lanes), dtype=torch.int64, device=device)
        q: Tensor | None = None
        confidence: Tensor | None = None
        parents: Tensor | None = None
        for i, lane in enumerate(lanes):
            if lane.k and lane.guess is not None:
                tokens[i, : lane.k] = torch.tensor(lane.guess[: lane.k], dtype=torch.int64, device=device)
                lengths[i] = lane.k
        if draft is not None:
            at = torch.tensor(rest, device=device)
            width = draft.tokens.shape[1]
            tokens[at, :width] = draft.tokens
            lengths[at] = torch.minimum(draft.lengths, x.rows.limit[at]).clamp(min=0)
            if draft.q is not None:
                q = torch.zeros((len(lanes), k, draft.q.shape[-1]), dtype=draft.q.dtype, device=device)
                q.scatter_(2, tokens[:, :, None], 1.0)  # the others are point masses
                q[at, :width] = draft.q
            if draft.confidence is not None:
                confidence = torch.zeros((len(lanes), k), device=device)
                confidence[at, :width] = draft.confidence
            if draft.parents is not None:
                parents = torch.arange(k, device=device).repeat(len(lanes), 1)
                parents[at, :width] = draft.parents
        return Draft(tokens, lengths, q, confidence, parents)

    def _checked(self, draft: Draft, lanes: Sequence[Lane]) -> Draft:
        size, k = len(lanes), max(lane.k for lane in lanes)
        if draft.parents is not None:
            before = torch.arange(draft.parents.shape[1], device=draft.parents.device)
            if draft.parents.shape != draft.tokens.shape or not bool(((draft.parents >= 0) & (draft.parents <= before)).all()):
                raise ValueError("a tree whose tokens do not follow one another")
            k = min(draft.tokens.shape[1], max(lane.most for lane in lanes))
        if draft.tokens.shape != (size, k):
            raise ValueError(f"draft of shape {tuple(draft.tokens.shape)}")
        if draft.q is not None and not bool(torch.isfinite(draft.q).all()):
            raise ValueError("probabilities are not finite")
        if not bool(((draft.tokens >= 0) & (draft.tokens < self.machine.vocab)).all()):
            raise ValueError("token ids outside the vocabulary")
        return draft

    def _neural(self, lanes: Sequence[Lane], which: list[int], x: CycleInput, trust: Sequence[float] | None) -> Draft:
        machine = self.machine
        assert machine.drafter is not None
        pick = None if len(which) == len(lanes) else torch.tensor(which, device=machine.device)
        take = lambda t: t if pick is None else t[pick]  # noqa: E731
        batch = self._draft_batch(
            [lanes[i].seq.id for i in which], [lanes[i].seq.tokens for i in which], take(x.slots), take(x.last), take(x.length),
            x.sampling if pick is None else x.sampling.select(pick), x.max_context,
        )  # fmt: skip
        if trust is not None and not self.sampled:
            batch.stop, batch.drop, batch.trust = [lanes[i].stop for i in which], [lanes[i].drop for i in which], trust
        if any(lanes[i].nodes for i in which) and not self.sampled:
            batch.nodes, batch.prices = [lanes[i].most for i in which], [lanes[i].prices for i in which]
        return machine.drafter.propose(batch, max(lanes[i].k for i in which))

    def _draft_batch(
        self, ids: Sequence[str], tokens: Sequence[Sequence[int]], slots: Tensor, last: Tensor, length: Tensor, sampling: SamplingBatch,
        max_context: int,
    ) -> DraftBatch:  # fmt: skip
        machine, count = self.machine, len(ids)
        each = torch.arange(count, device=machine.device)
        start = torch.arange(count + 1, dtype=torch.int32, device=machine.device)
        kv = machine.store.view(slots, length - 1, each, start, 1, max_context)
        features = machine.features[slots]
        return DraftBatch(ids, tokens, last, length, features, kv, sampling, self.sampled, machine.model.ops, machine.vocab)

    # ---- timing ---------------------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def probe(self, part: str, batch: int, k: int, context: int) -> None:
        machine = self.machine
        slots = torch.tensor(machine.scratch_slots(batch, context + k + 1), device=machine.device)
        length = torch.full((batch,), context, dtype=torch.int64, device=machine.device)
        params = [SamplingParams()] * batch
        sampling = SamplingBatch.build(params, [[0]] * batch, [[]] * batch, machine.vocab, machine.device)
        last = torch.zeros_like(length)
        if part == "verify":
            rows = Rows.of((k,) * batch, machine.device)
            x = CycleInput(rows, slots, last, length, sampling, machine.model.ops, context + k + 1)
            draft = Draft(torch.zeros((batch, k), dtype=torch.int64, device=machine.device), torch.full_like(length, k))
            machine.store.flush()
            out = cycle(machine.model, machine.store.pages_of(slots, x.max_context), draft if k else None, verify_coupled, machine.taps, x)
            out.verdict.tokens.tolist()  # waits for the device
            return
        drafter, ids = machine.drafter, [f"scratch {i}" for i in range(batch)]
        assert drafter is not None
        if isinstance(drafter, DraftModel):  # it keeps K/V of its own: time its steps, not the prompt it never runs again
            unread = READING if part == reading(drafter.name) else 0
            for name in ids:
                drafter.assume(name, [0] * max(0, context - unread))
        tokens = [[0] * (context + 1)] * batch
        drafter.propose(self._draft_batch(ids, tokens, slots, last, length, sampling, context + k + 1), k).tokens.tolist()
        for name in ids:
            drafter.forget(name)
