"""Which decode steps are captured before the first request, in a server (`warmup_keys`) and elsewhere (`first_keys`),
and which graph serves a step without a graph of its own: the cheapest that covers it, with idle sequences, masked
drafts, a longer context or more sampling features and the same bits (`cheapest_covering`); else a capture with padding
(`padded`), as all requests wait for a capture. A step that has run `OFTEN_STEPS` times in an `oversized` graph gets its
own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from .decode import Choosing, Key

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# positions of the nearest context, and how many times as far the next one reaches
NEAR_CONTEXT = 2048
FAR_FACTOR = 4
FAR_BATCH = 16  # sequences for which a server captures the second context at start
ADVISED_BATCH = 32  # those for which it captures the way of choosing that the model advises
# steps; sequences that cost about as much as one
OFTEN_STEPS = 64
FEW_SEQS = 8
# the K of graphs with padding: the last tokens of an answer are drafted with ever smaller ones
PADDED_K = (4, 8, 16)
TREE_POSITIONS = 1 << 18  # of all sequences of a step with trees: attention keeps sums of every row for every split
WAYS: tuple[Choosing, ...] = get_args(Choosing)  # each includes the features of the earlier ones


@dataclass(frozen=True)
class GraphLimits:
    """Limits of a captured step."""

    batch: int  # sequences
    context: int  # positions
    rows: int


def covers(there: Key, wanted: Key) -> bool:
    same = replace(there, batch=0, k=0, context=0, choosing=wanted.choosing) == replace(wanted, batch=0, k=0, context=0)
    deep = there.k == wanted.k or (there.k > wanted.k > 0 and not wanted.nodes)
    wide = there.batch >= wanted.batch and there.context >= wanted.context
    return same and deep and wide and WAYS.index(there.choosing) >= WAYS.index(wanted.choosing)


def cheapest_covering(there: Iterable[Key], wanted: Key) -> Key | None:
    fit = [key for key in there if covers(key, wanted)]
    return min(fit, key=lambda key: (key.batch * (key.k + 1), WAYS.index(key.choosing), key.context), default=None)


def oversized(stand_in: Key, wanted: Key) -> bool:
    """True if a step of this key is notably slower in the graph that stands in for its own."""
    return stand_in.k > wanted.k or stand_in.nodes != wanted.nodes or stand_in.batch > max(wanted.batch, FEW_SEQS)


def padded(key: Key, limits: GraphLimits, max_k: int = 0) -> Key:
    """The key to capture for a step that no graph covers. max_k: the maximum K of a chain; 0: K stays. Trees get a
    longer context only, as far as attention's partial sums of their rows allow."""
    context = NEAR_CONTEXT
    while context < key.context:
        context *= FAR_FACTOR
    context = max(key.context, min(context, limits.context))
    if key.nodes:
        return replace(key, context=context) if key.batch * context <= TREE_POSITIONS else key
    batch = next((size for size in BATCHES if size >= key.batch), key.batch)
    if batch > limits.batch or batch * (key.drafted + 1) > limits.rows:
        batch = key.batch
    k = next((k for k in PADDED_K if k >= key.k), key.k) if key.k > 0 else 0
    if k > max_k or batch * (k + 1) > limits.rows:
        k = key.k
    return replace(key, batch=batch, k=k, context=context)


def stand_in(there: Iterable[Key], wanted: Key) -> Key | None:
    """The graph that a step runs in, of those there are; chains stand in for a tree."""
    keys = list(there)
    return cheapest_covering(keys, wanted) or cheapest_covering(keys, replace(wanted, nodes=0))


def warmup_keys(
    limits: GraphLimits,
    widths: Sequence[int],
    *,
    drafters: Sequence[str | None] = (None,),
    advised: Choosing = "greedy",
) -> list[Key]:
    """A server's steps, those of most rows first, whose memory the others reuse. widths: the K; drafters: of `Key`;
    advised: how requests choose that follow the model's own advice."""
    near = min(NEAR_CONTEXT, limits.context)
    far = min(NEAR_CONTEXT * FAR_FACTOR, limits.context)
    batches = [*(size for size in BATCHES if size < limits.batch), limits.batch]
    shapes = [(batch, near) for batch in batches]
    if limits.context > NEAR_CONTEXT:
        shapes += [(batch, far) for batch in batches if batch <= FAR_BATCH]
    ways: tuple[Choosing, ...] = ("sampled", "greedy")
    keys: list[Key] = []
    for k in dict.fromkeys(widths):
        for batch, context in shapes:
            if batch * (k + 1) > limits.rows:
                continue
            for way in ways:
                keys.append(Key(batch, k, context, choosing=way, source="drafter" if k > 0 else None))
    if advised not in ways:
        nearest = [key for key in keys if key.choosing == ways[0] and key.context == near]
        keys += [replace(key, choosing=advised) for key in nearest if key.batch <= ADVISED_BATCH]
    keys = [replace(key, drafter=name) for key in keys for name in (drafters if key.k else (None,))]
    return sorted(keys, key=lambda key: -key.batch * (key.k + 1))


def first_keys(
    limits: GraphLimits,
    widths: Sequence[int],
    *,
    drafters: Sequence[str | None] = (None,),
    advised: Choosing = "greedy",
) -> list[Key]:
    """Those of `warmup_keys` that the first requests of a program need: one and few sequences, the nearest context."""
    near = min(NEAR_CONTEXT, limits.context)
    keys = warmup_keys(limits, widths, drafters=drafters, advised=advised)
    return [key for key in keys if key.batch in (1, min(FEW_SEQS, limits.batch)) and key.context == near]
