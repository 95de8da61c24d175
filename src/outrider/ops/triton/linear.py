"""Products y = x · wᵀ whose rows stand alone: a row has the same bits whether it comes by itself or among 2,048 others.

What fixes a sum is the weight's own cut (tiles.py): the inner dimension falls into `splits` spans, a span is one chain of matrix
instructions of 16 columns each, and the spans are added in order. Everything else follows from the number of rows and changes
no bit: how many rows and columns a program takes, which of the two operands is on the long side of the instruction, how many
columns are fetched at a time, and whether the spans of a tile run in several programs (the last one to finish adds them up) or
one after the other in a single program, which is what a pass of many rows does. Where the copy engine fetches, passes of several
hundred rows go to `wide`, and those whose rows are a power of two and some more to `dealt`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from .ahead import Ahead
from .common import finish, gdc_launch_dependents, gdc_wait, prefetch
from .dealt import apart_kernel, dealt_kernel, tiles_of
from .quant_tiles import processors_of, shared_of
from .tiles import COUNTERS, DEALT_UNCUT, SHARED, Shape, Tile, choose_tile, fitted, for_rows
from .wide import described, fetchable, wide_kernel

LATE_BYTES = 24 << 20  # weights from which the next kernel is let in only when the sums are done
TOGETHER = 2048  # rows whose x stays in L2 while products of many rows go through the weights
AHEAD_LINES = 4  # of every weight row: what a small kernel ahead leaves the memory time to fetch


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x, w, bias, mul, out, part, seen,
    M, N, K, x_stride, mul_stride, k_span, softcap,
    BM: tl.constexpr, MORE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TURNED: tl.constexpr,
    GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, MUL: tl.constexpr, SOFTCAP: tl.constexpr,
    EVEN: tl.constexpr, SPLITS: tl.constexpr, FOLDED: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr, AHEAD: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """x [M, K], w [N, K] (GATED: [2N, K], gate rows first) -> out [M, N]; MUL: act(x·wᵀ) * mul [M, N].
    FOLDED: this program walks all SPLITS spans itself. MORE: rows that it takes beside its BM (widths are powers of two, batches not)."""
    pid_m, pid_n, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = pid_m * (BM + MORE) + tl.arange(0, BM)
    cols = pid_n * BN + tl.arange(0, BN)
    SIDES: tl.constexpr = 2 if GATED else 1
    # Columns past the end repeat the last one: loads stay unmasked, and the copies are never stored.
    w_row = weight_rows(pid_n * BN, N, BN, GATED) * K
    if PDL:
        if not LATE:
            gdc_launch_dependents()
        if AHEAD > 0:
            lines = split * k_span + tl.arange(0, AHEAD) * 64  # bf16: 64 columns a line
            prefetch(w + w_row[:, None] + tl.minimum(lines, K - 1)[None, :])
        gdc_wait()
    x_row = x + rows.to(tl.int64) * x_stride
    k_from = split * k_span
    k_to = tl.minimum(k_from + k_span, K)
    WIDE: tl.constexpr = BN * SIDES
    if MORE > 0:
        more = pid_m * (BM + MORE) + BM + tl.arange(0, MORE)
        y_row = x + more.to(tl.int64) * x_stride
        acc, also = _pair(x_row, rows < M, y_row, more < M, w + w_row, k_from, k_to, BM, MORE, WIDE, BK, EVEN, PREC)
    elif FOLDED:
        acc = tl.zeros((BM, WIDE), dtype=tl.float32)
        if TURNED:
            acc = tl.trans(tl.zeros((WIDE, BM), dtype=tl.float32))
        for s in range(SPLITS):
            acc += chain(x_row, rows < M, w + w_row, s * k_span, tl.minimum(s * k_span + k_span, K), BM, WIDE, BK, TURNED, EVEN, PREC)
    else:
        acc = chain(x_row, rows < M, w + w_row, k_from, k_to, BM, WIDE, BK, TURNED, EVEN, PREC)
    if LATE:  # a big product: were the next kernel let in at once, its waiting programs would crowd out this one's
        gdc_launch_dependents()

    if SPLITS > 1 and not FOLDED:
        # The last program of a tile adds the partial sums in the order of the spans and resets the counter.
        tile = pid_n * tl.num_programs(0) + pid_m
        SIZE: tl.constexpr = (BM + MORE) * WIDE  # of one span's partial sums
        base = part + tile.to(tl.int64) * SPLITS * SIZE
        _leave(base + split * SIZE, acc, rows < M, BM, WIDE)
        if MORE > 0:
            _leave(base + split * SIZE + BM * WIDE, also, more < M, MORE, WIDE)
        tl.debug_barrier()
        done = tl.atomic_add(seen + tile, 1, sem="acq_rel")
        if done == SPLITS - 1:
            tl.debug_barrier()
            acc = _gather(base, rows < M, BM, WIDE, SIZE, SPLITS)
            tl.store(seen + tile, 0)
            _finish(acc, bias, mul, out, rows, cols, M, N, mul_stride, softcap, BM, BN, GATED, ACT, BIAS, MUL, SOFTCAP)
            if MORE > 0:
                also = _gather(base + BM * WIDE, more < M, MORE, WIDE, SIZE, SPLITS)
                _finish(also, bias, mul, out, more, cols, M, N, mul_stride, softcap, MORE, BN, GATED, ACT, BIAS, MUL, SOFTCAP)
    else:
        _finish(acc, bias, mul, out, rows, cols, M, N, mul_stride, softcap, BM, BN, GATED, ACT, BIAS, MUL, SOFTCAP)
        if MORE > 0:
            _finish(also, bias, mul, out, more, cols, M, N, mul_stride, softcap, MORE, BN, GATED, ACT, BIAS, MUL, SOFTCAP)


@triton.jit
def _leave(to, acc, row_ok, BM: tl.constexpr, WIDE: tl.constexpr):
    """A span's partial sums. Most rows of a tile may be empty: they need no traffic."""
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
def weight_rows(first, N, BN: tl.constexpr, GATED: tl.constexpr):
    """The rows of a weight [N, K] that give BN columns from `first` on; of a gated one [2N, K], eight of the gate and eight of up in
    turns, so that the two halves of a pair meet in one thread."""
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
def chain(
    x_row, row_ok, w_row, k_from, k_to,
    BM: tl.constexpr, WN: tl.constexpr, BK: tl.constexpr, TURNED: tl.constexpr, EVEN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One span: x [BM] rows times w [WN] rows over the columns k_from..k_to, added in steps of 16 -> float32 [BM, WN].
    TURNED: the weights' rows are on the long side of the instruction, the tokens on the short one."""
    ks = tl.arange(0, BK)
    x_ptr, w_ptr = x_row[:, None] + ks[None, :], w_row[:, None] + ks[None, :]
    acc = tl.zeros((WN, BM) if TURNED else (BM, WN), dtype=tl.float32)
    for k in range(k_from, k_to, BK):
        if EVEN:
            a = tl.load(x_ptr + k, mask=row_ok[:, None], other=0.0)
            b = tl.load(w_ptr + k)
        else:
            a = tl.load(x_ptr + k, mask=row_ok[:, None] & (ks[None, :] < k_to - k), other=0.0)
            b = tl.load(w_ptr + k, mask=ks[None, :] < k_to - k, other=0.0)
        if TURNED:
            acc = tl.dot(b, tl.trans(a), acc, input_precision=PREC)
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision=PREC)
    if TURNED:
        acc = tl.trans(acc)
    return acc


