"""Which GPU kernel serves which operation: `outrider doctor --kernels` prints this table. The limits are the constants
that the dispatching code compares with. All kernels of an operation give the same bits; one stays if it brings at least
5 % of a whole step in a published configuration (`docs/gpu-inside.md`)."""

from __future__ import annotations

from typing import NamedTuple

from .attention_config import MIN_QUERIES
from .gemm_config import STREAMK_MAX_ROWS
from .moe_gemv_int8 import MAX_MOE_GEMV_ROWS
from .ops import SIDE_STREAM_ROWS
from .w4a16_wgmma import MAX_WGMMA_TOKENS
from .wna16_gemv import MAX_GEMV_TOKENS


class KernelRow(NamedTuple):
    operation: str
    when: str
    kernel: str
    card: str  # where it runs; elsewhere the operation's last row serves


TABLE = (
    KernelRow("dense GEMM", f"129 to {STREAMK_MAX_ROWS} rows, one span", "gemm_streamk.streamk_kernel", "sm_90"),
    KernelRow("dense GEMM", f"129 to {STREAMK_MAX_ROWS} rows, several spans", "gemm_streamk.splitk_kernel", "sm_90"),
    KernelRow("dense GEMM", "more than 128 rows, bf16, where estimated faster", "gemm_wgmma.cu", "sm_90"),
    KernelRow("dense GEMM", "any", "gemm.linear_kernel", "any"),
    KernelRow("quantised GEMM", f"up to {MAX_GEMV_TOKENS} rows, every format", "wna16_gemv.cu", "sm_90"),
    KernelRow("quantised GEMM", f"up to {MAX_WGMMA_TOKENS} rows, 4 bits", "w4a16_wgmma.cu", "sm_90"),
    KernelRow("quantised GEMM", f"more than {MAX_WGMMA_TOKENS} rows, 4 bits", "w4a16_gemm.cu", "sm_90"),
    KernelRow("quantised GEMM", "any", "quant.quant_kernel", "any"),
    KernelRow("attention", f"over {MIN_QUERIES} queries × heads of 512, bf16", "attention_wgmma.cu", "sm_90"),
    KernelRow("attention", f"over {MIN_QUERIES} queries × heads, bf16", "prefill_attention.prompt_kernel", "sm_90"),
    KernelRow("attention", "any", "attention.attend_kernel + combine_kernel", "any"),
    KernelRow("attention of block drafters", "any", "block_attention.block_attend_kernel", "any"),
    KernelRow("experts", f"up to {MAX_MOE_GEMV_ROWS} rows, int8", "moe_gemv_int8.cu", "sm_90"),
    KernelRow("experts", f"up to {SIDE_STREAM_ROWS} rows", "moe.experts_kernel, shared MLP on a side stream", "any"),
    KernelRow("experts", "any", "moe.experts_kernel, quant_moe.quant_experts_kernel", "any"),
    KernelRow("MTP draft steps", "large drafter", "draft_steps.SteppedDrafter: short kernels", "sm_90"),
    KernelRow("MTP draft steps", "any", "the target's operations, step by step", "any"),
)
