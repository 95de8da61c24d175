"""Every op in plain PyTorch: the definition that each kernel is checked against, and the path for any device.

An ops object is chosen once (`outrider.ops.choose`) and passed to the models. Rows are tokens; every method is a
function of its arguments. Weights are `[out, in]` tensors, or packed weights returned by the same ops object.
Activations keep the dtype of `x`; norm weights are float32; logits are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..types import AttnSpec, BlockAttn, BlockRows, KVPages, KVView, OutriderError
from .adapter_slots import SlotWeight
from .backend import NO_EPILOGUE, Angles, Capabilities, Epilogue, ExpertWeights, HeadNorms, M, MoeLayer, Norms
from .formats import DeviceWeight, Weight
from .lowrank import Adapter, LowRank
from .noise import gumbel
from .trees import TreeOps

if TYPE_CHECKING:
    from .backend import BlockCall
    from .cpu.cycle import CpuCycle
    from .cpu.draft_model import CpuChain

FP8_MOST = torch.finfo(torch.float8_e4m3fn).max  # 448
HALF_MOST = 6e4  # what float16 holds


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """NeoX rotary embedding. x [R, heads, D]; cos, sin [R, D/2] float32; angles of 0 leave a pair untouched."""
    a, b = x.float().chunk(2, dim=-1)
    c = cos[:, None, :]
    s = sin[:, None, :]
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """K/V as the cache holds it. Eight-bit floats have no infinity: values are clamped to their range."""
    return x.clamp(-FP8_MOST, FP8_MOST).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


def encoded(x: Tensor, like: Tensor) -> Tensor:
    """A block drafter's K/V [R, heads, D] as the store keeps it; in int8 with a float32 scale after each head."""
    if like.dtype == torch.int8:
        x = x.float()
        factor = x.abs().amax(-1, keepdim=True).clamp(min=1e-20) / 127.0
        return torch.cat(((x / factor).round().to(torch.int8), factor.contiguous().view(torch.int8)), -1)
    return x.clamp(-HALF_MOST, HALF_MOST).to(like.dtype) if like.dtype == torch.float16 else stored(x, like.dtype)


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


