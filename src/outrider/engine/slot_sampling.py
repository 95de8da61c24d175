"""What choosing needs of a sequence beside temperature and filters, on the device and by slot: penalties with their
counts, bias, forbidden words, the least number of tokens.

A row is written when a sequence joins and kept up to date by the graphs themselves, so that a request with penalties
runs in the same graph as its neighbours. Tables are made when the first request asks for them; the row of a sequence
that asks for nothing is neutral.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..spec.choose import ANY, BadWords, Penalties, SamplingBatch, Sparse, min_tokens_mask, sparse_row, word_row
from ..types import SamplingParams


def _wide(count: int) -> int:
    """Widths of tables: the next power of two, so that few sizes are captured."""
    return 1 << (count - 1).bit_length() if count else 0


@dataclass(frozen=True)
class SamplingFeatures:
    """What the sequences of a step ask for beside temperature and filters; part of what a graph is captured for."""

    penalties: bool = False
    bias: int = 0  # most entries of a sequence
    words: int = 0  # most forbidden words of a sequence,
    reach: int = 0  # and how many tokens stand before the last one of the longest
    stops: int = 0  # most tokens that may not come before min_tokens
    logprobs: int = -1  # most likely tokens to report; -1: no logprobs at all
    grammar: bool = False

    @staticmethod
    def of(params: Iterable[SamplingParams], eos: int) -> SamplingFeatures:
        """eos: how many end tokens the model has."""
        asks = NO_FEATURES
        for p in params:
            if not p.processed:
                continue
            words = p.bad_words
            asks = SamplingFeatures(
                asks.penalties or p.penalised,
                max(asks.bias, _wide(len(p.logit_bias))),
                max(asks.words, _wide(len(words))),
                max(asks.reach, _wide(max((max(1, len(w) - 1) for w in words), default=0))),
                max(asks.stops, _wide(len(p.stop_token_ids) + eos) if p.min_tokens else 0),
                max(
                    asks.logprobs, -1 if p.logprobs is None else 0 if p.logprobs == 0 else 5 if p.logprobs <= 5 else 20
                ),
                asks.grammar or p.grammar is not None,
            )
        return asks


NO_FEATURES = SamplingFeatures()


class SlotSamplingState:
    def __init__(self, slots: int, vocab: int, eos: Sequence[int], device: torch.device):
        """slots: rows of every table, that of rows which fill up a batch included."""
        self.slots, self.vocab, self.eos, self.device = slots, vocab, tuple(eos), device
        self.penalties: Penalties | None = None
        self.bias = self.stops = Sparse(torch.zeros((slots, 0), dtype=torch.int64), torch.zeros((slots, 0)))
        none = torch.zeros((slots, 0), dtype=torch.int64)
        self.words = BadWords(none[:, :, None], none, none.bool(), none)
        self.min_tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.prompt_len = torch.zeros(slots, dtype=torch.int64, device=device)

    def grow(self, asks: SamplingFeatures) -> bool:
        """Make room for what is asked; what the rows hold is kept, since sequences may be in flight. True: tables have
        moved, so that no graph that reads them holds any more."""
        ints = lambda *shape: torch.zeros((self.slots, *shape), dtype=torch.int64, device=self.device)  # noqa: E731
        floats = lambda value=0.0: torch.full((self.slots,), value, device=self.device)  # noqa: E731
        grown = False
        if asks.penalties and self.penalties is None:
            grown, wide = True, (self.slots, self.vocab)
            seen, counts = (torch.zeros(wide, dtype=kind, device=self.device) for kind in (torch.bool, torch.int32))
            self.penalties = Penalties(floats(1.0), floats(), floats(), seen, counts)
        if asks.bias > self.bias.ids.shape[1]:
            grown, self.bias = True, _widened(self.bias, ints(asks.bias))
        if asks.stops > self.stops.ids.shape[1]:
            grown, self.stops = True, _widened(self.stops, ints(asks.stops))
        old, (most, reach) = self.words, self.words.prefix.shape[1:]
        if asks.words > most or asks.reach > reach:
            count, far = max(asks.words, most), max(asks.reach, reach)
            new = BadWords(ints(count, far) + ANY, ints(count), ints(count).bool(), ints(far) - 1)
            if most:  # words end at the right: what a longer one would see further left is not theirs to know
                new.prefix[:, :most, far - reach :], new.tail[:, far - reach :] = old.prefix, old.tail
                new.last[:, :most], new.real[:, :most] = old.last, old.real
            grown, self.words = True, new
        return grown

    def join(self, slot: int, p: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
        """A sequence stands in this slot from now on, with so many tokens of its answer already there."""
        put = lambda values, dtype: torch.tensor(values, dtype=dtype, device=self.device)  # noqa: E731
        if self.penalties is not None:
            own = SamplingBatch.build([p], [prompt], [output], self.vocab, self.device).penalties
            to = self.penalties
            rates = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
            for table, value in zip((to.repetition, to.presence, to.frequency), rates):
                table[slot] = value
            to.in_prompt[slot] = False if own is None else own.in_prompt[0]
            to.counts[slot] = 0 if own is None else own.counts[0]
        for sparse, pairs in (
            (self.bias, p.logit_bias),
            (self.stops, min_tokens_mask(p, self.eos) if p.min_tokens else {}),
        ):
            if sparse.ids.shape[1]:
                ids, values = sparse_row(pairs, sparse.ids.shape[1])
                sparse.ids[slot], sparse.values[slot] = put(ids, torch.int64), put(values, torch.float32)
        words, (most, reach) = self.words, self.words.prefix.shape[1:]
        if most:
            row = word_row(p, prompt, output, most, reach)
            for table, line in zip((words.prefix, words.last, words.real, words.tail), row):
                table[slot] = put(line, table.dtype)
        self.min_tokens[slot] = p.min_tokens
        self.prompt_len[slot] = len(prompt)

    # ---- inside a graph ---------------------------------------------------------------------------------------------
    def select(self, sampling: SamplingBatch, slots: Tensor, length: Tensor, asks: SamplingFeatures) -> SamplingBatch:
        """`sampling` [B] with the history of the sequences in `slots` [B], whose newest tokens stand at `length`
        [B]."""
        take = lambda t: t.index_select(0, slots)  # noqa: E731
        pen, words = self.penalties, self.words
        of_pen = (
            (pen.repetition, pen.presence, pen.frequency, pen.in_prompt, pen.counts)
            if asks.penalties and pen is not None
            else None
        )
        return replace(
            sampling, out_len=length + 1 - take(self.prompt_len),
            penalties=Penalties(*map(take, of_pen)) if of_pen is not None else None,
            bias=Sparse(take(self.bias.ids), take(self.bias.values)) if asks.bias else None,
            bad_words=BadWords(*map(take, (words.prefix, words.last, words.real, words.tail))) if asks.words else None,
            stops=Sparse(take(self.stops.ids), take(self.stops.values)) if asks.stops else None,
            min_tokens=take(self.min_tokens) if asks.stops else None,
        )  # fmt: skip

    def commit(self, seen: SamplingBatch, slots: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """The first `counts` of `tokens` [B, K + 1] were emitted: what `select` gave, and from it the tables, move
        on."""
        seen.commit(tokens, counts)
        if seen.penalties is not None and self.penalties is not None:
            self.penalties.counts.index_copy_(0, slots, seen.penalties.counts)
        if seen.bad_words is not None:
            self.words.tail.index_copy_(0, slots, seen.bad_words.tail)


def _widened(old: Sparse, ids: Tensor) -> Sparse:
    """The same pairs in a wider table; `ids` is the new one's, all 0."""
    new, width = Sparse(ids, ids.float()), old.ids.shape[1]
    if width:
        new.ids[:, :width], new.values[:, :width] = old.ids, old.values
    return new
