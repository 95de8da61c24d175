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


@dataclass(frozen=True)
class LeafNode:
    """A node that the next level extends."""

    seq: int
    node: int  # among all nodes of the sequence; -1: the newest token
    row: int  # of the level that scored it
    token: int
    chance: float


# (level, which sequence each node belongs to [W], tokens [W], which row of the level before each follows [W]) -> ids
# [W, N] or None, logits
Step = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor | None, Tensor]]


def select(nodes: Sequence[Node], max_nodes: int, prices: Sequence[float] | None = None) -> list[int]:
    """The likeliest nodes that are worth their prices, the main chain first, parents before children."""
    # a parent is never less likely than its children, nor later
    order = sorted(range(len(nodes)), key=lambda i: (-nodes[i].chance, i))[:max_nodes]
    if prices is not None:
        order = order[: best_count([nodes[i].chance for i in order], prices)]
    selected = sorted(order)
    main_chain: list[int] = []
    for i in selected:
        end = main_chain[-1] if main_chain else -1
        if nodes[i].rank == 0 and nodes[i].parent == end:
            main_chain.append(i)
    on_chain = set(main_chain)
    return main_chain + [i for i in selected if i not in on_chain]


def best_count(chances: Sequence[float], prices: Sequence[float]) -> int:
    """The n that maximises the sum of the first n chances minus prices[n]; 0 if no n gains anything."""
    total = 0.0
    best = 0.0
    count = 0
    for n, chance in enumerate(chances, 1):
        total += chance
        if total - prices[n] > best:
            best = total - prices[n]
            count = n
    return count


def build_tree(batch: DraftBatch, depth: int, score: Step, heads: Sequence[Tensor] = ()) -> Draft:
    """A tree for every sequence, of at most as many tokens as its plan has, `depth` deep.

    heads: where `score` puts the confidence head's output for the best token after each node [W], level by level; the
    other tokens share what it leaves.
    """
    assert batch.plans is not None
    size = len(batch.plans)
    device = batch.last.device
    trees: list[list[Node]] = [[] for _ in range(size)]
    leaves = [LeafNode(seq=b, node=-1, row=b, token=-1, chance=1.0) for b in range(size)]
    tokens = batch.last
    for level in range(depth):
        seq = torch.tensor([leaf.seq for leaf in leaves], device=device)
        rows = torch.tensor([leaf.row for leaf in leaves], device=device)
        if level > 0:
            tokens = torch.tensor([leaf.token for leaf in leaves], device=device)
        position = batch.position[seq] + 1 + level
        ids, logits = score(level, seq, tokens, rows)
        scores = batch.sampling.select(seq).scores(logits.float(), position, ids)  # [W, N] with noise where sampled
        best = scores.topk(min(SCORED_CHILDREN, scores.shape[1]), dim=-1).indices  # [W, 3]
        confidence = scores.softmax(-1).gather(1, best)  # [W, 3]
        if level < len(heads):
            confidence = with_head(confidence, heads[level])
        best_ids = best if ids is None else ids.gather(1, best)
        leaves = extend(trees, leaves, batch=batch, tokens=best_ids.tolist(), confidence=confidence.tolist())
        if not leaves:
            break
    return draft_of(trees, batch)


def with_head(confidence: Tensor, head: Tensor) -> Tensor:
    """[W, N] with the head's confidence [W] for the best token; the others share what it leaves."""
    others = confidence[:, 1:] / (1.0 - confidence[:, :1]).clamp_min(1e-6) * (1.0 - head[:, None])
    return torch.cat((head[:, None], others), 1)


def extend(
    trees: list[list[Node]],
    leaves: Sequence[LeafNode],
    *,
    batch: DraftBatch,
    tokens: Sequence[Sequence[int]],
    confidence: Sequence[Sequence[float]],
) -> list[LeafNode]:
    """Add the children of every leaf to its tree; return those that the next level extends, in the order of their
    sequences, the likeliest first, at most WIDTH of each sequence. tokens, confidence: of each leaf's children."""
    assert batch.plans is not None
    children: list[LeafNode] = []
    for row, leaf in enumerate(leaves):
        plan = batch.plans[leaf.seq]
        nodes = trees[leaf.seq]
        for rank, (token, sure) in enumerate(zip(tokens[row], confidence[row])):
            trust = sure if batch.trust is None else batch.trust[min(BINS - 1, int(sure * BINS))]
            chance = leaf.chance * trust
            if chance < plan.drop or not sure > 0.0:  # NaN is left out too
                continue
            nodes.append(Node(parent=leaf.node, token=token, confidence=sure, chance=chance, rank=rank))
            if chance >= plan.stop:
                children.append(LeafNode(seq=leaf.seq, node=len(nodes) - 1, row=row, token=token, chance=chance))
    children.sort(key=lambda child: (child.seq, -child.chance, child.node))
    return [child for i, child in enumerate(children) if i < WIDTH or children[i - WIDTH].seq != child.seq]


def draft_of(trees: Sequence[Sequence[Node]], batch: DraftBatch) -> Draft:
    """The draft that verifies the selected nodes of every tree."""
    assert batch.plans is not None
    device = batch.last.device
    draft_trees = list[DraftTree]()
    confidence = list[list[float]]()
    for nodes, plan in zip(trees, batch.plans):
        selected = select(nodes, plan.max_drafted, plan.prices)
        rows = {-1: 0, **{node: row for row, node in enumerate(selected, 1)}}
        tokens = [nodes[i].token for i in selected]
        parents = [rows[nodes[i].parent] for i in selected]
        draft_trees.append(DraftTree(tokens, parents))
        confidence.append([nodes[i].confidence for i in selected])
    lengths = torch.tensor([len(tree.tokens) for tree in draft_trees], device=device)
    padded_tokens = torch.tensor(padded([tree.tokens for tree in draft_trees]), device=device)
    padded_confidence = torch.tensor(padded(confidence), device=device).float()
    return Draft(padded_tokens, lengths, padded_confidence, trees=draft_trees)


def padded(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """The rows with zeros up to the longest one, which is taken to have at least one entry."""
    width = max(1, max(map(len, rows)))
    return [[*row, *[0] * (width - len(row))] for row in rows]


def build_fixed_tree(
    batch: DraftBatch, depth: int, nodes: int, score: Callable[[int, Frontier], tuple[Tensor | None, Tensor]]
) -> TreeRows:
    """A tree of `nodes` tokens for every sequence, at most `depth` deep. Nothing here waits for the device."""
    sampling = batch.sampling
    ops = batch.ops
    filtered = sampling.select(batch.kv.row_seq.repeat_interleave(WIDTH)) if sampling.cut is not None else None
    temperature = sampling.temperature
    if sampling.cut is not None:
        temperature = torch.ones_like(temperature)  # scores were divided by it already
    tree_nodes = Nodes.of(batch.last.shape[0], depth, batch.last.device)
    front = Frontier.root(batch.last)
    for level in range(depth):
        ids, logits = score(level, front)
        if filtered is not None:
            logits = filtered.apply_temperature(logits)
        noise = None
        if sampling.any_sampled:
            noise = DraftNoise(temperature, sampling.sampled, seed=sampling.seed, position=batch.position + 1 + level)
        front = ops.branch(logits, ids, noise, front=front, nodes=tree_nodes, level=level)
    return ops.build_fixed_tree(tree_nodes, nodes, depth)


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
