"""Reports step times to the controller's cost table and to the prefill budget. Torch-free.

Where steps overlap (`async_results`), the time of a step is that between two results; elsewhere, from its start to its
commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..spec.plan import StepTiming
from .prefill_budget import CAPTURED_ROWS, PrefillBudget
from .step import PendingStep, Sequence
from .step_io import drafted_per_sequence

if TYPE_CHECKING:
    from .draft_policy import DraftPolicy
    from .model_runner import ModelRunner


class StepTimer:
    def __init__(self, runner: ModelRunner, prefill: PrefillBudget, policy: DraftPolicy):
        self.runner = runner
        self.prefill = prefill
        self.policy = policy
        self._last_read_at = 0.0
        self._prompted = 0.0  # seconds spent on prompts before the present step
        self._timed: list[Sequence] = []  # the batch whose last step was timed

    def begin_prompts(self) -> None:
        """The present step, which has prompt chunks, begins."""
        self._prompted = self.runner.prompt_seconds

    def observe(self, pending: PendingStep, now: float) -> None:
        """A step was read `now` and committed. Steps with prompt rows are not reported to the controller; nor, where
        steps do not overlap, is the first step of a batch, which has cold caches."""
        scheduled = pending.batch.decode
        prompts = pending.batch.prompts
        if not scheduled:
            return
        if pending.executor.async_results:
            seconds = now - max(pending.began, self._last_read_at)
            known = not prompts
            self._last_read_at = now
            if pending.executor.num_captures != pending.num_captures:
                return  # the host captured a graph before it read this step
            if pending.rows <= CAPTURED_ROWS[-1]:
                self.prefill.observe(pending.rows, seconds)
        else:
            # with reading and committing
            seconds = self.runner.clock() - pending.began
            known = True
            self.prefill.observe(0, seconds)
            if prompts:
                rows = sum(chunk.num_tokens for chunk in prompts)
                self.prefill.observe(rows, seconds + self.runner.prompt_seconds - self._prompted)
        if not self.policy.controller.planned:
            return
        # one loop: between two passes over the weights every function call runs on cold caches
        seqs = list[Sequence]()
        drafter: str | None = None
        adapted = False
        num_positions = 0
        for row in scheduled:
            seqs.append(row.seq)
            drafter = drafter or row.plan.drafter
            adapted = adapted or row.seq.adapter is not None
            num_positions += row.position + 1
        if not pending.executor.async_results:
            known = self._timed == seqs
            self._timed = seqs
        # The cost table holds the base model's steps, and trees of one sequence.
        batch = len(seqs)
        if known and not adapted and not (pending.tree and batch > 1):
            timing = StepTiming(
                batch=batch,
                k=drafted_per_sequence(pending) if pending.width is None else pending.width,
                context=num_positions // batch if pending.context is None else pending.context,
                seconds=seconds,
                drafter=drafter,
                tree=pending.tree,
            )
            self.policy.controller.observe_step(timing)
