"""Counter-based noise that target and drafters add to the score of a token at a position. It is never stored and is the
same on every backend."""

from __future__ import annotations

import torch
from torch import Tensor


def mix32(x: Tensor) -> Tensor:
    """A 32-bit finaliser (lowbias32, Ettinger 2018) on int64 tensors that hold 32-bit values."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def noise_bits(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """Counter-based noise: 32 random bits (in int64), a pure function of its three arguments (broadcast)."""
    key = mix32((seed & 0xFFFFFFFF) ^ mix32((seed >> 32) & 0xFFFFFFFF))
    key = mix32(key ^ mix32((position + 0x9E3779B9) & 0xFFFFFFFF))
    return mix32(key ^ token_hash(token))


def token_hash(token: Tensor) -> Tensor:
    """The token's part of the noise, independent of seed and position."""
    return mix32((token + 0x85EBCA6B) & 0xFFFFFFFF)


def gumbel(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """Finite Gumbel noise, float32: -log(E), E = -log(1 - u), u from all 32 bits. Float32 is dense near u = 0, where E
    is small and the token wins, so that tokens of probability 1e-9 are still drawn at their rate. (A kernel without
    log1p: E = u + u²/2 + u³/3 below u = 2^-10, else -log(1 - u).) u is kept below 1: E must not be infinite."""
    u = ((noise_bits(seed, position, token).float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-u))
