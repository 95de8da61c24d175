"""The networks of block and feature drafters, over the backend's operations: DFlash, DFlash 2, DSpark, EAGLE-3.

The first three read the target's hidden states after some layers (taps) at every committed position (`context`,
`write_context`) and draft in one pass over the newest token and mask tokens (`backbone`). EAGLE-3 has one causal
layer, drafts token by token and feeds its output back. Control flow depends on shapes only. The definitions are the
published ones: tests/parity/test_block_drafters.py compares with dflash, DeepSpec, speculators and SafeAILab's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.backend import Angles, BlockCall
from ..ops.formats import DeviceWeight
from ..ops.reference import Backend, as_tensor
from ..types import AttnSpec, BlockAttn, BlockRows, KVView
from .block_config import BlockConfig
from .decoder import TextModel, rope_variants, vector

Rotations = list[Angles]  # of every rope variant


@dataclass(frozen=True)
class Conv:
    """DFlash 2: a causal convolution over the block, before and after a sublayer; its input gives the kernel."""

    base: Tensor  # [2, taps, H]
    projection: DeviceWeight  # [2·taps·H/group, H]


@dataclass(frozen=True)
class DraftLayer:
    """The weights of one layer. Queries and K/V have separate projections: a context needs K/V only."""

    attn: BlockAttn
    rope: int
    attn_norm: Tensor
    q: DeviceWeight
    kv: DeviceWeight  # [2·kv_heads·D, H], or k alone where v is the same
    q_bias: Tensor | None
    kv_bias: Tensor | None
    out: DeviceWeight
    out_bias: Tensor | None
    post_attn_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: DeviceWeight
    down: DeviceWeight
    post_mlp_norm: Tensor | None
    scalar: Tensor | None
    attn_conv: Conv | None
    mlp_conv: Conv | None


def convolve(x: Tensor, dynamic: Tensor, base: Tensor) -> Tensor:
    """x [B, S, H]; dynamic [B, S, taps, G]; base [taps, H]: each slot's sum over itself and the slots before it."""
    size, slots, hidden = x.shape
    taps, groups = dynamic.shape[2:]
    padded = F.pad(x, (0, 0, taps - 1, 0))  # zeros before the first slot
    shifted = torch.stack([padded[:, taps - 1 - t : taps - 1 - t + slots] for t in range(taps)], 2)  # [B, S, taps, H]
    kernel = base.to(x.dtype).view(taps, groups, -1) + dynamic[..., None]  # [B, S, taps, G, H/G]
    return (kernel * shifted.view(size, slots, taps, groups, -1)).sum(2).view(size, slots, hidden)


def after(conv: Conv | None, kernel: Tensor | None, y: Tensor, slots: int) -> Tensor:
    if conv is None or kernel is None:
        return y
    return convolve(y.view(-1, slots, y.shape[1]), kernel, conv.base[1]).view(y.shape)


