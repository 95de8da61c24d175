"""Decides which sequences run in a step, and how many tokens of each. Torch-free.

A step holds the decode rows of every running sequence and prompt chunks up to a budget, so a long prompt delays
streams little. An image that may not be split exceeds it; overspending is repaid from later steps' budgets, as are a
client's prompts next to streams of others (`PrefillBudget.charge`). Where rows are dear, clients in the background have
a part in every eighth step while others run. When pages run out a paused sequence is preempted, else the youngest: it
waits at the head of the queue, and its K/V is recomputed with the same bits.

`schedule` may be called again before its plan runs: admissions, reserved pages and preemptions stay, everything that
would count twice is booked by `commit_plan` alone.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from ..types import DraftPlan
from .prefill_budget import PrefillBudget
from .step import DecodeRow, PrefillDebt, PromptChunk, Sequence, StepBatch, StepPlan

if TYPE_CHECKING:
    from ..cache.pages import PagePool
    from ..cache.store import KVStore
    from .draft_policy import DraftPolicy

RESTORED = object()
BACKGROUND_EVERY = 8  # steps
NO_CLIENTS: frozenset[str] = frozenset()


class BlockedRequest(NamedTuple):
    """The head of the queue while its pages do not fit: it is not tried again before a page is released."""

    seq: Sequence
    pool: PagePool
    num_releases: int


class Scheduler:
    def __init__(
        self,
        cache: KVStore,
        max_batch: int,
        prefill: PrefillBudget,
        granularity: int,
        replay_rows: int,
        draft_policy: DraftPolicy,
        max_context: int = 1 << 30,
    ):
        """`granularity`: prefix hits are multiples of it. `replay_rows`: outputs of preempted sequences are recomputed
        in chunks of at most this many rows, so that the same kernels run as the first time."""
        self.cache = cache
        self.max_batch = max_batch
        self.prefill = prefill
        self.granularity = granularity
        self.replay_rows = replay_rows
        self.draft_policy = draft_policy
        self.max_context = max_context
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.preemptions = 0
        self.background = NO_CLIENTS  # clients that give way to others; replaced, never changed
        self._background_skips = 0
        self._blocked: BlockedRequest | None = None
        self._debt = PrefillDebt()
        self._scored: set[str] = set()  # clients of whose texts a pass ran since the last step

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        if seq.cache is not None:
            self.cache.close(seq.cache)
            seq.cache = None

    def schedule(self) -> StepPlan:
        """The next step: its sequences, their prompt chunks, and drafter and K of each that decodes."""
        batch = StepBatch()
        preemptions = self.preemptions
        if self.waiting:
            self._admit()
        absent = self._absent() if self.background else NO_CLIENTS
        ready = self._ready(absent)
        cycle = None
        if ready:
            plans, cycle = self.draft_policy.choose(ready)
            for seq, plan in zip(ready, plans, strict=True):
                if seq.cache is not None:  # else an older one has preempted it in this step
                    self._decode(batch, seq, plan)
        debt = self._debt
        if debt.overdrawn > 0 or debt.charged:
            debt = debt.repaid(self.prefill.with_decodes) if ready else PrefillDebt()
        if len(ready) < len(self.running):
            debt = self._prompts(batch, ready, debt, absent=absent)
        if self.preemptions != preemptions:
            self._drop_preempted(batch)
        if cycle is not None:  # only drafts that the controller chose may end themselves
            batch.trust = self.draft_policy.trust(batch.decode)
        return StepPlan(batch, cycle, debt, background_skips=self._background_skips + 1 if absent else 0)

    def commit_plan(self, plan: StepPlan) -> None:
        """Book a plan that is about to run."""
        self._debt = plan.debt
        self._scored.clear()
        self._background_skips = plan.background_skips
        if plan.cycle is not None:
            self.draft_policy.controller.commit(plan.cycle)

    @property
    def busy(self) -> bool:
        """Another step can make progress: paused sequences wait for a command, and give way to those that do not."""
        return any(not seq.paused for seq in self.running) or any(not seq.paused for seq in self.waiting)

    def preempt_paused(self) -> bool:
        """Take slot and pages of a paused sequence, if there is one: it gives way to whatever can progress."""
        victim = self._youngest_paused()
        if victim is not None:
            self._preempt(victim)
        return victim is not None

    def scored_rows(self, client: str, most: int) -> int:
        """Rows of a text that may be scored for a client now; 0: not before another step. Beside sequences of others a
        client has one pass per step, with as many rows as a prompt there."""
        if not self._others(client):
            return most
        if client in self._scored or self._debt.waits(client) or client in self._absent():
            return 0
        self._scored.add(client)
        return min(most, self.prefill.with_decodes or most)

    def charge_scored(self, client: str, seconds: float) -> None:
        """Charge a client for a pass over its text as for its prompts."""
        charged = dict(self._debt.charged)
        num_prompting = len({client, *charged})
        steps = self.prefill.charge_seconds(seconds, len(self._others(client)), num_prompting)
        if steps > 0.0:
            charged[client] = charged.get(client, 0.0) + steps
            self._debt = PrefillDebt(self._debt.overdrawn, charged)

    def _others(self, client: str) -> set[str]:
        """Other clients that the next steps are for."""
        waiting = self.waiting if self._blocked is None else ()  # which lacks pages that a text may hold
        return {seq.request.client for seq in (*self.running, *waiting) if not seq.paused} - {client}

    def _ready(self, absent: frozenset[str]) -> list[Sequence]:
        """The sequences that decode in the next step."""
        ready: list[Sequence] = []
        for seq in self.running:
            size = len(seq.tokens)
            if seq.computed != size - 1 or seq.paused or seq.request.client in absent:
                continue
            ahead = seq.num_inflight_tokens
            # the step in flight may end it or fill its context: it is not planned until that is known
            if ahead > 0 and (size + 1 >= seq.max_total_tokens or size + ahead >= self.max_context):
                continue
            ready.append(seq)
        return ready

    def _drop_preempted(self, batch: StepBatch) -> None:
        """Drop what was scheduled for sequences that have lost their pages to others since."""
        batch.prompts = [chunk for chunk in batch.prompts if chunk.seq.cache is not None]
        batch.decode = [row for row in batch.decode if row.seq.cache is not None]

    def _absent(self) -> frozenset[str]:
        """Clients without a part in the next step. Any step that has none of them has a sequence of another client."""
        if not self.prefill.rows_are_dear or self._background_skips >= BACKGROUND_EVERY - 1:
            return NO_CLIENTS
        clients = {seq.request.client for seq in self.running if not seq.paused}
        return self.background & clients if clients - self.background else NO_CLIENTS

    def _decode(self, batch: StepBatch, seq: Sequence, plan: DraftPlan) -> None:
        """Schedule a decoding sequence if pages can be reserved."""
        size = len(seq.tokens)
        cache = seq.active_cache
        positions = size + seq.num_inflight_tokens
        host_draft = None
        if plan.k > 0:
            positions += self.draft_policy.positions(plan)
            host_draft = self.draft_policy.host_draft(seq, plan)
        if positions > cache.room and not self._reserve(seq, positions):
            return
        batch.decode.append(DecodeRow(seq, cache.slot, size - 1, plan=plan, host_draft=host_draft))

    def _prompts(
        self, batch: StepBatch, decoding: list[Sequence], debt: PrefillDebt, absent: frozenset[str]
    ) -> PrefillDebt:
        """Schedule prompt chunks within the budget. Returns the debt after them."""
        overdrawn = debt.overdrawn
        charged = dict(debt.charged)
        prompts = [s for s in self.running if s.computed < len(s.tokens) - 1 and s.request.client not in absent]
        budget, beside = self.prefill.tokens(len(decoding), len(prompts))
        streaming = {s.request.client for s in self.running if s.computed == len(s.tokens) - 1 and not s.paused}
        half = budget // 2
        waiting = self._by_turn(prompts, debt) if beside else prompts
        for seq in waiting:
            if seq.cache is None:
                continue
            start, count = self._next_chunk(seq)
            if beside:
                count = min(count, half if len(waiting) > 1 and not batch.prompts else budget)
            planned = count
            count = seq.chunk_end(start, start + count) - start
            if count <= 0:
                continue
            if count > planned:  # an image that may not be split: the budget is exceeded, or it would never run
                if overdrawn > 0:
                    continue
            elif count > budget and batch.prompts:
                continue
            if self._reserve(seq, start + count):
                wanted = start + count == len(seq.tokens) - 1 and seq.drafts_from_hidden
                batch.prompts.append(PromptChunk(seq, seq.active_cache.slot, start, num_tokens=count, wanted=wanted))
                budget -= count
                if beside:
                    client = seq.request.client
                    overdrawn += max(0, -budget)
                    num_prompting = len({client, *charged})
                    steps = self.prefill.charge(count, len(streaming - {client}), num_prompting)
                    charged[client] = charged.get(client, 0.0) + steps
            if budget <= 0:
                break
        return PrefillDebt(overdrawn, charged)

    def _by_turn(self, prompts: list[Sequence], debt: PrefillDebt) -> list[Sequence]:
        """Prompts next to decoding sequences, without clients that had their share: the one with the fewest tokens
        left, which never waits for a long one, then the oldest first."""
        waiting = [s for s in prompts if not debt.waits(s.request.client)]
        soonest = min(waiting, key=lambda s: len(s.tokens) - s.computed, default=None)
        return waiting if soonest is None else [soonest, *(s for s in waiting if s is not soonest)]

    def _admit(self) -> None:
        """Give slots and pages to waiting sequences, in order. Paused ones stay where they are, and give way."""
        while True:
            seq = next((seq for seq in self.waiting if not seq.paused), None)
            if seq is None:
                return
            full = len(self.running) >= self.max_batch or self.cache.free_slots == 0
            if full and not self.preempt_paused():
                return
            if self._still_blocked(seq):
                if self.preempt_paused():
                    continue
                return
            # the last token runs in the first decode step; a draft may need the hidden state of the one before it
            prefill_end = len(seq.tokens) - 1
            limit = prefill_end - 1 if seq.drafts_from_hidden else prefill_end
            if seq.prefix is not None:
                seq.prefix.extend(seq.cache_keys, limit)
                if self.cache.disk is not None:
                    seq.restoring = seq.restoring or self.cache.disk.restore(seq.prefix, limit, self.granularity)
                    if next(seq.restoring, RESTORED) is not RESTORED:
                        return  # the rest of its prefix is read from disk in the next steps
            cache, hit = self.cache.open(seq.prefix, limit, self.granularity, unbroken=seq.unbroken)
            pool = self.cache.exhausted_pool(cache, len(seq.tokens))
            if pool is not None:
                self.cache.close(cache)
                self._blocked = BlockedRequest(seq, pool, pool.num_releases)
                continue
            self._blocked = None
            seq.cache = cache
            seq.computed = hit
            seq.has_features = hit == prefill_end and not seq.drafts_from_hidden
            seq.stats.cached_tokens = max(seq.stats.cached_tokens, hit)
            self.waiting.remove(seq)
            self.running.append(seq)

    def _still_blocked(self, seq: Sequence) -> bool:
        """True if this sequence did not fit and no page of the pool that lacked some was released since."""
        blocked = self._blocked
        return blocked is not None and blocked.seq is seq and blocked.pool.num_releases == blocked.num_releases

    def _next_chunk(self, seq: Sequence) -> tuple[int, int]:
        """First position and length. Borders lie on a grid: a prompt is always cut in the same places."""
        start = seq.computed
        end = len(seq.tokens) - 1
        count = min(self.prefill.chunk - start % self.prefill.chunk, end - start)
        if self.replay_rows < self.prefill.chunk:
            prompt_end = seq.prompt_len - 1
            count = min(count, prompt_end - start) if start < prompt_end else min(count, self.replay_rows)
        return start, count

    def _reserve(self, seq: Sequence, positions: int) -> bool:
        """Reserve pages for `positions`, preempting paused and younger sequences (and finally this one) if there are
        none."""
        while not self.cache.reserve(seq.active_cache, positions):
            victim = self._youngest_paused() or self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _youngest_paused(self) -> Sequence | None:
        return next((seq for seq in reversed(self.running) if seq.paused), None)

    def _preempt(self, victim: Sequence) -> None:
        """Take its slot and pages; it is admitted again before the sequences that came after it."""
        self.preemptions += 1
        self.running.remove(victim)
        self.cache.close(victim.active_cache)
        victim.cache = None
        victim.has_features = False
        victim.num_inflight_tokens = 0
        victim.computed = 0
        self.waiting.appendleft(victim)
