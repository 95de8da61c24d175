"""Log-probabilities of a given text: what the model would have thought of each of its tokens.

A `Scorer` walks through the text a few rows at a time, each walk between two steps of the engine, so that a long text holds up
nobody's stream. It uses a slot and pages of the engine's cache while it runs and gives them back at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cache.store import SeqCache, upload
from ..types import OutriderError
from .engine import Engine

ROWS = 64  # logits of so many positions at once


class Scorer:
    def __init__(self, tokens: Sequence[int], top: int) -> None:
        self._tokens, self._top, self._at = list(tokens), top, 0
        self._cache: SeqCache | None = None
        self.entries: list[dict[int, float] | None] = [None]  # per token {id: logprob}, itself first; nothing stands before the first

    @torch.inference_mode()
    def step(self, engine: Engine) -> bool:
        """Some rows further; True when there are more. On the engine's thread."""
        store, device, tokens = engine.store, engine.device, self._tokens
        if self._cache is None:
            if not store.free_slots:
                return True  # somebody will finish
            self._cache, _ = store.open(tokens, store.spec.page_size, reuse=False)
            if not store.reserve(self._cache, len(tokens)):
                self.close(engine)
                raise OutriderError(f"no room in the cache to score {len(tokens)} tokens now: try again, or with a shorter text")
        begin, end = self._at, min(self._at + ROWS, len(tokens) - 1)
        if begin < end:
            ids = upload(tokens[begin:end], torch.int64, device)
            positions = torch.arange(begin, end, device=device)
            row_start = upload([0, end - begin], torch.int32, device)
            view = store.view(
                upload([self._cache.slot], torch.int64, device), positions, torch.zeros_like(ids), row_start, end - begin, end
            )
            hidden = engine.model.forward(ids, view)
            assert isinstance(hidden, torch.Tensor)
            logp = torch.log_softmax(engine.model.logits(hidden).float(), -1)  # [rows, V]
            best = logp.topk(self._top, dim=-1) if self._top else None
            for row in range(end - begin):
                token = tokens[begin + row + 1]
                entry = {token: float(logp[row, token])}
                if best is not None:
                    entry.update({int(t): float(v) for t, v in zip(best.indices[row], best.values[row])})
                self.entries.append(entry)
            self._at = end
        if self._at < len(tokens) - 1:
            return True
        self.close(engine)
        return False

    def close(self, engine: Engine) -> None:
        if self._cache is not None:
            engine.store.close(self._cache)
            self._cache = None
