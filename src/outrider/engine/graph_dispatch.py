"""Which decode steps are captured before the first request, in a server (`warmup_keys`) and elsewhere (`first_keys`),
and which graph serves a step without a graph of its own: the cheapest that covers it, with idle sequences, masked
drafts, a longer context or more sampling features and the same bits (`cheapest_covering`); else a capture with padding
(`padded`), as all requests wait for a capture. A step that has run `OFTEN` times in an `oversized` graph gets its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import get_args

from .decode import Choosing, Key

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# positions of the nearest context, and how many times as far the next one reaches
NEAR_CONTEXT = 2048
FURTHER = 4
FAR_BATCH = 16  # sequences for which a server captures the second context at start
ADVISED_BATCH = 32  # those for which it captures the way of choosing that the model advises
# steps; sequences that cost about as much as one
OFTEN = 64
FEW_SEQS = 8
# the K of graphs with padding: the last tokens of an answer are drafted with ever smaller ones
PADDED_K = (4, 8, 16)
TREE_POSITIONS = 1 << 18  # of all sequences of a step with trees: attention keeps sums of every row for every split
WAYS: tuple[Choosing, ...] = get_args(Choosing)  # each includes the features of the earlier ones


def covers(there: Key, wanted: Key) -> bool:
    same = replace(there, batch=0, k=0, context=0, choosing=wanted.choosing) == replace(wanted, batch=0, k=0, context=0)
    deep = there.k == wanted.k or (there.k > wanted.k > 0 and not wanted.nodes)
    wide = there.batch >= wanted.batch and there.context >= wanted.context
    return same and deep and wide and WAYS.index(there.choosing) >= WAYS.index(wanted.choosing)


def cheapest_covering(there: Iterable[Key], wanted: Key) -> Key | None:
    fit = [key for key in there if covers(key, wanted)]
    return min(fit, key=lambda key: (key.batch * (key.k + 1), WAYS.index(key.choosing), key.context), default=None)


def oversized(found: Key, wanted: Key) -> bool:
    return found.k > wanted.k or found.nodes != wanted.nodes or found.batch > max(wanted.batch, FEW_SEQS)


def padded(key: Key, most: int, furthest: int, rows: int, max_k: int = 0) -> Key:
    """The key to capture for a step that no graph covers. most, furthest, rows: the maximum of sequences, positions and
    rows. max_k: the maximum K of a chain; 0: K stays. Trees get a longer context only, as far as attention's partial
    sums of their rows allow."""
    context = NEAR_CONTEXT
    while context < key.context:
        context *= FURTHER
    context = max(key.context, min(context, furthest))
    if key.nodes:
        return replace(key, context=context) if key.batch * context <= TREE_POSITIONS else key
    batch = next((size for size in BATCHES if size >= key.batch), key.batch)
    batch = batch if batch <= most and batch * (key.drafted + 1) <= rows else key.batch
    k = next((k for k in PADDED_K if k >= key.k), key.k) if key.k else 0
    k = k if k <= max_k and batch * (k + 1) <= rows else key.k
    return replace(key, batch=batch, k=k, context=context)


def stand_in(there: Iterable[Key], wanted: Key) -> Key | None:
    """The graph that a step runs in, of those there are; chains stand in for a tree."""
    keys = list(there)
    return cheapest_covering(keys, wanted) or cheapest_covering(keys, replace(wanted, nodes=0))


def warmup_keys(
    most: int,
    furthest: int,
    rows: int,
    widths: Sequence[int],
    drafters: Sequence[str | None] = (None,),
    advised: Choosing = "greedy",
) -> list[Key]:
    """A server's steps, those of most rows first, whose memory the others reuse. widths: the K; drafters: of `Key`;
    advised: how requests choose that follow the model's own advice."""
    batches = [*(size for size in BATCHES if size < most), most]
    shapes = [(batch, min(NEAR_CONTEXT, furthest)) for batch in batches]
    far = [batch for batch in batches if batch <= FAR_BATCH and furthest > NEAR_CONTEXT]
    shapes += [(batch, min(NEAR_CONTEXT * FURTHER, furthest)) for batch in far]
    ways: tuple[Choosing, ...] = ("sampled", "greedy")
    each = [(k, *shape, way) for k in dict.fromkeys(widths) for shape in shapes for way in ways]
    keys = [Key(b, k, context, way, "drafter" if k else None) for k, b, context, way in each if b * (k + 1) <= rows]
    if advised not in ways:
        near = [key for key in keys if key.choosing == ways[0] and key.context == min(NEAR_CONTEXT, furthest)]
        keys += [replace(key, choosing=advised) for key in near if key.batch <= ADVISED_BATCH]
    keys = [replace(key, drafter=name) for key in keys for name in (drafters if key.k else (None,))]
    return sorted(keys, key=lambda key: -key.batch * (key.k + 1))


def first_keys(
    most: int,
    furthest: int,
    rows: int,
    widths: Sequence[int],
    drafters: Sequence[str | None] = (None,),
    advised: Choosing = "greedy",
) -> list[Key]:
    """Those of `warmup_keys` that the first requests of a program need: one and few sequences, the nearest context."""
    near = min(NEAR_CONTEXT, furthest)
    keys = warmup_keys(most, furthest, rows, widths, drafters, advised)
    return [key for key in keys if key.batch in (1, min(FEW_SEQS, most)) and key.context == near]
