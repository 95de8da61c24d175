"""Decides which sequences run in a step, and how many tokens of each. Torch-free.

A step holds the decode rows of every running sequence and prompt chunks up to a budget, so a long prompt delays
streams little. An image that may not be split exceeds it, and the next waits until later steps have made up for that;
so do prompts of a client next to streams of others (`PrefillBudget.charge`). When pages run out the youngest sequence
is preempted: it waits at the head of the queue, and its K/V is recomputed with the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..types import NO_DRAFT, DraftPlan
from .prefill_budget import PrefillBudget
from .step import ScheduledSeq, Seq, StepBatch

if TYPE_CHECKING:
    from ..cache.store import KVStore

DONE = object()


class Scheduler:
    def __init__(
        self,
        cache: KVStore,
        max_batch: int,
        prefill: PrefillBudget,
        granularity: int,
        replay_rows: int,
        prefix_cache: bool,
        max_context: int = 1 << 30,
        block_rows: Mapping[str | None, int] | None = None,
    ):
        """`granularity`: prefix hits are multiples of it. `replay_rows`: outputs of preempted sequences are recomputed
        in chunks of at most this many rows, so that the same kernels run as the first time. `block_rows`: by drafter,
        positions that its drafts write at (`Drafter.block_rows`)."""
        self.cache = cache
        self.max_batch = max_batch
        self.prefill = prefill
        self.granularity = granularity
        self.replay_rows = replay_rows
        self.prefix_cache = prefix_cache
        self.max_context = max_context
        self.waiting: deque[Seq] = deque()
        self.running: list[Seq] = []  # oldest first
        self.preemptions = 0
        self.block_rows = block_rows or {}
        # prompt rows beyond the budgets of the steps since then: of unsplit images, and by client
        self._overdrawn = 0
        self._charged = dict[str, int]()

    def add(self, seq: Seq) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Seq) -> None:
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        if seq.cache is not None:
            self.cache.close(seq.cache)
            seq.cache = None

    def plan(self, choose: Callable[[list[Seq]], list[DraftPlan]]) -> StepBatch:
        """`choose` returns drafter and K for each decoding sequence."""
        batch = StepBatch()
        before = self.preemptions
        if self.waiting:
            self._admit()
        ready: list[Seq] = []
        for seq in self.running:
            size = len(seq.tokens)
            ahead = seq.num_inflight_tokens
            # the step in flight may end it or fill its context: it is not planned until that is known
            over = ahead and (size + 1 >= seq.max_total_tokens or size + ahead >= self.max_context)
            if seq.computed == size - 1 and not seq.paused and not over:
                ready.append(seq)
        for seq, plan in zip(ready, choose(ready) if ready else ()):
            if seq.cache is not None:  # else an older one has preempted it in this step
                self._decode(batch, seq, plan)
        if self._overdrawn or self._charged:
            made_up = self.prefill.with_decodes if ready else 1 << 30
            self._overdrawn = max(0, self._overdrawn - made_up)
            self._charged = {client: rows - made_up for client, rows in self._charged.items() if rows > made_up}
        if len(ready) < len(self.running):
            self._prompts(batch, ready)
        if self.preemptions != before:
            live = {id(s) for s in self.running}
            batch.prompts = [item for item in batch.prompts if id(item.seq) in live]
            batch.decode = [item for item in batch.decode if id(item.seq) in live]
        return batch

    def _decode(self, batch: StepBatch, seq: Seq, plan: DraftPlan) -> None:
        """Schedule a decoding sequence if pages can be reserved. The plan may have been made some steps ago."""
        size = len(seq.tokens)
        slot = seq.held.slot
        ahead = 0
        if plan.k:
            if size + plan.nodes > self.max_context:
                plan = plan._replace(nodes=0)
            ahead = max(plan.max_drafted, self.block_rows.get(plan.drafter, 0) - 1)
            if plan.drafter in self.block_rows and size + ahead > self.max_context:
                plan = NO_DRAFT
                ahead = 0
        if not self._reserve(seq, size + seq.num_inflight_tokens + ahead):
            return
        guess: Sequence[int] | None = None
        if plan.drafter == "ngram" and seq.ngram is not None:
            guess = seq.ngram.propose(plan.k + seq.num_inflight_tokens)[0]
            plan = plan._replace(nodes=0) if guess else NO_DRAFT  # else the match has ended since
        batch.decode.append(ScheduledSeq(seq, slot, size - 1, plan=plan, guess=guess))

    def _prompts(self, batch: StepBatch, decoding: list[Seq]) -> None:
        budget, beside = self.prefill.tokens(len(decoding), sum(s.computed < len(s.tokens) - 1 for s in self.running))
        streaming = {seq.request.client for seq in decoding}
        half = budget // 2
        waiting = self._by_turn() if beside else list(self.running)
        for seq in waiting:
            if seq.cache is None:
                continue
            start, count = self._next_chunk(seq)
            if beside:
                count = min(count, half if len(waiting) > 1 and not batch.prompts else budget)
            planned = count
            count = seq.chunk_end(start, start + count) - start
            unbroken = count > planned  # an image that may not be split: the budget is exceeded, or it would never run
            if count <= 0 or (self._overdrawn if unbroken else count > budget and batch.prompts):
                continue
            if self._reserve(seq, start + count):
                wanted = start + count == len(seq.tokens) - 1 and seq.drafts_from_hidden
                batch.prompts.append(ScheduledSeq(seq, seq.held.slot, start, count, wanted))
                budget -= count
                if beside:
                    client = seq.request.client
                    self._overdrawn = self._overdrawn + max(0, -budget)
                    charged = self.prefill.charge(count, len(streaming - {client}))
                    self._charged[client] = self._charged.get(client, 0) + charged
            if budget <= 0:
                break

    def _by_turn(self) -> list[Seq]:
        """Prompts next to decoding sequences, without clients that had their share: the one with the fewest tokens
        left, which never waits for a long one, then the oldest first."""
        waiting = [s for s in self.running if s.computed < len(s.tokens) - 1 and s.request.client not in self._charged]
        soonest = min(waiting, key=lambda s: len(s.tokens) - s.computed, default=None)
        return waiting if soonest is None else [soonest, *(s for s in waiting if s is not soonest)]

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_batch and self.cache.free_slots:
            seq = self.waiting[0]
            root = seq.prefix_root
            keys = seq.cache_keys[:-1]
            if self.cache.disk is not None:
                seq.restoring = seq.restoring or self.cache.disk.restore(keys, root, self.granularity)
                if next(seq.restoring, DONE) is not DONE:
                    return  # the rest of its prefix is read from disk in the next steps
            seq.cache, hit = self.cache.open(keys, self.granularity, self.prefix_cache, root, seq.unbroken)
            if not self.cache.fits(seq.cache, len(seq.tokens)):
                self.cache.close(seq.cache)
                seq.cache = None
                return  # it waits until pages are free
            seq.computed = hit
            seq.has_features = False
            seq.stats.cached_tokens = max(seq.stats.cached_tokens, hit)
            self.waiting.popleft()
            self.running.append(seq)

    def _next_chunk(self, seq: Seq) -> tuple[int, int]:
        """First position and length. Borders lie on a grid: a prompt is always cut in the same places."""
        start = seq.computed
        end = len(seq.tokens) - 1
        count = min(self.prefill.chunk - start % self.prefill.chunk, end - start)
        if self.replay_rows < self.prefill.chunk:
            prompt_end = seq.prompt_len - 1
            count = min(count, prompt_end - start) if start < prompt_end else min(count, self.replay_rows)
        return start, count

    def _reserve(self, seq: Seq, positions: int) -> bool:
        """Reserve pages for `positions`, preempting younger sequences (and finally this one) if there are none."""
        while not self.cache.reserve(seq.held, positions):
            victim = self.running[-1]
            self.preemptions += 1
            self.running.pop()
            self.cache.close(victim.held)
            victim.cache = None
            victim.has_features = False
            victim.num_inflight_tokens = 0
            victim.computed = 0
            self.waiting.appendleft(victim)
            if victim is seq:
                return False
        return True
