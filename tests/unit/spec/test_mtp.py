"""Drafting with a clustered head: noise leads to the clusters that hold the choice, but never where tokens are drawn
from q."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.drafter import MTPNet
from outrider.ops.reference import ReferenceOps
from outrider.spec.choose import SamplingBatch
from outrider.spec.drafter import DraftBatch
from outrider.spec.mtp import MTPDrafter
from outrider.spec.slot_sampling import sampling_batch
from outrider.types import SamplingParams

C = 64
S = 12
H = 16
OPS = ReferenceOps()


class Head(MTPNet):
    """A drafter whose state is a sum of what it is fed; its clusters are directions with the tokens scattered around
    them."""

    def __init__(self, top: int) -> None:
        r = torch.Generator().manual_seed(3)
        self.ops = OPS  # type: ignore[assignment]
        self.config = SimpleNamespace(cluster_top=top, taps=(), target_hash=None)  # type: ignore[assignment]
        self.centroids = torch.randn(C, H, generator=r)
        self.head = self.centroids[:, None] + 0.4 * torch.randn(C, S, H, generator=r)
        self.cluster_ids = torch.randperm(C * S, generator=r).view(C, S)
        self.turn = torch.linalg.qr(torch.randn(H, H, generator=r))[0]
        self.leans: list[Tensor | None] = []

    def start(self, kv: Any, features: Tensor) -> None:
        return None

    def step(self, token_embedding: Tensor, hidden: Tensor, state: None) -> tuple[Tensor, Tensor]:
        return 0.5 * hidden + token_embedding, hidden @ self.turn

    def candidates(self, g: Tensor, cluster_bonus: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        self.leans.append(cluster_bonus)
        return super().candidates(g, cluster_bonus)


def batch(temperature: float, size: int = 200) -> DraftBatch:
    r = torch.Generator().manual_seed(4)
    params = [SamplingParams(temperature=temperature, seed=s) for s in range(size)]
    sampling = sampling_batch(params, [[]] * size, [[]] * size, C * S, "cpu")
    last = torch.randint(0, C * S, (size,), generator=r)
    length = torch.arange(size) + 3
    features = torch.randn(size, H, generator=r)
    return DraftBatch([""] * size, [[]] * size, sampling, last, length, features, None, OPS)  # type: ignore[arg-type]


def propose(head: Head, batch: DraftBatch) -> Any:
    table = 0.1 * torch.randn(C * S, H, generator=torch.Generator().manual_seed(5))
    target = SimpleNamespace(config=SimpleNamespace(hidden=H), embed=lambda token: table[token])
    return MTPDrafter(head, target).propose(batch, 3)


def test_noise_leads_to_the_clusters_that_hold_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = batch(1.0)
    want = propose(Head(C), sampling).tokens  # every cluster: the full head
    led = propose(Head(6), sampling).tokens
    monkeypatch.setattr(SamplingBatch, "cluster_bonus", lambda *_: None)
    plain = propose(Head(6), sampling).tokens
    assert torch.equal(propose(Head(C), sampling).tokens, want)
    right, before = (float((tokens[:, 0] == want[:, 0]).float().mean()) for tokens in (led, plain))
    assert right > before + 0.1 and right > 0.8, (right, before)


def test_only_sampled_drafts_get_the_noise_of_clusters() -> None:
    sampled = Head(6)
    greedy = Head(6)
    propose(sampled, batch(1.0))
    propose(greedy, batch(0.0))
    assert greedy.leans == [None] * 3
    assert len(sampled.leans) == 3 and all(bonus is not None and bonus.any() for bonus in sampled.leans)
