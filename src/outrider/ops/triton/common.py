"""What the kernels share: activations, and programmatic dependent launch (PDL).

PDL lets a kernel start while the one before it drains. Every kernel calls `start` first: it allows the next kernel in and
waits until all earlier ones are complete and visible. Only weights, which nobody writes, may be touched before it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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
