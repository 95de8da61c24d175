"""A whole model, or a drafter's step, in one call of the library.

`compile_model` and `compile_drafter` walk a built model once into C structs and return a stand-in with the model's own
methods, or None where it has a part that the library does not know (experts, odd sizes): the caller then keeps the
model itself. The answers are bitwise the same either way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from typing import Any

import torch
from torch import Tensor

from ...types import KVView
from .lib import Batch, CCall, CLayer, CStack, CWeight, c_spec
from .ops import ACTIVATIONS, CpuOps, at, floats, table_scale

Pointers = dict[str, int | None]


class Stack:
    """Decoder layers as the library sees them; keeps alive what its pointers show."""

    def __init__(self, ops: CpuOps, blocks: Sequence[Any], inv_freqs: Sequence[Tensor], hidden: int, eps: float, act: str):
        self.ops, self.hidden = ops, hidden
        self.keep: list[Any] = [blocks, inv_freqs]
        self.layers = (CLayer * len(blocks))()
        for c, block in zip(self.layers, blocks, strict=True):
            c.attn, c.rope, c.inter = c_spec(block.spec), block.rope, ops.c_weight(block.down).k
            for name in ("qkv", "out", "gate_up", "down"):
                setattr(c, name, ops.c_weight(getattr(block, name)))
            for name in ("attn_norm", "q_norm", "k_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm", "scalar", "next_norm"):
                setattr(c, name, at(getattr(block, name)))
            for name in ("qkv_bias", "out_bias", "gate_up_bias", "down_bias"):
                setattr(c, name, at(self.hold(getattr(block, name))))
        self.freqs = (c_void_p * len(inv_freqs))(*[f.data_ptr() for f in inv_freqs])
        self.halves = (c_int32 * len(inv_freqs))(*[f.shape[0] for f in inv_freqs])
        self.c = CStack(
            layers=len(blocks), hidden=hidden, act=ACTIVATIONS[act], ropes=len(inv_freqs), eps=eps, embed_scale=1.0,
            layer=self.layers, inv_freq=self.freqs, rope_half=self.halves,
        )  # fmt: skip

    def hold(self, bias: Tensor | None) -> Tensor | None:
        """Biases come in the load dtype; the library reads float32."""
        if bias is not None:
            bias = floats(bias)
            self.keep.append(bias)
        return bias

    def run(
        self, kv: KVView, ids: Tensor | None = None, features: Tensor | None = None, taps: Sequence[int] = (), shift: int = 0
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """hidden [R, H] after the last norm, what `post` makes of it, and the residual streams after the layers `taps`."""
        batch = Batch(kv, ids)
        batch.set_cache(self.ops.pages(kv))
        batch.c.rope_shift = shift
        rows = batch.c.rows
        hidden = torch.empty((rows, self.hidden))
        call = CCall(ctypes.pointer(self.c), batch.c, at(features), hidden.data_ptr())
        fed_back = None
        if self.c.post.kind:
            fed_back = torch.empty((rows, self.c.post.n))
            call.fed_back = fed_back.data_ptr()
        streams = {i: torch.empty((rows, self.hidden)) for i in taps}
        if streams:
            pointers = (c_void_p * self.c.layers)(*[at(streams.get(i)) for i in range(self.c.layers)])
            call.taps = ctypes.addressof(pointers)
        if self.ops.lib.or_forward(self.ops.team, ctypes.byref(call)):
            raise MemoryError("scratch of a forward pass")
        return hidden, fed_back, [streams[i] for i in taps]


def unsupported(ops: CpuOps, blocks: Sequence[Any], hidden: int) -> str | None:
    """Why the library can't run these layers in one call."""
    groups: dict[str, tuple[int, ...]] = {}
    for block in blocks:
        s, inter = block.spec, ops.c_weight(block.down).k
        shape = (s.heads, s.kv_heads, s.head_dim, s.window or 0)
        if groups.setdefault(s.group, shape) != shape:
            return f"{s.group} layers of unlike shape"
        if hidden % 32 or s.head_dim % 32 or inter % 32 or s.heads // s.kv_heads > 32:
            return "sizes that are no multiple of 32"
    return None


class CompiledModel:
    """A target model: its own methods, with `forward` in one call."""

    def __init__(self, model: Any, stack: Stack):
        self.model, self.stack = model, stack
        self.config, self.ops, self.dtype, self.device = model.config, model.ops, model.dtype, model.device
        self.embed, self.logits = model.embed, model.logits
        self.table, self.head, self.blocks, self.inv_freqs = model.table, model.head, model.blocks, model.inv_freqs

    def forward(self, ids: Tensor, kv: KVView, taps: tuple[int, ...] = ()) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:
        hidden, _, streams = self.stack.run(kv, ids=ids, taps=taps)
        return (hidden, tuple(streams)) if taps else hidden


def compile_model(ops: CpuOps, model: Any) -> CompiledModel | None:
    config = model.config
    if config.moe is not None or unsupported(ops, model.blocks, config.hidden) or (config.ple_dim and config.ple_dim % 32):
        return None
    stack = Stack(ops, model.blocks, model.inv_freqs, config.hidden, config.norm_eps, config.activation)
    stack.c.embed = ops.c_weight(model.table)
    stack.c.embed_scale = table_scale(model.table, config.embed_scale)
    stack.keep.append(model.table)
    if config.ple_dim:
        source = model.ple_input
        stack.c.ple, stack.c.ple_norm = config.ple_dim, at(source.norm)
        stack.c.ple_embed, stack.c.ple_proj = ops.c_weight(source.table), ops.c_weight(source.proj)
        stack.c.ple_token_scale = table_scale(source.table, config.ple_dim**0.5)
        stack.c.ple_proj_scale = config.hidden**-0.5
        for c, side in zip(stack.layers, model.ple_blocks, strict=True):
            c.ple_gate, c.ple_out, c.ple_post_norm = ops.c_weight(side.gate), ops.c_weight(side.out), at(side.post_norm)
        stack.keep += [source, model.ple_blocks]
    return CompiledModel(model, stack)


class CompiledStep:
    """A drafter's `step` in one call: features -> `pre` -> query-only layers -> norm -> `post`."""

    def __init__(self, stack: Stack, shift: int):
        self.stack, self.shift = stack, shift

    def __call__(self, features: Tensor, kv: KVView) -> tuple[Tensor, Tensor]:
        """features [B, pre's columns] -> g [B, h] for the head, the next hidden state [B, Hb]."""
        hidden, fed_back, _ = self.stack.run(kv, features=floats(features), shift=self.shift)
        assert fed_back is not None
        return hidden, fed_back


def compile_step(ops: CpuOps, drafter: Any) -> CompiledStep | None:
    """For drafters with `blocks`, `pre`, `post` and one constant position (Gemma 4's assistants and ours)."""
    config = drafter.config
    if unsupported(ops, drafter.blocks, config.hidden):
        return None
    stack = Stack(ops, drafter.blocks, drafter.inv_freqs, config.hidden, config.norm_eps, config.activation)
    pre: CWeight = ops.c_weight(drafter.pre)
    post: CWeight = ops.c_weight(drafter.post)
    stack.c.pre, stack.c.post = pre, post
    stack.keep += [drafter.pre, drafter.post]
    return CompiledStep(stack, 2 - config.position_offset)
