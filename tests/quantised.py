"""Quantised checkpoints made from dense ones, container by container, from the containers' own definitions (none of
ours is used).

meant = quantised.rewrite(folder, "awq")      # the folder now holds the quantised model; `meant` are the values it
stands for stored, meant = quantised.convert(state, "awq")       # the same without a file, on the tensors' own device

Needs torch alone until a file is rewritten: benchmarks/gpu_formats.py makes its models with it on a bare machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Made = tuple[dict[str, Tensor], Tensor]  # the stored tensors by suffix, and the values they mean


def grid(
    w: Tensor, bits: int, group: int, symmetric: bool, kind: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q and zero (unsigned), scale, values."""
    g = w.float().view(w.shape[0], -1, group)
    top = (1 << bits) - 1
    if symmetric:
        scale = (g.abs().amax(-1) / (top / 2)).to(kind).float()
        zero = torch.full_like(scale, 1 << (bits - 1))
    else:
        scale = ((g.amax(-1) - g.amin(-1)) / top).to(kind).float()
        zero = (-g.amin(-1) / scale).round().clamp(1, top)
    q = (g / scale[..., None] + zero[..., None]).round().clamp(0, top)
    values = ((q - zero[..., None]) * scale[..., None]).view(w.shape)
    return q.view(w.shape).int(), zero.int(), scale.to(kind), values


def words(q: Tensor, bits: int, places: list[int] | None = None) -> Tensor:
    """[.., n] -> int32 [.., n · bits / 32]; places[i]: which of the values stands in the i-th lowest bits."""
    each = 32 // bits
    short = -q.shape[-1] % each
    q = torch.nn.functional.pad(q, (0, short)).view(*q.shape[:-1], -1, each)
    out = torch.zeros(q.shape[:-1], dtype=torch.int64, device=q.device)
    for i, place in enumerate(places or range(each)):
        out |= q[..., place].long() << (bits * i)
    return torch.where(out >= 1 << 31, out - (1 << 32), out).int()


