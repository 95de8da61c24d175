"""The CPU executor: a step is one call of a C library (`Backend.host_cycle`), for requests that are greedy or use
temperature, top-k, top-p and min-p, with or without logprobs.

Between two passes over the weights every line of Python runs on cold caches, so this path is short. The rounds of an
MTP drafter and of a DFlash are part of the call, a draft model's is a call before it; other block drafters draft
operation by operation before it. What a block drafter reads is kept in the call (ops.cpu.block).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ..ops.backend import DraftResult
from ..ops.decode_io import UNKNOWN, DecodeOutputs, Proposer
from ..ops.lowrank import Adapter
from ..spec.choose import SamplingBatch
from ..spec.plan import VERIFY, CostPart
from ..spec.slot_sampling import sampling_batch
from ..types import SamplingParams
from .drafting import Drafting
from .model_runner import ModelRunner
from .step import DecodeRows, Executor, PendingStep, Plan, StepBatch, StepFeatures, Trust
from .step_io import write_confidence, write_row

if TYPE_CHECKING:
    from ..ops.cpu.cycle import CpuCycle


class HostExecutor(Executor):
    name = "host"
    probes_whole_cycles = True

    def __init__(self, runner: ModelRunner, cycle: CpuCycle):
        self.runner = runner
        self.cycle = cycle
        self.drafting = Drafting(runner)
        drafter = runner.drafter
        # who drafts in a step, by the network that a plan names; others need another program
        self.proposers: Mapping[str, Proposer] = drafter.proposers_in(cycle) if drafter is not None else {}
        self._networks = frozenset(self.proposers)
        self._drafts_outside = Proposer.HOST in self.proposers.values()  # some network drafts before the call
        self.trees = Proposer.MTP in self.proposers.values() and cycle.unread is None
        runner.unread = cycle.unread
        self._probes: dict[int, SamplingBatch] = {}

    def supports(self, features: StepFeatures) -> bool:
        if features.altered or features.filtered_trees or not features.drafters <= self._networks:
            return False
        if self.cycle.unread is not None:  # then the call accepts no given trees
            for name in features.tree_drafters:
                if self.proposers[name] != Proposer.MTP:
                    return False
        return not features.adapters or all(self.cycle.takes(adapter) for adapter in features.adapters)

    def plan(self, batch: StepBatch) -> Plan:
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
        return pending

    def _run(self, batch: StepBatch) -> DecodeOutputs:
        """Make the drafts that the call does not, then run the call."""
        rows = batch.decode
        inputs = self.cycle.inputs
        seqs = [row.seq for row in rows]
        adapters = list[Adapter | None]()
        sampling = self.runner.sampling(seqs)
        if self.cycle.unread is not None:
            self.runner.join_unread(seqs)
        drafts = self._drafts_before(rows, sampling, batch.trust) if self._drafts_outside else {}
        outputs = self.cycle.outputs
        assert outputs.is_tree is not None
        drafter = None  # of a draft inside of the call; if requests name two, some drafts end a little early or late
        for i, row in enumerate(rows):
            plan = row.plan
            proposer = Proposer.HOST
            if plan.k > 0 and row.host_draft is None:
                assert plan.drafter is not None
                proposer = self.proposers[plan.drafter]
                if proposer != Proposer.HOST:
                    drafter = plan.drafter
            write_row(inputs, i, row, proposer=proposer, draft=drafts.get(i))
            outputs.is_tree[i] = proposer == Proposer.MTP and plan.nodes > 0
            adapters.append(row.seq.adapter)
        self.cycle.run(len(rows), sampling, adapters=adapters, trust=batch.trust.get(drafter or ""))
        for i, draft in drafts.items():
            write_confidence(outputs, i, draft.confidence[: inputs.max_draft[i] + 1])
        return outputs

    def _drafts_before(self, rows: DecodeRows, sampling: SamplingBatch, trust: Trust) -> dict[int, DraftResult]:
        """By index of the sequence, drafts of networks whose rounds are not part of the call."""
        outside = {name for name, proposer in self.proposers.items() if proposer == Proposer.HOST}
        which = [i for i, row in enumerate(rows) if row.needs_draft and row.plan.drafter in outside]
        if not which:
            return {}
        if len(which) < len(rows):
            sampling = sampling.select(torch.tensor(which))
        scheduled = [rows[i] for i in which]
        return dict(zip(which, self.drafting.on_host(scheduled, sampling, trust, alone=len(rows) == 1), strict=True))

    def can_probe(self, part: CostPart) -> bool:
        return part == VERIFY or (part.drafter in self.proposers and part.kind != "tree")

    def probe(self, part: CostPart, batch: int, k: int, context: int) -> None:
        """A verify pass of given drafts; or a whole cycle, which includes the draft."""
        sampling = self._probes.get(batch)  # built once per batch, not per cycle, as in real steps
        if sampling is None:
            params = [SamplingParams()] * batch
            sampling = sampling_batch(
                params, [[0]] * batch, [[]] * batch, vocab=self.runner.vocab, device=self.runner.device
            )
            self._probes[batch] = sampling
        slots = self.runner.scratch_slots(batch, context + k + 1)
        self.runner.store.flush()
        unread = self.runner.unread
        if unread is not None and part != VERIFY:  # a draft reads what its last cycle accepted
            for slot in slots:
                unread.assume(slot, context, min(context, 2))
        proposer = Proposer.HOST
        if part != VERIFY and k > 0:
            assert part.drafter is not None
            proposer = self.proposers[part.drafter]
            if proposer == Proposer.HOST:
                if unread is not None:
                    unread.read(slots)
                self.drafting.probe(part, batch, k, context=context)
        inputs = self.cycle.inputs
        inputs.slot[:batch] = slots
        inputs.last_token[:batch] = 0
        inputs.position[:batch] = context
        inputs.max_draft[:batch] = k
        inputs.max_nodes[:batch] = 0
        inputs.num_logprobs[:batch] = UNKNOWN
        inputs.stop_below[:batch] = 0.0
        inputs.drop_below[:batch] = 0.0
        inputs.proposer[:batch] = proposer
        inputs.host_draft[:batch] = 0
        self.cycle.run(batch, sampling, adapters=[None] * batch)
