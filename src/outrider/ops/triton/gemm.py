"""Row-invariant products y = x · wᵀ: a row has the same bits alone and among 2,048 others.

The weight's own reduction (gemm_config.py) fixes a sum: the inner dimension is cut into `splits` spans, a span is one
chain of matrix instructions of 16 columns each, and the spans are added in order. Everything else follows from the
number of rows and changes no bit: the tile of a program, which of the two operands is on the long side of the
instruction, how many columns are fetched at a time, and whether the spans of a tile run in several programs (the last
one to finish adds them up) or one after the other in a single program, as in a pass of many rows. Beyond 128 rows an
estimate (`gemm_config`) may choose, on Hopper, `gemm_streamk` (rows that are a power of two and some more) or
`gemm_wgmma`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ..backend import NO_EPILOGUE, Epilogue
from . import gemm_config
from .common import epilogue, epilogue_arguments, gate_and_up, gdc_launch_dependents, gdc_wait, prefetch, weight_rows
from .gemm_config import (
    MAX_FEW_ROWS,
    MAX_SMEM,
    STREAMK_MAX_WHOLE_TILES,
    GemmConfig,
    GemmPlan,
    GemmReduction,
    choose_reduction,
    triton_plan,
    wgmma_plan,
)
from .gemm_streamk import matrix_descriptor, splitk_kernel, streamk_kernel, tma_aligned
from .gemm_wgmma import GemmWgmma, WgmmaTile, flags_of
from .gemm_wgmma import suits as supports_wgmma
from .lowrank import Shrunk, lowrank_delta, slots_of
from .quant_config import sm_count

log = logging.getLogger("outrider")
LATE_TRIGGER_BYTES = 16 << 20  # weights from which the next kernel is let in only when the sums are done
PREFETCH_LINES = 4  # of every weight row: what a small kernel ahead leaves the memory time to fetch


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x, w, bias, mul, out, partial_out, semaphores, u, lora_b, ranges,
    M, N, K, x_stride, mul_stride, k_span, softcap, num_ranges, END_0, END_1,
    BM: tl.constexpr, BM2: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP_AB: tl.constexpr,
    GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, MUL: tl.constexpr, SOFTCAP: tl.constexpr,
    EVEN: tl.constexpr, SPLITS: tl.constexpr, SERIAL_SPLITK: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr, PREFETCH: tl.constexpr, TRIGGER_LATE: tl.constexpr,
    PARTS: tl.constexpr, RANK: tl.constexpr, RANGES: tl.constexpr, X_READY: tl.constexpr,
):
    """x [M, K], w [N, K] (GATED: [2N, K], gate rows first) -> out [M, N]; MUL: act(x @ w.T) * mul [M, N].
    SERIAL_SPLITK: this program processes all SPLITS spans itself. BM2: rows in addition to BM (tiles are powers
    of two, batches are not). RANGES: of rows that adapters change (`lowrank_delta`); 0: none. X_READY: x is
    complete when the kernel starts, u when the previous one is."""
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1)
    split = tl.program_id(2)
    rows = pid_m * (BM + BM2) + tl.arange(0, BM)
    cols = pid_n * BN + tl.arange(0, BN)
    SIDES: tl.constexpr = 2 if GATED else 1
    # Columns past the end repeat the last one: loads stay unmasked, and the copies are never stored.
    w_rows = weight_rows(pid_n * BN, N, BN, GATED)
    w_row = w_rows * K
    if PDL:
        if not TRIGGER_LATE:
            gdc_launch_dependents()
        if PREFETCH > 0:
            lines = split * k_span + tl.arange(0, PREFETCH) * 64  # bf16: 64 columns a line
            prefetch(w + w_row[:, None] + tl.minimum(lines, K - 1)[None, :])
        if RANGES > 0:
            slots = slots_of(ranges, num_ranges, RANGES)
            prefetch(lora_b + (slots[None, :] * (N * SIDES) + w_rows[:, None]) * RANK)
        if not X_READY:
            gdc_wait()
    x_row = x + rows.to(tl.int64) * x_stride
    k_from = split * k_span
    k_to = tl.minimum(k_from + k_span, K)
    WIDE: tl.constexpr = BN * SIDES
    X_CACHE: tl.constexpr = ".cg" if X_READY else ""  # L1 may hold what lay there before
    if BM2 > 0:
        more = pid_m * (BM + BM2) + BM + tl.arange(0, BM2)
        y_row = x + more.to(tl.int64) * x_stride
        acc, also = _pair(x_row, rows < M, y_row, more < M, w + w_row, k_from, k_to, BM, BM2, WIDE, BK, EVEN, PREC)
    elif SERIAL_SPLITK:
        acc = tl.zeros((BM, WIDE), dtype=tl.float32)
        if SWAP_AB:
            acc = tl.trans(tl.zeros((WIDE, BM), dtype=tl.float32))
        for s in range(SPLITS):
            acc += chain(
                x_row, rows < M, w + w_row, s * k_span, tl.minimum(s * k_span + k_span, K), BM, WIDE, BK, SWAP_AB, EVEN,
                PREC, X_CACHE,
            )
    else:
        acc = chain(x_row, rows < M, w + w_row, k_from, k_to, BM, WIDE, BK, SWAP_AB, EVEN, PREC, X_CACHE)
    # A big dense_gemm: were the next kernel let in at once, it would let in those behind it, and their waiting programs
    # would fill the SMs. 26B-A4B's experts, let in so by `out`, left its MLP on the side stream no shared memory.
    if TRIGGER_LATE:
        gdc_launch_dependents()

    if SPLITS > 1 and not SERIAL_SPLITK:
        # The last program of a tile adds the partial sums in the order of the spans and resets the counter.
        tile = pid_n * tl.num_programs(0) + pid_m
        SIZE: tl.constexpr = (BM + BM2) * WIDE  # of one span's partial sums
        base = partial_out + tile.to(tl.int64) * SPLITS * SIZE
        _leave(base + split * SIZE, acc, rows < M, BM, WIDE)
        if BM2 > 0:
            _leave(base + split * SIZE + BM * WIDE, also, more < M, BM2, WIDE)
        tl.debug_barrier()
        done = tl.atomic_add(semaphores + tile, 1, sem="acq_rel")
        if done == SPLITS - 1:
            tl.debug_barrier()
            acc = _gather(base, rows < M, BM, WIDE, SIZE, SPLITS)
            tl.store(semaphores + tile, 0)
            if RANGES > 0:
                acc = _changed(
                    acc, u, lora_b, ranges, bias, rows, rows < M, num_ranges, w_rows, N * SIDES, END_0, END_1, BM, WIDE,
                    PARTS, RANK, RANGES, SWAP_AB, PREC, X_READY, out.dtype.element_ty, BIAS,
                )
            _finish(
                acc, bias, mul, out, rows, cols, M, N, mul_stride, softcap, BM, BN, GATED, ACT, BIAS and RANGES == 0,
                MUL, SOFTCAP,
            )
            if BM2 > 0:
                also = _gather(base + BM * WIDE, more < M, BM2, WIDE, SIZE, SPLITS)
                _finish(
                    also, bias, mul, out, more, cols, M, N, mul_stride, softcap, BM2, BN, GATED, ACT, BIAS, MUL,
                    SOFTCAP
                )
    else:
        if RANGES > 0:
            acc = _changed(
                acc, u, lora_b, ranges, bias, rows, rows < M, num_ranges, w_rows, N * SIDES, END_0, END_1, BM, WIDE,
                PARTS, RANK, RANGES, SWAP_AB, PREC, X_READY, out.dtype.element_ty, BIAS,
            )
        _finish(
            acc, bias, mul, out, rows, cols, M, N, mul_stride, softcap, BM, BN, GATED, ACT, BIAS and RANGES == 0, MUL,
            SOFTCAP,
        )
        if BM2 > 0:
            _finish(
                also, bias, mul, out, more, cols, M, N, mul_stride, softcap, BM2, BN, GATED, ACT, BIAS, MUL, SOFTCAP
            )


@triton.jit
def _changed(
    acc, u, lora_b, ranges, bias, rows, live, num_ranges, w_rows, OUT, END_0, END_1,
    BM: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, RANGES: tl.constexpr,
    SWAP_AB: tl.constexpr, PREC: tl.constexpr, X_READY: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
):
    """Rounded as without changes, bias and all, before these are added."""
    if X_READY:
        gdc_wait()
    if BIAS:
        acc += tl.load(bias + w_rows).to(tl.float32)[None, :]
    delta = lowrank_delta(
        lora_b, u, ranges, num_ranges, rows, live, w_rows, OUT, END_0, END_1, BM, WIDE, PARTS, RANK, RANK, RANGES,
        SWAP_AB, PREC,
    )
    return acc.to(KIND).to(tl.float32) + delta


@triton.jit
def _leave(to, acc, row_ok, BM: tl.constexpr, WIDE: tl.constexpr):
    """Store a span's partial sums. Most rows of a tile may be empty: they need no traffic."""
    at = tl.arange(0, BM)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    tl.store(to + at, acc, mask=row_ok[:, None] & (tl.arange(0, WIDE) >= 0)[None, :])


