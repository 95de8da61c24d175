"""Writes a trained drafter to disk.

An MTP drafter of a Gemma 4 target: the `gemma4_assistant` layout that transformers and vLLM load. Of other targets: the
same files under our own model_type. Block drafters: the layouts of speculators (read by vLLM and the speculators
package) and vLLM (z-lab's DFlash and SafeAILab's EAGLE-3; also read by SGLang and llama.cpp's converter). `config_dict`
and `block_dict` are the inverses of `from_hf`; what a layout cannot express is an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from stat import S_IMODE
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ..models.block_config import BlockConfig, Layout
from ..models.builtin_configs import BUILTIN_CONFIGS
from ..models.config import ASSISTANT_TYPES, DrafterConfig, RopeSpec
from ..models.names import tensor_plan
from ..types import OutriderError, bad_input, require

Json = dict[str, Any]
LAYOUTS: dict[str, dict[str, Layout]] = {  # by kind of drafter
    "speculators": {"dflash": "speculators", "eagle3": "speculators"},
    "vllm": {"dflash": "z-lab", "eagle3": "eagle3"},
}
KINDS = {"sliding": "sliding_attention", "full": "full_attention"}


def config_dict(config: DrafterConfig) -> Json:
    head = {
        "use_ordered_embeddings": bool(config.clusters),
        "num_centroids": config.clusters or 2048,
        "centroid_intermediate_top_k": config.cluster_top or 32,
    }
    extra = {
        "position_offset": config.position_offset,
        "num_assistant_tokens": config.draft_tokens,
        "target_hash": config.target_hash,
        **({} if config.weight_bits is None else {"weight_bits": config.weight_bits}),
        **({} if config.reads is None else {"reads": list(config.reads)}),
    }
    if config.model_type in ASSISTANT_TYPES:  # keys unknown to transformers stay out of its config
        extra = {} if config.target_hash is None else {"target_hash": config.target_hash}
        return {**_gemma_dict(config), **head, **extra}
    if config.gemma:
        return {**_gemma_dict(config), **head, "style": "gemma", **extra}
    alike = ("heads", "kv_heads", "head_dim", "window", "scale")
    layers = [
        {**{key: getattr(l.attn, key) for key in alike}, "intermediate": l.intermediate, "rope": asdict(l.rope)}
        for l in config.layers
    ]
    return {
        "model_type": config.model_type,
        "style": "plain",
        "backbone_hidden_size": config.backbone_hidden,
        "hidden_size": config.hidden,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "tied_to_target": config.tied_to_target,
        "taps": list(config.taps),
        "layers": layers,
        "dtype": "bfloat16",
        "hidden_activation": "silu" if config.activation == "silu" else "gelu_pytorch_tanh",
        **head,
        **extra,
    }


def _gemma_dict(config: DrafterConfig) -> Json:
    """Configuration of one of Google's assistants, with this drafter's sizes."""
    named = {"gemma4_assistant": "Gemma4", "gemma4_unified_assistant": "Gemma4Unified"}.get(config.model_type)
    theirs = BUILTIN_CONFIGS[f"google/gemma-4-{'12B' if named == 'Gemma4Unified' else 'E2B'}-it-assistant"]
    some = config.layers[0]
    by_kind = {l.kind: l for l in config.layers}
    sliding = by_kind.get("sliding", some)
    full = by_kind.get("full", some)
    text = {
        "hidden_size": config.hidden,
        "intermediate_size": some.intermediate,
        "num_hidden_layers": len(config.layers),
        "num_kv_shared_layers": len(config.layers),
        "layer_types": [KINDS[l.kind] for l in config.layers],
        "num_attention_heads": some.attn.heads,
        "head_dim": sliding.attn.head_dim,
        "num_key_value_heads": sliding.attn.kv_heads,
        "global_head_dim": full.attn.head_dim,
        "num_global_key_value_heads": full.attn.kv_heads,
        "attention_k_eq_v": full.attn.k_eq_v or full.attn.kv_heads != sliding.attn.kv_heads,
        "sliding_window": sliding.attn.window or 512,
        "rope_parameters": {KINDS[k]: rope_dict(l.rope, gemma=True) for k, l in (("sliding", sliding), ("full", full))},
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "vocab_size_per_layer_input": 0,
    }
    return {
        **theirs,
        "architectures": ["OutriderDrafter" if named is None else f"{named}AssistantForCausalLM"],
        "model_type": config.model_type,
        "backbone_hidden_size": config.backbone_hidden,
        "text_config": {**theirs["text_config"], **text},
    }


def block_dict(config: BlockConfig, verifier: str | None = None) -> Json:
    """config.json in the layout that the configuration names. verifier: name of the target."""
    if config.kind not in ("dflash", "eagle3") or config.layout == "deepseek" or config.gemma:
        raise OutriderError(f"a {config.kind} drafter of {config.layout}'s layout cannot be written")
    check_layers_alike(config)
    if config.layout == "speculators":
        return speculators_dict(config, verifier)
    return vllm_eagle3_dict(config) if config.kind == "eagle3" else zlab_dflash_dict(config)


def sliding_layers(config: BlockConfig) -> list[bool]:
    """By layer: its type is sliding_attention. DFlash's layouts write causal masks as such, too."""
    dflash = config.kind != "eagle3"
    return [
        layer.attn.window is not None or (causal and dflash)
        for layer, causal in zip(config.layers, config.causal, strict=True)
    ]


