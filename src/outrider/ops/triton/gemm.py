"""Triton kernels of row-invariant products y = x · wᵀ: a row has the same bits alone and among 2,048 others.

The weight's own reduction (gemm_config.py) fixes a sum: the inner dimension is cut into `splits` spans, a span is one
chain of matrix instructions of 16 columns each, and the spans are added in order. Everything else follows from the
number of rows and changes no bit: the tile of a program, which of the two operands is on the long side of the
instruction, how many columns are fetched at a time, and whether the spans of a tile run in several programs (the last
one to finish adds them up) or one after the other in a single program, as in a pass of many rows. gemm_launch.py says
with which tiles a product is launched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import epilogue, gate_and_up, gdc_launch_dependents, gdc_wait, prefetch, weight_rows
from .lowrank import lowrank_delta, slots_of


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
    """out = epilogue(x · wᵀ): x [M, K], w [N, K] (GATED: [2N, K], gate rows first) -> out [M, N]; MUL: act(x · wᵀ) *
    mul [M, N]. SERIAL_SPLITK: a program processes all SPLITS spans itself. BM2: rows in addition to BM (tiles are
    powers of two, batches are not). RANGES: of rows that adapters change (`lowrank_delta`); 0: none. X_READY: x is
    complete when the kernel starts, u when the previous one is.

    Grid (M / (BM + BM2), N / BN, spans; 1 if SERIAL_SPLITK): a program per tile and span; the last one of a tile to
    finish adds the spans.
    """
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
    """The sums rounded as without adapters, bias and all, before their changes are added."""
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
