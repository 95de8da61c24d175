"""Every op in Triton. Rows are independent: a row has the same bits in a pass of any size, decode or prefill.

A matrix is a dense tensor, a `QuantWeight` (rows of one quantised format) or `Parts` (rows of several); experts are
dense or `QuantExperts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from ...types import AttnSpec, KVView, OutriderError
from ..adapter_slots import SlotWeight
from ..backend import GPU_CAPABILITIES, NO_EPILOGUE, Epilogue, ExpertWeights, M, MlpWeights, MoeLayer, Norms
from ..formats import MODES, DeviceWeight, Weight, join, rounded_to, stays_dense
from ..reference import ReferenceOps, as_tensor
from . import attention, block_attention, choose, draft_steps, lowrank, moe, norm, prefill_attention, rope, trees
from .attention_wgmma import AttentionWgmma
from .gemm import FUSED_ROWS, GemmDevice, Precompiler, compile_for, dense_gemm, variant
from .gemm_config import NUM_SEMAPHORES, choose_reduction
from .gemm_wgmma import GemmWgmma
from .moe_gemv_int8 import MAX_MOE_GEMV_ROWS, MoeGemvInt8
from .quant import quant_linear
from .quant_config import max_smem
from .quant_moe import QuantExperts, hold_experts, round_experts
from .repack import Parts, QuantWeight, repack
from .routing import Pairs, list_pairs
from .w4a16_gemm import W4A16Gemm
from .w4a16_wgmma import MAX_WGMMA_TOKENS, W4A16Wgmma
from .wna16_gemv import MAX_GEMV_TOKENS, WNA16Gemv

SIDE_STREAM_ROWS = 8  # rows up to which experts and the shared dense MLP run concurrently


class TritonOps(ReferenceOps):
    name = "triton"
    capabilities = GPU_CAPABILITIES

    def __init__(self, device: torch.device | str = "cuda", pdl: bool | None = None):
        """pdl: programmatic dependent launch; None: where the device has it (Hopper on)."""
        device = torch.device(device)
        on_gpu = device.type == "cuda"
        self.capability = torch.cuda.get_device_capability(device) if on_gpu else (0, 0)
        self.pdl = self.capability >= (9, 0) if pdl is None else pdl
        # every kernel leaves its counters at 0
        self.semaphores = torch.zeros(NUM_SEMAPHORES, dtype=torch.int32, device=device)
        self.lora_counters = torch.zeros_like(self.semaphores)  # those of `lowrank.shrink`, which runs next to products
        self.shared = max_smem(device)
        self.hopper = not on_gpu or self.capability[0] == 9  # the device that prefill tiles were tuned on
        self.wide_heads = AttentionWgmma.of(device, self.semaphores)
        wgmma = GemmWgmma.of(device, self.semaphores)
        alone = GemmDevice(self.semaphores, self.pdl, self.shared, wgmma, streamk=self.hopper)
        ahead = Precompiler(
            lambda kind, rows: compile_for(kind, rows, alone), lambda kind, rows: variant(kind, rows, wgmma is not None)
        )
        self.gemm = replace(alone, ahead=ahead) if on_gpu else alone

    def kv_dtype(self, dtype: torch.dtype, asked: str = "auto") -> torch.dtype:
        if asked == "fp8" and self.semaphores.is_cuda and self.capability < (8, 9):
            raise OutriderError("--kv-dtype fp8: this GPU has no eight-bit floats (sm_89 and later have); leave it out")
        return super().kv_dtype(dtype, asked)

    # ---- weights ------------------------------------------------------------------------------------------------
    def pack_weights(self, parts: Sequence[Weight], device: torch.device | str) -> DeviceWeight | None:
        if stays_dense((sum(p.shape[0] for p in parts), *parts[0].shape[1:])):
            return None
        here = [p.to(device) for p in parts]
        whole = join(here)
        if whole is not None:
            return repack(whole) if len(whole.shape) == 2 else hold_experts(whole)
        repacked = [repack(p) for p in here]
        packed = tuple(m for m in repacked if m is not None)
        if len(packed) < len(repacked):
            return None
        return Parts((sum(p.shape[0] for p in parts), parts[0].shape[1]), packed)

    def quantize(self, dense: Tensor, mode: str) -> DeviceWeight:
        if mode not in MODES:
            raise OutriderError(f"--quantize {mode}: the GPU holds {', '.join(MODES)}")
        format = rounded_to(mode, dense.shape)
        if format is None:
            return self.prepare(dense)
        weight = repack(format.quantise(dense)) if dense.dim() == 2 else round_experts(dense, format)
        return weight or self.prepare(dense)

    def take_rows(self, weight: DeviceWeight, order: Tensor) -> DeviceWeight:
        return super().take_rows(self.unpack(weight), order)

    def unpack(self, weight: DeviceWeight) -> Tensor:
        """Dense, in bfloat16: the weight times the columns of the identity."""
        if isinstance(weight, Tensor):
            return weight
        kind = torch.bfloat16 if self.semaphores.is_cuda else torch.float32  # the interpreter has no bfloat16
        one = torch.eye(weight.shape[1], dtype=kind, device=self.semaphores.device)
        return self.linear(one, weight).t().to(torch.bfloat16).contiguous()

    # ---- dense pieces -------------------------------------------------------------------------------------------
    embed = norm.embed
    per_layer_inputs = norm.per_layer_inputs
    rms_norm = norm.rms_norm
    act_mul = norm.act_mul
    clamp_columns = norm.clamp_columns

    def product(self, x: Tensor, w: DeviceWeight, end: Epilogue) -> Tensor:
        """x [R, in] · w [out, in], and what `end` makes of it."""
        if isinstance(w, QuantWeight):
            return self.multiply(x, w, end)
        if not isinstance(w, Parts):
            return dense_gemm(x, as_tensor(w), self.gemm, end)
        if end.act:
            result = self.product(x, w, replace(end, mul=None, act=""))
            gate, up = result.chunk(2, dim=-1) if end.mul is None else (result, end.mul)
            return self.act_mul(gate, up, end.act)
        outs = []
        at = 0
        for part in w.parts:
            rows = slice(at, at + part.shape[0])
            outs.append(self.multiply(x, part, replace(end, bias=None if end.bias is None else end.bias[rows])))
            at = rows.stop
        return torch.cat(outs, dim=-1)

    def multiply(self, x: Tensor, w: QuantWeight, end: Epilogue) -> Tensor:
        """By whichever kernel takes it: the bits are the same."""
        few = x.shape[0] <= MAX_GEMV_TOKENS
        more = x.shape[0] <= MAX_WGMMA_TOKENS
        kernels = self.few if few else self.more if more else self.many
        out = kernels.product(x, w, end, self.pdl) if kernels is not None else None
        return quant_linear(x, w, self.semaphores, end, self.pdl) if out is None else out

    @cached_property
    def few(self) -> WNA16Gemv | None:
        """Kernels for few tokens, created with the first quantised product."""
        return WNA16Gemv.of(self.semaphores.device, self.semaphores)

    @cached_property
    def more(self) -> W4A16Wgmma | None:
        """Kernels for more tokens, created with the first quantised product."""
        return None if self.few is None else W4A16Wgmma(self.semaphores.device, self.semaphores)

    @cached_property
    def many(self) -> W4A16Gemm | None:
        """Kernels for prompts and for batches with drafts, created with the first quantised product."""
        return None if self.few is None else W4A16Gemm(self.semaphores.device, self.semaphores)

    @cached_property
    def moe_gemv_int8(self) -> MoeGemvInt8 | None:
        """Kernels for the experts of few tokens, created at first use."""
        return MoeGemvInt8.of(self.semaphores.device, self.semaphores)

    def linear(self, x: Tensor, w: DeviceWeight, bias: Tensor | None = None) -> Tensor:
        return self.product(x, w, Epilogue(bias))

    def gated_linear(self, x: Tensor, w: DeviceWeight, act: str) -> Tensor:
        return self.product(x, w, Epilogue(act=act))

    def adapted_linear(
        self, x: Tensor, w: DeviceWeight, change: SlotWeight, ranges: Tensor, end: Epilogue = NO_EPILOGUE
    ) -> Tensor:
        shrunk = lowrank.shrink(x, change, ranges, self.lora_counters, self.pdl)
        if isinstance(w, Tensor) and len(x) <= FUSED_ROWS and shrunk.fits:
            return dense_gemm(shrunk.x, w, self.gemm, end, lora=shrunk)
        if isinstance(w, QuantWeight) and len(x) <= MAX_WGMMA_TOKENS and shrunk.fits:
            kernels = self.few if len(x) <= MAX_GEMV_TOKENS else self.more
            out = kernels.product(shrunk.x, w, end, self.pdl, shrunk) if kernels is not None else None
            if out is not None:
                return out
        y = self.gate_and_up(x, w) if end.gated else self.linear(x, w, end.bias)
        return lowrank.expand(y, shrunk, end.act, end.mul, self.pdl)

    def gate_and_up(self, x: Tensor, w: DeviceWeight) -> Tensor:
        """The product that `gated_linear` activates, [R, 2·I], with the same sums."""
        if not isinstance(w, Tensor):
            return self.product(x, w, NO_EPILOGUE)
        cut = choose_reduction(w.shape[0] // 2, w.shape[1], True, w.element_size())  # the gated product's sums
        many = cut.many and (2 * cut.many[0], *cut.many[1:])
        return dense_gemm(x, w, self.gemm, tile=replace(cut, bn=2 * cut.bn, many=many))

    def linear_act_mul(self, x: Tensor, w: DeviceWeight, y: Tensor, act: str) -> Tensor:
        return self.product(x, w, Epilogue(mul=y, act=act))

    def residual_norm(
        self, x: Tensor, y: Tensor, post_w: Tensor | None, scale: Tensor | None, next_w: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        return norm.residual_norm(x, y, post_w, scale, next_w, eps, self.pdl)[:2]

    def residual_norms(
        self, x: Tensor, y: Tensor, post_w: Tensor | None, w: Norms, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return norm.residual_norm(x, y, post_w, None, w[0], eps, self.pdl, w[1:])

    def logits(self, h: Tensor, w: DeviceWeight, softcap: float | None) -> Tensor:
        return self.product(h, w, Epilogue(softcap=softcap, out_dtype=torch.float32))

    # ---- attention ----------------------------------------------------------------------------------------------
    rope_angles = rope.rope_angles
    rope_write = rope.rope_write
    rotate_heads = rope.rotate_heads
    write_context = rope.write_context
    attend_block = block_attention.attend_block

    def attend(self, q: Tensor, spec: AttnSpec, kv: KVView) -> Tensor:
        return self.attend_span(q, spec, kv, 0)

    def attend_span(self, q: Tensor, spec: AttnSpec, kv: KVView, end: int) -> Tensor:
        out = self.wide_heads.attend(q, spec, kv, self.pdl, span_end=end) if self.wide_heads is not None else None
        if out is not None:
            return out
        if self.hopper and prefill_attention.supports(spec, kv, q.dtype, self.shared):
            return prefill_attention.attend(q, spec, kv, self.pdl, span_end=end)
        return attention.attend(q, spec, kv, self.pdl, span_end=end)

    # ---- trees of drafts ----------------------------------------------------------------------------------------
    branch = trees.branch
    chain_with_runner_ups = trees.chain_with_runner_ups
    build_fixed_tree = trees.build_fixed_tree
    accept_path = trees.accept_path
    compact_kv = trees.compact_kv

    # ---- mixture of experts -------------------------------------------------------------------------------------
    def moe(self, router_in: Tensor, x: Tensor, experts: ExpertWeights) -> Tensor:
        pairs = self.route(router_in, experts)
        return moe.experts(pairs, x, experts.gate_up, experts.down, experts.act, self.pdl)

    def route(self, router_in: Tensor, experts: ExpertWeights) -> Pairs:
        # float32: a choice between experts should not depend on bf16 rounding
        z = self.logits(router_in, experts.router, None)
        return list_pairs(z, experts.expert_scale, experts.top_k, self.pdl)

    def moe_with_shared_mlp(
        self, router_in: Tensor, x: Tensor, h: Tensor, stream: Tensor, layer: MoeLayer
    ) -> tuple[Tensor, Tensor]:
        experts = layer.experts
        few = self.moe_gemv_int8 if len(x) <= MAX_MOE_GEMV_ROWS and isinstance(experts.down, QuantExperts) else None
        fused = None if few is None else few.layer(x, experts, layer.mlp)
        if few is None or fused is None:
            dense, join = self.dense_mlp(h, layer.mlp, experts.act)
            return self._mixed(dense, router_in, x, stream, layer, join)
        beside, join = self.dense_mlp(h, layer.mlp, experts.act) if fused.mlp is None else (None, lambda: self.pdl)
        z = few.logits(fused, router_in, self.pdl)
        pairs, weight, dense = few.answers(fused, z, x, h, self.pdl)
        return moe.mix(pairs, weight, dense if beside is None else beside, stream, layer.end, join())

    def moe_next_to(
        self, dense: Tensor, router_in: Tensor, x: Tensor, stream: Tensor, layer: MoeLayer
    ) -> tuple[Tensor, Tensor]:
        return self._mixed(dense, router_in, x, stream, layer, lambda: self.pdl)

    def _mixed(
        self, dense: Tensor, router_in: Tensor, x: Tensor, stream: Tensor, layer: MoeLayer, join: Callable[[], bool]
    ) -> tuple[Tensor, Tensor]:
        pairs = self.route(router_in, layer.experts)
        experts = layer.experts
        pair_out = moe.products(pairs, x, experts.gate_up, experts.down, experts.act, self.pdl)
        return moe.mix(pair_out, pairs.weight, dense, stream, layer.end, join())

    def dense_mlp(self, h: Tensor, mlp: MlpWeights, act: str) -> tuple[Tensor, Callable[[], bool]]:
        """The MLP next to experts. With few rows it runs concurrently, on a side stream: the first reader calls the
        returned function, which says whether that reader may start before the previous kernel is done."""
        if not self.semaphores.is_cuda or len(h) > SIDE_STREAM_ROWS:
            return self.linear(self.gated_linear(h, mlp[0], act), mlp[1]), lambda: self.pdl
        ops, side = self.side_stream
        main = torch.cuda.current_stream(self.semaphores.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            result = ops.linear(ops.gated_linear(h, mlp[0], act), mlp[1])

        def join() -> bool:
            main.wait_stream(side)
            return False  # it follows two kernels

        return result, join

    @cached_property
    def side_stream(self) -> tuple[TritonOps, torch.cuda.Stream]:
        """Ops with separate counters, which wait for the previous kernel, and their stream."""
        return type(self)(self.semaphores.device, pdl=False), torch.cuda.Stream(self.semaphores.device)

    # ---- drafting and choosing ------------------------------------------------------------------------------------
    argmax = choose.argmax
    gumbel_argmax = choose.gumbel_argmax
    cluster_bonus = choose.cluster_bonus

    def clustered_logits(
        self, g: Tensor, centroids: DeviceWeight, rows: DeviceWeight, top: int, cluster_bonus: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return choose.cluster_scores(self.logits(g, centroids, None), cluster_bonus, g, as_tensor(rows), top, self.pdl)

    def compile_drafter(self, drafter: M) -> M:
        """A wrapper with the drafter's own methods whose rounds take few launches, if supported: Hopper and later."""
        if self.pdl and draft_steps.unsupported(drafter) is None:
            return cast(M, draft_steps.SteppedDrafter(drafter, pdl=True))
        return drafter


class DenseTritonOps(TritonOps):
    """All weights in 16 bits, whatever the file holds."""

    capabilities = replace(TritonOps.capabilities, quantizes=())
    pack_weights = ReferenceOps.pack_weights
    quantize = ReferenceOps.quantize
