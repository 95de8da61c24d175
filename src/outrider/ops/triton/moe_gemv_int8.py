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
MAX_ROWS = 8
MAX_PAIRS = 64  # of a token and an expert
MAX_CHOSEN_ALONE = 32  # experts of a single token: a warp chooses them
MAX_CHOSEN = 16  # experts of each of several tokens: a place has four bits
MAX_EXPERTS = 128
MAX_CHUNKS = 24
MAX_WARPS = 32
MAX_DOWN_WARPS = 16  # of several tokens
MAX_STAGES = 4
# of the router
MAX_SPANS = 8
MAX_COLUMNS = 512
# bytes in shared memory, under the names of moe_gemv_int8.cu
WORDS = 2048  # 16 rows of a chunk
STAGE = 2112  # these and their factors
X_BYTES = 256  # a token's columns of a chunk
CHOICES = 1040  # of several tokens: the list of their experts
PAD = 64  # of several tokens: so that rows that are read together lie in different banks
MAX_MOE_GEMV_ROWS = 3  # rows up to which they were faster: five take 95 us per layer on an H200, in Triton's tiles 89
Mixture = struct(SOURCE.name, "Mixture")


@dataclass(frozen=True)
class SharedMLP:
    """An MLP whose tiles run together with those of the experts."""

    gate_up: QuantWeight
    down: QuantWeight

    @staticmethod
    def of(gate_up: DeviceWeight, down: DeviceWeight, hidden: int, max_span: int) -> SharedMLP | None:
        """max_span: chunks that a warp can take of down."""
        if not isinstance(gate_up, QuantWeight) or not isinstance(down, QuantWeight):
            return None
        inner = down.shape[1]
        shapes = gate_up.shape == (2 * inner, hidden) and down.shape[0] == hidden and inner % 8 == 0
        fits = grouped(gate_up) and by_row(down) and shapes and units_of(down).span <= max_span
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
    return (span, splits) if k % 16 == 0 and 1 < splits <= MAX_SPANS and span <= MAX_COLUMNS else None


@dataclass(frozen=True)
class MoeGemvPlan:
    """How the products of one layer are distributed."""

    max_rows: int  # tokens that the kernels are compiled for
    router: tuple[int, int]  # columns of a span, spans
    chunks: int  # of gate_up: a warp each
    stages: int
    gate_up_shared: int
    down_chunks: int  # of an expert's down
    down_warps: int
    down_shared: int
    shape: ctypes.Structure  # `Mixture`

    @staticmethod
    def of(rows: int, experts: ExpertWeights, beside: SharedMLP | None, sms: int, room: int) -> MoeGemvPlan | None:
        """room: bytes of shared memory that a block may take. None: the kernels do not support these weights, this many
        tokens, or this little memory."""
        gate_up = experts.gate_up
        down = experts.down
        router = router_spans(experts.router)
        if not isinstance(gate_up, QuantExperts) or not isinstance(down, QuantExperts) or router is None:
            return None
        if not supports_weights(experts.router, gate_up, down) or not supports_choices(rows, experts.top_k):
            return None
        max_rows = 1 if rows == 1 else MAX_ROWS
        chunks = gate_up.matrix.chunks
        down_chunks = down.matrix.chunks
        if not max_rows <= chunks <= MAX_CHUNKS:
            return None
        mixture = mixture_of(rows, experts.top_k, gate_up, down, beside=beside)
        sums, stages = _gate_up_block(mixture, chunks, max_rows, sms=sms, room=room)
        warp_bytes, warps = _down_block(mixture, down_chunks, max_rows, sms=sms, room=room)
        if stages < 2 or warps < max_rows:
            return None
        return MoeGemvPlan(
            max_rows=max_rows,
            router=router,
            chunks=chunks,
            stages=stages,
            gate_up_shared=sums + stages * chunks * STAGE,
            down_chunks=down_chunks,
            down_warps=warps,
            down_shared=_list_bytes(max_rows) + warps * warp_bytes,
            shape=mixture,
        )


