"""Int8 experts for 1 to 3 bfloat16 tokens, gate_up in groups of 128 columns, down with one scale per row, as
`--quantize int8` makes of Gemma's 26B-A4B, together with the shared dense MLP if it is int8 too, in CUDA C++
(`ops/cuda/moe_gemv_int8.cu`): the bits of `routing`, `quant_moe` and `quant`, in three launches instead of six or
seven."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..backend import ExpertWeights, MlpWeights
from ..cuda.runtime import FOLDER, Flags, Kernel, struct
from ..formats import DeviceWeight
from ..reference import as_tensor
from .gemm_config import choose_reduction
from .nvrtc_kernels import NvrtcKernels
from .quant_moe import QuantExperts
from .repack import Codes, QuantWeight
from .wna16_gemv import ACTS, units_of

SOURCE = FOLDER / "moe_gemv_int8.cu"
MOST_ROWS = 8
MOST_PAIRS = 64
MOST_EXPERTS = 128
MOST_CHUNKS = 24
MOST_WARPS = 32
MOST_STAGES = 4
# of the router
MOST_SPANS = 8
MOST_COLUMNS = 512
# of a warp's chunk, and of the list of experts, as moe_gemv_int8.cu has them
WORDS = 2048
STAGE = 2112
X_BYTES = 256
CHOICES = 1040
MAX_MOE_GEMV_ROWS = 3  # rows up to which they were faster: five take 95 us per layer on an H200, in Triton's tiles 89
Mixture = struct(SOURCE.name, "Mixture")


@dataclass(frozen=True)
class SharedMLP:
    """An MLP whose tiles run together with those of the experts."""

    gate_up: QuantWeight
    down: QuantWeight

    @staticmethod
    def of(gate_up: DeviceWeight, down: DeviceWeight, hidden: int, most: int) -> SharedMLP | None:
        """most: chunks that a warp can take of down."""
        if not isinstance(gate_up, QuantWeight) or not isinstance(down, QuantWeight):
            return None
        inner = down.shape[1]
        shapes = gate_up.shape == (2 * inner, hidden) and down.shape[0] == hidden and inner % 8 == 0
        fits = grouped(gate_up) and by_row(down) and shapes and units_of(down).span <= most
        return SharedMLP(gate_up, down) if fits else None


def router_spans(router: DeviceWeight) -> tuple[int, int] | None:
    """Columns of a span, and spans, in the order of sums that a router [E, H] has in Triton; None: not one for the
    kernel."""
    if not isinstance(router, Tensor) or router.dtype != torch.bfloat16:
        return None
    if not router.is_contiguous() or router.shape[0] % 8:
        return None
    n, k = router.shape
    span = choose_reduction(n, k, gated=False, bytes_per=router.element_size()).span(k)
    splits = triton.cdiv(k, span)
    return (span, splits) if k % 16 == 0 and 1 < splits <= MOST_SPANS and span <= MOST_COLUMNS else None


@dataclass(frozen=True)
class MoeGemvPlan:
    """How the products of one layer are distributed."""

    most: int  # tokens that the kernels are compiled for
    router: tuple[int, int]  # columns of a span, spans
    chunks: int  # of gate_up: a warp each
    stages: int
    gate_up_shared: int
    down: int  # chunks of an expert's down
    down_warps: int
    down_shared: int
    shape: ctypes.Structure  # `Mixture`

    @staticmethod
    def of(
        rows: int, experts_of: ExpertWeights, beside: SharedMLP | None, sms: int, room: int
    ) -> MoeGemvPlan | None:
        router = experts_of.router
        gate_up = experts_of.gate_up
        down = experts_of.down
        top = experts_of.top_k
        if not isinstance(gate_up, QuantExperts) or not isinstance(down, QuantExperts):
            return None
        if not grouped(gate_up.matrix) or not by_row(down.matrix):
            return None
        routed = router_spans(router)
        if routed is None or tuple(router.shape) != (down.shape[0], down.shape[1]):
            return None
        experts, hidden, inner = down.shape
        chunks = gate_up.matrix.chunks
        deep = down.matrix.chunks
        most = 1 if rows == 1 else MOST_ROWS
        # a warp chooses; among several rows a place has four bits
        chosen = top <= (32 if rows == 1 else 16) and rows * top <= MOST_PAIRS
        fits = 0 < rows <= MOST_ROWS and chosen and experts <= MOST_EXPERTS and most <= chunks <= MOST_CHUNKS
        if not fits or gate_up.shape != (experts, 2 * inner, hidden) or hidden % 128 or inner % 8:
            return None
        tiles = top * inner // 8
        units = top * hidden // 16
        dense = 0
        span = chunks
        splits = 1
        down_span = 0
        down_splits = 0
        down_chunks = 0
        if beside is not None:
            dense = beside.down.shape[1]
            down_chunks = beside.down.chunks
            of_gate_up = units_of(beside.gate_up)
            of_down = units_of(beside.down)
            span = of_gate_up.span
            splits = of_gate_up.splits
            down_span = of_down.span
            down_splits = of_down.splits
            tiles = tiles + dense // 8
            units = units + hidden // 16 * down_splits
        # One token: the sums of all tiles of a block, a warp for every unit of down. Several: those of two tiles, as
        # many warps as fit.
        each = -(-tiles // sms)
        listed, pad = (CHOICES, 64) if most > 1 else (0, 0)
        sums = chunks * (each if most == 1 else 2) * (64 + most * (64 + pad // 4)) + listed
        stages = min(MOST_STAGES, each, (room - sums) // (chunks * STAGE))
        warp = deep * WORDS + most * (deep * X_BYTES + pad)
        fit = min(MOST_WARPS, (room - listed) // warp)
        warps = -(-units // sms) if most == 1 else min(fit, 16)
        if stages < 2 or not most <= warps <= fit:
            return None
        shape = Mixture(rows, experts, top, hidden, inner, dense, span, splits, down_chunks, down_span, down_splits)
        return MoeGemvPlan(
            most=most,
            router=routed,
            chunks=chunks,
            stages=stages,
            gate_up_shared=sums + stages * chunks * STAGE,
            down=deep,
            down_warps=warps,
            down_shared=listed + warps * warp,
            shape=shape,
        )


def grouped(w: QuantWeight) -> bool:
    """int8 with a bfloat16 factor for each chunk of 128 columns and nothing besides."""
    plain = w.codes is Codes.INT8 and w.plane == 32 and w.per == 4 and not w.half
    bare = w.zero_point is None and w.factor is None and w.order is None
    return plain and bare and w.shape[1] % w.columns_of_chunk == 0


def by_row(w: QuantWeight) -> bool:
    """int8 with a factor for each row."""
    plain = w.codes is Codes.INT8 and w.plane == 32 and w.per == 0
    return plain and w.factor is not None and w.order is None and w.shape[1] % 8 == 0


@dataclass(frozen=True)
class MoeGemvLayer:
    """One layer's weights, and the kernels for them."""

    experts: ExpertWeights
    mlp: SharedMLP | None  # None: it runs elsewhere
    plan: MoeGemvPlan
    kernels: list[Kernel]  # router, gate_up, down


