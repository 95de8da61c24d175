"""A checkpoint's audio weights: found by name, checked for completeness and loaded to the device.

Those of a GGUF model lie in the multimodal projector (mmproj) next to it: llama.cpp's `gemma4a` (conformer) and
`gemma4ua` (the 12B's projection). Ollama's converter writes the same tensors under other names. Every source gives
`per_dim_scale` with softplus applied, as GGUF files store it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.audio_config import AudioConfig
from ..models.config import Foreign, ForeignDict
from ..ops.formats import BLOCKS
from ..ops.formats.gguf import dequantize
from ..types import OutriderError, require
from .files import Files, open_source, translate
from .gguf import GGUF, read
from .mapped import TensorEntry
from .repos import companion
from .source import FLOATS, tensor

PREFIXES = ("audio_tower.", "embed_audio.")
RENAMED = {".conv_0.": ".layer0.", ".conv_1.": ".layer1.", "audio_tower.conformer.": "audio_tower.layers."}
TOKENS = ("<|audio>", "<|audio|>", "<audio|>")
PROJECTORS = {"gemma4a": "gemma4", "gemma4ua": "gemma4_unified"}  # kind -> model_type
WITHOUT = "--no-audio leaves the audio weights out"
TOP_NAMES = {
    "audio_tower.subsample_conv_projection.layer0.conv": "a.conv1d.0",
    "audio_tower.subsample_conv_projection.layer0.norm": "a.conv1d.0.norm",
    "audio_tower.subsample_conv_projection.layer1.conv": "a.conv1d.1",
    "audio_tower.subsample_conv_projection.layer1.norm": "a.conv1d.1.norm",
    "audio_tower.subsample_conv_projection.input_proj_linear": "a.input_projection",
    "audio_tower.output_proj": "a.pre_encode.out",
    "embed_audio.embedding_projection": "mm.a.input_projection",
}
LAYER_NAMES = {
    "feed_forward1.pre_layer_norm": "ffn_norm", "feed_forward1.ffw_layer_1": "ffn_up",
    "feed_forward1.ffw_layer_2": "ffn_down", "feed_forward1.post_layer_norm": "ffn_post_norm",
    "feed_forward2.pre_layer_norm": "ffn_norm_1", "feed_forward2.ffw_layer_1": "ffn_up_1",
    "feed_forward2.ffw_layer_2": "ffn_down_1", "feed_forward2.post_layer_norm": "ffn_post_norm_1",
    "norm_pre_attn": "attn_pre_norm", "norm_post_attn": "attn_post_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.post": "attn_out",
    "self_attn.relative_k_proj": "attn_k_rel", "lconv1d.linear_start": "conv_pw1",
    "lconv1d.depthwise_conv1d": "conv_dw", "lconv1d.linear_end": "conv_pw2", "norm_out": "ln2",
    # the files' names of these two are swapped
    "lconv1d.pre_layer_norm": "conv_norm", "lconv1d.conv_norm": "norm_conv",
}  # fmt: skip
# Ollama's converter
OLLAMA_MARK = "mm.a.fc.weight"
OLLAMA_TOP_NAMES = {
    "audio_tower.subsample_conv_projection.input_proj_linear": "a.pre_encode.out",
    "audio_tower.output_proj": "mm.a.fc",
}
OLLAMA_LAYER_NAMES = {
    "norm_pre_attn": "ln1", "norm_post_attn": "ln2", "norm_out": "layer_pre_norm",
    "self_attn.relative_k_proj": "linear_pos",
}  # fmt: skip


def audio_config(files: Files) -> AudioConfig | None:
    """None: no audio encoder. That of a GGUF model is in the mmproj next to it."""
    if files.gguf is None:
        return translate(AudioConfig.from_hf, files)
    path = companion(files.path, "mmproj")
    if path is None:
        return None
    described = mmproj_audio_config(read(path), files.config, files.gguf.meta.get("tokenizer.ggml.tokens"))
    return None if described is None else translate(AudioConfig.from_hf, replace(files, config=described))


def has_audio(files: Files) -> bool:
    """True if the weights exist. Some checkpoints keep the configuration without them."""
    if files.gguf is not None:
        return True  # the configuration was made from the tensors
    return any(name.removeprefix("model.").startswith(PREFIXES) for name in open_source(files).entries)


def load_audio(
    files: Files, config: AudioConfig, device: torch.device | str, dtype: torch.dtype, dummy_seed: int | None = None
) -> dict[str, Tensor]:
    """Loads tensors by the names of `AudioConfig.tensors`; wrong tensors are errors. dummy_seed: random weights
    instead."""
    shapes = config.tensors()
    if dummy_seed is not None:
        return _dummy(shapes, device, dtype, seed=dummy_seed)
    if files.gguf is not None:
        path = companion(files.path, "mmproj")
        assert path is not None, "it was there when the configuration was read"
        where = str(path)
        readers = mmproj_readers(read(path), config)
    else:
        where, readers = _safetensors_readers(files, config)
    weights: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        require(name in readers, f"{where}: tensor {name} is missing from the checkpoint's audio weights; {WITHOUT}")
        weight_dtype = torch.float32 if name.endswith("per_dim_scale") else dtype
        weights[name] = torch.empty(shape, dtype=weight_dtype, device=device)
        weights[name].copy_(readers.pop(name)().view(shape))
    if readers:
        raise OutriderError(
            f"{where}: tensor {min(readers)} is left over: audio_config does not describe it; {WITHOUT}"
        )
    return weights


def _safetensors_readers(files: Files, config: AudioConfig) -> tuple[str, dict[str, Callable[[], Tensor]]]:
    """Path of the safetensors, and a reader for each audio tensor."""
    source = open_source(files)
    shapes = config.tensors()
    readers: dict[str, Callable[[], Tensor]] = {}
    for full, entry in source.entries.items():
        name = full.removeprefix("model.")
        if not name.startswith(PREFIXES):
            continue
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        shape = shapes.get(name)
        if shape is not None and (entry.shape not in (shape, shape or (1,)) or entry.kind not in FLOATS):
            problem = f"is {entry.kind} {list(entry.shape)}, the config asks for {list(shape)}"
            raise OutriderError(f"{source.where}: tensor {name} {problem}; {WITHOUT}")
        readers[name] = partial(_softplus, entry) if name.endswith("per_dim_scale") else partial(tensor, entry)
    return source.where, readers


def _softplus(entry: TensorEntry) -> Tensor:
    return F.softplus(tensor(entry).float())


def _dummy(
    shapes: dict[str, tuple[int, ...]], device: torch.device | str, dtype: torch.dtype, seed: int
) -> dict[str, Tensor]:
    weights = {}
    generator = torch.Generator(device=device)
    for i, (name, shape) in enumerate(shapes.items()):
        generator.manual_seed(seed * 1_000_003 + 500_009 + i)
        weight = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith(("_min", "_max")):
            weight.fill_(-1e4 if name.endswith("_min") else 1e4)
        elif "norm" in name or name.endswith("per_dim_scale"):
            weight.normal_(1.0, 0.05, generator=generator)
        else:
            weight.normal_(0.0, 0.02, generator=generator)
        weights[name] = weight
    return weights


# ---- projectors ------------------------------------------------------------------------------------------------------
def audio_gguf_name(name: str, ollama: bool) -> str:
    """`audio_tower.layers.3.lconv1d.linear_end.linear.weight` -> `a.blk.3.conv_pw2.weight`."""
    top = TOP_NAMES | (OLLAMA_TOP_NAMES if ollama else {})
    in_layer = LAYER_NAMES | (OLLAMA_LAYER_NAMES if ollama else {})
    if name.endswith("per_dim_scale"):
        return f"a.blk.{name.split('.')[2]}.per_dim_scale.weight"
    stem, _, tail = name.replace(".linear.", ".").rpartition(".")
    layer = stem.removeprefix("audio_tower.layers.")
    if layer == stem:
        return f"{top[stem]}.{tail}"
    index, _, module = layer.partition(".")
    return f"a.blk.{index}.{in_layer[module]}.{tail}"


def mmproj_audio_config(file: GGUF, text: Foreign, tokens: object) -> ForeignDict | None:
    """The configuration of the text model `text`, whose vocabulary is `tokens`, with this projector's audio encoder.
    None: it has none."""
    kind = str(file.meta.get("clip.audio.projector_type", ""))
    if "mm.a.input_projection.weight" not in file.tensors or text.get("model_type") != "gemma4_text":
        return None
    if kind not in PROJECTORS:
        raise OutriderError(f"{file.path}: a {kind[:40]!r} audio projector cannot be read; {WITHOUT}")
    ids = {token: i for i, token in enumerate(tokens) if token in TOKENS} if isinstance(tokens, list) else {}
    if len(ids) < len(TOKENS):
        raise OutriderError(f"{file.path}: the model's vocabulary has no {TOKENS[0]}, so no text can place sound")
    boa, audio_id, eoa = (ids[token] for token in TOKENS)
    shared = {"audio_token_id": audio_id, "boa_token_id": boa, "eoa_token_index": eoa, "text_config": dict(text)}
    projection = _shape(file, "mm.a.input_projection.weight")
    if kind == "gemma4ua":
        return {"model_type": PROJECTORS[kind], "audio_config": {"audio_embed_dim": projection[1]}, **shared}
    hidden = _shape(file, "a.blk.0.attn_q.weight")[0]
    head_dim = _shape(file, "a.blk.0.per_dim_scale.weight")[-1]
    layers = {name.split(".")[2] for name in file.tensors if name.startswith("a.blk.")}
    audio: ForeignDict = {
        "hidden_size": hidden,
        "num_hidden_layers": len(layers),
        "num_attention_heads": hidden // max(1, head_dim),
        "subsampling_conv_channels": [_shape(file, f"a.conv1d.{i}.weight")[0] for i in (0, 1)],
        "output_proj_dims": projection[1],
        "conv_kernel_size": _shape(file, "a.blk.0.conv_dw.weight")[-1],
        "use_clipped_linears": "a.blk.0.attn_q.input_max" in file.tensors,
    }
    return {"model_type": PROJECTORS[kind], "audio_config": audio, **shared}


def _shape(file: GGUF, name: str) -> tuple[int, ...]:
    entry = file.tensors.get(name)
    if entry is None or (len(entry.shape) < 2 and "per_dim_scale" not in name):
        raise OutriderError(f"{file.path}: tensor {name} is missing from the projector, or is no matrix; {WITHOUT}")
    return entry.shape


def mmproj_readers(file: GGUF, config: AudioConfig) -> dict[str, Callable[[], Tensor]]:
    """A reader for each tensor, by Hugging Face name; tensors that the file lacks are left out. The file's audio
    tensors without such a name keep theirs."""
    ollama = OLLAMA_MARK in file.tensors
    readers: dict[str, Callable[[], Tensor]] = {}
    unmatched = {name for name in file.tensors if name.startswith(("a.", "mm.a."))}
    for name, shape in config.tensors().items():
        stored_name = audio_gguf_name(name, ollama)
        entry = file.tensors.get(stored_name)
        if entry is None:
            continue
        unmatched.remove(stored_name)
        if torch.Size(entry.shape).numel() != torch.Size(shape).numel() or entry.kind not in (*FLOATS, *BLOCKS):
            problem = f"is {entry.kind} {list(entry.shape)}, {list(shape)} is needed"
            raise OutriderError(f"{file.path}: tensor {stored_name} {problem}; {WITHOUT}")
        readers[name] = partial(_float32, entry)
    return readers | {name: partial(_float32, file.tensors[name]) for name in unmatched}


def _float32(entry: TensorEntry) -> Tensor:
    if entry.kind in BLOCKS:
        return dequantize(entry.kind, torch.from_numpy(entry.data()))
    return tensor(replace(entry, order=None)).float()