@triton.jit
def _gather(of, row_ok, BM: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """All spans' partial sums, added in order."""
    at = tl.arange(0, BM)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    live = row_ok[:, None] & (tl.arange(0, WIDE) >= 0)[None, :]
    acc = tl.zeros((BM, WIDE), dtype=tl.float32)
    if BM * WIDE > 8192:
        for s in range(SPLITS):
            acc += tl.load(of + s * SIZE + at, mask=live, other=0.0, cache_modifier=".cg")
    else:
        for s in tl.static_range(SPLITS):  # unrolled: the loads fly together, and there are registers for them
            acc += tl.load(of + s * SIZE + at, mask=live, other=0.0, cache_modifier=".cg")
    return acc


@triton.jit
def chain(
    x_row, row_ok, w_row, k_from, k_to,
    BM: tl.constexpr, WN: tl.constexpr, BK: tl.constexpr, SWAP_AB: tl.constexpr, EVEN: tl.constexpr, PREC: tl.constexpr,
    X_CACHE: tl.constexpr,
):
    """One span: x [BM] rows times w [WN] rows over the columns k_from..k_to, added in steps of 16 -> float32 [BM,
    WN]. SWAP_AB: the weights' rows are on the long side of the instruction, the tokens on the short one."""
    ks = tl.arange(0, BK)
    x_ptr = x_row[:, None] + ks[None, :]
    w_ptr = w_row[:, None] + ks[None, :]
    acc = tl.zeros((WN, BM) if SWAP_AB else (BM, WN), dtype=tl.float32)
    for k in range(k_from, k_to, BK):
        if EVEN:
            a = tl.load(x_ptr + k, mask=row_ok[:, None], other=0.0, cache_modifier=X_CACHE)
            b = tl.load(w_ptr + k)
        else:
            inside = ks[None, :] < k_to - k
            a = tl.load(x_ptr + k, mask=row_ok[:, None] & inside, other=0.0, cache_modifier=X_CACHE)
            b = tl.load(w_ptr + k, mask=inside, other=0.0)
        if SWAP_AB:
            acc = tl.dot(b, tl.trans(a), acc, input_precision=PREC)
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision=PREC)
    if SWAP_AB:
        acc = tl.trans(acc)
    return acc


