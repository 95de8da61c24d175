"""A small model of the same vocabulary drafts, token by token, with pages of its own.

It first catches up on the tokens it has not seen (the whole prompt, the first time), then runs K - 1 steps on its own
guesses. K/V is written at positions: a rejected guess is simply overwritten, an accepted one is already there.
Pages are taken as needed and given back by `forget`; the pool grows by doubling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..cache.store import last_rows
from ..models.config import ModelConfig
from ..types import Draft, KVView, Wanted
from .drafter import DraftBatch, Score, draft_round
from .nets import Target

PAGE = 32
CHUNK = 512  # most tokens of one sequence in a pass while catching up


@dataclass
class Track:
    """One sequence: its pages, and the tokens whose K/V they hold (position by position)."""

    pages: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    sure: int = 0  # positions below this were compared before; committed tokens do not change

    def agree(self, tokens: Sequence[int]) -> int:
        """How many positions hold the K/V of `tokens`."""
        while self.sure < min(len(self.held), len(tokens)) and self.held[self.sure] == tokens[self.sure]:
            self.sure += 1
        return self.sure


class Pages:
    """K/V of every layer over one pool of pages. Page 0 stays unused, as in the target's cache."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device):
        self.shapes = {i: (config.layers[i].attn.kv_heads, PAGE, config.layers[i].attn.head_dim) for i in config.kv_layers}
        self.keys: list[Tensor | None] = [None] * len(config.layers)
        self.values: list[Tensor | None] = [None] * len(config.layers)
        self.dtype, self.device, self.count = dtype, device, 0
        self.free: list[int] = []
        self._grow(64)
        self.free.remove(0)

    def _grow(self, count: int) -> None:
        for side in (self.keys, self.values):
            for i, shape in self.shapes.items():
                wider, old = torch.zeros((count, *shape), dtype=self.dtype, device=self.device), side[i]
                if old is not None:
                    wider[: self.count] = old
                side[i] = wider
        self.free += range(self.count, count)
        self.count = count

    def reserve(self, track: Track, positions: int) -> None:
        while len(track.pages) * PAGE < positions:
            if not self.free:
                self._grow(2 * self.count)
            track.pages.append(self.free.pop())

    def view(self, tracks: Sequence[Track], starts: Sequence[int], counts: Sequence[int]) -> KVView:
        """Rows starts[b] .. starts[b] + counts[b] - 1 of each sequence. Windowed layers use the same table as the others."""
        wide = max(len(t.pages) for t in tracks)
        table = torch.tensor([t.pages + [0] * (wide - len(t.pages)) for t in tracks], dtype=torch.int32, device=self.device)
        firsts = [sum(counts[:b]) for b in range(len(counts) + 1)]
        as_long = lambda values: torch.tensor(values, dtype=torch.int64, device=self.device)  # noqa: E731
        return KVView(
            PAGE, self.keys, self.values, {"full": table, "sliding": table},
            positions=as_long([p for s, n in zip(starts, counts) for p in range(s, s + n)]),
            row_seq=as_long([b for b, n in enumerate(counts) for _ in range(n)]),
            row_start=torch.tensor(firsts, dtype=torch.int32, device=self.device),
            max_rows=max(counts), max_context=max(s + n for s, n in zip(starts, counts)),
        )  # fmt: skip


