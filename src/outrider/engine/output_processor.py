"""The output of one request: detokenised text, and where it ends.

End tokens, the length limit, stop strings and a grammar's failure are checked token by token, and tokens of a cycle
after the end are dropped, so the output does not depend on the draft length.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..types import Matcher, SamplingParams
from .text import Detokenizer, overlap


class Accepted(NamedTuple):
    """The tokens of a cycle that belong to the output: the first len(`texts`) of them."""

    # text emitted with each token; "" while it may be half a character or the start of a stop string
    texts: list[str]
    finish: str | None = None  # stop | length | error
    error: str | None = None
    stopped_by: str | None = None  # the stop string that ended it


class OutputProcessor:
    def __init__(
        self, params: SamplingParams, eos: Collection[int], detok: Detokenizer | None, matcher: Matcher | None
    ) -> None:
        self.matcher = matcher
        self._params = params
        self._detok = detok
        self.end_token_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos))
        self._count = 0
        self._held = ""  # text that might begin a stop string

    def take(self, tokens: Sequence[int], room: int) -> Accepted:
        """`room`: how many more tokens the output may have, at least 1."""
        texts: list[str] = []
        params = self._params
        detok = self._detok
        for token in tokens:
            self._count += 1
            ended = token in self.end_token_ids and self._count >= params.min_tokens
            finish: str | None = None
            if ended:
                finish = "stop"
            elif len(texts) + 1 >= room:
                finish = "length"
            error = None
            stop = None
            if self.matcher is not None:
                self.matcher.advance([token])
                error = self.matcher.failed
                if error is not None:
                    finish = "error"
            # the token that ends an answer is not part of its text
            text = "" if ended or detok is None else detok.push((token,))
            if finish is not None and detok is not None:
                text += detok.flush()
            if params.stop:
                text, stop = self._until_stop(text, finish is not None)
                if stop is not None and error is None:
                    finish = "stop"
            texts.append(text)
            if finish is not None:
                return Accepted(texts, finish=finish, error=error, stopped_by=stop)
        return Accepted(texts)

    def _until_stop(self, text: str, last: bool) -> tuple[str, str | None]:
        """The part of the text that may be emitted, and the stop string that ended it."""
        stops = self._params.stop
        self._held += text
        matches = sorted((self._held.find(stop), stop) for stop in stops if stop in self._held)
        stopped_by: str | None = None
        end = len(self._held)
        if matches:
            end, stopped_by = matches[0]
            if self._params.include_stop:
                end += len(stopped_by)
        elif not last:
            end -= max(overlap(self._held, stop) for stop in stops)
        shown = self._held[:end]
        self._held = self._held[end:]
        return shown, stopped_by
