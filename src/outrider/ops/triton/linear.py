"""Skinny products y = x · wᵀ for 1..272 rows, row-invariant: a row's result never depends on how many rows there are.

The order of the sum over the inner dimension is fixed by (N, K) alone. A chunk of it is cut into `slices` of `bk` columns,
one a warp: a chain of dependent matrix instructions (16 columns, some 30 ns each) is what a short product waits for, and
so the warps of a program share the chain instead of each walking all of it. A slice's steps are added in order, the slices
at the end; `splits` spans are added in order by the program that finishes last. Only the rows of a tile (16, 32, 64, turned
128) follow from the number of rows, and a matrix instruction treats its rows independently.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import activate, gdc_launch_dependents, gdc_wait, prefetch, tanh
from .tiles import Tile, choose_tile

LATE_BYTES = 24 << 20  # weights from which the next kernel is let in only when the sums are done
AHEAD_LINES = 4  # of every weight row: what a small kernel ahead leaves the memory time to fetch
SHARED = 226 << 10  # bytes of shared memory a program may take
MAX_ROWS = 272  # 16 sequences of 17 rows; beyond it a pass is compute-bound and belongs to cuBLAS


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x, w, bias, mul, out, part, seen,
    M, N, K, x_stride, mul_stride, k_span, softcap,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SLICES: tl.constexpr,
    GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, MUL: tl.constexpr, SOFTCAP: tl.constexpr,
    EVEN: tl.constexpr, SPLITS: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """x [M, K], w [N, K] (GATED: [2N, K], gate rows first) -> out [M, N]; MUL: act(x·wᵀ) * mul [M, N]."""
    pid_m, pid_n, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = pid_m * BM + tl.arange(0, BM)
    cols = pid_n * BN + tl.arange(0, BN)
    k_from = split * k_span
    k_to = tl.minimum(k_from + k_span, K)
    # Columns past the end repeat the last one: loads stay unmasked, and the copies are never stored.
    w_row = tl.minimum(cols, N - 1).to(tl.int64) * K
    if PDL:
        if not LATE:
            gdc_launch_dependents()
        if AHEAD > 0:
            lines = k_from + tl.arange(0, AHEAD) * 64  # bf16: 64 columns a line
            prefetch(w + w_row[:, None] + tl.minimum(lines, K - 1)[None, :])
            if GATED:
                prefetch(w + N.to(tl.int64) * K + w_row[:, None] + tl.minimum(lines, K - 1)[None, :])
        gdc_wait()
    if SLICES > 1:
        acc, up = sliced(x, w, rows, rows, w_row, k_from, k_to, M, N, K, x_stride, BM, BN, BK, SLICES, GATED, EVEN, PREC)
    else:
        acc, up = _whole(x, w, rows, w_row, k_from, k_to, M, N, K, x_stride, BM, BN, BK, SLICES == 0, GATED, EVEN, PREC)
    if LATE:  # a big product: were the next kernel let in at once, its waiting programs would crowd out this one's
        gdc_launch_dependents()

    if SPLITS > 1:
        # The last program of a tile adds the partial sums in the order of the spans and resets the counter.
        tile = pid_n * tl.num_programs(0) + pid_m
        at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        live = (rows < M)[:, None] & (cols >= 0)[None, :]  # most rows of a tile may be empty: they need no traffic
        base = part + tile.to(tl.int64) * SPLITS * (BM * BN)
        tl.store(base + split * (BM * BN) + at, acc, mask=live)
        tl.debug_barrier()
        done = tl.atomic_add(seen + tile, 1, sem="acq_rel")
        if done == SPLITS - 1:
            tl.debug_barrier()
            acc = tl.zeros((BM, BN), dtype=tl.float32)
            for s in tl.static_range(SPLITS):  # unrolled: the loads fly together
                acc += tl.load(base + s * (BM * BN) + at, mask=live, other=0.0, cache_modifier=".cg")
            tl.store(seen + tile, 0)
            _finish(acc, up, bias, mul, out, rows, cols, M, N, mul_stride, softcap, GATED, ACT, BIAS, MUL, SOFTCAP)
    else:
        _finish(acc, up, bias, mul, out, rows, cols, M, N, mul_stride, softcap, GATED, ACT, BIAS, MUL, SOFTCAP)


@triton.jit
def sliced(
    x, w, x_rows, rows, w_row, k_from, k_to, M, N, K, x_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SLICES: tl.constexpr,
    GATED: tl.constexpr, EVEN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """A batched product whose batch is the slices: one warp each. Of x the rows x_rows, as far as `rows` are below M."""
    at = (tl.arange(0, SLICES) * BK)[:, None, None] + tl.arange(0, BK)[None, None, :]
    x_ptr = x + x_rows[None, :, None].to(tl.int64) * x_stride + at
    w_ptr = w + w_row[None, :, None] + at
    u_ptr = w_ptr
    if GATED:
        u_ptr = w_ptr + N.to(tl.int64) * K
    row_ok = rows[None, :, None] < M
    acc = tl.zeros((SLICES, BM, BN), dtype=tl.float32)
    up = tl.zeros((SLICES, BM, BN), dtype=tl.float32)
    for k in range(k_from, k_to, SLICES * BK):
        if EVEN:
            a = tl.load(x_ptr + k, mask=row_ok, other=0.0)
            b = tl.load(w_ptr + k)
        else:
            a = tl.load(x_ptr + k, mask=row_ok & (at < k_to - k), other=0.0)
            b = tl.load(w_ptr + k, mask=at < k_to - k, other=0.0)
        acc = tl.dot(a, tl.permute(b, (0, 2, 1)), acc, input_precision=PREC)
        if GATED:
            if EVEN:
                c = tl.load(u_ptr + k)
            else:
                c = tl.load(u_ptr + k, mask=at < k_to - k, other=0.0)
            up = tl.dot(a, tl.permute(c, (0, 2, 1)), up, input_precision=PREC)
    return tl.sum(acc, 0), tl.sum(up, 0)


@triton.jit
def _whole(
    x, w, rows, w_row, k_from, k_to, M, N, K, x_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TURNED: tl.constexpr,
    GATED: tl.constexpr, EVEN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """x · wᵀ, or turned w · xᵀ: 64 rows of w are then one instruction of a group of warps, which reads both sides from shared memory;
    the rows of x are its short side, from 16 to 128 without a change in how any of them is added up."""
    ks = tl.arange(0, BK)
    x_ptr = x + rows[:, None].to(tl.int64) * x_stride + ks[None, :]
    w_ptr = w + w_row[:, None] + ks[None, :]
    u_ptr = w_ptr
    if GATED:
        u_ptr = w_ptr + N.to(tl.int64) * K
    row_ok = rows[:, None] < M
    acc = tl.zeros((BN, BM) if TURNED else (BM, BN), dtype=tl.float32)
    up = tl.zeros((BN, BM) if TURNED else (BM, BN), dtype=tl.float32)
    for k in range(k_from, k_to, BK):
        if EVEN:
            a = tl.load(x_ptr + k, mask=row_ok, other=0.0)
            b = tl.load(w_ptr + k)
        else:
            k_ok = ks[None, :] < k_to - k
            a = tl.load(x_ptr + k, mask=row_ok & k_ok, other=0.0)
            b = tl.load(w_ptr + k, mask=k_ok, other=0.0)
        acc = _add(a, b, acc, TURNED, PREC)
        if GATED:
            if EVEN:
                c = tl.load(u_ptr + k)
            else:
                c = tl.load(u_ptr + k, mask=ks[None, :] < k_to - k, other=0.0)
            up = _add(a, c, up, TURNED, PREC)
    if TURNED:
        acc, up = tl.trans(acc), tl.trans(up)
    return acc, up


@triton.jit
def _add(a, b, acc, TURNED: tl.constexpr, PREC: tl.constexpr):
    if TURNED:
        return tl.dot(b, tl.trans(a), acc, input_precision=PREC)
    else:
        return tl.dot(a, tl.trans(b), acc, input_precision=PREC)


@triton.jit
def _finish(
    acc, up, bias, mul, out, rows, cols, M, N, mul_stride, softcap,
    GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, MUL: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Round where the plain twin rounds: after the product, after the activation."""
    kind = out.dtype.element_ty
    ok = (rows[:, None] < M) & (cols[None, :] < N)
    if BIAS:
        acc += tl.load(bias + tl.minimum(cols, N - 1)).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            up += tl.load(bias + N + tl.minimum(cols, N - 1)).to(tl.float32)[None, :]
        acc = activate(acc.to(kind).to(tl.float32), ACT).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    if MUL:
        other = tl.load(mul + rows[:, None].to(tl.int64) * mul_stride + cols[None, :], mask=ok, other=0.0).to(tl.float32)
        acc = activate(acc.to(kind).to(tl.float32), ACT).to(kind).to(tl.float32) * other
    if SOFTCAP:
        acc = tanh(acc / softcap) * softcap
    tl.store(out + rows[:, None].to(tl.int64) * N + cols[None, :], acc.to(kind), mask=ok)