def sliding_masks(config: BlockConfig) -> set[bool]:
    """Whether the sliding layers are causal."""
    return {causal for causal, sliding in zip(config.causal, sliding_layers(config), strict=True) if sliding}


def check_layers_alike(config: BlockConfig) -> None:
    """Refuse layers whose differences no layout can express."""
    ropes = {layer.rope for layer in config.layers}
    sliding = sliding_layers(config)
    windows = {layer.attn.window for layer, slides in zip(config.layers, sliding, strict=True) if slides}
    differ = len(ropes) > 1 or len(windows) > 1
    if config.layout == "speculators":
        differ = differ or len(sliding_masks(config)) > 1 or None in windows
    if differ:
        raise OutriderError("layers with different windows, rotary frequencies or masks cannot be written")


def transformer_dict(config: BlockConfig) -> Json:
    """The fields of a plain transformer, which all layouts share."""
    layer = config.layers[0]
    body: Json = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden,
        "intermediate_size": layer.intermediate,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": layer.attn.heads,
        "num_key_value_heads": layer.attn.kv_heads,
        "head_dim": layer.attn.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu" if config.activation == "silu" else "gelu_pytorch_tanh",
        "attention_bias": config.qkv_bias,
        "max_position_embeddings": 131072,
        "rope_theta": layer.rope.theta,
        "rope_parameters": rope_dict(layer.rope, gemma=False),
        "tie_word_embeddings": False,
    }
    if config.kind == "eagle3":
        return body
    body["layer_types"] = ["sliding_attention" if sliding else "full_attention" for sliding in sliding_layers(config)]
    windows = [layer.attn.window or 0 for layer in config.layers]
    if any(windows):
        body |= {"use_sliding_window": True, "sliding_window": max(windows)}
    return body


def target_dict(config: BlockConfig) -> Json:
    """The fields about the target, which all layouts share."""
    fields: Json = {
        "draft_vocab_size": config.draft_vocab,
        "num_target_layers": config.target_layers,
        "dtype": "bfloat16",
    }
    if config.target_hidden != config.hidden:
        fields["target_hidden_size"] = config.target_hidden
    return fields


def eagle3_norms(config: BlockConfig) -> Json:
    return {name: getattr(config, name) for name in ("norm_before_residual", "norm_before_fc", "norm_output")}


def layers_read(config: BlockConfig) -> list[int]:
    """The target's layers that are read, as EAGLE-3's and speculators' layouts count them: from 1."""
    return [tap + 1 for tap in config.taps or ()]


