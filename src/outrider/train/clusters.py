"""The clustered head: the vocabulary in C clusters of equal size, so that a draft step scores only the best few.

`balanced_kmeans` groups the head's rows: k-means where every cluster takes exactly V / C rows, filled best fit first.
Centroids start as the clusters' means and are trained along with the drafter (`cluster_loss`): they must rank the
cluster of the token that the target will choose, which a mean alone does not. Their label is the answer's own token:
the best one in a greedy answer, a drawn one (so, over many, the whole distribution) in a sampled answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..types import require

TOPS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # possible numbers of clusters scored per step
# likely_together: 1/16 of the clusters for the likeliest tokens, then 1/8 and 1/4; the rest last
BANDS = (16, 8, 4)
# k-means of 151,936 rows of 896 numbers took minutes on two cores
CPU_WIDTH = 128
CPU_ITERATIONS = 5
MEANING = 1.0  # likely_together: weight of the head's rows relative to the profiles


@torch.no_grad()
def balanced_kmeans(rows: Tensor, clusters: int, iterations: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    """rows [V, h] -> token_ordering int64 [V] (cluster by cluster, V / C tokens each), the clusters' means [C, h]."""
    vocab = rows.shape[0]
    fits = clusters >= 1 and vocab % clusters == 0
    require(fits, f"{vocab} tokens do not divide into {clusters} clusters of one size")
    size = vocab // clusters
    x = F.normalize(rows.float(), dim=-1)
    generator = torch.Generator().manual_seed(seed)
    # random projection keeps directions and saves a CPU time in proportion
    if not x.is_cuda and x.shape[1] > CPU_WIDTH:
        x = F.normalize(x @ torch.randn(x.shape[1], CPU_WIDTH, generator=generator), dim=-1)
        iterations = min(iterations, CPU_ITERATIONS)
    centres = x[torch.randperm(vocab, generator=generator)[:clusters].to(x.device)]
    every = torch.arange(vocab, device=x.device)
    for _ in range(iterations):  # unbalanced k-means first: cheap, and most of the improvement
        near = closest(x, every, centres)[1]
        sums = torch.zeros_like(centres).index_add_(0, near, x)
        count = torch.bincount(near, minlength=clusters)
        centres = F.normalize(torch.where(count[:, None] > 0, sums, centres), dim=-1)
    owner = fill_clusters(x, centres, size)
    order = owner.argsort(stable=True)
    return order, cluster_means(rows, order, clusters)


