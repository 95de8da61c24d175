"""Writes block drafters in the layouts that other engines read: speculators' (read by vLLM and the speculators package)
and vLLM's own (z-lab's DFlash and SafeAILab's EAGLE-3; also read by SGLang and llama.cpp's converter).

`block_dict` is the inverse of `BlockConfig.from_hf` for what both layouts can express; anything else is an error that
names it.
"""

from __future__ import annotations

from typing import Any

from ..models.block_config import BlockConfig, Layout
from ..models.config import RopeSpec
from ..types import OutriderError

Json = dict[str, Any]
LAYOUTS: dict[str, dict[str, Layout]] = {  # by kind of drafter
    "speculators": {"dflash": "speculators", "eagle3": "speculators"},
    "vllm": {"dflash": "z-lab", "eagle3": "eagle3"},
}


def block_dict(config: BlockConfig, verifier: str | None = None) -> Json:
    """config.json in the layout that the configuration names. verifier: name of the target."""
    if config.kind not in ("dflash", "eagle3") or config.layout == "deepseek" or config.gemma:
        raise OutriderError(f"a {config.kind} drafter of {config.layout}'s layout cannot be written")
    some, taps, eagle = config.layers[0], list(config.taps or ()), config.kind == "eagle3"
    windows = [layer.attn.window for layer in config.layers]
    ropes = {layer.rope for layer in config.layers}
    sliding = [w is not None or (c and not eagle) for w, c in zip(windows, config.causal, strict=True)]
    flags = {causal for causal, near in zip(config.causal, sliding, strict=True) if near}
    given = {w for w, near in zip(windows, sliding, strict=True) if near}
    unsaid = len(given) > 1 or (config.layout == "speculators" and (len(flags) > 1 or None in given))
    if len(ropes) > 1 or unsaid:
        raise OutriderError("layers with different windows, rotary frequencies or masks cannot be written")
    body: Json = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden,
        "intermediate_size": some.intermediate,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": some.attn.heads,
        "num_key_value_heads": some.attn.kv_heads,
        "head_dim": some.attn.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu" if config.activation == "silu" else "gelu_pytorch_tanh",
        "attention_bias": config.qkv_bias,
        "max_position_embeddings": 131072,
        "rope_theta": some.rope.theta,
        "rope_parameters": rope_dict(some.rope),
        "tie_word_embeddings": False,
    }
    if not eagle:
        body["layer_types"] = ["sliding_attention" if near else "full_attention" for near in sliding]
        body |= {"use_sliding_window": True, "sliding_window": max(w or 0 for w in windows)} if any(windows) else {}
    norms = {name: getattr(config, name) for name in ("norm_before_residual", "norm_before_fc", "norm_output") if eagle}
    drafted = {"draft_vocab_size": config.draft_vocab, "num_target_layers": config.target_layers, "dtype": "bfloat16"}
    if config.target_hidden != config.hidden:
        drafted["target_hidden_size"] = config.target_hidden
    if config.layout == "speculators":
        if config.embed_scale is not None or config.output_scale != 1.0:
            raise OutriderError("scaled embeddings or logits have no place in the speculators layout")
        key = "eagle_aux_hidden_state_layer_ids" if eagle else "aux_hidden_state_layer_ids"
        own: Json = {} if eagle else {
            "block_size": config.block, "mask_token_id": config.mask_id, "sample_from_anchor": config.from_anchor,
            "sliding_window_non_causal": flags == {False},
        }  # fmt: skip
        method = {"proposal_type": "greedy", "speculative_tokens": 5 if eagle else config.max_tokens}
        return {
            "architectures": ["Eagle3Speculator" if eagle else "DFlashDraftModel"],
            "speculators_model_type": config.kind,
            "speculators_config": {
                "algorithm": config.kind,
                "proposal_methods": [method],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": verifier, "architectures": []},
            },
            "transformer_layer_config": body,
            key: [tap + 1 for tap in taps],
            **own,
            **norms,
            **drafted,
        }
    if eagle:
        ids = {"eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in taps], "fc_norm": config.fc_norms}
        return {**body, "architectures": ["LlamaForCausalLMEagle3"], **ids, **norms, **drafted}
    nested: Json = {"mask_token_id": config.mask_id, "target_layer_ids": taps, "block_size": config.block}
    if config.embed_scale is not None:
        nested["input_embedding_scale"] = config.embed_scale
    if config.output_scale != 1.0:
        nested["output_multiplier"] = config.output_scale
    if config.softcap is not None:
        nested["final_logit_softcapping"] = config.softcap
    top: Json = {"architectures": ["DFlashDraftModel"], "block_size": config.block, "dflash_config": nested}
    if len(set(config.causal)) == 1:  # vLLM reads the one, SGLang the other
        nested["causal"] = top["is_causal"] = config.causal[0]
    return {**body, **top, **{k: v for k, v in drafted.items() if v is not None}}


def rope_dict(rope: RopeSpec) -> Json:
    if rope.rotated != rope.head_dim // 2:
        raise OutriderError("partly rotated heads cannot be written in this layout")
    if rope.scaling == "none":
        return {"rope_type": "default", "rope_theta": rope.theta}
    made: Json = {"rope_type": rope.scaling, "rope_theta": rope.theta, "factor": rope.factor}
    if rope.scaling == "llama3":
        made |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        made["original_max_position_embeddings"] = rope.original_context
    return made
