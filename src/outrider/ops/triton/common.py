"""Shared by the kernels: activations, epilogues, and programmatic dependent launch (PDL).

PDL lets a kernel start while the previous one drains. `pdl_start` lets the next kernel start and waits until all
earlier ones are complete and visible. Before it a kernel may read weights, which no kernel writes, and K/V of positions
below the pass's first: a kernel without PDL runs between the pass that wrote those and this one. A product after
`lowrank.shrink` also reads x, and writes, before it waits (see there).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..backend import Epilogue

LOG2E = 1.4426950408889634


class Launcher(Protocol):
    """The attributes of `TritonOps` that its functions in other files use."""

    pdl: bool


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid, arguments and options."""

    kernel: Any  # a function of `triton.jit`
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.options)

    def compile(self) -> None:
        """Compiles the kernel without launching it."""
        self.kernel.warmup(*self.arguments, grid=self.grid, **self.options)

    @property
    def shell(self) -> Launch:
        """A copy without memory, for compiling."""
        empty = (torch.empty(0, dtype=a.dtype, device="meta") if isinstance(a, Tensor) else a for a in self.arguments)
        return Launch(self.kernel, self.grid, tuple(empty), options=self.options)

    @property
    def variant(self) -> tuple[object, ...]:
        """Key of the compiled kernel: launches with equal keys share it."""
        return self.kernel, *sorted(self.options.items())


def precision(x: Tensor) -> str:
    """Input precision of `tl.dot` for products with x."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


@triton.jit
def pdl_start(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(ptrs):
    """Ask for the 128-byte lines at `ptrs` to be brought into L2."""
    text: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    at = ptrs.to(tl.int64, bitcast=True)
    tl.inline_asm_elementwise(text, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def activate(x, ACT: tl.constexpr):
    """float32 in and out."""
    if ACT == "silu":
        return x / (1.0 + tl.exp(-x))
    else:  # gelu_tanh; tanh(u) = 1 - 2 / (exp(2u) + 1) saturates cleanly at both ends
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return 0.5 * x * (2.0 - 2.0 / (tl.exp(2.0 * u) + 1.0))


@triton.jit
def weight_rows(first, N, BN: tl.constexpr, GATED: tl.constexpr):
    """The rows of a weight [N, K] that give BN columns from `first` on; of a gated one [2N, K], eight of the gate
    and eight of up in turns, so that the two halves of a pair meet in one thread."""
    if GATED:
        r = tl.arange(0, 2 * BN)
        row = tl.minimum(first + r // 16 * 8 + r % 8, N - 1) + r // 8 % 2 * N
    else:
        row = tl.minimum(first + tl.arange(0, BN), N - 1)
    return row.to(tl.int64)


@triton.jit
def gate_and_up(acc, BM: tl.constexpr, BN: tl.constexpr):
    """[BM, 2·BN] in the order of `weight_rows` -> two of [BM, BN]."""
    gate, up = tl.split(tl.permute(tl.reshape(acc, (BM, BN // 8, 2, 8)), (0, 1, 3, 2)))
    return tl.reshape(gate, (BM, BN)), tl.reshape(up, (BM, BN))


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def epilogue(
    acc, up, bias, mul, out, rows, cols, M, N, mul_stride, softcap,
    GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, MUL: tl.constexpr, SOFTCAP: tl.constexpr,
):
    """Applies bias, activation, product and soft-cap to a tile's sums [rows, cols] and stores them.

    GATED: acc holds the gate's sums, up the other half. Rounds where the reference rounds: after the product, after the
    activation.
    """
    kind = out.dtype.element_ty
    ok = (rows[:, None] < M) & (cols[None, :] < N)
    if BIAS:
        acc += tl.load(bias + tl.minimum(cols, N - 1)).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            up += tl.load(bias + N + tl.minimum(cols, N - 1)).to(tl.float32)[None, :]
        acc = activate(acc.to(kind).to(tl.float32), ACT).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    if MUL:
        other = tl.load(mul + rows[:, None].to(tl.int64) * mul_stride + cols[None, :], mask=ok, other=0.0)
        other = other.to(tl.float32)
        acc = activate(acc.to(kind).to(tl.float32), ACT).to(kind).to(tl.float32) * other
    if SOFTCAP:
        acc = tanh(acc / softcap) * softcap
    tl.store(out + rows[:, None].to(tl.int64) * N + cols[None, :], acc.to(kind), mask=ok)


def epilogue_arguments(end: Epilogue, out: Tensor) -> tuple[tuple[Tensor, ...], int, float, dict[str, int | str]]:
    """For `epilogue`: its tensors, mul_stride, softcap, and its constants."""
    pointers = (out if end.bias is None else end.bias, out if end.mul is None else end.mul, out)
    there = dict(BIAS=end.bias is not None, MUL=end.mul is not None, SOFTCAP=end.softcap is not None)
    stride = 0 if end.mul is None else end.mul.stride(0)
    return pointers, stride, float(end.softcap or 0.0), dict(GATED=end.gated, ACT=end.act, **there)