def closest(x: Tensor, rows: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Score and index of the best centre for these rows of x."""
    similarities = [(x[part] @ centres.T).max(-1) for part in rows.split(16384)]
    return torch.cat([f.values for f in similarities]), torch.cat([f.indices for f in similarities])


def fill_clusters(x: Tensor, centres: Tensor, size: int) -> Tensor:
    """Assigns every row to one cluster, `size` rows per cluster. In rounds: each row applies to its best cluster with
    free places, and a cluster with more applicants than places keeps the closest. A row near many full clusters ends in
    the best of the others."""
    vocab = x.shape[0]
    clusters = centres.shape[0]
    owner = torch.full((vocab,), -1, dtype=torch.int64, device=x.device)
    room = torch.full((clusters,), size, dtype=torch.int64, device=x.device)
    left = torch.arange(vocab, device=x.device)
    while left.numel():
        open_ids = (room > 0).nonzero()[:, 0]
        score, at = closest(x, left, centres[open_ids])
        want = open_ids[at]
        # by cluster, closest first: the rank inside the cluster decides
        order = score.argsort(descending=True, stable=True)
        order = order[want[order].argsort(stable=True)]
        sorted_want = want[order]
        starts = torch.searchsorted(sorted_want, torch.arange(clusters, device=x.device))
        rank = torch.arange(order.numel(), device=x.device) - starts[sorted_want]
        take = rank < room[sorted_want]
        won = order[take]
        owner[left[won]] = want[won]
        room -= torch.bincount(want[won], minlength=clusters)
        left = left[owner[left] < 0]
    return owner


@torch.no_grad()
def likely_together(
    g: Tensor, head: Tensor, clusters: int, *, bands: tuple[int, ...] = BANDS, width: int = 256
) -> Tensor:
    """token_ordering [V] by use: g [A, h] states of a drafter, q = softmax(g · head). Tokens are cut into bands by
    how likely they are over all states (the first of 1 / bands[0] of the clusters, ...), and inside a band grouped
    by the places where they are likely (√q over the states, projected at random). A context then needs few
    clusters, which k-means of the head's rows, rare and frequent tokens mixed, does not give."""
    vocab = head.shape[0]
    generator = torch.Generator().manual_seed(0)
    size = vocab // clusters
    where = torch.zeros(vocab, width, device=g.device)
    mean = torch.zeros(vocab, device=g.device)
    for part in g.split(4096):
        q = (part @ head.T).float().softmax(-1)  # [chunk, V]
        mean += q.sum(0)
        where += q.sqrt_().T @ torch.randn(part.shape[0], width, generator=generator).to(g.device)
    # the profile of a token that is likely nowhere is noise: its head row decides
    meaning = F.normalize(head.float(), dim=-1)
    features = torch.cat((F.normalize(where, dim=-1), MEANING * meaning), -1)
    rank = mean.argsort(descending=True)
    counts = [max(1, clusters // part_of) for part_of in bands]
    cut = rank.split([size * count for count in (*counts, clusters - sum(counts)) if count > 0])
    return torch.cat([ids[balanced_kmeans(features[ids], len(ids) // size)[0]] for ids in cut])


def cluster_means(rows: Tensor, order: Tensor, clusters: int) -> Tensor:
    """rows [V, h] -> the clusters' means [C, h]."""
    return rows.float()[order].view(clusters, -1, rows.shape[1]).mean(1)


def cluster_of(order: Tensor, clusters: int) -> Tensor:
    """token_ordering [V] -> the cluster of each token [V]."""
    size = order.shape[0] // clusters
    of = torch.empty_like(order)
    of[order] = torch.arange(order.shape[0], device=order.device) // size
    return of


def cluster_loss(
    g: Tensor, centroids: Tensor, label: Tensor, pull: float = 0.0, weight: Tensor | None = None
) -> Tensor:
    """Cross-entropy of the clusters' scores, summed: g [A, h], label [A] clusters, weight [A] (None: 1 each).
    `pull`: share of its gradient that reaches the drafter (0: it is not bent to its index)."""
    fixed = g.detach()
    seen = fixed + pull * (g - fixed) if pull else fixed
    z = (seen @ centroids.T).float()
    if weight is None:
        return F.cross_entropy(z, label, reduction="sum")
    return (F.cross_entropy(z, label, reduction="none") * weight).sum()


@dataclass(frozen=True)
class Recall:
    """One point of the recall / cost curve of a clustered head."""

    top: int
    share: float  # share of the vocabulary that is scored
    recall: float  # how often the full head's choice is among the scored tokens
    weights: int  # weights read by the head: scored rows and centroids


@torch.no_grad()
def recall_curve(g: Tensor, choice: Tensor, centroids: Tensor, order: Tensor) -> list[Recall]:
    """g [A, h] states, choice [A] the full head's tokens."""
    clusters = centroids.shape[0]
    vocab = order.shape[0]
    width = g.shape[1]
    right = cluster_of(order, clusters)[choice]
    size = vocab // clusters
    ranks = []  # number of clusters scored above the right one
    for states, label in zip(g.split(8192), right.split(8192), strict=True):
        z = (states @ centroids.to(g.dtype).T).float()
        ranks.append((z > z.gather(1, label[:, None])).sum(1))
    rank = torch.cat(ranks)
    return [
        Recall(
            top, top * size / vocab, recall=int((rank < top).sum()) / len(g), weights=(top * size + clusters) * width
        )
        for top in TOPS
        if top <= clusters
    ]


def choose_top(curve: list[Recall], need: float = 0.99, most: float = 0.1) -> Recall:
    """The cheapest point that contains the token often enough; else the best one that scores less than `most` of the
    vocabulary."""
    allowed = [r for r in curve if r.share < most]
    what = "less than the allowed share of the vocabulary"
    require(bool(allowed), f"no top of the clustered head scores {what}: more clusters are needed")
    good = [r for r in allowed if r.recall >= need]
    return min(good, key=lambda r: r.weights) if good else max(allowed, key=lambda r: r.recall)


@torch.enable_grad()
def fit_centroids(
    g: Tensor, label: Tensor, centroids: Tensor, steps: int, lr: float, batch: int = 8192, seed: int = 0
) -> Tensor:
    """Centroids fitted to recorded states: g [A, h], label [A] the cluster of the chosen token."""
    generator = torch.Generator().manual_seed(seed)
    c = torch.nn.Parameter(centroids.float().clone())
    optimizer = torch.optim.AdamW([c], lr=lr, weight_decay=0.0)
    for step in range(steps):
        pick = torch.randint(g.shape[0], (min(batch, g.shape[0]),), generator=generator).to(g.device)
        loss = cluster_loss(g[pick].float(), c, label[pick]) / pick.numel()
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        optimizer.step()
    return c.detach()
