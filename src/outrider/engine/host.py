"""The step as one call of a C library (`Backend.host_cycle`), for requests whose tokens are chosen greedily or by a
temperature alone, with or without logprobs.

Between two passes over the weights every line of Python runs on cold caches, so the way of a host cycle is kept short:
no tensor operations, and none of the 40 µs of entering inference mode. The tokens are those of `eager`. An MTP
drafter's round is part of the call; a draft model's is a call of its own before it.
"""

from __future__ import annotations

import torch

from ..ops.backend import CycleRequest, HostCycle
from ..spec.choose import SamplingBatch
from ..spec.drafter import HostDraftRequest
from ..spec.plan import READING, VerifiedTree, reading
from ..types import SamplingParams
from .cycle import logprobs
from .eager import switch_off
from .metrics import Metrics
from .model_runner import ModelRunner
from .step import Emitted, Executor, PendingStep, StepBatch


class HostExecutor(Executor):
    name = "host"

    def __init__(self, runner: ModelRunner, cycle: HostCycle, metrics: Metrics):
        self.runner, self.cycle, self.metrics = runner, cycle, metrics
        drafter = runner.drafter
        self.ahead = drafter if drafter is not None and drafter.host_rounds else None  # drafts before the call
        own = (drafter.name,) if drafter is not None and (cycle.drafts or drafter.host_rounds) else ()
        self.trees = cycle.drafts
        self.drafters = (None, "ngram", *own)  # whose drafts the call can take
        self._probes: dict[int, SamplingBatch] = {}

    def takes(self, batch: StepBatch) -> bool:
        return all([item.seq.temperature_only and item.drafter in self.drafters for item in batch.decode])

    def launch(self, batch: StepBatch) -> PendingStep:
        runner = self.runner
        if batch.prompts:
            runner.prompts(batch.prompts)
        pending = PendingStep(self, batch, [item.seq.held for item in batch.decode], runner.clock())
        if batch.decode:
            runner.store.flush()
            sampling = runner.sampling([item.seq for item in batch.decode])
            sure = self._guess(batch, sampling) if self.ahead is not None else {}
            asked = []
            for x in batch.decode:
                guess = x.guess if x.k else None
                likely = x.seq.request.params.logprobs
                asked.append(
                    CycleRequest(
                        x.slot, x.seq.tokens[-1], x.start, x.k, guess, x.stop, x.drop, x.nodes, x.prices, likely
                    )
                )
            told = self.cycle.run(asked, sampling, batch.trust)
            pending.payload = (
                [line._replace(confidence=sure[i]) if i in sure else line for i, line in enumerate(told)]
                if sure
                else told
            )
        return pending

    def _guess(self, batch: StepBatch, sampling: SamplingBatch) -> dict[int, list[float]]:
        """Let the draft model guess for its scheduled: the guesses are put into the scheduled, their confidences are
        returned by item."""
        assert self.ahead is not None
        which = [i for i, item in enumerate(batch.decode) if item.k and item.guess is None]
        if not which:
            return {}
        scheduled = [batch.decode[i] for i in which]
        some = sampling if len(which) == len(batch.decode) else sampling.select(torch.tensor(which))
        try:
            made = self.ahead.draft_on_host(
                HostDraftRequest(
                    [x.seq.id for x in scheduled],
                    [x.seq.tokens for x in scheduled],
                    max(x.k for x in scheduled),
                    some,
                    batch.trust,
                    [x.stop for x in scheduled],
                    [x.drop for x in scheduled],
                    len(batch.decode) == 1,
                )
            )
        except Exception as error:
            switch_off(self.ahead.name, scheduled, error, self.metrics)
            for item in scheduled:
                item.k = 0
            return {}
        for item, brought in zip(scheduled, made):
            item.k = min(item.k, brought.length)
            item.guess = brought.tokens[: item.k]
        return {i: brought.confidence[: batch.decode[i].k + 1] for i, brought in zip(which, made) if brought.confidence}

    def read(self, pending: PendingStep) -> list[Emitted]:
        scheduled, out = pending.batch.decode, []
        for item, (k, tokens, confidence, tree, rows) in zip(scheduled, pending.payload or ()):  # type: ignore[call-overload]
            item.k = k
            top = logprobs(rows, tokens, item.seq.request.params.logprobs or 0) if rows is not None else None
            out.append(Emitted(tokens, top, confidence, VerifiedTree.of(*tree) if tree is not None else None))
        if scheduled:
            pending.width, pending.context = (
                sum(item.k for item in scheduled) / len(scheduled),
                sum(len(x.seq.tokens) for x in scheduled) // len(scheduled),
            )
        return out

    def can_probe(self, part: str) -> bool:
        return (
            part == "verify" or part in self.drafters or (self.ahead is not None and part == reading(self.ahead.name))
        )

    def probe(self, part: str, batch: int, k: int, context: int) -> None:
        """A verify pass of guesses from outside; or a whole cycle with the draft of `part`, which runs within it."""
        sampling = self._probes.get(batch)  # built once for a batch, not once a cycle, as in earnest
        if sampling is None:
            params = [SamplingParams()] * batch
            sampling = SamplingBatch.build(params, [[0]] * batch, [[]] * batch, self.runner.vocab, self.runner.device)
            self._probes[batch] = sampling
        guess = [0] * k if part == "verify" else None
        slots = self.runner.scratch_slots(batch, context + k + 1)
        self.runner.store.flush()
        if self.ahead is not None and part != "verify":
            names, text = [f"scratch {i}" for i in range(batch)], [0] * (context + 1)
            unread = 0 if part == self.ahead.name else READING
            for name in names:
                self.ahead.assume(name, text[: max(0, context - unread)])
            self.ahead.draft_on_host(HostDraftRequest(names, [text] * batch, k, sampling, alone=batch == 1))
            for name in names:
                self.ahead.forget(name)
            guess = [0] * k
        self.cycle.run([CycleRequest(slot, 0, context, k, guess) for slot in slots], sampling, None)
