"""Which sequences run in a step, and how far. Torch-free: it sees tokens, positions and a cache that counts pages.

A step holds the decode rows of every running sequence (the newest token and its drafts) and prompt chunks up to a
budget, so that a long prompt never holds up running streams for more than one chunk. A prompt is prefilled up to
its last token, which then goes through the first decode cycle like any other.

When pages run out the youngest sequence is pre-empted: it gives up its pages, waits at the head of the queue and is
recomputed later; noise depends on (seed, position) only, so it goes on with the same text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..spec.plan import Choice
from ..types import RequestStats, SamplingParams


class Cache(Protocol):
    @property
    def free_slots(self) -> int: ...
    def open(self, tokens: Sequence[int], granularity: int, reuse: bool = True) -> tuple[Any, int]: ...
    def fits(self, seq: Any, positions: int) -> bool: ...
    def reserve(self, seq: Any, positions: int) -> bool: ...
    def close(self, seq: Any) -> None: ...


@dataclass
class Request:
    id: str
    prompt: list[int]
    params: SamplingParams
    draft_tokens: int | None = None  # None: as the engine is set
    drafter: bool | str = True  # False: plain decoding; a name: only that drafter


@dataclass(eq=False)
class Seq:
    """A request on its way. `tokens` are prompt and answer; K/V of `computed` of them is committed."""

    request: Request
    arrived: float
    tokens: list[int]
    computed: int = 0
    cache: Any = None
    has_features: bool = False  # the hidden state at tokens[-2] is known, so a drafter can start
    stats: RequestStats = field(default_factory=RequestStats)
    first_token_at: float | None = None
    drafter_off: bool = False
    ahead: int = 0  # most tokens that cycles in flight may add (the host reads one cycle behind)
    hold: bool = False  # wait for the cycle in flight before the next
    extra: Any = None  # the engine's own (detokeniser, n-gram index, grammar matcher)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        return self.request.params.max_tokens - self.outputs


@dataclass(frozen=True)
class Chunk:
    seq: Seq
    start: int
    count: int


@dataclass(slots=True)
class DecodeRow:
    seq: Seq
    drafter: str | None
    k: int  # tokens to draft; once drafted: how many were
    stop: float = 0.0  # where the draft may end itself: see spec.plan.Choice
    drop: float = 0.0


@dataclass
class StepPlan:
    prefill: list[Chunk] = field(default_factory=list)
    decode: list[DecodeRow] = field(default_factory=list)


class Scheduler:
    def __init__(self, cache: Cache, max_batch: int, chunk: int, granularity: int, replay_rows: int, prefix_cache: bool):
        """`granularity`: prefix hits are multiples of it. `replay_rows`: answers of pre-empted sequences are recomputed in
        pieces of at most so many rows, so that the same kernels run as the first time."""
        self.cache, self.max_batch, self.chunk, self.granularity = cache, max_batch, chunk, granularity
        self.replay_rows, self.prefix_cache = replay_rows, prefix_cache
        self.waiting: deque[Seq] = deque()
        self.running: list[Seq] = []  # oldest first
        self.preemptions = 0

    def add(self, seq: Seq) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Seq) -> None:
        """It has finished or was aborted."""
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        if seq.cache is not None:
            self.cache.close(seq.cache)
            seq.cache = None

    def plan(self, choose: Callable[[list[Seq]], list[Choice]]) -> StepPlan:
        """`choose` gives drafter and K for each decoding sequence."""
        plan, before = StepPlan(), self.preemptions
        self._admit()
        ready = [s for s in self.running if s.computed == len(s.tokens) - 1 and not s.hold]
        for seq, (drafter, k, stop, drop) in zip(ready, choose(ready) if ready else []):
            if seq.cache is None:
                continue  # pre-empted by an older one in this very step
            if self._reserve(seq, len(seq.tokens) + seq.ahead + k):
                plan.decode.append(DecodeRow(seq, drafter if k else None, k, stop, drop))
        budget = self.chunk + self.chunk // 4  # short prompts ride along with a long one instead of waiting for all of it
        for seq in list(self.running) if len(ready) < len(self.running) else ():
            if seq.cache is None:
                continue
            chunk = self._next_chunk(seq)
            if chunk is None or (chunk.count > budget and plan.prefill):
                continue
            if self._reserve(seq, chunk.start + chunk.count):
                plan.prefill.append(chunk)
                budget -= chunk.count
            if budget <= 0:
                break
        if self.preemptions != before:
            live = {id(s) for s in self.running}
            plan.prefill = [c for c in plan.prefill if id(c.seq) in live]
            plan.decode = [r for r in plan.decode if id(r.seq) in live]
        return plan

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_batch and self.cache.free_slots:
            seq = self.waiting[0]
            seq.cache, hit = self.cache.open(seq.tokens[:-1], self.granularity, self.prefix_cache)
            if not self.cache.fits(seq.cache, len(seq.tokens)):
                self.cache.close(seq.cache)
                seq.cache = None
                return  # it waits until pages come free
            seq.computed, seq.has_features = hit, False
            seq.stats.cached_tokens = max(seq.stats.cached_tokens, hit)
            self.waiting.popleft()
            self.running.append(seq)

    def _next_chunk(self, seq: Seq) -> Chunk | None:
        """Chunk borders lie on a grid from position 0, so that a prompt is always cut in the same places."""
        start, end = seq.computed, len(seq.tokens) - 1
        if start >= end:
            return None
        count = min(self.chunk - start % self.chunk, end - start)
        if self.replay_rows < self.chunk:
            prompt_end = seq.prompt_len - 1
            count = min(count, prompt_end - start) if start < prompt_end else min(count, self.replay_rows)
        return Chunk(seq, start, count)

    def _reserve(self, seq: Seq, positions: int) -> bool:
        """Room for `positions`, pre-empting younger sequences (and at last this one) when there is none."""
        while not self.cache.reserve(seq.cache, positions):
            victim = self.running[-1]
            self.preemptions += 1
            self.running.pop()
            self.cache.close(victim.cache)
            victim.cache, victim.computed, victim.has_features, victim.ahead = None, 0, False, 0
            self.waiting.appendleft(victim)
            if victim is seq:
                return False
        return True
