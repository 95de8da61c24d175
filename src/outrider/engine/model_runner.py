"""State that all executors share: the model, the K/V cache, the drafter, sampling parameters and, by slot, the hidden
states that drafts start from. `ModelRunner.prompts` runs the prompt chunks of a step for every executor."""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cache.store import KVStore, SeqCache, last_rows, ragged, upload
from ..models.decoder import TextModel
from ..ops.lowrank import Adapter
from ..spec.choose import SamplingBatch
from ..spec.drafter import Drafter
from ..spec.slot_sampling import Joining, SamplingFeatures, SlotSampling, filters_of
from ..types import KVView, OutputRows, SoftSpan
from .adapters import AdapterPool
from .metrics import Metrics
from .step import PromptChunk, PromptChunks, Sequence

if TYPE_CHECKING:
    from ..ops.cpu.block import UnreadRows

log = logging.getLogger("outrider")


def packed(chunks: PromptChunks, max_rows: int, replay_rows: int) -> list[list[PromptChunk]]:
    """Groups of chunks that share a pass of at most `max_rows` rows. Chunks of more than `replay_rows` have other
    attention kernels, so they come last, in groups of their own. A single chunk may be longer than a pass."""
    groups = list[list[PromptChunk]]()
    num_rows = 0
    previous_is_long: bool | None = None
    for chunk in sorted(chunks, key=lambda chunk: chunk.num_tokens > replay_rows):
        is_long = chunk.num_tokens > replay_rows
        if is_long != previous_is_long or num_rows + chunk.num_tokens > max_rows:
            groups.append([])
            num_rows = 0
        groups[-1].append(chunk)
        num_rows += chunk.num_tokens
        previous_is_long = is_long
    return groups