def compressed(bits: int, group: int, symmetric: bool, ordered: bool = False) -> Callable[[Tensor], Made]:
    def make(w: Tensor) -> Made:
        size = group or w.shape[1]
        order = shuffled(w, ordered)
        q, zero, scale, values = grid(w[:, order], bits, size, symmetric)
        back = torch.argsort(order)
        q = q[:, back]
        values = values[:, back]
        out = {"weight_packed": words(q, bits), "weight_scale": scale, "weight_shape": torch.tensor(w.shape)}
        if not symmetric:
            out["weight_zero_point"] = words(zero.t(), bits).t().contiguous()
        if ordered:
            out["weight_g_idx"] = (back // size).int()
        return out, values

    return make


def shuffled(w: Tensor, ordered: bool) -> Tensor:
    """An order of the columns; as they are where it is not asked for."""
    k = w.shape[1]
    return (torch.randperm(k, generator=torch.Generator().manual_seed(k)) if ordered else torch.arange(k)).to(w.device)


def awq(group: int) -> Callable[[Tensor], Made]:
    def make(w: Tensor) -> Made:
        q, zero, scale, values = grid(w, 4, group, False, torch.float16)
        places = [0, 2, 4, 6, 1, 3, 5, 7]

        def pack(t):
            return words(t.t().contiguous(), 4, places)

        return {"qweight": pack(q), "qzeros": pack(zero), "scales": scale.t().contiguous()}, values

    return make


def gptq(bits: int, group: int, ordered: bool = False) -> Callable[[Tensor], Made]:
    def make(w: Tensor) -> Made:
        order = shuffled(w, ordered)
        back = torch.argsort(order)
        q, zero, scale, values = grid(w[:, order], bits, group, False, torch.float16)
        out = {
            "qweight": words(q[:, back], bits).t().contiguous(), "qzeros": words(zero.t().contiguous() - 1, bits),
            "scales": scale.t().contiguous(), "g_idx": (back // group).int(),
        }  # fmt: skip
        return out, values[:, back]

    return make


def fp8(how: str, name: str = "weight_scale", block: tuple[int, int] = (16, 32)) -> Callable[[Tensor], Made]:
    down, across = block

    def make(w: Tensor) -> Made:
        w = w.float()
        if how == "tensor":
            scale = (w.abs().max() / 448).view(1)
            full = scale.expand(w.shape)
        elif how == "channel":
            scale = w.abs().amax(1, keepdim=True) / 448
            full = scale.expand(w.shape)
        else:
            rows = -(-w.shape[0] // down)
            columns = w.shape[1] // across
            padded = torch.nn.functional.pad(w, (0, 0, 0, rows * down - w.shape[0]))
            scale = padded.view(rows, down, columns, across).abs().amax((1, 3)) / 448
            full = scale.repeat_interleave(down, 0)[: w.shape[0]].repeat_interleave(across, 1)
        q = (w / full).to(torch.float8_e4m3fn)
        return {"weight": q, name: scale}, q.float() * full

    return make


def nvfp4(modelopt: bool) -> Callable[[Tensor], Made]:
    def make(w: Tensor) -> Made:
        levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=w.device)
        g = w.float().view(w.shape[0], -1, 16)
        whole = g.abs().max() / (6 * 448)
        scale = (g.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
        full = (scale.float() * whole)[..., None]
        codes = torch.bucketize((g / full).abs(), (levels[1:] + levels[:-1]) / 2)  # the nearest level
        values = (levels[codes] * g.sign() * full).view(w.shape)
        codes = (codes + 8 * (g < 0)).view(w.shape).to(torch.uint8)
        q = codes[:, 0::2] | (codes[:, 1::2] << 4)
        if modelopt:
            return {"weight": q, "weight_scale": scale, "weight_scale_2": whole, "input_scale": torch.ones(())}, values
        return {"weight_packed": q, "weight_scale": scale, "weight_global_scale": (1 / whole).view(1)}, values

    return make


def groups(layout: str, ignore: list[str], **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }


def ct(bits: int, group: int, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    how: dict[str, Any] = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return groups("pack-quantized", ["lm_head"], num_bits=bits, type="int", symmetric=symmetric, **how, **more)


def mixed() -> dict[str, Any]:
    """int4, but int8 for down projections; attention's values are left alone."""
    settings = ct(4, 32)
    settings["config_groups"]["down"] = {
        "targets": [r"re:.*\.mlp\.down_proj$"],
        "weights": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32},
    }  # fmt: skip
    return settings | {"ignore": ["lm_head", "re:.*v_proj$"]}


def dynamic() -> dict[str, Any]:
    """FP8-dynamic: the inputs of products are meant to be rounded too."""
    settings = groups("float-quantized", ["lm_head"], num_bits=8, type="float", strategy="channel", symmetric=True)
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    settings["config_groups"]["group_0"]["input_activations"] = activations
    return settings


Maker = Callable[[Tensor], Made]
# a maker, or one by part of the module's name
SCHEMES: dict[str, tuple[Maker | dict[str, Maker | None], dict[str, Any]]] = {
    "ct-int4-g32": (compressed(4, 32, True), ct(4, 32)),
    "ct-int4-g64-asym": (compressed(4, 64, False), ct(4, 64, False)),
    "ct-int4-g128": (compressed(4, 128, True), ct(4, 128)),
    "ct-int4-channel": (compressed(4, 0, True), ct(4, 0)),
    "ct-int4-actorder": (compressed(4, 32, True, True), ct(4, 32, actorder="group")),
    "ct-int8-g32": (compressed(8, 32, True), ct(8, 32)),
    "ct-int8-channel": (compressed(8, 0, True), ct(8, 0)),
    "ct-int8-channel-asym": (compressed(8, 0, False), ct(8, 0, False)),
    "ct-fp8-tensor": (fp8("tensor"), groups("float-quantized", ["lm_head"], num_bits=8, type="float", strategy="tensor")),
    "ct-fp8-channel": (fp8("channel"), groups("float-quantized", ["re:.*lm_head"], num_bits=8, type="float", strategy="channel")),
    "ct-fp8-block": (
        fp8("block"),
        groups("float-quantized", ["lm_head"], num_bits=8, type="float", strategy="block", block_structure=[16, 32]),
    ),
    "ct-fp8-block128": (
        fp8("block", block=(128, 128)),
        groups("float-quantized", ["lm_head"], num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
    ),
    "ct-fp8-dynamic": (fp8("channel"), dynamic()),
    "ct-mixed": ({"down_proj": compressed(8, 32, True), "v_proj": None, "": compressed(4, 32, True)}, mixed()),
    "ct-nvfp4": (
        nvfp4(False),
        groups("nvfp4-pack-quantized", ["lm_head"], num_bits=4, type="float", strategy="tensor_group", group_size=16),
    ),
    "modelopt-nvfp4": (nvfp4(True), {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}),
    "fp8-block": (fp8("block", "weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [16, 32]}),
    "awq": (awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "gptq-int4": (gptq(4, 32), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}),
    "gptq-int4-g128": (gptq(4, 128), {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}),
    "gptq-int4-actorder": (gptq(4, 32, True), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}),
    "gptq-int8": (gptq(8, 32), {"quant_method": "gptq", "bits": 8, "group_size": 32}),
}  # fmt: skip


def linear(name: str, values: Tensor) -> bool:
    return (
        name.endswith(".weight")
        and values.dim() == 2
        and ".layers." in name
        and "vision" not in name
        and "audio" not in name
    )


def convert(
    state: dict[str, Tensor], scheme: str, dense: Callable[[str], bool] = lambda name: False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every linear matrix of the layers quantised but those that `dense` names: the tensors a checkpoint stores, and
    the values meant."""
    makers = SCHEMES[scheme][0] if isinstance(SCHEMES[scheme][0], dict) else {"": SCHEMES[scheme][0]}
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, values in state.items():
        make = next(m for part, m in makers.items() if part in name)
        if make is not None and linear(name, values) and not dense(name) and values.shape[0] % 8 == 0:
            tensors, meant[name] = make(values)
            stored |= {f"{name.removesuffix('.weight')}.{suffix}": t.contiguous() for suffix, t in tensors.items()}
        else:
            stored[name] = meant[name] = values
    return stored, meant


def rewrite(folder: Path, scheme: str, dense: Callable[[str], bool] = lambda name: False) -> dict[str, Tensor]:
    """A checkpoint's matrices in another scheme; returns the state dict of the values meant."""
    from safetensors.torch import load_file, save_file

    stored, meant = convert(load_file(folder / "model.safetensors"), scheme, dense)
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": SCHEMES[scheme][1]}))
    return meant
