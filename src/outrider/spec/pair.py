"""Two network drafters of one target, from which each plan names one: an MTP drafter and a block drafter.

The target's pass returns the streams of both. Each drafter's context stays right whichever drafted: an MTP drafter
reads the target's K/V and last states, and the block drafter's own K/V is written after every pass (`extend`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import KVView, OutriderError
from .drafter import Drafter


class DrafterPair(Drafter):
    in_graph = True

    def __init__(self, first: Drafter, second: Drafter):
        """In the order in which drafts of a given K prefer them."""
        mtp, block = (first, second) if second.kv_specs else (second, first)
        if mtp.kv_specs or mtp.net is None or not block.kv_specs:
            kinds, got = "an MTP and a block drafter (DFlash, DSpark, EAGLE-3)", f"{first.name} and {second.name}"
            raise OutriderError(f"two drafters are {kinds}, got {got}")
        self._members, self.block, self.mtp = (first, second), block, mtp
        self.name = f"{first.name}+{second.name}"
        # the MTP drafter's first: a C step reads them from the front
        self.taps = (*mtp.taps, *(tap for tap in block.taps if tap not in mtp.taps))
        self.max_tokens = max(mtp.max_tokens, block.max_tokens)
        self.kv_specs, self.content = block.kv_specs, block.content
        self.block_rows, self.block_call = block.block_rows, block.block_call
        self.net, self.trained_for = mtp.net, mtp.trained_for

    @property
    def members(self) -> tuple[Drafter, ...]:
        return self._members

    def member(self, name: str | None) -> Drafter:
        return next(drafter for drafter in self.members if drafter.name == name)

    def features_of(self, drafter: Drafter, features: Tensor) -> Tensor:
        streams = features.split(features.shape[1] // (1 + len(self.taps)), 1)
        return torch.cat([streams[0], *(streams[1 + self.taps.index(tap)] for tap in drafter.taps)], 1)

    def extend(self, streams: tuple[Tensor, ...], kv: KVView, following: Tensor) -> None:
        self.block.extend(tuple(streams[self.taps.index(tap)] for tap in self.block.taps), kv, following)

    def max_nodes(self, depth: int) -> int:
        return max(drafter.max_nodes(depth) for drafter in self.members)
