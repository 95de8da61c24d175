"""How the target chooses a token: a deterministic function of (logits, parameters, history, seed, position).

z = process(logits): penalties, logit bias, bad words, grammar, min_tokens, temperature, top-k, top-p, min-p. The token
is argmax(z) at temperature 0, the lowest id on ties, else argmax(z + gumbel(seed, position, token)), an exact draw
from softmax(z). The drafter predicts with the same noise (`guess`), and a draft token is accepted while it equals the
target's choice (`accept`), so the output depends neither on the drafter nor on K or the batch.

Every row is computed from that row alone, to the bit: top-p sums in integers. Nothing here waits for a CUDA device.
Repetition penalty and bad words look at prompt and output, presence and frequency at the output only; all see the
drafted prefix. Logprobs are those of the raw logits. Equal logits are kept or dropped together: top-k keeps z >= the
k-th largest, min-p p >= min_p * max p, top-p a token while the mass of strictly likelier ones (after top-k) is <
top_p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..ops.noise import gumbel
from ..ops.reference import Backend
from ..types import Draft, Verdict

OFF = 1 << 40  # a top-k that keeps everything
ANY = -2  # in a bad word's prefix: matches any token
MASS = float(1 << 40)  # fixed point of top-p; 2^40 · V stays below 2^63
HEAD = 256  # candidates tried before sorting the whole vocabulary (CPU, top-p without top-k)
GUESS_HEAD = 512  # candidates of a drafter's filter: a draft need not be exact


@dataclass
class Penalties:
    repetition: Tensor  # float32 [B]
    presence: Tensor
    frequency: Tensor
    in_prompt: Tensor  # bool [B, V]
    counts: Tensor  # int32 [B, V] occurrences in the output; `commit` adds to it


@dataclass
class BadWords:
    prefix: Tensor  # int64 [B, M, W] all but the last token, right-aligned, ANY in front
    last: Tensor  # int64 [B, M]
    real: Tensor  # bool [B, M] False: padding
    tail: Tensor  # int64 [B, W] the newest W tokens of prompt and output (-1: none); `commit` shifts it


@dataclass
class Sparse:
    """A few (id, value) pairs per sequence, padded with (0, 0.0)."""

    ids: Tensor  # int64 [B, M]
    values: Tensor  # float32 [B, M]


@dataclass(frozen=True)
class Filters:
    """The host's summary of the sampling filters in a batch."""

    sampled: bool = False  # some sequence samples
    any: bool = False  # some sequence filters: by top-k, top-p or min-p
    top_k: bool = False
    top_p: bool = False
    # how many candidates are sure to hold every sequence's top-k; None: some sequence has top-p without top-k
    head: int | None = 1


@dataclass
class FilterValues:
    """The filters of a batch; off where a sequence has none or is greedy."""

    top_k: Tensor  # int64 [B] OFF: all
    top_p: Tensor  # float64 [B]
    min_logp: Tensor  # float32 [B] log(min_p)


Table = TypeVar("Table", Penalties, BadWords, Sparse, FilterValues)


def rows_of(table: Table, which: Tensor) -> Table:
    return type(table)(*(column.index_select(0, which) for column in vars(table).values()))