@triton.jit
def _pair(
    x_row, row_ok, y_row, also_ok, w_row, k_from, k_to,
    BM: tl.constexpr, BM2: tl.constexpr, WN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, PREC: tl.constexpr,
):
    """Two swapped chains that share the loaded weights: [BM, WN] and [BM2, WN]."""
    ks = tl.arange(0, BK)
    x_ptr = x_row[:, None] + ks[None, :]
    y_ptr = y_row[:, None] + ks[None, :]
    w_ptr = w_row[:, None] + ks[None, :]
    acc = tl.zeros((WN, BM), dtype=tl.float32)
    also = tl.zeros((WN, BM2), dtype=tl.float32)
    for k in range(k_from, k_to, BK):
        if EVEN:
            a = tl.load(x_ptr + k, mask=row_ok[:, None], other=0.0)
            c = tl.load(y_ptr + k, mask=also_ok[:, None], other=0.0)
            b = tl.load(w_ptr + k)
        else:
            inside = ks[None, :] < k_to - k
            a = tl.load(x_ptr + k, mask=row_ok[:, None] & inside, other=0.0)
            c = tl.load(y_ptr + k, mask=also_ok[:, None] & inside, other=0.0)
            b = tl.load(w_ptr + k, mask=inside, other=0.0)
        acc = tl.dot(b, tl.trans(a), acc, input_precision=PREC)
        also = tl.dot(b, tl.trans(c), also, input_precision=PREC)
    return tl.trans(acc), tl.trans(also)


@triton.jit
def _finish(
    acc, bias, mul, out, rows, cols, M, N, mul_stride, softcap,
    BM: tl.constexpr, BN: tl.constexpr,
    GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, MUL: tl.constexpr, SOFTCAP: tl.constexpr,
):
    up = acc
    if GATED:
        acc, up = gate_and_up(acc, BM, BN)
    epilogue(acc, up, bias, mul, out, rows, cols, M, N, mul_stride, softcap, GATED, ACT, BIAS, MUL, SOFTCAP)


