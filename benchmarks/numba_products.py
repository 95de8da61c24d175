"""The two largest products in Numba, for the comparison in docs/adr/0001: same packed bytes, same arithmetic.

The compiler is given every help that Numba has: parallel groups, contiguous loops over the 16 rows of a group (its
vector lanes), integer sums of known length. There is no way to name an integer dot-product instruction.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch


def quantise(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    b = x.reshape(len(x), -1, 32)
    d = np.abs(b).max(-1) / 127
    q = np.rint(b / d[:, :, None]).astype(np.int32)
    return q, d.astype(np.float32), (d * q.sum(-1)).astype(np.float32)


@numba.njit(parallel=True, fastmath=False)
def q4(data: Any, scale: Any, q: Any, d: Any, s: Any, out: Any) -> None:
    """data uint8 [G, KB, 4, 16, 4]; scale float32 [G, KB, 2, 16]; q int32 [M, KB, 32]; out [M, G·16]."""
    groups, blocks = data.shape[0], data.shape[1]
    for g in numba.prange(groups):
        acc = np.zeros((q.shape[0], 16), np.float32)
        for b in range(blocks):
            for m in range(q.shape[0]):
                dot = np.zeros(16, np.int32)
                for j in range(4):
                    for c in range(4):
                        low, high = q[m, b, 4 * j + c], q[m, b, 16 + 4 * j + c]
                        for r in range(16):
                            v = np.int32(data[g, b, j, r, c])
                            dot[r] += (v & 15) * low + (v >> 4) * high
                for r in range(16):
                    acc[m, r] += np.float32(dot[r]) * d[m, b] * scale[g, b, 0, r] + scale[g, b, 1, r] * s[m, b]
        for m in range(q.shape[0]):
            for r in range(16):
                out[m, 16 * g + r] = acc[m, r]


@numba.njit(parallel=True, fastmath=False)
def q8(data: Any, scale: Any, q: Any, d: Any, out: Any) -> None:
    """data int8 [G, KB, 8, 16, 4]; scale float32 [G, KB, 16]."""
    groups, blocks = data.shape[0], data.shape[1]
    for g in numba.prange(groups):
        acc = np.zeros((q.shape[0], 16), np.float32)
        for b in range(blocks):
            for m in range(q.shape[0]):
                dot = np.zeros(16, np.int32)
                for j in range(8):
                    for c in range(4):
                        x = q[m, b, 4 * j + c]
                        for r in range(16):
                            dot[r] += np.int32(data[g, b, j, r, c]) * x
                for r in range(16):
                    acc[m, r] += np.float32(dot[r]) * d[m, b] * scale[g, b, r]
        for m in range(q.shape[0]):
            for r in range(16):
                out[m, 16 * g + r] = acc[m, r]


class NumbaProducts:
    def __init__(self, ours: Any):
        numba.set_num_threads(ours.ops.threads)
        self.ours = ours
        self.layers = [self._q4(block.gate_up) for block in ours.model.blocks]
        w = ours.model.head
        data, scale = w.keep
        self.table = data.numpy().view(np.int8).reshape(-1, w.c.k // 32, 8, 16, 4), self._halves(w, scale)[:, :, 0]
        x = torch.randn(3, w.c.k)
        for mine, theirs in ((self._layer(x, 0), ours.ops.linear(x, ours.model.blocks[0].gate_up)), (self.head(x), ours.ops.linear(x, w))):
            assert np.allclose(mine, theirs.numpy(), rtol=1e-3, atol=1e-3), "the Numba products are wrong"

    @staticmethod
    def _q4(w: Any) -> tuple[np.ndarray, np.ndarray, int]:
        data, scale = w.keep
        return data.numpy().reshape(-1, w.c.k // 32, 4, 16, 4), NumbaProducts._halves(w, scale), w.c.n

    @staticmethod
    def _halves(w: Any, scale: torch.Tensor) -> np.ndarray:
        """float32 [groups, blocks, 1 or 2, 16]"""
        return scale.view(torch.float16).numpy().reshape(-(-w.c.n // 16), w.c.k // 32, -1, 16).astype(np.float32)

    def _layer(self, x: torch.Tensor, i: int) -> np.ndarray:
        data, scale, n = self.layers[i]
        out = np.empty((len(x), n), np.float32)
        q4(data, scale, *quantise(x.numpy()), out)
        return out

    def gate_ups(self, x: torch.Tensor) -> None:
        for i in range(len(self.layers)):
            self._layer(x, i)

    def head(self, x: torch.Tensor) -> np.ndarray:
        q, d, _ = quantise(x.numpy())
        out = np.empty((len(x), self.table[0].shape[0] * 16), np.float32)
        q8(*self.table, q, d, out)
        return out