def as_tensor(weight: DeviceWeight) -> Tensor:
    """A weight that these ops hold is a dense tensor; anything else was made by other ops."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"{type(weight).__name__} is not a dense tensor: it belongs to the ops object that made it")
    return weight


class ReferenceOps(TreeOps):
    name = "reference"
    version = ""
    # torch's products may round differently for another number of rows, in trees as in chains
    capabilities = Capabilities(trees=True)

    def kv_dtype(self, dtype: torch.dtype, asked: str = "auto") -> torch.dtype:
        """The storage type of K/V, given the dtype of the activations and the user's setting."""
        if asked == "int8":
            raise OutriderError("--kv-dtype int8: only the CPU's kernels keep K/V in int8; leave it out, or take fp8")
        return torch.float8_e4m3fn if asked == "fp8" else dtype

    # ---- weights ------------------------------------------------------------------------------------------------
    def pack_weights(self, parts: Sequence[Weight], device: torch.device | str) -> DeviceWeight | None:
        """The rows of all parts, stacked, as the kernels read them; None: pass a dense tensor instead."""
        return None

    def look_up(self, table: Weight, device: torch.device | str) -> DeviceWeight | None:
        """A table of which only rows are read, left in place; None: load it like any other."""
        return None

    def prepare(self, dense: Tensor) -> DeviceWeight:
        """A dense matrix as the kernels read it."""
        return dense

    def quantize(self, dense: Tensor, mode: str) -> DeviceWeight:
        """A dense matrix rounded to int4, int8 or fp8, whichever of them the kernels multiply."""
        raise OutriderError(f"the {self.name} ops cannot hold {mode} weights: choose others, or leave out --quantize")

    def take_rows(self, weight: DeviceWeight, order: Tensor) -> DeviceWeight:
        """Rows of a matrix in another order, held as they were: a head by clusters."""
        return as_tensor(weight)[order]

    def coarse(self, weight: DeviceWeight) -> DeviceWeight:
        """A draft model's weight in about four bits, if reading it limits the speed; here it is unchanged."""
        return weight

    # ---- whole models: backends that run them in fewer calls override these -------------------------------------
    def compile(self, model: M) -> M:
        """A target model whose forward pass takes fewer calls; the same bits."""
        return model

    def compile_drafter(self, drafter: M) -> M:
        """An MTP drafter whose steps, or whole rounds, take fewer calls."""
        return drafter

    def compile_attention(
        self,
        specs: Sequence[AttnSpec],
        views: Iterable[KVView],
        dtype: torch.dtype,
        progress: Callable[[int, int], None],
    ) -> int:
        """Compile, in parallel, what attention over these views needs, and launch nothing. progress: told how many of
        how many are done. Returns the number of kernels."""
        return 0

    def compile_block(self, net: object) -> BlockCall | None:
        """A block drafter's passes (models.block) in one call each. None: operation by operation."""
        return None

    def adapted(self, model: M, adapters: Sequence[Adapter | None], counts: Sequence[int]) -> M | None:
        """A wrapper of the model, for one pass over tokens in which sequence i has `counts[i]` rows and uses
        `adapters[i]`; None: operation by operation (engine.adapters)."""
        return None

    def host_cycle(
        self, model: object, drafter: object, cache: KVPages, features: Tensor, taps: Sequence[int], block: object
    ) -> CpuCycle | None:
        """Whole decode cycles in one call; `features` [slots, H·(1 + taps)] are updated. block: that of a drafter that
        reads all rows. None: not supported."""
        return None

    def draft_chain(self, model: object, head: DeviceWeight, listed: Tensor | None) -> CpuChain | None:
        """A draft model's rounds in one call each, scoring the rows `head` of the tokens `listed` (None: all).
        None: step by step."""
        return None

    # ---- dense pieces -------------------------------------------------------------------------------------------
    def embed(self, ids: Tensor, table: DeviceWeight, scale: float) -> Tensor:
        """[R] -> [R, H]. The factor is rounded to the table's dtype first, as the checkpoints were trained."""
        rows = F.embedding(ids, as_tensor(table))
        return rows if scale == 1.0 else rows * float(torch.tensor(scale, dtype=rows.dtype))

    def linear(self, x: Tensor, w: DeviceWeight, bias: Tensor | None = None) -> Tensor:
        """x [R, in] · w [out, in] -> [R, out]."""
        return F.linear(x, as_tensor(w), bias)

    def lowrank(
        self, a: Tensor, b: Tensor, scale: Tensor, pieces: Sequence[tuple[int, int]], base: DeviceWeight | None = None
    ) -> LowRank:
        """An adapter's change of one weight, as `add_lowrank` reads it: a [r, in], b [out, r], scale float32 [out].
        base: the weight, next to which the matrices may be held in as few bits."""
        return LowRank(self.prepare(a), self.prepare(b), scale, pieces=tuple(pieces))

    def pack_adapter(self, parts: Mapping[str, LowRank]) -> Mapping[str, LowRank]:
        """All changes of an adapter, in the memory layout of the kernels."""
        return parts

    def add_lowrank(self, y: Tensor, x: Tensor, part: LowRank, rows: Tensor | None) -> Tensor:
        """y [R, out] + scale · B (A x) in the given rows (None: in all), which may be written into y."""
        inputs = x if rows is None else x[rows]
        delta = self.linear(self.linear(inputs, part.a), part.b).float() * part.scale
        if rows is None:
            return (y.float() + delta).to(y.dtype)
        y[rows] = (y[rows].float() + delta).to(y.dtype)
        return y

    def rms_norm(self, x: Tensor, w: Tensor | None, eps: float) -> Tensor:
        """Float32 inside, cast back after scaling; w None: scale-free."""
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
        return (h if w is None else h * w).to(x.dtype)

    def per_layer_inputs(
        self, ids: Tensor, table: DeviceWeight, projected: Tensor, scale: float, w: Tensor, eps: float
    ) -> Tensor:
        """ids [R]; projected [R, L·ple] of the embeddings; w [ple] -> [L, R, ple], with the tokens' own part."""
        shape = (ids.shape[0], -1, w.shape[0])
        token = self.embed(ids, table, w.shape[0] ** 0.5).view(shape)
        context = self.rms_norm((projected * scale).view(shape), w, eps)
        return ((context + token) * 2**-0.5).transpose(0, 1).contiguous()

    def residual_norm(
        self, x: Tensor, y: Tensor, post_w: Tensor | None, scale: Tensor | None, next_w: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """x' = (x + post_norm(y)) * scale; returns x' and norm(x', next_w). post_w None: y is added as it is;
        next_w None: no next norm is wanted and x' is returned twice. scale is a [1] tensor or None."""
        y = y if post_w is None else self.rms_norm(y, post_w, eps)
        x = x + y
        if scale is not None:
            x = x * scale.to(x.dtype)
        return x, (x if next_w is None else self.rms_norm(x, next_w, eps))

    def residual_norms(
        self, x: Tensor, y: Tensor, post_w: Tensor | None, w: Norms, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x' = x + post_norm(y), and three norms of it."""
        x, h = self.residual_norm(x, y, post_w, scale=None, next_w=w[0], eps=eps)
        return x, h, self.rms_norm(x, w[1], eps), self.rms_norm(x, w[2], eps)

    def gated_linear(self, x: Tensor, w: DeviceWeight, act: str) -> Tensor:
        """w [2·I, H]: gate rows, then up rows -> act(gate) * up, [R, I]."""
        gate, up = self.linear(x, w).chunk(2, dim=-1)
        return self.act_mul(gate, up, act)

    def clamp_columns(self, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """x [R, N], in place, between low [N] and high [N]."""
        return x.clamp_(low, high)

    def act_mul(self, x: Tensor, y: Tensor, act: str) -> Tensor:
        """act: silu or gelu_tanh (models.config)."""
        return (F.silu(x) if act == "silu" else F.gelu(x, approximate="tanh")) * y

    def adapted_linear(
        self, x: Tensor, w: DeviceWeight, change: SlotWeight, ranges: Tensor, end: Epilogue = NO_EPILOGUE
    ) -> Tensor:
        """x · wᵀ + scale · B (A x), [R, out], each row with the matrices of its slot, and what `end` makes of it.
        ranges int32 [n, 3]: (first row, rows, slot) of all rows; slot -1: no addition."""
        y = self.linear(x, w, end.bias)
        for first, count, slot in ranges.tolist():
            rows = slice(first, first + count)
            at = 0
            for i, width in enumerate(change.rows if slot >= 0 else ()):
                cols = slice(at, at + width)
                at = at + width
                factor = float(change.scale[slot, i])
                if factor != 0.0:
                    delta = self.linear(self.linear(x[rows], change.a[slot, i]), change.b[slot, cols]).float()
                    y[rows, cols] = (y[rows, cols].float() + delta * factor).to(y.dtype)
        if end.mul is not None:
            return self.act_mul(y, end.mul, end.act)
        gate, up = y.chunk(2, dim=-1)
        return self.act_mul(gate, up, end.act) if end.act else y

    def linear_act_mul(self, x: Tensor, w: DeviceWeight, y: Tensor, act: str) -> Tensor:
        """act(x · wᵀ) * y, [R, out]."""
        return self.act_mul(self.linear(x, w), y, act)

    def logits(self, h: Tensor, w: DeviceWeight, softcap: float | None) -> Tensor:
        """Float32 logits [R, V], soft-capped where the model asks for it."""
        z = self.linear(h, w).float()
        return z if softcap is None else torch.tanh(z / softcap) * softcap

    # ---- attention ----------------------------------------------------------------------------------------------
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

    # ---- mixture of experts -------------------------------------------------------------------------------------
    def moe(self, router_in: Tensor, x: Tensor, experts: ExpertWeights) -> Tensor:
        """router_in [R, H], already normed and scaled; x [R, H], what the experts read. Softmax over all experts in
        float32, best top_k renormalised, then times expert_scale -> [R, H]."""
        p = self.linear(router_in, experts.router).float().softmax(-1)
        weight, chosen = p.topk(experts.top_k, dim=-1)  # [R, top_k]
        weight = weight / weight.sum(-1, keepdim=True) * experts.expert_scale[chosen]
        out = torch.zeros_like(x)
        gate_up = as_tensor(experts.gate_up)
        down = as_tensor(experts.down)
        for e in chosen.unique().tolist():
            row, slot = (chosen == e).nonzero(as_tuple=True)
            h = self.linear(self.gated_linear(x[row], gate_up[e], experts.act), down[e])
            out.index_add_(0, row, h * weight[row, slot, None].to(h.dtype))
        return out

    def moe_with_shared_mlp(
        self, router_in: Tensor, x: Tensor, h: Tensor, stream: Tensor, layer: MoeLayer
    ) -> tuple[Tensor, Tensor]:
        """`residual_norm` of stream [R, H] and y = norm(mlp(h)) + norm(moe)."""
        dense = self.linear(self.gated_linear(h, layer.mlp[0], layer.experts.act), layer.mlp[1])
        return self.moe_next_to(dense, router_in, x, stream=stream, layer=layer)

    def moe_next_to(
        self, dense: Tensor, router_in: Tensor, x: Tensor, stream: Tensor, layer: MoeLayer
    ) -> tuple[Tensor, Tensor]:
        """`moe_with_shared_mlp` if the dense MLP's output is known."""
        routed = self.moe(router_in, x, layer.experts)
        end = layer.end
        dense = self.rms_norm(dense, end.dense_norm, end.eps)
        y = self.residual_norm(dense, routed, end.routed_norm, scale=None, next_w=None, eps=end.eps)[0]
        return self.residual_norm(stream, y, end.post_norm, scale=end.scale, next_w=end.next_norm, eps=end.eps)

    # ---- drafting and choosing
    def clustered_logits(
        self, g: Tensor, centroids: DeviceWeight, rows: DeviceWeight, top: int, cluster_bonus: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scores of the best clusters' tokens. g [R, h]; centroids [C, h]; rows [C, S, h], the head's by cluster;
        cluster_bonus float32 [R, C], added to the clusters' scores -> ids [R, top], logits float32 [R, top, S]."""
        score = self.linear(g, centroids).float()
        best = (score if cluster_bonus is None else score + cluster_bonus).topk(top, dim=-1).indices
        return best, torch.einsum("rtsh,rh->rts", as_tensor(rows)[best].float(), g.float())

    def cluster_bonus(
        self, tokens: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, sampled: Tensor
    ) -> Tensor:
        """The bonus of each cluster, float32 [R, C]: temperature [R] times the largest noise of its tokens [C, S], 0
        where greedy. The noise of a draft is known before anything is scored."""
        luck = gumbel(seed[:, None, None], position[:, None, None], tokens).amax(-1)
        return torch.where(sampled[:, None], temperature[:, None] * luck, 0.0)

    def argmax(self, z: Tensor) -> Tensor:
        """z [R, N] -> [R]; the lowest index on ties."""
        return z.argmax(-1)

    def gumbel_argmax(
        self, z: Tensor, seed: Tensor, position: Tensor, tokens: Tensor | None, sampled: Tensor
    ) -> Tensor:
        """argmax of each row of z + gumbel(seed, position, token) where `sampled` [R], else of z: float32 [R, N],
        already divided by the temperature; seed, position int64 [R]; tokens [R, N]: of the columns (None: 0..N-1)."""
        tokens = torch.arange(z.shape[-1], device=z.device) if tokens is None else tokens
        noise = gumbel(seed[:, None], position[:, None], tokens)
        return torch.where(sampled[:, None], z + noise, z).argmax(-1)

    def filter_logits(self, z: Tensor, top_k: Tensor, top_p: Tensor, min_logp: Tensor) -> Tensor | None:
        """Top-k, top-p and min-p of each row of z [R, V], as `SamplingBatch` defines them; None: no kernel for it."""
        return None

    def logprob_rows(self, logits: Tensor, tokens: Tensor, top: int) -> Tensor:
        """float32 [R, 1 + 2·top] of the model's own distribution: the logprob of `tokens` [R], then the likeliest
        ones' logprobs and ids (a float32 holds ids up to 2^24)."""
        logp = torch.log_softmax(logits.float(), -1)
        best = logp.topk(top, dim=-1)
        return torch.cat((logp.gather(1, tokens[:, None]), best.values, best.indices.to(torch.float32)), 1)


# The interface of the ops: every backend is a subclass, and overrides what it does better.
Backend = ReferenceOps
