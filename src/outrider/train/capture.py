"""Online capture: one forward of the target over whole sequences gives what a drafter may see, and nothing goes to disk.

The target's own model code runs over dense tensors instead of pages: `DenseOps` writes K/V as [B, kv_heads, T, D] and
attends with the library's fused kernels. Sequences are padded on the right; causality keeps the padding harmless.
`SlotKV` is the same for decoding: B slots, one row each, K/V preallocated, so that a step can be a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.formats import Held
from ..ops.reference import ReferenceOps, activation, plain
from ..types import AttnSpec


@dataclass
class DenseKV:
    """Whole sequences: row r is position r % T of sequence r // T."""

    batch: int
    length: int
    positions: Tensor  # int64 [B·T]
    keys: dict[int, Tensor] = field(default_factory=dict)  # by layer [B, kv_heads, T, D]
    values: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(batch: int, length: int, device: torch.device) -> DenseKV:
        return DenseKV(batch, length, torch.arange(length, device=device).repeat(batch))


@dataclass
class SlotKV:
    """One row a slot at `positions`; keys up to `limit` are looked at (a host number: the shape of a captured graph)."""

    positions: Tensor  # int64 [B]
    slots: Tensor  # int64 [B] 0..B-1
    keys: dict[int, Tensor]  # by layer [B, kv_heads, T, D]
    values: dict[int, Tensor]
    limit: int


class DenseOps(ReferenceOps):
    """The reference ops over DenseKV or SlotKV, with fused norms and attention where the library has them."""

    name = "dense"

    def __init__(self) -> None:
        self._cast: dict[int, tuple[Tensor, Tensor]] = {}  # norm weights in the activations' dtype, kept alive beside the original

    def embed(self, ids: Tensor, table: Held, scale: float) -> Tensor:
        """As the reference's, with the factor rounded on the host: a captured graph may not copy from there."""
        rows = F.embedding(ids, plain(table))
        return rows if scale == 1.0 else rows * float(torch.tensor(scale, dtype=rows.dtype))

    def rms_norm(self, x: Tensor, w: Tensor | None, eps: float) -> Tensor:
        if x.dtype == torch.float32:
            return super().rms_norm(x, w, eps)
        if w is not None and w.dtype != x.dtype:
            kept = self._cast.get(id(w))
            if kept is None:
                kept = self._cast[id(w)] = (w, w.to(x.dtype))
            w = kept[1]
        return F.rms_norm(x, (x.shape[-1],), w, eps)

    def gated_linear(self, x: Tensor, w: Held, act: str) -> Tensor:
        gate, up = self.linear(x, w).chunk(2, dim=-1)
        return activation(act, gate).mul_(up)

    def rope_write(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, spec: AttnSpec, kv: Any
    ) -> Tensor:
        """As the reference's; where q and k have no norms of their own, each turns in one kernel."""
        if not qkv.is_cuda or q_norm is not None or k_norm is not None or not spec.writes or spec.k_eq_v or spec.norm_v:
            return super().rope_write(qkv, cos, sin, q_norm, k_norm, spec, kv)
        from .rotary import turn

        q, k, v = qkv.unflatten(1, (-1, spec.head_dim)).split((spec.heads, spec.kv_heads, spec.kv_heads), dim=1)
        self.write_kv(turn(k, cos, sin, 1.0), v, spec, kv)
        return turn(q, cos, sin, 1.0).flatten(1)

    def write_kv(self, k: Tensor, v: Tensor, spec: AttnSpec, kv: Any) -> None:
        if isinstance(kv, SlotKV):
            kv.keys[spec.kv_layer][kv.slots, :, kv.positions] = k
            kv.values[spec.kv_layer][kv.slots, :, kv.positions] = v
            return
        shape = (kv.batch, kv.length, spec.kv_heads, spec.head_dim)
        kv.keys[spec.kv_layer] = k.view(shape).transpose(1, 2)
        kv.values[spec.kv_layer] = v.reshape(shape).transpose(1, 2)

    def attend(self, q: Tensor, spec: AttnSpec, kv: Any) -> Tensor:
        k, v = kv.keys[spec.kv_layer], kv.values[spec.kv_layer]
        if isinstance(kv, SlotKV):
            return self._attend_slots(q, k[:, :, : kv.limit], v[:, :, : kv.limit], spec, kv)
        qs = q.view(kv.batch, kv.length, spec.heads, spec.head_dim).transpose(1, 2)
        out = causal_attention(qs, spread_heads(k, spec.heads), spread_heads(v, spec.heads), spec.scale, spec.window)
        return out.transpose(1, 2).reshape(q.shape)

    def _attend_slots(self, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, kv: SlotKV) -> Tensor:
        qs = q.view(-1, spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)
        at = torch.arange(kv.limit, device=q.device)
        hidden = at[None, :] > kv.positions[:, None]  # [B, T]
        if spec.window is not None:
            hidden |= at[None, :] <= kv.positions[:, None] - spec.window
        scores = torch.matmul(qs, k.transpose(-1, -2)).float().mul_(spec.scale)  # [B, kv_heads, G, T]
        weights = scores.masked_fill_(hidden[:, None, None, :], float("-inf")).softmax(-1).to(q.dtype)
        return torch.matmul(weights, v).reshape(q.shape)


def spread_heads(x: Tensor, heads: int) -> Tensor:
    """[B, kv_heads, T, D] -> [B, heads, T, D]: every K/V head repeated for the query heads that share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
    """q [B, heads, Tq, D] are the last Tq of the T positions; k, v [B, heads, T, D]. Query i sees keys <= i (in the window)."""
    ends, length = q.shape[2], k.shape[2]
    if window is not None and length > window:
        i = torch.arange(length - ends, length, device=q.device)[:, None]
        j = torch.arange(length, device=q.device)[None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(j <= i) & (j > i - window), scale=scale)
    if ends == length:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    from torch.nn.attention.bias import causal_lower_right

    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(ends, length), scale=scale)


@dataclass(frozen=True)
class Captured:
    hidden: Tensor  # [B, T, H] after the final norm
    keys: dict[int, Tensor]  # by layer [B, kv_heads, T, D]
    values: dict[int, Tensor]
    taps: tuple[Tensor, ...]  # residual streams [B, T, H]


@torch.no_grad()
def capture(model: Any, ids: Tensor, taps: tuple[int, ...] = ()) -> Captured:
    """ids [B, T] from position 0. `model` must have been built over DenseOps."""
    batch, length = ids.shape
    kv = DenseKV.of(batch, length, ids.device)
    out = model.forward(ids.reshape(-1), kv, taps) if taps else (model.forward(ids.reshape(-1), kv), ())
    hidden, streams = out
    shape = (batch, length, hidden.shape[-1])
    return Captured(hidden.view(shape), kv.keys, kv.values, tuple(s.view(shape) for s in streams))
