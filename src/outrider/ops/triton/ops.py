"""Every op in Triton. Rows are independent: a row has the same bits in a pass of any size, decode or prefill.

A matrix is a dense tensor, a `QuantWeight` (rows of one quantised format) or `Parts` (rows of several); experts are
dense or `QuantExperts`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
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
from ..registry import Certification, Registry
from . import block_attention, choose, draft_steps, lowrank, moe, norm, rope, trees
from .attention_wgmma import AttentionWgmma
from .cache_keys import settle_cache_keys
from .card import Card
from .common import Launch
from .gemm_config import NUM_SEMAPHORES, GemmReduction, choose_reduction
from .gemm_launch import DenseCall, GemmDevice, GemmKind, placeholder_call
from .gemm_wgmma import GemmWgmma
from .kernels import (
    ADAPTED,
    ATTENTION,
    DENSE,
    DRAFT,
    EXPERTS,
    QUANTISED,
    TABLE,
    AdaptedCall,
    AttentionCall,
    DraftShape,
    ExpertsCall,
    QuantCall,
    attention_launches,
)
from .moe_gemv_int8 import MoeGemvInt8
from .precompile import Precompiler
from .quant_moe import hold_experts, round_experts
from .repack import Parts, QuantWeight, repack
from .routing import Pairs, list_pairs
from .w4a16_gemm import W4A16Gemm
from .w4a16_wgmma import W4A16Wgmma
from .wna16_gemv import WNA16Gemv

log = logging.getLogger("outrider")
COMPILERS = 8  # threads


class TritonOps(ReferenceOps):
    name = "triton"
    capabilities = GPU_CAPABILITIES

    def __init__(
        self,
        device: torch.device | str = "cuda",
        pdl: bool | None = None,
        card: Card | None = None,
        registry: Registry | None = None,
    ):
        """pdl: programmatic dependent launch; None: if the card has it. card: None asks the device. registry: of
        another instance on the same device."""
        device = torch.device(device)
        self.card = card or Card.of(device)
        if self.card.real:
            settle_cache_keys()
        self.registry = registry or Registry(TABLE, self.card)
        self.pdl = self.card.pdl if pdl is None else pdl
        # every kernel leaves its counters at 0
        self.semaphores = torch.zeros(NUM_SEMAPHORES, dtype=torch.int32, device=device)
        self.lora_counters = torch.zeros_like(self.semaphores)  # those of `lowrank.shrink`, which runs next to products
        wgmma = GemmWgmma(device, self.semaphores) if self.card.cuda else None
        self.gemm = GemmDevice(self.semaphores, pdl=self.pdl, shared=self.card.shared, wgmma=wgmma)
        self.ahead = Precompiler(self._compile, self._compiled_form) if self.card.real else None

    def apply(self, certification: Certification) -> None:
        """Lets rejected kernels serve no more, and promises no more independent rows than were certified."""
        self.registry.apply(certification)
        rows = certification.independent_rows(self.capabilities.independent_rows)
        self.capabilities = replace(self.capabilities, independent_rows=rows)

    def _compile(self, kind: GemmKind, rows: int) -> None:
        """Compiles the kernel that serves this kind with this number of rows, without launching it."""
        call = placeholder_call(kind, rows, self.gemm)
        kernel = self.registry.choose(DENSE, call.shape)
        assert kernel.compile is not None
        kernel.compile(call)

    def _compiled_form(self, kind: GemmKind, rows: int) -> Hashable:
        """The part of the number of rows that a compiled kernel depends on."""
        shape = kind.shape(rows)
        kernel = self.registry.choose(DENSE, shape)
        plan = shape.wgmma_plan if kernel.launch is DenseCall.run_wgmma else shape.triton_plan
        return kernel.name, plan.config

    def kv_dtype(self, dtype: torch.dtype, asked: str = "auto") -> torch.dtype:
        if asked == "fp8" and self.card.real and self.card.capability < (8, 9):
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
        """x [R, in] · w [out, in], followed by the epilogue `end`."""
        if isinstance(w, QuantWeight):
            return self.multiply(x, w, end)
        if not isinstance(w, Parts):
            return self.multiply_dense(x, as_tensor(w), end)
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
        call = QuantCall(self, x, w, end=end)
        return cast(Tensor, self.registry.run(QUANTISED, call.shape, call))

    def multiply_dense(self, x: Tensor, w: Tensor, end: Epilogue, reduction: GemmReduction | None = None) -> Tensor:
        """The product of a dense weight. reduction: overrides the weight's."""
        call = DenseCall(x, w, self.gemm, end=end, reduction=reduction)
        if self.ahead is not None and reduction is None:
            self.ahead.before(call.kind, x.shape[0])
        return cast(Tensor, self.registry.run(DENSE, call.shape, call))

    # ---- CUDA C++ kernels, created at first use ------------------------------------------------------------------
    @cached_property
    def wna16_gemv(self) -> WNA16Gemv:
        return WNA16Gemv(self.semaphores.device, self.semaphores)

    @cached_property
    def w4a16_wgmma(self) -> W4A16Wgmma:
        return W4A16Wgmma(self.semaphores.device, self.semaphores)

    @cached_property
    def w4a16_gemm(self) -> W4A16Gemm:
        return W4A16Gemm(self.semaphores.device, self.semaphores)

    @cached_property
    def moe_gemv_int8(self) -> MoeGemvInt8:
        return MoeGemvInt8(self.semaphores.device, self.semaphores)

    @cached_property
    def attention_wgmma(self) -> AttentionWgmma:
        return AttentionWgmma(self.semaphores.device, self.semaphores)

    def linear(self, x: Tensor, w: DeviceWeight, bias: Tensor | None = None) -> Tensor:
        return self.product(x, w, Epilogue(bias))

    def gated_linear(self, x: Tensor, w: DeviceWeight, act: str) -> Tensor:
        return self.product(x, w, Epilogue(act=act))

    def adapted_linear(
        self, x: Tensor, w: DeviceWeight, change: SlotWeight, ranges: Tensor, end: Epilogue = NO_EPILOGUE
    ) -> Tensor:
        shrunk = lowrank.shrink(x, change, ranges, counters=self.lora_counters, pdl=self.pdl)
        call = AdaptedCall(ops=self, x=x, w=w, end=end, shrunk=shrunk)
        return cast(Tensor, self.registry.run(ADAPTED, call.shape, call))

    def gate_and_up(self, x: Tensor, w: DeviceWeight) -> Tensor:
        """The product that `gated_linear` activates, [R, 2·I], with the same sums."""
        if not isinstance(w, Tensor):
            return self.product(x, w, NO_EPILOGUE)
        cut = choose_reduction(
            w.shape[0] // 2, w.shape[1], gated=True, bytes_per=w.element_size()
        )  # the gated product's sums
        many = cut.many and (2 * cut.many[0], *cut.many[1:])
        return self.multiply_dense(x, w, NO_EPILOGUE, reduction=replace(cut, bn=2 * cut.bn, many=many))

    def linear_act_mul(self, x: Tensor, w: DeviceWeight, y: Tensor, act: str) -> Tensor:
        return self.product(x, w, Epilogue(mul=y, act=act))

    def residual_norm(
        self, x: Tensor, y: Tensor, post_w: Tensor | None, scale: Tensor | None, next_w: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        return norm.residual_norm(x, y, post_w, scale=scale, next_w=next_w, eps=eps, pdl=self.pdl)[:2]

    def residual_norms(
        self, x: Tensor, y: Tensor, post_w: Tensor | None, w: Norms, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return norm.residual_norm(x, y, post_w, scale=None, next_w=w[0], eps=eps, pdl=self.pdl, more=w[1:])

    def logits(self, h: Tensor, w: DeviceWeight, softcap: float | None) -> Tensor:
        return self.product(h, w, Epilogue(softcap=softcap, out_dtype=torch.float32))

    # ---- attention ----------------------------------------------------------------------------------------------
    rope_angles = rope.rope_angles
    rope_write = rope.rope_write
    rotate_heads = rope.rotate_heads
    write_context = rope.write_context
    attend_block = block_attention.attend_block

    def attend(self, q: Tensor, spec: AttnSpec, kv: KVView) -> Tensor:
        return self.attend_span(q, spec, kv, end=0)

    def attend_span(self, q: Tensor, spec: AttnSpec, kv: KVView, end: int) -> Tensor:
        call = AttentionCall(self, q, spec, kv=kv, span_end=end)
        return cast(Tensor, self.registry.run(ATTENTION, call.shape, call))

    def compile_attention(
        self, specs: Sequence[AttnSpec], views: Iterable[KVView], dtype: torch.dtype,
        progress: Callable[[int, int], None],
    ) -> int:
        if not self.card.real:
            return 0
        shells: dict[Hashable, Launch] = {}
        for kv in views:
            for spec in specs:
                width = spec.heads * spec.head_dim
                q = torch.empty((len(kv.positions), width), dtype=dtype, device=kv.positions.device)
                for launch in attention_launches(AttentionCall(self, q, spec, kv=kv, span_end=0)):
                    shells.setdefault(launch.variant, launch.shell)
        with ThreadPoolExecutor(COMPILERS) as pool:
            jobs = [pool.submit(shell.compile) for shell in shells.values()]
            for done, job in enumerate(as_completed(jobs), 1):
                error = job.exception()
                if error is not None:
                    log.debug("not compiled ahead: %s", error)  # compiled when needed
                progress(done, len(jobs))
        return len(shells)

    # ---- trees of drafts ----------------------------------------------------------------------------------------
    branch = trees.branch
    chain_with_runner_ups = trees.chain_with_runner_ups
    build_fixed_tree = trees.build_fixed_tree
    accept_path = trees.accept_path
    compact_kv = trees.compact_kv

    # ---- mixture of experts -------------------------------------------------------------------------------------
    def moe(self, router_in: Tensor, x: Tensor, experts: ExpertWeights) -> Tensor:
        pairs = self.route(router_in, experts)
        return moe.experts(pairs, x, experts.gate_up, down=experts.down, act=experts.act, pdl=self.pdl)

    def route(self, router_in: Tensor, experts: ExpertWeights) -> Pairs:
        # float32: a choice between experts should not depend on bf16 rounding
        z = self.logits(router_in, experts.router, None)
        return list_pairs(z, experts.expert_scale, experts.top_k, pdl=self.pdl)

    def moe_with_shared_mlp(
        self, router_in: Tensor, x: Tensor, h: Tensor, stream: Tensor, layer: MoeLayer
    ) -> tuple[Tensor, Tensor]:
        call = ExpertsCall(self, router_in, x, h=h, stream=stream, layer=layer)
        return cast("tuple[Tensor, Tensor]", self.registry.run(EXPERTS, call.shape, call))

    def few_experts(self, call: ExpertsCall) -> tuple[Tensor, Tensor] | None:
        """The result of `moe_gemv_int8`; None if it does not support these weights."""
        layer = call.layer
        experts = layer.experts
        kernels = self.moe_gemv_int8
        fused = kernels.layer(call.x, experts, layer.mlp)
        if fused is None:
            return None
        beside = None
        join = self.pdl_after_main
        if fused.mlp is None:
            beside, join = self.dense_mlp(call.h, layer.mlp, experts.act, side_stream=self.card.real)
        z = kernels.logits(fused, call.router_in, self.pdl)
        pairs, weight, dense = kernels.answers(fused, z, call.x, call.h, self.pdl)
        return moe.mix(
            pairs, weight, dense if beside is None else beside, stream=call.stream, end=layer.end, pdl=join()
        )

    def many_experts(self, call: ExpertsCall, side_stream: bool) -> tuple[Tensor, Tensor]:
        layer = call.layer
        dense, join = self.dense_mlp(call.h, layer.mlp, layer.experts.act, side_stream=side_stream)
        return self._mixed(dense, call.router_in, call.x, stream=call.stream, layer=layer, join=join)

    def moe_next_to(
        self, dense: Tensor, router_in: Tensor, x: Tensor, stream: Tensor, layer: MoeLayer
    ) -> tuple[Tensor, Tensor]:
        return self._mixed(dense, router_in, x, stream=stream, layer=layer, join=self.pdl_after_main)

    def _mixed(
        self, dense: Tensor, router_in: Tensor, x: Tensor, stream: Tensor, layer: MoeLayer, join: Callable[[], bool]
    ) -> tuple[Tensor, Tensor]:
        pairs = self.route(router_in, layer.experts)
        experts = layer.experts
        pair_out = moe.products(pairs, x, experts.gate_up, down=experts.down, act=experts.act, pdl=self.pdl)
        return moe.mix(pair_out, pairs.weight, dense, stream=stream, end=layer.end, pdl=join())

    def pdl_after_main(self) -> bool:
        """True if a kernel that reads only the main stream may start before the previous one is done."""
        return self.pdl

    def dense_mlp(
        self, h: Tensor, mlp: MlpWeights, act: str, side_stream: bool
    ) -> tuple[Tensor, Callable[[], bool]]:
        """The MLP next to experts. On a side stream it runs concurrently: the first reader of its result calls the
        returned function, which returns True if that reader may start before the previous kernel is done."""
        if not side_stream:
            return self.linear(self.gated_linear(h, mlp[0], act), mlp[1]), self.pdl_after_main
        ops, side = self.side_stream
        main = torch.cuda.current_stream(self.semaphores.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            result = ops.linear(ops.gated_linear(h, mlp[0], act), mlp[1])

        def join() -> bool:
            main.wait_stream(side)
            return False  # the reader follows two kernels

        return result, join

    @cached_property
    def side_stream(self) -> tuple[TritonOps, torch.cuda.Stream]:
        """Ops with separate counters on a second stream, which waits for the previous kernel."""
        device = self.semaphores.device
        return type(self)(device, pdl=False, card=self.card, registry=self.registry), torch.cuda.Stream(device)

    # ---- drafting and choosing ------------------------------------------------------------------------------------
    argmax = choose.argmax
    gumbel_argmax = choose.gumbel_argmax
    cluster_bonus = choose.cluster_bonus

    def clustered_logits(
        self, g: Tensor, centroids: DeviceWeight, rows: DeviceWeight, top: int, cluster_bonus: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return choose.cluster_scores(
            self.logits(g, centroids, None), cluster_bonus, g, rows=as_tensor(rows), top=top, pdl=self.pdl
        )

    def compile_drafter(self, drafter: M) -> M:
        """A wrapper with the drafter's own methods whose rounds take few launches, if supported: Hopper and later."""
        shape = DraftShape(self.pdl, short=self.pdl and draft_steps.unsupported(drafter) is None)
        return cast(M, self.registry.run(DRAFT, shape, drafter))


class DenseTritonOps(TritonOps):
    """All weights in 16 bits, whatever the file holds."""

    capabilities = replace(TritonOps.capabilities, quantizes=())
    pack_weights = ReferenceOps.pack_weights
    quantize = ReferenceOps.quantize
