"""Draft trees on the device: built, cut, verified and compacted on tensors of fixed shapes, without a host sync.

Captured steps use them (engine.decode). Every op is defined here in plain torch; a backend may run each as one kernel.
A draft cannot change the output, so `branch` and `build_fixed_tree` need not agree between backends bit for bit;
`accept_path` and `compact_kv` must.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..types import AttnSpec, DraftNoise, DraftTree, KVView
from .noise import gumbel

WIDTH = 4  # nodes per level that are expanded
BRANCH = 4  # tokens after each


def max_nodes(depth: int) -> int:
    """Nodes of a tree of this depth: BRANCH after the newest token, then after each of the WIDTH likeliest."""
    num_nodes = 0
    front = 1
    for _ in range(depth):
        num_nodes = num_nodes + BRANCH * front
        front = min(WIDTH, BRANCH * front)
    return num_nodes


@dataclass(frozen=True)
class Nodes:
    """The nodes found so far: M tokens of each sequence, equally many on every level; siblings are adjacent."""

    tokens: Tensor  # int64 [B, M]
    parents: Tensor  # int64 [B, M] the node each follows; -1: the newest token
    chance: Tensor  # float32 [B, M] probability that its whole path is right; 0: padding
    chain: Tensor  # int32 [B, M] 1: on the main chain, the best token after the best token ... after the newest

    @staticmethod
    def of(batch: int, depth: int, device: torch.device, width: int = WIDTH) -> Nodes:
        empty = partial(torch.empty, (batch, depth * width * BRANCH), device=device)
        return Nodes(empty(dtype=torch.int64), empty(dtype=torch.int64), empty(), chain=empty(dtype=torch.int32))


@dataclass(frozen=True)
class Frontier:
    """The nodes to score next: WIDTH of each sequence, likeliest first; nodes of probability 0 are padding."""

    tokens: Tensor  # int64 [B·WIDTH]
    before: Tensor  # int64 [B·WIDTH] which row of the level before each follows
    node: Tensor  # int64 [B, WIDTH]
    chance: Tensor  # float32 [B, WIDTH]
    chain: Tensor  # int32 [B, WIDTH]

    @staticmethod
    def root(last: Tensor) -> Frontier:
        """The newest tokens [B] alone."""
        first = (torch.arange(WIDTH, device=last.device) == 0).expand(last.shape[0], WIDTH)
        rows = torch.arange(first.numel(), device=last.device)
        nowhere = torch.full(first.shape, -1, dtype=torch.int64, device=last.device)
        return Frontier(
            tokens=last.repeat_interleave(WIDTH),
            before=rows,
            node=nowhere,
            chance=first.to(torch.float32),
            chain=first.to(torch.int32),
        )


@dataclass(frozen=True)
class TreeRows:
    """The rows of B drafts (types.DraftTree) in a verify pass: each newest token, then those drafted."""

    tokens: Tensor  # int64 [B, N] the drafted ones
    depth: Tensor  # int64 [R] 0: the newest token
    # int32 [R, depth + 1] the row (counted within the sequence) at each depth up to its own; behind that, itself
    ancestors: Tensor
    parent_rows: Tensor  # int64 [R] the parent (counted over all rows); -1 at a root

    @staticmethod
    def of(trees: Sequence[DraftTree], tokens: Tensor) -> TreeRows:
        """tokens: those of the trees, as a grid."""
        paths = [path for tree in trees for path in tree.ancestors]
        max_length = max(len(path) for path in paths)
        parents: list[int] = []
        for tree in trees:
            first = len(parents)
            parents += [-1, *(first + parent for parent in tree.parents)]
        as_tensor = partial(torch.tensor, device=tokens.device)
        return TreeRows(
            tokens,
            as_tensor([len(path) - 1 for path in paths]),
            as_tensor([path + [path[-1]] * (max_length - len(path)) for path in paths], dtype=torch.int32),
            parent_rows=as_tensor(parents),
        )

    @property
    def deepest(self) -> int:
        return self.ancestors.shape[1] - 1


class TreeOps:
    """The definitions."""

    def branch(
        self, logits: Tensor, ids: Tensor | None, noise: DraftNoise | None, front: Frontier, nodes: Nodes, level: int
    ) -> Frontier:
        """Adds the BRANCH best tokens after each row of the frontier, by logits [B·WIDTH, N] of the tokens `ids`
        (None: 0..N-1), to `nodes`; the likeliest of them are the next frontier. A child's probability is its parent's
        times its own under the (noisy) logits."""
        batch = front.node.shape[0]
        num_children = WIDTH * BRANCH
        first = level * WIDTH * BRANCH
        z = logits.float()
        if noise is not None:
            heat, sampled, seed, position = (t.repeat_interleave(WIDTH)[:, None] for t in noise)
            tokens = torch.arange(z.shape[1], device=z.device) if ids is None else ids
            z = torch.where(sampled, z / heat + gumbel(seed, position, tokens), z)
        best = z.topk(BRANCH, dim=-1).indices  # [B·W, BRANCH]
        sure = z.softmax(-1).gather(1, best).nan_to_num(0.0).view(batch, WIDTH, BRANCH)
        tokens = (best if ids is None else ids.gather(1, best)).view(batch, num_children)
        chance = (front.chance[:, :, None] * sure).view(batch, num_children)
        chain = (front.chain[:, :, None] * (torch.arange(BRANCH, device=z.device) == 0)).view(batch, num_children)
        here = slice(first, first + num_children)
        nodes.tokens[:, here] = tokens
        nodes.chance[:, here] = chance
        nodes.chain[:, here] = chain
        nodes.parents[:, here] = front.node.repeat_interleave(BRANCH, 1)
        pick = chance.sort(dim=1, descending=True, stable=True).indices[:, :WIDTH]
        rows = torch.arange(batch, device=z.device)[:, None] * WIDTH + pick // BRANCH
        picked, chance, chain = (t.gather(1, pick) for t in (tokens, chance, chain))
        return Frontier(tokens=picked.flatten(), before=rows.flatten(), node=first + pick, chance=chance, chain=chain)

    def chain_with_runner_ups(self, scores: Tensor, ids: Tensor) -> Nodes:
        """The nodes of a chain that was drafted in one call, and the runner-ups of each of its tokens, which are
        leaves. scores, ids [B, depth, P]: the best that each part of the head found at each step, and its token. The
        chain is the best of all."""
        batch, depth, _ = scores.shape
        device = scores.device
        best = scores.topk(BRANCH, dim=-1).indices  # [B, D, BRANCH]
        sure = scores.softmax(-1).gather(2, best).nan_to_num(0.0)
        path = sure[:, :, 0].cumprod(1)
        reach = torch.cat((torch.ones_like(path[:, :1]), path[:, :-1]), 1)
        levels = torch.arange(depth, device=device)[:, None].expand(depth, BRANCH).reshape(1, -1)
        first = (torch.arange(depth * BRANCH, device=device) % BRANCH == 0).to(torch.int32)
        parents = torch.where(levels > 0, (levels - 1) * BRANCH, -1)
        tokens = ids.gather(2, best).to(torch.int64).flatten(1)
        chance = (reach[:, :, None] * sure).flatten(1)
        return Nodes(tokens, parents.expand(batch, -1).contiguous(), chance, chain=first.expand(batch, -1).contiguous())

    def build_fixed_tree(self, nodes: Nodes, count: int, depth: int) -> TreeRows:
        """The `count` likeliest nodes, with their parents, which are no less likely and come before them."""
        batch, num_candidates = nodes.tokens.shape
        device = nodes.tokens.device
        rows = count + 1
        best = nodes.chance.sort(dim=1, descending=True, stable=True).indices[:, :count]
        order = torch.where(nodes.chain.gather(1, best) > 0, best, best + num_candidates)
        best = best.gather(1, order.sort(1).indices)  # [B, N]
        follows = nodes.parents.gather(1, best)
        number = (follows[:, :, None] == best[:, None, :]).to(torch.int64).argmax(-1) + 1
        # [B, N + 1] within the sequence
        parent_rows = torch.cat((torch.zeros_like(best[:, :1]), torch.where(follows < 0, 0, number)), 1)
        deep = torch.cat((torch.zeros_like(best[:, :1]), best // (num_candidates // depth) + 1), 1)
        up = [torch.arange(rows, device=device).expand(batch, rows)]
        for _ in range(depth):
            up.append(parent_rows.gather(1, up[-1]))
        at = (deep[:, :, None] - torch.arange(depth + 1, device=device)).clamp(min=0)
        ancestors = torch.stack(up, 2).gather(2, at).to(torch.int32)  # [B, N + 1, D + 1]
        first = torch.arange(batch, device=device)[:, None] * rows
        over = torch.where(torch.arange(rows, device=device) == 0, -1, parent_rows + first)
        return TreeRows(
            nodes.tokens.gather(1, best), deep.flatten(), ancestors.flatten(0, 1), parent_rows=over.flatten()
        )

    def accept_path(
        self, chosen: Tensor, ids: Tensor, tree: TreeRows, start: Tensor, limit: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """From each root to the child that holds the target's choice, while there is one, at most `limit` [B] steps.
        chosen, ids [R]; start [B + 1], where each sequence's rows begin. Returns the number of steps [B]; the chosen
        tokens on the path [B, deepest + 1] and their rows, counted within the sequence; padded with the last one."""
        first = start[:-1].long()
        batch = first.shape[0]
        rows = chosen.shape[0]
        seq = torch.repeat_interleave(start.diff(), output_size=rows).long()  # [R]
        at = first
        number = torch.arange(rows, device=chosen.device)
        path = [at]
        accepted = torch.zeros_like(first)
        going = torch.ones_like(first, dtype=torch.bool)
        for depth in range(tree.deepest):
            right = (tree.parent_rows == at[seq]) & (ids == chosen[at][seq])  # [R]
            child = first.new_full((batch,), rows).scatter_reduce(0, seq, torch.where(right, number, rows), "amin")
            going = going & (child < rows)
            if limit is not None:
                going = going & (limit > depth)
            at = torch.where(going, child, at)
            accepted = accepted + going.to(torch.int64)
            path.append(at)
        rows_of = torch.stack(path, 1)  # [B, D + 1] over all rows
        return accepted, chosen[rows_of], rows_of - first[:, None]

    def compact_kv(self, rows: Tensor, accepted: Tensor, length: Tensor, specs: Sequence[AttnSpec], kv: KVView) -> None:
        """Moves the keys and values of the accepted path, which lie in the order of rows [B, D + 1] after `length` [B],
        to the positions of its tokens; in every layer of `specs`."""
        depth = torch.arange(rows.shape[1], device=length.device)
        on_path = depth <= accepted[:, None]  # [B, D + 1]
        seq = torch.arange(length.shape[0], device=length.device)[:, None].expand_as(on_path).reshape(-1)
        target = length[:, None] + torch.where(on_path, depth, 0)
        # if there is nothing to move, the newest token onto itself
        source = length[:, None] + torch.where(on_path, rows, 0)
        for spec in specs:
            self.move_kv(seq, source.reshape(-1), target.reshape(-1), spec=spec, kv=kv)

    def move_kv(self, seq: Tensor, source: Tensor, target: Tensor, spec: AttnSpec, kv: KVView) -> None:
        """Keys and values at `source` [M] of the table rows `seq` [M] to `target` [M]; all are read first."""
        keys = kv.keys[spec.kv_layer]
        values = kv.values[spec.kv_layer]
        assert keys is not None and values is not None
        page, into = (kv.tables[spec.group][seq, at // kv.page_size].long() for at in (source, target))
        for cache in (keys, values):
            cache[into, :, target % kv.page_size] = cache[page, :, source % kv.page_size]
