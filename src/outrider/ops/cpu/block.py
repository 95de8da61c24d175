"""A block drafter's network in calls of the library (block.h): its reading of the target's states, and a draft's pass.

`compile_block` converts a built network once into C structs; None: the library does not support a part of it (odd
sizes, a table divided among processes), and the operations run one by one. `CpuCycle` makes both a part of its own
call, the draft where its tokens do not depend on each other (DFlash).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_int64, c_void_p
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...types import KVPages, KVView
from ..formats import DeviceWeight
from .forward import MATRICES, VECTORS, Stack, supports
from .lib import CBatchBuffers, CBlockNet, CPages, CUnread, PackedKind, at, c_block_spec, floats
from .packing import c_weight, table_scale

if TYPE_CHECKING:
    from .ops import CpuOps

UNREAD = 32  # rows of a sequence that are kept until they are read: their projection takes little more time than one's


class CpuBlock:
    def __init__(self, ops: CpuOps, net: Any, stack: Stack):
        config = net.config
        self.ops = ops
        self.stack = stack
        self.keep = net
        self.taps = config.taps
        self.one_pass = config.kind != "eagle3" and not config.conv_taps  # `backbone` works
        # a draft's tokens do not depend on each other: `CpuCycle` can draft
        self.drafts = self.one_pass and not (config.selector_rank or config.markov_rank or config.confidence)
        head = net.head if net.head is not None else net.target.head
        c = self.c = CBlockNet(fc=c_weight(net.fc), head=c_weight(head), streams=len(config.taps))
        c.call.stack = at(stack.c)
        c.hidden_norm = at(net.hidden_norm)
        c.input_norm = at(net.input_norm)
        c.ids = at(net.ids)
        if config.kind == "eagle3":
            c.token_norm = at(net.layers[0].attn_norm)
        if net.fc_norms:
            self.fc_norms = (c_void_p * len(net.fc_norms))(*map(at, net.fc_norms))
            c.fc_norms = at(self.fc_norms)
        c.mask = config.mask_id
        c.first = 0 if config.from_anchor else 1
        c.block = 0 if all(config.causal) else config.block
        c.scale = config.output_scale
        c.cap = config.softcap or 0.0

    def write_context(self, streams: Sequence[Tensor], kv: KVView, following: Tensor) -> None:
        batch = CBatchBuffers(kv, self.ops.pages(kv))
        following = following.contiguous()
        pointers = (c_void_p * len(streams))(*map(at, streams))
        self.ops.lib.or_block_context(self.ops.pool, self.c, batch.c, at(pointers), at(following))

    def backbone(self, ids: Tensor, kv: KVView, end: Tensor) -> Tensor:
        """Compiled form of BlockNet.backbone: ids [B, S], end [B] -> [B, S, H]."""
        rows = block_view(kv, end, ids.shape[1])
        hidden, _, _ = self.stack.run(rows, ids=ids.reshape(-1), ends=end + ids.shape[1] - 1)
        return hidden.view(*ids.shape, -1)


class UnreadRows:
    """Committed positions that a block drafter has not read yet, by slot of `cache` (Unread in block.h)."""

    def __init__(self, block: CpuBlock, cache: KVPages, pages: CPages, batch: Structure):
        """batch: whole tables, by slot."""
        self.ops = block.ops
        slots = next(iter(cache.tables.values())).shape[0]
        self.net = CBlockNet.from_buffer_copy(block.c)  # a copy: this one reads this cache
        self.net.call.batch = batch
        self.states = torch.empty((slots, UNREAD, block.c.fc.k))
        self.following = torch.zeros((slots, UNREAD), dtype=torch.int64)
        self.span = torch.zeros((slots, 2), dtype=torch.int64)
        self.c = CUnread(*map(at, (self.states, self.following, self.span)), UNREAD)
        self.keep = (block, pages)

    def read(self, slots: list[int]) -> None:
        which = (c_int64 * len(slots))(*slots)
        self.ops.lib.or_read_slots(self.ops.pool, self.net, self.c, at(which), len(slots))

    def assume(self, slot: int, position: int, count: int) -> None:
        """Treat the last `count` of `position` committed positions as unread, with states of zeros; 0: none are."""
        self.span[slot, 0] = position - count
        self.span[slot, 1] = count
        self.states[slot, :count] = 0.0


def block_view(kv: KVView, start: Tensor, count: int) -> KVView:
    """The view of B blocks of `count` rows that begin at the positions `start` [B]."""
    size = start.shape[0]
    positions = (start[:, None] + torch.arange(count)).reshape(-1)
    row_start = torch.arange(0, size * count + 1, count, dtype=torch.int32)
    return replace(kv, positions=positions, row_seq=torch.arange(size).repeat_interleave(count), row_start=row_start)


def _is_dense(weight: DeviceWeight) -> bool:
    return c_weight(weight).kind == PackedKind.DENSE


def compile_block(ops: CpuOps, net: Any) -> CpuBlock | None:
    config = net.config
    target = net.target
    layers = net.layers
    same_input = all(_is_dense(layer.q) == _is_dense(layer.kv) for layer in layers)
    whole = target.together.tp.world == 1 or (net.table is not None and net.head is not None)
    parts = [(layer.attn.spec, layer.down) for layer in layers]
    near = all(s.window is None or s.window > UNREAD for s, _ in parts)  # no page is freed before it is read
    if not (near and same_input and whole and supports(parts, config.hidden, config.target_hidden)):
        return None
    table = net.table if net.table is not None else target.table
    norms = [*(layer.attn_norm for layer in layers), net.norm]
    absent = dict.fromkeys((*MATRICES, *VECTORS))
    blocks = []
    for layer, next_norm in zip(layers, norms[1:], strict=True):
        fields = {**absent, **vars(layer), "spec": layer.attn.spec, "qkv": layer.q, "qkv_bias": layer.q_bias}
        fields |= {"q_norm": layer.attn.q_norm, "k_norm": layer.attn.k_norm, "next_norm": next_norm}
        blocks.append(SimpleNamespace(**fields))
    stack = Stack(ops, blocks, net.inv_freqs, hidden=config.hidden, eps=config.norm_eps, act=config.activation)
    for c, layer in zip(stack.layers, layers, strict=True):
        bias = None if layer.kv_bias is None else floats(layer.kv_bias)
        stack.keep.append(bias)
        c.attn = c_block_spec(layer.attn)
        c.kv = c_weight(layer.kv)
        c.kv_bias = at(bias)
    stack.c.embed = c_weight(table)
    scale = target.config.embed_scale if config.embed_scale is None else config.embed_scale
    stack.c.embed_scale = table_scale(table, scale)
    return CpuBlock(ops, net, stack)
