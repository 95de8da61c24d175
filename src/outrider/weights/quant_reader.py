"""The storage layouts of a quantised matrix [N, K]: one `QuantReader` per layout makes a `Weight` from its tensors.

pack-quantized: `weight_packed` int32 [N, K · bits / 32], the first column in the lowest bits. AWQ ("gemm"): `qweight`
int32 [K, N / 8], rows of a word in the order 0 2 4 6 1 3 5 7. GPTQ: `qweight` int32 [K · bits / 32, N], `qzeros` minus
one unless `gptq_v2`, `g_idx` [K] each column's group. int-quantized and FP8: one scale per tensor, row or block.
NVFP4: uint8 [N, K / 2], scales in e4m3 [N, K / 16], one global scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.formats import Float8Format, Format, IntegerFormat, NvFp4Format, Weight
from ..ops.formats.integer import halves, pairs
from ..types import OutriderError, require

Shape = tuple[int, ...]
Tensors = Mapping[str, Tensor]  # tensors of one matrix, by suffix of the module's name
FLOATS = "float32 float16 bfloat16"
# weights only: activations are not quantised
ACTIVATION_SCALES = "input_scale", "input_global_scale", "input_zero_point", "output_scale"
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # place of each of eight rows in a word


@dataclass(frozen=True)
class QuantReader:
    scheme: str  # the container's name for it, for messages
    format: Format  # the resulting format, as far as the configuration determines it
    suffixes: tuple[str, ...]  # required tensors, by suffix of the module's name
    read: Callable[[str, Shape, Tensors], Weight]  # the first argument names the matrix in errors
    optional: tuple[str, ...] = ()  # tensors that may exist, used or not


def expect(where: str, tensors: Tensors, name: str, shape: Shape, kinds: str) -> Tensor:
    """Returns the tensor if it has exactly this shape; `kinds`: prefixes of permitted torch dtypes."""
    tensor = tensors[name]
    kind = str(tensor.dtype).removeprefix("torch.")
    known = kind.startswith(tuple(kinds.split()))
    if tuple(tensor.shape) != shape or not known:
        wanted = kind if known else kinds.split()[0]
        raise OutriderError(f"{where}: its {name} is {kind} {list(tensor.shape)}, not {wanted} {list(shape)}")
    return tensor


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [.., W] -> uint8 [.., W · 32 / bits], the lowest bits first."""
    parts = [(words >> (bits * i)) & ((1 << bits) - 1) for i in range(32 // bits)]
    return torch.stack(parts, dim=-1).flatten(-2).to(torch.uint8)


# ---- integers -------------------------------------------------------------------------------------------------------
def groups_of(where: str, shape: Shape, group: int, row_step: int, column_step: int) -> int:
    """Groups per row. Raises an error if rows or columns do not fill whole words, or columns whole groups."""
    rows, columns = shape[-2:]
    if rows % row_step or columns % column_step or (group and columns % group):
        raise OutriderError(f"{where}: {rows} rows of {columns} are no whole words or no whole groups of {group}")
    return columns // group if group else 1


def integers(
    where: str, shape: Shape, bits: int, group: int, tensors: dict[str, Tensor], index: Tensor | None
) -> Weight:
    """tensors: q, scale and zero as in `IntegerFormat`. index [K]: each column's group; columns are sorted by it."""
    columns = torch.arange(shape[-1])
    ordered = False
    if index is not None and group and (index != columns // group).any():
        order = torch.argsort(index.long(), stable=True)
        ordered = True
        if not torch.equal(index.long()[order], columns // group):
            raise OutriderError(f"{where}: its g_idx does not give every group {group} columns")
        values = (halves(tensors["q"]) if bits == 4 else tensors["q"])[..., order]
        tensors |= {"q": (pairs(values) if bits == 4 else values).contiguous(), "order": order.int()}
    return Weight(
        IntegerFormat(bits, group, has_zero_point="zero" in tensors, ordered=ordered, scale=tensors["scale"].dtype),
        shape,
        tensors,
    )


def pack_quantized(bits: int, group: int, symmetric: bool, ordered: bool) -> QuantReader:
    def read(where: str, shape: Shape, tensors: Tensors) -> Weight:
        *outer, rows, columns = shape
        groups = groups_of(where, shape, group=group, row_step=1, column_step=32 // bits)
        packed = expect(where, tensors, name="weight_packed", shape=(*outer, rows, columns * bits // 32), kinds="int32")
        scale = expect(where, tensors, name="weight_scale", shape=(*outer, rows, groups), kinds=FLOATS)
        fields = {"q": packed.contiguous().view(torch.uint8), "scale": scale}
        if not symmetric:
            if "weight_zero_point" not in tensors:
                raise OutriderError(f"{where}: its weight_zero_point is missing, and the scheme is not symmetric")
            zero = expect(
                where, tensors, name="weight_zero_point", shape=(*outer, -(-rows * bits // 32), groups), kinds="int32"
            )
            fields["zero"] = unpack(zero.transpose(-1, -2), bits)[..., :rows].transpose(-1, -2).contiguous()
        index = None
        if "weight_g_idx" in tensors and group:
            index = expect(where, tensors, name="weight_g_idx", shape=(columns,), kinds="int32 int64")
            index = index if int(index.min()) >= 0 else None  # -1: it was never set
        return integers(where, shape, bits=bits, group=group, tensors=fields, index=index)

    name = f"compressed-tensors pack-quantized int{bits} {f'group {group}' if group else 'channel'}"
    optional = ("weight_shape", "weight_zero_point", "weight_g_idx", *ACTIVATION_SCALES)
    format = IntegerFormat(bits, group, has_zero_point=not symmetric, ordered=ordered)
    return QuantReader(name, format, suffixes=("weight_packed", "weight_scale"), read=read, optional=optional)


def by_columns(method: str, bits: int, group: int, less_one: bool = False, ordered: bool = False) -> QuantReader:
    """AWQ's and GPTQ's layouts: words of rows ("awq") or of columns ("gptq"). less_one: zeros are stored minus one."""
    each = 32 // bits
    is_awq = method == "awq"

    def read(where: str, shape: Shape, tensors: Tensors) -> Weight:
        rows, columns = shape
        groups = groups_of(where, shape, group=group, row_step=each, column_step=1 if is_awq else each)

        def words_of_rows(name: str, count: int) -> Tensor:
            values = unpack(expect(where, tensors, name=name, shape=(count, rows // each), kinds="int32"), bits)
            return (values.view(count, -1, 8)[:, :, AWQ_PLACES].reshape(count, rows) if is_awq else values).t()

        if is_awq:
            q = words_of_rows("qweight", columns).contiguous()
        else:
            q = unpack(
                expect(where, tensors, name="qweight", shape=(columns // each, rows), kinds="int32").t(), bits
            )  # [N, K]
        zero = words_of_rows("qzeros", groups) + less_one  # 8 bits wrap; 16 is a zero that 4 bits cannot hold
        scale = expect(where, tensors, name="scales", shape=(groups, rows), kinds=FLOATS).t().contiguous()
        fields = {"q": pairs(q) if bits == 4 else q.contiguous(), "scale": scale, "zero": zero.contiguous()}
        index = (
            expect(where, tensors, name="g_idx", shape=(columns,), kinds="int32 int64")
            if "g_idx" in tensors and group
            else None
        )
        return integers(where, shape, bits=bits, group=group, tensors=fields, index=index)

    name = f"{method} int{bits} {f'group {group}' if group else 'channel'}"
    format = IntegerFormat(bits, group, has_zero_point=True, ordered=ordered, scale=torch.float16)
    return QuantReader(
        name,
        format,
        suffixes=("qweight", "qzeros", "scales"),
        read=read,
        optional=() if is_awq else ("g_idx", "bias_g_idx"),
    )


# ---- one scale per tensor, row or block -----------------------------------------------------------------------------
def spread(where: str, tensors: Tensors, name: str, shape: Shape, block: tuple[int, int] | None = None) -> Tensor:
    """Expands a scale to float32 [N, 1], or for blocks of rows and columns to [N, K / columns per block]."""
    rows, columns = shape[-2:]
    scale = tensors[name]
    if scale.numel() == 1:
        return scale.float().reshape(1, 1).expand(*shape[:-1], 1).contiguous()
    if block is None:
        row = {name: scale.reshape(*shape[:-1], -1)}
        return expect(where, row, name=name, shape=(*shape[:-1], 1), kinds=FLOATS).float()
    expect(where, tensors, name=name, shape=(*shape[:-2], -(-rows // block[0]), -(-columns // block[1])), kinds=FLOATS)
    return scale.float().repeat_interleave(block[0], dim=-2)[..., :rows, :].contiguous()


def int_quantized() -> QuantReader:
    format = IntegerFormat(8, 0, scale=torch.float32)

    def read(where: str, shape: Shape, tensors: Tensors) -> Weight:
        q = expect(where, tensors, name="weight", shape=shape, kinds="int8").view(torch.uint8) ^ 128
        return Weight(format, shape, {"q": q, "scale": spread(where, tensors, "weight_scale", shape=shape)})

    optional = ("weight_zero_point", *ACTIVATION_SCALES)
    return QuantReader(
        "compressed-tensors int-quantized int8",
        format,
        suffixes=("weight", "weight_scale"),
        read=read,
        optional=optional,
    )


def float8(method: str, block: tuple[int, int] | None = None, scale: str = "weight_scale") -> QuantReader:
    format = Float8Format(0 if block is None else block[1])

    def read(where: str, shape: Shape, tensors: Tensors) -> Weight:
        q = expect(where, tensors, name="weight", shape=shape, kinds="float8_e4m3fn")
        return Weight(format, shape, {"q": q, "scale": spread(where, tensors, scale, shape=shape, block=block)})

    name = f"{method} fp8{'' if block is None else f' block {block[0]}x{block[1]}'}"
    return QuantReader(name, format, suffixes=("weight", scale), read=read, optional=ACTIVATION_SCALES)


def nvfp4(method: str, codes: str, above: str, divided: bool) -> QuantReader:
    """codes, above: suffixes of the packed weight and of the global scale, by which compressed-tensors divides."""

    def read(where: str, shape: Shape, tensors: Tensors) -> Weight:
        *rows, columns = shape
        require("pre_quant_scale" not in tensors, f"{where}: a pre_quant_scale (AWQ inside NVFP4) is not supported")
        factor = tensors[above].float()
        if factor.numel() != 1 or (divided and not float(factor) > 0):
            raise OutriderError(f"{where}: its {above} should be one positive number")
        fields = {
            "q": expect(where, tensors, name=codes, shape=(*rows, columns // 2), kinds="uint8"),
            "scale": expect(where, tensors, name="weight_scale", shape=(*rows, columns // 16), kinds="float8_e4m3fn"),
            "factor": (1.0 / factor if divided else factor).reshape(1, 1).expand(*rows, 1).contiguous(),
        }
        return Weight(NvFp4Format(), shape, fields)

    optional = (*ACTIVATION_SCALES, "pre_quant_scale")
    return QuantReader(method, NvFp4Format(), suffixes=(codes, "weight_scale", above), read=read, optional=optional)
