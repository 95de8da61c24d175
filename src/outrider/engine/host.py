"""The step as one call of a C library (`Backend.host_cycle`), for requests whose tokens are chosen greedily or by a temperature alone,
with or without logprobs.

Between two passes over the weights every line of Python runs on cold caches, so the way of a host cycle is kept short: no tensor
operations, and none of the 40 µs of entering inference mode. The tokens are those of `eager`. An MTP drafter's round is part of the
call; a draft model's is a call of its own before it.
"""

from __future__ import annotations

import torch

from ..ops.backend import Asked, HostCycle
from ..spec.choose import SamplingBatch
from ..spec.draft_model import DraftModel
from ..spec.plan import READING, Branches, reading
from ..types import SamplingParams
from .cycle import logprobs
from .eager import switch_off
from .machine import Machine
from .metrics import Metrics
from .step import Emitted, Executor, Flight, StepBatch


class HostExecutor(Executor):
    name = "host"

    def __init__(self, machine: Machine, cycle: HostCycle, metrics: Metrics):
        self.machine, self.cycle, self.metrics = machine, cycle, metrics
        drafter = machine.drafter
        self.draft_model = drafter if isinstance(drafter, DraftModel) and drafter.chain is not None else None  # drafts ahead of the call
        own = (drafter.name,) if drafter is not None and (cycle.drafts or self.draft_model is not None) else ()
        self.trees = cycle.drafts
        self.drafters = (None, "ngram", *own)  # whose drafts the call can take
        self._probes: dict[int, SamplingBatch] = {}

    def takes(self, batch: StepBatch) -> bool:
        return all([lane.seq.tempered and lane.drafter in self.drafters for lane in batch.decode])

    def launch(self, batch: StepBatch) -> Flight:
        machine = self.machine
        if batch.prompts:
            machine.prompts(batch.prompts)
        flight = Flight(self, batch, [lane.seq.held for lane in batch.decode], machine.clock())
        if batch.decode:
            machine.store.flush()
            sampling = machine.sampling([lane.seq for lane in batch.decode])
            sure = self._guess(batch, sampling) if self.draft_model is not None else {}
            asked = []
            for x in batch.decode:
                guess = x.guess if x.k else None
                likely = x.seq.request.params.logprobs
                asked.append(Asked(x.slot, x.seq.tokens[-1], x.start, x.k, guess, x.stop, x.drop, x.nodes, x.prices, likely))
            told = self.cycle.run(asked, sampling, batch.trust)
            flight.payload = [line._replace(confidence=sure[i]) if i in sure else line for i, line in enumerate(told)] if sure else told
        return flight

    def _guess(self, batch: StepBatch, sampling: SamplingBatch) -> dict[int, list[float]]:
        """Let the draft model guess for its lanes: the guesses are put into the lanes, their confidences are returned by lane."""
        assert self.draft_model is not None
        which = [i for i, lane in enumerate(batch.decode) if lane.k and lane.guess is None]
        if not which:
            return {}
        lanes = [batch.decode[i] for i in which]
        some = sampling if len(which) == len(batch.decode) else sampling.select(torch.tensor(which))
        try:
            made = self.draft_model.guess(
                [x.seq.id for x in lanes], [x.seq.tokens for x in lanes], max(x.k for x in lanes), some, batch.trust,
                [x.stop for x in lanes], [x.drop for x in lanes], len(batch.decode) == 1,
            )  # fmt: skip
        except Exception as error:
            switch_off(self.draft_model.name, lanes, error, self.metrics)
            for lane in lanes:
                lane.k = 0
            return {}
        for lane, brought in zip(lanes, made):
            lane.k = min(lane.k, brought.length)
            lane.guess = brought.tokens[: lane.k]
        return {i: brought.confidence[: batch.decode[i].k + 1] for i, brought in zip(which, made) if brought.confidence}

    def read(self, flight: Flight) -> list[Emitted]:
        lanes, out = flight.batch.decode, []
        for lane, (k, tokens, confidence, tree, rows) in zip(lanes, flight.payload or ()):  # type: ignore[call-overload]
            lane.k = k
            top = logprobs(rows, tokens, lane.seq.request.params.logprobs or 0) if rows is not None else None
            out.append(Emitted(tokens, top, confidence, Branches.of(*tree) if tree is not None else None))
        if lanes:
            flight.width, flight.context = sum(lane.k for lane in lanes) / len(lanes), sum(len(x.seq.tokens) for x in lanes) // len(lanes)
        return out

    def times(self, part: str) -> bool:
        return part == "verify" or part in self.drafters or (self.draft_model is not None and part == reading(self.draft_model.name))

    def probe(self, part: str, batch: int, k: int, context: int) -> None:
        """A verify pass of guesses from outside; or a whole cycle with the draft of `part`, which runs within it."""
        sampling = self._probes.get(batch)  # built once for a batch, not once a cycle, as in earnest
        if sampling is None:
            params = [SamplingParams()] * batch
            sampling = SamplingBatch.build(params, [[0]] * batch, [[]] * batch, self.machine.vocab, self.machine.device)
            self._probes[batch] = sampling
        guess = [0] * k if part == "verify" else None
        slots = self.machine.scratch_slots(batch, context + k + 1)
        self.machine.store.flush()
        if self.draft_model is not None and part != "verify":
            self.draft_model.rehearse(batch, k, context, sampling, 0 if part == self.draft_model.name else READING)
            guess = [0] * k
        self.cycle.run([Asked(slot, 0, context, k, guess) for slot in slots], sampling, None)
