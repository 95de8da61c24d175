"""The block formats of GGUF, decoded exactly as the format defines them.

A row of K weights is K / size blocks; a block is `nbytes` bytes. Numbers are little-endian; d, m are float16.
Decoding happens in float32 with one rounding per operation, in the order written here (which is ggml's).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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
        values = torch.from_numpy(dequantize(self.kind, stored_rows(weight)))
        return values.view(weight.shape).to(weight.tensors["blocks"].device)


def stored_rows(weight: Weight) -> np.ndarray:
    """uint8 [N, bytes per row]: all rows of a matrix, or of all experts."""
    blocks = weight.tensors["blocks"]
    return blocks.reshape(-1, blocks.shape[-1]).cpu().numpy()


def from_rows(kind: str, rows: np.ndarray) -> Weight:
    """The matrix of these rows, uint8 [N, bytes per row]."""
    size, nbytes = BLOCKS[kind]
    shape = (len(rows), rows.shape[1] // nbytes * size)
    return Weight(GGUFBlockFormat(kind), shape, {"blocks": torch.from_numpy(rows)})


def dequantize(kind: str, rows: np.ndarray) -> np.ndarray:
    """uint8 [N, bytes per row] -> float32 [N, K]."""
    size, nbytes, decode = _KINDS[kind]
    count, width = rows.shape
    blocks = np.ascontiguousarray(rows).reshape(-1, nbytes)  # [blocks, nbytes]
    with np.errstate(all="ignore"):  # a scale may be infinite in a damaged file
        return decode(blocks).reshape(count, width // nbytes * size)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of every block: float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(qs: np.ndarray) -> np.ndarray:
    """[blocks, 16] -> [blocks, 32]: low halves first, then high halves."""
    return np.concatenate((qs & 15, qs >> 4), axis=1)


def _fifth_bit(blocks: np.ndarray, at: int) -> np.ndarray:
    """Bit j of the uint32 at byte `at`, as 16 or 0: [blocks, 32]."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def _q4_0(b: np.ndarray) -> np.ndarray:
    return _half(b, 0) * (_nibbles(b[:, 2:18]).astype(np.int8) - 8).astype(np.float32)


def _q4_1(b: np.ndarray) -> np.ndarray:
    return _half(b, 0) * _nibbles(b[:, 4:20]).astype(np.float32) + _half(b, 2)


def _q5_0(b: np.ndarray) -> np.ndarray:
    q = (_nibbles(b[:, 6:22]) | _fifth_bit(b, 2)).astype(np.int8) - 16
    return _half(b, 0) * q.astype(np.float32)


def _q5_1(b: np.ndarray) -> np.ndarray:
    q = _nibbles(b[:, 8:24]) | _fifth_bit(b, 4)
    return _half(b, 0) * q.astype(np.float32) + _half(b, 2)


def _q8_0(b: np.ndarray) -> np.ndarray:
    return _half(b, 0) * b[:, 2:34].view(np.int8).astype(np.float32)


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight 6-bit scales and eight 6-bit minima out of 12 bytes: two uint8 [blocks, 8]."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((a & 63, (c & 15) | ((a >> 6) << 4)), axis=1)
    minima = np.concatenate((b & 63, (c >> 4) | ((b >> 6) << 4)), axis=1)
    return scales, minima


def _k_affine(b: np.ndarray, q: np.ndarray) -> np.ndarray:
    """q uint8 [blocks, 8, 32] -> (d·scale)·q - dmin·min."""
    scales, minima = _k_scales(b[:, 4:16])
    d = (_half(b, 0) * scales.astype(np.float32))[:, :, None]
    m = (_half(b, 2) * minima.astype(np.float32))[:, :, None]
    return d * q.astype(np.float32) - m


def _k_nibbles(qs: np.ndarray) -> np.ndarray:
    """[blocks, 128] -> [blocks, 8, 32]: each 32 bytes hold two sub-blocks, low halves first."""
    pairs = qs.reshape(-1, 4, 1, 32)
    return np.concatenate((pairs & 15, pairs >> 4), axis=2).reshape(-1, 8, 32)


def _q4_k(b: np.ndarray) -> np.ndarray:
    return _k_affine(b, _k_nibbles(b[:, 16:144]))


def _q5_k(b: np.ndarray) -> np.ndarray:
    high = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1  # bit s belongs to sub-block s
    return _k_affine(b, _k_nibbles(b[:, 48:176]) | (high << 4))


def _q6_k(b: np.ndarray) -> np.ndarray:
    low = b[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate((low & 15, low >> 4), axis=2).reshape(-1, 2, 4, 32)
    high = (b[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]) & 3
    q = (low | (high << 4)).astype(np.int8) - 32  # [blocks, 2, 4, 32]
    scales = _half(b, 208) * b[:, 192:208].view(np.int8).astype(np.float32)  # [blocks, 16]: one for 16 weights
    return scales[:, :, None] * q.reshape(-1, 16, 16).astype(np.float32)


IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _iq4_nl(b: np.ndarray) -> np.ndarray:
    return _half(b, 0) * IQ4_VALUES[_nibbles(b[:, 2:18])]


def _iq4_xs(b: np.ndarray) -> np.ndarray:
    """d, 16 bits with the top two bits of eight scales, 4 bytes with their low halves, 8 x 16 bytes of nibbles."""
    low = np.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), axis=2).reshape(-1, 8)
    # [blocks, 8]
    high = np.ascontiguousarray(b[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)[None] & 3
    scale = _half(b, 0) * ((low | (high << 4)).astype(np.float32) - 32)
    return scale[:, :, None] * IQ4_VALUES[_nibbles(b[:, 8:].reshape(-1, 16)).reshape(-1, 8, 32)]


# kind: weights in a block, bytes of a block, decoder
_KINDS: dict[str, tuple[int, int, Callable[[np.ndarray], np.ndarray]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
    "IQ4_NL": (32, 18, _iq4_nl),
    "IQ4_XS": (256, 136, _iq4_xs),
}
BLOCKS = {kind: (size, nbytes) for kind, (size, nbytes, _) in _KINDS.items()}
