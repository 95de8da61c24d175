"""Token sampling: argmax with counter-based noise that is never stored, and the clustered head of small drafters."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import Launcher, pdl_start

CHUNK = 2048  # columns a program; the second stage sees one candidate a chunk


@triton.jit
def mix32(x):
    """lowbias32 on uint32, which wraps as the twin's masking does."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def noise_bits(token, seed, position):
    """32 random bits of tokens (int64) at a position."""
    key = mix32((seed & 0xFFFFFFFF).to(tl.uint32) ^ mix32(((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)))
    key = mix32(key ^ mix32(((position + 0x9E3779B9) & 0xFFFFFFFF).to(tl.uint32)))
    return mix32(key ^ mix32(((token + 0x85EBCA6B) & 0xFFFFFFFF).to(tl.uint32)))


@triton.jit
def noise(bits):
    """Gumbel noise; it falls as the bits rise."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), 1.0 - 1.0 / 16777216.0)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0)))  # -log(1 - u) where 1 - u would round
    return -tl.log(tl.where(u < 1.0 / 1024.0, series, -tl.log(1.0 - u)))


@triton.jit
def gumbel(token, seed, position):
    """The noise that target and drafters share."""
    return noise(noise_bits(token, seed, position))


@triton.jit(do_not_specialize_on_alignment=["seed", "position", "sampled"])
def argmax_kernel(
    z, tokens, seed, position, sampled, best, where, n, chunks,
    NOISE: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):
    """The largest of each chunk of z [R, n], with noise for sampled rows (NOISE), and its column -> best float32 and
    where int32 [R, chunks]; ties to the lower column. TOKENS: int64 [R, n] are the ids of the columns, which noise
    depends on.

    Grid (R, chunks): a program per CHUNK columns of a row.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    ok = i < n
    pdl_start(PDL)
    value = tl.load(z + row * n + i, mask=ok, other=float("-inf"))
    if NOISE:  # noqa: SIM102
        if tl.load(sampled + row) != 0:
            token = i.to(tl.int64)
            if TOKENS:
                token = tl.load(tokens + row * n + i, mask=ok, other=0)
            value = tl.where(ok, value + gumbel(token, tl.load(seed + row), tl.load(position + row)), float("-inf"))
    top, at = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + row * chunks + chunk, top)
    tl.store(where + row * chunks + chunk, tl.minimum(chunk * CHUNK + at, n - 1))  # a NaN may point anywhere


@triton.jit
def argmax_last_kernel(best, where, out, chunks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The column of the largest chunk: best, where [R, chunks] -> out int64 [R].

    Grid (R,): a program per row.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    pdl_start(PDL)
    value = tl.load(best + row * chunks + i, mask=i < chunks, other=float("-inf"))
    _, at = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out + row, tl.load(where + row * chunks + tl.minimum(at, chunks - 1)).to(tl.int64))


def argmax(
    ops: Launcher, z: Tensor, noise: tuple[Tensor, Tensor, Tensor] | None = None, tokens: Tensor | None = None
) -> Tensor:
    """The lowest id on ties. noise: seed, position, and which rows have it; tokens: ids of the columns."""
    rows, n = z.shape
    seed, position, sampled = noise or (z, z, z)
    z = z.contiguous()
    chunks = triton.cdiv(n, CHUNK)
    best, where = (z.new_empty((rows, chunks), dtype=kind) for kind in (torch.float32, torch.int32))
    out = z.new_empty(rows, dtype=torch.int64)
    ids = seed if tokens is None else tokens.expand(rows, n).contiguous()
    argmax_kernel[(rows, chunks)](
        z, ids, seed, position, sampled, best, where, n, chunks,
        NOISE=noise is not None, TOKENS=tokens is not None, CHUNK=CHUNK, PDL=ops.pdl, num_warps=4, launch_pdl=ops.pdl,
    )
    argmax_last_kernel[(rows,)](
        best, where, out, chunks, BLOCK=triton.next_power_of_2(chunks), PDL=ops.pdl, num_warps=1, launch_pdl=ops.pdl
    )
    return out


def gumbel_argmax(
    ops: Launcher, z: Tensor, seed: Tensor, position: Tensor, tokens: Tensor | None, sampled: Tensor
) -> Tensor:
    return argmax(ops, z, (seed, position, sampled.view(torch.uint8)), tokens=tokens)


