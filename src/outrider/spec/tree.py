"""Builds draft trees from the drafter's own scores.

Level by level: the likeliest nodes are scored together, and the three best tokens after each (by the *noisy* scores
when sampling) become its children. A node's probability is the product of the confidences on its path, mapped to their
acceptance (`trust`); below `drop` it is left out, below `stop` it has no children. EAGLE-2 (Li et al. 2024) also
builds trees by confidence, to a fixed size; here the cost of a row decides. The main chain comes first: if the target
agrees with it, the K/V lies as if there had been no branch. `build_fixed_tree` is for captured steps, which cannot
read scores on the host: always the same number of nodes, chosen on the device (ops.trees).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..ops.trees import WIDTH, Frontier, Nodes, TreeRows
from ..types import Draft, DraftNoise, DraftTree, KVView
from .acceptance import BINS
from .drafter import DraftBatch

SCORED_CHILDREN = 3  # tokens after each node that `build_tree` scores: a fourth gains nothing on a CPU


@dataclass(frozen=True)
class Node:
    parent: int  # among all nodes of the sequence; -1: the newest token
    token: int
    confidence: float
    chance: float  # probability that its whole path is right
    rank: int  # 0: the best token after its parent


# (level, which sequence each node belongs to [W], tokens [W], which row of the level before each follows [W]) -> ids
# [W, N] or None, logits
Step = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor | None, Tensor]]


def select(nodes: Sequence[Node], most: int, prices: Sequence[float] | None = None) -> list[int]:
    """The likeliest nodes, at most `most` and worth their prices, the main chain first, parents before children."""
    # a parent is never less likely, nor later
    order = sorted(range(len(nodes)), key=lambda i: (-nodes[i].chance, i))[:most]
    if prices is not None:
        net = 0.0
        best = 0.0
        count = 0
        for n, i in enumerate(order, 1):
            net += nodes[i].chance
            if net - prices[n] > best:
                best = net - prices[n]
                count = n
        order = order[:count]
    kept = set(order)
    line: list[int] = []
    for i in sorted(kept):
        if nodes[i].rank == 0 and nodes[i].parent == (line[-1] if line else -1):
            line.append(i)
    return line + [i for i in sorted(kept) if i not in line]


def build_tree(batch: DraftBatch, depth: int, score: Step, heads: Sequence[Tensor] = ()) -> Draft:
    """A tree for every sequence, of at most as many tokens as its plan has, `depth` deep. heads: where `score` puts the
    confidence head's output for the best token after each node [W], level by level; the others share the rest."""
    assert batch.plans is not None
    plans = batch.plans
    size = len(batch.plans)
    device = batch.last.device
    trees: list[list[Node]] = [[] for _ in range(size)]
    front = [(b, -1, 1.0) for b in range(size)]  # sequence, node, chance
    tokens = batch.last
    rows = torch.arange(size, device=device)
    for level in range(depth):
        seq = torch.tensor([b for b, _, _ in front], device=device)
        at = batch.position[seq] + 1 + level
        sampling = batch.sampling.select(seq)
        ids, logits = score(level, seq, tokens, rows)
        z = sampling.scores(logits.float(), at, ids)  # [W, N] with noise where sampled
        best = z.topk(min(SCORED_CHILDREN, z.shape[1]), dim=-1).indices  # [W, 3]
        likely = z.softmax(-1).gather(1, best)
        if level < len(heads):
            others = likely[:, 1:] / (1.0 - likely[:, :1]).clamp_min(1e-6) * (1.0 - heads[level][:, None])
            likely = torch.cat((heads[level][:, None], others), 1)
        sure = likely.tolist()
        named = (best if ids is None else ids.gather(1, best)).tolist()
        following: list[tuple[float, int, int, int, int]] = []  # chance, sequence, node, row, token
        for row, (b, parent, chance) in enumerate(front):
            for rank, (token, confidence) in enumerate(zip(named[row], sure[row])):
                trust = confidence if batch.trust is None else batch.trust[min(BINS - 1, int(confidence * BINS))]
                if chance * trust < plans[b].drop or not confidence > 0.0:
                    continue
                trees[b].append(Node(parent, token, confidence, chance * trust, rank))
                if chance * trust >= plans[b].stop:
                    following.append((chance * trust, b, len(trees[b]) - 1, row, token))
        following.sort(key=lambda x: (x[1], -x[0], x[2]))
        # at most WIDTH of each sequence
        chosen = [x for i, x in enumerate(following) if i < WIDTH or following[i - WIDTH][1] != x[1]]
        if not chosen:
            break
        front = [(b, node, chance) for chance, b, node, _, _ in chosen]
        tokens = torch.tensor([token for *_, token in chosen], device=device)
        rows = torch.tensor([row for _, _, _, row, _ in chosen], device=device)
    picked = [select(nodes, plan.max_drafted, plan.prices) for nodes, plan in zip(trees, plans)]
    made = list[DraftTree]()
    confidence = list[list[float]]()
    for nodes, which in zip(trees, picked):
        number = {-1: 0, **{node: j for j, node in enumerate(which, 1)}}
        made.append(DraftTree([nodes[i].token for i in which], [number[nodes[i].parent] for i in which]))
        confidence.append([nodes[i].confidence for i in which])
    width = max(1, max(len(which) for which in picked))
    padded = lambda rows: torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)  # noqa: E731
    lengths = torch.tensor([len(which) for which in picked], device=device)
    return Draft(padded([tree.tokens for tree in made]), lengths, padded(confidence).float(), made)


def build_fixed_tree(
    batch: DraftBatch, depth: int, nodes: int, score: Callable[[int, Frontier], tuple[Tensor | None, Tensor]]
) -> TreeRows:
    """A tree of `nodes` tokens for every sequence, at most `depth` deep. Nothing here waits for the device."""
    sampling = batch.sampling
    ops = batch.ops
    filtered = sampling.select(batch.kv.row_seq.repeat_interleave(WIDTH)) if sampling.cut is not None else None
    # or it was divided by already
    heat = torch.ones_like(sampling.temperature) if sampling.cut is not None else sampling.temperature
    found = Nodes.of(batch.last.shape[0], depth, batch.last.device)
    front = Frontier.root(batch.last)
    for level in range(depth):
        ids, logits = score(level, front)
        if filtered is not None:
            logits = filtered.apply_temperature(logits)
        noise = None
        if sampling.any_sampled:
            noise = DraftNoise(heat, sampling.sampled, sampling.seed, batch.position + 1 + level)
        front = ops.branch(logits, ids, noise, front, found, level)
    return ops.build_fixed_tree(found, nodes, depth)


def widened(kv: KVView) -> KVView:
    """The view of one row per sequence, for WIDTH rows of each at the same position."""
    positions = kv.positions.repeat_interleave(WIDTH)
    row_seq = kv.row_seq.repeat_interleave(WIDTH)
    return replace(kv, positions=positions, row_seq=row_seq, row_start=kv.row_start * WIDTH, max_rows=WIDTH)


def spread_view(kv: KVView, seq: Tensor) -> KVView:
    """The view of one row per sequence, for several rows of the sequences `seq` [W], ascending, at one position."""
    counts = torch.bincount(seq, minlength=kv.positions.shape[0])
    start = torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(torch.int32)
    return replace(kv, positions=kv.positions[seq], row_seq=seq, row_start=start, max_rows=int(counts.max()))
