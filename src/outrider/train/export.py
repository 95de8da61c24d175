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
    some = config.layers[0]
    taps = list(config.taps or ())
    eagle = config.kind == "eagle3"
    windows = [layer.attn.window for layer in config.layers]
    ropes = {layer.rope for layer in config.layers}
    sliding = [w is not None or (c and not eagle) for w, c in zip(windows, config.causal, strict=True)]
    flags = {causal for causal, near in zip(config.causal, sliding, strict=True) if near}
    sliding_windows = {w for w, near in zip(windows, sliding, strict=True) if near}
    mixed_layers = len(ropes) > 1 or len(sliding_windows) > 1
    if config.layout == "speculators":
        mixed_layers = mixed_layers or len(flags) > 1 or None in sliding_windows
    if mixed_layers:
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
        "rope_parameters": rope_dict(some.rope, gemma=False),
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
        extra: Json = {} if eagle else {
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
            **extra,
            **norms,
            **drafted,
        }
    if eagle:
        ids = {"eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in taps], "fc_norm": config.fc_norms}
        return {**body, "architectures": ["LlamaForCausalLMEagle3"], **ids, **norms, **drafted}
    nested: Json = {"mask_token_id": config.mask_id, "target_layer_ids": taps, "block_size": config.block}
    scales = {"input_embedding_scale": config.embed_scale, "final_logit_softcapping": config.softcap}
    scales["output_multiplier"] = None if config.output_scale == 1.0 else config.output_scale
    nested |= {k: v for k, v in scales.items() if v is not None}
    top: Json = {"architectures": ["DFlashDraftModel"], "block_size": config.block, "dflash_config": nested}
    if len(set(config.causal)) == 1:  # the first is read by vLLM, the second by SGLang
        nested["causal"] = top["is_causal"] = config.causal[0]
    return {**body, **top, **{k: v for k, v in drafted.items() if v is not None}}


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
