"""Tiny LoRA adapters: written by peft next to a transformers model, or by hand for the engines' own tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.models.config import ModelConfig
from outrider.models.names import tensor_plan
from outrider.weights.adapter import ADAPTABLE

TEXT = r"(.*language_model\.|(?!.*(vision|audio)).*)"  # of a multimodal model the text tower only
LINEAR = (
    r"(layers\.\d+\.(self_attn|mlp)\.\w+_proj|per_layer_input_gate|per_layer_projection|per_layer_model_projection)"
)


def peft_model(model: Any, folder: Path, seed: int = 3, **settings: Any) -> Any:
    """The model with a random adapter on all linear modules of its text tower, which is also saved to `folder`."""
    from peft import LoraConfig, get_peft_model

    target = TEXT + r"([\w.]*\.)?" + LINEAR
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": target, **settings})
    adapted = get_peft_model(model, config).eval()
    rng = torch.Generator().manual_seed(seed)
    for name, p in adapted.named_parameters():
        if "lora_" in name:
            p.data.copy_(0.3 * torch.randn(p.shape, generator=rng))
    adapted.save_pretrained(folder)
    return adapted


def write_adapter(
    config: ModelConfig, folder: Path, seed: int = 0, rank: int = 4, size: float = 0.5, only: str = "_"
) -> Path:
    """A PEFT folder for every linear module of a configuration, or those whose name holds `only`."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, plan in tensor_plan(config).items():
        if ADAPTABLE.fullmatch(name) is None:
            continue
        for source, (rows, columns) in zip(plan.sources, plan.source_shapes):
            module = "base_model.model." + source.removesuffix(".weight")
            if only not in module.rsplit(".", 1)[1]:
                continue
            tensors[module + ".lora_A.weight"] = size * torch.randn((rank, columns), generator=rng)
            tensors[module + ".lora_B.weight"] = size * torch.randn((rows, rank), generator=rng)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "use_rslora": False,
        "bias": "none",
        "target_modules": [n for n in ("q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj") if only in n],
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "use_dora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