def for_rows(tile: Tile, n: int, rows: int, gated: bool) -> tuple[int, Tile]:
    """Rows of a tile, and the cut that fits them: the order of sums stays as it is (unsliced, bk has no part in it). Two warps
    at 64 rows keep the compiler on the same matrix instruction as at 16 and 32."""
    bm = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 or tile.slices else 128
    sides, bn, bk, warps = 2 if gated else 1, tile.bn, tile.bk, tile.warps
    if bm == 32 and tile.many:
        bn, bk, stages, warps = tile.many
        return bm, replace(tile, bn=bn, bk=bk, stages=stages, warps=warps)
    if tile.slices == 0:
        room = SHARED // ((bm + bn * sides) * bk * 2)
        return bm, replace(tile, stages=max(2, min(tile.stages, room)), warps=8 if bn * sides * bm > 16384 else warps)
    if bm == 32:
        bn = max(bn, 64 // sides if n >= 64 * 264 else 32 // sides)
    if bm == 64:
        bn = 32 // sides if tile.slices > 1 else min(bn, 64 // sides)
    if tile.slices == 1 and (bm == 64 or bn > tile.bn):
        bk, warps = min(bk, 64), 2 if bm == 64 else warps
    room = SHARED // (1 if bn * bm >= 2048 else 2) // ((bm + bn * sides) * bk * tile.slices * 2)
    return bm, replace(tile, bn=bn, bk=bk, warps=warps, stages=tile.stages if bm == 16 else max(3, min(6, room + 1)))


def skinny(
    x: Tensor, w: Tensor, seen: Tensor, *, bias: Tensor | None = None, mul: Tensor | None = None, act: str = "",
    gated: bool = False, softcap: float | None = None, out_dtype: torch.dtype | None = None, pdl: bool = False,
    tile: Tile | None = None, ahead: int | None = None, late: int | None = None,
) -> Tensor:  # fmt: skip
    """ahead: lines of 64 columns fetched into L2 before the kernel ahead of this one is done; late: see LATE_BYTES."""
    rows, k = x.shape
    n = w.shape[0] // 2 if gated else w.shape[0]
    if x.stride(1) != 1:
        x = x.contiguous()
    tile = tile or choose_tile(n, k, gated, w.element_size())
    ahead, late = AHEAD_LINES if ahead is None else ahead, LATE_BYTES if late is None else late
    chunk = tile.bk * max(1, tile.slices)
    span = triton.cdiv(triton.cdiv(k, tile.splits), chunk) * chunk
    splits = triton.cdiv(k, span)
    bm, tile = for_rows(tile, n, rows, gated)
    chunk = tile.bk * max(1, tile.slices)
    out = torch.empty((rows, n), dtype=out_dtype or x.dtype, device=x.device)
    grid = (triton.cdiv(rows, bm), triton.cdiv(n, tile.bn), splits)
    part = torch.empty((grid[0] * grid[1] * splits, bm, tile.bn), dtype=torch.float32, device=x.device) if splits > 1 else out
    linear_kernel[grid](
        x, w, bias if bias is not None else out, mul if mul is not None else out, out, part, seen,
        rows, n, k, x.stride(0), mul.stride(0) if mul is not None else 0, span, float(softcap or 0.0),
        BM=bm, BN=tile.bn, BK=tile.bk, SLICES=tile.slices, GATED=gated, ACT=act, BIAS=bias is not None, MUL=mul is not None,
        SOFTCAP=softcap is not None, EVEN=k % chunk == 0 and span % chunk == 0, SPLITS=splits,
        PREC="tf32x3" if x.dtype == torch.float32 else "tf32", PDL=pdl,
        AHEAD=ahead if pdl and w.element_size() == 2 else 0, LATE=pdl and w.numel() * w.element_size() >= late,
        num_warps=tile.warps, num_stages=tile.stages, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
