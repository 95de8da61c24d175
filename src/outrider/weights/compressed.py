"""How compressed-tensors checkpoints store quantised matrices: packed integers, plain int8, FP8, NVFP4.

`config_groups` of the checkpoint's `quantization_config` say which modules have which scheme, `ignore` which are
dense. The result is a `QuantScheme`: a module's name to how its matrix is stored (weights.stored). A scheme that is
not known is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.formats import Float8Format, Format, IntegerFormat, NvFp4Format, Weight
from ..types import OutriderError
from .quant_reader import ACTIVATION_SCALES, QuantReader, QuantScheme, Settings, expect, linear, matches, strings, whole

METHOD = "compressed-tensors"


def spread(where: str, scale: Tensor, shape: tuple[int, ...], block: tuple[int, int] | None = None) -> Tensor:
    """A scale of the whole tensor, of each row, or of blocks of rows and columns, as float32 [N, 1] or [N, K /
    columns of a block]."""
    rows, columns = shape[-2], shape[-1]
    if scale.numel() == 1:
        return scale.float().reshape(1, 1).expand(*shape[:-1], 1).contiguous()
    if block is None:
        return expect(
            where, "weight_scale", scale.reshape(*shape[:-1], -1), (*shape[:-1], 1), "float32 float16 bfloat16"
        ).float()
    down, across = -(-rows // block[0]), -(-columns // block[1])
    expect(where, "weight_scale", scale, (*shape[:-2], down, across), "float32 float16 bfloat16")
    return scale.float().repeat_interleave(block[0], dim=-2)[..., :rows, :].contiguous()


@dataclass(frozen=True)
class PackedIntegers:
    """`weight_packed` int32 [N, K · bits / 32], the first column in the lowest bits, stored with 2^(bits - 1)
    added."""

    bits: int
    group: int
    symmetric: bool
    ordered: bool = False
    suffixes = ("weight_packed", "weight_scale")
    optional = ("weight_shape", "weight_zero_point", "weight_g_idx", *ACTIVATION_SCALES)

    @property
    def scheme(self) -> str:
        return f"{METHOD} pack-quantized int{self.bits} {f'group {self.group}' if self.group else 'channel'}"

    @property
    def format(self) -> Format:
        return IntegerFormat(self.bits, self.group, not self.symmetric, self.ordered)

    def read(self, where: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Weight:
        *outer, rows, columns = shape
        if (columns * self.bits) % 32 or (self.group and columns % self.group):
            raise OutriderError(f"{where}: rows of {columns} are no whole words or no whole groups of {self.group}")
        packed = expect(
            where, "weight_packed", tensors["weight_packed"], (*outer, rows, columns * self.bits // 32), "int32"
        )
        groups = columns // self.group if self.group else 1
        scale = tensors["weight_scale"]
        expect(where, "weight_scale", scale, (*outer, rows, groups), "bfloat16 float16 float32")
        made = {"q": packed.contiguous().view(torch.uint8), "scale": scale}
        if not self.symmetric:
            if "weight_zero_point" not in tensors:
                raise OutriderError(f"{where}: its weight_zero_point is missing, and the scheme is not symmetric")
            words = -(-rows * self.bits // 32)
            zero = expect(where, "weight_zero_point", tensors["weight_zero_point"], (*outer, words, groups), "int32")
            made["zero"] = unpack(zero.transpose(-1, -2), self.bits)[..., :rows].transpose(-1, -2).contiguous()
        ordered = False
        if "weight_g_idx" in tensors and self.group:
            index = expect(where, "weight_g_idx", tensors["weight_g_idx"], (columns,), "int32 int64")
            ordered = bool((index != torch.arange(columns) // self.group).any()) and int(index.min()) >= 0
            if ordered:
                made["q"], made["order"] = by_group(where, made["q"], index, self.bits, self.group)
        return Weight(IntegerFormat(self.bits, self.group, not self.symmetric, ordered, scale.dtype), shape, made)


@dataclass(frozen=True)
class PlainIntegers:
    """`weight` int8 [N, K], one factor a row or a tensor."""

    suffixes = ("weight", "weight_scale")
    optional = ("weight_zero_point", *ACTIVATION_SCALES)
    scheme = f"{METHOD} int-quantized int8"
    format = IntegerFormat(8, 0, scale=torch.float32)

    def read(self, where: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Weight:
        q = expect(where, "weight", tensors["weight"], shape, "int8")
        return Weight(
            self.format, shape, {"q": q.view(torch.uint8) ^ 128, "scale": spread(where, tensors["weight_scale"], shape)}
        )


@dataclass(frozen=True)
class Floats:
    """`weight` float8 [N, K] with `weight_scale` for the tensor, a row, or a block."""

    block: tuple[int, int] | None = None
    scale: str = "weight_scale"
    method: str = f"{METHOD} float-quantized"

    @property
    def suffixes(self) -> tuple[str, ...]:
        return ("weight", self.scale)

    optional = ACTIVATION_SCALES

    @property
    def scheme(self) -> str:
        return f"{self.method} fp8{'' if self.block is None else f' block {self.block[0]}x{self.block[1]}'}"

    @property
    def format(self) -> Format:
        return Float8Format(0 if self.block is None else self.block[1])

    def read(self, where: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Weight:
        q = expect(where, "weight", tensors["weight"], shape, "float8_e4m3fn")
        return Weight(self.format, shape, {"q": q, "scale": spread(where, tensors[self.scale], shape, self.block)})


@dataclass(frozen=True)
class PackedFloats:
    """NVFP4: `weight_packed` uint8 [N, K / 2]; the scale above the groups' is divided by
    (`weight_global_scale`)."""

    suffixes = ("weight_packed", "weight_scale", "weight_global_scale")
    optional = ACTIVATION_SCALES
    scheme = f"{METHOD} nvfp4-pack-quantized"
    format = NvFp4Format()

    def read(self, where: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Weight:
        whole_scale = tensors["weight_global_scale"].float()
        if whole_scale.numel() != 1 or not float(whole_scale) > 0:
            raise OutriderError(f"{where}: its weight_global_scale should be one positive number")
        return nvfp4(where, shape, tensors["weight_packed"], tensors["weight_scale"], 1.0 / whole_scale)


def nvfp4(where: str, shape: tuple[int, ...], q: Tensor, scale: Tensor, factor: Tensor) -> Weight:
    *rows, columns = shape
    expect(where, "packed weight", q, (*rows, columns // 2), "uint8")
    expect(where, "weight_scale", scale, (*rows, columns // 16), "float8_e4m3fn")
    return Weight(
        NvFp4Format(), shape, {"q": q, "scale": scale, "factor": factor.reshape(1, 1).expand(*rows, 1).contiguous()}
    )


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [.., W] -> uint8 [.., W · 32 / bits], the lowest bits first."""
    parts = [(words >> (bits * i)) & ((1 << bits) - 1) for i in range(32 // bits)]
    return torch.stack(parts, dim=-1).flatten(-2).to(torch.uint8)


def by_group(where: str, q: Tensor, index: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Columns sorted by their group, so that a group's columns stand together: (q in that order, the order)."""
    from ..ops.formats.integer import halves, pairs

    order = torch.argsort(index.long(), stable=True)
    if not torch.equal(index.long()[order], torch.arange(len(index)) // group):
        raise OutriderError(f"{where}: its g_idx does not give every group {group} columns")
    values = (halves(q) if bits == 4 else q)[..., order]
    return (pairs(values) if bits == 4 else values).contiguous(), order.int()


def compressed_tensors(settings: Settings) -> QuantScheme:
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise OutriderError(f"quantization_config ({METHOD}) has no config_groups")
    kept: list[tuple[list[str], QuantReader]] = []
    for name, group in groups.items():
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise OutriderError(f"quantization_config ({METHOD}): {name} has no weights")
        layout = str(group.get("format") or settings.get("format") or "")
        kept.append((strings(group, "targets"), scheme(layout, group["weights"])))
    dense = strings(settings, "ignore")

    def find(module: str) -> QuantReader | None:
        if matches(module, dense):
            return None
        named = next((stored for targets, stored in kept if matches(module, targets)), None)
        return named or next((stored for targets, stored in kept if linear(module) and "Linear" in targets), None)

    return find


def scheme(layout: str, weights: Settings) -> QuantReader:
    kind = str(weights.get("type", "int"))
    bits = whole(weights, "num_bits", 8, METHOD)
    strategy = str(weights.get("strategy"))
    known = (
        f"quantization_config ({METHOD}): {layout or 'no format'} with {kind}{bits} weights by {strategy} is not "
        f"supported"
    )
    if layout == "pack-quantized" and kind == "int" and bits in (4, 8) and strategy in ("group", "channel"):
        group = whole(weights, "group_size", None, METHOD) if strategy == "group" else 0
        if group not in (0, 16, 32, 64, 128, 256):
            raise OutriderError(f"{known}: groups of {group}")
        return PackedIntegers(
            bits, group, bool(weights.get("symmetric", True)), weights.get("actorder") in ("group", True)
        )
    if layout == "nvfp4-pack-quantized" and kind == "float" and bits == 4:
        return PackedFloats()
    if layout in ("float-quantized", "naive-quantized") and kind == "float" and bits == 8:
        if strategy == "block":
            block = weights.get("block_structure")
            if (
                not isinstance(block, (list, tuple))
                or len(block) != 2
                or not all(type(b) is int and b > 0 for b in block)
            ):
                raise OutriderError(f"{known}: block_structure {str(block)[:40]}")
            return Floats((block[0], block[1]))
        if strategy in ("tensor", "channel"):
            return Floats()
    if (
        layout in ("int-quantized", "naive-quantized")
        and kind == "int"
        and bits == 8
        and strategy in ("tensor", "channel")
    ):
        return PlainIntegers()
    raise OutriderError(known)
