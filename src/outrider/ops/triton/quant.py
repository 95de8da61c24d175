"""Products with quantised weights: y = x · wᵀ for any number of rows, dequantised in registers, row-invariant.

**Layout** (`repack`). A weight's columns are cut into chunks of 8 (4-bit) or 4 (8-bit) planes of P columns; a chunk of
one row is P words of 32 bits. Word 2c holds, for the first half of the planes, columns 2c (lower 16 bits) and 2c + 1
(upper 16 bits) of each plane; word 2c + 1 the same for the second half. So one mask gives a register with two
neighbouring columns of one plane, exactly as the matrix instruction takes them: nothing moves between threads, and a
plane multiplies P neighbouring columns of x. 64 rows of a chunk lie together, so a program reads one contiguous piece
of memory. Five- and six-bit codes store their lower four bits like that, and next to each word, in a byte or two, the
one or two high bits of each of its eight nibbles. Scales are 16-bit pairs, one word per two groups; a row's words are
adjacent, and 64 rows lie together here too.

**Order of sums**: planes in order, chunks in order, then `splits` spans in order: a function of the shape alone. The
weights are on the long side of the matrix instruction, the tokens on the short one, so a token's sum does not depend on
the number of tokens. (8 tokens take mma.sync, more take wgmma: both gave the same bits on an H200, as the device checks
compare.)

**Scales** multiply the sum of a group, in float32: the weights themselves are small integers (or floats of 4 or 8
bits), which bfloat16 holds exactly. `zero_point` is for formats with an offset: zero_point[n, g] · (sum of x over the
group) is added.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backend import Epilogue
from .common import epilogue, epilogue_arguments, gdc_launch_dependents, gdc_wait, precision, prefetch
from .quant_config import QuantTile, choose_quant_tile, fit, max_smem
from .repack import QuantWeight
from .unpack import planes_of

LATE_TRIGGER_BYTES = 24 << 20  # weights from which the next kernel is let in only when the sums are done


@triton.jit
def _half(pair, HIGH: tl.constexpr, FP16: tl.constexpr):
    """One of the two 16-bit numbers of a word, as float32."""
    if FP16:
        bits = (pair >> 16 if HIGH else pair & 0xFFFF).to(tl.int16)
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (pair & -65536 if HIGH else pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _pairs(ptr, PAIRS: tl.constexpr, PLAIN: tl.constexpr):
    """The words of a chunk's scales, one, two or four adjacent ones per row: one load in whichever layout its user has.
    A plain one would be laid out separately and moved through shared memory."""
    if PLAIN:
        a = tl.load(ptr)
        b = a
        c = a
        d = a
        if PAIRS > 1:
            b = tl.load(ptr + 1)
        if PAIRS > 2:
            c = tl.load(ptr + 2)
            d = tl.load(ptr + 3)
        return a, b, c, d
    at = ptr.to(tl.int64, bitcast=True)
    if PAIRS == 4:
        load: tl.constexpr = "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];"
        return tl.inline_asm_elementwise(load, "=r,=r,=r,=r,l", [at], dtype=(tl.int32,) * 4, is_pure=True, pack=1)
    elif PAIRS == 2:
        a, b = tl.inline_asm_elementwise(
            "ld.global.nc.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [at], dtype=(tl.int32,) * 2, is_pure=True, pack=1
        )
        return a, b, a, b
    else:
        a = tl.inline_asm_elementwise("ld.global.nc.b32 $0, [$1];", "=r,l", [at], dtype=tl.int32, is_pure=True, pack=1)
        return a, a, a, a


@triton.jit
def _total(ptr, DIRECT: tl.constexpr):
    """A group's sums of x, by token: straight into the layout of the sums they are added to where a thread has few
    tokens."""
    if not DIRECT:
        return tl.load(ptr)
    else:
        at = ptr.to(tl.int64, bitcast=True)
        # The kernel before wrote them: not pure, so that it stays behind the wait.
        return tl.inline_asm_elementwise(
            "ld.global.f32 $0, [$1];", "=f,l", [at], dtype=tl.float32, is_pure=False, pack=1
        )


@triton.jit
def add_chunk(
    acc, beside, words, above, scales, lifts, x_ptr, y_ptr, live, also, sums, sums_stride, left,
    CODES: tl.constexpr, PLANES: tl.constexpr, P: tl.constexpr, PER: tl.constexpr, FP16: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    BM: tl.constexpr, MORE: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, PLAIN: tl.constexpr, PREC: tl.constexpr,
):
    """acc [BN, BM] and the products of one chunk: words [BN, P] with what is above them, their factors and offsets; x
    at x_ptr [BM, P] and on, of which `left` columns are there; live [BM]: tokens that are; sums [BM]: where those of x
    over the chunk's first group lie, those of the next one sums_stride further (of tokens that are not: anything).
    beside [BN, MORE], y_ptr, also: additional tokens, of groups without an offset."""
    values = planes_of(words, above, CODES, P, BN, x_ptr.dtype.element_ty, PLAIN)
    d = tl.zeros((BN, BM), dtype=tl.float32)
    for i in tl.static_range(PLANES):
        if EVEN:
            a = tl.load(x_ptr + i * P, mask=live[:, None], other=0.0)
        else:
            a = tl.load(x_ptr + i * P, mask=live[:, None] & (tl.arange(0, P)[None, :] < left - i * P), other=0.0)
        if PER == 0:
            acc = tl.dot(values[i], tl.trans(a), acc, input_precision=PREC)
        else:
            factor = _half(scales[i // PER // 2], (i // PER) % 2 == 1, FP16)[:, None]
            if i % PER == 0:
                d = tl.dot(values[i], tl.trans(a), input_precision=PREC)
            else:
                d = tl.dot(values[i], tl.trans(a), d, input_precision=PREC)
            if i % PER == PER - 1:
                acc += d * factor
                if ZERO_POINT:
                    total = _total(sums + i // PER * sums_stride, BM <= 16 and not PLAIN)
                    acc += _half(lifts[i // PER // 2], (i // PER) % 2 == 1, FP16)[:, None] * total[None, :]
            if MORE > 0:
                tl.static_assert(PER == 1 and not ZERO_POINT, "further tokens: a group a plane, no offsets")
                if EVEN:
                    b = tl.load(y_ptr + i * P, mask=also[:, None], other=0.0)
                else:
                    b = tl.load(
                        y_ptr + i * P, mask=also[:, None] & (tl.arange(0, P)[None, :] < left - i * P), other=0.0
                    )
                beside += tl.dot(values[i], tl.trans(b), input_precision=PREC) * factor
    return acc, beside


@triton.jit(do_not_specialize=["M"])
def quant_kernel(
    x, w, high, scale, zero_point, sums, factor, bias, mul, out, partial_out, semaphores,
    M, N, K, chunks, chunk_span, x_stride, mul_stride, sums_stride, softcap,
    CODES: tl.constexpr, PLANES: tl.constexpr, P: tl.constexpr, PER: tl.constexpr, FP16: tl.constexpr,
    ZERO_POINT: tl.constexpr, FACTOR: tl.constexpr, BM: tl.constexpr, MORE: tl.constexpr, BN: tl.constexpr,
    GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, MUL: tl.constexpr, SOFTCAP: tl.constexpr,
    EVEN: tl.constexpr, SPLITS: tl.constexpr, PLAIN: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr, TRIGGER_LATE: tl.constexpr,
):
    """out = x · wᵀ with an epilogue: x [M, K]; w int32 [N / 64, chunks, 64, P], high as many bytes or pairs of them;
    scale, zero_point int32 [N / 64, chunks, 64, pairs]; sums float32 [groups, M and more]; factor [N] -> out [M, N]
    (GATED: gate rows, then up rows -> [M, N / 2]). PER: planes per group; 0: no scales except those of whole rows.
    MORE: tokens in addition to BM, so that a program may take 40: four drafted ones of eight sequences.

    Grid (M / (BM + MORE), N / BN, SPLITS): a program per tile and span of chunks; the last one of a tile adds the
    spans.
    """
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1)
    split = tl.program_id(2)
    PAIRS: tl.constexpr = 0 if PER == 0 else (PLANES // PER + 1) // 2
    COLUMNS: tl.constexpr = PLANES * P
    GROUPS: tl.constexpr = 1 if PER == 0 else PLANES // PER
    rows = pid_m * (BM + MORE) + tl.arange(0, BM)
    local = tl.arange(0, BN)
    if GATED:  # gate and up rows alternate in the tile, and so do the sums
        cols = tl.minimum(pid_n * (BN // 2) + local // 2, N // 2 - 1) + (local % 2) * (N // 2)
    else:
        # rows of the weight; those past the end repeat the last one and are never stored
        cols = tl.minimum(pid_n * BN + local, N - 1)
    first = split * chunk_span
    last = tl.minimum(first + chunk_span, chunks)
    block = (cols // 64).to(tl.int64) * chunks
    w_row = block * (64 * P) + (cols % 64) * P
    w_ptr = w + w_row[:, None] + tl.arange(0, P)[None, :]
    h_ptr = high + w_row[:, None] + tl.arange(0, P)[None, :]
    s_ptr = scale + block * (64 * PAIRS) + cols % 64 * PAIRS
    l_ptr = zero_point + block * (64 * PAIRS) + cols % 64 * PAIRS
    if PDL:
        if not TRIGGER_LATE:
            gdc_launch_dependents()
        if PREFETCH > 0:  # no kernel writes weights: prefetch the first chunks while the previous kernel runs
            prefetch(w + w_row[:, None] + (tl.minimum(first + tl.arange(0, PREFETCH), last - 1) * (64 * P))[None, :])
        gdc_wait()
    x_ptr = x + rows[:, None].to(tl.int64) * x_stride + tl.arange(0, P)[None, :]
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    # not read where there are none
    more = rows
    y_ptr = x_ptr
    beside = acc
    if MORE > 0:
        more = pid_m * (BM + MORE) + BM + tl.arange(0, MORE)
        y_ptr = x + more[:, None].to(tl.int64) * x_stride + tl.arange(0, P)[None, :]
        beside = tl.zeros((BN, MORE), dtype=tl.float32)
    if PER > 0:
        s_a, s_b, s_c, s_d = _pairs(s_ptr + first * (64 * PAIRS), PAIRS, PLAIN)
    for chunk in tl.range(first, last, num_stages=STAGES):
        words = tl.load(w_ptr + chunk * (64 * P))
        above = words
        if CODES == "int5" or CODES == "uint5" or CODES == "int6":
            above = tl.load(h_ptr + chunk * (64 * P)).to(tl.int32)
        scales = (words, words, words, words)  # not read where there are none
        if PER > 0:  # this chunk's factors came with the one before; the next one's are asked for now
            scales = (s_a, s_b, s_c, s_d)
            s_a, s_b, s_c, s_d = _pairs(s_ptr + tl.minimum(chunk + 1, last - 1) * (64 * PAIRS), PAIRS, PLAIN)
        lifts = scales
        if ZERO_POINT:
            lifts = _pairs(l_ptr + chunk * (64 * PAIRS), PAIRS, PLAIN)
        at_sums = sums + chunk * GROUPS * sums_stride + rows
        acc, beside = add_chunk(
            acc, beside, words, above, scales, lifts, x_ptr + chunk * COLUMNS, y_ptr + chunk * COLUMNS, rows < M,
            more < M, at_sums,
            sums_stride, K - chunk * COLUMNS, CODES, PLANES, P, PER, FP16, ZERO_POINT, BM, MORE, BN, EVEN, PLAIN, PREC,
        )
    if FACTOR:
        acc *= tl.load(factor + cols)[:, None]
        if MORE > 0:
            beside *= tl.load(factor + cols)[:, None]
    # a big product: were the next kernel let in at once, its waiting programs would crowd out this one's
    if TRIGGER_LATE:
        gdc_launch_dependents()
    if SPLITS > 1:
        # The last program of a tile adds the partial sums in the order of the spans and resets the counter.
        place = pid_n * tl.num_programs(0) + pid_m
        SIZE: tl.constexpr = (BM + MORE) * BN
        base_part = partial_out + place.to(tl.int64) * SPLITS * SIZE
        _keep(base_part + split * SIZE, acc, rows < M, BM, BN)
        if MORE > 0:
            _keep(base_part + split * SIZE + BM * BN, beside, more < M, MORE, BN)
        tl.debug_barrier()
        done = tl.atomic_add(semaphores + place, 1, sem="acq_rel")
        if done == SPLITS - 1:
            tl.debug_barrier()
            acc = _added(base_part, rows < M, SIZE, SPLITS, BM, BN)
            if MORE > 0:
                beside = _added(base_part + BM * BN, more < M, SIZE, SPLITS, MORE, BN)
            tl.store(semaphores + place, 0)
            _finish(acc, bias, mul, out, rows, pid_n, M, N, mul_stride, softcap, BM, BN, GATED, ACT, BIAS, MUL, SOFTCAP)
            if MORE > 0:
                _finish(
                    beside, bias, mul, out, more, pid_n, M, N, mul_stride, softcap, MORE, BN, GATED, ACT, BIAS, MUL,
                    SOFTCAP,
                )
    else:
        _finish(acc, bias, mul, out, rows, pid_n, M, N, mul_stride, softcap, BM, BN, GATED, ACT, BIAS, MUL, SOFTCAP)
        if MORE > 0:
            _finish(
                beside, bias, mul, out, more, pid_n, M, N, mul_stride, softcap, MORE, BN, GATED, ACT, BIAS, MUL, SOFTCAP
            )


@triton.jit
def _keep(partial_out, sums, live, BM: tl.constexpr, BN: tl.constexpr):
    """A span's sums [BN, BM], of the tokens that are."""
    at = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    tl.store(partial_out + at, sums, mask=live[None, :] & (at >= 0))