class BlockNet:
    def __init__(self, config: BlockConfig, weights: Mapping[str, DeviceWeight], ops: Backend, target: TextModel):
        self.config = config
        self.ops = ops
        self.target = target
        self.norm = as_tensor(weights["norm"])
        self.fc: DeviceWeight = weights["fc"]  # [H, taps·Ht]
        self.hidden_norm = as_tensor(weights["hidden_norm"])
        self.input_norm = vector(weights, "input_norm")
        self.fc_norms = [as_tensor(weights[f"fc_norm.{i}"]) for i in range(len(config.taps or ()) * config.fc_norms)]
        self.table: DeviceWeight | None = weights.get("embed")
        self.head: DeviceWeight | None = weights.get("head")
        rope_of, self.inv_freqs = rope_variants(config.layers, self.norm.device)
        self.kv_specs = config.stored(target.config)
        self.layers = [_layer(weights, i, config, stored=self.kv_specs[i], rope=rope) for i, rope in enumerate(rope_of)]
        self.weights = weights  # of the heads of DFlash 2 and DSpark, by name
        d2t = vector(weights, "d2t")
        drafted = torch.arange(config.draft_vocab, device=self.norm.device)
        self.ids: Tensor | None = None if d2t is None else drafted + d2t  # [V_d] the target's ids
        self.call: BlockCall | None = None  # whole passes (`compiled`)

    def compiled(self) -> BlockNet:
        """Runs whole passes in one call each if the backend can."""
        self.call = self.ops.compile_block(self)
        return self

    # ---- inputs ---------------------------------------------------------------------------------------------------
    def embed(self, ids: Tensor) -> Tensor:
        scale = self.target.config.embed_scale if self.config.embed_scale is None else self.config.embed_scale
        if self.table is not None:
            return self.ops.embed(ids, self.table, scale)
        return self.target.rows(ids, self.target.table, scale)

    def context(self, streams: Sequence[Tensor]) -> Tensor:
        """Tapped states [R, Ht] each -> the context at a committed position [R, H]; EAGLE-3: the residual's feature."""
        ops = self.ops
        eps = self.config.norm_eps
        parts = list(streams)
        if self.fc_norms:
            parts = [ops.rms_norm(part, w, eps) for part, w in zip(parts, self.fc_norms, strict=True)]
        joined = torch.cat(parts, -1)
        if self.input_norm is not None:
            joined = ops.rms_norm(joined, self.input_norm, eps)
        features = ops.linear(joined, self.fc)
        return features if self.config.kind == "eagle3" else ops.rms_norm(features, self.hidden_norm, eps)

    def feature_input(self, layer: DraftLayer, ids: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """EAGLE-3: the input of attention [R, 2H], and the start of the residual stream [R, H]."""
        ops = self.ops
        eps = self.config.norm_eps
        normed = ops.rms_norm(feature, self.hidden_norm, eps)
        joined = torch.cat((ops.rms_norm(self.embed(ids), layer.attn_norm, eps), normed), -1)
        return joined, normed if self.config.norm_before_residual else feature

    # ---- context --------------------------------------------------------------------------------------------------
    def angles(self, positions: Tensor) -> Rotations:
        return [self.ops.rope_angles(positions, freq) for freq in self.inv_freqs]

    def write_context(self, streams: Sequence[Tensor], kv: KVView, following: Tensor) -> None:
        """Writes each layer's K/V of a target pass. following [R]: the token after each position, for EAGLE-3."""
        if self.call is not None:
            self.call.write_context(streams, kv, following)
            return
        x = self.context(streams)
        angles = self.angles(kv.positions)
        if self.config.kind == "eagle3":
            x, _ = self.feature_input(self.layers[0], following, x)
        for layer in self.layers:
            kv_rows = self.ops.linear(x, layer.kv, layer.kv_bias)
            self.ops.write_context(kv_rows, angles[layer.rope], layer.attn, kv=kv)

    # ---- layers ---------------------------------------------------------------------------------------------------
    def rows(self, layer: DraftLayer, like: Tensor, end: Tensor, count: int) -> BlockRows:
        """Buffers for the K/V of blocks of `count` rows that begin at position `end` [B]."""
        spec = layer.attn.spec
        k, v = (like.new_empty((end.shape[0], spec.kv_heads, count, spec.head_dim)) for _ in range(2))
        return BlockRows(k, v, end)

    def attend(
        self, layer: DraftLayer, x: Tensor, angles: Rotations, kv: KVView, block: BlockRows, first: int
    ) -> Tensor:
        """x [B·S, H'], the rows from `first` on of B blocks -> [B·S, heads·D]."""
        q = self.ops.linear(x, layer.q, layer.q_bias)
        kv_rows = self.ops.linear(x, layer.kv, layer.kv_bias)
        return self.ops.attend_block(q, kv_rows, angles[layer.rope], attn=layer.attn, kv=kv, block=block, first=first)

    def prepare(self, conv: Conv | None, h: Tensor, slots: int) -> tuple[Tensor, Tensor | None]:
        """The sublayer's input, from h [B·S, H], and the convolution kernel for its output."""
        if conv is None:
            return h, None
        dynamic = self.ops.linear(h, conv.projection).view(len(h) // slots, slots, 2, self.config.conv_taps, -1)
        convolved = convolve(h.view(-1, slots, h.shape[1]), dynamic[:, :, 0], conv.base[0])
        return convolved.view(h.shape), dynamic[:, :, 1]

    def rest(
        self, layer: DraftLayer, x: Tensor, attended: Tensor, next_norm: Tensor, slots: int, kernel: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Residual stream x [B·S, H] and attention [B·S, heads·D] -> the stream, and the next layer's input."""
        ops = self.ops
        eps = self.config.norm_eps
        y = after(layer.attn_conv, kernel, ops.linear(attended, layer.out, layer.out_bias), slots=slots)
        x, h = ops.residual_norm(x, y, layer.post_attn_norm, scale=None, next_w=layer.mlp_norm, eps=eps)
        h, kernel = self.prepare(layer.mlp_conv, h, slots)
        y = ops.linear(ops.gated_linear(h, layer.gate_up, self.config.activation), layer.down)
        y = after(layer.mlp_conv, kernel, y, slots=slots)
        return ops.residual_norm(x, y, layer.post_mlp_norm, scale=layer.scalar, next_w=next_norm, eps=eps)

    def backbone(self, ids: Tensor, kv: KVView, end: Tensor) -> Tensor:
        """Blocks of token ids [B, S] that begin at position `end` [B] -> the head's input [B, S, H]."""
        if self.call is not None and self.call.one_pass:
            return self.call.backbone(ids, kv, end)
        size, slots = ids.shape
        angles = self.angles((end[:, None] + torch.arange(slots, device=end.device)).reshape(-1))
        x = self.embed(ids.reshape(-1))
        norms = [*(layer.attn_norm for layer in self.layers), self.norm]
        h = self.ops.rms_norm(x, norms[0], self.config.norm_eps)
        for layer, next_norm in zip(self.layers, norms[1:], strict=True):
            h, kernel = self.prepare(layer.attn_conv, h, slots)
            attended = self.attend(layer, h, angles, kv=kv, block=self.rows(layer, h, end, count=slots), first=0)
            x, h = self.rest(layer, x, attended, next_norm=next_norm, slots=slots, kernel=kernel)
        return h.view(size, slots, -1)

    def feature_step(
        self, ids: Tensor, feature: Tensor, kv: KVView, own: BlockRows, step: int
    ) -> tuple[Tensor, Tensor]:
        """EAGLE-3: ids [B], features [B, H] of position `own.end` + step -> the head's input, the next feature."""
        (layer,) = self.layers
        joined, x = self.feature_input(layer, ids, feature)
        attended = self.attend(layer, joined, self.angles(own.end + step), kv=kv, block=own, first=step)
        x, h = self.rest(layer, x, attended, next_norm=self.norm, slots=1, kernel=None)
        return h, h if self.config.norm_output else x

    # ---- heads ----------------------------------------------------------------------------------------------------
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> float32 [R, V_d], scaled and capped as the checkpoint asks."""
        scale = self.config.output_scale
        cap = self.config.softcap
        capped = cap if scale == 1.0 else None  # inside the matmul kernel
        if self.head is not None:
            z = self.ops.logits(hidden, self.head, capped)
        else:
            z = self.target.scores(hidden, capped)
        if scale == 1.0:
            return z
        return z * scale if cap is None else torch.tanh(z * (scale / cap)) * cap

    def select(self, hidden: Tensor, unary: Tensor, candidates: Tensor, previous: Tensor) -> Tensor:
        """DFlash 2: scores [B, top] of the candidates [B, top] (draft ids) after the tokens `previous` [B]."""
        w = self.weights
        ops = self.ops
        pairs = ops.embed(previous, w["predecessor"], 1.0) * ops.linear(hidden, w["selector"])  # [B, r]
        after = ops.embed(candidates.reshape(-1), w["successor"], 1.0).view(*candidates.shape, -1)
        return unary + torch.einsum("br,bkr->bk", pairs.float(), after.float())

    def markov(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """DSpark's sequential head: addition to the logits [B, V_d], next state, embedding of `previous` [B]."""
        w = self.weights
        ops = self.ops
        e = ops.embed(previous, w["markov_w1"], 1.0)  # [B, r]
        state = torch.zeros_like(e) if state is None else state
        mixed = e
        if self.config.markov == "gated":
            joint = ops.linear(torch.cat((hidden, e), -1), w["markov_joint"], vector(w, "markov_joint_bias"))
            mixed = torch.sigmoid(joint) * e
        elif self.config.markov == "rnn":
            joint = ops.linear(torch.cat((state, e, hidden), -1), w["markov_joint"], vector(w, "markov_joint_bias"))
            gate, candidate, input_gate = joint.chunk(3, -1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1.0 - gate) * torch.tanh(candidate)
            mixed = torch.tanh(input_gate)
        return ops.logits(mixed, w["markov_w2"], None), state, e

    def confidence(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """DSpark: float32 [B], the probability that the target accepts this token after those before."""
        joined = hidden if embedded is None else torch.cat((hidden, embedded.to(hidden.dtype)), -1)
        weight, bias = (as_tensor(self.weights[name]) for name in ("confidence", "confidence_bias"))
        return torch.sigmoid(F.linear(joined.float(), weight, bias))[:, 0]


def _layer(weights: Mapping[str, DeviceWeight], i: int, config: BlockConfig, stored: AttnSpec, rope: int) -> DraftLayer:
    here = f"layers.{i}."
    layer_weights = {name.removeprefix(here): weight for name, weight in weights.items() if name.startswith(here)}

    def conv(name: str) -> Conv | None:
        if name not in layer_weights:
            return None
        return Conv(as_tensor(layer_weights[name]), layer_weights[name + "_projection"])

    causal = config.causal[i]
    window = config.layers[i].attn.window
    attn = BlockAttn(
        stored, window, causal, q_norm=vector(layer_weights, "q_norm"), k_norm=vector(layer_weights, "k_norm")
    )
    modules = {"attn": attn, "rope": rope, "attn_conv": conv("attn_conv"), "mlp_conv": conv("mlp_conv")}
    plain = {field.name: layer_weights.get(field.name) for field in fields(DraftLayer) if field.name not in modules}
    return DraftLayer(**modules, **plain)  # type: ignore[arg-type]  # as it is planned
