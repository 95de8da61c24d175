"""Dense products: which launch serves which shape.

A product is a `DenseCall`. Its `DenseShape` is what the choice of a kernel depends on (kernels.py): `linear_kernel` for
every shape, and beyond 128 rows, by an estimate (gemm_config.py) on Hopper, `gemm_streamk` (rows that are a power of
two and some more) or `gemm_wgmma`. All have the same order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ..backend import NO_EPILOGUE, Epilogue
from . import gemm_config
from .common import epilogue_arguments
from .gemm import linear_kernel
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
from .lowrank import Shrunk
from .quant_config import sm_count

LATE_TRIGGER_BYTES = 16 << 20  # weights from which the next kernel is let in only when the sums are done
PREFETCH_LINES = 4  # of every weight row: what a small kernel ahead leaves the memory time to fetch
FEW_REGISTERS = 80  # per thread: as many programs at a time as without adapters, which hides the loads of adapters


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
        return launch_of(self.x, self.w, self.device, end=self.end, reduction=self.reduction, config=config)

    def streamk_launch(self) -> GemmLaunch:
        """Launch of `streamk_kernel`, or of `splitk_kernel` if the weight has several spans."""
        config = self.shape.triton_plan.config
        return launch_of(self.x, self.w, self.device, end=self.end, reduction=self.reduction, config=config)

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


def dense_gemm(
    x: Tensor, w: Tensor, device: GemmDevice, end: Epilogue = NO_EPILOGUE, reduction: GemmReduction | None = None,
    config: GemmConfig | None = None, lora: Shrunk | None = None,
) -> Tensor:
    """x [R, K], w [N, K] -> [R, N] in Triton. reduction, config: override the table; lora: adapters to be added, of at
    most MAX_FEW_ROWS rows."""
    return launch_of(x, w, device, end=end, reduction=reduction, config=config, lora=lora).run()


def launch_of(
    x: Tensor, w: Tensor, device: GemmDevice, end: Epilogue, reduction: GemmReduction | None = None,
    config: GemmConfig | None = None, lora: Shrunk | None = None,
) -> GemmLaunch:
    """The launch of `dense_gemm`: with TMA if the configuration, the device and the operands have it."""
    x = x if x.stride(1) == 1 else x.contiguous()
    gated = end.gated
    itemsize = w.element_size()
    rows, k = x.shape
    n = w.shape[0] // 2 if gated else w.shape[0]
    reduction = reduction or choose_reduction(n, k, gated, bytes_per=itemsize)
    if config is None:
        config = triton_plan(reduction, n, k, rows=rows, gated=gated, bytes_per=itemsize).config
        config = gemm_config.fit_smem(config, 2 if gated else 1, itemsize, shared=device.shared)
    out = x.new_empty((rows, n), dtype=end.out_dtype or x.dtype)
    product = TiledProduct(x, w, out, device=device, end=end, config=config, span=reduction.span(k))
    assert lora is None or not config.bm2, "changes are added to products of few rows"
    if config.tma and device.shared >= MAX_SMEM and tma_aligned(x) and tma_aligned(w):
        return product.streamk_launch()
    return product.linear_launch(lora)


@dataclass(frozen=True)
class TiledProduct:
    """A dense product whose spans and tiles are chosen."""

    x: Tensor  # [R, K], columns adjacent
    w: Tensor  # [N, K]; gated: [2N, K]
    out: Tensor  # [R, N]
    device: GemmDevice
    end: Epilogue
    config: GemmConfig
    span: int  # columns of a span

    @property
    def splits(self) -> int:
        return triton.cdiv(self.x.shape[1], self.span)

    @property
    def tiles_m(self) -> int:
        return triton.cdiv(self.out.shape[0], self.config.bm + self.config.bm2)

    @property
    def tiles_n(self) -> int:
        return triton.cdiv(self.out.shape[1], self.config.bn)

    @property
    def sums_per_tile(self) -> int:
        return (self.config.bm + self.config.bm2) * self.config.bn * (2 if self.end.gated else 1)

    def _room_for_sums(self, count: int) -> Tensor:
        """Memory for partial sums; if there are none, any tensor."""
        return self.x.new_empty(count, dtype=torch.float32) if count > 0 else self.out

    def _options(self, constants: dict[str, int | str]) -> dict[str, int | str | bool]:
        """Options that all kernels have in common."""
        config = self.config
        return dict(
            BM=config.bm, BM2=config.bm2, BN=config.bn, BK=config.bk, SPLITS=self.splits, PDL=self.device.pdl,
            num_warps=config.warps, num_stages=config.stages, launch_pdl=self.device.pdl, **constants,
        )

    def streamk_launch(self) -> GemmLaunch:
        """Launch of `streamk_kernel`, a program per SM, or of `splitk_kernel`, a program per span of a tile."""
        x = self.x
        config = self.config
        splits = self.splits
        tensors, mul_stride, softcap, constants = epilogue_arguments(self.end, self.out)
        options = self._options(constants)
        tiles = self.tiles_m * self.tiles_n
        whole = splits > 1 or tiles <= STREAMK_MAX_WHOLE_TILES
        programs = tiles * splits if whole else min(tiles, sm_count(x.device))
        cut = tiles % programs > 0
        if splits > 1:
            num_sums = programs
        else:
            num_sums = programs + 1 if cut else 0
        arguments = (
            matrix_descriptor(x, config.bm, config.bk), matrix_descriptor(x, config.bm2, config.bk),
            matrix_descriptor(self.w, config.bn, config.bk), *tensors,
            self._room_for_sums(num_sums * self.sums_per_tile), self.device.semaphores,
            *self.out.shape, x.shape[1], mul_stride, self.span, softcap,
        )
        kernel = splitk_kernel
        if splits == 1:
            kernel = streamk_kernel
            options["CUT"] = cut
        return GemmLaunch(kernel=kernel, grid=(programs,), arguments=arguments, options=options, out=self.out)

    def linear_launch(self, lora: Shrunk | None) -> GemmLaunch:
        """Launch of `linear_kernel`: a program per tile, and per span unless a program takes all spans of its tile."""
        x = self.x
        w = self.w
        config = self.config
        splits = self.splits
        pdl = self.device.pdl
        k = x.shape[1]
        serial_splitk = splits > 1 and config.serial_splitk
        assert not config.bm2 or (config.swap_ab and not serial_splitk)
        tensors, mul_stride, softcap, constants = epilogue_arguments(self.end, self.out)
        options = self._options(constants)
        grid = (self.tiles_m, self.tiles_n, 1 if serial_splitk else splits)
        num_sums = self.tiles_m * self.tiles_n * splits if grid[2] > 1 else 0
        no_lora = (self.out, self.out, self.out)
        arguments = (
            x, w, *tensors, self._room_for_sums(num_sums * self.sums_per_tile), self.device.semaphores,
            *(no_lora if lora is None else (lora.u, lora.change.b, lora.ranges)),
            *self.out.shape, k, x.stride(0), mul_stride, self.span, softcap,
            *((0, 0, 0) if lora is None else (len(lora.ranges), *lora.ends)),
        )
        even = k % config.bk == 0 and self.span % config.bk == 0
        options |= dict(
            SWAP_AB=config.swap_ab, EVEN=even, SERIAL_SPLITK=serial_splitk,
            PREC="tf32x3" if x.dtype == torch.float32 else "tf32",
            PREFETCH=PREFETCH_LINES if pdl and w.element_size() == 2 else 0,
            TRIGGER_LATE=pdl and w.nbytes >= LATE_TRIGGER_BYTES, PARTS=lora.parts if lora else 0,
            RANK=lora.rank if lora else 0, RANGES=triton.next_power_of_2(len(lora.ranges)) if lora else 0,
            X_READY=even and lora is not None and lora.follows(x) and tma_aligned(x),
        )
        if lora is not None and config.bm == 16 and config.stages <= 3:
            options["maxnreg"] = FEW_REGISTERS
        return GemmLaunch(kernel=linear_kernel, grid=grid, arguments=arguments, options=options, out=self.out)