class DraftModel:
    name = "draft_model"
    taps: tuple[int, ...] = ()

    def __init__(self, model: Target):
        self.model = model
        self.pages = Pages(model.config, model.ops.kv_dtype(model.dtype), model.device)
        self.tracks: dict[str, Track] = {}
        self._last: tuple[list[Track], Tensor] | None = None  # what the last proposal ran: [B, K - 1]

    def propose(self, batch: DraftBatch, k: int) -> Draft:
        self._remember()
        fit = [i for i, tokens in enumerate(batch.tokens) if len(tokens) + k <= self.model.config.max_context]
        tokens = batch.last.new_zeros((len(batch.ids), k))
        if not fit:
            return Draft(tokens, torch.zeros_like(batch.length))
        at = torch.tensor(fit, device=batch.last.device)
        drafted = self._chain(batch, fit, at, k)
        spread = lambda t: None if t is None else t.new_zeros((len(batch.ids), *t.shape[1:])).index_copy_(0, at, t)  # noqa: E731
        lengths = torch.zeros_like(batch.length).index_copy_(0, at, drafted.lengths)
        return Draft(tokens.index_copy_(0, at, drafted.tokens), lengths, spread(drafted.q), spread(drafted.confidence))

    def _chain(self, batch: DraftBatch, fit: list[int], at: Tensor, k: int) -> Draft:
        """Of the sequences `fit`: k tokens [F, k], and q [F, k, V] when they were drawn."""
        tracks = [self.tracks.setdefault(batch.ids[i], Track()) for i in fit]
        texts = [batch.tokens[i] for i in fit]
        sampling = batch.sampling if len(fit) == len(batch.ids) else batch.sampling.select(at)
        own = replace(batch, last=batch.last[at], length=batch.length[at], sampling=sampling)
        hidden = self._catch_up(tracks, texts, k)  # [F, H] of the newest token

        def score(j: int, token: Tensor, lean: Tensor | None) -> tuple[None, Tensor]:
            if not j:
                return None, self.model.logits(hidden)
            view = self.pages.view(tracks, [len(t) + j - 1 for t in texts], [1] * len(fit))
            return None, self.model.logits(self._forward(token, view))

        if batch.sampled:
            drafted, steps = draft_round(own, k, score), k
        else:
            drafted, steps = self._sure(own, k, score, fit)
        self._last = (tracks, drafted.tokens[:, : steps - 1])
        return drafted

    def _sure(self, batch: DraftBatch, k: int, score: Score, fit: list[int]) -> tuple[Draft, int]:
        """A round of guesses with their probabilities, which ends where nobody's guesses are worth another step (plan.Choice); and the
        steps it took. A step costs as much as a token of a small model: far too much for a guess that will hardly be read."""
        size, device = len(fit), batch.last.device
        confidence = torch.zeros((size, k), device=device)
        lengths, path, live = [k] * size, [1.0] * size, [True] * size

        def enough(j: int, token: Tensor, logits: Tensor) -> bool:
            confidence[:, j] = sure = batch.sampling.likely(logits, token)
            if batch.trust is None or batch.stop is None or batch.drop is None:
                return False
            for b, p in enumerate(sure.tolist()):
                if live[b]:
                    path[b] *= batch.trust[min(len(batch.trust) - 1, int(p * len(batch.trust)))]
                    live[b] = path[b] >= max(batch.stop[fit[b]], batch.drop[fit[b]])
                    lengths[b] = k if live[b] else j if path[b] < batch.drop[fit[b]] else j + 1
            return not any(live)

        made = draft_round(batch, k, score, enough=enough).tokens
        tokens = torch.nn.functional.pad(made, (0, k - made.shape[1]))
        return Draft(tokens, torch.tensor(lengths, device=device), confidence=confidence), made.shape[1]

    def _catch_up(self, tracks: list[Track], texts: list[Sequence[int]], k: int) -> Tensor:
        """Run what each sequence's pages do not hold, at least its newest token; returns the hidden states of those."""
        done = [min(t.agree(text), len(text) - 1) for t, text in zip(tracks, texts)]
        for track, text in zip(tracks, texts):
            self.pages.reserve(track, len(text) + k)
        out: list[Tensor | None] = [None] * len(tracks)
        while any(h is None for h in out):
            which = [b for b, h in enumerate(out) if h is None]
            starts = [done[b] for b in which]
            counts = [min(CHUNK, len(texts[b]) - done[b]) for b in which]
            ids = [t for b, s, n in zip(which, starts, counts) for t in texts[b][s : s + n]]
            view = self.pages.view([tracks[b] for b in which], starts, counts)
            ends = [i for i, b in enumerate(which) if starts[i] + counts[i] == len(texts[b])]
            wanted = last_rows(view, ends) if len(ends) < len(ids) else None
            hidden = self._forward(torch.tensor(ids, dtype=torch.int64, device=self.pages.device), view, wanted)
            for b, start, count in zip(which, starts, counts):
                done[b] = start + count
                tracks[b].held[start:] = texts[b][start : start + count]
            for i, state in zip(ends, hidden):
                out[which[i]] = state
        return torch.stack([h for h in out if h is not None])

    def _forward(self, ids: Tensor, kv: KVView, wanted: Wanted | None = None) -> Tensor:
        hidden = self.model.forward(ids, kv, (), wanted)
        assert isinstance(hidden, Tensor)  # no taps were asked for
        return hidden

    def _remember(self) -> None:
        """Note what the last proposal wrote. Only now: the target's answer has been waited for, so this wait is free."""
        if self._last is not None:
            (tracks, drafted), self._last = self._last, None
            for track, tokens in zip(tracks, drafted.tolist()):
                track.held += tokens

    def assume(self, request_id: str, tokens: Sequence[int]) -> None:
        """Take the K/V of `tokens` as held, whatever the pages hold: for timing what a step costs after a prompt, without running one."""
        self._remember()
        track = self.tracks.setdefault(request_id, Track())
        self.pages.reserve(track, len(tokens))
        track.held[:], track.sure = tokens, len(tokens)

    def forget(self, request_id: str) -> None:
        self._remember()
        track = self.tracks.pop(request_id, None)
        if track is not None:
            self.pages.free += track.pages

    def check(self) -> None:
        """Every page but page 0 is free or held by one sequence."""
        held = [p for t in self.tracks.values() for p in t.pages]
        if sorted(held + self.pages.free) != list(range(1, self.pages.count)):
            raise AssertionError("draft model: pages leak")
