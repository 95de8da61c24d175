"""A checkpoint's vision weights: found by name, checked for completeness and loaded to the device.

Those of a GGUF model lie in a file next to it, the multimodal projector (mmproj): llama.cpp's `gemma3` (SigLIP),
`gemma4v` (tower) and `gemma4uv` (the 12B's embedder). `mmproj_config` describes the pair as a Hugging Face
configuration, `read_mmproj` returns tensors under Hugging Face names and in their layout. Sizes come from the tensors'
shapes, heads and eps from the metadata. Its audio tensors are read by `audio.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import isqrt

import torch
from torch import Tensor

from ..models.config import Foreign, ForeignDict
from ..models.vision_config import VisionConfig
from ..ops.formats import BLOCKS
from ..ops.formats.gguf import dequantize
from ..types import OutriderError, require
from .files import Files, open_source, translate
from .gguf import GGUF, read
from .mapped import TensorEntry
from .repos import companion
from .source import FLOATS, tensor

PREFIXES = ("vision_tower.", "embed_vision.", "vision_embedder.", "multi_modal_projector.")
UNIFIED = "vision_embedder.multimodal_embedder."  # where newer checkpoints of transformers keep the projection
TOKENS = {"gemma3": ("<start_of_image>", "<image_soft_token>", "<end_of_image>")}
GEMMA4_TOKENS = ("<|image>", "<|image|>", "<image|>")
TOP = {
    "vision_tower.patch_embedder.input_proj": "v.patch_embd",
    "vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
    "vision_tower.std_bias": "v.std_bias", "vision_tower.std_scale": "v.std_scale",
    "embed_vision.embedding_projection": "mm.input_projection",
    "vision_embedder.patch_ln1": "v.patch_norm.1", "vision_embedder.patch_ln2": "v.patch_norm.2",
    "vision_embedder.pos_norm": "v.patch_norm.3", "vision_embedder.patch_dense": "v.patch_embd",
    "vision_embedder.pos_embedding": "v.position_embd.weight",
    "vision_tower.embeddings.patch_embedding": "v.patch_embd",
    "vision_tower.embeddings.position_embedding": "v.position_embd", "vision_tower.post_layernorm": "v.post_ln",
    "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
    "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
}  # fmt: skip
LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out", "self_attn.out_proj": "attn_out", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "input_layernorm": "ln1", "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2", "post_feedforward_layernorm": "ffn_post_norm", "layer_norm1": "ln1",
    "layer_norm2": "ln2", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
}  # fmt: skip
PROJECTORS = {"gemma3": "gemma3_text", "gemma4v": "gemma4_text", "gemma4uv": "gemma4_text"}  # kind -> model_type


def vision_config(files: Files) -> VisionConfig | None:
    """None: no vision weights. Those of a GGUF model are in the mmproj next to it, if that is supported."""
    if files.gguf is None:
        return translate(VisionConfig.from_hf, files)
    path = companion(files.path, "mmproj")
    if path is None or files.config.get("model_type") not in PROJECTORS.values():
        return None
    described = mmproj_config(read(path), files.config, files.gguf.meta.get("tokenizer.ggml.tokens"))
    return translate(VisionConfig.from_hf, replace(files, config=described))


def load_vision(
    files: Files, config: VisionConfig, device: torch.device | str, dtype: torch.dtype, dummy_seed: int | None = None
) -> dict[str, Tensor]:
    """Loads tensors by the names of `VisionConfig.tensors`; wrong tensors are errors. dummy_seed: random weights
    instead."""
    wanted = config.tensors()
    if dummy_seed is not None:
        return _dummy(wanted, device, dtype, seed=dummy_seed)
    where, stored = _stored(files, config)
    tensors: dict[str, Tensor] = {}
    for name, shape in wanted.items():
        require(name in stored, f"{where}: tensor {name} is missing from the checkpoint's vision weights")
        tensors[name] = torch.empty(shape, dtype=dtype, device=device)
        tensors[name].copy_(stored.pop(name)().view(shape))
    if stored:
        raise OutriderError(f"{where}: tensor {min(stored)} is left over: vision_config does not describe it")
    return tensors


def _stored(files: Files, config: VisionConfig) -> tuple[str, dict[str, Callable[[], Tensor]]]:
    if files.gguf is not None:
        path = companion(files.path, "mmproj")
        assert path is not None, "it was there when the configuration was read"
        return str(path), read_mmproj(read(path), config)
    source = open_source(files)
    wanted = config.tensors()
    stored: dict[str, Callable[[], Tensor]] = {}
    for full, entry in source.entries.items():
        name = full.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
        name = name.replace(UNIFIED, "embed_vision.")
        if not name.startswith(PREFIXES):
            continue
        shape = wanted.get(name)
        if shape is not None and (entry.shape not in (shape, shape or (1,)) or entry.kind not in FLOATS):
            problem = f"is {entry.kind} {list(entry.shape)}, the config asks for {list(shape)}"
            raise OutriderError(f"{source.where}: tensor {name} {problem}")
        stored[name] = partial(tensor, entry)
    return source.where, stored


def has_vision(files: Files) -> bool:
    """True if the weights exist. Some checkpoints keep the configuration without them."""
    names = () if files.gguf is not None else open_source(files).entries
    return files.gguf is not None or any(name.removeprefix("model.").startswith(PREFIXES) for name in names)


def _dummy(
    wanted: dict[str, tuple[int, ...]], device: torch.device | str, dtype: torch.dtype, seed: int
) -> dict[str, Tensor]:
    tensors = {}
    generator = torch.Generator(device=device)
    for i, (name, shape) in enumerate(wanted.items()):
        generator.manual_seed(seed * 1_000_003 + i)
        weight = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith(("_min", "_max")):
            weight.fill_(-1e4 if name.endswith("_min") else 1e4)
        elif "norm" in name or "_ln" in name or name.endswith("std_scale"):
            weight.normal_(0.0 if name.endswith("bias") else 1.0, 0.05, generator=generator)
        else:
            weight.normal_(0.0, 0.02, generator=generator)
        tensors[name] = weight
    return tensors


# ---- projectors ------------------------------------------------------------------------------------------------------
def gguf_name(name: str) -> str:
    """`vision_tower.encoder.layers.3.mlp.fc1.bias` -> `v.blk.3.ffn_up.bias`."""
    if name in TOP:
        return TOP[name]
    stem, _, tail = name.replace(".linear.", ".").rpartition(".")
    layer = stem.removeprefix("vision_tower.encoder.layers.")
    if layer == stem:
        return f"{TOP[stem]}.{tail}"
    index, _, inner = layer.partition(".")
    return f"v.blk.{index}.{LAYER[inner]}.{tail}"


def mmproj_config(file: GGUF, text: Foreign, tokens: object) -> ForeignDict:
    """The configuration of the text model `text`, whose vocabulary is `tokens`, together with this projector."""
    kind = file.meta.get("clip.vision.projector_type", file.meta.get("clip.projector_type"))
    family = PROJECTORS.get(str(kind))
    if family is None or family != text.get("model_type"):
        raise OutriderError(f"{file.path}: a {str(kind)[:40]!r} projector does not fit {text.get('model_type')}")
    spelled = TOKENS.get(str(kind), GEMMA4_TOKENS)
    known = {token: i for i, token in enumerate(tokens) if token in spelled} if isinstance(tokens, list) else {}
    if spelled[0] not in known or spelled[2] not in known:
        raise OutriderError(f"{file.path}: the model's vocabulary has no {spelled[0]}, so no text can place an image")
    boi, image, eoi = (known.get(token, len(known) + (1 << 30)) for token in spelled)
    patch = mmproj_shape(file, "v.patch_embd.weight")
    positions = mmproj_shape(file, "v.position_embd.weight")
    layers = sum(name.startswith("v.blk.") and name.endswith(".ln1.weight") for name in file.tensors)
    heads = mmproj_number(file, "attention.head_count", 1.0)
    eps = mmproj_number(file, "attention.layer_norm_epsilon", 1e-6)
    vision: ForeignDict = {"hidden_size": patch[0], "num_hidden_layers": layers, "num_attention_heads": int(heads)}
    ids = {"boi_token_id": boi, "image_token_id": image, "eoi_token_id": eoi}
    if kind == "gemma3":
        across = isqrt(positions[0])
        scale = int(mmproj_number(file, "projector.scale_factor", 4))
        wide = mmproj_shape(file, "v.blk.0.ffn_up.weight")  # its rows or its columns: older files have them swapped
        vision |= {"image_size": across * patch[-1], "patch_size": patch[-1], "layer_norm_eps": eps}
        vision |= {"intermediate_size": next((n for n in wide if n != patch[0]), patch[0])}
        indices = {key.replace("_id", "_index"): value for key, value in ids.items()}
        config = {"model_type": "gemma3", "text_config": dict(text), "vision_config": vision, **indices}
        return config | {"mm_tokens_per_image": (across // max(1, scale)) ** 2}
    pool = {"pooling_kernel_size": int(mmproj_number(file, "projector.scale_factor", 3))}
    body = dict(text)
    model_type = "gemma4_unified" if kind == "gemma4uv" else "gemma4"
    if not text.get("hidden_size_per_layer_input"):  # no key has it; only E2B and E4B are causal
        body["use_bidirectional_attention"] = "vision"
    if kind == "gemma4uv":
        side = isqrt(mmproj_shape(file, "v.patch_norm.1.weight")[0] // 3)
        patch_size = side // pool["pooling_kernel_size"]
        vision = {"mm_embed_dim": patch[0], "mm_posemb_size": positions[1], "patch_size": patch_size}
    else:
        dim = mmproj_shape(file, "v.blk.0.attn_q_norm.weight")[0]
        rows = {name: mmproj_shape(file, f"v.blk.0.{name}.weight")[0] for name in ("attn_q", "attn_k", "ffn_gate")}
        vision |= {
            "patch_size": patch[-1],
            "position_embedding_size": positions[1],
            "rms_norm_eps": eps,
            "head_dim": dim,
            "num_attention_heads": rows["attn_q"] // dim,
            "num_key_value_heads": rows["attn_k"] // dim,
            "intermediate_size": rows["ffn_gate"],
            "use_clipped_linears": "v.blk.0.attn_q.input_max" in file.tensors,
            "standardize": "v.std_bias" in file.tensors,
        }
    return {"model_type": model_type, "text_config": body, "vision_config": vision | pool, **ids}


def mmproj_shape(file: GGUF, name: str) -> tuple[int, ...]:
    entry = file.tensors.get(name)
    if entry is None or (len(entry.shape) < 2 and "norm" not in name):
        raise OutriderError(f"{file.path}: tensor {name} is missing from the projector, or is no matrix")
    return entry.shape


def mmproj_number(file: GGUF, key: str, default: float) -> float:
    value = file.meta.get(f"clip.vision.{key}", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise OutriderError(f"{file.path}: metadata clip.vision.{key} should be a number, got {str(value)[:40]}")
    return float(value)


def read_mmproj(file: GGUF, config: VisionConfig) -> dict[str, Callable[[], Tensor]]:
    """A reader for each tensor, by Hugging Face name; tensors that the file lacks are left out."""
    entries = {}
    for name, wanted in config.tensors().items():
        entry = file.tensors.get(gguf_name(name))
        if ".mlp.fc" in name and entry is not None and entry.shape[0] != wanted[0]:  # older files have them swapped
            other = {"fc1": "fc2", "fc2": "fc1"}[name.split(".")[-2]]
            entry = file.tensors.get(gguf_name(name.replace(name.split(".")[-2], other)))
        if entry is not None:
            entries[name] = _reader(file, name, entry=entry, wanted=wanted, config=config)
    return entries


def _reader(
    file: GGUF, name: str, entry: TensorEntry, wanted: tuple[int, ...], config: VisionConfig
) -> Callable[[], Tensor]:
    flipped = (2, config.positions, config.hidden) if name == "vision_embedder.pos_embedding" else wanted
    if torch.Size(entry.shape).numel() != torch.Size(wanted).numel() or entry.kind not in (*FLOATS, *BLOCKS):
        problem = f"is {entry.kind} {list(entry.shape)}, {list(wanted)} is needed"
        raise OutriderError(f"{file.path}: tensor {gguf_name(name)} {problem}")

    def read() -> Tensor:
        if entry.kind in BLOCKS:
            stored = dequantize(entry.kind, torch.from_numpy(entry.data()))
        else:
            stored = tensor(replace(entry, order=None)).float()
        stored = stored.reshape(flipped)
        if name == "vision_embedder.pos_embedding":
            return stored.transpose(0, 1)
        if name == "multi_modal_projector.mm_soft_emb_norm.weight":
            return stored - 1  # the file's norms contain the one
        side = config.patch if config.kind == "tower" else config.side
        if name.endswith(("input_proj.weight", "patch_dense.weight")):  # channel first there
            return stored.view(-1, 3, side, side).permute(0, 2, 3, 1).reshape(wanted)
        if ".patch_ln1." in name:
            return stored.view(3, side, side).permute(1, 2, 0).reshape(wanted)
        return stored

    return read
