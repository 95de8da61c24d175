"""Which decode steps a server captures before its first request (`warmup_keys`), and which graph serves a step without
a graph of its own: the cheapest that covers it, with idle sequences, masked drafts, a longer context or more sampling
features and the same bits (`cheapest_covering`); else a capture with padding (`padded`), as all requests wait for a
capture. A step that has run `OFTEN` times in an `oversized` graph gets its own.
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
# steps; sequences that cost about as much as one
OFTEN = 64
FEW_SEQS = 8
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
    return found.k > wanted.k or found.batch > max(wanted.batch, FEW_SEQS)


def padded(key: Key, most: int, furthest: int, rows: int) -> Key:
    """The key to capture for a step that no graph covers. Trees are not padded: attention keeps partial sums of each
    of their rows. most, furthest, rows: the maximum of sequences, positions and rows."""
    if key.nodes:
        return key
    batch = next((size for size in BATCHES if size >= key.batch), key.batch)
    batch = batch if batch <= most and batch * (key.drafted + 1) <= rows else key.batch
    context = NEAR_CONTEXT
    while context < key.context:
        context *= FURTHER
    return replace(key, batch=batch, context=max(key.context, min(context, furthest)))


def warmup_keys(
    most: int, furthest: int, rows: int, widths: Sequence[int], drafters: Sequence[str | None] = (None,)
) -> list[Key]:
    """A server's steps, those of most rows first, whose memory the others reuse. widths: the K; drafters: of `Key`."""
    batches = [*(size for size in BATCHES if size < most), most]
    shapes = [(batch, min(NEAR_CONTEXT, furthest)) for batch in batches]
    far = [batch for batch in batches if batch <= FAR_BATCH and furthest > NEAR_CONTEXT]
    shapes += [(batch, min(NEAR_CONTEXT * FURTHER, furthest)) for batch in far]
    ways: tuple[Choosing, ...] = ("sampled", "greedy")
    each = [(k, *shape, way) for k in dict.fromkeys(widths) for shape in shapes for way in ways]
    keys = [Key(b, k, context, way, "drafter" if k else None) for k, b, context, way in each if b * (k + 1) <= rows]
    keys = [replace(key, drafter=name) for key in keys for name in (drafters if key.k else (None,))]
    return sorted(keys, key=lambda key: -key.batch * (key.k + 1))