@dataclass
class ModelRunner:
    model: TextModel
    store: KVStore
    drafter: Drafter | None
    features: Tensor  # [slots + 1, H·(1 + taps)]: the drafter's inputs; the last row is for padding rows
    eos: tuple[int, ...]
    clock: Callable[[], float]
    metrics: Metrics
    prompt_seconds: float = 0.0  # spent on prompts so far
    divided: bool = False  # other processes run the same steps: if one of them fails, all must fail
    scratch: list[SeqCache] = field(default_factory=list)  # sequences without a request, for timing steps
    adapters: AdapterPool | None = None  # None: this engine has no adapters
    unread: UnreadRows | None = None  # rows of C steps that a block drafter has not read yet
    # spans the scoring of a text, with the arguments of `score`
    scoring: Callable[[SeqCache, list[int], int, bool], AbstractContextManager[None]] | None = None
    slot_sampling: SlotSampling = field(init=False)
    _sampled: list[Sequence] = field(default_factory=list)  # the last batch,
    batch_sampling: SamplingBatch | None = None  # and its rows; None: a graph has updated them

    def __post_init__(self) -> None:
        self.slot_sampling = SlotSampling(self.features.shape[0], self.vocab, self.eos, device=self.device)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps if self.drafter is not None else ()

    @property
    def vocab(self) -> int:
        return self.model.config.vocab_size

    def prompts(self, chunks: PromptChunks, run: Callable[[PromptChunks], None] | None = None, most: int = 0) -> None:
        """Run prompt chunks, packed into few passes, each with the same bits as alone: up to the number of independent
        rows, and long chunks only with long ones, which have other attention kernels. run: another way to run a pass,
        of at most `most` rows (0: as many as are independent)."""
        can = self.model.ops.capabilities
        texts = list[PromptChunk]()
        for chunk in chunks:
            span = chunk.seq.span_at(chunk.start) if chunk.seq.request.spans else None
            if span is None:
                texts.append(chunk)
            else:
                self._timed([chunk], partial(self.run_span, chunk, span))
        max_rows = min(most or can.independent_rows, can.independent_rows)
        for group in packed(texts, max_rows, can.replay_rows):
            self._timed(group, partial(run or self.run, group))

    def _timed(self, chunks: PromptChunks, run: Callable[[], None]) -> None:
        """Run a pass over these chunks and divide its time among their sequences."""
        began = self.clock()
        run()
        seconds = self.clock() - began
        self.prompt_seconds += seconds
        num_rows = sum(chunk.num_tokens for chunk in chunks)
        for chunk in chunks:
            chunk.seq.stats.prefill_s += seconds * chunk.num_tokens / num_rows

    @torch.inference_mode()
    def run(self, chunks: PromptChunks) -> None:
        """One forward pass over some chunks. A prompt's last hidden state is kept if its first draft starts from it."""
        ids = [token for chunk in chunks for token in chunk.seq.tokens[chunk.start : chunk.start + chunk.num_tokens]]
        kv = self.view([chunk.slot for chunk in chunks], [(chunk.start, chunk.num_tokens) for chunk in chunks])
        ends = [i for i, chunk in enumerate(chunks) if chunk.wanted]
        last = last_rows(kv, ends)
        model = self.model_for([chunk.seq.adapter for chunk in chunks], [chunk.num_tokens for chunk in chunks])
        features = self.forward(upload(ids, torch.int64, self.device), kv, last, chunks=chunks, model=model)
        if ends:
            where = upload([chunks[i].slot for i in ends], torch.int64, self.device)
            self.features.index_copy_(0, where, features)

    def forward(
        self,
        ids: Tensor,
        kv: KVView,
        last: OutputRows,
        chunks: PromptChunks = (),
        model: TextModel | None = None,
        following: Tensor | None = None,
    ) -> Tensor:
        """A prefill pass: the drafter's inputs at the rows `last`. A drafter with its own K/V reads all rows, and in a
        captured pass the next token of each (`following`). model: with the adapters of the rows."""
        model = model or self.model
        if self.drafter is None or not self.drafter.kv_specs:
            return model.forward(ids, kv, self.taps, wanted=last).features
        out = model.forward(ids, kv, self.taps)
        if following is None:
            self.extend([chunk.seq for chunk in chunks], out.streams, kv, following=self.next_tokens(chunks))
        else:
            self.drafter.extend(out.streams, kv, following)
        return out.features.index_select(0, last.rows)

    def extend(self, seqs: abc.Sequence[Sequence], streams: tuple[Tensor, ...], kv: KVView, following: Tensor) -> None:
        """Let a drafter with its own K/V read a pass. following [R]: the next token of each row. If it fails, these
        sequences continue without it."""
        assert self.drafter is not None
        try:
            self.drafter.extend(streams, kv, following)
        except Exception as error:
            for member in self.drafter.members:
                if member.kv_specs:
                    self.switch_off(member.name, seqs, error)

    def next_tokens(self, chunks: PromptChunks) -> Tensor:
        """[R]: the token after each row of these prompt chunks."""
        tokens: list[int] = []
        for chunk in chunks:
            tokens += chunk.seq.tokens[chunk.start + 1 : chunk.start + chunk.num_tokens + 1]
        return upload(tokens, torch.int64, self.device)

    def join_unread(self, seqs: abc.Sequence[Sequence]) -> None:
        """Ensure that `unread` holds nothing of a slot's earlier sequence."""
        if self.unread is None:
            return
        for seq in seqs:
            cache = seq.active_cache
            if not cache.unread_joined:
                cache.unread_joined = True
                self.unread.assume(cache.slot, 0, 0)

    def catch_up(self, seqs: abc.Sequence[Sequence]) -> None:
        """Feed a block drafter the rows that C steps deferred: before it drafts operation by operation, before a step
        that it reads at once, and before pages are shared."""
        if self.unread is not None:
            self.join_unread(seqs)
            self.store.flush()
            self.unread.read([seq.active_cache.slot for seq in seqs])

    def switch_off(self, drafter: str, seqs: abc.Sequence[Sequence], error: Exception) -> None:
        """Switch off a drafter that failed on these sequences. They continue without it."""
        affected = [seq for seq in seqs if drafter not in seq.failed_drafters]
        if not affected:
            return  # it fails in every pass
        reason = f"{drafter}: {type(error).__name__}: {error}".splitlines()[0]
        log.warning("drafter switched off for %d request(s): %s", len(affected), reason)
        for seq in affected:
            seq.failed_drafters.add(drafter)
            earlier = seq.stats.drafter_off
            seq.stats.drafter_off = reason if earlier is None else f"{earlier}; {reason}"
        self.metrics.drafter_failures += 1

    def model_for(self, adapters: abc.Sequence[Adapter | None], counts: abc.Sequence[int]) -> TextModel:
        """The model for a pass in which sequence i has `counts[i]` rows and uses `adapters[i]`."""
        if self.adapters is None or all([adapter is None for adapter in adapters]):
            return self.model
        return self.model.ops.adapted(self.model, adapters, counts) or self.adapters.model_for(adapters, counts)

    @torch.inference_mode()
    def run_span(self, chunk: PromptChunk, span: SoftSpan) -> None:
        """Run the rows of one image in a pass of their own: so its bits depend on no other sequence."""
        kv = self.view([chunk.slot], [(chunk.start, chunk.num_tokens)])
        rows = chunk.start - span.start
        soft = span.soft_tokens[rows : rows + chunk.num_tokens].to(self.device, self.model.dtype)
        end = span.end if span.bidirectional else None
        last = last_rows(kv, [0] if chunk.wanted else [])
        reads_all_rows = self.drafter is not None and bool(self.drafter.kv_specs)
        model = self.model
        adapted = chunk.seq.adapter is not None
        if self.adapters is not None and adapted:
            model = self.adapters.model_for([chunk.seq.adapter], [chunk.num_tokens])
        out = model.forward_soft(
            soft, span.pad_id, kv, taps=self.taps, wanted=None if reads_all_rows or adapted else last, end=end
        )
        if reads_all_rows and self.drafter is not None:
            self.extend([chunk.seq], out.streams, kv, following=self.next_tokens([chunk]))
        if chunk.wanted:
            self.features[chunk.slot] = out.features[-1]

    @torch.inference_mode()
    def score(
        self, cache: SeqCache, tokens: list[int], begin: int, logits: bool, adapter: Adapter | None = None
    ) -> Tensor:
        """Hidden states [R, H] or logits [R, V] of one sequence's tokens from `begin` on; their K/V is written."""
        with nullcontext() if self.scoring is None else self.scoring(cache, tokens, begin, logits):
            view = self.view([cache.slot], [(begin, len(tokens))])
            model = self.model_for([adapter], [len(tokens)])
            hidden = model.forward(upload(tokens, torch.int64, self.device), view).hidden
            return self.model.logits(hidden) if logits else hidden

    def view(self, slots: list[int], spans: list[tuple[int, int]]) -> KVView:
        """The K/V view for a pass over (first position, count) of the sequences in these slots."""
        device = self.device
        start, count = spans[0]
        if len(spans) == 1:
            positions = torch.arange(start, start + count, device=device)
            starts = [0, count]
            row_seq = torch.zeros_like(positions)
        else:
            places, owners, starts = ragged(spans)
            positions = upload(places, torch.int64, device)
            row_seq = upload(owners, torch.int64, device)
        return self.store.view(
            upload(slots, torch.int64, device),
            positions,
            row_seq,
            row_start=upload(starts, torch.int32, device),
            max_rows=max(count for _, count in spans),
            max_context=max(start + count for start, count in spans),
        )

    def sampling(self, seqs: list[Sequence]) -> SamplingBatch:
        """Gathered only when the batch has changed: `SlotSampling.commit` keeps it up to date in between."""
        if self.batch_sampling is None or self._sampled != seqs:
            params = [seq.request.params for seq in seqs]
            asks = SamplingFeatures.of(params, len(self.eos))
            self.join(seqs, asks)
            slots = torch.tensor([seq.active_cache.slot for seq in seqs], device=self.device)
            position = torch.tensor([len(seq.tokens) - 1 for seq in seqs], device=self.device)
            self.batch_sampling = self.slot_sampling.select(slots, position, filters_of(params, self.vocab), asks=asks)
            self._sampled = seqs
        return self.batch_sampling

    def join(self, seqs: abc.Sequence[Sequence], asks: SamplingFeatures) -> None:
        """Ensure that `slot_sampling` has the rows of these sequences, with all features they need."""
        fresh = []
        self.slot_sampling.grow(asks)
        for seq in seqs:
            cache = seq.active_cache
            if not cache.sampling_joined:
                cache.sampling_joined = True
                params = seq.request.params
                assert not (seq.num_inflight_tokens and params.altered), "its history joined with its first step"
                fresh.append(Joining(cache.slot, params, seq.request.prompt, output=seq.tokens[seq.prompt_len :]))
        if fresh:
            self.slot_sampling.join(fresh)

    def scratch_slots(self, count: int, positions: int) -> list[int]:
        """Scratch sequences with `positions` reserved and any content; what does not fit uses the scratch page."""
        while len(self.scratch) < count:
            self.scratch.append(self.store.open()[0])
        ahead = self.drafter.block_rows if self.drafter is not None else 0
        for cache in self.scratch[:count]:
            self.store.reserve(cache, positions + ahead)
        return [cache.slot for cache in self.scratch[:count]]

    def close_scratch(self) -> None:
        for cache in self.scratch:
            self.store.close(cache)
        self.scratch.clear()