@triton.jit
def _pair(
    x_row, row_ok, y_row, also_ok, w_row, k_from, k_to,
    BM: tl.constexpr, MORE: tl.constexpr, WN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Two turned chains that share what is read of the weights: [BM, WN] and [MORE, WN]."""
    ks = tl.arange(0, BK)
    x_ptr, y_ptr, w_ptr = x_row[:, None] + ks[None, :], y_row[:, None] + ks[None, :], w_row[:, None] + ks[None, :]
    acc = tl.zeros((WN, BM), dtype=tl.float32)
    also = tl.zeros((WN, MORE), dtype=tl.float32)
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
):  # fmt: skip
    up = acc
    if GATED:
        acc, up = gate_and_up(acc, BM, BN)
    finish(acc, up, bias, mul, out, rows, cols, M, N, mul_stride, softcap, GATED, ACT, BIAS, MUL, SOFTCAP)


@dataclass(frozen=True)
class Kind:
    """A product but for its rows: what one compiled kernel serves."""

    n: int
    k: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    gated: bool = False
    act: str = ""
    bias: torch.dtype | None = None
    mul: tuple[torch.dtype, int] | None = None  # and its row stride
    softcap: bool = False


def variant(kind: Kind, rows: int) -> Shape:
    """What of the number of rows a compiled kernel depends on."""
    tile = choose_tile(kind.n, kind.k, kind.gated, kind.dtype.itemsize)
    return for_rows(tile, kind.n, kind.k, rows, kind.gated, kind.dtype.itemsize)


def compile_for(kind: Kind, rows: int, pdl: bool, shared: int) -> None:
    """Compile the kernel for so many rows of this kind and launch nothing: tensors without memory stand for the real ones."""

    def shell(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    sides = 2 if kind.gated else 1
    launch = _call(
        shell(rows, kind.k, dtype=kind.dtype), shell(kind.n * sides, kind.k, dtype=kind.dtype), shell(COUNTERS, dtype=torch.int32),
        bias=None if kind.bias is None else shell(kind.n * sides, dtype=kind.bias),
        mul=None if kind.mul is None else shell(rows, kind.mul[1], dtype=kind.mul[0])[:, : kind.n],
        act=kind.act, gated=kind.gated, softcap=1.0 if kind.softcap else None, out_dtype=kind.out_dtype, pdl=pdl, tile=None, shape=None,
        shared=shared,
    )  # fmt: skip
    launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)


def product(
    x: Tensor, w: Tensor, seen: Tensor, *, bias: Tensor | None = None, mul: Tensor | None = None, act: str = "",
    gated: bool = False, softcap: float | None = None, out_dtype: torch.dtype | None = None, pdl: bool = False,
    tile: Tile | None = None, shape: Shape | None = None, ahead: Ahead[Kind] | None = None, shared: int | None = None,
) -> Tensor:  # fmt: skip
    """x [R, K], w [N, K] -> [R, N]. tile, shape: other cuts than the table's, for measuring; shared: bytes that a program may take,
    where the device is not to be asked."""
    if ahead is not None:
        n = w.shape[0] // 2 if gated else w.shape[0]
        beside = None if mul is None else (mul.dtype, mul.stride(0))
        biased = None if bias is None else bias.dtype
        ahead.before(Kind(n, w.shape[1], x.dtype, out_dtype or x.dtype, gated, act, biased, beside, softcap is not None), x.shape[0])
    launch = _call(
        x if x.stride(1) == 1 else x.contiguous(), w, seen, bias=bias, mul=mul, act=act, gated=gated, softcap=softcap,
        out_dtype=out_dtype or x.dtype, pdl=pdl, tile=tile, shape=shape, shared=shared or shared_of(x.device),
    )  # fmt: skip
    launch.kernel[launch.grid](*launch.arguments, **launch.options)
    return launch.out


@dataclass(frozen=True)
class Launch:
    kernel: JITFunction[Any]
    grid: tuple[int, ...]
    arguments: tuple[Tensor | TensorDescriptor | int | float, ...]
    options: dict[str, int | str | bool]
    out: Tensor  # where the result will be


def _call(
    x: Tensor, w: Tensor, seen: Tensor, *, bias: Tensor | None, mul: Tensor | None, act: str, gated: bool, softcap: float | None,
    out_dtype: torch.dtype, pdl: bool, tile: Tile | None, shape: Shape | None, shared: int,
) -> Launch:  # fmt: skip
    rows, k = x.shape
    n = w.shape[0] // 2 if gated else w.shape[0]
    tile = tile or choose_tile(n, k, gated, w.element_size())
    span = triton.cdiv(triton.cdiv(k, tile.splits), tile.bk) * tile.bk
    splits = triton.cdiv(k, span)
    shape = shape or fitted(for_rows(tile, n, k, rows, gated, w.element_size()), 2 if gated else 1, w.element_size(), shared)
    folded = splits > 1 and shape.folded
    assert not shape.more or (shape.turned and not folded)
    out = torch.empty((rows, n), dtype=out_dtype, device=x.device)
    ends: dict[str, int | str | bool] = dict(
        GATED=gated, ACT=act, BIAS=bias is not None, MUL=mul is not None, SOFTCAP=softcap is not None, SPLITS=splits, PDL=pdl,
        num_warps=shape.warps, num_stages=shape.stages, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    by_engine = shape.fetched and shared >= SHARED and fetchable(x) and fetchable(w)
    if by_engine and shape.more:
        tiles = triton.cdiv(rows, shape.bm + shape.more) * triton.cdiv(n, shape.bn)
        programs = tiles * splits if splits > 1 or tiles <= DEALT_UNCUT else min(tiles, processors_of(x.device))
        cut = tiles % programs > 0
        sums = (programs if splits > 1 else programs + 1 if cut else 0) * (shape.bm + shape.more) * shape.bn * (2 if gated else 1)
        given = (
            tiles_of(x, shape.bm, shape.bk), tiles_of(x, shape.more, shape.bk), tiles_of(w, shape.bn, shape.bk),
            bias if bias is not None else out, mul if mul is not None else out, out,
            torch.empty((sums,), dtype=torch.float32, device=x.device) if sums else out, seen,
            rows, n, k, mul.stride(0) if mul is not None else 0, span, float(softcap or 0.0),
        )  # fmt: skip
        ends |= dict(BM=shape.bm, MORE=shape.more, BN=shape.bn, BK=shape.bk)
        if splits > 1:
            return Launch(apart_kernel, (programs,), given, ends, out)
        return Launch(dealt_kernel, (programs,), given, ends | dict(CUT=cut), out)
    if by_engine:
        tiles = triton.cdiv(rows, shape.bm) * triton.cdiv(n, shape.bn)
        # Two accumulators leave no registers for the next tile's, and storing float32 takes the shared memory that its fetching needs.
        several = splits == 1 and out_dtype.itemsize == 2
        programs = min(tiles, processors_of(x.device)) if several else tiles
        fetches = (
            described(x, shape.bm, shape.bk), described(w, shape.bn, shape.bk, gated), bias if bias is not None else out,
            mul if mul is not None else out, out, rows, n, k, mul.stride(0) if mul is not None else 0, span, float(softcap or 0.0),
        )  # fmt: skip
        ends |= dict(BM=shape.bm, BN=shape.bn, BK=shape.bk, SEVERAL=several, TOGETHER=max(1, TOGETHER // shape.bm))
        return Launch(wide_kernel, (programs,), fetches, ends, out)
    grid = (triton.cdiv(rows, shape.bm + shape.more), triton.cdiv(n, shape.bn), 1 if folded else splits)
    wide = shape.bn * (2 if gated else 1)
    sums = grid[0] * grid[1] * splits * (shape.bm + shape.more) * wide
    part = torch.empty((sums,), dtype=torch.float32, device=x.device) if grid[2] > 1 else out
    arguments = (
        x, w, bias if bias is not None else out, mul if mul is not None else out, out, part, seen,
        rows, n, k, x.stride(0), mul.stride(0) if mul is not None else 0, span, float(softcap or 0.0),
    )  # fmt: skip
    ends |= dict(
        BM=shape.bm, MORE=shape.more, BN=shape.bn, BK=shape.bk, TURNED=shape.turned,
        EVEN=k % shape.bk == 0 and span % shape.bk == 0, FOLDED=folded, PREC="tf32x3" if x.dtype == torch.float32 else "tf32",
        AHEAD=AHEAD_LINES if pdl and w.element_size() == 2 else 0, LATE=pdl and w.numel() * w.element_size() >= LATE_BYTES,
    )  # fmt: skip
    return Launch(linear_kernel, grid, arguments, ends, out)
