"""Sampling state on the device, one row per slot, written when a sequence joins and updated by `commit`, inside
captured steps as well. Wide tables are allocated when the first request needs them; other rows are neutral.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from ctypes import c_int64
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache.store import upload
from ..types import GREEDY_EPS, SamplingParams
from .choose import ANY, OFF, BadWords, Filters, FilterValues, Penalties, SamplingBatch, Sparse, rows_of


def _wide(count: int) -> int:
    """Widths of tables: the next power of two, so that few sizes are captured."""
    return 1 << (count - 1).bit_length() if count else 0


@dataclass(frozen=True)
class SamplingFeatures:
    """Features of a step's sequences beyond temperature and filters; part of a graph's key."""

    penalties: bool = False
    bias: int = 0  # most entries of a sequence
    words: int = 0  # maximum bad words of a sequence,
    reach: int = 0  # and the number of tokens before the last one of the longest
    stops: int = 0  # most tokens that may not come before min_tokens
    logprobs: int = -1  # most likely tokens to report; -1: no logprobs at all
    grammar: bool = False

    @staticmethod
    def of(params: Iterable[SamplingParams], eos: int) -> SamplingFeatures:
        """eos: number of the model's end tokens."""
        asks = NO_FEATURES
        for p in params:
            if not p.processed:
                continue
            words = p.bad_words
            reach = max((max(1, len(word) - 1) for word in words), default=0)
            num_stops = len(p.stop_token_ids) + eos if p.min_tokens > 0 else 0
            asks = SamplingFeatures(
                penalties=asks.penalties or p.penalised,
                bias=max(asks.bias, _wide(len(p.logit_bias))),
                words=max(asks.words, _wide(len(words))),
                reach=max(asks.reach, _wide(reach)),
                stops=max(asks.stops, _wide(num_stops)),
                logprobs=max(asks.logprobs, _logprobs_width(p.logprobs)),
                grammar=asks.grammar or p.grammar is not None,
            )
        return asks


def _logprobs_width(top: int | None) -> int:
    """Tokens that a captured step reports beside the chosen one, for a request of `top`; -1: no logprobs."""
    if top is None:
        return -1
    return next(width for width in (0, 5, 20) if width >= top)


NO_FEATURES = SamplingFeatures()


@dataclass(frozen=True)
class Joining:
    """A sequence that enters a slot, with the output it has so far."""

    slot: int
    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]


