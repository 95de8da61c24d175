"""Stream-K products of 129 to some hundred rows with TMA (Hopper and later): the chains of sums of `gemm`, so the
same bits.

TMA loads whole tiles of x and of the weights into shared memory, with zeros past their ends: threads compute no
addresses and need no masks. A program takes BM and BM2 rows (five rows each of 32 or 64 sequences are 160 or 320, and
tiles are powers of two) through the same weights, whose rows are on the long side of the instruction. There is one
program per SM, and they take the tiles in rounds. The rest of the last round is cut along the chains: a program starts
with the first part of a tile, stores the sums, and ends with the last part of the tile that the previous program
started with. A chain continues from exactly the stored sums, so the order of additions is unchanged, and all programs
end at the same time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .common import epilogue, pdl_start


@triton.jit(do_not_specialize=["M"])
def streamk_kernel(
    x, y, w, bias, mul, out, partial_out, semaphores, M, N, K, mul_stride, k_span, softcap,
    BM: tl.constexpr, BM2: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, MUL: tl.constexpr, SOFTCAP: tl.constexpr,
    SPLITS: tl.constexpr, CUT: tl.constexpr, PDL: tl.constexpr,
):
    """out = epilogue(x · wᵀ): x [M, K] in tiles of BM rows, y the same in tiles of BM2, w [N, K] (GATED: [2N, K], gate
    rows first), as descriptors -> out [M, N]. CUT: the last round is not full; partial_out: one tile of sums per
    program, semaphores: whether they are stored.

    Grid (programs,): one per SM, or one per tile if there are fewer; each takes tiles in rounds.
    """
    tl.static_assert(SPLITS == 1)
    pdl_start(PDL)
    SIZE: tl.constexpr = (BM + BM2) * BN * (2 if GATED else 1)  # of a tile's sums
    me = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles_m = tl.cdiv(M, BM + BM2)
    tiles = tiles_m * tl.cdiv(N, BN)
    steps = tl.cdiv(K, BK)
    cut = tiles % programs + programs if CUT else 0  # tiles that are cut into parts: each has more than one
    begin = cut * steps * me // programs
    end = cut * steps * (me + 1) // programs
    first = begin // steps
    last = (end + steps - 1) // steps - 1
    parts = last - first + 1
    for i in tl.range(0, parts + (tiles - cut) // programs):
        tile = last - i
        low = 0
        high = steps
        if i >= parts:
            tile = cut + me + (i - parts) * programs
        else:
            low = tl.maximum(begin - tile * steps, 0)
            high = tl.minimum(end - tile * steps, steps)
        row = tile % tiles_m * (BM + BM2)
        col = tile // tiles_m * BN
        if CUT and low > 0:
            # Begun by the program before this one, which did so first of all: there is hardly ever a wait.
            while tl.atomic_add(semaphores + me, 0, sem="acquire") == 0:
                pass
            a, b, c, d = _take(partial_out + me * SIZE, BM, BM2, BN, GATED)
            tl.debug_barrier()
            tl.store(semaphores + me, 0)
            # One step by itself: sums that enter the loop as they were loaded make every matrix instruction wait for
            # the one before.
            a, b, c, d = _step(x, y, w, row, col, low * BK, N, a, b, c, d, BM, GATED)
            a, b, c, d = _chain(x, y, w, row, col, low * BK + BK, high * BK, N, a, b, c, d, BM, BK, GATED)
        else:
            a, b, c, d = _zeros(BM, BM2, BN, GATED)
            a, b, c, d = _chain(x, y, w, row, col, 0, high * BK, N, a, b, c, d, BM, BK, GATED)
        if CUT and high < steps:
            _leave(partial_out + (me + 1) * SIZE, a, b, c, d, BM, BM2, BN, GATED)
            tl.debug_barrier()
            tl.atomic_xchg(semaphores + me + 1, 1, sem="release")
        else:
            _finish(
                a, b, c, d, bias, mul, out, row, col, M, N, mul_stride, softcap, BM, BM2, BN, GATED, ACT, BIAS, MUL,
                SOFTCAP,
            )


@triton.jit(do_not_specialize=["M"])
def splitk_kernel(
    x, y, w, bias, mul, out, partial_out, semaphores, M, N, K, mul_stride, k_span, softcap,
    BM: tl.constexpr, BM2: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, MUL: tl.constexpr, SOFTCAP: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
):
    """out = epilogue(x · wᵀ) for weights of several spans, operands as of `streamk_kernel`. partial_out: the sums of
    all spans of all tiles.

    Grid (tiles · SPLITS,): a program per span of a tile: all store their sums, and the last one adds them in order.
    """
    pdl_start(PDL)
    SIZE: tl.constexpr = (BM + BM2) * BN * (2 if GATED else 1)
    tiles_n = tl.cdiv(N, BN)
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    row = tile // tiles_n * (BM + BM2)
    col = tile % tiles_n * BN
    a, b, c, d = _zeros(BM, BM2, BN, GATED)
    to = tl.minimum(split * k_span + k_span, K)
    a, b, c, d = _chain(x, y, w, row, col, split * k_span, to, N, a, b, c, d, BM, BK, GATED)
    base = partial_out + tile.to(tl.int64) * SPLITS * SIZE
    _leave(base + split * SIZE, a, b, c, d, BM, BM2, BN, GATED)
    tl.debug_barrier()
    done = tl.atomic_add(semaphores + tile, 1, sem="acq_rel")
    if done == SPLITS - 1:
        tl.debug_barrier()
        tl.store(semaphores + tile, 0)
        a, b, c, d = _zeros(BM, BM2, BN, GATED)
        for s in range(SPLITS):
            e, f, g, h = _take(base + s * SIZE, BM, BM2, BN, GATED)
            a += e
            b += f
            if GATED:
                c += g
                d += h
        _finish(
            a, b, c, d, bias, mul, out, row, col, M, N, mul_stride, softcap, BM, BM2, BN, GATED, ACT, BIAS, MUL, SOFTCAP
        )


# The sums of a tile are four blocks: [BN, BM] and [BN, BM2], and the same of up; ungated, the latter stand for nothing.
@triton.jit
def _zeros(BM: tl.constexpr, BM2: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr):
    a = tl.zeros((BN, BM), dtype=tl.float32)
    b = tl.zeros((BN, BM2), dtype=tl.float32)
    c = a
    d = b
    if GATED:
        c = tl.zeros((BN, BM), dtype=tl.float32)
        d = tl.zeros((BN, BM2), dtype=tl.float32)
    return a, b, c, d


@triton.jit
def _chain(x, y, w, row, col, k_from, k_to, N, a, b, c, d, BM: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr):
    """Sums that go on from these over the columns k_from..k_to."""
    for k in range(k_from, k_to, BK):
        a, b, c, d = _step(x, y, w, row, col, k, N, a, b, c, d, BM, GATED)
    return a, b, c, d


@triton.jit
def _step(x, y, w, row, col, k, N, a, b, c, d, BM: tl.constexpr, GATED: tl.constexpr):
    gate = w.load([col, k])
    these = x.load([row, k])
    a = tl.dot(gate, these.T, a)
    if GATED:
        up = w.load([N + col, k])
        c = tl.dot(up, these.T, c)
    more = y.load([row + BM, k])
    b = tl.dot(gate, more.T, b)
    if GATED:
        d = tl.dot(up, more.T, d)
    return a, b, c, d


@triton.jit
def _leave(to, a, b, c, d, BM: tl.constexpr, BM2: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr):
    tl.store(to + _places(BN, BM), a)
    tl.store(to + BN * BM + _places(BN, BM2), b)
    if GATED:
        tl.store(to + BN * (BM + BM2) + _places(BN, BM), c)
        tl.store(to + BN * (2 * BM + BM2) + _places(BN, BM2), d)


@triton.jit
def _take(of, BM: tl.constexpr, BM2: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr):
    a = tl.load(of + _places(BN, BM), cache_modifier=".cg")
    b = tl.load(of + BN * BM + _places(BN, BM2), cache_modifier=".cg")
    c = a
    d = b
    if GATED:
        c = tl.load(of + BN * (BM + BM2) + _places(BN, BM), cache_modifier=".cg")
        d = tl.load(of + BN * (2 * BM + BM2) + _places(BN, BM2), cache_modifier=".cg")
    return a, b, c, d


@triton.jit
def _finish(
    a, b, c, d, bias, mul, out, row, col, M, N, mul_stride, softcap, BM: tl.constexpr, BM2: tl.constexpr,
    BN: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, MUL: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    cols = col + tl.arange(0, BN)
    rows = row + tl.arange(0, BM)
    more = row + BM + tl.arange(0, BM2)
    a = tl.trans(a)
    b = tl.trans(b)
    c = tl.trans(c)
    d = tl.trans(d)
    epilogue(a, c, bias, mul, out, rows, cols, M, N, mul_stride, softcap, GATED, ACT, BIAS, MUL, SOFTCAP)
    epilogue(b, d, bias, mul, out, more, cols, M, N, mul_stride, softcap, GATED, ACT, BIAS, MUL, SOFTCAP)


@triton.jit
def _places(HIGH: tl.constexpr, WIDTH: tl.constexpr):
    return tl.arange(0, HIGH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


def matrix_descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A TMA descriptor of a matrix with tiles of this size."""
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [rows, columns])


def tma_aligned(x: Tensor) -> bool:
    """Whether TMA can load it: rows must begin at whole 16 bytes."""
    return x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
