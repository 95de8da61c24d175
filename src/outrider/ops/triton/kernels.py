"""The table of GPU kernels: which serves which shape on which card, in which order of sums (`ops/registry.py`).

Dispatch, precompilation, certification and `outrider doctor --kernels` read it. The limits are the constants that the
kernels are written for. Of several kernels that serve, the one with the lowest estimate runs, of equal ones the first.
The last kernel of an order is its definition: plain Triton, for every card. A kernel stays if it gains at least 5 % of
a whole step in a published configuration (`docs/gpu-inside.md`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ...types import AttnSpec, KVView
from ..backend import Epilogue, MoeLayer
from ..registry import Kernel
from . import attention, attention_wgmma, draft_steps, lowrank, prefill_attention, w4a16_gemm, w4a16_wgmma, wna16_gemv
from .attention_config import MIN_QUERIES, choose_reduction
from .card import Card
from .common import Launch
from .gemm_config import MAX_FEW_ROWS, MAX_SMEM, STREAMK_MAX_ROWS
from .gemm_launch import DenseCall, DenseShape, dense_gemm
from .lowrank import Shrunk
from .moe_gemv_int8 import MAX_MOE_GEMV_ROWS
from .quant import quant_linear
from .quant_moe import QuantExperts
from .repack import QuantWeight
from .w4a16_wgmma import MAX_WGMMA_TOKENS
from .wna16_gemv import MAX_GEMV_TOKENS, WeightChunk, WorkUnits

if TYPE_CHECKING:
    from .ops import TritonOps

SIDE_STREAM_ROWS = 8  # rows up to which experts and the shared dense MLP run concurrently


class QuantShape(NamedTuple):
    """Properties of a quantised product that the choice of a kernel depends on."""

    rows: int
    units: WorkUnits
    chunk: WeightChunk
    comparable: bool  # the CUDA C++ kernels support its numbers and its epilogue
    four_bits: bool  # integers of four bits in groups
    whole_tiles: bool  # the matrices that adapters change consist of whole tiles

    @property
    def w4a16(self) -> w4a16_gemm.W4A16Shape:
        return w4a16_gemm.W4A16Shape(self.rows, self.units, self.chunk.groups, has_zero_point=self.chunk.has_zero_point)


@dataclass(frozen=True)
class QuantCall:
    """A quantised product to launch."""

    ops: TritonOps
    x: Tensor
    w: QuantWeight
    end: Epilogue
    shrunk: Shrunk | None = None  # adapters to be added

    @property
    def shape(self) -> QuantShape:
        return QuantShape(
            rows=self.x.shape[0],
            units=wna16_gemv.units_of(self.w),
            chunk=WeightChunk.of(self.w),
            comparable=wna16_gemv.compared(self.x, self.w, self.end),
            four_bits=w4a16_wgmma.four_bits_in_groups(self.w),
            whole_tiles=wna16_gemv.whole_tiles(self.shrunk),
        )


class AdaptedShape(NamedTuple):
    """A product that adapters change."""

    rows: int
    dense: bool
    fits: bool  # all B fit side by side into one program
    quantised: QuantShape | None


@dataclass(frozen=True)
class AdaptedCall:
    ops: TritonOps
    x: Tensor
    w: Any  # DeviceWeight
    end: Epilogue
    shrunk: Shrunk

    @property
    def quantised(self) -> QuantCall:
        return QuantCall(ops=self.ops, x=self.shrunk.x, w=self.w, end=self.end, shrunk=self.shrunk)

    @property
    def shape(self) -> AdaptedShape:
        return AdaptedShape(
            rows=len(self.x),
            dense=isinstance(self.w, Tensor),
            fits=self.shrunk.fits,
            quantised=self.quantised.shape if isinstance(self.w, QuantWeight) else None,
        )


class AttentionShape(NamedTuple):
    """A pass of one layer's attention."""

    queries: int  # rows of a sequence times the heads that share a K/V head
    wide_heads: bool  # attention_wgmma supports it
    single_blocks: bool  # prompt_kernel supports it


