"""A draft model: a small model with the target's vocabulary that drafts token by token, with its own K/V pages.

It first reads the tokens it has not seen, then runs K - 1 steps on its own drafts. A rejected token's K/V is
overwritten, an accepted one's is there. Weights have about four bits (`Backend.coarse`), the head scores a shortlist,
and rounds run in one call if the backend supports that (`Backend.draft_chain`); with filters step by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cache.store import last_rows, ragged
from ..models.config import ModelConfig
from ..models.decoder import TextModel
from ..ops.backend import DraftRequest, DraftResult
from ..ops.decode_io import Proposer
from ..types import Draft, KVPages, KVView
from .acceptance import AcceptanceProfile
from .drafter import DraftBatch, Drafter, DrafterOrigin, DraftTexts, confident_round, padded

if TYPE_CHECKING:
    from ..ops.cpu.cycle import CpuCycle

PAGE = 32
CHUNK = 512  # maximum tokens of one sequence in a pass while catching up
# tokens read in a pass before a round in one call: of one sequence alone, and where others wait for it
READ_ALONE = 256
READ_BESIDE = 64
READ_IN_ROUND = 16  # tokens that such a round reads itself
# tokens that are scored for every text, or a quarter of a vocabulary where that is more (counted: docs/drafting.md)
SHORTLIST_TOKENS = 49_152
MAX_UNLISTED = 512  # and of a text's own, in addition to those
NO_RESULT = DraftResult([], [], 0)
# The controller's prior for a draft model: acceptance by position, and by confidence in 16 bins, as counted on 1,340
# greedy and 640 sampled tokens of Qwen2.5-Coder-0.5B with a stand-in for the 1.5B (benchmarks/cpu_standin.py).
ACCEPTED = (0.72, 0.76, 0.78, 0.81, 0.83)
TRUST = (0.2, 0.25, 0.25, 0.25, 0.32, 0.4, 0.38, 0.38, 0.48, 0.54, 0.55, 0.7, 0.72, 0.74, 0.82, 0.97)


@dataclass
class Track:
    """One sequence: its pages, and the tokens whose K/V they hold (`cached`, by position)."""

    pages: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    num_matching: int = 0  # the first positions, whose cached tokens are the text's; committed tokens do not change
    unlisted: dict[int, None] = field(default_factory=dict)  # its latest tokens that are not on the shortlist, in order
    foreign: bool = False  # it has an id beyond the draft model's vocabulary
    num_scanned: int = 0  # the first tokens, which `scan` has seen

    def match(self, tokens: Sequence[int]) -> int:
        """The number of first positions whose cached K/V is that of this text."""
        end = min(len(self.cached), len(tokens))
        while self.num_matching < end and self.cached[self.num_matching] == tokens[self.num_matching]:
            self.num_matching += 1
        return self.num_matching

    def scan(self, tokens: Sequence[int], is_listed: bytearray) -> None:
        """Look for foreign and unlisted ids among new tokens. is_listed: by id of the draft model's vocabulary."""
        for token in tokens[self.num_scanned :]:
            if token >= len(is_listed):
                self.foreign = True
            elif not is_listed[token]:
                self.unlisted.pop(token, None)  # the latest are last
                self.unlisted[token] = None
        self.num_scanned = len(tokens)
        while len(self.unlisted) > MAX_UNLISTED:
            del self.unlisted[next(iter(self.unlisted))]