@dataclass(frozen=True)
class GemmKind:
    """A dense product except for its number of rows: the products that one compiled kernel serves."""

    n: int
    k: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    gated: bool = False
    act: str = ""
    bias: torch.dtype | None = None
    mul: tuple[torch.dtype, int] | None = None  # and its row stride
    softcap: bool = False

    def shape(self, rows: int) -> DenseShape:
        """The product's shape with this many rows and contiguous operands."""
        many = rows > MAX_FEW_ROWS
        aligned = many and self.k * self.dtype.itemsize % 16 == 0
        rounds = not self.gated or self.out_dtype == torch.bfloat16
        return DenseShape(
            rows=rows,
            n=self.n,
            k=self.k,
            gated=self.gated,
            itemsize=self.dtype.itemsize,
            tma=aligned,
            wgmma=aligned and self.dtype == torch.bfloat16 and self.mul is None and self.n % 8 == 0 and rounds,
        )


class DenseShape(NamedTuple):
    """Properties of a dense product that the choice of a kernel depends on."""

    rows: int
    n: int
    k: int
    gated: bool
    itemsize: int
    tma: bool = False  # TMA can load x and the weights; only set if a kernel that uses it may serve
    wgmma: bool = False  # gemm_wgmma supports this product
    reduction: GemmReduction | None = None  # None: the weight's own

    @property
    def order(self) -> GemmReduction:
        return self.reduction or choose_reduction(self.n, self.k, self.gated, bytes_per=self.itemsize)

    @property
    def triton_plan(self) -> GemmPlan:
        return triton_plan(self.order, self.n, self.k, rows=self.rows, gated=self.gated, bytes_per=self.itemsize)

    @property
    def wgmma_plan(self) -> GemmPlan:
        return wgmma_plan(self.order, self.n, self.k, rows=self.rows, gated=self.gated)

    @property
    def spans(self) -> int:
        return triton.cdiv(self.k, self.order.span(self.k))


@dataclass(frozen=True)
class GemmDevice:
    """State shared by all products of one device."""

    semaphores: Tensor  # every kernel leaves its counters at 0
    pdl: bool = False
    shared: int = MAX_SMEM  # bytes of shared memory that a program may take
    wgmma: GemmWgmma | None = None  # kernels for many rows, if the card has them


@dataclass(frozen=True)
class DenseCall:
    """A dense product to launch: x [R, K], w [N, K] -> [R, N]."""

    x: Tensor
    w: Tensor
    device: GemmDevice
    end: Epilogue = NO_EPILOGUE
    reduction: GemmReduction | None = None  # None: the weight's own

    @cached_property
    def shape(self) -> DenseShape:
        x = self.x
        w = self.w
        many = x.shape[0] > MAX_FEW_ROWS
        return DenseShape(
            rows=x.shape[0],
            n=w.shape[0] // 2 if self.end.gated else w.shape[0],
            k=w.shape[1],
            gated=self.end.gated,
            itemsize=w.element_size(),
            tma=many and (x.stride(1) != 1 or tma_aligned(x)) and tma_aligned(w),  # any other x is copied first
            wgmma=many and self.reduction is None and supports_wgmma(x, w, self.end),
            reduction=self.reduction,
        )

    @property
    def kind(self) -> GemmKind:
        end = self.end
        return GemmKind(
            n=self.shape.n,
            k=self.shape.k,
            dtype=self.x.dtype,
            out_dtype=end.out_dtype or self.x.dtype,
            gated=end.gated,
            act=end.act,
            bias=None if end.bias is None else end.bias.dtype,
            mul=None if end.mul is None else (end.mul.dtype, end.mul.stride(0)),
            softcap=end.softcap is not None,
        )

    @property
    def wgmma_tile(self) -> WgmmaTile:
        config = self.shape.wgmma_plan.config
        return WgmmaTile(config.bn, config.swap_ab, config.cut)

    def linear_launch(self) -> GemmLaunch:
        """Launch of `linear_kernel`. Tiles chosen for stream-K are loaded without TMA."""
        shape = self.shape
        config = replace(shape.triton_plan.config, tma=False)
        config = gemm_config.fit_smem(config, 2 if shape.gated else 1, shape.itemsize, shared=self.device.shared)
        return launch_of(self.x, self.w, self.device, end=self.end, tile=self.reduction, shape=config)

    def streamk_launch(self) -> GemmLaunch:
        """Launch of `streamk_kernel`, or of `splitk_kernel` if the weight has several spans."""
        config = self.shape.triton_plan.config
        return launch_of(self.x, self.w, self.device, end=self.end, tile=self.reduction, shape=config)

    def run_wgmma(self) -> Tensor | None:
        if self.device.wgmma is None:
            return None
        return self.device.wgmma.product(
            self.x, self.w, self.end, pdl=self.device.pdl, reduction=self.shape.order, tile=self.wgmma_tile
        )

    def compile_wgmma(self) -> None:
        assert self.device.wgmma is not None
        self.device.wgmma.kernel("gemm_wgmma", flags_of(self.end, self.wgmma_tile, self.shape.spans > 1))


