"""GPTQ: `qweight` int32 [K · bits / 32, N], columns of the matrix packed downwards; `g_idx` gives each column's group.

The zeros are stored minus one unless the checkpoint says `gptq_v2`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.formats import Format, IntegerFormat, Weight
from ..ops.formats.integer import pairs
from ..types import OutriderError
from .compressed import by_group, unpack
from .quant_reader import QuantReader, QuantScheme, Settings, expect, linear, matches, strings, whole


@dataclass(frozen=True)
class Gptq:
    bits: int
    group: int  # 0: the whole row
    second: bool  # zeros as they are
    ordered: bool = False
    suffixes = ("qweight", "qzeros", "scales")
    optional = ("g_idx", "bias_g_idx")

    @property
    def scheme(self) -> str:
        return f"gptq int{self.bits} {f'group {self.group}' if self.group else 'channel'}"

    @property
    def format(self) -> Format:
        return IntegerFormat(self.bits, self.group, True, self.ordered, torch.float16)

    def read(self, where: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Weight:
        (rows, columns), each = shape, 32 // self.bits
        if rows % each or columns % each or (self.group and columns % self.group):
            raise OutriderError(
                f"{where}: {rows} rows of {columns} are no whole words or no whole groups of {self.group}"
            )
        groups = columns // self.group if self.group else 1
        qweight = expect(where, "qweight", tensors["qweight"], (columns // each, rows), "int32")
        qzeros = expect(where, "qzeros", tensors["qzeros"], (groups, rows // each), "int32")
        scale = expect(where, "scales", tensors["scales"], (groups, rows), "float16 bfloat16 float32").t().contiguous()
        q = unpack(qweight.t(), self.bits)  # [N, K]
        zero = unpack(qzeros, self.bits).t().contiguous()
        if not self.second:
            # 16 is a zero that 4 bits cannot hold
            zero = (zero + 1) & ((1 << self.bits) - 1) if self.bits == 8 else zero + 1
        made = {"q": pairs(q) if self.bits == 4 else q.contiguous(), "scale": scale, "zero": zero}
        ordered = False
        if "g_idx" in tensors and self.group:
            index = expect(where, "g_idx", tensors["g_idx"], (columns,), "int32 int64")
            ordered = bool((index != torch.arange(columns) // self.group).any())
            if ordered:
                made["q"], made["order"] = by_group(where, made["q"], index, self.bits, self.group)
        return Weight(IntegerFormat(self.bits, self.group, True, ordered, scale.dtype), shape, made)


def gptq(settings: Settings) -> QuantScheme:
    def stored(values: Settings) -> Gptq:
        bits, group = whole(values, "bits", 4, "gptq"), whole(values, "group_size", 128, "gptq")
        if bits not in (4, 8):
            raise OutriderError(f"quantization_config (gptq): {bits} bits are not supported; known: 4, 8")
        return Gptq(bits, max(0, group), settings.get("checkpoint_format") == "gptq_v2", bool(values.get("desc_act")))

    usual, dense = stored(settings), strings(settings, "modules_to_not_convert", "modules_in_block_not_to_quantize")
    special = settings.get("dynamic")
    # "-:pattern" leaves modules dense, "+:pattern" or "pattern" changes them
    rules = special if isinstance(special, Mapping) else {}

    def find(module: str) -> QuantReader | None:
        if not linear(module) or module == "lm_head" or matches(module, dense, contained=True):
            return None
        for pattern, change in rules.items():
            if re.match(str(pattern).removeprefix("+:").removeprefix("-:"), module):
                return (
                    None
                    if str(pattern).startswith("-:")
                    else stored({**settings, **change})
                    if isinstance(change, Mapping)
                    else usual
                )
        return usual

    return find