class DraftPages:
    """K/V of every layer over one pool of pages. Page 0 stays unused, as in the target's cache."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device):
        specs = {i: config.layers[i].attn for i in config.kv_layers}
        self.shapes = {i: (spec.kv_heads, PAGE, spec.head_dim) for i, spec in specs.items()}
        self.keys: list[Tensor | None] = [None] * len(config.layers)
        self.values: list[Tensor | None] = [None] * len(config.layers)
        self.dtype = dtype
        self.device = device
        self.count = 0
        self.free: list[int] = []
        self.all = KVPages(PAGE, self.keys, self.values, tables={})
        self._grow(64)
        self.free.remove(0)

    def _grow(self, count: int) -> None:
        for side in (self.keys, self.values):
            for i, shape in self.shapes.items():
                more = torch.zeros((count - self.count, *shape), dtype=self.dtype, device=self.device)
                earlier = side[i]
                side[i] = more if earlier is None else torch.cat((earlier, more))
        self.free += range(self.count, count)
        self.count = count

    def reserve(self, track: Track, positions: int) -> None:
        while len(track.pages) * PAGE < positions:
            if not self.free:
                self._grow(2 * self.count)
            track.pages.append(self.free.pop())

    def view(self, tracks: Sequence[Track], starts: Sequence[int], counts: Sequence[int]) -> KVView:
        """Rows starts[b] .. starts[b] + counts[b] - 1 of each sequence; windowed layers use the same table."""
        wide = max(len(t.pages) for t in tracks)
        rows = [t.pages + [0] * (wide - len(t.pages)) for t in tracks]
        table = torch.tensor(rows, dtype=torch.int32, device=self.device)
        places, owners, firsts = ragged(list(zip(starts, counts)))
        positions, row_seq = torch.tensor([places, owners], dtype=torch.int64, device=self.device)
        row_start = torch.tensor(firsts, dtype=torch.int32, device=self.device)
        pages = KVPages(PAGE, self.keys, self.values, tables={"full": table, "sliding": table})
        end = max(start + count for start, count in zip(starts, counts))
        return pages.view(positions, row_seq, row_start, max_rows=max(counts), max_context=end)


def shortlist(vocab: int, always: Iterable[int] = (), padded: bool = False) -> Tensor | None:
    """The tokens that a draft model scores, int64 [N] ascending; None: all. A BPE vocabulary is nearly in the order of
    frequency: its beginning, and the tokens in `always`. padded: it has ids beyond `vocab`, never scored."""
    if vocab < 2 * SHORTLIST_TOKENS:
        return torch.arange(vocab) if padded else None
    listed = {*range(max(SHORTLIST_TOKENS, vocab // 4)), *(t for t in always if 0 <= t < vocab)}
    return torch.tensor(sorted(listed), dtype=torch.int64)


class DraftModel(Drafter):
    name = "draft_model"
    starts_from = "tokens"
    profile = AcceptanceProfile("", ACCEPTED, TRUST, judged=1980)

    def __init__(
        self,
        model: TextModel,
        listed: Tensor | None = None,
        vocab: int | None = None,
        *,
        origin: DrafterOrigin = DrafterOrigin(),
    ):
        """listed: see `shortlist`. vocab: the target's, if padding makes it differ. Ids that only the draft model has
        are never drafted; a text with an id that only the target has gets no drafts."""
        self.model = model
        self.listed = listed
        self.origin = origin
        ops = model.ops
        self.vocab = model.config.vocab_size if vocab is None else vocab
        self.head = model.head if listed is None else ops.coarse(ops.take_rows(model.head, listed))
        self.is_listed = bytearray(model.config.vocab_size)
        for token in listed.tolist() if listed is not None else range(len(self.is_listed)):
            self.is_listed[token] = 1
        self.chain = ops.draft_chain(model, self.head, listed)
        self.host_rounds = self.chain is not None
        self.pages = DraftPages(model.config, ops.kv_dtype(model.dtype), model.device)
        self._last: tuple[list[Track], Tensor] | None = None  # what the last proposal ran: [B, K - 1]

    def proposers_in(self, cycle: CpuCycle) -> dict[str, Proposer]:
        return {self.name: Proposer.HOST} if self.host_rounds else {}

    def propose(self, batch: DraftBatch, k: int) -> Draft:
        if self.chain is not None and batch.sampling.cut is None:
            return self._one_call(batch, k)
        self._remember()
        fit = [i for i, tokens in enumerate(batch.tokens) if self._fits(batch.tracks[i], tokens, k)]
        tokens = batch.last.new_zeros((len(batch.tokens), k))
        if not fit:
            return Draft(tokens, torch.zeros_like(batch.position))
        at = torch.tensor(fit, device=batch.last.device)
        drafted = self._steps(batch, fit, at, k=k)
        lengths = torch.zeros_like(batch.position).index_copy_(0, at, drafted.lengths)
        assert drafted.confidence is not None
        confidence = drafted.confidence.new_zeros(tokens.shape).index_copy_(0, at, drafted.confidence)
        return Draft(tokens.index_copy_(0, at, drafted.tokens), lengths, confidence)

    def new_track(self, request_id: str) -> Track:
        return Track()

    def _fits(self, track: Track, tokens: Sequence[int], k: int) -> bool:
        track.scan(tokens, self.is_listed)
        return not track.foreign and len(tokens) + k <= self.model.config.max_context

    # ---- in one call
    def draft_on_host(self, texts: DraftTexts, k: int, alone: bool) -> list[DraftResult]:
        """A text still being read has no draft: few tokens are read per round, so that no sequence waits long."""
        tokens = texts.tokens
        plans = texts.plans
        sampling = texts.sampling
        assert self.chain is not None
        self._remember()
        fit = [i for i, text in enumerate(tokens) if self._fits(texts.tracks[i], text, k)]
        tracks = [texts.tracks[i] for i in fit]
        self._read(tracks, [tokens[i] for i in fit], k, left=READ_ALONE if alone else READ_BESIDE, enough=READ_IN_ROUND)
        ready = [(i, t) for i, t in zip(fit, tracks) if len(tokens[i]) - t.match(tokens[i]) <= READ_IN_ROUND]
        out = [NO_RESULT] * len(tokens)
        if not ready:
            return out
        behind = []
        for i, track in ready:
            start = min(track.num_matching, len(tokens[i]) - 1)
            request = DraftRequest(tokens[i][start:], start, track.pages, seen=list(track.unlisted))
            if plans is not None:
                request = request._replace(stop=plans[i].stop, drop=plans[i].drop)
            behind.append(request)
        some = sampling if len(ready) == len(tokens) else sampling.select(torch.tensor([i for i, _ in ready]))
        results = self.chain.run(behind, self.pages.all, k, sampling=some, trust=texts.trust)
        for (i, track), was, result in zip(ready, behind, results):
            track.cached[was.start :] = [*was.tokens, *result.tokens[:-1]]
            out[i] = result
        return out

    def _read(self, tracks: Sequence[Track], texts: Sequence[Sequence[int]], k: int, left: int, enough: int) -> None:
        """One pass over tokens before the newest, at most `left`, of texts with more than `enough` unread ones."""
        spans = []
        for track, text in zip(tracks, texts):
            self.pages.reserve(track, len(text) + k)
            done = track.match(text)
            count = min(left, len(text) - 1 - done)
            if len(text) - done > enough and count > 0:
                spans.append((track, text, done, count))
                left -= count
        if spans:
            self._pass(spans, [])  # their outputs are not read

    def _pass(self, spans: Sequence[tuple[Track, Sequence[int], int, int]], ends: Sequence[int]) -> Tensor:
        """Run (start, count) of each text; its track then holds the K/V. Returns the last hidden states of `ends`."""
        view = self.pages.view([s[0] for s in spans], [s[2] for s in spans], [s[3] for s in spans])
        ids = [token for _, text, start, count in spans for token in text[start : start + count]]
        for track, text, start, count in spans:
            track.cached[start:] = text[start : start + count]
        wanted = last_rows(view, ends) if len(ends) < len(ids) else None
        tokens = torch.tensor(ids, dtype=torch.int64, device=self.pages.device)
        return self.model.forward(tokens, view, wanted=wanted).hidden

    def _one_call(self, batch: DraftBatch, k: int) -> Draft:
        results = self.draft_on_host(batch, k, len(batch.tokens) == 1)
        tokens = torch.zeros((len(results), k), dtype=torch.int64)
        confidence = torch.zeros((len(results), k))
        for i, result in enumerate(results):
            tokens[i, : len(result.tokens)] = torch.tensor(result.tokens, dtype=torch.int64)
            confidence[i, : len(result.confidence)] = torch.tensor(result.confidence, dtype=torch.float32)
        return Draft(tokens, torch.tensor([result.length for result in results]), confidence=confidence)

    # ---- step by step
    def _steps(self, batch: DraftBatch, fit: list[int], at: Tensor, k: int) -> Draft:
        tracks = [batch.tracks[i] for i in fit]
        texts = [batch.tokens[i] for i in fit]
        sampling = batch.sampling if len(fit) == len(batch.tokens) else batch.sampling.select(at)
        plans = None if batch.plans is None else [batch.plans[i] for i in fit]
        filtered_batch = replace(
            batch, last=batch.last[at], position=batch.position[at], sampling=sampling, plans=plans
        )
        hidden = self._catch_up(tracks, texts, k)  # [F, H] of the newest token
        scores, names = self._scores([t.unlisted for t in tracks])
        ids = None if names is None else names.expand(len(fit), -1)

        def score(j: int, token: Tensor, cluster_bonus: Tensor | None) -> tuple[Tensor | None, Tensor]:
            if j == 0:
                return ids, scores(hidden)
            view = self.pages.view(tracks, [len(t) + j - 1 for t in texts], [1] * len(fit))
            return ids, scores(self.model.forward(token, view).hidden)

        # A step costs as much as a token of a small model: too much for a token that will hardly be accepted.
        drafted = confident_round(filtered_batch, k, score)
        self._last = (tracks, drafted.tokens[:, :-1])
        return padded(drafted, k)

    def _scores(self, unlisted: Sequence[Collection[int]]) -> tuple[Callable[[Tensor], Tensor], Tensor | None]:
        """A function of hidden [F, H] to logits [F, N], and the token ids [N] (None: all). unlisted: tokens that are
        scored for one sequence each, in addition to the shortlist."""
        model = self.model
        ops = self.model.ops
        cap = self.model.config.softcap
        listed = self.listed
        if listed is None and self.vocab == model.config.vocab_size:
            return model.logits, None
        if listed is None:
            shared = min(self.vocab, model.config.vocab_size)
            return lambda hidden: model.logits(hidden)[:, :shared], torch.arange(shared, device=model.device)
        more = sorted({token for tokens in unlisted for token in tokens})
        if not more:
            return lambda hidden: ops.logits(hidden, self.head, cap), listed
        rows = ops.take_rows(model.head, torch.tensor(more))
        of_others = torch.tensor([[token not in tokens for token in more] for tokens in unlisted])  # [F, M]

        def scored(hidden: Tensor) -> Tensor:
            unlisted_logits = ops.logits(hidden, rows, cap).masked_fill(of_others, -math.inf)
            return torch.cat((ops.logits(hidden, self.head, cap), unlisted_logits), 1)

        return scored, torch.cat((listed, torch.tensor(more)))

    def _catch_up(self, tracks: list[Track], texts: list[Sequence[int]], k: int) -> Tensor:
        """Run the tokens that each sequence's pages do not hold; returns the newest one's hidden states [F, H]."""
        while any(len(text) - track.match(text) > CHUNK for track, text in zip(tracks, texts)):
            self._read(tracks, texts, k, left=CHUNK * len(tracks), enough=CHUNK)
        spans = []
        for track, text in zip(tracks, texts):
            self.pages.reserve(track, len(text) + k)
            start = min(track.num_matching, len(text) - 1)
            spans.append((track, text, start, len(text) - start))
        return self._pass(spans, range(len(spans)))

    def _remember(self) -> None:
        """Record what the last proposal wrote. Only now: the target's result has been awaited, so this wait is free."""
        if self._last is not None:
            tracks, drafted = self._last
            self._last = None
            for track, tokens in zip(tracks, drafted.tolist()):
                track.cached += tokens

    def unread(self, track: Track, tokens: Sequence[int]) -> int:
        """The number of tokens of a text that it has not read, except those that every round reads."""
        return max(0, len(tokens) - len(track.cached) - 2)

    def assume(self, track: Track, tokens: Sequence[int]) -> None:
        """Treat the K/V of `tokens` as present, for timing."""
        self._remember()
        self.pages.reserve(track, len(tokens))
        track.cached[:] = tokens
        track.num_matching = len(tokens)

    def release(self, track: Track) -> None:
        self._remember()
        self.pages.free += track.pages
        track.pages = []

    def check(self, tracks: Sequence[Track]) -> None:
        """Audit: every page but page 0 is free or belongs to one of all tracks."""
        used = [page for track in tracks for page in track.pages]
        if sorted(used + self.pages.free) != list(range(1, self.pages.count)):
            raise AssertionError("draft model: pages leak")
