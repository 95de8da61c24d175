"""FP8 as `quant_method: fp8` writes it: `weight` in e4m3 with `weight_scale_inv` for blocks (a factor, in spite of its name), or
`weight_scale` for the tensor."""

from __future__ import annotations

from ..types import OutriderError
from .compressed import Floats
from .stored import Recipe, Settings, Stored, linear, matches, strings


def fp8(settings: Settings) -> Recipe:
    block, dense = settings.get("weight_block_size"), strings(settings, "modules_to_not_convert", "ignored_layers")
    if block is None:
        stored = Floats(None, "weight_scale", "fp8")
    elif isinstance(block, (list, tuple)) and len(block) == 2 and all(type(b) is int and b > 0 for b in block):
        stored = Floats((block[0], block[1]), "weight_scale_inv", "fp8")
    else:
        raise OutriderError(f"quantization_config (fp8): weight_block_size {str(block)[:40]} is no pair of numbers")

    def find(module: str) -> Stored | None:
        return stored if linear(module) and not matches(module, dense, contained=True) else None

    return find
