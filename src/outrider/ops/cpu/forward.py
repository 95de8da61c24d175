"""A whole model, or a drafter's step, in one call of the library.

`compile_model` and `compile_drafter` convert a built model once into C structs and return an object with the model's
own methods, or None if the library does not support a part of it (odd sizes). The results are bitwise the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, Structure, c_int32, c_void_p
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...types import AttnSpec, DraftEnd, DraftNoise, DraftRound, KVView, OutputRows
from ..backend import EVERY_ROW, Pass
from ..formats import DeviceWeight
from ..lowrank import Adapter
from .lib import ACTIVATIONS, CBatchBuffers, CCall, CDraft, CLayer, CStack, at, c_spec, floats
from .lowrank import PassAdapters, table
from .packing import c_moe, c_weight, cluster_hashes, routable, table_scale

if TYPE_CHECKING:
    from .ops import CpuOps

# fields of CLayer that a model's block has under the same name
MATRICES = ("qkv", "out", "gate_up", "down")
VECTORS = [
    field[0] for field in CLayer._fields_ if field[1] is c_void_p and field[0] not in ("ple_post_norm", "kv_bias")
]


class Stack:
    """Decoder layers as C structs; keeps the memory behind its pointers alive."""

    def __init__(
        self, ops: CpuOps, blocks: Sequence[Any], inv_freqs: Sequence[Tensor], hidden: int, eps: float, act: str
    ):
        self.ops = ops
        self.hidden = hidden
        self.keep: list[object] = [blocks, inv_freqs]
        self.changed: WeakKeyDictionary[Adapter, Array[Structure] | None] = WeakKeyDictionary()
        self.layers = (CLayer * len(blocks))()
        for c, block in zip(self.layers, blocks, strict=True):
            c.attn = c_spec(block.spec)
            c.rope = block.rope
            c.inter = c_weight(block.down).k
            for name in MATRICES:
                setattr(c, name, c_weight(getattr(block, name)))
            for name in VECTORS:
                vector = getattr(block, name)
                if vector is not None:  # biases come in the load dtype; the library reads float32
                    vector = floats(vector)
                    self.keep.append(vector)
                setattr(c, name, at(vector))
        self.freqs = (c_void_p * len(inv_freqs))(*map(at, inv_freqs))
        self.halves = (c_int32 * len(inv_freqs))(*[f.shape[0] for f in inv_freqs])
        c = self.c = CStack(layers=len(blocks), hidden=hidden, act=ACTIVATIONS[act], eps=eps, embed_scale=1.0)
        c.layer = at(self.layers)
        c.inv_freq = at(self.freqs)
        c.rope_half = at(self.halves)
        c.ropes = len(inv_freqs)

    def changes(self, adapter: Adapter) -> Array[Structure] | None:
        """An adapter's changes, weight by weight; None: one of them is not supported by the library."""
        if adapter not in self.changed:
            self.changed[adapter] = table(adapter, len(self.layers))
        return self.changed[adapter]

    def run(
        self,
        kv: KVView,
        ids: Tensor | None = None,
        features: Tensor | None = None,
        taps: Sequence[int] = (),
        shift: int = 0,
        wanted: OutputRows | None = None,
        adapters: Structure | None = None,
        ends: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Runs one pass.

        Returns, for the wanted rows: hidden [R, H] after the last norm, its `post` product, the streams after `taps`.
        """
        pages = self.ops.pages(kv)
        batch = CBatchBuffers(kv, pages, ids, ends=ends)
        batch.c.rope_shift = shift
        rows = batch.c.rows if wanted is None else wanted.rows.shape[0]
        hidden = torch.empty((rows, self.hidden))
        call = CCall(at(self.c), batch.c, at(features), at(hidden))
        if wanted is not None:
            few = CBatchBuffers(wanted.kv, pages)
            which = wanted.rows.contiguous()
            few.c.rows = rows
            call.few = few.c
            call.wanted = at(which)
            call.narrow = True
        if adapters is not None:
            call.adapters = adapters
        fed_back = torch.empty((rows, self.c.post.n)) if self.c.post.kind else None
        call.fed_back = at(fed_back)
        streams = {i: torch.empty((rows, self.hidden)) for i in taps}
        if streams:
            pointers = (c_void_p * self.c.layers)(*[at(streams.get(i)) for i in range(self.c.layers)])
            call.taps = at(pointers)
        self.ops.lib.or_forward(self.ops.pool, call)
        return hidden, fed_back, [streams[i] for i in taps]


def supports(layers: Sequence[tuple[AttnSpec, DeviceWeight]], *widths: int) -> bool:
    """Whether the library can run these layers: those of a group must be alike, all widths multiples of 32."""
    specs = [spec for spec, _ in layers]
    shapes = {(s.group, s.heads, s.kv_heads, s.head_dim, s.window) for s in specs}
    every = (*widths, *(s.head_dim for s in specs), *(c_weight(down).k for _, down in layers))
    alike = len(shapes) == len({s.group for s in specs})
    return alike and not any(width % 32 for width in every) and all(s.heads // s.kv_heads <= 32 for s in specs)


class CompiledModel:
    """A target model of one process with `forward` in one call; everything else is the model's (`forward_soft` has the
    same bits). adapters: for one pass in which sequence i has `counts[i]` rows."""

    def __init__(self, model: Any, stack: Stack, adapters: Sequence[Adapter | None] = (), counts: Sequence[int] = ()):
        self.model = model
        self.stack = stack
        self.ops = model.ops
        self.config = model.config
        self.device = model.device
        self.dtype = model.dtype
        self.head = model.head
        self.counts = counts
        self.adapters = PassAdapters(stack.changes, adapters) if adapters else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, ids: Tensor, kv: KVView, taps: tuple[int, ...] = (), wanted: OutputRows | None = None) -> Pass:
        used = None if self.adapters is None else self.adapters.by_row(self.counts)
        hidden, _, streams = self.stack.run(kv, ids=ids, taps=taps, wanted=wanted, adapters=used)
        return Pass(hidden, tuple(streams))


def compile_model(ops: CpuOps, model: Any) -> CompiledModel | None:
    config = model.config
    if not supports([(b.spec, b.down) for b in model.blocks], config.hidden, config.ple_dim):
        return None
    if config.moe is not None and any(not routable(e.layer.experts) for e in model.experts):
        return None
    stack = Stack(ops, model.blocks, model.inv_freqs, hidden=config.hidden, eps=config.norm_eps, act=config.activation)
    if config.moe is not None:
        for c, e in zip(stack.layers, model.experts, strict=True):
            c.moe = c_moe(e.layer.experts)
            end = e.layer.end
            c.moe.router_norm = at(e.router_norm)
            c.moe.norm = at(e.norm)
            c.moe.post_norm = at(end.routed_norm)
            c.moe.post_dense_norm = at(end.dense_norm)
        stack.keep.append(model.experts)
    stack.c.embed = c_weight(model.table)
    stack.c.embed_scale = table_scale(model.table, config.embed_scale)
    stack.keep.append(model.table)
    if config.ple_dim:
        source = model.ple_input
        stack.c.ple = config.ple_dim
        stack.c.ple_norm = at(source.norm)
        stack.c.ple_embed = c_weight(source.table)
        stack.c.ple_proj = c_weight(source.proj)
        stack.c.ple_token_scale = table_scale(source.table, config.ple_dim**0.5)
        stack.c.ple_proj_scale = config.hidden**-0.5
        for c, block in zip(stack.layers, model.blocks, strict=True):
            c.ple_gate = c_weight(block.ple_gate)
            c.ple_out = c_weight(block.ple_out)
            c.ple_post_norm = at(block.ple_post_norm)
        stack.keep.append(source)
    return CompiledModel(model, stack)


class CompiledDrafter:
    """An MTP drafter with one constant position: its own methods, `step` in one call, and `draft`, a whole round."""

    most = EVERY_ROW  # sequences in one call
    has_runner_ups = False

    def __init__(self, drafter: Any, stack: Stack):
        config = drafter.config
        self.drafter = drafter
        self.stack = stack
        self.ops = stack.ops
        self.config = config
        self.candidates = drafter.candidates
        self.runner_ups = drafter.runner_ups
        self.shift = 2 - config.position_offset
        target = drafter.target
        c = self.c = CDraft(table=c_weight(target.table), head=c_weight(drafter.head), tied=config.tied_to_target)
        c.table_scale = table_scale(target.table, target.config.embed_scale)
        c.unit = not config.gemma
        self.cluster_ids: Tensor | None = None
        if config.clusters:
            self.cluster_ids = drafter.cluster_ids.contiguous()
            self.hashes = cluster_hashes(self.cluster_ids)
            c.centroids = c_weight(drafter.centroids)
            c.cluster_ids = at(self.cluster_ids)
            c.hashes = at(self.hashes)
            c.clusters, c.size = self.cluster_ids.shape
            c.top = config.cluster_top

    def start(self, kv: KVView, features: Tensor) -> DraftRound:
        return DraftRound(kv, taps=self.drafter.tapped(features))

    def step(self, token_embedding: Tensor, hidden: Tensor, state: DraftRound) -> tuple[Tensor, Tensor]:
        features = floats(self.drafter.inputs(token_embedding, hidden, state))
        g, fed_back, _ = self.stack.run(state.kv, features=features, shift=self.shift)
        if fed_back is None:
            return g, g
        return (fed_back if self.config.tied_to_target else g), fed_back

    def draft(
        self, last: Tensor, features: Tensor, kv: KVView, steps: int, noise: DraftNoise, end: DraftEnd | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, steps], as `step`, `candidates` and `gumbel_argmax` give them one by one; their probabilities
        [B, steps] among the candidates; lengths [B]. When all drafts have ended themselves, the steps that are left do
        not run, and their tokens and probabilities are 0."""
        state = self.start(kv, features)
        start = floats(features[:, : self.config.backbone_hidden])
        size = last.shape[0]
        out = torch.zeros((size, steps), dtype=torch.int64)
        confidence = torch.zeros((size, steps))
        lengths = torch.empty(size, dtype=torch.int64)
        batch = CBatchBuffers(kv, self.ops.pages(kv))
        batch.c.rope_shift = self.shift
        drawn = [floats(noise.temperature), *(t.contiguous() for t in (noise.sampled, noise.seed, noise.position))]
        buffers = [last.contiguous(), start, state.taps, *drawn]
        c = self.c
        c.call = CCall(at(self.stack.c), batch.c)
        c.steps = steps
        c.last, c.start, c.taps, c.temperature, c.sampled, c.seed, c.position = map(at, buffers)
        c.out, c.confidence, c.lengths = map(at, (out, confidence, lengths))
        assert end is None or (
            [t.shape[0] for t in end] == [size, size, 16] and all(t.dtype == torch.float64 for t in end)
        )
        c.stop, c.drop, c.trust = map(at, end) if end is not None else (None, None, None)
        self.ops.lib.or_draft(self.ops.pool, c)
        return out, confidence, lengths


def compile_drafter(ops: CpuOps, drafter: Any) -> CompiledDrafter | None:
    config = drafter.config
    if not supports([(b.spec, b.down) for b in drafter.blocks], config.hidden, config.backbone_hidden):
        return None
    stack = Stack(
        ops, drafter.blocks, drafter.inv_freqs, hidden=config.hidden, eps=config.norm_eps, act=config.activation
    )
    stack.c.pre = c_weight(drafter.pre)
    if drafter.post is not None:
        stack.c.post = c_weight(drafter.post)
    stack.keep += [drafter.pre, drafter.post]
    return CompiledDrafter(drafter, stack)
