"""The clustered head: clusters of one size that hold what belongs together, and centroids that rank them."""

from __future__ import annotations

import pytest
import torch

from outrider.train.clusters import (
    Recall,
    balanced_kmeans,
    choose_top,
    cluster_loss,
    cluster_of,
    fit_centroids,
    likely_together,
    recall_curve,
)
from outrider.types import OutriderError


def blobs(clusters: int = 8, size: int = 6, width: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows around well separated directions, shuffled; and the blob of each row."""
    r = torch.Generator().manual_seed(1)
    centres = torch.linalg.qr(torch.randn(width, width, generator=r))[0][:clusters] * 4
    of = torch.arange(clusters).repeat_interleave(size)[torch.randperm(clusters * size, generator=r)]
    return centres[of] + 0.2 * torch.randn(clusters * size, width, generator=r), of


def test_clusters_are_balanced_permutations() -> None:
    rows = torch.randn(96, 10, generator=torch.Generator().manual_seed(0))
    rows[:40] = rows[0] + 0.01 * rows[:40]  # a crowd that no single cluster can hold
    order, means = balanced_kmeans(rows, 12)
    assert sorted(order.tolist()) == list(range(96))
    assert torch.bincount(cluster_of(order, 12)).tolist() == [8] * 12
    torch.testing.assert_close(means, rows[order].view(12, 8, 10).mean(1))
    with pytest.raises(OutriderError, match="96 tokens do not divide into 7"):
        balanced_kmeans(rows, 7)


def test_what_belongs_together_is_found() -> None:
    rows, of = blobs()
    best = max(
        int(sum(torch.bincount(of[order.view(8, 6)[c]]).max() for c in range(8)))
        for order in (balanced_kmeans(rows, 8, seed=s)[0] for s in range(4))
    )
    assert best >= 42  # of 48 rows, in the best of four starts


def test_recall_is_counted_by_definition() -> None:
    r = torch.Generator().manual_seed(2)
    g, head, centroids, order = (
        torch.randn(50, 6, generator=r), torch.randn(32, 6, generator=r), torch.randn(8, 6, generator=r),
        torch.randperm(32, generator=r),
    )  # fmt: skip
    choice = (g @ head.T).argmax(-1)
    curve = recall_curve(g, choice, centroids, order)
    for point in curve:
        top = (g @ centroids.T).topk(point.top).indices
        inside = [int(choice[a]) in order.view(8, 4)[top[a]].flatten().tolist() for a in range(50)]
        assert point.recall == pytest.approx(sum(inside) / 50)
        assert point.share == point.top / 8 and point.weights == (point.top * 4 + 8) * 6
    assert curve[-1].recall == 1.0


def test_fitting_centroids_finds_more() -> None:
    r = torch.Generator().manual_seed(3)
    head = torch.randn(64, 8, generator=r) * (
        1 + 3 * torch.rand(64, 1, generator=r)
    )  # rows of unlike lengths: means rank badly
    order, means = balanced_kmeans(head, 16)
    g = torch.randn(800, 8, generator=r)
    choice = (g @ head.T).argmax(-1)
    label = cluster_of(order, 16)[choice]
    fitted = fit_centroids(g[:600], label[:600], means, 200, 3e-2, 256)
    before, after = (recall_curve(g[600:], choice[600:], c, order)[0].recall for c in (means, fitted))
    assert after > before + 0.1


def test_the_cheapest_good_top_is_chosen() -> None:
    curve = [
        Recall(1, 0.01, 0.9, 100),
        Recall(2, 0.02, 0.99, 200),
        Recall(4, 0.04, 0.999, 400),
        Recall(16, 0.16, 1.0, 1600),
    ]
    assert choose_top(curve, 0.98).top == 2
    assert choose_top(curve, 0.9999).top == 4  # the best of those allowed
    with pytest.raises(OutriderError, match="more clusters"):
        choose_top(curve[-1:], 0.9)


def test_clusters_by_use_hold_more_of_a_draw() -> None:
    """Catches: profiles of the wrong axis, bands that lose or repeat tokens. Tokens used together need not look
    alike."""
    r = torch.Generator().manual_seed(0)
    topics = 8
    vocab = 128
    clusters = 16
    topic = torch.randint(topics, (vocab,), generator=r)
    head = torch.cat((torch.randn(vocab, 24, generator=r), 3 * torch.nn.functional.one_hot(topic, topics).float()), 1)
    g = torch.cat(
        (
            torch.zeros(400, 24),
            2 * torch.nn.functional.one_hot(torch.randint(topics, (400,), generator=r), topics).float(),
        ),
        1,
    )
    q = (g @ head.T).softmax(-1)

    def held(order: torch.Tensor) -> float:
        return float(q[:, order].view(400, clusters, -1).sum(-1).topk(3).values.sum(-1).mean())

    order = likely_together(g, head, clusters, bands=(2,), width=64)
    assert torch.equal(order.sort().values, torch.arange(vocab))
    assert held(order) > held(balanced_kmeans(head, clusters)[0]) + 0.02


def test_a_pull_reaches_the_drafter() -> None:
    g = torch.randn(5, 4, requires_grad=True)
    c = torch.randn(3, 4, requires_grad=True)
    label = torch.tensor([0, 1, 2, 0, 1])
    cluster_loss(g, c, label).backward()
    assert g.grad is None and c.grad is not None
    cluster_loss(g, c, label, 1.0).backward()
    assert g.grad is not None
    whole = g.grad.clone()
    g.grad = None
    cluster_loss(g, c, label, 0.25).backward()
    torch.testing.assert_close(g.grad, 0.25 * whole)