@dataclass(frozen=True)
class AttentionCall:
    ops: TritonOps
    q: Tensor
    spec: AttnSpec
    kv: KVView
    span_end: int

    @property
    def shape(self) -> AttentionShape:
        spec = self.spec
        kv = self.kv
        shared = self.ops.card.shared
        queries = kv.max_rows * (spec.heads // spec.kv_heads)
        if queries <= MIN_QUERIES:
            return AttentionShape(queries, wide_heads=False, single_blocks=False)
        cut = choose_reduction(spec, self.q.dtype, shared)
        return AttentionShape(
            queries=queries,
            wide_heads=attention_wgmma.suits(spec, kv, self.q.dtype, cut=cut),
            single_blocks=prefill_attention.supports(spec, kv, self.q.dtype, shared=shared),
        )


class ExpertsShape(NamedTuple):
    """Routed experts next to a dense MLP."""

    rows: int
    quantised: bool


@dataclass(frozen=True)
class ExpertsCall:
    ops: TritonOps
    router_in: Tensor
    x: Tensor
    h: Tensor
    stream: Tensor
    layer: MoeLayer

    @property
    def shape(self) -> ExpertsShape:
        return ExpertsShape(len(self.x), isinstance(self.layer.experts.down, QuantExperts))


class DraftShape(NamedTuple):
    """A drafter's round."""

    pdl: bool
    short: bool  # SteppedDrafter supports the drafter


def on_cuda(card: Card) -> bool:
    return card.cuda


def on_hopper(card: Card) -> bool:
    return card.hopper


def on_streamk(card: Card) -> bool:
    """Compiled for sm_100, cut tiles exceed its shared memory."""
    return card.hopper and card.shared >= MAX_SMEM


def on_any_card(card: Card) -> bool:
    return card.real


# ---- dense products
def serves_streamk(shape: DenseShape, card: Card, spans: bool) -> bool:
    return shape.tma and shape.triton_plan.config.tma and (shape.spans > 1) == spans


def triton_micros(shape: DenseShape, card: Card) -> float:
    return shape.triton_plan.micros


def wgmma_micros(shape: DenseShape, card: Card) -> float:
    return shape.wgmma_plan.micros


# ---- quantised products
def serves_gemv(shape: QuantShape, card: Card) -> bool:
    fits = shape.rows <= MAX_GEMV_TOKENS and shape.comparable and shape.whole_tiles
    return fits and bool(wna16_gemv.choose_block(shape.units, shape.chunk, shape.rows, sms=card.sms, room=card.shared))


def serves_w4a16_wgmma(shape: QuantShape, card: Card) -> bool:
    fits = MAX_GEMV_TOKENS < shape.rows <= MAX_WGMMA_TOKENS and shape.comparable and shape.whole_tiles
    if not fits or not shape.four_bits or w4a16_wgmma.blocks_of_a_span(shape.units, card.sms) == 0:
        return False
    chunk = shape.chunk
    return w4a16_wgmma.choose_block(shape.rows, chunk.groups, chunk.has_zero_point, room=card.shared) is not None


def serves_w4a16_gemm(shape: QuantShape, card: Card) -> bool:
    fits = shape.rows > MAX_WGMMA_TOKENS and shape.comparable and shape.four_bits
    return fits and w4a16_gemm.choose_tile(shape.w4a16, card.sms // 2, card.shared) is not None


def run_gemv(call: QuantCall) -> Tensor | None:
    return call.ops.wna16_gemv.product(call.x, call.w, call.end, call.ops.pdl, lora=call.shrunk)


def run_w4a16_wgmma(call: QuantCall) -> Tensor | None:
    return call.ops.w4a16_wgmma.product(call.x, call.w, call.end, call.ops.pdl, lora=call.shrunk)


def run_w4a16_gemm(call: QuantCall) -> Tensor | None:
    return call.ops.w4a16_gemm.product(call.x, call.w, call.end, call.ops.pdl)


def run_quant(call: QuantCall) -> Tensor:
    return quant_linear(call.x, call.w, call.ops.semaphores, extras=call.end, pdl=call.ops.pdl)


# ---- products with adapters
def serves_adapted_dense(shape: AdaptedShape, card: Card) -> bool:
    return shape.dense and shape.rows <= MAX_FEW_ROWS and shape.fits


def serves_adapted_gemv(shape: AdaptedShape, card: Card) -> bool:
    return shape.quantised is not None and shape.fits and serves_gemv(shape.quantised, card)


def serves_adapted_wgmma(shape: AdaptedShape, card: Card) -> bool:
    return shape.quantised is not None and shape.fits and serves_w4a16_wgmma(shape.quantised, card)


def run_adapted_dense(call: AdaptedCall) -> Tensor:
    return dense_gemm(call.shrunk.x, call.w, call.ops.gemm, end=call.end, lora=call.shrunk)


def run_expand(call: AdaptedCall) -> Tensor:
    ops = call.ops
    y = ops.gate_and_up(call.x, call.w) if call.end.gated else ops.linear(call.x, call.w, call.end.bias)
    return lowrank.expand(y, call.shrunk, act=call.end.act, mul=call.end.mul, pdl=ops.pdl)


# ---- attention
def serves_wide_heads(shape: AttentionShape, card: Card) -> bool:
    return shape.wide_heads


def serves_prompts(shape: AttentionShape, card: Card) -> bool:
    return shape.single_blocks


def run_wide_heads(call: AttentionCall) -> Tensor | None:
    return call.ops.attention_wgmma.attend(call.q, call.spec, call.kv, call.ops.pdl, span_end=call.span_end)


def run_prompts(call: AttentionCall) -> Tensor:
    return prefill_attention.attend(call.q, call.spec, call.kv, pdl=call.ops.pdl, span_end=call.span_end)


def run_attention(call: AttentionCall) -> Tensor:
    return attention.attend(call.q, call.spec, call.kv, pdl=call.ops.pdl, span_end=call.span_end)


def attention_launches(call: AttentionCall) -> list[Launch]:
    """Launches of the Triton kernel that serves this call; empty if another kernel serves it."""
    serving = call.ops.registry.choose(ATTENTION, call.shape)
    if serving.launch is run_prompts:
        return [prefill_attention.launch_of(call.q, call.spec, call.kv, pdl=call.ops.pdl)[1]]
    if serving.launch is run_attention:
        return attention.launches_of(call.q, call.spec, call.kv, pdl=call.ops.pdl)[1]
    return []


# ---- experts and drafters
def serves_experts_int8(shape: ExpertsShape, card: Card) -> bool:
    return shape.quantised and shape.rows <= MAX_MOE_GEMV_ROWS


def serves_side_stream(shape: ExpertsShape, card: Card) -> bool:
    return shape.rows <= SIDE_STREAM_ROWS


def run_experts_int8(call: ExpertsCall) -> tuple[Tensor, Tensor] | None:
    return call.ops.few_experts(call)


def run_experts(call: ExpertsCall, side_stream: bool) -> tuple[Tensor, Tensor]:
    return call.ops.many_experts(call, side_stream)


def serves_short_steps(shape: DraftShape, card: Card) -> bool:
    return shape.pdl and shape.short


def any_shape(shape: Any, card: Card) -> bool:
    return True


DENSE = "dense product"
QUANTISED = "quantised product"
ADAPTED = "product with adapters"
ATTENTION = "attention"
EXPERTS = "experts"
DRAFT = "draft round"

TABLE = (
    Kernel(
        name="streamk_kernel",
        op=DENSE,
        order="dense product",
        source="gemm_streamk.py",
        when=f"129 to {STREAMK_MAX_ROWS} rows, one span",
        serves=partial(serves_streamk, spans=False),
        launch=lambda call: call.streamk_launch().run(),
        runs_on=on_streamk,
        micros=triton_micros,
        compile=lambda call: call.streamk_launch().compile(),
    ),
    Kernel(
        name="splitk_kernel",
        op=DENSE,
        order="dense product",
        source="gemm_streamk.py",
        when=f"129 to {STREAMK_MAX_ROWS} rows, several spans",
        serves=partial(serves_streamk, spans=True),
        launch=lambda call: call.streamk_launch().run(),
        runs_on=on_streamk,
        micros=triton_micros,
        compile=lambda call: call.streamk_launch().compile(),
    ),
    Kernel(
        name="gemm_wgmma",
        op=DENSE,
        order="dense product",
        source="gemm_wgmma.cu",
        when=f"more than {MAX_FEW_ROWS} rows, bf16",
        serves=lambda shape, card: shape.wgmma,
        launch=DenseCall.run_wgmma,
        runs_on=on_cuda,
        micros=wgmma_micros,
        compile=DenseCall.compile_wgmma,
    ),
    Kernel(
        name="linear_kernel",
        op=DENSE,
        order="dense product",
        source="gemm.py",
        when="any",
        serves=any_shape,
        launch=lambda call: call.linear_launch().run(),
        micros=triton_micros,
        compile=lambda call: call.linear_launch().compile(),
    ),
    Kernel(
        name="wna16_gemv",
        op=QUANTISED,
        order="quantised product",
        source="wna16_gemv.cu",
        when=f"up to {MAX_GEMV_TOKENS} rows, every format",
        serves=serves_gemv,
        launch=run_gemv,
        runs_on=on_cuda,
    ),
    Kernel(
        name="w4a16_wgmma",
        op=QUANTISED,
        order="quantised product",
        source="w4a16_wgmma.cu",
        when=f"up to {MAX_WGMMA_TOKENS} rows, 4 bits",
        serves=serves_w4a16_wgmma,
        launch=run_w4a16_wgmma,
        runs_on=on_cuda,
    ),
    Kernel(
        name="w4a16_gemm",
        op=QUANTISED,
        order="quantised product",
        source="w4a16_gemm.cu",
        when=f"more than {MAX_WGMMA_TOKENS} rows, 4 bits",
        serves=serves_w4a16_gemm,
        launch=run_w4a16_gemm,
        runs_on=on_cuda,
    ),
    Kernel(
        name="quant_kernel",
        op=QUANTISED,
        order="quantised product",
        source="quant.py",
        when="any",
        serves=any_shape,
        launch=run_quant,
    ),
    Kernel(
        name="linear_kernel with adapters",
        op=ADAPTED,
        order="product with adapters",
        source="gemm.py",
        when=f"up to {MAX_FEW_ROWS} rows, dense",
        serves=serves_adapted_dense,
        launch=run_adapted_dense,
    ),
    Kernel(
        name="wna16_gemv with adapters",
        op=ADAPTED,
        order="product with adapters",
        source="wna16_gemv.cu",
        when=f"up to {MAX_GEMV_TOKENS} rows, every format",
        serves=serves_adapted_gemv,
        launch=lambda call: run_gemv(call.quantised),
        runs_on=on_cuda,
    ),
    Kernel(
        name="w4a16_wgmma with adapters",
        op=ADAPTED,
        order="product with adapters",
        source="w4a16_wgmma.cu",
        when=f"up to {MAX_WGMMA_TOKENS} rows, 4 bits",
        serves=serves_adapted_wgmma,
        launch=lambda call: run_w4a16_wgmma(call.quantised),
        runs_on=on_cuda,
    ),
    Kernel(
        name="expand_kernel",
        op=ADAPTED,
        order="product with adapters",
        source="lowrank.py",
        when="any, after the product",
        serves=any_shape,
        launch=run_expand,
    ),
    Kernel(
        name="attention_wgmma",
        op=ATTENTION,
        order="attention",
        source="attention_wgmma.cu",
        when=f"over {MIN_QUERIES} queries × heads of 512, bf16",
        serves=serves_wide_heads,
        launch=run_wide_heads,
        runs_on=on_cuda,
    ),
    Kernel(
        name="prompt_kernel",
        op=ATTENTION,
        order="attention",
        source="prefill_attention.py",
        when=f"over {MIN_QUERIES} queries × heads, bf16",
        serves=serves_prompts,
        launch=run_prompts,
        runs_on=on_hopper,
    ),
    Kernel(
        name="attend_kernel",
        op=ATTENTION,
        order="attention",
        source="attention.py",
        when="any",
        serves=any_shape,
        launch=run_attention,
    ),
    Kernel(
        name="moe_gemv_int8",
        op=EXPERTS,
        order="experts",
        source="moe_gemv_int8.cu",
        when=f"up to {MAX_MOE_GEMV_ROWS} rows, int8",
        serves=serves_experts_int8,
        launch=run_experts_int8,
        runs_on=on_cuda,
    ),
    Kernel(
        name="experts_kernel, MLP on a side stream",
        op=EXPERTS,
        order="experts",
        source="moe.py, quant_moe.py",
        when=f"up to {SIDE_STREAM_ROWS} rows",
        serves=serves_side_stream,
        launch=partial(run_experts, side_stream=True),
        runs_on=on_any_card,
    ),
    Kernel(
        name="experts_kernel",
        op=EXPERTS,
        order="experts",
        source="moe.py, quant_moe.py",
        when="any",
        serves=any_shape,
        launch=partial(run_experts, side_stream=False),
    ),
    Kernel(
        name="short steps",
        op=DRAFT,
        order=None,  # a draft need not be exact
        source="draft_steps.py",
        when="Gemma 4's larger drafters, cards with dependent launches",
        serves=serves_short_steps,
        launch=partial(draft_steps.SteppedDrafter, pdl=True),
    ),
    Kernel(
        name="the target's kernels",
        op=DRAFT,
        order=None,
        source="spec/mtp.py",
        when="any",
        serves=any_shape,
        launch=lambda drafter: drafter,
    ),
)
