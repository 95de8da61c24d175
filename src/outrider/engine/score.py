"""What a model makes of a given text, without generating: log-probabilities of its tokens, or one vector for all of it.

A `Walk` goes through the text a few rows at a time, each part between two steps of the engine, so that a long text holds up
nobody's stream. It uses a slot and pages of the engine's cache while it runs and gives them back at the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache.store import SeqCache, upload
from ..types import OutriderError
from .engine import Engine

ROWS = 64  # positions at once


class Walk(ABC):
    def __init__(self, tokens: Sequence[int], count: int) -> None:
        """Reads the first `count` of the tokens."""
        self.tokens, self._count, self._at = list(tokens), count, 0
        self._cache: SeqCache | None = None

    @abstractmethod
    def take(self, engine: Engine, hidden: Tensor, begin: int) -> None:
        """hidden [rows, H] after the final norm, of the tokens from `begin` on."""

    @torch.inference_mode()
    def step(self, engine: Engine) -> bool:
        """Some rows further; True when there are more. On the engine's thread."""
        store, device, tokens = engine.store, engine.device, self.tokens
        if self._cache is None:
            if not store.free_slots:
                return True  # somebody will finish
            self._cache, _ = store.open(tokens, store.spec.page_size, reuse=False)
            if not store.reserve(self._cache, len(tokens)):
                self.close(engine)
                raise OutriderError(f"no room in the cache to score {len(tokens)} tokens now: try again, or with a shorter text")
        begin, end = self._at, min(self._at + ROWS, self._count)
        if begin < end:
            ids = upload(tokens[begin:end], torch.int64, device)
            positions = torch.arange(begin, end, device=device)
            row_start = upload([0, end - begin], torch.int32, device)
            view = store.view(
                upload([self._cache.slot], torch.int64, device), positions, torch.zeros_like(ids), row_start, end - begin, end
            )
            hidden = engine.model.forward(ids, view)
            assert isinstance(hidden, Tensor)
            self.take(engine, hidden, begin)
            self._at = end
        if self._at < self._count:
            return True
        self.close(engine)
        return False

    def close(self, engine: Engine) -> None:
        if self._cache is not None:
            engine.store.close(self._cache)
            self._cache = None


class Scorer(Walk):
    """What the model would have thought of each token, with the `top` likeliest in its place."""

    def __init__(self, tokens: Sequence[int], top: int) -> None:
        super().__init__(tokens, len(tokens) - 1)  # after the last token nothing is asked
        self._top = top
        self.entries: list[dict[int, float] | None] = [None]  # per token {id: logprob}, itself first; nothing stands before the first

    def take(self, engine: Engine, hidden: Tensor, begin: int) -> None:
        logp = torch.log_softmax(engine.model.logits(hidden).float(), -1)  # [rows, V]
        best = logp.topk(self._top, dim=-1) if self._top else None
        for row in range(len(hidden)):
            token = self.tokens[begin + row + 1]
            entry = {token: float(logp[row, token])}
            if best is not None:
                entry.update({int(t): float(v) for t, v in zip(best.indices[row], best.values[row])})
            self.entries.append(entry)


class Embedder(Walk):
    """One vector for a text: the mean of the hidden states after the final norm, of length one."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(tokens, len(tokens))
        self._sum: Tensor | None = None  # [H] float64

    def take(self, engine: Engine, hidden: Tensor, begin: int) -> None:
        part = hidden.double().sum(0)
        self._sum = part if self._sum is None else self._sum + part

    def vector(self, dimensions: int | None = None) -> list[float]:
        """The first `dimensions` of it, made of length one again."""
        assert self._sum is not None, "not walked yet"
        mean = self._sum[: dimensions or len(self._sum)]
        return [float(x) for x in (mean / mean.norm().clamp(min=1e-12)).float()]