def supports_weights(router: DeviceWeight, gate_up: QuantExperts, down: QuantExperts) -> bool:
    """True if the kernels are written for these formats and sizes."""
    if not grouped(gate_up.matrix) or not by_row(down.matrix):
        return False
    experts, hidden, inner = down.shape
    if tuple(router.shape) != (experts, hidden) or gate_up.shape != (experts, 2 * inner, hidden):
        return False
    return experts <= MAX_EXPERTS and hidden % 128 == 0 and inner % 8 == 0


def supports_choices(rows: int, top: int) -> bool:
    """True if the kernels can choose `top` experts for each of this many tokens."""
    max_top = MAX_CHOSEN_ALONE if rows == 1 else MAX_CHOSEN
    return 0 < rows <= MAX_ROWS and top <= max_top and rows * top <= MAX_PAIRS


def mixture_of(
    rows: int, top: int, gate_up: QuantExperts, down: QuantExperts, beside: SharedMLP | None
) -> ctypes.Structure:
    """The sizes that the kernels read."""
    experts, hidden, inner = down.shape
    mixture = Mixture(rows=rows, experts=experts, top=top, hidden=hidden, inner=inner)
    if beside is None:
        mixture.dense_span = gate_up.matrix.chunks
        mixture.dense_splits = 1
        return mixture
    dense_units = units_of(beside.gate_up)
    down_units = units_of(beside.down)
    mixture.dense = beside.down.shape[1]
    mixture.dense_span = dense_units.span
    mixture.dense_splits = dense_units.splits
    mixture.down_chunks = beside.down.chunks
    mixture.down_span = down_units.span
    mixture.down_splits = down_units.splits
    return mixture


def _list_bytes(max_rows: int) -> int:
    return CHOICES if max_rows > 1 else 0


def _pad_bytes(max_rows: int) -> int:
    return PAD if max_rows > 1 else 0


def _gate_up_block(
    mixture: ctypes.Structure, chunks: int, max_rows: int, sms: int, room: int
) -> tuple[int, int]:
    """Bytes of shared memory without the stages, and stages. A block keeps the sums of all its tiles for one token, of
    two tiles for several."""
    tiles = mixture.top * mixture.inner // 8 + mixture.dense // 8
    tiles_per_block = -(-tiles // sms)
    tiles_with_sums = tiles_per_block if max_rows == 1 else 2
    sums_of_tile = 64 + max_rows * (64 + _pad_bytes(max_rows) // 4)
    sums = chunks * tiles_with_sums * sums_of_tile + _list_bytes(max_rows)
    return sums, min(MAX_STAGES, tiles_per_block, (room - sums) // (chunks * STAGE))


def _down_block(
    mixture: ctypes.Structure, down_chunks: int, max_rows: int, sms: int, room: int
) -> tuple[int, int]:
    """Bytes of shared memory of a warp, and warps: one for every unit of down for one token, as many as fit for
    several; 0: too few fit."""
    units = mixture.top * mixture.hidden // 16 + mixture.hidden // 16 * mixture.down_splits
    warp_bytes = down_chunks * WORDS + max_rows * (down_chunks * X_BYTES + _pad_bytes(max_rows))
    max_warps = min(MAX_WARPS, (room - _list_bytes(max_rows)) // warp_bytes)
    warps = -(-units // sms) if max_rows == 1 else min(max_warps, MAX_DOWN_WARPS)
    return warp_bytes, warps if warps <= max_warps else 0


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
        MOST=plan.max_rows, ROUTER_SPAN=span, ROUTER_SPLITS=splits, CHUNKS=plan.chunks, STAGES=plan.stages,
        DOWN=plan.down_chunks, DOWN_WARPS=plan.down_warps, ACT=ACTS[act], TOKENS=4, WARPS=plan.chunks,
    )
