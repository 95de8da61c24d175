"""A target model, whatever its family: Llama 2 and 3, SmolLM2, Mistral, Qwen 2 and 3, Gemma 3 and Gemma 4, text only.

What differs is configuration: a part that a checkpoint lacks is None in its `Block`. Gemma 4's sliding and full layers
have their own head size, RoPE and K/V heads; full layers may take v from the k projection; edge models share the K/V
of their last owning layers and add per-layer embeddings (PLE).

A model is built from a frozen config, a mapping of canonical weight names and an ops object. Names are looked up once,
at construction; the forward passes see fields only. Drafters share the rotary frequencies and `Block`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.backend import ExpertWeights, MoeLayer, MoeResidual, Pass
from ..ops.formats import DeviceWeight
from ..ops.reference import Backend, as_tensor
from ..types import AttnSpec, KVView, OutputRows
from .config import LayerSpec, ModelConfig, RopeSpec
from .split import SOLO, Collectives, piece


class ResidualNorms(NamedTuple):
    """The tensors of `ops.residual_norm` after a sublayer."""

    post_norm: Tensor | None  # of the sublayer's output
    scalar: Tensor | None  # the layer's, [1]
    next_norm: Tensor | None


def inverse_frequencies(rope: RopeSpec, device: torch.device) -> Tensor:
    """[head_dim / 2] float32. The exponent runs over head_dim even where only the first `rotated` pairs turn."""
    freq = rope.theta ** -(torch.arange(0, rope.head_dim, 2, dtype=torch.int64).float() / rope.head_dim)
    freq[rope.rotated :] = 0.0
    if rope.scaling == "linear":
        freq = freq / rope.factor
    elif rope.scaling == "llama3":  # stretch long waves, keep short ones, blend between
        wavelength = 2 * math.pi / freq
        low = rope.low_freq_factor
        high = rope.high_freq_factor
        keep = ((rope.original_context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        freq = (1 - keep) * freq / rope.factor + keep * freq
    return freq.to(device)


def rope_variants(layers: Sequence[LayerSpec], device: torch.device) -> tuple[list[int], list[Tensor]]:
    """The rope variant of each layer, and the frequencies of each variant."""
    kinds: list[RopeSpec] = []
    for layer in layers:
        if layer.rope not in kinds:
            kinds.append(layer.rope)
    return [kinds.index(layer.rope) for layer in layers], [inverse_frequencies(rope, device) for rope in kinds]


@dataclass(frozen=True)
class Block:
    """The weights of one decoder layer, whatever the family; None where it has no such part."""

    spec: AttnSpec
    rope: int  # index into the pass's angles
    attn_norm: Tensor
    qkv: DeviceWeight  # [spec.qkv_rows, H]
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: DeviceWeight  # [H, heads·D]
    out_bias: Tensor | None
    post_attn_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: DeviceWeight  # [2·I, H]
    gate_up_bias: Tensor | None
    down: DeviceWeight  # [H, I]
    down_bias: Tensor | None
    post_mlp_norm: Tensor | None
    scalar: Tensor | None  # [1], multiplies the whole residual stream
    ple_gate: DeviceWeight | None  # [ple, H], per-layer embeddings
    ple_out: DeviceWeight | None  # [H, ple]
    ple_post_norm: Tensor | None
    next_norm: Tensor  # the norm of this layer's output: the next layer's, or the final one


def gather_blocks(
    weights: Mapping[str, DeviceWeight], layers: Sequence[LayerSpec], rope_of: Sequence[int], adds_biases: bool = True
) -> list[Block]:
    """adds_biases: this process adds the biases that an all-reduce must count once."""
    skipped = () if adds_biases else ("out_bias", "down_bias")
    names = [f.name for f in fields(Block) if f.name not in ("spec", "rope", "next_norm")]
    blocks = []
    for i, (layer, rope) in enumerate(zip(layers, rope_of, strict=True)):
        block_weights = {name: None if name in skipped else weights.get(f"layers.{i}.{name}") for name in names}
        is_last = i + 1 == len(layers)
        next_norm = as_tensor(weights["norm" if is_last else f"layers.{i + 1}.attn_norm"])
        blocks.append(Block(layer.attn, rope, next_norm=next_norm, **block_weights))  # type: ignore[arg-type]  # names are checked by the loader
    return blocks


def vector(weights: Mapping[str, DeviceWeight], name: str) -> Tensor | None:
    return as_tensor(weights[name]) if name in weights else None


@dataclass(frozen=True)
class PerLayerInput:
    table: DeviceWeight  # [V, L·ple]
    proj: DeviceWeight  # [L·ple, H]
    norm: Tensor  # [ple]


@dataclass(frozen=True)
class Experts:
    """One layer's routed experts, next to its dense MLP, and the norms before them."""

    layer: MoeLayer
    router_norm: Tensor  # [H] float32: the router's own scale times hidden^-0.5
    norm: Tensor  # before the experts