def placeholder_call(kind: GemmKind, rows: int, device: GemmDevice) -> DenseCall:
    """A product of this kind with meta tensors, to compile its kernel without launching."""
    shell = partial(torch.empty, device="meta")
    sides = 2 if kind.gated else 1
    end = Epilogue(
        bias=None if kind.bias is None else shell(kind.n * sides, dtype=kind.bias),
        mul=None if kind.mul is None else shell((rows, kind.mul[1]), dtype=kind.mul[0])[:, : kind.n],
        act=kind.act,
        softcap=1.0 if kind.softcap else None,
        out_dtype=kind.out_dtype,
    )
    x = shell((rows, kind.k), dtype=kind.dtype)
    w = shell((kind.n * sides, kind.k), dtype=kind.dtype)
    semaphores = shell(gemm_config.NUM_SEMAPHORES, dtype=torch.int32)
    return DenseCall(x, w, replace(device, semaphores=semaphores), end=end)


class Precompiler:
    """Compiles kernels in parallel before a pass of another size needs them. A model has some ten kinds of products:
    compiled one after the other at their first launch, they would delay running requests by a quarter of a minute, once
    per machine. So the products in use are recorded, and when the first of them comes with a new number of rows, all
    are compiled for it at once. Nothing is launched; a kernel that was not compiled ahead is compiled when it is
    needed."""

    def __init__(self, compile_one: Callable[[Any, int], None], variant: Callable[[Any, int], Hashable]):
        """compile_one(kind, rows): compiles without launching; may fail. variant(kind, rows): equal for numbers of rows
        that share a compiled kernel."""
        self._compile = compile_one
        self._variant = variant
        self._asked = dict[Hashable, None]()
        self._rows = set[int]()
        self._made: set[tuple[Hashable, Hashable]] = set()

    def before(self, kind: Hashable, rows: int) -> None:
        """Must be called before a launch."""
        if kind not in self._asked:
            self._asked[kind] = None
            self._made.add((kind, self._variant(kind, rows)))  # compiled by its own launch
        elif rows not in self._rows:
            self._rows.add(rows)
            missing = [one for one in self._asked if (one, self._variant(one, rows)) not in self._made]
            self._made.update((one, self._variant(one, rows)) for one in missing)
            if len(missing) > 1:
                with ThreadPoolExecutor(8) as pool:
                    for future in [pool.submit(self._compile, one, rows) for one in missing]:
                        error = future.exception()
                        if error is not None:
                            log.debug("not compiled ahead for %d rows: %s", rows, error)


def dense_gemm(
    x: Tensor, w: Tensor, device: GemmDevice, end: Epilogue = NO_EPILOGUE, tile: GemmReduction | None = None,
    shape: GemmConfig | None = None, lora: Shrunk | None = None,
) -> Tensor:
    """x [R, K], w [N, K] -> [R, N] in Triton. tile, shape: override the table; lora: adapters to be added, of at most
    MAX_FEW_ROWS rows."""
    return launch_of(x, w, device, end=end, tile=tile, shape=shape, lora=lora).run()


@dataclass(frozen=True)
class GemmLaunch:
    kernel: JITFunction[Any]
    grid: tuple[int, ...]
    arguments: tuple[Tensor | TensorDescriptor | int | float, ...]
    options: dict[str, int | str | bool]
    out: Tensor  # the result, after the launch

    def run(self) -> Tensor:
        self.kernel[self.grid](*self.arguments, **self.options)
        return self.out

    def compile(self) -> None:
        self.kernel.warmup(*self.arguments, grid=self.grid, **self.options)


