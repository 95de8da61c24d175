"""Tiny models that see: Gemma 4's tower with clipped linears and a causal mask (E2B), a tower with standardised output
and images that see themselves (31B), the unified embedder (12B), to all of which the drafters of `tiny.assistant` fit,
and Gemma 3 with SigLIP, whose images see themselves on all layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tests import tiny
from torch import Tensor
from transformers import PreTrainedModel

from outrider.models.image_processing import pixels
from outrider.models.vision import patches, unit_range
from outrider.models.vision_config import VisionConfig

GEMMA4 = ("gemma4_e2b", "gemma4_31b", "gemma4_12b")
KINDS = (*GEMMA4, "gemma3_4b")
SPELLED = {"gemma3_4b": ("<start_of_image>", "<image_soft_token>", "<end_of_image>")}
# behind the byte-level tokenizer's 262
BOI = 262
IMAGE = 263
EOI = 264
EDGE_TEXTS: dict[str, dict[str, Any]] = {
    "gemma4_e2b": tiny._EDGE | dict(num_kv_shared_layers=3, use_double_wide_mlp=True),
    "gemma4_e4b": tiny._EDGE | dict(num_key_value_heads=2, num_kv_shared_layers=2, layer_types=[tiny._S, tiny._F] * 3),
}
IDS = dict(boi_token_id=BOI, image_token_id=IMAGE, eoi_token_id=EOI, video_token_id=265, audio_token_id=266)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|image|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def target(kind: str, seed: int = 0) -> PreTrainedModel:
    t = transformers
    if kind == "gemma3_4b":
        text = tiny._config(kind).text_config
        vision = dict(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=56,
            patch_size=7, vision_use_head=False,
        )  # fmt: skip
        ids = dict(boi_token_index=BOI, image_token_index=IMAGE, eoi_token_index=EOI, mm_tokens_per_image=16)
        config: Any = t.Gemma3Config(text_config=text.to_dict(), vision_config=vision, **ids)
    elif kind == "gemma4_12b":
        text = {k: v for k, v in tiny._K_EQ_V.items() if "per_layer" not in k} | dict(intermediate_size=40)
        text |= dict(use_bidirectional_attention="vision")
        vision = dict(patch_size=2, pooling_kernel_size=3, mm_embed_dim=16, mm_posemb_size=128, output_proj_dims=16)
        config = t.Gemma4UnifiedConfig(
            text_config=t.Gemma4UnifiedTextConfig(**text).to_dict(), vision_config=vision, audio_config=None, **IDS
        )
    else:
        edge = kind in EDGE_TEXTS
        text = EDGE_TEXTS.get(kind) or tiny._K_EQ_V | dict(use_bidirectional_attention="vision")
        vision = dict(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            head_dim=16, patch_size=4, position_embedding_size=256, use_clipped_linears=edge, standardize=not edge,
        )  # fmt: skip
        config = t.Gemma4Config(
            text_config=t.Gemma4TextConfig(**text).to_dict(), vision_config=vision, audio_config=None, **IDS
        )
    model = tiny._finish(t.AutoModelForImageTextToText.from_config(config, attn_implementation="eager"), seed)
    for name, buffer in model.named_buffers():
        if name.endswith(("_min", "_max")):  # narrow enough to clip
            buffer.fill_(-1.5 if name.endswith("_min") else 1.25)
    return model


def write(kind: str, folder: Path, seed: int = 0) -> Path:
    tiny.write(target(kind, seed), folder)
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = SPELLED.get(kind, ("<|image>", "<|image|>", "<image|>"))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in names])
    assert tokenizer.token_to_id(names[1]) == IMAGE
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template(kind)}))
    return folder


def template(kind: str) -> str:
    return TEMPLATE.replace("<|image|>", placeholder(kind))


def placeholder(kind: str) -> str:
    """The text in place of an image."""
    return SPELLED[kind][0] if kind in SPELLED else "<|image|>"


def decoded(config: VisionConfig, image: Image.Image, budget: int) -> np.ndarray:
    """The pixels that the vision model reads."""
    return pixels(image, *((0, config.square) if config.square else (budget, config.side)))


def model_input(config: VisionConfig, made: np.ndarray) -> tuple[Tensor, Tensor]:
    """Inputs of transformers' model for one image: values and positions, unpadded; for SigLIP the image itself."""
    if config.kind == "siglip":
        values = (unit_range(torch.from_numpy(made.copy())) - 0.5) / 0.5
        return values.permute(2, 0, 1)[None], torch.empty(1, 0)
    side = config.side if config.kind == "unified" else config.patch
    values, positions = patches(unit_range(torch.from_numpy(made.copy())), side)
    return values[None], positions[None]


def soft_tokens(model: PreTrainedModel, config: VisionConfig, made: np.ndarray) -> Tensor:
    with torch.no_grad():
        inputs = model_input(config, made)[: 1 if config.kind == "siglip" else 2]
        out = model.get_image_features(*inputs, return_dict=True).pooler_output
    return (out[0] if isinstance(out, (list, tuple)) else out).reshape(-1, config.text_hidden)


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR)
