"""Draft rounds with dummy weights held against a float32 drafter: are the guesses of a fast path those of the plain
arithmetic?

The float32 drafter follows the guesses of the path under test, so one near tie that falls otherwise does not spoil what
comes after it. `short` is how far a guess lies below the best score, in standard deviations of the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpu_rig import Rig, time_ms
from outrider.cache.store import SeqCache
from outrider.engine.capture import Graph
from outrider.models.drafter import MTPNet
from outrider.ops.reference import ReferenceOps, as_tensor
from outrider.spec.drafter import DraftBatch, Drafter, guess_next
from outrider.spec.slot_sampling import sampling_batch
from outrider.types import SamplingParams


def gentle(rig: Rig) -> None:
    """Norms that differ from one, and attention scores as moderate as trained weights keep them: with norms of one a
    softmax picks a single key, and which one is up to rounding. Before anything packs the weights; after the cache was
    filled."""
    rng = torch.Generator(device=rig.device).manual_seed(9)
    for name, w in rig.drafter_weights.items():
        if isinstance(w, Tensor) and w.is_floating_point() and w.dim() < 2:
            noise = torch.randn(w.shape, generator=rng, device=w.device, dtype=torch.float32)
            w.fill_(0.25 if name.endswith("q_norm") else 1.0).mul_(1.0 + 0.1 * noise)
    for keys in rig.store.keys:
        if keys is not None:
            keys.mul_(0.25)


def float32_drafter(rig: Rig) -> MTPNet:
    """The rig's drafter in float32 with the plain ops."""
    assert rig.drafter is not None
    weights = {name: w.float() if w.is_floating_point() else w for name, w in rig.drafter_weights.items()}
    return MTPNet(rig.drafter.model.config, weights, ReferenceOps(), rig.model)


def batch_of(rig: Rig, seqs: list[SeqCache], contexts: int | list[int], params: list[SamplingParams]) -> DraftBatch:
    """The first sequences, one for each of `params`, at one context or at one each."""
    n, device = len(params), rig.device
    lengths = [contexts] * n if isinstance(contexts, int) else contexts
    slots = torch.tensor([s.slot for s in seqs[:n]], device=device)
    length = torch.tensor(lengths, device=device)
    each, start = torch.arange(n, device=device), torch.arange(n + 1, dtype=torch.int32, device=device)
    kv = rig.store.view(slots, length - 1, each, start, 1, max(lengths) + 64)
    rng = torch.Generator(device=device).manual_seed(lengths[0] + n)
    features = torch.randn((n, rig.config.hidden), device=device, generator=rng).to(rig.model.dtype)
    sampling = sampling_batch(params, [[]] * n, [[]] * n, rig.config.vocab_size, device)
    last = (each * 7919 + 11) % rig.config.vocab_size
    return DraftBatch([""] * n, [[]] * n, last, length, features, kv, sampling, rig.ops)


@dataclass(frozen=True)
class Followed:
    short: float  # the worst guess; 0 with noise, where scores cannot be told from noise
    same: float  # share of guesses that are the float32 drafter's own
    g: Tensor  # float32 [B, h]: what the head was given in the last step

    def error(self, g: Tensor) -> float:
        """Relative error of another path's g, the worst row."""
        return float(((g.float() - self.g).norm(dim=1) / self.g.norm(dim=1)).max())


def follow(reference: MTPNet, rig: Rig, batch: DraftBatch, tokens: Tensor) -> Followed:
    """tokens: int64 [B, K], guesses of the path under test."""
    sampling, clusters, ops = batch.sampling, reference.cluster_ids, reference.ops
    features = batch.features.float()
    state, hidden, before = reference.start(batch.kv, features), features[:, : rig.config.hidden], batch.last
    own, short = [], 0.0
    for j, token in enumerate(tokens.T):
        at = batch.position + 1 + j  # the position being guessed
        g, hidden = reference.step(rig.model.embed(before).float(), hidden, state)
        guess, z = guess_next(sampling, at, partial(reference.candidates, g), ops, clusters)
        own.append(guess)
        before = token
        if not sampling.any_sampled:
            # Scored with its own row of the head: where two clusters tie for the last place, a good guess may be no
            # candidate here.
            row = token if clusters is None else (clusters.flatten() == token[:, None]).int().argmax(1)
            score = (as_tensor(reference.head).reshape(-1, g.shape[1])[row] * g).sum(1)
            short = max(short, float(((z.amax(1) - score) / z.std(1)).max()))
    return Followed(round(short, 4), round(float((torch.stack(own, 1) == tokens).float().mean()), 3), g)


class Clock:
    """Microseconds of a draft step inside a graph behind a flush of L2, less the flush."""

    def __init__(self, device: torch.device):
        self.device, self.junk = device, torch.zeros(64 << 20, dtype=torch.float32, device=device)
        self.base = self._us(lambda: None)

    def _us(self, call: Callable[[], object]) -> float:
        def once() -> None:
            self.junk.add_(1.0)
            call()

        return 1e3 * time_ms(Graph(once, self.device).replay, 15, 2)

    def step(self, drafter: Drafter, batch: DraftBatch, k: int) -> float:
        """Of one of the k steps of a round."""
        return (self._us(lambda: drafter.propose(batch, k)) - self.base) / k
