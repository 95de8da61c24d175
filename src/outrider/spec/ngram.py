"""The n-gram drafter: copies what followed the longest earlier occurrence of the text's last tokens. Torch-free.

As in LZ77, a table gives the latest position of each n-gram and a chain leads to the earlier ones; a few candidates
are compared backwards and the longest wins (on ties the running match, then the latest position).
"""

from __future__ import annotations

from collections.abc import Iterable

NGRAM = "ngram"  # the drafter's name
SIZES = (5, 2)  # n-grams that are looked up, longest first; the last is the shortest match worth a draft
TRIES = 8  # candidates of one size that are compared
REACH = 64  # a match this long is long enough
COMPARED = 16  # tokens that are compared at once


class NgramIndex:
    def __init__(self, tokens: Iterable[int] = ()):
        self.tokens = list(tokens)
        self._indexed = 0  # number of them in the tables: the others are added at the next match
        self._latest: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in SIZES)
        # [i]: where the n-gram that ends at i ended before; -1
        self._earlier: tuple[list[int], ...] = tuple([] for _ in SIZES)
        # the running match: tokens[_place] would come next, _length tokens agree
        self._place = -1
        self._length = 0

    def extend(self, tokens: Iterable[int]) -> None:
        self.tokens += tokens

    def _index(self) -> None:
        tokens = self.tokens
        for at in range(self._indexed, len(tokens)):
            if self._place >= 0 and tokens[self._place] == tokens[at]:
                self._place = self._place + 1
                self._length = self._length + 1
            else:
                self._place = -1
                self._length = 0
            for size, latest, earlier in zip(SIZES, self._latest, self._earlier):
                if at + 1 < size:
                    earlier.append(-1)
                    continue
                gram = tuple(tokens[at + 1 - size : at + 1])
                earlier.append(latest.get(gram, -1))
                latest[gram] = at
        self._indexed = len(tokens)

    def match(self) -> int:
        """Length of the suffix that was found again (0: no match). Any number of tokens can be copied from a match."""
        if self._indexed < len(self.tokens):
            self._index()
            self._match()
        return self._length if self._place >= 0 else 0

    def propose(self, k: int) -> tuple[list[int], int]:
        """k tokens that may follow, and the length of the matching suffix (0: no match, no tokens)."""
        if not self.match():
            return [], 0
        known = self.tokens
        period = len(known) - self._place  # a copy that reaches the end wraps around: the text repeats itself
        return [known[self._place + i % period] for i in range(k)], self._length

    def _match(self) -> None:
        best, place = (min(self._length, REACH), self._place) if self._place >= 0 else (0, -1)
        for size, earlier in zip(SIZES, self._earlier):
            if best >= REACH:
                break
            at = earlier[-1] if earlier else -1
            tries = TRIES
            while at >= 0 and tries:
                length = self._agree(at, size)
                if length > best:
                    best = length
                    place = at + 1
                at = earlier[at]
                tries = tries - 1
            if best >= size:
                break
        if place != self._place:
            self._place = place
            self._length = best

    def _agree(self, at: int, known: int) -> int:
        """How many tokens up to and including `at` equal the end of the text; the last `known` are known to."""
        tokens = self.tokens
        end = len(self.tokens) - 1
        max_length = min(at + 1, REACH)
        length = known
        while length + COMPARED <= max_length and (
            tokens[at - length - COMPARED + 1 : at - length + 1]
            == tokens[end - length - COMPARED + 1 : end - length + 1]
        ):
            length += COMPARED
        while length < max_length and tokens[at - length] == tokens[end - length]:
            length += 1
        return length
