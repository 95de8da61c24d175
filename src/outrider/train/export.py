"""Writes a trained drafter to disk.

Gemma 4 targets: the `gemma4_assistant` layout that transformers and vLLM load. Other targets: the same files under our
own model_type. `config_dict` and `DrafterConfig.from_hf` are inverses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from stat import S_IMODE

from safetensors.torch import save_file
from torch import Tensor

from ..models.block_config import BlockConfig
from ..models.config import ASSISTANT_TYPES, DrafterConfig, RopeSpec
from ..models.names import tensor_plan
from ..spec.block_load import block_plan
from ..types import OutriderError
from .block_export import Json, block_dict

KINDS = {"sliding": "sliding_attention", "full": "full_attention"}


def config_dict(config: DrafterConfig) -> Json:
    head = {
        "use_ordered_embeddings": bool(config.clusters),
        "num_centroids": config.clusters or 2048,
        "centroid_intermediate_top_k": config.cluster_top or 32,
    }
    own: Json = {
        "position_offset": config.position_offset,
        "num_assistant_tokens": config.draft_tokens,
        "target_hash": config.target_hash,
    }
    if config.weight_bits is not None:
        own["weight_bits"] = config.weight_bits
    if config.reads is not None:
        own["reads"] = list(config.reads)
    if not config.gemma:
        layers = [
            {
                "heads": l.attn.heads,
                "kv_heads": l.attn.kv_heads,
                "head_dim": l.attn.head_dim,
                "window": l.attn.window,
                "scale": l.attn.scale,
                "intermediate": l.intermediate,
                "rope": asdict(l.rope),
            }
            for l in config.layers
        ]
        return {
            "model_type": config.model_type,
            "style": config.style,
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
            **own,
        }
    by_kind = {l.kind: l for l in config.layers}
    some = config.layers[0]
    sliding, full = by_kind.get("sliding", some), by_kind.get("full", some)
    text = {
        "model_type": "gemma4_unified_text" if "unified" in config.model_type else "gemma4_text",
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
        "rope_parameters": {KINDS[k]: rope_dict(l.rope) for k, l in (("sliding", sliding), ("full", full))},
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "final_logit_softcapping": None,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    }
    if "unified" in config.model_type:
        text = {
            k: v
            for k, v in text.items()
            if k not in ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block")
        }
    names = {
        "gemma4_assistant": "Gemma4AssistantForCausalLM",
        "gemma4_unified_assistant": "Gemma4UnifiedAssistantForCausalLM",
    }
    raw = {"model_type": config.model_type, "backbone_hidden_size": config.backbone_hidden, "text_config": text, **head}
    raw |= {
        "architectures": [names.get(config.model_type, "OutriderDrafter")],
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    if config.model_type in ASSISTANT_TYPES:  # keys unknown to transformers stay out of its config
        raw |= {k: own[k] for k in ("target_hash",) if own[k] is not None}
        return raw
    return {**raw, "style": "gemma", **own}


def rope_dict(rope: RopeSpec) -> Json:
    if rope.scaling == "linear":
        return {"rope_type": "linear", "rope_theta": rope.theta, "factor": rope.factor}
    if rope.scaling == "llama3":
        raise OutriderError("rotary frequencies of Llama 3 have no place in Gemma's layout")
    if rope.rotated == rope.head_dim // 2:
        return {"rope_type": "default", "rope_theta": rope.theta}
    return {
        "rope_type": "proportional",
        "rope_theta": rope.theta,
        "partial_rotary_factor": 2 * rope.rotated / rope.head_dim,
    }


def save_drafter(
    folder: Path,
    config: DrafterConfig | BlockConfig,
    weights: Mapping[str, Tensor],
    provenance: Mapping[str, object] | None = None,
    card: str = "",
) -> None:
    """config.json, generation_config.json, model.safetensors (and provenance.json, README.md). The weights file is
    replaced last and whole, so that a full disk leaves what was there."""
    tensors: dict[str, Tensor] = {}
    plans = block_plan(config, ()) if isinstance(config, BlockConfig) else tensor_plan(config)
    for name, plan in plans.items():
        tensor = weights[name].detach().cpu()
        tensor = tensor.long() if plan.role == "index" else tensor.bfloat16()
        pieces = tensor.split(list(plan.parts)) if plan.parts else (tensor,)
        for source, piece in zip(plan.sources, pieces, strict=True):
            tensors[source] = piece.contiguous().clone()
    generation = {"is_assistant": True, "num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}
    files: dict[str, Mapping[str, object] | str] = {"provenance.json": provenance or {}, "README.md": card}
    if isinstance(config, BlockConfig):
        target = str(provenance["target"]) if provenance else None
        write_folder(folder, block_dict(config, target), tensors, files)
    else:
        write_folder(folder, config_dict(config), tensors, {"generation_config.json": generation, **files})


def write_folder(
    folder: Path, config: Json, tensors: Mapping[str, Tensor], others: Mapping[str, Mapping[str, object] | str] = {}
) -> None:
    """config.json, model.safetensors and other files, JSON or text; empty ones are left out."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "model.part"
        save_file(dict(tensors), part, metadata={"format": "pt"})
        write_json(folder / "config.json", config)
        for name, content in others.items():
            if isinstance(content, str) and content:
                (folder / name).write_text(content, encoding="utf-8")
            elif content:
                write_json(folder / name, dict(content))  # type: ignore[call-overload]
        # safetensors makes it readable by its owner only: a server may run as another user
        part.chmod(S_IMODE((folder / "config.json").stat().st_mode))
        part.replace(folder / "model.safetensors")
    except OSError as error:
        raise OutriderError(
            f"{folder}: the drafter cannot be written ({error}); free some space and run the command again"
        ) from None


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Atomic: the file is whole or unchanged."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def read_json(path: Path) -> Json:
    """Empty if there is no such file, or no JSON in it."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
