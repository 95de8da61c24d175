"""Attention in plain PyTorch: rotary embedding, writing K/V into pages, reading it; chains, trees, block drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from ..types import AttnSpec, BlockAttn, BlockRows, KVView
from .backend import Angles, HeadNorms

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
FLOAT16_MAX = 6e4  # a little less than what float16 holds


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """NeoX rotary embedding. x [R, heads, D]; cos, sin [R, D/2] float32; angles of 0 leave a pair untouched."""
    a, b = x.float().chunk(2, dim=-1)
    c = cos[:, None, :]
    s = sin[:, None, :]
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """K/V as the cache holds it. Eight-bit floats have no infinity: values are clamped to their range."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


def encoded(x: Tensor, like: Tensor) -> Tensor:
    """A block drafter's K/V [R, heads, D] as the store keeps it; in int8 with a float32 scale after each head."""
    if like.dtype == torch.int8:
        x = x.float()
        factor = x.abs().amax(-1, keepdim=True).clamp(min=1e-20) / 127.0
        return torch.cat(((x / factor).round().to(torch.int8), factor.contiguous().view(torch.int8)), -1)
    return x.clamp(-FLOAT16_MAX, FLOAT16_MAX).to(like.dtype) if like.dtype == torch.float16 else stored(x, like.dtype)


def decoded(rows: Tensor, dim: int) -> Tensor:
    if rows.dtype == torch.int8:
        return rows[..., :dim].float() * rows[..., dim:].contiguous().view(torch.float32)
    return rows.float() if rows.dtype == torch.float8_e4m3fn else rows


