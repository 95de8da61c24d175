"""An LLM that answers by rule, on a clock of its own: what the harness needs of one, and nothing else."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from outrider.types import RequestStats


@dataclass
class FakeEvent:
    id: str
    tokens: list[int]
    text: str
    finish_reason: str | None = None
    stats: RequestStats | None = None
    error: str | None = None
    kinds: list[str] = field(default_factory=list)


@dataclass
class FakeRequest:
    id: str
    ids: list[int]
    params: object
    draft_tokens: int | None
    drafter: bool


class FakeEngine:
    """Answers a request in one step: the prompt's ids, cut to max_tokens; a drafted answer takes `ms` a token less."""

    def __init__(self, ms, wrong=False):
        self.ms = ms
        self.wrong = wrong
        self.waiting = []
        self.runs = 0
        self.metrics = type("M", (), {"prefill_seconds": 0.0})()

    def submit(self, request):
        self.waiting.append(request)

    def step(self):
        events = []
        for request in self.waiting:
            self.runs += 1
            drafting = request.drafter and request.draft_tokens != 0
            tokens = (request.ids * 20)[: request.params.max_tokens]
            if drafting and self.wrong:
                tokens = [*tokens[:-1], 99]
            k = 0 if not drafting else request.draft_tokens or 3
            ms = self.ms[k]
            stats = RequestStats(
                new_tokens=len(tokens), first_emitted=1, ttft_s=0.01, decode_s=ms * 1e-3 * (len(tokens) - 1), cycles=4
            )
            stats.drafted = 4 * k
            stats.accepted = 2 * k
            stats.cycles_by_drafted[k], stats.cycles_by_accepted[k] = 4, 2
            events.append(FakeEvent(request.id, tokens, f"text {tokens}", "stop", stats))
        self.waiting = []
        return events


class FakeLLM:
    def __init__(self, ms=None, wrong=False):
        self.engine = FakeEngine(ms or {0: 10.0, 3: 5.0, 4: 8.0}, wrong)
        self._ids = itertools.count()

    def encode_chat(self, text):
        return [len(word) for word in text.split()] or [1]

    def requests(self, ids, params, draft_tokens, drafter, tree=None):
        return [FakeRequest(str(next(self._ids)), ids, params, draft_tokens, drafter)]
