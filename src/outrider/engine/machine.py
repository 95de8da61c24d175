"""What every executor runs on: model, cache, drafter, and what it keeps by slot. Runs the prompts of a step, which are the same for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..cache.store import KVStore, SeqCache, upload
from ..spec.choose import SamplingBatch
from ..spec.drafter import Drafter
from ..spec.nets import Target
from .cycle import forward
from .step import Lane, Seq


@dataclass
class Machine:
    model: Target
    store: KVStore
    drafter: Drafter | None
    features: Tensor  # [slots + 1, H·(1 + taps)]: what a draft starts from; the last row is for rows that fill up a batch
    eos: tuple[int, ...]
    clock: Callable[[], float]
    prompt_seconds: float = 0.0  # spent on prompts so far
    scratch: list[SeqCache] = field(default_factory=list)  # sequences that nobody asked for: what steps are timed on
    _sampled: list[Seq] = field(default_factory=list)  # whose parameters `_sampling` holds
    _sampling: SamplingBatch | None = None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps if self.drafter is not None else ()

    @property
    def vocab(self) -> int:
        return self.model.config.vocab_size

    def prompts(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            began = self.clock()
            self._prompt(lane)
            seconds = self.clock() - began
            lane.seq.stats.prefill_s += seconds
            self.prompt_seconds += seconds

    @torch.inference_mode()
    def _prompt(self, lane: Lane) -> None:
        """One chunk of one sequence. Its last hidden state is kept where the first draft starts from it."""
        seq, end = lane.seq, lane.start + lane.count
        ids = upload(seq.tokens[lane.start : end], torch.int64, self.device)
        positions = torch.arange(lane.start, end, device=self.device)
        row_start = upload([0, lane.count], torch.int32, self.device)
        slots = upload([lane.slot], torch.int64, self.device)
        kv = self.store.view(slots, positions, torch.zeros_like(ids), row_start, lane.count, end)
        _, features = forward(self.model, ids, kv, self.taps)
        if end == len(seq.tokens) - 1:
            self.features[lane.slot] = features[-1]

    def sampling(self, seqs: list[Seq]) -> SamplingBatch:
        """Rebuilt only when the batch has changed: `SamplingBatch.commit` keeps it up to date in between."""
        if self._sampling is None or self._sampled != seqs:
            self._sampling = SamplingBatch.build(
                [s.request.params for s in seqs], [s.request.prompt for s in seqs], [s.tokens[s.prompt_len :] for s in seqs],
                self.vocab, self.device, self.eos,
            )  # fmt: skip
            self._sampled = seqs
        return self._sampling

    def scratch_slots(self, count: int, positions: int) -> list[int]:
        """So many scratch sequences with room for `positions`, filled with whatever the cache holds; what does not fit stands on the
        scratch page."""
        while len(self.scratch) < count:
            self.scratch.append(self.store.open([0], self.store.spec.page_size, reuse=False)[0])
        for cache in self.scratch[:count]:
            self.store.reserve(cache, positions)
        return [cache.slot for cache in self.scratch[:count]]

    def close_scratch(self) -> None:
        for cache in self.scratch:
            self.store.close(cache)
        self.scratch.clear()
