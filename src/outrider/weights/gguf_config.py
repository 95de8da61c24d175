"""Translates a GGUF file's metadata and tensor names into Hugging Face's.

GGUF stores Llama's q and k rows permuted; the order that undoes it is attached to the entry. Gemma 3's norms contain
the +1. MTP drafters (llama.cpp's `gemma4-assistant`, earlier `gemma4_assistant` with `mtp.…`) and block drafters
(`dflash`, also DSpark, and `eagle3`) are files of their own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..models.config import FAMILIES, GEMMA4_ROPE, ForeignDict
from ..types import OutriderError
from .gguf import GGUF, Value
from .mapped import TensorEntry, TensorSource

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_assistant": "gemma4_assistant",
    "gemma4-assistant": "gemma4_assistant",
}
# numbers that have the same key in every architecture
NUMBERS = {
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "hidden_size": "embedding_length",
}
EXPERTS = {
    "num_experts": "expert_count",
    "top_k_experts": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>")  # chat models stop here too

TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "mtp.pre_projection": "pre_projection",
    "mtp.post_projection": "post_projection",
    "mtp.centroids": "masked_embedding.centroids",
    "nextn.pre_projection": "pre_projection",
    "nextn.post_projection": "post_projection",
    "masked_embd_centroids": "masked_embedding.centroids",
    "enc.output_norm": "hidden_norm",
    "conf_proj": "confidence_head.proj",
}
BLOCKS = ("dflash", "eagle3")
ORDERING = "masked_embedding.token_ordering"
LAYER = {
    "attn_norm": "input_layernorm", "attn_norm_2": "hidden_norm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1", "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "ffn_gate_inp": "router.proj",
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
}  # fmt: skip
WHOLE = {  # names with another ending
    "mtp.token_ordering.weight": ORDERING,
    "masked_embd_ordering": ORDERING,
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
}


def hf_name(name: str, arch: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; an unknown name stays as it is."""
    prefix = ""
    stems = TOP
    suffix = name
    if name.startswith("blk."):
        _, index, suffix = (name.split(".", 2) + ["", ""])[:3]
        norm = "pre_feedforward_layernorm" if arch.startswith("gemma") else "post_attention_layernorm"
        prefix = f"model.layers.{index}."
        stems = LAYER | {"ffn_norm": norm}
    stem, _, tail = suffix.rpartition(".")
    if suffix in WHOLE:
        return prefix + WHOLE[suffix]
    return f"{prefix}{stems[stem]}.{tail}" if stem in stems else name


