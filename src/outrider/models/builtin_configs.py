"""The config.json contents of the Gemma 4 family and its MTP drafters (assistants), from assets/configs.

`BUILTIN_CONFIGS[hugging_face_id]` is a dict that `ModelConfig.from_hf` or `DrafterConfig.from_hf` reads: enough to
inspect a model, to predict its speed, or to run it on dummy weights before anything is downloaded. A downloaded
config.json wins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from .config import Foreign, ForeignDict

FOLDER = Path(__file__).resolve().parent.parent / "assets" / "configs"
SIZES = ("E2B", "E4B", "12B", "26B-A4B", "31B")


def _w4a16(config: Foreign) -> ForeignDict:
    """The QAT checkpoints for vLLM: int4 in groups of 32, embeddings, head and towers in bfloat16."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    how = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return {**config, "quantization_config": how | {"ignore": ["lm_head"]}}


def _all() -> dict[str, Foreign]:
    """All built-in configurations, with Google's QAT checkpoints: bfloat16 values of Q4_0, and W4A16 (no mixture)."""
    configs: dict[str, Foreign] = {}
    for size in SIZES:
        base = f"gemma-4-{size}-it"
        target, assistant = (json.loads((FOLDER / f"{name}.json").read_text()) for name in (base, f"{base}-assistant"))
        for stem in (f"google/{base}", f"google/{base}-qat-q4_0-unquantized"):
            configs |= {stem: target, f"{stem}-assistant": assistant}
        if size != "26B-A4B":
            configs[f"google/{base}-qat-w4a16-ct"] = _w4a16(target)
    return configs


BUILTIN_CONFIGS: Mapping[str, Foreign] = _all()
