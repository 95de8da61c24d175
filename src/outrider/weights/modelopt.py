"""NVIDIA's modelopt: NVFP4 (`weight` uint8, `weight_scale`, `weight_scale_2`) or FP8 (`weight`, `weight_scale`), by
layer if mixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from ..ops.formats import NvFp4Format, Weight
from ..types import OutriderError
from .compressed import Floats, nvfp4
from .names import normalise
from .quant_reader import ACTIVATION_SCALES, QuantReader, QuantScheme, Settings, linear, matches, strings


@dataclass(frozen=True)
class ModeloptFp4:
    suffixes = ("weight", "weight_scale", "weight_scale_2")
    optional = (*ACTIVATION_SCALES, "pre_quant_scale")
    scheme = "modelopt NVFP4"
    format = NvFp4Format()

    def read(self, where: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Weight:
        if "pre_quant_scale" in tensors:
            raise OutriderError(f"{where}: a pre_quant_scale (AWQ inside NVFP4) is not supported")
        factor = tensors["weight_scale_2"].float()
        if factor.numel() != 1:
            raise OutriderError(f"{where}: its weight_scale_2 should be one number")
        return nvfp4(where, shape, tensors["weight"], tensors["weight_scale"], factor)


def by_name(algorithm: object) -> QuantReader | None:
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        return ModeloptFp4()
    if algorithm == "FP8":
        return Floats(None, "weight_scale", "modelopt")
    if algorithm in (None, "", "none"):
        return None
    raise OutriderError(f"quantization_config (modelopt): {str(algorithm)[:40]} is not supported; known: NVFP4, FP8")


def modelopt(settings: Settings) -> QuantScheme:
    nested = settings.get("quantization")  # as hf_quant_config.json has it
    settings = nested if isinstance(nested, Mapping) else settings
    algorithm, dense = settings.get("quant_algo"), strings(settings, "ignore", "exclude_modules")
    each = settings.get("quantized_layers")
    layers = {normalise(str(k)): v for k, v in each.items()} if isinstance(each, Mapping) else {}
    usual = by_name(algorithm) if algorithm != "MIXED_PRECISION" else None

    def find(module: str) -> QuantReader | None:
        if not linear(module) or matches(module, dense) or any(fnmatchcase(module, normalise(p)) for p in dense):
            return None
        named = layers.get(module)
        return by_name(named.get("quant_algo")) if isinstance(named, Mapping) else usual

    return find