class MoeGemvInt8(NvrtcKernels):
    source = SOURCE

    def plan(self, x: Tensor, experts: ExpertWeights, shared: SharedMLP | None) -> MoeGemvPlan | None:
        """The plan of these weights; None if they are not supported."""
        if x.shape[0] > MAX_MOE_GEMV_ROWS or x.dtype != torch.bfloat16:
            return None
        return MoeGemvPlan.of(x.shape[0], experts, shared, sms=self.sms, room=self.room)

    def layer(self, x: Tensor, experts: ExpertWeights, mlp: MlpWeights) -> MoeGemvLayer | None:
        """The layer of these weights; None if they are not supported."""
        down = experts.down
        shared = SharedMLP.of(*mlp, x.shape[1], down.matrix.chunks) if isinstance(down, QuantExperts) else None
        plan = self.plan(x, experts, shared)
        return None if plan is None else MoeGemvLayer(experts, shared, plan, kernels=self.kernels(plan, experts.act))

    def logits(self, layer: MoeGemvLayer, router_in: Tensor, pdl: bool) -> Tensor:
        """router_in [R, H] -> float32 [R, E]."""
        router = as_tensor(layer.experts.router)
        span, splits = layer.plan.router
        z = torch.empty((len(router_in), len(router)), dtype=torch.float32, device=router_in.device)
        pointers = (router_in.data_ptr(), router.data_ptr(), z.data_ptr())
        shared = splits * (8 * (2 * span + 32) + 256)
        layer.kernels[0](len(router) // 8, 32 * splits, shared, [*pointers, layer.plan.shape], pdl)
        return z

    def answers(
        self, layer: MoeGemvLayer, z: Tensor, x: Tensor, h: Tensor, pdl: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """z float32 [R, E]: the router's logits; x [R, H]: what the experts read; h [R, H]: what the dense MLP reads ->
        pairs [R · top, H], their weights float32 [R · top], and the dense MLP's partial sums float32 [spans, R, H],
        empty if it is not included."""
        plan = layer.plan
        experts = layer.experts
        shape = layer.plan.shape
        count = shape.rows * shape.top
        between = x.new_empty((count, shape.inner))
        pairs = x.new_empty((count, shape.hidden))
        weight = x.new_empty(count, dtype=torch.float32)
        dense_between = x.new_empty((shape.rows, shape.dense))
        dense_out = x.new_empty((shape.down_splits, shape.rows, shape.hidden), dtype=torch.float32)
        assert isinstance(experts.gate_up, QuantExperts) and isinstance(experts.down, QuantExperts)
        a = experts.gate_up.matrix
        b = experts.down.matrix
        first, second = (a, b) if layer.mlp is None else (layer.mlp.gate_up, layer.mlp.down)
        assert a.scale is not None and first.scale is not None and b.factor is not None and second.factor is not None
        blocks = self.sms
        _, gate_up, down = layer.kernels
        scale = experts.expert_scale
        pointers = addresses(z, scale, x, a.words, a.scale, between, weight, h, first.words, first.scale, dense_between)
        gate_up(blocks, 32 * plan.chunks, plan.gate_up_shared, [*pointers, shape], pdl)
        pointers = addresses(
            z, between, b.words, b.factor, pairs, dense_between, second.words, second.factor, dense_out
        )
        down(blocks, 32 * plan.down_warps, plan.down_shared, [*pointers, shape], pdl)
        return pairs, weight, dense_out

    def kernels(self, plan: MoeGemvPlan, act: str) -> list[Kernel]:
        """The compiled kernels: router, gate_up, down."""
        flags = flags_of(plan, act)
        return [self.kernel(name, flags) for name in ("experts_router", "experts_gate_up", "experts_down")]


def addresses(*tensors: Tensor) -> list[int]:
    return [t.data_ptr() for t in tensors]


def flags_of(plan: MoeGemvPlan, act: str) -> Flags:
    span, splits = plan.router
    return dict(
        MOST=plan.most, ROUTER_SPAN=span, ROUTER_SPLITS=splits, CHUNKS=plan.chunks, STAGES=plan.stages, DOWN=plan.down,
        DOWN_WARPS=plan.down_warps, ACT=ACTS[act], TOKENS=4, WARPS=plan.chunks,
    )