def launch_of(
    x: Tensor, w: Tensor, device: GemmDevice, end: Epilogue, tile: GemmReduction | None = None,
    shape: GemmConfig | None = None, lora: Shrunk | None = None,
) -> GemmLaunch:
    x = x if x.stride(1) == 1 else x.contiguous()
    gated = end.gated
    pdl = device.pdl
    itemsize = w.element_size()
    rows, k = x.shape
    n = w.shape[0] // 2 if gated else w.shape[0]
    tile = tile or choose_reduction(n, k, gated, bytes_per=itemsize)
    span = tile.span(k)
    splits = triton.cdiv(k, span)
    if shape is None:
        shape = triton_plan(tile, n, k, rows=rows, gated=gated, bytes_per=itemsize).config
        shape = gemm_config.fit_smem(shape, 2 if gated else 1, itemsize, shared=device.shared)
    serial_splitk = splits > 1 and shape.serial_splitk
    assert not shape.bm2 or (shape.swap_ab and not serial_splitk)
    out = x.new_empty((rows, n), dtype=end.out_dtype or x.dtype)
    tensors, mul_stride, softcap, constants = epilogue_arguments(end, out)
    ends: dict[str, int | str | bool] = dict(
        BM=shape.bm, BM2=shape.bm2, BN=shape.bn, BK=shape.bk, SPLITS=splits, PDL=pdl, num_warps=shape.warps,
        num_stages=shape.stages, launch_pdl=pdl, **constants,
    )
    numbers = (mul_stride, span, softcap)
    tiles_m = triton.cdiv(rows, shape.bm + shape.bm2)
    tiles_n = triton.cdiv(n, shape.bn)
    sums_of_tile = (shape.bm + shape.bm2) * shape.bn * (2 if gated else 1)
    assert lora is None or not shape.bm2, "changes are added to products of few rows"
    if shape.tma and device.shared >= MAX_SMEM and tma_aligned(x) and tma_aligned(w):
        tiles = tiles_m * tiles_n
        whole = splits > 1 or tiles <= STREAMK_MAX_WHOLE_TILES
        programs = tiles * splits if whole else min(tiles, sm_count(x.device))
        cut = tiles % programs > 0
        if splits > 1:
            num_sums = programs
        else:
            num_sums = programs + 1 if cut else 0
        sums = num_sums * sums_of_tile
        launch_arguments = (
            matrix_descriptor(x, shape.bm, shape.bk), matrix_descriptor(x, shape.bm2, shape.bk),
            matrix_descriptor(w, shape.bn, shape.bk), *tensors, x.new_empty(sums, dtype=torch.float32) if sums else out,
            device.semaphores, rows, n, k, *numbers,
        )
        if splits > 1:
            return GemmLaunch(kernel=splitk_kernel, grid=(programs,), arguments=launch_arguments, options=ends, out=out)
        return GemmLaunch(
            kernel=streamk_kernel, grid=(programs,), arguments=launch_arguments, options=ends | dict(CUT=cut), out=out
        )
    grid = (tiles_m, tiles_n, 1 if serial_splitk else splits)
    partial_out = x.new_empty(tiles_m * tiles_n * splits * sums_of_tile, dtype=torch.float32) if grid[2] > 1 else out
    arguments = (
        x, w, *tensors, partial_out, device.semaphores,
        *((out, out, out) if lora is None else (lora.u, lora.change.b, lora.ranges)),
        rows, n, k, x.stride(0), *numbers, *((0, 0, 0) if lora is None else (len(lora.ranges), *lora.ends)),
    )
    even = k % shape.bk == 0 and span % shape.bk == 0
    ends |= dict(
        SWAP_AB=shape.swap_ab, EVEN=even, SERIAL_SPLITK=serial_splitk,
        PREC="tf32x3" if x.dtype == torch.float32 else "tf32", PREFETCH=PREFETCH_LINES if pdl and itemsize == 2 else 0,
        TRIGGER_LATE=pdl and w.nbytes >= LATE_TRIGGER_BYTES, PARTS=lora.parts if lora else 0,
        RANK=lora.rank if lora else 0, RANGES=triton.next_power_of_2(len(lora.ranges)) if lora else 0,
        X_READY=even and lora is not None and lora.follows(x) and tma_aligned(x),
    )
    if lora is not None and shape.bm == 16 and shape.stages <= 3:
        ends["maxnreg"] = 80  # as many programs at a time as without changes: they are what hides its loads
    return GemmLaunch(kernel=linear_kernel, grid=grid, arguments=arguments, options=ends, out=out)
