"""The configurations of the Gemma 4 family and its assistants, as their config.json files state them.

`KNOWN[hugging_face_id]` is a dict that `ModelConfig.from_hf` or `DrafterConfig.from_hf` reads: enough to inspect a
model, to predict its speed, or to run it on dummy weights before anything is downloaded. A downloaded config.json wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import GEMMA4_ROPE, Foreign, ForeignDict

_FAMILY = {
    "vocab_size": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "rope_parameters": GEMMA4_ROPE,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": False,
}


SMALL_TOWER: ForeignDict = {"use_clipped_linears": True}  # of E2B and E4B; the sizes are VisionConfig's defaults
LARGE_TOWER: ForeignDict = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "head_dim": 72, "standardize": True,
}  # fmt: skip
UNIFIED: ForeignDict = {"mm_embed_dim": 3840}


def _text(
    model_type: str,
    *,
    hidden: int,
    sliding: int,
    blocks: int,
    heads: int,
    kv: int,
    global_kv: int | None,
    intermediate: int,
    window: int,
    context: int,
    **rest: object,
) -> ForeignDict:
    """What targets and assistants state alike. sliding: how many sliding layers stand before each of the `blocks` full
    ones."""
    return {
        **_FAMILY,
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": (sliding + 1) * blocks,
        "layer_types": (["sliding_attention"] * sliding + ["full_attention"]) * blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "num_global_key_value_heads": global_kv,
        "attention_k_eq_v": global_kv is not None,
        "intermediate_size": intermediate,
        "sliding_window": window,
        "max_position_embeddings": context,
        **rest,
    }


def _target(model_type: str, vision: ForeignDict, **text: Any) -> ForeignDict:
    own = {"final_logit_softcapping": 30.0, "num_kv_shared_layers": 0, "eos_token_id": 1, **text}
    outer = {"model_type": model_type, "eos_token_id": [1, 106], "tie_word_embeddings": True, "dtype": "bfloat16"}
    if vision is not SMALL_TOWER:
        own["use_bidirectional_attention"] = "vision"
    return {**outer, "vision_config": vision, "text_config": _text(f"{model_type}_text", **own)}


def _assistant(model_type: str, *, backbone: int, clustered: bool, **text: Any) -> ForeignDict:
    own = {"sliding": 3, "blocks": 1, "final_logit_softcapping": None, "num_kv_shared_layers": 4, **text}
    return {
        "model_type": model_type,
        "text_config": _text(model_type.replace("assistant", "text"), **own),
        "backbone_hidden_size": backbone,
        "use_ordered_embeddings": clustered,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def _w4a16(config: Foreign) -> ForeignDict:
    """The QAT checkpoints for vLLM: int4 in groups of 32, embeddings, head and towers in bfloat16."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    how = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }
    return {**config, "quantization_config": how}


def _with_qat(known: dict[str, ForeignDict]) -> dict[str, ForeignDict]:
    """Google's QAT checkpoints have the shapes of the others: bfloat16 values that survive Q4_0, and for all but the
    mixture W4A16."""
    more = {}
    for name, config in known.items():
        base, _, assistant = name.partition("-it")
        more[f"{base}-it-qat-q4_0-unquantized{assistant}"] = config
        if not assistant and "26B" not in name:
            more[f"{base}-it-qat-w4a16-ct"] = _w4a16(config)
    return known | more


BUILTIN_CONFIGS: Mapping[str, Foreign] = _with_qat({
    "google/gemma-4-E2B-it": _target(
        "gemma4", SMALL_TOWER, hidden=1536, sliding=4, blocks=7, heads=8, kv=1, global_kv=None, intermediate=6144,
        window=512, context=131072,
        num_kv_shared_layers=20, use_double_wide_mlp=True, hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262144,
    ),
    "google/gemma-4-E4B-it": _target(
        "gemma4", SMALL_TOWER, hidden=2560, sliding=5, blocks=7, heads=8, kv=2, global_kv=None, intermediate=10240,
        window=512, context=131072,
        num_kv_shared_layers=18, hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144,
    ),
    "google/gemma-4-12B-it": _target(
        "gemma4_unified", UNIFIED, hidden=3840, sliding=5, blocks=8, heads=16, kv=8, global_kv=1, intermediate=15360,
        window=1024, context=262144,
    ),
    "google/gemma-4-26B-A4B-it": _target(
        "gemma4", LARGE_TOWER, hidden=2816, sliding=5, blocks=5, heads=16, kv=8, global_kv=2, intermediate=2112,
        window=1024, context=262144,
        enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
    ),
    "google/gemma-4-31B-it": _target(
        "gemma4", LARGE_TOWER, hidden=5376, sliding=5, blocks=10, heads=32, kv=16, global_kv=4, intermediate=21504,
        window=1024, context=262144,
    ),
    "google/gemma-4-E2B-it-assistant": _assistant(
        "gemma4_assistant", backbone=1536, hidden=256, intermediate=2048, heads=4, kv=1, global_kv=None, window=512,
        context=131072,
        clustered=True,
    ),
    "google/gemma-4-E4B-it-assistant": _assistant(
        "gemma4_assistant", backbone=2560, hidden=256, intermediate=2048, heads=4, kv=2, global_kv=None, window=512,
        context=131072,
        clustered=True,
    ),
    "google/gemma-4-12B-it-assistant": _assistant(
        "gemma4_unified_assistant", backbone=3840, hidden=1024, intermediate=8192, heads=16, kv=8, global_kv=1,
        window=1024,
        context=262144, clustered=False,
    ),
    "google/gemma-4-26B-A4B-it-assistant": _assistant(
        "gemma4_assistant", backbone=2816, hidden=1024, intermediate=8192, heads=16, kv=8, global_kv=2, window=1024,
        context=131072,
        clustered=False,
    ),
    "google/gemma-4-31B-it-assistant": _assistant(
        "gemma4_assistant", backbone=5376, hidden=1024, intermediate=8192, heads=32, kv=16, global_kv=4, window=1024,
        context=131072,
        clustered=False,
    ),
})  # fmt: skip
