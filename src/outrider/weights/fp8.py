"""FP8 as `quant_method: fp8` writes it: `weight` in e4m3 with `weight_scale_inv` for blocks (a factor, in spite of its
name), or `weight_scale` for the tensor."""

from __future__ import annotations

from ..types import OutriderError
from .compressed import Floats
from .quant_reader import QuantScheme, Settings, all_but, strings


def fp8(settings: Settings) -> QuantScheme:
    block = settings.get("weight_block_size")
    if block is None:
        stored = Floats(None, "weight_scale", "fp8")
    elif isinstance(block, (list, tuple)) and len(block) == 2 and all(type(b) is int and b > 0 for b in block):
        stored = Floats((block[0], block[1]), "weight_scale_inv", "fp8")
    else:
        raise OutriderError(f"quantization_config (fp8): weight_block_size {str(block)[:40]} is no pair of numbers")
    return all_but(strings(settings, "modules_to_not_convert", "ignored_layers"), stored)
