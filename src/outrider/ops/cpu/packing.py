"""Quantised weights in the layout of product.h: groups of 16 rows, blocks of 32 columns. Numpy in, one PackedWeight out.

Q4_0, Q4_1, Q8_0 keep their very bits; Q4_K, Q5_* keep their values, their block scales rounded to float16; Q6_K (two
scales in a block of 32) and rows of unlike kinds fused into one weight are rounded to int8.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..quant import BLOCKS, QuantPart, dequantize
from ..reference import token_hash
from .lib import W_Q4, W_Q4M, W_Q8, W_Q8M, CWeight
from .memory import Arena

LANES, BLOCK = 16, 32
BITS = {W_Q4: 4, W_Q4M: 4, W_Q8: 8, W_Q8M: 8}


@dataclass(frozen=True)
class PackedWeight:
    shape: tuple[int, ...]
    data: Tensor  # uint8
    scale: Tensor  # float16
    c: CWeight

    @property
    def ref(self) -> int:
        return ctypes.addressof(self.c)

    @property
    def nbytes(self) -> int:
        return self.data.numel() + 2 * self.scale.numel()

    def view(self, *shape: int) -> PackedWeight:
        """The same rows under another shape, e.g. by cluster [C, S, h]."""
        known = math.prod(d for d in shape if d != -1)
        shape = tuple(self.c.n * self.c.k // known if d == -1 else d for d in shape)
        assert shape[-1] == self.c.k and math.prod(shape) == self.c.n * self.c.k
        return PackedWeight(shape, self.data, self.scale, self.c)


@dataclass
class Rows:
    """Rows of one kind, block by block: q uint8 [N, KB, 16 (nibble pairs) or 32], scale and lift float16 [N, KB]."""

    kind: int
    q: np.ndarray
    scale: np.ndarray
    lift: np.ndarray | None


def pack(parts: Sequence[QuantPart], arena: Arena) -> PackedWeight | None:
    """Rows of all parts in order; None where the width does not divide into blocks."""
    k = parts[0].shape[1]
    if k % BLOCK or any(p.kind not in BLOCKS for p in parts):
        return None
    kinds = {_kind(p) for p in parts}
    if len(kinds) == 1:
        rows = [_rows(p) for p in parts]
    elif kinds == {W_Q4, W_Q4M}:
        rows = [_with_lift(_rows(p)) for p in parts]
    else:
        rows = [quantize_rows(p.dense(), "int8") for p in parts]
    return assemble(rows, k, arena)


def assemble(rows: list[Rows], k: int, arena: Arena) -> PackedWeight:
    kind, n, kb = rows[0].kind, sum(len(r.q) for r in rows), k // BLOCK
    groups, words = -(-n // LANES), rows[0].q.shape[2] // 4
    has_min = rows[0].lift is not None
    data = arena.empty((groups, kb, words, LANES), torch.int32)
    scale = arena.empty((groups, kb, 2 if has_min else 1, LANES), torch.float16)
    to, to_scale = data.numpy().view(np.uint32), scale.numpy()
    for g0, piece in _whole_groups(rows):
        count = len(piece.q) // LANES
        words_in = np.ascontiguousarray(piece.q).view("<u4").reshape(count, LANES, kb, words)
        to[g0 : g0 + count] = words_in.transpose(0, 2, 3, 1)
        to_scale[g0 : g0 + count, :, 0] = piece.scale.reshape(count, LANES, kb).transpose(0, 2, 1)
        if piece.lift is not None:
            to_scale[g0 : g0 + count, :, 1] = piece.lift.reshape(count, LANES, kb).transpose(0, 2, 1)
    c = CWeight(kind, n, k, 0, data.data_ptr(), scale.data_ptr())
    return PackedWeight((n, k), data.view(torch.uint8), scale, c)


def _whole_groups(rows: list[Rows]) -> list[tuple[int, Rows]]:
    """Pieces that start on a group's first row; parts that don't are joined, and the last is padded with zeros."""
    if any(len(r.q) % LANES for r in rows):
        joined = Rows(
            rows[0].kind, np.concatenate([r.q for r in rows]), np.concatenate([r.scale for r in rows]),
            None if rows[0].lift is None else np.concatenate([r.lift for r in rows if r.lift is not None]),
        )  # fmt: skip
        short = -len(joined.q) % LANES
        pad = lambda a: np.concatenate((a, np.zeros((short, *a.shape[1:]), a.dtype)))  # noqa: E731
        rows = [Rows(joined.kind, pad(joined.q), pad(joined.scale), None if joined.lift is None else pad(joined.lift))]
    at, out = 0, []
    for r in rows:
        out.append((at, r))
        at += len(r.q) // LANES
    return out


def _kind(part: QuantPart) -> int:
    return {"Q4_0": W_Q4, "Q4_1": W_Q4M, "Q4_K": W_Q4M, "Q8_0": W_Q8, "Q6_K": W_Q8, "Q5_0": W_Q8M, "Q5_1": W_Q8M, "Q5_K": W_Q8M}[part.kind]


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<f2")[:, :, 0]


def _rows(part: QuantPart) -> Rows:
    (n, k), (size, nbytes) = part.shape, BLOCKS[part.kind]
    b = part.data.reshape(n, k // size, nbytes)
    if part.kind == "Q4_0":
        return Rows(W_Q4, b[:, :, 2:], _half(b, 0), None)
    if part.kind == "Q4_1":
        return Rows(W_Q4M, b[:, :, 4:], _half(b, 0), _half(b, 2))
    if part.kind == "Q8_0":
        return Rows(W_Q8, b[:, :, 2:], _half(b, 0), None)
    if part.kind == "Q6_K":
        return quantize_rows(part.dense(), "int8")
    return _affine_rows(part)


def _affine_rows(part: QuantPart) -> Rows:
    """Scale and lift as the format's own decoder computes them: decode with every integer 0, then 1 without the minimum."""
    n, k = part.shape
    top = 15 if part.kind == "Q4_K" else 31
    blocks = lambda rows: dequantize(part.kind, rows).reshape(n, k // BLOCK, BLOCK)  # noqa: E731
    low = blocks(_with_values(part, 0))[:, :, 0]
    step = blocks(_with_values(part, 1))[:, :, 0] - (low if part.kind == "Q5_0" else 0)
    safe = np.where(step == 0, 1, step)[:, :, None]
    q = np.clip(np.rint((blocks(part.data) - low[:, :, None]) / safe), 0, top).astype(np.uint8)
    if top == 15:
        q = q[:, :, :16] | (q[:, :, 16:] << 4)
    return Rows(W_Q4M if top == 15 else W_Q8M, q, step.astype(np.float16), low.astype(np.float16))


def _with_values(part: QuantPart, value: int) -> np.ndarray:
    """The rows with every quantised integer set to 0 or 1; with 1 the minimum is cleared (Q5_0 has none)."""
    nbytes = BLOCKS[part.kind][1]
    high, low = {"Q5_0": (2, 6), "Q5_1": (4, 8), "Q4_K": (16, 16), "Q5_K": (16, 48)}[part.kind]  # where these bits begin
    b = part.data.reshape(-1, nbytes).copy()
    b[:, high:] = 0
    b[:, low:] = 0x11 * value
    if value and part.kind != "Q5_0":
        b[:, 2:4] = 0
    return b.reshape(part.data.shape)


def _with_lift(rows: Rows) -> Rows:
    if rows.kind == W_Q4M:
        return rows
    return Rows(W_Q4M, rows.q, rows.scale, (rows.scale.astype(np.float32) * -8).astype(np.float16))


def quantize_rows(dense: np.ndarray, mode: str) -> Rows:
    """float32 [N, K]: int8 by the largest magnitude of a block; int4 between a block's smallest and largest value."""
    b = np.ascontiguousarray(dense, dtype=np.float32).reshape(len(dense), -1, BLOCK)
    if mode == "int8":
        scale = (np.abs(b).max(-1) / 127).astype(np.float16)
        inv = np.divide(1.0, scale, out=np.zeros(scale.shape, np.float32), where=scale > 0, dtype=np.float32)
        return Rows(W_Q8, np.clip(np.rint(b * inv[:, :, None]), -127, 127).astype(np.int8).view(np.uint8), scale, None)
    low, high = b.min(-1), b.max(-1)
    low, scale = low.astype(np.float16), ((high - low) / 15).astype(np.float16)
    inv = np.divide(1.0, scale, out=np.zeros(scale.shape, np.float32), where=scale > 0, dtype=np.float32)
    q = np.clip(np.rint((b - low.astype(np.float32)[:, :, None]) * inv[:, :, None]), 0, 15).astype(np.uint8)
    return Rows(W_Q4M, q[:, :, :16] | (q[:, :, 16:] << 4), scale, low)


def take(w: PackedWeight, order: np.ndarray, arena: Arena) -> PackedWeight:
    """Rows `order` of a packed weight, bit for bit."""
    groups, kb = w.scale.shape[:2]
    words = w.data.view(torch.int32).numpy().reshape(groups, kb, -1, LANES).transpose(0, 3, 1, 2).reshape(groups * LANES, kb, -1)
    scales = w.scale.numpy().transpose(0, 3, 1, 2).reshape(groups * LANES, kb, -1)[order]
    q = np.ascontiguousarray(words[order]).view(np.uint8)
    return assemble([Rows(w.c.kind, q, scales[:, :, 0], scales[:, :, 1] if scales.shape[2] == 2 else None)], w.c.k, arena)


def quantize(dense: Tensor, mode: str, arena: Arena) -> PackedWeight | None:
    """A dense [N, K] weight, blockwise; None where K does not divide into blocks. Works in slices: float32 copies stay small."""
    n, k = dense.shape
    if k % BLOCK:
        return None
    step = max(LANES, (1 << 22) // k // LANES * LANES)
    return assemble([quantize_rows(dense[lo : lo + step].float().numpy(), mode) for lo in range(0, n, step)], k, arena)


def cluster_hashes(tokens: Tensor) -> Tensor:
    """Token ids [C, S] -> int32 [C / 16, S, 16], what the noise needs of each: a lane is a cluster (lean_phase of draft.h)."""
    clusters, size = tokens.shape
    padded = torch.zeros((-(-clusters // LANES) * LANES, size), dtype=torch.int64)
    padded[:clusters] = token_hash(tokens)
    words = padded.view(-1, LANES, size).transpose(1, 2).numpy().astype(np.uint32)  # the lower 32 bits
    return torch.from_numpy(np.ascontiguousarray(words).view(np.int32))
