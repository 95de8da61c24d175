"""NVFP4: 4-bit floats (e2m1), one FP8 scale (e4m3) per 16 columns and one float32 scale per tensor.

Tensors: q uint8 [N, K / 2], the even column in the low half; scale float8_e4m3fn [N, K / 16]; factor float32 [N, 1],
the tensor's scale expanded to rows: weight[n, k] = e2m1(q[n, k]) * (scale[n, k // 16] * factor[n]).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..gguf_blocks import BLOCKS
from .base import Format, Unit, Weight
from .gguf import codes_of
from .integer import halves, pairs

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values of codes 0..7; 8..15 are their negatives
GROUP = 16
NAN = 127  # e4m3's; GGUF reads it as 0, and ignores the sign


@dataclass(frozen=True)
class NvFp4Format(Format):
    @property
    def name(self) -> str:
        return "nvfp4"

    @property
    def units(self) -> Mapping[str, Unit]:
        return {"q": Unit(2), "scale": Unit(GROUP), "factor": Unit(0, bytes=4)}

    def dequantise(self, weight: Weight) -> Tensor:
        q = weight.tensors["q"]
        table = torch.tensor([*VALUES, *(-v for v in VALUES)], device=q.device)
        scale = weight.tensors["scale"].float() * weight.tensors["factor"]
        groups = table[halves(q).long()].reshape(*weight.shape[:-1], -1, GROUP)
        return (groups * scale[..., None]).reshape(weight.shape)

    def quantise(self, values: Tensor) -> Weight:
        """Chooses one scale per tensor such that the largest group scale is 448, then the nearest of the eight
        magnitudes."""
        groups = values.float().reshape(*values.shape[:-1], -1, GROUP)
        top = groups.abs().amax(-1)
        factor = (top.amax() / (6.0 * 448.0)).clamp_min(1e-12)
        scale = (top / 6.0 / factor).clamp(2**-9, 448.0).to(torch.float8_e4m3fn)
        parts = groups / (scale.float() * factor)[..., None]
        middles = torch.tensor([(a + b) / 2 for a, b in pairwise(VALUES)], device=values.device)
        codes = torch.bucketize(parts.abs().contiguous(), middles) + 8 * (parts < 0)
        rows = factor.expand(*values.shape[:-1], 1).contiguous()
        q = pairs(codes.to(torch.uint8).reshape(values.shape))
        return Weight(self, tuple(values.shape), {"q": q, "scale": scale, "factor": rows})


def scaled_nvfp4(weight: Weight, factor: Tensor) -> Weight:
    """GGUF's NVFP4 blocks [N, K] and their matrix's factor [1, 1], in the tensors of this format."""
    blocks = weight.tensors["blocks"]
    scale = blocks.unflatten(-1, (-1, BLOCKS["NVFP4"][1]))[..., :4].flatten(-2)
    scale = torch.where(scale & NAN == NAN, 0, scale & NAN).view(torch.float8_e4m3fn)
    q = pairs(codes_of("NVFP4", blocks))
    tensors = {"q": q, "scale": scale, "factor": factor.expand(weight.shape[0], 1).contiguous()}
    return Weight(NvFp4Format(), weight.shape, tensors, release=weight.release)