def speculators_dict(config: BlockConfig, verifier: str | None) -> Json:
    if config.embed_scale is not None or config.output_scale != 1.0:
        raise OutriderError("scaled embeddings or logits have no place in the speculators layout")
    eagle = config.kind == "eagle3"
    method = {"proposal_type": "greedy", "speculative_tokens": 5 if eagle else config.max_tokens}
    raw: Json = {
        "architectures": ["Eagle3Speculator" if eagle else "DFlashDraftModel"],
        "speculators_model_type": config.kind,
        "speculators_config": {
            "algorithm": config.kind,
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "transformer_layer_config": transformer_dict(config),
    }
    if eagle:
        raw["eagle_aux_hidden_state_layer_ids"] = layers_read(config)
        raw |= eagle3_norms(config)
    else:
        raw["aux_hidden_state_layer_ids"] = layers_read(config)
        raw["block_size"] = config.block
        raw["mask_token_id"] = config.mask_id
        raw["sample_from_anchor"] = config.from_anchor
        raw["sliding_window_non_causal"] = sliding_masks(config) == {False}
    return {**raw, **target_dict(config)}


def vllm_eagle3_dict(config: BlockConfig) -> Json:
    return {
        **transformer_dict(config),
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_aux_hidden_state_layer_ids": layers_read(config),
        "fc_norm": config.fc_norms,
        **eagle3_norms(config),
        **target_dict(config),
    }


def zlab_dflash_dict(config: BlockConfig) -> Json:
    optional = {
        "input_embedding_scale": config.embed_scale,
        "final_logit_softcapping": config.softcap,
        "output_multiplier": None if config.output_scale == 1.0 else config.output_scale,
    }
    nested: Json = {
        "mask_token_id": config.mask_id,
        "target_layer_ids": list(config.taps or ()),
        "block_size": config.block,
        **{name: value for name, value in optional.items() if value is not None},
    }
    raw: Json = {
        **transformer_dict(config),
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block,
        "dflash_config": nested,
        **{name: value for name, value in target_dict(config).items() if value is not None},
    }
    if len(set(config.causal)) == 1:
        nested["causal"] = config.causal[0]  # vLLM reads this
        raw["is_causal"] = config.causal[0]  # SGLang reads this
    return raw


def rope_dict(rope: RopeSpec, gemma: bool) -> Json:
    """Rope settings. gemma: in Gemma's layout, which has partly rotated heads but not Llama 3's frequencies."""
    partly = rope.rotated != rope.head_dim // 2
    require(gemma or not partly, "partly rotated heads cannot be written in this layout")
    require(not gemma or rope.scaling != "llama3", "rotary frequencies of Llama 3 have no place in Gemma's layout")
    if rope.scaling == "none":
        share = {"partial_rotary_factor": 2 * rope.rotated / rope.head_dim} if partly else {}
        return {"rope_type": "proportional" if partly else "default", "rope_theta": rope.theta, **share}
    parameters: Json = {"rope_type": rope.scaling, "rope_theta": rope.theta, "factor": rope.factor}
    if rope.scaling == "llama3":
        parameters |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        parameters["original_max_position_embeddings"] = rope.original_context
    return parameters


def save_drafter(
    folder: Path,
    config: DrafterConfig | BlockConfig,
    weights: Mapping[str, Tensor],
    provenance: Mapping[str, Any] = {},
    card: str = "",
) -> None:
    """Writes config.json, generation_config.json and model.safetensors (and provenance.json, README.md). The weights
    file is replaced last and as a whole, so a full disk leaves the previous files."""
    tensors: dict[str, Tensor] = {}
    for name, plan in tensor_plan(config).items():
        tensor = weights[name].detach().cpu()
        tensor = tensor.long() if plan.role == "index" else tensor.bfloat16()
        pieces = tensor.split(list(plan.parts)) if plan.parts else (tensor,)
        for source, piece in zip(plan.sources, pieces, strict=True):
            tensors[source] = piece.contiguous().clone()
    files: dict[str, Mapping[str, Any]] = {"provenance.json": provenance}
    if isinstance(config, BlockConfig):
        files["config.json"] = block_dict(config, provenance.get("target"))
    else:
        schedule = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}
        files |= {"config.json": config_dict(config), "generation_config.json": {"is_assistant": True, **schedule}}
    write_folder(folder, tensors, files=files, card=card)


def write_folder(
    folder: Path, tensors: Mapping[str, Tensor], files: Mapping[str, Mapping[str, Any]], card: str = ""
) -> None:
    """Writes model.safetensors, JSON files and the card, omitting empty ones."""
    advice = "free some space and run the command again"
    with bad_input(OSError, lambda error: f"{folder}: the drafter cannot be written ({error}); {advice}"):
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "model.part"
        save_file(dict(tensors), part, metadata={"format": "pt"})
        for name, content in files.items():
            if content:
                write_json(folder / name, content)
        if card:
            (folder / "README.md").write_text(card, encoding="utf-8")
        # safetensors makes files readable by their owner only, but a server may run as another user
        part.chmod(S_IMODE((folder / "config.json").stat().st_mode))
        part.replace(folder / "model.safetensors")


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Writes atomically: the file is complete or unchanged."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def read_json(path: Path) -> Json:
    """The object in a JSON file; empty if the file is missing or not JSON."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