class TextModel:
    """A decoder-only model, from embedding to head. With tensor parallelism (`together`, models.split) a rank has its
    part of every layer, and the rows of its tokens of embedding and head."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, DeviceWeight], ops: Backend, together: Collectives = SOLO
    ):
        self.config = config
        self.ops = ops
        self.together = together
        self.keeps_all_rows = False  # rows whose output is not needed run through all layers, too
        tp = together.tp
        self.tokens = [piece(config.vocab_size, rank, tp.world) for rank in range(tp.world)]  # of each process
        self.all_reduce = together.all_reduce
        self.last_write = config.kv_layers[-1]  # rows whose output is not needed stop after this layer's K/V
        self.table: DeviceWeight = weights["embed"]  # [V, H]
        self.head: DeviceWeight = self.table if config.tied else weights["head"]
        norm = as_tensor(weights["norm"])
        self.device = norm.device
        # A packed table has no dtype of its own: ask the op what it hands out.
        first = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.dtype: torch.dtype = ops.embed(first, self.table, 1.0).dtype
        rope_of, self.inv_freqs = rope_variants(config.layers, self.device)
        self.blocks = gather_blocks(weights, config.layers, rope_of=rope_of, adds_biases=tp.rank == 0)
        self.experts = [self.gather_experts(weights, i) for i in range(len(config.layers))] if config.moe else None
        self.ple_input: PerLayerInput | None = None
        if config.ple_dim:
            self.ple_input = PerLayerInput(weights["ple_embed"], weights["ple_proj"], as_tensor(weights["ple_norm"]))

    def forward(self, ids: Tensor, kv: KVView, taps: tuple[int, ...] = (), wanted: OutputRows | None = None) -> Pass:
        """ids [R] at kv.positions -> hidden states and the streams after the layers `taps`, of the rows `wanted`."""
        if wanted is None or not self.keeps_all_rows:
            return self._run(self.embed(ids), ids, kv, taps=taps, wanted=wanted, end=None)
        out = self._run(self.embed(ids), ids, kv, taps=taps, wanted=None, end=None)
        return Pass(out.hidden[wanted.rows], tuple(stream[wanted.rows] for stream in out.streams))

    def with_ops(self, ops: Backend) -> TextModel:
        """This model for passes with other operations, which know the pass's rows (ops.lowrank,
        ops.adapter_slots): all rows run through all layers. Made per pass, so it shares everything."""
        model = copy.copy(self)
        model.ops = ops
        model.keeps_all_rows = True
        return model

    def forward_soft(
        self, soft: Tensor, pad_id: int, kv: KVView, taps: tuple[int, ...], wanted: OutputRows | None, end: int | None
    ) -> Pass:
        """Like `forward`, for soft tokens [R, H] of one image, with per-layer embeddings of `pad_id`. end: on sliding
        layers, and all of Gemma 3's, rows see all keys before it; None: causal."""
        ids = torch.full((soft.shape[0],), pad_id, dtype=torch.int64, device=soft.device)
        return self._run(soft, ids, kv, taps=taps, wanted=wanted, end=end)

    def _run(
        self,
        residual: Tensor,
        ids: Tensor,
        kv: KVView,
        taps: tuple[int, ...],
        wanted: OutputRows | None,
        end: int | None,
    ) -> Pass:
        """residual [R, H]: the stream before the first layer."""
        ops = self.ops
        angles = self.angles(kv.positions)
        ple = None if self.ple_input is None else self.per_layer_inputs(self.ple_input, ids, residual)
        normed = ops.rms_norm(residual, self.blocks[0].attn_norm, self.config.norm_eps)  # [R, H]
        streams: dict[int, Tensor] = {}
        for i, block in enumerate(self.blocks):
            qkv = ops.linear(normed, block.qkv, block.qkv_bias)
            q = ops.rope_write(
                qkv, angles[block.rope], (block.q_norm, block.k_norm), spec=block.spec, kv=kv
            )  # [R, heads·D]
            if wanted is not None and i == self.last_write:  # the outputs of the other rows are not read
                rows = wanted.rows
                kv = wanted.kv
                if not rows.shape[0]:
                    return Pass(residual[:0], (residual[:0],) * len(taps))
                q = q[rows]
                residual = residual[rows]
                angles = self.angles(kv.positions)
                streams = {tap: stream[rows] for tap, stream in streams.items()}
                ple = None if ple is None else ple[:, rows]
            causal = end is None or (block.spec.window is None and self.config.family != "gemma3")
            attended = ops.attend(q, block.spec, kv) if causal else ops.attend_span(q, block.spec, kv, end=end or 0)
            residual, normed = self.after_attention(i, residual, attended, ple=ple)
            if i in taps:
                streams[i] = residual
        return Pass(normed, tuple(streams[i] for i in taps))

    def after_attention(self, i: int, residual: Tensor, attended: Tensor, ple: Tensor | None) -> tuple[Tensor, Tensor]:
        """The rest of layer i: residual stream [R, H] and attention [R, heads·D] -> the new stream, and its norm for
        the next layer (after the last layer: the final norm). ple: per-layer embeddings [L, R, ple]."""
        ops = self.ops
        block = self.blocks[i]
        eps = self.config.norm_eps
        projected = self.all_reduce(ops.linear(attended, block.out, block.out_bias))
        if self.experts is None:
            residual, normed = ops.residual_norm(
                residual, projected, block.post_attn_norm, scale=None, next_w=block.mlp_norm, eps=eps
            )
            norms = self.mlp_norms(block)
            residual, normed = ops.residual_norm(
                residual, self.mlp(normed, block), norms.post_norm, scale=norms.scalar, next_w=norms.next_norm, eps=eps
            )
        else:  # experts as well as the dense MLP; they and their router have their own norms
            experts = self.experts[i]
            residual, normed, router_in, expert_in = ops.residual_norms(
                residual,
                projected,
                block.post_attn_norm,
                w=(block.mlp_norm, experts.router_norm, experts.norm),
                eps=eps,
            )
            residual, normed = self.mlp_and_experts(
                experts, block, normed, router_in=router_in, expert_in=expert_in, x=residual
            )
        if ple is not None:
            assert block.ple_gate is not None and block.ple_out is not None
            gated = ops.linear_act_mul(residual, block.ple_gate, ple[i], act=self.config.activation)
            added = ops.linear(gated, block.ple_out)
            residual, normed = ops.residual_norm(
                residual, added, block.ple_post_norm, scale=block.scalar, next_w=block.next_norm, eps=eps
            )
        return residual, normed

    def mlp(self, h: Tensor, block: Block) -> Tensor:
        ops = self.ops
        act = self.config.activation
        if block.gate_up_bias is None:
            return self.all_reduce(ops.linear(ops.gated_linear(h, block.gate_up, act), block.down))
        gate, up = ops.linear(h, block.gate_up, block.gate_up_bias).chunk(2, dim=-1)
        return self.all_reduce(ops.linear(ops.act_mul(gate, up, act), block.down, block.down_bias))

    def mlp_norms(self, block: Block) -> ResidualNorms:
        """Norms behind the MLP. With per-layer embeddings, the layer's scalar and the next norm come after those."""
        if self.config.ple_dim:
            return ResidualNorms(block.post_mlp_norm, scalar=None, next_norm=None)
        return ResidualNorms(block.post_mlp_norm, scalar=block.scalar, next_norm=block.next_norm)

    def mlp_and_experts(
        self, experts: Experts, block: Block, h: Tensor, router_in: Tensor, expert_in: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """MLP, experts and the residual step. h, router_in, expert_in [R, H]: norms of the stream x, their inputs."""
        ops = self.ops
        layer = experts.layer
        if self.together.tp.world == 1:
            return ops.moe_with_shared_mlp(router_in, expert_in, h, stream=x, layer=layer)
        # Each process has a piece of every expert: the sum comes before the norm.
        end = layer.end
        routed = self.all_reduce(ops.moe(router_in, expert_in, layer.experts))
        dense = ops.rms_norm(self.mlp(h, block), end.dense_norm, end.eps)
        y = ops.residual_norm(dense, routed, end.routed_norm, scale=None, next_w=None, eps=end.eps)[0]
        return ops.residual_norm(x, y, end.post_norm, scale=end.scale, next_w=end.next_norm, eps=end.eps)

    def gather_experts(self, weights: Mapping[str, DeviceWeight], i: int) -> Experts:
        config = self.config
        block = self.blocks[i]
        here = f"layers.{i}."
        assert config.moe is not None
        router, gate_up, down = (weights[here + name] for name in ("router", "experts_gate_up", "experts_down"))
        scale, router_scale, norm, post, post_dense = (
            as_tensor(weights[here + name])
            for name in ("expert_scale", "router_scale", "mlp_norm_2", "post_mlp_norm_2", "post_mlp_norm_1")
        )
        experts = ExpertWeights(router, scale, gate_up, down=down, top_k=config.moe.top_k, act=config.activation)
        norms = self.mlp_norms(block)
        end = MoeResidual(
            dense_norm=post_dense,
            routed_norm=post,
            post_norm=norms.post_norm,
            scale=norms.scalar,
            next_norm=norms.next_norm,
            eps=config.norm_eps,
        )
        layer = MoeLayer(experts, (block.gate_up, block.down), end)
        return Experts(layer, router_scale * config.hidden**-0.5, norm)

    def embed(self, ids: Tensor) -> Tensor:
        """[R] -> the scaled input embedding [R, H], which is also an MTP drafter's input."""
        return self.rows(ids, self.table, self.config.embed_scale)

    def rows(self, ids: Tensor, table: DeviceWeight, scale: float) -> Tensor:
        """[R] -> [R, width] of a vocabulary-parallel table: a rank looks up its tokens, 0 for others; exact."""
        if len(self.tokens) == 1:
            return self.ops.embed(ids, table, scale)
        lo, hi = self.tokens[self.together.tp.rank]
        rows = self.ops.embed((ids - lo).clamp(0, hi - lo - 1), table, scale)
        return self.all_reduce(rows.masked_fill(((ids < lo) | (ids >= hi))[:, None], 0.0))

    def per_layer_inputs(self, source: PerLayerInput, ids: Tensor, x: Tensor) -> Tensor:
        """[L, R, ple]: the token's own part and a projection of its embedding, computed once per pass."""
        ops = self.ops
        config = self.config
        projected = ops.linear(x, source.proj)
        if len(self.tokens) > 1:  # the rows of these tokens, as a table of their own
            by_token = self.rows(ids, source.table, 1.0)
            ids = torch.arange(ids.shape[0], device=ids.device)
            source = replace(source, table=by_token)
        return ops.per_layer_inputs(
            ids, source.table, projected, scale=config.hidden**-0.5, w=source.norm, eps=config.norm_eps
        )

    def angles(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """cos, sin [R, D/2] of every rope variant."""
        return [self.ops.rope_angles(positions, freq) for freq in self.inv_freqs]

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] after the final norm -> float32 [R, V]."""
        return self.scores(hidden, self.config.softcap)

    def scores(self, hidden: Tensor, softcap: float | None) -> Tensor:
        return self.together.gather(self.ops.logits(hidden, self.head, softcap), [hi - lo for lo, hi in self.tokens])
