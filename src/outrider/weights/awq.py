"""How AWQ checkpoints (layout "gemm") store a matrix of N rows and K columns: `qweight` int32 [K, N / 8].

A word holds four bits of each of eight neighbouring rows, from the lowest bits on in the order 0 2 4 6 1 3 5 7.
`qzeros` [K / group, N / 8] is packed likewise; `scales` is [K / group, N].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.formats import Format, IntegerFormat, Weight
from ..ops.formats.integer import pairs
from ..types import OutriderError
from .compressed import unpack
from .quant_reader import QuantScheme, Settings, all_but, expect, strings, whole

PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word each of eight rows is


@dataclass(frozen=True)
class Awq:
    group: int
    suffixes = ("qweight", "qzeros", "scales")
    optional = ()

    @property
    def scheme(self) -> str:
        return f"awq int4 group {self.group}"

    @property
    def format(self) -> Format:
        return IntegerFormat(4, self.group, has_zero_point=True, scale=torch.float16)

    def read(self, where: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Weight:
        rows, columns = shape
        if rows % 8 or columns % self.group:
            raise OutriderError(
                f"{where}: {rows} rows of {columns} are no whole words or no whole groups of {self.group}"
            )
        groups = columns // self.group
        qweight = expect(where, "qweight", tensors["qweight"], (columns, rows // 8), "int32")
        qzeros = expect(where, "qzeros", tensors["qzeros"], (groups, rows // 8), "int32")
        scale = expect(where, "scales", tensors["scales"], (groups, rows), "float16 bfloat16 float32").t().contiguous()
        q, zero = (
            unpack(t, 4).view(len(t), -1, 8)[:, :, PLACES].reshape(len(t), rows).t().contiguous()
            for t in (qweight, qzeros)
        )
        return Weight(
            IntegerFormat(4, self.group, has_zero_point=True, scale=scale.dtype),
            shape,
            {"q": pairs(q), "scale": scale, "zero": zero},
        )


def awq(settings: Settings) -> QuantScheme:
    bits, version = whole(settings, "bits", 4, "awq"), str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise OutriderError(
            f"quantization_config (awq): {bits} bits in layout {version!r} are not supported; known: 4 bits, gemm"
        )
    return all_but(strings(settings, "modules_to_not_convert"), Awq(whole(settings, "group_size", 128, "awq")))
