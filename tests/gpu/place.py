"""Place and extent of the GPU checks: real shapes on a GPU, elsewhere a dry run on tiny models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gpu_rig import SIZES, shallow
from outrider.models.builtin_configs import BUILTIN_CONFIGS

LAYERS = {"E2B": 10, "E4B": 12, "12B": 6, "26B-A4B": 6, "31B": 6}  # both kinds of attention; edge models share K/V
KS = (1, 2, 4, 8, 16)
GIB = 2**30


def tiny(raw: dict[str, Any]) -> dict[str, Any]:
    """A model of the same kind, small enough for a dry run on a CPU."""
    text = dict(raw["text_config"])
    text |= dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, head_dim=16, global_head_dim=32)
    text |= dict(vocab_size=512, sliding_window=16)
    text["num_key_value_heads"] = min(2, text["num_key_value_heads"])
    if text["num_global_key_value_heads"]:
        text["num_global_key_value_heads"] = 1
    if text["hidden_size_per_layer_input"]:
        text |= dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=512)
    if text["enable_moe_block"]:
        text |= dict(num_experts=8, top_k_experts=2, moe_intermediate_size=16)
    small = {**raw, "text_config": text}
    if "backbone_hidden_size" in raw:
        small |= dict(backbone_hidden_size=32, num_centroids=16, centroid_intermediate_top_k=4)
    return small


@dataclass(frozen=True)
class Place:
    """Place and extent of the checks."""

    device: str
    dtype: torch.dtype
    steps: int  # tokens compared
    context: int

    @staticmethod
    def here() -> Place:
        if torch.cuda.is_available():
            return Place("cuda", torch.bfloat16, 512, 900)  # crosses the windows of 512 and 1024
        return Place("cpu", torch.float64, 24, 40)

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"

    def ops(self) -> Any:
        if self.gpu:
            from outrider.ops.triton import TritonOps

            return TritonOps("cuda")
        from outrider.ops.reference import ReferenceOps

        return ReferenceOps()

    def raw(self, size: str, layers: int | None = None) -> dict[str, Any]:
        raw = dict(BUILTIN_CONFIGS[SIZES[size]])
        raw = shallow(raw, LAYERS[size] if layers is None else layers) if layers != 0 else raw
        return raw if self.gpu else tiny(raw)

    def assistant(self, size: str) -> dict[str, Any]:
        raw = dict(BUILTIN_CONFIGS[SIZES[size] + "-assistant"])
        return raw if self.gpu else tiny(raw)

    def sync(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()


HERE = Place.here()
