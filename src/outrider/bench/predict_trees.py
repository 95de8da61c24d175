"""Predicts gain and cost of draft trees; the counterpart of `predict`. Torch-free.

Of the tokens after a node at depth j the drafter's best is right with probability a_j; where it is wrong, the second
with probability s (the profile's `second`); where both are, the third with 0.7·s, and the fourth with 0.49·s. The tree
is the likeliest of its size and depth regardless of the drafter's confidence, with up to four tokens after each of up
to four nodes per level; a tree built by confidence in every cycle gains more.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..spec.plan import DEEPEST
from ..types import MAX_DRAFT, OutriderError
from .predict import Acceptance, Setup, draft_seconds, verify_seconds

BRANCH, WIDTH = 4, 4  # as ops.trees has them, which needs torch; a test compares them
SECOND = 0.35  # where no card says better: what the shipped drafter shows, a little less
# a third guess against a second, a fourth against a third (.38, .27, .19 greedily, .35, .23, .18 at T = 1:
# docs/lab/log.md)
FADE = 0.7


@dataclass(frozen=True)
class TreePoint:
    nodes: int  # tokens that are verified
    depth: int
    widest: int  # nodes of a level that the drafter goes on from
    cycle_ms: float
    tokens: float  # a cycle and sequence
    ms_per_token: float
    speedup: float


def likeliest(survive: Sequence[float], second: float, nodes: int, depth: int) -> tuple[float, list[int]]:
    """Tokens per cycle of the best tree of `nodes` tokens, and the number of expanded nodes per level."""
    if not 0.0 <= second <= 1.0:
        raise OutriderError(f"the chance that a second guess is right must be in [0, 1], got {second}")
    open_nodes = [0] * (depth + 1)  # of each level: that may have tokens behind them
    inner: list[set[int]] = [set() for _ in range(depth)]  # that have some
    tokens, kept, number = 1.0, 0, 0
    # the chance, negative so that the likeliest comes first; a number; the level; the parent's number
    heap = [(-1.0, 0, 0, -1)]
    while heap and kept <= nodes:
        chance, me, level, parent = heapq.heappop(heap)
        kept += 1
        if level:
            tokens -= chance
            inner[level - 1].add(parent)
        if level == depth or open_nodes[level] == WIDTH:
            continue
        open_nodes[level] += 1
        before = survive[level - 1] if level else 1.0
        a, missed = survive[level] / before if before else 0.0, 1.0
        for rank in range(BRANCH):
            each = a if rank == 0 else second * FADE ** (rank - 1)
            number += 1
            heapq.heappush(heap, (chance * missed * each, number, level + 1, me))
            missed *= 1.0 - each
    return tokens, [len(found) for found in inner if found]


def tree_points(setup: Setup, accept: Acceptance, nodes: int, second: float) -> list[TreePoint]:
    """By depth: the best tree of at most `nodes` tokens. A level is one step of the drafter over its nodes."""
    if not 2 <= nodes <= MAX_DRAFT:
        raise OutriderError(f"--tree must be in 2..{MAX_DRAFT} tokens, got {nodes}")
    plain, out = verify_seconds(setup, 0), []
    for depth in range(1, min(DEEPEST, nodes) + 1):
        found = []
        for size in range(depth, min(nodes, BRANCH + WIDTH * BRANCH * (depth - 1)) + 1):
            tokens, inner = likeliest(accept.survive, second, size, depth)
            seconds = verify_seconds(setup, size)
            seconds += sum(draft_seconds(replace(setup, batch=setup.batch * rows), 1) for rows in inner)
            found.append(
                TreePoint(
                    size, depth, max(inner), 1e3 * seconds, tokens, 1e3 * seconds / tokens, plain * tokens / seconds
                )
            )
        out.append(max(found, key=lambda p: p.speedup))
    return out
