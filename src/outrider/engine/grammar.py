"""Structured output: a grammar becomes token masks that advance along a draft. Torch-free.

Before a verify pass the engine calls `bits(drafts)`: one row per position of the draft and one after it, so that the
output equals that of masked plain decoding. `advance(tokens)` commits.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..types import OutriderError

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Bounded white space: a model may print JSON on one line or indented, but can't spend its budget on blanks.
WHITESPACE = r"[ ]?|\n[ ]{0,16}"
# Processor time of one request's masks: seconds for each, and for all of them together at first. An ordinary mask takes
# 0.02 to 0.5 ms; an ambiguous grammar takes longer with every token, 400 ms after forty of them, and all sequences of
# the batch wait for it.
MASK_SECONDS = 0.002
MASK_BURST = 0.25
REHEARSED = 48  # tokens that a grammar is tested with before it is served


class GrammarMatcher:
    """The state of one request in its grammar. If that turns out too complex, `failed` says why, masks allow end
    tokens only, and the engine ends this request alone."""

    def __init__(self, start: LLMatcher, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._start = start
        self._inner = start.deep_copy()
        self._taken: list[int] = []  # committed tokens, to restore the state after a draft broke the parser
        self._vocab = vocab_size
        self._eos = list(eos_ids)
        # computed so far, and their processor time
        self._masks = 0
        self._spent = 0.0
        self.failed: str | None = None

    @property
    def slow(self) -> bool:
        """Mask computation has exceeded its share of the time; this never resets."""
        return self._spent > MASK_BURST + MASK_SECONDS * self._masks

    def bits(self, drafts: Sequence[int]) -> np.ndarray:
        """int32 [len(drafts) + 1, V / 32], one bit per token: 1 where it is allowed. Row j assumes that drafts[:j] were
        accepted; rows after the first drafted token outside the grammar cannot be reached and allow everything."""
        words = (self._vocab + 31) // 32
        bits = np.full((len(drafts) + 1, words), -1, dtype=np.int32)
        valid = 0
        consumed = 0
        self._fill(bits[0])
        for draft in drafts:
            ended = self.done
            if not self._consume(draft):
                break
            consumed += not ended
            self._fill(bits[valid + 1])
            # too complex after this token: plain decoding may never reach it, so the draft ends before it
            if self.failed is not None:
                bits[valid + 1] = -1
                break
            valid += 1
        if self.failed is not None and valid + consumed and not self.slow:
            self._replay()
        elif consumed and not self._inner.rollback(consumed):
            self._fail(self._inner.get_error())
        return bits

    def advance(self, tokens: Sequence[int]) -> None:
        """Commit emitted tokens. Each was allowed by a mask, so a refusal is a failure."""
        for token in tokens:
            if self.failed is None and not self._consume(token):
                self._fail(self._inner.get_error() or f"token {token} is outside the grammar")
            self._taken.append(token)

    @property
    def done(self) -> bool:
        """The text is complete: only an end token may follow."""
        return self.failed is not None or bool(self._inner.is_stopped())

    def _replay(self) -> None:
        """Restore the state before the draft; a parser that has failed cannot roll back."""
        tokens = self._taken
        self._taken = []
        self._inner = self._start.deep_copy()
        self.failed = None
        self.advance(tokens)

    def _fail(self, why: str) -> None:
        self.failed = self.failed or f"the grammar failed: {first_line(why)}"

    def _consume(self, token: int) -> bool:
        if self.done:
            return token in self._eos  # the text is complete; the end token changes nothing
        began = time.thread_time()
        # leaves the state usable on refusal; consume_token would poison it
        num_consumed = self._inner.try_consume_tokens([token])
        self._spent += time.thread_time() - began
        return bool(num_consumed == 1)

    def _fill(self, row: np.ndarray) -> None:
        if not self.done:
            began = time.thread_time()
            self._inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            self._masks += 1
            self._spent += time.thread_time() - began
            if self._inner.is_error():
                self._fail(self._inner.get_error())
            elif self.slow:
                self._fail("its masks take too long while decoding: make it less ambiguous")
        if self.done:
            row[:] = 0
            for token in self._eos:
                row[token >> 5] |= np.uint32(1 << (token & 31)).astype(np.int32)


@dataclass(frozen=True)
class CompiledGrammar:
    """A compiled grammar. Cheap to share: `matcher()` copies the start state."""

    start: LLMatcher
    vocab_size: int
    eos_ids: tuple[int, ...]
    unenforced: str = ""  # what it leaves out of the schemas that it was written from, for the client

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self.start, self.vocab_size, self.eos_ids)

    def rehearse(self) -> None:
        """Refuse a grammar that compiles fast and has slow masks: follow a few allowed tokens."""
        matcher = self.matcher()
        rng = random.Random(0)
        for _ in range(REHEARSED):
            allowed = unpacked(matcher.bits([]), self.vocab_size)[0]
            if matcher.slow:
                raise OutriderError(f"{matcher.failed}")
            allowed[list(self.eos_ids)] = False
            tokens = np.flatnonzero(allowed)
            if matcher.done or not len(tokens):
                return
            matcher.advance([int(tokens[rng.randrange(len(tokens))])])


class GrammarCompiler:
    """Compiles for one tokenizer. Building it costs about a second for a large vocabulary, so make one and keep it."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        try:
            import llguidance
        except ImportError as e:
            raise OutriderError("structured output needs llguidance: pip install 'outrider[serve]'") from e
        self._ll = llguidance
        self._tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_ids))
        self._vocab = vocab_size
        self._eos = tuple(eos_ids)

    def compile(self, grammar: str) -> CompiledGrammar:
        """A grammar in llguidance's own form. Time and memory are unbounded: the caller must limit them."""
        error = self._ll.LLMatcher.validate_grammar(grammar, self._tokenizer)
        if error and not error.startswith("WARNING"):
            raise OutriderError(f"the grammar can't be compiled: {first_line(error)}")
        start = self._ll.LLMatcher(self._tokenizer, grammar, log_level=0)
        if start.is_error():
            raise OutriderError(f"the grammar can't be compiled: {first_line(start.get_error())}")
        compiled = CompiledGrammar(start, self._vocab, self._eos)
        first = compiled.matcher()
        # some grammars compile but allow nothing, or are too complex at the first step
        some = unpacked(first.bits([]), self._vocab).any()
        if first.failed is not None or not some:
            raise OutriderError(f"the grammar can't be compiled: {first.failed or 'it allows no text at all'}")
        return compiled


