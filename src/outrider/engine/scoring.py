"""Scores a given text without generating: log-probabilities of its tokens, or one embedding of the whole text.

A `ScoringJob` processes the text a few rows at a time between engine steps. Next to sequences of other clients these
rows count as those of the client's prompts (`Scheduler.scored_rows`), so texts delay streams no more than prompts do.
It uses a slot and pages of the engine's cache while it runs and frees them at the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache.store import SeqCache
from ..ops.lowrank import Adapter
from ..ops.reference import ReferenceOps
from ..types import OutriderError
from .engine import Engine
from .step_io import logprobs

MAX_SCORED_ROWS = 64  # positions per pass


class ScoringJob(ABC):
    logits = False  # it needs the logits of each position, not its hidden state
    adapter: Adapter | None = None
    client: str = ""  # whose time it takes

    def __init__(self, tokens: Sequence[int], count: int) -> None:
        """Scores the first `count` of the tokens."""
        self.tokens = list(tokens)
        self._count = count
        self._at = 0
        self._cache: SeqCache | None = None

    @abstractmethod
    def take(self, states: Tensor, begin: int) -> None:
        """states [rows, H] after the final norm (or logits [rows, V]), of the tokens from `begin` on."""

    @torch.inference_mode()
    def step(self, engine: Engine) -> bool:
        """Run the next rows; True: there are more. Called on the engine's thread, between two of its steps."""
        store = engine.store
        tokens = self.tokens
        if self._cache is None:
            if not store.free_slots and not engine.scheduler.preempt_paused():
                return True  # another sequence will finish
            self._cache, _ = store.open()
        begin = self._at
        # sliding groups hold a window and the rows that one pass may write
        rows = min(MAX_SCORED_ROWS, store.spec.chunk, self._count - begin)
        if rows > 0:
            rows = engine.scheduler.scored_rows(self.client, rows)
            if rows == 0:
                return True  # others have their turn
            end = begin + rows
            while not store.reserve(self._cache, end, full_positions=self._count):
                if not engine.scheduler.preempt_paused():
                    self.close(engine)
                    room = f"no room in the cache to score {len(tokens)} tokens now"
                    raise OutriderError(f"{room}: try again, or with a shorter text")
            began = engine.clock()
            part = tokens[begin:end]
            result = engine.runner.score(self._cache, part, begin, logits=self.logits, adapter=self.adapter)
            self.take(result, begin)
            store.commit(self._cache, end)
            self._at = end
            engine.scheduler.charge_scored(self.client, engine.clock() - began)
        if self._at < self._count:
            return True
        self.close(engine)
        return False

    def close(self, engine: Engine) -> None:
        if self._cache is not None:
            engine.store.close(self._cache)
            self._cache = None


class Scorer(ScoringJob):
    """The log-probability of each token of a text, and those of the `top` likeliest tokens in its place."""

    logits = True

    def __init__(self, tokens: Sequence[int], top: int) -> None:
        super().__init__(tokens, len(tokens) - 1)  # nothing is needed after the last token
        self._top = top
        # per token {id: logprob}, itself first; the first token has none
        self.entries: list[dict[int, float] | None] = [None]

    def take(self, states: Tensor, begin: int) -> None:
        tokens = self.tokens[begin + 1 : begin + 1 + len(states)]
        rows = ReferenceOps().logprob_rows(states, torch.tensor(tokens, device=states.device), self._top)
        self.entries += logprobs(rows.tolist(), tokens, self._top)


class Embedder(ScoringJob):
    """One vector for a text: the mean of the hidden states after the final norm, normalised."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(tokens, len(tokens))
        self._sum: Tensor | None = None  # [H] float64

    def take(self, states: Tensor, begin: int) -> None:
        part = states.double().sum(0)
        self._sum = part if self._sum is None else self._sum + part

    def vector(self, dimensions: int | None = None) -> list[float]:
        """Its first `dimensions`, normalised again."""
        assert self._sum is not None, "not walked yet"
        mean = self._sum[: dimensions or len(self._sum)]
        out: list[float] = (mean / mean.norm().clamp(min=1e-12)).float().tolist()
        return out
