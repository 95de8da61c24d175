"""The CPU executor: a step is one call of a C library (`Backend.host_cycle`), for requests that are greedy or use
temperature, top-k, top-p and min-p, with or without logprobs.

Between two passes over the weights every line of Python runs on cold caches, so this path is short. The rounds of an
MTP drafter and of a DFlash are part of the call, a draft model's is a call before it; other block drafters draft
operation by operation before it. What a block drafter reads is kept in the call (ops.cpu.block).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..ops.backend import DraftResult
from ..ops.decode_io import UNKNOWN, DecodeOutputs, Proposer
from ..spec.choose import SamplingBatch
from ..spec.drafter import DraftTexts
from ..spec.plan import READING, VERIFY, CostPart
from ..spec.slot_sampling import sampling_batch
from ..types import SamplingParams
from .eager import EagerExecutor
from .model_runner import ModelRunner
from .step import DecodeRow, Executor, PendingStep, Plan, StepBatch
from .step_io import mean_context, mean_drafted, write_confidence, write_row

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
            pending.outputs = self._run(batch)
            pending.width = mean_drafted(pending.outputs, batch.decode)
            pending.context = mean_context(batch.decode)
        return pending

    def _run(self, batch: StepBatch) -> DecodeOutputs:
        """Drafts of drafters outside of the call, then the call."""
        rows = batch.decode
        sampling = self.runner.sampling([row.seq for row in rows])
        if self.eager is not None:
            self.runner.join_unread([row.seq for row in rows])
        ahead = self._draft_ahead(batch, sampling) if self.ahead is not None or self.eager is not None else {}
        drafter = None  # of a draft inside of the call; if requests name two, some drafts end a little early or late
        for i, row in enumerate(rows):
            draft = ahead.get(i)
            if draft is not None:
                plan = row.plan._replace(k=min(row.plan.k, draft.length))
                row = row._replace(plan=plan, host_draft=draft.tokens)
            proposer = self._proposer(row)
            if proposer != Proposer.HOST:
                drafter = row.plan.drafter
            write_row(self.cycle.inputs, i, row, proposer)
        adapters = [row.seq.adapter for row in rows]
        self.cycle.run(len(rows), sampling, adapters=adapters, trust=batch.trust.get(drafter or ""))
        outputs = self.cycle.outputs
        assert outputs.is_tree is not None
        outputs.is_tree[: len(rows)] = self.cycle.inputs.max_nodes[: len(rows)] > 0
        for i, draft in ahead.items():
            write_confidence(outputs, i, draft.confidence[: min(rows[i].plan.k, draft.length) + 1])
        return outputs

    def _proposer(self, row: DecodeRow) -> Proposer:
        if row.plan.k == 0 or row.host_draft is not None:
            return Proposer.HOST
        return Proposer.BLOCK if row.plan.drafter == self.block else Proposer.MTP

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

    def can_probe(self, part: CostPart) -> bool:
        return part.drafter in self.drafters and (part.kind in ("verify", "draft") or self.ahead is not None)

    def probe(self, part: CostPart, batch: int, k: int, context: int) -> None:
        """A verify pass of given drafts; or a whole cycle, which includes the draft."""
        sampling = self._probes.get(batch)  # built once per batch, not per cycle, as in real steps
        if sampling is None:
            params = [SamplingParams()] * batch
            sampling = sampling_batch(params, [[0]] * batch, [[]] * batch, self.runner.vocab, self.runner.device)
            self._probes[batch] = sampling
        drafted = k == 0 or part == VERIFY  # before the call
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
            drafted = True
        if self.runner.unread is not None and part != VERIFY:  # a draft reads what its last cycle accepted
            for slot in slots:
                self.runner.unread.assume(slot, context, min(context, 2))
        if self.eager is not None and part.drafter not in (None, self.mtp, self.block):
            if self.runner.unread is not None:
                self.runner.unread.read(slots)
            self.eager.probe(part, batch, k, context)
            drafted = True
        inputs = self.cycle.inputs
        is_block = part.drafter is not None and part.drafter == self.block
        inputs.slot[:batch] = slots
        inputs.last_token[:batch] = 0
        inputs.position[:batch] = context
        inputs.max_draft[:batch] = k
        inputs.max_nodes[:batch] = 0
        inputs.num_logprobs[:batch] = UNKNOWN
        inputs.stop_below[:batch] = 0.0
        inputs.drop_below[:batch] = 0.0
        inputs.proposer[:batch] = Proposer.HOST if drafted else Proposer.BLOCK if is_block else Proposer.MTP
        inputs.host_draft[:batch] = 0
        self.cycle.run(batch, sampling, adapters=[None] * batch)
