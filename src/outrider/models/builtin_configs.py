"""The config.json contents of the Gemma 4 family and its MTP drafters (assistants).

`BUILTIN_CONFIGS[hugging_face_id]` is a dict that `ModelConfig.from_hf` or `DrafterConfig.from_hf` reads: enough to
inspect a model, to predict its speed, or to run it on dummy weights before anything is downloaded. A downloaded
config.json wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .config import GEMMA4_ROPE, Foreign, ForeignDict

OUTER: ForeignDict = {"tie_word_embeddings": True, "dtype": "bfloat16"}
TEXT: ForeignDict = {
    **OUTER,
    "vocab_size": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "rope_parameters": GEMMA4_ROPE,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": False,
}
SMALL_TOWER: ForeignDict = {"use_clipped_linears": True}  # of E2B and E4B; the sizes are VisionConfig's defaults
LARGE_TOWER: ForeignDict = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "standardize": True,
}
EDGE: ForeignDict = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
EXPERTS: ForeignDict = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}


class Size(NamedTuple):
    sliding: int  # sliding layers before each full one
    full: int  # full layers
    hidden: int
    intermediate: int
    heads: int
    kv: int
    global_kv: int | None  # K/V heads of full layers, where K is V
    window: int
    context: int


SIZES = {
    "E2B": Size(4, 7, 1536, 6144, 8, 1, None, 512, 131072),
    "E4B": Size(5, 7, 2560, 10240, 8, 2, None, 512, 131072),
    "12B": Size(5, 8, 3840, 15360, 16, 8, 1, 1024, 262144),
    "26B-A4B": Size(5, 5, 2816, 2112, 16, 8, 2, 1024, 262144),
    "31B": Size(5, 10, 5376, 21504, 32, 16, 4, 1024, 262144),
}
VISION = {"E2B": SMALL_TOWER, "E4B": SMALL_TOWER, "12B": {"mm_embed_dim": 3840}}  # the others: LARGE_TOWER
OWN: dict[str, ForeignDict] = {
    "E2B": {"num_kv_shared_layers": 20, "use_double_wide_mlp": True, **EDGE},
    "E4B": {"num_kv_shared_layers": 18, **EDGE},
    "26B-A4B": EXPERTS,
}


def _text(size: Size) -> ForeignDict:
    return {
        **TEXT,
        "hidden_size": size.hidden,
        "num_hidden_layers": (size.sliding + 1) * size.full,
        "layer_types": (["sliding_attention"] * size.sliding + ["full_attention"]) * size.full,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv,
        "num_global_key_value_heads": size.global_kv,
        "attention_k_eq_v": size.global_kv is not None,
        "intermediate_size": size.intermediate,
        "sliding_window": size.window,
        "max_position_embeddings": size.context,
    }


def _target(name: str) -> ForeignDict:
    kind, vision = "gemma4_unified" if name == "12B" else "gemma4", VISION.get(name, LARGE_TOWER)
    own = {"final_logit_softcapping": 30.0, "num_kv_shared_layers": 0, "eos_token_id": 1, **OWN.get(name, {})}
    if vision is not SMALL_TOWER:
        own["use_bidirectional_attention"] = "vision"
    text = {**_text(SIZES[name]), "model_type": f"{kind}_text", **own}
    return {**OUTER, "model_type": kind, "eos_token_id": [1, 106], "vision_config": vision, "text_config": text}


def _assistant(name: str) -> ForeignDict:
    """Four layers over the K/V heads and the window of its target."""
    target, small = SIZES[name], name in ("E2B", "E4B")
    size = target._replace(sliding=3, full=1, hidden=1024, intermediate=8192)
    if small:
        size = size._replace(hidden=256, intermediate=2048, heads=4)
    if name != "12B":
        size = size._replace(context=131072)
    kind = "gemma4_unified" if name == "12B" else "gemma4"
    own = {"model_type": f"{kind}_text", "final_logit_softcapping": None, "num_kv_shared_layers": 4}
    return {
        **OUTER,
        "model_type": f"{kind}_assistant",
        "text_config": {**_text(size), **own},
        "backbone_hidden_size": target.hidden,
        "use_ordered_embeddings": small,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
    }


def _w4a16(config: Foreign) -> ForeignDict:
    """The QAT checkpoints for vLLM: int4 in groups of 32, embeddings, head and towers in bfloat16."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    how = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return {**config, "quantization_config": how | {"ignore": ["lm_head"]}}


def _all() -> dict[str, Foreign]:
    """With Google's QAT checkpoints of the same shapes: bfloat16 values of Q4_0, and W4A16 (no mixture)."""
    found: dict[str, Foreign] = {}
    for name in SIZES:
        base, target, assistant = f"google/gemma-4-{name}-it", _target(name), _assistant(name)
        for stem in (base, f"{base}-qat-q4_0-unquantized"):
            found |= {stem: target, f"{stem}-assistant": assistant}
        if name != "26B-A4B":
            found[f"{base}-qat-w4a16-ct"] = _w4a16(target)
    return found


BUILTIN_CONFIGS: Mapping[str, Foreign] = _all()