@triton.jit
def _added(partial_out, live, SIZE: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The sums of all spans, in order."""
    at = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    mask = live[None, :] & (at >= 0)
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    if BM > 16:
        for s in range(SPLITS):
            acc += tl.load(partial_out + s * SIZE + at, mask=mask, other=0.0, cache_modifier=".cg")
    else:  # unrolled: the loads fly together, and there are registers for them
        for s in tl.static_range(SPLITS):
            acc += tl.load(partial_out + s * SIZE + at, mask=mask, other=0.0, cache_modifier=".cg")
    return acc


@triton.jit
def _finish(
    acc, bias, mul, out, rows, pid_n, M, N, mul_stride, softcap, BM: tl.constexpr, BN: tl.constexpr,
    GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, MUL: tl.constexpr, SOFTCAP: tl.constexpr,
):
    y = tl.trans(acc)  # [BM, BN]
    if GATED:
        y, up = tl.split(tl.reshape(y, (BM, BN // 2, 2)))
        cols = pid_n * (BN // 2) + tl.arange(0, BN // 2)
        epilogue(y, up, bias, mul, out, rows, cols, M, N // 2, mul_stride, softcap, GATED, ACT, BIAS, MUL, SOFTCAP)
    else:
        cols = pid_n * BN + tl.arange(0, BN)
        epilogue(y, y, bias, mul, out, rows, cols, M, N, mul_stride, softcap, GATED, ACT, BIAS, MUL, SOFTCAP)


@triton.jit
def sums_kernel(x, out, K, x_stride, groups, out_stride, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[g, row] = the sum of x [R, K] over group g of GROUP columns, float32 [groups, R].

    Grid (R, groups / BLOCK): a program per BLOCK groups of a row.
    """
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    k = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    total = tl.sum(tl.load(x + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32), 1)
    tl.store(out + g * out_stride + row, total, mask=g < groups)


def quant_linear(
    x: Tensor, w: QuantWeight, semaphores: Tensor, extras: Epilogue, pdl: bool,
    tile: QuantTile | None = None, bm: int | None = None, shared: int | None = None,
) -> Tensor:
    """x [R, K] · wᵀ -> [R, N], or [R, N / 2] where it is gate and up."""
    if w.order is not None:
        x = x[:, w.order]
    if x.stride(1) != 1:
        x = x.contiguous()
    rows = x.shape[0]
    n, k = w.shape
    tile = tile or choose_quant_tile(w.padded, w.columns, w.codes.bits)
    span = triton.cdiv(w.chunks, tile.splits)
    splits = triton.cdiv(w.chunks, span)
    if bm is None:
        bm, tile = fit(tile, rows, w, shared=shared or max_smem(x.device))
    out = x.new_empty((rows, n // 2 if extras.gated else n), dtype=extras.out_dtype or x.dtype)
    grid = (triton.cdiv(rows, bm + tile.more), triton.cdiv(n, tile.bn), splits)
    partial_out = out
    if splits > 1:
        partial_out = x.new_empty((grid[0] * grid[1] * splits, (bm + tile.more) * tile.bn), dtype=torch.float32)
    tensors, sums_stride, constants = weight_arguments(x, w, bm, out=out, pdl=pdl)
    ends, mul_stride, softcap, end_constants = epilogue_arguments(extras, out)
    quant_kernel[grid](
        *tensors, *ends, partial_out, semaphores,
        rows, n, k, w.chunks, span, x.stride(0), mul_stride, sums_stride, softcap,
        BM=bm, MORE=tile.more, BN=tile.bn, SPLITS=splits, STAGES=tile.stages, PREFETCH=tile.ahead if pdl else 0,
        TRIGGER_LATE=pdl and w.words.nbytes >= LATE_TRIGGER_BYTES, num_warps=tile.warps, num_stages=tile.stages,
        maxnreg=tile.registers,
        enable_fp_fusion=True,  # a product and a sum are one rounding, here as in `wna16_gemv`
        **constants, **end_constants,
    )
    return out


def weight_arguments(
    x: Tensor, w: QuantWeight, tokens: int, out: Tensor, pdl: bool
) -> tuple[list[Tensor], int, dict[str, int | str]]:
    """Kernel arguments of x and the weight: tensors from x to factor, sums_stride, constants.

    tokens: of a tile; out: placeholder for absent tensors.
    """
    sums = out if w.zero_point is None else group_sums(x, w, tokens, pdl=pdl)
    beside = (w.words if t is None else t for t in (w.high, w.scale, w.zero_point))
    constants = dict(
        CODES=w.codes.value, PLANES=w.planes, P=w.plane, PER=w.per, FP16=w.half, ZERO_POINT=w.zero_point is not None,
        FACTOR=w.factor is not None, EVEN=w.shape[1] % w.columns_of_chunk == 0,
        PLAIN=x.dtype != torch.bfloat16 or x.device.type == "cpu", PREC=precision(x), PDL=pdl, launch_pdl=pdl,
    )
    return [x, w.words, *beside, sums, out if w.factor is None else w.factor], sums.stride(0), constants


def group_sums(x: Tensor, w: QuantWeight, tokens: int, pdl: bool) -> Tensor:
    """float32 [groups of the padded width, R padded with anything to whole tiles of this many tokens]."""
    group = w.per * w.plane
    groups = w.chunks * (w.planes // w.per)
    out = x.new_empty((groups, triton.cdiv(x.shape[0], tokens) * tokens), dtype=torch.float32)
    sums_kernel[(x.shape[0], triton.cdiv(groups, 32))](
        x, out, x.shape[1], x.stride(0), groups, out.stride(0),
        GROUP=group, BLOCK=32, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )
    return out
