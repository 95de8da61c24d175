"""A block drafter's network in calls of the library (block.h): its reading of the target's states, and a draft's pass.

`compile_block` converts a built network once into C structs; None: the library does not support a part of it (odd
sizes, a table divided among processes), and the operations run one by one. `CpuCycle` makes both a part of its own
call, the draft where its tokens do not depend on each other (DFlash).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...types import KVPages, KVView
from .forward import MATRICES, VECTORS, Stack
from .lib import CBatch, CBatchBuffers, CBlockNet, CPages, CUnread, PackedKind, c_block_spec
from .ops import CpuOps, at, floats, table_scale

UNREAD = 32  # rows of a sequence that are kept until they are read: their projection takes little more time than one's


class CpuBlock:
    def __init__(self, ops: CpuOps, net: Any, stack: Stack):
        config = net.config
        self.ops, self.stack, self.keep, self.taps = ops, stack, net, config.taps
        self.one_pass = config.kind != "eagle3" and not config.conv_taps  # `backbone` works
        # a draft's tokens do not depend on each other: `CpuCycle` can draft
        self.drafts = self.one_pass and not (config.selector_rank or config.markov_rank or config.confidence)
        head = net.head if net.head is not None else net.target.head
        c = self.c = CBlockNet(fc=ops.c_weight(net.fc), head=ops.c_weight(head), streams=len(config.taps))
        c.call.stack = ctypes.addressof(stack.c)
        c.hidden_norm, c.input_norm, c.ids = at(net.hidden_norm), at(net.input_norm), at(net.ids)
        if config.kind == "eagle3":
            c.token_norm = at(net.layers[0].attn_norm)
        if net.fc_norms:
            self.fc_norms = (c_void_p * len(net.fc_norms))(*map(at, net.fc_norms))
            c.fc_norms = ctypes.addressof(self.fc_norms)
        c.mask, c.first = config.mask_id, 0 if config.from_anchor else 1
        c.block = 0 if all(config.causal) else config.block
        c.scale, c.cap = config.output_scale, config.softcap or 0.0

    def write_context(self, streams: Sequence[Tensor], kv: KVView, following: Tensor) -> None:
        batch, following = CBatchBuffers(kv, self.ops.pages(kv)), following.contiguous()
        pointers = (c_void_p * len(streams))(*[stream.data_ptr() for stream in streams])
        refs = (ctypes.byref(self.c), batch.ref, ctypes.addressof(pointers), following.data_ptr())
        if self.ops.lib.or_block_context(self.ops.team, *refs):
            raise MemoryError("scratch of a block drafter")

    def backbone(self, ids: Tensor, kv: KVView, end: Tensor) -> Tensor:
        """As BlockNet.backbone: ids [B, S], end [B] -> [B, S, H]."""
        rows = block_view(kv, end, ids.shape[1])
        hidden, _, _ = self.stack.run(rows, ids=ids.reshape(-1), ends=end + ids.shape[1] - 1)
        return hidden.view(*ids.shape, -1)


class UnreadRows:
    """What a block drafter has not yet read of committed positions, by slot of `cache` (Unread in block.h)."""

    def __init__(self, block: CpuBlock, cache: KVPages, pages: CPages, batch: CBatch):
        """batch: whole tables, by slot."""
        self.ops, slots = block.ops, next(iter(cache.tables.values())).shape[0]
        self.net = CBlockNet.from_buffer_copy(block.c)  # a copy: this one reads this cache
        self.net.call.batch = batch
        self.states = torch.empty((slots, UNREAD, block.c.fc.k))
        self.following = torch.zeros((slots, UNREAD), dtype=torch.int64)
        self.span = torch.zeros((slots, 2), dtype=torch.int64)
        self.c = CUnread(self.states.data_ptr(), self.following.data_ptr(), self.span.data_ptr(), UNREAD)
        self.keep = (block, pages)

    def read(self, slots: list[int]) -> None:
        which = (c_int64 * len(slots))(*slots)
        refs = (ctypes.byref(self.net), ctypes.byref(self.c), ctypes.addressof(which))
        if self.ops.lib.or_read_slots(self.ops.team, *refs, len(slots)):
            raise MemoryError("scratch of a block drafter")

    def assume(self, slot: int, position: int, count: int) -> None:
        """Treat the last `count` of `position` committed positions as unread, with states of zeros; 0: none are."""
        self.span[slot, 0], self.span[slot, 1] = position - count, count
        self.states[slot, :count] = 0.0


def block_view(kv: KVView, start: Tensor, count: int) -> KVView:
    """The view of B blocks of `count` rows that begin at the positions `start` [B]."""
    size = start.shape[0]
    positions = (start[:, None] + torch.arange(count)).reshape(-1)
    row_start = torch.arange(0, size * count + 1, count, dtype=torch.int32)
    return replace(kv, positions=positions, row_seq=torch.arange(size).repeat_interleave(count), row_start=row_start)


def supports_block(ops: CpuOps, net: Any) -> bool:
    config, layers = net.config, net.layers
    specs = [layer.attn.spec for layer in layers]
    alike = len({(s.group, s.heads, s.kv_heads, s.head_dim) for s in specs}) == len({s.group for s in specs})
    widths = [config.hidden, config.target_hidden, *(s.head_dim for s in specs)]
    widths += [layer.intermediate for layer in config.layers]
    dense = lambda w: ops.c_weight(w).kind == PackedKind.DENSE  # noqa: E731
    same_input = all(dense(layer.q) == dense(layer.kv) for layer in layers)  # quantised, or as it is
    whole = net.target.together.tp.world == 1 or (net.table is not None and net.head is not None)
    sizes = all(s.heads // s.kv_heads <= 32 for s in specs) and not any(width % 32 for width in widths)
    near = all(s.window is None or s.window > UNREAD for s in specs)  # no page is freed before it is read
    return near and alike and same_input and whole and sizes


def compile_block(ops: CpuOps, net: Any) -> CpuBlock | None:
    if not supports_block(ops, net):
        return None
    config, target, layers = net.config, net.target, net.layers
    table = net.table if net.table is not None else target.table
    norms = [*(layer.attn_norm for layer in layers), net.norm]
    absent = dict.fromkeys((*MATRICES, *VECTORS))
    blocks = []
    for layer, next_norm in zip(layers, norms[1:], strict=True):
        own = {**absent, **vars(layer), "spec": layer.attn.spec, "qkv": layer.q, "qkv_bias": layer.q_bias}
        own |= {"q_norm": layer.attn.q_norm, "k_norm": layer.attn.k_norm, "next_norm": next_norm}
        blocks.append(SimpleNamespace(**own))
    stack = Stack(ops, blocks, net.inv_freqs, config.hidden, config.norm_eps, config.activation)
    for c, layer in zip(stack.layers, layers, strict=True):
        bias = None if layer.kv_bias is None else floats(layer.kv_bias)
        stack.keep.append(bias)
        c.attn, c.kv, c.kv_bias = c_block_spec(layer.attn), ops.c_weight(layer.kv), at(bias)
    stack.c.embed = ops.c_weight(table)
    scale = target.config.embed_scale if config.embed_scale is None else config.embed_scale
    stack.c.embed_scale = table_scale(table, scale)
    return CpuBlock(ops, net, stack)
