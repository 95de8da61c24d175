"""A grammar of one rule: any of these tokens, and an end token. Masks as a compiled grammar does, so it is exact under drafting."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np


class AllowedTokens:
    """Grammar and matcher in one: the same tokens are allowed at every place, so there is no state to advance."""

    failed: str | None = None

    def __init__(self, allowed: Collection[int], vocab_size: int) -> None:
        self._row = np.zeros(vocab_size, dtype=bool)
        self._row[sorted(allowed)] = True

    def matcher(self) -> AllowedTokens:
        return self

    def masks(self, drafts: Sequence[int]) -> tuple[np.ndarray, int]:
        valid = next((i for i, t in enumerate(drafts) if not self._row[t]), len(drafts))
        return np.tile(self._row, (len(drafts) + 1, 1)), valid

    def bits(self, drafts: Sequence[int]) -> np.ndarray:
        """The same rows packed, 32 tokens a word: int32 [len(drafts) + 1, words]."""
        words = -(-len(self._row) // 32)
        packed = np.zeros(words * 4, dtype=np.uint8)
        whole = np.packbits(self._row, bitorder="little")
        packed[: len(whole)] = whole
        return np.tile(packed.view(np.int32), (len(drafts) + 1, 1))

    def advance(self, tokens: Sequence[int]) -> None:
        pass