@triton.jit(do_not_specialize_on_alignment=["seed", "position", "temperature", "sampled"])
def cluster_bonus_kernel(
    tokens, seed, position, temperature, sampled, out, clusters, size, SOME: tl.constexpr, SPACE: tl.constexpr,
    PDL: tl.constexpr
):
    """temperature times the largest noise of each cluster's tokens, which is that of the smallest bits; 0 for rows that
    are not sampled. tokens [C, size] -> out float32 [R, C].

    Grid (R, C / SOME): a program per SOME clusters of a row.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * SOME + tl.arange(0, SOME)
    i = tl.arange(0, SPACE)
    ok = (c < clusters)[:, None] & (i < size)[None, :]
    pdl_start(PDL)
    cluster_bonus = tl.zeros((SOME,), dtype=tl.float32)
    if tl.load(sampled + row) != 0:
        token = tl.load(tokens + c[:, None] * size + i[None, :], mask=ok, other=0)
        bits = tl.where(ok, noise_bits(token.to(tl.int64), tl.load(seed + row), tl.load(position + row)), 0xFFFFFFFF)
        cluster_bonus = tl.load(temperature + row) * noise(tl.min(bits, 1))
    tl.store(out + row * clusters + c, cluster_bonus, mask=c < clusters)


def cluster_bonus(
    ops: Launcher, tokens: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, sampled: Tensor
) -> Tensor:
    """tokens [C, S] -> float32 [R, C]."""
    clusters, size = tokens.shape
    rows = seed.shape[0]
    out = torch.empty((rows, clusters), dtype=torch.float32, device=tokens.device)
    space = triton.next_power_of_2(size)
    some = max(1, 2048 // space)
    cluster_bonus_kernel[(rows, triton.cdiv(clusters, some))](
        tokens, seed, position, temperature, sampled.view(torch.uint8), out, clusters, size, SOME=some, SPACE=space,
        PDL=ops.pdl, num_warps=4, launch_pdl=ops.pdl,
    )
    return out


@triton.jit
def top_clusters_kernel(
    z, cluster_bonus, best, clusters, LEAN: tl.constexpr, TOP: tl.constexpr, SPACE: tl.constexpr, PLACES: tl.constexpr,
    PDL: tl.constexpr
):
    """The TOP best of z [R, C] (LEAN: + cluster_bonus), best first, ties to the lower id -> best int64 [R, TOP]. No
    sort: the score that TOP of them reach is found bit by bit, and only those are put in order, by how many beat each.

    Grid (R,): a program per row.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, SPACE)
    pdl_start(PDL)
    score = tl.load(z + row * clusters + c, mask=c < clusters, other=float("-inf"))
    if LEAN:
        score += tl.load(cluster_bonus + row * clusters + c, mask=c < clusters, other=0.0)
    key = tl.where(c < clusters, ordered(score), 0)
    least = tl.full((), 0, dtype=tl.uint32)
    for i in range(32):
        more = least | (1 << (31 - i))
        least = tl.where(tl.sum((key >= more).to(tl.int32), 0) >= TOP, more, least)
    above = key > least
    level = (key == least) & (c < clusters)
    room = TOP - tl.sum(above.to(tl.int32), 0)
    selected = above | (level & (tl.cumsum(level.to(tl.int32), 0) <= room))
    tl.store(best + row * TOP + tl.cumsum(selected.to(tl.int32), 0) - 1, c.to(tl.int64), mask=selected)
    tl.debug_barrier()  # what other threads of this program stored is read
    p = tl.arange(0, PLACES)
    ids = tl.load(best + row * TOP + p, mask=p < TOP, other=0)
    score = tl.load(z + row * clusters + ids)
    if LEAN:
        score += tl.load(cluster_bonus + row * clusters + ids)
    key = tl.where(p < TOP, ordered(score), 0)
    beats = (key[None, :] > key[:, None]) | ((key[None, :] == key[:, None]) & (p[None, :] < p[:, None]))
    tl.debug_barrier()  # all have read
    tl.store(best + row * TOP + tl.sum(beats.to(tl.int32), 1), ids, mask=p < TOP)


@triton.jit
def ordered(x):
    """A float32 as a whole number from 0 on with the same order."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # the sum makes -0 a 0
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def cluster_scores_kernel(
    g, rows_, best, out, size, hidden, TOP: tl.constexpr, BS: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr
):
    """Scores of the tokens of the chosen clusters: g [R, hidden] · rows_ [C, size, hidden] at best [R, TOP] -> out
    float32 [R, TOP, size].

    Grid (R, TOP, size / BS): a program per BS tokens of a cluster of a row.
    """
    row = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1)
    at = tl.program_id(2) * BS + tl.arange(0, BS)
    h = tl.arange(0, BH)
    pdl_start(PDL)
    cluster = tl.load(best + row * TOP + t)
    query = tl.load(g + row * hidden + h, mask=h < hidden, other=0.0).to(tl.float32)
    ok = (at < size)[:, None] & (h < hidden)[None, :]
    w = tl.load(rows_ + (cluster * size + at)[:, None] * hidden + h[None, :], mask=ok, other=0.0).to(tl.float32)
    tl.store(out + (row * TOP + t) * size + at, tl.sum(w * query[None, :], 1), mask=at < size)


def cluster_scores(
    z: Tensor, cluster_bonus: Tensor | None, g: Tensor, rows: Tensor, top: int, pdl: bool
) -> tuple[Tensor, Tensor]:
    """z [R, C] float32 centroid scores, cluster_bonus [R, C] to be added; g [R, h]; rows [C, S, h] -> cluster ids [R,
    top], logits [R, top, S]."""
    count, clusters = z.shape
    size = rows.shape[1]
    hidden = rows.shape[2]
    best = torch.empty((count, top), dtype=torch.int64, device=z.device)
    out = torch.empty((count, top, size), dtype=torch.float32, device=z.device)
    top_clusters_kernel[(count,)](
        z, z if cluster_bonus is None else cluster_bonus, best, clusters, LEAN=cluster_bonus is not None, TOP=top,
        SPACE=triton.next_power_of_2(clusters),
        PLACES=triton.next_power_of_2(top), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )
    cluster_scores_kernel[(count, top, triton.cdiv(size, 32))](
        g.contiguous(), rows, best, out, size, hidden,
        TOP=top, BS=32, BH=triton.next_power_of_2(hidden), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )
    return best, out
