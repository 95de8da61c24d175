"""What the kernels share: activations, and programmatic dependent launch (PDL).

PDL lets a kernel start while the one before it drains. Every kernel calls `start` first: it allows the next kernel in and
waits until all earlier ones are complete and visible. Only weights, which nobody writes, may be touched before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FETCHERS = 128  # programs that do nothing but fetch: about one a multiprocessor
WAVE = 12672  # rows of a weight matrix that are read at once; later ones would be evicted before they are wanted


@dataclass(frozen=True)
class Soon:
    """Weights that a kernel with little to read fetches into L2 for a later one: `rows` of each half, `lines` of each row."""

    weight: Tensor
    rows: int
    lines: int
    other: int  # elements from the gate half to the up half; 0: no halves

    @staticmethod
    def of(weight: Tensor, gated: bool, budget: int) -> Soon | None:
        halves = 2 if gated else 1
        n, k = weight.shape[0] // halves, weight.shape[1]
        rows = min(n, WAVE)
        lines = min(budget // (rows * halves * 128), -(-k // 64))
        return Soon(weight, rows, lines, n * k if gated else 0) if lines > 0 and weight.element_size() == 2 else None


@triton.jit
def start(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(ptrs):
    """Ask for the 128-byte lines at `ptrs` to be brought into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs.to(tl.int64, bitcast=True)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def fetch(w, rows, lines, width, other, worker, workers):
    """Bring the first lines of the first rows of a weight matrix into L2, and as much from `other` elements further on where
    that is not 0; shared among `workers` programs. bf16: 64 columns a line."""
    for r in range(worker * 32, rows, workers * 32):
        at = tl.minimum(r + tl.arange(0, 32), rows - 1).to(tl.int64)[:, None] * width
        for c in range(0, lines, 4):
            line = w + at + tl.minimum((c + tl.arange(0, 4)) * 64, width - 1)[None, :]
            prefetch(line)
            if other > 0:
                prefetch(line + other)


@triton.jit
def activate(x, ACT: tl.constexpr):
    """float32 in and out."""
    if ACT == "silu":
        return x / (1.0 + tl.exp(-x))
    else:  # gelu_tanh; tanh(u) = 1 - 2 / (exp(2u) + 1) saturates cleanly at both ends
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return 0.5 * x * (2.0 - 2.0 / (tl.exp(2.0 * u) + 1.0))


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
