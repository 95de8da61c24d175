"""Picking tokens: argmax with counter-based noise that is never stored, and the clustered head of small drafters."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import start

CHUNK = 2048  # columns a program; the second stage sees one candidate a chunk


@triton.jit
def mix32(x):
    """lowbias32 on uint32, which wraps as the twin's masking does."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit(do_not_specialize_on_alignment=["seed", "position", "hot"])
def argmax_kernel(
    z, tokens, seed, position, hot, best, where, n, chunks,
    NOISE: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    ok = i < n
    start(PDL)
    value = tl.load(z + row * n + i, mask=ok, other=float("-inf"))
    if NOISE:  # noqa: SIM102
        if tl.load(hot + row) != 0:
            s, p = tl.load(seed + row), tl.load(position + row)
            key = mix32((s & 0xFFFFFFFF).to(tl.uint32) ^ mix32(((s >> 32) & 0xFFFFFFFF).to(tl.uint32)))
            key = mix32(key ^ mix32(((p + 0x9E3779B9) & 0xFFFFFFFF).to(tl.uint32)))
            token = i.to(tl.int64)
            if TOKENS:
                token = tl.load(tokens + row * n + i, mask=ok, other=0)
            bits = mix32(key ^ mix32(((token + 0x85EBCA6B) & 0xFFFFFFFF).to(tl.uint32)))
            u = tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), 1.0 - 1.0 / 16777216.0)
            series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0)))  # -log(1 - u) where 1 - u would round
            value = tl.where(ok, value - tl.log(tl.where(u < 1.0 / 1024.0, series, -tl.log(1.0 - u))), float("-inf"))
    top, at = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + row * chunks + chunk, top)
    tl.store(where + row * chunks + chunk, chunk * CHUNK + at)


@triton.jit
def argmax_last_kernel(best, where, out, chunks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    start(PDL)
    value = tl.load(best + row * chunks + i, mask=i < chunks, other=float("-inf"))
    _, at = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out + row, tl.load(where + row * chunks + tl.minimum(at, chunks - 1)).to(tl.int64))


def argmax(z: Tensor, pdl: bool) -> Tensor:
    """The lowest id on ties."""
    return _argmax(z, z, z, None, z, False, pdl)


def gumbel_argmax(z: Tensor, seed: Tensor, position: Tensor, tokens: Tensor | None, hot: Tensor, pdl: bool) -> Tensor:
    return _argmax(z, seed, position, tokens, hot.view(torch.uint8), True, pdl)


def _argmax(z: Tensor, seed: Tensor, position: Tensor, tokens: Tensor | None, hot: Tensor, noise: bool, pdl: bool) -> Tensor:
    rows, n = z.shape
    z = z.contiguous()
    chunks = triton.cdiv(n, CHUNK)
    best = torch.empty((rows, chunks), dtype=torch.float32, device=z.device)
    where = torch.empty((rows, chunks), dtype=torch.int32, device=z.device)
    out = torch.empty((rows,), dtype=torch.int64, device=z.device)
    launch = {"launch_pdl": True} if pdl else {}
    ids = seed if tokens is None else tokens.expand(rows, n).contiguous()
    argmax_kernel[(rows, chunks)](
        z, ids, seed, position, hot, best, where, n, chunks,
        NOISE=noise, TOKENS=tokens is not None, CHUNK=CHUNK, PDL=pdl, num_warps=4, **launch,
    )  # fmt: skip
    argmax_last_kernel[(rows,)](best, where, out, chunks, BLOCK=triton.next_power_of_2(chunks), PDL=pdl, num_warps=1, **launch)
    return out


@triton.jit
def top_clusters_kernel(z, best, clusters, TOP: tl.constexpr, TOP_P: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The TOP best of z [R, C], best first, ties to the lower id: one sort of (score, id) packed into 64 bits."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    start(PDL)
    score = tl.load(z + row * clusters + c, mask=c < clusters, other=float("-inf"))
    bits = score.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # ordered as signed integers
    packed = (order.to(tl.int64) << 32) | (BLOCK - 1 - c).to(tl.int64)
    top = tl.topk(packed, TOP_P)
    i = tl.arange(0, TOP_P)
    tl.store(best + row * TOP + i, (BLOCK - 1) - (top & 0xFFFFFFFF), mask=i < TOP)


@triton.jit
def cluster_scores_kernel(
    g, rows_, best, out, size, hidden, TOP: tl.constexpr, BS: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr
):
    """One cluster of one row a program: the scores of its tokens."""
    row, t = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, h = tl.arange(0, BS), tl.arange(0, BH)
    start(PDL)
    cluster = tl.load(best + row * TOP + t)
    query = tl.load(g + row * hidden + h, mask=h < hidden, other=0.0).to(tl.float32)
    for base in range(0, size, BS):
        at = base + s
        ok = (at < size)[:, None] & (h < hidden)[None, :]
        w = tl.load(rows_ + (cluster * size + at)[:, None] * hidden + h[None, :], mask=ok, other=0.0).to(tl.float32)
        tl.store(out + (row * TOP + t) * size + at, tl.sum(w * query[None, :], 1), mask=at < size)


def cluster_scores(z: Tensor, g: Tensor, rows: Tensor, top: int, pdl: bool) -> tuple[Tensor, Tensor]:
    """z [R, C] float32 centroid scores; g [R, h]; rows [C, S, h] -> cluster ids [R, top], logits [R, top, S]."""
    count, clusters = z.shape
    size, hidden = rows.shape[1], rows.shape[2]
    best = torch.empty((count, top), dtype=torch.int64, device=z.device)
    out = torch.empty((count, top, size), dtype=torch.float32, device=z.device)
    launch = {"launch_pdl": True} if pdl else {}
    top_clusters_kernel[(count,)](
        z, best, clusters, TOP=top, TOP_P=triton.next_power_of_2(top), BLOCK=triton.next_power_of_2(clusters), PDL=pdl,
        num_warps=4, **launch,
    )
    cluster_scores_kernel[(count, top)](
        g.contiguous(), rows, best, out, size, hidden, TOP=top, BS=32, BH=triton.next_power_of_2(hidden), PDL=pdl, num_warps=4, **launch
    )
    return best, out
