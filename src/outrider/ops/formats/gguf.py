"""The block formats of GGUF, decoded exactly as the format defines them.

A row of K weights is K / size blocks; a block is `nbytes` bytes. Numbers are little-endian; d, m are float16.
A weight is code * scale + offset, in float32 with one rounding per operation (which is ggml's order); the codes of IQ4
stand for the numbers of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..gguf_blocks import BLOCKS
from .base import Format, Unit, Weight


@dataclass(frozen=True)
class GGUFBlockFormat(Format):
    """One of the block formats; its tensor `blocks` is uint8 [N, bytes of a row], as stored in the file."""

    kind: str

    @property
    def name(self) -> str:
        return self.kind

    @property
    def units(self) -> Mapping[str, Unit]:
        size, nbytes = BLOCKS[self.kind]
        return {"blocks": Unit(size, nbytes)}

    def dequantise(self, weight: Weight) -> Tensor:
        blocks = weight.tensors["blocks"]
        return dequantize(self.kind, blocks.flatten(0, -2).cpu()).view(weight.shape).to(blocks.device)


def dequantize(kind: str, rows: Tensor) -> Tensor:
    """uint8 [N, bytes per row] -> float32 [N, K]."""
    codes = codes_of(kind, rows)
    scale, offset = scales_of(kind, rows)
    values = torch.tensor(IQ4_VALUES)[codes.int()] if kind.startswith("IQ4") else codes.float().sub_(ZERO.get(kind, 0))
    values = values.unflatten(1, (scale.shape[1], -1)).mul_(scale[:, :, None])
    return (values if offset is None else values.add_(offset[:, :, None])).flatten(1)


def codes_of(kind: str, rows: Tensor) -> Tensor:
    """uint8 [N, bytes per row] -> uint8 (Q8_0: int8) [N, K], on any device."""
    size, nbytes = BLOCKS[kind]
    b = rows.unflatten(1, (-1, nbytes))  # [N, blocks, nbytes]
    shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)
    if kind == "Q8_0":
        codes = b[..., 2:].contiguous().view(torch.int8)
    elif kind in ("Q4_K", "Q5_K"):
        codes = _nibbles(b[..., -128:], 4)  # each 32 bytes hold two sub-blocks
        if kind == "Q5_K":  # bit s belongs to sub-block s
            codes |= (((b[..., None, 16:48] >> shifts[:, None]) & 1) << 4).flatten(-2)
    elif kind == "Q6_K":
        high = (b[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts[::2][:, None]) & 3  # [N, blocks, 2, 4, 32]
        codes = _nibbles(b[..., :128], 2) | (high << 4).flatten(-3)
    else:
        codes = _nibbles(b[..., -size // 2 :], size // 32)
        if kind in ("Q5_0", "Q5_1"):
            codes |= (((b[..., -20:-16, None] >> shifts) & 1) << 4).flatten(-2)
    return codes.flatten(1)


def scales_of(kind: str, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """uint8 [N, bytes per row] -> float32 [N, groups]: scales, and offsets if the format has them."""
    b = rows.unflatten(1, (-1, BLOCKS[kind][1]))
    if kind in ("Q4_K", "Q5_K"):  # eight 6-bit scales and eight 6-bit minima in 12 bytes
        low = b[..., 4:8]
        mid = b[..., 8:12]
        high = b[..., 12:16]
        scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), dim=-1)
        minima = torch.cat((mid & 63, (high >> 4) | ((mid >> 6) << 4)), dim=-1)
        return (_half(b, 0) * scales.float()).flatten(1), (-(_half(b, 2) * minima.float())).flatten(1)
    if kind == "Q6_K":
        return (_half(b, 208) * b[..., 192:208].contiguous().view(torch.int8).float()).flatten(1), None
    if kind == "IQ4_XS":  # 16 bits with the top two bits of eight scales, 4 bytes with their low halves
        low = torch.stack((b[..., 4:8] & 15, b[..., 4:8] >> 4), dim=-1).flatten(-2)
        high = (b[..., 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8, device=rows.device)) & 3
        return (_half(b, 0) * ((low | (high.flatten(-2) << 4)).float() - 32)).flatten(1), None
    return _half(b, 0).flatten(1), _half(b, 2).flatten(1) if kind in ("Q4_1", "Q5_1") else None


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of every block: float32 [N, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(b: Tensor, pieces: int) -> Tensor:
    """Splits bytes into nibbles: in each piece of the last dimension all low halves, then all high halves."""
    b = b.unflatten(-1, (pieces, -1))
    return torch.cat((b & 15, b >> 4), dim=-1).flatten(-2)


IQ4_VALUES = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)
ZERO = {"Q4_0": 8, "Q5_0": 16, "Q6_K": 32}  # the code of 0, where it is not 0