def unpermute(heads: int, rows: int) -> np.ndarray:
    """The stored row of each original row: pairs (2i, 2i+1) of a head go back to (i, i + D/2)."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def source(file: GGUF, config: ForeignDict) -> TensorSource:
    entries: dict[str, TensorEntry] = {}
    for name, entry in file.tensors.items():
        if name == "rope_freqs.weight" or name.endswith(".input_scale"):  # read by `hf_config`; of rounded activations
            continue
        named = hf_name(name, file.arch)
        permuted = file.arch in ("llama", "eagle3") and named.endswith(("weight", "bias"))
        if permuted and ".self_attn." in named and named.split(".")[-2] in ("q_proj", "k_proj"):
            heads = config["num_attention_heads" if ".q_proj." in named else "num_key_value_heads"]
            if entry.shape[0] % (2 * heads):
                raise OutriderError(f"{file.path}: tensor {name} has {entry.shape[0]} rows, not for {heads} heads")
            entry = replace(entry, order=unpermute(heads, entry.shape[0]))
        entries[named] = entry
    return TensorSource(str(file.path), entries, file.header, plus_one_done=True)


class _Meta:
    """Typed reads of `arch.key`, with errors that name the key."""

    def __init__(self, file: GGUF) -> None:
        self.file = file
        self.arch = file.arch

    def get(self, key: str) -> Value | None:
        return self.file.meta.get(f"{self.arch}.{key}")

    def bad(self, key: str, what: str) -> OutriderError:
        return OutriderError(f"{self.file.path}: metadata {self.arch}.{key} {what}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e15:
            raise self.bad(key, f"should be a number, got {str(value)[:40]}")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        value = int(self.number(key, default))
        if not 0 <= value < 1 << 31:
            raise self.bad(key, f"is {value}")
        return value

    def base(self) -> ForeignDict:
        numbers: ForeignDict = {name: self.whole(key) for name, key in NUMBERS.items()}
        return numbers | {"rms_norm_eps": self.number("attention.layer_norm_rms_epsilon")}

    def per_layer(self, key: str, layers: int) -> list[int]:
        """A scalar for all layers, or an array with one value each."""
        value = self.get(key)
        if isinstance(value, np.ndarray):
            if value.shape != (layers,):
                raise self.bad(key, f"has {value.size} values for {layers} layers")
            return [int(v) for v in value]
        return [self.whole(key)] * layers


def eos_ids(file: GGUF) -> list[int]:
    ids = [file.meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    tokens = file.meta.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        ids += [i for i, token in enumerate(tokens) if token in TURN_ENDS]
    return list(dict.fromkeys(t for t in ids if type(t) is int))


def hf_config(file: GGUF) -> ForeignDict:
    if file.arch == "clip":
        raise OutriderError(f"{file.path} is a multimodal projector (mmproj), not a model: name the model's own file")
    if file.arch in BLOCKS:
        return _block(file)
    if file.arch not in ARCHITECTURES:
        raise OutriderError(
            f"{file.path}: GGUF architecture {file.arch[:40]!r} is not supported: supported are {FAMILIES}"
        )
    meta = _Meta(file)
    tensors = file.tensors
    config = meta.base()
    embedding = tensors.get("token_embd.weight")
    layers = config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    if not 1 <= layers <= 1000 or not heads or embedding is None or len(embedding.shape) != 2:
        raise OutriderError(f"{file.path}: no layers, no heads or no token_embd.weight: is this a language model?")
    config |= {
        "model_type": ARCHITECTURES[file.arch],
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": meta.whole("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": file.meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_ids(file),
    }
    if not file.arch.startswith("gemma4"):
        return config | _plain(meta, heads, layers, hidden=config["hidden_size"])
    config |= _gemma4(meta, layers)
    return config if file.arch == "gemma4" else _assistant(file, config)


def _assistant(file: GGUF, text: ForeignDict) -> ForeignDict:
    """The target's width is that of the drafter's output; a drafter with centroids has a clustered head."""
    named = {hf_name(name, file.arch): entry for name, entry in file.tensors.items()}
    post = named.get("post_projection.weight")
    centroids = named.get("masked_embedding.centroids.weight")
    if post is None:
        raise OutriderError(f"{file.path}: nextn.post_projection.weight is missing: is this a Gemma 4 drafter?")
    clusters = {} if centroids is None else {"use_ordered_embeddings": True, "num_centroids": centroids.shape[0]}
    # A drafter has no K or V; the flag only means that its full layers have their own number of K/V heads.
    text["attention_k_eq_v"] = text["num_global_key_value_heads"] != text["num_key_value_heads"]
    return {"model_type": text["model_type"], "backbone_hidden_size": post.shape[0], "text_config": text, **clusters}


def _block(file: GGUF) -> ForeignDict:
    """A block drafter's config in z-lab's or EAGLE-3's layout. GGUF's taps name the layer whose input they are."""
    meta = _Meta(file)
    tensors = file.tensors
    config = meta.base()
    layers, heads, hidden = (config[key] for key in NUMBERS)
    words = file.meta.get("tokenizer.ggml.tokens")
    vocab = meta.whole("vocab_size", len(words) if isinstance(words, list) else 0)
    taps = meta.get("target_layers" if file.arch == "dflash" else "extract_layers")
    if not layers or not heads or not vocab or not isinstance(taps, np.ndarray) or taps.dtype.kind not in "iu":
        raise OutriderError(f"{file.path}: no layers, heads, vocabulary or target layers for a {file.arch} drafter")
    config |= {"vocab_size": vocab, **_plain(meta, heads, layers, hidden=hidden)}
    if file.arch == "eagle3":
        head = tensors.get("output.weight")
        return config | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "draft_vocab_size": vocab if head is None else head.shape[0],
            "target_hidden_size": meta.whole("target_hidden_size", hidden),
            "eagle_aux_hidden_state_layer_ids": [int(t) for t in taps],
            "norm_before_residual": bool(meta.get("norm_before_residual")),
        }
    if "selector_hidden.weight" in tensors:
        raise OutriderError(f"{file.path}: DFlash 2 drafters are read from safetensors, not from GGUF")
    nested: ForeignDict = {
        "mask_token_id": file.meta.get("tokenizer.ggml.mask_token_id"),
        "target_layer_ids": [int(t) - 1 for t in taps],
        "block_size": meta.whole("block_size"),
    }
    if meta.get("attention.causal") is not None:
        nested["causal"] = bool(meta.get("attention.causal"))
    if "sliding_window" in config:
        every = meta.get("attention.sliding_window_pattern") is None
        config["layer_types"] = ["sliding_attention"] * layers if every else _layer_types(meta, layers)
    markov = tensors.get("markov_w1.weight")
    sure = tensors.get("conf_proj.weight")
    if markov is not None:
        nested |= {
            "markov_rank": markov.shape[-1],
            "sample_from_anchor": bool(meta.get("sample_from_anchor") in (None, True)),
            "enable_confidence_head": sure is not None,
            "confidence_head_with_markov": sure is not None and sure.shape[-1] > hidden,
        }
    name = "DFlashDraftModel" if markov is None else "DSparkDraftModel"
    return config | {"architectures": [name], "model_type": "qwen3", "dflash_config": nested}


def _plain(meta: _Meta, heads: int, layers: int, hidden: int) -> ForeignDict:
    tensors = meta.file.tensors
    head_dim = meta.whole("attention.key_length", hidden // heads)
    config: ForeignDict = {
        "intermediate_size": meta.whole("feed_forward_length"),
        "num_key_value_heads": meta.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
    }
    if meta.get("rope.scaling.type") not in (None, "none"):
        factor = meta.number("rope.scaling.factor")
        config["rope_scaling"] = {"rope_type": str(meta.get("rope.scaling.type")), "factor": factor}
    if "rope_freqs.weight" in tensors:
        config["rope_scaling"] = _llama3_scaling(meta, config["rope_theta"], head_dim)
    if meta.arch == "gemma3":
        config["sliding_window"] = meta.whole("attention.sliding_window")
        config["rope_local_base_freq"] = meta.number("rope.freq_base_swa", 10000.0)
        # only 27B differs, and no key has it
        config["query_pre_attn_scalar"] = hidden / heads if layers == 62 else head_dim
        config["layer_types"] = _layer_types(meta, layers)
    elif meta.get("attention.sliding_window") is not None:
        config |= {"sliding_window": meta.whole("attention.sliding_window"), "use_sliding_window": True}
    return config


def _layer_types(meta: _Meta, layers: int) -> list[str]:
    key = "attention.sliding_window_pattern"
    if isinstance(meta.get(key), np.ndarray):
        return ["sliding_attention" if s else "full_attention" for s in meta.per_layer(key, layers)]
    every = meta.whole(key, 6) or 1
    return ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]


def _llama3_scaling(meta: _Meta, theta: float, head_dim: int) -> ForeignDict:
    """Recovers and verifies the rope parameters of Llama 3.1: files hold the divisors of the frequencies instead."""
    entry = meta.file.tensors["rope_freqs.weight"]
    if entry.kind != "F32" or entry.shape != (head_dim // 2,):
        raise OutriderError(f"{meta.file.path}: rope_freqs.weight should be F32 [{head_dim // 2}]")
    stored = entry.data().view("<f4")[0].astype(np.float64)
    factor = float(stored.max())
    low = 1.0
    high = 4.0
    original = 8192
    wave = 2 * np.pi * float(theta) ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wave - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1 - smooth) / factor + smooth)
    if not np.allclose(stored, expected, rtol=1e-3):
        raise OutriderError(f"{meta.file.path}: rope_freqs.weight is not Llama 3's scaling, and no other is known")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _gemma4(meta: _Meta, layers: int) -> ForeignDict:
    kinds = _layer_types(meta, layers)
    kv = meta.per_layer("attention.head_count_kv", layers)
    wide = meta.per_layer("feed_forward_length", layers)
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    sliding = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    if not full or not sliding:
        raise OutriderError(f"{meta.file.path}: Gemma 4 has sliding and full layers; the metadata names only one kind")
    shared = meta.whole("attention.shared_kv_layers", 0)
    cap = meta.number("final_logit_softcapping", 0.0)
    config: ForeignDict = {
        "layer_types": kinds,
        "head_dim": meta.whole("attention.key_length_swa"),
        "global_head_dim": meta.whole("attention.key_length"),
        "num_key_value_heads": kv[sliding[0]],
        "num_global_key_value_heads": kv[full[0]],
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in meta.file.tensors,
        "intermediate_size": wide[0],
        "use_double_wide_mlp": shared > 0 and wide[-1] == 2 * wide[0],
        "sliding_window": meta.whole("attention.sliding_window"),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": meta.whole("embedding_length_per_layer_input", 0),
        "final_logit_softcapping": cap or None,
        "rope_parameters": {
            kind: GEMMA4_ROPE[kind] | {"rope_theta": meta.number(key, GEMMA4_ROPE[kind]["rope_theta"])}
            for kind, key in (("sliding_attention", "rope.freq_base_swa"), ("full_attention", "rope.freq_base"))
        },
    }
    if meta.whole("expert_count", 0):
        config |= {"enable_moe_block": True} | {name: meta.whole(key) for name, key in EXPERTS.items()}
    return config
