"""Every op in plain PyTorch: the definition that each kernel is checked against, and the path for any device. Attention
is in attention.py, draft trees in trees.py.

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

from ..types import AttnSpec, KVPages, KVView, OutriderError
from .adapter_slots import SlotWeight
from .attention import AttentionOps
from .backend import NO_EPILOGUE, Capabilities, Epilogue, ExpertWeights, M, MoeLayer, Norms
from .formats import DeviceWeight, Weight
from .lowrank import Adapter, LowRank
from .noise import gumbel
from .trees import TreeOps

if TYPE_CHECKING:
    from .backend import BlockCall
    from .cpu.cycle import CpuCycle
    from .cpu.draft_model import CpuChain


def as_tensor(weight: DeviceWeight) -> Tensor:
    """A weight that these ops hold is a dense tensor; anything else was made by other ops."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"{type(weight).__name__} is not a dense tensor: it belongs to the ops object that made it")
    return weight


class ReferenceOps(AttentionOps, TreeOps):
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
