"""CpuOps: the ops in C on this machine's cores, with weights kept quantised.

Activations are float32. Every output row is bitwise independent of the other rows, including dense weights and
attention; `compile` runs a whole model in one call and gives the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from ctypes import Structure
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from ...platforms.processor import default_threads
from ...types import AttnSpec, BlockAttn, BlockRows, KVPages, KVView, OutriderError, require
from ..backend import EVERY_ROW, Angles, Capabilities, ExpertWeights, HeadNorms, M
from ..formats import DenseFormat, DeviceWeight, Weight
from ..formats import dense as dense_weight
from ..formats.blocks import blocks_of
from ..lowrank import Adapter, LowRank
from ..reference import ReferenceOps, as_tensor
from . import lowrank, packing
from .block import CpuBlock, block_view, compile_block
from .certify import certified_library
from .cycle import CpuCycle
from .draft_model import CpuChain
from .forward import CompiledDrafter, CompiledModel, compile_drafter, compile_model
from .lib import ACTIVATIONS, FILE_TYPES, CBatchBuffers, CPages, at, c_block_spec, c_spec, floats, ptrs
from .memory import Arena, advise
from .packing import LANES, PackedWeight, c_moe, c_weight, routable, table_scale

BF16_LEVEL = 3  # or_isa() from which on pairs of bfloat16 are multiplied
FACTOR = 4  # bytes of a row's factor, behind its int8 values (cache.store.row_width)


class CpuOps(ReferenceOps):
    name = "cpu"
    capabilities = Capabilities(
        independent_rows=EVERY_ROW,
        prompts_independent=True,
        quantizes=("int8", "int4"),
        quantizes_tables=True,
        holds_halves=True,
        draft_format="int8",
        trees=True,
        shortlists=True,
        prefill_with_decodes=16,
        prefill_idle=64,
        blocks_in_pages=True,
    )

    def __init__(self, threads: int | None = None, isa: str | None = None):
        self.isa = isa
        self.lib, certification = certified_library(isa)
        independent_rows = certification.independent_rows(EVERY_ROW)
        self.capabilities = replace(self.capabilities, independent_rows=independent_rows)
        self.version = Path(self.lib._name).stem
        self.threads = threads or default_threads()
        self.pool: int = self.lib.or_pool_new(self.threads)
        self._close = weakref.finalize(self, self.lib.or_pool_free, self.pool)
        self.packer = packing.Packer(self.lib, self.pool, Arena())
        self._batch: tuple[weakref.ref[KVView], CBatchBuffers] | None = None
        self._pages: tuple[weakref.ref[Tensor], CPages] | None = None
        self._hashes: tuple[weakref.ref[Tensor], Tensor] | None = None

    def kv_dtype(self, dtype: torch.dtype, asked: str = "auto") -> torch.dtype:
        """Half the memory traffic: float16, which the processor widens while loading, or bfloat16 if it multiplies
        pairs of them. int8: a quarter, and a scale for every row of a head."""
        require(asked != "fp8", "--kv-dtype fp8: the CPU's kernels keep K/V in int8, not fp8")
        if asked == "int8":
            return torch.int8
        return torch.bfloat16 if self.lib.or_isa() >= BF16_LEVEL else torch.float16

    # ---- weights --------------------------------------------------------------------------------------------------
    def pack_weights(self, parts: Sequence[Weight], device: torch.device | str) -> DeviceWeight | None:
        parts = [
            dense_weight(p.dense().bfloat16()) if p.format.name == "NVFP4" else p for p in parts
        ]  # exact: six bits
        if all(halves(p) for p in parts) and len({p.format for p in parts}) == 1:
            return self.packer.halves(parts)
        parts = [p if p.format.name in FILE_TYPES else blocks_of(p) or p for p in parts]
        if any(p.format.name not in FILE_TYPES for p in parts):
            return None
        experts = len(parts[0].shape) == 3
        if experts and (len(parts) != 1 or parts[0].shape[1] % 32):  # an expert's rows, and its gates: whole groups
            return None
        packed = self.packer.pack(parts)
        return packed.view(*parts[0].shape) if experts and packed is not None else packed

    def look_up(self, table: Weight, device: torch.device | str) -> DeviceWeight | None:
        """A table in place in the file: it takes no memory except the pages that are read."""
        if halves(table):
            return packing.dense_rows(table.tensors["values"], 0)
        if len(table.shape) != 2 or table.format.name not in FILE_TYPES:
            return None
        return packing.in_file(table)

    def quantize(self, dense: Tensor, mode: str) -> DeviceWeight:
        if dense.dim() == 3 and dense.shape[1] % 32:
            return self.prepare(dense)
        packed = self.packer.quantize(dense.reshape(-1, dense.shape[-1]), mode)
        return self.prepare(dense) if packed is None else packed.view(*dense.shape)

    def take_rows(self, weight: DeviceWeight, order: Tensor) -> DeviceWeight:
        if isinstance(weight, PackedWeight):
            return self.packer.take(weight, order)
        return super().take_rows(weight, order)

    def coarse(self, weight: DeviceWeight) -> DeviceWeight:
        if len(weight.shape) == 3 and weight.shape[1] % 32:
            return weight  # experts of such a height are multiplied as they are
        if isinstance(weight, PackedWeight):
            return self.packer.coarse(weight)
        dense = as_tensor(weight)
        rows = packing.dense_rows(dense.reshape(-1, dense.shape[-1]).contiguous(), dense.numel() * dense.element_size())
        packed = self.packer.coarse(rows)
        return weight if packed is rows else packed.view(*dense.shape)

    def prepare(self, dense: Tensor) -> Tensor:
        return dense.contiguous()

    def unpack(self, weight: DeviceWeight) -> Tensor:
        """float32, dense."""
        if isinstance(weight, Tensor):
            return weight.float()
        rows = torch.arange(c_weight(weight).n)
        return self.embed(rows, weight, 1.0).view(weight.shape)

    # ---- dense pieces ---------------------------------------------------------------------------------------------
    def embed(self, ids: Tensor, table: DeviceWeight, scale: float) -> Tensor:
        w = c_weight(table)
        ids = ids.contiguous()
        out = torch.empty((ids.shape[0], w.k))
        self.lib.or_rows(w, ids.data_ptr(), ids.shape[0], table_scale(table, scale), out.data_ptr())
        return out

    def linear(self, x: Tensor, w: DeviceWeight, bias: Tensor | None = None) -> Tensor:
        c = c_weight(w)
        x = floats(x)
        out = torch.empty((x.shape[0], c.n))
        bias = None if bias is None else floats(bias)
        self.lib.or_linear(self.pool, c, x.data_ptr(), x.shape[0], at(bias), out.data_ptr())
        return out

    def lowrank(
        self, a: Tensor, b: Tensor, scale: Tensor, pieces: Sequence[tuple[int, int]], base: DeviceWeight | None = None
    ) -> LowRank:
        return lowrank.pack(self.packer, a, b, scale, pieces, base) or super().lowrank(a, b, scale, pieces=pieces)

    def pack_adapter(self, parts: Mapping[str, LowRank]) -> Mapping[str, LowRank]:
        return lowrank.side_by_side(parts)

    def add_lowrank(self, y: Tensor, x: Tensor, part: LowRank, rows: Tensor | None) -> Tensor:
        if not isinstance(part.a, PackedWeight):
            return super().add_lowrank(y, x, part, rows=rows)
        inputs, out = (floats(x), floats(y)) if rows is None else (floats(x[rows]), floats(y[rows]))
        c = lowrank.c_lowrank(part)
        groups = out.shape[1] // LANES
        self.lib.or_lowrank(self.pool, c, inputs.data_ptr(), out.shape[0], groups, out.data_ptr())
        if rows is None:
            return out
        y[rows] = out
        return y

    def gated_linear(self, x: Tensor, w: DeviceWeight, act: str) -> Tensor:
        c = c_weight(w)
        x = floats(x)
        if c.n % 32:  # gate and up rows share a group
            return super().gated_linear(x, w, act)
        out = torch.empty((x.shape[0], c.n // 2))
        self.lib.or_gated_linear(self.pool, c, x.data_ptr(), x.shape[0], ACTIVATIONS[act], out.data_ptr())
        return out

    def logits(self, h: Tensor, w: DeviceWeight, softcap: float | None) -> Tensor:
        c = c_weight(w)
        h = floats(h)
        out = torch.empty((h.shape[0], c.n))
        self.lib.or_logits(self.pool, c, h.data_ptr(), h.shape[0], softcap or 0.0, out.data_ptr())
        return out

    def rms_norm(self, x: Tensor, w: Tensor | None, eps: float) -> Tensor:
        x = floats(x)
        out = torch.empty_like(x)
        n = x.shape[-1]
        self.lib.or_rms_norm(x.data_ptr(), x.numel() // n, n, at(w), eps, out.data_ptr())
        return out

    def residual_norm(
        self, x: Tensor, y: Tensor, post_w: Tensor | None, scale: Tensor | None, next_w: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        x = floats(x)
        y = floats(y)
        rows, n = x.shape
        out = torch.empty_like(x)
        h = out if next_w is None else torch.empty_like(x)
        result = out, h, torch.empty(n)
        self.lib.or_residual_norm(*ptrs(x, y), rows, n, *ptrs(post_w, scale, next_w), eps, *ptrs(*result))
        return out, h

    def act_mul(self, x: Tensor, y: Tensor, act: str) -> Tensor:
        x, y = (t if t.dtype == torch.float32 and t.stride(-1) == 1 else floats(t) for t in (x, y))
        rows, n = x.shape
        out = torch.empty((rows, n))
        operands = x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0)
        self.lib.or_act_mul(*operands, rows, n, ACTIVATIONS[act], out.data_ptr())
        return out

    def moe(self, router_in: Tensor, x: Tensor, experts: ExpertWeights) -> Tensor:
        if not routable(experts):
            return super().moe(router_in, x, experts)
        router_in = floats(router_in)
        x = floats(x)
        out = torch.empty_like(x)
        act = ACTIVATIONS[experts.act]
        self.lib.or_moe(self.pool, c_moe(experts), *ptrs(router_in, x), x.shape[0], act, out.data_ptr())
        return out

    # ---- whole models ---------------------------------------------------------------------------------------------
    def compile(self, model: M) -> M:
        return cast(M, compile_model(self, model) or model)

    def compile_drafter(self, drafter: M) -> M:
        return cast(M, compile_drafter(self, drafter) or drafter)

    def compile_block(self, net: object) -> CpuBlock | None:
        return compile_block(self, net)

    def adapted(self, model: M, adapters: Sequence[Adapter | None], counts: Sequence[int]) -> M | None:
        """For a compiled model."""
        if not isinstance(model, CompiledModel) or not all(a is None or model.stack.changes(a) for a in adapters):
            return None
        return cast(M, CompiledModel(model.model, model.stack, adapters, counts=counts))

    def host_cycle(
        self, model: object, drafter: object, cache: KVPages, features: Tensor, taps: Sequence[int], block: object
    ) -> CpuCycle | None:
        """For a compiled model; an MTP drafter that was not compiled is left out."""
        self.pages(cache)  # refuses K/V that the kernels do not read, before the first request
        if not isinstance(model, CompiledModel) or features.dtype != torch.float32:
            return None
        mtp = drafter if isinstance(drafter, CompiledDrafter) else None
        return CpuCycle(
            model, mtp, cache, features=features, taps=taps, block=block if isinstance(block, CpuBlock) else None
        )

    def draft_chain(self, model: object, head: DeviceWeight, listed: Tensor | None) -> CpuChain | None:
        return CpuChain(model, head, listed) if isinstance(model, CompiledModel) else None

    # ---- attention ------------------------------------------------------------------------------------------------
    def rope_angles(self, positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.contiguous()
        rows = positions.shape[0]
        half = inv_freq.shape[0]
        cos = torch.empty((rows, half))
        sin = torch.empty((rows, half))
        self.lib.or_angles(positions.data_ptr(), rows, inv_freq.data_ptr(), half, *ptrs(cos, sin))
        return cos, sin

    def rope_write(self, qkv: Tensor, angles: Angles, norms: HeadNorms, spec: AttnSpec, kv: KVView) -> Tensor:
        """Rotates q within a copy of qkv and returns it as a view of the copy."""
        qkv = floats(qkv).clone()
        self.lib.or_rope_write(self.pool, c_spec(spec), self.batch(kv), *ptrs(qkv, *angles, *norms))
        return qkv[:, : spec.heads * spec.head_dim]

    def attend(self, q: Tensor, spec: AttnSpec, kv: KVView) -> Tensor:
        q = q if q.dtype == torch.float32 and q.stride(-1) == 1 else floats(q)
        out = torch.empty((q.shape[0], spec.heads * spec.head_dim))
        self.lib.or_attend(self.pool, c_spec(spec), self.batch(kv), q.data_ptr(), q.stride(0), out.data_ptr())
        return out

    def attend_span(self, q: Tensor, spec: AttnSpec, kv: KVView, end: int) -> Tensor:
        """Row by row: the kernel sees each at the image's last position, with a window that is longer by as much."""
        one = torch.zeros(1, dtype=torch.int64)
        start = torch.tensor([0, 1], dtype=torch.int32)
        shown = replace(kv, positions=one + end - 1, row_seq=one, row_start=start, max_rows=1, max_context=end)
        windows = [None if spec.window is None else spec.window + end - 1 - p for p in kv.positions.tolist()]
        longer = [replace(spec, window=window) for window in windows]
        return torch.cat([self.attend(row, its, shown) for row, its in zip(q.split(1), longer, strict=True)])

    def write_context(self, kv_rows: Tensor, angles: Angles, attn: BlockAttn, kv: KVView) -> None:
        c = c_block_spec(attn)
        kv_rows = floats(kv_rows)
        c.heads = 0  # k and v alone
        self.lib.or_rope_write(self.pool, c, self.batch(kv), *ptrs(kv_rows, *angles, None, attn.k_norm))

    def attend_block(
        self, q: Tensor, kv_rows: Tensor, angles: Angles, attn: BlockAttn, kv: KVView, block: BlockRows, first: int
    ) -> Tensor:
        """Attention of a block's rows. Unlike the reference it writes their K/V into the sequences' pages, behind the
        committed positions, where the target's next pass writes: `Drafter.block_rows` are reserved there."""
        count = q.shape[0] // block.end.shape[0]
        start = block.end + first
        batch = CBatchBuffers(block_view(kv, start, count), self.pages(kv), ends=start + count - 1)
        qkv = torch.cat((floats(q), floats(kv_rows)), 1)
        c = c_block_spec(attn)
        self.lib.or_rope_write(self.pool, c, batch.c, *ptrs(qkv, *angles, attn.q_norm, attn.k_norm))
        out = torch.empty_like(q, dtype=torch.float32)
        self.lib.or_attend(self.pool, c, batch.c, qkv.data_ptr(), qkv.stride(0), out.data_ptr())
        return out

    def move_kv(self, seq: Tensor, source: Tensor, target: Tensor, spec: AttnSpec, kv: KVView) -> None:
        """Moves rows one after another: a position must be read before it is overwritten."""
        moves = [t.contiguous() for t in (seq, source, target)]
        self.lib.or_move_kv(c_spec(spec), self.batch(kv), *ptrs(*moves), seq.shape[0])

    def batch(self, kv: KVView) -> Structure:
        """The view's pointers, cached: every layer of a pass uses the same view."""
        if self._batch is None or self._batch[0]() is not kv:
            self._batch = (weakref.ref(kv), CBatchBuffers(kv, self.pages(kv)))
        return self._batch[1].c

    def pages(self, kv: KVPages) -> CPages:
        first = next(t for t in kv.keys if t is not None)
        if first.dtype == torch.int8 and (
            kv.page_size % LANES or any(t is not None and t.shape[-1] % LANES != FACTOR for t in kv.keys)
        ):
            raise OutriderError(f"K/V in int8 needs pages and heads of multiples of {LANES}: leave out --kv-dtype")
        if self._pages is None or self._pages[0]() is not first:
            self._pages = (weakref.ref(first), CPages(kv))
            for t in (*kv.keys, *kv.values):
                if t is not None:
                    advise(t.data_ptr(), t.numel() * t.element_size())
        return self._pages[1]

    # ---- drafting and choosing --------------------------------------------------------------------------------------
    def clustered_logits(
        self, g: Tensor, centroids: DeviceWeight, rows: DeviceWeight, top: int, cluster_bonus: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        g = floats(g)
        c = c_weight(rows)
        clusters = rows.shape[0]
        size = rows.shape[1]
        scores = self.linear(g, centroids)
        if cluster_bonus is not None:
            scores += cluster_bonus
        best = torch.empty((g.shape[0], top), dtype=torch.int64)
        out = torch.empty((g.shape[0], top, size))
        how = g.data_ptr(), g.shape[0], scores.data_ptr(), clusters, top, size
        self.lib.or_clustered(self.pool, c, *how, *ptrs(best, out))
        return best, out

    def cluster_bonus(
        self, tokens: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, sampled: Tensor
    ) -> Tensor:
        if self._hashes is None or self._hashes[0]() is not tokens:
            self._hashes = (weakref.ref(tokens), packing.cluster_hashes(tokens))
        clusters, size = tokens.shape
        rows = seed.shape[0]
        out = torch.zeros((seed.shape[0], clusters))
        how = [floats(temperature), *[t.contiguous() for t in (sampled, seed, position)]]
        self.lib.or_cluster_bonus(self.pool, self._hashes[1].data_ptr(), clusters, size, rows, *ptrs(*how, out))
        return out

    def argmax(self, z: Tensor) -> Tensor:
        nothing = torch.zeros(z.shape[0], dtype=torch.int64)
        return self.gumbel_argmax(z, nothing, nothing, tokens=None, sampled=torch.zeros(z.shape[0], dtype=torch.bool))

    def gumbel_argmax(
        self, z: Tensor, seed: Tensor, position: Tensor, tokens: Tensor | None, sampled: Tensor
    ) -> Tensor:
        z = floats(z)
        seed = seed.contiguous()
        position = position.contiguous()
        sampled = sampled.contiguous()
        tokens = None if tokens is None else tokens.contiguous()
        out = torch.empty(z.shape[0], dtype=torch.int64)
        self.lib.or_choose(self.pool, z.data_ptr(), *z.shape, *ptrs(seed, position, tokens, sampled, out))
        return out

    def filter_logits(self, z: Tensor, top_k: Tensor, top_p: Tensor, min_logp: Tensor) -> Tensor:
        z = floats(z).clone()
        how = [t.contiguous() for t in (top_k, top_p, min_logp)]
        self.lib.or_filter(self.pool, z.data_ptr(), *z.shape, *ptrs(*how))
        return z

    def logprob_rows(self, logits: Tensor, tokens: Tensor, top: int) -> Tensor:
        z = floats(logits)
        tokens = tokens.contiguous()
        out = torch.empty((z.shape[0], 1 + 2 * top))
        self.lib.or_logprobs(self.pool, z.data_ptr(), *z.shape, tokens.data_ptr(), top, out.data_ptr())
        return out


def halves(w: Weight) -> bool:
    """A dense matrix in 16 bits."""
    return len(w.shape) == 2 and isinstance(w.format, DenseFormat) and w.format.dtype in (torch.float16, torch.bfloat16)