@dataclass
class SamplingBatch:
    """Parameters and history of B sequences as tensors, rows of a `SlotSampling`; `commit` updates the history."""

    temperature: Tensor  # float32 [B]; 1 where greedy
    sampled: Tensor  # bool [B] sampled, not greedy
    seed: Tensor  # int64 [B]
    filters: Filters
    cut: FilterValues | None = None  # if some sequence filters
    out_len: Tensor | None = None  # int64 [B] tokens generated so far
    penalties: Penalties | None = None
    bias: Sparse | None = None
    bad_words: BadWords | None = None
    stops: Sparse | None = None  # ids that may not come before min_tokens (value -inf)
    min_tokens: Tensor | None = None  # int64 [B]

    @property
    def any_sampled(self) -> bool:
        return self.filters.sampled

    @property
    def looks_back(self) -> bool:
        """True if the choice depends on earlier tokens (penalties, bad words): rows after different drafts differ."""
        return self.penalties is not None or self.bad_words is not None

    # ---- choosing (device) ----------------------------------------------------------------------------------------
    def process(
        self,
        logits: Tensor,  # float32 [R, V]
        row_seq: Tensor,  # int64 [R]
        row_offset: Tensor,  # int64 [R] index inside the sequence's verify block: the token is output out_len + offset
        drafts: Tensor,  # int64 [B, K]; row j sees drafts[:, :j]
        grammar: Tensor | None = None,  # bool [R, V] True: allowed
        lines: Tensor | None = None,  # int64 [R, D] of a tree: row r sees lines[r, :row_offset[r]]
        ops: Backend | None = None,  # its kernel for filters, where it has one
    ) -> Tensor:
        """z [R, V]: the token is drawn from softmax(z). `logits` is never changed; it may be returned itself."""
        z = logits
        if lines is None and self.looks_back:
            lines = drafts[row_seq]
        if self.penalties is not None and lines is not None:
            z = self._penalise(z, self.penalties, row_seq, row_offset=row_offset, lines=lines)
        if self.bias is not None:
            z = z.scatter_add(1, self.bias.ids[row_seq], self.bias.values[row_seq])
        if self.bad_words is not None and lines is not None:
            z = self._forbid(z, self.bad_words, row_seq, row_offset=row_offset, lines=lines)
        if grammar is not None:
            z = z.masked_fill(~grammar, -math.inf)
        if self.stops is not None and self.min_tokens is not None and self.out_len is not None:
            early = self.out_len[row_seq] + row_offset < self.min_tokens[row_seq]  # [R]
            added = torch.where(early[:, None], self.stops.values[row_seq], 0.0)
            biased = z.scatter_add(1, self.stops.ids[row_seq], added)
            # if only a stop token is left (a finished grammar), min_tokens is ignored
            z = biased if grammar is None else torch.where((biased.amax(-1) > -math.inf)[:, None], biased, z)
        if self.any_sampled:
            z = z / self.temperature[row_seq][:, None]
        cut = self.cut
        if cut is None:
            return z
        if ops is not None:
            filtered = ops.filter_logits(z, cut.top_k[row_seq], cut.top_p[row_seq], min_logp=cut.min_logp[row_seq])
            if filtered is not None:
                return filtered
        return self._filter(z, row_seq, cut, exact=True)

    def choose(self, z: Tensor, row_seq: Tensor, position: Tensor, ops: Backend) -> Tensor:
        """Tokens [R]; `position` [R] is the position of the chosen token in its sequence."""
        if not self.any_sampled:
            return ops.argmax(z)
        return ops.gumbel_argmax(z, self.seed[row_seq], position, tokens=None, sampled=self.sampled[row_seq])

    def commit(self, tokens: Tensor, counts: Tensor) -> None:
        """The first `counts[b]` of `tokens` [B, K+1] were emitted. In place, so that a captured graph sees it."""
        if self.penalties is not None:
            new = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
            vocab = self.penalties.counts.shape[1]
            self.penalties.counts.scatter_add_(1, tokens.clamp(0, vocab - 1), new.to(torch.int32))
        if self.bad_words is not None:
            line = torch.cat((self.bad_words.tail, tokens), 1)
            width = self.bad_words.tail.shape[1]
            self.bad_words.tail.copy_(line.gather(1, counts[:, None] + torch.arange(width, device=tokens.device)))
        if self.out_len is not None:
            self.out_len += counts

    def select(self, which: Tensor) -> SamplingBatch:
        """Some of the sequences, as far as a drafter needs them: no history, no masks."""
        cut = None if self.cut is None else rows_of(self.cut, which)
        return SamplingBatch(
            self.temperature[which], self.sampled[which], self.seed[which], filters=self.filters, cut=cut
        )

    # ---- drafting -------------------------------------------------------------------------------------------------
    def cluster_bonus(self, clusters: Tensor | None, position: Tensor, ops: Backend) -> Tensor | None:
        """The bonus that `guess` adds to the scores of a clustered head [B, C]; clusters [C, S]. None also if a filter
        removes unlikely tokens: measured, the bonus then finds the choice less often."""
        if clusters is None or not self.any_sampled:
            return None
        free = self.sampled
        cut = self.cut
        if cut is not None:
            free = free & (cut.top_k == OFF) & (cut.top_p >= 1.0) & (cut.min_logp == -math.inf)
        return ops.cluster_bonus(clusters, self.seed, position, temperature=self.temperature, sampled=free)

    def guess(self, logits: Tensor, position: Tensor, ops: Backend, token_ids: Tensor | None = None) -> Tensor:
        """The drafter's prediction of the target's choice, with the target's own noise: tokens [B] from logits [B, N]
        of the ids `token_ids` [B, N] (None: 0..N-1). Filters are applied, history and masks are not."""
        if not self.any_sampled:
            best = ops.argmax(logits)
        else:
            best = ops.gumbel_argmax(
                self.apply_temperature(logits), self.seed, position, tokens=token_ids, sampled=self.sampled
            )
        return best if token_ids is None else token_ids.gather(1, best[:, None])[:, 0]

    def likely(self, logits: Tensor, places: Tensor) -> Tensor:
        """float32 [B]: the drafter's probability of its tokens, at these columns [B] of its logits [B, N]."""
        z = logits / self.temperature[:, None] if self.any_sampled else logits
        return (z.gather(1, places[:, None])[:, 0] - z.logsumexp(1)).exp()

    def scores(self, logits: Tensor, position: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """The scores that `guess` maximises: float32 [B, N], with filters and, where sampled, noise."""
        if not self.any_sampled:
            return logits
        tokens = torch.arange(logits.shape[1], device=logits.device) if token_ids is None else token_ids
        noise = gumbel(self.seed[:, None], position[:, None], tokens)
        return torch.where(self.sampled[:, None], self.apply_temperature(logits) + noise, logits)

    # ---- the pieces of process ------------------------------------------------------------------------------------
    @staticmethod
    def _penalise(z: Tensor, pen: Penalties, row_seq: Tensor, row_offset: Tensor, lines: Tensor) -> Tensor:
        counts = pen.counts[row_seq]  # [R, V] a copy
        before = torch.arange(lines.shape[1], device=z.device) < row_offset[:, None]  # [R, K]
        counts.scatter_add_(1, lines.clamp(0, z.shape[1] - 1), before.to(torch.int32))
        used = counts > 0
        rate = pen.repetition[row_seq][:, None]
        z = torch.where(used | pen.in_prompt[row_seq], torch.where(z > 0, z / rate, z * rate), z)
        return z - pen.frequency[row_seq][:, None] * counts - pen.presence[row_seq][:, None] * used

    @staticmethod
    def _forbid(z: Tensor, bad: BadWords, row_seq: Tensor, row_offset: Tensor, lines: Tensor) -> Tensor:
        width = bad.tail.shape[1]
        line = torch.cat((bad.tail[row_seq], lines), 1)  # [R, W + K]
        at = row_offset[:, None] + torch.arange(width, device=z.device)
        window = line.gather(1, at.clamp(max=line.shape[1] - 1))  # [R, W] the tokens just before the row's own
        prefix = bad.prefix[row_seq]  # [R, M, W]
        hit = ((prefix == window[:, None, :]) | (prefix == ANY)).all(-1) & bad.real[row_seq]  # [R, M]
        return z.scatter_add(1, bad.last[row_seq], torch.where(hit, -math.inf, 0.0))

    def apply_temperature(self, logits: Tensor) -> Tensor:
        """A drafter's logits [B, N], divided by the temperatures and filtered."""
        z = logits / self.temperature[:, None]
        if self.cut is None:
            return z
        return self._filter(z, torch.arange(z.shape[0], device=z.device), self.cut, exact=False)

    def _filter(self, z: Tensor, row_seq: Tensor, cut: FilterValues, exact: bool) -> Tensor:
        """-inf below each row's floor. The floor depends only on the row's own values."""
        vocab = z.shape[1]
        head = self.filters.head
        if not (self.filters.top_k or self.filters.top_p):
            return z.masked_fill(z < z.amax(-1, keepdim=True) + cut.min_logp[row_seq][:, None], -math.inf)
        if head is None and exact:
            head = HEAD if z.device.type == "cpu" else vocab
        elif head is None:
            head = GUESS_HEAD
        floor, enough = self._floor(z, row_seq, cut, head=min(head, vocab))
        # on the CPU reading the result is free: the whole vocabulary is sorted only if the head was too short
        if exact and self.filters.head is None and head < vocab and not bool(enough.all()):
            floor, _ = self._floor(z, row_seq, cut, head=vocab)
        return z.masked_fill(z < floor[:, None], -math.inf)

    def _floor(self, z: Tensor, row_seq: Tensor, cut: FilterValues, head: int) -> tuple[Tensor, Tensor]:
        """The smallest logit that is kept [R], from the `head` largest; and whether these were enough [R]."""
        # [R, head], largest first
        values, at = z.sort(-1, descending=True) if head == z.shape[1] else z.topk(head, dim=-1)
        k = cut.top_k[row_seq]
        kth = values.gather(1, (k - 1).clamp(max=head - 1)[:, None])[:, 0]
        floor = torch.where(k <= head, kth, -math.inf)
        enough = torch.ones_like(k, dtype=torch.bool)
        best = values[:, :1].clamp(min=torch.finfo(z.dtype).min)  # finite even when all is masked
        if self.filters.top_p:
            mass = ((z - best).exp() * MASS).to(torch.int64).masked_fill_(z < floor[:, None], 0)  # [R, V]
            limit = cut.top_p[row_seq] * mass.sum(-1)  # float64 [R]
            token_mass = mass.gather(1, at)  # [R, head]
            upto = token_mass.cumsum(-1)
            inside = values.masked_fill((upto - token_mass) >= limit[:, None], math.inf).amin(-1)
            on = cut.top_p[row_seq] < 1.0
            floor = torch.where(on, torch.maximum(floor, inside), floor)
            enough = ~on | (upto[:, -1] >= limit)
        return torch.maximum(floor, best[:, 0] + cut.min_logp[row_seq]), (k <= head) | (k == OFF) & enough


def accept(chosen: Tensor, draft: Draft) -> Verdict:
    """`chosen` [B, K+1] are the target's own tokens; drafts count while they equal them."""
    width = draft.tokens.shape[1]
    real = torch.arange(width, device=chosen.device) < draft.lengths[:, None]
    right = (draft.tokens == chosen[:, :width]) & real
    accepted = right.to(torch.int64).cumprod(1).sum(1)
    return Verdict(accepted, chosen, accepted + 1)
