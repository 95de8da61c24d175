"""The networks of block and feature drafters, in the backend's operations: DFlash, DFlash 2, DSpark, EAGLE-3.

A block drafter (the first three) reads the target's residual streams of every committed position: `context` joins and
norms them, `project` makes each layer's K/V of them. A draft is one pass over a block of tokens, the newest one and
mask tokens behind it (`backbone`), whose slots attend to that context and to one another. EAGLE-3 has one causal layer
fed by the embedding of the token after a position and by the joined streams; it drafts token by token and feeds its own
output back.

The definitions are the published ones: dflash (z-lab), DeepSpec (deepseek-ai), speculators (Red Hat), EAGLE-3
(SafeAILab). tests/parity/test_block_drafters.py holds these networks against them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.backend import Backend
from ..ops.formats import DeviceWeight
from ..ops.reference import as_tensor, rotate
from .block_config import BlockConfig
from .config import LayerSpec
from .decoder import TextModel
from .layers import rope_variants, vector

# layer -> keys and values [B, kv_heads, N, D] of a context, and the position of each key [B, N] (below 0: none)
Past = Callable[[int], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Conv:
    """DFlash 2: a causal convolution over the block whose kernel follows from its input, before and after a
    sublayer."""

    base: Tensor  # [2, taps, H]
    projection: DeviceWeight  # [2·taps·H/group, H]


@dataclass(frozen=True)
class DraftLayer:
    """The weights of one layer. Queries and K/V are apart: a context needs the second only."""

    spec: LayerSpec
    causal: bool
    rope: int
    attn_norm: Tensor
    q: DeviceWeight
    kv: DeviceWeight  # [2·kv_heads·D, H], or k alone where v is the same
    q_bias: Tensor | None
    kv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
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
    padded = F.pad(x, (0, 0, taps - 1, 0))  # nothing stands before the first slot
    shifted = torch.stack([padded[:, taps - 1 - t : taps - 1 - t + slots] for t in range(taps)], 2)  # [B, S, taps, H]
    kernel = base.to(x.dtype).view(taps, groups, -1) + dynamic[..., None]  # [B, S, taps, G, H/G]
    return (kernel * shifted.view(size, slots, taps, groups, -1)).sum(2).view(size, slots, hidden)


class BlockNet:
    def __init__(self, config: BlockConfig, weights: Mapping[str, DeviceWeight], ops: Backend, target: TextModel):
        self.config, self.ops, self.target = config, ops, target
        self.norm = as_tensor(weights["norm"])
        self.fc: DeviceWeight = weights["fc"]  # [H, taps·Ht]
        self.hidden_norm = as_tensor(weights["hidden_norm"])
        self.input_norm = vector(weights, "input_norm")
        self.fc_norms = [as_tensor(weights[f"fc_norm.{i}"]) for i in range(len(config.taps or ()) * config.fc_norms)]
        self.table: DeviceWeight | None = weights.get("embed")
        self.head: DeviceWeight | None = weights.get("head")
        rope_of, self.inv_freqs = rope_variants(config.layers, self.norm.device)
        self.layers = [_layer(weights, i, config, rope) for i, rope in enumerate(rope_of)]
        self.weights = weights  # of the heads of DFlash 2 and DSpark, by name
        d2t = vector(weights, "d2t")
        drafted = torch.arange(config.draft_vocab, device=self.norm.device)
        self.ids: Tensor | None = None if d2t is None else drafted + d2t  # [V_d] the target's ids

    # ---- inputs ---------------------------------------------------------------------------------------------------
    def embed(self, ids: Tensor) -> Tensor:
        """[R] -> [R, H]"""
        scale = self.target.config.embed_scale if self.config.embed_scale is None else self.config.embed_scale
        if self.table is not None:
            return self.ops.embed(ids, self.table, scale)
        return self.target.rows(ids, self.target.table, scale)

    def context(self, streams: Sequence[Tensor]) -> Tensor:
        """The tapped streams [R, Ht] each -> what layers read of a committed position [R, H]; of EAGLE-3 the feature
        that enters the residual stream."""
        ops, eps, parts = self.ops, self.config.norm_eps, list(streams)
        if self.fc_norms:
            parts = [ops.rms_norm(part, w, eps) for part, w in zip(parts, self.fc_norms, strict=True)]
        joined = torch.cat(parts, -1)
        if self.input_norm is not None:
            joined = ops.rms_norm(joined, self.input_norm, eps)
        made = ops.linear(joined, self.fc)
        return made if self.config.kind == "eagle3" else ops.rms_norm(made, self.hidden_norm, eps)

    def feature_input(self, layer: DraftLayer, ids: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """EAGLE-3: what attention reads [R, 2H], and where the residual stream begins [R, H]."""
        ops, eps = self.ops, self.config.norm_eps
        normed = ops.rms_norm(feature, self.hidden_norm, eps)
        joined = torch.cat((ops.rms_norm(self.embed(ids), layer.attn_norm, eps), normed), -1)
        return joined, normed if self.config.norm_before_residual else feature

    # ---- attention ------------------------------------------------------------------------------------------------
    def head_norm(self, x: Tensor, w: Tensor | None) -> Tensor:
        """x [R, heads, D], each head by itself."""
        return self.ops.rms_norm(x.reshape(-1, x.shape[-1]), w, self.config.norm_eps).view(x.shape)

    def project(self, layer: DraftLayer, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [R, kv_heads, D] of rows x at positions [R]."""
        ops, spec = self.ops, layer.spec.attn
        heads = spec.kv_heads * (1 if spec.k_eq_v else 2)
        made = ops.linear(x, layer.kv, layer.kv_bias).view(x.shape[0], heads, spec.head_dim)
        raw_k, raw_v = made[:, : spec.kv_heads], made[:, 0 if spec.k_eq_v else spec.kv_heads :]
        k = raw_k if layer.k_norm is None else self.head_norm(raw_k, layer.k_norm)
        v = self.head_norm(raw_v, None) if spec.norm_v else raw_v
        return rotate(k, *ops.rope_angles(positions, self.inv_freqs[layer.rope])), v

    def attend(self, layer: DraftLayer, x: Tensor, positions: Tensor, past: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """x [B, S, H'] at positions [B, S] over the past's keys and one another -> [B, S, heads·D]."""
        spec, (size, slots, _), ops = layer.spec.attn, x.shape, self.ops
        flat, at = x.reshape(size * slots, -1), positions.reshape(-1)
        q = ops.linear(flat, layer.q, layer.q_bias).view(size * slots, spec.heads, spec.head_dim)
        q = q if layer.q_norm is None else self.head_norm(q, layer.q_norm)
        q = rotate(q, *ops.rope_angles(at, self.inv_freqs[layer.rope]))
        own_k, own_v = (t.view(size, slots, spec.kv_heads, -1).transpose(1, 2) for t in self.project(layer, flat, at))
        keys, values, places = past
        keys, values = torch.cat((keys.to(q.dtype), own_k), 2), torch.cat((values.to(q.dtype), own_v), 2)
        places = torch.cat((places, positions), 1)[:, None]  # [B, 1, N + S]
        behind = positions[..., None] - places  # [B, S, N + S]
        seen = (places >= 0).expand_as(behind)
        if layer.causal:
            seen = seen & (behind >= 0)
        if spec.window is not None:
            seen = seen & (behind.abs() < spec.window)
        mixed = F.scaled_dot_product_attention(
            q.view(size, slots, spec.heads, -1).transpose(1, 2),
            keys,
            values,
            seen[:, None],
            scale=spec.scale,
            enable_gqa=True,
        )
        return mixed.transpose(1, 2).reshape(size, slots, -1)

    # ---- layers ---------------------------------------------------------------------------------------------------
    def prepare(self, conv: Conv | None, h: Tensor) -> tuple[Tensor, Tensor | None]:
        """h [B, S, H] as the sublayer reads it, and the kernel for what it gives."""
        if conv is None:
            return h, None
        size, slots, hidden = h.shape
        dynamic = self.ops.linear(h.reshape(size * slots, hidden), conv.projection)
        dynamic = dynamic.view(size, slots, 2, self.config.conv_taps, -1)
        return convolve(h, dynamic[:, :, 0], conv.base[0]), dynamic[:, :, 1]

    def rest(self, layer: DraftLayer, x: Tensor, attended: Tensor, kernel: Tensor | None = None) -> Tensor:
        """Residual stream x [B, S, H] and attention output [B, S, heads·D] -> the stream after the layer."""
        ops, eps, (size, slots, hidden) = self.ops, self.config.norm_eps, x.shape
        rows = lambda t: t.reshape(size * slots, -1)  # noqa: E731
        y = ops.linear(rows(attended), layer.out, layer.out_bias)
        if kernel is not None and layer.attn_conv is not None:
            y = rows(convolve(y.view(size, slots, hidden), kernel, layer.attn_conv.base[1]))
        stream, h = ops.residual_norm(rows(x), y, layer.post_attn_norm, None, layer.mlp_norm, eps)
        h3, kernel = self.prepare(layer.mlp_conv, h.view(size, slots, hidden))
        y = ops.linear(ops.gated_linear(rows(h3), layer.gate_up, self.config.activation), layer.down)
        if kernel is not None and layer.mlp_conv is not None:
            y = rows(convolve(y.view(size, slots, hidden), kernel, layer.mlp_conv.base[1]))
        stream, _ = ops.residual_norm(stream, y, layer.post_mlp_norm, layer.scalar, None, eps)
        return stream.view(size, slots, hidden)

    def backbone(self, ids: Tensor, positions: Tensor, past: Past) -> Tensor:
        """A block of tokens ids [B, S] at positions [B, S] -> what the head reads [B, S, H]."""
        size, slots = ids.shape
        x = self.embed(ids.reshape(-1)).view(size, slots, -1)
        for i, layer in enumerate(self.layers):
            h = self.ops.rms_norm(x.reshape(size * slots, -1), layer.attn_norm, self.config.norm_eps)
            h, kernel = self.prepare(layer.attn_conv, h.view(size, slots, -1))
            x = self.rest(layer, x, self.attend(layer, h, positions, past(i)), kernel)
        return self.ops.rms_norm(x.reshape(size * slots, -1), self.norm, self.config.norm_eps).view(size, slots, -1)

    def feature_step(
        self, ids: Tensor, feature: Tensor, positions: Tensor, past: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """EAGLE-3: tokens ids [B] behind the positions [B], their features [B, H] -> what the head reads, the next
        step's feature, and the past with this row."""
        (layer,) = self.layers
        joined, x = self.feature_input(layer, ids, feature)
        x = self.rest(layer, x[:, None], self.attend(layer, joined[:, None], positions[:, None], past))[:, 0]
        k, v = (t[:, :, None] for t in self.project(layer, joined, positions))
        keys, values, places = past
        grown = torch.cat((keys.to(k.dtype), k), 2), torch.cat((values.to(v.dtype), v), 2)
        h = self.ops.rms_norm(x, self.norm, self.config.norm_eps)
        return h, h if self.config.norm_output else x, (*grown, torch.cat((places, positions[:, None]), 1))

    # ---- heads ----------------------------------------------------------------------------------------------------
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> float32 [R, V_d], scaled and capped as the checkpoint asks."""
        config = self.config
        if self.head is not None:
            z = self.ops.logits(hidden, self.head, None)
        else:
            z = self.target.scores(hidden, None)
        z = z if config.output_scale == 1.0 else z * config.output_scale
        return z if config.softcap is None else torch.tanh(z / config.softcap) * config.softcap

    def select(self, hidden: Tensor, unary: Tensor, candidates: Tensor, previous: Tensor) -> Tensor:
        """DFlash 2: scores [B, top] of the candidates [B, top] (draft ids) with these unary logits, behind the tokens
        `previous` [B]."""
        w, ops = self.weights, self.ops
        pairs = ops.embed(previous, w["predecessor"], 1.0) * ops.linear(hidden, w["selector"])  # [B, r]
        after = ops.embed(candidates.reshape(-1), w["successor"], 1.0).view(*candidates.shape, -1)
        return unary + torch.einsum("br,bkr->bk", pairs.float(), after.float())

    def markov(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """DSpark's sequential head: what it adds to the logits [B, V_d], its next state, and the embedding of the
        tokens `previous` [B]."""
        w, ops = self.weights, self.ops
        e = ops.embed(previous, w["markov_w1"], 1.0)  # [B, r]
        state = torch.zeros_like(e) if state is None else state
        mixed = e
        if self.config.markov == "gated":
            joint = ops.linear(torch.cat((hidden, e), -1), w["markov_joint"], vector(w, "markov_bias"))
            mixed = torch.sigmoid(joint) * e
        elif self.config.markov == "rnn":
            joint = ops.linear(torch.cat((state, e, hidden), -1), w["markov_joint"], vector(w, "markov_bias"))
            gate, candidate, given = joint.chunk(3, -1)
            gate = torch.sigmoid(gate)
            state, mixed = gate * state + (1.0 - gate) * torch.tanh(candidate), torch.tanh(given)
        return ops.logits(mixed, w["markov_w2"], None), state, e

    def confidence(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """DSpark: float32 [B], how likely the target accepts this slot's token if it accepted those before."""
        joined = hidden if embedded is None else torch.cat((hidden, embedded.to(hidden.dtype)), -1)
        weight, bias = (as_tensor(self.weights[name]) for name in ("confidence", "confidence_bias"))
        return torch.sigmoid(F.linear(joined.float(), weight, bias))[:, 0]


def _layer(weights: Mapping[str, DeviceWeight], i: int, config: BlockConfig, rope: int) -> DraftLayer:
    here = f"layers.{i}."
    own = {name.removeprefix(here): weight for name, weight in weights.items() if name.startswith(here)}
    conv = lambda name: Conv(as_tensor(own[name]), own[name + "_projection"]) if name in own else None  # noqa: E731
    return DraftLayer(
        spec=config.layers[i],
        causal=config.causal[i],
        rope=rope,
        attn_norm=as_tensor(own["attn_norm"]),
        q=own["q"],
        kv=own["kv"],
        q_bias=vector(own, "q_bias"),
        kv_bias=vector(own, "kv_bias"),
        q_norm=vector(own, "q_norm"),
        k_norm=vector(own, "k_norm"),
        out=own["out"],
        out_bias=vector(own, "out_bias"),
        post_attn_norm=vector(own, "post_attn_norm"),
        mlp_norm=as_tensor(own["mlp_norm"]),
        gate_up=own["gate_up"],
        down=own["down"],
        post_mlp_norm=vector(own, "post_mlp_norm"),
        scalar=vector(own, "scalar"),
        attn_conv=conv("attn_conv"),
        mlp_conv=conv("mlp_conv"),
    )