def block_context(attn: BlockAttn, kv: KVView, end: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [B, kv_heads, N, D] of the positions before `end` [B], as far back as the store and the layer's
    window reach, and the position of each [B, N] (below 0: none). Shapes follow from the view alone."""
    spec = attn.spec
    page = kv.page_size
    keys = kv.keys[spec.kv_layer]
    values = kv.values[spec.kv_layer]
    table = kv.tables[spec.group]
    assert keys is not None and values is not None
    width = min(table.shape[1], -(-kv.max_context // page))
    back = min((w for w in (spec.window, attn.window) if w is not None), default=None)
    first = torch.zeros_like(end) if back is None else (end - back + 1).clamp(min=0) // page
    which = first[:, None] + torch.arange(width if back is None else min(width, back // page + 2), device=end.device)
    pages = table.gather(1, which.clamp(max=table.shape[1] - 1)).long()  # [B, P]
    at = (which[:, :, None] * page + torch.arange(page, device=end.device)).flatten(1)  # [B, N]
    there = at < end[:, None]
    if back is not None:
        there &= at > end[:, None] - back

    def rows(t: Tensor) -> Tensor:
        return decoded(t[pages], spec.head_dim).transpose(1, 2).flatten(2, 3)

    return rows(keys), rows(values), torch.where(there, at, -1)


class AttentionOps(ABC):
    """The definitions."""

    @abstractmethod
    def rms_norm(self, x: Tensor, w: Tensor | None, eps: float) -> Tensor:
        """Float32 inside, cast back after scaling; w None: scale-free."""

    def rope_angles(self, positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [R, D/2] in float32; once per pass and rope variant."""
        angles = positions.float()[:, None] * inv_freq[None, :]
        return angles.cos(), angles.sin()

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(x, cos, sin)

    def rope_write(self, qkv: Tensor, angles: Angles, norms: HeadNorms, spec: AttnSpec, kv: KVView) -> Tensor:
        """qkv [R, spec.qkv_rows] -> q [R, heads·D]: norm and rotate q and k, norm v, write k and v."""
        rows = qkv.shape[0]
        dim = spec.head_dim
        q_norm, k_norm = norms
        q = qkv[:, : spec.heads * dim].view(rows, spec.heads, dim)
        q = self.rotate(q if q_norm is None else self.rms_norm(q, q_norm, spec.eps), *angles)
        if spec.writes:
            self.write_kv(*self.keys_values(qkv[:, spec.heads * dim :], angles, k_norm, spec=spec), spec, kv)
        return q.reshape(rows, spec.heads * dim)

    def write_kv(self, k: Tensor, v: Tensor, spec: AttnSpec, kv: KVView) -> None:
        """k, v [R, kv_heads, D] into the pages."""
        keys = kv.keys[spec.kv_layer]
        values = kv.values[spec.kv_layer]
        assert keys is not None and values is not None
        places = kv.positions if kv.kv_slots is None else kv.kv_slots
        page = kv.tables[spec.group][kv.row_seq, places // kv.page_size].long()  # [R]
        slot = places % kv.page_size
        keys[page, :, slot] = stored(k, keys.dtype)
        values[page, :, slot] = stored(v, values.dtype)

    def gather_kv(self, seq: int, count: int, spec: AttnSpec, kv: KVView) -> tuple[Tensor, Tensor]:
        """Keys and values of positions 0..count-1 of one sequence: [kv_heads, count, D]."""
        keys = kv.keys[spec.kv_layer]
        values = kv.values[spec.kv_layer]
        assert keys is not None and values is not None
        pages = kv.tables[spec.group][seq, : -(-count // kv.page_size)].long()

        def rows(t: Tensor) -> Tensor:
            return t[pages].transpose(0, 1).reshape(spec.kv_heads, -1, spec.head_dim)[:, :count]

        return rows(keys), rows(values)

    def rotate_heads(
        self, qkv: Tensor, angles: Angles, norms: tuple[Tensor, Tensor], heads: tuple[int, int], eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norms and rotates q and k, and norms v, of a vision tower's qkv [P, (heads + 2 kv heads)·D].

        Returns [P, heads, D] each.
        """
        q, k, v = qkv.unflatten(-1, (-1, norms[0].shape[0])).split((heads[0], heads[1], heads[1]), 1)
        q, k = (rotate(self.rms_norm(t, w, eps), *angles) for t, w in zip((q, k), norms))
        return q, k, self.rms_norm(v, None, eps)

    def attend(self, q: Tensor, spec: AttnSpec, kv: KVView) -> Tensor:
        """q [R, heads·D] over the rows' visible keys -> [R, heads·D]. Softmax in float32."""
        out = torch.empty_like(q)
        starts = kv.row_start.tolist()
        for b in range(len(starts) - 1):
            lo = starts[b]
            hi = starts[b + 1]
            if lo == hi:
                continue
            if kv.ancestors is not None:
                self._attend_tree(q, spec, kv, b=b, lo=lo, hi=hi, out=out)
                continue
            at = kv.positions[lo:hi]
            out[lo:hi] = self._attend_rows(q[lo:hi], spec, kv, b=b, at=at, last=at)
        return out

    def _attend_rows(self, q: Tensor, spec: AttnSpec, kv: KVView, b: int, at: Tensor, last: Tensor) -> Tensor:
        """Rows of sequence b at positions `at` [R], each of which sees the keys up to `last` [R]."""
        count = int(last.max()) + 1
        rows = q.shape[0]
        k, v = self.gather_kv(b, count, spec, kv=kv)
        j = torch.arange(count, device=q.device)
        visible = j[None, :] <= last[:, None]
        if spec.window is not None:
            visible &= j[None, :] > at[:, None] - spec.window
        qs = q.view(rows, spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)
        scores = torch.einsum("rgqd,gnd->grqn", qs.float(), k.float()) * spec.scale
        weights = scores.masked_fill(~visible[None, :, None, :], float("-inf")).softmax(-1)
        mixed = torch.einsum("grqn,gnd->rgqd", weights, torch.where(visible.any(0)[None, :, None], v.float(), 0.0))
        return mixed.reshape(rows, -1).to(q.dtype)

    def attend_span(self, q: Tensor, spec: AttnSpec, kv: KVView, end: int) -> Tensor:
        """Attention of the rows of one image in one sequence: each sees the keys up to position `end` - 1, and the
        window bounds only the keys before a row."""
        return self._attend_rows(q, spec, kv, b=0, at=kv.positions, last=torch.full_like(kv.positions, end - 1))

    def keys_values(
        self, kv_rows: Tensor, angles: Angles, k_norm: Tensor | None, spec: AttnSpec
    ) -> tuple[Tensor, Tensor]:
        """K and V [R, kv_heads, D] of their product kv_rows [R, ·]: k and then v, unless v is the raw k."""
        parts = kv_rows.view(kv_rows.shape[0], -1, spec.head_dim)
        raw_k = parts[:, : spec.kv_heads]
        raw_v = parts[:, 0 if spec.k_eq_v else spec.kv_heads :]
        k = raw_k if k_norm is None else self.rms_norm(raw_k, k_norm, spec.eps)
        return self.rotate(k, *angles), self.rms_norm(raw_v, None, spec.eps) if spec.norm_v else raw_v

    def write_context(self, kv_rows: Tensor, angles: Angles, attn: BlockAttn, kv: KVView) -> None:
        """A block drafter's K/V of committed positions, from their product (`keys_values`), at the rows' positions."""
        keys = kv.keys[attn.spec.kv_layer]
        values = kv.values[attn.spec.kv_layer]
        assert keys is not None and values is not None
        k, v = self.keys_values(kv_rows, angles, attn.k_norm, spec=attn.spec)
        page = kv.tables[attn.spec.group][kv.row_seq, kv.positions // kv.page_size].long()
        slot = kv.positions % kv.page_size
        keys[page, :, slot] = encoded(k, keys)
        values[page, :, slot] = encoded(v, values)

    def attend_block(
        self, q: Tensor, kv_rows: Tensor, angles: Angles, attn: BlockAttn, kv: KVView, block: BlockRows, first: int
    ) -> Tensor:
        """Attention of a block drafter. q [B·S, heads·D] and the product kv_rows [B·S, ·] of K and V (`keys_values`),
        before norms and rotation: the rows `first`, `first` + 1, … of B blocks. Their K/V goes into `block`; each row
        sees the positions of `kv` before its block and the rows of `block` so far, as `attn` says -> [B·S, heads·D]."""
        spec = attn.spec
        size, kv_heads, _, dim = block.keys.shape
        slots = q.shape[0] // size
        end = first + slots
        q = q.view(-1, spec.heads, dim)
        q = rotate(q if attn.q_norm is None else self.rms_norm(q, attn.q_norm, spec.eps), *angles)
        for to, rows in zip(
            (block.keys, block.values), self.keys_values(kv_rows, angles, attn.k_norm, spec=spec), strict=True
        ):
            to[:, :, first:end] = rows.view(size, slots, kv_heads, dim).transpose(1, 2)
        keys, values, places = block_context(attn, kv, block.end)
        keys = torch.cat((keys.to(q.dtype), block.keys[:, :, :end]), 2)
        values = torch.cat((values.to(q.dtype), block.values[:, :, :end]), 2)
        positions = block.end[:, None] + torch.arange(end, device=q.device)  # [B, first + S]
        places = torch.cat((places, positions), 1)[:, None]  # [B, 1, N]
        behind = positions[:, first:, None] - places  # [B, S, N]
        seen = (places >= 0).expand_as(behind)
        if attn.causal:
            seen = seen & (behind >= 0)
        if attn.window is not None:
            seen = seen & (behind.abs() < attn.window)
        q = q.view(size, slots, spec.heads, dim).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, keys, values, seen[:, None], scale=spec.scale, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(size * slots, -1)

    def _attend_tree(self, q: Tensor, spec: AttnSpec, kv: KVView, b: int, lo: int, hi: int, out: Tensor) -> None:
        """Each row by itself over the keys of its own path in the order of positions, as in plain decoding."""
        assert kv.ancestors is not None
        base = int(kv.positions[lo])
        paths = kv.ancestors[lo:hi].tolist()
        positions = kv.positions[lo:hi].tolist()
        k, v = self.gather_kv(b, base + hi - lo, spec, kv=kv)
        for i, (path, position) in enumerate(zip(paths, positions)):
            first = 0 if spec.window is None else max(0, position - spec.window + 1)
            slots = [p if p < base else base + path[p - base] for p in range(first, position + 1)]
            at = torch.tensor(slots, device=q.device)
            qs = q[lo + i].view(spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)
            weights = (torch.einsum("gqd,gnd->gqn", qs.float(), k[:, at].float()) * spec.scale).softmax(-1)
            out[lo + i] = torch.einsum("gqn,gnd->gqd", weights, v[:, at].float()).reshape(-1).to(q.dtype)
