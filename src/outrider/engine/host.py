"""The CPU executor: a step is one call of a C library (`Backend.host_cycle`), for requests that are greedy or use
temperature, top-k, top-p and min-p, with or without logprobs.

Between two passes over the weights every line of Python runs on cold caches, so this path is short. The rounds of an
MTP drafter and of a DFlash are part of the call, a draft model's is a call before it; other block drafters draft
operation by operation before it. What a block drafter reads is kept in the call (ops.cpu.block).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..ops.backend import CycleRequest, DraftResult
from ..spec.choose import SamplingBatch
from ..spec.drafter import DraftTexts
from ..spec.plan import READING, VERIFY, CostPart, VerifiedTree
from ..spec.slot_sampling import sampling_batch
from ..types import DraftPlan, SamplingParams
from .cycle import logprobs
from .eager import EagerExecutor
from .model_runner import ModelRunner
from .step import Emitted, Executor, PendingStep, Plan, StepBatch

if TYPE_CHECKING:
    from ..ops.cpu.cycle import CpuCycle


class HostExecutor(Executor):
    name = "host"

    def __init__(self, runner: ModelRunner, cycle: CpuCycle):
        self.runner = runner
        self.cycle = cycle
        drafter = runner.drafter
        self.ahead = drafter if drafter is not None and drafter.host_rounds else None  # drafts before the call
        # drafts operation by operation
        self.eager = EagerExecutor(runner) if drafter is not None and drafter.kv_specs else None
        members = drafter.members if drafter is not None else ()
        # drafters whose rounds are part of the call
        self.mtp = next((one.name for one in members if one.net is not None and cycle.drafts), None)
        self.block = next((one.name for one in members if one.kv_specs and cycle.drafts_blocks), None)
        runner.unread = cycle.unread
        calls = self.mtp is not None or self.ahead is not None or self.eager is not None
        self.trees = self.mtp is not None and self.eager is None
        self.drafters = (None, "ngram", *(one.name for one in members if calls))  # drafters that the call supports
        self._probes: dict[int, SamplingBatch] = {}

    def plan(self, batch: StepBatch) -> Plan | None:
        for item in batch.decode:
            seq = item.seq
            if seq.altered or item.plan.drafter not in self.drafters:
                return None
            if item.plan.nodes and not seq.request.params.temperature_only:  # the library's trees have no filters
                return None
            if seq.adapter is not None and not self.cycle.takes(seq.adapter):
                return None
            if item.plan.nodes and self.eager is not None and item.plan.drafter != self.mtp:
                return None  # the call accepts no given trees
        return Plan(batch)

    def launch(self, plan: Plan) -> PendingStep:
        batch = plan.batch
        runner = self.runner
        if batch.prompts:
            runner.prompts(batch.prompts)
        pending = PendingStep(self, batch, runner.clock())
        if batch.decode:
            runner.store.flush()
            sampling = runner.sampling([item.seq for item in batch.decode])
            if self.eager is not None:
                runner.join_unread([item.seq for item in batch.decode])
            ahead = self._draft_ahead(batch, sampling) if self.ahead is not None or self.eager is not None else {}
            requests = []
            inside = None
            for i, x in enumerate(batch.decode):
                seq = x.seq
                each = x.plan
                guess = x.host_draft
                if i in ahead:
                    each = each._replace(k=min(each.k, ahead[i].length))
                    guess = ahead[i].tokens[: each.k]
                guess = guess if each.k else None
                top = seq.request.params.logprobs
                block = each.drafter is not None and each.drafter == self.block and guess is None
                requests.append(CycleRequest(x.slot, seq.tokens[-1], x.position, each, guess, top, seq.adapter, block))
                inside = each.drafter if each.k and guess is None else inside
            # one drafter's trust: if requests name two, some drafts end a little early or late
            made = self.cycle.run(requests, sampling, batch.trust.get(inside or ""))
            for i, drafted in ahead.items():
                if drafted.confidence:
                    made[i] = made[i]._replace(confidence=drafted.confidence[: requests[i].plan.k + 1])
            pending.payload = made
        return pending

    def _draft_ahead(self, batch: StepBatch, sampling: SamplingBatch) -> dict[int, DraftResult]:
        """Drafts of drafters whose rounds are not part of the call, by index of the sequence."""
        inside = (self.mtp, self.block)
        drafted = [item.plan.k and item.host_draft is None and item.plan.drafter not in inside for item in batch.decode]
        which = [i for i, here in enumerate(drafted) if here]
        if not which:
            return {}
        scheduled = [batch.decode[i] for i in which]
        some = sampling if len(which) == len(batch.decode) else sampling.select(torch.tensor(which))
        if self.ahead is None:
            assert self.eager is not None
            return dict(zip(which, self.eager.drafts(scheduled, some, batch.trust)))
        plans = [x.plan for x in scheduled]
        trust = batch.trust.get(self.ahead.name)
        tracks = [x.seq.draft_track for x in scheduled]
        tokens = [x.seq.tokens for x in scheduled]
        texts = DraftTexts(tracks, tokens, some, plans=plans, trust=trust)
        k = max(plan.k for plan in plans)
        try:
            return dict(zip(which, self.ahead.draft_on_host(texts, k, len(batch.decode) == 1)))
        except Exception as error:
            self.runner.switch_off(self.ahead.name, [x.seq for x in scheduled], error)
            return dict.fromkeys(which, DraftResult([], [], 0))

    def read(self, pending: PendingStep) -> list[Emitted]:
        scheduled = pending.batch.decode
        out = []
        width = 0
        context = 0
        made = pending.payload or ()
        for item, (k, tokens, confidence, tree, rows, drafts) in zip(scheduled, made):  # type: ignore[call-overload]
            seq = item.seq
            top = logprobs(rows, tokens, seq.request.params.logprobs or 0) if rows is not None else None
            verified = VerifiedTree.of(*tree) if tree is not None else None
            out.append(Emitted(tokens, k, top, confidence, verified, drafts))
            width = width + k
            context = context + len(seq.tokens)
        if out:
            pending.width = width / len(out)
            pending.context = context // len(out)
        return out

    def can_probe(self, part: CostPart) -> bool:
        return part.drafter in self.drafters and (part.kind in ("verify", "draft") or self.ahead is not None)

    def probe(self, part: CostPart, batch: int, k: int, context: int) -> None:
        """A verify pass of given drafts; or a whole cycle, which includes the draft."""
        sampling = self._probes.get(batch)  # built once per batch, not per cycle, as in real steps
        if sampling is None:
            params = [SamplingParams()] * batch
            sampling = sampling_batch(params, [[0]] * batch, [[]] * batch, self.runner.vocab, self.runner.device)
            self._probes[batch] = sampling
        guess = [0] * k if part == VERIFY else None
        slots = self.runner.scratch_slots(batch, context + k + 1)
        self.runner.store.flush()
        if self.ahead is not None and part != VERIFY:
            tracks = [self.ahead.new_track("scratch") for _ in range(batch)]
            text = [0] * (context + 1)
            unread = READING if part.kind == "reading" else 0
            for track in tracks:
                self.ahead.assume(track, text[: max(0, context - unread)])
            self.ahead.draft_on_host(DraftTexts(tracks, [text] * batch, sampling), k, batch == 1)
            for track in tracks:
                self.ahead.release(track)
            guess = [0] * k
        if self.runner.unread is not None and part != VERIFY:  # a draft reads what its last cycle accepted
            for slot in slots:
                self.runner.unread.assume(slot, context, min(context, 2))
        if self.eager is not None and part.drafter not in (None, self.mtp, self.block):
            if self.runner.unread is not None:
                self.runner.unread.read(slots)
            self.eager.probe(part, batch, k, context)
            guess = [0] * k
        plan = DraftPlan(part.drafter, k)
        block = part.drafter is not None and part.drafter == self.block
        requests = [CycleRequest(slot, 0, context, plan, guess, block=block) for slot in slots]
        self.cycle.run(requests, sampling, None)