class SlotSampling:
    def __init__(self, slots: int, vocab: int, eos: Sequence[int], device: torch.device):
        """slots: rows of every table, including the one for padding rows of a batch."""
        self.slots = slots
        self.vocab = vocab
        self.eos = tuple(eos)
        self.device = device
        full = partial(torch.full, (slots,), device=device)
        self.temperature = full(fill_value=1.0)
        self.sampled = full(fill_value=False)
        top_p = full(fill_value=1.0, dtype=torch.float64)
        self.cut = FilterValues(full(fill_value=OFF), top_p, full(fill_value=-math.inf))
        self.seed, self.min_tokens, self.prompt_len = (full(fill_value=0) for _ in range(3))
        self.penalties: Penalties | None = None
        none = torch.zeros((slots, 0), dtype=torch.int64, device=device)
        self.bias = self.stops = Sparse(none, none.float())
        self.words = BadWords(none.view(slots, 0, 0), none, none.bool(), tail=none)
        self.version = 0  # incremented when tables move: graphs that read the old ones are invalid

    def grow(self, asks: SamplingFeatures) -> None:
        """Allocate tables for these features; existing rows are kept, since sequences may be in flight."""
        if asks != NO_FEATURES:
            with torch.inference_mode(False):  # tables may be written outside of it
                self._grow(asks)

    def _grow(self, asks: SamplingFeatures) -> None:
        if asks.penalties and self.penalties is None:
            zeros = partial(torch.zeros, device=self.device)
            shape = (self.slots, self.vocab)
            rates = (zeros(self.slots) + 1.0, zeros(self.slots), zeros(self.slots))
            self.penalties = Penalties(*rates, zeros(shape, dtype=torch.bool), zeros(shape, dtype=torch.int32))
            self.version += 1
        more = asks.bias - self.bias.ids.shape[1]
        if more > 0:
            self.bias = _widened(self.bias, more)
            self.version = self.version + 1
        more = asks.stops - self.stops.ids.shape[1]
        if more > 0:
            self.stops = _widened(self.stops, more)
            self.version = self.version + 1
        old = self.words
        max_words, reach = self.words.prefix.shape[1:]
        if asks.words > max_words or asks.reach > reach:
            more = max(0, asks.words - max_words)
            far = max(0, asks.reach - reach)
            # words are right-aligned: shorter ones ignore the columns further left
            prefix = F.pad(old.prefix, (far, 0, 0, more), value=ANY)
            tail = F.pad(old.tail, (far, 0), value=-1)
            self.words = BadWords(prefix, F.pad(old.last, (0, more)), F.pad(old.real, (0, more)), tail=tail)
            self.version += 1

    def join(self, rows: Sequence[Joining]) -> None:
        params = [row.params for row in rows]
        where = upload([row.slot for row in rows], torch.int64, self.device)

        def put(table: Tensor, values: Sequence[object]) -> None:
            table.index_copy_(0, where, upload(values, table.dtype, self.device))  # type: ignore[arg-type]

        sampled = [p.temperature >= GREEDY_EPS for p in params]
        drawn = [p if hot else GREEDY for p, hot in zip(params, sampled)]  # filters apply to sampled sequences only
        put(self.temperature, [p.temperature if hot else 1.0 for p, hot in zip(params, sampled)])
        put(self.sampled, sampled)
        put(self.seed, [c_int64(int(p.seed)).value for p in params])
        put(self.cut.top_k, [_top_k(p, self.vocab) for p in drawn])
        put(self.cut.top_p, [p.top_p for p in drawn])
        put(self.cut.min_logp, [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in drawn])
        put(self.min_tokens, [p.min_tokens for p in params])
        put(self.prompt_len, [len(row.prompt) for row in rows])
        to = self.penalties
        if to is not None:
            put(to.repetition, [p.repetition_penalty for p in params])
            put(to.presence, [p.presence_penalty for p in params])
            put(to.frequency, [p.frequency_penalty for p in params])
            for row in rows:
                to.in_prompt[row.slot] = False
                to.counts[row.slot] = 0
                if row.params.penalised:
                    prompt, output = (upload(ids, torch.int64, self.device) for ids in (row.prompt, row.output))
                    to.in_prompt[row.slot].index_fill_(0, prompt, True)
                    to.counts[row.slot].scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        early: list[dict[int, float]] = []  # tokens that would end an output before `min_tokens`
        for p in params:
            ends: set[int] = set()
            if p.min_tokens > 0:
                ends.update(p.stop_token_ids)
                if not p.ignore_eos:
                    ends.update(self.eos)
            early.append(dict.fromkeys(sorted(ends), -math.inf))
        for sparse, pairs in ((self.bias, [p.logit_bias for p in params]), (self.stops, early)):
            width = sparse.ids.shape[1]
            if width > 0:
                put(sparse.ids, [[*some.keys(), *[0] * (width - len(some))] for some in pairs])
                put(sparse.values, [[*some.values(), *[0.0] * (width - len(some))] for some in pairs])
        words = self.words
        max_words, reach = self.words.prefix.shape[1:]
        if max_words > 0:
            tables = zip(*(_word_row(row, max_words, reach) for row in rows))
            for table, values in zip((words.prefix, words.last, words.real, words.tail), tables):
                put(table, values)

    # ---- inside captured steps too: nothing here looks at a value
    def select(self, slots: Tensor, position: Tensor, filters: Filters, asks: SamplingFeatures) -> SamplingBatch:
        """Rows of the sequences in `slots` [B], whose newest tokens are at `position` [B]."""
        temperature, sampled, seed = (t.index_select(0, slots) for t in (self.temperature, self.sampled, self.seed))
        cut = rows_of(self.cut, slots) if filters.any else None
        batch = SamplingBatch(temperature, sampled, seed, filters=filters, cut=cut)
        if asks.penalties and self.penalties is not None:
            batch.penalties = rows_of(self.penalties, slots)
        if asks.bias:
            batch.bias = rows_of(self.bias, slots)
        if asks.words:
            batch.bad_words = rows_of(self.words, slots)
        if asks.stops:
            batch.stops = rows_of(self.stops, slots)
            batch.min_tokens = self.min_tokens.index_select(0, slots)
            batch.out_len = position + 1 - self.prompt_len.index_select(0, slots)
        return batch

    def commit(self, seen: SamplingBatch, slots: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """The first `counts` of `tokens` [B, K + 1] were emitted: update the selected rows and the tables."""
        seen.commit(tokens, counts)
        if seen.penalties is not None and self.penalties is not None:
            self.penalties.counts.index_copy_(0, slots, seen.penalties.counts)
        if seen.bad_words is not None:
            self.words.tail.index_copy_(0, slots, seen.bad_words.tail)


GREEDY = SamplingParams()


def sampling_batch(
    params: Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    vocab: int,
    device: torch.device | str,
    eos: Sequence[int] = (),
) -> SamplingBatch:
    """For sequences without slots."""
    slots = SlotSampling(len(params), vocab, eos, device=torch.device(device))
    asks = SamplingFeatures.of(params, len(eos))
    where = torch.arange(len(params), device=device)
    slots.grow(asks)
    slots.join([Joining(i, *each) for i, each in enumerate(zip(params, prompts, outputs))])
    position = torch.tensor([len(p) + len(o) - 1 for p, o in zip(prompts, outputs)], device=device)
    return slots.select(where, position, filters_of(params, vocab), asks=asks)


def filters_of(params: Iterable[SamplingParams], vocab: int) -> Filters:
    """The union of what these need."""
    drawn = [p for p in params if p.temperature >= GREEDY_EPS]
    top_k = [_top_k(p, vocab) for p in drawn]
    cut = [k for p, k in zip(drawn, top_k) if k != OFF or p.top_p < 1.0]
    return Filters(
        sampled=bool(drawn),
        any=bool(cut) or any(p.min_p > 0 for p in drawn),
        top_k=any(k != OFF for k in top_k),
        top_p=any(p.top_p < 1.0 for p in drawn),
        head=None if OFF in cut else max(cut, default=1),
    )


def _top_k(p: SamplingParams, vocab: int) -> int:
    return p.top_k if 0 < p.top_k < vocab else OFF


def _word_row(row: Joining, max_words: int, width: int) -> tuple[Sequence[object], ...]:
    """A row of each table of a `BadWords` that has `max_words` words of up to `width` tokens before the last."""
    words = row.params.bad_words
    gap = max_words - len(row.params.bad_words)
    line = [*row.prompt[-width:], *row.output[-width:]][-width:]
    return (
        [[ANY] * (width - len(w) + 1) + list(w[:-1]) for w in words] + [[ANY] * width] * gap,
        [w[-1] for w in words] + [0] * gap,
        [True] * len(words) + [False] * gap,
        [-1] * (width - len(line)) + line,
    )


def _widened(old: Sparse, more: int) -> Sparse:
    return Sparse(F.pad(old.ids, (0, more)), F.pad(old.values, (0, more)))
