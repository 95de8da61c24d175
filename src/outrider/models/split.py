"""Tensor parallelism: which heads, columns and tokens of a model each process has. Torch-free.

Attention heads stay with the K/V heads they read (several processes may keep the same one); MLP and experts are
divided along their inner width, embedding and head by tokens. `Collectives.all_reduce` adds partial sums in the order
of the ranks, so a row's sum depends on no other row. Norms, router, per-layer projections and all of a drafter but its
attention are replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..types import OutriderError
from .config import DrafterConfig, LayerSpec, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

Span = tuple[int, int]  # [lo, hi)


@dataclass(frozen=True)
class TPRank:
    rank: int = 0
    world: int = 1


@dataclass(frozen=True)
class Shard:
    """A process's part of a source tensor: spans of rows (dimension -2; of a vector its elements), or of columns."""

    spans: tuple[Span, ...]
    columns: bool = False


# by canonical name, one for each source of its plan; absent names are kept whole
Shards = dict[str, tuple[Shard, ...]]


class Collectives:
    """The collective operations of the processes that share a model; of a single process: identities."""

    tp = TPRank()

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of all processes' tensors, in the order of the ranks; the same bits everywhere."""
        return partial

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """[R, widths[rank]] of each -> [R, sum(widths)], in the order of the ranks."""
        return part


SOLO = Collectives()


def piece(size: int, index: int, parts: int, alignment: int = 1) -> Span:
    """The index-th of `parts` pieces of `size`, cut at multiples of `alignment`; they differ by at most one of it."""
    each, more = divmod(-(-size // alignment), parts)
    lo = index * each + min(index, more)
    return min(size, lo * alignment), min(size, (lo + each + (index < more)) * alignment)


def heads_of(heads: int, kv_heads: int, tp: TPRank) -> tuple[Span, Span]:
    group = heads // kv_heads  # query heads that read one K/V head
    if kv_heads >= tp.world:
        lo, hi = piece(kv_heads, tp.rank, tp.world)
        return (lo * group, hi * group), (lo, hi)
    for kv in range(kv_heads):
        first, end = piece(tp.world, kv, kv_heads)  # the processes that keep this K/V head
        if first <= tp.rank < end:
            lo, hi = piece(group, tp.rank - first, end - first)
            return (kv * group + lo, kv * group + hi), (kv, kv + 1)
    raise AssertionError("every process has a K/V head")


def split_target(config: ModelConfig, tp: TPRank, alignment: Callable[[str], int]) -> tuple[ModelConfig, Shards]:
    """This process's configuration, and its shard of each weight. alignment(name): where columns may be cut."""
    tokens = (Shard((piece(config.vocab_size, tp.rank, tp.world),)),)
    cuts: Shards = {"embed": tokens}
    if not config.tied:
        cuts["head"] = tokens
    if config.ple_dim:
        cuts["ple_embed"] = tokens
    layers = []
    moe = config.moe
    for i, layer in enumerate(config.layers):
        here = f"layers.{i}."
        layer_shard = _attention(cuts, here, layer, tp=tp, what=f"layer {i}")
        inner = _inner(layer.intermediate, tp, alignment(here + "down"), what=f"the MLP of layer {i}")
        cuts[here + "gate_up"] = cuts[here + "gate_up_bias"] = (Shard((inner,)), Shard((inner,)))
        cuts[here + "down"] = (Shard((inner,), columns=True),)
        if config.moe is not None:
            wide = config.moe.intermediate
            lo, hi = _inner(wide, tp, alignment(here + "experts_down"), what=f"the experts of layer {i}")
            cuts[here + "experts_gate_up"] = (Shard(((lo, hi), (wide + lo, wide + hi))),)
            cuts[here + "experts_down"] = (Shard(((lo, hi),), columns=True),)
            moe = replace(config.moe, intermediate=hi - lo)
        layers.append(replace(layer_shard, intermediate=inner[1] - inner[0]))
    return replace(config, layers=tuple(layers), moe=moe), cuts


def split_drafter(config: DrafterConfig, tp: TPRank) -> tuple[DrafterConfig, Shards]:
    """An MTP drafter attends to the target's K/V, so its heads stay with theirs; everything else is kept whole."""
    cuts: Shards = {}
    each = enumerate(config.layers)
    layers = tuple(_attention(cuts, f"layers.{i}.", layer, tp=tp, what=f"the drafter's layer {i}") for i, layer in each)
    return replace(config, layers=layers), cuts


def _attention(cuts: Shards, here: str, layer: LayerSpec, tp: TPRank, what: str) -> LayerSpec:
    attn = layer.attn
    (q, q_end), (kv, kv_end) = heads_of(attn.heads, attn.kv_heads, tp)
    if attn.heads < tp.world or q == q_end:
        heads = f"{attn.heads} heads over {attn.kv_heads} K/V heads"
        raise OutriderError(f"{what} has {heads}, too few for --tensor-parallel {tp.world}: take fewer")
    q_shard = Shard(((q * attn.head_dim, q_end * attn.head_dim),))
    keys = Shard(((kv * attn.head_dim, kv_end * attn.head_dim),))
    cuts[here + "qkv"] = cuts[here + "qkv_bias"] = (q_shard, *[keys] * attn.kv_parts)
    cuts[here + "out"] = (replace(q_shard, columns=True),)
    return replace(layer, attn=replace(attn, heads=q_end - q, kv_heads=kv_end - kv))


def _inner(size: int, tp: TPRank, alignment: int, what: str) -> Span:
    if alignment == 0:
        raise OutriderError(f"{what}: columns in an order of their own cannot be divided: leave out --tensor-parallel")
    if -(-size // alignment) < tp.world:
        pieces = f"{size} wide and may be cut at multiples of {alignment} only"
        raise OutriderError(f"{what} is {pieces}: too few pieces for --tensor-parallel {tp.world}")
    return piece(size, tp.rank, tp.world, alignment=alignment)