class AllowedTokens:
    """A grammar that allows the same tokens at every position, and its own matcher: it has no state to advance."""

    failed: str | None = None

    def __init__(self, allowed: Collection[int], vocab_size: int) -> None:
        row = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
        row[sorted(allowed)] = True
        self._row = np.packbits(row, bitorder="little").view(np.int32)

    def matcher(self) -> AllowedTokens:
        return self

    def bits(self, drafts: Sequence[int]) -> np.ndarray:
        return np.tile(self._row, (len(drafts) + 1, 1))

    def advance(self, tokens: Sequence[int]) -> None:
        pass


def unpacked(bits: np.ndarray, vocab: int) -> np.ndarray:
    """A matcher's bits as bool [rows, V]: True where a token is allowed."""
    return np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool)


def schema_grammar(schema: object) -> str:
    """JSON that validates against `schema`. Keywords llguidance can't enforce are refused, never ignored."""
    import llguidance

    make = llguidance.LLMatcher.grammar_from_json_schema
    try:
        return str(make(json.dumps(schema), overrides={"whitespace_pattern": WHITESPACE}))
    except (ValueError, TypeError, RecursionError) as error:
        raise OutriderError(f"the JSON schema can't be compiled: {first_line(str(error))}") from None


def first_line(text: str) -> str:
    """One informative line: a heading that ends with a colon is joined with the line after it."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" ^~-|")]
    line = " ".join(lines) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return line[:300] or "no reason given"
