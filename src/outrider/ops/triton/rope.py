"""Rotary angles, and the fused step between the q/k/v product and attention: norms, rotation, paged K/V write."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import AttnSpec, BlockAttn, KVView
from ..backend import Angles, HeadNorms
from .common import Launcher, pdl_start

PROMPT = 256  # rows from which a program takes several heads: there are enough programs
# up to FEW_HEADS heads a program takes several for FEW_ROWS rows: steps of E2B gain 0.9 %; 40 rows lose 0.5
FEW_HEADS = 8
FEW_ROWS = range(5, 17)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def angles_kernel(positions, inv_freq, cos, sin, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """cos and sin of positions [R] times inv_freq [n] -> float32 [R, n] each.

    Grid (R,): a program per row.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    ok = i < n
    freq = tl.load(inv_freq + i, mask=ok, other=0.0)
    pdl_start(PDL)
    angle = tl.load(positions + row).to(tl.float32) * freq
    tl.store(cos + row * n + i, tl.cos(angle), mask=ok)
    tl.store(sin + row * n + i, tl.sin(angle), mask=ok)


def rope_angles(ops: Launcher, positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    rows = positions.shape[0]
    half = inv_freq.shape[0]
    cos = torch.empty((rows, half), dtype=torch.float32, device=positions.device)
    sin = torch.empty_like(cos)
    angles_kernel[(rows,)](
        positions, inv_freq, cos, sin, half, BLOCK=triton.next_power_of_2(half), PDL=ops.pdl, num_warps=2,
        launch_pdl=ops.pdl,
    )
    return cos, sin


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table", "places", "row_seq"])
def rope_write_kernel(
    qkv, cos, sin, q_norm, k_norm, q_out, keys, values, table, places, row_seq, qkv_stride, table_stride, page_stride,
    eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, K_EQ_V: tl.constexpr, NORM_V: tl.constexpr, SOME: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norms and rotates q and k, norms v, and writes k and v into the cache's pages: qkv [R, (HEADS + 2 · KV_HEADS) · 2
    · HALF] (K_EQ_V: without v), cos and sin [R, HALF] -> q_out [R, HEADS · 2 · HALF]; keys and values [pages, KV_HEADS,
    PAGE, 2 · HALF] at places [R].

    Grid (R, programs of all heads): a program per SOME heads of one kind of a row, one warp each: the q heads, then
    the k heads, then the v heads.
    """
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) - HEADS // SOME
    EACH: tl.constexpr = (KV_HEADS + SOME - 1) // SOME  # programs of k, and of v
    first = tl.program_id(1) * SOME
    last = HEADS
    if number >= 0:
        last = HEADS + (number // EACH + 1) * KV_HEADS
        first = last - KV_HEADS + number % EACH * SOME
    head = first + tl.arange(0, SOME)[:, None]
    # [SOME, BLOCK]: data that all heads share is loaded for each, so that no warp waits for another.
    i = tl.arange(0, BLOCK)[None, :] + (head - head)
    ok = (i < HALF) & (head < last)
    # Norm weights, positions and tables were written before the pass: loaded while the previous kernel still runs.
    to = row * 0
    if first >= HEADS:
        to = _slot(table, places, row_seq, row, (first - HEADS) % KV_HEADS, table_stride, page_stride, HALF, PAGE)
    to += (head - first) * (PAGE * 2 * HALF)
    of_q = tl.where(first < HEADS, HALF, 0)
    of_k = tl.where(first < HEADS, 0, HALF)
    if Q_NORM:
        qa = tl.load(q_norm + i, mask=i < of_q, other=0.0)
        qb = tl.load(q_norm + HALF + i, mask=i < of_q, other=0.0)
    if K_NORM:
        ka = tl.load(k_norm + i, mask=i < of_k, other=0.0)
        kb = tl.load(k_norm + HALF + i, mask=i < of_k, other=0.0)
    pdl_start(PDL)
    source = head
    if K_EQ_V:
        source = tl.where(first >= HEADS + KV_HEADS, head - KV_HEADS, head)
    base = qkv + row * qkv_stride + source * (2 * HALF)
    kind = q_out.dtype.element_ty
    a = tl.load(base + i, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(base + HALF + i, mask=ok, other=0.0).to(tl.float32)
    c = tl.load(cos + row * HALF + i, mask=ok, other=0.0)
    s = tl.load(sin + row * HALF + i, mask=ok, other=0.0)
    inv = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
    if first < HEADS:
        if Q_NORM:
            a = (a * inv * qa).to(kind).to(tl.float32)
            b = (b * inv * qb).to(kind).to(tl.float32)
        q_to = q_out + row * (HEADS * 2 * HALF) + head * (2 * HALF)
        tl.store(q_to + i, (a * c - b * s).to(kind), mask=ok)
        tl.store(q_to + HALF + i, (b * c + a * s).to(kind), mask=ok)
    elif first < HEADS + KV_HEADS:
        if K_NORM:
            a = (a * inv * ka).to(kind).to(tl.float32)
            b = (b * inv * kb).to(kind).to(tl.float32)
        tl.store(keys + to + i, _stored((a * c - b * s).to(kind), keys), mask=ok)
        tl.store(keys + to + HALF + i, _stored((b * c + a * s).to(kind), keys), mask=ok)
    else:
        if NORM_V:
            a = (a * inv).to(kind).to(tl.float32)
            b = (b * inv).to(kind).to(tl.float32)
        tl.store(values + to + i, _stored(a, values), mask=ok)
        tl.store(values + to + HALF + i, _stored(b, values), mask=ok)


@triton.jit
def _stored(x, cache):
    """K/V as the cache holds it. Eight-bit floats end at 448 and know no infinity; rounded here, to even, whatever the
    cast does."""
    if cache.dtype.element_ty == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -448.0), 448.0)
        exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 0x3C800000)  # of subnormals that of 2^-6
        # 1.5 · 2^20 times as large: a sum with it has three bits of x left
        large = (exponent + 0x0A400000).to(tl.float32, bitcast=True)
        x = (x + large) - large
    return x.to(cache.dtype.element_ty)


@triton.jit
def _slot(table, places, row_seq, row, head, table_stride, page_stride, HALF: tl.constexpr, PAGE: tl.constexpr):
    place = tl.load(places + row)
    page = tl.load(table + tl.load(row_seq + row) * table_stride + place // PAGE).to(tl.int64)
    return page * page_stride + (head * PAGE + place % PAGE) * (2 * HALF)


def rope_write(ops: Launcher, qkv: Tensor, angles: Angles, norms: HeadNorms, spec: AttnSpec, kv: KVView) -> Tensor:
    rows = qkv.shape[0]
    half = spec.head_dim // 2
    cos, sin = angles
    q_norm, k_norm = norms
    q = qkv.new_empty((rows, spec.heads * spec.head_dim))
    keys = kv.keys[spec.kv_layer]
    values = kv.values[spec.kv_layer]
    assert keys is not None and values is not None
    table = kv.tables[spec.group]
    several = rows >= PROMPT or (rows in FEW_ROWS and spec.heads <= FEW_HEADS)
    some = 1
    if several:
        some = math.gcd(4 if half <= 128 else 2, spec.heads)
    rope_write_kernel[(rows, spec.heads // some + (2 * triton.cdiv(spec.kv_heads, some) if spec.writes else 0))](
        qkv, cos, sin, cos if q_norm is None else q_norm, cos if k_norm is None else k_norm, q, keys, values, table,
        kv.positions if kv.kv_slots is None else kv.kv_slots, kv.row_seq, qkv.stride(0), table.stride(0),
        keys.stride(0), spec.eps, HEADS=spec.heads, KV_HEADS=spec.kv_heads, HALF=half,
        BLOCK=triton.next_power_of_2(half), PAGE=kv.page_size, Q_NORM=q_norm is not None, K_NORM=k_norm is not None,
        K_EQ_V=spec.k_eq_v, NORM_V=spec.norm_v, SOME=some, PDL=ops.pdl, num_warps=some, launch_pdl=ops.pdl,
    )
    return q


def write_context(ops: Launcher, kv_rows: Tensor, angles: Angles, attn: BlockAttn, kv: KVView) -> None:
    rope_write(ops, kv_rows, angles, norms=(None, attn.k_norm), spec=replace(attn.spec, heads=0), kv=kv)


@triton.jit
def rotate_heads_kernel(
    qkv, cos, sin, q_norm, k_norm, out, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):
    """Norms and rotates the heads of an image's patches, without a cache: qkv [R, (HEADS + 2 · KV_HEADS) · D] -> out,
    the same shape; v is normed without a weight and not rotated.

    Grid (R, 3): a program per patch and kind: all heads of q, of k or of v.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    HALF: tl.constexpr = D // 2
    head = tl.arange(0, BH)
    i = tl.arange(0, BD)
    count = tl.where(part == 0, HEADS, KV_HEADS)
    first = tl.where(part == 0, 0, HEADS + (part - 1) * KV_HEADS)
    is_q = i < tl.where(part == 0, HALF, 0)
    is_k = i < tl.where(part == 1, HALF, 0)
    turn = i < tl.where(part < 2, HALF, 0)
    one = tl.where(part == 2, 1.0, 0.0)  # v has no weight
    scale = tl.load(q_norm + i, mask=is_q, other=0.0) + tl.load(k_norm + i, mask=is_k, other=0.0) + one
    scale_b = tl.load(q_norm + HALF + i, mask=is_q, other=0.0) + tl.load(k_norm + HALF + i, mask=is_k, other=0.0) + one
    c = tl.load(cos + row * HALF + i, mask=turn, other=1.0)[None, :]
    s = tl.load(sin + row * HALF + i, mask=turn, other=0.0)[None, :]
    ok = (head < count)[:, None] & (i < HALF)[None, :]
    at = row * ((HEADS + 2 * KV_HEADS) * D) + ((first + head) * D)[:, None] + i[None, :]
    pdl_start(PDL)
    kind = out.dtype.element_ty
    a = tl.load(qkv + at, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(qkv + at + HALF, mask=ok, other=0.0).to(tl.float32)
    factor = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
    a = (a * factor * scale[None, :]).to(kind).to(tl.float32)
    b = (b * factor * scale_b[None, :]).to(kind).to(tl.float32)
    tl.store(out + at, (a * c - b * s).to(kind), mask=ok)
    tl.store(out + at + HALF, (b * c + a * s).to(kind), mask=ok)


def rotate_heads(
    ops: Launcher, qkv: Tensor, angles: Angles, norms: tuple[Tensor, Tensor], heads: tuple[int, int], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.empty_like(qkv)
    dim = norms[0].shape[0]
    rotate_heads_kernel[(qkv.shape[0], 3)](
        qkv, *angles, *norms, out, eps, HEADS=heads[0], KV_HEADS=heads[1], D=dim, BH=triton.next_power_of_2(heads[0]),
        BD=triton.next_power_of_2(dim // 2), PDL=ops.pdl, num_warps=4, launch_pdl=ops.pdl,
    )
    q, k, v = out.unflatten(-1, (-1, dim)).split((heads[0], heads[1], heads[1]), 1)
    return q, k, v
