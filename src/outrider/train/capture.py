"""Online capture: one forward pass of the target over whole sequences yields the drafter's inputs; nothing is stored on
disk.

The target's own model code runs over dense tensors instead of pages: `DenseOps` writes K/V as [B, kv_heads, T, D] and
attends with torch's fused kernels. Sequences are padded on the right; causality keeps the padding harmless. `Recorder`
returns the target's outputs for a batch: captured on the spot, or once per sequence and then kept in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.decoder import TextModel
from ..ops.formats import DeviceWeight
from ..ops.reference import ReferenceOps, as_tensor
from ..types import AttnSpec
from .data import Sequences, TrainBatch
from .losses import likely_tokens


@dataclass
class DenseKV:
    """Whole sequences of T positions. Rows are the last Tq positions of each, sequence by sequence; those that write
    K/V are all T."""

    batch: int
    positions: Tensor  # int64 [B·Tq]
    keys: dict[int, Tensor] = field(default_factory=dict)  # by layer [B, kv_heads, T, D]
    values: dict[int, Tensor] = field(default_factory=dict)


class DenseOps(ReferenceOps):
    """The reference ops over DenseKV, with fused norms and attention where the library has them."""

    name = "dense"

    def __init__(self) -> None:
        # norm weights in the activations' dtype, with the original, which stays alive
        self._cast: dict[int, tuple[Tensor, Tensor]] = {}

    def embed(self, ids: Tensor, table: DeviceWeight, scale: float) -> Tensor:
        """As the reference's, with the factor rounded on the host: a captured graph may not copy from there."""
        rows = F.embedding(ids, as_tensor(table))
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

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not x.is_cuda:
            return super().rotate(x, cos, sin)
        from .kernels import Rotate

        return Rotate.apply(x, cos, sin)

    def write_kv(self, k: Tensor, v: Tensor, spec: AttnSpec, kv: DenseKV) -> None:  # type: ignore[override]
        shape = (kv.batch, -1, spec.kv_heads, spec.head_dim)
        kv.keys[spec.kv_layer] = k.view(shape).transpose(1, 2)
        kv.values[spec.kv_layer] = v.reshape(shape).transpose(1, 2)

    def attend(self, q: Tensor, spec: AttnSpec, kv: DenseKV) -> Tensor:  # type: ignore[override]
        k, v = kv.keys[spec.kv_layer], kv.values[spec.kv_layer]
        qs = q.view(kv.batch, -1, spec.heads, spec.head_dim).transpose(1, 2)
        out = causal_attention(qs, spread_heads(k, spec.heads), spread_heads(v, spec.heads), spec.scale, spec.window)
        return out.transpose(1, 2).reshape(q.shape)


def spread_heads(x: Tensor, heads: int) -> Tensor:
    """[B, kv_heads, T, D] -> [B, heads, T, D]: every K/V head repeated for the query heads that share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
    """q [B, heads, Tq, D] are the last Tq of the T positions; k, v [B, heads, T, D]. Query i sees keys <= i (in the
    window)."""
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
class CapturedStates:
    hidden: Tensor  # [B, T, H] after the final norm
    keys: dict[int, Tensor]  # by layer [B, kv_heads, T, D]
    values: dict[int, Tensor]
    taps: tuple[Tensor, ...]  # residual streams [B, T, H]


@torch.no_grad()
def capture(model: TextModel, ids: Tensor, taps: tuple[int, ...] = ()) -> CapturedStates:
    """ids [B, T] from position 0. `model` must have been built over DenseOps."""
    batch, length = ids.shape
    kv = DenseKV(batch, torch.arange(length, device=ids.device).repeat(batch))
    out = model.forward(ids.reshape(-1), kv, taps)  # type: ignore[arg-type]
    shape = (batch, length, out.hidden.shape[-1])
    return CapturedStates(out.hidden.view(shape), kv.keys, kv.values, tuple(s.view(shape) for s in out.streams))


class Recorder:
    """The target's outputs for the batches of one dataset. With `keep` it runs once per sequence, each alone, so that
    the outputs do not depend on the batch; only the layers that the drafter reads are kept."""

    def __init__(
        self,
        model: TextModel,
        data: Sequences,
        reads: tuple[int, ...],
        taps: tuple[int, ...],
        keep: bool = False,
        rank: bool = False,
    ):
        self.model, self.data, self.reads, self.taps, self.keep = model, data, reads, taps, keep
        self.rank = rank  # `likely` will be asked for
        # By sequence: its states (a batch of one), and int32 [judged positions, LIKELY] the likeliest tokens, where
        # they will be asked for.
        self.kept: dict[int, tuple[CapturedStates, Tensor]] = {}

    def take(self, batch: TrainBatch) -> CapturedStates:
        if not self.keep:
            return capture(self.model, batch.ids, self.taps)
        rows = [self._shown(int(i))[0] for i in batch.which]
        width = batch.ids.shape[1]

        def joined(parts: list[Tensor]) -> Tensor:  # [1, (kv_heads,) T, D] each, padded with zeros to the batch's width
            return torch.cat([F.pad(p, (0, 0, 0, width - p.shape[-2])) for p in parts])

        return CapturedStates(
            joined([r.hidden for r in rows]),
            {l: joined([r.keys[l] for r in rows]) for l in self.reads},
            {l: joined([r.values[l] for r in rows]) for l in self.reads},
            tuple(joined([r.taps[n] for r in rows]) for n in range(len(self.taps))),
        )

    def likely(self, batch: TrainBatch, seen: CapturedStates) -> Tensor:
        """The target's likeliest tokens at the batch's judged positions [N, LIKELY]."""
        if self.keep:
            return torch.cat([self._shown(int(i))[1] for i in batch.which]).long()
        return likely_tokens(self.model, seen.hidden.flatten(0, 1)[batch.teacher])

    def _shown(self, i: int) -> tuple[CapturedStates, Tensor]:
        if i not in self.kept:
            ids = torch.from_numpy(self.data[i].astype(np.int64))[None].to(self.model.device)
            seen = capture(self.model, ids, self.taps)
            judged = seen.hidden[0, int(self.data.prompts[i]) : ids.shape[1] - 1]
            likely = likely_tokens(self.model, judged).int() if self.rank else torch.zeros((0, 0), dtype=torch.int32)
            keys, values = ({l: side[l].contiguous() for l in self.reads} for side in (seen.keys, seen.values))
            self.kept[i] = CapturedStates(seen.hidden, keys, values, seen.taps), likely
        return self.kept[i]
